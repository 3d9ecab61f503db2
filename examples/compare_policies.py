"""All policies, in virtual time: no model, no GPU, a few seconds.

    python examples/compare_policies.py [--requests 32] [--prompt 512] [--cap 512] [--seed 0]

The times are those of a cost model (`RooflineCost`) with the numbers of OPT-13B in fp16 on an A100 with 40 GB, which
leaves memory for about 15,700 tokens of KV.

Throughput: all requests are there from the start. Output lengths are exponential with mean 128, drawn again while they
exceed the cap. Each policy that is about memory is shown twice: told every true length, and told only the cap, which is
what a service knows.

Order: requests of two tenants arrive one by one, more than memory holds at a time. Each policy that is about who goes
first is shown by what it does to latencies.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import replace
from statistics import mean

from batchkit import (
    ChunkedPrefillScheduler,
    DynamicScheduler,
    Engine,
    FairScheduler,
    FeedbackScheduler,
    KVGeometry,
    LeastSlackScheduler,
    OptimisticScheduler,
    OrcaScheduler,
    PagedAllocator,
    PagedScheduler,
    PriorityScheduler,
    RequestOutput,
    RooflineCost,
    Scheduler,
    ShortestFirstScheduler,
    ShortestRemainingScheduler,
    SimulatedRunner,
    SkipAheadScheduler,
    StaticScheduler,
    StepReport,
    TrueLengths,
    VirtualClock,
    WaitingServedScheduler,
    WorkloadRecord,
    simulate,
)

GEOMETRY = KVGeometry(num_blocks=981, block_size=16, max_model_len=2048, vocab_size=50_272, eos_token_ids=(2,))
COST = RooflineCost(num_params=12.85e9, kv_bytes_per_token=819_200, bandwidth=1.555e12, flops=312e12)
OPTIONS = {"max_model_len": GEOMETRY.max_model_len, "max_tokens_per_step": 2048}


def policies(longest: int) -> dict[str, Callable[[PagedAllocator], Scheduler]]:
    return {
        "static, padded to the longest of all": lambda pool: StaticScheduler(pool, pad_to=longest, **OPTIONS),
        "static": lambda pool: StaticScheduler(pool, **OPTIONS),
        "static, finished dropped": lambda pool: StaticScheduler(pool, drop_finished=True, **OPTIONS),
        "dynamic": lambda pool: DynamicScheduler(pool, **OPTIONS),
        "orca, reserves model_len": lambda pool: OrcaScheduler(pool, reserve="model_len", **OPTIONS),
        "orca, reserves pow2": lambda pool: OrcaScheduler(pool, reserve="pow2", **OPTIONS),
        "orca, reserves max_tokens": lambda pool: OrcaScheduler(pool, **OPTIONS),
        "waiting-served": lambda pool: WaitingServedScheduler(pool, **OPTIONS),
        "paged": lambda pool: PagedScheduler(pool, **OPTIONS),
        "chunked": lambda pool: ChunkedPrefillScheduler(pool, **OPTIONS),
        "optimistic": lambda pool: OptimisticScheduler(pool, **OPTIONS),
    }


BY_ORDER: dict[str, type[Scheduler]] = {
    "chunked (first come first served)": ChunkedPrefillScheduler,
    "skip-ahead": SkipAheadScheduler,
    "shortest-first": ShortestFirstScheduler,
    "shortest-remaining": ShortestRemainingScheduler,
    "feedback": FeedbackScheduler,
    "priority": PriorityScheduler,
    "least-slack": LeastSlackScheduler,
    "fair": FairScheduler,
}


def output_lengths(count: int, cap: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    lengths: list[int] = []
    while len(lengths) < count:
        length = round(rng.expovariate(1 / 128))
        if length <= cap:
            lengths.append(max(1, length))
    return lengths


class Load:
    """Sums over the steps of a run."""

    num_running = kv_tokens = 0

    def __call__(self, report: StepReport) -> None:
        self.num_running += report.num_running
        self.kv_tokens += report.kv_tokens


def run(
    make: Callable[[PagedAllocator], Scheduler], records: list[WorkloadRecord], num_blocks: int = GEOMETRY.num_blocks
) -> tuple[Engine, Load, list[RequestOutput]]:
    """The engine after the workload, the load of its steps, and the outputs."""
    load = Load()
    clock = VirtualClock()
    geometry = replace(GEOMETRY, num_blocks=num_blocks)
    runner = TrueLengths(SimulatedRunner(geometry, clock=clock, cost=COST, check_kv=False))
    engine = Engine(runner, make(PagedAllocator(num_blocks, geometry.block_size)), clock=clock, on_step=load)
    outputs = simulate(engine, records)
    return engine, load, outputs


def table(records: list[WorkloadRecord], longest: int) -> None:
    runs = {name: run(make, records) for name, make in policies(longest).items()}
    static = runs["static"][0].clock()
    print(f"  {'':37}{'generated':>10}{'with prompt':>12}{'to':>8}{'running':>9}{'KV':>6}{'':>10}")
    print(
        f"  {'':37}{'tokens/s':>10}{'tokens/s':>12}{'static':>8}{'(mean)':>9}{'full':>6}{'preempted':>10}{'steps':>7}"
    )
    for name, (engine, load, _) in runs.items():
        stats, seconds = engine.stats(), engine.clock()
        tokens = stats.generated_tokens
        running = load.num_running / stats.num_steps
        full = load.kv_tokens / stats.num_steps / (stats.num_blocks * stats.block_size)
        print(
            f"  {name:37}{tokens / seconds:>10.0f}{(tokens + stats.prompt_tokens) / seconds:>12.0f}"
            f"{static / seconds:>7.2f}x{running:>9.1f}{full:>6.0%}{stats.num_preemptions:>10}{stats.num_steps:>7}"
        )


NUM_BLOCKS = 250  # of the second workload: 4,000 slots


def arrivals(count: int, seed: int) -> list[WorkloadRecord]:
    """Two tenants, five requests a second: of three, two are a report and one is a chat."""
    rng = random.Random(seed)
    records, now = [], 0.0
    for number in range(count):
        now += rng.expovariate(5)
        chat = number % 3 == 0
        length = 1 + min(399, round(rng.expovariate(1 / (40 if chat else 160))))
        records.append(
            WorkloadRecord(
                prompt=list(range(3, 3 + (rng.randint(16, 64) if chat else rng.randint(64, 768)))),
                max_tokens=400,
                output_tokens=length,
                predicted=max(1, round(length * rng.uniform(0.67, 1.33))),
                arrival=now,
                deadline=now + 2 + 0.04 * length if chat else None,
                priority=0 if chat else 1,
                metadata={"tenant": "chat" if chat else "report"},
            )
        )
    return records


def order_table(records: list[WorkloadRecord]) -> None:
    print(f"  {'':37}{'latency':>8}{'':>8}{'of':>8}{'of':>9}{'chats':>7}{'':>11}{'tokens':>11}")
    print(f"  {'':37}{'mean':>8}{'p99':>8}{'chats':>8}{'reports':>9}{'late':>7}{'preempted':>11}{'again':>11}")
    for name, policy in BY_ORDER.items():
        engine, _, outputs = run(lambda pool, policy=policy: policy(pool, **OPTIONS), records, NUM_BLOCKS)
        finished = [output.timings.finished or 0.0 for output in outputs]
        latency = [end - record.arrival for end, record in zip(finished, records, strict=True)]
        is_chat = [record.deadline is not None for record in records]
        chats = mean(s for s, chat in zip(latency, is_chat, strict=True) if chat)
        reports = mean(s for s, chat in zip(latency, is_chat, strict=True) if not chat)
        late = sum(
            record.deadline is not None and end > record.deadline for end, record in zip(finished, records, strict=True)
        )
        stats = engine.stats()
        print(
            f"  {name:37}{mean(latency):>7.1f}s{sorted(latency)[int(0.99 * len(latency))]:>7.1f}s{chats:>7.1f}s"
            f"{reports:>8.1f}s{late / sum(is_chat):>7.0%}{stats.num_preemptions:>11}{stats.recomputed_tokens:>11,}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--cap", type=int, default=512, help="longest output")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    lengths = output_lengths(args.requests, args.cap, args.seed)

    print(
        f"SIMULATED: no model ran. Seconds are those of RooflineCost: {COST.num_params / 1e9:.2f}e9 parameters of "
        f"{COST.bytes_per_param:.0f} bytes,\n{COST.kv_bytes_per_token:,.0f} bytes of KV per token, "
        f"{COST.bandwidth / 1e9:,.0f} GB/s, {COST.flops / 1e12:.0f} TFLOP/s at {COST.efficiency:.0%}, "
        f"{COST.overhead_s * 1e3:.0f} ms a step: OPT-13B on an A100-40.\n"
        f"{args.requests} requests at once, prompts of {args.prompt} tokens, outputs of {min(lengths)} to "
        f"{max(lengths)}, mean {sum(lengths) / len(lengths):.0f}; "
        f"{GEOMETRY.num_blocks * GEOMETRY.block_size:,} KV slots."
    )
    for title, declared in (("The true lengths are declared", None), (f"{args.cap} is declared for all", args.cap)):
        print(f"\n{title}:")
        prompt = list(range(3, 3 + args.prompt))
        records = [
            WorkloadRecord(prompt=prompt, max_tokens=declared or length, output_tokens=length) for length in lengths
        ]
        table(records, max(lengths))
    records = arrivals(2 * args.requests, args.seed)
    print(
        f"\nBy order: {len(records)} requests of two tenants, {records[-1].arrival:.0f} s of arrivals, "
        f"hints right within a third, {NUM_BLOCKS * GEOMETRY.block_size:,} KV slots:"
    )
    order_table(records)
    print(
        "\nstatic: padded to the batch's longest, finished rows computed to its end; dropped: not computed any more. "
        "Prompts are not padded."
    )


if __name__ == "__main__":
    main()
