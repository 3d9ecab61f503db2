"""Weights of linear layers, and of the embeddings tied to them, in the order in which kernels read them.

A kernel that finds its weights in the order of its loops takes about half the time of one that has to turn them. That
costs either a second set of weights, or the first. Kernels are ours (`Packed`: a row's result then does not depend on
how many rows there are), or oneDNN's for what the processor has units for (`Reordered`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .layer_kernels import DTYPES, Packed

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["AnyPacked", "Reordered", "is_given_up", "pack", "pack_again", "unpack"]


class Reordered:
    """Weights of a linear layer in the order of oneDNN.

    Attributes:
        numbers: all of them, [outputs, inputs], opaque to all but oneDNN.
    """

    def __init__(self, weight: torch.Tensor, *, in_place: bool = False) -> None:
        """Copy weights, [outputs, inputs], in another order; `in_place` is for `Packed`."""
        self.fill(weight)

    @property
    def shape(self) -> torch.Size:
        """[outputs, inputs]."""
        return self.numbers.shape

    def fill(self, weight: torch.Tensor) -> None:
        """Have other weights of the same shape and dtype."""
        self.numbers: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)

    def unpacked(self) -> torch.Tensor:
        """The weights as they were, [outputs, inputs]."""
        return self.numbers.to_dense()

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """As `torch.nn.functional.linear`: [..., outputs] of x, [..., inputs]."""
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.numbers, bias, "none", [], "")
        return result


AnyPacked = Packed | Reordered


def pack(model: nn.Module, layers: Mapping[nn.Linear, type[AnyPacked]], *, moves: bool) -> int:
    """Give linear layers an attribute ``packed`` beside their weight.

    Args:
        model: which has them.
        layers: those that are computed by a kernel, and how its weights are. One whose weight is no parameter, but
            computed anew by whoever changes that, is passed over.
        moves: give up the weights themselves, one after another, wherever nothing but such layers and plain embeddings
            has them: then hardly more memory is taken than before. What is left of a weight has its shape, and is NaN.

    Returns:
        How many layers have packed weights.
    """
    layers = {layer: kind for layer, kind in layers.items() if layer._parameters.get("weight") is not None}
    owners: dict[int, list[nn.Module]] = defaultdict(list)
    for module in model.modules():
        for parameter in module._parameters.values():
            owners[id(parameter)].append(module)
    shared = _overlapping(model) if moves else set()
    done: dict[int, AnyPacked] = {}
    for layer, kind in layers.items():
        weight: Any = layer.weight
        if id(weight) not in done:
            its = owners[id(weight)]
            gives_up = moves and all(
                layers.get(owner) is kind or (kind is Packed and _is_plain_embedding(owner))  # type: ignore[call-overload]
                for owner in its
            )
            in_place = gives_up and id(weight) not in shared
            done[id(weight)] = _pack(weight, kind, its, gives_up=gives_up, in_place=in_place)
        vars(layer)["packed"] = done[id(weight)]
    return len(layers)


def _overlapping(model: nn.Module) -> set[int]:
    """The ids of tensors whose memory is another one's too: parts of one, or the same under another name."""
    tensors = {id(tensor): tensor for part in (model.parameters(), model.buffers()) for tensor in part}
    spans = []
    for key, tensor in tensors.items():
        if tensor.numel() and tensor.layout == torch.strided:
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            spans.append((tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size(), key))
    found: set[int] = set()
    end, whose = 0, 0
    for begin, stop, key in sorted(spans):
        if begin < end:
            found |= {key, whose}
        if stop > end:
            end, whose = stop, key
    return found


def _pack(weight: Any, kind: type[AnyPacked], owners: list[nn.Module], *, gives_up: bool, in_place: bool) -> AnyPacked:
    packed = kind(weight.data, in_place=in_place)
    if gives_up:
        weight.data = weight.data.new_full((1, 1), math.nan).as_strided(weight.shape, (0, 0))
        for owner in owners:
            if isinstance(owner, nn.Embedding) and isinstance(packed, Packed):
                vars(owner).update(packed=packed, forward=packed.rows)
    return packed


def _is_plain_embedding(module: nn.Module) -> bool:
    return type(module) is nn.Embedding and module.max_norm is None and "forward" not in vars(module)


def unpack(model: nn.Module) -> None:
    """Undo `pack`."""
    for module in model.modules():
        packed: AnyPacked | None = vars(module).pop("packed", None)
        if packed is None:
            continue
        weight: Any = module._parameters["weight"]
        if is_given_up(weight):
            weight.data = packed.unpacked()
        if isinstance(module, nn.Embedding):
            del module.forward


def pack_again(model: nn.Module) -> None:
    """Pack anew the weights that were copied. Those that were given up are what they are."""
    done: dict[int, AnyPacked | None] = {}
    for module in model.modules():
        packed: AnyPacked | None = vars(module).get("packed")
        if packed is None:
            continue
        weight: Any = module._parameters["weight"]
        if is_given_up(weight):
            continue
        if id(packed) not in done:
            done[id(packed)] = _packed_anew(packed, weight.data)
        if done[id(packed)] is None:
            del vars(module)["packed"]
        else:
            vars(module)["packed"] = done[id(packed)]


def _packed_anew(packed: AnyPacked, weight: torch.Tensor) -> AnyPacked | None:
    if weight.dtype not in DTYPES or weight.device.type != "cpu" or weight.dim() != 2:
        return None
    if weight.shape != packed.shape or weight.dtype != packed.numbers.dtype:
        return Packed(weight) if isinstance(packed, Packed) else None
    packed.fill(weight)
    return packed


def is_given_up(weight: torch.Tensor) -> bool:
    """Whether a weight is what `pack` leaves of one that it has moved."""
    if weight.layout != torch.strided or weight.stride() != (0, 0) or not weight.numel():
        return False
    with torch.inference_mode():  # so that the weight may be from there
        return bool(weight[0, 0].isnan())
