"""Records out: exactly one for each row, each a line of its own."""

from __future__ import annotations

import gzip
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from ..openai import Response
from ..types import Completion, RequestOutput, TokenLogprobs
from .faults import NotDone
from .keys import Key
from .rows import BadRow, Row

__all__ = ["FIELDS", "Records", "Writer", "check_output", "encoded", "open_output"]

FIELDS = (
    "id",
    "text",
    "finish_reason",
    "usage",
    "error",
    "key",
    "outputs",
    "logprobs",
    "cumulative_logprob",
    "prompt_logprobs",
    "custom_id",
    "response",
)
"""The fields of a record; columns that are kept must have other names."""

_encode = json.JSONEncoder(ensure_ascii=False).encode
# Some programs end a line at these characters, which JSON leaves as they are.
_LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


def encoded(record: dict[str, Any]) -> bytes:
    """A record as a line."""
    text = _encode(record).translate(_LINE_ENDS)
    # Half of a surrogate pair, which JSON can hold and UTF-8 cannot, becomes JSON's own escape for it.
    return text.encode("utf-8", "backslashreplace") + b"\n"


class Writer:
    """Writes records, each when it is there, or in the order of their rows.

    In their order, what is written is at any time the beginning of it: a record waits until all before it are there.

    Args:
        stream: to write.
        name: of the stream, for messages.
        flush: after each write. In a gzip file that would undo the packing.
        keep_order: in the order of the rows.
    """

    def __init__(
        self, stream: BinaryIO, *, name: str = "the output", flush: bool = True, keep_order: bool = False
    ) -> None:
        self._stream = stream
        self._name = name
        self._flush = flush
        self._keep_order = keep_order
        self._ready: list[bytes] = []
        self._held: dict[int, bytes] = {}
        self._next = 0

    @property
    def num_held(self) -> int:
        """Records that wait for an earlier one."""
        return len(self._held)

    def put(self, position: int, record: dict[str, Any]) -> None:
        """Take the record of a row; positions count from 0."""
        if not self._keep_order:
            self._ready.append(encoded(record))
            return
        self._held[position] = encoded(record)
        while self._next in self._held:
            self._ready.append(self._held.pop(self._next))
            self._next += 1

    def write(self) -> None:
        """Write what may be written, in whole lines and at once.

        Raises:
            NotDone: it cannot be written.
            BrokenPipeError: nobody reads it any more.
        """
        if self._ready:
            ready, self._ready = self._ready, []
            with _writing(self._name):
                self._stream.write(b"".join(ready))
                if self._flush:
                    self._stream.flush()

    def close(self) -> None:
        """Write what is left, and end the file; stdout stays open.

        Raises:
            NotDone, BrokenPipeError: as `write`.
        """
        with _writing(self._name):
            if sys.stdout is not None and self._stream is sys.stdout.buffer:
                self._stream.flush()
            else:
                self._stream.close()


@contextmanager
def _writing(name: str) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise NotDone(f"cannot write {name}: {error.strerror or error}") from None


class Records:
    """Makes the records of rows: those of this command, or those of an OpenAI batch file.

    Args:
        model: its name, for the answers in a batch file.
        decode: the text of tokens, special ones too.
    """

    def __init__(self, *, model: str, decode: Callable[[list[int]], str]) -> None:
        self._model = model
        self._decode = decode

    def of_output(self, row: Row, output: RequestOutput, num_dropped: int = 0) -> dict[str, Any]:
        """The record of a request that has ended.

        Args:
            row: its row.
            output: its last.
            num_dropped: tokens that were cut off its prompt.
        """
        if output.error is not None:
            return self.of_fault(row, output.error, code="server_error")
        if row.ask.chat is not None:
            response = {"status_code": 200, "request_id": output.request_id, "body": self._body(row, output)}
            return _batch_record(row.id, row.key, row.kept, response=response)
        usage = {
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": sum(completion.num_tokens for completion in output.outputs),
        }
        if num_dropped:
            usage["dropped_prompt_tokens"] = num_dropped
        record: dict[str, Any] = {"id": row.id, **_said(output.outputs[0]), "usage": usage}
        if len(output.outputs) > 1:
            record["outputs"] = [{"index": found.index, **_said(found)} for found in output.outputs]
        if output.prompt_logprobs is not None:
            record["prompt_logprobs"] = _logprobs(output.prompt_token_ids, output.prompt_logprobs)
        return {**record, **row.kept, "key": str(row.key)}

    def of_fault(self, row: Row, message: str, *, code: str = "invalid_request") -> dict[str, Any]:
        """The record of a good row that has no answer."""
        return _error_record(row.id, row.key, row.kept, message, code=code, is_batch=row.ask.chat is not None)

    def of_bad(self, bad: BadRow) -> dict[str, Any]:
        """The record of a line that cannot be taken."""
        return _error_record(bad.id, bad.key, bad.kept, str(bad), code=bad.code, is_batch=bad.is_batch)

    def _body(self, row: Row, output: RequestOutput) -> dict[str, Any]:
        chat = bool(row.ask.chat)
        return Response(
            chat=chat,
            id=f"{'chatcmpl' if chat else 'cmpl'}-{row.key}",
            model=self._model,
            created=int(time.time()),
            params=row.ask.params,
            decode=self._decode,
        ).body([output])


def _said(completion: Completion) -> dict[str, Any]:
    said: dict[str, Any] = {"text": completion.text, "finish_reason": completion.finish_reason}
    if completion.logprobs is not None:
        said["logprobs"] = _logprobs(completion.token_ids, completion.logprobs)
        said["cumulative_logprob"] = _finite(completion.cumulative_logprob)
    return said


def _logprobs(token_ids: Sequence[int], found: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    """One entry for each token: its own log-probability and rank, and those of the best ones, all by token ids."""

    def entry(token: int, at: TokenLogprobs) -> dict[str, Any]:
        return {"token_id": token, "logprob": _finite(at[token].logprob), "rank": at[token].rank}

    return [
        None if at is None else {**entry(token, at), "best": [entry(other, at) for other in at]}
        for token, at in zip(token_ids, found, strict=True)
    ]


def _finite(logprob: float | None) -> float | None:
    """Null for a probability of 0, since JSON knows no infinity."""
    return None if logprob is None or not math.isfinite(logprob) else logprob


def _error_record(
    row_id: str | int, key: Key, kept: dict[str, Any], message: str, *, code: str, is_batch: bool
) -> dict[str, Any]:
    if is_batch:
        return _batch_record(row_id, key, kept, error={"code": code, "message": message})
    return {"id": row_id, "error": message, **kept, "key": str(key)}


def _batch_record(
    row_id: str | int,
    key: Key,
    kept: dict[str, Any],
    *,
    response: dict[str, Any] | None = None,
    error: dict[str, Any] | None = None,
) -> dict[str, Any]:
    # A line whose custom_id cannot be used goes by its number, which stands in the message.
    custom_id = row_id if isinstance(row_id, str) else None
    return {
        "id": f"batch_req_{key}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
        **kept,
        "key": str(key),
    }


def check_output(path: str, source: str, *, may_exist: bool) -> None:
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
    if target.is_file() and target.stat().st_size and not may_exist:
        raise NotDone(f"{path} exists; --resume goes on with it, --overwrite replaces it; or name another file")


def open_output(path: str, stack: ExitStack, *, keep_order: bool, append: bool) -> Writer:
    """Records into a file, a gzip file, or stdout (``-``).

    Raises:
        NotDone: it cannot be opened.
    """
    if path == "-":
        return Writer(sys.stdout.buffer, name="stdout", keep_order=keep_order)
    is_packed = path.endswith(".gz")
    mode: Literal["ab", "wb"] = "ab" if append else "wb"
    with _writing(path):
        stream = cast(BinaryIO, gzip.open(path, mode, compresslevel=6)) if is_packed else open(path, mode)  # noqa: SIM115
    stack.callback(_let_go, stream)
    return Writer(stream, name=path, flush=not is_packed, keep_order=keep_order)


def _let_go(stream: BinaryIO) -> None:
    """Close a file that is closed already, or whose job has ended in a way that says more than a fault of closing."""
    with suppress(OSError):
        stream.close()
