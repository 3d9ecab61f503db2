"""Comparisons as text tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from ..metrics import Interval
from .compare import PERCENTILES, Comparison, Goal, policy_ms_per_step

__all__ = [
    "SUSTAINED",
    "THROUGHPUT_LEGEND",
    "latency_table",
    "missing_line",
    "saturation_table",
    "sustained",
    "table",
    "throughput_table",
]

LATENCIES = {"ttft": "TTFT s", "tpot": "TPOT s", "e2e": "e2e s", "normalised": "normalised s/token"}
"""Kinds of latency in tables and plots, by the start of their names in `FIGURES`."""


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as they need to be: the first to the left, the others to the right.

    >>> print(table(["policy", "rows"], [["paged", "7.5"]]))
    policy  rows
    paged    7.5
    """
    lines = [list(heads), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]

    def text(line: Sequence[str]) -> str:
        first, *others = (
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        return "  ".join([first, *others]).rstrip()

    return "\n".join(text(line) for line in lines)


THROUGHPUT_LEGEND = """\
both: prompt and generated tokens of requests that were served, per second; x: against the policy named, load by load,
± 95 % over the seeds; rows: that do something, in the mean over steps; slots: those as a share of the most rows that
any step of this run had; KV: shares of the memory over time: used, reserved for tokens to come, internal: the rest of
what is held, external: free and enough for who waits, but not side by side; policy ms: in the policy, per step"""
"""What the columns of `throughput_table` are."""


def throughput_table(found: Comparison, baseline: str) -> str:
    """Tokens per second, what the slots and the KV memory were used for, and what the policy itself took.

    Args:
        found: with at least one run.
        baseline: the ratio's policy; a dash stands for the ratio where it was not run.
    """
    rows = []
    for policy in found.policies:
        mean = {name: found.figure(policy, name).mean for name in _THROUGHPUT}
        rows.append(
            [
                policy,
                f"{mean['prompt_per_s']:,.1f}",
                f"{mean['generated_per_s']:,.1f}",
                f"{mean['tokens_per_s']:,.1f}",
                _ratio(found, policy, baseline),
                f"{mean['mean_rows']:.1f}",
                f"{mean['slot_use']:.0%}",
                *(f"{100 * mean[f'kv_{kind}']:.1f}" for kind in _KV),
                f"{mean['preemptions']:,.0f}",
                f"{mean['steps']:,.0f}",
                f"{_policy_ms(found, policy):.3f}",
                f"{mean['unfinished']:,.0f}",
            ]
        )
    heads = ["policy", "prompt/s", "gen./s", "both/s", f"x {baseline}", "rows", "slots"]
    heads += [f"KV {kind} %" for kind in _KV]
    return table([*heads, "preempt.", "steps", "policy ms", "unfin."], rows)


def latency_table(found: Comparison, goal: Goal | None = None) -> str:
    """Percentiles of each kind of latency, a line each, and the rates beside the first.

    Args:
        found: with at least one run.
        goal: of the goodput; None leaves that column out.
    """
    rows = []
    for policy in found.policies:
        mean = {name: found.figure(policy, name).mean for name in ("prompt_per_s", "generated_per_s", "requests_per_s")}
        runs = found.of(policy)
        rates = [
            f"{mean['prompt_per_s']:,.1f}",
            f"{mean['generated_per_s']:,.1f}",
            f"{mean['requests_per_s']:.3g}",
            *([] if goal is None else [f"{sum(run.goodput(goal) for run in runs) / len(runs):.3g}"]),
            f"{found.figure(policy, 'unfinished').mean:,.1f}",
            f"{_policy_ms(found, policy):.3f}",
        ]
        for number, (kind, label) in enumerate(LATENCIES.items()):
            values = [f"{found.figure(policy, f'{kind}_p{percent}').mean:.4g}" for percent in PERCENTILES]
            rows.append([policy if number == 0 else "", label, *values, *(rates if number == 0 else [""] * len(rates))])
    heads = ["policy", "latency", *(f"p{percent}" for percent in PERCENTILES), "prompt/s", "gen./s", "served/s"]
    return table([*heads, *([] if goal is None else ["goodput/s"]), "unfin.", "policy ms"], rows)


SUSTAINED = 0.9
"""A rate is sustained if at least such a share of requests ends as arrive, see `Run.kept_up`."""


def sustained(found: Mapping[float, Comparison], policy: str) -> float | None:
    """The highest rate up to which a policy sustains all rates that were tried; None if not even the lowest."""
    highest = None
    for rate in sorted(found):
        if policy not in found[rate].policies or not found[rate].figure(policy, "kept_up").mean >= SUSTAINED:
            break
        highest = rate
    return highest


def saturation_table(found: Mapping[float, Comparison]) -> str:
    """How far each policy kept up with each rate, the highest rate that it sustains, and the most tokens per second.

    Args:
        found: a comparison for each rate, each with at least one run.
    """
    rates = sorted(found)
    rows = []
    for policy in dict.fromkeys(policy for one in found.values() for policy in one.policies):
        there = {rate: found[rate] for rate in rates if policy in found[rate].policies}
        highest = sustained(found, policy)
        rows.append(
            [
                policy,
                *(_share(there[rate].figure(policy, "kept_up").mean) if rate in there else "-" for rate in rates),
                f"below {rates[0]:g}" if highest is None else f"{highest:g}" + " or more" * (highest == rates[-1]),
                f"{max(one.figure(policy, 'tokens_per_s').mean for one in there.values()):,.1f}",
            ]
        )
    return table(["kept up with", *(f"{rate:g}/s" for rate in rates), "saturates at", "most both/s"], rows)


def _share(value: float) -> str:
    return f"{value:.0%}" if math.isfinite(value) else "-"


def missing_line(missing: Sequence[tuple[str, int]], cell: str) -> str:
    """Says which runs of a cell, such as ``cap 96``, were not made."""
    return f"{cell}: missing " + ", ".join(f"{policy} with seed {seed}" for policy, seed in missing)


_KV = ("used", "reserved", "internal", "external", "free")
_THROUGHPUT = (
    "prompt_per_s",
    "generated_per_s",
    "tokens_per_s",
    "mean_rows",
    "slot_use",
    *(f"kv_{kind}" for kind in _KV),
    "preemptions",
    "steps",
    "unfinished",
)


def _policy_ms(found: Comparison, policy: str) -> float:
    runs = found.of(policy)
    return sum(policy_ms_per_step(run) for run in runs) / len(runs)


def _ratio(found: Comparison, policy: str, baseline: str) -> str:
    seeds = {run.seed for run in found.of(baseline)}
    if not any(run.seed in seeds for run in found.of(policy)):
        return "-"
    return _interval(found.ratio(policy, baseline, "tokens_per_s"))


def _interval(value: Interval) -> str:
    if not math.isfinite(value.mean):
        return "-"
    return f"{value.mean:.2f}" + ("" if value.half_width is None else f" ± {value.half_width:.2f}")
