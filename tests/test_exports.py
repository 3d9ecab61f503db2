"""The public names and their signatures, against tests/golden/signatures.txt.

A change there is a change that users' code can notice. If it is meant, write the file anew and say it in the
changelog:

    python tests/test_exports.py --write
"""

from __future__ import annotations

import difflib
import enum
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ForwardRef, get_origin

from typing_extensions import is_protocol, is_typeddict

import batchkit

GOLDEN = Path(__file__).parent / "golden" / "signatures.txt"
OPERATORS = {"__bool__", "__call__", "__contains__", "__enter__"}
RENEW = "If the change is meant: `python tests/test_exports.py --write`, and a line in CHANGELOG.md."


def annotation(value: Any) -> str:
    if isinstance(value, ForwardRef):
        value = value.__forward_arg__
    return value if isinstance(value, str) else inspect.formatannotation(value)


def default(value: Any) -> str:
    """A default value's text, the same in every process and every version of Python."""
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, type) or callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    text = repr(value)
    return f"<{type(value).__qualname__}>" if " at 0x" in text else text


def signature(function: Callable[..., Any]) -> str:
    """A signature's text: annotations as they stand in the source, without quotation marks."""
    found = inspect.signature(function)
    shown: list[str] = []
    star = False
    for parameter in found.parameters.values():
        text = parameter.name
        if parameter.kind is parameter.VAR_POSITIONAL:
            text, star = "*" + text, True
        elif parameter.kind is parameter.VAR_KEYWORD:
            text = "**" + text
        elif parameter.kind is parameter.KEYWORD_ONLY and not star:
            shown.append("*")
            star = True
        if parameter.annotation is not parameter.empty:
            text += f": {annotation(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            text += f" = {default(parameter.default)}"
        shown.append(text)
    result = "" if found.return_annotation is found.empty else f" -> {annotation(found.return_annotation)}"
    return f"({', '.join(shown)}){result}"


def is_ours(cls: type) -> bool:
    return cls.__module__.split(".")[0] == "batchkit"


def members(cls: type) -> Iterator[str]:
    """What users can call, read or override on a class. What a public base has is shown there."""
    named: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if is_ours(base) and (base is cls or base.__name__ not in batchkit.__all__):
            named.update((n, value) for n, value in vars(base).items() if not n.startswith("_") or n in OPERATORS)
    arguments = {} if is_protocol(cls) else inspect.signature(cls).parameters
    for name, value in sorted(named.items()):
        words = "abstract " if getattr(value, "__isabstractmethod__", False) else ""
        if isinstance(value, (classmethod, staticmethod)):
            words, value = f"{words}{type(value).__name__} ", value.__func__
        if isinstance(value, property):
            assert value.fget is not None
            yield f"{words}{name}: {annotation(inspect.signature(value.fget).return_annotation)}"
        elif inspect.isfunction(value):
            yield f"{words}def {name}{signature(value)}"
        elif inspect.isdatadescriptor(value):
            if name not in arguments:  # the constructor's signature has it
                yield name
        elif name not in arguments:
            yield f"{name} = {default(value)}"


def describe(name: str) -> Iterator[str]:
    """The lines of the golden file about one public name."""
    value = getattr(batchkit, name)
    if get_origin(value) is not None:
        yield f"{name} = {annotation(value)}"
    elif is_typeddict(value):
        fields = ", ".join(f"{key}: {annotation(kind)}" for key, kind in value.__annotations__.items())
        yield f"typed dict {name}({fields})"
    elif not isinstance(value, type):
        yield f"def {name}{signature(value)}"
    elif issubclass(value, enum.Enum):
        yield f"enum {name}: {', '.join(member.name for member in value)}"
    elif issubclass(value, BaseException):
        yield f"exception {name}[{', '.join(base.__name__ for base in value.__bases__)}]"
    else:
        bases = ", ".join(base.__name__ for base in value.__bases__ if is_ours(base))
        kind = "protocol" if is_protocol(value) else "class"
        made = "" if is_protocol(value) else signature(value).removesuffix(" -> None")
        yield f"{kind} {name}{f'[{bases}]' if bases else ''}{made}"
        yield from (f"    {member}" for member in members(value))


def current() -> str:
    return "".join(f"{line}\n" for name in batchkit.__all__ for line in describe(name))


def test_all_is_sorted_and_everything_in_it_exists() -> None:
    assert list(batchkit.__all__) == sorted(batchkit.__all__)
    assert len(set(batchkit.__all__)) == len(batchkit.__all__)
    for name in batchkit.__all__:
        getattr(batchkit, name)


def test_nothing_public_is_left_out_of_all() -> None:
    public = {
        name for name, value in vars(batchkit).items() if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert public - {"annotations", "TYPE_CHECKING"} <= set(batchkit.__all__)


def test_public_signatures_are_those_of_the_golden_file() -> None:
    assert GOLDEN.is_file(), f"{GOLDEN.name} is missing. {RENEW}"
    now, golden = current(), GOLDEN.read_text(encoding="utf-8")
    diff = difflib.unified_diff(golden.splitlines(), now.splitlines(), GOLDEN.name, "now", lineterm="", n=0)
    assert now == golden, "public signatures changed:\n" + "\n".join(diff) + f"\n{RENEW}"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(current(), encoding="utf-8")
        print(f"wrote {GOLDEN}")
    else:
        sys.exit("usage: python tests/test_exports.py --write")
