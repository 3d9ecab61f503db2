"""Kernels that multiply bfloat16 by instructions for it, for which `emulated_units.h` stands in."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import hashlib
from collections.abc import Iterator
from ctypes import CDLL
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import batchkit.hf.decoder as decoder
import batchkit.hf.fused as fused
import batchkit.hf.layer_kernels as layer_kernels
from batchkit import Engine, SamplingParams
from batchkit.hf.attention import bind
from batchkit.hf.backends import native
from batchkit.hf.backends.native import BuildError
from batchkit.hf.fused import optimized
from batchkit.hf.layer_kernels import Packed, linear
from tiny_models import tiny

EMULATED = Path(__file__).with_name("emulated_units.h")
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)


def _why_not() -> str | None:
    try:
        native.kernels("linear")
    except BuildError as error:
        return str(error)
    return None


pytestmark = pytest.mark.skipif(_why_not() is not None, reason=f"no kernels here: {_why_not()}")


def _forget() -> None:
    for known in (layer_kernels._function, layer_kernels._linear_floats, layer_kernels._panel, decoder._functions):
        known.cache_clear()


@pytest.fixture(autouse=True, params=["dot products", "tiles"])
def units(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    which = ["-DEMULATED_TILES"] if request.param == "tiles" else []
    # Its contents are not among what names a library, hence the hash.
    made_of = hashlib.sha256(EMULATED.read_bytes()).hexdigest()
    flags = [*native._PROCESSORS["AVX2"], "-include", str(EMULATED), *which, f"-DMADE_OF=0x{made_of[:8]}"]

    def kernels(name: str) -> CDLL:
        return native.load(native._KERNELS / f"{name}.cpp", flags) if name in ("linear", "decoder") else real(name)

    real = native.kernels
    for module in (layer_kernels, decoder, fused):
        monkeypatch.setattr(module, "kernels", kernels)
    monkeypatch.setattr(fused, "_has_units", lambda dtype: dtype == torch.bfloat16)
    monkeypatch.setattr(fused, "multiplies_bfloat16", lambda: True)
    _forget()
    yield
    _forget()


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("inputs", [1, 2, 3, 31, 32, 33, 64, 256, 289, 600])
@pytest.mark.parametrize("outputs", [1, 63, 64, 65, 200])
class TestLinear:
    def test_there_and_back(self, outputs: int, inputs: int) -> None:
        weight = random(outputs, inputs)
        packed = Packed(weight)
        assert layer_kernels._panel() == 64 and torch.equal(packed.unpacked(), weight)
        whole = random(128, inputs)
        within = Packed.within(whole.clone())
        assert within is not None
        within.fill(within.numbers)
        assert torch.equal(within.unpacked(), whole) and torch.equal(within.undone(), whole)
        assert torch.equal(packed.undone(), weight)

    def test_products(self, outputs: int, inputs: int) -> None:
        packed, bias = Packed(random(outputs, inputs)), random(outputs, seed=1)
        x = random(97, inputs, seed=2)
        want = nn.functional.linear(x.double(), packed.unpacked().double(), bias.double())
        got = linear(x, packed, bias)
        torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-5 * float(want.abs().max()))
        for rows in (1, 2, 11, 12, 13, 15, 16, 17, 33, 48, 49):  # a row's result is its own
            assert torch.equal(linear(x[:rows], packed, bias), got[:rows])
            assert torch.equal(linear(x[-rows:], packed, bias), got[-rows:])


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3_text", "olmo2"])
@pytest.mark.parametrize(
    "sizes",
    [{}, {"hidden_size": 40, "intermediate_size": 70, "num_attention_heads": 5, "num_key_value_heads": 1}],
    ids=["even", "odd"],
)
class TestModels:
    def test_logits(self, family: str, sizes: dict[str, int]) -> None:
        """They are no further from those in float64 than torch's, or hardly."""
        truth = bind(tiny(family, **sizes).double()).run_alone()
        model = tiny(family, **sizes).bfloat16()
        plain = bind(model).run_alone().double()
        bound = optimized(bind(model), "copy")
        assert bound.fused is not None and bound.fused.layers == (2, 2) and bound.fused.packed == (15, 15)
        allowed = 1.2 * float((plain - truth).norm())
        got = bound.run_alone().double()
        assert (got - truth).norm() <= allowed
        # With some weights packed, and others not.
        for name, module in bound.model.named_modules():
            if name.endswith(("1.mlp.up_proj", "1.self_attn.k_proj", "0.mlp.down_proj", "0.self_attn.o_proj")):
                del vars(module)["packed"]
        for layer in bound.model.model.layers:  # type: ignore[union-attr]
            layer.forward.weights_changed()  # type: ignore[union-attr,operator]
        assert (bound.run_alone().double() - truth).norm() <= allowed

    def test_steps(self, family: str, sizes: dict[str, int]) -> None:
        """Prompts together, also one of more tokens than go through a layer at once, and chunks beside decoding."""
        changes: dict[str, Any] = {**sizes, "max_position_embeddings": 512}
        prompts = [[5, 9, 11], [k % 90 for k in range(290)], [1], list(range(3, 40))]
        truth = tiny(family, **changes).bfloat16().double()
        model = tiny(family, **changes).bfloat16()
        with Engine.from_model(model, num_kv_blocks=64, max_tokens_per_step=260, pack_weights="move") as engine:
            assert model.model.layers[0].mlp.up_proj.weight.isnan().all()
            for prompt, out in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
                tokens = [*prompt, *out.token_ids]
                with torch.no_grad():
                    logits = truth(torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1]
                want = logits.log_softmax(-1).gather(1, torch.tensor(out.token_ids)[:, None])[:, 0]
                found = [by[token].logprob for token, by in zip(out.token_ids, out.outputs[0].logprobs, strict=True)]
                torch.testing.assert_close(torch.tensor(found).double(), want, rtol=0, atol=0.02)


def test_without_packing_linear_layers_are_torchs() -> None:
    bound = optimized(bind(tiny().bfloat16()))
    assert bound.fused is not None and bound.fused.linear == (0, 0) and bound.fused.layers == (0, 0)
    assert bound.fused.norms == (5, 5)
