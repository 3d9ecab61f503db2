"""Answer a list of prompts, or those of a JSONL file, with a model of transformers.

    python examples/offline_batch.py MODEL [examples/prompts.jsonl] [--max-tokens 32]

For files, `batchkit generate` does the same and more; this shows what it takes in a program of your own.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from pathlib import Path

from batchkit import Engine, SamplingParams

PROMPTS = [
    "The capital of France is",
    "Three red fruits are",
    "Water boils at",
    "The opposite of hot is",
]


def read(path: str) -> tuple[list[str], list[SamplingParams]]:
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").split("\n") if line]
    return [row["prompt"] for row in rows], [SamplingParams(**row.get("params", {})) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder, or a name on the hub")
    parser.add_argument("prompts", nargs="?", help="JSONL: objects with prompt and params")
    parser.add_argument("--max-tokens", type=int, default=16, help="for the built-in prompts")
    parser.add_argument("--dtype", default="auto", help="such as float32, faster on a CPU without bf16 units")
    args = parser.parse_args()
    logging.basicConfig()  # shows warnings
    if args.prompts:
        prompts, params = read(args.prompts)
    else:
        prompts, params = PROMPTS, [SamplingParams(temperature=0, max_tokens=args.max_tokens)] * len(PROMPTS)

    # Leaving the block frees the KV memory. Any other policy goes in by `scheduler=`.
    with Engine.from_pretrained(args.model, dtype=args.dtype, kv_memory="256MiB") as engine:
        began = time.perf_counter()
        # A prompt that cannot be taken (too long, say) gives an output with its error; the others go on.
        outputs = engine.generate(prompts, params, on_error="return")
        seconds = time.perf_counter() - began
        stats = engine.stats()

    for prompt, output in zip(prompts, outputs, strict=True):
        print(f"{prompt!r}\n    {output.error or output.text!r} ({output.finish_reason})")
    print(
        f"\n{len(outputs)} prompts in {seconds:.1f} s: {stats.generated_tokens} tokens generated, "
        f"at most {stats.peak_used_blocks} of {stats.num_blocks} KV blocks used, {stats.scheduler}"
    )


if __name__ == "__main__":
    main()
