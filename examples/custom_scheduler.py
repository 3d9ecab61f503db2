"""A policy of your own, checked and measured without a model.

python examples/custom_scheduler.py
"""

from __future__ import annotations

import random
import statistics

from batchkit import (
    ChunkedPrefillScheduler,
    Engine,
    KVGeometry,
    PagedAllocator,
    RooflineCost,
    Scheduler,
    SimulatedRunner,
    TrueLengths,
    VirtualClock,
    WorkloadRecord,
    simulate,
)
from batchkit.testing import check_scheduler


class ShortestFirst(Scheduler):
    """Admits who is expected to be done first, by ``length_hint``, and lets waiting make up for length.

    Sorting all that wait costs n log n a step: meant for thousands of them, not for millions.

    Args:
        tokens_per_s: a second of waiting outweighs so many tokens, so that newcomers cannot starve a long request.
    """

    chunked = True

    def __init__(self, allocator, *, tokens_per_s=20.0, **options):
        super().__init__(allocator, **options)
        self.tokens_per_s = tokens_per_s

    def order(self, now):
        def rank(seq):
            expected = seq.request.length_hint or seq.request.max_tokens
            return expected + self.tokens_per_s * seq.request.arrival

        return sorted(self.waiting, key=rank)

    def schedule(self, step):
        for seq in sorted(self.running, key=lambda seq: seq.num_uncomputed > 1):  # decodes first
            step.run(seq, victims=self.victims(seq))
        for seq in self.order(step.now):
            if not step.run(seq, reserve=seq.num_tokens):
                break


# An ablation: the same policy, but whoever has the least to compute again gives way, not the newest.
class CheapestVictim(ShortestFirst):
    def victims(self, seq):
        return sorted(super().victims(seq), key=lambda other: other.num_computed)


def workload(count: int, seed: int) -> list[WorkloadRecord]:
    """Poisson arrivals, 12 a second; exponential outputs of mean 100; hints that are right within a third."""
    rng = random.Random(seed)
    records, now = [], 0.0
    for _ in range(count):
        now += rng.expovariate(12)
        length = 1 + min(399, int(rng.expovariate(1 / 100)))
        records.append(
            WorkloadRecord(
                prompt=rng.randint(16, 256),
                max_tokens=400,
                output_tokens=length,
                predicted=max(1, round(length * rng.uniform(0.67, 1.33))),
                arrival=now,
            )
        )
    return records


def main() -> None:
    for policy in (ShortestFirst, CheapestVictim):
        check_scheduler(policy, num_workloads=8)
        print(f"{policy.__name__} keeps the rules")
    # A step is a thousandth of a second there, so that a token must be worth about as much.
    check_scheduler(
        lambda pool, **options: ShortestFirst(pool, tokens_per_s=1000, **options), num_workloads=1, max_wait_steps=100
    )
    print("ShortestFirst starves nobody")

    geometry = KVGeometry(num_blocks=200, block_size=16, max_model_len=1024, vocab_size=50_272, eos_token_ids=(2,))
    cost = RooflineCost(num_params=12.85e9, kv_bytes_per_token=819_200, bandwidth=1.555e12, flops=312e12)
    print("\nSIMULATED, by RooflineCost:   latency, mean   median      p99   preempted   tokens recomputed")
    for policy in (ChunkedPrefillScheduler, ShortestFirst, CheapestVictim):
        clock = VirtualClock()
        runner = TrueLengths(SimulatedRunner(geometry, clock=clock, cost=cost, check_kv=False))
        engine = Engine(runner, policy(PagedAllocator(geometry.num_blocks, geometry.block_size)), clock=clock)
        done = [output.timings for output in simulate(engine, workload(150, seed=1))]
        latencies = sorted(t.finished - t.arrival for t in done if t.finished is not None)
        stats = engine.stats()
        print(
            f"{policy.__name__:28}{statistics.mean(latencies):>15.2f} s{statistics.median(latencies):>7.2f} s"
            f"{latencies[int(0.99 * len(latencies))]:>7.2f} s{stats.num_preemptions:>12}{stats.recomputed_tokens:>20,}"
        )


if __name__ == "__main__":
    main()
