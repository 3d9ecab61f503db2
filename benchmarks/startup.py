"""From a fresh process to the first token: imports, loading, first step. The file cache is warm after the first repeat.

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
    "import_s": "importing batchkit, torch and transformers",
    "load_s": "Engine.from_pretrained",
    "first_token_s": "add_request to the first token",
    "without_import_s": "from_pretrained to the first token, imports done before",
    "with_import_s": "everything",
}


def child(model: str, dtype: str, started: float) -> None:
    """Run in a process of its own: print the seconds of each part as JSON. `started` is the parent's wall clock."""
    begin = time.time()
    from batchkit import Engine, SamplingParams
    from batchkit.hf import runner  # noqa: F401 - brings torch and what the engine uses of transformers

    imported = time.time()
    with Engine.from_pretrained(model, dtype=dtype) as engine:
        loaded = time.time()
        engine.add_request("The capital of France is", SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
        while not any(output.new_token_ids for output in engine.step()):
            pass
        done = time.time()
    parts = {
        "start_s": begin - started,
        "import_s": imported - begin,
        "load_s": loaded - imported,
        "first_token_s": done - loaded,
        "without_import_s": done - imported,
        "with_import_s": done - started,
    }
    print(json.dumps(parts))


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds from a fresh process to the first token.")
    parser.add_argument("--model", default=".cache/smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/startup.json"))
    parser.add_argument("--child", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        child(args.model, args.dtype, args.child)
        return

    runs: list[dict[str, float]] = []
    for _ in range(args.repeat):
        command = [sys.executable, __file__, "--model", args.model, "--dtype", args.dtype, "--child", repr(time.time())]
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}
        )
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    print(f"{args.model}, {args.dtype}, median of {args.repeat} fresh processes (lowest, highest)")
    for key, meaning in COLUMNS.items():
        values = [run[key] for run in runs]
        print(f"{statistics.median(values):8.2f} s  ({min(values):.2f}, {max(values):.2f})  {meaning}")
    args.json.parent.mkdir(parents=True, exist_ok=True)
    record = {"model": args.model, "dtype": args.dtype, "runs": runs}
    args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
