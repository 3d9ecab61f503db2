"""The step trace: a file with one line of JSON for each step, and its reader.

The first line says who wrote: ``kind`` ("engine"), ``version`` (`VERSION`, raised when a field changes its meaning or
goes; new ones may come at any time), ``batchkit``, ``time``, and the engine's `EngineStats` as ``stats``. A line with
``kind`` "step" follows for each step that had rows or copies and did not raise, and one with ``kind`` "end" when the
engine is closed. Times are seconds of the engine's clock. Fields of a step::

    step            its number, from 1
    time            when it began
    added           requests since the last line: request, arrival, prompt_tokens, max_tokens, priority, n
    rows            in the order of the plan: request, seq, start, tokens; sample, samples and idle where they are not
                    0 or false; where the block table has changed: blocks, from its entry number blocks_from on
    preempted       request, and for: the one that needed its blocks, or null
    copies          [kind, source, target]
    blocked         why nobody else was admitted: request, why, what it needs and what there is; null if nobody waits
    waiting, running            sequences after the step
    used_blocks, free_blocks    while the rows were computed
    kv_tokens       tokens whose KV the used blocks hold; the rest of them is reserved or wasted
    new_tokens      sampled and kept
    schedule_s, execute_s, sample_s     seconds in the policy, in the forward pass, in sampling
    error           the runner's fault, or null; the rows are then planned anew
    ended           requests since the last line: request, reason (of the first sample), error, prompt_tokens,
                    output_tokens (of all samples), and the fields of `RequestTimings`

The line of the end has ``time``, ``added`` and ``ended``. A request's id is the caller's and may come again after it
has ended; ``seq`` never does.
"""

from __future__ import annotations

import json
import logging
import operator
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from .types import (
    EngineStats,
    FinishReason,
    Request,
    RequestOutput,
    RequestTimings,
    ScheduledSequence,
    StepReport,
)

__all__ = ["VERSION", "Trace", "TraceWriter", "TracedRequest", "read_trace"]

logger = logging.getLogger("batchkit")

VERSION = 1


class TraceWriter:
    """Writes a trace, line by line, so that a program that dies leaves whole steps.

    A disk that is full ends the trace with a warning, and not the engine.

    Args:
        path: overwritten if it exists.
        stats: of the engine that begins.
        now: seconds of its clock.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], stats: EngineStats, now: float) -> None:
        self._num_blocks = stats.num_blocks
        self._added: list[dict[str, Any]] = []
        self._ended: list[dict[str, Any]] = []
        self._tables: dict[int, Sequence[int]] = {}  # as last written, by Sequence.id
        self._path = path
        self._file = open(os.fspath(path), "w", encoding="utf-8", newline="\n")  # noqa: SIM115 - close() does
        release = sys.modules[__package__].__version__  # the package imports this module
        self._write({"kind": "engine", "version": VERSION, "batchkit": release, "time": now, "stats": asdict(stats)})

    def added(self, request: Request) -> None:
        """A request was queued."""
        self._added.append(
            {
                "request": request.id,
                "arrival": request.arrival,
                "prompt_tokens": len(request.prompt_token_ids),
                "max_tokens": request.max_tokens,
                "priority": request.priority,
                "n": request.params.n,
            }
        )

    def ended(self, output: RequestOutput, seq_ids: Iterable[int]) -> None:
        """A request has its final output; its samples were these sequences."""
        for seq_id in seq_ids:
            self._tables.pop(seq_id, None)
        self._ended.append(
            {
                "request": output.request_id,
                "reason": output.finish_reason,
                "error": output.error,
                "prompt_tokens": len(output.prompt_token_ids),
                "output_tokens": sum([completion.num_tokens for completion in output.outputs]),
                **asdict(output.timings),
            }
        )

    def step(self, report: StepReport) -> None:
        """A step is over, and so is what came before it."""
        out = report.output
        by_seq = {row.seq_id: row.request.id for row in out.rows}
        for eviction in out.preempted:
            self._tables.pop(eviction.seq_id, None)
        rows = [self._row(row) for row in out.rows]
        blocked = out.blocked
        self._write(
            {
                "kind": "step",
                "step": report.step,
                "time": report.time,
                **self._news(),
                "rows": rows,
                "preempted": [
                    {"request": eviction.request_id, "for": by_seq.get(eviction.for_seq_id or 0)}
                    for eviction in out.preempted
                ],
                "copies": [[copy.kind, copy.source, copy.target] for copy in out.copies],
                "blocked": blocked and {**_renamed(blocked._asdict()), "why": blocked.why and blocked.why.value},
                "waiting": report.num_waiting,
                "running": report.num_running,
                "used_blocks": report.num_used_blocks,
                "free_blocks": self._num_blocks - report.num_used_blocks,
                "kv_tokens": report.kv_tokens,
                "new_tokens": report.num_new_tokens,
                "schedule_s": round(report.schedule_s, 7),
                "execute_s": round(report.execute_s, 7),
                "sample_s": round(report.sample_s, 7),
                "error": report.error and f"{type(report.error).__name__}: {report.error}",
            }
        )

    def close(self, now: float) -> None:
        """Write what has come since the last step, and close the file."""
        self._write({"kind": "end", "time": now, **self._news()})
        try:
            self._file.close()
        except OSError as error:
            self._give_up(error)

    def _news(self) -> dict[str, Any]:
        news = {"added": self._added, "ended": self._ended}
        self._added, self._ended = [], []
        return news

    def _row(self, row: ScheduledSequence) -> dict[str, Any]:
        line: dict[str, Any] = {
            "request": row.request.id,
            "seq": row.seq_id,
            "start": row.start,
            "tokens": row.num_tokens,
        }
        if row.sample_index:
            line["sample"] = row.sample_index
        if row.samples:
            line["samples"] = True
        if row.idle:
            line["idle"] = True
        known = self._tables.get(row.seq_id, ())
        if row.blocks is not known:
            same = len(known) if row.blocks[: len(known)] == known else 0
            line["blocks_from"] = same
            line["blocks"] = list(row.blocks[same:])
            self._tables[row.seq_id] = row.blocks
        return line

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file.closed:
            return
        try:
            self._file.write(json.dumps(line, ensure_ascii=True, separators=(",", ":"), default=_plain) + "\n")
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        logger.warning("the trace %s ends here: %s", self._path, error)
        with suppress(OSError):  # closed it is, even if what it buffers cannot be written
            self._file.close()


def _plain(number: Any) -> int | float:
    """A number that is not Python's own: callers may give times of numpy."""
    try:
        return operator.index(number)
    except TypeError:
        return float(number)


def _renamed(blocked: dict[str, Any]) -> dict[str, Any]:
    return {"request": blocked.pop("request_id"), **blocked}


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedRequest:
    """What a trace says of a request that has ended; see `RequestOutput` for the fields."""

    request_id: str
    finish_reason: FinishReason
    error: str | None
    prompt_tokens: int
    output_tokens: int
    timings: RequestTimings


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """A trace, read back.

    Attributes:
        engine: the first line.
        steps: the lines of the steps.
        requests: that have ended, in the order in which they did.
        complete: whether the engine was closed; otherwise the program died, or goes on.
    """

    engine: Mapping[str, Any]
    steps: tuple[Mapping[str, Any], ...]
    requests: tuple[TracedRequest, ...]
    complete: bool


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace. A last line that was cut off is left out.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no trace, or of another version; with the line's number.
    """
    engine: Mapping[str, Any] | None = None
    steps: list[Mapping[str, Any]] = []
    requests: list[TracedRequest] = []
    complete = False
    with open(path, encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            if not text.endswith("\n"):
                if engine is None:
                    raise ValueError(f"{os.fspath(path)} is no trace: its first line has no end")
                break
            try:
                line = json.loads(text)
                kind = line["kind"]
            except (ValueError, TypeError, KeyError, RecursionError):
                raise ValueError(f"{os.fspath(path)}, line {number}: this is no line of a trace") from None
            if engine is None:
                if kind != "engine" or line.get("version") != VERSION:
                    raise ValueError(
                        f"{os.fspath(path)} is no trace of version {VERSION}: its first line has kind {kind!r} and "
                        f"version {line.get('version')!r}"
                    )
                engine = line
                continue
            if kind == "step":
                steps.append(line)
            complete = complete or kind == "end"
            try:
                requests += [_traced(ended) for ended in line["ended"]]
            except (TypeError, KeyError) as error:
                raise ValueError(f"{os.fspath(path)}, line {number}: this is no line of a trace: {error!r}") from None
    if engine is None:
        raise ValueError(f"{os.fspath(path)} is no trace: it is empty")
    return Trace(engine=engine, steps=tuple(steps), requests=tuple(requests), complete=complete)


def _traced(ended: Mapping[str, Any]) -> TracedRequest:
    return TracedRequest(
        request_id=ended["request"],
        finish_reason=ended["reason"],
        error=ended["error"],
        prompt_tokens=ended["prompt_tokens"],
        output_tokens=ended["output_tokens"],
        timings=RequestTimings(**{name: ended[name] for name in RequestTimings.__dataclass_fields__}),
    )
