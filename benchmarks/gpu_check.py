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
import gc
import importlib.metadata
import importlib.util
import itertools
import json
import logging
import math
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from typing_extensions import override

import batchkit
from batchkit import KVGeometry, ModelRunner, MonotonicClock, RooflineCost, SamplingParams, UnsupportedModel
from batchkit.clocks import Clock
from batchkit.costs import Device, ModelShape
from batchkit.experiment.compare import FIGURES, Run, run
from batchkit.experiment.loads import Requests, all_at_once, fixed, original
from batchkit.experiment.policies import POLICIES, Policy
from batchkit.experiment.tables import table
from batchkit.experiment.targets import Load, SimulatedTarget, Target
from batchkit.hf.runner import TransformersRunner
from batchkit.hf.shape import model_shape
from batchkit.types import BlockCopy, Request, SamplerOutput, ScheduledSequence, SchedulerOutput

ROOT = Path(__file__).resolve().parent.parent
PARTS = {"tests": 0.38, "device": 0.02, "decode": 0.28, "throughput": 0.32}
"""Shares of the time; what a part leaves goes to those after it."""
SHAPES = ("opt-13b", "llama-3-8b")
BACKENDS = ("xformers", "varlen", "reference")
BASELINE = "static-global"
LAYERS = 10
"""Of the model under the experiment."""
WARM_STEPS, STEPS, STEPS_S = 3, 20, 2.0
TESTS_IN_REHEARSAL = "(llama or mistral) and bfloat16 or swapping"
TINY = {
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
"""What of a configuration is made small, where it has it."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        batches, context: rows of a decode step, and tokens of each, the new one among them.
        block_size: of a decode step's KV; all backends can have it.
        copied: bytes.
        product: rows and columns of a matrix.
        pools, prompt, caps: tokens of the KV memory and of a prompt, and caps of the output, of the experiment.
        counts: requests of its loads; the most for which there is time.
    """

    batches: tuple[int, ...] = (1, 16, 64, 256)
    context: int = 1024
    block_size: int = 256
    copied: int = 4 << 30
    product: int = 8192
    pools: tuple[int, ...] = (15_700, 8_100)
    prompt: int = 512
    caps: tuple[int, ...] = (32, 128, 512, 1536)
    counts: tuple[int, ...] = (16, 24, 32, 48, 64, 96, 128)


SMALL = Sizes(
    batches=(1, 4),
    context=64,
    block_size=64,
    copied=1 << 22,
    product=128,
    pools=(600,),
    prompt=16,
    caps=(32,),
    counts=(8, 16),
)
"""For a rehearsal."""


class Check:
    """What was found so far, and how much time is left."""

    def __init__(
        self, device: torch.device, *, tiny: bool, skip: Sequence[str], budget_s: float, layers: int = LAYERS
    ) -> None:
        self.device = device
        self.sizes = SMALL if tiny else Sizes()
        self.layers = layers
        self.tiny = tiny
        self.errors: dict[str, str] = {}
        self.missing: list[str] = []
        self.cut: list[str] = []
        self.found: dict[str, Any] = {}
        self._started = time.monotonic()
        self._budget_s = budget_s
        self._parts = {name: share for name, share in PARTS.items() if name not in skip}

    @property
    def is_rehearsal(self) -> bool:
        """Whether nothing here says anything about a GPU."""
        return self.tiny or self.device.type != "cuda"

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of those that are run."""
        return tuple(self._parts)

    def left_s(self, part: str) -> float:
        """Seconds until a part must have ended."""
        names = list(self._parts)
        share = sum(self._parts[name] for name in names[: names.index(part) + 1]) / sum(self._parts.values())
        return self._started + share * self._budget_s - time.monotonic()

    @contextlib.contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Go on after whatever goes wrong inside."""
        try:
            yield
        except Exception as error:
            self.errors[what] = f"{type(error).__name__}: {error}"
            say(f"FAILED: {what}\n{traceback.format_exc()}")
        # Out here, where no traceback holds on to the tensors of a part that failed.
        self.tidy()

    def tidy(self) -> None:
        """Give the memory of what is gone back to the device."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def wait(self) -> None:
        """Until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def lacks(self, what: str) -> None:
        """Note what is missing, once."""
        if what not in self.missing:
            self.missing.append(what)
            say(f"missing: {what}")

    def leave_out(self, what: str) -> None:
        """Note what there was no time for."""
        self.cut.append(what)
        say(f"left out: {what}")

    def to_json(self) -> dict[str, Any]:
        """Everything."""
        return {
            "rehearsal": self.is_rehearsal,
            **self.found,
            "errors": self.errors,
            "missing": self.missing,
            "cut": self.cut,
            "seconds": time.monotonic() - self._started,
        }


def say(text: str) -> None:
    """Progress, apart from the table."""
    print(text, file=sys.stderr, flush=True)


# --- versions and tests -----------------------------------------------------------------------------------------------


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


# --- the device -------------------------------------------------------------------------------------------------------


def median_s(check: Check, act: Callable[[], Any]) -> float:
    """Seconds that something takes, from an idle device until it is idle again."""
    for _ in range(WARM_STEPS):
        act()
    samples: list[float] = []
    while len(samples) < STEPS and (len(samples) < 3 or sum(samples) < STEPS_S):
        check.wait()
        began = time.perf_counter()
        act()
        check.wait()
        samples.append(time.perf_counter() - began)
    return statistics.median(samples)


def device_speed(check: Check) -> dict[str, float]:
    """Bytes per second of a copy, read and written ones together; operations per second of a product in bfloat16."""
    size, side = check.sizes.copied, check.sizes.product
    memory = torch.zeros(2, size, dtype=torch.uint8, device=check.device)
    bandwidth = 2 * size / median_s(check, lambda: memory[0].copy_(memory[1]))
    factors = torch.randn(2, side, side, dtype=torch.bfloat16, device=check.device)
    flops = 2 * side**3 / median_s(check, lambda: factors[0] @ factors[1])
    return {"bandwidth": bandwidth, "flops": flops}


# --- models and runners -----------------------------------------------------------------------------------------------


def shape_folder(check: Check, name: str, scratch: Path, *, layers: int | None = None) -> Path:
    """A folder with the configuration of a model, or of one with fewer layers; for a rehearsal with that of a tiny one.

    Args:
        check: says whether this is a rehearsal.
        name: of the model.
        scratch: for configurations that are changed.
        layers: as many. Default: the model's.
    """
    folder = ROOT / "benchmarks" / "models" / name
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if check.tiny:
        config |= {key: value for key, value in TINY.items() if key in config}
        config |= {"bos_token_id": 1, "eos_token_id": 2}
    elif layers is not None:
        config |= {"num_hidden_layers": layers}
    made = scratch / f"{layers or ''}" / name
    made.mkdir(parents=True, exist_ok=True)
    (made / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return made


def build(check: Check, folder: Path) -> Any:
    """A model with random weights, made where it is to run."""
    torch.manual_seed(0)
    with torch.device(check.device):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    return model.eval()


def weights_read(model: Any) -> int:
    """Bytes of the weights that every step reads: all but tables in which tokens and positions are looked up."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    head = model.get_output_embeddings().weight
    return sum(weights.nbytes for weights in model.parameters() if weights is head or id(weights) not in tables)


class Warnings(logging.Handler):
    """What the library warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    @property
    def fallback(self) -> str | None:
        """Why steps run without graphs, if they were to have them."""
        return next((message for message in self.messages if "CUDA graphs" in message), None)


@contextlib.contextmanager
def warned() -> Iterator[Warnings]:
    """Collect warnings."""
    handler = Warnings()
    logger = logging.getLogger("batchkit")
    logger.addHandler(handler)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)


def make_runner(check: Check, model: Any, attention: str, **options: Any) -> TransformersRunner | None:
    """A runner, or None, with the reasons noted, where this backend cannot run."""
    try:
        return TransformersRunner(model, attention=attention, **options)
    except UnsupportedModel as error:
        check.lacks(" ".join(str(error).split()))
        return None


# --- decode steps -----------------------------------------------------------------------------------------------------


def make_step(batch: int, context: int, block_size: int, *, new: int = 1, contiguous: bool = False) -> SchedulerOutput:
    """A step of rows that each compute the last tokens of their context, by default one, which is to decode."""
    each = -(-context // block_size)
    blocks = list(range(batch * each))
    random.Random(0).shuffle(blocks)
    request = Request(id="r", prompt_token_ids=(1,), params=SamplingParams(temperature=0), max_tokens=1)
    rows = tuple(
        ScheduledSequence(
            seq_id=index,
            row=0,
            seat=index,
            request=request,
            sample_index=0,
            start=context - new,
            num_tokens=new,
            token_ids=(5,) * new,
            output_ids=[],
            num_output=0,
            blocks=range(first, first + each) if contiguous else tuple(blocks[first : first + each]),
            samples=True,
            idle=False,
        )
        for index, first in enumerate(range(0, batch * each, each))
    )
    return SchedulerOutput(rows, num_tokens=batch * new)


def execute(runner: ModelRunner, step: SchedulerOutput) -> None:
    """Compute a step, whose rows all must do."""
    for result in runner.execute(step).rows:
        if result.error is not None:
            raise RuntimeError(result.error)


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


# --- throughput -------------------------------------------------------------------------------------------------------


class Kept(ModelRunner):
    """A runner that several engines use in turn. Closing it closes nothing."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    @property
    @override
    def geometry(self) -> KVGeometry:
        return self._runner.geometry

    @override
    def execute(self, out: SchedulerOutput) -> SamplerOutput:
        return self._runner.execute(out)

    @override
    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        self._runner.copy_blocks(copies)

    @override
    def check_request(self, request: Request) -> None:
        self._runner.check_request(request)

    @override
    def close(self) -> None:
        pass


@dataclass(frozen=True)
class DeviceTarget(Target):
    """A runner that is warm, with the KV memory that it has."""

    runner: ModelRunner
    kv_tokens: int
    block_size: int
    prefix_caching: bool = field(default=False, init=False)

    @property
    @override
    def is_simulated(self) -> bool:
        return False

    @override
    def make_runner(self, policy: Policy, num_blocks: int) -> tuple[ModelRunner, Clock]:
        return Kept(self.runner), MonotonicClock()


@dataclass(frozen=True)
class Stand:
    """A device under the experiment, and the simulator's picture of it."""

    target: DeviceTarget
    simulated: SimulatedTarget
    cost: RooflineCost
    pool: int
    layers: int
    attention: str
    graphs: bool


def throughput(check: Check, scratch: Path) -> list[dict[str, Any]]:
    """All policies on loads of every cap, in KV memories of every size."""
    cells: list[dict[str, Any]] = check.found.setdefault("throughput", [])
    if "device" not in check.found:
        raise RuntimeError("the simulator needs the speed of the device, and that was not measured")
    folder = shape_folder(check, SHAPES[0], scratch, layers=check.layers)
    model, shape = build(check, folder), model_shape(folder, dtype="bfloat16")
    with contextlib.ExitStack() as stack:
        stands = []
        for pool in check.sizes.pools:
            with check.attempt(f"throughput with a KV memory of {pool} tokens"):
                stands.append(stack.enter_context(_stand(check, model, shape, pool)))
        groups = [(cap, stand) for cap in check.sizes.caps for stand in stands]
        while groups:
            # Longer outputs get more time.
            weights = [math.sqrt(cap) for cap, _ in groups]
            cap, stand = groups.pop(0)
            with check.attempt(f"throughput at cap {cap} with {stand.pool} tokens"):
                _group(check, stand, cap, cells, check.left_s("throughput") * weights[0] / sum(weights))
    return cells


@contextlib.contextmanager
def _stand(check: Check, model: Any, shape: ModelShape, pool: int) -> Iterator[Stand]:
    """The first backend that can run, with graphs if they can be captured, warm."""
    graphs = check.device.type == "cuda"
    memory = pool * shape.kv_bytes_per_token
    with warned() as warnings:
        made = (make_runner(check, model, attention, cuda_graphs=graphs, kv_memory=memory) for attention in BACKENDS)
        attention, runner = next((pair for pair in zip(BACKENDS, made, strict=True) if pair[1] is not None), ("", None))
        if runner is None:
            raise RuntimeError("no attention backend can run this model")
        with contextlib.closing(runner):
            runner._pool.fill(0.01)  # type: ignore[union-attr]
            cost = _cost(check, runner, shape)
            geometry = runner.geometry
            tokens = geometry.num_blocks * geometry.block_size
            yield Stand(
                DeviceTarget(runner, tokens, geometry.block_size),
                SimulatedTarget(
                    cost=cost, kv_tokens=tokens, block_size=geometry.block_size, max_model_len=geometry.max_model_len
                ),
                cost,
                pool,
                model.config.num_hidden_layers,
                attention,
                graphs and warnings.fallback is None,
            )


def _cost(check: Check, runner: TransformersRunner, shape: ModelShape) -> RooflineCost:
    """What a step costs in the simulator: the device's measured speeds, and what the last decode step took beyond.

    On the way to it every kernel is compiled and every graph captured that the experiment needs.
    """
    size, blocks, prompt = runner.geometry.block_size, runner.geometry.num_blocks, check.sizes.prompt
    execute(runner, make_step(1, prompt, size, new=prompt))
    step, context = None, prompt + size // 2
    while context <= min(runner.geometry.max_model_len, prompt + max(check.sizes.caps)):
        most = blocks // -(-context // size)
        for rows in sorted({*(1 << power for power in range(most.bit_length())), most}):
            step = make_step(rows, context, size)
            execute(runner, step)
        context *= 2
    if step is None:
        raise RuntimeError(f"{blocks} KV blocks of {size} tokens are too few for a prompt of {prompt}")
    seconds = median_s(check, lambda: execute(runner, step))
    speed = check.found["device"]
    device = Device(
        name=str(check.device),
        memory_bytes=math.inf,
        bandwidth=speed["bandwidth"],
        flops=speed["flops"],
        host_bandwidth=math.inf,
    )
    # The speed is that of a product already.
    cost = RooflineCost.of(shape, device, block_size=size, efficiency=1.0, overhead_s=0.0)
    return replace(cost, overhead_s=max(0.0, seconds - cost(step)))


def _group(check: Check, stand: Stand, cap: int, cells: list[dict[str, Any]], share_s: float) -> None:
    """One load under every policy."""
    until = time.monotonic() + share_s
    load, expected = _affordable(check, stand, cap, until)
    seconds: dict[str, float] = {}
    for name, policy in POLICIES.items():
        what = f"throughput at cap {cap} with {stand.pool} tokens, {name}"
        if name not in expected:
            check.leave_out(f"{what}: the longest sequence does not fit")
            continue
        left = max(0.0, min(until - time.monotonic(), check.left_s("throughput")))
        if expected[name].window_s > left:
            check.leave_out(f"{what}: it would take {expected[name].window_s:.0f} s, and {left:.0f} s are left")
            continue
        with check.attempt(what):
            # What takes far longer than expected is stopped.
            got = run(stand.target, policy, load, until_s=2 * left)
            if got.num_failed:
                raise RuntimeError(f"{got.num_failed} of {len(load)} requests failed")
            if got.num_unfinished:
                check.leave_out(
                    f"{what}: {got.num_unfinished} of {len(load)} requests were not done in {2 * left:.0f} s"
                )
                continue
            seconds[name] = got.window_s
            cells.append(
                {
                    "pool": stand.pool,
                    "block_size": stand.target.block_size,
                    "cap": cap,
                    "requests": len(load),
                    "policy": name,
                    "layers": stand.layers,
                    "attention": stand.attention,
                    "graphs": stand.graphs,
                    "overhead_ms": 1e3 * stand.cost.overhead_s,
                    **{figure: FIGURES[figure](got) for figure in ("prompt_per_s", "generated_per_s", "tokens_per_s")},
                    "steps": got.steps.num_steps,
                    "seconds": got.window_s,
                    "simulated_seconds": expected[name].window_s,
                    "factor": _factor(seconds, name),
                    "simulated_factor": _factor({key: one.window_s for key, one in expected.items()}, name),
                }
            )
            say(f"{what}: {len(load)} requests in {got.window_s:.1f} s, simulated {expected[name].window_s:.1f} s")


def _factor(seconds: dict[str, float], name: str) -> float | None:
    """Throughput in units of the baseline's on the same load."""
    return seconds[BASELINE] / seconds[name] if BASELINE in seconds else None


def _affordable(check: Check, stand: Stand, cap: int, until: float) -> tuple[Load, dict[str, Run]]:
    """A load, and what the simulator says of each policy on it.

    The largest one for which all policies have the time; or, if none is, the shortest, whose outputs happen to be so.
    """
    requests = Requests(prompts=fixed(check.sizes.prompt), outputs=original(cap))
    tried: list[tuple[float, Load, dict[str, Run]]] = []
    began = time.monotonic()
    for count in check.sizes.counts:
        if tried and time.monotonic() - began > 0.2 * (until - began):
            break  # simulating takes time too
        load: Load = all_at_once(requests, num_requests=count).make(0)
        runs: dict[str, Run] = {}
        for name, policy in POLICIES.items():
            with contextlib.suppress(ValueError):  # the longest sequence does not fit
                runs[name] = run(stand.simulated, policy, load)
        tried.append((sum(one.window_s for one in runs.values()), load, runs))
    left = until - time.monotonic()
    fitting = [one for one in tried if one[0] <= left]
    _, load, runs = fitting[-1] if fitting else min(tried, key=lambda one: one[0])
    return load, runs


# --- what comes out ---------------------------------------------------------------------------------------------------


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
