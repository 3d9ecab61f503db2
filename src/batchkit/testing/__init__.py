"""Conformance checks for parts that users write: schedulers, allocators, runners.

Each check drives a part with random workloads, asserts every rule of its interface after every step, and raises
`ConformanceError` naming the rule and the step. They need no torch and no test framework::

    from batchkit.testing import check_scheduler

    def test_my_policy():
        check_scheduler(MyPolicy)
"""

from .allocator import check_allocator
from .runner import check_runner
from .scheduler import check_scheduler

__all__ = ["check_allocator", "check_runner", "check_scheduler"]
