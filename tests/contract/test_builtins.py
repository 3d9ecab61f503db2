"""Every part that ships passes the checks that are offered for parts of one's own."""

import pytest

from batchkit import (
    ChunkedPrefillScheduler,
    ContiguousAllocator,
    DynamicScheduler,
    KVGeometry,
    OrcaScheduler,
    PagedAllocator,
    PagedScheduler,
    Scheduler,
    SimulatedRunner,
    StaticScheduler,
    TrueLengths,
    WaitingServedScheduler,
)
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


@pytest.mark.parametrize("make", POLICIES, ids=lambda make: make.__name__)
def test_policy(make):
    check_scheduler(make, num_workloads=4, max_wait_steps=100)


@pytest.mark.parametrize("make", [PagedAllocator, ContiguousAllocator])
def test_allocator(make):
    check_allocator(make)


def test_simulated_runner():
    geometry = KVGeometry(num_blocks=32, block_size=4, host_blocks=16, max_model_len=100, vocab_size=50)
    check_runner(lambda: SimulatedRunner(geometry))
    check_runner(lambda: TrueLengths(SimulatedRunner(geometry)))


class ShortestFirst(Scheduler):
    """The policy in the documentation: it starves long requests, and is sound."""

    chunked = True

    def schedule(self, step):
        order = sorted(self.running, key=lambda seq: seq.max_kv)
        for seq in order:
            step.run(seq, victims=reversed(order))
        for seq in sorted(self.waiting, key=lambda seq: seq.max_kv):
            if not step.run(seq, reserve=seq.num_tokens):
                break


def test_a_policy_that_may_starve_passes_without_a_bound():
    check_scheduler(ShortestFirst, num_workloads=10)


class NewestVictimsOfAll(ChunkedPrefillScheduler):
    """An ablation in three lines."""

    def victims(self, seq):
        return reversed(self.running)


def test_an_ablation_by_victims():
    check_scheduler(NewestVictimsOfAll, num_workloads=10)
