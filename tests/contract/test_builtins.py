"""Every part that ships passes the checks that are offered for parts of one's own."""

import math

import pytest

from batchkit import (
    ChunkedPrefillScheduler,
    ContiguousAllocator,
    DynamicScheduler,
    FairScheduler,
    FeedbackScheduler,
    KVGeometry,
    LeastSlackScheduler,
    OptimisticScheduler,
    OrcaScheduler,
    PagedAllocator,
    PagedScheduler,
    PriorityScheduler,
    ShortestFirstScheduler,
    ShortestRemainingScheduler,
    SimulatedRunner,
    SkipAheadScheduler,
    StaticScheduler,
    TrueLengths,
    WaitingServedScheduler,
)
from batchkit.errors import ConformanceError
from batchkit.testing import check_allocator, check_runner, check_scheduler


def named(name, make):
    make.__name__ = name
    return make


POLICIES = [
    StaticScheduler,
    named("static, finished dropped", lambda a, **options: StaticScheduler(a, drop_finished=True, **options)),
    named("static, padded", lambda a, **options: StaticScheduler(a, pad_to=20, **options)),
    named("dynamic", lambda a, **options: DynamicScheduler(a, max_wait_s=0.01, **options)),
    OrcaScheduler,
    named("orca pow2", lambda a, **options: OrcaScheduler(a, reserve="pow2", **options)),
    named("orca model_len", lambda a, **options: OrcaScheduler(a, reserve="model_len", **options)),
    WaitingServedScheduler,
    PagedScheduler,
    ChunkedPrefillScheduler,
]


# Few workloads where minutes count, more of them elsewhere.
EFFORT = pytest.mark.parametrize("effort", [2, pytest.param(6, marks=pytest.mark.slow)])


@EFFORT
@pytest.mark.parametrize("make", POLICIES, ids=lambda make: make.__name__)
def test_policy(make, effort):
    check_scheduler(make, num_workloads=effort, seed=effort, max_wait_steps=100)


def with_arguments(policy, **arguments):
    shown = ", ".join(f"{name}={value}" for name, value in arguments.items())
    return named(f"{policy.__name__}({shown})", lambda a, **options: policy(a, **arguments, **options))


LIBRARY = [
    ShortestFirstScheduler,
    ShortestRemainingScheduler,
    with_arguments(ShortestRemainingScheduler, preemptible_part=1),
    FairScheduler,
    with_arguments(FairScheduler, input_weight=0),
    # A second is about thirty steps, and requests have sixteen tokens at most.
    with_arguments(FeedbackScheduler, quantum_tokens=2, promote_after_s=1),
    with_arguments(LeastSlackScheduler, undated_due_s=2),
    with_arguments(LeastSlackScheduler, undated_due_s=2, preempt_below_s=math.inf),
    with_arguments(PriorityScheduler, ageing_s_per_level=0.5),
    SkipAheadScheduler,
    with_arguments(SkipAheadScheduler, max_skips=1, window=2),
    OptimisticScheduler,
    with_arguments(OptimisticScheduler, start=0, floor=0, raise_on_preemption=1, decay_per_step=0.5),
]


@EFFORT
@pytest.mark.parametrize("make", LIBRARY, ids=lambda make: make.__name__)
def test_policy_of_the_library(make, effort):
    check_scheduler(make, num_workloads=effort, seed=effort, max_wait_steps=100, step_s=0.03)


# What ageing is for: the same policies without it.
STARVING = [
    with_arguments(ShortestFirstScheduler, ageing_tokens_per_s=0),
    with_arguments(ShortestRemainingScheduler, ageing_tokens_per_s=0),
    with_arguments(FeedbackScheduler, quantum_tokens=2, promote_after_s=math.inf),
    with_arguments(LeastSlackScheduler, undated_due_s=1e6),
]


@pytest.mark.parametrize("make", STARVING, ids=lambda make: make.__name__)
def test_without_ageing_they_starve_and_the_bound_shows_it(make):
    check_scheduler(make, num_workloads=1, step_s=0.03)
    with pytest.raises(ConformanceError, match="goes without a row for more than 100 steps"):
        check_scheduler(make, num_workloads=0, max_wait_steps=100, step_s=0.03)


def with_prefix_caching(num_blocks, block_size):
    return PagedAllocator(num_blocks, block_size, prefix_caching=True)


@pytest.mark.parametrize("make", [PagedAllocator, with_prefix_caching, ContiguousAllocator])
def test_allocator(make):
    check_allocator(make)


def test_simulated_runner():
    geometry = KVGeometry(num_blocks=32, block_size=4, host_blocks=16, max_model_len=100, vocab_size=50)
    check_runner(lambda: SimulatedRunner(geometry))
    check_runner(lambda: TrueLengths(SimulatedRunner(geometry)))


class NewestVictimsOfAll(ChunkedPrefillScheduler):
    """An ablation in three lines."""

    def victims(self, seq):
        return reversed(self.running)


def test_an_ablation_by_victims():
    check_scheduler(NewestVictimsOfAll, num_workloads=5)
