"""Where the time of a step goes: decode steps and a prefill, by number of rows, beside what the memory allows.

For each number of rows an engine decodes that many sequences of the same length. A plain run gives the time of a step;
an instrumented one, right after it, gives the shares: scheduling, packing (index arrays and the backend's plan),
attention (with the writing of K and V), decoder layers whose other parts are computed together, linear layers besides,
what else the model computes, sampling, and the rest, which is the engine's bookkeeping and text.

Three floors stand beside it: the time in which the weights can be read once, the same with the KV of the rows, and the
linear layers alone on as many rows, with weights as in the step, one after the other. Reading is measured here, by
summing what no cache can hold.

Where a step is far below its floor, something else was running, and a note says so.

    python benchmarks/step.py --model .cache/smollm2 [--dtype float32 --batches 1,16 --context 200 --json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM

import batchkit
from attention import read_rate
from batchkit import ChunkedPrefillScheduler, Engine, PagedAllocator, SamplingParams, StepReport
from batchkit.hf import decoder
from batchkit.hf.attention import bind
from batchkit.hf.backends import NAMES, choose_backend
from batchkit.hf.fused import optimized
from batchkit.hf.kv_pool import block_bytes
from batchkit.hf.runner import TransformersRunner

WARM_STEPS = 3
LEAST_OF_FLOOR = 0.8  # of a step over its floor; less than that is no noise
SHARES = ("scheduling", "packing", "attention", "layers", "linear", "other model", "sampling", "engine")


class Stopwatch:
    """Seconds by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same callable, whose seconds count under `name`."""

        def run(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - started

        return run

    def watch_linear(self, model: nn.Module) -> None:
        """Count linear layers that are called as such."""
        started: list[float] = []

        def before(*given: Any) -> None:
            started.append(time.perf_counter())

        def after(*given: Any) -> None:
            self.seconds["linear"] += time.perf_counter() - started.pop()

        for module in linear_layers(model):
            module.register_forward_pre_hook(before)
            module.register_forward_hook(after)


def linear_layers(model: nn.Module) -> list[nn.Linear]:
    """Every linear layer, the output projection among them."""
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


@dataclass(frozen=True)
class Measured:
    """Of one number of rows, in seconds.

    Attributes:
        prefill: all prompts, in as many steps as they take.
        decode: one step.
        shares: of a decode step, by name.
    """

    prefill: float
    decode: float
    shares: dict[str, float]


def measure(model: Any, rows: int, args: argparse.Namespace) -> Measured:
    """Time `rows` sequences, without instruments and then with them."""
    plain, prefill, _ = play(model, rows, args, None)
    watch = Stopwatch()
    functions = decoder._functions

    def timed(dtype: torch.dtype) -> tuple[Any, ...]:
        before_floats, before, after_floats, after = functions(dtype)
        return before_floats, watch.timed("layers", before), after_floats, watch.timed("layers", after)

    with mock.patch.object(decoder, "_functions", timed):
        _, _, shares = play(model, rows, args, watch)
    return Measured(prefill, plain, shares)


def play(
    model: Any, rows: int, args: argparse.Namespace, watch: Stopwatch | None
) -> tuple[float, float, dict[str, float]]:
    """Seconds of a decode step and of the prefill; and a step's shares, if it is watched."""
    rng = random.Random(rows)
    vocab = model.config.get_text_config().vocab_size
    length = args.context - args.steps // 2 - WARM_STEPS  # so that steps see `context` tokens in the mean
    prompts = [[rng.randrange(vocab // 100, vocab) for _ in range(length)] for _ in range(rows)]
    # The first rows decode while the last prompts are computed.
    total = WARM_STEPS + args.steps + 2 + rows * length // args.max_tokens_per_step
    reports: list[StepReport] = []
    blocks = rows * -(-(length + total) // args.block_size)
    runner = TransformersRunner(
        model,
        num_kv_blocks=blocks,
        block_size=args.block_size,
        attention=args.attention,
        optimize=not args.no_optimize,
        pack_weights=args.pack_weights,
    )
    scheduler = ChunkedPrefillScheduler(
        PagedAllocator(blocks, args.block_size),
        max_model_len=runner.geometry.max_model_len,
        max_num_seqs=rows,
        max_tokens_per_step=max(args.max_tokens_per_step, rows),
    )
    with Engine(runner, scheduler, on_step=reports.append) as engine:
        params = SamplingParams(temperature=0, max_tokens=total, ignore_eos=True, detokenize=False)
        engine.generate(prompts[:1], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False))
        for prompt in prompts:
            engine.add_request(prompt, params)
        del reports[:]
        started = time.perf_counter()
        while engine.stats().num_waiting or not reports or reports[-1].output.num_tokens > rows:
            engine.step()
        prefill = time.perf_counter() - started
        for _ in range(WARM_STEPS - 1):
            engine.step()
        if watch is not None:
            instrument(runner, watch)
        del reports[:]
        seconds = []
        for _ in range(args.steps):
            started = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - started)
        assert all(report.output.num_tokens == rows for report in reports)
    shares: dict[str, float] = {}
    if watch is not None:
        found = {name: watch.seconds[name] / args.steps for name in ("packing", "attention", "layers", "linear")}
        found["scheduling"] = sum(report.schedule_s for report in reports) / args.steps
        found["sampling"] = sum(report.sample_s for report in reports) / args.steps
        execute = sum(report.execute_s for report in reports) / args.steps
        found["other model"] = execute - sum(found[name] for name in ("layers", "linear", "attention", "packing"))
        found["engine"] = statistics.fmean(seconds) - execute - found["scheduling"] - found["sampling"]
        shares = {name: found[name] for name in SHARES}
    return statistics.median(seconds), prefill, shares


def instrument(runner: TransformersRunner, watch: Stopwatch) -> None:
    """Time the parts of a runner, from now on."""
    assert runner._bound is not None
    watch.seconds.clear()
    watch.watch_linear(runner._bound.model)  # a clone, of which nobody else knows
    backend: Any = runner._backend
    runner._builder.build = watch.timed("packing", runner._builder.build)  # type: ignore[method-assign]
    backend.plan = watch.timed("packing", backend.plan)
    backend.write = watch.timed("attention", backend.write)
    backend.attend = watch.timed("attention", backend.attend)


def linear_alone(model: Any, rows: int) -> float:
    """Seconds of all linear layers on so many rows, one after the other; a median."""
    work = [(module, torch.randn(rows, module.in_features).to(module.weight.dtype)) for module in linear_layers(model)]

    def run() -> None:
        for module, given in work:
            module.forward(given)

    with torch.inference_mode():
        run()
        return statistics.median(seconds_of(run) for _ in range(5))


def seconds_of(call: Callable[[], Any]) -> float:
    """Of one call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batches", default="1,4,16,64,128,256", help="numbers of rows")
    parser.add_argument("--context", type=int, default=200, help="tokens that a row sees in a decode step, in the mean")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-tokens-per-step", type=int, default=2048, help="of the prefill")
    parser.add_argument("--attention", choices=NAMES)
    parser.add_argument("--pack-weights", choices=("copy",), help="as for Engine.from_model; from_pretrained does so")
    parser.add_argument("--no-optimize", action="store_true", help="as for Engine.from_model")
    parser.add_argument("--threads", type=int, help="default: torch's own number")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    transformers.utils.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype)
    bound = bind(model) if args.no_optimize else optimized(bind(model), args.pack_weights)
    layers = list(bound.layers.values())
    kv_bytes = sum(block_bytes(layers, 1).values())
    name = choose_backend(args.attention, layers, type(model).__name__, block_size=args.block_size).name
    weights = sum(module.weight.numel() * module.weight.itemsize for module in linear_layers(model))
    bandwidth = read_rate()
    dtype = str(model.dtype).removeprefix("torch.")
    print(
        f"{args.model} in {dtype}, attention backend {name}, {torch.get_num_threads()} threads, "
        f"weights {'packed' if args.pack_weights else 'as they are'}, context {args.context}; "
        f"reading at {bandwidth / 1e9:.1f} GB/s"
    )
    print("milliseconds; shares are those of the instrumented run, in percent\n")
    print(
        f"{'rows':>5} {'prefill':>9} {'tok/s':>7} {'decode':>8} | {'weights':>8} {'+ KV':>8} {'linear':>8} | "
        f"{'x floor':>8} | " + " ".join(f"{share:>11}" for share in SHARES)
    )
    found = []
    for rows in map(int, args.batches.split(",")):
        got = measure(model, rows, args)
        kv = rows * args.context * kv_bytes / bandwidth
        linear = linear_alone(bound.model, rows)
        tokens = rows * (args.context - args.steps // 2 - WARM_STEPS)
        whole = sum(got.shares.values())
        print(
            f"{rows:>5} {1e3 * got.prefill:>9.1f} {tokens / got.prefill:>7.0f} {1e3 * got.decode:>8.2f} | "
            f"{1e3 * weights / bandwidth:>8.2f} {1e3 * (weights / bandwidth + kv):>8.2f} {1e3 * linear:>8.2f} | "
            f"{got.decode / (linear + kv):>8.2f} | "
            + " ".join(f"{100 * got.shares[share] / whole:>11.1f}" for share in SHARES),
            flush=True,
        )
        if got.decode < LEAST_OF_FLOOR * (linear + kv):
            print("      ^ the floor is above the step: something else is running, and this row means nothing")
        found.append(
            {
                "rows": rows,
                "prefill_s": got.prefill,
                "prefill_tokens": tokens,
                "decode_s": got.decode,
                "shares_s": got.shares,
                "weights_read_s": weights / bandwidth,
                "kv_read_s": kv,
                "linear_alone_s": linear,
            }
        )
    print("\nx floor: the decode step over the linear layers alone plus the KV read once")
    if args.json:
        head = {
            "model": Path(args.model).name,
            "dtype": dtype,
            "attention": name,
            "context": args.context,
            "optimize": not args.no_optimize,
            "pack_weights": args.pack_weights,
            "block_size": args.block_size,
            "threads": torch.get_num_threads(),
            "read_bytes_per_s": bandwidth,
            "versions": {
                "batchkit": batchkit.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            "python": platform.python_version(),
            "machine": platform.processor() or platform.machine(),
        }
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({**head, "measured": found}, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
