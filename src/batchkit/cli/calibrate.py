"""``batchkit calibrate``: a cost model of this device for `batchkit simulate`."""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from collections.abc import Iterator
from typing import Any

from ..experiment.calibrate import Calibration, calibrate
from ..experiment.compare import run
from ..experiment.policies import Policy
from ..experiment.targets import ModelTarget, Target
from ..schedulers import ChunkedPrefillScheduler
from ..trace import Trace, read_trace
from ..workload import WorkloadRecord
from .faults import NotDone, loading, say
from .options import DONE
from .records import check_output

__all__ = ["add_calibrate", "target_of"]

_SEATS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_LONGEST_PROMPT = 256
_OUTPUT_TOKENS = (4, 16)
_KV_TOKENS = max(_SEATS) * (_LONGEST_PROMPT + _OUTPUT_TOKENS[1])


def add_calibrate(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "calibrate",
        help="fit a cost model to this device, for simulations",
        description="Measure steps of many sizes with a model on this device, or take step traces, fit a cost model "
        "to them, and print how far it is from steps that the fit has not seen. A run of its own takes a minute or "
        "two on a small model.",
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a folder, or a name on the hub; not with --traces")
    parser.add_argument("--traces", metavar="FILE", nargs="+", help="fit to these step traces; no model runs")
    parser.add_argument("--hold-out", metavar="FILE", nargs="+", help="traces that the fit does not see")
    parser.add_argument("--dtype", help="of the weights; default: that of the checkpoint")
    parser.add_argument("--device", help="such as cpu or cuda:0; default: the accelerator, if there is one")
    parser.add_argument("--seed", metavar="N", type=int, help="of the prompts' lengths; default: 0")
    parser.add_argument("--json", metavar="OUT", help="write the cost model here, for --calibration")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    _check_options(args)
    if args.json is not None:
        _check_output(args.json)
    try:
        if args.traces is None:
            traces, about = _measured(args)
        else:
            traces, about = [read_trace(path) for path in args.traces], {"traces": len(args.traces)}
        held_out = None if args.hold_out is None else [read_trace(path) for path in args.hold_out]
        found = calibrate(traces, about=about, held_out=held_out)
    except ValueError as error:
        raise NotDone(str(error)) from None
    for line in _lines(found):
        print(line)
    if args.json is not None:
        try:
            found.save(args.json)
        except OSError as error:
            raise NotDone(f"{args.json} cannot be written: {error.strerror}") from None
    return DONE


def _check_options(args: argparse.Namespace) -> None:
    if (args.model is None) == (args.traces is None):
        raise NotDone("calibrate takes a model to measure, or --traces; one of the two")
    if args.traces is None:
        if args.hold_out is not None:
            raise NotDone("--hold-out goes with --traces")
        return
    for name in ("dtype", "device", "seed"):
        if getattr(args, name) is not None:
            raise NotDone(f"--{name} does not go with --traces")


def _check_output(path: str) -> None:
    """Find out before minutes of measurement that their result could not be kept."""
    check_output(path, "-", may_exist=True)
    place = os.path.realpath(path)
    if not os.access(place if os.path.exists(place) else os.path.dirname(place), os.W_OK):
        raise NotDone(f"{path} cannot be written: there is no permission")


def _lines(found: Calibration) -> Iterator[str]:
    cost = found.cost
    yield "tokens in a step    seconds, contexts apart"
    for tokens, seconds in zip(cost.tokens, cost.seconds, strict=True):
        yield f"{tokens:>15,}    {seconds:.6f}"
    yield f"each token of context  {cost.context_s:.3e} s; each pair {cost.pair_s:.3e} s"
    for name, error in (("fitted to", found.fitted), ("held out", found.held_out)):
        yield (
            f"{name + ':':<10} {error.num_steps:,} steps of {error.measured_s:.2f} s in all, predicted "
            f"{error.predicted_s:.2f} s ({error.total_error:+.1%}); of a step, {error.mean_step_error:.1%} in the mean"
        )


def _measured(args: argparse.Namespace) -> tuple[list[Trace], dict[str, Any]]:
    """Runs of a few seats each, with prompts of all lengths, so that steps of all sizes occur."""
    target, about = target_of(args)
    seed = 0 if args.seed is None else args.seed
    rng = random.Random(f"calibrate-{seed}")
    traces = []
    with tempfile.TemporaryDirectory() as folder:
        for number, seats in enumerate(_SEATS, 1):
            say(f"batchkit: {number} of {len(_SEATS)}: {seats} at a time")
            load = [
                WorkloadRecord(prompt=rng.randint(1, _LONGEST_PROMPT), max_tokens=rng.randint(*_OUTPUT_TOKENS))
                for _ in range(seats + 2)
            ]
            policy = Policy(
                name=str(seats),
                scheduler=ChunkedPrefillScheduler,
                max_num_seqs=seats,
                max_tokens_per_step=max(seats, rng.choice((64, 128, 256, 512))),
            )
            trace = os.path.join(folder, f"{seats}.jsonl")
            failed = run(target, policy, load, seed=seed, trace=trace).num_failed
            traces.append(read_trace(trace))
            if failed:
                error = next(ended.error for ended in traces[-1].requests if ended.error is not None)
                raise NotDone(
                    f"{failed} of {len(load)} requests failed, {seats} at a time, and a cost model is one of requests "
                    f"that are served: {' '.join(error.split())}"
                )
    return traces, about


def target_of(args: argparse.Namespace) -> tuple[Target, dict[str, Any]]:
    """The model that is measured, and what the file says of it; tests put another function there."""
    with loading(args.model) as path:
        from ..hf.environment import limit_threads, num_threads
        from ..hf.loading import load_weights

        limit_threads()
        model = load_weights(path, device=args.device, dtype=args.dtype or "auto")
    return ModelTarget(model=model, kv_tokens=_KV_TOKENS), {
        "model": os.path.basename(os.path.normpath(args.model)),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "threads": num_threads(),
    }
