"""Attention over the KV pool: the protocol in `base`, one implementation per module beside it, and which one is used.

A backend is used if it has nothing against the layers (`AttentionBackend.unsupported_reasons`) and has just computed
them right (`trial`). Where nobody says which one, the first of those for the device that qualifies for all layers is
taken, or else the reference.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ...errors import UnsupportedModel
from .cpu import CpuBackend
from .reference import ReferenceBackend
from .trial import faults
from .varlen import VarlenBackend
from .xformers import XformersBackend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .base import AttentionBackend, LayerSpec

logger = logging.getLogger("batchkit")

__all__ = ["NAMES", "ON_CPU", "ON_CUDA", "block_size_for", "choose_backend"]

ON_CUDA: tuple[type[AttentionBackend], ...] = (XformersBackend, VarlenBackend)
"""Backends for CUDA devices, the preferred one first."""
ON_CPU: tuple[type[AttentionBackend], ...] = (CpuBackend,)
"""Backends for the CPU, the preferred one first."""
_KINDS: tuple[type[AttentionBackend], ...] = (*ON_CUDA, *ON_CPU, ReferenceBackend)
_BACKENDS = {kind.name: kind for kind in _KINDS}
NAMES = tuple(_BACKENDS)
"""What backends are called."""


def choose_backend(
    wanted: AttentionBackend | str | None, layers: Sequence[LayerSpec], model: str, *, block_size: int | None = None
) -> AttentionBackend:
    """The backend for these layers.

    Args:
        wanted: a backend, its name, or None for an automatic choice.
        layers: from the probe.
        model: the model's name, for messages.
        block_size: tokens per KV block; None: what suits the backend. One that cannot have it is not chosen
            automatically; a backend that is wanted is returned all the same.

    Raises:
        ValueError: no backend has this name.
        UnsupportedModel: the backend wanted cannot compute the layers, with every reason.
    """
    if wanted is None:
        return _automatic(layers, model, block_size)
    if isinstance(wanted, str) and wanted not in _BACKENDS:
        raise ValueError(f"attention must be a backend or one of {', '.join(map(repr, _BACKENDS))}, got {wanted!r}")
    backend = _BACKENDS[wanted]() if isinstance(wanted, str) else wanted
    reasons = _reasons(backend, layers, block_size)
    if reasons:
        raise UnsupportedModel(model, [f"attention backend {backend.name}: {reason}" for reason in reasons])
    return backend


def block_size_for(backend: AttentionBackend, wanted: int | None) -> int:
    """Tokens per KV block: those wanted, or what suits the backend.

    Raises:
        ValueError: the backend cannot have so many.
    """
    if not _takes(backend, wanted):
        raise ValueError(
            f"block_size must be a multiple of {backend.block_size_multiple} for attention backend {backend.name}, got "
            f"{wanted}"
        )
    return backend.default_block_size if wanted is None else wanted


def _automatic(layers: Sequence[LayerSpec], model: str, block_size: int | None) -> AttentionBackend:
    devices = {layer.device.type for layer in layers}
    kinds = ON_CUDA if "cuda" in devices else ON_CPU if "cpu" in devices else ()
    for backend in (*(kind() for kind in kinds), ReferenceBackend()):
        if _takes(backend, block_size):
            reasons = _reasons(backend, layers, block_size)
        else:
            reasons = [f"blocks of {block_size} tokens, and it needs a multiple of {backend.block_size_multiple}"]
        if not reasons:
            break
        logger.debug("%s: not attention backend %s: %s", model, backend.name, "; ".join(reasons))
    logger.info("%s: attention backend %s", model, backend.name)
    return backend


def _takes(backend: AttentionBackend, block_size: int | None) -> bool:
    return block_size is None or block_size % backend.block_size_multiple == 0


def _reasons(backend: AttentionBackend, layers: Sequence[LayerSpec], block_size: int | None) -> list[str]:
    """Why a backend cannot compute the layers, by its own account or else by trial."""
    reasons = backend.unsupported_reasons(layers)
    # What is made of the reference would be compared with itself.
    if reasons or isinstance(backend, ReferenceBackend):
        return reasons
    size = block_size if block_size is not None and _takes(backend, block_size) else backend.default_block_size
    return faults(backend, layers, size)
