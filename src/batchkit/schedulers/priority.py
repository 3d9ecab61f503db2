"""Priorities."""

from __future__ import annotations

from collections.abc import Iterable

from typing_extensions import Unpack, override

from ..allocators import BlockAllocator
from ..scheduler import SchedulerOptions
from ..sequence import Sequence
from ._arguments import check_number
from ._books import Rank, RankedQueue
from ._ranked import RankedScheduler

__all__ = ["PriorityScheduler"]


class PriorityScheduler(RankedScheduler):
    """Serves the lowest ``request.priority`` first, and equals in the order in which they came.

    A lower number is more urgent, as in vLLM. A request that waits takes the place of running ones whose number is
    higher, the least urgent first; one that runs takes the memory that it lacks from those behind it.

    Nobody starves: `ageing_s_per_level` seconds of waiting outweigh one level, so that a request yields to no other of
    a priority p levels better that arrives more than ``p * ageing_s_per_level`` seconds after it. From then on it is
    the next to be admitted, once a seat and memory are free, and keeps its place when newer ones come; but it takes no
    place from one whose number is lower. Everybody ages from the arrival at one rate, waiting or running, so that the
    order of two requests never changes, and no two can preempt each other in turn.

    A step costs the running ones and their sorting; an arrival and an admission cost the logarithm of the queue.

    Args:
        ageing_s_per_level: see above. ``math.inf``: no ageing; requests then wait for as long as better ones keep
            coming.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        ageing_s_per_level: float = 30.0,
        **options: Unpack[SchedulerOptions],
    ) -> None:
        super().__init__(allocator, **options)
        check_number("ageing_s_per_level", ageing_s_per_level)
        if not ageing_s_per_level > 0:
            raise ValueError(f"ageing_s_per_level must be more than 0 seconds, got {ageing_s_per_level}")
        self.ageing_s_per_level = ageing_s_per_level
        self._queue = RankedQueue(self.rank)

    @override
    def rank(self, seq: Sequence) -> Rank:
        return seq.request.priority + seq.request.arrival / self.ageing_s_per_level, seq.id

    @override
    def _yielding(self, seq: Sequence) -> Iterable[Sequence]:
        priority = seq.request.priority
        return (other for other in self.victims(seq) if other.request.priority > priority)
