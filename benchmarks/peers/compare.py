"""batchkit and the engines that one would pick instead, on one machine in one run.

Each engine is a process of its own, in its own environment (`make bench-peers` sets them up). They are started one
after the other, and then run in turn, A B C A B C. Ratios are medians over the repeats of the ratio within each repeat:
absolute figures drift with the machine.

What is measured:

* throughput: 128 requests of 128 prompt tokens, output lengths Exp(32), redrawn above 384; tokens generated per second;
* step: what a decode step takes with 1, 16, 64 and 128 rows: the difference of two runs that generate 8 and 40 tokens;
* prefill: 16 prompts of 128 tokens and one token each;
* start: from the process's begin to its first token; and the most memory that it had.

    python benchmarks/peers/compare.py --model .cache/smollm2 --envs .venv-peers [--engines batchkit,vllm --repeat 5]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchkit.experiment.loads import exponential_lengths

HERE = Path(__file__).parent
ENGINES = ("batchkit", "vllm", "openvino", "transformers static", "transformers continuous")
BATCHES = (1, 16, 64, 128)
SHORT, LONG = 8, 40
"""Tokens of the two runs whose difference is made of decode steps."""


@dataclass
class Peer:
    """An engine's process.

    Attributes:
        name: of the engine.
        process: takes runs.
        start_s: until its first token.
        found: seconds by what was measured, one for each repeat.
        peak_mb: the most memory that it had.
        versions: of what it runs with.
    """

    name: str
    process: subprocess.Popen[str]
    start_s: float = 0.0
    found: dict[str, list[float]] = field(default_factory=dict)
    peak_mb: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)

    def run(self, prompt: int, lengths: list[int], seed: int) -> float:
        """Seconds."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompt": prompt, "lengths": lengths, "seed": seed}) + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        self.peak_mb = max(self.peak_mb, answer["peak_mb"])
        return float(answer["seconds"])

    def wait(self, started: float) -> None:
        """Until it is ready."""
        self.versions = self._answer()["versions"]
        self.start_s = time.perf_counter() - started

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} has ended with exit status {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def command(name: str, args: argparse.Namespace) -> list[str]:
    """What starts an engine."""
    envs = Path(args.envs)
    own = envs / name / "bin/python"
    python = str(own) if name in ("vllm", "openvino") else sys.executable
    model = str(envs / "openvino-model") if name == "openvino" else args.model
    more = {
        "transformers continuous": ["--continuous"],
        "batchkit": [] if args.attention is None else ["--attention", args.attention],
    }.get(name, [])
    return [python, str(HERE / f"run_{name.split()[0]}.py"), "--model", model, "--dtype", args.dtype, *more]


def measure(peer: Peer, parts: list[str], seed: int, args: argparse.Namespace) -> None:
    """All parts once."""
    if "throughput" in parts:
        drawn = exponential_lengths(args.n, mean=32, cap=384, rng=random.Random(seed))
        lengths = [max(1, length) for length in drawn]
        peer.found.setdefault("throughput", []).append(sum(lengths) / peer.run(128, lengths, seed))
    if "step" in parts:
        for batch in args.batches:
            short, long = (peer.run(128, [tokens] * batch, seed) for tokens in (SHORT, LONG))
            peer.found.setdefault(f"step {batch}", []).append((long - short) / (LONG - SHORT))
    if "prefill" in parts:
        peer.found.setdefault("prefill 16x128", []).append(16 * 128 / peer.run(128, [1] * 16, seed))


def row(what: str, peers: list[Peer]) -> str:
    """Medians, and in brackets how many times as fast the first engine is."""
    is_time = what.startswith("step")
    cells = [f"{what:<16}"]
    for peer in peers:
        value = statistics.median(peer.found[what])
        ratios = [mine / its for mine, its in zip(peers[0].found[what], peer.found[what], strict=True)]
        ratio = statistics.median([1 / r for r in ratios] if is_time else ratios)
        shown = f"{1e3 * value:.1f} ms" if is_time else f"{value:.0f} tok/s"
        cells.append(f"{shown} ({ratio:.2f})".rjust(24))
    return " ".join(cells)


def machine() -> dict[str, Any]:
    """The processor, as far as the system tells."""
    words: list[str] = []
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
            elif key.strip() == "flags":
                words = value.split()
    except OSError:
        pass
    units = [unit for unit in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if unit in words]
    return {"processor": name, "cores": len(os.sched_getaffinity(0)), "units": units}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--envs", default=".venv-peers", help="folder of the peers' environments and exports")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--parts", default="throughput,step,prefill")
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=list(BATCHES))
    parser.add_argument("--n", type=int, default=128, help="requests of the throughput part")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--attention", help="of batchkit")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    parts = args.parts.split(",")
    peers: list[Peer] = []
    try:
        for name in args.engines.split(","):
            started = time.perf_counter()
            process = subprocess.Popen(command(name, args), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            peers.append(Peer(name, process))
            peers[-1].wait(started)
            print(f"{name}: first token after {peers[-1].start_s:.1f} s", flush=True)
        for repeat in range(args.repeat):
            for peer in peers:
                measure(peer, parts, repeat, args)
            print(f"repeat {repeat + 1} of {args.repeat}", flush=True)
    finally:
        for peer in peers:
            peer.process.terminate()
            peer.process.wait()
    print(f"\n{'':<16} " + " ".join(f"{peer.name:>24}" for peer in peers))
    for what in peers[0].found:
        print(row(what, peers))
    print(f"{'start':<16} " + " ".join(f"{peer.start_s:.1f} s".rjust(24) for peer in peers))
    print(f"{'peak memory':<16} " + " ".join(f"{peer.peak_mb:.0f} MB".rjust(24) for peer in peers))
    print(f"\nmedians of {args.repeat}; in brackets: {peers[0].name} is so many times as fast")
    if args.json:
        record = {
            "model": Path(args.model).name,
            "dtype": args.dtype,
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine(),
            "engines": {
                peer.name: {
                    "versions": peer.versions,
                    "start_s": peer.start_s,
                    "peak_mb": peer.peak_mb,
                    "found": peer.found,
                }
                for peer in peers
            },
        }
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
