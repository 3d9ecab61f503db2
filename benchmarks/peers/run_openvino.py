"""OpenVINO GenAI's continuous batching, in an environment of its own. It is called by `compare.py`.

`--model` is an export of the model: ``optimum-cli export openvino --model MODEL --task text-generation-with-past
--weight-format fp16 EXPORT``.
"""

from __future__ import annotations

import argparse

from protocol import Generate, options, serve


def make(args: argparse.Namespace) -> Generate:
    """An engine with chunked prefill and without its prefix cache."""
    import numpy as np
    import openvino
    import openvino_genai

    config = openvino_genai.SchedulerConfig()
    config.cache_size, config.max_num_seqs, config.max_num_batched_tokens = 2, args.max_seqs, 512
    config.enable_prefix_caching, config.dynamic_split_fuse = False, True
    hint = {"bfloat16": "bf16", "float32": "f32"}[args.dtype]
    engine = openvino_genai.ContinuousBatchingPipeline(args.model, config, "CPU", {"INFERENCE_PRECISION_HINT": hint})

    def generate(prompts: list[list[int]], lengths: list[int]) -> int:
        handles = []
        for index, (ids, length) in enumerate(zip(prompts, lengths, strict=True)):
            wanted = openvino_genai.GenerationConfig()
            wanted.max_new_tokens = wanted.min_new_tokens = length
            wanted.ignore_eos, wanted.do_sample = True, False
            handles.append(engine.add_request(index, openvino.Tensor(np.array([ids], dtype=np.int64)), wanted))
        while engine.has_non_finished_requests():
            engine.step()
        return sum(len(output.generated_ids) for handle in handles for output in handle.read_all())

    return generate


if __name__ == "__main__":
    serve(options().parse_args(), make, ("openvino-genai", "openvino"))
