"""Versions of what torch was built with, the devices, and the attention backends."""

from __future__ import annotations

import os

import torch

from ..machine import usable_cpus
from .backends import ON_CPU, ON_CUDA
from .backends.native import BuildError, cache_folder, kernels, multiplies_bfloat16
from .kv_pool import free_memory
from .loading import default_device

__all__ = ["describe", "limit_threads", "num_threads"]

_GIB = 1 << 30


def describe() -> list[tuple[str, str]]:
    """Names and what is to be said of each, for people."""
    has_kernels, found = _cpu_kernels()
    on_cuda = ", else ".join(kind.name for kind in ON_CUDA)
    on_cpu = ", else ".join(kind.name for kind in ON_CPU) if has_kernels else "reference"
    return [
        ("torch CPU", f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"),
        ("torch CUDA", torch.version.cuda or "built without"),
        *(("device", text) for text in _devices()),
        ("default device", default_device()),
        ("CPU kernels", found),
        ("attention", f"{on_cpu} on CPUs, {on_cuda} on CUDA devices, where it computes a model right; else reference"),
    ]


def _cpu_kernels() -> tuple[bool, str]:
    """Whether there are any, and what is to be said of them."""
    try:
        kernels("attention")
        has_units = multiplies_bfloat16()
    except BuildError as error:
        return False, f"none: {error}"
    made = f"for {torch.backends.cpu.get_cpu_capability()}" + (" and its bfloat16" if has_units else "")
    if any(cache_folder().glob("attention-*.so")):
        return True, f"compiled {made}, in {cache_folder()}"
    return True, f"compiled {made} anew in every process: they cannot be kept in {cache_folder()}"


def limit_threads() -> None:
    """Have torch use no more threads than can run at a time, unless OMP_NUM_THREADS says how many.

    For programs that own their process, such as the command line; the library never calls it.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(torch.get_num_threads(), usable_cpus()))


def num_threads() -> int:
    """How many threads torch computes with on the CPU."""
    return torch.get_num_threads()


def _devices() -> list[str]:
    found = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        free = torch.cuda.mem_get_info(index)[0]
        found.append(
            f"cuda:{index}, {device.name}, compute capability {device.major}.{device.minor}, "
            f"{free / _GIB:.1f} of {device.total_memory / _GIB:.1f} GiB free"
        )
    names = ["mps"] if torch.backends.mps.is_available() else []
    for name in [*names, "cpu"]:
        free_bytes = free_memory(torch.device(name))
        found.append(name if free_bytes is None else f"{name}, {free_bytes / _GIB:.1f} GiB free")
    return found
