"""``batchkit explain``: where the gain of continuous batching comes from, one change at a time."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..costs import DEVICES
from ..experiment.compare import Run
from ..experiment.ladder import CHANGES, Factor, Ladder, Rung, climb
from ..experiment.loads import Workload
from ..experiment.plots import ladder_plot
from ..experiment.tables import missing_line, table
from ..experiment.targets import Target, longest_output, longest_sequence
from ..experiment.trace_files import read_requests
from ..workload import WorkloadRecord
from .bench import report_failures, target_of, warn_of_memory
from .bench_loads import kv_tokens, longest_declared, variance_workload
from .bench_options import CALIBRATION, LENGTHS, add_lengths, add_memory, seed_number, several
from .bench_report import Bar, check_outputs, settings, write_json
from .faults import NotDone, one_line, say, with_place
from .options import DONE, DTYPES, INTERRUPTED, add_attention, said, whole_number

__all__ = ["add_explain"]

_NOTABLE = 1.05
"""Two factors that differ by less are called the same."""


def add_explain(commands: argparse._SubParsersAction[Any]) -> None:
    """The command ``explain``."""
    parser = commands.add_parser(
        "explain",
        help="where the gain of continuous batching comes from, change by change",
        description="Climb from naive static batching to just-in-time blocks with chunked prefill, one change at a "
        "time and in two orders, and say what each change gives. Simulated on a device preset, measured on the model "
        "otherwise.",
    )
    parser.add_argument("model", metavar="MODEL", help="a folder, with a preset also a config.json, or a name")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--calibration", metavar="FILE", help=CALIBRATION)
    where.add_argument(
        "--device",
        type=said(_device),
        help=f"{', '.join(DEVICES)}: simulated; such as cpu or cuda:0: measured; default: measured on the accelerator, "
        "if there is one",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of weights and KV; default: the model's own")
    add_attention(parser)

    load = parser.add_argument_group("workload, all of it at the start")
    add_lengths(load).add_argument(
        "--requests", metavar="FILE", help="recorded ones, without their arrivals: Azure's, BurstGPT's or JSON lines"
    )
    load.add_argument("--cap", type=whole_number, metavar="N", help="longest output; default: 384, or that of --fixed")
    load.add_argument(
        "--declared",
        type=said(_declared),
        default="both",
        metavar="both|true|N",
        help="what requests say as max_tokens: their true lengths, N, or the first and then the cap; default: both",
    )

    memory = parser.add_argument_group("memory and budgets")
    add_memory(memory)
    memory.add_argument(
        "--max-model-len",
        type=whole_number,
        metavar="N",
        help="what is reserved at first; default: prompt and longest declared output",
    )
    memory.add_argument(
        "--static-batch", type=whole_number, metavar="N", help="a batch that somebody has set; default: what fits"
    )
    memory.add_argument("--max-num-seqs", type=whole_number, default=256, metavar="N", help="default: 256")
    memory.add_argument(
        "--step-tokens", type=whole_number, default=2048, metavar="N", help="budget of a step; default: 2048"
    )
    memory.add_argument(
        "--chunk-tokens", type=whole_number, default=512, metavar="N", help="the same, with chunks; default: 512"
    )

    results = parser.add_argument_group("runs and results")
    results.add_argument(
        "--seeds", type=several(seed_number), default=[0, 1, 2, 3, 4], metavar="N,...", help="default: 0,1,2,3,4"
    )
    results.add_argument("--json", metavar="FILE", help="gets all figures")
    results.add_argument("--plot", metavar="FILE", help="gets a picture, of the kind that its ending says")
    # The target is made as for `simulate`, which has these as options.
    parser.set_defaults(run=_explain, trace_folder=None, original=False, overhead_s=None, efficiency=None)


def _device(text: str) -> str:
    if text not in DEVICES and not re.fullmatch(r"(cpu|cuda|mps|xpu)(:\d+)?", text):
        raise ValueError(f"there is no preset {text!r}; there are {', '.join(DEVICES)}, and devices such as cuda:0")
    return text


def _declared(text: str) -> int | str:
    if text in ("both", "true"):
        return text
    if not (text.isdecimal() and int(text)):
        raise ValueError(f"must be both, true or a number of at least 1, got {text!r}")
    return int(text)


# --- the command -----------------------------------------------------------------------------------------------------


def _explain(args: argparse.Namespace) -> int:
    args.is_simulated = args.device in DEVICES or args.calibration is not None
    if args.is_simulated and args.attention is not None:
        raise NotDone("--attention is for a model that is measured, and this is simulated")
    for name, value in LENGTHS.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
        elif args.requests is not None:
            raise NotDone(f"--{name} does not go with --requests")
    if args.cap is not None and args.requests is not None:
        raise NotDone("--cap does not go with --requests")
    if args.cap is None:
        args.cap = 384 if args.fixed is None else args.fixed
    cases = list(_cases(args))
    check_outputs(args)
    make, head = target_of(args)
    head = {"command": "explain", "settings": settings(args, ()), **head}
    found: dict[str, Ladder] = {}
    facts: dict[str, dict[str, int]] = {}
    targets: dict[str, Target] = {}
    length = max(longest for _, _, longest in cases)  # one for all, so that what is declared is all that differs
    limit = head["model"]["max_model_len"]
    if length > limit:
        raise NotDone(f"a sequence may have {length:,} tokens, and the model takes {limit:,}")
    budget = kv_tokens(args, length)
    for label, workload, _ in cases:
        facts[label] = {"kv_tokens": budget, "max_model_len": length}
        _check_budget(args, workload, budget)
        warn_of_memory(head, label, budget)
        targets[label] = make(kv_tokens=budget, max_model_len=length)
    _write(args.json, head, facts, found)
    interrupted = False
    for label, workload, _ in cases:
        try:
            found[label] = _climb(args, label, workload, targets[label])
        except KeyboardInterrupt:
            interrupted = True
            break
        _print(label, facts[label], found[label])
        _write(args.json, head, facts, found)
        if found[label].comparison.missing:
            interrupted = True
            break
    for line in _across(found):
        print(line)
    if args.plot is not None and found:
        ladder_plot(args.plot, found)
    if interrupted:
        say("batchkit: interrupted")
        for label, _, _ in cases:
            if label not in found:
                say(f"batchkit: {label}: missing altogether")
            elif missing := found[label].comparison.missing:
                say(f"batchkit: {missing_line(missing, label)}")
    return INTERRUPTED if interrupted else DONE


def _cases(args: argparse.Namespace) -> Iterator[tuple[str, Workload, int]]:
    """For each way of declaring lengths its label, the workload and the longest sequence."""
    for declared in ("true", "cap") if args.declared == "both" else (args.declared,):
        if args.requests is not None:
            yield _recorded(args, declared)
            continue
        case = argparse.Namespace(**{**vars(args), "declared": declared})
        length = args.max_model_len or args.prompt[1] + longest_declared(case, args.cap)
        yield _label(args.cap if declared == "cap" else declared), variance_workload(case, args.cap), length


def _label(declared: int | str) -> str:
    return "true lengths declared" if declared == "true" else f"{declared} tokens declared"


def _recorded(args: argparse.Namespace, declared: int | str) -> tuple[str, Workload, int]:
    try:
        file = read_requests(args.requests, declared=declared if isinstance(declared, int) else None)
    except (OSError, ValueError) as error:
        raise NotDone(one_line(error)) from None
    cap = declared if isinstance(declared, int) else max(record.max_tokens for record in file.records)

    def at_once(record: WorkloadRecord) -> WorkloadRecord:
        tokens = (record.output_tokens or record.max_tokens) if declared == "true" else cap
        return replace(record, arrival=0.0, deadline=None, max_tokens=tokens)

    load = tuple(at_once(record) for record in file.records)
    label = _label("true" if declared == "true" else cap)
    name = f"{file.name}; all at once; {label}"
    return (
        label,
        Workload(name=name, make=lambda seed: load),
        (args.max_model_len or longest_sequence(load) + 1),
    )


def _check_budget(args: argparse.Namespace, workload: Workload, budget: int) -> None:
    """Find out about sequences that do not fit before the first run, not before the last."""
    for seed in args.seeds:
        try:
            load = workload.make(seed)
        except ValueError as error:
            raise NotDone(one_line(error)) from None
        slots = longest_sequence(load)
        if -(-slots // args.block_size) > budget // args.block_size:
            raise NotDone(
                f"the longest sequence of seed {seed} declares {slots} KV slots; the KV budget is {budget} tokens in "
                f"blocks of {args.block_size}"
            )
        if args.max_model_len is not None and slots + 1 > args.max_model_len:
            raise NotDone(
                f"the longest sequence of seed {seed} has {slots + 1} tokens (outputs up to {longest_output(load)}), "
                f"more than --max-model-len {args.max_model_len}"
            )


def _climb(args: argparse.Namespace, label: str, workload: Workload, target: Target) -> Ladder:
    bar = Bar(0)
    bar.begin(label)

    def on_run(run: Run) -> None:
        bar.advance()
        report_failures(run, label)

    try:
        return climb(
            workload,
            target=target,
            seeds=args.seeds,
            static_batch=args.static_batch,
            max_num_seqs=args.max_num_seqs,
            step_tokens=args.step_tokens,
            chunk_tokens=args.chunk_tokens,
            on_run=on_run,
        )
    except ValueError as error:
        raise NotDone(f"{label}: {one_line(error)}") from None
    except Exception as error:  # the model's own code
        raise NotDone(f"{label}: {with_place(error)}") from None
    finally:
        bar.close()


def _write(path: str | None, head: dict[str, Any], facts: dict[str, dict[str, int]], found: dict[str, Ladder]) -> None:
    if path is None:
        return
    ladders = [
        {"case": label, **case, **(found[label].to_json() if label in found else {"missing": "all"})}
        for label, case in facts.items()
    ]
    write_json(path, {**head, "ladders": ladders})


# --- what it says ----------------------------------------------------------------------------------------------------


def _print(label: str, facts: dict[str, int], ladder: Ladder) -> None:
    said_facts = ", ".join(f"{name} {value:,}" for name, value in facts.items())
    print(f"\n{label}: {ladder.comparison.workload}\n{said_facts}")
    for order in ladder.designs:
        rungs = ladder.rungs(order)
        print(f"\norder {order}\n{_table(rungs)}")
        gain = ladder.gain(order)
        print("whole gain: unknown, runs are missing" if gain is None else f"whole gain: {_factor(gain)}")
        for line in _within(rungs, ladder.is_certain(order)):
            print(line)
    for line in _between_orders(ladder):
        print(line)


def _table(rungs: list[Rung]) -> str:
    lines = []
    for rung in rungs:
        factor = rung.factor
        lines.append(
            [
                rung.title,
                "-" if factor is None else f"{factor.mean:.3f}",
                "-" if factor is None or factor.low is None else f"{factor.low:.3f} to {factor.high:.3f}",
                "-" if rung.share is None else f"{100 * rung.share:.1f}",
                *_rates(rung),
            ]
        )
    heads = ["change", "factor", "95 %", "share %", "prompt/s", "gen./s", "both/s", "rows", "KV used %"]
    return table(heads, lines)


def _rates(rung: Rung) -> list[str]:
    figures = rung.figures
    if figures is None:
        return ["not run", *["-"] * 4]
    return [
        *(f"{figures[name]:,.1f}" for name in ("prompt_per_s", "generated_per_s", "tokens_per_s", "mean_rows")),
        f"{100 * figures['kv_used']:.1f}",
    ]


def _factor(factor: Factor) -> str:
    interval = "" if factor.low is None else f" ({factor.low:.3f} to {factor.high:.3f})"
    return f"{factor.mean:.3f} times{interval}"


def _within(rungs: list[Rung], is_certain: bool) -> Iterator[str]:
    """What one order shows."""
    known = [(rung.title, rung.factor) for rung in rungs if rung.factor is not None]
    if not known:
        return
    title, most = max(known, key=lambda one: one[1].mean)
    if not is_certain:
        yield "That cannot be told from no gain at all: how it is shared out says nothing."
    elif most.mean > 1:
        yield f"Most comes from: {title}, {_factor(most)}."
    losing = [f"{title}, {_factor(factor)}" for title, factor in known if factor.mean < 1]
    if losing:
        yield f"Slower than before: {'; '.join(losing)}."


def _between_orders(ladder: Ladder) -> Iterator[str]:
    """What depends on the order of the changes."""
    (first, one), (second, other) = ((order, _factors(ladder, order)) for order in ladder.designs)
    yield from _differing(one, other, f"in order {first}", f"in order {second}", "the order")


def _across(found: dict[str, Ladder]) -> Iterator[str]:
    """What depends on what requests declare."""
    if len(found) < 2:
        return
    (label, ladder), (other_label, other) = found.items()
    for order in ladder.designs:
        yield f"\norder {order}, {label} against {other_label}"
        gains = ladder.gain(order), other.gain(order)
        if gains[0] is not None and gains[1] is not None:
            yield f"Whole gain: {_factor(gains[0])} against {_factor(gains[1])}."
        yield from _differing(
            _factors(ladder, order),
            _factors(other, order),
            f"with {label}",
            f"with {other_label}",
            "what requests declare",
        )


def _factors(ladder: Ladder, order: str) -> dict[str, float]:
    return {
        rung.change: rung.factor.mean
        for rung in ladder.rungs(order)
        if rung.change is not None and rung.factor is not None
    }


def _differing(one: dict[str, float], other: dict[str, float], here: str, there: str, what: str) -> Iterator[str]:
    """A sentence for each change whose factors differ, the greatest difference first."""
    both = {change: abs(math.log(one[change] / other[change])) for change in one if change in other}
    notable = sorted((change for change in both if both[change] > math.log(_NOTABLE)), key=lambda name: -both[name])
    if not both:
        return
    if not notable:
        yield f"No change's factor differs by more than {_NOTABLE - 1:.0%} with {what}."
    for change in notable:
        title = CHANGES[change][0]
        yield f"Depends on {what}: {title}, {one[change]:.2f} times {here}, {other[change]:.2f} {there}."
