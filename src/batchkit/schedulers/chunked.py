"""Chunked prefill."""

from __future__ import annotations

from typing import ClassVar

from typing_extensions import override

from ..scheduler import Scheduler, Step

__all__ = ["ChunkedPrefillScheduler"]


class ChunkedPrefillScheduler(Scheduler):
    """Every step decodes everybody, and fills what is left of its token budget with pieces of prompts.

    Sarathi-Serve (OSDI'24), section 4.2, "stall-free batching"; the default of vLLM V1. No prompt, however long,
    holds up the sequences that are decoding. A sequence joins when its whole prompt has blocks; when they run out,
    the newest is preempted.
    """

    chunked: ClassVar[bool] = True
    default_max_tokens_per_step: ClassVar[int] = 512

    @override
    def schedule(self, step: Step) -> None:
        self._go_on(step)
        self._join(step)

    def _go_on(self, step: Step) -> None:
        """Those that run: decodes first."""
        prefilling = []
        for seq in self.running:
            if seq.num_uncomputed > 1:
                prefilling.append(seq)
            else:
                step.run(seq, victims=self.victims(seq))
        for seq in prefilling:
            step.run(seq, victims=self.victims(seq))

    def _join(self, step: Step) -> None:
        """Those that wait, until one is refused."""
        for seq in self.order(step.now):
            if not step.run(seq, reserve=seq.num_tokens):
                break
