"""Just-in-time KV blocks."""

from __future__ import annotations

from typing_extensions import Unpack, override

from ..allocators import BlockAllocator
from ..scheduler import Scheduler, SchedulerOptions, Step
from ._arguments import check_count

__all__ = ["PagedScheduler"]


class PagedScheduler(Scheduler):
    """Takes KV blocks as tokens come, and preempts the newest sequence when they run out.

    PagedAttention (SOSP'23), section 4, and the first vLLM: prompts first, in steps of their own; when none can join,
    everybody decodes.

    Args:
        watermark_blocks: while others run, admission leaves so many blocks free for their next tokens, so that a
            newcomer is not preempted at once. Default: a hundredth of the pool.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        watermark_blocks: int | None = None,
        **options: Unpack[SchedulerOptions],
    ) -> None:
        super().__init__(allocator, **options)
        if watermark_blocks is None:
            watermark_blocks = allocator.num_blocks // 100
        check_count("watermark_blocks", watermark_blocks, 0)
        self.watermark_blocks = watermark_blocks

    @override
    def schedule(self, step: Step) -> None:
        for seq in self.running:
            if seq.num_uncomputed > 1:
                step.run(seq, victims=self.victims(seq))
        for seq in self.order(step.now):
            left = self.allocator.num_free_blocks - self.allocator.missing(seq.id, seq.num_tokens)
            if self.running and left < self.watermark_blocks:
                break
            if not step.run(seq, reserve=seq.num_tokens):
                break
        if not step:
            for seq in self.running:
                step.run(seq, victims=self.victims(seq))
