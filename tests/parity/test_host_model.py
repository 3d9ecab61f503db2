"""The caller's model and process are the same while a runner is open, and after it."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import copy
import gc
import random
import weakref

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from batchkit.hf.runner import TransformersRunner
from batchkit.types import Request, SamplingParams, ScheduledSequence, SchedulerOutput
from tiny_models import COMMON

MODELS = {
    "llama": {"attention_dropout": 0.5},
    "gemma2": {"sliding_window": 8, "attention_dropout": 0.5},
    "mixtral": {"num_local_experts": 4, "attention_dropout": 0.5},
}
PROMPT = torch.tensor([[5, 9, 14, 3, 60, 61, 62, 40, 33, 12]])


def tiny(family: str, **changes: object) -> torch.nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**COMMON, **MODELS[family], **changes})
    return AutoModelForCausalLM.from_config(config).float()


def steps(runner: TransformersRunner, count: int, temperature: float = 1.0) -> list[int]:
    """Prefill a prompt and decode, sampling."""
    params = SamplingParams(temperature=temperature, seed=3)
    prompt = tuple(PROMPT[0].tolist())
    request = Request(id="a", prompt_token_ids=prompt, params=params, max_tokens=count, seed=3)
    known, start, output = list(prompt), 0, []
    for _ in range(count):
        row = ScheduledSequence(
            seq_id=1,
            row=0,
            seat=0,
            request=request,
            sample_index=0,
            start=start,
            num_tokens=len(known) - start,
            token_ids=tuple(known[start:]),
            output_ids=output,
            num_output=len(output),
            blocks=range(8),
            samples=True,
            idle=False,
        )
        (result,) = runner.execute(SchedulerOutput(rows=(row,), num_tokens=row.num_tokens)).rows
        assert result.error is None
        start = len(known)
        output.append(result.token_ids[0])
        known.append(result.token_ids[0])
    return output


def use(model: torch.nn.Module) -> list[torch.Tensor]:
    """What a caller does with a model: forward, generate, train. Returns everything that comes out."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        seen = [model(PROMPT).logits, model(PROMPT, use_cache=False, output_hidden_states=True).hidden_states[-1]]
        seen.append(model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=6, do_sample=False))
        torch.manual_seed(7)
        seen.append(model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=6, do_sample=True))
    model.train()
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(PROMPT, labels=PROMPT).loss
    loss.backward()
    seen.append(loss.detach())
    seen += [parameter.grad.clone() for parameter in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    seen += [parameter.detach().clone() for parameter in model.parameters()]
    return seen if model.train(was_training) is model else []


def state(model: torch.nn.Module) -> dict[str, object]:
    return {
        "config": model.config.to_dict(),
        "attention": model.config._attn_implementation,
        "generation": model.generation_config.to_dict(),
        "training": [module.training for module in model.modules()],
        "modules": [id(module) for module in model.modules()],
        "parameters": [(id(p), p.data_ptr(), p.requires_grad) for p in model.parameters()],
        "buffers": [(id(b), b.data_ptr()) for b in model.buffers()],
        "hooks": [
            {key: list(value) for key, value in vars(module).items() if key.endswith("_hooks")}
            for module in model.modules()
        ],
        "attributes": [sorted(vars(module)) for module in model.modules()],
    }


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("training", [False, True])
def test_forward_generate_and_training_are_bit_identical(family: str, training: bool) -> None:
    model = tiny(family).train(training)
    seen: list[tuple[object, ...]] = []
    model.model.layers[0].register_forward_hook(lambda module, args, output: seen.append(args))
    with torch.no_grad():
        model(PROMPT, output_hidden_states=True)  # transformers installs hooks of its own for this, once
    control = copy.deepcopy(model)
    before = state(model)

    runner = TransformersRunner(model, num_kv_blocks=8)
    steps(runner, 3)
    assert state(model) == before
    for round_ in range(3):  # a training step each
        if round_ == 2:
            runner.close()
        else:
            steps(runner, 2)
        for got, expected in zip(use(model), use(control), strict=True):
            assert torch.equal(got, expected)
        assert state(model) == before
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("family", MODELS)
def test_training_in_place_is_seen(family: str) -> None:
    model = tiny(family)
    runner = TransformersRunner(model, num_kv_blocks=8)
    for _ in range(2):
        got = steps(runner, 8, temperature=0)
        fresh = TransformersRunner(copy.deepcopy(model), num_kv_blocks=8)
        assert got == steps(fresh, 8, temperature=0)
        for _ in range(3):
            use(model)
    first = model.get_input_embeddings().weight
    assert runner._bound.model.get_input_embeddings().weight is first


def test_train_mode_and_dropout_stay_the_callers() -> None:
    model = tiny("llama").train()
    runner = TransformersRunner(model, num_kv_blocks=8)
    assert model.training and all(module.training for module in model.modules())
    got = steps(runner, 8, temperature=0)
    assert got == steps(TransformersRunner(copy.deepcopy(model).eval(), num_kv_blocks=8), 8, temperature=0)
    assert model.training


@pytest.mark.parametrize("where", ["autocast", "grad", "no_grad", "default_device"])
def test_the_callers_context_does_not_matter(where: str) -> None:
    model = tiny("llama")
    expected = steps(TransformersRunner(model, num_kv_blocks=8), 6, temperature=0)
    context = {
        "autocast": torch.autocast("cpu", torch.bfloat16),
        "grad": torch.enable_grad(),
        "no_grad": torch.no_grad(),
        "default_device": torch.device("meta"),
    }[where]
    with context:
        runner = TransformersRunner(model, num_kv_blocks=8)
        assert {layer.dtype for layer in runner._bound.layers.values()} == {torch.float32}
        got = steps(runner, 6, temperature=0)
    assert got == expected


def test_process_wide_state_is_untouched() -> None:
    model = tiny("llama")

    def everything() -> list[object]:
        return [
            torch.get_rng_state().tolist(),
            random.getstate(),
            np.random.get_state()[1].tolist(),
            np.random.get_state()[2],
            torch.get_num_threads(),
            torch.get_num_interop_threads(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.cuda.flash_sdp_enabled(),
            torch.get_float32_matmul_precision(),
            torch.get_default_device(),
        ]

    before = everything()
    runner = TransformersRunner(model, num_kv_blocks=8)
    assert everything() == before
    steps(runner, 10)
    assert everything() == before
    runner.close()
    assert everything() == before


def test_hooks_that_shape_the_output_are_kept() -> None:
    """A hook may be part of what the model computes, so the clone has it too; it is shared, not copied."""
    model = tiny("llama").eval()
    scale = {"by": 1.0}
    model.model.layers[0].register_forward_hook(lambda module, args, output: output * scale["by"])
    runner = TransformersRunner(model, num_kv_blocks=8)
    for by in (1.0, -2.0):
        scale["by"] = by
        with torch.no_grad():
            expected = model(PROMPT).logits[0, -1].argmax().item()
        assert steps(runner, 1, temperature=0) == [expected]


def test_many_runners_on_one_model() -> None:
    model = tiny("gemma2")
    alone = steps(TransformersRunner(model, num_kv_blocks=8), 8)
    runners = [TransformersRunner(model, num_kv_blocks=8) for _ in range(3)]
    assert [steps(runner, 8) for runner in runners] == [alone] * 3
    runners[0].close()
    assert steps(runners[1], 8) == alone


def test_close_gives_the_memory_back() -> None:
    model = tiny("llama")
    runner = TransformersRunner(model, num_kv_blocks=8, swap_memory="1MB")
    steps(runner, 2)
    pools = [weakref.ref(pool) for pool in (*runner._pool._pools, *runner._pool._host)]
    pools += [weakref.ref(layer.key) for layer in runner._pool.layers]
    clone = weakref.ref(runner._bound.model)
    gc.disable()
    try:
        runner.close()
        assert all(pool() is None for pool in pools)  # at once, not when the garbage collector comes round
    finally:
        gc.enable()
    gc.collect()
    assert clone() is None
    assert all(p.data_ptr() for p in model.parameters())
