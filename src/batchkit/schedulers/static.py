"""Static batching."""

from __future__ import annotations

from typing import ClassVar

from typing_extensions import Unpack, override

from ..allocators import BlockAllocator
from ..scheduler import Scheduler, SchedulerOptions, Step
from ..sequence import Sequence, Status
from ..types import Refusal
from ._arguments import check_count, check_switch

__all__ = ["StaticScheduler"]


class StaticScheduler(Scheduler):
    """Picks a batch, runs it to its end, then picks the next: the request-level batching that Orca replaced.

    Orca (OSDI'22), section 2; FasterTransformer and transformers' ``generate`` work like this. A batch is as many
    waiting requests as there are seats and memory for their longest outputs; it prefills, over as many steps as the
    token budget needs, and then decodes. A finished sequence keeps its seat, its KV and its compute until the last
    one ends, and only then is anything delivered. Prompts are not padded, which is kinder than those systems.

    Args:
        drop_finished: let finished sequences leave at once; their seats stay empty until the batch ends.
        pad_to: a batch runs until its rows have been stepped for this many output tokens, even if all have finished
            before: the padding to the longest output of the whole workload in the 2023 throughput experiment.
    """

    chunked: ClassVar[bool] = True
    reserves_all: ClassVar[bool] = True
    streams: ClassVar[bool] = False

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        drop_finished: bool = False,
        pad_to: int | None = None,
        **options: Unpack[SchedulerOptions],
    ) -> None:
        super().__init__(allocator, **options)
        check_switch("drop_finished", drop_finished)
        if pad_to is not None:
            check_count("pad_to", pad_to, 1)
        if pad_to is not None and drop_finished:
            raise ValueError(f"pad_to={pad_to} keeps finished sequences, drop_finished=True lets them go")
        self.drop_finished = drop_finished
        self.pad_to = pad_to
        self._open = True  # whether sequences may still join the batch
        self._num_decodes = 0

    @override
    def may_leave(self, seq: Sequence) -> bool:
        if self.drop_finished:
            return True
        if self.pad_to is not None and self._num_decodes < self.pad_to - 1:  # the first token came with the prefill
            return False
        return not self._open and self.num_held == len(self.running)

    @override
    def schedule(self, step: Step) -> None:
        if not self.running:
            self._open, self._num_decodes = True, 0
        decoding: list[Sequence] = []
        held: list[Sequence] = []
        is_held = Status.HELD
        for seq in self.running:
            if seq.status is is_held:
                held.append(seq)
            elif seq.num_uncomputed > 1:
                step.run(seq)
            else:
                decoding.append(seq)
        if self._open:
            self._open = False
            for seq in self.order(step.now):
                if not step.run(seq, reserve=seq.max_kv):
                    # Only the budget of this step stopped the filling; seats and memory close the batch.
                    self._open = step.refused is Refusal.TOKENS
                    break
        if not step:
            # Held ones last: with a budget cut for lack of memory, their idle rows could leave no room for any other.
            for seq in (*decoding, *held):
                step.run(seq)
            self._num_decodes += 1
