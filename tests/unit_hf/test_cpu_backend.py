"""The backend of C++ kernels on the CPU: against the reference, and bit for bit against itself."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import math
import random
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import batchkit.hf.backends.cpu as cpu
import batchkit.hf.backends.native as native
from batchkit import ContiguousAllocator, Engine, OrcaScheduler, PagedScheduler, SamplingParams
from batchkit.errors import UnsupportedModel
from batchkit.hf.backends import choose_backend
from batchkit.hf.backends.base import LayerSpec
from batchkit.hf.backends.cpu import CpuBackend
from batchkit.hf.backends.reference import ReferenceBackend
from batchkit.hf.backends.trial import TrialStep, faults, make_step
from tiny_models import tiny

CPU = torch.device("cpu")
PLAIN = LayerSpec(0, 9, 3, 64, 64, torch.float32, CPU)
HALF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""What rounding to the nearest adds at most, as a part of the result."""

_REASONS = CpuBackend().unsupported_reasons([PLAIN])
pytestmark = pytest.mark.skipif(bool(_REASONS), reason="; ".join(_REASONS))


def check(step: TrialStep, scaling: float | None = None) -> None:
    got, want = (step.run(backend, scaling) for backend in (CpuBackend(), ReferenceBackend()))
    assert got.is_contiguous() and got.dtype == want.dtype
    torch.testing.assert_close(got, want, atol=1e-5 * float(step.value.abs().max()), rtol=1e-5)


def in_float32(step: TrialStep) -> TrialStep:
    kv = replace(step.kv, key=step.kv.key.float(), value=step.kv.value.float())
    return TrialStep(
        layer=replace(step.layer, dtype=torch.float32),
        kv=kv,
        batch=step.batch,
        query=step.query.float(),
        key=step.key.float(),
        value=step.value.float(),
        sinks=None if step.sinks is None else step.sinks.float(),
    )


def random_step(seed: int, dtype: torch.dtype = torch.float32) -> tuple[TrialStep, float | None]:
    rng = random.Random(seed)
    kv_heads, shared = rng.choice([(1, 1), (3, 1), (2, 2), (3, 3), (1, 5), (2, 7), (1, 8), (1, 16), (1, 71)])
    width = rng.choice([8, 5, 64, 80, 96, 128, 192, 256])
    layer = LayerSpec(
        index=0,
        num_heads=kv_heads * shared,
        num_kv_heads=kv_heads,
        key_dim=width,
        value_dim=rng.choice([width, width, 48, 13]),
        dtype=dtype,
        device=CPU,
        window=rng.choice([None, None, None, 1, 3, 17, 64, 256, 300]),
        softcap=rng.choice([None, None, 1.5, 30.0]),
        has_sinks=rng.random() < 0.3,
    )
    size = rng.choice([1, 5, 16, 32, 64])
    near = [0, 1, size - 1, size, size + 1, 63, 64, 65, 255, 256, 257, 511, 513, 700]
    rows = [(rng.choice(near), rng.choice([1, 1, 1, 2, 3, rng.randint(1, 150)])) for _ in range(rng.randint(1, 7))]
    step = make_step(layer, rows, block_size=size, scattered=rng.random() < 0.7, seed=seed)
    assert step.kv.key.isnan().any()
    return step, rng.choice([None, None, 0.4])


class TestAgainstTheReference:
    @pytest.mark.parametrize("seed", range(80))
    def test_random_steps(self, seed: int) -> None:
        check(*random_step(seed))

    @pytest.mark.parametrize("dtype", HALF)
    @pytest.mark.parametrize("seed", range(80, 110))
    def test_half_precision_is_rounded_once(self, seed: int, dtype: torch.dtype) -> None:
        """What the same numbers give in float32, but for rounding the result: nothing within is rounded."""
        step, scaling = random_step(seed, dtype)
        truth = in_float32(step).run(ReferenceBackend(), scaling)
        got = step.run(CpuBackend(), scaling)
        assert got.dtype == dtype
        atol = 1e-5 * float(step.value.abs().max())
        torch.testing.assert_close(got.float(), truth, atol=atol, rtol=HALF[dtype])
        reference = step.run(ReferenceBackend(), scaling).float()
        assert (got.float() - truth).norm() <= (reference - truth).norm() * 1.01 + atol

    @pytest.mark.parametrize("dtype", [torch.float32, *HALF])
    @pytest.mark.parametrize("width", [5, 8, 64, 72, 80, 96, 128, 192, 256])
    def test_widths(self, width: int, dtype: torch.dtype) -> None:
        for value_dim in (width, 24):
            layer = replace(PLAIN, key_dim=width, value_dim=value_dim, dtype=dtype)
            step = make_step(layer, [(70, 1), (3, 2), (0, 1), (0, 50), (20, 40)], block_size=16)
            got, truth = step.run(CpuBackend()), in_float32(step).run(ReferenceBackend())
            torch.testing.assert_close(got.float(), truth, atol=5e-5, rtol=HALF.get(dtype, 0))

    @pytest.mark.parametrize("shared", range(1, 14))
    def test_heads(self, shared: int) -> None:
        layer = replace(PLAIN, num_heads=2 * shared, num_kv_heads=2)
        check(make_step(layer, [(300, 1), (30, 2), (0, 5), (64, 33), (0, 97)], block_size=16))

    @pytest.mark.parametrize("size", [1, 5, 16, 32, 64])
    def test_lengths_at_the_borders_of_blocks_and_items(self, size: int) -> None:
        layer = replace(PLAIN, num_heads=4, num_kv_heads=2, key_dim=16, value_dim=16)
        near = {base + more for base in (0, size, 3 * size, 64, 256, 512, 4095) for more in (-1, 0, 1, 2)}
        starts = sorted(start for start in near if start >= 0)
        check(make_step(layer, [(start, 1) for start in starts], block_size=size))
        check(make_step(layer, [(start, 3) for start in starts], block_size=size, scattered=False))

    @pytest.mark.parametrize("window", [None, 3, 250])
    @pytest.mark.parametrize("heads", [1, 2])
    def test_a_few_queries_on_both_sides_of_a_border(self, heads: int, window: int | None) -> None:
        """Some of them see no key of one of their items."""
        layer = replace(PLAIN, num_heads=heads, num_kv_heads=1, key_dim=16, value_dim=16, window=window)
        rows = [(start, count) for start in range(248, 258) for count in range(2, 9)]
        check(make_step(layer, rows, block_size=16))

    @pytest.mark.parametrize("window", [1, 2, 16, 250, 256, 257, 1000, 5000])
    def test_windows(self, window: int) -> None:
        layer = replace(PLAIN, num_heads=4, num_kv_heads=2, window=window)
        rows = [(1500, 1), (257, 1), (0, 1), (0, 400), (300, 90), (999, 2)]
        check(make_step(layer, rows, block_size=16))

    @pytest.mark.parametrize("softcap", [0.5, 50.0])
    def test_softcap(self, softcap: float) -> None:
        step = make_step(replace(PLAIN, softcap=softcap), [(300, 1), (0, 70)], block_size=16)
        check(step)
        step.query.mul_(20)
        check(step)

    def test_long_prompts_and_chunks(self) -> None:
        layer = replace(PLAIN, num_heads=3, num_kv_heads=1)
        check(make_step(layer, [(0, 1500), (2500, 200), (4000, 40)], block_size=16))

    def test_a_trial_finds_nothing(self) -> None:
        kinds = [
            replace(PLAIN, dtype=dtype, window=window, has_sinks=has_sinks)
            for dtype in (torch.float32, *HALF)
            for window in (None, 9)
            for has_sinks in (False, True)
        ]
        assert faults(CpuBackend(), kinds, 16) == []


class TestScores:
    @pytest.mark.parametrize("rows", [[(300, 1)], [(0, 300)]], ids=["decoding", "prompt"])
    def test_huge_ones(self, rows: list[tuple[int, int]]) -> None:
        """Far beyond what exp can take: each query sees one key, or next to one."""
        step = make_step(PLAIN, rows, block_size=16)
        step.query.mul_(1e4)
        got = step.run(CpuBackend())
        assert got.isfinite().all()
        scores = in_float64(step)
        torch.testing.assert_close(got.double(), scores, atol=5e-2, rtol=0)
        assert (got.double() - scores).abs().median() < 1e-6

    @pytest.mark.parametrize("rows", [[(300, 1)], [(0, 300)]], ids=["decoding", "prompt"])
    def test_equal_ones_are_a_mean(self, rows: list[tuple[int, int]]) -> None:
        step = make_step(replace(PLAIN, num_heads=3), rows, block_size=16)
        step.query.zero_()
        check(step)

    @pytest.mark.parametrize("rows", [[(300, 1)], [(290, 40)]], ids=["decoding", "chunk"])
    def test_minus_infinity_weighs_nothing(self, rows: list[tuple[int, int]]) -> None:
        """All scores of the first item, and of the first keys that are copied together."""
        step = make_step(PLAIN, rows, block_size=16)
        step.query.abs_()
        for position in range(260):
            step.kv.key[:, slot(step, 0, position)] = -math.inf
        got, want = (step.run(backend) for backend in (CpuBackend(), ReferenceBackend()))
        assert got.isfinite().all()
        torch.testing.assert_close(got, want, atol=1e-5 * float(step.value.abs().max()), rtol=1e-5)

    def test_weights_are_exact_far_below_the_highest(self) -> None:
        """A key that has the score 0 and the value 0, and one of score -x and value 1: the result is its weight."""
        layer = replace(PLAIN, num_heads=1, num_kv_heads=1, key_dim=16, value_dim=16)
        scores = torch.linspace(-80, 0, 997)
        step = make_step(layer, [(1, 1)] * len(scores), block_size=2)
        step.query.fill_(1)
        for row, score in enumerate(scores):
            first, second = slot(step, row, 0), slot(step, row, 1)
            step.kv.key[:, [first, second]] = 0
            step.kv.value[:, first], step.kv.value[:, second] = 0, 1
            step.kv.key[:, second, 3] = score
        got = step.run(CpuBackend(), scaling=1.0)[:, 0, 0].double()
        want = torch.sigmoid(scores.double())
        assert ((got - want).abs() / want).max() < 1.8e-7

    @pytest.mark.parametrize("dtype", HALF)
    @pytest.mark.parametrize("width", [16, 23])
    def test_results_are_rounded_as_torch_rounds(self, width: int, dtype: torch.dtype) -> None:
        """Means of two numbers, many of which lie in the middle between two that the dtype has."""
        layer = replace(PLAIN, value_dim=width, dtype=dtype)
        step = make_step(layer, [(1, 1)] * 200, block_size=2)
        step.query.zero_()
        pairs = [[slot(step, row, position) for position in (0, 1)] for row in range(200)]
        step.kv.value[:, pairs] = 1 + torch.randint(0, 64, (3, 200, 2, width)).to(dtype) * torch.finfo(dtype).eps
        want = step.kv.value[:, pairs].float().mean(2).transpose(0, 1).repeat_interleave(3, 1)
        assert (want != want.to(dtype)).float().mean() > 0.4
        assert torch.equal(step.run(CpuBackend()), want.to(dtype))

    @pytest.mark.parametrize("dtype", [torch.float32, *HALF])
    def test_nan_in_a_query_shows(self, dtype: torch.dtype) -> None:
        for rows in ([(300, 1), (20, 1)], [(10, 90), (0, 50)]):
            step = make_step(replace(PLAIN, dtype=dtype), rows, block_size=16)
            step.query[0] = math.nan
            got = step.run(CpuBackend())
            assert got[0].isnan().all() and not got[1:].isnan().any()


def in_float64(step: TrialStep) -> torch.Tensor:
    """[T, num_heads, value_dim] of a step with one row, plain scores and no window."""
    keys, values = (
        pool[:, [slot(step, 0, position) for position in range(int(step.batch.kv_lens[0]))]].double()
        for pool in (step.kv.key, step.kv.value)
    )
    shared = step.layer.num_heads // step.layer.num_kv_heads
    scores = step.query.double().transpose(0, 1) @ keys.repeat_interleave(shared, 0).transpose(1, 2)
    scores *= step.layer.key_dim**-0.5
    hidden = torch.arange(keys.shape[1]) > torch.from_numpy(step.batch.positions)[:, None]
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return (weights @ values.repeat_interleave(shared, 0)).transpose(0, 1)


def slot(step: TrialStep, row: int, position: int) -> int:
    batch = step.batch
    block, offset = divmod(position, batch.block_size)
    return int(batch.tables[batch.table_starts[row] + block]) * batch.block_size + offset


class TestWhatIsRead:
    @pytest.mark.parametrize("rows", [[(700, 1), (90, 1)], [(700, 60), (90, 2)]], ids=["decoding", "chunks"])
    def test_nothing_before_a_window(self, rows: list[tuple[int, int]]) -> None:
        layer = replace(PLAIN, window=50)
        step = make_step(layer, rows, block_size=16)
        want = step.run(CpuBackend())
        for row, (start, _) in enumerate(rows):
            for position in range(start - 49):
                step.kv.key[:, slot(step, row, position)] = math.nan
                step.kv.value[:, slot(step, row, position)] = math.nan
        assert torch.equal(step.run(CpuBackend()), want)

    def test_no_key_that_comes_later_in_the_row(self) -> None:
        """The first queries of a prompt do not look at the block of keys that none of them sees."""
        step = make_step(PLAIN, [(0, 300)], block_size=16)
        want = step.run(CpuBackend())
        for position in range(200, 300):
            step.kv.key[:, slot(step, 0, position)] = math.nan
            step.kv.value[:, slot(step, 0, position)] = math.nan
        got = step.run(CpuBackend())
        assert torch.equal(got[:150], want[:150]) and got[200:].isnan().all()

    def test_the_keys_of_the_pool_and_not_the_packed_ones(self) -> None:
        step = make_step(PLAIN, [(0, 40), (7, 1)], block_size=16)
        want = step.run(CpuBackend())
        step.key.fill_(math.nan)
        step.value.fill_(math.nan)
        assert torch.equal(step.run(CpuBackend()), want)


KINDS = {
    "plain": PLAIN,
    "bfloat16": replace(PLAIN, dtype=torch.bfloat16),
    "odd": replace(PLAIN, num_heads=7, num_kv_heads=1, key_dim=5, value_dim=13),
    "everything": replace(PLAIN, window=300, softcap=3.0, has_sinks=True),
}
ROWS = [(1000, 1), (0, 130), (3, 1), (600, 70), (255, 2), (256, 1), (0, 1)]


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


class TestNothingElseMatters:
    @pytest.mark.parametrize("kind", KINDS)
    def test_the_number_of_threads(self, kind: str, threads) -> None:
        step = make_step(KINDS[kind], ROWS, block_size=16)
        results = []
        for count in (1, 2, 4, 3):
            threads(count)
            results.append(step.run(CpuBackend()))
            assert torch.get_num_threads() == count
        assert all(torch.equal(result, results[0]) for result in results)

    @pytest.mark.parametrize("kind", KINDS)
    def test_the_other_rows(self, kind: str, threads) -> None:
        threads(2)
        together = make_step(KINDS[kind], ROWS, block_size=16)
        want = together.run(CpuBackend())
        for row, (start, count) in enumerate(ROWS):
            begin, end = together.batch.query_starts[row : row + 2]
            alone = make_step(KINDS[kind], [(start, count)], block_size=16, seed=1)
            for position in range(start + count):
                for mine, theirs in ((alone.kv.key, together.kv.key), (alone.kv.value, together.kv.value)):
                    mine[:, slot(alone, 0, position)] = theirs[:, slot(together, row, position)]
            one = replace(alone, query=together.query[begin:end], sinks=together.sinks)
            assert torch.equal(one.run(CpuBackend()), want[begin:end])

    def test_a_backend_that_has_been_used(self, threads) -> None:
        """Its scratch memory grows with steps and threads, and what is left there does not show."""
        backend = CpuBackend()
        small, large = (make_step(PLAIN, rows, block_size=16) for rows in ([(5, 1)], ROWS))
        sizes = []
        for step, count in ((small, 1), (large, 1), (large, 4), (small, 1)):
            threads(count)
            assert torch.equal(step.run(backend), step.run(CpuBackend()))
            sizes.append(len(backend._scratch))
        assert 0 < sizes[0] < sizes[1] < sizes[2] == sizes[3]
        backend.drop_caches()
        assert len(backend._scratch) == 0
        assert torch.equal(large.run(backend), large.run(CpuBackend()))


class TestItems:
    @pytest.mark.parametrize("window", [None, 1, 100, 257])
    @pytest.mark.parametrize("shared", [1, 3, 96, 200])
    def test_each_query_sees_each_of_its_keys_once(self, window: int | None, shared: int) -> None:
        rows = [(0, 1), (700, 1), (0, 300), (500, 131), (255, 1), (256, 2), (10, 97)]
        batch = make_step(PLAIN, rows, block_size=16).batch
        made = cpu._Items(batch, window, shared)
        seen = [np.zeros(start + i + 1, int) for start, count in rows for i in range(count)]
        taken = []
        kept: dict[int, list[tuple[int, int]]] = {}
        for token, count, position, table, parts, first, begin, end, partial in made.items.tolist():
            row = int(np.searchsorted(batch.query_starts, token, side="right")) - 1
            assert table == batch.table_starts[row] and position == batch.positions[token]
            assert count * shared <= max(96, shared) and begin < end
            for i in range(count):
                seen[token + i][begin : min(end, position + i + 1)] += 1
            if parts > 1:
                taken += range(partial, partial + count)
                kept.setdefault(token, []).append((begin, partial))
                assert parts == sum(other[0] == token for other in made.items.tolist()) and partial >= first
        for counts in seen:
            hidden = max(len(counts) - window, 0) if window is not None else 0
            assert (counts[hidden:] == 1).all()
        assert sorted(taken) == list(range(made.call.num_partials))
        for token, count, _, _, _, first, *_ in made.items.tolist():
            for nth, (_, partial) in enumerate(sorted(kept.get(token, ()))):
                assert partial == first + nth * count

    def test_the_most_work_comes_first(self) -> None:
        made = cpu._Items(make_step(PLAIN, ROWS, block_size=16).batch, None, 3)
        work = made.items[:, 1] * (made.items[:, 7] - made.items[:, 6])
        assert (np.diff(work) <= 0).all() and work[0] > work[-1]

    def test_they_are_made_once_for_a_kind_of_layer(self) -> None:
        plan = CpuBackend().plan(make_step(PLAIN, ROWS, block_size=16).batch)
        assert plan.items(None, 3) is plan.items(None, 3)
        assert plan.items(None, 3) is not plan.items(5, 3)


class TestInputs:
    def test_views_of_one_projection(self) -> None:
        """Queries, keys and values side by side, as models with one fused projection hand them over."""
        step = make_step(PLAIN, [(0, 40), (100, 1), (7, 5)], block_size=16)
        want = step.run(CpuBackend())
        fused = torch.cat([part.contiguous() for part in (step.query, step.key, step.value)], dim=1)
        query, key, value = fused.split([9, 3, 3], dim=1)
        assert not query.is_contiguous()
        assert torch.equal(replace(step, query=query, key=key, value=value).run(CpuBackend()), want)

    def test_numbers_that_are_not_side_by_side(self) -> None:
        step = make_step(PLAIN, [(0, 40), (100, 1)], block_size=16)
        want = step.run(CpuBackend())
        query = step.query.transpose(1, 2).contiguous().transpose(1, 2)
        assert query.stride(2) != 1
        assert torch.equal(replace(step, query=query).run(CpuBackend()), want)

    def test_sinks_in_half_precision(self) -> None:
        step = make_step(replace(PLAIN, has_sinks=True), [(40, 1), (0, 20)], block_size=16)
        check(replace(step, sinks=step.sinks.bfloat16()))

    @pytest.mark.parametrize("dtype", [torch.float32, *HALF])
    @pytest.mark.parametrize("layout", ["packed", "heads first", "fused", "numbers apart"])
    @pytest.mark.parametrize("tokens", [1, 37, 2000])
    def test_write(self, tokens: int, layout: str, dtype: torch.dtype) -> None:
        layer = replace(PLAIN, dtype=dtype, key_dim=24, value_dim=7)
        step = make_step(layer, [(5, 1)], block_size=16, num_blocks=200)
        slots = torch.randperm(3200)[:tokens]
        key, value = (torch.randn(tokens, 3, width).to(dtype) for width in (24, 7))
        if layout == "heads first":
            key, value = (side.transpose(0, 1).contiguous().transpose(0, 1) for side in (key, value))
        elif layout == "fused":
            key, value = torch.cat([key, value], dim=2).split([24, 7], dim=2)
        elif layout == "numbers apart":
            key, value = (side.transpose(1, 2).contiguous().transpose(1, 2) for side in (key, value))
        pools = []
        for backend in (CpuBackend(), ReferenceBackend()):
            kv = replace(step.kv, key=step.kv.key.clone(), value=step.kv.value.clone())
            backend.write(kv, slots, key, value)
            pools.append((kv.key, kv.value))
        for got, want in zip(*pools, strict=True):
            torch.testing.assert_close(got, want, equal_nan=True, atol=0, rtol=0)

    def test_write_converts(self) -> None:
        """Some models hand over keys in another dtype than values."""
        step = make_step(replace(PLAIN, dtype=torch.bfloat16), [(5, 1)], block_size=16)
        key, value = torch.randn(2, 3, 64), torch.randn(2, 3, 64).bfloat16()
        CpuBackend().write(step.kv, torch.tensor([7, 3]), key, value)
        assert torch.equal(step.kv.key[:, [7, 3]], key.bfloat16().transpose(0, 1))
        assert torch.equal(step.kv.value[:, [7, 3]], value.transpose(0, 1))


FAMILIES = {
    "llama": {},
    "gemma2": {"sliding_window": 6, "attn_logit_softcapping": 5.0},
    "gpt_oss": {"sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {},
    "mistral": {"sliding_window": 7},
    "gpt_neox": {"num_key_value_heads": 4},
}


class TestModels:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_families(self, family: str) -> None:
        self.same_tokens(tiny(family, **FAMILIES[family]), scheduler=PagedScheduler)

    def test_contiguous_memory(self) -> None:
        self.same_tokens(tiny(), scheduler=OrcaScheduler, allocator=ContiguousAllocator)

    def same_tokens(self, model: torch.nn.Module, **options: object) -> None:
        prompts = [[5, 9, 2, 7], [*range(3, 66)], [11] * 30, [3]]
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        said = {}
        for attention in ("cpu", "reference"):
            with Engine.from_model(model, attention=attention, num_kv_blocks=64, max_model_len=96, **options) as engine:
                said[attention] = [list(output.token_ids) for output in engine.generate(prompts, params)]
        assert said["cpu"] == said["reference"]


class TestWhatItRefuses:
    def test_float64_and_other_devices(self) -> None:
        layers = [replace(PLAIN, dtype=torch.float64), replace(PLAIN, device=torch.device("cuda:0"))]
        assert CpuBackend().unsupported_reasons(layers) == [
            "it computes in float32, bfloat16 and float16, and the model is in float64",
            "it computes on the CPU, and the model is on cuda:0",
        ]

    @pytest.fixture
    def anew(self, monkeypatch):
        cpu._library.cache_clear()
        yield monkeypatch
        monkeypatch.undo()
        cpu._library.cache_clear()

    def test_other_processors(self, anew) -> None:
        anew.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
        assert CpuBackend().unsupported_reasons([PLAIN]) == [
            "kernels need AVX2, and torch finds the CPU capability DEFAULT"
        ]
        anew.setattr("platform.machine", lambda: "aarch64")
        assert CpuBackend().unsupported_reasons([PLAIN]) == [
            "kernels are for Linux on x86-64, and this is linux on aarch64"
        ]

    def test_no_compiler(self, anew, caplog) -> None:
        anew.setenv("CXX", "no-such-compiler")
        anew.setattr(native, "_found", {})
        native._warn.cache_clear()
        for _ in range(2):
            assert choose_backend(None, [PLAIN], "M").name == "reference"
        reason = "there is no C++ compiler 'no-such-compiler' (the environment variable CXX says which to use)"
        with pytest.raises(UnsupportedModel) as caught:
            choose_backend("cpu", [PLAIN], "M")
        assert caught.value.reasons == (f"attention backend cpu: {reason}",)
        warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert warnings == [f"there are no C++ kernels for the CPU, and what takes their place is slower: {reason}"]


class TestAutomaticChoice:
    def test_it_is_the_first_on_the_cpu(self) -> None:
        assert choose_backend(None, [PLAIN], "M").name == "cpu"
        assert choose_backend(None, [replace(PLAIN, dtype=torch.float64)], "M").name == "reference"

    def test_a_model_gets_it(self, caplog) -> None:
        with caplog.at_level("INFO", logger="batchkit"), Engine.from_model(tiny(), num_kv_blocks=8):
            pass
        assert "LlamaForCausalLM: attention backend cpu" in caplog.messages


def test_there_is_one_openmp() -> None:
    """Its threads are torch's: a second library would start as many again."""
    code = (
        "import re, torch; from batchkit.hf.backends.trial import make_step\n"
        "from batchkit.hf.backends.base import LayerSpec; from batchkit.hf.backends.cpu import CpuBackend\n"
        "layer = LayerSpec(0, 4, 2, 32, 32, torch.float32, torch.device('cpu'))\n"
        "make_step(layer, [(0, 60)], block_size=16).run(CpuBackend())\n"
        "maps = open('/proc/self/maps').read()\n"
        "assert 'attention-' in maps\n"
        "found = set(re.findall(r'/\\S*lib(?:gomp|omp|iomp5)[^\\s/]*', maps))\n"
        "assert len(found) == 1, found\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
