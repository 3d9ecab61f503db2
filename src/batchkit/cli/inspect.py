"""``batchkit env`` and ``batchkit doctor``: what is here, and whether a model comes out right on it."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from importlib import metadata

from ..errors import UnsupportedModel
from ..machine import usable_cpus
from .faults import NotDone, loading, one_line
from .options import DONE, NOT_DONE

__all__ = ["doctor", "env", "versions"]

_PACKAGES = ("torch", "transformers", "safetensors", "tokenizers", "numpy", "tqdm", "xformers", "triton")
# Units that decide how fast matrix products of each dtype are, by their names in /proc/cpuinfo.
_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")


def env() -> int:
    """Print versions, devices and the attention backend. Never fails over what is missing: it says so."""
    for name, text in (*versions().items(), *_hf()):
        print(f"{name:<18}{text}")
    return DONE


def versions() -> dict[str, str]:
    """What runs here, and on what, by name."""
    return {
        "batchkit": sys.modules["batchkit"].__version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "platform": platform.platform(),
        "CPU": _cpu(),
        **{name: _version(name) for name in _PACKAGES},
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cpu() -> str:
    parts = [platform.machine() or "unknown", f"{usable_cpus()} of {os.cpu_count()} cores usable"]
    from ..hf.loading import cpu_flags  # needs no torch

    flags = cpu_flags()
    return ", ".join([*parts, *(name for name in _FEATURES if name in flags)])


def _hf() -> list[tuple[str, str]]:
    """What only torch and transformers know."""
    try:
        from ..hf.environment import describe
    except Exception as error:  # a broken installation raises whatever it likes
        return [
            ("models", f"cannot run: {one_line(error)}"),
            ("", "the policies, the simulator and the checks run without; `pip install batchkit` brings the rest"),
        ]
    return describe()


def doctor(args: argparse.Namespace) -> int:
    """Check a model and print what was found. Returns the exit code."""
    with loading(args.model) as path:
        from ..hf.doctor import examine
        from ..hf.loading import load_weights

        model = load_weights(path, device=args.device, dtype=args.dtype)
    try:
        found = examine(model, seed=args.seed, attention=args.attention)
    except UnsupportedModel as error:
        print(f"{type(model).__name__} is refused:")
        for reason in error.reasons:
            print(f"  {reason}")
        return NOT_DONE
    except Exception as error:  # the model's own code
        raise NotDone(f"{type(model).__name__} cannot be examined: {one_line(error)}") from None
    for name, text in found.lines():
        print(f"{name:<18}{text}")
    return DONE if found.is_right else NOT_DONE
