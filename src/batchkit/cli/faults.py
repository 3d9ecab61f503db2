"""What ends a command with one line on stderr, and what is said of rows that fail."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

__all__ = ["NotDone", "RowFaults", "loading", "one_line", "say", "with_place"]

_SHOWN = 5
"""As many faults of rows are shown."""


class NotDone(Exception):
    """Ends the command with one line on stderr and exit code 1."""


def say(text: str) -> None:
    """A line on stderr. That nobody can read it, as on a disk that is full, is no reason to lose records."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def one_line(error: BaseException) -> str:
    """What an exception says, without its line ends; its class where that says more."""
    text = " ".join(str(error).split())
    if isinstance(error, (NotDone, OSError, ValueError)) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def with_place(error: BaseException) -> str:
    """The same with the line of code that raised it, for faults in code that the user may have written."""
    if isinstance(error, SyntaxError) and error.filename and os.path.isfile(error.filename):
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    return f"{one_line(error)} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else one_line(error)


class RowFaults:
    """Why rows fail: how many, and the faults of the first few.

    Attributes:
        num: rows that fail.
    """

    def __init__(self) -> None:
        self.num = 0
        self._first: list[str] = []

    def add(self, fault: str) -> None:
        """Take the fault of one row."""
        self.num += 1
        if len(self._first) < _SHOWN:
            self._first.append(" ".join(fault.split()))  # a tokenizer's error may have several lines

    def print(self, notes: Iterable[str]) -> None:
        """Say on stderr the first ones, how many more there are, and the notes."""
        num_more = self.num - len(self._first)
        for line in (*self._first, *([f"and {num_more:,} more"] if num_more else []), *notes):
            say(f"batchkit: {line}")


@contextmanager
def loading(name: str) -> Iterator[str]:
    """Gives a model's path or name; whatever is raised over it becomes one line.

    A path that does not exist is never taken for a name on the hub.
    """
    from ..hf.loading import model_path  # needs no torch

    try:
        path = model_path(name)
    except FileNotFoundError as error:
        raise NotDone(f"cannot load the model: {error}") from None
    try:
        yield path
    except NotDone:
        raise
    except Exception as error:  # the libraries below raise whatever they like over a model
        raise NotDone(f"cannot load the model {path}: {one_line(error)}") from None
