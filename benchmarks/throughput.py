"""Tokens per second of every policy, and of transformers itself, on one workload in one run.

The workload: prompts of one length made of random tokens; output lengths drawn from an exponential distribution and
kept only if they are at most the cap; greedy; end-of-sequence tokens ignored. Each policy is told the true lengths.

The contenders run in turn, A B C A B C, each in an engine of its own that is made, warmed and closed outside the
measured time. The ratio to static is the median over the repeats of the ratio within each repeat: absolute figures
drift with the machine, so compare nothing across runs.

    python benchmarks/throughput.py --model .cache/smollm2 [--n 32 --repeat 1 --policies paged,chunked --engines static]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

import batchkit
from batchkit import Engine, SamplingParams
from batchkit.cli import SCHEDULERS

POLICIES = ("static", "dynamic", "orca", "waiting-served", "paged", "chunked")
ENGINES = {
    "static": "transformers generate, batches padded to their own maximum",
    "static-global": "transformers generate, batches padded to the maximum of all",
    "continuous": "transformers continuous batching",
}
BASELINE = "transformers static"

Prompts = list[list[int]]
Generate = Callable[[Prompts, list[int]], int]
"""Takes prompts and how many tokens each is to give; returns how many it got."""
Contender = Callable[[], contextlib.AbstractContextManager[Generate]]
"""Makes an engine that is ready to generate."""


def workload(args: argparse.Namespace, vocab_size: int) -> tuple[Prompts, list[int]]:
    """The prompts and the output lengths."""
    rng = random.Random(args.seed)
    # The first ids are special tokens in most vocabularies.
    prompts = [[rng.randrange(vocab_size // 100, vocab_size) for _ in range(args.inp)] for _ in range(args.n)]
    lengths: list[int] = []
    while len(lengths) < args.n:
        length = max(1, round(rng.expovariate(1 / args.mean)))
        if length <= args.cap:
            lengths.append(length)
    return prompts, lengths


@contextlib.contextmanager
def batchkit_engine(model: Any, policy: str, args: argparse.Namespace) -> Iterator[Generate]:
    """An engine of batchkit. The static policies get the static batch size, the others `--max-seqs`."""
    max_num_seqs = args.batch if policy in ("static", "dynamic") else args.max_seqs
    blocks = args.kv_blocks or args.max_seqs * -(-(args.inp + args.cap) // args.block_size)
    engine = Engine.from_model(
        model,
        scheduler=SCHEDULERS[policy],
        num_kv_blocks=blocks,
        block_size=args.block_size,
        max_num_seqs=max_num_seqs,
        max_tokens_per_step=args.max_tokens_per_step,
        pack_weights="copy",  # as fast as `Engine.from_pretrained`, beside a model that others use
    )

    def generate(prompts: Prompts, lengths: list[int]) -> int:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in lengths]
        return sum(len(output.token_ids) for output in engine.generate(prompts, params))

    with engine:
        yield generate


@contextlib.contextmanager
def transformers_static(model: Any, to_global_max: bool, args: argparse.Namespace) -> Iterator[Generate]:
    """`model.generate` on one batch after the other. All prompts have one length, so that none is padded."""

    def generate(prompts: Prompts, lengths: list[int]) -> int:
        for i in range(0, len(prompts), args.batch):
            ids = torch.tensor(prompts[i : i + args.batch], device=model.device)
            steps = max(lengths) if to_global_max else max(lengths[i : i + args.batch])
            config = GenerationConfig(max_new_tokens=steps, min_new_tokens=steps, do_sample=False, pad_token_id=0)
            with torch.inference_mode():
                out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
            assert out.shape[1] == ids.shape[1] + steps
        return sum(lengths)

    yield generate


@contextlib.contextmanager
def transformers_continuous(model: Any, args: argparse.Namespace) -> Iterator[Generate]:
    """The continuous batching of transformers. It changes its model, so that it gets one of its own."""
    config = GenerationConfig(max_new_tokens=args.cap, eos_token_id=-1, do_sample=False, pad_token_id=0)
    manager = model.init_continuous_batching(generation_config=config)
    manager.start()
    calls = 0

    def generate(prompts: Prompts, lengths: list[int]) -> int:
        nonlocal calls
        calls += 1
        for i, (ids, length) in enumerate(zip(prompts, lengths, strict=True)):
            manager.add_request(ids, request_id=f"{calls}-{i}", max_new_tokens=length)
        done = generated = 0
        while done < len(prompts):
            result = manager.get_result(timeout=5)
            if result is not None and result.is_finished():
                done += 1
                generated += len(result.generated_tokens)
            elif not manager.is_running():
                raise RuntimeError("transformers' continuous batching stopped before its requests were done")
        return generated

    try:
        yield generate
    finally:
        manager.stop(block=True, timeout=10)


def contenders(args: argparse.Namespace) -> dict[str, Contender]:
    """What runs, by name."""

    def load() -> Any:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).to(args.device)
        model.generation_config.eos_token_id = None
        return model.eval()

    model = load()
    own = load() if "continuous" in args.engines else None
    made: dict[str, Contender] = {}
    for engine in args.engines:
        made[f"transformers {engine}"] = {
            "static": partial(transformers_static, model, False, args),
            "static-global": partial(transformers_static, model, True, args),
            "continuous": partial(transformers_continuous, own, args),
        }[engine]
    for policy in args.policies:
        made[f"batchkit {policy}"] = partial(batchkit_engine, model, policy, args)
    args.vocab_size = model.config.vocab_size
    return made


def measure(make: Contender, prompts: Prompts, lengths: list[int]) -> float:
    """Seconds that one contender takes for the workload."""
    with make() as generate:
        generate(prompts[:4], [4] * len(prompts[:4]))
        began = time.perf_counter()
        generated = generate(prompts, lengths)
        seconds = time.perf_counter() - began
    assert generated == sum(lengths), f"{generated} tokens were generated, {sum(lengths)} were asked for"
    return seconds


def names(known: dict[str, Any]) -> Callable[[str], list[str]]:
    """A parser of comma-separated names."""

    def parse(text: str) -> list[str]:
        chosen = [name for name in text.split(",") if name]
        if unknown := set(chosen) - set(known):
            raise argparse.ArgumentTypeError(f"unknown: {sorted(unknown)}; known: {', '.join(known)}")
        return chosen

    return parse


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Tokens per second of batchkit's policies and of transformers, interleaved.",
        epilog="engines: " + "; ".join(f"{name}: {meaning}" for name, meaning in ENGINES.items()),
    )
    parser.add_argument("--model", default=".cache/smollm2", help="a checkpoint that transformers loads")
    parser.add_argument("--n", type=int, default=128, help="requests")
    parser.add_argument("--inp", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--mean", type=float, default=32, help="of the exponential that output lengths come from")
    parser.add_argument("--cap", type=int, default=384, help="longer outputs are drawn again")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=16, help="of the static contenders")
    parser.add_argument("--max-seqs", type=int, default=128, help="seats of the other policies")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--kv-blocks", type=int, help="default: what --max-seqs sequences of full length need")
    parser.add_argument("--max-tokens-per-step", type=int, help="default: the policy's")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--policies", type=names(SCHEDULERS), default=list(POLICIES), help="comma-separated (default: the first six)"
    )
    parser.add_argument(
        "--engines", type=names(ENGINES), default=list(ENGINES), help="comma-separated (default: the first six)"
    )
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/throughput.json"))
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    made = contenders(args)
    prompts, lengths = workload(args, args.vocab_size)
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for repeat in range(args.repeat):
        for name, make in made.items():
            seconds[name].append(measure(make, prompts, lengths))
            print(f"[{repeat + 1}/{args.repeat}] {name}: {seconds[name][-1]:.1f} s", file=sys.stderr, flush=True)

    num_prompt, num_generated = args.n * args.inp, sum(lengths)
    print(
        f"{args.model}, {args.dtype} on {args.device}: {args.n} requests, {args.inp} prompt tokens, outputs "
        f"Exp({args.mean:g}) <= {args.cap} ({num_generated} in all, longest {max(lengths)}); static batches of "
        f"{args.batch}; medians of {args.repeat}"
    )
    print(f"{'':<28}{'seconds':>9}{'generated/s':>13}{'prompt/s':>11}{'both/s':>10}{'to static':>11}")
    results: dict[str, Any] = {}
    for name, samples in seconds.items():
        median = statistics.median(samples)
        base = seconds.get(BASELINE)
        ratio = statistics.median(b / s for b, s in zip(base, samples, strict=True)) if base else None
        results[name] = {
            "seconds": samples,
            "median_s": median,
            "generated_tokens_per_s": num_generated / median,
            "prompt_tokens_per_s": num_prompt / median,
            "ratio_to_static": ratio,
        }
        print(
            f"{name:<28}{median:>9.1f}{num_generated / median:>13.1f}{num_prompt / median:>11.1f}"
            f"{(num_prompt + num_generated) / median:>10.1f}{f'{ratio:.2f}x' if ratio else '-':>11}"
        )
    settings = {key: value for key, value in vars(args).items() if key != "json"}
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "batchkit": batchkit.__version__,
        "threads": torch.get_num_threads(),
    }
    record = {
        "settings": settings,
        "versions": versions,
        "prompt_tokens": num_prompt,
        "generated_tokens": num_generated,
        "results": results,
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
