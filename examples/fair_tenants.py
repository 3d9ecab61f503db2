"""Two tenants share an engine, and one of them floods it.

    python examples/fair_tenants.py [--seed 0]

"calm" sends a short request now and then; "flood" sends fifty long ones in the first second. First come first served
makes calm wait behind all of them. `FairScheduler` admits whoever has been served least. It reads the tenant from
``metadata={"tenant": ...}`` of `Engine.add_request`. Simulated: no model runs.
"""

from __future__ import annotations

import argparse
import random
from statistics import mean

from batchkit import (
    ChunkedPrefillScheduler,
    Engine,
    FairScheduler,
    KVGeometry,
    PagedAllocator,
    RequestOutput,
    RooflineCost,
    Scheduler,
    SimulatedRunner,
    VirtualClock,
    WorkloadRecord,
    simulate,
)

GEOMETRY = KVGeometry(num_blocks=200, block_size=16, max_model_len=1024, vocab_size=50_272)
COST = RooflineCost(num_params=12.85e9, kv_bytes_per_token=819_200, bandwidth=1.555e12, flops=312e12)


def workload(seed: int) -> list[WorkloadRecord]:
    rng = random.Random(seed)
    flood = [(rng.random(), rng.randint(100, 300), rng.randint(100, 300), "flood") for _ in range(50)]
    calm = [(0.5 * number, rng.randint(20, 60), rng.randint(20, 60), "calm") for number in range(1, 41)]
    return [
        WorkloadRecord(prompt=prompt, max_tokens=length, arrival=arrival, metadata={"tenant": tenant})
        for arrival, prompt, length, tenant in flood + calm
    ]


def serve(policy: type[Scheduler], records: list[WorkloadRecord]) -> list[RequestOutput]:
    clock = VirtualClock()
    runner = SimulatedRunner(GEOMETRY, clock=clock, cost=COST, check_kv=False)
    pool = PagedAllocator(GEOMETRY.num_blocks, GEOMETRY.block_size)
    return simulate(Engine(runner, policy(pool), clock=clock), records)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    records = workload(parser.parse_args().seed)
    print("SIMULATED: no model ran; seconds are those of RooflineCost, for OPT-13B on an A100-40.\n")
    print(f"{'':26}{'tenant':8}{'requests':>9}{'first token':>13}{'latency':>9}{'longest':>9}{'all done':>10}")
    for policy in (ChunkedPrefillScheduler, FairScheduler):
        outputs = serve(policy, records)
        for tenant in ("calm", "flood"):
            times = [
                out.timings for out, record in zip(outputs, records, strict=True) if record.metadata["tenant"] == tenant
            ]
            first = mean((t.first_token or 0.0) - t.arrival for t in times)
            latency = [(t.finished or 0.0) - t.arrival for t in times]
            done = max(t.finished or 0.0 for t in times)
            print(
                f"{policy.__name__:26}{tenant:8}{len(times):>9}{first:>11.2f} s{mean(latency):>7.2f} s"
                f"{max(latency):>7.2f} s{done:>8.2f} s"
            )


if __name__ == "__main__":
    main()
