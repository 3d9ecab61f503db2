"""The backend on torch's `varlen_attn`: against the reference, by a stand-in for the kernel; and what that is told."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import builtins
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.attention.varlen

import batchkit.hf.backends.varlen as backend
from batchkit import ContiguousAllocator, Engine, OrcaScheduler, PagedScheduler, SamplingParams
from batchkit.errors import UnsupportedModel
from batchkit.hf.backends import choose_backend
from batchkit.hf.backends.base import LayerKV, LayerSpec
from batchkit.hf.backends.reference import ReferenceBackend
from batchkit.hf.backends.trial import make_step
from batchkit.hf.backends.varlen import VarlenBackend
from tiny_models import tiny
from unit_hf.varlen_rig import on_the_cpu  # noqa: F401 - a fixture

BLOCK = 256
CPU = torch.device("cpu")
PLAIN = LayerSpec(0, 4, 2, 16, 16, torch.float16, CPU)


@pytest.mark.usefixtures("on_the_cpu")
class TestAgainstTheReference:
    @pytest.mark.parametrize("seed", range(25))
    def test_random_steps(self, seed: int) -> None:
        rng = random.Random(seed)
        kv_heads, shared = rng.choice([(1, 1), (3, 1), (2, 2), (1, 4), (1, 8)])
        window = rng.choice([None, None, 1, 7, BLOCK, BLOCK + 1, 600])
        dtype = rng.choice([torch.float16, torch.bfloat16])
        layer = replace(PLAIN, num_heads=kv_heads * shared, num_kv_heads=kv_heads, window=window, dtype=dtype)
        near = [0, 1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 3]
        rows = [(rng.choice(near), rng.choice([1, 1, 2, rng.randint(1, 70)])) for _ in range(rng.randint(1, 6))]
        scattered = rng.random() < 0.6
        step = make_step(layer, rows, block_size=BLOCK, scattered=scattered, seed=seed)
        assert step.kv.key.isnan().any() and step.batch.contiguous.all() != scattered
        scaling = rng.choice([None, 0.4])
        got, want = (step.run(one, scaling) for one in (VarlenBackend(), ReferenceBackend()))
        atol = 2e-3 if dtype == torch.float16 else 2e-2
        torch.testing.assert_close(got, want, atol=atol, rtol=0)

    def test_prompts_alone_read_nothing_from_the_pool(self) -> None:
        for window in (None, 3):
            step = make_step(replace(PLAIN, window=window), [(0, 7), (0, 1), (0, 300)], block_size=BLOCK)
            want = step.run(ReferenceBackend())
            step.kv.key.fill_(float("nan"))
            step.kv.value.fill_(float("nan"))
            torch.testing.assert_close(step.run(VarlenBackend()), want, atol=2e-3, rtol=0)

    def test_blocks_of_512(self) -> None:
        step = make_step(PLAIN, [(511, 1), (512, 2), (3, 1)], block_size=512)
        got, want = (step.run(one) for one in (VarlenBackend(), ReferenceBackend()))
        torch.testing.assert_close(got, want, atol=2e-3, rtol=0)

    @pytest.mark.parametrize(
        ("policy", "allocator"), [(PagedScheduler, None), (OrcaScheduler, ContiguousAllocator)], ids=["paged", "orca"]
    )
    def test_a_model(self, policy, allocator) -> None:
        prompts = [[5, 9, 2, 7], [*range(3, 66)], [11] * 30]
        params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        options = {"scheduler": policy, "num_kv_blocks": 8, "max_model_len": 80}
        if allocator is not None:
            options["allocator"] = allocator
        model = tiny().half()
        said = {}
        for attention in ("varlen", "reference"):
            with Engine.from_model(model, attention=attention, block_size=BLOCK, **options) as engine:
                said[attention] = [list(output.token_ids) for output in engine.generate(prompts, params)]
        assert said["varlen"] == said["reference"]


class TestWhatItIsTold:
    @pytest.fixture
    def told(self, monkeypatch, on_the_cpu) -> list[dict]:  # noqa: F811
        """Arguments of each call."""
        calls = []
        real = torch.nn.attention.varlen.varlen_attn

        def watched(*args, **kwargs):
            calls.append({**kwargs, **dict(zip(("query", "key", "value", "cu_seq_q", "cu_seq_k"), args, strict=False))})
            return real(*args[:4], args[3] if args[4] is None else args[4], *args[5:], **kwargs)

        monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", watched)
        return calls

    def test_one_call_computes_a_step(self, told) -> None:
        make_step(PLAIN, [(300, 1), (0, 9), (256, 20), (5, 1)], block_size=BLOCK).run(VarlenBackend())
        assert len(told) == 1

    def test_the_pool_is_handed_over_as_it_lies(self, told) -> None:
        step = make_step(PLAIN, [(300, 1)], block_size=BLOCK)
        step.run(VarlenBackend())
        for name, pool in (("key", step.kv.key), ("value", step.kv.value)):
            assert told[0][name].data_ptr() == pool.data_ptr() and told[0][name].shape == (4, 256, 2, 16)

    @pytest.mark.parametrize(
        ("changes", "rows", "version", "wanted"),
        [
            ({}, [(9, 1), (300, 1)], "2.13.0", None),  # heads become queries
            ({"num_kv_heads": 4}, [(9, 1), (300, 1)], "2.13.0", 1),
            ({"window": 7}, [(9, 1), (300, 1)], "2.13.0", 1),
            ({"window": 512}, [(9, 1), (300, 1)], "2.13.0", None),  # as many as the tables hold
            ({}, [(9, 1), (300, 2)], "2.14.0.dev20260901+cu130", 1),
            ({}, [(9, 1), (300, 2)], "2.12.1+cu128", None),  # it refuses the argument, and never splits
        ],
    )
    def test_splits_only_where_they_are_joined_right(self, monkeypatch, told, changes, rows, version, wanted) -> None:
        monkeypatch.setattr(torch, "__version__", version)
        make_step(replace(PLAIN, **changes), rows, block_size=BLOCK).run(VarlenBackend())
        assert told[0].get("num_splits") == wanted

    def test_other_implementations_get_no_cumulative_lengths_and_may_split(self, monkeypatch, told) -> None:
        monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3")
        make_step(PLAIN, [(9, 2), (300, 1)], block_size=BLOCK).run(VarlenBackend())
        assert told[0]["cu_seq_k"] is None and "num_splits" not in told[0]
        make_step(PLAIN, [(0, 2), (0, 3)], block_size=BLOCK).run(VarlenBackend())
        assert told[1]["cu_seq_k"] is told[1]["cu_seq_q"]

    def test_decodes_have_one_shape_for_a_width(self, told) -> None:
        """Also where each row is a prompt of one token."""
        plans = []
        for rows in ([(300, 1), (5, 1)], [(0, 1), (0, 1)], [(700, 1), (699, 1)]):
            step = make_step(replace(PLAIN, window=600), rows, block_size=BLOCK)
            batch = replace(step.batch, min_width=4)
            (plan,) = VarlenBackend().plan(batch).groups(600, CPU, step.kv.zero_block)
            plans.append((plan.tables.shape, plan.max_q, plan.max_k, plan.window))
        assert plans == [((2, 4), 1, 1024, (599, 0))] * 3

    def test_a_recorded_step_takes_another_one(self) -> None:
        first, second = (make_step(PLAIN, rows, block_size=BLOCK) for rows in ([(300, 1)], [(400, 1)]))
        plan = VarlenBackend().plan(first.batch)
        (step,) = plan.groups(None, CPU, first.kv.zero_block)
        table, lens = step.tables, step.key_lens
        plan.take(second.batch)
        assert lens.tolist() == [401] and table.tolist() == [second.batch.tables.tolist()]


@pytest.mark.skipif(bool(backend._missing_parts()), reason="this torch's operator takes no block tables")
def test_the_real_operator_takes_these_arguments() -> None:
    """On the meta device, which has shapes and no numbers."""
    meta = torch.device("meta")
    for rows in ([(300, 1), (0, 9)], [(300, 1), (5, 1)], [(0, 5), (0, 2)]):
        for changes in ({}, {"window": 5}, {"num_kv_heads": 4}):
            layer = replace(PLAIN, device=meta, **changes)
            step = make_step(replace(layer, device=CPU), rows, block_size=BLOCK)
            kv = LayerKV(step.kv.key.to(meta), step.kv.value.to(meta), BLOCK, step.kv.zero_block)
            moved = replace(
                step, layer=layer, kv=kv, **{n: getattr(step, n).to(meta) for n in ("query", "key", "value")}
            )
            out = moved.run(VarlenBackend(), 0.3)
            assert out.device == meta and out.shape == step.query.shape and out.dtype == torch.float16


class TestUnsupported:
    def test_every_reason_at_once(self) -> None:
        bad = replace(
            PLAIN, key_dim=260, value_dim=264, dtype=torch.float32, softcap=2.0, has_sinks=True, window=4, num_heads=4
        )
        with pytest.raises(UnsupportedModel) as caught:
            choose_backend("varlen", [bad, replace(bad, index=1)], "Strange")
        for reason in (
            "it needs a CUDA device, and the model is on cpu",
            "float16 and bfloat16, and the model is in float32",
            "different widths, 260 and 264",
            "heads have width 260, and its kernels are for multiples of 8 up to 256",
            "soft-capped",
            "sinks",
        ):
            assert str(caught.value).count(reason) == 1
        assert str(caught.value).count("attention backend varlen: ") == 6

    @pytest.mark.parametrize("width", [12, 264])
    def test_widths(self, width: int, on_the_cpu) -> None:  # noqa: F811
        (reason,) = VarlenBackend().unsupported_reasons([replace(PLAIN, key_dim=width, value_dim=width)])
        assert reason.startswith(f"heads have width {width}, ")
        assert VarlenBackend().unsupported_reasons([replace(PLAIN, key_dim=80, value_dim=80)]) == []

    def test_an_old_device(self, monkeypatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        (reason,) = VarlenBackend().unsupported_reasons([replace(PLAIN, device=torch.device("cuda:1"))])
        assert reason == "it needs compute capability 8.0, and cuda:1 has 7.5"

    def test_a_torch_whose_operator_takes_no_tables(self, monkeypatch, on_the_cpu) -> None:  # noqa: F811
        def older(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None): ...

        monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", older)
        monkeypatch.setattr(torch, "__version__", "2.10.0")
        assert VarlenBackend().unsupported_reasons([PLAIN]) == [
            "torch 2.10.0's varlen_attn takes no block_table, no seqused_k, no window_size, no enable_gqa, no scale: "
            "torch >= 2.12 has it"
        ]

    def test_a_torch_without_the_operator(self, monkeypatch, on_the_cpu) -> None:  # noqa: F811
        real = builtins.__import__

        def importing(name, *rest):
            if name == "torch.nn.attention.varlen":
                raise ImportError(name)
            return real(name, *rest)

        monkeypatch.setattr(builtins, "__import__", importing)
        (reason,) = VarlenBackend().unsupported_reasons([PLAIN])
        assert "has no varlen_attn: torch >= 2.12" in reason

    def test_what_the_kernel_refuses_on_the_device(self, monkeypatch, on_the_cpu) -> None:  # noqa: F811
        def refusing(*args, block_table, seqused_k, window_size, enable_gqa, scale, num_splits=None):
            raise RuntimeError("seqused_k is\n not supported on ROCm")

        monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", refusing)
        with pytest.raises(UnsupportedModel, match="RuntimeError: seqused_k is not supported on ROCm"):
            choose_backend("varlen", [PLAIN], "Any")

    def test_splits_that_are_joined_wrong_are_found_by_trial(self, monkeypatch, on_the_cpu) -> None:  # noqa: F811
        monkeypatch.setattr(backend, "_SPLITS_SINCE", (99, 0))
        with pytest.raises(UnsupportedModel, match="decoding over scattered blocks is off by nan"):
            choose_backend("varlen", [replace(PLAIN, num_kv_heads=4)], "Any")


def test_numbers_are_not_changed_by_the_plan() -> None:
    step = make_step(PLAIN, [(300, 1), (5, 4)], block_size=BLOCK)
    before = {name: np.array(getattr(step.batch, name)) for name in ("tables", "kv_lens", "query_starts")}
    VarlenBackend().plan(step.batch).groups(None, CPU, step.kv.zero_block)
    for name, array in before.items():
        np.testing.assert_array_equal(getattr(step.batch, name), array)
