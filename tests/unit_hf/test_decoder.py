"""Decoder layers computed by two calls of kernels: which are, and that they give what the layers give."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

import batchkit.hf.fused as fused
from batchkit import Engine, SamplingParams
from batchkit.hf.attention import ATTENTION_NAME, AttentionContext, bind
from batchkit.hf.backends.native import BuildError, kernels
from batchkit.hf.decoder import DecoderLayer, Workspace
from batchkit.hf.fused import _replace_layer, _Trials, fuse, optimized
from batchkit.hf.layer_kernels import Packed
from batchkit.hf.packing import pack
from tiny_models import COMMON, tiny


def _why_not() -> str | None:
    try:
        kernels("decoder")
    except BuildError as error:
        return str(error)
    return None


pytestmark = pytest.mark.skipif(_why_not() is not None, reason=f"no kernels here: {_why_not()}")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Alone(AttentionContext):
    """A context in which a token attends to itself, and heads share values; it keeps what it was given."""

    def __init__(self) -> None:
        self.given: list[torch.Tensor] = []
        self.scaling: Any = None

    def attend(self, module: nn.Module, query: Any, key: Any, value: Any, *, scaling: Any, **more: Any) -> torch.Tensor:
        self.given += [query.clone(), key.clone(), value.clone()]
        self.scaling = scaling
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2).contiguous()


@pytest.fixture(autouse=True)
def _is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_is_ours", lambda dtype, **_: True)


def layer_of(family: str, dtype: torch.dtype, **changes: Any) -> Any:
    """One layer with random weights, norms and biases among them, that calls batchkit's attention."""
    kinds = {
        "llama": modeling_llama.LlamaDecoderLayer,
        "gemma2": modeling_gemma2.Gemma2DecoderLayer,
        "qwen3": modeling_qwen3.Qwen3DecoderLayer,
    }
    config = AutoConfig.for_model(family, **{**COMMON, "hidden_size": 96, "intermediate_size": 200, **changes})
    config._attn_implementation = ATTENTION_NAME
    torch.manual_seed(0)
    layer = kinds[family](config, 0).eval()
    for weight in layer.parameters():
        weight.data = torch.randn(weight.shape) * (1.0 if weight.dim() == 1 else weight.shape[1] ** -0.5)
    return layer.to(dtype)


def replaced(layer: Any) -> bool:
    with torch.inference_mode():
        _replace_layer(_Trials(), layer, layer.self_attn, layer.self_attn.q_proj.weight.dtype, Workspace())
    return isinstance(vars(layer).get("forward"), DecoderLayer)


def inputs(layer: Any, tokens: int, dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    width = layer.self_attn.head_dim
    waves = tuple(torch.randn(1, tokens, width, generator=generator).to(dtype) for _ in "cs")
    hidden = torch.randn(1, tokens, layer.self_attn.q_proj.in_features, generator=generator).to(dtype)
    return {"hidden_states": hidden, "position_embeddings": waves}


def outputs(forward: Callable[..., Any], given: dict[str, Any], **more: Any) -> list[torch.Tensor]:
    context = Alone()
    with torch.inference_mode():
        out = forward(**given, batchkit=context, attention_mask=None, **more)
    return [out, *context.given]


def plainly(layer: Any) -> Callable[..., Any]:
    return functools.partial(type(layer).forward, layer)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"head_dim": 36, "hidden_size": 52, "intermediate_size": 33}),
        ("llama", {"num_key_value_heads": 4, "head_dim": 2, "hidden_size": 12}),
        ("gemma2", {"head_dim": 32}),
        ("qwen3", {"head_dim": 64}),
    ],
)
class TestNumbers:
    @pytest.mark.parametrize("packs", [True, False])
    @pytest.mark.parametrize("tokens", [1, 2, 7, 9, 49, 250])
    def test_are_those_of_the_layer(
        self, family: str, changes: Any, dtype: torch.dtype, tokens: int, packs: bool
    ) -> None:
        """They are no further from those in float64 than the layer's own, or hardly at all."""
        layer = layer_of(family, dtype, **changes)
        exact = layer_of(family, dtype, **changes).double()
        given = inputs(layer, tokens, dtype)
        own = outputs(plainly(layer), given)
        doubles = {
            "hidden_states": given["hidden_states"].double(),
            "position_embeddings": tuple(wave.double() for wave in given["position_embeddings"]),
        }
        truth = outputs(plainly(exact), doubles)
        assert replaced(layer)
        if packs:
            pack(layer, {part: Packed for part in layer.modules() if isinstance(part, nn.Linear)}, moves=True)
        for got, its, want in zip(outputs(layer, given), own, truth, strict=True):
            assert got.shape == its.shape == want.shape and got.dtype == dtype
            allowed = max((1.1 if tokens > 2 else 1.6) * float((its.double() - want).norm()), 1e-6 * float(want.norm()))
            assert float((got.double() - want).norm()) <= allowed

    def test_do_not_depend_on_neighbours_or_threads(self, family: str, changes: Any, dtype: torch.dtype) -> None:
        layer = layer_of(family, dtype, **changes)
        assert replaced(layer)
        pack(layer, {part: Packed for part in layer.modules() if isinstance(part, nn.Linear)}, moves=False)
        given = inputs(layer, 300, dtype)
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(1)
            want = outputs(layer, given)
            for threads, begin, end in ((2, 0, 300), (4, 0, 300), (1, 7, 8), (2, 299, 300), (3, 100, 260)):
                torch.set_num_threads(threads)
                waves = tuple(wave[:, begin:end] for wave in given["position_embeddings"])
                part = {"hidden_states": given["hidden_states"][:, begin:end], "position_embeddings": waves}
                got = outputs(layer, part)
                assert torch.equal(got[0], want[0][:, begin:end])
                assert all(torch.equal(a, b[:, :, begin:end]) for a, b in zip(got[1:], want[1:], strict=True))
        finally:
            torch.set_num_threads(before)


class TestWhichAreReplaced:
    def test_scaling_is_the_layers(self) -> None:
        layer = layer_of("llama", torch.float32)
        layer.self_attn.scaling = 0.123
        assert replaced(layer)
        context = Alone()
        layer(**inputs(layer, 3, torch.float32), batchkit=context)
        assert context.scaling == 0.123

    def test_none_that_compute_something_else(self) -> None:
        own = modeling_llama.LlamaDecoderLayer

        class Damped(own):
            def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
                return hidden_states + 0.9 * (super().forward(hidden_states, **kwargs) - hidden_states)

        class Tupled(own):
            def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
                return (super().forward(hidden_states, **kwargs),)

        class ByPosition(own):
            def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
                far = (kwargs["position_ids"] > 2)[..., None]
                return super().forward(hidden_states, **kwargs) * torch.where(far, 0.99, 1.0)

        class Keyed(own):
            """Its keys are others."""

            def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
                cos, sin = kwargs.pop("position_embeddings")
                return super().forward(hidden_states, position_embeddings=(cos, -sin), **kwargs)

        for kind in (Damped, Tupled, ByPosition, Keyed):
            layer = layer_of("llama", torch.float32)
            layer.__class__ = kind
            assert not replaced(layer)
        assert replaced(layer_of("llama", torch.float32))

    @pytest.mark.parametrize("name", ["position_ids", "cache_position"])
    def test_none_that_look_at_positions(self, name: str) -> None:
        """Wherever it makes a difference: Ministral 3 scales queries from some thousands on."""
        layer = layer_of("llama", torch.float32)

        class Scaled(type(layer.self_attn)):  # type: ignore[misc]
            def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
                factor = 1 + torch.log1p((kwargs[name] // 10**9).float())
                return super().forward(hidden_states * factor[..., None], **kwargs)

        layer.self_attn.__class__ = Scaled
        assert not replaced(layer)

    @pytest.mark.parametrize(("limit", "is_seen"), [(2.0, True), (30.0, True), (500.0, True), (1e9, False)])
    @pytest.mark.parametrize("side", ["q_proj", "k_proj", "v_proj"])
    def test_none_that_cut_numbers_off(self, side: str, limit: float, is_seen: bool) -> None:
        """Also beyond what usual weights give, since a model's may be larger."""
        layer = layer_of("llama", torch.float32)

        class Cut(type(layer.self_attn)):  # type: ignore[misc]
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                probe = copy.copy(self)
                part = self._modules[side]
                probe._modules = {**self._modules, side: nn.Sequential(part, nn.Hardtanh(-limit, limit))}
                return super(Cut, probe).forward(*args, **kwargs)

        layer.self_attn.__class__ = Cut
        assert replaced(layer) != is_seen

    def test_none_with_weights_that_a_kernel_does_not_know(self) -> None:
        def shift(layer: Any) -> None:
            layer.shift = nn.Parameter(torch.zeros(96))

        def table(layer: Any) -> None:
            layer.self_attn.register_buffer("table", torch.zeros(3))

        def adapter(layer: Any) -> None:
            layer.mlp.adapter = nn.Linear(96, 96)

        def other(layer: Any) -> None:
            class Lora(nn.Linear):
                pass

            layer.self_attn.q_proj.__class__ = Lora

        def half(layer: Any) -> None:
            layer.mlp.up_proj.bfloat16()

        for change in (shift, table, adapter, other, half):
            layer = layer_of("llama", torch.float32)
            change(layer)
            assert not replaced(layer), change.__name__

    def test_none_to_whose_parts_somebody_listens(self) -> None:
        for name in ("self_attn.q_proj", "mlp", "input_layernorm", "mlp.act_fn"):
            for kind in ("register_forward_hook", "register_forward_pre_hook"):
                layer = layer_of("llama", torch.float32)
                getattr(layer.get_submodule(name), kind)(lambda *given: None)
                assert not replaced(layer)
            layer = layer_of("llama", torch.float32)
            part = layer.get_submodule(name)
            part.forward = part.forward
            assert not replaced(layer)
        layer = layer_of("llama", torch.float32)
        seen: list[int] = []
        layer.register_forward_hook(lambda *given: seen.append(1))
        assert replaced(layer)
        outputs(layer, inputs(layer, 3, torch.float32))
        assert seen == [1]

    def test_each_by_itself(self) -> None:
        """A layer may go by its index."""

        class Odd(modeling_llama.LlamaDecoderLayer):
            def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
                out = super().forward(hidden_states, **kwargs)
                return out * 1.01 if self.self_attn.layer_idx == 2 else out

        model = tiny(num_hidden_layers=4).bfloat16()
        for layer in model.model.layers:
            layer.__class__ = Odd
        bound = bind(model)
        found, which = fuse(bound.model, bound.layers)
        assert found.layers == (3, 4) and bound.model.model.layers[2] not in which

    def test_others_stay_beside_them(self) -> None:
        model = tiny()
        model.model.layers[1].register_parameter("gain", nn.Parameter(torch.ones(1)))
        bound = bind(model)
        found, _ = fuse(bound.model, bound.layers)
        assert found.layers == (1, 2) and found.rotary == (2, 2) and found.norms == (5, 5)


class TestWhatDoesNotFit:
    """It is computed by the layer itself."""

    def test_arguments(self) -> None:
        layer = layer_of("llama", torch.float32)
        given = inputs(layer, 4, torch.float32)
        want = outputs(plainly(layer), given)
        assert replaced(layer)
        calls: list[str] = []
        own = vars(layer)["forward"]._plain
        vars(layer)["forward"]._plain = lambda *args, **kwargs: calls.append("own") or own(*args, **kwargs)

        def check(got: list[torch.Tensor], count: int) -> None:
            assert len(calls) == count
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)

        check(outputs(layer, given), 0)
        check(outputs(layer, given, use_cache=False, position_ids=torch.arange(4)[None], cache=None), 0)
        check(outputs(layer, given, something=torch.ones(1)), 1)
        listed = {**given, "position_embeddings": list(given["position_embeddings"])}
        check(outputs(layer, listed), 2)
        context = Alone()
        with torch.inference_mode():
            layer(given["hidden_states"], None, batchkit=context, position_embeddings=given["position_embeddings"])
        assert len(calls) == 3
        with pytest.raises(RuntimeError, match="no context came"), torch.inference_mode():
            layer(**given)

    def test_tensors(self) -> None:
        layer = layer_of("llama", torch.float32)
        plain = plainly(layer_of("llama", torch.float32))
        assert replaced(layer)
        given = inputs(layer, 4, torch.float32)
        cos, sin = given["position_embeddings"]
        for change in (
            {"hidden_states": given["hidden_states"].expand(2, -1, -1).contiguous()},
            {"position_embeddings": (cos[:, :1], sin[:, :1])},
            {"position_embeddings": (cos.double(), sin.double())},
            {"hidden_states": given["hidden_states"][:, :0], "position_embeddings": (cos[:, :0], sin[:, :0])},
        ):
            errors: list[type[Exception] | None] = []
            results = []
            for forward in (layer, plain):
                try:
                    results.append(outputs(forward, {**given, **change}))
                    errors.append(None)
                except RuntimeError as error:
                    errors.append(type(error))
            assert errors[0] == errors[1]
            for a, b in zip(*results, strict=True) if results else ():
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        strided = {**given, "hidden_states": torch.stack([given["hidden_states"]] * 2, -1)[..., 0]}
        strided["position_embeddings"] = tuple(torch.stack([wave, wave], 1)[:, 0] for wave in (cos, sin))
        for a, b in zip(outputs(layer, strided), outputs(plain, given), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)

    def test_positions_that_are_written_over(self) -> None:
        """A model may keep the tensors that it fills in every step."""
        layer = layer_of("llama", torch.float32)
        assert replaced(layer)
        given = inputs(layer, 4, torch.float32)
        for _ in range(2):
            for got, want in zip(outputs(layer, given), outputs(plainly(layer), given), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
            for wave in given["position_embeddings"]:
                wave.mul_(-1.5)

    @pytest.mark.parametrize("packs", [True, False])
    def test_weights_that_have_changed(self, packs: bool) -> None:
        layer = layer_of("llama", torch.float32, attention_bias=True)
        assert replaced(layer)
        if packs:
            pack(layer, {part: Packed for part in layer.modules() if isinstance(part, nn.Linear)}, moves=False)
        given = inputs(layer, 5, torch.float32)
        norm, bias = layer.post_attention_layernorm, layer.self_attn.k_proj
        changes: list[Callable[[], Any]] = [
            lambda: norm.weight.data.mul_(-2),
            lambda: setattr(norm.weight, "data", torch.linspace(-1, 1, 192)[::2]),  # another layout
            lambda: setattr(norm, "weight", nn.Parameter(torch.linspace(2, 3, 96))),
            lambda: setattr(bias.bias, "data", torch.linspace(2, 3, 16)),
        ]
        if not packs:
            changes += [
                lambda: setattr(layer.mlp.up_proj.weight, "data", torch.randn(96, 200).t() / 10),
                lambda: setattr(layer.mlp.up_proj, "weight", nn.Parameter(torch.randn(200, 96) / 10)),
                lambda: layer.mlp.down_proj.weight.data.mul_(3),
            ]
        before = outputs(layer, given)
        for change in changes:
            change()
            after = outputs(layer, given)
            assert not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            for a, b in zip(after, outputs(plainly(layer), given), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
            before = after

    def test_a_model_of_another_dtype(self) -> None:
        model = tiny()
        bound = optimized(bind(model))
        assert bound.fused is not None and bound.fused.layers == (2, 2)
        for dtype in (torch.float64, torch.bfloat16, torch.float32):
            model.to(dtype)
            want = bind(model).run_alone()
            assert bound.run_alone().dtype == dtype
            assert (bound.run_alone() - want).norm() <= 4 * torch.finfo(dtype).eps * want.norm() + 1e-6


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "qwen2", "qwen3", "olmo2", "mistral", "smollm3"])
@pytest.mark.parametrize("packs", ["copy", None])
def test_outputs_of_engines(family: str, packs: Any) -> None:
    prompts = [[5, 9, 11], [40] * 50, [1], list(range(3, 40))]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    found = []
    for options in ({"pack_weights": packs}, {"optimize": False, "attention": "reference"}):
        with Engine.from_model(tiny(family, head_dim=8), num_kv_blocks=64, **options) as engine:
            its = engine._runner._bound.fused  # type: ignore[attr-defined]
            assert its is None or its.layers == (2, 2)
            found.append([output.token_ids for output in engine.generate(prompts, params)])
    assert found[0] == found[1]
