"""The policies: one per file, each with its paper."""

from .chunked import ChunkedPrefillScheduler
from .dynamic import DynamicScheduler
from .orca import OrcaScheduler
from .paged import PagedScheduler
from .static import StaticScheduler
from .waiting_served import WaitingServedScheduler

__all__ = [
    "ChunkedPrefillScheduler",
    "DynamicScheduler",
    "OrcaScheduler",
    "PagedScheduler",
    "StaticScheduler",
    "WaitingServedScheduler",
]
