"""The drawing that the page and the pictures of the docs share: requests by steps, and the block pool under them.

A state is told by colour and by shape: waiting is a thin line, preempted a half-high bar, held is hatched. The colours
are of the palette that Okabe and Ito made for colour-blind people.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from .model import MEANINGS, STATES, State, View, figure_rows

__all__ = ["STYLE", "Scale", "chart", "defs", "legend", "picture"]

# A variable for each colour, so that one drawing serves light and dark.
_LIGHT = {
    "bg": "#ffffff", "ink": "#1b1f24", "soft": "#5f6b7a", "line": "#d9dee4", "free": "#f0f2f5",
    "waiting": "#a7b0bb", "prefill": "#e69f00", "decode": "#0072b2", "paused": "#9ecae9", "held": "#8a6f9c",
    "preempted": "#d55e00", "used": "#009e73", "wasted": "#c0392b",
}  # fmt: skip
_DARK = {
    **_LIGHT,
    "bg": "#14181d", "ink": "#e8ebef", "soft": "#9aa6b4", "line": "#323a44", "free": "#20262d",
    "waiting": "#657080", "prefill": "#f0b429", "decode": "#56b4e9", "paused": "#2d5f82", "held": "#b79bc9",
    "preempted": "#ff7f3f", "used": "#1fbf92", "wasted": "#ff7d6e",
}  # fmt: skip


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())


STYLE = (
    f":root{{{_variables(_LIGHT)}color-scheme:light dark}}"
    f"@media(prefers-color-scheme:dark){{:root{{{_variables(_DARK)}}}}}"
    + "".join(f".{state}{{fill:var(--{state})}}" for state in STATES if state != "held")
    + ".held{fill:url(#held)}.wasted{fill:url(#wasted)}.used{fill:var(--used)}.free{fill:var(--free)}"
    "svg text{fill:var(--ink);font:12px system-ui,-apple-system,'Segoe UI',sans-serif}"
    "svg .soft{fill:var(--soft);font-size:11px}svg .head{font-weight:600;font-size:14px}"
    ".grid{stroke:var(--bg);fill:none;vector-effect:non-scaling-stroke}"
    ".frame{stroke:var(--line);fill:none;vector-effect:non-scaling-stroke}"
)
"""What the drawing needs; the page adds its own."""

_GAP = 26  # between the requests and the pool, for the axis
_HEIGHTS: dict[State, float] = {"waiting": 0.16, "preempted": 0.45}  # of a row; of the others all of it


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes in pixels: of a step, of a request, of the pool's strip, and of the margin for names."""

    step: float
    row: float
    pool: float
    margin: float

    @classmethod
    def for_views(cls, views: Sequence[View]) -> Scale:
        """One scale that suits all of them, so that they can be compared."""
        steps = max([len(view.steps) for view in views])
        lanes = max([len(view.lanes) for view in views])
        row = 22.0 if lanes <= 16 else 13.0 if lanes <= 48 else max(2.0, min(9.0, 640 / lanes))
        names = max([len(lane.request_id) for view in views for lane in view.lanes] or [1]) if row >= 12 else 0
        return cls(
            step=min(22.0, max(0.25, 1100 / steps)), row=row, pool=72.0, margin=max(44.0, min(16, names) * 7.2 + 14)
        )


def defs() -> str:
    """Hatchings, to be defined once in a document."""
    hatch = (
        '<pattern id="{0}" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate({1})">'
        '<rect width="5" height="5" fill="var(--{0})" opacity=".22"/>'
        '<rect width="2" height="5" fill="var(--{0})"/></pattern>'
    )
    return f"<defs>{hatch.format('held', 45)}{hatch.format('wasted', -45)}</defs>"


def _rectangle(x: float, y: float, width: float, height: float) -> str:
    return f"M{x:g} {y:g}h{width:g}v{height:g}h{-width:g}z"


def _lanes(view: View, scale: Scale) -> str:
    """One path for each state, however many requests there are."""
    gap = 2.0 if scale.row >= 9 else 0.5
    first = view.steps[0].step
    paths: dict[State, list[str]] = {state: [] for state in STATES}
    for index, lane in enumerate(view.lanes):
        for state, begin, end in lane.merged():
            height = (scale.row - gap) * _HEIGHTS.get(state, 1.0)
            top = index * scale.row + (scale.row - height) / 2
            paths[state].append(
                _rectangle(
                    round((begin - first) * scale.step, 2),
                    round(top, 2),
                    round((end - begin + 1) * scale.step, 2),
                    round(height, 2),
                )
            )
    return "".join(f'<path class="{state}" d="{"".join(path)}"/>' for state, path in paths.items() if path)


def _pool(view: View, scale: Scale, top: float) -> str:
    """Used slots from below, wasted ones on them, the rest free; a rectangle for equal steps side by side."""
    pool = view.stats["num_blocks"] * view.stats["block_size"]
    unit = scale.pool / pool
    used: list[str] = []
    wasted: list[str] = []
    begin = 0
    for end in range(1, len(view.steps) + 1):
        step = view.steps[begin]
        if end < len(view.steps):
            after = view.steps[end]
            if (after.used, after.wasted) == (step.used, step.wasted):
                continue
        x, width = round(begin * scale.step, 2), round((end - begin) * scale.step, 2)
        bottom = top + scale.pool
        if step.used:
            used.append(_rectangle(x, round(bottom - step.used * unit, 2), width, round(step.used * unit, 2)))
        if step.wasted:
            height = (step.used + step.wasted) * unit
            wasted.append(_rectangle(x, round(bottom - height, 2), width, round(step.wasted * unit, 2)))
        begin = end
    width = round(len(view.steps) * scale.step, 2)
    return (
        f'<path class="free" d="{_rectangle(0, top, width, scale.pool)}"/>'
        f'<path class="used" d="{"".join(used)}"/><path class="wasted" d="{"".join(wasted)}"/>'
        + _block_lines(view, scale, top, width)
    )


def _block_lines(view: View, scale: Scale, top: float, width: float) -> str:
    blocks = view.stats["num_blocks"]
    if scale.pool / blocks < 5:
        return ""
    lines = "".join(f"M0 {top + at * scale.pool / blocks:g}h{width:g}" for at in range(1, blocks))
    return f'<path class="grid" d="{lines}"/>'


def _tick_every(step: float) -> int:
    """So many steps between two numbers on the axis that they do not touch."""
    every = 1
    while every * step < 44:
        every = every * 5 // 2 if str(every).startswith("2") else every * 2  # 1, 2, 5, 10, 20, 50
    return every


def height_of(view: View, scale: Scale) -> float:
    """Of a chart."""
    return len(view.lanes) * scale.row + _GAP + scale.pool + 4


def chart(view: View, scale: Scale) -> str:
    """A view as a group whose origin is its upper left corner; what has the class ``stretch`` may be scaled in x."""
    lanes_height = len(view.lanes) * scale.row
    width = round(len(view.steps) * scale.step, 2)
    top = lanes_height + _GAP
    grid = ""
    if scale.step >= 7:
        rules = "".join(
            f"M{at * scale.step:g} 0v{lanes_height:g}M{at * scale.step:g} {top:g}v{scale.pool:g}"
            for at in range(1, len(view.steps))
        )
        grid = f'<path class="grid" d="{rules}"/>'
    names = ""
    if scale.row >= 12:
        letters = int((scale.margin - 14) / 7.2)
        for index, lane in enumerate(view.lanes):
            name = lane.request_id if len(lane.request_id) <= letters else lane.request_id[: letters - 1] + "\u2026"
            y = (index + 0.5) * scale.row + 4
            names += f'<text x="{scale.margin - 8:g}" y="{y:g}" text-anchor="end">{escape(name)}</text>'
    else:
        names = f'<text class="soft" x="{scale.margin - 8:g}" y="11" text-anchor="end">{len(view.lanes)}</text>'
    first = view.steps[0].step
    every = _tick_every(scale.step)
    ticks = "".join(
        f'<text class="soft tick" data-at="{at}" x="{scale.margin + (at + 0.5) * scale.step:g}" '
        f'y="{lanes_height + 16:g}" text-anchor="middle">{first + at}</text>'
        for at in range(len(view.steps))
        if (first + at) % every == 0 or (at == 0 and every < 5)
    )
    return (
        f'{names}{ticks}<text class="soft" x="{scale.margin - 8:g}" y="{lanes_height + 16:g}" '
        f'text-anchor="end">step</text>'
        f'<text class="soft" x="{scale.margin - 8:g}" y="{top + scale.pool / 2 + 4:g}" text-anchor="end">KV</text>'
        f'<g transform="translate({scale.margin:g} 0)"><g class="stretch">{_lanes(view, scale)}'
        f"{_pool(view, scale, top)}{grid}"
        f'<path class="frame" d="{_rectangle(0, top, width, scale.pool)}"/></g></g>'
    )


def swatch(kind: str) -> str:
    """A cell of 18 by 14 pixels for a legend, as it looks in the drawing."""
    height = 14 * _HEIGHTS.get(kind, 1.0)  # type: ignore[call-overload]
    return f'<path class="{kind}" d="{_rectangle(0, round(7 - height / 2, 2), 18, round(height, 2))}"/>'


def legend(views: Sequence[View]) -> list[tuple[str, str]]:
    """Class and meaning of each kind of cell; of the states, those that occur."""
    there = {span.state for view in views for lane in view.lanes for span in lane.spans}
    states = [(state, MEANINGS[state]) for state in STATES if state in there]
    return [
        *states,
        ("used", "KV slots that hold a token"),
        ("wasted", "held, but empty"),
        ("free", "free"),
    ]


def picture(views: Sequence[View], titles: Sequence[str], *, label: str) -> str:
    """Views side by side as one SVG document, with a legend and a line of figures under each.

    Args:
        views: with steps.
        titles: a heading for each.
        label: what a screen reader says.
    """
    scale = Scale(step=16.0, row=22.0, pool=64.0, margin=44.0)
    x, body = 16.0, ""
    height = max(height_of(view, scale) for view in views)
    for view, title in zip(views, titles, strict=True):
        width = scale.margin + len(view.steps) * scale.step
        figures = dict(figure_rows(view.figures))
        lines = (
            f"{figures['steps']} steps, mean batch {figures['mean batch']}",
            f"KV used {figures['KV used']}, wasted {figures['KV wasted']}",
            f"idle rows {figures['idle rows']}, preemptions {figures['preemptions']}",
        )
        texts = "".join(
            f'<text class="soft" x="{scale.margin:g}" y="{height + 18 + 16 * at:g}">{escape(line)}</text>'
            for at, line in enumerate(lines)
        )
        body += (
            f'<g transform="translate({x:g} 52)"><text class="head" x="{scale.margin:g}" y="-16">{escape(title)}</text>'
            f"{chart(view, scale)}{texts}</g>"
        )
        x += max(width, scale.margin + 190) + 20
    total = x
    at, row, key = 60.0, 0, ""
    for kind, meaning in legend(views):
        wide = 18 + 8 + 6.4 * len(meaning) + 22
        if at + wide > total and at > 60:
            at, row = 60.0, row + 1
        key += (
            f'<g transform="translate({at:g} {height + 128 + 22 * row:g})">{swatch(kind)}'
            f'<text x="26" y="11">{escape(meaning)}</text></g>'
        )
        at += wide
    bottom = height + 128 + 22 * (row + 1) + 8
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total:g} {bottom:g}" width="{total:g}" '
        f'height="{bottom:g}" role="img"><title>{escape(label)}</title><style>{STYLE}</style>{defs()}'
        f'<rect width="100%" height="100%" fill="var(--bg)"/>{body}{key}</svg>\n'
    )
