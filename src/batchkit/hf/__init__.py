"""Everything that needs torch and transformers. Names are imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .loading import load_model as load_model
    from .runner import TransformersRunner as TransformersRunner
    from .tokenizer import HFTokenizer as HFTokenizer

_HOMES = {"HFTokenizer": ".tokenizer", "TransformersRunner": ".runner", "load_model": ".loading"}

__all__ = ["HFTokenizer", "TransformersRunner", "load_model"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home, __name__), name)
