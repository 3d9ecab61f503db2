"""Dynamic batching."""

from __future__ import annotations

import math

from typing_extensions import Unpack, override

from ..allocators import BlockAllocator
from ..scheduler import SchedulerOptions, Step
from ._arguments import check_count, check_number
from .static import StaticScheduler

__all__ = ["DynamicScheduler"]


class DynamicScheduler(StaticScheduler):
    """Static batching for requests that arrive one by one: a batch starts when it is large enough or has waited enough.

    Clipper (NSDI'17), section 4.3, "delayed batching"; NVIDIA Triton's dynamic batcher. Once started, a batch runs as
    under `StaticScheduler`.

    Args:
        min_batch: start as soon as so many requests wait. Default: one for each seat.
        max_wait_s: start no later than so many seconds after the oldest waiting request arrived.
        drop_finished, pad_to: see `StaticScheduler`.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        min_batch: int | None = None,
        max_wait_s: float = 0.05,
        drop_finished: bool = False,
        pad_to: int | None = None,
        **options: Unpack[SchedulerOptions],
    ) -> None:
        super().__init__(allocator, drop_finished=drop_finished, pad_to=pad_to, **options)
        if min_batch is None:
            min_batch = self.max_num_seqs
        check_count("min_batch", min_batch)
        if not 1 <= min_batch <= self.max_num_seqs:
            raise ValueError(f"min_batch must be between 1 and max_num_seqs ({self.max_num_seqs}), got {min_batch}")
        check_number("max_wait_s", max_wait_s)
        if not 0 <= max_wait_s < math.inf:
            raise ValueError(f"max_wait_s must be finite and at least 0 seconds, got {max_wait_s}")
        self.min_batch = min_batch
        self.max_wait_s = max_wait_s

    @override
    def schedule(self, step: Step) -> None:
        if not self.running and 0 < len(self.waiting) < self.min_batch:
            due = min(seq.request.arrival for seq in self.waiting) + self.max_wait_s
            if step.now < due:
                step.wait_until(due)
                return
        super().schedule(step)
