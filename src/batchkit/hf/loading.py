"""Loads a model and its tokenizer the quick and quiet way."""

from __future__ import annotations

import functools
import logging
import os
import platform
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from transformers import PreTrainedModel

    from .tokenizer import HFTokenizer

__all__ = ["cpu_flags", "default_device", "load_model", "load_weights", "model_path"]

logger = logging.getLogger("batchkit")


def load_model(
    name_or_path: str | os.PathLike[str], *, device: str | torch.device | None = None, dtype: str | torch.dtype = "auto"
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
        ValueError: not a causal language model, or no such dtype.
    """
    from transformers import AutoTokenizer

    from .tokenizer import HFTokenizer

    model = load_weights(name_or_path, device=device, dtype=dtype)
    return model, HFTokenizer(AutoTokenizer.from_pretrained(model_path(name_or_path)))


def model_path(name_or_path: str | os.PathLike[str]) -> str:
    """What transformers is to load: a folder, with ``~`` resolved, or a name on the hub.

    Raises:
        FileNotFoundError: it is a path, and there is no such folder; it is never taken for a name on the hub.
    """
    path = os.path.expanduser(name_or_path)
    if (os.path.isabs(path) or path.startswith(".")) and not os.path.isdir(path):
        raise FileNotFoundError(f"there is no folder {name_or_path}")
    return path


def load_weights(
    name_or_path: str | os.PathLike[str], *, device: str | torch.device | None = None, dtype: str | torch.dtype = "auto"
) -> PreTrainedModel:
    """The model of `load_model` without a tokenizer; arguments and errors are the same."""
    import torch
    from transformers import AutoModelForCausalLM

    path = model_path(name_or_path)
    if isinstance(dtype, str) and dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f'dtype must be "auto", or the name of a torch dtype such as "float32", got {dtype!r}')
    with _no_progress_bar():
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    model = model.to(default_device() if device is None else device).eval()
    is_half = model.device.type == "cpu" and model.dtype in (torch.bfloat16, torch.float16)
    if is_half and not _has_half_units() and not _has_kernels():
        logger.warning(
            '%s on a CPU that has no units for it is slow: dtype="float32" is faster',
            str(model.dtype).removeprefix("torch."),
        )
    return model


def _has_half_units() -> bool:
    """Whether this CPU multiplies matrices in bfloat16 natively; True where it does not say."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    flags = cpu_flags()
    return not flags or "avx512_bf16" in flags or "amx_bf16" in flags


def _has_kernels() -> bool:
    from .backends.native import BuildError, kernels

    try:
        kernels("linear")
    except BuildError:
        return False
    return True


@functools.cache
def cpu_flags() -> frozenset[str]:
    """The words with which the system describes its CPUs; none where it does not."""
    try:
        return frozenset(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split())
    except OSError:
        return frozenset()


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
