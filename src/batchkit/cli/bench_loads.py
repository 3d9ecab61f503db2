"""What the options of ``batchkit bench`` and ``batchkit simulate`` mean: their workloads, memory and policies."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from ..allocators import ContiguousAllocator
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
from .bench_options import LENGTHS
from .faults import NotDone, one_line
from .specs import try_policy

__all__ = [
    "chosen_policies",
    "fill_in",
    "kv_tokens",
    "latency_workloads",
    "longest_declared",
    "source_of",
    "variance_workload",
]

_DEFAULTS: dict[str, Any] = {
    **LENGTHS,
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
_LIMITS = ("max_num_seqs", "max_tokens_per_step")
"""Arguments of every scheduler that a policy here may have of its own."""
_GO_WITH: dict[str, set[str]] = {
    "rates": {*_LENGTHS, "n", "arrivals"},
    "requests": {"declared", "speed", "limit", "max_model_len"},
    "clients": {*_LENGTHS, "think_s", "requests_per_client"},
    "sessions": {*_LENGTHS, "think_s", "turns", "shared_prefix", "rates", "arrivals"},
}
"""Which options count beside the one that says where requests come from."""


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


def _prompts(bounds: tuple[int, int]) -> Draws[int]:
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
        limits = {key: spec.arguments[key] for key in _LIMITS if key in spec.arguments}
        rest = {key: value for key, value in spec.arguments.items() if key not in _LIMITS}
        policies.append(replace(one_per_class(name, spec.policy, rest), **limits))
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
