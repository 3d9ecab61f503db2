"""What modules of a model compute, found out by trial: norms and gated MLPs that kernels can compute instead."""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .layer_kernels import DTYPES, GELU_TANH, SILU, gated, norm

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["activation_of", "agree", "gated_by", "is_plain", "norm_of", "traits"]

_SLACK = 8.0
"""How far a kernel may be from a module besides, in epsilons of float32: sums have other partial sums, and functions
other polynomials."""


def traits(module: nn.Module) -> tuple[Any, ...]:
    """What modules of one kind have in common: their class, and whatever attributes it has given them."""
    own = vars(module).keys() - vars(nn.Module()).keys()
    simple = (bool, int, float, str, type(None))
    values = {name: vars(module)[name] for name in sorted(own)}
    return (type(module), *((k, v if isinstance(v, simple) else id(v)) for k, v in values.items()))


def is_plain(weight: Any) -> bool:
    """Whether the numbers of a weight are where it points to: those of quantized ones, for example, are not."""
    is_dense = type(weight) in (torch.Tensor, nn.Parameter) and weight.layout == torch.strided
    return is_dense and not weight.is_neg() and not weight.is_conj()


def _has_state(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None


def agree(ours: Callable[[torch.dtype], Any], own: Callable[[torch.dtype], Any], dtype: torch.dtype) -> bool:
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


def norm_of(module: Any) -> tuple[float, float] | None:
    """What is added to the mean square, and what to the weights, if a module is a root mean square norm."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight: Any = getattr(module, "weight", None)
    if not is_plain(weight) or weight.dim() != 1 or weight.dtype not in DTYPES or not isinstance(eps, float):
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
        ours = functools.partial(_norm_in, x, weights, eps=eps, offset=offset)
        if agree(ours, own, weight.dtype):
            return eps, offset
    return None


def _norm_in(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, **more: float) -> torch.Tensor:
    return norm(x.to(dtype), weight.to(dtype), **more)


def activation_of(module: nn.Module, dtype: torch.dtype) -> int | None:
    """The activation by which a module gates, if it is an MLP as most models have it."""
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

    def ours(activation: int, x: torch.Tensor, each: torch.dtype) -> torch.Tensor:
        return gated_by(probe(each), x.to(each), activation)

    for activation in (SILU, GELU_TANH):
        if all(
            agree(functools.partial(ours, activation, given), functools.partial(own, given), each)
            for given, each in ((x, dtype), (far, torch.float32))
        ):
            return activation
    return None


def gated_by(module: Any, x: torch.Tensor, activation: int) -> torch.Tensor:
    """What an MLP gives that gates by an activation."""
    gate, up = module.gate_proj(x), module.up_proj(x)
    is_alike = gate.shape == up.shape and gate.dtype == up.dtype and gate.dtype in DTYPES
    result: torch.Tensor = module.down_proj(gated(gate, up, activation) if is_alike else module.act_fn(gate) * up)
    return result
