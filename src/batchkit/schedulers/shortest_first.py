"""Shortest job first."""

from __future__ import annotations

import math
from collections.abc import Iterable

from typing_extensions import Unpack, override

from ..allocators import BlockAllocator
from ..scheduler import SchedulerOptions, Step
from ..sequence import Sequence
from ._arguments import check_number
from ._books import Rank, RankedQueue, expected_output
from .chunked import ChunkedPrefillScheduler

__all__ = ["ShortestFirstScheduler"]


class ShortestFirstScheduler(ChunkedPrefillScheduler):
    """Admits who is expected to be done first. Who runs goes on as under `ChunkedPrefillScheduler`.

    Shortest job first, which has the lowest mean waiting time of all orders without preemption (Smith, "Various
    optimizers for single-stage production", 1956); for LLMs with predicted lengths as in SSJF (Qiu et al., "Efficient
    Interactive LLM Serving with Proxy Model-based Sequence Length Prediction", 2024). The expected length is
    ``request.length_hint``, or ``max_tokens`` where there is none. A wrong hint costs order, never correctness.

    An arrival and an admission cost the logarithm of the queue; a step in which nobody comes or joins, nothing.

    Args:
        ageing_tokens_per_s: a second of waiting outweighs so many expected tokens. Nobody starves: a request of n
            tokens yields to no other that arrives more than n / ageing_tokens_per_s seconds after it. 0: no ageing;
            long requests then wait for as long as shorter ones keep coming, which under load is for ever.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        ageing_tokens_per_s: float = 20.0,
        **options: Unpack[SchedulerOptions],
    ) -> None:
        super().__init__(allocator, **options)
        check_number("ageing_tokens_per_s", ageing_tokens_per_s)
        if not 0 <= ageing_tokens_per_s < math.inf:
            raise ValueError(f"ageing_tokens_per_s must be finite and at least 0, got {ageing_tokens_per_s}")
        self.ageing_tokens_per_s = ageing_tokens_per_s
        self._queue = RankedQueue(self._rank)

    def _rank(self, seq: Sequence) -> Rank:
        # Everybody ages at one rate, so that it is enough to count from the arrival: the order never changes.
        return expected_output(seq) + self.ageing_tokens_per_s * seq.request.arrival, seq.id

    @override
    def order(self, now: float) -> Iterable[Sequence]:
        self._queue.update(self.waiting)
        return self._queue

    @override
    def schedule(self, step: Step) -> None:
        super().schedule(step)
        self._queue.settle()
