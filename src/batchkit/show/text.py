"""The same picture in a terminal: a character for a cell, or for some cells side by side."""

from __future__ import annotations

from .model import MEANINGS, STATES, State, View, figure_rows

__all__ = ["drawing"]

_SIGNS: dict[State, str] = {
    "waiting": ".", "prefill": "P", "decode": "d", "paused": "-", "held": "~", "preempted": "x",
}  # fmt: skip
_WEIGHT: tuple[State, ...] = ("preempted", "prefill", "held", "decode", "paused", "waiting")
"""Where a character stands for several steps, it shows the first of these that is among them."""


def drawing(view: View, *, width: int = 100, height: int = 60) -> str:
    """The lines of a run.

    Args:
        view: with steps.
        width: characters of a line; steps are put together to fit.
        height: requests at most; the others are counted.
    """
    if not view.steps:
        raise ValueError(f"{view.name} has no steps to draw")
    names = [lane.request_id if len(lane.request_id) <= 14 else lane.request_id[:11] + "..." for lane in view.lanes]
    margin = max([len(name) for name in (*names[:height], "KV wasted")]) + 2
    columns = max(8, width - margin)
    merged = -(-len(view.steps) // columns)
    num_columns = -(-len(view.steps) // merged)
    first = view.steps[0].step
    stats = view.stats
    lines = [
        f"{stats['scheduler']}  {view.name}: {stats['num_blocks']} blocks of {stats['block_size']} tokens, "
        f"{stats['max_num_seqs']} seats",
        f"steps {first} to {view.steps[-1].step}; a character is {'a step' if merged == 1 else f'{merged} steps'}"
        + ("" if view.complete else "; the trace has no end: the program died, or goes on"),
        "",
    ]
    for name, lane in list(zip(names, view.lanes, strict=True))[:height]:
        cells: list[State | None] = [None] * num_columns
        for state, begin, end in lane.merged():
            for at in range((begin - first) // merged, (end - first) // merged + 1):
                known = cells[at]
                if known is None or _WEIGHT.index(state) < _WEIGHT.index(known):
                    cells[at] = state
        row = "".join(_SIGNS[state] if state else " " for state in cells)
        lines.append(f"{name:>{margin - 2}}  {row.rstrip()}")
    if len(view.lanes) > height:
        lines.append(f"{'':>{margin}}and {len(view.lanes) - height:,} more requests")
    lines.append("")
    pool = stats["num_blocks"] * stats["block_size"]
    groups = [view.steps[at : at + merged] for at in range(0, len(view.steps), merged)]
    for label, slots in (
        ("KV used", [sum(step.used for step in group) / len(group) for group in groups]),
        ("KV wasted", [sum(step.wasted for step in group) / len(group) for group in groups]),
    ):
        lines.append(f"{label:>{margin - 2}}  " + "".join(_tenths(value / pool) for value in slots))
    there = {span.state for lane in view.lanes for span in lane.spans}
    lines += ["", *(f"  {_SIGNS[state]}  {MEANINGS[state]}" for state in STATES if state in there)]
    lines += ["  0-9  tenths of the KV slots, # all of them", ""]
    return "\n".join([*lines, *_wrapped([f"{name} {value}" for name, value in figure_rows(view.figures)], width)])


def _tenths(share: float) -> str:
    return "#" if share >= 1 else str(int(share * 10))


def _wrapped(parts: list[str], width: int) -> list[str]:
    """The parts in lines, two spaces in front and between."""
    lines = [""]
    for part in parts:
        if lines[-1] and len(lines[-1]) + len(part) + 2 > width:
            lines.append("")
        lines[-1] += "  " + part
    return lines
