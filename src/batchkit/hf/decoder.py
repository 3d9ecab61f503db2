"""Decoder layers computed by two calls of kernels, with attention between them (`backends/kernels/decoder.cpp`).

A layer of transformers is a dozen modules, whose calls cost more than what they compute when a step has few rows. A
layer whose parts are known, and which gives what the kernels give, gets a `DecoderLayer` for its ``forward``.
"""

from __future__ import annotations

import copy
import functools
import types
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from .attention import Recorder
from .backends.native import kernels
from .layer_kernels import DTYPES, Packed, num_threads
from .replaceable import agree, is_plain, traits

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DecoderLayer", "kind_of", "parts_of", "try_layer"]

_LISTENERS = ("_forward_hooks", "_forward_pre_hooks")
_HARMLESS = frozenset({"cache_position", "position_ids", "use_cache"})
"""Keywords of a layer that change nothing where there is no cache and no mask; a trial has shown that positions do not.
"""


class _Matrix(Structure):
    """`Matrix` of the kernels."""

    _fields_ = (
        ("weights", c_void_p),
        ("bias", c_void_p),
        ("outputs", c_int64),
        ("inputs", c_int64),
        ("is_packed", c_int64),
    )


class _Norm(Structure):
    """`Norm` of the kernels."""

    _fields_ = (("weight", c_void_p), ("width", c_int64), ("eps", c_float), ("offset", c_float))


class _Before(Structure):
    """`Before` of the kernels."""

    _fields_ = (
        *((name, _Matrix) for name in ("query", "key", "value")),
        *((name, _Norm) for name in ("norm", "query_norm", "key_norm")),
        ("hidden", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("outs", c_void_p * 3),
        ("rows", c_int64),
        ("head_width", c_int64),
        ("scratch", c_void_p),
        ("num_threads", c_int64),
    )


class _After(Structure):
    """`After` of the kernels."""

    _fields_ = (
        *((name, _Matrix) for name in ("out", "gate", "up", "down")),
        *((name, _Norm) for name in ("attention_norm", "norm", "mlp_norm")),
        ("attended", c_void_p),
        ("hidden", c_void_p),
        ("result", c_void_p),
        ("rows", c_int64),
        ("activation", c_int64),
        ("scratch", c_void_p),
        ("num_threads", c_int64),
    )


@functools.cache
def _functions(dtype: torch.dtype) -> tuple[Any, Any, Any, Any]:
    """The two kernels for a dtype, each after what says how many floats of scratch memory it needs.

    Raises:
        BuildError: this machine cannot have them.
    """
    found = []
    for name, argument in (("before", _Before), ("after", _After)):
        floats = getattr(kernels("decoder"), f"batchkit_{name}_floats_{DTYPES[dtype]}")
        floats.argtypes, floats.restype = (POINTER(argument),), c_int64
        function = getattr(kernels("decoder"), f"batchkit_{name}_{DTYPES[dtype]}")
        function.argtypes, function.restype = (POINTER(argument),), None
        found += [floats, function]
    return found[0], found[1], found[2], found[3]


class Parts(NamedTuple):
    """The modules of a decoder layer by the kernels' names; norms that it does not have are None."""

    attention: Any
    mlp: Any
    linear: dict[str, nn.Linear]
    norms: dict[str, nn.Module | None]


def parts_of(layer: nn.Module, attention: nn.Module) -> Parts | None:
    """The parts of a layer that has nothing else, and to which nobody listens; None for others."""
    children = layer._modules
    mlp = children.get("mlp")
    if children.get("self_attn") is not attention or mlp is None:
        return None
    after_attention = children.get("post_attention_layernorm")
    if "pre_feedforward_layernorm" in children or "input_layernorm" not in children:
        # Norms of what attention and the MLP give (Gemma 2, OLMo 2).
        norms = {
            "attention_norm": after_attention,
            "norm": children.get("pre_feedforward_layernorm"),
            "mlp_norm": children.get("post_feedforward_layernorm"),
        }
    else:
        norms = {"attention_norm": None, "norm": after_attention, "mlp_norm": None}
    norms |= {
        "input_norm": children.get("input_layernorm"),
        "query_norm": attention._modules.get("q_norm"),
        "key_norm": attention._modules.get("k_norm"),
    }
    names = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj"}
    linear: dict[str, Any] = {name: attention._modules.get(own) for name, own in names.items()}
    linear |= {name: mlp._modules.get(f"{name}_proj") for name in ("gate", "up", "down")}
    if any(type(part) is not nn.Linear or not is_plain(part.weight) for part in linear.values()):
        return None
    known = {id(part) for part in (*linear.values(), *norms.values(), attention, mlp, layer)}
    for part in layer.modules():
        has_state = bool(part._parameters or part._buffers)
        if (id(part) not in known or part in (attention, mlp, layer)) and has_state:
            return None
        if "forward" in vars(part) or (part is not layer and any(vars(part)[kind] for kind in _LISTENERS)):
            return None
    return Parts(attention, mlp, linear, norms)


def kind_of(layer: nn.Module) -> Any:
    """What layers that compute the same, but for their weights, have in common."""
    inner = []
    for name, part in layer.named_modules():
        shapes = tuple(weight.shape for weight in part._parameters.values() if weight is not None)
        inner.append((name, traits(part), None if part._modules else repr(part), shapes))
    return tuple(inner)


def try_layer(
    layer: nn.Module,
    parts: Parts,
    dtype: torch.dtype,
    norms: dict[str, tuple[float, float] | None],
    activation: int | None,
) -> Callable[[nn.Module, Parts], DecoderLayer] | None:
    """What gives layers of this kind their ``forward``; None if they do not compute what the kernels do.

    Args:
        layer: one of them.
        parts: its parts.
        dtype: of the model.
        norms: what `norm_of` has found of each.
        activation: what `activation_of` has found.
    """
    tensors = [tensor for part in layer.modules() for tensor in part._parameters.values() if tensor is not None]
    if dtype not in DTYPES or any(tensor.dtype != dtype for tensor in tensors):
        return None
    if activation is None or any(norms[name] is None and norm is not None for name, norm in parts.norms.items()):
        return None
    head_width = getattr(parts.attention, "head_dim", None)
    if not isinstance(head_width, int) or head_width % 2:
        return None
    make = functools.partial(DecoderLayer, norms=norms, activation=activation, head_width=head_width, dtype=dtype)

    tokens = 5
    probes = {each: _probe(layer, parts, each) for each in (torch.float64, torch.float32, dtype)}
    width = next(iter(probes.values()))[1].linear["query"].in_features
    hidden = torch.randn(1, tokens, width)
    waves = [torch.randn(1, tokens, head_width) for _ in ("cos", "sin")]
    positions = torch.randint(1000, (1, tokens))

    def run(forward: Callable[..., Any], dtype: torch.dtype) -> torch.Tensor:
        recorder = Recorder()
        embeddings = tuple(wave.to(dtype) for wave in waves)
        out = forward(
            hidden.to(dtype),
            attention_mask=None,
            position_ids=positions,
            position_embeddings=embeddings,
            use_cache=False,
            batchkit=recorder,
        )
        (call,) = recorder.calls
        assert isinstance(out, torch.Tensor) and not call.unknown and not call.has_sinks and not call.has_mask
        scaling = head_width**-0.5 if call.scaling is None else call.scaling
        return torch.cat([x.flatten() for x in (out, call.query, call.key, call.value, out.new_tensor([scaling]))])

    def own(dtype: torch.dtype) -> torch.Tensor:
        probe, _ = probes[dtype]
        return run(types.MethodType(type(probe).forward, probe), dtype)

    def ours(each: torch.dtype) -> torch.Tensor:
        probe, its = probes[each]
        return run(make(probe, its, dtype=each), each)

    return make if agree(ours, own, dtype) else None


def _probe(layer: nn.Module, parts: Parts, dtype: torch.dtype) -> tuple[nn.Module, Parts]:
    """The layer with random weights, of which hidden states and the MLP have few; heads are as they are."""
    generator = torch.Generator().manual_seed(0)
    hidden, inner = 40, 24
    linear = {}
    for name, part in parts.linear.items():
        inputs = part.in_features if name == "out" else inner if name == "down" else hidden
        outputs = hidden if name in ("out", "down") else inner if name in ("gate", "up") else part.out_features
        linear[name] = made = nn.Linear(inputs, outputs, bias=part.bias is not None)
        for tensor in made.parameters():
            tensor.data = torch.randn(tensor.shape, generator=generator) * inputs**-0.5
    replaced: dict[int, nn.Module] = {id(part): linear[name] for name, part in parts.linear.items()}
    norms: dict[str, nn.Module | None] = {}
    for name, norm in parts.norms.items():
        norms[name] = None
        if norm is not None:
            weight: Any = norm.weight
            size = len(weight) if name in ("query_norm", "key_norm") else hidden
            norms[name] = made_norm = copy.copy(norm)
            made_norm._parameters = {"weight": nn.Parameter(torch.randn(size, generator=generator))}
            replaced[id(norm)] = made_norm

    def shrunk(part: nn.Module) -> nn.Module:
        made = replaced.get(id(part))
        if made is None:
            made = copy.copy(part)  # a deep copy would copy what hooks hold
            made._modules = {name: child and shrunk(child) for name, child in part._modules.items()}
        return made

    probe = shrunk(layer)
    children: Any = probe._modules
    probe.to(dtype)
    return probe, Parts(children["self_attn"], children["mlp"], linear, norms)


class DecoderLayer:
    """The ``forward`` of a layer by the kernels, or its own for whatever they are not for.

    Args:
        layer: the layer.
        parts: its parts.
        norms: eps of each norm that there is, and what is added to its weights.
        activation: of the MLP, as `gated` has it.
        head_width: of queries and keys.
        dtype: of all weights.
    """

    def __init__(
        self,
        layer: nn.Module,
        parts: Parts,
        *,
        norms: dict[str, tuple[float, float] | None],
        activation: int,
        head_width: int,
        dtype: torch.dtype,
    ) -> None:
        self._plain = types.MethodType(type(layer).forward, layer)
        self._attention = parts.attention
        self._scaling: float | None = getattr(parts.attention, "scaling", None)
        self._parts = parts
        self._norms = norms
        self._dtype = dtype
        self._before = _Before(head_width=head_width)
        self._after = _After(activation=activation)
        self._shapes = {
            (part, name): weight.shape
            for part in (*parts.linear.values(), *parts.norms.values())
            if part is not None
            for name, weight in part._parameters.items()
            if weight is not None
        }
        self._kept: list[tuple[dict[str, Any], str, int, torch.Tensor]] = []
        self._fits = False

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the layer's own."""
        context = kwargs.get("batchkit")
        waves = kwargs.get("position_embeddings")
        if not self._kept or any(params[name].data_ptr() != at for params, name, at, _ in self._kept):
            self._fits = self._find()
        before, after = self._before, self._after
        tokens = hidden_states.shape[1] if hidden_states.dim() == 3 else 0
        wave = (1, tokens, before.head_width)
        if (
            not self._fits
            or args
            or context is None
            or not isinstance(waves, tuple)
            or len(waves) != 2
            or hidden_states.dtype is not self._dtype
            or hidden_states.shape != (1, tokens, before.query.inputs)
            or not tokens
            or not all(each.shape == wave and each.dtype is self._dtype for each in waves)
            or not self._has_harmless(kwargs)
        ):
            return self._plain(hidden_states, *args, **kwargs)
        hidden = hidden_states.contiguous()
        cos, sin = waves[0].contiguous(), waves[1].contiguous()
        before_floats, run_before, after_floats, run_after = _functions(self._dtype)
        threads = num_threads(before.query.inputs * before.query.outputs * tokens)

        outs = [
            hidden.new_empty(tokens, matrix.outputs // before.head_width, before.head_width)
            for matrix in (before.query, before.key, before.value)
        ]
        before.hidden, before.cos, before.sin = hidden.data_ptr(), cos.data_ptr(), sin.data_ptr()
        before.outs[0], before.outs[1], before.outs[2] = (out.data_ptr() for out in outs)
        before.rows, before.num_threads = tokens, threads
        scratch = torch.empty(before_floats(byref(before)), dtype=torch.float32, device="cpu")
        before.scratch = scratch.data_ptr()
        run_before(byref(before))

        attended = context.attend(
            self._attention,
            *(out.transpose(0, 1)[None] for out in outs),
            attention_mask=None,
            scaling=self._scaling,
            sliding_window=None,
            softcap=None,
            sinks=None,
            others={},
        )

        result = torch.empty_like(hidden)
        after.attended, after.hidden, after.result = attended.data_ptr(), hidden.data_ptr(), result.data_ptr()
        after.rows, after.num_threads = tokens, threads
        floats = after_floats(byref(after))
        if floats > len(scratch):
            scratch = torch.empty(floats, dtype=torch.float32, device="cpu")
        after.scratch = scratch.data_ptr()
        run_after(byref(after))
        return result

    def weights_changed(self) -> None:
        """Weights, packed ones too, may be somewhere else now."""
        self._kept = []

    def _has_harmless(self, kwargs: dict[str, Any]) -> bool:
        known = ("batchkit", "position_embeddings")
        return all(
            value is None or value is False or name in known or name in _HARMLESS for name, value in kwargs.items()
        )

    def _find(self) -> bool:
        """Where weights are now; whether they are what the kernels take."""
        self._kept = []
        fits = True

        def pointer(module: nn.Module, name: str) -> int | None:
            nonlocal fits
            tensor: torch.Tensor | None = module._parameters[name]
            if tensor is None:
                return None
            # Kept, so that nothing else can come to be where it is.
            self._kept.append((module._parameters, name, tensor.data_ptr(), tensor.detach()))
            is_same = tensor.dtype == self._dtype and tensor.shape == self._shapes[module, name]
            fits = fits and is_same and tensor.is_contiguous()
            return tensor.data_ptr()

        def matrix(name: str) -> _Matrix:
            part = self._parts.linear[name]
            packed: Packed | None = vars(part).get("packed")
            outputs, inputs = part.weight.shape if packed is None else packed.shape
            weights = pointer(part, "weight") if packed is None else packed.numbers.data_ptr()
            return _Matrix(weights, pointer(part, "bias"), outputs, inputs, packed is not None)

        def norm(name: str) -> _Norm:
            part, how = self._parts.norms[name], self._norms[name]
            if part is None or how is None:
                return _Norm(None, 0, 0.0, 0.0)
            return _Norm(pointer(part, "weight"), self._shapes[part, "weight"].numel(), *how)

        before, after = self._before, self._after
        for name in ("query", "key", "value"):
            setattr(before, name, matrix(name))
        for name in ("out", "gate", "up", "down"):
            setattr(after, name, matrix(name))
        before.norm, before.query_norm, before.key_norm = norm("input_norm"), norm("query_norm"), norm("key_norm")
        for name in ("attention_norm", "norm", "mlp_norm"):
            setattr(after, name, norm(name))
        return fits
