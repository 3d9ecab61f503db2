"""What the step trace costs: the seconds spent writing it, as a share of the run that is traced.

    python benchmarks/tracing.py [--model .cache/smollm2] [--n 32]

The writer is timed from inside, since two runs of one workload differ by more than it costs.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

from batchkit import Engine, SamplingParams
from batchkit.trace import TraceWriter, read_trace


class Timed:
    """Adds up the seconds that some methods of a class take."""

    def __init__(self, cls: type, *names: str) -> None:
        self.seconds = 0.0
        for name in names:
            setattr(cls, name, self._timed(getattr(cls, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*args)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=".cache/smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--n", type=int, default=32, help="requests")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=32, help="tokens of each output")
    args = parser.parse_args()

    writing = Timed(TraceWriter, "added", "ended", "step", "close")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.jsonl")
        with Engine.from_pretrained(args.model, dtype=args.dtype, kv_memory="1GiB", trace=path) as engine:
            params = SamplingParams(temperature=0, max_tokens=args.output, ignore_eos=True)
            engine.generate([[5, 6, 7]], params)
            writing.seconds, began = 0.0, time.perf_counter()
            prompts = ([100 + (7 * i + k) % 9000 for k in range(args.prompt)] for i in range(args.n))
            engine.generate(prompts, params)
            seconds = time.perf_counter() - began
        num_steps, num_bytes = len(read_trace(path).steps), os.path.getsize(path)
    print(
        f"{args.n} requests of {args.prompt} + {args.output} tokens, {args.dtype}: {seconds:.1f} s, of which "
        f"{1e3 * writing.seconds:.1f} ms wrote the trace: {writing.seconds / seconds:.2%}\n"
        f"{num_steps} steps, {num_bytes / num_steps:,.0f} bytes a step"
    )


if __name__ == "__main__":
    main()
