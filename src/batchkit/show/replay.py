"""A trace's scheduler, stepped once more without the model: for the same decisions, or under another policy.

Requests come back as the trace has them: arrival, prompt length, ``max_tokens``, priority, ``n``, and how many tokens
they really gave. The same policy gets each request and each abort before the step in which it was there, at the time of
that step, and what ended within a step, by an abort or a row's fault, within it; another policy gets them at the time
of the trace. Not in a trace are the tokens, deadlines, length hints, metadata and the arguments of the policy's class:
a policy that reads them may decide otherwise. Of a request that was aborted, or that a trace without an end leaves
running, it is not known which of several samples had ended.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import allocators
from ..allocators import BlockAllocator
from ..clocks import VirtualClock
from ..engine import Engine
from ..params import SamplingParams
from ..scheduler import Scheduler
from ..simulate import SimulatedRunner, TrueLengths
from ..trace import Trace, TracedRequest, read_trace
from ..types import KVGeometry, SchedulerOutput, StepReport
from .model import Names, View, step_seconds, view

__all__ = ["Difference", "LineCost", "Replayed", "fit_line", "replay"]


_Decision = tuple[tuple[tuple[Any, ...], ...], tuple[int, ...]]

_WITHIN = 0.5  # of a step: what happens while it is computed


@dataclass(frozen=True, slots=True)
class LineCost:
    """Seconds of a step as a line over its tokens: ``fixed_s + token_s x tokens``."""

    fixed_s: float
    token_s: float

    def __call__(self, out: SchedulerOutput) -> float:
        """Of a step."""
        return self.fixed_s + self.token_s * out.num_tokens


@dataclass(frozen=True, slots=True)
class Difference:
    """The first step that is not the same: its number, and each run's in words; None where a run has ended."""

    step: int
    recorded: str | None
    replayed: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """What came of it.

    Attributes:
        recorded, replayed: the two runs.
        difference: the first one between their decisions; None if there is none, or if another policy was asked for.
        cost: of the steps under another policy; None where each took what it had taken.
    """

    recorded: View
    replayed: View
    difference: Difference | None
    cost: LineCost | None


def fit_line(view: View) -> LineCost:
    """The least-squares line over the seconds of a run's steps; neither of its numbers is below 0."""
    xs, ys = [float(step.tokens) for step in view.steps], [step.seconds for step in view.steps]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread if spread else 0.0
    slope = max(0.0, slope)
    fixed = mean_y - slope * mean_x
    if fixed < 0:  # the best line through the origin
        return LineCost(0.0, sum(x * y for x, y in zip(xs, ys, strict=True)) / sum(x * x for x in xs))
    return LineCost(fixed, slope)


def replay(
    trace: Trace,
    name: str,
    policy: type[Scheduler],
    arguments: Mapping[str, Any],
    *,
    output: str | os.PathLike[str],
    is_another: bool,
) -> Replayed:
    """Step a policy over the requests of a trace.

    Args:
        trace: as read.
        name: its file's, for people.
        policy: the class.
        arguments: of it, beyond those of every scheduler.
        output: gets the trace of the replay.
        is_another: the policy is not the recorded one: requests come by the clock, and steps cost by `fit_line`.

    Raises:
        ValueError: the trace cannot be replayed, and why.
        OSError: `output` cannot be written.
    """
    recorded = view(trace, name)
    if not recorded.steps:
        raise ValueError(f"{name} has no steps to replay")
    lengths = _lengths(trace, recorded)
    cost = fit_line(recorded) if is_another else None
    _Run(trace, recorded, lengths, policy, arguments, output, cost).play()
    replayed_trace = read_trace(output)
    replayed = view(replayed_trace, os.fspath(output))
    difference = None if is_another else _first_difference(trace, replayed_trace)
    return Replayed(recorded=recorded, replayed=replayed, difference=difference, cost=cost)


def _lengths(trace: Trace, recorded: View) -> list[list[int]]:
    """How many tokens each sample of each lane gave in all; refuses what the trace says too little of."""
    for number, line in enumerate(trace.steps, 2):
        where = f"{recorded.name}, line {number}"
        if line["error"]:
            raise ValueError(f"{where}: step {line['step']} failed ({line['error']}), and a replay has no such failure")
        if any(kind != "copy" for kind, _, _ in line["copies"]):
            raise ValueError(
                f"{where}: a sequence was swapped to host memory, whose size is not in the trace: it cannot be replayed"
            )
    decisions = _decisions(trace)
    held = {(lane, sample) for rows, _ in decisions for lane, sample, _, _, idle in rows if idle}
    lengths = []
    for number, lane in enumerate(recorded.lanes):
        ended = lane.ended
        if ended is not None and ended.timings.cached_tokens:
            raise ValueError(
                f"{recorded.name}: request {lane.request_id!r} found {ended.timings.cached_tokens} tokens in "
                f"the prefix cache; prompts are not in a trace, so that it cannot be replayed"
            )
        is_done = ended is not None and ended.finish_reason in ("stop", "length")
        lengths.append(
            [
                # Of one that did not come to its end, all that is known is that it would have gone on.
                lane.sampled.get(sample, 0) if is_done or (number, sample) in held else lane.added["max_tokens"]
                for sample in range(lane.added["n"])
            ]
        )
    _refuse_found_tokens(decisions, recorded)
    return lengths


def _refuse_found_tokens(decisions: Sequence[_Decision], recorded: View) -> None:
    """A request of one sample goes on where its last row ended, or begins at 0, unless it found KV in the cache.

    What it found again after a preemption is not in its timings, nor are there any of one that has not ended.
    """
    ends: dict[int, int] = {}  # by lane
    for number, (rows, preempted) in enumerate(decisions, 2):
        for lane in preempted:
            ends.pop(lane, None)
        for lane, _, start, tokens, idle in rows:
            added = recorded.lanes[lane].added
            if added["n"] > 1 or idle:
                continue
            if start != (known := ends.get(lane, 0)):
                raise ValueError(
                    f"{recorded.name}, line {number}: a row of request {added['request']!r} starts at token {start}, "
                    f"not at {known}, as if from the prefix cache; prompts are not in a trace, so that it cannot be "
                    f"replayed"
                )
            ends[lane] = start + tokens


class _Run:
    """One replay. Without a cost it follows the recorded steps by their numbers, with one the recorded times."""

    def __init__(
        self,
        trace: Trace,
        recorded: View,
        lengths: Sequence[list[int]],
        policy: type[Scheduler],
        arguments: Mapping[str, Any],
        output: str | os.PathLike[str],
        cost: LineCost | None,
    ) -> None:
        stats = recorded.stats
        self._recorded, self._lengths, self._cost = recorded, lengths, cost
        self._seconds = step_seconds(trace)
        self._num_steps = 0
        clock = self._clock = VirtualClock(trace.engine["time"])
        geometry = KVGeometry(
            num_blocks=stats["num_blocks"],
            block_size=stats["block_size"],
            max_model_len=stats["max_model_len"],
            vocab_size=100,
        )
        runner = SimulatedRunner(geometry, clock=clock, cost=self._took, check_kv=False)
        allocator = getattr(allocators, stats["allocator"], None)
        if not (isinstance(allocator, type) and issubclass(allocator, BlockAllocator)):
            raise ValueError(f"{recorded.name}: the allocator {stats['allocator']} is not one of batchkit's")
        scheduler = policy(
            allocator(stats["num_blocks"], stats["block_size"]),
            max_model_len=stats["max_model_len"],
            max_num_seqs=stats["max_num_seqs"],
            max_tokens_per_step=stats["max_tokens_per_step"],
            **arguments,
        )
        self._engine = Engine(TrueLengths(runner), scheduler, clock=clock, on_step=self._count, trace=output)
        # What the callers did, in order: when, whether it is an abort, and to which lane.
        self._acts = deque(sorted(self._act(trace)))

    def _act(self, trace: Trace) -> Iterator[tuple[float, bool, int]]:
        """When each request comes and is aborted: the number of steps before it, or, by the clock, the time."""
        names = Names(trace)
        num_lanes = 0
        for before, line in enumerate(trace.steps):
            ended = names.take(line)
            for lane, added in enumerate(line["added"], num_lanes):
                yield (before if self._cost is None else min(line["time"], max(added["arrival"], 0.0))), False, lane
            num_lanes += len(line["added"])
            yield from self._aborts(ended, before, line["time"])
        yield from self._aborts(names.take_last(), len(trace.steps), math.inf)

    def _aborts(
        self, ended: Iterable[tuple[int, TracedRequest]], before: int, began: float
    ) -> Iterator[tuple[float, bool, int]]:
        """Of those that ended before, or within, the step that began at that time."""
        for lane, end in ended:
            finished = end.timings.finished
            if end.finish_reason not in ("stop", "length") and finished is not None:
                # A row's fault ends a request within the step, even where the step takes no time.
                is_within = finished > began or end.error is not None
                yield (before + _WITHIN * is_within if self._cost is None else finished), True, lane

    def _took(self, out: SchedulerOutput) -> float:
        if self._cost is not None:
            return self._cost(out)
        while self._acts and self._acts[0][0] <= self._num_steps + _WITHIN:
            self._do(*self._acts.popleft())
        # Beyond the recorded steps, what the last one took.
        return self._seconds[min(self._num_steps, len(self._seconds) - 1)]

    def _count(self, report: StepReport) -> None:
        self._num_steps += 1

    def play(self) -> None:
        """All requests, to their ends; of a trace without an end, as many steps as it has."""
        engine, clock, steps = self._engine, self._clock, self._recorded.steps
        with engine:
            while self._acts or engine.has_unfinished():
                if self._cost is None and self._num_steps < len(steps):
                    clock.sleep_until(steps[self._num_steps].time)
                if not self._recorded.complete and self._num_steps >= len(steps):
                    break
                if not engine.has_unfinished() and self._acts and not self._is_due():
                    if self._cost is None:  # it is ahead of the recorded run, and has nothing else to do
                        self._do(*self._acts.popleft())
                        continue
                    clock.sleep_until(self._acts[0][0])
                while self._acts and self._is_due():
                    self._do(*self._acts.popleft())
                engine.step()
                coming = self._acts[0][0] if self._acts and self._cost is not None else None
                engine.wait(coming)

    def _is_due(self) -> bool:
        return self._acts[0][0] <= (self._num_steps if self._cost is None else self._clock())

    def _do(self, when: float, is_abort: bool, number: int) -> None:
        name = str(number)  # ids may come twice, and a run of another length may have both at once
        if is_abort:
            self._engine.abort(name)
            return
        added = self._recorded.lanes[number].added
        lengths = self._lengths[number]
        params = SamplingParams(
            temperature=0,
            max_tokens=added["max_tokens"],
            n=added["n"],
            detokenize=False,
            stop_token_ids=(0,) if any(length < added["max_tokens"] for length in lengths) else (),
        )
        self._engine.add_request(
            # Prompts of their own: nothing is to be found in a cache.
            [1 + number % 99] * added["prompt_tokens"],
            params,
            request_id=name,
            priority=added["priority"],
            arrival=added["arrival"],
            metadata={"output_tokens": lengths},
        )


def _first_difference(recorded: Trace, replayed: Trace) -> Difference | None:
    known, again = _decisions(recorded), _decisions(replayed)
    if not recorded.complete:
        again = again[: len(known)]
    for at in range(max(len(known), len(again))):
        one = known[at] if at < len(known) else None
        two = again[at] if at < len(again) else None
        if one != two:
            return Difference(at + 1, one and _in_words(one, recorded), two and _in_words(two, recorded))
    return None


def _decisions(trace: Trace) -> list[_Decision]:
    """Of each step: rows as lane, sample, start, tokens and idle; and the lanes that were preempted."""
    names = Names(trace)
    found: list[_Decision] = []
    for line in trace.steps:
        names.take(line)
        rows = tuple(
            (names[row["request"]], row.get("sample", 0), row["start"], row["tokens"], bool(row.get("idle")))
            for row in line["rows"]
        )
        found.append((rows, tuple(names[entry["request"]] for entry in line["preempted"])))
    return found


def _in_words(decision: _Decision, recorded: Trace) -> str:
    names = [added["request"] for line in recorded.steps for added in line["added"]]
    rows, preempted = decision
    said = [
        f"{names[lane]}{f'/{sample}' if sample else ''} {'idle ' if idle else ''}[{start}:{start + tokens}]"
        for lane, sample, start, tokens, idle in rows
    ]
    shown = ", ".join(said[:12]) + (f" and {len(said) - 12} more" if len(said) > 12 else "")
    lost = f"; preempted {', '.join(names[lane] for lane in preempted)}" if preempted else ""
    return f"{shown or 'no rows'}{lost}"
