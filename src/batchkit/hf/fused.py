"""Layers of a model computed by kernels of our own, on CPUs.

What is computed between matrix products gets one pass over the numbers. transformers writes a norm, a gated activation
or rotary positions as several operators, each of which reads and writes all the numbers and costs a call; in a decode
step there are hundreds of them. `fuse` gives modules of a bound clone another ``forward``, which calls a kernel in C++
(`backends/kernels/layers.cpp`). Linear layers get one too (`backends/kernels/linear.cpp`), unless torch has
instructions for their dtype that the kernel does not use: it does so for packed weights in bfloat16. Where both are
replaced, a whole decoder layer is (`decoder`).

No weight is copied, unless weights are to be packed (`packing`).

What a module computes is not guessed from its name: for each kind of module the kernel is compared with the module
itself, with other weights and random inputs, and one that is not the same but for rounding stays as it is.
"""

from __future__ import annotations

import copy
import functools
import logging
import types
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn
from typing_extensions import override

from .backends.native import kernels, multiplies_bfloat16
from .decoder import PLACE, LayerTrial, Workspace, kind_of, parts_of
from .layer_kernels import DTYPES, Packed, linear, norm, rotary
from .loading import cpu_flags
from .packing import pack, unpack
from .replaceable import activation_of, agree, gated_by, is_plain, norm_of, traits

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .attention import BoundModel

logger = logging.getLogger("batchkit")

__all__ = ["Fused", "PackWeights", "fuse", "optimized"]

PackWeights = Literal["copy", "move"]
"""Whether packed weights are beside the model's, or in place of them."""

_Make = Callable[[nn.Module], Callable[..., Any]]
"""Gives the ``forward`` of a module."""

_ALLOWED = {torch.float32: 1e-2, torch.float64: 1e-2}
_ALLOWED_ELSE = 1.0
"""How far the logits of a model may be from those before. In half precision thirty layers make much of a rounding, so
that two right ways differ by a half; those of another model would be off by 1.4."""
_ROTARY = "apply_rotary_pos_emb"
"""What nearly all models of transformers call the function that turns queries and keys."""


class Fused(NamedTuple):
    """What `fuse` has replaced: how many modules, of how many that look like it."""

    layers: tuple[int, int]
    norms: tuple[int, int]
    gated: tuple[int, int]
    rotary: tuple[int, int]
    linear: tuple[int, int]
    packed: tuple[int, int]

    @override
    def __str__(self) -> str:
        names = (
            "decoder layers",
            "norms",
            "gated activations",
            "rotary positions of layers",
            "linear layers",
            "linear layers with packed weights",
        )
        parts = [f"{some} of {all_} {name}" for (some, all_), name in zip(self, names, strict=True) if all_]
        return ", ".join(parts) or "nothing: it has nothing of the kind"


def _is_ours(dtype: torch.dtype, *, packs: bool) -> bool:
    """Whether linear layers of this dtype are for our kernel, with packed weights or without."""
    return dtype in DTYPES and (not _has_units(dtype) or (packs and dtype == torch.bfloat16 and multiplies_bfloat16()))


def _has_units(dtype: torch.dtype) -> bool:
    """Whether the processor multiplies numbers in half precision itself, so that torch is fast in it."""
    name = {torch.bfloat16: "avx512_bf16", torch.float16: "avx512_fp16"}.get(dtype)
    return name in cpu_flags()


def optimized(bound: BoundModel, pack_weights: PackWeights | None = None) -> BoundModel:
    """The same, with what can be replaced replaced, if the model then computes the same.

    Args:
        bound: whose clone is changed.
        pack_weights: whether the weights of linear layers that are replaced are packed, and how.

    Raises:
        BuildError: this machine cannot have the kernels. Nothing has changed.
    """
    for name in ("layers", "linear", "decoder"):
        kernels(name)
    name = type(bound.model).__name__
    try:
        before = bound.run_alone()
    except Exception as error:  # then nothing can be compared
        logger.debug("%s: no fused layers: %r", name, error)
        return bound
    fused, replaced = fuse(bound.model, bound.layers, packs=pack_weights is not None)
    try:
        if pack_weights is not None:
            layers = [module for module in replaced if isinstance(module, nn.Linear)]
            count = pack(bound.model, layers, moves=pack_weights == "move")
            fused = fused._replace(packed=(count, fused.linear[1]))
        is_alike = not replaced or _is_alike(bound.run_alone(), before)
    except Exception:  # a module is called in a way that was not tried
        is_alike = False
    if not is_alike:
        unpack(bound.model)
        for module in replaced:
            del module.forward
        if pack_weights is not None:  # perhaps something reads a layer's weights behind its back
            logger.warning("%s: weights are not packed, since packed ones give other logits", name)
            return optimized(bound)
        logger.warning("%s: layers are left as they are, since fused ones give other logits", name)
        return bound
    return replace(bound, fused=fused)


def fuse(model: nn.Module, attention: Iterable[nn.Module], *, packs: bool = False) -> tuple[Fused, list[nn.Module]]:
    """Replace what can be replaced in a clone; its weights stay where they are.

    Args:
        model: a clone, all of whose weights are on the CPU.
        attention: its attention modules.
        packs: whether weights will be packed.

    Returns:
        How many modules were replaced, and which.
    """
    trials = _Trials()
    model_dtype = next(model.parameters()).dtype
    attention = list(attention)
    if _is_ours(model_dtype, packs=packs):
        workspace = Workspace()
        parents = {child: module for module in model.modules() for child in module._modules.values()}
        for module in attention:
            _replace_layer(trials, parents[module], module, model_dtype, workspace)
    for module in model.modules():
        if "forward" in vars(module):  # somebody else has been here, or it is a whole layer
            continue
        weight: Any = getattr(module, "weight", None)
        if type(module).__name__.endswith("RMSNorm"):
            trials.replace("norms", module, _norm_kind(module), functools.partial(_try_norm, module))
        elif {"gate_proj", "up_proj", "down_proj", "act_fn"} <= module._modules.keys():
            act: Any = module.act_fn
            weight = getattr(module.gate_proj, "weight", None)
            dtype = weight.dtype if isinstance(weight, torch.Tensor) else model_dtype
            if not (act._forward_hooks or act._forward_pre_hooks):
                trials.replace("gated", module, _mlp_kind(module, dtype), functools.partial(_try_gated, module, dtype))
        elif type(module) is nn.Linear and is_plain(weight):
            dtype = module.weight.dtype
            if _is_ours(dtype, packs=packs):
                trials.replace("linear", module, (nn.Linear, dtype), functools.partial(_try_linear, dtype))
    for module in attention:
        turn = getattr(_unwrapped(type(module).forward), "__globals__", {}).get(_ROTARY)
        if turn is not None and "forward" not in vars(module):
            trials.replace("rotary", module, (turn, model_dtype), functools.partial(_try_rotary, turn, model_dtype))
    counts = {what: (sum(made), len(made)) for what, made in trials.made.items()}
    return Fused(**counts), trials.replaced


def _norm_kind(norm: nn.Module) -> Any:
    weight: Any = getattr(norm, "weight", None)
    return (traits(norm), (weight.dtype, weight.shape) if isinstance(weight, torch.Tensor) else None)


def _mlp_kind(mlp: Any, dtype: torch.dtype) -> Any:
    return (traits(mlp), traits(mlp.act_fn), repr(mlp.act_fn), dtype)


def _replace_layer(
    trials: _Trials, layer: nn.Module, attention: nn.Module, dtype: torch.dtype, workspace: Workspace
) -> None:
    parts = parts_of(layer, attention)
    if parts is None:
        trials.made["layers"].append(False)
        return
    norms = {
        name: None if norm is None else trials.found(("norm of", _norm_kind(norm)), functools.partial(norm_of, norm))
        for name, norm in parts.norms.items()
    }
    activation = None
    if "act_fn" in parts.mlp._modules:
        kind = ("activation of", _mlp_kind(parts.mlp, dtype))
        activation = trials.found(kind, functools.partial(activation_of, parts.mlp, dtype))
    kind = kind_of(layer)
    trial = trials.found(kind, functools.partial(LayerTrial, layer, parts, dtype, norms, activation))
    place = (kind, *(getattr(part, PLACE, None) for part in layer.modules()))
    fits = trial is not None and trials.found(place, functools.partial(trial.fits, layer, parts))
    trials.made["layers"].append(bool(fits))
    if fits:
        layer.forward = trial.make(layer, parts, workspace=workspace)
        trials.replaced.append(layer)


def _unwrapped(function: Any) -> Any:
    """A function without its decorators, if these are of transformers, which has them for names that are outdated."""
    while hasattr(function, "__wrapped__"):
        if not getattr(function, "__globals__", {}).get("__name__", "").startswith("transformers."):
            return None
        function = function.__wrapped__
    return function


class _Trials:
    """What was replaced so far, and what was found of each kind of module."""

    def __init__(self) -> None:
        self.made: dict[str, list[bool]] = {name: [] for name in Fused._fields}
        self.replaced: list[nn.Module] = []
        self._found: dict[Any, Any] = {}

    def found(self, kind: Any, trial: Callable[[], Any]) -> Any:
        """What the trial of a kind of module gave, or None if it failed."""
        if kind not in self._found:
            try:
                # Not under what the caller has set up.
                with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.autocast("cpu", enabled=False):
                    torch.default_generator.manual_seed(0)  # not those of other devices
                    with torch.inference_mode():
                        self._found[kind] = trial()
            except Exception:  # it is not what it looks like
                self._found[kind] = None
        return self._found[kind]

    def replace(self, what: str, module: nn.Module, kind: Any, trial: Callable[[], _Make | None]) -> None:
        """Give a module another ``forward``, if the trial of its kind made one."""
        make = self.found(kind, trial)
        self.made[what].append(make is not None)
        if make is not None:
            module.forward = make(module)
            self.replaced.append(module)


def _is_alike(logits: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether logits are those of the same model: the length of the difference, as a part of what they vary by."""
    allowed = _ALLOWED.get(before.dtype, _ALLOWED_ELSE)
    # Without those of tokens that the model masks, beside which all else would be nothing.
    seen = before.isfinite() & (before > torch.finfo(before.dtype).min / 2)
    if seen.sum() < 2:
        return False
    after, before = logits[seen].double(), before[seen].double()
    return float((after - before).square().mean()) <= allowed**2 * float(before.var())


def _try_norm(module: nn.Module) -> _Make | None:
    """How a module of this kind is replaced; None if it is not."""
    found = norm_of(module)
    if found is None:
        return None
    weight: Any = module.weight
    return functools.partial(_norm_forward, dtype=weight.dtype, eps=found[0], offset=found[1])


def _norm_forward(module: Any, *, dtype: torch.dtype, eps: float, offset: float) -> Callable[..., Any]:
    plain = types.MethodType(type(module).forward, module)

    def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        weight = module.weight
        fits = x.dtype == weight.dtype == dtype and x.shape[-1:] == weight.shape and weight.is_contiguous()
        if args or kwargs or not fits:
            return plain(x, *args, **kwargs)
        return norm(x, weight, eps=eps, offset=offset)

    return forward


def _try_gated(module: nn.Module, dtype: torch.dtype) -> _Make | None:
    activation = activation_of(module, dtype)
    return None if activation is None else functools.partial(_gated_forward, dtype=dtype, activation=activation)


def _gated_forward(module: Any, *, dtype: torch.dtype, activation: int) -> Callable[..., Any]:
    plain = types.MethodType(type(module).forward, module)

    def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or x.dtype != dtype:
            return plain(x, *args, **kwargs)
        return gated_by(module, x, activation)

    return forward


def _try_linear(dtype: torch.dtype) -> _Make | None:
    sizes = (70, 37)
    module = nn.Linear(*sizes)
    x = torch.randn(20, sizes[0])

    def own(dtype: torch.dtype) -> torch.Tensor:
        result: torch.Tensor = copy.deepcopy(module).to(dtype)(x.to(dtype))
        return torch.stack([result] * 4)

    def ours(each: torch.dtype) -> torch.Tensor:
        weight, bias = module.weight.to(each), module.bias.to(each)
        # Packed or not, and for many rows and few.
        ways = [linear(x.to(each), way, bias) for way in (weight, Packed(weight))]
        ways += [torch.cat([linear(row, way, bias) for row in x.to(each)[:, None]]) for way in (weight, Packed(weight))]
        return torch.stack(ways)

    return functools.partial(_linear_forward, dtype=dtype) if agree(ours, own, dtype) else None


def _linear_forward(module: Any, *, dtype: torch.dtype) -> Callable[..., Any]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        bias = module.bias
        weight: torch.Tensor | Packed = vars(module).get("packed") or module.weight
        numbers = weight.numbers if isinstance(weight, Packed) else weight
        fits = (
            x.dtype == numbers.dtype == dtype
            and x.shape[-1] == weight.shape[1]
            and numbers.is_contiguous()
            and (bias is None or (bias.dtype == dtype and bias.is_contiguous()))
        )
        if fits:
            return linear(x, weight, bias)
        return nn.functional.linear(x, weight.unpacked() if isinstance(weight, Packed) else weight, bias)

    return forward


def _try_rotary(turn: Callable[..., Any], dtype: torch.dtype) -> _Make | None:
    if dtype not in DTYPES:
        return None
    tokens, width = 5, 24
    heads = [torch.randn(1, tokens, count, width).transpose(1, 2) for count in (3, 2)]
    waves = [torch.randn(1, tokens, width) for _ in ("cos", "sin")]

    def by(way: Callable[..., Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.cat(way(*(tensor.to(dtype) for tensor in (*heads, *waves))), 1)

    ours = _turning(turn)
    if not agree(functools.partial(by, ours), functools.partial(by, turn), dtype):
        return None
    return functools.partial(_attention_forward, turn=ours)


def _turning(turn: Callable[..., Any]) -> Callable[..., Any]:
    """A function like `turn`, which is called for whatever the kernel is not for."""

    def turning(query: Any, key: Any, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
        fits = (
            not args
            and not kwargs
            and query.dim() == key.dim() == 4
            and cos.shape == sin.shape == (1, query.shape[2], query.shape[3])
            and query.shape[0] == key.shape[0] == 1
            and query.shape[2:] == key.shape[2:]
            and query.dtype == key.dtype == cos.dtype == sin.dtype
            and query.dtype in DTYPES
            and query.stride(3) == key.stride(3) == 1
            and query.shape[3] % 2 == 0
        )
        return rotary(query, key, cos, sin) if fits else turn(query, key, cos, sin, *args, **kwargs)

    return turning


def _attention_forward(module: nn.Module, *, turn: Callable[..., Any]) -> Callable[..., Any]:
    """The module's own ``forward``, for which `_ROTARY` is another function."""
    own = _unwrapped(type(module).forward)
    assert isinstance(own, types.FunctionType)
    made = types.FunctionType(
        own.__code__, {**own.__globals__, _ROTARY: turn}, own.__name__, own.__defaults__, own.__closure__
    )
    made.__kwdefaults__ = own.__kwdefaults__
    return types.MethodType(made, module)
