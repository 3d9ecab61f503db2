"""First come first served, with exceptions."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from typing_extensions import Unpack, override

from ..allocators import BlockAllocator
from ..scheduler import SchedulerOptions, Step
from ..sequence import Sequence
from ..types import Refusal
from ._arguments import check_count
from ._books import PerSequence
from .chunked import ChunkedPrefillScheduler

__all__ = ["SkipAheadScheduler"]


class SkipAheadScheduler(ChunkedPrefillScheduler):
    """Lets requests that fit pass the first of the queue while that does not, but only so many times.

    First come first served leaves memory idle while a long prompt waits for room at the head of the queue; letting
    everybody pass starves it. The bound between the two is that of a backfilling batch queue (Lifka, "The ANL/IBM SP
    scheduling system", 1995), counted in requests in place of a promised start. Nobody passes for lack of a seat, or in
    a step in which the head has just been preempted.

    A step costs `window` tries at most, however many wait.

    Args:
        max_skips: how many requests may pass one from the time on that it has become the head of the queue, all told,
            also while a preempted one stands before it. 0: first come first served.
        window: how many behind the head are tried in a step.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        max_skips: int = 16,
        window: int = 32,
        **options: Unpack[SchedulerOptions],
    ) -> None:
        super().__init__(allocator, **options)
        check_count("max_skips", max_skips, 0)
        check_count("window", window, 1)
        self.max_skips = max_skips
        self.window = window
        self._skips: PerSequence[int] = PerSequence()  # kept: a head may be pushed back, or preempted, and come again

    @override
    def schedule(self, step: Step) -> None:
        head = next(iter(self.order(step.now)), None)
        if head is not None:  # also if one that is preempted in this step comes to stand before it
            self._skips.set(head, self._skips.get(head, 0))
        super().schedule(step)

    @override
    def _join(self, step: Step) -> None:
        waiting = iter(self.order(step.now))
        for head in waiting:
            if not step.run(head, reserve=head.num_tokens):
                if step.refused is Refusal.BLOCKS:
                    self._let_pass(step, head, islice(waiting, self.window))
                break

    def _let_pass(self, step: Step, head: Sequence, behind: Iterable[Sequence]) -> None:
        # Whoever has been the head keeps its bound when those that passed it are preempted and come to stand before it.
        passed = [head]
        most = self._skips.get(head, 0)
        for seq in behind:
            if most >= self.max_skips:
                break
            if step.run(seq, reserve=seq.num_tokens):
                most += 1
                for other in passed:
                    self._skips.set(other, self._skips.get(other, 0) + 1)
            elif step.refused is not Refusal.BLOCKS:
                break
            elif (skips := self._skips.get(seq, -1)) >= 0:
                passed.append(seq)
                most = max(most, skips)
