"""Whether a long job costs more per step, or holds more memory, than a short one.

`Engine.stream` over 200,000 short rows under SimulatedRunner; no model runs. Every tenth of the job gives a line, so
that a slow moment of the machine shows as one and a growing cost as a slope.

    python benchmarks/stream.py [--rows 200000]
"""

from __future__ import annotations

import argparse
import gc
import resource
import sys
import time

from batchkit import (
    ChunkedPrefillScheduler,
    Engine,
    KVGeometry,
    PagedAllocator,
    SamplingParams,
    SimulatedRunner,
)


def resident_mib() -> float:
    """Of this process now; where the system does not say, the most it ever was."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize() / 2**20
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--seats", type=int, default=64)
    args = parser.parse_args()

    geometry = KVGeometry(num_blocks=1024, block_size=16, max_model_len=256, vocab_size=1000)
    scheduler = ChunkedPrefillScheduler(PagedAllocator(1024, 16), max_num_seqs=args.seats)
    engine = Engine(SimulatedRunner(geometry, check_kv=False), scheduler)
    prompts = ([i % 1000, 7, 8] for i in range(args.rows))
    print(f"{args.rows:,} rows of {args.max_tokens} tokens, {args.seats} seats; resident {resident_mib():.1f} MiB")
    print(f"{'rows done':>12}{'ms per step':>14}{'resident MiB':>15}")
    num_done, steps, began = 0, 0, time.perf_counter()
    for output in engine.stream(prompts, SamplingParams(max_tokens=args.max_tokens)):
        num_done += output.finished
        if output.finished and num_done % max(1, args.rows // 10) == 0:
            seconds, now = time.perf_counter() - began, engine.stats().num_steps
            gc.collect()
            print(f"{num_done:>12,}{1e3 * seconds / (now - steps):>14.3f}{resident_mib():>15.1f}", flush=True)
            steps, began = now, time.perf_counter()


if __name__ == "__main__":
    main()
