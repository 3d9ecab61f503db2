"""Decode steps by graphs, with stand-ins for what only a device has: see graph_rig."""

from __future__ import annotations

import contextlib
import logging

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchkit import (
    ChunkedPrefillScheduler,
    ContiguousAllocator,
    Engine,
    OrcaScheduler,
    PagedAllocator,
    PagedScheduler,
    SamplingParams,
    StaticScheduler,
)
from batchkit.errors import InvariantError
from batchkit.hf import graphs
from batchkit.hf.backends.base import overwrite
from batchkit.hf.batch import BatchBuilder
from batchkit.hf.graphs import find_waits, padded_decodes
from batchkit.hf.runner import TransformersRunner
from batchkit.types import Request, ScheduledSequence
from parity.test_families import FAMILIES
from parity.test_families import tiny as of_family
from tiny_models import tiny
from unit_hf.graph_rig import Recorder, Rerun, SameShapes, Tape, forced_logits, reruns, tapes  # noqa: F401 - a fixture
from unit_hf.varlen_rig import on_the_cpu  # noqa: F401 - a fixture

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14] * 9, [15, 16]]
LENGTHS = (9, 3, 6, 12, 1)


def generate(model: torch.nn.Module, **options):
    options = {"num_kv_blocks": 40, "block_size": 4, **options}
    params = [SamplingParams(temperature=0, max_tokens=k, ignore_eos=True, logprobs=1) for k in LENGTHS]
    with Engine.from_model(model, **options) as engine:
        return engine.generate(PROMPTS, params)


def assert_same(got, want) -> None:
    for mine, theirs in zip(got, want, strict=True):
        assert mine.token_ids == theirs.token_ids
        for a, b in zip(mine.outputs[0].logprobs, theirs.outputs[0].logprobs, strict=True):
            assert {k: v.logprob for k, v in a.items()} == pytest.approx({k: v.logprob for k, v in b.items()}, abs=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scheduler": ChunkedPrefillScheduler, "max_tokens_per_step": 4, "max_num_seqs": 3},
        {"scheduler": StaticScheduler, "max_num_seqs": 3},  # with rows that do not sample
        {"scheduler": OrcaScheduler, "allocator": ContiguousAllocator},
        {"scheduler": PagedScheduler, "num_kv_blocks": 8},  # with preemption
        {"scheduler": PagedScheduler, "num_kv_blocks": 8, "swap_memory": "1MB"},
    ],
    ids=["default", "chunked", "static", "orca", "preempting", "swapping"],
)
@pytest.mark.parametrize("family", ["llama", "mistral", "opt"])
def test_outputs_are_those_without_graphs(tapes: list[Tape], family: str, options: dict) -> None:  # noqa: F811
    model = tiny(family, **({"sliding_window": 6} if family == "mistral" else {}))
    want = generate(model, **options)
    assert_same(generate(model, attention=SameShapes(), cuda_graphs=True, **options), want)
    assert len(tapes) <= 4  # for 5 requests: of 1, 2, 4 and 8 rows
    assert sum(graph.num_replays for graph in tapes) > len(tapes)


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("window", [None, 200])
def test_varlen_s_plans_can_be_replayed(reruns: list[Rerun], monkeypatch, window) -> None:  # noqa: F811
    monkeypatch.setattr(graphs, "find_waits", lambda forward: set())  # the stand-in reads its numbers
    model = tiny(
        head_dim=16, max_position_embeddings=512, **({"family": "mistral", "sliding_window": 200} if window else {})
    )
    prompts = [[5] * 254, [6] * 3, [7] * 255]  # to the end of a block, and beyond

    work = (model.half(), prompts, (5, 3, 4))
    options = {"num_kv_blocks": 8, "attention": "varlen"}
    want = forced_logits(*work, **options)
    assert not reruns
    torch.testing.assert_close(forced_logits(*work, cuda_graphs=True, **options), want, atol=2e-3, rtol=0)
    assert 1 <= len(reruns) <= 3
    assert sum(graph.num_replays for graph in reruns) == 4


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"gemma2", "gpt_oss", "vaultgemma"}))  # caps and sinks
def test_families_can_be_captured(tapes: list[Tape], family: str) -> None:  # noqa: F811
    model = of_family(*FAMILIES[family])
    prompts, params = PROMPTS[:3], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

    def tokens(**options) -> list[tuple[int, ...]]:
        with Engine.from_model(model, num_kv_blocks=40, block_size=4, **options) as engine:
            return [output.token_ids for output in engine.generate(prompts, params)]

    assert tokens(attention=SameShapes(), cuda_graphs=True) == tokens()
    # It looks at its input ids, to warn of padding.
    assert bool(tapes) == (not family.startswith("gpt2"))


def test_steps_of_more_rows_than_expected_are_computed_without(tapes: list[Tape]) -> None:  # noqa: F811
    model = tiny()
    rows = []

    class Watched(SameShapes):
        def plan(self, batch):
            rows.append((batch.num_rows, batch.min_width > 1))
            return super().plan(batch)

    options = {"num_kv_blocks": 40, "block_size": 4, "attention": Watched(), "cuda_graphs": True}
    runner = TransformersRunner(model, max_num_seqs=3, **options)
    with Engine(runner, PagedScheduler(PagedAllocator(40, 4))) as engine:
        engine.generate(PROMPTS[:4], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
        assert not tapes
        engine.generate(PROMPTS[:3], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    assert rows[-1] == (4, True)  # 3, padded
    assert [graph.num_replays for graph in tapes] == [2]


def test_scores_of_single_tokens_survive_the_next_pass(tapes: list[Tape], monkeypatch) -> None:  # noqa: F811
    monkeypatch.setattr("batchkit.hf.runner._MAX_SCORED", 1)  # one token of a scored prompt in each pass
    model = tiny()
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1, logprobs=1, ignore_eos=True)

    def scores(**options):
        with Engine.from_model(model, num_kv_blocks=40, block_size=4, **options) as engine:
            return [
                [{k: round(v.logprob, 4) for k, v in entry.items()} for entry in out.prompt_logprobs[1:]]
                for out in engine.generate(PROMPTS[:3], params)
            ]

    assert scores(attention=SameShapes(), cuda_graphs=True) == scores()
    assert tapes


def test_nothing_but_the_rows_own_blocks_and_the_spare_one_is_written(tapes: list[Tape]) -> None:  # noqa: F811
    runner = TransformersRunner(tiny(), num_kv_blocks=9, block_size=4, attention=SameShapes(), cuda_graphs=True)
    runner._pool.fill(float("nan"))
    pools = [pool for kv in runner._pool.layers for pool in (kv.key, kv.value)]
    assert {kv.zero_block for kv in runner._pool.layers} == {10}
    for pool in pools:
        pool[:, 36:40] = float("nan")  # the spare block
    before = [pool.clone() for pool in pools]
    params = SamplingParams(temperature=0)
    rows = [
        ScheduledSequence(
            i,
            0,
            i,
            Request(id=str(i), prompt_token_ids=(3, 4), params=params, max_tokens=2),
            0,
            0,
            1,
            (3,),
            [],
            0,
            (block,),
            True,
            False,
        )
        for i, block in enumerate((2, 5, 7))
    ]
    runner._compute(rows)
    (graph,) = tapes
    assert graph.num_replays == 1
    for was, now in zip(before, pools, strict=True):
        changed = (was != now) & ~(was.isnan() & now.isnan())
        slots = changed.any(-1).any(0).nonzero().ravel().tolist()
        assert slots == [8, 20, 28, 36]  # the first of blocks 2, 5, 7, and of the spare one


def test_new_weights_are_captured_anew(tapes: list[Tape]) -> None:  # noqa: F811
    model = tiny()
    with Engine.from_model(model, num_kv_blocks=40, block_size=4, attention=SameShapes(), cuda_graphs=True) as engine:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        engine.generate(PROMPTS[:1], params)
        first = len(tapes)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.data = torch.rand_like(parameter) - 0.5  # other memory
        engine.weights_changed()
        (got,) = engine.generate(PROMPTS[:1], params)
    assert len(tapes) == 2 * first
    with Engine.from_model(model, num_kv_blocks=40, block_size=4) as plain:
        assert got.token_ids == plain.generate(PROMPTS[:1], params)[0].token_ids


def test_a_model_that_waits_for_the_device_runs_without(tapes: list[Tape], caplog) -> None:  # noqa: F811
    model = tiny()
    model.register_forward_hook(lambda module, args, output: output.logits[0, 0, 0].item() and None)
    want = generate(model)
    assert_same(generate(model, attention=SameShapes(), cuda_graphs=True), want)
    assert not tapes
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert record.getMessage() == (
        "decode steps run without CUDA graphs: the forward pass waits for the device or the host (item)"
    )


@pytest.mark.parametrize("when", ["capture", "later"])
def test_a_capture_that_fails_loses_nothing(tapes: list[Tape], monkeypatch, caplog, when: str) -> None:  # noqa: F811
    model = tiny()
    want = generate(model)
    real, asked = Recorder.capture, []

    def capture(self, compute):
        asked.append(self)
        if when == "capture" or len(asked) > 1:
            try:
                raise torch.OutOfMemoryError("no memory for a graph")
            finally:
                raise RuntimeError("the capture has failed")  # as it is on a device
        return real(self, compute)

    monkeypatch.setattr(Recorder, "capture", capture)
    assert_same(generate(model, attention=SameShapes(), cuda_graphs=True), want)
    assert len(asked) == (1 if when == "capture" else 2)  # and never again
    said = "RuntimeError('the capture has failed'), after OutOfMemoryError('no memory for a graph')"
    assert caplog.text.count(f"decode steps run without CUDA graphs: {said}") == 1


def test_a_step_that_fails_before_it_is_captured_is_a_step_that_fails(tapes: list[Tape], caplog) -> None:  # noqa: F811
    model = tiny()
    want = generate(model)
    decodes = []

    class TooLittle(SameShapes):
        def plan(self, batch):
            if batch.num_rows == batch.num_tokens:
                decodes.append(batch.num_rows)
                if len(decodes) == 1:
                    raise torch.OutOfMemoryError("for now")
            return super().plan(batch)

    assert_same(generate(model, attention=TooLittle(), cuda_graphs=True), want)
    assert tapes
    assert "out of memory with 4 tokens in a step, trying 2" in caplog.text
    assert "without CUDA graphs" not in caplog.text


@pytest.mark.parametrize("most", [1, 64])
def test_graphs_that_were_not_replayed_for_long_go(tapes: list[Tape], monkeypatch, most: int) -> None:  # noqa: F811
    monkeypatch.setattr(graphs, "_MOST_GRAPHS", most)
    params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in (3, 6, 6, 9)]
    with Engine.from_model(tiny(), num_kv_blocks=40, block_size=4, attention=SameShapes(), cuda_graphs=True) as engine:
        (first, second) = (engine.generate(PROMPTS[:4], params) for _ in range(2))
    assert [one.token_ids for one in first] == [one.token_ids for one in second]
    assert len(tapes) == (4 if most == 1 else 2)  # of 4 rows and of 1


def test_the_reference_says_that_it_cannot(tapes: list[Tape], caplog) -> None:  # noqa: F811
    model = tiny()
    assert_same(generate(model, attention="reference", cuda_graphs=True), generate(model))
    assert not tapes
    assert caplog.text.count("attention backend reference computes every step in other shapes") == 1


def test_graphs_are_for_one_cuda_device() -> None:
    with pytest.raises(ValueError, match="cuda_graphs needs the whole model on one CUDA device, and it is on cpu"):
        Engine.from_model(tiny(), cuda_graphs=True)
    with pytest.raises(TypeError, match="cuda_graphs must be True or False, got 1"):
        Engine.from_model(tiny(), cuda_graphs=1)


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.sum() > 0),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: x.nonzero(),
        lambda x: torch.where(x > 0.5),
        lambda x: x[x > 0.5],
        lambda x: x.unique(),
        lambda x: torch.equal(x, x),
        lambda x: torch.bincount(x.long()),
        lambda x: torch.argwhere(x),
        lambda x: x.histc(4),
        lambda x: torch.nn.functional.one_hot(x.long()),
        lambda x: x.repeat_interleave(x.long()),
        lambda x: torch.repeat_interleave(x.long()),
        lambda x: x.tensor_split(torch.arange(2)),
        lambda x: x.to("meta"),
        lambda x: torch.empty(4, device="meta").copy_(x),
        lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0]),
    ],
)
def test_what_a_graph_cannot_hold_is_found(wait) -> None:
    with torch.inference_mode():
        assert find_waits(lambda: wait(torch.arange(4) / 4))


def test_what_it_can_hold_is_not() -> None:
    def harmless() -> torch.Tensor:
        x = torch.arange(4) / 4
        x = torch.where(x > 0.5, x, 0.0)[torch.arange(2)]
        x = x.repeat_interleave(2).histc(2, min=0, max=1) + torch.nn.functional.one_hot(x.long(), num_classes=2).sum(0)
        return torch.nn.functional.softmax(x @ x, -1) + torch.full((2,), 1.0).cumsum(0)

    with torch.inference_mode():
        assert not find_waits(harmless)


@given(st.lists(st.tuples(st.integers(1, 70), st.booleans()), min_size=1, max_size=150), st.integers(1, 8))
def test_padding_adds_rows_and_changes_none(rows: list[tuple[int, bool]], size: int) -> None:
    request = Request(id="r", prompt_token_ids=(1,), params=SamplingParams(), max_tokens=1)
    taken, scheduled = 0, []
    for index, (length, contiguous) in enumerate(rows):
        need = -(-length // size)
        blocks = range(taken, taken + need)
        taken += need
        table = blocks if contiguous else tuple(reversed(blocks))
        scheduled.append(
            ScheduledSequence(
                index, 0, index, request, 0, length - 1, 1, (index + 1,), [], 0, table, samples=True, idle=False
            )
        )
    batch = BatchBuilder(size).build(scheduled)
    padded = padded_decodes(batch, spare_block=taken)
    count, more = len(rows), padded.num_rows - len(rows)
    assert padded.num_rows == padded.num_tokens
    assert padded.num_rows in (1, 2, 4, 8, 16, 32, 64, 128, 192)
    assert more < max(count, 64)
    assert padded.min_width >= max(-(-length // size) for length, _ in rows)
    for name in ("input_ids", "positions", "slots", "kv_lens", "contiguous"):
        np.testing.assert_array_equal(getattr(padded, name)[:count], getattr(batch, name))
    everything = np.arange(padded.num_rows)
    tables = padded.padded_tables(everything, 0 * everything, padded.min_width, -1)
    np.testing.assert_array_equal(
        tables[:count], batch.padded_tables(np.arange(count), 0 * np.arange(count), padded.min_width, -1)
    )
    assert (tables[count:, 0] == taken).all()
    assert (tables[count:, 1:] == -1).all()
    assert (padded.slots[count:] == taken * size).all()
    assert padded.contiguous.all() == batch.contiguous.all()


def test_only_numbers_within_tensors_may_be_replaced() -> None:
    old = torch.zeros(3)
    overwrite(old, torch.arange(3.0))
    assert old.tolist() == [0, 1, 2]
    overwrite([1, 2], [3])  # what the host knows
    for new in (torch.zeros(4), torch.zeros(3, dtype=torch.int32)):
        with pytest.raises(InvariantError, match=r"for torch\.float32"):
            overwrite(old, new)
    with pytest.raises(InvariantError, match="5 for 4"):
        overwrite(4, 5)


@pytest.mark.parametrize("fails", [False, True])
def test_a_capture_leaves_stream_and_lock_as_they_were(monkeypatch, fails: bool) -> None:
    """With torch.cuda in the abstract: a capture that fails does not put the stream back by itself."""
    now = {"stream": "the program's"}

    class Capture:
        def __init__(self, graph, *, pool, stream, capture_error_mode) -> None:
            self.stream, self.mode = stream, (pool, capture_error_mode)

        def __enter__(self) -> None:
            now.update(before=now["stream"], stream=self.stream, mode=self.mode)

        def __exit__(self, *error) -> None:
            if fails:
                raise RuntimeError("the capture has failed")
            now["stream"] = now["before"]

    for name, value in {
        "Stream": lambda device: f"that of {device}",
        "graph_pool_handle": lambda: "pool",
        "CUDAGraph": object,
        "device": lambda device: contextlib.nullcontext(),
        "current_stream": lambda: now["stream"],
        "set_stream": lambda stream: now.update(stream=stream),
        "graph": Capture,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    recorder = graphs.CudaRecorder("cuda:1")
    seen = []
    with pytest.raises(RuntimeError, match="failed") if fails else contextlib.nullcontext():
        recorder.capture(lambda: seen.append(now["stream"]))
    assert seen == ["that of cuda:1"]
    assert now["stream"] == "the program's"
    assert now["mode"] == ("pool", "thread_local")
    assert graphs._CAPTURING.acquire(blocking=False)
    graphs._CAPTURING.release()
