"""A chat in the terminal, by the model's own chat template. An empty line, or the end of the input, ends it.

python examples/chat.py MODEL [--max-tokens 256] [--temperature 0.7]
"""

from __future__ import annotations

import argparse
import logging

from batchkit import Engine, RequestError, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder, or a name on the hub")
    parser.add_argument("--system", help="what the model is told first")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--dtype", default="auto", help="such as float32, faster on a CPU without bf16 units")
    args = parser.parse_args()
    logging.basicConfig()  # shows warnings
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature)
    messages = [{"role": "system", "content": args.system}] if args.system else []

    with Engine.from_pretrained(args.model, dtype=args.dtype, kv_memory="256MiB") as engine:
        while text := read("> "):
            messages.append({"role": "user", "content": text})
            answer = ""
            try:
                # A conversation is one prompt: a list of messages.
                for output in engine.stream([messages], params):
                    print(output.new_text, end="", flush=True)
                    answer += output.new_text
            except RequestError as error:
                print(f"[{error}]")  # the conversation no longer fits
                return
            print()
            messages.append({"role": "assistant", "content": answer})


def read(prompt: str) -> str:
    try:
        return input(prompt)
    except EOFError:
        print()
        return ""


if __name__ == "__main__":
    main()
