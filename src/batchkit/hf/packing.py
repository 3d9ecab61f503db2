"""Weights of linear layers, and of the embeddings tied to them, in the order in which kernels read them.

A kernel that finds its weights in the order of its loops takes about half the time of one that has to turn them. That
costs either a second set of weights, or the first. A row's result then does not depend on how many rows there are.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .layer_kernels import DTYPES, Packed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["is_given_up", "pack", "pack_again", "unpack"]


def pack(model: nn.Module, layers: Iterable[nn.Linear], *, moves: bool) -> int:
    """Give linear layers an attribute ``packed`` beside their weight.

    Args:
        model: which has them.
        layers: those that are computed by the kernel. One whose weight is no parameter, but computed anew by whoever
            changes that, is passed over.
        moves: give up the weights themselves, one after another, wherever nothing but such layers and plain embeddings
            has them: then hardly more memory is taken than before. What is left of a weight has its shape, and is NaN.

    Returns:
        How many layers have packed weights.
    """
    layers = {layer: None for layer in layers if layer._parameters.get("weight") is not None}
    owners: dict[int, list[nn.Module]] = defaultdict(list)
    for module in model.modules():
        for parameter in module._parameters.values():
            owners[id(parameter)].append(module)
    shared = _overlapping(model) if moves else set()
    for layer in layers:
        weight: Any = layer.weight
        if "packed" not in vars(layer):
            its = owners[id(weight)]
            gives_up = moves and all(owner in layers or _is_plain_embedding(owner) for owner in its)
            with torch.inference_mode(weight.is_inference()):  # which the caller's mode need not be
                packed = [owner for owner in its if owner in layers]
                embeddings = [owner for owner in its if owner not in layers] if gives_up else []
                _pack(weight, packed, embeddings, gives_up=gives_up, in_place=gives_up and id(weight) not in shared)
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


def _pack(
    weight: Any, layers: Sequence[nn.Module], embeddings: Sequence[nn.Module], *, gives_up: bool, in_place: bool
) -> None:
    """Pack one weight for all that have it. `unpack` can undo it from whichever line an interrupt comes at."""
    within = Packed.within(weight.data) if in_place else None
    packed = within or Packed(weight.data)
    for layer in layers:
        vars(layer)["packed"] = packed
    if gives_up:
        weight.data = weight.data.new_full((1, 1), math.nan).as_strided(weight.shape, (0, 0))
    for embedding in embeddings:
        vars(embedding).update(packed=packed, forward=packed.rows)
    if within is not None:
        within.fill(within.numbers)


def _is_plain_embedding(module: nn.Module) -> bool:
    return type(module) is nn.Embedding and module.max_norm is None and "forward" not in vars(module)


def unpack(model: nn.Module) -> None:
    """Undo `pack`, in the memory of the packed weights. What an interrupt leaves of it can be done again."""
    for module in model.modules():
        packed: Packed | None = vars(module).get("packed")
        if packed is None:
            continue
        weight: Any = module._parameters["weight"]
        with torch.inference_mode(weight.is_inference()):
            if _is_lost(weight, packed):
                weight.data = packed.undone().to(weight.dtype)
        del vars(module)["packed"]
        if isinstance(module, nn.Embedding):
            vars(module).pop("forward", None)


def _is_lost(weight: torch.Tensor, packed: Packed) -> bool:
    """Whether the packed numbers are the only ones: also where the caller has since made other NaN of NaN."""
    if is_given_up(weight):
        return True
    return weight.shape == packed.shape and bool(weight[:1, :1].isnan().any() and weight.isnan().all())


def pack_again(model: nn.Module) -> None:
    """Pack anew the weights that were copied. Those that were given up are what they are."""
    done: dict[int, Packed | None] = {}
    for module in model.modules():
        packed: Packed | None = vars(module).get("packed")
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


def _packed_anew(packed: Packed, weight: torch.Tensor) -> Packed | None:
    if weight.dtype not in DTYPES or weight.device.type != "cpu" or weight.dim() != 2:
        return None
    if weight.shape != packed.shape or weight.dtype != packed.numbers.dtype:
        return Packed(weight)
    packed.fill(weight)
    return packed


def is_given_up(weight: torch.Tensor) -> bool:
    """Whether a weight is what `pack` leaves of one that it has moved."""
    if weight.layout != torch.strided or weight.stride() != (0, 0) or not weight.numel():
        return False
    with torch.inference_mode(weight.is_inference()):
        return bool(weight[0, 0].isnan())
