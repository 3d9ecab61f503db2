"""Loads a model and its tokenizer the quick and quiet way."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from os import PathLike

    import torch
    from transformers import PreTrainedModel

    from .tokenizer import HFTokenizer

__all__ = ["default_device", "load_model", "load_weights"]


def load_model(
    name_or_path: str | PathLike[str], *, device: str | torch.device | None = None, dtype: str | torch.dtype = "auto"
) -> tuple[PreTrainedModel, HFTokenizer]:
    """Load a causal language model in eval mode, and its tokenizer.

    Args:
        name_or_path: a folder, or a name on the hub.
        device: where to put it. Default: `default_device`.
        dtype: ``"auto"`` is the one that the weights are stored in; else a dtype or its name, such as ``"float32"``.

    Returns:
        The model and a `HFTokenizer`.

    Raises:
        OSError: there is no such model.
        ValueError: not a causal language model.
    """
    from transformers import AutoTokenizer

    from .tokenizer import HFTokenizer

    model = load_weights(name_or_path, device=device, dtype=dtype)
    return model, HFTokenizer(AutoTokenizer.from_pretrained(name_or_path))


def load_weights(
    name_or_path: str | PathLike[str], *, device: str | torch.device | None = None, dtype: str | torch.dtype = "auto"
) -> PreTrainedModel:
    """The model of `load_model` without a tokenizer; arguments and errors are the same."""
    from transformers import AutoModelForCausalLM

    with _no_progress_bar():
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name_or_path, dtype=dtype)
    return model.to(default_device() if device is None else device).eval()


def default_device() -> str:
    """CUDA if there is one, else MPS, else the CPU."""
    import torch

    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Reading weights takes seconds; a bar for it is noise in a host program's output."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
