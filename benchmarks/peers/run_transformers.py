"""transformers: `generate` on static batches, or its continuous batching. It is called by `compare.py`."""

from __future__ import annotations

import argparse

from protocol import Generate, options, serve


def make(args: argparse.Namespace) -> Generate:
    """All prompts of a run have one length, so that none is padded."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype).eval()
    model.generation_config.eos_token_id = None

    def static(prompts: list[list[int]], lengths: list[int]) -> int:
        for i in range(0, len(prompts), args.batch):
            ids = torch.tensor(prompts[i : i + args.batch])
            steps = max(lengths[i : i + args.batch])
            config = GenerationConfig(max_new_tokens=steps, min_new_tokens=steps, do_sample=False, pad_token_id=0)
            with torch.inference_mode():
                model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        return sum(lengths)

    def continuous(prompts: list[list[int]], lengths: list[int]) -> int:
        config = GenerationConfig(max_new_tokens=max(lengths), eos_token_id=-1, do_sample=False, pad_token_id=0)
        manager = model.init_continuous_batching(generation_config=config)
        manager.start()
        for index, (ids, length) in enumerate(zip(prompts, lengths, strict=True)):
            manager.add_request(ids, request_id=str(index), max_new_tokens=length)
        done = got = 0
        while done < len(prompts):
            result = manager.get_result(timeout=5)
            if result is not None and result.is_finished():
                done, got = done + 1, got + len(result.generated_tokens)
        manager.stop(block=True, timeout=5)
        return got

    return continuous if args.continuous else static


if __name__ == "__main__":
    parser = options()
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--continuous", action="store_true")
    serve(parser.parse_args(), make, ("transformers", "torch"))
