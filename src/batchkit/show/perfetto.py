"""A trace in the JSON format of Chrome's tracing, which ui.perfetto.dev opens.

The format is the "Trace Event Format" of the Chromium project's catapult; times are microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .model import View

__all__ = ["chrome_trace"]


def chrome_trace(views: Sequence[View]) -> dict[str, Any]:
    """One process for each run, with a thread for each request and counters of KV slots, tokens and sequences."""
    events: list[dict[str, Any]] = []
    for pid, view in enumerate(views, 1):
        events += _events(view, pid)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(view: View, pid: int) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": _name(view)}}
    ]
    if not view.steps:
        return events
    first, start = view.steps[0].step, view.steps[0].time
    for step in view.steps:
        counters = {
            "KV slots": {"used": step.used, "wasted": step.wasted, "free": step.free},
            "tokens": {"computed": step.tokens, "sampled": step.new_tokens},
            "sequences": {"rows": step.rows, "waiting": step.waiting},
        }
        events += [
            {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": _us(step.time - start), "args": values}
            for name, values in counters.items()
        ]
    for tid, lane in enumerate(view.lanes, 1):
        events.append(
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": f"request {lane.request_id}"}}
        )
        for span in lane.spans:
            begin, last = view.steps[span.first - first], view.steps[span.last - first]
            ts = _us(begin.time - start)
            events.append(
                {
                    "ph": "X",
                    "name": span.state,
                    "cat": "request",
                    "pid": pid,
                    "tid": tid,
                    "ts": ts,
                    "dur": round(_us(last.time + last.seconds - start) - ts, 3),
                    "args": {
                        "steps": f"{span.first}-{span.last}",
                        "tokens per step": span.tokens,
                        "blocks": span.blocks,
                    },
                }
            )
    return events


def _name(view: View) -> str:
    return f"{view.stats['scheduler']} ({view.name})"


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
