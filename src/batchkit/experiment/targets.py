"""Where an experiment runs: on a simulated device, or on a model that is here."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import override

from ..allocators import PagedAllocator
from ..clocks import Clock, MonotonicClock, VirtualClock
from ..costs import MeasuredCost, RooflineCost
from ..engine import Engine
from ..metrics import StepRecorder
from ..params import SamplingParams
from ..preemption import Swap
from ..runner import ModelRunner
from ..schedulers import StaticScheduler
from ..simulate import SimulatedRunner, TrueLengths
from ..types import KVGeometry, StepReport
from ..workload import Session, WorkloadRecord
from .loads import turns
from .policies import Policy

__all__ = ["Load", "ModelTarget", "SimulatedTarget", "Stage", "Target", "longest_output", "longest_sequence"]

Load = Sequence["WorkloadRecord | Session"]


@dataclass(frozen=True, slots=True)
class Stage:
    """An engine that is ready to run, and what adds up its steps."""

    engine: Engine
    recorder: StepRecorder


class Target(ABC):
    """A device, simulated or real, with a KV budget. `open` gives a `Stage`, and closes its engine afterwards."""

    kv_tokens: int
    block_size: int
    prefix_caching: bool

    @property
    @abstractmethod
    def is_simulated(self) -> bool:
        """Whether its seconds are those of a cost model."""

    @abstractmethod
    def make_runner(self, policy: Policy, num_blocks: int) -> tuple[ModelRunner, Clock]:
        """What computes for a policy, with so many KV blocks, and the clock of its seconds."""

    @contextmanager
    def open(
        self,
        policy: Policy,
        load: Load,
        *,
        on_step: Callable[[StepReport], None] | None = None,
        trace: str | os.PathLike[str] | None = None,
    ) -> Iterator[Stage]:
        """An engine of its own for a policy that is to play a load; `on_step` and `trace` as in `Engine`.

        Raises:
            ValueError: the budget is not one block, or the load's longest sequence does not fit.
        """
        tokens = self.kv_tokens if policy.kv_tokens is None else policy.kv_tokens
        if tokens < self.block_size:
            raise ValueError(f"{policy.name}: a KV budget of {tokens} tokens is not one block of {self.block_size}")
        runner, clock = self.make_runner(policy, tokens // self.block_size)
        geometry = runner.geometry
        try:
            host = PagedAllocator(geometry.host_blocks, geometry.block_size) if geometry.host_blocks else None
            scheduler = policy.make(
                num_blocks=geometry.num_blocks,
                block_size=geometry.block_size,
                max_model_len=geometry.max_model_len,
                longest_sequence=longest_sequence(load),
                longest_output=longest_output(load),
                preemption=Swap(host) if host else None,
                **({"prefix_caching": True} if self.prefix_caching else {}),
            )
            recorder = StepRecorder(scheduler, clock)
            hook = recorder if on_step is None else _both(recorder, on_step)
            engine = Engine(TrueLengths(runner), scheduler, clock=clock, on_step=hook, trace=trace)
        except BaseException:
            runner.close()
            raise
        with engine:
            yield Stage(engine, recorder)


def _both(first: Callable[[StepReport], None], second: Callable[[StepReport], None]) -> Callable[[StepReport], None]:
    def hook(report: StepReport) -> None:
        first(report)
        second(report)

    return hook


def longest_output(load: Load) -> int:
    """Tokens that the longest output really has."""
    return max(record.output_tokens or record.max_tokens for record, _ in turns(load))


def longest_sequence(load: Load) -> int:
    """KV slots that the longest sequence may need, by what it declares."""
    return max(prompt + max(record.max_tokens, 1) - 1 for record, prompt in turns(load))


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedTarget(Target):
    """A device by its cost model. The engine, the schedulers and the allocators are the real ones.

    Attributes:
        cost: seconds of a step; a policy's `System` replaces a roofline's overheads.
        kv_tokens: the KV budget, rounded down to blocks.
        block_size: tokens per block.
        max_model_len: the most tokens of prompt and output together.
        vocab_size: of the made-up tokens.
        prefix_caching: see `PagedAllocator`.
        host_tokens: host memory for preempted sequences, in tokens; 0: they are computed again.
        check_kv: see `SimulatedRunner`; takes a few times as long.
    """

    cost: RooflineCost | MeasuredCost
    kv_tokens: int
    block_size: int = 16
    max_model_len: int = 2048
    vocab_size: int = 32_000
    prefix_caching: bool = False
    host_tokens: int = 0
    check_kv: bool = False

    @property
    @override
    def is_simulated(self) -> bool:
        return True

    @override
    def make_runner(self, policy: Policy, num_blocks: int) -> tuple[ModelRunner, Clock]:
        clock = VirtualClock()
        geometry = KVGeometry(
            num_blocks=num_blocks,
            block_size=self.block_size,
            host_blocks=self.host_tokens // self.block_size,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
        )
        cost = self.cost
        if policy.system is not None:
            if not isinstance(cost, RooflineCost):
                raise ValueError(f"{policy.name} has a System of its own, which a measured cost cannot take on")
            cost = replace(
                cost,
                overhead_s=policy.system.overhead_s,
                batch_overhead_s=policy.system.batch_overhead_s,
                padded=policy.system.padded,
            )
        return SimulatedRunner(geometry, clock=clock, cost=cost, check_kv=self.check_kv), clock


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelTarget(Target):
    """A transformers model that is loaded. Its seconds are real ones.

    Attributes:
        model: a causal language model of transformers.
        kv_tokens: the KV budget, rounded down to blocks.
        block_size, max_model_len, prefix_caching, swap_memory, attention: see `Engine.from_model`.
    """

    model: Any
    kv_tokens: int
    block_size: int = 16
    max_model_len: int | None = None
    prefix_caching: bool = False
    swap_memory: int | str | None = None
    attention: Any = None

    @property
    @override
    def is_simulated(self) -> bool:
        return False

    @override
    def make_runner(self, policy: Policy, num_blocks: int) -> tuple[ModelRunner, Clock]:
        from ..hf.runner import TransformersRunner

        # The first steps of a process compile, allocate and fill caches; they are nobody's cost. In an engine of their
        # own, since the trace and the figures are to begin with the load.
        with Engine.from_model(
            self.model,
            scheduler=StaticScheduler,
            num_kv_blocks=max(4, -(-64 // self.block_size)),
            block_size=self.block_size,
            attention=self.attention,
        ) as warm:
            warm.generate([[1, 2, 3]] * 4, SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False))
        runner = TransformersRunner(
            self.model,
            num_kv_blocks=num_blocks,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            swap_memory=self.swap_memory,
            attention=self.attention,
        )
        return runner, MonotonicClock()
