"""Iteration-level scheduling that lets requests join in groups."""

from __future__ import annotations

import math
from typing import ClassVar

from typing_extensions import Unpack, override

from ..allocators import BlockAllocator
from ..scheduler import Scheduler, SchedulerOptions, Step
from ._arguments import check_count, check_number

__all__ = ["WaitingServedScheduler"]


class WaitingServedScheduler(Scheduler):
    """Interrupts decoding for a prefill only when enough requests would join by it.

    The batcher of Hugging Face's text-generation-inference, 2023: its ``waiting_served_ratio`` and
    ``max_waiting_tokens``. A joining step prefills the newcomers alone. Each reserves memory for its longest output.

    Args:
        waiting_served_ratio: newcomers join when at least max(1, floor(ratio x running)) of them would fit.
        max_waiting_steps: after so many decode steps without anybody joining, one that fits is enough.
    """

    reserves_all: ClassVar[bool] = True

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        waiting_served_ratio: float = 1.2,
        max_waiting_steps: int = 20,
        **options: Unpack[SchedulerOptions],
    ) -> None:
        super().__init__(allocator, **options)
        check_number("waiting_served_ratio", waiting_served_ratio)
        if not 0 <= waiting_served_ratio < math.inf:
            raise ValueError(f"waiting_served_ratio must be finite and at least 0, got {waiting_served_ratio}")
        check_count("max_waiting_steps", max_waiting_steps, 0)
        self.waiting_served_ratio = waiting_served_ratio
        self.max_waiting_steps = max_waiting_steps
        self._steps_since_join = 0

    @override
    def schedule(self, step: Step) -> None:
        # Newcomers whose step failed, or whose prompt exceeds a step's budget, are served before anything else.
        for seq in self.running:
            if seq.num_uncomputed > 1:
                step.run(seq)
        if step:
            return
        wanted = max(1, int(self.waiting_served_ratio * len(self.running)))
        if not self.running or self._steps_since_join >= self.max_waiting_steps:
            wanted = 1
        if self._would_join(step, wanted):
            for seq in self.order(step.now):
                if not step.run(seq, reserve=seq.max_kv):
                    break
        if step:
            self._steps_since_join = 0
            return
        for seq in self.running:
            step.run(seq)
        self._steps_since_join += 1

    def _would_join(self, step: Step, wanted: int) -> bool:
        """Whether the first `wanted` waiting sequences fit together; counted before any of them runs."""
        seats = self.max_num_seqs - len(self.running)
        blocks, tokens = self.allocator.num_free_blocks, step.tokens_left
        for seq in self.order(step.now):
            blocks -= self.allocator.missing(seq.id, seq.max_kv)
            tokens -= min(seq.num_uncomputed, step.tokens_left)  # a longer one is cut
            seats -= 1
            if min(seats, blocks, tokens) < 0:
                return False
            wanted -= 1
            if not wanted:
                return True
        return False
