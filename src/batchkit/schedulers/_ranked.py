"""What the policies that preempt by rank have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from operator import itemgetter
from typing import ClassVar

from typing_extensions import override

from ..scheduler import Scheduler, Step
from ..sequence import Sequence
from ._books import Rank, RankedQueue

__all__ = ["RankedScheduler"]


class RankedScheduler(Scheduler):
    """Serves the lowest rank first; a higher one gives way, also to a sequence that waits.

    In each step the running and the waiting sequences take their turns together, by rank, since who is in the step
    can no longer give way in it. Prompts are cut so that everybody behind them that runs still gets a token.

    Nobody is preempted for ever if ranks are such that of two sequences the one that gave way cannot, before the other
    has got a token, take its place back.

    A step costs the running ones and their sorting; an arrival and an admission cost the logarithm of the queue.
    """

    chunked: ClassVar[bool] = True
    default_max_tokens_per_step: ClassVar[int] = 512
    _queue: RankedQueue

    @abstractmethod
    def rank(self, seq: Sequence) -> Rank:
        """Who goes first, and keeps its blocks. Of a sequence that waits it may not change."""

    def _yielding(self, seq: Sequence) -> Iterable[Sequence]:
        """Whom a waiting `seq` may preempt to be admitted. Default: `victims`."""
        return self.victims(seq)

    @override
    def order(self, now: float) -> Iterable[Sequence]:
        self._queue.update(self.waiting)
        return self._queue

    @override
    def victims(self, seq: Sequence) -> Iterable[Sequence]:
        rank = self.rank(seq)
        yield from sorted((other for other in self.running if self.rank(other) > rank), key=self.rank, reverse=True)

    @override
    def schedule(self, step: Step) -> None:
        heads = ((self.rank(seq), seq) for seq in self.order(step.now))
        head = next(heads, None)
        running = sorted(((self.rank(seq), seq) for seq in self.running), key=itemgetter(0))
        for place, (rank, seq) in enumerate(running):
            behind = len(running) - place
            while head is not None and head[0] < rank:
                head = next(heads, None) if self._admit_one(step, head[1], behind) else None
            step.run(seq, max_tokens=max(1, step.tokens_left - behind + 1), victims=self.victims(seq))
        while head is not None:
            head = next(heads, None) if self._admit_one(step, head[1], 0) else None
        self._queue.settle()

    def _admit_one(self, step: Step, seq: Sequence, behind: int) -> bool:
        """Admit `seq` and leave a token to each of those `behind` it that run."""
        return step.run(seq, max_tokens=step.tokens_left - behind, reserve=seq.num_tokens, victims=self._yielding(seq))
