"""batchkit, in this project's environment. It is called by `compare.py`."""

from __future__ import annotations

import argparse

from protocol import Generate, options, serve

from batchkit import Engine, SamplingParams


def make(args: argparse.Namespace) -> Generate:
    """An engine with room for `--max-seqs` sequences of `--max-len` tokens."""
    engine = Engine.from_pretrained(
        args.model,
        dtype=args.dtype,
        max_num_seqs=args.max_seqs,
        max_model_len=args.max_len,
        max_tokens_per_step=args.tokens_per_step,
        attention=args.attention,
        optimize=not args.plain,
    )

    def generate(prompts: list[list[int]], lengths: list[int]) -> int:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in lengths]
        return sum(len(output.token_ids) for output in engine.generate(prompts, params))

    return generate


if __name__ == "__main__":
    parser = options()
    parser.add_argument("--tokens-per-step", type=int, default=512)
    parser.add_argument("--attention")
    parser.add_argument("--plain", action="store_true")
    serve(parser.parse_args(), make, ("batchkit", "torch", "transformers"))
