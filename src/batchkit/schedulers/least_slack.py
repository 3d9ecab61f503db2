"""Deadlines."""

from __future__ import annotations

import math
from collections.abc import Iterable

from typing_extensions import Unpack, override

from ..allocators import BlockAllocator
from ..scheduler import SchedulerOptions, Step
from ..sequence import Sequence
from ._arguments import check_number
from ._books import Progress, Rank, RankedQueue, expected_output
from ._ranked import RankedScheduler

__all__ = ["LeastSlackScheduler"]


class LeastSlackScheduler(RankedScheduler):
    """Admits who has the least time to spare before ``request.deadline``.

    Least slack, or least laxity, first (Mok, "Fundamental design problems of distributed systems for the hard-real-time
    environment", 1983). Slack is ``deadline - now`` less the time that the rest is expected to take: the steps for
    what is not computed and for the tokens of ``length_hint`` (or ``max_tokens``) that are to come, times the seconds
    of a step, as observed. Slack decides who is admitted; who gives way is decided by the deadline alone, the latest
    first, for by slack two sequences would preempt each other in turn: who waits loses slack, who runs does not.

    Requests without a deadline come behind, as if they were due `undated_due_s` after their arrival, so that a stream
    of urgent ones cannot put them off for ever. One with a deadline far ahead may wait until then. Under overload, late
    requests hold up others that could still be in time; refuse or abort them where that matters.

    A step costs the running ones and their sorting; an arrival and an admission cost the logarithm of the queue; a
    change of the observed seconds by more than a quarter costs the whole queue.

    Args:
        undated_due_s: after so many seconds a request without a deadline counts as due: the ageing.
        preempt_below_s: a waiting request takes the place of one that is due later only once its slack is less.
        step_s: the seconds of a step that are assumed until one has been observed.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        undated_due_s: float = 60.0,
        preempt_below_s: float = 1.0,
        step_s: float = 0.03,
        **options: Unpack[SchedulerOptions],
    ) -> None:
        super().__init__(allocator, **options)
        for name, seconds in (("undated_due_s", undated_due_s), ("step_s", step_s)):
            check_number(name, seconds)
            if not 0 < seconds < math.inf:
                raise ValueError(f"{name} must be finite and more than 0 seconds, got {seconds}")
        check_number("preempt_below_s", preempt_below_s)
        if math.isnan(preempt_below_s):
            raise ValueError("preempt_below_s must be a number of seconds, got nan")
        self.undated_due_s = undated_due_s
        self.preempt_below_s = preempt_below_s
        self.step_s = step_s
        self._now = -math.inf
        self._observed: float | None = None
        self._progress = Progress()
        self._queue = RankedQueue(self._start_by)

    def due(self, seq: Sequence) -> float:
        """When `seq` is due, in seconds of the engine's clock."""
        deadline = seq.request.deadline
        return seq.request.arrival + self.undated_due_s if deadline is None else deadline

    @override
    def rank(self, seq: Sequence) -> Rank:
        return self.due(seq), seq.id

    def _start_by(self, seq: Sequence) -> Rank:
        """When it must run at the latest: at any one time the least slack is the earliest of these."""
        tokens = max(1, expected_output(seq) - len(seq.output))
        return self.due(seq) - self.step_s * (tokens + seq.num_uncomputed / self.max_tokens_per_step), seq.id

    @override
    def _yielding(self, seq: Sequence) -> Iterable[Sequence]:
        return self.victims(seq) if self._start_by(seq)[0] - self._now < self.preempt_below_s else ()

    @override
    def schedule(self, step: Step) -> None:
        if self._progress.was_made(self.running):
            took = step.now - self._now
            self._observed = took if self._observed is None else 0.9 * self._observed + 0.1 * took
            if not 0.8 <= self._observed / self.step_s <= 1.25 and self._observed > 0:
                self.step_s = self._observed
                self._queue.rebuild(self.waiting)
        self._now = step.now
        super().schedule(step)
        self._progress.note(self.running)
