"""``batchkit bench`` and ``batchkit simulate``: policies side by side on a model that is here, or on a device's cost.

Both have the same experiments: ``variance``, throughput over how much output lengths vary, and ``latency``, over how
much arrives. Each is a list of cells, and each cell is one `batchkit.experiment.compare.compare`.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from ..costs import DEVICES, ModelShape, RooflineCost
from ..experiment.calibrate import Calibration
from ..experiment.compare import Comparison, Goal, Run, compare
from ..experiment.loads import facts as load_facts
from ..experiment.plan import kv_budget
from ..experiment.plots import latency_plot, throughput_plot
from ..experiment.policies import Policy
from ..experiment.tables import (
    SUSTAINED,
    THROUGHPUT_LEGEND,
    latency_table,
    missing_line,
    saturation_table,
    throughput_table,
)
from ..experiment.targets import ModelTarget, SimulatedTarget, Target, longest_output, longest_sequence
from .bench_loads import (
    chosen_policies,
    fill_in,
    kv_tokens,
    latency_workloads,
    longest_declared,
    source_of,
    variance_workload,
)
from .bench_options import add_common, add_latency, add_variance
from .bench_report import Bar, Cell, Results, check_outputs, settings
from .faults import NotDone, loading, one_line, say, with_place
from .inspect import versions
from .options import DONE, INTERRUPTED

__all__ = ["add_bench", "add_simulate", "report_failures", "shape_of", "target_of", "warn_of_memory"]

SATURATION = (
    "kept up: requests that end in the second half of the arrivals, as a share of those that arrive in it;\n"
    f"a policy saturates at the highest rate up to which that is {SUSTAINED:.0%} or more; tokens per second include "
    "the drain"
)

# Makes a target of a KV budget in tokens and the model's length.
MakeTarget = Callable[..., Target]


def add_bench(commands: argparse._SubParsersAction[Any]) -> None:
    """The command ``bench``."""
    _add(commands, "bench", "policies side by side on a model", simulated=False)


def add_simulate(commands: argparse._SubParsersAction[Any]) -> None:
    """The command ``simulate``."""
    _add(commands, "simulate", "policies side by side on a device's cost model", simulated=True)


def _add(commands: argparse._SubParsersAction[Any], name: str, summary: str, *, simulated: bool) -> None:
    parser = commands.add_parser(name, help=summary, description=f"Compare {summary}.")
    experiments = parser.add_subparsers(required=True, metavar="EXPERIMENT", dest="experiment")
    for experiment, what, add, run in (
        ("variance", "throughput over how much output lengths vary", add_variance, _variance),
        ("latency", "latencies over how much arrives", add_latency, _latency),
    ):
        one = experiments.add_parser(experiment, help=what, description=f"Measure {what}.")
        add_common(one, simulated=simulated)
        add(one)
        one.set_defaults(run=run, is_simulated=simulated)


def _variance(args: argparse.Namespace) -> int:
    fill_in(args)
    policies = chosen_policies(args)
    workloads = {cap: variance_workload(args, cap) for cap in args.caps}
    check_outputs(args)
    make, head = target_of(args)
    cells = []
    for cap, workload in workloads.items():
        length = args.prompt[1] + longest_declared(args, cap)
        budget = kv_tokens(args, length)
        facts = {"cap": cap, "kv_tokens": budget, "max_model_len": length}
        target = make(kv_tokens=budget, max_model_len=length)
        cells.append(Cell(label=f"cap {cap}", value=cap, workload=workload, target=target, facts=facts))
    results, code = _play(args, head, cells, policies, lambda found: throughput_table(found, policies[0].name))
    found = {cell.value: results.found[cell.label] for cell in cells if results.found[cell.label].runs}
    if found:
        print(f"\n{THROUGHPUT_LEGEND}")
    if args.plot is not None and found:
        throughput_plot(args.plot, found, over="cap of the output lengths, tokens")
    return code


def _latency(args: argparse.Namespace) -> int:
    fill_in(args)
    policies = chosen_policies(args)
    workloads, length = latency_workloads(args)
    check_outputs(args)
    make, head = target_of(args)
    budget = kv_tokens(args, length)
    target = make(kv_tokens=budget, max_model_len=length, prefix_caching=args.prefix_caching)
    cells = []
    for rate, workload in workloads.items():
        facts = {**({} if rate is None else {"rate": rate}), "kv_tokens": budget, "max_model_len": length}
        label = source_of(args) if rate is None else f"rate {rate!r}".removesuffix(".0")
        cells.append(Cell(label=label, value=rate or 0.0, workload=workload, target=target, facts=facts))
    goal = None
    if args.goal_ttft_s is not None or args.goal_tpot_s is not None:
        goal = Goal(ttft_s=args.goal_ttft_s, tpot_s=args.goal_tpot_s)
    results, code = _play(
        args,
        head,
        cells,
        policies,
        lambda found: latency_table(found, goal),
        goal=goal,
        warm_up_s=args.warm_up_s,
        until_s=args.until_s,
    )
    found = {cell.value: results.found[cell.label] for cell in cells if results.found[cell.label].runs}
    if source_of(args) == "rates" and args.rates is not None and found:
        print(f"\n{saturation_table(found)}\n{SATURATION}")
    if args.plot is not None and found:
        latency_plot(args.plot, found, cell=lambda value: next(one.label for one in cells if one.value == value))
    return code


def shape_of(args: argparse.Namespace) -> ModelShape:
    """The shape of the model that a simulation is of; tests put another function there."""
    from ..hf.shape import model_shape

    return model_shape(args.model, dtype=args.dtype)


def target_of(args: argparse.Namespace) -> tuple[MakeTarget, dict[str, Any]]:
    """What makes targets, and what the JSON file says of it. Prints what it is."""
    if args.is_simulated:
        return _simulated(args)
    with loading(args.model) as path:
        from ..hf.environment import limit_threads
        from ..hf.loading import load_weights
        from ..hf.runner import model_len

        limit_threads()
        model = load_weights(path, device=args.device, dtype=args.dtype)
        length = model_len(model.config)
    dtype = str(model.dtype).removeprefix("torch.")
    print(f"MEASURED: {args.model} in {dtype} on {model.device}")
    return partial(ModelTarget, model=model, block_size=args.block_size, attention=args.attention), {
        "versions": versions(),
        "model": {"name": args.model, "dtype": dtype, "device": str(model.device), "max_model_len": length},
    }


def _simulated(args: argparse.Namespace) -> tuple[MakeTarget, dict[str, Any]]:
    try:
        shape = shape_of(args)
    except Exception as error:  # the libraries below raise whatever they like over a configuration
        raise NotDone(f"cannot read the model's configuration: {one_line(error)}") from None
    make = partial(SimulatedTarget, block_size=args.block_size, vocab_size=shape.vocab_size)
    constants = {name: value for name in ("overhead_s", "efficiency") if (value := getattr(args, name)) is not None}
    if args.calibration is not None:
        if constants:
            raise NotDone(f"--{next(iter(constants)).replace('_', '-')} does not go with --calibration")
        try:
            known = Calibration.load(args.calibration)
        except ValueError as error:
            raise NotDone(str(error)) from None
        about = ", ".join(f"{name}: {value}" for name, value in known.about.items())
        print(
            f"SIMULATED: {shape.name} by a cost model fitted to measured steps ({about}); on steps that the fit had "
            f"not seen it was {known.held_out.total_error:+.1%} off in all"
        )
        return partial(make, cost=known.cost), {"model": asdict(shape), "cost": asdict(known.cost)}
    device = DEVICES[args.device]
    try:
        fits = kv_budget(shape, device) // (shape.kv_bytes_per_token * args.block_size) * args.block_size
    except ValueError as error:
        raise NotDone(one_line(error)) from None
    cost = RooflineCost.of(shape, device, block_size=args.block_size, **constants)
    print(f"SIMULATED: {shape.name} on {device.name}, by a cost model; nothing was measured")
    print(
        f"cost of a step: {1e3 * cost.overhead_s:g} ms\n"
        f"  + the greater of {1e3 * shape.weight_bytes / cost.bandwidth:.4g} ms for reading the weights and "
        f"{2e3 * shape.active_params / (cost.efficiency * cost.flops):.4g} ms per token\n"
        f"    ({cost.bandwidth:.4g} bytes/s; {cost.efficiency:.0%} of {cost.flops:.4g} FLOP/s; "
        f"{shape.num_params:,} parameters)\n"
        f"  + {1e3 * shape.kv_bytes_per_token / cost.bandwidth:.4g} ms per token of context "
        f"({shape.kv_bytes_per_token:,} KV bytes), and the arithmetic of attention\n"
        f"memory: {fits:,} KV tokens fit beside the weights; what a run has is said below, and --kv-tokens sets it"
    )
    return partial(make, cost=cost), {"model": asdict(shape), "cost": asdict(cost), "kv_tokens_that_fit": fits}


def warn_of_memory(head: dict[str, Any], label: str, budget: int) -> None:
    """Say so if a device has less memory than is simulated."""
    fits = head.get("kv_tokens_that_fit")
    if fits is not None and budget > fits:
        say(f"batchkit: {label}: {budget:,} KV tokens are simulated, and only {fits:,} fit on the device")


def report_failures(run: Run, label: str) -> None:
    """Say so if requests of a run failed: they are in none of its figures."""
    if run.num_failed:
        total = run.num_failed + run.num_unfinished + len(run.requests)
        say(f"batchkit: {label}, {run.policy}, seed {run.seed}: {run.num_failed:,} of {total:,} requests failed")


def _play(
    args: argparse.Namespace,
    head: dict[str, Any],
    cells: Sequence[Cell],
    policies: Sequence[Policy],
    table: Callable[[Comparison], str],
    *,
    goal: Goal | None = None,
    **window: float | None,
) -> tuple[Results, int]:
    """All cells in turn. What was measured is kept whatever happens.

    Returns:
        What was measured, and the exit code.
    """
    for cell in cells:
        _check_fit(cell, policies, args, head["model"]["max_model_len"])
        warn_of_memory(head, cell.label, cell.facts["kv_tokens"])
    results = Results(
        args.json,
        {"command": f"{args.command} {args.experiment}", "settings": settings(args, policies), **head},
        cells,
        policies=policies,
        seeds=args.seeds,
        goal=goal,
    )
    bar = Bar(len(cells) * len(policies) * len(args.seeds))
    code = DONE
    real_s = time.perf_counter()
    shown: list[Cell] = []

    def show(cell: Cell) -> None:
        shown.append(cell)
        facts = ", ".join(f"{name} {value:,}".removesuffix(".0") for name, value in cell.facts.items())
        drawn = _drawn(cell, args.seeds)
        print(f"\n{cell.workload.name}\n{drawn}\n{facts}\n{table(results.found[cell.label])}", flush=True)

    try:
        for cell in cells:
            bar.begin(cell.label)

            def on_run(run: Run, cell: Cell = cell) -> None:
                results.add(cell, run)
                bar.advance()
                report_failures(run, cell.label)

            found = compare(
                policies,
                cell.workload,
                target=cell.target,
                seeds=args.seeds,
                on_run=on_run,
                trace_folder=_trace_folder(args, cell),
                **window,  # type: ignore[arg-type]
            )
            if found.missing:
                raise KeyboardInterrupt
            show(cell)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except NotDone:
        raise
    except Exception as error:  # a policy may be the user's
        told = one_line(error) if isinstance(error, ValueError) else with_place(error)
        raise NotDone(f"{cell.label}: {told}") from None
    finally:
        bar.close()
    real_s = time.perf_counter() - real_s
    if code == INTERRUPTED:
        results.write()
        for cell in cells:
            if cell not in shown and results.found[cell.label].runs:
                show(cell)
        say("batchkit: interrupted")
        for cell in cells:
            if missing := results.found[cell.label].missing:
                say(f"batchkit: {missing_line(missing, cell.label)}")
    if args.is_simulated:
        simulated_s = sum(run.window_s for found in results.found.values() for run in found.runs)
        print(f"\n{simulated_s:,.1f} s simulated in {real_s:,.1f} s: {simulated_s / real_s:,.1f} for each real second")
    return results, code


def _trace_folder(args: argparse.Namespace, cell: Cell) -> str | None:
    if args.trace_folder is None:
        return None
    folder = os.path.join(args.trace_folder, cell.label.replace(" ", "-").replace("/", "-"))
    os.makedirs(folder, exist_ok=True)
    return folder


def _drawn(cell: Cell, seeds: Sequence[int]) -> str:
    """What a distribution came to: few requests may be far from their mean."""
    loads = [load_facts(cell.workload.make(seed)) for seed in seeds]
    means = [one.output_tokens / one.num_requests for one in loads]
    each = "" if len(means) == 1 else f" ({min(means):.1f} to {max(means):.1f} by seed)"
    longest = max(one.longest_output for one in loads)
    return f"outputs: {sum(means) / len(means):.1f} tokens in the mean{each}, {longest:,} at most"


def _check_fit(cell: Cell, policies: Sequence[Policy], args: argparse.Namespace, limit: int) -> None:
    """Find out about sequences that fit neither the model nor the memory before the first run, not before the last."""
    budget, length = cell.facts["kv_tokens"], cell.facts["max_model_len"]
    if length > limit:
        raise NotDone(
            f"{cell.label}: a request has up to {length:,} tokens, and the model takes {limit:,}"
            + (f"; --max-model-len {limit} leaves such requests out" if cell.label == "requests" else "")
        )
    if budget < args.block_size:
        raise NotDone(f"{cell.label}: a KV budget of {budget} tokens is not one block of {args.block_size}")
    for seed in args.seeds:
        try:
            load = cell.workload.make(seed)
            for policy in policies:
                policy.make(
                    num_blocks=budget // args.block_size,
                    block_size=args.block_size,
                    max_model_len=length,
                    longest_sequence=longest_sequence(load),
                    longest_output=longest_output(load),
                )
        except ValueError as error:
            raise NotDone(f"{cell.label}: {one_line(error)}") from None
        except Exception as error:  # a policy may be the user's
            raise NotDone(f"{cell.label}: {with_place(error)}") from None
