"""The input's lines, one at a time, and how much of it has been read."""

from __future__ import annotations

import codecs
import gzip
import io
import os
import queue
import stat
import sys
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import BinaryIO, cast

from .faults import NotDone, one_line

__all__ = ["Lines", "open_input"]

_FAULTS = (OSError, EOFError, zlib.error)
_AHEAD = 1024


class Lines:
    """The lines of a stream that are not empty, with their numbers, counted from 1.

    A pipe is read by a thread, so that the engine need not stand still while the next line is on its way; the thread
    also closes it.

    Args:
        stream: to read.
        name: of the stream, for messages.
        may_wait: reading it may take long.
        size: its bytes, if they are known.
        position: how many of them are read; by default as many as the lines have.
        limit: the most lines to give.

    Attributes:
        num_rows: lines given so far.
    """

    def __init__(
        self,
        stream: BinaryIO,
        *,
        name: str = "the input",
        may_wait: bool = False,
        size: int | None = None,
        position: Callable[[], int] | None = None,
        limit: int | None = None,
    ) -> None:
        self._stream = stream
        self._name = name
        self._size = size
        self._position = position
        self._limit = limit
        self._number = self._num_bytes = 0
        self._peeked: deque[tuple[int, bytes]] = deque()
        self._at_end = False
        self.num_rows = 0
        self._ahead: queue.Queue[bytes | Exception] | None = None
        if may_wait:
            self._ahead = queue.Queue(maxsize=_AHEAD)
            threading.Thread(target=self._read_ahead, args=(self._ahead,), daemon=True).start()

    def _read_ahead(self, ahead: queue.Queue[bytes | Exception]) -> None:
        try:
            while line := self._stream.readline():
                ahead.put(line)
        except _FAULTS as error:
            ahead.put(error)
        self._stream.close()
        ahead.put(b"")

    @property
    def num_lines(self) -> int:
        """Lines read so far, empty ones among them."""
        return self._number

    @property
    def ended(self) -> bool:
        """There are no more."""
        return self._at_end and not self._peeked

    def peek(self) -> Iterator[bytes]:
        """The lines to come, from the first on, which `get` then gives; waits for each. For use before `get`.

        Raises:
            NotDone: as `get`.
        """
        yield from [line for _, line in self._peeked]
        while len(self._peeked) != self._limit and (found := self._next(wait=True)) is not None:
            self._peeked.append(found)
            yield found[1]

    def get(self, *, wait: bool) -> tuple[int, bytes] | None:
        """The next line and its number. None: there is no more, or not yet and `wait` is False.

        Raises:
            NotDone: it cannot be read. There is no more after that.
        """
        found = self._peeked.popleft() if self._peeked else self._next(wait=wait)
        if found is not None:
            self.num_rows += 1
            if self.num_rows == self._limit:
                self._at_end = True
        return found

    def _next(self, *, wait: bool) -> tuple[int, bytes] | None:
        while not self._at_end:
            try:
                line = self._ahead.get(block=wait) if self._ahead else self._stream.readline()
            except queue.Empty:
                return None
            except _FAULTS as error:
                line = error
            if isinstance(line, Exception):
                self._at_end = True
                told = line.strerror if isinstance(line, OSError) else None
                raise NotDone(f"cannot read {self._name}: {told or one_line(line)}") from None
            self._at_end = not line
            self._number += bool(line)
            self._num_bytes += len(line)
            if (line.removeprefix(codecs.BOM_UTF8) if self._number == 1 else line).strip():
                return self._number, line
        return None

    def estimate(self) -> int | None:
        """How many lines there are in all, by how far the bytes read have come; None: nothing is known."""
        if self.ended:
            return self.num_rows
        read = self._num_bytes if self._position is None else self._position()
        found = max(self.num_rows, round(self.num_rows * self._size / read)) if self._size and read else None
        if self._limit is not None:
            return self._limit if found is None else min(found, self._limit)
        return found


def open_input(path: str, stack: ExitStack, *, limit: int | None = None) -> Lines:
    """The lines of a file, of a gzip file, or of stdin (``-``).

    Raises:
        NotDone: it cannot be opened.
    """
    if path == "-":
        return Lines(_stdin(), name="stdin", may_wait=True, limit=limit)
    is_packed = path.endswith(".gz")
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            # Its thread closes it: here that would wait for the next line.
            pipe = gzip.open(path) if is_packed else open(path, "rb")  # noqa: SIM115
            return Lines(cast(BinaryIO, pipe), name=path, may_wait=True, limit=limit)
        raw = stack.enter_context(open(path, "rb"))  # noqa: SIM115 - the stack closes it
    except OSError as error:
        raise NotDone(f"cannot read {path}: {error.strerror or error}") from None
    if is_packed:
        unpacked = cast(BinaryIO, stack.enter_context(gzip.GzipFile(fileobj=raw)))
        return Lines(unpacked, name=path, size=status.st_size, position=raw.tell, limit=limit)
    return Lines(raw, name=path, size=status.st_size, limit=limit)


def _stdin() -> BinaryIO:
    if sys.stdin is None:
        raise NotDone("cannot read stdin: it is closed")
    try:
        # A buffer of its own: the reading thread may still hold its lock when the interpreter flushes the usual one.
        return open(sys.stdin.fileno(), "rb", closefd=False)
    except io.UnsupportedOperation:
        return sys.stdin.buffer
