"""Comparisons as plots. matplotlib is imported when one is drawn."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from .compare import Comparison
from .ladder import Ladder
from .tables import LATENCIES

__all__ = ["NoPlots", "check_plot", "ladder_plot", "latency_plot", "throughput_plot"]

_MARKERS = "osD^vP*X<>"
_DASHES = ("-", "--", ":", "-.")  # so that of lines that coincide both are seen


class NoPlots(Exception):
    """matplotlib is not installed."""


def throughput_plot(path: str | os.PathLike[str], found: Mapping[float, Comparison], *, over: str) -> None:
    """Tokens per second, prompt and generated, over what was varied: a line for each policy, with 95 % intervals.

    Args:
        path: of the picture; its ending says the format.
        found: a comparison for each value of the x axis, which is logarithmic.
        over: label of that axis.

    Raises:
        NoPlots: matplotlib is missing.
    """
    figure, panels = _figure(columns=1, rows=1)
    _lines(panels[0][0], found, over)
    _save(figure, path)


def latency_plot(
    path: str | os.PathLike[str], found: Mapping[float, Comparison], *, cell: Callable[[float], str]
) -> None:
    """Latencies as cumulative distributions, a row of panels for each cell; with several cells, throughput over them.

    Args:
        path: of the picture; its ending says the format.
        found: a comparison for each cell, by its rate.
        cell: names a cell.

    Raises:
        NoPlots: matplotlib is missing.
    """
    figure, panels = _figure(columns=len(LATENCIES), rows=len(found) + (len(found) > 1))
    for row, (rate, one) in zip(panels, found.items(), strict=False):
        for axes, (kind, label) in zip(row, LATENCIES.items(), strict=True):
            for number, policy in enumerate(one.policies):
                runs = one.of(policy)
                points = [[run.of(f"{kind}_s", percent) for run in runs] for percent in range(101)]
                means = [sum(values) / len(values) for values in points]
                axes.plot(means, range(101), label=policy, linestyle=_DASHES[number % len(_DASHES)])
            # Policies are orders of magnitude apart; but where all tokens come at once, the time between them is 0.
            axes.set(xscale="linear" if kind == "tpot" else "log")
            axes.set(xlabel=label, ylabel="% of requests", title=cell(rate))
        row[0].legend(fontsize="small")
    if len(found) > 1:
        first, *others = panels[-1]
        _lines(first, found, "requests per second offered")
        for axes in others:
            axes.set_visible(False)
    _save(figure, path)


def ladder_plot(path: str | os.PathLike[str], found: Mapping[str, Ladder]) -> None:
    """Tokens per second after each change, with its factor: a row of panels for each case, a column for each order.

    Args:
        path: of the picture; its ending says the format.
        found: at least one ladder, by what tells its case; all with the same orders.

    Raises:
        NoPlots: matplotlib is missing.
    """
    figure, panels = _figure(columns=max(len(ladder.designs) for ladder in found.values()), rows=len(found))
    figure.set_size_inches(1.8 * figure.get_figwidth(), figure.get_figheight())  # the changes' names need room
    for row, (case, ladder) in zip(panels, found.items(), strict=True):
        for axes, order in zip(row, ladder.designs, strict=True):
            rungs = [rung for rung in ladder.rungs(order) if rung.figures is not None]
            bars = axes.barh(
                [rung.title for rung in rungs], [rung.figures["tokens_per_s"] for rung in rungs if rung.figures]
            )
            factors = ["" if rung.factor is None else f"x {rung.factor.mean:.2f}" for rung in rungs]
            axes.bar_label(bars, labels=factors, padding=3, fontsize="small")
            axes.invert_yaxis()
            axes.margins(x=0.12)
            axes.set(xlabel="prompt + generated tokens per second", title=f"{case}, order {order}")
    _save(figure, path)


def check_plot(path: str | os.PathLike[str]) -> None:
    """Find out before an experiment whether its plot can be drawn.

    Raises:
        NoPlots: matplotlib is missing.
        ValueError: it draws no such kind of file.
    """
    figure, _ = _figure(columns=1, rows=1)
    ending = os.path.splitext(path)[1].removeprefix(".")
    known = figure.canvas.get_supported_filetypes()
    if ending not in known:
        raise ValueError(f"{os.fspath(path)} must end with one of .{', .'.join(sorted(known))}")


def _figure(*, columns: int, rows: int) -> tuple[Any, Any]:
    try:
        import matplotlib.backends.backend_agg
        import matplotlib.figure
    except ModuleNotFoundError:
        raise NoPlots("a plot needs matplotlib: pip install 'batchkit[plots]'") from None
    figure = matplotlib.figure.Figure(figsize=(5.5 * columns + 1, 4.0 * rows), layout="constrained")
    matplotlib.backends.backend_agg.FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)


def _lines(axes: Any, found: Mapping[float, Comparison], over: str) -> None:
    names = dict.fromkeys(policy for one in found.values() for policy in one.policies)
    for number, policy in enumerate(names):
        there = [(x, one.figure(policy, "tokens_per_s")) for x, one in found.items() if policy in one.policies]
        axes.errorbar(
            [x for x, _ in there],
            [value.mean for _, value in there],
            yerr=[value.half_width or 0.0 for _, value in there],
            label=policy,
            marker=_MARKERS[number % len(_MARKERS)],
            linestyle=_DASHES[number % len(_DASHES)],
            capsize=3,
        )
    axes.set(xscale="log", xlabel=over, ylabel="prompt + generated tokens per second")
    axes.set_xticks(list(found), [f"{x:g}" for x in found])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")


def _save(figure: Any, path: str | os.PathLike[str]) -> None:
    from matplotlib import rc_context

    is_svg = os.fspath(path).endswith(".svg")
    # The same figures give the same file, and text stays text.
    with rc_context({"svg.hashsalt": "batchkit", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None} if is_svg else None)
