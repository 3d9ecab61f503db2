"""The command line: jobs (``batchkit generate``), experiments, traces, and what is here (``env``, ``doctor``).

Records and reports go to the output, everything else to stderr. One file in a folder of small ones for each thing:

* `options`: what may be said, and what of it is wrong before anything is opened;
* `specs`: ``--scheduler NAME|module:Class,key=value``; `templates`: ``--template 'Summarise: {body}'``;
* `lines`, `rows`, `records`: bytes in, a row of them, a record out; `keys`: what a row is known by;
* `resume`: what an earlier run has left to do;
* `job`, `dry_run`: a file on its way through an engine, and what would become of it; `fit`: prompts that are too long;
* `progress`: how far it is; `inspect`: ``env`` and ``doctor``; `faults`: what ends a command with one line;
* `bench` with `bench_options`, `bench_loads` and `bench_report`: ``bench`` and ``simulate``; `explain`, `plan`,
  `calibrate`: the commands of these names; `show`: that, and ``replay``.

`make_engine` is the one place where an engine is built; tests put another function there.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TextIO, cast

from ..engine import Engine
from .bench import add_bench, add_simulate
from .calibrate import add_calibrate
from .dry_run import preview_engine
from .explain import add_explain
from .faults import NotDone, say
from .inspect import doctor, env
from .job import generate
from .options import INTERRUPTED, NOT_DONE, AddCommand, parse
from .plan import add_plan
from .show import add_replay, add_show
from .specs import SCHEDULERS

__all__ = ["SCHEDULERS", "main", "make_engine"]

_MORE: tuple[AddCommand, ...] = (add_show, add_replay, add_bench, add_simulate, add_plan, add_calibrate, add_explain)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; ``sys.argv[1:]`` by default. Returns the exit code; wrong usage raises SystemExit(2)."""
    if sys.stderr is None:  # closed; `print` would take stdout in its place, among the records
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process
    args = parse(argv, _MORE)
    try:
        code = _run(args)
        if sys.stdout is not None:
            sys.stdout.flush()
    except (NotDone, OSError) as error:  # OSError: of a report on a disk that is full
        gone = isinstance(error, BrokenPipeError)
        say(f"batchkit: {'nobody reads the output any more' if gone else error}")
        code = NOT_DONE
    except KeyboardInterrupt:
        say("batchkit: interrupted")
        code = INTERRUPTED
    _give_up(sys.stdout)
    _give_up(sys.stderr)
    return code


def _run(args: argparse.Namespace) -> int:
    if args.command == "generate":
        return generate(args, make_engine)
    if args.command in ("env", "doctor"):
        return doctor(args) if args.command == "doctor" else env()
    return int(args.run(args))


def _give_up(stream: TextIO | None) -> None:
    """Keep the interpreter from writing once more, on its way out, what could not be written."""
    try:
        if stream is not None:
            stream.flush()
    except OSError:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), cast(TextIO, stream).fileno())


def make_engine(args: argparse.Namespace) -> Engine:
    """The engine that a command's options ask for. For a dry run, one without weights, which can run nothing."""
    if args.dry_run:
        return preview_engine(args)
    from ..hf.environment import limit_threads

    limit_threads()
    return Engine.from_pretrained(
        args.model,
        device=args.device,
        dtype=args.dtype,
        scheduler=args.scheduler.policy,
        kv_memory=args.kv_memory,
        num_kv_blocks=args.num_kv_blocks,
        block_size=args.block_size,
        swap_memory=args.swap_memory,
        prefix_caching=args.prefix_caching,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_tokens_per_step=args.max_tokens_per_step,
        attention=args.attention,
        cuda_graphs=args.cuda_graphs,
        **args.scheduler.arguments,
    )
