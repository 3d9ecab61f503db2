"""The command line: ``batchkit generate IN.jsonl -o OUT.jsonl --model PATH``.

Rows are read as there is room for them and written in their order, each as soon as all rows before it are there. A bad
row gives a record with an error and the others go on. Records go to the output, everything else to stderr.

`make_engine` is the one place where an engine is built; tests put another function there.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import io
import json
import logging
import os
import queue
import stat
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from .engine import Engine
from .errors import EngineFailed, SchedulerStalled
from .scheduler import Scheduler
from .schedulers import (
    ChunkedPrefillScheduler,
    DynamicScheduler,
    OrcaScheduler,
    PagedScheduler,
    StaticScheduler,
    WaitingServedScheduler,
)
from .types import EngineStats, RequestOutput, SamplingParams

__all__ = ["main", "make_engine"]

SCHEDULERS: dict[str, type[Scheduler]] = {
    "static": StaticScheduler,
    "dynamic": DynamicScheduler,
    "orca": OrcaScheduler,
    "waiting-served": WaitingServedScheduler,
    "paged": PagedScheduler,
    "chunked": ChunkedPrefillScheduler,
}

DONE, NOT_DONE, FAILED_ROWS, INTERRUPTED = 0, 1, 3, 130  # 2 is argparse's, for wrong usage

_EXIT_CODES = "exit codes: 0 done; 1 not done; 2 wrong usage; 3 done, and some rows have failed; 130 interrupted"
_PARAMS = {field.name: field for field in dataclasses.fields(SamplingParams)}
# Some programs end a line at these characters, which JSON leaves as they are.
_LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


_MOST_HELD = 16
"""Results may wait for an earlier, slow one; with so many windows of them, reading stops."""


class _NotDone(Exception):
    """What ends the command with one line on stderr and exit code 1."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; ``sys.argv[1:]`` by default. Returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        code: int = args.command(args)
    except (_NotDone, OSError) as error:  # OSError: of closing a file on a disk that is full
        print(f"batchkit: {error}", file=sys.stderr)
        return NOT_DONE
    except KeyboardInterrupt:
        print("batchkit: interrupted", file=sys.stderr)
        return INTERRUPTED
    return code


def make_engine(args: argparse.Namespace) -> Engine:
    """The engine that a command's options ask for."""
    return Engine.from_pretrained(
        args.model,
        device=args.device,
        dtype=args.dtype,
        scheduler=SCHEDULERS[args.scheduler],
        kv_memory=args.kv_memory,
        num_kv_blocks=args.num_kv_blocks,
        block_size=args.block_size,
        swap_memory=args.swap_memory,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_tokens_per_step=args.max_tokens_per_step,
    )


# ----------------------------------------------------------------------------------------------- options


def _parser() -> argparse.ArgumentParser:
    version = sys.modules[__package__ or "batchkit"].__version__
    parser = argparse.ArgumentParser(prog="batchkit", description="Continuous batching of LLM inference.")
    parser.add_argument("--version", action="version", version=f"batchkit {version}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    generate = commands.add_parser(
        "generate",
        help="answer the prompts of a JSONL file",
        description="Answer the prompts of a JSONL file. A line is an object with `prompt` (text or token ids) and, "
        "if wanted, `id` (text or an integer; else the line's number) and `params` (fields of SamplingParams); other "
        "keys are ignored, and so are empty lines. Each gives one record, in the same order: `id`, `text`, "
        "`finish_reason` and `usage`, or `id` and `error`.",
        epilog=_EXIT_CODES,
    )
    generate.set_defaults(command=_generate, parser=generate)
    generate.add_argument("input", metavar="IN", help="JSONL in UTF-8; - for stdin")
    generate.add_argument("-o", "--output", metavar="OUT", required=True, help="JSONL in UTF-8; - for stdout")
    generate.add_argument("--overwrite", action="store_true", help="replace an output file that is not empty")
    generate.add_argument("--quiet", action="store_true", help="no bar, no warnings, no figures")

    model = generate.add_argument_group("model")
    model.add_argument("--model", metavar="PATH", required=True, help="a folder, or a name on the hub")
    model.add_argument("--dtype", default="auto", help='such as float32; default: "auto", the one it is stored in')
    model.add_argument("--device", help="such as cpu or cuda:0; default: the accelerator, if there is one")
    model.add_argument("--max-model-len", metavar="N", type=_count, help="most tokens of prompt and output together")

    engine = generate.add_argument_group("scheduling and memory")
    engine.add_argument("--scheduler", choices=SCHEDULERS, default="chunked", help="the policy; default: chunked")
    engine.add_argument("--max-num-seqs", metavar="N", type=_count, help="most sequences that run at a time")
    engine.add_argument("--max-tokens-per-step", metavar="N", type=_count, help="token budget of a step")
    size = engine.add_mutually_exclusive_group()
    size.add_argument("--kv-memory", metavar="SIZE", help="KV cache in bytes or like 2GiB; default: what is useful")
    size.add_argument("--num-kv-blocks", metavar="N", type=_count, help="KV cache in blocks")
    engine.add_argument("--block-size", metavar="N", type=_count, help="tokens in a KV block")
    engine.add_argument("--swap-memory", metavar="SIZE", help="host memory for preempted sequences; default: none")

    defaults = generate.add_argument_group("sampling, where a line's `params` do not say")
    defaults.add_argument("--max-tokens", metavar="N", type=int, help="most tokens to generate")
    defaults.add_argument("--temperature", metavar="T", type=float, help="0 is greedy; default: 1")
    defaults.add_argument("--seed", metavar="N", type=int, help="default: a fresh one for each line")
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


# ----------------------------------------------------------------------------------------------- rows in


@dataclass(frozen=True, slots=True)
class _Row:
    """One good line."""

    id: str | int
    prompt: str | list[int]
    params: SamplingParams


class _BadRow(Exception):
    """A line that cannot be taken, with the id that its record gets."""

    def __init__(self, row_id: str | int, message: str) -> None:
        self.row_id = row_id
        super().__init__(message)


class _Lines:
    """The lines of a stream that are not empty, with their numbers, counted from 1.

    A pipe is read by a thread, so that the engine need not stand still while the next line is on its way.

    Args:
        stream: to read.
        may_wait: reading it may take long.
    """

    def __init__(self, stream: BinaryIO, *, may_wait: bool) -> None:
        self._stream = stream
        self._number = 0
        self.num_bytes = 0
        self.ended = False
        self._ahead: queue.Queue[bytes | OSError] | None = None
        if may_wait:
            self._ahead = queue.Queue(maxsize=1024)
            threading.Thread(target=self._read_ahead, args=(self._ahead,), daemon=True).start()

    def _read_ahead(self, ahead: queue.Queue[bytes | OSError]) -> None:
        try:
            while line := self._stream.readline():
                ahead.put(line)
        except OSError as error:
            ahead.put(error)
        ahead.put(b"")

    def get(self, *, wait: bool) -> tuple[int, bytes] | None:
        """The next line and its number. None: there is no more, or not yet and `wait` is False.

        Raises:
            OSError: it cannot be read.
        """
        while not self.ended:
            try:
                line = self._ahead.get(block=wait) if self._ahead else self._stream.readline()
            except queue.Empty:
                return None
            if isinstance(line, OSError):
                raise line
            self.ended = not line
            self._number += 1
            self.num_bytes += len(line)
            if not line.isspace() and line:
                return self._number, line
        return None


def _parse(number: int, line: bytes, defaults: dict[str, Any], seen: dict[str, int]) -> _Row:
    """A line's request.

    Args:
        number: of the line, the id of one that has none.
        line: its bytes.
        defaults: sampling parameters for what it does not say.
        seen: the ids so far as text, and their lines; its own is added.

    Raises:
        _BadRow: it is none.
    """
    try:
        row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        raise _BadRow(number, f"line {number} is not UTF-8: byte {error.start} is {line[error.start]:#04x}") from None
    except (ValueError, RecursionError) as error:
        raise _BadRow(number, f"line {number} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise _BadRow(number, f"line {number} must be an object with a prompt, got {_kind(row)}")
    row_id = row.get("id")
    if row_id is None:
        row_id = number
    if isinstance(row_id, bool) or not isinstance(row_id, (str, int)):
        raise _BadRow(number, f"line {number}: id must be text or an integer, got {_kind(row_id)}")
    first = seen.setdefault(str(row_id), number)
    if first != number:
        raise _BadRow(row_id, f"line {number}: id {row_id!r} is that of line {first} already")
    try:
        return _Row(row_id, _prompt(row), _params(row, defaults))
    except (TypeError, ValueError) as error:
        raise _BadRow(row_id, f"line {number}: {error}") from None


def _prompt(row: dict[str, Any]) -> str | list[int]:
    if "prompt" not in row:
        raise ValueError(f"there is no prompt, only {', '.join(map(repr, row)) or 'an empty object'}")
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list):
        if all(type(token) is int for token in prompt):
            return prompt
        raise TypeError("prompt must be text or a list of token ids; not all of these are integers")
    raise TypeError(f"prompt must be text or a list of token ids, got {_kind(prompt)}")


def _params(row: dict[str, Any], defaults: dict[str, Any]) -> SamplingParams:
    misplaced = [name for name in row if name in _PARAMS]
    if misplaced:
        raise ValueError(f"{', '.join(misplaced)} must stand in params")
    given = row.get("params")
    given = {} if given is None else given
    if not isinstance(given, dict):
        raise TypeError(f"params must be an object, got {_kind(given)}")
    for name in given:
        if name not in _PARAMS:
            near = difflib.get_close_matches(name, _PARAMS, n=1)
            raise ValueError(f"unknown parameter {name!r}; " + (f"is it {near[0]}?" if near else _known()))
    return SamplingParams(**{**defaults, **given})


def _known() -> str:
    return f"there are {', '.join(sorted(_PARAMS))}"


def _kind(value: object) -> str:
    """A JSON value in a message."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


# ----------------------------------------------------------------------------------------------- records out


class _Records:
    """Writes records in the order of their rows, each as soon as all before it are there."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._done: dict[int, bytes] = {}
        self._next = 0

    @property
    def num_held(self) -> int:
        """Records that wait for an earlier one."""
        return len(self._done)

    def put(self, position: int, record: dict[str, Any]) -> None:
        """Take the record of a row; positions count from 0."""
        text = json.dumps(record, ensure_ascii=False).translate(_LINE_ENDS)
        # Half of a surrogate pair, which JSON can hold and UTF-8 cannot, becomes JSON's own escape for it.
        self._done[position] = text.encode("utf-8", "backslashreplace") + b"\n"

    def write(self, *, gaps: bool = False) -> None:
        """Write and flush what is next; with `gaps`, everything that is there, in order."""
        ready = []
        while self._next in self._done:
            ready.append(self._done.pop(self._next))
            self._next += 1
        if gaps:
            ready += [self._done.pop(position) for position in sorted(self._done)]
        if ready:
            self._stream.write(b"".join(ready))
            self._stream.flush()


def _record(row_id: str | int, output: RequestOutput) -> dict[str, Any]:
    if output.finish_reason == "error":
        return {"id": row_id, "error": output.error or "it failed"}
    return {
        "id": row_id,
        "text": output.text,
        "finish_reason": output.finish_reason,
        "usage": {
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": output.outputs[0].num_tokens,
        },
    }


# ----------------------------------------------------------------------------------------------- generate


def _generate(args: argparse.Namespace) -> int:
    defaults = {
        name: value for name in ("max_tokens", "temperature", "seed") if (value := getattr(args, name)) is not None
    }
    try:
        SamplingParams(**defaults)
    except (TypeError, ValueError) as error:
        args.parser.error(str(error))
    with ExitStack() as stack:
        lines, size = _open_input(args.input, stack)
        _check_output(args)
        try:
            first = lines.get(wait=True)
        except OSError as error:
            raise _NotDone(f"cannot read {args.input}: {error.strerror or error}") from None
        if first is None:
            raise _NotDone(f"{args.input} has no rows")
        if not args.quiet:
            stack.enter_context(_warnings_on_stderr())
        engine = stack.enter_context(_load(args))
        sink = _open_output(args, stack)
        job = _Job(engine, lines, _Records(sink), defaults, _Bar(size, shown=not args.quiet))
        began = time.monotonic()
        try:
            job.run(first)
        except BrokenPipeError:
            _forget_stdout(args)
            raise _NotDone("nobody reads the output any more") from None
        except (EngineFailed, SchedulerStalled, OSError) as error:
            raise _NotDone(f"stopped after {job.num_rows} rows were read: {_one_line(error)}") from None
        finally:
            job.bar.close()
            if not args.quiet:
                _print_figures(engine.stats(), job, time.monotonic() - began)
    return FAILED_ROWS if job.num_failed else DONE


class _Job:
    """One file on its way through an engine.

    Attributes:
        num_rows: read so far.
        num_failed: records with an error.
        reasons: how the others ended.
    """

    def __init__(self, engine: Engine, lines: _Lines, records: _Records, defaults: dict[str, Any], bar: _Bar) -> None:
        self.engine, self.lines, self.records, self.defaults, self.bar = engine, lines, records, defaults, bar
        self.num_rows = self.num_failed = 0
        self.reasons: Counter[str] = Counter()
        self._window = max(1024, 4 * engine.stats().max_num_seqs)  # the most rows in the engine
        self._seen: dict[str, int] = {}
        self._live: dict[str, tuple[int, str | int]] = {}  # by the engine's id: position and id of the row

    def run(self, line: tuple[int, bytes] | None) -> None:
        """Answer all lines, of which the first has been read. What is finished when it raises is written."""
        try:
            while line is not None or self._live:
                while line is not None:
                    self._add(*line)
                    line = self._next_line()
                for output in self.engine.step():
                    if output.finished:
                        position, row_id = self._live.pop(output.request_id)
                        self._put(position, _record(row_id, output))
                self.records.write()
                self.engine.wait()
                line = self._next_line()
        finally:
            self.records.write(gaps=True)

    def _next_line(self) -> tuple[int, bytes] | None:
        """A line, if there is room for it; with nothing in the engine, None means that there are no more."""
        self.records.write()
        if len(self._live) >= self._window or self.records.num_held >= _MOST_HELD * self._window:
            return None
        return self.lines.get(wait=not self._live)

    def _add(self, number: int, line: bytes) -> None:
        position = self.num_rows
        self.num_rows += 1
        try:
            row = _parse(number, line, self.defaults, self._seen)
        except _BadRow as bad:
            self._put(position, {"id": bad.row_id, "error": str(bad)})
            return
        try:
            request_id = self.engine.add_request(row.prompt, row.params, request_id=str(row.id))
        except Exception as error:  # a tokenizer may raise anything over a text
            self._put(position, {"id": row.id, "error": f"line {number}: {error}"})
            return
        self._live[request_id] = position, row.id

    def _put(self, position: int, record: dict[str, Any]) -> None:
        self.records.put(position, record)
        self.num_failed += "error" in record
        self.reasons[record.get("finish_reason", "error")] += 1
        self.bar.update(self.num_rows, self.lines)


class _Bar:
    """A progress bar on stderr, if that is a terminal. The total is estimated from the bytes read so far."""

    def __init__(self, size: int | None, *, shown: bool) -> None:
        self._size = size
        self._bar: Any = None
        if shown and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(unit="req", file=sys.stderr)

    def update(self, num_rows: int, lines: _Lines) -> None:
        """One more is done, of `num_rows` read."""
        if self._bar is None:
            return
        if lines.ended:
            self._bar.total = num_rows
        elif self._size and lines.num_bytes:
            self._bar.total = max(num_rows, round(num_rows * self._size / lines.num_bytes))
        self._bar.update()

    def close(self) -> None:
        """Leave it as it stands."""
        if self._bar is not None:
            self._bar.close()


def _print_figures(stats: EngineStats, job: _Job, seconds: float) -> None:
    def tokens(count: int) -> str:
        return f"{count:,} ({count / max(seconds, 1e-9):,.1f} per second)"

    done = sum(job.reasons.values())
    peak = stats.peak_used_blocks
    share = peak / stats.num_blocks
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in job.reasons.most_common())
    for name, text in (
        ("requests", f"{done:,} in {seconds:.1f} s: {done - job.num_failed:,} ok, {job.num_failed:,} failed"),
        ("prompt tokens", tokens(stats.prompt_tokens)),
        ("generated tokens", tokens(stats.generated_tokens)),
        ("finish reasons", reasons or "none"),
        ("peak KV use", f"{peak:,} of {stats.num_blocks:,} blocks of {stats.block_size} tokens ({share:.1%})"),
        ("preemptions", f"{stats.num_preemptions:,}"),
        ("scheduler", f"{stats.scheduler}, {stats.num_steps:,} steps"),
    ):
        print(f"{name:<18}{text}", file=sys.stderr)


# ----------------------------------------------------------------------------------------------- files and the model


def _open_input(path: str, stack: ExitStack) -> tuple[_Lines, int | None]:
    """The input's lines, and its bytes if it is a file."""
    try:
        if path == "-":
            return _Lines(_stdin(), may_wait=True), None
        status = os.stat(path)
        stream = stack.enter_context(open(path, "rb"))  # noqa: SIM115 - the stack closes it
    except OSError as error:
        raise _NotDone(f"cannot read {path}: {error.strerror or error}") from None
    if stat.S_ISREG(status.st_mode):
        return _Lines(stream, may_wait=False), status.st_size
    return _Lines(stream, may_wait=True), None


def _stdin() -> BinaryIO:
    try:
        # A buffer of its own: the reading thread may still hold its lock when the interpreter flushes the usual one.
        return open(sys.stdin.fileno(), "rb", closefd=False)
    except io.UnsupportedOperation:
        return sys.stdin.buffer


def _check_output(args: argparse.Namespace) -> None:
    """Find out before the model is loaded what would be in the way."""
    if args.output == "-":
        return
    path = Path(args.output)
    if path.exists() and args.input != "-" and os.path.samefile(path, args.input):
        raise _NotDone(f"{args.output} is the input and would be overwritten")
    if path.is_dir():
        raise _NotDone(f"cannot write {args.output}: it is a folder")
    if not path.absolute().parent.is_dir():
        raise _NotDone(f"cannot write {args.output}: there is no folder {path.parent}")
    if path.is_file() and path.stat().st_size and not args.overwrite:
        raise _NotDone(f"{args.output} exists; name another file, or say --overwrite")


def _open_output(args: argparse.Namespace, stack: ExitStack) -> BinaryIO:
    if args.output == "-":
        return sys.stdout.buffer
    try:
        return stack.enter_context(open(args.output, "wb"))
    except OSError as error:
        raise _NotDone(f"cannot write {args.output}: {error.strerror or error}") from None


def _forget_stdout(args: argparse.Namespace) -> None:
    """Keep the interpreter from flushing into a pipe without a reader once more."""
    if args.output == "-":
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), sys.stdout.fileno())


def _load(args: argparse.Namespace) -> Engine:
    name = os.path.expanduser(args.model)
    if (os.path.isabs(name) or name.startswith(".")) and not os.path.isdir(name):
        raise _NotDone(f"cannot load the model: there is no folder {args.model}")
    args.model = name
    try:
        return make_engine(args)
    except Exception as error:  # the libraries below raise whatever they like over a model
        raise _NotDone(f"cannot load the model {args.model}: {_one_line(error)}") from None


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, (OSError, ValueError)) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class _OneLine(logging.Formatter):
    """A fault in a warning without its traceback."""

    def formatException(self, ei: Any) -> str:
        return f"  {_one_line(ei[1])}"


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
