"""Reservation by experience."""

from __future__ import annotations

import math

from typing_extensions import Unpack, override

from ..allocators import BlockAllocator
from ..scheduler import SchedulerOptions, Step
from ..sequence import Sequence
from ._arguments import check_number
from ._books import Progress
from .chunked import ChunkedPrefillScheduler

__all__ = ["OptimisticScheduler"]


class OptimisticScheduler(ChunkedPrefillScheduler):
    """Admits a request if memory would suffice were everybody to generate a fraction of what is still declared.

    Between `ChunkedPrefillScheduler`, which expects nothing and preempts when it was wrong, and `OrcaScheduler`, which
    expects everything and leaves memory idle. The fraction is learned, as SGLang's new-token ratio is (Zheng et al.,
    NeurIPS'24; ``new_token_ratio`` of its scheduler): it falls in every step that generates, and rises when
    somebody had to be preempted. Nothing is set aside for anybody: what one does not use, others may.

    Admission is first come first served, so nobody starves. A step in which somebody waits costs the running ones.

    Args:
        start: the fraction to begin with. 1: as careful as Orca.
        floor: it does not fall below.
        decay_per_step: how much it falls.
        raise_on_preemption: how much it rises, to 1 at most, in a step that preempts.

    Attributes:
        ratio: the fraction now.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        start: float = 0.7,
        floor: float = 0.1,
        decay_per_step: float = 0.001,
        raise_on_preemption: float = 0.1,
        **options: Unpack[SchedulerOptions],
    ) -> None:
        super().__init__(allocator, **options)
        for name, value in (("start", start), ("floor", floor)):
            check_number(name, value)
        if not 0 <= floor <= start <= 1:
            raise ValueError(f"0 <= floor <= start <= 1 must hold, got floor={floor}, start={start}")
        for name, value in (("decay_per_step", decay_per_step), ("raise_on_preemption", raise_on_preemption)):
            check_number(name, value)
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must be between 0 and 1, got {value}")
        self.floor = floor
        self.decay_per_step = decay_per_step
        self.raise_on_preemption = raise_on_preemption
        self.ratio = start
        self._progress = Progress()

    @override
    def schedule(self, step: Step) -> None:
        if self._progress.was_made(self.running):
            self.ratio = max(self.floor, self.ratio - self.decay_per_step)
        num_running = len(self.running)
        self._go_on(step)
        if len(self.running) < num_running:
            self.ratio = min(1.0, self.ratio + self.raise_on_preemption)
        if self.waiting:
            self._join(step)
        self._progress.note(self.running)

    def _missing(self, seq: Sequence) -> int:
        """Blocks that `seq` lacks for what it is expected to become."""
        to_come = math.ceil(self.ratio * max(0, seq.max_kv - seq.num_tokens))
        return self.allocator.missing(seq.id, seq.num_tokens + to_come)

    @override
    def _join(self, step: Step) -> None:
        free = self.allocator.num_free_blocks - sum(map(self._missing, self.running))
        for seq in self.order(step.now):
            free -= self._missing(seq)
            # The first of all always goes: alone it fits, whatever it becomes.
            if (free < 0 and self.running) or not step.run(seq, reserve=seq.num_tokens):
                break
