"""Decoder layers computed by two calls of kernels, with attention between them (`backends/kernels/decoder.cpp`).

A layer of transformers is a dozen modules, whose calls cost more than what they compute when a step has few rows. A
layer whose parts are known, and which gives what the kernels give, gets a `DecoderLayer` for its ``forward``.
"""

from __future__ import annotations

import copy
import functools
import types
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import nn

from .attention import Recorder
from .backends.native import kernels
from .layer_kernels import DTYPES, Packed, num_threads
from .replaceable import agree, is_plain, traits

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PLACE", "DecoderLayer", "LayerTrial", "Workspace", "kind_of", "parts_of"]

_Module = TypeVar("_Module", bound=nn.Module)

_LISTENERS = ("_forward_hooks", "_forward_pre_hooks")
PLACE = "layer_idx"
"""The attribute of a module that says in which layer of the model it is."""
_HARMLESS = frozenset({"batchkit", "cache_position", "position_embeddings", "position_ids", "use_cache"})
"""Keywords of a layer that are looked at, or change nothing where there is no cache and no mask; a trial has shown that
positions do not."""


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
    if any(type(part) is not nn.Linear or not is_plain(part._parameters.get("weight")) for part in linear.values()):
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
    """What layers that compute the same, but for their weights and their place in the model, have in common."""
    inner = []
    for name, part in layer.named_modules():
        shapes = tuple(weight.shape for weight in part._parameters.values() if weight is not None)
        own = [trait for trait in traits(part) if not (isinstance(trait, tuple) and trait[0] == PLACE)]
        inner.append((name, *own, None if part._modules else repr(part), shapes))
    return tuple(inner)


class LayerTrial:
    """What layers of one kind compute, beside what the kernels do.

    Args:
        layer: the first of them.
        parts: its parts.
        dtype: of the model.
        norms: what `norm_of` has found of each.
        activation: what `activation_of` has found.

    Raises:
        ValueError: they do not compute what the kernels do.
        Whatever they raise where they are not what they look like.
    """

    def __init__(
        self,
        layer: nn.Module,
        parts: Parts,
        dtype: torch.dtype,
        norms: dict[str, tuple[float, float] | None],
        activation: int | None,
    ) -> None:
        tensors = [tensor for part in layer.modules() for tensor in part._parameters.values() if tensor is not None]
        width = getattr(parts.attention, "head_dim", None)
        if (
            dtype not in DTYPES
            or any(tensor.dtype != dtype for tensor in tensors)
            or activation is None
            or any(norms[name] is None and norm is not None for name, norm in parts.norms.items())
            or not isinstance(width, int)
            or width % 2
        ):
            raise ValueError("the kernels have nothing like it")
        self.make = functools.partial(DecoderLayer, norms=norms, activation=activation, head_width=width, dtype=dtype)
        self._head_width = width
        self._small = _small_parts(parts)
        self._far = _far_parts(self._small)
        hidden = self._small.linear["query"].in_features
        tokens = 5
        self._hidden = torch.randn(1, tokens, hidden)
        self._waves = [torch.randn(1, tokens, width) for _ in ("cos", "sin")]
        self._given = []
        # In half precision far numbers are rounded too much to tell anything.
        for small, each in ((self._small, dtype), (self._far, torch.float32)):
            ours, own = (functools.partial(way, layer, parts, small) for way in (self._ours, self._own))
            if not agree(ours, own, each):
                raise ValueError("it computes something else than the kernels")
            self._given.append(ours(torch.float32))

    def fits(self, layer: nn.Module, parts: Parts) -> bool:
        """Whether one more layer, which is like the first but for its place, gives what the kernels gave."""
        for small, given in zip((self._small, self._far), self._given, strict=True):
            difference = self._own(layer, parts, small, torch.float32) - given
            if not difference.abs().max() <= 1e-4 * given.abs().max():
                return False
        return True

    def _own(self, layer: nn.Module, parts: Parts, small: Parts, dtype: torch.dtype) -> torch.Tensor:
        probe, _ = _probe(layer, parts, small, dtype)
        return self._run(types.MethodType(type(probe).forward, probe), dtype)

    def _ours(self, layer: nn.Module, parts: Parts, small: Parts, dtype: torch.dtype) -> torch.Tensor:
        probe, its = _probe(layer, parts, small, dtype)
        return self._run(self.make(probe, its, dtype=dtype, workspace=Workspace()), dtype)

    def _run(self, forward: Callable[..., Any], dtype: torch.dtype) -> torch.Tensor:
        recorder = Recorder()
        out = forward(
            self._hidden.to(dtype),
            attention_mask=None,
            position_ids=_UNREADABLE,
            cache_position=_UNREADABLE,
            position_embeddings=tuple(wave.to(dtype) for wave in self._waves),
            use_cache=False,
            batchkit=recorder,
        )
        (call,) = recorder.calls
        if not isinstance(out, torch.Tensor) or call.unknown or call.has_sinks or call.has_mask:
            raise ValueError("it calls attention, or is called, in another way")
        scaling = self._head_width**-0.5 if call.scaling is None else call.scaling
        return torch.cat([x.flatten() for x in (out, call.query, call.key, call.value, out.new_tensor([scaling]))])


_UNREADABLE: Any = object()
"""In place of the positions: the kernels know them by cosines and sines alone, so a layer that looks at them is not for
the kernels (Ministral 3 scales queries by them). No choice of positions would tell at which ones it does so."""


def _far_parts(small: Parts) -> Parts:
    """The same with queries, keys and values 1,000 times as large: beyond where a layer may cut them off."""
    linear = dict(small.linear)
    for name in ("query", "key", "value"):
        linear[name] = _with(linear[name], {each: 1000 * w.data for each, w in linear[name].named_parameters()})
    return small._replace(linear=linear)


def _small_parts(parts: Parts) -> Parts:
    """Random weights for hidden states and an MLP of few numbers, in float64; heads are as they are."""
    hidden, inner = 40, 24
    linear = {}
    for name, part in parts.linear.items():
        inputs = part.in_features if name == "out" else inner if name == "down" else hidden
        outputs = hidden if name in ("out", "down") else inner if name in ("gate", "up") else part.out_features
        made = nn.Linear(inputs, outputs, bias=part.bias is not None, device="meta")
        linear[name] = _with(
            made,
            {
                each: torch.randn(weight.shape, dtype=torch.float64) * inputs**-0.5
                for each, weight in made.named_parameters()
            },
        )
    norms: dict[str, nn.Module | None] = {}
    for name, norm in parts.norms.items():
        norms[name] = None
        if norm is not None:
            weight: Any = norm.weight
            size = len(weight) if name in ("query_norm", "key_norm") else hidden
            norms[name] = _with(norm, {"weight": torch.randn(size, dtype=torch.float64)})
    return Parts(None, None, linear, norms)


def _with(module: _Module, weights: dict[str, torch.Tensor]) -> _Module:
    """The module with other weights."""
    made = copy.copy(module)  # a deep copy would copy what hooks hold
    made._parameters = dict.fromkeys(module._parameters) | {
        name: nn.Parameter(weight, requires_grad=False) for name, weight in weights.items()
    }
    return made


def _probe(layer: nn.Module, parts: Parts, small: Parts, dtype: torch.dtype) -> tuple[nn.Module, Parts]:
    """The layer with small parts, in a dtype."""
    replaced: dict[int, nn.Module] = {}

    def cast(part: _Module, its: nn.Module) -> _Module:
        made = _with(part, {name: weight.to(dtype) for name, weight in part.named_parameters()})
        replaced[id(its)] = made
        return made

    linear = {name: cast(small.linear[name], its) for name, its in parts.linear.items()}
    norms: dict[str, nn.Module | None] = {}
    for name, its in parts.norms.items():
        norm = small.norms[name]
        norms[name] = None if norm is None or its is None else cast(norm, its)

    def shrunk(part: nn.Module) -> nn.Module:
        made = replaced.get(id(part))
        if made is None:
            made = copy.copy(part)
            made._modules = {name: child and shrunk(child) for name, child in part._modules.items()}
        return made

    probe = shrunk(layer)
    children: Any = probe._modules
    return probe, Parts(children["self_attn"], children["mlp"], linear, norms)


class Workspace:
    """What the layers of a model need for a step, and use one after the other.

    Attributes:
        waves: cosines and sines that were last looked at, as the model has them.
        context: of the step in which that was.
        wave: the shape of both, [1, tokens, head width].
        dtype: of both.
        generation: changes when anything comes to be in another place.
    """

    def __init__(self) -> None:
        self.waves: Any = None
        self.context: Any = None
        self.wave: torch.Size | None = None
        self.dtype: torch.dtype | None = None
        self.generation = 0
        self._copies: list[torch.Tensor] = []
        self._key: tuple[Any, ...] = ()
        self._outs: tuple[torch.Tensor, ...] = ()
        self._scratch = torch.empty(0, dtype=torch.float32, device="cpu")

    def take_waves(self, waves: Any, context: Any) -> bool:
        """Copy them, if they are a pair of tensors that are alike; whether they are."""
        if not isinstance(waves, tuple) or len(waves) != 2:
            return False
        cos, sin = waves
        if cos.shape != sin.shape or cos.dtype != sin.dtype:
            return False
        if cos.shape != self.wave or cos.dtype != self.dtype:
            self.wave, self.dtype = cos.shape, cos.dtype
            self._copies = [torch.empty_like(each, memory_format=torch.contiguous_format) for each in waves]
            self.generation += 1
        for copied, each in zip(self._copies, waves, strict=True):
            copied.copy_(each)
        self.waves, self.context = waves, context  # kept, so that nothing else can be taken for them
        return True

    def take(self, before: _Before, after: _After, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Give a layer all else that it needs.

        Returns:
            Where its queries, keys and values come to be, [tokens, heads, width] each.
        """
        width = before.head_width
        sides = before.query.outputs, before.key.outputs, before.value.outputs
        key = (before.rows, before.num_threads, width, *sides, after.gate.outputs, after.out.outputs, dtype)
        if key != self._key:
            before_floats, after_floats = _functions(dtype)[::2]
            floats = max(before_floats(byref(before)), after_floats(byref(after)))
            self._scratch = torch.empty(floats, dtype=torch.float32, device="cpu")
            self._outs = tuple(
                torch.empty(before.rows, side // width, width, dtype=dtype, device="cpu") for side in sides
            )
            self._key = key
            self.generation += 1
        before.cos, before.sin = (each.data_ptr() for each in self._copies)
        before.scratch = after.scratch = self._scratch.data_ptr()
        for index, out in enumerate(self._outs):
            before.outs[index] = out.data_ptr()
        return self._outs


def _are_harmless(kwargs: dict[str, Any]) -> bool:
    for name, value in kwargs.items():
        if value is not None and value is not False and name not in _HARMLESS:
            return False
    return True


class DecoderLayer:
    """The ``forward`` of a layer by the kernels, or its own for whatever they are not for.

    Args:
        layer: the layer.
        parts: its parts.
        norms: eps of each norm that there is, and what is added to its weights.
        activation: of the MLP, as `gated` has it.
        head_width: of queries and keys.
        dtype: of all weights.
        workspace: that of the model.
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
        workspace: Workspace,
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
        self._workspace = workspace
        self._numbers = parts.linear["query"].weight.numel()
        self._outs: tuple[torch.Tensor, ...] = ()
        self._taken = (0, 0, -1)  # tokens, threads and generation for which everything is in its place

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the layer's own."""
        if not self._is_current():
            self._fits = self._find()
        before, after, work = self._before, self._after, self._workspace
        context = kwargs.get("batchkit")
        waves = kwargs.get("position_embeddings")
        if (
            not self._fits
            or args
            or context is None
            or hidden_states.dtype is not self._dtype
            or hidden_states.dim() != 3
            or hidden_states.shape[0] != 1
            or hidden_states.shape[2] != before.query.inputs
            or not hidden_states.shape[1]
            or not ((waves is work.waves and context is work.context) or work.take_waves(waves, context))
            or work.wave != (1, hidden_states.shape[1], before.head_width)
            or work.dtype is not self._dtype
            or not _are_harmless(kwargs)
        ):
            return self._plain(hidden_states, *args, **kwargs)
        hidden = hidden_states.contiguous()
        tokens = hidden.shape[1]
        run_before, run_after = _functions(self._dtype)[1::2]
        threads = num_threads(self._numbers * tokens)
        if (tokens, threads, work.generation) != self._taken:
            before.rows = after.rows = tokens
            before.num_threads = after.num_threads = threads
            self._outs = work.take(before, after, self._dtype)
            self._taken = (tokens, threads, work.generation)

        before.hidden = hidden.data_ptr()
        run_before(byref(before))
        attended = context.attend_tokens(self._attention, *self._outs, scaling=self._scaling)
        result = torch.empty_like(hidden)
        after.attended, after.hidden, after.result = attended.data_ptr(), before.hidden, result.data_ptr()
        run_after(byref(after))
        return result

    def weights_changed(self) -> None:
        """Weights, packed ones too, may be somewhere else now."""
        self._kept = []

    def _is_current(self) -> bool:
        for parameters, name, at, _ in self._kept:
            if parameters[name].data_ptr() != at:
                return False
        return bool(self._kept)

    def _find(self) -> bool:
        """Where weights are now; whether they are what the kernels take."""
        self._kept = []
        self._taken = (0, 0, -1)
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
            nonlocal fits
            part = self._parts.linear[name]
            packed: Packed | None = vars(part).get("packed")
            if packed is not None:
                fits = fits and packed.numbers.dtype == self._dtype and packed.shape == self._shapes[part, "weight"]
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
