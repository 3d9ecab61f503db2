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


class InteractiveFirst(Scheduler):
    """Lets interactive requests (``priority`` above 0) pass the others, which fill what memory and seats they leave.

    Everybody has a place in one line: an interactive request at its arrival, any other `handicap_s` seconds later. The
    places never change, so that nobody starves, and no two can preempt each other in turn. Sorting all that wait costs
    n log n a step: meant for thousands of them, not for millions.
    """

    chunked = True  # a row may be cut to what is left of the step's token budget

    def __init__(self, allocator, *, handicap_s=10.0, **options):
        super().__init__(allocator, **options)
        self.handicap_s = handicap_s

    def place(self, seq):
        return (seq.request.arrival + (0 if seq.request.priority > 0 else self.handicap_s), seq.id)

    def victims(self, seq):
        behind = [other for other in self.running if self.place(other) > self.place(seq)]
        return sorted(behind, key=self.place, reverse=True)

    def schedule(self, step):
        admitting = True
        for seq in sorted([*self.running, *self.waiting], key=self.place):
            if seq in self.running:
                step.run(seq, victims=self.victims(seq))
            elif admitting:
                admitting = step.run(seq, reserve=seq.num_tokens, victims=self.victims(seq))


# An ablation: the same policy, but whoever has the least to compute again gives way, not the last in the line.
class CheapestVictim(InteractiveFirst):
    def victims(self, seq):
        return sorted(super().victims(seq), key=lambda other: other.num_computed)


def workload(count: int, seed: int) -> list[WorkloadRecord]:
    """Poisson arrivals, six a second: every fourth is interactive and short."""
    rng = random.Random(seed)
    records, now = [], 0.0
    for number in range(count):
        now += rng.expovariate(6)
        interactive = number % 4 == 0
        records.append(
            WorkloadRecord(
                prompt=rng.randint(16, 256),
                max_tokens=400,
                output_tokens=1 + min(399, int(rng.expovariate(1 / (40 if interactive else 120)))),
                arrival=now,
                priority=int(interactive),
            )
        )
    return records


def main() -> None:
    for policy in (InteractiveFirst, CheapestVictim):
        # A step takes 30 ms there, so that the handicap is 33 steps; the bound shows that nobody starves.
        check_scheduler(
            lambda pool, policy=policy, **options: policy(pool, handicap_s=1.0, **options),
            num_workloads=4,
            max_wait_steps=100,
            step_s=0.03,
        )
        print(f"{policy.__name__} keeps the rules and starves nobody")

    geometry = KVGeometry(num_blocks=200, block_size=16, max_model_len=1024, vocab_size=50_272, eos_token_ids=(2,))
    cost = RooflineCost(num_params=12.85e9, kv_bytes_per_token=819_200, bandwidth=1.555e12, flops=312e12)
    records = workload(120, seed=1)
    print("\nSIMULATED, by RooflineCost: mean latency, interactive      others   preempted   tokens recomputed")
    for policy in (ChunkedPrefillScheduler, InteractiveFirst, CheapestVictim):
        clock = VirtualClock()
        runner = TrueLengths(SimulatedRunner(geometry, clock=clock, cost=cost, check_kv=False))
        engine = Engine(runner, policy(PagedAllocator(geometry.num_blocks, geometry.block_size)), clock=clock)
        outputs = simulate(engine, records)
        mean = [
            statistics.mean(
                (out.timings.finished or 0.0) - record.arrival
                for out, record in zip(outputs, records, strict=True)
                if record.priority == priority
            )
            for priority in (1, 0)
        ]
        stats = engine.stats()
        print(
            f"{policy.__name__:28}{mean[0]:>25.2f} s{mean[1]:>10.2f} s{stats.num_preemptions:>12}"
            f"{stats.recomputed_tokens:>20,}"
        )


if __name__ == "__main__":
    main()
