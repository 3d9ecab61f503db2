"""The default size of the KV cache on devices that count their memory: the largest steps are run first."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import batchkit.hf.kv_pool as kv_pool
import batchkit.hf.profiling as profiling
import batchkit.hf.runner as module
from batchkit import ChunkedPrefillScheduler, Engine, PagedScheduler, SamplingParams
from batchkit.errors import RunnerOutOfMemory
from batchkit.hf.profiling import largest_steps
from batchkit.hf.runner import TransformersRunner
from tiny_models import tiny

CPU = torch.device("cpu")
EACH = 4096
"""Bytes of a block of 16 tokens of `tiny`."""


class Meter:
    """Stands in for the device's counters: a step takes so much for each of its tokens and rows."""

    def __init__(self, per_token: int = 0, per_row: int = 0) -> None:
        self.per_token, self.per_row = per_token, per_row
        self.steps: list[tuple[int, int, int]] = []

    def peak_bytes(self, compute: Callable[[], Any], devices: Any) -> dict[torch.device, int]:
        assert set(devices) == {CPU}
        given = len(self.steps)
        out = compute()
        assert all(row.error is None and len(row.token_ids) == 1 for row in out.rows)
        ((rows, tokens, _),) = self.steps[given:]
        return {CPU: rows * self.per_row + tokens * self.per_token}


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Meter]]:
    """Profiling runs on the CPU, with a meter and so much free memory."""

    def install(free: int, **per: int) -> Meter:
        meter = Meter(**per)
        execute = TransformersRunner.execute

        def watched(runner: TransformersRunner, out: Any) -> Any:
            longest = max(row.start + row.num_tokens for row in out.rows)
            meter.steps.append((len(out.rows), out.num_tokens, longest))
            return execute(runner, out)

        monkeypatch.setattr(TransformersRunner, "execute", watched)
        monkeypatch.setattr(profiling, "DEVICES", frozenset({"cpu"}))
        monkeypatch.setattr(profiling, "peak_bytes", meter.peak_bytes)
        monkeypatch.setattr(kv_pool, "free_memory", lambda device: free)
        return meter

    return install


class TestLargestSteps:
    def test_they_are_as_large_as_steps_get(self) -> None:
        steps = dict(largest_steps(max_tokens=100, max_rows=8, max_len=60, block_size=16))
        spans = {what: [(row.start, row.num_tokens) for row in step.rows] for what, step in steps.items()}
        assert spans == {
            "prompts": [(0, 13)] * 4 + [(0, 12)] * 4,
            "the end of a long prompt": [(0, 60)],
            "decoding": [(59, 1)] * 8,
        }
        for step in steps.values():
            assert step.num_tokens == sum(row.num_tokens for row in step.rows)
            for row in step.rows:
                assert row.samples and len(row.token_ids) == row.num_tokens
                assert len(row.blocks) == -(-(row.start + row.num_tokens) // 16)

    def test_of_a_sequence_that_is_longer_than_a_step(self) -> None:
        steps = dict(largest_steps(max_tokens=100, max_rows=300, max_len=1000, block_size=16))
        (chunk,) = steps["the end of a long prompt"].rows
        assert (chunk.start, chunk.num_tokens) == (900, 100)
        assert len(steps["prompts"].rows) == len(steps["decoding"].rows) == 100

    def test_no_prompt_is_longer_than_a_sequence(self) -> None:
        steps = dict(largest_steps(max_tokens=100, max_rows=2, max_len=30, block_size=16))
        assert [row.num_tokens for row in steps["prompts"].rows] == [30, 30]


class TestDefaultSize:
    def test_it_is_half_of_what_the_largest_step_leaves(self, on_the_cpu) -> None:
        meter = on_the_cpu(EACH * 50, per_token=EACH // 10)
        runner = TransformersRunner(tiny(), max_num_seqs=40, max_tokens_per_step=100)
        assert meter.steps == [(40, 100, 3), (1, 100, 128), (40, 40, 128)]
        assert runner.geometry.num_blocks == (50 - 10) // 2
        assert runner._pool.num_blocks == 20

    def test_every_kind_of_step_counts(self, on_the_cpu) -> None:
        on_the_cpu(EACH * 50, per_row=EACH // 4)
        assert TransformersRunner(tiny(), max_num_seqs=40, max_tokens_per_step=100).geometry.num_blocks == 20

    def test_a_step_has_room_for_a_token_of_each_sequence(self, on_the_cpu) -> None:
        meter = on_the_cpu(EACH * 50)
        TransformersRunner(tiny(), max_num_seqs=40, max_tokens_per_step=3)
        assert meter.steps[0][:2] == (40, 40)

    def test_few_sequences_need_no_more(self, on_the_cpu) -> None:
        on_the_cpu(EACH * 1000, per_token=1)
        assert TransformersRunner(tiny(), max_num_seqs=3).geometry.num_blocks == 3 * 8

    def test_a_sequence_that_does_not_fit_is_as_long_as_the_memory(self, on_the_cpu) -> None:
        meter = on_the_cpu(EACH * 6)
        TransformersRunner(tiny(), max_num_seqs=4)
        assert max(longest for _, _, longest in meter.steps) == 3 * 16

    @pytest.mark.parametrize("graphs", [False, True])
    def test_it_holds_what_steps_have_just_run_beside(self, on_the_cpu, monkeypatch, graphs) -> None:
        monkeypatch.setattr("batchkit.hf.graphs._DEVICES", frozenset({"cpu"}))
        monkeypatch.setattr(module, "DecodeGraphs", lambda *args, **kwargs: None)
        on_the_cpu(EACH * 50, per_row=EACH * 42 // 40)
        runner = TransformersRunner(tiny(), max_num_seqs=40, max_tokens_per_step=100, cuda_graphs=graphs)
        assert runner.geometry.num_blocks == 8 and runner.geometry.max_model_len == 8 * 16

    def test_a_step_that_does_not_fit_hides_no_other(self, on_the_cpu, monkeypatch) -> None:
        meter = on_the_cpu(EACH * 50)

        def peak_bytes(compute: Callable[[], Any], devices: Any) -> dict[torch.device, int]:
            if len(meter.steps) == 2:
                raise RunnerOutOfMemory("decoding")
            compute()
            return {CPU: EACH * 30}

        monkeypatch.setattr(profiling, "peak_bytes", peak_bytes)
        runner = TransformersRunner(tiny(), max_num_seqs=40, max_tokens_per_step=100)
        assert runner.geometry.num_blocks == (50 - 30) // 2

    @pytest.mark.parametrize("size", [{"num_kv_blocks": 7}, {"kv_memory": EACH * 7}])
    def test_a_size_that_is_given_is_taken_as_it_is(self, on_the_cpu, size, caplog) -> None:
        meter = on_the_cpu(EACH * 2, per_token=EACH)
        with caplog.at_level(logging.WARNING, logger="batchkit"):
            assert TransformersRunner(tiny(), **size).geometry.num_blocks == 7
        assert not meter.steps and len(caplog.records) == 1

    def test_steps_that_do_not_fit_leave_half(self, on_the_cpu, monkeypatch, caplog) -> None:
        on_the_cpu(EACH * 50)
        forward = module.TransformersRunner._forward

        def tight(runner: TransformersRunner, batch: Any, tokens: Any) -> torch.Tensor:
            if batch.num_tokens > 60:
                raise torch.OutOfMemoryError("out of memory: tried to allocate 3 GiB")
            return forward(runner, batch, tokens)

        monkeypatch.setattr(TransformersRunner, "_forward", tight)
        with Engine.from_model(tiny(), max_num_seqs=40, max_tokens_per_step=100) as engine:
            assert engine.stats().num_blocks == 25
            assert "the largest step, prompts, does not fit" in caplog.text and "3 GiB" in caplog.text
            prompts = [[5] * 90, [7] * 30]
            outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=4))
        assert [len(output.token_ids) for output in outputs] == [4, 4]

    def test_outputs_do_not_depend_on_it(self, on_the_cpu) -> None:
        params = SamplingParams(temperature=0.8, seed=3, max_tokens=20)
        prompts = [[5, 9, 11], [40] * 50, [1]]
        outputs = []
        for is_profiled in (False, True):
            if is_profiled:
                meter = on_the_cpu(EACH * 100)
            with Engine.from_model(tiny(), max_num_seqs=4) as engine:
                outputs.append([output.token_ids for output in engine.generate(prompts, params)])
        assert meter.steps and outputs[0] == outputs[1]

    @pytest.mark.parametrize(
        ("scheduler", "given", "largest"),
        [(ChunkedPrefillScheduler, {}, 512), (PagedScheduler, {}, 2048), (PagedScheduler, 90, 90)],
    )
    def test_the_engine_says_how_large_steps_are(self, on_the_cpu, scheduler, given, largest) -> None:
        meter = on_the_cpu(EACH * 100)
        limits = {"max_tokens_per_step": given} if given else {}
        with Engine.from_model(tiny(), scheduler=scheduler, max_num_seqs=64, **limits) as engine:
            assert engine.stats().max_tokens_per_step == largest
        assert meter.steps[0][1] == min(largest, 64 * 128)


def test_on_the_cpu_nothing_is_run_beforehand(monkeypatch) -> None:
    monkeypatch.setattr(profiling, "largest_steps", None)
    TransformersRunner(tiny(), max_num_seqs=3)


def test_graphs_have_memory_of_their_own(on_the_cpu, monkeypatch) -> None:
    """Decoding takes it twice: in a graph, and where a step has more rows than one."""
    on_the_cpu(EACH * 100, per_row=EACH // 2)
    monkeypatch.setattr("batchkit.hf.graphs._DEVICES", frozenset({"cpu"}))
    made: list[Any] = []
    monkeypatch.setattr(module, "DecodeGraphs", lambda *args, **kwargs: made.append(kwargs))
    runner = TransformersRunner(tiny(), max_num_seqs=40, max_tokens_per_step=100, cuda_graphs=True)
    assert runner.geometry.num_blocks == (100 - 40) // 2
    assert made[0]["spare_block"] == 30
