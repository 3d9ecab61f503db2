"""Layers of a model computed by kernels of our own, on CPUs.

What is computed between matrix products gets one pass over the numbers. transformers writes a norm, a gated activation
or rotary positions as several operators, each of which reads and writes all the numbers and costs a call; in a decode
step there are hundreds of them. `fuse` gives modules of a bound clone another ``forward``, which calls a kernel in C++
(`backends/kernels/layers.cpp`). Linear layers get one too, where their numbers have 16 bits and the processor has no
instructions for products of these: torch then takes several times as long as in float32
(`backends/kernels/linear.cpp`). No weight is copied.

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
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from typing_extensions import override

from .backends.native import kernels
from .layer_kernels import DTYPES, GELU_TANH, SILU, gated, linear, norm, rotary

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .attention import BoundModel

logger = logging.getLogger("batchkit")

__all__ = ["Fused", "fuse", "optimized"]

_Make = Callable[[nn.Module], Callable[..., Any]]
"""Gives the ``forward`` of a module."""

_SLACK = 8.0
"""How far a kernel may be from a module besides, in epsilons of float32: sums have other partial sums, and functions
other polynomials."""
_ALLOWED = {torch.float32: 1e-2, torch.float64: 1e-2}
_ALLOWED_ELSE = 1.0
"""How far the logits of a model may be from those before. In half precision thirty layers make much of a rounding, so
that two right ways differ by a half; those of another model would be off by 1.4."""
_ROTARY = "apply_rotary_pos_emb"
"""What nearly all models of transformers call the function that turns queries and keys."""


class Fused(NamedTuple):
    """What `fuse` has replaced: how many modules, of how many that look like it."""

    norms: tuple[int, int]
    gated: tuple[int, int]
    rotary: tuple[int, int]
    linear: tuple[int, int]

    @override
    def __str__(self) -> str:
        names = ("norms", "gated activations", "rotary positions of layers", "linear layers in 16 bits")
        parts = [f"{some} of {all_} {name}" for (some, all_), name in zip(self, names, strict=True) if all_]
        return ", ".join(parts) or "nothing: it has nothing of the kind"


@functools.cache
def _is_slow(dtype: torch.dtype) -> bool:
    """Whether torch multiplies matrices of this dtype without instructions for it."""
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(dtype)
    is_fast = None if name is None else getattr(torch.ops.mkldnn, name, None)
    return is_fast is not None and not is_fast()


def optimized(bound: BoundModel) -> BoundModel:
    """The same, with what can be replaced replaced, if the model then computes the same.

    Raises:
        BuildError: this machine cannot have the kernels. Nothing has changed.
    """
    kernels("layers")
    before = bound.run_alone()
    fused, replaced = fuse(bound.model, bound.layers)
    try:
        is_alike = not replaced or _is_alike(bound.run_alone(), before)
    except Exception:  # a module is called in a way that was not tried
        is_alike = False
    if not is_alike:
        for module in replaced:
            del module.forward
        logger.warning(
            "%s: layers are left as they are, since fused ones give other logits", type(bound.model).__name__
        )
        return bound
    return replace(bound, fused=fused)


def fuse(model: nn.Module, attention: Iterable[nn.Module]) -> tuple[Fused, list[nn.Module]]:
    """Replace what can be replaced in a clone; its weights stay where they are.

    Args:
        model: a clone, all of whose weights are on the CPU.
        attention: its attention modules.

    Returns:
        How many modules were replaced, and which.
    """
    trials = _Trials()
    model_dtype = next(model.parameters()).dtype
    for module in model.modules():
        if "forward" in vars(module):  # somebody else has been here
            continue
        weight: Any = getattr(module, "weight", None)
        if type(module).__name__.endswith("RMSNorm"):
            eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
            kind: Any = (_traits(module), (weight.dtype, weight.shape) if isinstance(weight, torch.Tensor) else None)
            trials.replace("norms", module, kind, functools.partial(_try_norm, module, eps))
        elif {"gate_proj", "up_proj", "down_proj", "act_fn"} <= module._modules.keys():
            act: Any = module.act_fn
            weight = getattr(module.gate_proj, "weight", None)
            dtype = weight.dtype if isinstance(weight, torch.Tensor) else model_dtype
            if not (act._forward_hooks or act._forward_pre_hooks):
                kind = (_traits(module), _traits(act), repr(act), dtype)
                trials.replace("gated", module, kind, functools.partial(_try_gated, module, dtype))
        elif type(module) is nn.Linear and _is_plain(weight) and _is_slow(module.weight.dtype):
            dtype = module.weight.dtype
            trials.replace("linear", module, (nn.Linear, dtype), functools.partial(_try_linear, dtype))
    for module in attention:
        turn = getattr(_unwrapped(type(module).forward), "__globals__", {}).get(_ROTARY)
        if turn is not None and "forward" not in vars(module):
            trials.replace("rotary", module, (turn, model_dtype), functools.partial(_try_rotary, turn, model_dtype))
    counts = {what: (sum(made), len(made)) for what, made in trials.made.items()}
    return Fused(**counts), trials.replaced


def _traits(module: nn.Module) -> tuple[Any, ...]:
    """What modules of one kind have in common: their class, and whatever attributes it has given them."""
    own = vars(module).keys() - vars(nn.Module()).keys()
    simple = (bool, int, float, str, type(None))
    values = {name: vars(module)[name] for name in sorted(own)}
    return (type(module), *((k, v if isinstance(v, simple) else id(v)) for k, v in values.items()))


def _is_plain(weight: Any) -> bool:
    """Whether the numbers of a weight are where it points to: those of quantized ones, for example, are not."""
    return type(weight) in (torch.Tensor, nn.Parameter) and weight.layout == torch.strided


def _has_state(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None


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
        self._found: dict[Any, _Make | None] = {}

    def replace(self, what: str, module: nn.Module, kind: Any, trial: Callable[[], _Make | None]) -> None:
        """Give a module another ``forward``, if the trial of its kind made one."""
        if kind not in self._found:
            try:
                # Not under what the caller has set up.
                with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.autocast("cpu", enabled=False):
                    torch.default_generator.manual_seed(0)  # not those of other devices
                    with torch.inference_mode():
                        self._found[kind] = trial()
            except Exception:  # it is not what it looks like
                self._found[kind] = None
        make = self._found[kind]
        self.made[what].append(make is not None)
        if make is not None:
            module.forward = make(module)
            self.replaced.append(module)


def _is_alike(logits: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether logits are those of the same model: the length of the difference, as a part of what they vary by."""
    allowed = _ALLOWED.get(before.dtype, _ALLOWED_ELSE)
    # Without those of tokens that the model masks, beside which all else would be nothing.
    seen = before.isfinite() & (before > torch.finfo(before.dtype).min / 2)
    after, before = logits[seen].double(), before[seen].double()
    return float((after - before).square().mean()) <= allowed**2 * float(before.var())


def _agree(ours: Callable[[torch.dtype], Any], own: Callable[[torch.dtype], Any], dtype: torch.dtype) -> bool:
    """Whether two ways of computing one thing differ by rounding alone.

    Args:
        ours: gives a tensor in a dtype.
        own: the module's way; what it gives in float64 is taken for the truth.
        dtype: in which it will be used.
    """
    truth = own(torch.float64)
    slack = _SLACK * torch.finfo(torch.float32).eps * truth.abs().max()
    # In float32 too, whatever the dtype: rounding in half precision hides one activation from another.
    for each in {torch.float32, dtype}:
        errors = [(way(each).double() - truth).square().mean().sqrt() for way in (ours, own)]
        if not errors[0] <= 1.5 * errors[1] + slack:  # NaN is not
            return False
    return True


def _try_norm(module: Any, eps: Any) -> _Make | None:
    """How a module of this kind is replaced; None if it is not."""
    weight: Any = getattr(module, "weight", None)
    if not _is_plain(weight) or weight.dim() != 1 or weight.dtype not in DTYPES or not isinstance(eps, float):
        return None
    if module._parameters.keys() != {"weight"} or module._buffers or module._modules:  # which may change what it does
        return None
    weights = torch.randn(weight.shape)
    # Of such sizes that the mean square is as small as eps, and much larger.
    x = torch.randn(32, 3, len(weights)) * torch.tensor([[1e-3], [1.0], [30.0]])

    def own(dtype: torch.dtype) -> torch.Tensor:
        probe = copy.copy(module)  # a deep copy would copy what its hooks hold
        probe._parameters = {"weight": nn.Parameter(weights.to(dtype), requires_grad=False)}
        result: torch.Tensor = type(module).forward(probe, x.to(dtype))
        return result

    for offset in (0.0, 1.0):
        ours = functools.partial(_norm_of, x, weights, eps=eps, offset=offset)
        if _agree(ours, own, weight.dtype):
            return functools.partial(_norm_forward, dtype=weight.dtype, eps=eps, offset=offset)
    return None


def _norm_of(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, **more: float) -> torch.Tensor:
    return norm(x.to(dtype), weight.to(dtype), **more)


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
    if dtype not in DTYPES:
        return None
    linear = {"gate_proj": nn.Linear(16, 24), "up_proj": nn.Linear(16, 24), "down_proj": nn.Linear(24, 16)}
    others = [part for name, part in module.named_children() if name not in linear]
    if module._parameters or module._buffers or any(map(_has_state, others)):  # which may change what it does
        return None
    x = 4 * torch.randn(2, 40, 16)
    far = 1000 * x  # beyond where some activations are cut off

    def probe(dtype: torch.dtype) -> nn.Module:
        """The module with small projections."""
        made = copy.copy(module)
        made._modules = {**module._modules, **{name: copy.deepcopy(part).to(dtype) for name, part in linear.items()}}
        return made

    def own(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        result: torch.Tensor = type(module).forward(probe(dtype), x.to(dtype))
        return result

    def ours(make: Callable[..., Any], x: torch.Tensor, each: torch.dtype) -> torch.Tensor:
        result: torch.Tensor = make(probe(each), dtype=each)(x.to(each))
        return result

    for activation in (SILU, GELU_TANH):
        make = functools.partial(_gated_forward, activation=activation)
        if all(
            _agree(functools.partial(ours, make, given), functools.partial(own, given), each)
            for given, each in ((x, dtype), (far, torch.float32))
        ):
            return functools.partial(make, dtype=dtype)
    return None


def _gated_forward(module: Any, *, dtype: torch.dtype, activation: int) -> Callable[..., Any]:
    plain = types.MethodType(type(module).forward, module)

    def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or x.dtype != dtype:
            return plain(x, *args, **kwargs)
        gate, up = module.gate_proj(x), module.up_proj(x)
        return module.down_proj(gated(gate, up, activation))

    return forward


def _try_linear(dtype: torch.dtype) -> _Make | None:
    sizes = (70, 37)
    module = nn.Linear(*sizes)
    x = torch.randn(20, sizes[0])

    def own(dtype: torch.dtype) -> torch.Tensor:
        result: torch.Tensor = copy.deepcopy(module).to(dtype)(x.to(dtype))
        return result

    def ours(each: torch.dtype) -> torch.Tensor:
        # It has no float32, of which there is nothing to find out.
        return linear(x.to(each), module.weight.to(each), module.bias.to(each)) if each == dtype else own(each)

    return functools.partial(_linear_forward, dtype=dtype) if _agree(ours, own, dtype) else None


def _linear_forward(module: Any, *, dtype: torch.dtype) -> Callable[..., Any]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        weight, bias = module.weight, module.bias
        fits = (
            x.dtype == weight.dtype == dtype
            and x.shape[-1] == weight.shape[1]
            and weight.is_contiguous()
            and (bias is None or (bias.dtype == dtype and bias.is_contiguous()))
        )
        return linear(x, weight, bias) if fits else nn.functional.linear(x, weight, bias)

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
    if not _agree(functools.partial(by, ours), functools.partial(by, turn), dtype):
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
