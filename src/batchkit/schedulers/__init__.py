"""The policies: one per file, each with its paper."""

from .chunked import ChunkedPrefillScheduler
from .dynamic import DynamicScheduler
from .fair import FairScheduler
from .feedback import FeedbackScheduler
from .least_slack import LeastSlackScheduler
from .optimistic import OptimisticScheduler
from .orca import OrcaScheduler
from .paged import PagedScheduler
from .priority import PriorityScheduler
from .shortest_first import ShortestFirstScheduler
from .shortest_remaining import ShortestRemainingScheduler
from .skip_ahead import SkipAheadScheduler
from .static import StaticScheduler
from .waiting_served import WaitingServedScheduler

__all__ = [
    "ChunkedPrefillScheduler",
    "DynamicScheduler",
    "FairScheduler",
    "FeedbackScheduler",
    "LeastSlackScheduler",
    "OptimisticScheduler",
    "OrcaScheduler",
    "PagedScheduler",
    "PriorityScheduler",
    "ShortestFirstScheduler",
    "ShortestRemainingScheduler",
    "SkipAheadScheduler",
    "StaticScheduler",
    "WaitingServedScheduler",
]
