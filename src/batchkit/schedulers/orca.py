"""Iteration-level scheduling with reservation."""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

from typing_extensions import Unpack, override

from ..allocators import BlockAllocator
from ..scheduler import Scheduler, SchedulerOptions, Step
from ..sequence import Sequence

__all__ = ["OrcaScheduler", "Reserve", "reserved_slots"]

Reserve = Literal["max_tokens", "pow2", "model_len"]


def reserved_slots(reserve: Reserve, num_prompt: int, max_tokens: int, max_model_len: int | None) -> int:
    """KV slots that a reservation takes; never less than the request may need.

    Args:
        reserve: see `OrcaScheduler`.
        num_prompt: tokens of the prompt.
        max_tokens: declared for the output.
        max_model_len: of the model; needed for "model_len".
    """
    declared = max(max_tokens, 1)
    needed = num_prompt + declared - 1
    if reserve == "max_tokens":
        return needed
    if reserve == "model_len":
        assert max_model_len is not None
        return max(needed, max_model_len)
    slots = num_prompt + (1 << (declared - 1).bit_length()) - 1
    # Slots beyond the model's length could never be used.
    return max(needed, slots if max_model_len is None else min(slots, max_model_len))


class OrcaScheduler(Scheduler):
    """Requests join and leave at every iteration; each reserves memory for all it may become when it joins.

    Orca (OSDI'22), section 4.2, Algorithm 1: first come first served, and selection stops at the first request that
    does not fit. Whole prompts run together with decoding rows. The three reservations are those of the
    PagedAttention paper (SOSP'23, section 6.1).

    Args:
        reserve: how much output a request reserves memory for. "max_tokens": what it declared ("Oracle" in the paper,
            if it declared the truth); "pow2": the next power of two, up to `max_model_len`; "model_len": as much as
            the model can take ("Max"), which needs `max_model_len`. No reservation exceeds the pool.
    """

    reserves_all: ClassVar[bool] = True

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        reserve: Reserve = "max_tokens",
        **options: Unpack[SchedulerOptions],
    ) -> None:
        super().__init__(allocator, **options)
        if reserve not in get_args(Reserve):
            raise ValueError(f"reserve must be one of {', '.join(get_args(Reserve))}, got {reserve!r}")
        if reserve == "model_len" and self.max_model_len is None:
            raise ValueError('reserve="model_len" needs max_model_len')
        self.reserve: Reserve = reserve

    def reservation(self, seq: Sequence) -> int:
        """KV slots that `seq` reserves when it joins; never less than it may need."""
        return reserved_slots(self.reserve, seq.num_prompt, seq.request.max_tokens, self.max_model_len)

    @override
    def schedule(self, step: Step) -> None:
        for seq in self.running:
            step.run(seq)
        for seq in self.order(step.now):
            if not step.run(seq, reserve=self.reservation(seq)):
                break
