"""Weights of linear layers, and of the embeddings tied to them, in the order in which kernels read them.

A kernel that finds its weights in the order of its loops takes about half the time of one that has to turn them, and a
row's result then does not depend on how many rows there are. That costs either a second set of weights, or the first.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .layer_kernels import DTYPES, Packed

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["pack", "pack_again", "unpack"]


def pack(model: nn.Module, layers: Iterable[nn.Linear], *, moves: bool) -> int:
    """Give linear layers an attribute ``packed`` beside their weight.

    Args:
        model: which has them.
        layers: those that are computed by the kernel.
        moves: give up the weights themselves, one after another, wherever nothing but such layers and plain embeddings
            has them: then hardly more memory is taken than before. What is left of a weight has its shape, and is NaN.

    Returns:
        How many layers have packed weights.
    """
    packable = set(layers)
    owners: dict[int, list[nn.Module]] = defaultdict(list)
    for module in model.modules():
        for parameter in module._parameters.values():
            owners[id(parameter)].append(module)
    done: dict[int, Packed] = {}
    for layer in packable:
        weight: Any = layer.weight
        if id(weight) not in done:
            done[id(weight)] = _pack(weight, owners[id(weight)], packable, moves=moves)
        vars(layer)["packed"] = done[id(weight)]
    return len(packable)


def _pack(weight: Any, owners: list[nn.Module], packable: set[nn.Linear], *, moves: bool) -> Packed:
    moves = moves and all(owner in packable or _is_plain_embedding(owner) for owner in owners)
    packed = Packed(weight.data, in_place=moves)
    if moves:
        weight.data = weight.data.new_full((1, 1), math.nan).expand(weight.shape)
        for owner in owners:
            if isinstance(owner, nn.Embedding):
                vars(owner).update(packed=packed, forward=packed.rows)
    return packed


def _is_plain_embedding(module: nn.Module) -> bool:
    return type(module) is nn.Embedding and module.max_norm is None and "forward" not in vars(module)


def unpack(model: nn.Module) -> None:
    """Undo `pack`."""
    for module in model.modules():
        packed: Packed | None = vars(module).pop("packed", None)
        if packed is None:
            continue
        weight: Any = module._parameters["weight"]
        if _is_given_up(weight):
            weight.data = packed.unpacked()
        if isinstance(module, nn.Embedding):
            del module.forward


def pack_again(model: nn.Module) -> None:
    """Pack anew the weights that were copied. Those that were given up are what they are."""
    done: dict[int, Packed | None] = {}
    for module in model.modules():
        packed: Packed | None = vars(module).get("packed")
        if packed is None:
            continue
        weight: Any = module._parameters["weight"]
        if _is_given_up(weight):
            continue
        if id(packed) not in done:
            done[id(packed)] = _packed_anew(packed, weight.data)
        if done[id(packed)] is None:
            del vars(module)["packed"]
        else:
            vars(module)["packed"] = done[id(packed)]


def _packed_anew(packed: Packed, weight: torch.Tensor) -> Packed | None:
    if weight.dtype not in DTYPES or weight.device.type != "cpu" or weight.dim() != 2:
        return None
    if weight.shape != packed.shape or weight.dtype != packed.numbers.dtype:
        return Packed(weight)
    packed.fill(weight)
    return packed


def _is_given_up(weight: torch.Tensor) -> bool:
    return weight.stride() == (0, 0) and weight.numel() > 1
