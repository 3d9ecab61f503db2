"""What attention costs on the CPU: the backends in turn, beside the time that reading the KV takes at least.

    python benchmarks/attention.py [--backends cpu,reference --dtypes float32 --batches 1,64 --contexts 1024]

Every layer has its own pool, as in a model, so that a layer's KV is in no cache when its turn comes; where the pools
would take more than --memory, fewer of them take several layers' turns. Block tables are scattered. A layer writes its
K and V and attends. The backends take turns, and ratios are those of medians. The floor of decoding is the KV of all
rows, read once at the rate at which torch sums memory that no cache holds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import torch

from batchkit.hf.backends import choose_backend
from batchkit.hf.backends.base import AttentionBackend, LayerSpec
from batchkit.hf.backends.trial import TrialStep, make_step
from batchkit.sizes import parse_bytes


def listed(text: str) -> list[str]:
    """What stands between commas."""
    return [part for part in text.split(",") if part]


def numbers(text: str) -> list[int]:
    """Numbers between commas."""
    return [int(part) for part in listed(text)]


def read_rate() -> float:
    """Bytes per second."""
    data = torch.ones(1 << 27)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - start)
    return data.numel() * data.element_size() / min(times)


def medians(backends: Sequence[AttentionBackend], steps: Sequence[TrialStep], seconds: float) -> list[float]:
    """Seconds of each backend, each in turn until all of them together took so long."""
    times: list[list[float]] = [[] for _ in backends]
    for backend in backends:
        run(backend, steps)
    begin = time.perf_counter()
    while len(times[0]) < 3 or time.perf_counter() - begin < seconds:
        for backend, found in zip(backends, times, strict=True):
            start = time.perf_counter()
            run(backend, steps)
            found.append(time.perf_counter() - start)
    return [statistics.median(found) for found in times]


def kv_bytes(layer: LayerSpec, rows: Sequence[tuple[int, int]]) -> int:
    """Of all tokens of the rows."""
    tokens = sum(start + count for start, count in rows)
    return tokens * layer.num_kv_heads * (layer.key_dim + layer.value_dim) * layer.dtype.itemsize


def stack(
    layer: LayerSpec, rows: Sequence[tuple[int, int]], count: int, memory: int, block_size: int
) -> list[TrialStep]:
    """The step in `count` layers, with pools of their own for as many as there is memory for."""
    pools = max(1, min(count, memory // kv_bytes(layer, rows)))
    made = [make_step(layer, rows, block_size=block_size) for _ in range(pools)]
    return [made[index % pools] for index in range(count)]


def run(backend: AttentionBackend, steps: Sequence[TrialStep]) -> None:
    """All layers of one step, with one plan."""
    first = steps[0]
    slots = torch.from_numpy(first.batch.slots)
    plan = backend.plan(first.batch)
    for step in steps:
        backend.write(step.kv, slots, step.key, step.value)
        backend.attend(step.layer, step.kv, plan, step.query, step.key, step.value, scaling=None, sinks=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", type=listed, default=["cpu", "reference"], help="ratios are to the first one")
    parser.add_argument("--dtypes", type=listed, default=["float32", "bfloat16"])
    parser.add_argument("--batches", type=numbers, default=[1, 16, 64, 128])
    parser.add_argument("--contexts", type=numbers, default=[200, 1024])
    parser.add_argument("--prompts", nargs="*", default=["16x128", "1x2048"], help="rows x tokens")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--memory", default="2GB", help="for the pools of all layers")
    parser.add_argument("--seconds", type=float, default=3.0, help="to measure each line, at least three turns")
    args = parser.parse_args()

    loads = [
        (f"{rows} x 1 after {context}", [(context, 1)] * rows) for context in args.contexts for rows in args.batches
    ]
    for prompt in args.prompts:
        rows, tokens = map(int, prompt.split("x"))
        loads.append((f"{rows} x {tokens}", [(0, tokens)] * rows))
    rate = read_rate()
    print(
        f"{args.layers} layers of {args.heads} heads over {args.kv_heads} KV heads of {args.head_dim}, blocks of "
        f"{args.block_size}; {torch.get_num_threads()} threads; memory is read at {rate / 1e9:.1f} GB/s"
    )
    print(f"{'':<28}{'floor, ms':>10}" + "".join(f"{name + ', ms':>16}{'ratio':>8}" for name in args.backends))
    for dtype in args.dtypes:
        layer = LayerSpec(
            0, args.heads, args.kv_heads, args.head_dim, args.head_dim, getattr(torch, dtype), torch.device("cpu")
        )
        backends = [choose_backend(name, [layer], "the stack", block_size=args.block_size) for name in args.backends]
        for name, load in loads:
            steps = stack(layer, load, args.layers, parse_bytes("--memory", args.memory), args.block_size)
            with torch.inference_mode():
                found = medians(backends, steps, args.seconds)
            floor = args.layers * kv_bytes(layer, load) / rate
            print(
                f"{dtype + ' ' + name:<28}{1e3 * floor:>10.2f}"
                + "".join(f"{1e3 * took:>16.2f}{took / found[0]:>8.2f}" for took in found),
                flush=True,
            )


if __name__ == "__main__":
    main()
