"""What prefix caching saves: many requests behind one system prompt, with the cache and without it, in one run.

Every request is the same system prompt and a question of its own. The contenders run in turn, A B C A B C, each in an
engine of its own that is made, warmed with other tokens and closed outside the measured time: without the cache; with
it, the others coming when the first request has its first token; with it, all coming at once, when whoever is admitted
before the system prompt has been computed computes it too. Ratios are medians over the repeats of the ratio within
each; absolute figures drift with the machine.

    python benchmarks/prefix.py --model .cache/smollm2 [--n 32 --repeat 1]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from batchkit import Engine, RequestOutput, SamplingParams

CONTENDERS = {
    "no cache": {"prefix_caching": False, "one_ahead": True},
    "cache, one ahead": {"prefix_caching": True, "one_ahead": True},
    "cache, all at once": {"prefix_caching": True, "one_ahead": False},
}
BASELINE = "no cache"


@dataclass(frozen=True)
class Run:
    """What one contender did."""

    seconds: float
    prefill_tokens: int
    cached_tokens: int
    outputs: list[tuple[int, ...]]


def workload(args: argparse.Namespace, vocab_size: int) -> list[list[int]]:
    """The prompts; the first one is the warm-up's, as long as the others and without their beginning."""
    rng = random.Random(args.seed)

    def tokens(count: int) -> list[int]:
        # The first ids are special tokens in most vocabularies.
        return [rng.randrange(vocab_size // 100, vocab_size) for _ in range(count)]

    system = tokens(args.system)
    return [tokens(args.system + args.question)] + [system + tokens(args.question) for _ in range(args.n)]


def run(
    model: Any, prompts: list[list[int]], args: argparse.Namespace, *, prefix_caching: bool, one_ahead: bool
) -> Run:
    """Seconds and tokens of one contender."""
    params = SamplingParams(temperature=0, max_tokens=args.output, ignore_eos=True, detokenize=False)
    warm_up, *prompts = prompts
    length = len(warm_up) + args.output
    with Engine.from_model(
        model,
        num_kv_blocks=(args.n + 1) * -(-length // args.block_size),
        block_size=args.block_size,
        prefix_caching=prefix_caching,
        max_tokens_per_step=args.max_tokens_per_step,
    ) as engine:
        engine.generate([warm_up], params)
        before = engine.stats()
        finals: dict[str, RequestOutput] = {}
        began = time.perf_counter()
        for number, prompt in enumerate(prompts):
            engine.add_request(prompt, params, request_id=str(number))
            while one_ahead and engine.stats().generated_tokens == before.generated_tokens:
                engine.step()
        while engine.has_unfinished():
            finals.update((output.request_id, output) for output in engine.step() if output.finished)
        seconds = time.perf_counter() - began
        after = engine.stats()
    assert after.recomputed_tokens == 0, "the KV cache is too small for the workload"
    computed = after.computed_tokens - before.computed_tokens
    return Run(
        seconds=seconds,
        # A generated token is computed too, but for the last of each request.
        prefill_tokens=computed - args.n * (args.output - 1),
        cached_tokens=after.cached_tokens - before.cached_tokens,
        outputs=[finals[str(number)].token_ids for number in range(args.n)],
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=".cache/smollm2", help="a checkpoint that transformers loads")
    parser.add_argument("--n", type=int, default=32, help="requests")
    parser.add_argument("--system", type=int, default=1000, help="tokens of the system prompt")
    parser.add_argument("--question", type=int, default=20, help="tokens of each question")
    parser.add_argument("--output", type=int, default=16, help="tokens of each output")
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-tokens-per-step", type=int, help="default: the policy's")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).to(args.device).eval()
    prompts = workload(args, model.config.vocab_size)
    runs: dict[str, list[Run]] = {name: [] for name in CONTENDERS}
    for _ in range(args.repeat):
        for name, options in CONTENDERS.items():
            runs[name].append(run(model, prompts, args, **options))

    print(
        f"{args.model}, {args.dtype} on {args.device}: {args.n} requests of {args.system} common and {args.question} "
        f"own tokens, {args.output} generated; medians of {args.repeat}"
    )
    print(f"{'':<22}{'seconds':>9}{'to no cache':>13}{'prefill tokens':>16}{'found':>9}{'same tokens':>13}")
    for name, samples in runs.items():
        base = runs[BASELINE]
        ratio = statistics.median(b.seconds / s.seconds for b, s in zip(base, samples, strict=True))
        last = samples[-1]
        same = sum(mine == other for mine, other in zip(last.outputs, base[-1].outputs, strict=True))
        print(
            f"{name:<22}{statistics.median(s.seconds for s in samples):>9.1f}{ratio:>12.2f}x{last.prefill_tokens:>16,}"
            f"{last.cached_tokens:>9,}{f'{same}/{args.n}':>13}"
        )


if __name__ == "__main__":
    main()
