"""What may be said to ``batchkit bench`` and ``batchkit simulate``; `bench_loads` says what it means."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any, Literal

from ..costs import DEVICES
from ..experiment.policies import POLICIES
from .options import DTYPES, add_attention, said, whole_number
from .specs import SCHEDULERS, parse_policy
from .specs import Policy as Spec

__all__ = [
    "CALIBRATION",
    "LENGTHS",
    "OUTPUTS",
    "above_zero",
    "add_common",
    "add_latency",
    "add_lengths",
    "add_memory",
    "add_variance",
    "seed_number",
    "several",
    "token_range",
]

CALIBRATION = "the device that `batchkit calibrate` measured, in place of a preset"

LENGTHS: dict[str, Any] = {"n": 128, "prompt": (128, 128), "mean": 32.0}
"""What `add_lengths` has where nothing is said."""

_ELSEWHERE = {
    "allocator": "--allocator and --block-size",
    "max_model_len": "the lengths of the requests",
    "preemption": "a Target in Python",
}

OUTPUTS = ("json", "plot", "trace_folder")
"""Options that say where results go."""


def add_variance(parser: argparse.ArgumentParser) -> None:
    """What only the throughput experiment has."""
    parser.add_argument(
        "--caps",
        type=several(whole_number),
        default=[8, 32, 96, 384],
        metavar="N,...",
        help="longest outputs to try; default: 8,32,96,384",
    )
    _add_outputs(parser)


def add_latency(parser: argparse.ArgumentParser) -> None:
    """What only the latency experiment has. Most have no default here, so that it shows what was said in vain."""
    source = parser.add_argument_group("where requests come from")
    source.add_argument("--rates", type=several(above_zero), metavar="R,...", help="of arrivals, per second")
    source.add_argument(
        "--arrivals",
        choices=("poisson", "evenly", "burst"),
        help="at a rate, or burst: all at once; default: poisson",
    )
    other = source.add_mutually_exclusive_group()
    other.add_argument(
        "--requests", metavar="FILE", help="recorded ones: of Azure's or BurstGPT's traces, or batchkit's JSON lines"
    )
    other.add_argument("--clients", type=whole_number, metavar="N", help="that send one when the one before has ended")
    other.add_argument(
        "--sessions", type=whole_number, metavar="N", help="conversations, each prompt after all that was said before"
    )
    source.add_argument("--speed", type=above_zero, metavar="X", help="recorded time runs X times as fast; default: 1")
    source.add_argument("--limit", type=whole_number, metavar="N", help="only the first N recorded requests")
    source.add_argument(
        "--max-model-len", type=whole_number, metavar="N", help="leave out recorded requests that are longer"
    )
    source.add_argument(
        "--think-s", type=_seconds, metavar="S", help="mean time between an answer and the next prompt; default: 0"
    )
    source.add_argument("--requests-per-client", type=whole_number, metavar="N", help="default: 10")
    source.add_argument("--turns", type=whole_number, metavar="N", help="of a conversation; default: 4")
    source.add_argument(
        "--shared-prefix", type=_tokens, metavar="N", help="tokens that all conversations begin with; default: 0"
    )
    parser.add_argument("--cap", type=whole_number, metavar="N", help="longest output; default: 256")
    _add_outputs(parser)
    parser.add_argument(
        "--prefix-caching", action="store_true", help="compute the beginning that prompts have in common once"
    )
    window = parser.add_argument_group("what counts")
    window.add_argument(
        "--warm-up-s", type=_seconds, default=0.0, metavar="S", help="requests that arrive before do not; default: 0"
    )
    window.add_argument("--until-s", type=above_zero, metavar="S", help="stop after S seconds; default: when all end")
    window.add_argument("--goal-ttft-s", type=above_zero, metavar="S", help="for the goodput: most until a token")
    window.add_argument("--goal-tpot-s", type=above_zero, metavar="S", help="for the goodput: most seconds between two")


def add_common(parser: argparse.ArgumentParser, *, simulated: bool) -> None:
    """What both experiments have, on a simulated device or on a real one."""
    parser.add_argument("model", metavar="MODEL", help=f"a folder{', a config.json' * simulated}, or a name on the hub")
    if simulated:
        where = parser.add_mutually_exclusive_group(required=True)
        where.add_argument("--device", type=said(_device), metavar="PRESET", help=f"one of {', '.join(DEVICES)}")
        where.add_argument("--calibration", metavar="FILE", help=CALIBRATION)
        parser.add_argument("--overhead-s", type=_seconds, metavar="S", help="what a step costs beyond; default: 0.002")
        parser.add_argument("--efficiency", type=_share, metavar="P", help="part of the FLOP/s reached; default: 0.6")
    else:
        parser.add_argument("--device", help="such as cpu or cuda:0; default: the accelerator, if there is one")
        add_attention(parser)
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of weights and KV; default: the model's own")

    group = parser.add_argument_group("policies and memory")
    group.add_argument(
        "--policies",
        type=several(said(_policy)),
        metavar="NAME,...",
        help=f"some of {', '.join(POLICIES)}; default: all, or none if --scheduler is given",
    )
    group.add_argument(
        "--scheduler",
        type=said(_spec),
        action="append",
        default=[],
        metavar="POLICY[,key=value...]",
        help=f"one more: {', '.join(SCHEDULERS)}, or module:Class for one of your own; may be given several times",
    )
    add_memory(group)
    group.add_argument(
        "--allocator",
        choices=("paged", "contiguous"),
        default="paged",
        help="contiguous: for policies that reserve all at admission; default: paged",
    )

    group = parser.add_argument_group("runs and results")
    group.add_argument(
        "--seeds", type=several(seed_number), default=[0, 1, 2], metavar="N,...", help="a run for each; default: 0,1,2"
    )
    group.add_argument("--json", metavar="FILE", help="gets all figures, anew after each run")
    group.add_argument("--plot", metavar="FILE", help="gets a picture, of the kind that its ending says")
    group.add_argument("--trace-folder", metavar="FOLDER", help="gets a step trace of each run")


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    add_lengths(parser).add_argument(
        "--original", action="store_true", help="outputs are those of the 2023 experiment (mean 128) for every seed"
    )
    parser.add_argument(
        "--declared",
        type=said(_declared),
        metavar="true|cap|N",
        help="what requests say as max_tokens: their true lengths, the cap, or N; default: true, of recorded ones what "
        "the file says",
    )


def add_lengths(parser: argparse._ActionsContainer) -> argparse._MutuallyExclusiveGroup:
    """How many requests there are and how long; by default as in `LENGTHS`. Returns the ways to say outputs."""
    parser.add_argument("--n", type=whole_number, metavar="N", help="requests of a run; default: 128")
    parser.add_argument(
        "--prompt",
        type=said(token_range),
        metavar="N|LO:HI",
        help="tokens of a prompt, between two numbers equally likely; default: 128",
    )
    outputs = parser.add_mutually_exclusive_group()
    outputs.add_argument(
        "--mean",
        type=above_zero,
        metavar="N",
        help="outputs are exponential with this mean, by rejection up to the cap; default: 32",
    )
    outputs.add_argument("--fixed", type=whole_number, metavar="N", help="every output has N tokens")
    return outputs


def add_memory(parser: argparse._ActionsContainer) -> None:
    """How much KV memory there is."""
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--kv-tokens", type=whole_number, metavar="N", help="KV budget in tokens")
    size.add_argument(
        "--kv-sequences",
        type=whole_number,
        default=8,
        metavar="N",
        help="KV budget in sequences of the greatest length; default: 8",
    )
    parser.add_argument(
        "--block-size", type=whole_number, default=16, metavar="N", help="tokens per block; default: 16"
    )


# --- types of options ------------------------------------------------------------------------------------------------


def several(one: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """A type for argparse: values with commas between them, each of the type `one`, all different."""

    def convert(text: str) -> list[Any]:
        values = [one(part.strip()) for part in text.split(",")]
        if len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f"{text!r} names one twice")
        return values

    return convert


def _device(text: str) -> str:
    if text not in DEVICES:
        raise ValueError(f"there is no preset {text!r}; there are {', '.join(DEVICES)}")
    return text


def _policy(text: str) -> str:
    if text not in POLICIES:
        raise ValueError(f"there is no policy {text!r}; there are {', '.join(POLICIES)}, and --scheduler for others")
    return text


def _spec(text: str) -> tuple[str, Spec]:
    return text, parse_policy(text, elsewhere=_ELSEWHERE)


def token_range(text: str) -> tuple[int, int]:
    """``N`` or ``LO:HI``."""
    low, _, high = text.partition(":")
    if not (low.isdecimal() and (high or low).isdecimal() and 1 <= int(low) <= int(high or low)):
        raise ValueError(f"must be N or LO:HI with 1 <= LO <= HI, got {text!r}")
    return int(low), int(high or low)


def _declared(text: str) -> int | Literal["true", "cap"]:
    if text == "true":
        return "true"
    if text == "cap":
        return "cap"
    if not (text.isdecimal() and int(text)):
        raise ValueError(f"must be true, cap or a number of at least 1, got {text!r}")
    return int(text)


def _number(text: str, what: str, is_right: Callable[[float], bool]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not is_right(value):
        raise argparse.ArgumentTypeError(f"must be {what}, got {text!r}")
    return value


def seed_number(text: str) -> int:
    """A type for argparse: a whole number from 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"a seed is a whole number of at least 0, got {text!r}")
    return int(text)


def _tokens(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number of tokens, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    return _number(text, "a finite number of seconds, at least 0", lambda value: 0 <= value < math.inf)


def above_zero(text: str) -> float:
    """A type for argparse: a finite number above 0."""
    return _number(text, "a finite number above 0", lambda value: 0 < value < math.inf)


def _share(text: str) -> float:
    return _number(text, "above 0 and at most 1", lambda value: 0 < value <= 1)
