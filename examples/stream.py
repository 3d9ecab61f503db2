"""Print the answers to a few prompts while they are being written, each line when its text grows by a word or so.

python examples/stream.py MODEL [PROMPT ...] [--max-tokens 24]
"""

from __future__ import annotations

import argparse
import logging

from batchkit import Engine, SamplingParams

PROMPTS = ["The capital of France is", "Three red fruits are", "Water boils at"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder, or a name on the hub")
    parser.add_argument("prompts", nargs="*", default=PROMPTS)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--dtype", default="auto", help="such as float32, faster on a CPU without bf16 units")
    args = parser.parse_args()
    logging.basicConfig()  # shows warnings

    with Engine.from_pretrained(args.model, dtype=args.dtype, kv_memory="256MiB") as engine:
        params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
        # One output for each prompt that has news, as soon as it is there: `position` says of which prompt.
        for output in engine.stream(args.prompts, params):
            if output.new_text:
                print(f"{output.position}: {output.new_text!r}", flush=True)
            if output.finished:
                first = output.timings.first_token - output.timings.arrival
                print(f"{output.position}: [{output.finish_reason}, first token after {first:.2f} s] {output.text!r}")


if __name__ == "__main__":
    main()
