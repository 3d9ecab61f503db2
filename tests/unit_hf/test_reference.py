"""The reference backend against attention written out with loops, for every feature that a layer can have."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

import batchkit.hf.backends.reference as reference
from batchkit.errors import UnsupportedModel
from batchkit.hf.backends import choose_backend
from batchkit.hf.backends.base import LayerSpec
from batchkit.hf.backends.reference import ReferenceBackend
from batchkit.hf.batch import BatchBuilder
from batchkit.hf.kv_pool import KVPool
from batchkit.types import Request, SamplingParams, ScheduledSequence

REQUEST = Request(id="r", prompt_token_ids=(1,), params=SamplingParams(), max_tokens=1)
CPU = torch.device("cpu")
PLAIN = LayerSpec(0, 6, 2, 8, 8, torch.float32, CPU)
LAYERS = {
    "grouped": PLAIN,
    "multi-head": replace(PLAIN, num_kv_heads=6),
    "multi-query": replace(PLAIN, num_kv_heads=1),
    "value-dim": replace(PLAIN, value_dim=5),
    "window": replace(PLAIN, window=5),
    "window-one": replace(PLAIN, window=1),
    "softcap": replace(PLAIN, softcap=2.0),
    "sinks": replace(PLAIN, has_sinks=True),
    "everything": replace(PLAIN, value_dim=5, window=6, softcap=2.0, has_sinks=True),
}
BLOCK, NUM_BLOCKS = 4, 800


class Case:
    """Rows over a pool, with every K and V known."""

    def __init__(self, layer: LayerSpec, rows: list[tuple[int, int]], seed: int = 0, scale: float = 1.0) -> None:
        """Rows are (start, number of tokens)."""
        generator = torch.Generator().manual_seed(seed)

        def rand(*shape: int) -> torch.Tensor:
            return (torch.randn(shape, generator=generator) * scale).to(layer.dtype)

        self.layer = layer
        self.pool = KVPool([layer], num_blocks=NUM_BLOCKS, block_size=BLOCK)
        self.pool.fill(float("nan"))
        self.kv = self.pool.layers[0]
        free = random.Random(seed).sample(range(NUM_BLOCKS), NUM_BLOCKS)
        self.scheduled, self.keys, self.values = [], [], []
        for seq_id, (start, num) in enumerate(rows):
            total = start + num
            blocks = tuple(free.pop() for _ in range(-(-total // BLOCK)))
            key, value = (
                rand(total, layer.num_kv_heads, layer.key_dim),
                rand(total, layer.num_kv_heads, layer.value_dim),
            )
            slots = torch.tensor([blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(total)])
            self.kv.key[:, slots] = key.transpose(0, 1)
            self.kv.value[:, slots] = value.transpose(0, 1)
            self.keys.append(key)
            self.values.append(value)
            self.scheduled.append(
                ScheduledSequence(
                    seq_id=seq_id,
                    row=0,
                    seat=0,
                    request=REQUEST,
                    sample_index=0,
                    start=start,
                    num_tokens=num,
                    token_ids=(1,) * num,
                    output_ids=[],
                    num_output=0,
                    blocks=blocks,
                    samples=True,
                    idle=False,
                )
            )
        self.batch = BatchBuilder(BLOCK).build(self.scheduled)
        self.query = rand(self.batch.num_tokens, layer.num_heads, layer.key_dim)
        self.sinks = rand(layer.num_heads) if layer.has_sinks else None
        self.key = torch.cat([key[row.start :] for key, row in zip(self.keys, self.scheduled, strict=True)])
        self.value = torch.cat([value[row.start :] for value, row in zip(self.values, self.scheduled, strict=True)])

    def run(self, backend: ReferenceBackend | None = None, scaling: float | None = None) -> torch.Tensor:
        backend = backend or ReferenceBackend()
        plan = backend.plan(self.batch)
        return backend.attend(
            self.layer, self.kv, plan, self.query, self.key, self.value, scaling=scaling, sinks=self.sinks
        )

    def expected(self, scaling: float | None = None) -> torch.Tensor:
        layer = self.layer
        factor = layer.key_dim**-0.5 if scaling is None else scaling
        out, at = [], 0
        for row, key, value in zip(self.scheduled, self.keys, self.values, strict=True):
            for position in range(row.start, row.start + row.num_tokens):
                low = 0 if layer.window is None else max(0, position - layer.window + 1)
                heads = []
                for head in range(layer.num_heads):
                    shared = head // (layer.num_heads // layer.num_kv_heads)
                    scores = key[low : position + 1, shared].double() @ self.query[at, head].double() * factor
                    if layer.softcap is not None:
                        scores = layer.softcap * torch.tanh(scores / layer.softcap)
                    if self.sinks is not None:
                        scores = torch.cat([scores, self.sinks[head : head + 1].double()])
                    weights = scores.softmax(0)[: position + 1 - low]
                    heads.append(weights @ value[low : position + 1, shared].double())
                out.append(torch.stack(heads))
                at += 1
        return torch.stack(out).float()


MIXES = {
    "decode": [(8, 1), (0, 1), (3, 1), (15, 1), (22, 1)],
    "one-decode": [(9, 1)],
    "full-blocks": [(7, 1), (7, 1)],
    "one-token-prompt": [(0, 1)],
    "fresh": [(0, 7)],
    "fresh-together": [(0, 7), (0, 7), (0, 7)],
    "fresh-ragged": [(0, 3), (0, 9), (0, 2)],
    "chunk": [(6, 5)],
    "chunks": [(6, 5), (4, 4), (1, 2)],
    "all": [(6, 5), (8, 1), (0, 6), (0, 1), (3, 1), (0, 2), (17, 3), (12, 1)],
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("kind", LAYERS)
def test_equals_loops(kind: str, mix: str) -> None:
    case = Case(LAYERS[kind], MIXES[mix])
    torch.testing.assert_close(case.run(), case.expected(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["grouped", "everything"])
def test_scaling(kind: str) -> None:
    case = Case(LAYERS[kind], MIXES["all"])
    torch.testing.assert_close(case.run(scaling=0.7), case.expected(0.7), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(kind: str, dtype: torch.dtype) -> None:
    case = Case(replace(LAYERS[kind], dtype=dtype), MIXES["all"])
    out = case.run()
    assert out.dtype == dtype
    bound = 4e-2 if dtype == torch.bfloat16 else 6e-3
    torch.testing.assert_close(out.float(), case.expected(), rtol=bound, atol=bound)


@pytest.mark.parametrize("kind", ["grouped", "window", "everything"])
def test_rows_of_very_different_length_are_grouped(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_SIMILAR", 8)
    rows = [(n, 1) for n in (1, 200, 3, 90, 2, 60, 150, 33, 7, 100)] + [(0, n) for n in (40, 3, 11, 2)]
    case = Case(LAYERS[kind], rows)
    backend = ReferenceBackend()
    groups = backend.plan(case.batch).groups(case.layer.window, CPU, NUM_BLOCKS)
    if case.layer.window is None:
        assert 5 <= len(groups) <= 9
        gathered = sum(group.size * group.num_keys for group in groups)
        assert gathered < 2.5 * int(case.batch.kv_lens.sum())
    torch.testing.assert_close(case.run(backend), case.expected(), rtol=1e-5, atol=1e-5)


def test_short_rows_are_one_call() -> None:
    case = Case(PLAIN, [(n, 1) for n in range(0, 200, 9)])
    assert len(ReferenceBackend().plan(case.batch).groups(None, CPU, NUM_BLOCKS)) == 1


def test_a_window_gathers_only_what_it_sees() -> None:
    case = Case(LAYERS["window"], [(200, 1), (150, 1), (100, 1), (90, 3)])
    groups = ReferenceBackend().plan(case.batch).groups(5, CPU, NUM_BLOCKS)
    assert all(group.num_keys <= 12 for group in groups)


@pytest.mark.parametrize("kind", ["grouped", "window", "everything"])
def test_long_queries_are_split(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_MAX_SCORES", 64)
    case = Case(LAYERS[kind], [(6, 15), (0, 21), (3, 1), (0, 12)])
    torch.testing.assert_close(case.run(), case.expected(), rtol=1e-5, atol=1e-5)


def test_gathering_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_MAX_GATHER", 64)
    case = Case(PLAIN, [(29, 1)] * 7 + [(0, 30)] * 5)
    groups = ReferenceBackend().plan(case.batch).groups(None, CPU, NUM_BLOCKS)
    assert max(group.size * group.num_keys for group in groups) <= 64
    torch.testing.assert_close(case.run(), case.expected(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["grouped", "everything"])
def test_a_row_of_nan_disturbs_no_other(kind: str) -> None:
    case = Case(LAYERS[kind], MIXES["all"])
    good = case.run()
    for bad, row in enumerate(case.scheduled):
        spoilt = Case(LAYERS[kind], MIXES["all"])
        for block in row.blocks:
            spoilt.kv.key[:, block * BLOCK : (block + 1) * BLOCK] = torch.nan
            spoilt.kv.value[:, block * BLOCK : (block + 1) * BLOCK] = torch.nan
        begin, end = int(case.batch.query_starts[bad]), int(case.batch.query_starts[bad + 1])
        for tensor in (spoilt.query, spoilt.key, spoilt.value):
            tensor[begin:end] = torch.nan
        others = torch.ones(len(good), dtype=torch.bool)
        others[begin:end] = False
        assert torch.equal(spoilt.run()[others], good[others])


def test_scratch_is_reused_and_can_be_dropped() -> None:
    backend = ReferenceBackend()
    large, small = Case(PLAIN, [(40, 1), (30, 1)]), Case(PLAIN, [(5, 1), (6, 1)], seed=1)
    for case in (small, large, small, large):
        torch.testing.assert_close(case.run(backend), case.expected(), rtol=1e-5, atol=1e-5)
    assert len(backend._scratch) == 2
    backend.drop_caches()
    assert not backend._scratch
    torch.testing.assert_close(small.run(backend), small.expected(), rtol=1e-5, atol=1e-5)


def test_similar_covers_each_once() -> None:
    rng = random.Random(0)
    for _ in range(100):
        lens = np.array([rng.choice([1, 5, 300, 700, 5000, 300_000]) for _ in range(rng.randint(0, 30))], np.int64)
        groups = [group.tolist() for group in reference._similar(lens)]
        assert sorted(at for group in groups for at in group) == list(range(len(lens)))
        for group in groups:
            assert group == sorted(group)
            longest = lens[group].max()
            assert longest <= reference._SIMILAR or lens[group].min() >= min(longest // 2, longest - 1)


def test_choose_backend() -> None:
    assert choose_backend(None, [replace(PLAIN, dtype=torch.float64)], "M").name == "reference"
    assert choose_backend("reference", [PLAIN], "M").name == "reference"
    with pytest.raises(ValueError, match="got 'flash'"):
        choose_backend("flash", [PLAIN], "M")

    class Picky(ReferenceBackend):
        name = "picky"

        def unsupported_reasons(self, layers: object) -> list[str]:
            return ["no windows", "no sinks"]

    with pytest.raises(UnsupportedModel, match=r"M cannot be bound: attention backend picky: no windows; .*no sinks"):
        choose_backend(Picky(), [PLAIN], "M")
