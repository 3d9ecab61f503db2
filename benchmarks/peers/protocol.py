"""What the engines that are compared have in common: a process each, which is told what to generate.

A process loads its engine, generates a little, and says that it is ready; then it takes one line of JSON for each run
from its standard input, and answers with one. So engines that take a minute to start can run in turn, A B A B.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

Generate = Callable[[list[list[int]], list[int]], int]
"""Takes prompts and how many tokens each is to give, greedily, whatever they are; returns how many it got."""


def options() -> argparse.ArgumentParser:
    """What every engine takes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-seqs", type=int, default=128)
    parser.add_argument("--max-len", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=49_000)
    return parser


def prompts_of(count: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    """Random tokens. The first ids are special ones in most vocabularies."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab // 100, vocab) for _ in range(length)] for _ in range(count)]


def serve(args: argparse.Namespace, make: Callable[[argparse.Namespace], Generate], packages: tuple[str, ...]) -> None:
    """Be the process: answers go to what standard output was, and whatever the engine prints to standard error.

    Args:
        args: of `options`.
        make: the engine.
        packages: whose versions are told.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**what: Any) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    generate = make(args)
    generate(prompts_of(1, 8, args.vocab, 0), [1])
    say(versions={name: metadata.version(name) for name in packages})
    generate(prompts_of(4, 128, args.vocab, 1), [4] * 4)
    for line in sys.stdin:
        run = json.loads(line)
        prompts = prompts_of(len(run["lengths"]), run["prompt"], args.vocab, run["seed"])
        started = time.perf_counter()
        got = generate(prompts, run["lengths"])
        seconds = time.perf_counter() - started
        assert got == sum(run["lengths"]), (got, sum(run["lengths"]))
        with open("/proc/self/status") as status:
            peak = next(int(row.split()[1]) for row in status if row.startswith("VmHWM"))
        say(seconds=seconds, tokens=got, peak_mb=peak / 1024)
