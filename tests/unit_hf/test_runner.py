"""TransformersRunner as the engine sees it: geometry, results, faults, life cycle."""

from __future__ import annotations

import importlib.metadata
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import logging
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

import batchkit.hf.kv_pool as kv_pool
import batchkit.hf.loading as loading
from batchkit import Engine, PagedAllocator, PagedScheduler
from batchkit.errors import EngineClosed, OutOfKVMemory, RunnerOutOfMemory, UnsupportedModel
from batchkit.hf.backends.reference import ReferenceBackend
from batchkit.hf.loading import load_weights
from batchkit.hf.runner import TransformersRunner, eos_token_ids, model_len
from batchkit.types import BlockCopy, Request, RowResult, SamplingParams, ScheduledSequence, SchedulerOutput
from tiny_models import COMMON, tiny

EACH = 2 * 16 * 2 * (8 + 8) * 4  # bytes of a KV block of 16 tokens


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny()


def request(**params: object) -> Request:
    params = {"temperature": 0, **params}
    return Request(id="r", prompt_token_ids=(1,), params=SamplingParams(**params), max_tokens=9, seed=5)


def row(
    seq_id: int,
    sequence: list[int],
    start: int = 0,
    *,
    samples: bool = True,
    idle: bool = False,
    of: Request | None = None,
) -> ScheduledSequence:
    """All tokens of `sequence` from `start`, in blocks of 16 that are the sequence's own four."""
    return ScheduledSequence(
        seq_id=seq_id,
        row=0,
        seat=seq_id,
        request=of or request(),
        sample_index=0,
        start=start,
        num_tokens=len(sequence) - start,
        token_ids=tuple(sequence[start:]),
        output_ids=[],
        num_output=0,
        blocks=range(seq_id * 4, seq_id * 4 + 4),
        samples=samples,
        idle=idle,
    )


def out(*rows: ScheduledSequence) -> SchedulerOutput:
    return SchedulerOutput(rows=rows, num_tokens=sum(row.num_tokens for row in rows))


def greedy(model: torch.nn.Module, sequence: list[int]) -> int:
    with torch.no_grad():
        return int(model(torch.tensor([sequence])).logits[0, -1].argmax())


A, B, C = [5, 9, 14, 3], [60, 61, 62, 40, 33, 12], [7]


class TestGeometry:
    def test_given(self, model: torch.nn.Module) -> None:
        runner = TransformersRunner(model, num_kv_blocks=7, block_size=4, max_model_len=50)
        g = runner.geometry
        assert (g.num_blocks, g.block_size, g.host_blocks, g.max_model_len) == (7, 4, 0, 50)
        assert (g.vocab_size, g.eos_token_ids) == (97, (2,))
        assert runner.geometry is g

    def test_memory(self, model: torch.nn.Module) -> None:
        assert TransformersRunner(model, kv_memory=EACH * 5).geometry.num_blocks == 5
        g = TransformersRunner(model, kv_memory="1MB", swap_memory=EACH * 3 + 1).geometry
        assert (g.num_blocks, g.host_blocks) == (1_000_000 // EACH, 3)
        assert TransformersRunner(model, num_kv_blocks=1, swap_memory=1).geometry.host_blocks == 0
        with pytest.raises(OutOfKVMemory, match=f"{EACH - 1:,} bytes"):
            TransformersRunner(model, kv_memory=EACH - 1)

    def test_default_memory(self, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        assert TransformersRunner(model, max_num_seqs=3).geometry.num_blocks == 3 * 8
        assert TransformersRunner(model, max_num_seqs=3, max_model_len=17).geometry.num_blocks == 3 * 2
        monkeypatch.setattr(kv_pool, "free_memory", lambda device: EACH * 10)
        assert TransformersRunner(model).geometry.num_blocks == 5

    @pytest.mark.parametrize(
        ("arguments", "error", "words"),
        [
            ({"max_model_len": 129}, ValueError, "129.*max_position_embeddings is 128"),
            ({"max_model_len": 0}, ValueError, "at least 1, got 0"),
            ({"max_model_len": "9"}, TypeError, "integer"),
            ({"block_size": 0}, ValueError, "block_size must be at least 1"),
            ({"block_size": 1.5}, TypeError, "block_size must be an integer"),
            ({"max_num_seqs": 0}, ValueError, "max_num_seqs must be at least 1"),
            ({"num_kv_blocks": 0}, ValueError, "num_kv_blocks must be at least 1"),
            ({"num_kv_blocks": 3, "kv_memory": "1GB"}, ValueError, "not both"),
            ({"kv_memory": "lots"}, ValueError, "kv_memory must be"),
            ({"swap_memory": "-1"}, ValueError, "swap_memory must be"),
            ({"attention": "none"}, ValueError, "attention must be"),
        ],
    )
    def test_refused(self, model: torch.nn.Module, arguments: dict, error: type, words: str) -> None:
        with pytest.raises(error, match=words):
            TransformersRunner(model, **arguments)

    def test_eos_of_both_configurations(self) -> None:
        model = tiny()
        model.config.eos_token_id = [2, 9]
        model.generation_config.eos_token_id = [7, 2]
        assert eos_token_ids(model) == (2, 7, 9)
        model.config.eos_token_id = None
        model.generation_config.eos_token_id = 4
        assert eos_token_ids(model) == (4,)
        model.generation_config = None
        assert eos_token_ids(model) == ()

    def test_embeddings_larger_than_the_configuration_says(self) -> None:
        model = tiny(tie_word_embeddings=False)
        model.resize_token_embeddings(101)
        assert TransformersRunner(model, num_kv_blocks=1).geometry.vocab_size == 101

    def test_learned_and_rotary_limits(self) -> None:
        assert TransformersRunner(tiny("gpt2", head_dim=8, n_positions=32), num_kv_blocks=1).geometry.max_model_len > 0
        config = AutoConfig.for_model("llama", **COMMON)
        assert model_len(config) == 128
        config.rope_parameters = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
        assert model_len(config) == 128
        config.rope_parameters = {"rope_type": "longrope", "original_max_position_embeddings": 32}
        assert model_len(config) == 32
        assert model_len(config, 20) == 20
        with pytest.raises(ValueError, match="33, but the original length of its RoPE type longrope is 32"):
            model_len(config, 33)
        config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0}
        with pytest.raises(ValueError, match=r"129.*128"):
            model_len(config, 129)
        config = SimpleNamespace()
        config.get_text_config = lambda decoder: config
        assert model_len(config, 500) == 500
        with pytest.raises(ValueError, match="states no length"):
            model_len(config)


class TestExecute:
    def test_greedy_equals_the_model(self, model: torch.nn.Module) -> None:
        runner = TransformersRunner(model, num_kv_blocks=16)
        known = [list(A), list(B), list(C)]
        starts = [0, 0, 0]
        for _ in range(12):
            rows = [row(i, known[i], starts[i]) for i in (1, 0, 2)]
            results = runner.execute(out(*rows)).rows
            for i, result in zip((1, 0, 2), results, strict=True):
                assert result.error is None
                assert result.token_ids == (greedy(model, known[i]),)
                starts[i] = len(known[i])
                known[i].append(result.token_ids[0])

    def test_rows_that_do_not_sample(self, model: torch.nn.Module) -> None:
        runner = TransformersRunner(model, num_kv_blocks=16)
        got = runner.execute(out(row(0, A, samples=False), row(1, B), row(2, C, samples=False)))
        assert [r.token_ids for r in got.rows] == [(), (greedy(model, B),), ()]
        assert got.sample_s > 0
        got = runner.execute(out(row(0, [*A, 8], 4, samples=False)))
        assert [r.token_ids for r in got.rows] == [()]
        assert got.sample_s == 0
        # They were computed and written all the same.
        (got_row,) = runner.execute(out(row(0, [*A, 8, 9], 5))).rows
        assert got_row.token_ids == (greedy(model, [*A, 8, 9]),)
        assert runner.execute(out()).rows == ()

    def test_twice_and_in_between_and_without_caches(self, model: torch.nn.Module) -> None:
        runner = TransformersRunner(model, num_kv_blocks=16)
        sampled = request(temperature=1.0)
        runner.execute(out(row(0, A), row(1, B)))
        step = out(row(0, [*A, 8], 4, of=sampled), row(1, [*B, 9], 6, of=sampled))
        first = runner.execute(step).rows
        assert runner.execute(step).rows == first
        runner.execute(out(row(0, [*A, 8, 1, 1, 1], 5), row(2, C)))  # later positions, another sequence
        assert runner.execute(step).rows == first
        runner.drop_caches()
        runner.weights_changed()
        assert runner.execute(step).rows == first
        # What was computed later is still there.
        (got,) = runner.execute(out(row(0, [*A, 8, 1, 1, 1, 4], 8))).rows
        assert got.token_ids == (greedy(model, [*A, 8, 1, 1, 1, 4]),)

    def test_idle_rows_change_nothing(self, model: torch.nn.Module) -> None:
        runner = TransformersRunner(model, num_kv_blocks=16)
        runner.execute(out(row(0, A), row(1, B)))
        for _ in range(3):
            idle, live = runner.execute(out(row(0, A, 3, samples=False, idle=True), row(1, [*B, 4], 6))).rows
            assert idle.token_ids == () and idle.error is None
            assert live.token_ids == (greedy(model, [*B, 4]),)
        (got,) = runner.execute(out(row(0, [*A, 8], 4))).rows
        assert got.token_ids == (greedy(model, [*A, 8]),)

    def test_a_neighbour_changes_no_sample(self, model: torch.nn.Module) -> None:
        runner = TransformersRunner(model, num_kv_blocks=32)
        sampled = request(temperature=1.0)
        alone = runner.execute(out(row(1, B, of=sampled))).rows[0]
        crowd = [row(i, [11 + i] * (i + 2), of=sampled) for i in range(8) if i != 1]
        assert runner.execute(out(*crowd[:3], row(1, B, of=sampled), *crowd[3:])).rows[3] == alone

    def test_swapped_out_and_in(self, model: torch.nn.Module) -> None:
        runner = TransformersRunner(model, num_kv_blocks=16, swap_memory=EACH * 2)
        runner._pool.fill(float("nan"))
        runner.execute(out(row(1, B)))
        runner.copy_blocks([BlockCopy("swap_out", 4, 1)])
        runner.execute(out(row(1, A)))  # somebody else in its blocks
        runner.copy_blocks([BlockCopy("swap_in", 1, 8), BlockCopy("copy", 8, 12)])
        for seq_id in (2, 3):
            (got,) = runner.execute(out(row(seq_id, [*B, 4], 6))).rows
            assert got.token_ids == (greedy(model, [*B, 4]),)

    def test_broken_rows(self, model: torch.nn.Module) -> None:
        runner = TransformersRunner(model, num_kv_blocks=16, max_model_len=6)
        with pytest.raises(ValueError, match="7 tokens, and max_model_len is 6"):
            runner.execute(out(row(0, [3] * 7)))
        with pytest.raises(ValueError, match="1 blocks of 16 for 17 tokens"):
            TransformersRunner(model, num_kv_blocks=16).execute(out(row(0, [3] * 17)._replace(blocks=(1,))))


class TestFaults:
    def test_logits_that_are_not_finite_end_one_row(self) -> None:
        model = tiny(tie_word_embeddings=False)
        good = greedy(model, A)
        with torch.no_grad():
            model.get_input_embeddings().weight[96] = float("nan")
        runner = TransformersRunner(model, num_kv_blocks=16)
        for _ in range(2):
            got = runner.execute(out(row(1, [5, 96, 5]), row(0, A), row(2, [96, 4], samples=False))).rows
            assert got[0].error == "the model's logits at position 2 are not finite"
            assert got[0].token_ids == ()
            assert got[1].token_ids == (good,) and got[1].error is None
            assert got[2].error is None
        # Its blocks may be given to another.
        (again,) = runner.execute(out(row(1, A))).rows
        assert again.token_ids == (good,)

    def test_a_model_may_mask_tokens(self) -> None:
        model = tiny()
        model.lm_head.register_forward_hook(
            lambda module, args, output: output.index_fill(-1, torch.tensor(5), -torch.inf)
        )
        runner = TransformersRunner(model, num_kv_blocks=16)
        assert runner.execute(out(row(0, A))).rows[0].error is None

    @pytest.mark.parametrize(
        "error",
        [
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
            RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: 9 bytes"),
            RuntimeError("MPS backend out of memory"),
        ],
    )
    def test_out_of_memory_is_told_and_harmless(self, error: RuntimeError) -> None:
        model = tiny()
        raising = [False]

        def hook(module: object, args: object, output: torch.Tensor) -> None:
            if raising[0]:
                raise error

        model.model.layers[1].mlp.register_forward_hook(hook)
        runner = TransformersRunner(model, num_kv_blocks=16)
        raising[0] = True
        with pytest.raises(RunnerOutOfMemory, match=r"2 rows with 10 tokens are too many: .*memory") as caught:
            runner.execute(out(row(0, A), row(1, B)))
        assert caught.value.__context__ is None  # its frames would keep the step's tensors alive
        raising[0] = False
        assert runner.execute(out(row(0, A))).rows[0].token_ids == (greedy(model, A),)

    def test_other_faults_pass(self) -> None:
        model = tiny()
        broken = [False]
        model.model.norm.register_forward_pre_hook(lambda module, args: 1 / 0 if broken[0] else None)
        runner = TransformersRunner(model, num_kv_blocks=16)
        broken[0] = True
        with pytest.raises(ZeroDivisionError):
            runner.execute(out(row(0, A)))
        with pytest.raises(IndexError):
            TransformersRunner(tiny(), num_kv_blocks=16).execute(out(row(0, [5, 97])))

    def test_a_backend_that_lacks_something(self) -> None:
        class Picky(ReferenceBackend):
            name = "picky"

            def unsupported_reasons(self, layers: object) -> list[str]:
                return [f"{len(layers)} layers are two too many"]  # type: ignore[arg-type]

        with pytest.raises(ValueError, match="backend picky: 2 layers are two too many"):
            TransformersRunner(tiny(), num_kv_blocks=1, attention=Picky())

    def test_xformers_needs_a_device_and_says_all_that_is_missing(self) -> None:
        with pytest.raises(UnsupportedModel) as caught:
            TransformersRunner(tiny(), num_kv_blocks=1, attention="xformers")
        for reason in (
            "it needs a CUDA device, and the model is on cpu",
            "it computes in float16 and bfloat16, and the model is in float32",
            "heads have width 8, and its kernels are for 16, 32, 64, 128, 256",
        ):
            assert str(caught.value).count(f"attention backend xformers: {reason}") == 1

    @pytest.mark.parametrize(
        ("version", "reason"),
        [
            (None, "triton is not installed: pip install 'triton>=3.6,<3.9'"),
            ("3.9.0rc1", "triton 3.9.0rc1 has not what its kernels are written with: pip install 'triton>=3.6,<3.9'"),
            ("4.0", "triton 4.0 has not what its kernels are written with"),
            ("3.8.0+cpu", None),
        ],
    )
    def test_a_triton_that_xformers_cannot_use(self, monkeypatch, version: str | None, reason: str | None) -> None:
        def installed(name: str) -> str:
            if version is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(importlib.metadata, "version", installed)
        with pytest.raises(UnsupportedModel) as caught:
            TransformersRunner(tiny(), num_kv_blocks=1, attention="xformers")
        assert ("triton" in str(caught.value)) == (reason is not None)
        assert reason is None or reason in str(caught.value)

    def test_the_block_size_suits_the_backend(self) -> None:
        class Coarse(ReferenceBackend):
            name, default_block_size, block_size_multiple = "coarse", 32, 32

        with pytest.raises(ValueError, match="must be a multiple of 32 for attention backend coarse, got 16"):
            TransformersRunner(tiny(), num_kv_blocks=1, block_size=16, attention=Coarse())
        assert TransformersRunner(tiny(), num_kv_blocks=1, block_size=64, attention=Coarse()).geometry.block_size == 64
        assert TransformersRunner(tiny(), num_kv_blocks=1, attention=Coarse()).geometry.block_size == 32
        assert TransformersRunner(tiny(), num_kv_blocks=1).geometry.block_size == 16


def test_close() -> None:
    model = tiny()
    runner = TransformersRunner(model, num_kv_blocks=16)
    runner.execute(out(row(0, A)))
    for _ in range(2):
        runner.close()
    with pytest.raises(EngineClosed, match="runner is closed"):
        runner.execute(out(row(0, A)))
    with pytest.raises(EngineClosed, match="runner is closed"):
        runner.copy_blocks([BlockCopy("copy", 0, 1)])
    runner.drop_caches()
    assert runner.geometry.num_blocks == 16
    assert greedy(model, A) >= 0


def test_bfloat16_follows_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens may differ in half precision; forced on the same tokens, logits stay close."""
    model = tiny().bfloat16()
    runner = TransformersRunner(model, num_kv_blocks=16)
    assert runner._pool.layers[0].key.dtype == torch.bfloat16
    seen = []
    monkeypatch.setattr(runner, "_sample", lambda logits, rows: seen.append(logits.float()) or [RowResult((0,))] * 2)
    for start in range(len(B)):
        runner.execute(out(row(1, B[: start + 1], start), row(0, A)))
    with torch.no_grad():
        expected = model(torch.tensor([B])).logits[0].float()
    torch.testing.assert_close(torch.stack([logits[0] for logits in seen]), expected, rtol=0, atol=0.02)


def test_time_per_token_of_history_is_small() -> None:
    """Building a step's arrays is a matter of rows, not of tokens of context."""
    from batchkit.hf.batch import BatchBuilder

    builder = BatchBuilder(16)
    tables = [tuple(range(i, i + 130)) for i in range(256)]
    rows = [row(i, [1] * 2050, 2049)._replace(blocks=tables[i]) for i in range(256)]
    builder.build(rows)
    best = min(_timed(builder.build, rows) for _ in range(20))
    assert best < 0.02  # about half a millisecond on an idle machine


def _timed(function: object, *args: object) -> float:
    start = time.perf_counter()
    function(*args)  # type: ignore[operator]
    return time.perf_counter() - start


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, batchkit.hf; assert not {'torch', 'transformers'} & set(sys.modules), 'imported'"
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_conforms(family: str) -> None:
    from batchkit.testing import check_runner

    changes = {"sliding_window": 8} if family == "gemma2" else {}
    model = tiny(family, **changes)
    check_runner(lambda: TransformersRunner(model, num_kv_blocks=40, block_size=4, swap_memory="1MB"), num_workloads=3)


class TestLoading:
    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> str:
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from tokenizers.pre_tokenizers import Whitespace
        from transformers import PreTrainedTokenizerFast

        where = str(tmp_path_factory.mktemp("model"))
        tiny().bfloat16().save_pretrained(where)
        tokenizer = Tokenizer(WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "hello": 3, "world": 4}, unk_token="<unk>"))
        tokenizer.pre_tokenizer = Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>").save_pretrained(where)
        return where

    def test_loads(self, folder: str, capfd: pytest.CaptureFixture[str]) -> None:
        from transformers.utils import logging as their_logging

        from batchkit.hf import HFTokenizer, load_model

        before = their_logging.get_verbosity(), their_logging.is_progress_bar_enabled()
        model, tokenizer = load_model(folder, device="cpu")
        assert (their_logging.get_verbosity(), their_logging.is_progress_bar_enabled()) == before
        assert capfd.readouterr() == ("", "")
        assert model.dtype == torch.bfloat16 and not model.training
        assert isinstance(tokenizer, HFTokenizer) and tokenizer.encode("hello world") == [3, 4]
        runner = TransformersRunner(model, num_kv_blocks=4)
        assert runner.execute(out(row(0, [3, 4]))).rows[0].error is None

    def test_dtype(self, folder: str) -> None:
        from batchkit.hf import load_model

        assert load_model(folder, device="cpu", dtype="float32")[0].dtype == torch.float32
        assert load_model(folder, device="cpu", dtype=torch.float16)[0].dtype == torch.float16

    def test_nothing_there(self, tmp_path: object) -> None:
        from batchkit.hf import load_model

        with pytest.raises(OSError, match="nowhere"):
            load_model(f"{tmp_path}/nowhere", device="cpu")

    def test_a_folder_that_is_not_there_is_no_name_on_the_hub(self, tmp_path: Path) -> None:
        for name in (str(tmp_path / "nowhere"), "./nowhere", tmp_path / "nowhere"):
            with pytest.raises(FileNotFoundError, match=r"there is no folder .*nowhere"):
                load_weights(name)

    @pytest.mark.parametrize("dtype", ["fp32", "nn", ""])
    def test_a_dtype_that_is_none(self, dtype: str) -> None:
        with pytest.raises(ValueError, match=f"such as \"float32\", got '{dtype}'"):
            load_weights("name/on-the-hub", dtype=dtype)

    @pytest.mark.parametrize(("has_units", "has_kernels"), [(True, False), (False, True), (False, False)])
    def test_half_precision_on_a_cpu_without_units_and_kernels_is_said(
        self,
        has_units: bool,
        has_kernels: bool,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr(loading, "_has_half_units", lambda: has_units)
        monkeypatch.setattr(loading, "_has_kernels", lambda: has_kernels)
        tiny().save_pretrained(tmp_path)
        with caplog.at_level(logging.WARNING, logger="batchkit"):
            load_weights(tmp_path, device="cpu")
            assert not caplog.records
            load_weights(tmp_path, device="cpu", dtype="bfloat16")
        is_slow = not has_units and not has_kernels
        assert len(caplog.records) == is_slow
        assert not is_slow or "bfloat16 on a CPU that has no units for it" in caplog.records[0].message


def test_arguments_that_nobody_takes_are_named_before_anything_is_made() -> None:
    class Own(PagedScheduler):
        def __init__(self, allocator: PagedAllocator, **options: object) -> None:
            self.mine = options.pop("mine")
            super().__init__(allocator, **options)

    for name, near in (("max_seqs", "max_num_seqs"), ("kv_memry", "kv_memory"), ("watermark", "watermark_blocks")):
        with pytest.raises(TypeError, match=f"nor PagedScheduler takes an argument '{name}'; is it {near}"):
            Engine.from_model(object(), scheduler=PagedScheduler, **{name: 4})
    with pytest.raises(TypeError, match="takes an argument 'preemption'"):
        Engine.from_model(object(), preemption=None)
    with Engine.from_model(tiny(), num_kv_blocks=8, scheduler=Own, mine=5) as engine:
        assert engine.stats().scheduler == "Own"
    with pytest.raises(TypeError, match="scheduler must be a class, such as PagedScheduler, got 'chunked'"):
        Engine.from_model(object(), scheduler="chunked")
    with pytest.raises(TypeError, match=r"functools\.partial.*given beside it, .*scheduler=MyPolicy, most=2\)"):
        Engine.from_model(object(), scheduler=partial(Own, mine=5))
    with pytest.raises(TypeError, match=r"got LlamaForCausalLM; Engine\.from_model takes a model"):
        Engine(tiny(), PagedScheduler(PagedAllocator(8, 16)))


def test_a_cache_beyond_the_memory_is_said(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="batchkit"):
        TransformersRunner(model, kv_memory="1MiB").close()
        assert not caplog.records
        monkeypatch.setattr(kv_pool, "free_memory", lambda device: 1000)
        for size in ({"kv_memory": "1MiB"}, {"num_kv_blocks": 256}):
            TransformersRunner(model, **size).close()
    said = "the KV cache has 1,048,576 bytes on cpu, where 1,000 are free"
    assert [record.message for record in caplog.records] == [said, said]
