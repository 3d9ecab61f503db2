"""What competes in an experiment: a scheduler with its arguments, and what its implementation costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..allocators import BlockAllocator, PagedAllocator
from ..preemption import Preemption
from ..scheduler import Scheduler
from ..schedulers import (
    ChunkedPrefillScheduler,
    DynamicScheduler,
    OrcaScheduler,
    PagedScheduler,
    StaticScheduler,
    WaitingServedScheduler,
)

__all__ = ["POLICIES", "Policy", "System", "one_per_class"]


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """What an implementation adds to the arithmetic of its policy. Only simulations read it.

    Attributes:
        overhead_s: what each step costs beyond the roofline: Python, kernel launches, the network.
        batch_overhead_s: what a batch costs beyond, such as a sleep between two of them.
        padded: it computes rows padded to the longest of the step.
    """

    overhead_s: float = 0.002
    batch_overhead_s: float = 0.0
    padded: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """One contender.

    Attributes:
        name: in tables; no two of a comparison have the same.
        scheduler: the class.
        arguments: of the class, beyond those below.
        allocator: its class. A comparison of policies should give all of them the same.
        static_seats: as many seats as sequences of the greatest length fit, as somebody chooses who must set the batch
            beforehand; otherwise memory alone bounds it.
        pad_to_longest: ``pad_to`` is the longest output of the whole load, as in the 2023 experiment.
        max_num_seqs, max_tokens_per_step: see `Scheduler`. Default: its own.
        kv_tokens: a KV budget of its own, in tokens. Default: that of the target.
        system: see `System`. Default: that of the target.
    """

    name: str
    scheduler: type[Scheduler]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    allocator: type[BlockAllocator] = PagedAllocator
    static_seats: bool = False
    pad_to_longest: bool = False
    max_num_seqs: int | None = None
    max_tokens_per_step: int | None = None
    kv_tokens: int | None = None
    system: System | None = None

    def make(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        longest_sequence: int,
        longest_output: int,
        preemption: Preemption | None = None,
        **caching: bool,
    ) -> Scheduler:
        """The scheduler, over an allocator of its own.

        Args:
            num_blocks: of the KV memory.
            block_size: tokens in each.
            max_model_len: see `Scheduler`.
            longest_sequence: KV slots of the load's longest sequence, by what it declares.
            longest_output: tokens, by what really happens.
            preemption: see `Scheduler`.
            caching: further arguments of the allocator.

        Raises:
            ValueError: the longest sequence does not fit.
        """
        blocks_each = -(-longest_sequence // block_size)
        if blocks_each > num_blocks:
            raise ValueError(
                f"{self.name}: the longest sequence declares {longest_sequence} KV slots, {blocks_each} blocks of "
                f"{block_size}; the KV budget is {num_blocks} blocks"
            )
        seats, budget = self.max_num_seqs, self.max_tokens_per_step
        if seats is None and self.static_seats:
            seats = num_blocks // blocks_each
        if seats is not None and budget is None:
            budget = max(seats, self.scheduler.default_max_tokens_per_step)
        arguments = dict(self.arguments)
        if self.pad_to_longest:
            arguments["pad_to"] = longest_output
        return self.scheduler(
            self.allocator(num_blocks, block_size, **caching),
            max_model_len=max_model_len,
            max_num_seqs=seats,
            max_tokens_per_step=budget,
            preemption=preemption,
            **arguments,
        )


def _static(name: str, scheduler: type[Scheduler] = StaticScheduler, **more: Any) -> Policy:
    return Policy(name=name, scheduler=scheduler, static_seats=True, **more)


POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        _static("static-global", pad_to_longest=True),
        _static("static-batch"),
        _static("static-drop", arguments={"drop_finished": True}),
        _static("dynamic", DynamicScheduler),
        Policy(name="orca-model_len", scheduler=OrcaScheduler, arguments={"reserve": "model_len"}),
        Policy(name="orca-pow2", scheduler=OrcaScheduler, arguments={"reserve": "pow2"}),
        Policy(name="orca-max_tokens", scheduler=OrcaScheduler),
        Policy(name="waiting-served", scheduler=WaitingServedScheduler),
        Policy(name="paged", scheduler=PagedScheduler),
        Policy(name="chunked", scheduler=ChunkedPrefillScheduler),
    )
}
"""The contenders of the throughput experiment, by name; see docs/experiment.md."""


def one_per_class(name: str, scheduler: type[Scheduler], arguments: Mapping[str, Any]) -> Policy:
    """A policy of the user's, or a built-in one with arguments: static ones get seats as in `POLICIES`."""
    return Policy(
        name=name, scheduler=scheduler, arguments=arguments, static_seats=issubclass(scheduler, StaticScheduler)
    )
