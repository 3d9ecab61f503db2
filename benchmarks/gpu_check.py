"""What a GPU does with batchkit: whether it is right, how fast a decode step is, and what the policies make of it.

`gpu_check.sh` runs this with the path set. The parts, each of which may fail without the others:

* ``tests``: tests/gpu.
* ``device``: the bandwidth of a copy within the device's memory, and the speed of a matrix product.
* ``decode``: seconds of a decode step, through the runner's `execute`, beside the time in which the device can read the
  weights once. Models have random weights, made on the device. A step is measured from an idle device until it is idle
  again; the median of up to 20 after 3 that do not count.
* ``throughput``: the 2023 experiment's loads (`original.py`), of as many requests as there is time for, under every
  policy, beside what the simulator says of the same load. All policies have one runner, whose kernels and graphs were
  made before. The model has a quarter of OPT-13B's layers, since of the whole one there is no time for a static batch
  at the greatest cap; what a layer takes, and so the policies' factors, is the same.

There is a time budget. What does not fit is named at the end, with what is missing and what failed. The exit code is 1
if something failed.

    python benchmarks/gpu_check.py [--json FILE] [--skip tests,decode,throughput] [--budget-s 450]

``--device cpu --tiny`` is a rehearsal: it tries this script, and says nothing about a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import batchkit
from batchkit.costs import ModelShape
from batchkit.experiment.tables import table
from batchkit.hf.runner import TransformersRunner
from batchkit.hf.shape import model_shape
from gpu_rig import (
    BACKENDS,
    LAYERS,
    PARTS,
    ROOT,
    SHAPES,
    Check,
    build,
    execute,
    make_runner,
    make_step,
    median_s,
    say,
    shape_folder,
    warned,
    weights_read,
)
from gpu_throughput import throughput

TESTS_IN_REHEARSAL = "(llama or mistral) and bfloat16 or swapping"


def versions(check: Check) -> dict[str, Any]:
    """Of everything that matters, and what the device is."""
    known: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    for name in ("triton", "xformers", "transformers", "numpy"):
        try:
            known[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            known[name] = None
            check.lacks(f"{name} is not installed")
    known["batchkit"] = batchkit.__version__
    known["device"] = str(check.device)
    if check.device.type == "cuda":
        properties = torch.cuda.get_device_properties(check.device)
        known["device"] = properties.name
        known["capability"] = f"{properties.major}.{properties.minor}"
        known["memory_bytes"] = properties.total_memory
        known["driver"] = _driver()
    return known


def _driver() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.split("\n")[0].strip() or None


def tests(check: Check) -> dict[str, Any]:
    """Run tests/gpu in a process of its own, whose memory is free again afterwards."""
    if importlib.util.find_spec("pytest") is None:
        check.lacks("pytest is not installed: tests/gpu were not run")
        return {"outcome": "not run"}
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-rs", "-p", "no:cacheprovider", "--tb=short"]
    # The whole suite's conftest asks for packages that are not needed here.
    command += ["--confcutdir=tests/gpu", *(["-k", TESTS_IN_REHEARSAL] if check.is_rehearsal else [])]
    if importlib.util.find_spec("xdist") is not None and not check.is_rehearsal:
        command += ["-n", "4"]  # compilers take most of the time
    environment = {**os.environ, "BATCHKIT_GPU_TESTS_DEVICE": "cpu"} if check.is_rehearsal else None
    limit = check.left_s("tests")
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"tests/gpu took longer than {limit:.0f} s and were ended") from None
    lines = done.stdout.strip().splitlines() or [""]
    if done.returncode:
        say("\n".join(lines[-60:]) + done.stderr[-4000:])
        raise RuntimeError(f"tests/gpu: {lines[-1]}")
    return {"outcome": lines[-1], "skipped": [line for line in lines if line.startswith("SKIPPED")]}


def device_speed(check: Check) -> dict[str, float]:
    """Bytes per second of a copy, read and written ones together; operations per second of a product in bfloat16."""
    size, side = check.sizes.copied, check.sizes.product
    memory = torch.zeros(2, size, dtype=torch.uint8, device=check.device)
    bandwidth = 2 * size / median_s(check, lambda: memory[0].copy_(memory[1]))
    factors = torch.randn(2, side, side, dtype=torch.bfloat16, device=check.device)
    flops = 2 * side**3 / median_s(check, lambda: factors[0] @ factors[1])
    return {"bandwidth": bandwidth, "flops": flops}


def fitting_tokens(check: Check, shape: ModelShape) -> int:
    """Tokens of the KV memory: what the greatest step needs, or what there is room for beside its other memory."""
    wanted = max(check.sizes.batches) * check.sizes.context
    if check.device.type != "cuda":
        return wanted
    free, total = torch.cuda.mem_get_info(check.device)
    return min(wanted, int(free - 0.15 * total) // shape.kv_bytes_per_token)


def decode(check: Check, scratch: Path) -> list[dict[str, Any]]:
    """Every shape, backend, layout and batch, with graphs and without."""
    cells: list[dict[str, Any]] = check.found.setdefault("decode", [])
    for number, name in enumerate(SHAPES):
        until = time.monotonic() + check.left_s("decode") / (len(SHAPES) - number)
        with check.attempt(f"decode of {name}"):
            _decode_shape(check, shape_folder(check, name, scratch), cells, until)
    return cells


def _decode_shape(check: Check, folder: Path, cells: list[dict[str, Any]], until: float) -> None:
    model, shape = build(check, folder), model_shape(folder, dtype="bfloat16")
    size = check.sizes.block_size
    blocks = fitting_tokens(check, shape) // size
    bandwidth = check.found.get("device", {}).get("bandwidth")
    # What matters most comes first, in case that time is up. The reference has nothing that could be captured.
    modes = [(attention, False) for attention in BACKENDS]
    if check.device.type == "cuda":
        modes = [(attention, True) for attention in BACKENDS if attention != "reference"] + modes
    for attention, graphs in modes:
        title = f"decode of {folder.name} by {attention}{' with graphs' if graphs else ''}"
        with check.attempt(title), warned() as warnings:
            runner = make_runner(check, model, attention, cuda_graphs=graphs, num_kv_blocks=blocks, block_size=size)
            if runner is None:
                continue
            with contextlib.closing(runner):
                # What memory holds at first may be no number, and the sampler refuses those.
                runner._pool.fill(0.01)  # type: ignore[union-attr]
                for batch, layout in itertools.product(check.sizes.batches, ("paged", "contiguous")):
                    what = f"{title}, {batch} rows, {layout}"
                    context = min(check.sizes.context, blocks // batch * size)
                    if time.monotonic() > until or not context:
                        why = "no time is left" if context else f"{blocks} KV blocks are not one for each row"
                        check.leave_out(f"{what}: {why}")
                        continue
                    with check.attempt(what):
                        seconds = _decode_s(check, runner, batch, context, contiguous=layout == "contiguous")
                        say(f"{what}: {1e3 * seconds:.2f} ms")
                        read = weights_read(model)
                        both = read + batch * context * shape.kv_bytes_per_token
                        cells.append(
                            {
                                "model": folder.name,
                                "batch": batch,
                                "context": context,
                                "attention": attention,
                                "layout": layout,
                                "graphs": graphs and warnings.fallback is None,
                                "fallback": warnings.fallback,
                                "ms": 1e3 * seconds,
                                "weights_floor_ms": 1e3 * read / bandwidth if bandwidth else None,
                                "floor_ms": 1e3 * both / bandwidth if bandwidth else None,
                            }
                        )


def _decode_s(check: Check, runner: TransformersRunner, batch: int, context: int, *, contiguous: bool) -> float:
    step = make_step(batch, context, runner.geometry.block_size, contiguous=contiguous)
    return median_s(check, lambda: execute(runner, step))


def show(check: Check) -> str:
    """Everything as text."""
    found = check.found
    lines = []
    if check.is_rehearsal:
        lines += ["REHEARSAL: this tries the script. It says nothing about a GPU.", ""]
    lines.append(", ".join(f"{name} {value}" for name, value in found.get("versions", {}).items()))
    if "tests" in found:
        lines.append(f"tests/gpu: {found['tests']['outcome']}")
    if "device" in found:
        speed = found["device"]
        lines.append(f"copy {speed['bandwidth'] / 1e9:,.0f} GB/s, product {speed['flops'] / 1e12:,.1f} TFLOP/s")
    rows = _decode_rows(found.get("decode", [])) + _throughput_rows(found.get("throughput", []))
    if rows:
        lines += ["", table(("what", "rows or n", "how", "measured", "floor or simulated", "ratio"), rows), LEGEND]
    for title, items in (
        ("Goals", goals(check)),
        ("Missing", check.missing),
        ("Left out", check.cut),
        ("Failed", [f"{what}: {error}" for what, error in check.errors.items()]),
    ):
        if items:
            lines += ["", f"{title}:", *(f"  {item}" for item in items)]
    return "\n".join(lines)


LEGEND = """\
decode: rows of one step; milliseconds; floor: the weights read once, then the KV too, at the copy's bandwidth; ratio to
each. throughput: requests; prompt and generated tokens per second; the factor to static-global that the simulator
gives; ratio: the factor measured."""


def _decode_rows(cells: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    return [
        (
            f"decode {one['model']}, context {one['context']:,}",
            str(one["batch"]),
            f"{one['attention']} {one['layout']} {'graphs' if one['graphs'] else 'eager'}",
            f"{one['ms']:.2f} ms",
            f"{one['weights_floor_ms']:.2f}, {one['floor_ms']:.2f}" if one["floor_ms"] else "-",
            f"{one['ms'] / one['weights_floor_ms']:.2f}x, {one['ms'] / one['floor_ms']:.2f}x"
            if one["floor_ms"]
            else "-",
        )
        for one in sorted(cells, key=lambda one: (one["model"], one["batch"]))
    ]


def _throughput_rows(cells: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    return [
        (
            f"throughput, {one['layers']} layers, cap {one['cap']}, KV {one['pool']:,}",
            str(one["requests"]),
            f"{one['policy']} ({one['attention']} {'graphs' if one['graphs'] else 'eager'})",
            f"{one['tokens_per_s']:,.0f} tok/s",
            _times(one["simulated_factor"]),
            _times(one["factor"]),
        )
        for one in cells
    ]


def _times(factor: float | None) -> str:
    return "-" if factor is None else f"{factor:.2f}x"


def goals(check: Check) -> list[str]:
    """What is to be reached, and whether it was."""
    cells = check.found.get("decode", [])
    lines = []

    def with_graphs(**wanted: Any) -> dict[str, dict[str, Any]]:
        """By backend, of OPT-13B."""
        wanted |= {"model": SHAPES[0], "graphs": True}
        return {one["attention"]: one for one in cells if all(one[key] == value for key, value in wanted.items())}

    def verdict(goal: str, ratios: dict[str, float], most: float) -> None:
        said = [f"{name} {ratio:.2f}x: {'met' if ratio <= most else 'missed'}" for name, ratio in ratios.items()]
        lines.append(f"{goal}: {'not measured' if check.is_rehearsal or not said else ', '.join(said)}")

    for batch in (1, 16):
        paged = with_graphs(batch=batch, layout="paged")
        ratios = {
            f"{name} ({one['ms'] / one['floor_ms']:.2f}x of reading the KV too)": one["ms"] / one["weights_floor_ms"]
            for name, one in paged.items()
            if one["floor_ms"]
        }
        verdict(f"{SHAPES[0]}, {batch} rows, graphs, within 1.35x of reading the weights", ratios, 1.35)
    paged, contiguous = (with_graphs(batch=64, layout=layout) for layout in ("paged", "contiguous"))
    ratios = {name: one["ms"] / contiguous[name]["ms"] for name, one in paged.items() if name in contiguous}
    verdict(f"{SHAPES[0]}, 64 rows, graphs, paged within 1.15x of contiguous", ratios, 1.15)
    factors = [one for one in check.found.get("throughput", []) if one["factor"] is not None]
    near = sum(abs(one["factor"] / one["simulated_factor"] - 1) <= 0.15 for one in factors)
    said = f"{near} of {len(factors)} are: {'met' if near == len(factors) else 'missed'}"
    lines.append(
        f"factors of the policies within 15 % of the simulator's: "
        f"{'not measured' if check.is_rehearsal or not factors else said}"
    )
    return lines


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check and measure batchkit on a GPU.")
    parser.add_argument("--json", type=Path, help="gets everything that was found")
    parser.add_argument("--skip", default="", help=f"parts that are not run, comma-separated: {', '.join(PARTS)}")
    parser.add_argument("--budget-s", type=float, default=450.0, help="seconds for everything")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of OPT-13B's 40, in the throughput experiment")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a rehearsal")
    parser.add_argument("--tiny", action="store_true", help="tiny models, for a rehearsal")
    args = parser.parse_args(arguments)
    args.skip = [name for name in args.skip.split(",") if name]
    if unknown := set(args.skip) - set(PARTS):
        parser.error(f"--skip: unknown {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if not set(PARTS) - set(args.skip):
        parser.error("--skip: nothing is left to run")
    if not 1 <= args.layers <= 40:
        parser.error(f"--layers: OPT-13B has 40, got {args.layers}")
    if args.device != "cuda" and not args.tiny:
        parser.error("without a GPU only --tiny is reasonable: a rehearsal")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; --device cpu --tiny is a rehearsal without one")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_args(arguments)
    transformers.utils.logging.set_verbosity_error()
    check = Check(torch.device(args.device), tiny=args.tiny, skip=args.skip, budget_s=args.budget_s, layers=args.layers)

    def write() -> None:
        if args.json is not None:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(check.to_json(), indent=1) + "\n", encoding="utf-8")

    with check.attempt("versions"):
        check.found["versions"] = versions(check)
    with tempfile.TemporaryDirectory() as scratch:
        acts: dict[str, Callable[[], Any]] = {
            "tests": lambda: tests(check),
            "device": lambda: device_speed(check),
            "decode": lambda: decode(check, Path(scratch)),
            "throughput": lambda: throughput(check, Path(scratch)),
        }
        for part in check.parts:
            say(f"{part}: up to {check.left_s(part):.0f} s")
            with check.attempt(part):
                check.found[part] = acts[part]()
            write()
    print(show(check))
    return 1 if check.errors else 0


if __name__ == "__main__":
    sys.exit(main())
