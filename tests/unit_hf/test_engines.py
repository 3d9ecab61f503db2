"""Whole engines around tiny models: beside each other, and after they have been closed."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import logging
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from batchkit import Engine, OrcaScheduler, RequestOutput, SamplingParams
from tiny_models import tiny


def add_all(engine: Engine, name: str) -> None:
    for i in range(8):
        params = SamplingParams(max_tokens=5 + i, seed=i, temperature=i % 2, ignore_eos=True)
        engine.add_request([(5 + 7 * i + k) % 97 for k in range(1 + 9 * i)], params, request_id=f"{name}{i}")


def finals(outputs: list[RequestOutput]) -> dict[str, tuple[int, ...]]:
    return {output.request_id: output.token_ids for output in outputs if output.finished}


def test_two_engines_interleaved_give_what_each_gives_alone() -> None:
    def make() -> list[Engine]:
        first = Engine.from_model(tiny("llama", seed=1), num_kv_blocks=16, block_size=16)
        second = Engine.from_model(tiny("qwen2", seed=2), num_kv_blocks=20, block_size=8, scheduler=OrcaScheduler)
        for name, engine in (("a", first), ("b", second)):
            add_all(engine, name)
        return [first, second]

    alone = []
    for engine in make():
        outputs: list[RequestOutput] = []
        while engine.has_unfinished():
            outputs += engine.step()
        alone.append(finals(outputs))
        engine.close()

    engines = make()
    together: list[list[RequestOutput]] = [[], []]
    while any(engine.has_unfinished() for engine in engines):
        for engine, outputs in zip(engines, together, strict=True):
            outputs += engine.step()
    assert [finals(outputs) for outputs in together] == alone
    assert alone[0].values() != alone[1].values()
    for engine in engines:
        engine.close()


def process_state() -> dict[str, object]:
    return {
        "torch": torch.get_rng_state().tolist(),
        "numpy": np.random.get_state()[1].tolist(),
        "random": random.getstate(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "handlers": [logging.getLogger(name).handlers[:] for name in (None, "batchkit", "transformers")],
        "levels": [logging.getLogger(name).level for name in (None, "batchkit", "transformers")],
        "environment": dict(os.environ),
        "folder": os.getcwd(),
    }


def test_the_process_is_as_it_was(tmp_path: Path) -> None:
    models = [tiny("llama", seed=1), tiny("gpt2", seed=2)]
    before = process_state()
    for model in models:
        with Engine.from_model(model, num_kv_blocks=16, block_size=16, trace=tmp_path / "trace") as engine:
            add_all(engine, "a")
            engine.step()
            assert process_state() == before
            engine.generate([[5, 6], [7]], SamplingParams(max_tokens=3))
    assert process_state() == before


ROUNDS = """
import gc, os
from batchkit import Engine, SamplingParams
from tiny_models import tiny

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

# 8 KiB of KV for each token, so that 1,600 tokens can be seen.
model = tiny("llama", num_hidden_layers=4, num_key_value_heads=4, head_dim=64)
prompts = [[5 + i, 7] * 40 for i in range(16)]

def open_run_close():
    # Eight tensors of 64 MiB, of which a little is touched.
    with Engine.from_model(model, kv_memory="512MiB") as engine:
        engine.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True))
        return resident()

for _ in range(2):  # what torch loads and caches on first use is not the engine's
    open_run_close()
gc.collect()
print(resident())
print(*[open_run_close() for _ in range(10)])
gc.collect()
print(resident())
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="this system does not say what a process holds")
def test_memory_after_closing_is_that_of_the_start() -> None:
    # In a process of its own: what other tests have left on the heap would hide what is taken and given back.
    done = subprocess.run(
        [sys.executable, "-c", ROUNDS],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    (start,), opened, (end,) = [[int(size) for size in line.split()] for line in done.stdout.splitlines()]
    assert min(opened) > start + 8 * 2**20
    assert end < 1.05 * start
