"""``--scheduler NAME|module:Class[,key=value...]``: a policy's class and its arguments.

Everything that can be wrong with it is found out before the model is loaded.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..allocators import PagedAllocator
from ..scheduler import Scheduler, argument_names
from ..schedulers import (
    ChunkedPrefillScheduler,
    DynamicScheduler,
    FairScheduler,
    FeedbackScheduler,
    LeastSlackScheduler,
    OptimisticScheduler,
    OrcaScheduler,
    PagedScheduler,
    PriorityScheduler,
    ShortestFirstScheduler,
    ShortestRemainingScheduler,
    SkipAheadScheduler,
    StaticScheduler,
    WaitingServedScheduler,
)
from .faults import with_place

__all__ = ["OPTIONS", "SCHEDULERS", "Policy", "parse_policy", "try_policy"]

SCHEDULERS: dict[str, type[Scheduler]] = {
    "static": StaticScheduler,
    "dynamic": DynamicScheduler,
    "orca": OrcaScheduler,
    "waiting-served": WaitingServedScheduler,
    "paged": PagedScheduler,
    "chunked": ChunkedPrefillScheduler,
    "shortest-first": ShortestFirstScheduler,
    "shortest-remaining": ShortestRemainingScheduler,
    "priority": PriorityScheduler,
    "fair": FairScheduler,
    "feedback": FeedbackScheduler,
    "least-slack": LeastSlackScheduler,
    "skip-ahead": SkipAheadScheduler,
    "optimistic": OptimisticScheduler,
}
_BY_CLASS = {policy.__name__: policy for policy in SCHEDULERS.values()}

# Arguments of every scheduler that have options of their own.
OPTIONS = {
    "allocator": "--num-kv-blocks and --block-size",
    "max_model_len": "--max-model-len",
    "max_num_seqs": "--max-num-seqs",
    "max_tokens_per_step": "--max-tokens-per-step",
    "preemption": "--swap-memory",
}


@dataclass(frozen=True, slots=True)
class Policy:
    """What a spec names: a class, and arguments for it beyond those of every scheduler."""

    policy: type[Scheduler]
    arguments: dict[str, Any]


def parse_policy(spec: str, *, elsewhere: Mapping[str, str] = OPTIONS) -> Policy:
    """The policy that a spec names.

    Args:
        spec: ``name`` or ``module:Class``, and ``,key=value`` for arguments.
        elsewhere: arguments of every scheduler that may not be given here, and what gives them.

    Raises:
        ValueError: it names none, or an argument that the class does not take; the message says what there is.
    """
    name, comma, rest = spec.partition(",")
    policy = _imported(name) if ":" in name else SCHEDULERS.get(name) or _BY_CLASS.get(name)
    if policy is None:
        module, dot, own = name.rpartition(".")
        if dot and own != "py" and all(part.isidentifier() for part in name.split(".")):
            near = [f"{module}:{own}"]
        else:
            near = difflib.get_close_matches(name, [*SCHEDULERS, *_BY_CLASS], n=1)
        raise ValueError(
            f"there is no policy {name!r}; "
            + (f"is it {near[0]}?" if near else f"there are {', '.join(SCHEDULERS)}, and module:Class for your own")
        )
    arguments: dict[str, Any] = {}
    # A comma separates only where key= follows, so that a value may have some.
    for part in re.split(r",(?=\s*[A-Za-z_]\w*\s*=)", rest) if comma else ():
        key, equals, value = (text.strip() for text in part.partition("="))
        if not equals:
            raise ValueError(f"{part!r} is not key=value; {policy.__name__} takes {_takes(policy)}")
        if key in elsewhere:
            raise ValueError(f"{key} is not given here but by {elsewhere[key]}")
        if key not in _keys(policy) and key not in OPTIONS:
            raise ValueError(f"{policy.__name__} takes no {key!r}; it takes {_takes(policy)}")
        if key in arguments:
            raise ValueError(f"{key} is given twice")
        arguments[key] = _value(value)
    return Policy(policy, arguments)


def try_policy(spec: Policy, **options: int | None) -> None:
    """Make the scheduler once over blocks that nobody uses: what its class refuses is found out early.

    Args:
        spec: the policy.
        options: the arguments of every scheduler, where they are known.

    Raises:
        ValueError: it cannot be made.
    """
    # Many blocks, since only a lack of them could make a class refuse what is right.
    allocator = PagedAllocator(1 << 14, 16)
    # A model says its length when it is loaded; some policies want one.
    length = options.pop("max_model_len", None) or 1 << 16
    try:
        spec.policy(allocator, max_model_len=length, **options, **spec.arguments)  # type: ignore[arg-type]
    except Exception as error:  # the class may be the user's
        # A complaint about its arguments says enough; any other fault needs its place.
        told = str(error) if isinstance(error, (TypeError, ValueError)) else with_place(error)
        given = ", ".join(f"{key}={value!r}" for key, value in spec.arguments.items())
        raise ValueError(f"{spec.policy.__name__} cannot be made{given and f' with {given}'}: {told}") from None


def _imported(path: str) -> type[Scheduler]:
    module_name, _, class_name = path.partition(":")
    if module_name.endswith(".py") or "/" in module_name or not (module_name and class_name):
        raise ValueError(f"{path!r} must be module:Class, a module's name as in `import`, without folder and .py")
    if os.getcwd() not in sys.path:  # as under `python -m batchkit`
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ValueError(f"{module_name} cannot be imported: {with_place(error)}") from None
        raise ValueError(
            f"there is no module {error.name!r}, neither in this folder nor among what is installed"
        ) from None
    except Exception as error:
        raise ValueError(f"{module_name} cannot be imported: {with_place(error)}") from None
    found = getattr(module, class_name, None)
    if isinstance(found, type) and issubclass(found, Scheduler):
        return found
    there = [name for name, value in vars(module).items() if isinstance(value, type) and issubclass(value, Scheduler)]
    of_its_own = [name for name in there if vars(module)[name].__module__ == module.__name__] or there
    what = "there is no" if found is None else "it is no Scheduler:"
    raise ValueError(
        f"in {module_name} ({getattr(module, '__file__', None) or 'built in'}) {what} {class_name}; "
        f"schedulers there: {', '.join(of_its_own) or 'none'}"
    )


def _keys(policy: type[Scheduler]) -> list[str]:
    """The arguments of a class without those that have options of their own."""
    return [name for name in argument_names(policy) if name not in OPTIONS]


def _takes(policy: type[Scheduler]) -> str:
    return ", ".join(_keys(policy)) or "no arguments of its own"


def _value(text: str) -> Any:
    """A value as JSON or as a literal of Python; else the text itself."""
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, SyntaxError, RecursionError):
            continue
    return text
