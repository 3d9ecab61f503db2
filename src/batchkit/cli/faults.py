"""What ends a command with one line on stderr."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["NotDone", "loading", "one_line", "with_place"]


class NotDone(Exception):
    """Ends the command with one line on stderr and exit code 1."""


def one_line(error: BaseException) -> str:
    """What an exception says, without its line ends; its class where that says more."""
    text = " ".join(str(error).split())
    if isinstance(error, (NotDone, OSError, ValueError)) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def with_place(error: BaseException) -> str:
    """The same with the line of code that raised it, for faults in code that the user may have written."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{one_line(error)} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else one_line(error)


@contextmanager
def loading(name: str) -> Iterator[str]:
    """Gives a model's path or name; whatever is raised over it becomes one line.

    A path that does not exist is never taken for a name on the hub.
    """
    path = os.path.expanduser(name)
    if (os.path.isabs(path) or path.startswith(".")) and not os.path.isdir(path):
        raise NotDone(f"cannot load the model: there is no folder {name}")
    try:
        yield path
    except NotDone:
        raise
    except Exception as error:  # the libraries below raise whatever they like over a model
        raise NotDone(f"cannot load the model {path}: {one_line(error)}") from None
