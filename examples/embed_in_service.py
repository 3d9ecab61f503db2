"""A service with a model of its own: any thread may ask, one engine answers, the model is used beside it.

    python examples/embed_in_service.py MODEL [--clients 8]

`EngineThread` owns the engine and runs it in a thread of its own. Request handlers submit prompts and wait for futures,
or read streams; whatever is done with the model itself goes between two steps.
"""

from __future__ import annotations

import argparse
import logging
from concurrent.futures import ThreadPoolExecutor

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from batchkit import Engine, EngineStats, EngineThread, SamplingParams


def metrics(stats: EngineStats) -> str:
    """The lines that Prometheus reads. For figures of each step see prometheus_metrics.py."""
    values = {
        "requests_waiting": stats.num_waiting,
        "requests_running": stats.num_running,
        "kv_blocks_free": stats.num_free_blocks,
        "steps_total": stats.num_steps,
        "prompt_tokens_total": stats.prompt_tokens,
        "generated_tokens_total": stats.generated_tokens,
        "preemptions_total": stats.num_preemptions,
    }
    lines = [f"batchkit_{name} {value}" for name, value in values.items()]
    lines += [f'batchkit_requests_total{{reason="{reason}"}} {count}' for reason, count in stats.finished.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder, or a name on the hub")
    parser.add_argument("--clients", type=int, default=8)
    args = parser.parse_args()

    logging.basicConfig(level=logging.WARNING)  # batchkit logs to "batchkit" and sets up nothing
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    inner = Engine.from_model(model, tokenizer, kv_memory="256MiB", max_num_seqs=16)
    params = SamplingParams(temperature=0, max_tokens=12)

    # Leaving the block finishes what has been submitted, and frees the KV memory.
    with EngineThread(inner, max_waiting=64) as engine:

        def answer(prompt: str) -> str:
            return engine.submit(prompt, params, timeout_s=60).result().text

        prompts = [f"{i} plus {i} is" for i in range(args.clients)]
        with ThreadPoolExecutor(args.clients) as clients:  # each waits for its own answer, as request handlers do
            for prompt, text in zip(prompts, clients.map(answer, prompts), strict=True):
                print(f"{prompt!r} -> {text!r}")

        try:
            answer("word " * 100_000)
        except ValueError as error:
            print(f"refused: {error}")

        for output in engine.stream("The capital of Italy is", params):
            print(output.new_text, end="", flush=True)
            if "." in output.text:
                break  # which aborts it
        print()

        prompt = tokenizer("The capital of France is", return_tensors="pt").input_ids

        def predict(_: Engine) -> torch.Tensor:  # the model is the caller's still
            with torch.no_grad():
                return model(prompt).logits[0, -1].argmax()

        print(f"the model by itself: {tokenizer.decode(engine.call(predict).result())!r}\n")
    print(metrics(engine.stats()))


if __name__ == "__main__":
    main()
