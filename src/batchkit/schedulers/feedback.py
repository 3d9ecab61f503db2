"""Multi-level feedback queues."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from typing_extensions import Unpack, override

from ..allocators import BlockAllocator
from ..scheduler import SchedulerOptions
from ..sequence import Sequence, Status
from ._arguments import check_count, check_number
from ._books import PerSequence, Rank, RankedQueue
from ._ranked import RankedScheduler

__all__ = ["FeedbackScheduler"]


_SLACK = 64  # notes of sequences that wait no more, beyond as many as wait, before they are swept out


class FeedbackScheduler(RankedScheduler):
    """Serves who has had little service first, so that short requests pass long ones without a guess of any length.

    The skip-join multi-level feedback queue of FastServe (Wu et al., "FastServe: Iteration-Level Preemptive Scheduling
    for Large Language Model Inference", NSDI'26, section 4). Level 0 goes first. A request joins at the first level
    whose quantum is more than its prompt costs, and sinks by one level when it has used up the quantum of its own; each
    quantum is twice the one before. Within a level it is first come first served. A sequence that waits may take the
    place of one of a deeper level, which is then computed again: `Swap` is worth its host memory here.

    A step costs the running ones and their sorting; an arrival, an admission and a promotion cost the logarithm of the
    queue.

    Args:
        quantum_tokens: of service at level 0.
        num_levels: levels; the last one has no end.
        prompt_weight: what a token of a prompt costs, in generated tokens: the prompt is computed at once.
        promote_after_s: the ageing: who has waited so long for a place goes to level 0, with a new quantum.
            ``math.inf``: never; long requests then wait for as long as short ones keep coming.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        quantum_tokens: int = 16,
        num_levels: int = 6,
        prompt_weight: float = 0.05,
        promote_after_s: float = 10.0,
        **options: Unpack[SchedulerOptions],
    ) -> None:
        super().__init__(allocator, **options)
        for name, count in (("quantum_tokens", quantum_tokens), ("num_levels", num_levels)):
            check_count(name, count, 1)
        for name, value in (("prompt_weight", prompt_weight), ("promote_after_s", promote_after_s)):
            check_number(name, value)
        if not 0 <= prompt_weight < math.inf:
            raise ValueError(f"prompt_weight must be finite and at least 0, got {prompt_weight}")
        if not promote_after_s > 0:
            raise ValueError(f"promote_after_s must be more than 0 seconds, got {promote_after_s}")
        self.quantum_tokens = quantum_tokens
        self.num_levels = num_levels
        self.prompt_weight = prompt_weight
        self.promote_after_s = promote_after_s
        self._quanta = [quantum_tokens << level for level in range(num_levels - 1)]
        self._queue = RankedQueue(self.rank)
        self._promoted: PerSequence[int] = PerSequence()  # the output of those promoted, at that time
        self._since: deque[tuple[float, Sequence, int]] = deque()  # who began to wait when, after which preemption

    def level(self, seq: Sequence) -> int:
        """The level of `seq`: by its prompt, by what it has generated, and by its last promotion."""
        quanta = self._quanta
        promoted_at = self._promoted.get(seq, -1)
        level = 0
        if promoted_at < 0:
            cost = self.prompt_weight * seq.num_prompt
            while level < len(quanta) and quanta[level] <= cost:
                level += 1
            served = cost + len(seq.output)
        else:
            served = len(seq.output) - promoted_at
        while level < len(quanta) and quanta[level] <= served:
            served -= quanta[level]
            level += 1
        return level

    @override
    def rank(self, seq: Sequence) -> Rank:
        return self.level(seq), seq.id

    @override
    def _yielding(self, seq: Sequence) -> Iterable[Sequence]:
        level = self.level(seq)
        return (other for other in self.victims(seq) if self.level(other) > level)

    @override
    def order(self, now: float) -> Iterable[Sequence]:
        for seq in self._queue.update(self.waiting):
            if self.promote_after_s < math.inf:
                self._since.append((now, seq, seq.num_preemptions))
        while self._since and self._since[0][0] + self.promote_after_s <= now:
            entry = self._since.popleft()
            if _waits_still(entry):
                seq = entry[1]
                self._promoted.set(seq, len(seq.output))
                self._queue.push(seq)
        if len(self._since) > 2 * len(self.waiting) + _SLACK:
            self._since = deque(filter(_waits_still, self._since))
        return self._queue


def _waits_still(entry: tuple[float, Sequence, int]) -> bool:
    """Whether a sequence has not been admitted since it was noted."""
    _, seq, num_preemptions = entry
    return seq.status is Status.WAITING and seq.num_preemptions == num_preemptions
