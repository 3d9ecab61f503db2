"""What a server on a GPU goes through: preemption, blocks that hold NaN, too little memory, and its end."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from typing_extensions import override

import batchkit.hf.kv_pool as kv_pool
from batchkit.hf.backends import kv_write
from batchkit.hf.backends.base import write_plainly
from batchkit.hf.profiling import largest_steps, peak_bytes
from batchkit.hf.runner import TransformersRunner
from gpu.rig import BACKENDS, backend, check_close, model_of, prompts_of, serve

# What torch or a kernel warns of on a device is no fault of the device.
pytestmark = pytest.mark.filterwarnings("default")

ANY = ["reference", *(one for one in BACKENDS if one != "reference")]
DTYPE = torch.float16
LONG = prompts_of(250, 250, 249, 247)
STEPS = 12  # after which each has outgrown a block of 256


@pytest.mark.parametrize("attention", ANY)
@pytest.mark.parametrize("policy", ["paged", "chunked"])
def test_swapping_changes_nothing(policy: str, attention: str) -> None:
    model = model_of("llama", DTYPE)
    work: dict[str, Any] = {"prompts": LONG, "steps": STEPS}
    exact = serve(copy.deepcopy(model).float(), attention="reference", **work)
    want = serve(model, attention="reference", forced=exact.tokens, **work)
    tight = serve(
        model,
        attention=backend(attention, DTYPE),
        policy=policy,
        forced=exact.tokens,
        block_size=256,
        num_kv_blocks=len(LONG) + 1,
        swap_memory="256MiB",
        **work,
    )
    assert tight.stats.num_preemptions > 0 and tight.stats.recomputed_tokens == 0
    check_close(tight, want, exact)


@pytest.mark.parametrize("attention", ANY)
@pytest.mark.parametrize("policy", ["paged", "contiguous", "chunked"])
def test_what_unwritten_blocks_hold_changes_no_bit(policy: str, attention: str) -> None:
    prompts = prompts_of(3, 70, 130)
    some, others = (
        serve(
            model_of("mistral", DTYPE),
            attention=backend(attention, DTYPE),
            policy=policy,
            prompts=prompts,
            steps=3,
            fill=fill,
        )
        for fill in (float("nan"), 0.0)
    )
    assert all(torch.equal(a, b) for a, b in zip(some.logits, others.logits, strict=True))


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("attention", ANY)
def test_close_gives_the_memory_back(cuda: torch.device, attention: str, graphs: bool) -> None:
    options = {"cuda_graphs": True} if graphs else {}

    def taken() -> int:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    model = model_of("llama", DTYPE)
    serve(model, attention=attention, **options)  # what a library keeps for the process, such as workspaces
    before = taken()
    torch.cuda.reset_peak_memory_stats()
    serve(model, attention=attention, swap_memory="16MiB", **options)
    assert torch.cuda.max_memory_allocated() > before
    assert taken() == before


def test_one_kernel_writes_keys_and_values(cuda: torch.device) -> None:
    pytest.importorskip("triton")
    assert kv_write._writer(cuda) is not write_plainly


# --- too little memory ------------------------------------------------------------------------------------------------

WORK = prompts_of(500, 7)
BEYOND = 300  # tokens of a step, in the rehearsal
FREE = 144 << 20
"""Bytes. A token takes three activations of 128 KiB at once: 507 tokens need 190 MiB, and half of them 95."""


class Stingy(TransformersRunner):
    """Stands for a device with too little memory."""

    @override
    def _execute(self, rows: Any) -> Any:
        if (count := sum(row.num_tokens for row in rows)) > BEYOND:
            raise torch.OutOfMemoryError(f"{count} tokens")
        return super()._execute(rows)


@contextlib.contextmanager
def little_memory(device: torch.device, free: int = FREE) -> Iterator[None]:
    """This process may have so many bytes more than it has."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + free) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_step_out_of_memory_is_planned_again_with_half_the_tokens(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    # In float32 other steps give the same tokens.
    model = model_of("llama", torch.float32, intermediate_size=1 << 15)
    work: dict[str, Any] = {"attention": "reference", "policy": "chunked", "budget": 512, "prompts": WORK}
    want = serve(model, **work)
    with caplog.at_level(logging.WARNING, "batchkit"):
        if device.type == "cuda":
            with little_memory(device):
                got = serve(model, **work)
        else:
            got = serve(model, runner_type=Stingy, **work)
    assert next(record.args for record in caplog.records if "out of memory" in record.message) == (507, 253)
    assert got.tokens == want.tokens
    for some, others in zip(got.logits, want.logits, strict=True):
        torch.testing.assert_close(some, others, atol=1e-3, rtol=0)


def test_peaks_are_what_torch_takes_from_the_device(cuda: torch.device) -> None:
    before = torch.cuda.memory_allocated(cuda)
    peaks = peak_bytes(lambda: torch.empty(200 << 20, dtype=torch.uint8, device=cuda), [cuda])
    assert 200 << 20 <= peaks[cuda] < 210 << 20
    assert torch.cuda.memory_allocated(cuda) == before
    assert peak_bytes(lambda: None, [cuda]) == {cuda: 0}


def test_the_largest_steps_fit_beside_a_cache_of_the_default_size(
    cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(
        "llama", DTYPE, intermediate_size=1 << 13, num_hidden_layers=8
    )  # a token takes 16 KiB, several times over
    limits = {"max_num_seqs": 256, "max_tokens_per_step": 8192}
    roomy = TransformersRunner(model, **limits)
    cap = roomy.geometry.num_blocks
    block = roomy.geometry.block_size
    size = sum(kv_pool.block_bytes(list(roomy._bound.layers.values()), block).values())
    steps = [step for _, step in largest_steps(max_tokens=8192, max_rows=256, max_len=1024, block_size=block)]
    roomy._pool.fill(0.0)
    most = max(peak_bytes(lambda step=step: roomy.execute(step), [cuda])[cuda] for step in steps)
    roomy.close()
    free = most + cap * size * 3 // 4  # not enough for all that 256 sequences can use
    monkeypatch.setattr(kv_pool, "free_memory", lambda device: free)
    with little_memory(cuda, free):
        runner = TransformersRunner(model, **limits)
        assert 0 < runner.geometry.num_blocks < cap // 2
        runner._pool.fill(0.0)
        for step in steps:
            assert all(row.error is None for row in runner.execute(step).rows)
        runner.close()
