"""Figures of runs: pure functions over `RequestOutput` and `StepReport`, and what adds them up.

Definitions, as the field uses them: TTFT is the time from arrival to the first token; TPOT the mean time between later
tokens of a request; end-to-end latency the time from arrival to the last token, and normalised latency that divided by
the tokens generated (Orca, OSDI'22, section 6.2); goodput the requests per second that meet all targets of a service
(DistServe, OSDI'24, section 2.3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .scheduler import Scheduler
from .types import Refusal, Request, RequestOutput, ScheduledSequence, StepReport
from .workload import true_length

__all__ = ["Interval", "KVUse", "Latency", "StepFigures", "StepRecorder", "interval_95", "latency", "percentile"]

# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom; beyond, those of the next listed one.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def percentile(values: Iterable[float], percent: float) -> float:
    """The value below which `percent` of 100 of the values lie, interpolated between neighbours.

    Raises:
        ValueError: there are no values.

    >>> percentile([1.0, 2.0, 4.0], 50), percentile([1.0, 2.0, 4.0], 75)
    (2.0, 3.0)
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("a percentile needs at least one value")
    if not 0 <= percent <= 100:
        raise ValueError(f"percent must be between 0 and 100, got {percent}")
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean, and how far from it the truth may lie: ``mean - half_width .. mean + half_width`` at 95 %.

    Attributes:
        mean: of the values.
        half_width: by Student's t; None where one value says nothing about it.
        num: how many values.
    """

    mean: float
    half_width: float | None
    num: int


def interval_95(values: Iterable[float]) -> Interval:
    """The mean of independent values with its 95 % interval.

    Raises:
        ValueError: there are no values.

    >>> interval_95([1.0, 2.0, 3.0])
    Interval(mean=2.0, half_width=2.4843..., num=3)
    """
    given = list(values)
    if not given:
        raise ValueError("a mean needs at least one value")
    num = len(given)
    mean = math.fsum(given) / num
    if num == 1:
        return Interval(mean, None, 1)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in given) / (num - 1))
    return Interval(mean, _T95[min(num - 1, len(_T95)) - 1] * deviation / math.sqrt(num), num)


@dataclass(frozen=True, kw_only=True, slots=True)
class Latency:
    """How long one request took, in seconds.

    Attributes:
        queue_s: from its arrival until it was first in a step.
        ttft_s: from its arrival to its first token.
        tpot_s: between tokens after the first, in the mean; None of a request of one token.
        e2e_s: from its arrival to its end.
        normalised_s: `e2e_s` for each token generated.
    """

    queue_s: float
    ttft_s: float
    tpot_s: float | None
    e2e_s: float
    normalised_s: float


def latency(output: RequestOutput) -> Latency:
    """Of a request that gave tokens, by its final output.

    Raises:
        ValueError: it gave none, or is not finished.
    """
    times, num = output.timings, output.outputs[0].num_tokens
    if times.finished is None or times.first_token is None or times.first_scheduled is None:
        raise ValueError(f"request {output.request_id!r} has no latency: it gave no token, or goes on")
    e2e = times.finished - times.arrival
    return Latency(
        queue_s=times.first_scheduled - times.arrival,
        ttft_s=times.first_token - times.arrival,
        tpot_s=(times.finished - times.first_token) / (num - 1) if num > 1 else None,
        e2e_s=e2e,
        normalised_s=e2e / num,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class KVUse:
    """What the KV slots were used for: shares of the pool, weighted by time; they add up to 1.

    The classes are those of PagedAttention (SOSP'23, section 3.1).

    Attributes:
        used: hold a token's keys and values.
        reserved: will hold one that the sequence is still to generate.
        internal: belong to a sequence that will never fill them: reserved beyond its true length, or left over in
            its last block.
        external: free, but of no use to the sequence that waits, since they do not lie side by side.
        free: the rest.
    """

    used: float
    reserved: float
    internal: float
    external: float
    free: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFigures:
    """What a run's steps add up to.

    Attributes:
        num_steps: with rows.
        busy_s: seconds in steps, by the engine's clock.
        schedule_s: seconds of processor time in the policy, by the system's clock, also where the engine's is virtual.
        num_rows: rows, idle ones among them.
        num_idle_rows: rows of finished sequences that were computed all the same.
        num_tokens: tokens computed, idle ones among them.
        peak_rows: the most rows of a step.
        num_preemptions: how often a sequence lost its blocks.
        kv: see `KVUse`.
    """

    num_steps: int
    busy_s: float
    schedule_s: float
    num_rows: int
    num_idle_rows: int
    num_tokens: int
    peak_rows: int
    num_preemptions: int
    kv: KVUse

    @property
    def mean_rows(self) -> float:
        """Rows of a step that do something, in the mean over steps."""
        return (self.num_rows - self.num_idle_rows) / self.num_steps if self.num_steps else 0.0

    @property
    def slot_use(self) -> float:
        """`mean_rows` as a share of `peak_rows`: how full the batch was kept with work."""
        return self.mean_rows / self.peak_rows if self.peak_rows else 0.0


class StepRecorder:
    """An ``on_step`` hook that adds up what `StepFigures` says.

    How much of a reservation will be used is known only to somebody who knows the true output length: it is taken from
    the request's metadata, where `workload.play` puts it; without it, `Request.max_tokens` counts as true.

    Args:
        scheduler: of the engine.
        clock: of the engine.
    """

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._block_size = scheduler.allocator.block_size
        self._pool = scheduler.allocator.num_blocks * self._block_size
        self._final: dict[int, int] = {}  # KV slots that a running sequence will fill, by Sequence.id
        self.clear()

    def clear(self) -> None:
        """Forget what was recorded."""
        self._num_steps = self._num_rows = self._num_idle = self._num_tokens = self._peak = self._num_preemptions = 0
        self._busy_s = self._schedule_s = 0.0
        self._used = self._reserved = self._held = self._external = 0.0

    def __call__(self, report: StepReport) -> None:
        """Take in one step."""
        seconds = self._clock() - report.time
        out, kv_tokens = report.output, report.kv_tokens
        rows = out.rows
        self._schedule_s += report.schedule_s
        self._num_preemptions += len(out.preempted)
        self._busy_s += seconds
        if not rows:
            return
        working = [row for row in rows if not row.idle]
        num_rows = len(rows)
        self._num_steps += 1
        self._num_rows += num_rows
        self._num_idle += num_rows - len(working)
        self._num_tokens += out.num_tokens
        if num_rows > self._peak:
            self._peak = num_rows
        block_size = self._block_size
        held = report.num_used_blocks * block_size
        reserved = 0
        if working or report.num_running + report.num_finished > num_rows:  # else all are idle, and fill nothing more
            reserved = self._reserved_slots(report, working)
        self._used += seconds * kv_tokens
        self._reserved += seconds * min(reserved, held - kv_tokens)
        self._held += seconds * held
        blocked = out.blocked
        if blocked is not None and blocked.why is Refusal.BLOCKS and blocked.blocks_needed <= blocked.blocks_free:
            self._external += seconds * blocked.blocks_free * block_size

    def _reserved_slots(self, report: StepReport, working: Iterable[ScheduledSequence]) -> int:
        """Slots of those that run which will be filled later; `working` are the rows that are not idle."""
        block_size, final = self._block_size, self._final
        slots = 0
        for row in working:
            last = final.get(row.seq_id)
            if last is None:
                last = final[row.seq_id] = _final_slots(row.request, row.sample_index)
            later = min(last, len(row.blocks) * block_size) - row.start - row.num_tokens
            if later > 0:
                slots += later
        rows = report.output.rows
        if report.num_running + report.num_finished > len(rows):  # some had no row in this step
            in_step = {row.seq_id for row in rows}
            table = self._scheduler.allocator.table
            for seq in self._scheduler.running:
                if seq.id not in in_step:
                    last = min(_final_slots(seq.request, seq.index), len(table(seq.id)) * block_size)
                    slots += max(0, last - seq.num_computed)
        if len(final) > 2 * report.num_running + 64:
            alive = {seq.id for seq in self._scheduler.running}
            self._final = {seq_id: last for seq_id, last in final.items() if seq_id in alive}
        return slots

    def figures(self) -> StepFigures:
        """What was recorded so far."""
        whole = self._busy_s * self._pool or 1.0
        used, reserved, external = self._used / whole, self._reserved / whole, self._external / whole
        internal = self._held / whole - used - reserved
        return StepFigures(
            num_steps=self._num_steps,
            busy_s=self._busy_s,
            schedule_s=self._schedule_s,
            num_rows=self._num_rows,
            num_idle_rows=self._num_idle,
            num_tokens=self._num_tokens,
            peak_rows=self._peak,
            num_preemptions=self._num_preemptions,
            kv=KVUse(
                used=used,
                reserved=reserved,
                internal=internal,
                external=external,
                free=1.0 - used - reserved - internal - external,
            ),
        )


def _final_slots(request: Request, sample_index: int) -> int:
    """KV slots that a sample of a request fills in the end."""
    length = true_length(request.metadata.get("output_tokens", request.max_tokens), sample_index)
    return len(request.prompt_token_ids) + max(length, 1) - 1
