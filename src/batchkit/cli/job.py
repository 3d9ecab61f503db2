"""``batchkit generate``: a file of rows through an engine.

Rows are read as there is room for them, and each record is written when it is there. A bad row gives a record with an
error and the others go on. But for the hashes of ids, what is held does not grow with the file: the rows that are in
the engine, and with ``--keep-order`` the records that wait for an earlier row.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

from ..engine import Engine
from ..errors import EngineFailed, SchedulerStalled
from ..types import EngineStats, RequestOutput
from .dry_run import dry_run
from .faults import NotDone, RowFaults, loading, one_line, say, with_place
from .fit import OnTooLong, submit
from .lines import open_input
from .options import DONE, FAILED_ROWS, STOPPED
from .progress import Progress, duration
from .records import Records, Writer, check_output, open_output
from .resume import Earlier, Plan, plan
from .rows import BadRow, Row, RowReader, Rows, is_batch_file

__all__ = ["Job", "generate"]

_MOST_HELD = 16
"""Records may wait for an earlier, slow row; with so many windows of them, reading stops."""


def generate(args: argparse.Namespace, make_engine: Callable[[argparse.Namespace], Engine]) -> int:
    """Run the command. Returns the exit code."""
    name = args.model
    if args.resume and os.path.exists(args.input) and not os.path.isfile(args.input):
        raise NotDone(f"--resume reads the input twice, and {args.input} is no file")
    with ExitStack() as stack:
        lines = open_input(args.input, stack, limit=args.limit)
        if args.output is not None:
            check_output(args.output, args.input, may_exist=args.overwrite or args.resume)
        if next(lines.peek(), None) is None:
            raise NotDone(f"{args.input} has no rows")
        make_reader = partial(
            RowReader,
            text=args.is_text,
            maybe_text=args.maybe_text,
            batch=is_batch_file(lines) if args.is_batch is None else args.is_batch,
            template=args.template,
            chat=args.chat,
            keep=args.keep,
            defaults=args.defaults,
        )
        found = _plan(args, make_reader) if args.resume else None
        if found is not None and not found.num_left:
            return FAILED_ROWS if found.num_errors else DONE
        if not args.quiet:
            stack.enter_context(_warnings_on_stderr())
        with loading(args.model) as args.model:
            engine = stack.enter_context(make_engine(args))
        reader = make_reader()
        rows = Rows(
            lines,
            reader,
            shard=args.shard,
            done=None if found is None else found.done,
            num_left=None if found is None else found.num_left,
        )
        if args.dry_run:
            return FAILED_ROWS if dry_run(engine, rows, reader, args) else DONE
        job = Job(
            engine,
            rows,
            Records(model=name, decode=_decode(engine)),
            open_output(args.output, stack, keep_order=args.keep_order, append=found is not None),
            window=args.window,
            on_too_long=args.on_too_long,
            max_first_failures=args.max_first_failures,
            progress=Progress(shown=not args.quiet),
        )
        began = time.monotonic()
        try:
            with _stopped_by_signals(job):
                job.run()
            job.writer.close()
        except BrokenPipeError:
            raise NotDone("nobody reads the output any more") from None
        except (EngineFailed, SchedulerStalled, OSError, NotDone) as error:
            raise NotDone(f"stopped after {rows.num} rows were read: {one_line(error)}") from None
        except Exception as error:  # a policy may be the user's own
            raise NotDone(f"stopped after {rows.num} rows were read: {with_place(error)}") from None
        finally:
            job.progress.close(num_done=job.num_done, total=rows.estimate())
            if not args.quiet:
                _print_figures(engine.stats(), job, time.monotonic() - began)
                job.faults.print(reader.absent())
    if job.is_cut_short:
        if not args.quiet:
            say("batchkit: stopped, and rows are left; --resume goes on with them")
        return STOPPED
    return FAILED_ROWS if job.faults.num or (found is not None and found.num_errors) else DONE


def _plan(args: argparse.Namespace, make_reader: Callable[[], RowReader]) -> Plan | None:
    """What an earlier run has left to do; None: there was none."""
    if not os.path.exists(args.output) or not os.path.getsize(args.output):
        return None
    earlier = Earlier.read(args.output, retry_errors=args.retry_errors)
    with ExitStack() as stack:
        rows = Rows(open_input(args.input, stack, limit=args.limit), make_reader(), shard=args.shard, done=earlier.done)
        return plan(args.output, rows, earlier, redo_changed=args.redo_changed, quiet=args.quiet)


def _decode(engine: Engine) -> Callable[[list[int]], str]:
    tokenizer = engine.tokenizer
    if tokenizer is None:  # token ids alone have no texts
        return lambda token_ids: ""
    return partial(tokenizer.decode, skip_special_tokens=False)


class _Stop(Exception):
    """Ends the wait for a row that may never come."""


class Job:
    """One file on its way through an engine.

    Args:
        engine: without other requests.
        rows: of the file.
        records: makes what comes out.
        writer: takes it.
        window: the most rows in the engine. Default: 1024, or four for each seat.
        on_too_long: what becomes of a prompt that is too long.
        max_first_failures: if the first so many rows have all failed, the rest is not tried; 0: it is. Rows that
            have failed in an earlier run do not count.
        progress: shows how far it is.

    Attributes:
        num_cut: rows whose prompt was cut.
        is_cut_short: it was stopped while there were rows to be done.
        faults: of the rows whose records have an error.
        reasons: how many rows ended for each reason, ``"error"`` among them.
    """

    def __init__(
        self,
        engine: Engine,
        rows: Rows,
        records: Records,
        writer: Writer,
        *,
        window: int | None = None,
        on_too_long: OnTooLong = "error",
        max_first_failures: int = 0,
        progress: Progress,
    ) -> None:
        self.engine, self.rows, self.records, self.writer = engine, rows, records, writer
        self.on_too_long: OnTooLong = on_too_long
        self.max_first_failures = max_first_failures
        self.progress = progress
        self.window = max(1024, 4 * engine.stats().max_num_seqs) if window is None else window
        self.num_cut = self._num_first_failures = 0
        self._first: set[int] = set()  # positions of the first rows
        self._hopeless: NotDone | None = None  # all of them have failed
        self.is_cut_short = False
        self.faults = RowFaults()
        self.reasons: Counter[str] = Counter()
        self._live: dict[str, tuple[int, Row, int]] = {}  # by the engine's id
        self._begun: set[str] = set()  # those that have delivered a token
        self._streams = False  # some have, before their end
        self._fault: NotDone | None = None
        self._stopping = self._wound_up = self._waiting = False

    @property
    def num_done(self) -> int:
        """Rows that have ended, in whatever way."""
        return self.reasons.total()

    def stop(self) -> bool:
        """Finish what runs, and read no more. May be called from a signal handler.

        Returns:
            Whether this was new.
        """
        was_new, self._stopping = not self._stopping, True
        if self._waiting:
            raise _Stop
        return was_new

    def run(self) -> None:
        """Answer all rows. What is finished when it raises is written.

        Raises:
            NotDone: the input could not be read to its end, or only the first rows were tried, since all have failed;
                what was answered is written.
        """
        try:
            self._read()
            while self._live:
                if self._stopping and not self._wound_up:
                    self._wind_up()
                for output in self.engine.step():
                    if output.finished:
                        self._begun.discard(output.request_id)
                        self._end(*self._live.pop(output.request_id), output)
                    else:
                        self._begun.add(output.request_id)
                        self._streams = True
                for _, row, _ in self._live.values() if self._hopeless else ():
                    self._give_up(row)
                self.writer.write()
                self._show()
                self.engine.wait()
                self._read()
        except BaseException:
            with suppress(NotDone, OSError):  # what has ended the job says more
                self.writer.write()
            raise
        self.writer.write()
        if self._fault is not None:
            raise self._fault
        self.is_cut_short |= self._stopping and self.rows.has_more()

    def _wind_up(self) -> None:
        """Let go of rows that have not begun.

        A policy that delivers nothing before the end does not tell which have: all are finished then.
        """
        self._wound_up = True
        waiting = self._live.keys() - self._begun if self._streams else set()
        for request_id in waiting:
            self.engine.abort(request_id)
        num_begun = len(self._live) - len(waiting)
        self.progress.say(f"stopping when {num_begun:,} rows are finished; a second signal stops at once")

    def _read(self) -> None:
        """Take the rows for which there is room; with none in the engine, wait for the next one or the end."""
        while not self._stopping and len(self._live) < self.window and self.writer.num_held < _MOST_HELD * self.window:
            try:
                row = self._next()
            except NotDone as fault:
                self._fault = fault
                return
            if row is None:
                return
            self._give_up(row)
            self._add(row)
            self.writer.write()
            self._show()

    def _give_up(self, row: Row | BadRow) -> None:
        """Raise if the first rows have all failed: there is this one left."""
        if self._hopeless is not None and not self.rows.is_again(row):
            raise self._hopeless

    def _next(self) -> Row | BadRow | None:
        if self._live:
            return self.rows.get(wait=False)
        try:
            self._waiting = True
            return self.rows.get(wait=True) if not self._stopping else None
        except _Stop:
            self.is_cut_short = True  # a row may be lost that was just read
            return None
        finally:
            self._waiting = False

    def _add(self, row: Row | BadRow) -> None:
        position = self.rows.num - 1
        if len(self._first) < self.max_first_failures and not self.rows.is_again(row):
            self._first.add(position)
        if isinstance(row, BadRow):
            self._fail(position, str(row), self.records.of_bad(row))
            return
        try:
            request_id, num_dropped = submit(self.engine, row, self.on_too_long)
        except Exception as error:  # a tokenizer may raise anything over a text
            message = f"line {row.number}: {error}"
            self._fail(position, message, self.records.of_fault(row, message))
            return
        self.num_cut += num_dropped > 0
        self._live[request_id] = position, row, num_dropped

    def _end(self, position: int, row: Row, num_dropped: int, output: RequestOutput) -> None:
        if output.finish_reason == "abort" and self._stopping:
            self.is_cut_short = True
            return
        record = self.records.of_output(row, output, num_dropped)
        if output.error is not None:
            self._fail(position, f"line {row.number}: {output.error}", record)
            return
        self.writer.put(position, record)
        self.reasons[str(output.finish_reason)] += 1

    def _fail(self, position: int, fault: str, record: dict[str, Any]) -> None:
        self.writer.put(position, record)
        self.reasons["error"] += 1
        self.faults.add(fault)
        self._num_first_failures += position in self._first
        if position in self._first and self._num_first_failures == self.max_first_failures:
            self._hopeless = NotDone(
                f"the first {self.max_first_failures} rows have all failed, this one with: "
                f"{one_line(ValueError(fault))}; --max-first-failures 0 goes on nevertheless"
            )

    def _show(self) -> None:
        if self.progress.is_due():
            self.progress.show(
                num_done=self.num_done,
                num_failed=self.faults.num,
                total=self.rows.estimate(),
                num_tokens=self.engine.stats().generated_tokens,
            )


@contextmanager
def _stopped_by_signals(job: Job) -> Iterator[None]:
    """SIGTERM and Ctrl-C let the job finish what runs; the second one ends it at once. The handlers are put back."""

    def handle(number: int, frame: object) -> None:
        if not job.stop():
            raise KeyboardInterrupt

    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():  # elsewhere there are none to be had
        for number in (signal.SIGTERM, signal.SIGINT):
            # Whoever has it ignored, as a shell has for what runs in its background, means that.
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
        say(f"{name:<18}{text}")


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
