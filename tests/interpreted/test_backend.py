"""The backend's kernels and masks against the reference backend."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import batchkit.hf.backends.xformers as backend
from batchkit.errors import UnsupportedModel
from batchkit.hf.backends import choose_backend, kv_write, kv_write_kernel
from batchkit.hf.backends.reference import ReferenceBackend
from batchkit.hf.backends.trial import faults
from interpreted.rig import BLOCK, CPU, OnCPU, case, layer

AROUND_BLOCKS = [(0, 1), (62, 1), (63, 1), (64, 1), (129, 1)]


@pytest.mark.parametrize("scattered", [True, False], ids=["paged", "contiguous"])
@pytest.mark.parametrize(
    ("kv_heads", "shared", "width", "window"),
    [(2, 1, 64, None), (1, 8, 64, None), (1, 2, 128, None), (1, 2, 64, 70), (1, 1, 64, 1)],
)
def test_decoding_is_what_the_reference_computes(kv_heads, shared, width, window, scattered) -> None:
    step = case(layer(kv_heads, shared, width, window), AROUND_BLOCKS, scattered=scattered)
    assert step.batch.contiguous.all() != scattered
    for scaling in (None, 0.3) if width == 128 else (None,):
        got, want = (step.run(one, scaling) for one in (OnCPU(), ReferenceBackend()))
        torch.testing.assert_close(got, want, atol=2e-3, rtol=0)


@pytest.mark.parametrize("window", [None, 5])
def test_a_step_of_prompts_chunks_and_decodes(window) -> None:
    rows = [(0, 7), (66, 1), (61, 9), (0, 1), (3, 2)]
    step = case(layer(window=window), rows, scattered=True)
    torch.testing.assert_close(step.run(OnCPU()), step.run(ReferenceBackend()), atol=2e-3, rtol=0)


def test_fresh_prompts_alone_read_nothing_from_the_pool() -> None:
    step = case(layer(), [(0, 7), (0, 3)], scattered=True)
    step.kv.key.fill_(float("nan"))
    step.kv.value.fill_(float("nan"))
    torch.testing.assert_close(step.run(OnCPU()), step.run(ReferenceBackend()), atol=2e-3, rtol=0)


@pytest.mark.parametrize(("width", "value_width"), [(64, 64), (128, 128), (80, 80), (24, 16)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_one_kernel_writes_keys_and_values(width, value_width, dtype) -> None:
    assert kv_write._writer(CPU) is kv_write_kernel.write
    spec = replace(layer(3, 2), key_dim=width, value_dim=value_width, dtype=dtype)
    step = case(spec, [(0, 7), (66, 1), (61, 9), (3, 1)], scattered=True)
    assert step.is_written_by(OnCPU())
    # As one projection of query, key and value hands them over.
    fused = torch.randn(len(step.batch.slots), 3, 2 * width + value_width).to(dtype)
    key, value = fused[..., width : 2 * width], fused[..., 2 * width :]
    slots = torch.from_numpy(step.batch.slots)
    OnCPU().write(step.kv, slots, key, value)
    assert torch.equal(step.kv.key[:, slots], key.transpose(0, 1))
    assert torch.equal(step.kv.value[:, slots], value.transpose(0, 1))


@pytest.mark.parametrize("pointer", ["*fp16", "*bf16", "*fp32"])
def test_the_kernel_that_writes_compiles_for_a_gpu(pointer, tmp_path) -> None:
    """The interpreter runs it as Python, and takes what the compiler refuses.

    The compiler needs no device, but a process in which nothing has been interpreted.
    """
    code = f"""
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from batchkit.hf.backends.kv_write_kernel import _write

types = {{"slots": "*i64", **dict.fromkeys(("key", "key_pool", "value", "value_pool"), {pointer!r})}}
types = {{name: types.get(name, "i32") for name in _write.arg_names}}
sizes = {{"KEY_DIM": 80, "VALUE_DIM": 64, "WIDTH": 128}}
source = ASTSource(_write, types | dict.fromkeys(sizes, "constexpr"), sizes)
assert triton.compile(source, target=GPUTarget("cuda", 90, 32), options={{"num_warps": 1}}).asm["cubin"]
"""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, env=env)


def test_a_kernel_that_does_not_work_is_not_used(monkeypatch, caplog) -> None:
    monkeypatch.setattr(kv_write, "_writer", kv_write._writer.__wrapped__)

    def half(kv, slots, key, value) -> None:
        kv.key[:, slots] = key.transpose(0, 1)

    monkeypatch.setattr(kv_write_kernel, "write", half)
    step = case(layer(), [(0, 7), (66, 1)], scattered=True)
    assert step.is_written_by(OnCPU())
    assert "K and V are written by two kernels a layer on cpu" in caplog.text and "something else" in caplog.text


def test_the_kernel_for_gaps_is_wrong_for_several_queries_and_never_gets_them() -> None:
    names = backend._names()
    step = case(layer(), [(60, 4), (60, 4)], scattered=False)
    starts = (step.batch.tables[step.batch.table_starts[:-1]] * BLOCK).tolist()
    mask = names.gappy_mask.from_seqlens([4, 4], [*starts, step.kv.key.shape[1]], [64, 64], device=CPU)
    query = step.query[None, :, :, None]
    key, value = (backend._repeated(pool.transpose(0, 1), 1) for pool in (step.kv.key, step.kv.value))
    got = names.forward(query, key, value, attn_bias=mask, op=names.split_k).reshape(8, 2, 64)
    error = (got - step.run(ReferenceBackend())).abs().amax((1, 2))
    # The last query of a row sees all that the row has; those before it see what they must not.
    assert error[[3, 7]].max() < 2e-3 and error[[0, 4]].min() > 0.05
    with pytest.raises(ValueError, match=r"one token per row, got rows of \[4, 4\]"):
        backend._decode_mask(step.batch, np.arange(2), 2, None, CPU, step.kv.zero_block)


def seen_by(step, window: int | None) -> torch.Tensor:
    """[T, T + keys]: which slots of the pool each token sees, written out."""
    seen = torch.zeros(step.batch.num_tokens, step.kv.key.shape[1], dtype=torch.bool)
    for row in range(step.batch.num_rows):
        table = step.batch.tables[step.batch.table_starts[row] : step.batch.table_starts[row + 1]]
        for token in range(step.batch.query_starts[row], step.batch.query_starts[row + 1]):
            last = int(step.batch.positions[token])
            for position in range(0 if window is None else max(0, last + 1 - window), last + 1):
                seen[token, table[position // BLOCK] * BLOCK + position % BLOCK] = True
    return seen


@pytest.mark.parametrize("seed", range(12))
def test_masks_hide_what_the_reference_hides(seed: int) -> None:
    rng = random.Random(seed)
    window = rng.choice([None, 1, 40, 64, 200])
    rows = [
        (rng.choice([0, rng.randint(0, 200)]), rng.choice([1, rng.randint(1, 90)])) for _ in range(rng.randint(1, 5))
    ]
    step = case(layer(width=16, window=window), rows, scattered=rng.random() < 0.5, num_blocks=40, seed=seed)
    want = seen_by(step, window)
    num_seen = 0
    for group in OnCPU().plan(step.batch).groups(window, CPU, step.kv.zero_block):
        tokens = torch.arange(step.batch.num_tokens) if group.tokens is None else group.tokens
        if group.reads_pool:
            slots = torch.arange(step.kv.key.shape[1])
        elif group.slots is not None:
            slots = group.slots
        else:
            slots = torch.as_tensor(step.batch.slots)[tokens]
        shape = (len(tokens), len(slots))
        if hasattr(group.mask, "block_tables"):  # over the slots up to the last block in use
            shape = (len(tokens), group.mask.block_tables.numel() * BLOCK)
        got = group.mask.materialize(shape) == 0
        assert got[group.num_tokens :].sum() == len(tokens) - group.num_tokens  # padding sees one key each
        got, tokens = got[: group.num_tokens], tokens[: group.num_tokens]
        seen = torch.zeros_like(want[tokens])
        # A slot may be gathered for several rows.
        for token in range(len(tokens)):
            seen[token, slots[: got.shape[1]][got[token]]] = True
        torch.testing.assert_close(seen, want[tokens])
        num_seen += int(got.sum())
    assert num_seen == int(want.sum())


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("scattered", [True, False], ids=["paged", "contiguous"])
def test_a_batch_that_grows_compiles_few_kernels(monkeypatch, scattered: bool, window: int | None) -> None:
    sizes = ("Z", "N_CTX_K", "BLOCK_N_PER_SPLIT", "kv_cache_blocks_per_row", "NUM_PROGRAMS_DIM2_CONST")
    compiled = set()

    class Kernel:
        def __getitem__(self, grid):
            return lambda **arguments: compiled.add(tuple(arguments[name] for name in sizes))

    op = backend._names().split_k
    monkeypatch.setattr(op, "get_kernel", classmethod(lambda cls: Kernel()))
    monkeypatch.setattr(sys.modules[op.__module__], "merge_attentions", lambda *parts: None)
    for num_rows in (5, 8):
        for start in range(0, 330, 40):
            rows = [(start + row, 1) for row in range(num_rows)]
            case(layer(1, window=window), rows, scattered=scattered, num_blocks=64).run(OnCPU())
    assert 1 < len(compiled) <= 4  # contexts of 1 to 330 tokens, up to 64, 128, 256 and 512


def test_more_keys_than_the_kernel_can_count(monkeypatch) -> None:
    step = case(layer(), [(3, 1)], scattered=True)
    monkeypatch.setattr(backend, "_MOST_ELEMENTS", step.kv.key.numel() - 1)
    with pytest.raises(ValueError, match="take 204,800 elements, and xformers' kernel counts only up to"):
        step.run(OnCPU())


@pytest.mark.parametrize("spec", [layer(shared=2), layer(window=4096)], ids=["grouped", "window"])
def test_it_passes_its_trial(spec) -> None:
    assert faults(OnCPU(), [spec], BLOCK) == []


def test_kernels_that_fail_when_they_are_tried_are_a_fault() -> None:
    tried = set()

    class NotBuilt(OnCPU):
        def _forward(self, query, key, value, mask, scaling, *, decodes):
            tried.add(decodes)
            if not decodes:
                raise NotImplementedError("No operator found\n   xFormers wasn't build with CUDA support")
            return super()._forward(query, key, value, mask, scaling, decodes=decodes)

    (fault,) = faults(NotBuilt(), [layer()], BLOCK)
    assert fault.endswith("NotImplementedError: No operator found xFormers wasn't build with CUDA support")
    assert tried == {True, False}


def test_a_window_that_the_kernels_do_not_get_is_found() -> None:
    class Blind(OnCPU):
        def attend(self, spec, *rest, **more):
            return super().attend(replace(spec, window=None), *rest, **more)

    assert any(
        "decoding over contiguous blocks is off by" in fault for fault in faults(Blind(), [layer(window=9)], BLOCK)
    )


def test_every_reason_at_once() -> None:
    bad = replace(layer(), key_dim=24, value_dim=32, dtype=torch.float32, softcap=2.0, has_sinks=True)
    with pytest.raises(UnsupportedModel) as caught:
        choose_backend("xformers", [bad, bad], "Strange")
    for reason in (
        "float16 and bfloat16, and the model is in float32",
        "different widths, 24 and 32",
        "heads have width 24, and its kernels are for 16, 32, 64, 128, 256",
        "soft-capped",
        "sinks",
    ):
        assert str(caught.value).count(reason) == 1
