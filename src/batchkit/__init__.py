"""batchkit: continuous batching of LLM inference, with pluggable scheduling policies.

`Engine.add_request` and `Engine.step` are the whole loop. Three parts can be swapped: a `Scheduler` decides, a
`BlockAllocator` owns the KV blocks, a `ModelRunner` computes. Importing this module imports neither torch nor
transformers; `Engine.from_pretrained` does.
"""

from .allocators import BlockAllocator, ContiguousAllocator, PagedAllocator
from .clocks import Clock, MonotonicClock, VirtualClock
from .engine import Engine
from .errors import (
    BatchkitError,
    ConformanceError,
    DuplicateRequest,
    EngineBusy,
    EngineClosed,
    EngineFailed,
    InvariantError,
    KVLost,
    OutOfKVMemory,
    PolicyError,
    PromptsFailed,
    RequestError,
    RequestTooLong,
    RunnerError,
    RunnerOutOfMemory,
    SchedulerStalled,
    UnsupportedModel,
)
from .preemption import Preemption, Recompute, Swap
from .runner import ModelRunner
from .scheduler import Scheduler, SchedulerOptions, Step
from .schedulers import (
    ChunkedPrefillScheduler,
    DynamicScheduler,
    OrcaScheduler,
    PagedScheduler,
    StaticScheduler,
    WaitingServedScheduler,
)
from .sequence import Sequence, Status
from .simulate import RooflineCost, SimulatedRunner, TrueLengths, WorkloadRecord, simulate
from .text import Tokenizer
from .types import (
    BlockCopy,
    Blocked,
    Completion,
    EngineStats,
    Eviction,
    FinishReason,
    KVGeometry,
    Refusal,
    Request,
    RequestOutput,
    RequestTimings,
    RowResult,
    SamplerOutput,
    SamplingParams,
    ScheduledSequence,
    SchedulerOutput,
    StepReport,
)

__version__ = "0.1.0"

__all__ = [
    "BatchkitError",
    "BlockAllocator",
    "BlockCopy",
    "Blocked",
    "ChunkedPrefillScheduler",
    "Clock",
    "Completion",
    "ConformanceError",
    "ContiguousAllocator",
    "DuplicateRequest",
    "DynamicScheduler",
    "Engine",
    "EngineBusy",
    "EngineClosed",
    "EngineFailed",
    "EngineStats",
    "Eviction",
    "FinishReason",
    "InvariantError",
    "KVGeometry",
    "KVLost",
    "ModelRunner",
    "MonotonicClock",
    "OrcaScheduler",
    "OutOfKVMemory",
    "PagedAllocator",
    "PagedScheduler",
    "PolicyError",
    "Preemption",
    "PromptsFailed",
    "Recompute",
    "Refusal",
    "Request",
    "RequestError",
    "RequestOutput",
    "RequestTimings",
    "RequestTooLong",
    "RooflineCost",
    "RowResult",
    "RunnerError",
    "RunnerOutOfMemory",
    "SamplerOutput",
    "SamplingParams",
    "ScheduledSequence",
    "Scheduler",
    "SchedulerOptions",
    "SchedulerOutput",
    "SchedulerStalled",
    "Sequence",
    "SimulatedRunner",
    "StaticScheduler",
    "Status",
    "Step",
    "StepReport",
    "Swap",
    "Tokenizer",
    "TrueLengths",
    "UnsupportedModel",
    "VirtualClock",
    "WaitingServedScheduler",
    "WorkloadRecord",
    "simulate",
]
