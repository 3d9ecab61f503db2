"""``batchkit generate``: a file of rows through an engine.

Rows are read as there is room for them and written in their order, each as soon as all rows before it are there. A bad
row gives a record with an error and the others go on. What is held does not grow with the file: the rows that are in
the engine, and the records that wait for an earlier row.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ..engine import Engine
from ..errors import EngineFailed, SchedulerStalled
from ..types import EngineStats
from .dry_run import dry_run
from .faults import NotDone, RowFaults, loading, one_line, with_place
from .fit import OnTooLong, submit
from .lines import Lines, open_input
from .options import DONE, FAILED_ROWS
from .progress import Progress, duration
from .records import Records, check_output, error_record, open_output, record
from .rows import BadRow, RowReader

__all__ = ["Job", "generate"]

_MOST_HELD = 16
"""Records may wait for an earlier, slow row; with so many windows of them, reading stops."""


def generate(args: argparse.Namespace, make_engine: Callable[[argparse.Namespace], Engine]) -> int:
    """Run the command. Returns the exit code."""
    reader = RowReader(
        text=args.is_text,
        maybe_text=args.maybe_text,
        template=args.template,
        chat=args.chat,
        keep=args.keep,
        defaults=args.defaults,
    )
    with ExitStack() as stack:
        lines = open_input(args.input, stack, limit=args.limit)
        if args.output is not None:
            check_output(args.output, args.input, overwrite=args.overwrite)
        if lines.is_empty():
            raise NotDone(f"{args.input} has no rows")
        if not args.quiet:
            stack.enter_context(_warnings_on_stderr())
        with loading(args.model) as args.model:
            engine = stack.enter_context(make_engine(args))
        if args.dry_run:
            return FAILED_ROWS if dry_run(engine, lines, reader, args) else DONE
        records = open_output(args.output, stack)
        job = Job(
            engine,
            lines,
            reader,
            records,
            window=args.window,
            on_too_long=args.on_too_long,
            progress=Progress(shown=not args.quiet),
        )
        began = time.monotonic()
        try:
            job.run()
        except BrokenPipeError:
            raise NotDone("nobody reads the output any more") from None
        except (EngineFailed, SchedulerStalled, OSError, NotDone) as error:
            raise NotDone(f"stopped after {job.num_rows} rows were read: {one_line(error)}") from None
        except Exception as error:  # a policy may be the user's own
            raise NotDone(f"stopped after {job.num_rows} rows were read: {with_place(error)}") from None
        finally:
            job.progress.close(num_done=job.num_done, total=lines.estimate())
            if not args.quiet:
                _print_figures(engine.stats(), job, time.monotonic() - began)
                job.faults.print(reader.absent())
    return FAILED_ROWS if job.faults.num else DONE


class Job:
    """One file on its way through an engine.

    Args:
        engine: without other requests.
        lines: of the file.
        reader: makes rows of them.
        records: takes what comes out.
        window: the most rows in the engine. Default: 1024, or four for each seat.
        on_too_long: what becomes of a prompt that is too long.
        progress: shows how far it is.

    Attributes:
        num_rows: read so far.
        num_cut: rows whose prompt was cut.
        faults: of the rows whose records have an error.
        reasons: how many rows ended for each reason, ``"error"`` among them.
    """

    def __init__(
        self,
        engine: Engine,
        lines: Lines,
        reader: RowReader,
        records: Records,
        *,
        window: int | None = None,
        on_too_long: OnTooLong = "error",
        progress: Progress,
    ) -> None:
        self.engine, self.lines, self.reader, self.records = engine, lines, reader, records
        self.on_too_long: OnTooLong = on_too_long
        self.progress = progress
        self.window = max(1024, 4 * engine.stats().max_num_seqs) if window is None else window
        self.num_rows = self.num_cut = 0
        self.faults = RowFaults()
        self.reasons: Counter[str] = Counter()
        self._live: dict[str, tuple[int, int, str | int, dict[str, Any], int]] = {}  # by the engine's id
        self._fault: NotDone | None = None

    @property
    def num_done(self) -> int:
        """Rows that have ended, in whatever way."""
        return self.reasons.total()

    def run(self) -> None:
        """Answer all rows. What is finished when it raises is written.

        Raises:
            NotDone: the input could not be read to its end; the rows before that are answered.
        """
        try:
            self._read()
            while self._live:
                for output in self.engine.step():
                    if output.finished:
                        position, number, row_id, kept, num_dropped = self._live.pop(output.request_id)
                        if output.finish_reason == "error":
                            self.faults.add(f"line {number}: {output.error}")
                        self._put(position, record(row_id, output, kept, num_dropped))
                self.records.write()
                self._show()
                self.engine.wait()
                self._read()
        finally:
            self.records.write(gaps=True)
        if self._fault is not None:
            raise self._fault

    def _read(self) -> None:
        """Take the rows for which there is room; with none in the engine, wait for the next one or the end."""
        while len(self._live) < self.window and self.records.num_held < _MOST_HELD * self.window:
            try:
                line = self.lines.get(wait=not self._live)
            except NotDone as fault:
                self._fault = fault
                return
            if line is None:
                return
            self._add(*line)
            self.records.write()
            self._show()

    def _add(self, number: int, line: bytes) -> None:
        position = self.num_rows
        self.num_rows += 1
        try:
            row = self.reader.read(number, line)
        except BadRow as bad:
            self._fail(position, bad.id, str(bad), bad.kept)
            return
        try:
            request_id, num_dropped = submit(self.engine, row, self.on_too_long)
        except Exception as error:  # a tokenizer may raise anything over a text
            self._fail(position, row.id, f"line {number}: {error}", row.kept)
            return
        self.num_cut += num_dropped > 0
        self._live[request_id] = position, number, row.id, row.kept, num_dropped

    def _fail(self, position: int, row_id: str | int, fault: str, kept: dict[str, Any]) -> None:
        self.faults.add(fault)
        self._put(position, error_record(row_id, fault, kept))

    def _put(self, position: int, record: dict[str, Any]) -> None:
        self.records.put(position, record)
        self.reasons[record.get("finish_reason", "error")] += 1

    def _show(self) -> None:
        if self.progress.is_due():
            self.progress.show(
                num_done=self.num_done,
                num_failed=self.faults.num,
                total=self.lines.estimate(),
                num_tokens=self.engine.stats().generated_tokens,
            )


def _print_figures(stats: EngineStats, job: Job, seconds: float) -> None:
    def tokens(count: int) -> str:
        return f"{count:,} ({count / max(seconds, 1e-9):,.1f} per second)"

    done, failed, peak = job.num_done, job.faults.num, stats.peak_used_blocks
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in job.reasons.most_common())
    lines = [
        ("requests", f"{done:,} in {duration(seconds)}: {done - failed:,} ok, {failed:,} failed"),
        ("prompt tokens", tokens(stats.prompt_tokens)),
        ("generated tokens", tokens(stats.generated_tokens)),
        ("finish reasons", reasons or "none"),
        (
            "peak KV use",
            f"{peak:,} of {stats.num_blocks:,} blocks of {stats.block_size} tokens ({peak / stats.num_blocks:.1%})",
        ),
        ("preemptions", f"{stats.num_preemptions:,}"),
        ("scheduler", f"{stats.scheduler}, {stats.num_steps:,} steps"),
    ]
    if job.num_cut:
        lines.insert(1, ("prompts cut", f"{job.num_cut:,}"))
    for name, text in lines:
        print(f"{name:<18}{text}", file=sys.stderr)


class _OneLine(logging.Formatter):
    """A fault in a warning without its traceback."""

    def formatException(self, ei: Any) -> str:
        return f"  {one_line(ei[1])}"


@contextmanager
def _warnings_on_stderr() -> Iterator[None]:
    logger = logging.getLogger("batchkit")
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine("batchkit: %(message)s"))
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
