"""Attention over the KV pool: the protocol in `base`, one implementation per module beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import UnsupportedModel
from .reference import ReferenceBackend
from .xformers import XformersBackend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .base import AttentionBackend, LayerSpec

__all__ = ["choose_backend"]

_BACKENDS: dict[str, type[AttentionBackend]] = {kind.name: kind for kind in (ReferenceBackend, XformersBackend)}


def choose_backend(wanted: AttentionBackend | str | None, layers: Sequence[LayerSpec], model: str) -> AttentionBackend:
    """The backend for these layers.

    Args:
        wanted: a backend, its name, or None for the reference: the others have not been seen on a device yet.
        layers: from the probe.
        model: the model's name, for messages.

    Raises:
        ValueError: no backend has this name.
        UnsupportedModel: the backend wanted does not support the layers, with every reason.
    """
    if isinstance(wanted, str) and wanted not in _BACKENDS:
        raise ValueError(f"attention must be a backend or one of {', '.join(map(repr, _BACKENDS))}, got {wanted!r}")
    chosen = ReferenceBackend.name if wanted is None else wanted
    backend = _BACKENDS[chosen]() if isinstance(chosen, str) else chosen
    reasons = backend.unsupported_reasons(layers)
    if reasons:
        raise UnsupportedModel(model, [f"attention backend {backend.name}: {reason}" for reason in reasons])
    return backend
