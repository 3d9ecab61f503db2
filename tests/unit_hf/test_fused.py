"""Fused layers on the CPU: the kernels, which modules get them, and that outputs stay what they are."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import copy
import functools
import gc
import logging
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

import batchkit.hf.fused as module
import batchkit.hf.layer_kernels as layer_kernels
from batchkit import Engine, SamplingParams
from batchkit.hf.attention import bind
from batchkit.hf.backends.native import BuildError, kernels
from batchkit.hf.fused import Fused, fuse, optimized
from batchkit.hf.layer_kernels import GELU_TANH, SILU, best, gated, linear, norm, rotary
from batchkit.hf.runner import TransformersRunner
from tiny_models import tiny


def _why_not() -> str | None:
    try:
        kernels("layers")
    except BuildError as error:
        return str(error)
    return None


pytestmark = pytest.mark.skipif(_why_not() is not None, reason=f"no kernels here: {_why_not()}")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = (1, 2, 7, 8, 15, 16, 17, 33, 64, 100, 576, 1000)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def spread(*shape: int, dtype: torch.dtype, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def check(got: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype) -> None:
    """One rounding, at the end, of what was computed in float32."""
    assert got.dtype == dtype and got.shape == truth.shape
    rtol = max(0.51 * torch.finfo(dtype).eps, 2e-6)
    torch.testing.assert_close(got.double(), truth, rtol=rtol, atol=1e-6 if dtype == torch.float32 else 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
class TestKernels:
    @pytest.mark.parametrize("width", WIDTHS)
    @pytest.mark.parametrize("offset", [0.0, 1.0])
    def test_norm(self, dtype: torch.dtype, width: int, offset: float) -> None:
        x = spread(3, 4, width, dtype=dtype) * torch.tensor([[1e-2], [1.0], [1.0], [20.0]], dtype=dtype)
        weight = spread(width, dtype=dtype, seed=1)
        truth = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        check(norm(x, weight, eps=1e-5, offset=offset), truth * (weight.double() + offset), dtype)
        check(norm(x, None, eps=1e-5), truth, dtype)
        # As one of several things in a wider tensor.
        wide = torch.cat((x, x), -1)[..., :width]
        assert torch.equal(norm(wide, weight, eps=1e-5), norm(x, weight, eps=1e-5))

    @pytest.mark.parametrize("width", WIDTHS)
    def test_gated(self, dtype: torch.dtype, width: int) -> None:
        gate, up = spread(3, width, dtype=dtype, scale=4), spread(3, width, dtype=dtype, seed=1)
        for activation, function in (
            (SILU, nn.functional.silu),
            (GELU_TANH, lambda x: nn.functional.gelu(x, approximate="tanh")),
        ):
            check(gated(gate, up, activation), function(gate.double()) * up.double(), dtype)

    def test_gated_far_out(self, dtype: torch.dtype) -> None:
        top = float(torch.finfo(dtype).max)
        gate = torch.tensor([0.0, -0.0, 1e-7, 30, -30, 88, -88, 1000, -1000, top, -top, math.inf], dtype=dtype)
        one = torch.ones_like(gate)
        got = gated(gate, one, SILU)
        assert torch.equal(got.isnan(), torch.zeros_like(got, dtype=torch.bool))
        torch.testing.assert_close(got.float(), nn.functional.silu(gate.float()), rtol=1e-2, atol=1e-6)
        assert gated(torch.full_like(gate, math.nan), one, SILU).isnan().all()

    @pytest.mark.parametrize("width", [2, 6, 8, 16, 24, 64, 80, 128])
    def test_rotary(self, dtype: torch.dtype, width: int) -> None:
        heads = (3, 1)
        fused = spread(1, 5, sum(heads) + 1, width, dtype=dtype)  # as one projection gives them
        query, key = fused[:, :, :3].transpose(1, 2), fused[:, :, 3:4].transpose(1, 2)
        cos, sin = (spread(1, 5, width, dtype=dtype, seed=seed) for seed in (1, 2))
        for got, x in zip(rotary(query, key, cos, sin), (query, key), strict=True):
            exact, waves = x.double(), (cos.double()[:, None], sin.double()[:, None])
            turned = torch.cat((-exact[..., width // 2 :], exact[..., : width // 2]), -1)
            atol = 1e-6 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
            torch.testing.assert_close(got.double(), exact * waves[0] + turned * waves[1], rtol=0, atol=atol)
            assert got.transpose(1, 2).is_contiguous()

    @pytest.mark.parametrize("width", [1, 7, 8, 33, 4095, 4096, 4097, 49152])
    def test_best(self, dtype: torch.dtype, width: int) -> None:
        logits = spread(9, width, dtype=dtype)
        logits[1] = 0  # all the same
        logits[2] = -math.inf
        logits[3, width // 2] = math.nan
        logits[4, width - 1] = math.nan
        logits[5, width // 3] = logits[5, width - 1] = math.inf
        logits[6, width // 3 :] = -math.inf
        values, found = best(logits)
        want = logits.max(-1)
        assert torch.equal(found, want.indices)
        torch.testing.assert_close(values, want.values.float(), rtol=0, atol=0, equal_nan=True)
        wide = torch.cat((logits, logits + 1), -1)[:, :width]
        assert torch.equal(best(wide)[1], want.indices)

    def test_best_in_a_dtype_without_a_kernel(self, dtype: torch.dtype) -> None:
        logits = spread(3, 100, dtype=dtype)
        values, found = best(logits.double())
        assert torch.equal(found, logits.max(-1).indices) and values.dtype == torch.float32

    def test_neighbours_and_threads_change_no_bit(self, dtype: torch.dtype, threads: Callable[[int], None]) -> None:
        x, weight = spread(150, 1000, dtype=dtype), spread(1000, dtype=dtype, seed=1)
        query = spread(1, 150, 4, 250, dtype=dtype).transpose(1, 2)
        wave = spread(1, 150, 250, dtype=dtype, seed=2)
        assert x.numel() > layer_kernels._FOR_THREADS
        found = []
        for number in (1, 2, 3):
            threads(number)
            found.append(
                (norm(x, weight, eps=1e-6), gated(x, x, 0), *rotary(query, query, wave, wave), *best(x), gated(x, x, 1))
            )
        for others in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))
        assert torch.equal(norm(x[5:6], weight, eps=1e-6), found[0][0][5:6])
        assert torch.equal(gated(x[5:6, 3:500], x[5:6, 3:500], 0), found[0][1][5:6, 3:500])

    def test_layouts(self, dtype: torch.dtype) -> None:
        """Parts of wider tensors give what copies of them give."""
        x, wave = (spread(1, 4, 5, 48, dtype=dtype, seed=seed)[..., :24] for seed in (0, 1))
        y, waves = x.contiguous(), wave[:, 0].contiguous()
        assert torch.equal(gated(x, wave, 0), gated(y, wave.contiguous(), 0))
        for got, want in zip(rotary(x, x, wave[:, 0], wave[:, 0]), rotary(y, y, waves, waves), strict=True):
            assert torch.equal(got, want)

    def test_nothing_is_nothing(self, dtype: torch.dtype) -> None:
        empty = torch.empty(0, 16, dtype=dtype)
        assert norm(empty, torch.ones(16, dtype=dtype), eps=1e-6).shape == gated(empty, empty, 0).shape == (0, 16)


@pytest.mark.parametrize("dtype", DTYPES)
class TestLinear:
    @pytest.mark.parametrize("inputs", [1, 5, 8, 16, 63, 64, 255, 256, 257, 600])
    @pytest.mark.parametrize("outputs", [1, 7, 8, 31, 32, 33, 64, 100])
    def test_sizes(self, dtype: torch.dtype, inputs: int, outputs: int) -> None:
        weight, bias = spread(outputs, inputs, dtype=dtype, seed=1), spread(outputs, dtype=dtype, seed=2)
        for rows in (1, 2, 3, 4, 7, 8, 9, 11, 30):
            x = spread(rows, inputs, dtype=dtype)
            truth = x.double() @ weight.double().T
            for given, want in ((None, truth), (bias, truth + bias.double())):
                got = linear(x, weight, given)
                assert got.dtype == dtype
                slack = 1e-6 * inputs * (1 + float(truth.abs().max()))
                torch.testing.assert_close(got.double(), want, rtol=0.51 * torch.finfo(dtype).eps, atol=slack)

    def test_rounding_is_to_the_nearest_and_to_even(self, dtype: torch.dtype) -> None:
        """One product and one sum, which float32 holds as they are, and half of which lie between two numbers."""
        bias = torch.arange(256, 512).to(dtype)
        weight = torch.tensor([0.5, 1.0, 0.125, -0.5], dtype=dtype).repeat(64)[:, None] * (bias[:1] / 256)
        x = torch.tensor([[1.0], [2.0], [4.0]], dtype=dtype)
        want = (x.double() @ weight.double().T + bias.double()).to(dtype)
        assert torch.equal(linear(x, weight, bias), want)

    def test_shapes_and_layouts(self, dtype: torch.dtype) -> None:
        weight = spread(40, 24, dtype=dtype)
        x = spread(2, 3, 48, dtype=dtype)[..., ::2]
        want = nn.functional.linear(x.float(), weight.float()).to(dtype)
        torch.testing.assert_close(linear(x, weight), want, rtol=1e-2, atol=1e-2)
        assert linear(x[:0], weight).shape == (0, 3, 40)

    def test_what_a_row_gives_depends_on_it_alone(self, dtype: torch.dtype, threads: Callable[[int], None]) -> None:
        x, weight = spread(50, 520, dtype=dtype), spread(300, 520, dtype=dtype, seed=1)
        for rows in (8, 50):
            found = []
            for number in (1, 2, 3):
                threads(number)
                found.append(linear(x[:rows], weight))
            assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
        assert torch.equal(linear(x[20:33], weight), found[0][20:33])
        assert torch.equal(linear(x[3:4], weight), linear(x[:8], weight)[3:4])

    def test_what_is_not_a_number_stays_in_its_row(self, dtype: torch.dtype) -> None:
        x, weight = spread(12, 64, dtype=dtype), spread(50, 64, dtype=dtype, seed=1)
        want = linear(x, weight)
        x[5, 10] = math.nan
        x[7, 3] = math.inf
        got = linear(x, weight)
        assert got[5].isnan().all() and not got[7].isfinite().any()
        rest = [row for row in range(12) if row not in (5, 7)]
        assert torch.equal(got[rest], want[rest])

    @pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gpt_neox"])
    def test_models(self, dtype: torch.dtype, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Logits are no further from those in float64 than without, or hardly at all."""
        truth = bind(tiny(family).double()).run_alone()
        model = tiny(family).to(dtype)
        bound = bind(model)
        plain = bound.run_alone().double()
        monkeypatch.setattr(module, "_is_ours", lambda dtype, **_: True)
        found = optimized(bound)
        assert found.fused is not None and found.fused.linear[0] == found.fused.linear[1] >= 8
        allowed = max(1.2 * float((plain - truth).norm()), 1e-6 * float(truth.norm()))
        assert (found.run_alone().double() - truth).norm() <= allowed

    def test_only_where_torch_is_ours(self, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        for is_ours, count in ((True, 15), (False, 0)):
            monkeypatch.setattr(module, "_is_ours", lambda dtype, is_ours=is_ours, **_: is_ours)
            assert fused_of(tiny().to(dtype)).linear == (count, count)

    def test_weights_that_change_are_used(self, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_is_ours", lambda dtype, **_: True)
        model = tiny().to(dtype)
        bound = optimized(bind(model))
        before = bound.run_alone()
        head = model.get_output_embeddings()
        head.weight.data = (head.weight.data * 2).t().contiguous().t()  # another place, and another layout
        torch.testing.assert_close(bound.run_alone(), before * 2, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("kernels_multiply", [True, False])
def test_whose_linear_layers_are(kernels_multiply: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch has those in what the processor multiplies itself, but for what the kernels do so too."""
    found: set[str] = set()
    monkeypatch.setattr(module, "cpu_flags", lambda: found)
    monkeypatch.setattr(module, "multiplies_bfloat16", lambda: kernels_multiply)
    ours = {
        (dtype, packs)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
        for packs in (True, False)
        if module._is_ours(dtype, packs=packs)
    }
    assert ours == {(each, packs) for each in DTYPES for packs in (True, False)}
    found |= {"avx512_bf16", "avx512_fp16"}
    for packs in (True, False):
        assert module._is_ours(torch.float32, packs=packs)
        assert module._is_ours(torch.bfloat16, packs=packs) == (packs and kernels_multiply)
        assert not module._is_ours(torch.float16, packs=packs)


def fused_of(model: nn.Module) -> Fused:
    bound = bind(model)
    return fuse(bound.model, bound.layers)[0]


class TestWhatIsReplaced:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        ("family", "layers", "norms", "gates", "turns", "linear"),
        [
            ("llama", (2, 2), (5, 5), (2, 2), (2, 2), 15),
            ("gemma2", (2, 2), (9, 9), (2, 2), (2, 2), 15),  # weights are less one, and the activation is GELU
            ("qwen2", (2, 2), (5, 5), (2, 2), (2, 2), 15),  # projections have biases
            ("qwen3", (2, 2), (9, 9), (2, 2), (2, 2), 15),  # heads are normed too
            ("olmo2", (2, 2), (9, 9), (2, 2), (2, 2), 15),  # norms come after, and are of all heads together
            ("phi3", (0, 2), (5, 5), (0, 0), (2, 2), 9),  # one projection for gate and up
            ("gpt_neox", (0, 2), (0, 0), (0, 0), (2, 2), 9),  # parts of a head are turned
            ("glm", (0, 2), (5, 5), (0, 0), (0, 2), 13),  # neighbours are turned, not halves
            ("cohere", (0, 2), (0, 0), (2, 2), (0, 2), 15),
            ("gpt2", (0, 2), (0, 0), (0, 0), (0, 0), 1),
        ],
    )
    def test_by_family(
        self,
        family: str,
        layers: Any,
        norms: Any,
        gates: Any,
        turns: Any,
        linear: int,
        dtype: torch.dtype,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(module, "_is_ours", lambda dtype, **_: True)
        want = Fused(layers, norms, gates, turns, (linear, linear), (0, 0))
        assert fused_of(tiny(family).to(dtype)) == want

    def test_a_module_that_computes_something_else_stays(self) -> None:
        class ClippedRMSNorm(LlamaRMSNorm):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x).clamp(-2, 2)

        class WideRMSNorm(LlamaRMSNorm):
            """Its eps is another one."""

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                normed: torch.Tensor = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 2 * self.variance_epsilon)
                return self.weight * normed

        for kind in (ClippedRMSNorm, WideRMSNorm):
            model = tiny()
            model.model.norm = kind(32, eps=1e-6)
            assert fused_of(model).norms == (4, 5)
        model.model.norm = Gemma2RMSNorm(32)
        assert fused_of(model).norms == (5, 5)

    @pytest.mark.parametrize("function", [nn.ReLU(), nn.GELU(), nn.Sigmoid()])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_other_activations_stay(self, function: nn.Module, dtype: torch.dtype) -> None:
        """In bfloat16 one could not tell GELU by erf from GELU by tanh."""
        model = tiny().to(dtype)
        model.model.layers[0].mlp.act_fn = function
        assert fused_of(model).gated == (1, 2)

    def test_what_somebody_has_replaced_or_listens_to_stays(self) -> None:
        model = tiny()
        mlp, attention = model.model.layers[0].mlp, model.model.layers[1].self_attn
        mlp.act_fn = nn.SiLU()
        seen: list[int] = []
        mlp.act_fn.register_forward_hook(lambda *given: seen.append(1))
        own = model.model.norm.forward
        model.model.norm.forward = lambda x: own(x) * 2
        found = fused_of(model)
        assert (found.norms, found.gated, found.rotary) == ((4, 4), (1, 1), (2, 2))
        assert seen and type(attention).forward is not None

    def test_the_callers_model_is_left_alone(self) -> None:
        model = tiny()
        before = {name: id(parameter) for name, parameter in model.named_parameters()}
        turn = modeling_llama.apply_rotary_pos_emb
        runner = TransformersRunner(model, num_kv_blocks=4)
        assert runner._bound.fused == ((2, 2), (5, 5), (2, 2), (2, 2), (15, 15), (0, 0))
        assert not any("forward" in vars(part) for part in model.modules())
        assert modeling_llama.apply_rotary_pos_emb is turn
        assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
        copy.deepcopy(model)

    def test_hooks_of_what_is_replaced_still_run(self) -> None:
        model = tiny()
        seen = []
        for part in (model.model.norm, model.model.layers[0].mlp, model.model.layers[0].mlp.gate_proj):
            part.register_forward_hook(lambda part, *given: seen.append(type(part).__name__))
        with Engine.from_model(model, num_kv_blocks=8) as engine:
            del seen[:]
            engine.generate([[5, 6, 7]], SamplingParams(max_tokens=1))
        assert seen == ["Linear", "LlamaMLP", "LlamaRMSNorm"]

    def test_the_callers_random_numbers_are_left_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        bound = bind(tiny())
        torch.manual_seed(5)
        want = torch.rand(3)
        torch.manual_seed(5)
        seeds: list[int] = []
        monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
        optimized(bound)
        assert torch.equal(torch.rand(3), want) and not seeds


class TestWhatWasNotTried:
    """Modules that compute what the kernels do when they are bound, and something else at another time or place."""

    def differs(self, model: nn.Module, change: Callable[[], object] = lambda: None) -> float:
        """How far fused logits are from plain ones after a change, as a part of these."""
        bound = optimized(bind(model))
        assert bound.fused is not None
        change()
        want = bind(model).run_alone()
        return float((bound.run_alone() - want).norm() / want.norm())

    def test_modules_of_one_class_with_other_attributes(self) -> None:
        class Scaled(LlamaMLP):
            scale = 1.0

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x) * self.scale

        model = tiny()
        for layer in model.model.layers:
            layer.mlp.__class__ = Scaled
        model.model.layers[1].mlp.scale = 1.01
        assert fused_of(model).gated == (1, 2)
        assert self.differs(model) < 1e-5

    def test_weights_of_its_own_that_change_nothing_yet(self) -> None:
        class Swish(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.beta = nn.Parameter(torch.ones(()))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * torch.sigmoid(self.beta * x)

        class ShiftedRMSNorm(LlamaRMSNorm):
            def __init__(self, width: int) -> None:
                super().__init__(width)
                self.bias = nn.Parameter(torch.zeros(width))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x) + self.bias

        model = tiny()
        act, normed = Swish(), ShiftedRMSNorm(32)
        model.model.layers[0].mlp.act_fn, model.model.norm = act, normed
        found = fused_of(model)
        assert found.gated == (1, 2) and found.norms == (4, 5)

        def change() -> None:
            act.beta.data.fill_(3)
            normed.bias.data.fill_(2)

        assert self.differs(model, change) < 1e-5

    @pytest.mark.parametrize("limit", [7.0, 10.0, 100.0])
    def test_activations_that_are_cut_off(self, limit: float) -> None:
        class Limited(LlamaMLP):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                gate = self.gate_proj(x).clamp(max=limit)
                return self.down_proj(self.act_fn(gate) * self.up_proj(x).clamp(-limit, limit))

        model = tiny()
        model.model.layers[0].mlp.__class__ = Limited
        assert fused_of(model).gated == (1, 2)

    def test_more_arguments(self) -> None:
        class Scaled(LlamaMLP):
            def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
                return super().forward(x) * scale

        model = tiny()
        for layer in model.model.layers:
            layer.mlp.__class__ = Scaled
            layer.mlp.register_forward_pre_hook(lambda part, given: (*given, 2.0))
        assert self.differs(model) < 1e-5

    def test_a_forward_that_somebody_has_wrapped(self) -> None:
        attention = modeling_llama.LlamaAttention

        class Louder(attention):
            @functools.wraps(attention.forward)
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                out, *rest = attention.forward(self, *args, **kwargs)
                return out * 1.01, *rest

        model = tiny()
        for layer in model.model.layers:
            layer.self_attn.__class__ = Louder
        assert self.differs(model) < 1e-5

    def test_weights_in_another_layout_or_dtype(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def change() -> None:
            model.model.norm.weight.data = torch.linspace(-1, 1, 64)[::2]

        model = tiny()
        assert self.differs(model, change) < 1e-5
        monkeypatch.setattr(module, "_is_ours", lambda dtype, **_: dtype != torch.float32)
        for before, after in ((torch.float32, torch.float64), (torch.bfloat16, torch.float32)):
            model = tiny().to(before)
            assert self.differs(model, functools.partial(model.to, after)) < 1e-5
        model = tiny("qwen2").bfloat16()

        def shift() -> None:
            model.model.layers[0].self_attn.q_proj.bias.data = torch.linspace(-9, 9, 64).bfloat16()[::2]

        assert self.differs(model, shift) < 2e-2

    def test_quantized_weights(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Those that are tensors of another class say that they are in bfloat16, and point to nothing."""
        monkeypatch.setattr(module, "_is_ours", lambda dtype, **_: True)
        model = tiny().bfloat16()
        part = model.model.layers[0].mlp.up_proj
        part.weight = nn.Parameter(Scaled8(part.weight.data), requires_grad=False)
        assert part.weight.dtype == torch.bfloat16
        assert fused_of(model).linear == (14, 14)
        assert self.differs(model) < 2e-2
        model.model.layers[1].mlp.gate_proj = Packed(model.model.layers[1].mlp.gate_proj)
        runner = TransformersRunner(model, num_kv_blocks=4)
        assert runner._bound.fused is not None and runner._bound.fused.gated == (2, 2)

    def test_hooks_are_not_copied(self) -> None:
        class Watcher:
            def __deepcopy__(self, memo: Any) -> Any:
                raise AssertionError("it may hold a model")

            def see(self, *given: Any) -> None: ...

        model = tiny()
        for part in model.modules():
            part.register_forward_hook(Watcher().see)
        assert fused_of(model).norms == (5, 5)

    def test_masked_logits_hide_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for mask in (-math.inf, torch.finfo(torch.float32).min):
            model = tiny()
            model.lm_head.register_forward_hook(lambda part, given, out, mask=mask: out.index_fill(-1, MASKED, mask))
            assert optimized(bind(model)).fused is not None
            with monkeypatch.context() as patch:
                patch.setattr(module, "norm", lambda x, weight, *, eps, offset=0.0: x * 1.5)
                assert optimized(bind(model)).fused is None

    def test_under_what_the_caller_has_set_up(self) -> None:
        model = tiny().bfloat16()
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
            found = fused_of(model)
        assert found[1:4] == ((5, 5), (2, 2), (2, 2))

    def test_inputs_that_do_not_fit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """They get what they would get without."""
        monkeypatch.setattr(module, "_is_ours", lambda dtype, **_: True)
        bound = optimized(bind(tiny().bfloat16()))
        normed, layer = bound.model.model.norm, bound.model.lm_head
        x = spread(3, 32, dtype=torch.float32)
        assert torch.equal(normed(x), LlamaRMSNorm.forward(normed, x))
        for given in (x, x.bfloat16()[:, :16]):
            with pytest.raises(RuntimeError):
                layer(given)
        with pytest.raises(TypeError):
            normed(x.bfloat16(), None)
        with pytest.raises(RuntimeError):
            normed(spread(3, 64, dtype=torch.bfloat16))

    def test_rotary_inputs_that_do_not_fit(self) -> None:
        own = modeling_llama.apply_rotary_pos_emb
        ours = module._turning(own)
        query, key = spread(1, 3, 5, 8, dtype=torch.bfloat16), spread(1, 1, 5, 8, dtype=torch.bfloat16, seed=1)
        waves = [spread(1, 5, 8, dtype=torch.bfloat16, seed=seed) for seed in (2, 3)]
        two = torch.cat((query, key.expand(1, 3, 5, 8)))
        square = spread(1, 5, 5, 8, dtype=torch.bfloat16)
        by_width = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (query, key)]
        for given in (
            (query, key, *(wave.float() for wave in waves)),
            (square, square, *waves, 2),
            (two, two, *waves),
            (*by_width, *waves),
            (query[:, :, :1], key[:, :, :1], *waves),
        ):
            for got, want in zip(ours(*given), own(*given), strict=True):
                assert got.dtype == want.dtype and got.shape == want.shape
                torch.testing.assert_close(got.float(), want.float(), rtol=2e-2, atol=2e-2)
        got = ours(square, square, *waves, unsqueeze_dim=2)[0]
        assert torch.equal(got, own(square, square, *waves, unsqueeze_dim=2)[0])


MASKED = torch.tensor([0])


class Packed(nn.Module):
    """A linear layer as torch's own quantization has them: the weight is a method, and its state is no tensor."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._packed = (linear.weight.data,)

    def weight(self) -> torch.Tensor:
        return self._packed[0]

    def get_extra_state(self) -> Any:
        return self._packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight())


class Scaled8(torch.Tensor):
    """A weight in 8 bits that passes for one in 16."""

    @staticmethod
    def __new__(cls, weight: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype, device="cpu")

    def __init__(self, weight: torch.Tensor) -> None:
        self.scale = weight.abs().max() / 127
        self.numbers = (weight / self.scale).round().to(torch.int8)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return args[0]
        plain = [part.numbers * part.scale if isinstance(part, cls) else part for part in args]
        return function(*plain, **(kwargs or {}))


class TestRunner:
    def outputs(self, model: nn.Module, **options: Any) -> list[tuple[int, ...]]:
        prompts = [[5, 9, 11], [40] * 50, [1], list(range(3, 40))]
        with Engine.from_model(model, num_kv_blocks=64, attention="reference", **options) as engine:
            params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
            return [output.token_ids for output in engine.generate(prompts, params)]

    @pytest.mark.parametrize(
        "family", ["llama", "gemma2", "gemma3_text", "qwen3", "phi3", "olmo2", "glm", "mixtral", "gpt_neox"]
    )
    def test_outputs_are_those_without(self, family: str) -> None:
        model = tiny(family)
        assert self.outputs(model) == self.outputs(model, optimize=False)

    def test_nothing_is_held_after_the_end(self) -> None:
        model = tiny()
        held = {name: weakref.ref(parameter) for name, parameter in model.named_parameters()}
        engine = Engine.from_model(model, num_kv_blocks=8)
        gc.collect()
        gc.disable()
        try:
            engine.close()
            del engine, model
            assert not [name for name, ref in held.items() if ref() is not None]
        finally:
            gc.enable()

    def test_off(self) -> None:
        assert TransformersRunner(tiny(), num_kv_blocks=4, optimize=False)._bound.fused is None
        with pytest.raises(TypeError, match="optimize must be True or False, got 1"):
            TransformersRunner(tiny(), optimize=1)

    def test_weights_that_change_are_used(self) -> None:
        model = tiny()
        with Engine.from_model(model, num_kv_blocks=64) as engine:
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            before = engine.generate([[5, 9, 11]], params)[0].token_ids
            with torch.no_grad():
                for part in model.modules():
                    if isinstance(part, LlamaRMSNorm):
                        part.weight.mul_(torch.linspace(-1, 1, len(part.weight)))
            model.model.norm.weight.data = model.model.norm.weight.data * -3
            engine.weights_changed()
            after = engine.generate([[5, 9, 11]], params)[0].token_ids
        assert before != after
        with Engine.from_model(model, num_kv_blocks=64, optimize=False) as engine:
            assert engine.generate([[5, 9, 11]], params)[0].token_ids == after

    def test_a_model_that_comes_out_otherwise_is_left_as_it_was(self, monkeypatch, caplog) -> None:
        monkeypatch.setattr(module, "norm", lambda x, weight, *, eps, offset=0.0: x * 1.5)
        with caplog.at_level(logging.WARNING, logger="batchkit"):
            runner = TransformersRunner(tiny(), num_kv_blocks=4)
        assert runner._bound.fused is None
        assert not any("forward" in vars(part) for part in runner._bound.model.modules())
        assert "LlamaForCausalLM: layers are left as they are" in caplog.text

    def test_without_kernels_nothing_is_fused(self, monkeypatch) -> None:
        def none(name: str) -> Any:
            raise BuildError("there is no C++ compiler 'c++'")

        monkeypatch.setattr(module, "kernels", none)
        assert TransformersRunner(tiny(), num_kv_blocks=4)._bound.fused is None
