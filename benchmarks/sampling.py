"""What sampling costs, as a share of a decode step: all rows greedy, and rows with all kinds of parameters.

    python benchmarks/sampling.py --model .cache/smollm2 [--dtype bfloat16 --rows 64 --context 256]

The rows have one prompt, which is computed once (a prefix cache), and decode together. Only steps in which every row
decodes one token count; the workloads take turns, and the shares are those within a step, so that a machine that is
busy otherwise changes them little.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from batchkit import Engine, SamplingParams, StepReport

MIXED: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.7},
    {"top_k": 50},
    {"top_p": 0.9},
    {"temperature": 1.3, "min_p": 0.05},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"repetition_penalty": 1.1},
    {"temperature": 0, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    {"logit_bias": dict.fromkeys(range(100, 200), -5.0)},
    {"temperature": 0, "logprobs": 5},
    {"top_p": 0.95, "logprobs": 1},
    {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2, "min_tokens": 5, "stop_token_ids": [0]},
    {"allowed_token_ids": range(1000, 20_000)},
    {"temperature": 1.0, "frequency_penalty": 0.2, "logprobs": 0},
    {"temperature": 0, "logit_bias": {5: 1.0}},
    {"top_k": 5},
)
"""The rows take these in turn."""
WORKLOADS: dict[str, tuple[dict[str, Any], ...]] = {
    "greedy": ({"temperature": 0},),
    "temperature 1": ({},),
    "mixed": MIXED,
}


def decode_steps(
    engine: Engine,
    reports: list[StepReport],
    prompt: Sequence[int],
    settings: Sequence[dict[str, Any]],
    rows: int,
    steps: int,
) -> list[StepReport]:
    """Reports of the steps in which all rows decode one token."""
    common = {"max_tokens": steps + 2, "ignore_eos": True, "detokenize": False}
    params = [SamplingParams(seed=i, **{**common, **settings[i % len(settings)]}) for i in range(rows)]
    reports.clear()
    engine.generate([prompt] * rows, params)
    return [r for r in reports if len(r.output.rows) == r.output.num_tokens == r.num_new_tokens == rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=".cache/smollm2", help="a checkpoint that transformers loads")
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--context", type=int, default=256, help="tokens of the prompt")
    parser.add_argument("--steps", type=int, default=6, help="decode steps of each repeat, at least 4")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).to(args.device).eval()
    vocab_size = model.config.vocab_size
    prompt = [100 + (7 * k) % (vocab_size - 100) for k in range(args.context)]
    reports: list[StepReport] = []
    found: dict[str, list[StepReport]] = {name: [] for name in WORKLOADS}
    with Engine.from_model(
        model,
        prefix_caching=True,
        max_num_seqs=args.rows,
        max_model_len=args.context + 4 * args.steps + 32,
        max_tokens_per_step=max(512, 32 * args.rows),
        on_step=reports.append,
    ) as engine:
        engine.generate([prompt], SamplingParams(max_tokens=1))
        for _ in range(args.repeat):
            for name, settings in WORKLOADS.items():
                found[name] += decode_steps(engine, reports, prompt, settings, rows=args.rows, steps=args.steps)

    print(
        f"{args.model}, {args.dtype} on {args.device}, {torch.get_num_threads()} threads: {args.rows} rows decoding "
        f"behind {args.context} tokens, vocabulary {vocab_size:,}; medians over {len(found['mixed'])} steps each"
    )
    print(f"{'':<16}{'forward, ms':>12}{'sampling, ms':>14}{'share of the step':>19}{'most':>8}")
    for name, steps in found.items():
        shares = [r.sample_s / (r.schedule_s + r.execute_s + r.sample_s) for r in steps]
        print(
            f"{name:<16}{1e3 * statistics.median(r.execute_s for r in steps):>12.1f}"
            f"{1e3 * statistics.median(r.sample_s for r in steps):>14.1f}"
            f"{statistics.median(shares):>19.2%}{max(shares):>8.1%}"
        )


if __name__ == "__main__":
    main()
