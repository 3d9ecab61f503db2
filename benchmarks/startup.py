"""From a fresh process to the first token: imports, loading, first step; and what of it is transformers' own.

In turn with each process, transformers loads the same model in one of its own, and makes no token: nothing that runs
its models takes less. The file cache is warm after the first repeat.

python benchmarks/startup.py --model .cache/smollm2
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

COLUMNS = {
    "start_s": "the interpreter's own start",
    "import_s": "importing batchkit",
    "load_s": "Engine.from_pretrained, which imports torch and transformers",
    "first_token_s": "add_request to the first token",
    "all_s": "everything",
    "transformers_s": "transformers alone: imports, the model and its tokenizer, no token",
}


def serve(model: str, dtype: str, started: float) -> dict[str, float]:
    """The seconds of each part; run in a process of its own. `started` is the parent's wall clock."""
    begin = time.time()
    from batchkit import Engine, SamplingParams

    imported = time.time()
    with Engine.from_pretrained(model, dtype=dtype) as engine:
        loaded = time.time()
        engine.add_request("The capital of France is", SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
        while not any(output.new_token_ids for output in engine.step()):
            pass
        done = time.time()
    return {
        "start_s": begin - started,
        "import_s": imported - begin,
        "load_s": loaded - imported,
        "first_token_s": done - loaded,
        "all_s": done - started,
    }


def load(model: str, dtype: str, started: float) -> dict[str, float]:
    """As `serve`, without batchkit."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    AutoTokenizer.from_pretrained(model)
    return {"transformers_s": time.time() - started}


PARTS = {"serve": serve, "load": load}


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds from a fresh process to the first token.")
    parser.add_argument("--model", default=".cache/smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/startup.json"))
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part is not None:
        print(json.dumps(PARTS[args.part](args.model, args.dtype, args.started)))
        return

    runs: list[dict[str, float]] = []
    for _ in range(args.repeat):
        run: dict[str, float] = {}
        for part in PARTS:
            command = [sys.executable, __file__, "--model", args.model, "--dtype", args.dtype, "--part", part]
            done = subprocess.run(
                [*command, "--started", repr(time.time())],
                check=True,
                stdout=subprocess.PIPE,
                stderr=None if part == "serve" else subprocess.DEVNULL,  # a bar for the weights
                text=True,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
            )
            run |= json.loads(done.stdout.splitlines()[-1])
        runs.append(run)
    print(f"{args.model}, {args.dtype}, median of {args.repeat} fresh processes (lowest, highest)")
    for key, meaning in COLUMNS.items():
        values = [run[key] for run in runs]
        print(f"{statistics.median(values):8.2f} s  ({min(values):.2f}, {max(values):.2f})  {meaning}")
    ratio = statistics.median(run["all_s"] / run["transformers_s"] for run in runs)
    print(f"{ratio:8.2f} times what transformers alone takes, median of the ratios")
    args.json.parent.mkdir(parents=True, exist_ok=True)
    record = {"model": args.model, "dtype": args.dtype, "runs": runs}
    args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
