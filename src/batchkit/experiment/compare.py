"""Policies side by side: the same arrivals for all of them, several times over, with intervals."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ..metrics import Interval, Latency, StepFigures, interval_95, latency, percentile
from ..types import StepReport
from ..workload import play
from .loads import Workload, turns
from .policies import Policy
from .targets import Load, Target

__all__ = ["FIGURES", "Comparison", "Goal", "Measured", "Run", "compare", "policy_ms_per_step", "run"]

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """What a service promises of each request. None: nothing.

    Attributes:
        ttft_s, tpot_s: seconds to the first token, and between later ones in the mean.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None

    def is_met(self, took: Latency) -> bool:
        """Whether a request was served as promised."""
        first = self.ttft_s is None or took.ttft_s <= self.ttft_s
        return first and (self.tpot_s is None or took.tpot_s is None or took.tpot_s <= self.tpot_s)


@dataclass(frozen=True, slots=True)
class Measured:
    """One request that ended in the window.

    Attributes:
        prompt_tokens, output_tokens: of the request.
        latency: see `Latency`.
    """

    prompt_tokens: int
    output_tokens: int
    latency: Latency


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One policy on one load.

    The window begins `warm_up_s` after the start and ends with the run: when the last request has ended (drained), or
    when time was up. Requests count if they arrived in the window; tokens of both kinds are those of such requests
    that were served to their end.

    Attributes:
        policy: its name.
        seed: of the load.
        window_s: seconds by the engine's clock.
        requests: served to their end, in the order in which they ended.
        num_unfinished: arrived in the window and not done when time was up.
        num_failed: ended with an error.
        steps: see `StepFigures`; of the whole run.
        kept_up: requests that ended in the second half of the arrivals as a share of those that arrived in it, whether
            they count or not: near 1 as long as the engine keeps up, less the faster the queue grows. The half is
            that of the time from the window's begin to the last arrival. NaN if all arrived at once.
        real_s: seconds of the system's clock that the run took, also if the engine's was virtual.
    """

    policy: str
    seed: int
    window_s: float
    requests: tuple[Measured, ...]
    num_unfinished: int
    num_failed: int
    steps: StepFigures
    kept_up: float
    real_s: float
    _sorted: dict[str, list[float]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def prompt_tokens(self) -> int:
        """Of the requests that were served."""
        return sum(one.prompt_tokens for one in self.requests)

    @property
    def generated_tokens(self) -> int:
        """Of the requests that were served."""
        return sum(one.output_tokens for one in self.requests)

    def goodput(self, goal: Goal) -> float:
        """Requests per second served as promised."""
        return sum(goal.is_met(one.latency) for one in self.requests) / self.window_s

    def of(self, name: str, percent: float) -> float:
        """A percentile of one kind of latency, by the field's name in `Latency`; NaN if no request has it."""
        known = self._sorted.get(name)
        if known is None:
            values = [getattr(one.latency, name) for one in self.requests]
            known = self._sorted[name] = sorted(value for value in values if value is not None)
        return percentile(known, percent) if known else math.nan

    def to_json(self, goal: Goal | None = None, *, is_simulated: bool) -> dict[str, Any]:
        """See `Comparison.to_json`."""
        return {
            "policy": self.policy,
            "seed": self.seed,
            "requests": len(self.requests),
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "failed": self.num_failed,
            **({"goodput": self.goodput(goal)} if goal is not None else {}),
            "figures": {name: _plain(figure(self)) for name, figure in FIGURES.items()},
            "cdf": {
                name: [_plain(self.of(f"{name}_s", percent)) for percent in range(101)]
                for name in ("ttft", "tpot", "e2e", "normalised")
            },
            **({} if is_simulated else {"policy_ms_per_step": policy_ms_per_step(self)}),
        }


def _of(name: str, percent: float) -> Callable[[Run], float]:
    return lambda run: run.of(name, percent)


FIGURES: dict[str, Callable[[Run], float]] = {
    "generated_per_s": lambda run: run.generated_tokens / run.window_s,
    "prompt_per_s": lambda run: run.prompt_tokens / run.window_s,
    "tokens_per_s": lambda run: (run.prompt_tokens + run.generated_tokens) / run.window_s,
    "requests_per_s": lambda run: len(run.requests) / run.window_s,
    "window_s": lambda run: run.window_s,
    "steps": lambda run: run.steps.num_steps,
    "mean_rows": lambda run: run.steps.mean_rows,
    "peak_rows": lambda run: run.steps.peak_rows,
    "slot_use": lambda run: run.steps.slot_use,
    "kv_used": lambda run: run.steps.kv.used,
    "kv_reserved": lambda run: run.steps.kv.reserved,
    "kv_internal": lambda run: run.steps.kv.internal,
    "kv_external": lambda run: run.steps.kv.external,
    "kv_free": lambda run: run.steps.kv.free,
    "preemptions": lambda run: run.steps.num_preemptions,
    "unfinished": lambda run: run.num_unfinished,
    "kept_up": lambda run: run.kept_up,
    **{
        f"{name}_p{percent}": _of(f"{name}_s", percent)
        for name in ("queue", "ttft", "tpot", "e2e", "normalised")
        for percent in PERCENTILES
    },
}
"""What is reported of a run, by name: a number of it. Under a cost model the same seed gives the same ones."""


def policy_ms_per_step(run: Run) -> float:
    """Milliseconds of processor time that the policy took for a step: another number in every run."""
    return 1e3 * run.steps.schedule_s / max(1, run.steps.num_steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Some policies on some loads.

    Attributes:
        workload: what it was.
        runs: all that were made, in order.
        missing: (policy, seed) that were not, because the comparison was interrupted.
        is_simulated: whether seconds are those of a cost model.
    """

    workload: str
    runs: tuple[Run, ...]
    is_simulated: bool
    missing: tuple[tuple[str, int], ...] = ()

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of the policies with at least one run, in order."""
        return tuple(dict.fromkeys(run.policy for run in self.runs))

    def of(self, policy: str) -> tuple[Run, ...]:
        """The runs of one policy, by seed in order."""
        return tuple(run for run in self.runs if run.policy == policy)

    def figure(self, policy: str, name: str) -> Interval:
        """The mean of a figure of `FIGURES` over the seeds, with its interval."""
        return interval_95(FIGURES[name](run) for run in self.of(policy))

    def ratio(self, policy: str, baseline: str, name: str) -> Interval:
        """A figure in units of that of another policy, paired by seed; NaN where that is 0."""
        base = {run.seed: FIGURES[name](run) or math.nan for run in self.of(baseline)}
        return interval_95(FIGURES[name](run) / base[run.seed] for run in self.of(policy) if run.seed in base)

    def to_json(self, goal: Goal | None = None) -> dict[str, Any]:
        """Everything but the single requests, as JSON takes it; latencies as 101 percentiles each.

        What the system's clock says of a simulation is left out, so that the same seeds give the same text.
        """
        return {**self.head(), "runs": [run.to_json(goal, is_simulated=self.is_simulated) for run in self.runs]}

    def head(self) -> dict[str, Any]:
        """What `to_json` says above the runs."""
        return {
            "workload": self.workload,
            "simulated": self.is_simulated,
            "missing": [list(one) for one in self.missing],
        }


def _plain(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def run(
    target: Target,
    policy: Policy,
    load: Load,
    *,
    seed: int = 0,
    warm_up_s: float = 0.0,
    until_s: float | None = None,
    on_step: Callable[[StepReport], None] | None = None,
    trace: str | os.PathLike[str] | None = None,
) -> Run:
    """Play one load to one policy.

    Args:
        target: makes the engine.
        policy: decides.
        load: what arrives.
        seed: of the prompts given as a length.
        warm_up_s: requests that arrive before are served and not counted.
        until_s: stop after so many seconds. Default: when everything has ended.
        on_step: sees every step.
        trace: a file for the step trace.

    Raises:
        ValueError: the longest sequence does not fit the KV budget, or nothing arrives in the window.
    """
    if not load:
        raise ValueError("a load needs at least one request")
    if not 0 <= warm_up_s < math.inf:
        raise ValueError(f"warm_up_s must be finite and at least 0 seconds, got {warm_up_s}")
    if until_s is not None and not until_s > warm_up_s:
        raise ValueError(f"until_s must be more than the warm-up of {warm_up_s:g} s, got {until_s}")
    num_requests = sum(1 for _ in turns(load))
    served: list[Measured] = []
    arrivals: list[float] = []
    ends: list[float] = []
    unfinished = failed = 0
    began = time.perf_counter()
    with target.open(policy, load, on_step=on_step, trace=trace) as stage:
        start = stage.engine.clock()
        opens = start + warm_up_s
        closes = start
        for played in play(stage.engine, load, seed=seed, until_s=until_s):
            output = played.output
            finished = output.timings.finished
            assert finished is not None
            closes = max(closes, finished)
            arrivals.append(output.timings.arrival)
            if output.finish_reason != "abort":
                ends.append(finished)
            if output.timings.arrival < opens:
                continue
            if output.finish_reason == "abort":
                unfinished += 1
            elif output.finish_reason == "error":
                failed += 1
            else:
                served.append(Measured(len(output.prompt_token_ids), output.outputs[0].num_tokens, latency(output)))
        steps = stage.recorder.figures()
    if until_s is not None and len(arrivals) < num_requests:  # time was up before they came
        closes = max(closes, start + until_s)
    if closes <= opens or not any(moment >= opens for moment in arrivals):
        raise ValueError(f"nothing arrived after the warm-up of {warm_up_s:g} s: the run took {closes - start:g} s")
    return Run(
        policy=policy.name,
        seed=seed,
        window_s=closes - opens,
        requests=tuple(served),
        num_unfinished=unfinished,
        num_failed=failed,
        steps=steps,
        kept_up=_kept_up(arrivals, ends, opens),
        real_s=time.perf_counter() - began,
    )


def _kept_up(arrivals: list[float], ends: list[float], opens: float) -> float:
    last = max(arrivals)
    middle = (opens + last) / 2
    # Without the last arrival, which cannot have ended by then.
    arrived = sum(middle <= moment < last for moment in arrivals)
    return sum(middle <= moment < last for moment in ends) / arrived if arrived else math.nan


def compare(
    policies: Iterable[Policy],
    workload: Workload,
    *,
    target: Target,
    seeds: Iterable[int] = (0,),
    warm_up_s: float = 0.0,
    until_s: float | None = None,
    on_run: Callable[[Run], None] | None = None,
    trace_folder: str | os.PathLike[str] | None = None,
) -> Comparison:
    """Play the same loads to every policy, load by load in turn, so that drift of the machine meets all of them.

    Ctrl-C ends it early: what was measured is returned, and `Comparison.missing` says what was not.

    Args:
        policies: the contenders, under different names.
        workload: makes a load from a seed.
        target: see `Target`.
        seeds: one load for each.
        warm_up_s: see `run`.
        until_s: see `run`.
        on_run: called with each run as it is there.
        trace_folder: gets a step trace of each run, ``<policy>-<seed>.jsonl``; see `batchkit.trace`.

    Raises:
        ValueError: two policies have one name, there is no policy or no seed; and see `run`.
    """
    contenders, seeds = list(policies), list(seeds)
    names = [policy.name for policy in contenders]
    if not contenders or not seeds:
        raise ValueError(f"a comparison needs policies and seeds, got {len(contenders)} and {len(seeds)}")
    if len(set(names)) < len(names):
        raise ValueError(f"policies of a comparison need different names, got {', '.join(names)}")
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds of a comparison must differ, got {seeds}")
    todo = [(seed, policy) for seed in seeds for policy in contenders]
    runs: list[Run] = []
    load: Load = ()
    made_for: int | None = None
    try:
        for seed, policy in todo:
            if seed != made_for:
                load, made_for = workload.make(seed), seed
            trace = None
            if trace_folder is not None:
                trace = os.path.join(trace_folder, f"{policy.name.replace('/', '_')}-{seed}.jsonl")
            runs.append(run(target, policy, load, seed=seed, warm_up_s=warm_up_s, until_s=until_s, trace=trace))
            if on_run is not None:
                on_run(runs[-1])
    except KeyboardInterrupt:
        if not runs:
            raise
    return Comparison(
        workload=workload.name,
        runs=tuple(runs),
        is_simulated=target.is_simulated,
        missing=tuple((policy.name, seed) for seed, policy in todo[len(runs) :]),
    )
