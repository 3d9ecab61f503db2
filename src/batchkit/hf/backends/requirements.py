"""What attention kernels for GPUs ask of a layer, said once for all backends that call some."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Collection

    from .base import LayerSpec

__all__ = ["unmet"]

_DTYPES = (torch.float16, torch.bfloat16)
_CAPABILITY = (8, 0)


def unmet(layer: LayerSpec, *, devices: Collection[str], widths: Collection[int], said: str) -> list[str]:
    """Why kernels in half precision, for plain scores and one width of keys and values, cannot compute a layer.

    Args:
        layer: the layer.
        devices: types of devices that have the kernels. Of "cuda", compute capability 8.0 and up.
        widths: of heads that there are kernels for.
        said: the same in words.
    """
    reasons = []
    if layer.device.type not in devices:
        reasons.append(f"it needs a CUDA device, and the model is on {layer.device}")
    elif layer.device.type == "cuda":
        found = torch.cuda.get_device_capability(layer.device)
        if found < _CAPABILITY:
            reasons.append(
                f"it needs compute capability {_version(_CAPABILITY)}, and {layer.device} has {_version(found)}"
            )
    if layer.dtype not in _DTYPES:
        dtype = str(layer.dtype).removeprefix("torch.")
        reasons.append(f"it computes in float16 and bfloat16, and the model is in {dtype}")
    if layer.key_dim != layer.value_dim:
        reasons.append(f"keys and values have different widths, {layer.key_dim} and {layer.value_dim}")
    if layer.key_dim not in widths:
        reasons.append(f"heads have width {layer.key_dim}, and its kernels are for {said}")
    if layer.softcap is not None:
        reasons.append("scores are soft-capped")
    if layer.has_sinks:
        reasons.append("there are attention sinks")
    return reasons


def _version(pair: tuple[int, int]) -> str:
    return ".".join(map(str, pair))
