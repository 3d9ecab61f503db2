"""Builds libraries of C++ on the machine that runs them, once, and loads them: the kernels for x86 CPUs among them.

The compiler is called directly: the code includes neither torch nor Python, and compiles in seconds. What is built is
kept in a folder of the user's, under a name that says what it is made of, so that it is never out of date.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

logger = logging.getLogger("batchkit")

__all__ = ["BuildError", "cache_folder", "kernels", "load", "multiplies_bfloat16"]

_KERNELS = Path(__file__).with_name("kernels")
_PROCESSORS = {
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"),
}
"""What the compiler is told, by what torch says that the processor can do."""
_BF16_FLAGS = ("-mavx512bf16",)
_TILE_FLAGS = ("-mamx-tile", "-mamx-bf16")
"""Besides, where the processor multiplies bfloat16 itself. Compilers of before 2021 do not know all of them."""
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-ffp-contract=fast")
_LAST_LINES = 5
"""Of what a compiler says, so many lines are told: the error is among them."""

_lock = threading.Lock()
_found: dict[tuple[Path, tuple[str, ...]], ctypes.CDLL | str] = {}
"""The libraries, or why there are none."""


class BuildError(RuntimeError):
    """A library cannot be built or loaded; the message says why."""


def cache_folder() -> Path:
    """Where libraries are kept: ``$BATCHKIT_CACHE``, ``$XDG_CACHE_HOME/batchkit`` or ``~/.cache/batchkit``."""
    own = os.environ.get("BATCHKIT_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batchkit"


def kernels(name: str) -> ctypes.CDLL:
    """The library made of ``kernels/<name>.cpp``, for this processor.

    Raises:
        BuildError: this machine cannot have it.
    """
    import torch  # `load` does without

    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise BuildError(f"kernels are for Linux on x86-64, and this is {sys.platform} on {platform.machine()}")
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in _PROCESSORS:
        raise BuildError(f"kernels need AVX2, and torch finds the CPU capability {capability}")
    try:
        return load(_KERNELS / f"{name}.cpp", _processor_flags(capability))
    except BuildError as error:
        _warn(str(error))
        raise


def multiplies_bfloat16() -> bool:
    """Whether the kernels use instructions that multiply bfloat16.

    Raises:
        BuildError: there are no kernels.
    """
    import torch

    kernels("linear")
    return set(_BF16_FLAGS) <= set(_processor_flags(torch.backends.cpu.get_cpu_capability()))


@functools.cache
def _processor_flags(capability: str) -> tuple[str, ...]:
    """What the compiler is told of the processor: all that both know. It is one for all, which share packed weights."""
    from ..loading import cpu_flags

    usual = _PROCESSORS[capability]
    found = cpu_flags()
    more: list[tuple[str, ...]] = []
    if capability == "AVX512" and "avx512_bf16" in found:
        more = [_BF16_FLAGS]
        if {"amx_tile", "amx_bf16"} <= found and _may_use_tiles():
            more.insert(0, (*_BF16_FLAGS, *_TILE_FLAGS))
    for flags in more:
        try:
            load(_KERNELS / "linear.cpp", (*usual, *flags))
        except BuildError as error:
            logger.info("kernels do without %s: %s", " ".join(flags), error)
        else:
            return (*usual, *flags)
    return usual


def _may_use_tiles() -> bool:
    """Ask Linux for the processor's tiles (AMX), as every process that uses them has to."""
    syscall, arch_prctl, request_permission, tiles = ctypes.CDLL(None).syscall, 158, 0x1023, 18
    return bool(syscall(arch_prctl, request_permission, tiles) == 0)


@functools.cache
def _warn(reason: str) -> None:
    """Say once what somebody can do something about."""
    logger.warning("there are no C++ kernels for the CPU, and what takes their place is slower: %s", reason)


def load(source: Path, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """The library made of one file of C++ with OpenMP, compiled if this machine has not done so before.

    Args:
        source: the file. It may include headers beside it.
        flags: what the compiler is told besides the usual.

    Raises:
        BuildError: every time, if it has failed once in this process.
    """
    key = (source, tuple(flags))
    with _lock:
        if key not in _found:
            try:
                _found[key] = _load(source, flags)
            except (BuildError, OSError) as error:
                _found[key] = str(error)
        found = _found[key]
    if isinstance(found, str):
        raise BuildError(found)
    return found


def _load(source: Path, flags: Sequence[str]) -> ctypes.CDLL:
    named = os.environ.get("CXX", "").strip() or "c++"
    try:
        compiler = shlex.split(named)
    except ValueError as error:
        raise BuildError(f"the environment variable CXX is {named!r}, which is not a command: {error}") from error
    if shutil.which(compiler[0]) is None:
        raise BuildError(f"there is no C++ compiler {compiler[0]!r} (the environment variable CXX says which to use)")
    command = [*compiler, *_FLAGS, *flags]
    files = [source, *sorted(source.parent.glob("*.h"))]
    made_of = ([file.read_text() for file in files], command, _output([*compiler, "--version"]))
    name = f"{source.stem}-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}.so"
    kept = cache_folder() / name
    with contextlib.suppress(BuildError):
        return _open(kept)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with _alone(kept.with_suffix(".lock")):
            with contextlib.suppress(BuildError):
                return _open(kept)  # by another process
            _build(command, source, kept)
            return _open(kept)
    except OSError as error:
        logger.warning(
            "kernels cannot be kept in %s, and are compiled in every process: BATCHKIT_CACHE names another folder (%s)",
            kept.parent,
            error,
        )
        with tempfile.TemporaryDirectory() as folder:
            kept = Path(folder, name)
            _build(command, source, kept)
            return _open(kept)  # stays loaded without its file


def _build(command: Sequence[str], source: Path, library: Path) -> None:
    logger.info("compiling %s for this machine, once; it takes some seconds", source.name)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        compiled, linked = Path(folder, "compiled.o"), Path(folder, "linked.so")
        _output([*command, "-c", str(source), "-o", str(compiled)])
        # Left open, OpenMP is what torch has loaded: two of them would have twice the threads. With a torch that has
        # another kind, or none, the compiler's own is linked.
        _output([*command, "-fno-openmp", "-shared", str(compiled), "-o", str(linked)])
        try:
            _open(linked)
        except BuildError:
            _output([*command, "-shared", str(compiled), "-o", str(linked)])
            _open(linked)
        with linked.open("rb") as file:
            os.fsync(file.fileno())  # before it has its name: half a library would end the process that loads it
        linked.replace(library)


def _open(library: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise BuildError(f"what was compiled does not load: {error}") from error


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        said = " | ".join(line.strip() for line in done.stdout.splitlines()[-_LAST_LINES:])
        raise BuildError(f"{command[0]} fails: {said or f'exit status {done.returncode}'}")
    return done.stdout


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Wait until no other process is in here. Where files cannot be locked, nobody waits."""
    import fcntl  # not on Windows

    with lock.open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
