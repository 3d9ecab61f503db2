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

__all__ = ["load_model"]


def load_model(
    name_or_path: str | PathLike[str], *, device: str | torch.device | None = None, dtype: str | torch.dtype = "auto"
) -> tuple[PreTrainedModel, HFTokenizer]:
    """Load a causal language model in eval mode, and its tokenizer.

    Args:
        name_or_path: a folder, or a name on the hub.
        device: where to put it. Default: CUDA if there is one, else MPS, else the CPU.
        dtype: ``"auto"`` is the one that the weights are stored in; else a dtype or its name, such as ``"float32"``.

    Returns:
        The model and a `HFTokenizer`.

    Raises:
        OSError: there is no such model.
        ValueError: not a causal language model.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from .tokenizer import HFTokenizer

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    with _no_progress_bar():
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name_or_path, dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(name_or_path)
    return model.to(device).eval(), HFTokenizer(tokenizer)


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
