"""Records out: one for each row, in the order of the rows."""

from __future__ import annotations

import gzip
import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, cast

from ..types import RequestOutput
from .faults import NotDone

__all__ = ["FIELDS", "Records", "check_output", "error_record", "open_output", "record"]

FIELDS = ("id", "text", "finish_reason", "usage", "error")
"""The fields of a record; columns that are kept must have other names."""

_encode = json.JSONEncoder(ensure_ascii=False).encode
# Some programs end a line at these characters, which JSON leaves as they are.
_LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


class Records:
    """Writes records in the order of their rows, each as soon as all before it are there.

    Args:
        stream: to write.
        flush: after each write. In a gzip file that would undo the packing.
    """

    def __init__(self, stream: BinaryIO, *, flush: bool = True) -> None:
        self._stream = stream
        self._flush = flush
        self._done: dict[int, bytes] = {}
        self._next = 0

    @property
    def num_held(self) -> int:
        """Records that wait for an earlier one."""
        return len(self._done)

    def put(self, position: int, record: dict[str, Any]) -> None:
        """Take the record of a row; positions count from 0."""
        text = _encode(record).translate(_LINE_ENDS)
        # Half of a surrogate pair, which JSON can hold and UTF-8 cannot, becomes JSON's own escape for it.
        self._done[position] = text.encode("utf-8", "backslashreplace") + b"\n"

    def write(self, *, gaps: bool = False) -> None:
        """Write what is next; with `gaps`, everything that is there, in order."""
        ready = []
        while self._next in self._done:
            ready.append(self._done.pop(self._next))
            self._next += 1
        if gaps:
            ready += [self._done.pop(position) for position in sorted(self._done)]
        if ready:
            self._stream.write(b"".join(ready))
            if self._flush:
                self._stream.flush()


def record(row_id: str | int, output: RequestOutput, kept: dict[str, Any], num_dropped: int = 0) -> dict[str, Any]:
    """The record of a request that has ended.

    Args:
        row_id: of its row.
        output: its last.
        kept: columns of the row.
        num_dropped: tokens that were cut off its prompt.
    """
    if output.finish_reason == "error":
        return error_record(row_id, output.error or "it failed", kept)
    usage = {"prompt_tokens": len(output.prompt_token_ids), "completion_tokens": output.outputs[0].num_tokens}
    if num_dropped:
        usage["dropped_prompt_tokens"] = num_dropped
    return {"id": row_id, "text": output.text, "finish_reason": output.finish_reason, "usage": usage, **kept}


def error_record(row_id: str | int, message: str, kept: dict[str, Any]) -> dict[str, Any]:
    """The record of a row that has no answer."""
    return {"id": row_id, "error": message, **kept}


def check_output(path: str, source: str, *, overwrite: bool) -> None:
    """Find out before the model is loaded what would be in the way.

    Raises:
        NotDone: something is.
    """
    if path == "-":
        if sys.stdout is None:
            raise NotDone("cannot write stdout: it is closed")
        return
    target = Path(path)
    if target.exists() and source != "-" and os.path.samefile(target, source):
        raise NotDone(f"{path} is the input and would be overwritten")
    if target.is_dir():
        raise NotDone(f"cannot write {path}: it is a folder")
    if not target.absolute().parent.is_dir():
        raise NotDone(f"cannot write {path}: there is no folder {target.parent}")
    if target.is_file() and target.stat().st_size and not overwrite:
        raise NotDone(f"{path} exists; name another file, or say --overwrite")


def open_output(path: str, stack: ExitStack) -> Records:
    """Records into a file, a gzip file, or stdout (``-``).

    Raises:
        NotDone: it cannot be opened.
    """
    if path == "-":
        return Records(sys.stdout.buffer)
    try:
        if path.endswith(".gz"):
            packed = stack.enter_context(gzip.open(path, "wb", compresslevel=6))  # noqa: SIM115 - the stack closes it
            return Records(cast(BinaryIO, packed), flush=False)
        return Records(stack.enter_context(open(path, "wb")))
    except OSError as error:
        raise NotDone(f"cannot write {path}: {error.strerror or error}") from None
