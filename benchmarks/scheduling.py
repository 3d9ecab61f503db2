"""What a policy costs: seconds per step between the engine's asking and the rows' being there.

256 sequences of about 2,048 tokens decode, with 1,000 and with 200,000 requests waiting behind them. No model runs.
Both engines of a policy step in turn, so that a slow moment of the machine meets both.

    python benchmarks/scheduling.py [--policies paged,chunked] [--steps 100]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from pathlib import Path
from typing import Any

from batchkit import Engine, KVGeometry, PagedAllocator, SamplingParams, Scheduler, SimulatedRunner, StepReport
from batchkit.cli import SCHEDULERS

BLOCK_SIZE = 16
MAX_LEN = 4096


def engine_with(policy: type[Scheduler], running: int, context: int, waiting: int, times: list[float]) -> Engine:
    """An engine whose `running` sequences decode at `context` tokens, with `waiting` others behind them."""
    blocks = running * MAX_LEN // BLOCK_SIZE
    geometry = KVGeometry(num_blocks=blocks, block_size=BLOCK_SIZE, max_model_len=MAX_LEN, vocab_size=1000)

    def note(report: StepReport) -> None:
        times.append(report.schedule_s)

    # One step takes all prompts, so that the sequences stay of one length.
    scheduler = policy(
        PagedAllocator(blocks, BLOCK_SIZE), max_num_seqs=running, max_tokens_per_step=running * (context + 1)
    )
    engine = Engine(SimulatedRunner(geometry, check_kv=False), scheduler, on_step=note)
    params = SamplingParams(max_tokens=MAX_LEN - context, ignore_eos=True)
    for prompt, number in ((range(context), running), (range(32), waiting)):
        token_ids = [token % 1000 for token in prompt]
        for _ in range(number):
            engine.add_request(token_ids, params)
    while engine.stats().num_running < running:
        engine.step()
    return engine


def measure(policy: type[Scheduler], args: argparse.Namespace) -> dict[int, list[float]]:
    """Seconds of each step, by the number of requests waiting."""
    times: dict[int, list[float]] = {waiting: [] for waiting in args.waiting}
    context = args.context - args.steps // 2
    engines = {n: engine_with(policy, args.running, context, n, times[n]) for n in args.waiting}
    for engine in engines.values():
        for _ in range(5):
            engine.step()
    gc.collect()
    for samples in times.values():
        samples.clear()
    for _ in range(args.steps):
        for engine in engines.values():
            engine.step()
    for waiting, engine in engines.items():
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting) == (args.running, waiting), stats
        assert len(times[waiting]) == args.steps
        engine.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds per step spent in the scheduler, rows included.")
    parser.add_argument("--policies", default=",".join(SCHEDULERS), help="comma-separated (default: all)")
    parser.add_argument("--running", type=int, default=256, help="sequences that decode")
    parser.add_argument("--context", type=int, default=2048, help="tokens of each")
    parser.add_argument("--waiting", type=int, nargs="+", default=[1_000, 200_000], help="requests behind them")
    parser.add_argument("--steps", type=int, default=100, help="steps measured")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/scheduling.json"))
    args = parser.parse_args()

    few, many = min(args.waiting), max(args.waiting)
    results: dict[str, Any] = {}
    print(f"{args.running} sequences of {args.context} tokens decode; ms per step in the scheduler, median (mean)")
    print(f"{'policy':<16}" + "".join(f"{f'{n:,} waiting':>20}" for n in args.waiting) + f"{'ratio':>8}")
    for name in args.policies.split(","):
        times = measure(SCHEDULERS[name], args)
        medians = {n: statistics.median(samples) for n, samples in times.items()}
        means = {n: statistics.fmean(samples) for n, samples in times.items()}
        ratio = medians[many] / medians[few]
        results[name] = {"median_s": medians, "mean_s": means, "ratio": ratio}
        cells = "".join(f"{f'{1e3 * medians[n]:.2f} ({1e3 * means[n]:.2f})':>20}" for n in args.waiting)
        print(f"{name:<16}{cells}{ratio:>8.2f}", flush=True)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    settings = {key: value for key, value in vars(args).items() if key != "json"}
    args.json.write_text(json.dumps({"settings": settings, "policies": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
