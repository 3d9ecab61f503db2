"""The throughput experiment of `gpu_check.py`."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from typing_extensions import override

from batchkit import KVGeometry, ModelRunner, MonotonicClock, RooflineCost
from batchkit.clocks import Clock
from batchkit.costs import Device, ModelShape
from batchkit.experiment.compare import FIGURES, Run, run
from batchkit.experiment.loads import Requests, all_at_once, fixed, original
from batchkit.experiment.policies import POLICIES, Policy
from batchkit.experiment.targets import Load, SimulatedTarget, Target
from batchkit.hf.runner import TransformersRunner
from batchkit.hf.shape import model_shape
from batchkit.types import BlockCopy, Request, SamplerOutput, SchedulerOutput
from gpu_rig import BACKENDS, SHAPES, Check, build, execute, make_runner, make_step, median_s, say, shape_folder, warned

BASELINE = "static-global"


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
