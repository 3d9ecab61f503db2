"""Libraries that are built where they run: once, whatever else happens at the same time, or not at all and why."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch  # noqa: F401 - brings the OpenMP that libraries use

import batchkit.hf.backends.native as native
from batchkit.hf.backends.native import BuildError, cache_folder, load

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("c++") is None, reason="there is no C++ compiler, or no Linux"
)

SUM = """
    #include <cstdint>
    extern "C" int64_t sum_to(int64_t n, int threads) {
        int64_t total = 0;
    #pragma omp parallel for num_threads(threads) reduction(+ : total)
        for (int64_t i = 1; i <= n; i++) total += i;
        return total;
    }
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file, an empty cache, and a compiler that counts what it compiles."""
    monkeypatch.setenv("BATCHKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(native, "_found", {})
    compiler = tmp_path / "c++"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *" -c "*) echo "$*" >> {tmp_path}/compiled;; esac\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    path = tmp_path / "sum.cpp"
    path.write_text(textwrap.dedent(SUM))
    return path


def compilations(source: Path) -> list[str]:
    record = source.with_name("compiled")
    return record.read_text().splitlines() if record.exists() else []


def in_cache() -> list[str]:
    return sorted(path.name for path in cache_folder().iterdir() if path.suffix != ".lock")


def test_it_computes(source: Path) -> None:
    library = load(source)
    assert library.sum_to(1000, 1) == library.sum_to(1000, 3) == 500500
    (name,) = in_cache()
    assert name.startswith("sum-") and name.endswith(".so")


def test_what_is_built_is_not_built_again(source: Path, monkeypatch) -> None:
    for _ in range(3):
        monkeypatch.setattr(native, "_found", {})  # as in another process
        load(source)
    assert len(compilations(source)) == 1


def test_other_source_flags_and_compilers_are_built(source: Path, monkeypatch) -> None:
    load(source)
    load(source, ["-DOTHER"])
    assert len(compilations(source)) == 2 and "-DOTHER" in compilations(source)[1]
    monkeypatch.setattr(native, "_found", {})
    source.write_text(source.read_text().replace("total += i", "total += 2 * i"))
    assert load(source).sum_to(1000, 1) == 1001000
    newer = source.with_name("newer")
    newer.write_text('#!/bin/sh\n[ "$1" = --version ] && echo newer || exec c++ "$@"\n')
    newer.chmod(0o755)
    monkeypatch.setenv("CXX", str(newer))
    monkeypatch.setattr(native, "_found", {})
    load(source)
    assert len(in_cache()) == 4


def test_another_header_is_built(source: Path, monkeypatch) -> None:
    header = source.with_name("more.h")
    source.write_text(f'#include "more.h"\n{source.read_text().replace("return total", "return total + MORE")}')
    for more in (1, 2):
        header.write_text(f"#define MORE {more}\n")
        monkeypatch.setattr(native, "_found", {})
        assert load(source).sum_to(10, 1) == 55 + more


def test_what_is_kept_and_does_not_load_is_built_again(source: Path) -> None:
    assert in_other_processes(source, 1) == [0]
    (name,) = in_cache()
    (cache_folder() / name).write_bytes(b"")
    assert load(source).sum_to(10, 1) == 55
    assert len(compilations(source)) == 2


def test_a_compiler_with_arguments(source: Path, monkeypatch) -> None:
    monkeypatch.setenv("CXX", f"{os.environ['CXX']} -DFROM_CXX")
    load(source)
    assert "-DFROM_CXX" in compilations(source)[0]


def in_other_processes(source: Path, count: int) -> list[int]:
    """Exit statuses of processes that load the library at the same time."""
    code = (
        "import sys, torch; from pathlib import Path; from batchkit.hf.backends.native import load\n"
        "assert load(Path(sys.argv[1])).sum_to(1000, 2) == 500500\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, str(source)]) for _ in range(count)]
    return [process.wait(120) for process in running]


def test_processes_at_once_build_it_once(source: Path) -> None:
    assert in_other_processes(source, 3) == [0, 0, 0]
    assert len(compilations(source)) == 1 and len(in_cache()) == 1


def test_without_locks_it_is_built_all_the_same(source: Path, monkeypatch) -> None:
    def refuses(file: object, operation: int) -> None:
        raise OSError("No locks available")

    monkeypatch.setattr("fcntl.flock", refuses)
    assert load(source).sum_to(10, 1) == 55
    assert len(in_cache()) == 1


def test_no_compiler(source: Path, monkeypatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    with pytest.raises(BuildError, match=r"there is no C\+\+ compiler 'no-such-compiler'"):
        load(source)


def test_an_error_is_told_once_it_is_found(source: Path) -> None:
    source.write_text('extern "C" int wrong() { return nothing_of_this_name; }\n')
    for _ in range(2):
        with pytest.raises(BuildError, match=r"c\+\+ fails: .*nothing_of_this_name.* was not declared") as caught:
            load(source)
        assert "\n" not in str(caught.value)
    assert len(compilations(source)) == 1 and in_cache() == []


def test_what_does_not_load(source: Path) -> None:
    source.write_text('extern "C" int nowhere(); extern "C" int wrong() { return nowhere(); }\n')
    with pytest.raises(BuildError, match=r"what was compiled does not load: .*undefined symbol: nowhere"):
        load(source)
    assert in_cache() == []


@pytest.mark.parametrize("taken_by", ["a file", "a folder that cannot be written"])
def test_a_cache_that_cannot_be_written(source: Path, taken_by: str, monkeypatch) -> None:
    folder = cache_folder()
    if taken_by == "a file":
        folder.write_text("")
    else:
        folder.mkdir()
        real = Path.open

        def refuses(path: Path, mode: str = "r", *rest: object, **more: object):
            # Not by its mode: the tests may run as root, who writes anywhere.
            if path.parent == folder and "w" in mode:
                raise PermissionError(13, "Permission denied", str(path))
            return real(path, mode, *rest, **more)

        monkeypatch.setattr(Path, "open", refuses)
    assert load(source).sum_to(10, 1) == 55
    assert len(compilations(source)) == 1
    assert folder.is_file() or in_cache() == []


@pytest.mark.parametrize("named", ["c++ '", '""', "no-such-compiler"])
def test_a_compiler_that_is_not_one(source: Path, named: str, monkeypatch) -> None:
    monkeypatch.setenv("CXX", named)
    with pytest.raises(BuildError, match="CXX"):
        load(source)


class TestProcessorFlags:
    """What is asked of the compiler, by what the processor says that it has and what the compiler knows."""

    USUAL = native._PROCESSORS["AVX512"]
    BF16 = (*USUAL, *native._BF16_FLAGS)
    TILES = (*BF16, *native._TILE_FLAGS)

    def found(self, monkeypatch: pytest.MonkeyPatch, *has: str, knows: str = "", may: bool = True) -> tuple[str, ...]:
        def load(source: Path, flags: tuple[str, ...]) -> None:
            if not {flag for flag in flags if flag not in self.USUAL} <= set(knows.split()):
                raise BuildError("unknown flag")

        monkeypatch.setattr(native, "load", load)
        monkeypatch.setattr("batchkit.hf.loading.cpu_flags", lambda: frozenset(has))
        monkeypatch.setattr(native, "_may_use_tiles", lambda: may)
        return native._processor_flags.__wrapped__("AVX512")  # type: ignore[no-any-return,attr-defined]

    def test_all_that_both_know(self, monkeypatch: pytest.MonkeyPatch) -> None:
        everything = " ".join(self.TILES)
        tiles = ("avx512_bf16", "amx_tile", "amx_bf16")
        assert self.found(monkeypatch, *tiles, knows=everything) == self.TILES
        assert self.found(monkeypatch, *tiles, knows=everything, may=False) == self.BF16
        assert self.found(monkeypatch, *tiles, knows=" ".join(self.BF16)) == self.BF16
        assert self.found(monkeypatch, *tiles) == self.USUAL
        assert self.found(monkeypatch, "avx512_bf16", knows=everything) == self.BF16
        assert self.found(monkeypatch, "avx512f", knows=everything) == self.USUAL

    @pytest.mark.parametrize("more", [native._BF16_FLAGS, (*native._BF16_FLAGS, *native._TILE_FLAGS)])
    @pytest.mark.parametrize("name", ["linear", "decoder"])
    def test_kernels_compile(self, name: str, more: tuple[str, ...], source: Path, monkeypatch) -> None:
        """Whatever processor this one is: to load them is not to run them."""
        monkeypatch.delenv("CXX")
        try:
            load(source, more)
        except BuildError:
            pytest.skip("this compiler does not know the processor")
        load(native._KERNELS / f"{name}.cpp", (*self.USUAL, *more))


def test_nowhere_to_write(source: Path, monkeypatch) -> None:
    def refuses(*rest: object, **more: object) -> None:
        raise FileNotFoundError(2, "No usable temporary directory found")

    cache_folder().write_text("")
    monkeypatch.setattr("tempfile.TemporaryDirectory", refuses)
    with pytest.raises(BuildError, match="No usable temporary directory found"):
        load(source)


def test_without_the_openmp_of_torch_the_compilers_own_is_linked(source: Path) -> None:
    # The module by itself: its package would bring torch along.
    code = (
        "import sys; from importlib.util import module_from_spec, spec_from_file_location; from pathlib import Path\n"
        f"spec = spec_from_file_location('native', {native.__file__!r})\n"
        "native = module_from_spec(spec); spec.loader.exec_module(native)\n"
        "assert native.load(Path(sys.argv[1])).sum_to(1000, 2) == 500500\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(source)], check=True, timeout=120)
    assert len(in_cache()) == 1


def test_where_it_is_kept(monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("BATCHKIT_CACHE", raising=False)
    assert cache_folder() == Path("/home/somebody/.cache/batchkit")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_folder() == Path("/caches/batchkit")
    monkeypatch.setenv("BATCHKIT_CACHE", "/own")
    assert cache_folder() == Path("/own")
