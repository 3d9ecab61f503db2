"""Shortest remaining time first."""

from __future__ import annotations

import math
from collections.abc import Iterable

from typing_extensions import Unpack, override

from ..allocators import BlockAllocator
from ..scheduler import SchedulerOptions
from ..sequence import Sequence
from ._arguments import check_number
from ._books import Rank, RankedQueue, expected_output
from ._ranked import RankedScheduler

__all__ = ["ShortestRemainingScheduler"]


class ShortestRemainingScheduler(RankedScheduler):
    """Serves who is expected to have the fewest tokens left; a shorter newcomer takes the place of a longer one.

    Shortest remaining processing time, which has the lowest mean time in system of all orders (Schrage, "A proof of
    the optimality of the shortest remaining processing time discipline", 1968), with the limit on preemption of TRAIL
    (Shahout et al., "Don't Stop Me Now: Embedding Based Scheduling for LLMs", ICLR'25): who is nearly done
    and holds much KV stays. What remains is ``request.length_hint``, or ``max_tokens`` where there is none, less what
    was generated, and at least 1: a request that outlives its hint may end at any time.

    A preempted sequence is computed again, or kept by `Swap`. A step costs the running ones and their sorting; an
    arrival and an admission cost the logarithm of the queue.

    Args:
        ageing_tokens_per_s: a second since the arrival outweighs so many remaining tokens, of those that wait and of
            those that run, so that no two can preempt each other in turn. 0: no ageing; long requests are then put off
            for as long as shorter ones keep coming.
        preemptible_part: a sequence that has generated more than this part of its expected length is not preempted for
            one that waits. It may still be preempted so that one before it can go on. 0: nobody is preempted for a
            newcomer.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        ageing_tokens_per_s: float = 20.0,
        preemptible_part: float = 0.8,
        **options: Unpack[SchedulerOptions],
    ) -> None:
        super().__init__(allocator, **options)
        check_number("ageing_tokens_per_s", ageing_tokens_per_s)
        if not 0 <= ageing_tokens_per_s < math.inf:
            raise ValueError(f"ageing_tokens_per_s must be finite and at least 0, got {ageing_tokens_per_s}")
        check_number("preemptible_part", preemptible_part)
        if not 0 <= preemptible_part <= 1:
            raise ValueError(f"preemptible_part must be between 0 and 1, got {preemptible_part}")
        self.ageing_tokens_per_s = ageing_tokens_per_s
        self.preemptible_part = preemptible_part
        self._queue = RankedQueue(self.rank)

    @override
    def rank(self, seq: Sequence) -> Rank:
        remaining = max(1, expected_output(seq) - len(seq.output))
        return remaining + self.ageing_tokens_per_s * seq.request.arrival, seq.id

    @override
    def _yielding(self, seq: Sequence) -> Iterable[Sequence]:
        for other in self.victims(seq):
            if len(other.output) < self.preemptible_part * expected_output(other):
                yield other
