"""What may be said to ``batchkit bench`` and ``batchkit simulate``, and what workloads and policies it means."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from ..allocators import ContiguousAllocator
from ..costs import DEVICES
from ..experiment.loads import (
    Draws,
    Requests,
    Workload,
    all_at_once,
    burst,
    closed_loop,
    conversations,
    evenly,
    exponential,
    exponential_think,
    fixed,
    open_loop,
    original,
    poisson,
    turns,
    uniform,
)
from ..experiment.policies import POLICIES, Policy, one_per_class
from ..experiment.trace_files import RequestFile, read_requests
from .faults import NotDone, one_line
from .options import DTYPES, said, whole_number
from .specs import SCHEDULERS, parse_policy, try_policy
from .specs import Policy as Spec

__all__ = [
    "OUTPUTS",
    "add_common",
    "add_latency",
    "add_variance",
    "chosen_policies",
    "fill_in",
    "kv_tokens",
    "latency_workloads",
    "longest_declared",
    "requests",
    "source_of",
    "variance_workload",
]

OUTPUTS = ("json", "plot", "trace_folder")
"""Options that say where results go."""

Range = tuple[int, int]


_DEFAULTS: dict[str, Any] = {
    "n": 128,
    "prompt": (128, 128),
    "mean": 32.0,
    "declared": "true",
    "cap": 256,
    "arrivals": "poisson",
    "speed": 1.0,
    "think_s": 0.0,
    "requests_per_client": 10,
    "turns": 4,
    "shared_prefix": 0,
}
_LENGTHS = {"prompt", "mean", "fixed", "original", "declared", "cap"}
_GO_WITH: dict[str, set[str]] = {
    "rates": {*_LENGTHS, "n", "arrivals"},
    "requests": {"declared", "speed", "limit", "max_model_len"},
    "clients": {*_LENGTHS, "think_s", "requests_per_client"},
    "sessions": {*_LENGTHS, "think_s", "turns", "shared_prefix", "rates", "arrivals"},
}
"""Which options count beside the one that says where requests come from."""


def add_variance(parser: argparse.ArgumentParser) -> None:
    """What only the throughput experiment has."""
    parser.add_argument(
        "--caps",
        type=_list(whole_number),
        default=[8, 32, 96, 384],
        metavar="N,...",
        help="longest outputs to try; default: 8,32,96,384",
    )
    _add_lengths(parser)


def add_latency(parser: argparse.ArgumentParser) -> None:
    """What only the latency experiment has. Most have no default here, so that it shows what was said in vain."""
    source = parser.add_argument_group("where requests come from")
    source.add_argument("--rates", type=_list(_above_zero), metavar="R,...", help="of arrivals, per second")
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
    source.add_argument("--speed", type=_above_zero, metavar="X", help="recorded time runs X times as fast; default: 1")
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
    _add_lengths(parser)
    parser.add_argument(
        "--prefix-caching", action="store_true", help="compute the beginning that prompts have in common once"
    )
    window = parser.add_argument_group("what counts")
    window.add_argument(
        "--warm-up-s", type=_seconds, default=0.0, metavar="S", help="requests that arrive before do not; default: 0"
    )
    window.add_argument("--until-s", type=_above_zero, metavar="S", help="stop after S seconds; default: when all end")
    window.add_argument("--goal-ttft-s", type=_above_zero, metavar="S", help="for the goodput: most until a token")
    window.add_argument(
        "--goal-tpot-s", type=_above_zero, metavar="S", help="for the goodput: most seconds between two"
    )


def add_common(parser: argparse.ArgumentParser, *, simulated: bool) -> None:
    """What both experiments have, on a simulated device or on a real one."""
    parser.add_argument("model", metavar="MODEL", help=f"a folder{', a config.json' * simulated}, or a name on the hub")
    if simulated:
        parser.add_argument(
            "--device", type=said(_device), required=True, metavar="PRESET", help=f"one of {', '.join(DEVICES)}"
        )
        parser.add_argument(
            "--overhead-s", type=_seconds, default=0.002, metavar="S", help="what a step costs beyond; default: 0.002"
        )
        parser.add_argument(
            "--efficiency", type=_share, default=0.6, metavar="P", help="part of the FLOP/s reached; default: 0.6"
        )
    else:
        parser.add_argument("--device", help="such as cpu or cuda:0; default: the accelerator, if there is one")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of weights and KV; default: the model's own")

    group = parser.add_argument_group("policies and memory")
    group.add_argument(
        "--policies",
        type=_list(said(_policy)),
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
    size = group.add_mutually_exclusive_group()
    size.add_argument("--kv-tokens", type=whole_number, metavar="N", help="KV budget in tokens")
    size.add_argument(
        "--kv-sequences",
        type=whole_number,
        default=8,
        metavar="N",
        help="KV budget in sequences of the greatest length; default: 8",
    )
    group.add_argument("--block-size", type=whole_number, default=16, metavar="N", help="tokens per block; default: 16")
    group.add_argument(
        "--allocator",
        choices=("paged", "contiguous"),
        default="paged",
        help="contiguous: for policies that reserve all at admission; default: paged",
    )

    group = parser.add_argument_group("runs and results")
    group.add_argument(
        "--seeds", type=_list(_seed), default=[0, 1, 2], metavar="N,...", help="a run for each; default: 0,1,2"
    )
    group.add_argument("--json", metavar="FILE", help="gets all figures, anew after each run")
    group.add_argument("--plot", metavar="FILE", help="gets a picture, of the kind that its ending says")
    group.add_argument("--trace-folder", metavar="FOLDER", help="gets a step trace of each run")


def _add_lengths(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--n", type=whole_number, metavar="N", help="requests of a run; default: 128")
    parser.add_argument(
        "--prompt",
        type=said(_range),
        metavar="N|LO:HI",
        help="tokens of a prompt, between two numbers equally likely; default: 128",
    )
    lengths = parser.add_mutually_exclusive_group()
    lengths.add_argument(
        "--mean",
        type=_above_zero,
        metavar="N",
        help="outputs are exponential with this mean, by rejection up to the cap; default: 32",
    )
    lengths.add_argument("--fixed", type=whole_number, metavar="N", help="every output has N tokens")
    lengths.add_argument(
        "--original", action="store_true", help="outputs are those of the 2023 experiment (mean 128) for every seed"
    )
    parser.add_argument(
        "--declared",
        type=said(_declared),
        metavar="true|cap|N",
        help="what requests say as max_tokens: their true lengths, the cap, or N; default: true, of recorded ones what "
        "the file says",
    )


# --- what it means ---------------------------------------------------------------------------------------------------


def fill_in(args: argparse.Namespace) -> None:
    """Give options that were not said their defaults.

    Raises:
        NotDone: one was said that does not count beside the others.
    """
    if args.experiment == "latency":
        _check_source(args)
        if args.cap is None and args.fixed is not None:
            args.cap = args.fixed
    for name, value in _DEFAULTS.items():
        if getattr(args, name, value) is None:
            setattr(args, name, value)


def source_of(args: argparse.Namespace) -> str:
    """Where the requests of the latency experiment come from: the name of an option."""
    return next((name for name in ("requests", "clients", "sessions") if getattr(args, name) is not None), "rates")


def _check_source(args: argparse.Namespace) -> None:
    source = source_of(args)
    for name in sorted({name for names in _GO_WITH.values() for name in names} - _GO_WITH[source] - {source}):
        if getattr(args, name) not in (None, False):
            raise NotDone(f"--{name.replace('_', '-')} does not go with --{source}")
    if args.arrivals == "burst" and args.rates is not None:
        raise NotDone("--arrivals burst has no rates: all come at once")
    if source == "rates" and args.arrivals != "burst" and args.rates is None:
        raise NotDone("say where requests come from: --rates, --arrivals burst, --requests, --clients or --sessions")
    if args.arrivals in ("poisson", "evenly") and args.rates is None:
        raise NotDone(f"--arrivals {args.arrivals} needs --rates")
    if args.prefix_caching and args.allocator == "contiguous":
        raise NotDone("--prefix-caching does not go with --allocator contiguous, whose sequences share no blocks")


def requests(args: argparse.Namespace, cap: int) -> Requests:
    """What requests are like whose outputs have at most `cap` tokens.

    Raises:
        NotDone: lengths do not go together.
    """
    if args.fixed is not None and args.fixed > cap:
        raise NotDone(f"--fixed {args.fixed} is more than the cap of {cap}")
    declared = cap if args.declared == "cap" else args.declared
    if declared != "true" and declared < (cap if args.fixed is None else args.fixed):
        raise NotDone(f"--declared {declared} is less than outputs may have with a cap of {cap}")
    try:
        return Requests(prompts=_prompts(args.prompt), outputs=_outputs(args, cap), declared=declared)
    except ValueError as error:
        raise NotDone(str(error)) from None


def _prompts(bounds: Range) -> Draws[int]:
    low, high = bounds
    return fixed(low) if low == high else uniform(low, high)


def _outputs(args: argparse.Namespace, cap: int) -> Draws[int]:
    if args.fixed is not None:
        return fixed(args.fixed)
    return original(cap) if args.original else exponential(args.mean, cap)


def variance_workload(args: argparse.Namespace, cap: int) -> Workload:
    """All requests at the start."""
    return all_at_once(requests(args, cap), num_requests=args.n)


def latency_workloads(args: argparse.Namespace) -> tuple[dict[float | None, Workload], int]:
    """The workload of each rate, or the one there is under None, and the length of the longest request.

    Raises:
        NotDone: the file cannot be read, or is wrong, by its line and field.
    """
    if args.requests is not None:
        found = _recorded(args)
        longest = max(prompt + record.max_tokens for record, prompt in turns(found.records))
        return {None: found.workload()}, longest
    like = requests(args, args.cap)
    longest = args.prompt[1] + longest_declared(args, args.cap)
    think = exponential_think(args.think_s) if args.think_s else None
    if args.clients is not None:
        each = args.requests_per_client
        return {None: closed_loop(like, clients=args.clients, requests_per_client=each, think=think)}, longest
    at = evenly if args.arrivals == "evenly" else poisson
    arrivals = {None: burst()} if args.rates is None else {rate: at(rate) for rate in args.rates}
    if args.sessions is None:
        return {rate: open_loop(like, num_requests=args.n, arrivals=one) for rate, one in arrivals.items()}, longest
    talks = {
        rate: conversations(
            like,
            sessions=args.sessions,
            turns_each=args.turns,
            prefix_tokens=args.shared_prefix,
            think=think,
            arrivals=one,
        )
        for rate, one in arrivals.items()
    }
    return talks, args.shared_prefix + args.turns * longest


def _recorded(args: argparse.Namespace) -> RequestFile:
    if args.declared == "cap":
        raise NotDone("--declared cap does not go with --requests: say a number")
    try:
        return read_requests(
            args.requests,
            limit=args.limit,
            speed=args.speed,
            declared=None if args.declared == "true" else args.declared,
            max_model_len=args.max_model_len,
        )
    except OSError as error:
        raise NotDone(f"{args.requests} cannot be read: {error.strerror or one_line(error)}") from None
    except ValueError as error:
        raise NotDone(one_line(error)) from None


def longest_declared(args: argparse.Namespace, cap: int) -> int:
    """The most tokens that an output may declare."""
    return cap if isinstance(args.declared, str) else max(cap, int(args.declared))


def kv_tokens(args: argparse.Namespace, max_model_len: int) -> int:
    """The KV budget: as it was said, or in sequences of the greatest length. Their last tokens need no slot."""
    if args.kv_tokens is not None:
        return int(args.kv_tokens)
    block_size: int = args.block_size
    return int(args.kv_sequences) * -(-(max_model_len - 1) // block_size) * block_size


def chosen_policies(args: argparse.Namespace) -> list[Policy]:
    """The contenders, in the order in which they were named.

    Raises:
        NotDone: two have one name, or one cannot be made.
    """
    names = args.policies if args.policies is not None else [] if args.scheduler else list(POLICIES)
    policies = [POLICIES[name] for name in names]
    for name, spec in args.scheduler:
        try:
            try_policy(spec)
        except ValueError as error:
            raise NotDone(str(error)) from None
        policies.append(one_per_class(name, spec.policy, spec.arguments))
    twice = [one.name for number, one in enumerate(policies) if one.name in [two.name for two in policies[:number]]]
    if twice:
        raise NotDone(f"the policy {twice[0]} is named twice")
    if args.allocator == "contiguous":
        growing = [policy.name for policy in policies if not policy.scheduler.reserves_all]
        if growing:
            raise NotDone(
                f"--allocator contiguous is for policies that reserve all at admission, unlike {', '.join(growing)}"
            )
        policies = [replace(policy, allocator=ContiguousAllocator) for policy in policies]
    return policies


# --- types of options ------------------------------------------------------------------------------------------------


def _list(one: Callable[[str], Any]) -> Callable[[str], list[Any]]:
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
    return text, parse_policy(text)


def _range(text: str) -> Range:
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


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"a seed is a whole number of at least 0, got {text!r}")
    return int(text)


def _tokens(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number of tokens, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    return _number(text, "a finite number of seconds, at least 0", lambda value: 0 <= value < math.inf)


def _above_zero(text: str) -> float:
    return _number(text, "a finite number above 0", lambda value: 0 < value < math.inf)


def _share(text: str) -> float:
    return _number(text, "above 0 and at most 1", lambda value: 0 < value <= 1)
