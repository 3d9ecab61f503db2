"""What a trace shows: for each request what it did in each step, for each step what the blocks held, and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from ..trace import Trace, TracedRequest

__all__ = [
    "STATES",
    "Figures",
    "Lane",
    "Span",
    "State",
    "StepView",
    "View",
    "cut",
    "figure_rows",
    "step_seconds",
    "view",
]

State = Literal["waiting", "prefill", "decode", "paused", "held", "preempted"]
STATES: tuple[State, ...] = get_args(State)

MEANINGS: dict[State, str] = {
    "waiting": "waiting: has had no row yet",
    "prefill": "prefill: computes its prompt, or again what it lost",
    "decode": "decode: computes one token",
    "paused": "paused: keeps its blocks and has no row",
    "held": "held: has finished and keeps its seat",
    "preempted": "preempted: has lost its blocks",
}


@dataclass(slots=True)
class Span:
    """Steps side by side in which a request did the same.

    Attributes:
        state: what it did.
        first, last: numbers of steps.
        tokens: computed for it in each of them.
        blocks: that its samples' tables name.
    """

    state: State
    first: int
    last: int
    tokens: int
    blocks: int


@dataclass(slots=True)
class Lane:
    """A request from its arrival to its end.

    Attributes:
        request_id: the caller's; two lanes may have the same, one after the other.
        added: what the trace said when it came.
        spans: without gaps.
        sampled: tokens by sample.
        ended: None where the trace does not say.
    """

    request_id: str
    added: Mapping[str, Any]
    spans: list[Span] = field(default_factory=list)
    sampled: dict[int, int] = field(default_factory=dict)
    ended: TracedRequest | None = None

    def put(self, state: State, step: int, tokens: int, blocks: int) -> None:
        """Say what it does in the next step."""
        if self.spans:
            last = self.spans[-1]
            if (last.state, last.tokens, last.blocks) == (state, tokens, blocks) and last.last == step - 1:
                last.last = step
                return
        self.spans.append(Span(state, step, step, tokens, blocks))

    @property
    def first_row(self) -> int | None:
        """The number of the first step in which it had a row; None if it had none."""
        return next((span.first for span in self.spans if span.state != "waiting"), None)

    def merged(self) -> list[tuple[State, int, int]]:
        """Its spans by state alone: state, first and last step."""
        found: list[tuple[State, int, int]] = []
        for span in self.spans:
            if found and found[-1][0] == span.state and found[-1][2] == span.first - 1:
                found[-1] = (span.state, found[-1][1], span.last)
            else:
                found.append((span.state, span.first, span.last))
        return found


@dataclass(frozen=True, slots=True)
class StepView:
    """A step.

    Attributes:
        step, time: its number, and when it began.
        seconds: it took, by the engine's clock.
        used, wasted, free: KV slots that hold a token's keys and values; held ones that do not; those of free blocks.
        rows, idle: rows, and idle ones among them.
        tokens, new_tokens: computed; sampled and kept.
        waiting: sequences after it.
        preempted: how often a sequence lost its blocks.
        policy_s: seconds in the policy, by the system's clock.
    """

    step: int
    time: float
    seconds: float
    used: int
    wasted: int
    free: int
    rows: int
    idle: int
    tokens: int
    new_tokens: int
    waiting: int
    preempted: int
    policy_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What a run adds up to; shares of the KV pool are weighted by time.

    Attributes:
        steps, seconds: how many; from the beginning of the first to the end of the last.
        prompt_tokens: of requests that had their first row in these steps.
        new_tokens: sampled and kept.
        mean_batch: rows of a step without idle ones, in the mean over steps.
        idle_rows: in all.
        preemptions: in all.
        used, wasted, free: shares of the pool that add up to 1.
        policy_s: seconds in the policy, by the system's clock.
    """

    steps: int
    seconds: float
    prompt_tokens: int
    new_tokens: int
    mean_batch: float
    idle_rows: int
    preemptions: int
    used: float
    wasted: float
    free: float
    policy_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """A run as all pictures show it.

    Attributes:
        name: for people.
        stats: the engine's, when it began; see `EngineStats`.
        lanes: requests, in the order in which they came.
        steps: as traced.
        figures: of all steps.
        complete: see `Trace`.
    """

    name: str
    stats: Mapping[str, Any]
    lanes: tuple[Lane, ...]
    steps: tuple[StepView, ...]
    figures: Figures
    complete: bool


def cut(view: View, first: int | None, last: int | None) -> View:
    """Of a view the steps from `first` to `last`, both included, the requests that were there, and their figures.

    Raises:
        ValueError: there are no such steps.
    """
    low = view.steps[0].step if first is None else first
    high = view.steps[-1].step if last is None else last
    steps = tuple(step for step in view.steps if low <= step.step <= high)
    if not steps:
        raise ValueError(
            f"{view.name} has steps {view.steps[0].step} to {view.steps[-1].step}, and none of {low}:{high}"
        )
    figures = _figures(view.lanes, steps)
    lanes = []
    for lane in view.lanes:
        spans = [
            replace(span, first=max(span.first, low), last=min(span.last, high))
            for span in lane.spans
            if span.first <= high and span.last >= low
        ]
        if spans:
            lanes.append(replace(lane, spans=spans))
    return replace(view, lanes=tuple(lanes), steps=steps, figures=figures)


def step_seconds(trace: Trace) -> list[float]:
    """How long each step took by the engine's clock: until the next one, or, if nobody runs then, until its last end.

    Where nothing tells, as of the last step of a program that died, the seconds measured inside of the step count.
    """
    steps = trace.steps
    seconds = []
    for step, after in zip(steps, (*steps[1:], None), strict=True):
        ends = [ended["finished"] for ended in step["ended"]]
        if after is not None and step["running"]:
            until = after["time"]
        elif ends:
            until = max(ends)
        else:
            until = step["time"] + step["schedule_s"] + step["execute_s"] + step["sample_s"]
        seconds.append(max(0.0, until - step["time"]))
    return seconds


def view(trace: Trace, name: str) -> View:
    """What to draw of a trace.

    Args:
        trace: as read.
        name: for people, and for faults: the file's.

    Raises:
        ValueError: a line speaks of a request that was never added, or lacks a field; with the line's number.
    """
    lanes: list[Lane] = []
    steps: list[StepView] = []
    by_id: dict[str, Lane] = {}
    books = _Books()
    ends = iter(trace.requests)
    try:
        pool = trace.engine["stats"]["num_blocks"] * trace.engine["stats"]["block_size"]
        trace.engine["stats"]["scheduler"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{name}, line 1: this is no line of a trace: {error!r}") from None
    for number, line in enumerate(trace.steps, 2):
        try:
            if line["step"] != trace.steps[0]["step"] + number - 2:
                raise ValueError(f"{name}, line {number}: step {line['step']} is out of order")
            for added in line["added"]:
                by_id[added["request"]] = lane = Lane(added["request"], added)
                lanes.append(lane)
            gone = {ended["request"]: next(ends) for ended in line["ended"]}
            books.step(line, by_id, gone)
            for request_id, ended in gone.items():
                by_id.pop(request_id).ended = ended
        except KeyError as error:
            known = error.args[0] in _FIELDS
            raise ValueError(
                f"{name}, line {number}: "
                + (f"the field {error} is missing" if known else f"request {error} was never added")
            ) from None
        except TypeError as error:
            raise ValueError(f"{name}, line {number}: this is no line of a trace: {error}") from None
    try:
        seconds = step_seconds(trace)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{name}: a step lacks a time: {error!r}") from None
    block_size = trace.engine["stats"]["block_size"]
    for line, took in zip(trace.steps, seconds, strict=True):
        held = line["used_blocks"] * block_size
        used = max(0, min(line["kv_tokens"], held))
        rows = line["rows"]
        steps.append(
            StepView(
                step=line["step"],
                time=line["time"],
                seconds=took,
                used=used,
                wasted=held - used,
                free=pool - held,
                rows=len(rows),
                idle=sum(bool(row.get("idle")) for row in rows),
                tokens=sum(row["tokens"] for row in rows),
                new_tokens=line["new_tokens"],
                waiting=line["waiting"],
                preempted=len(line["preempted"]),
                policy_s=line["schedule_s"],
            )
        )
    for lane in lanes:
        _tell_held_from_paused(lane)
    return View(
        name=name,
        stats=trace.engine["stats"],
        lanes=tuple(lanes),
        steps=tuple(steps),
        figures=_figures(lanes, steps),
        complete=trace.complete,
    )


_FIELDS = frozenset(
    [
        "added",
        "ended",
        "rows",
        "preempted",
        "request",
        "seq",
        "start",
        "tokens",
        "prompt_tokens",
        "step",
        "time",
        "waiting",
        "running",
        "used_blocks",
        "kv_tokens",
        "new_tokens",
        "blocks_from",
        "blocks",
        "schedule_s",
        "execute_s",
        "sample_s",
        "arrival",
        "max_tokens",
        "priority",
        "n",
    ]
)


class _Books:
    """What is known of the sequences between one line and the next."""

    def __init__(self) -> None:
        self._blocks: dict[str, dict[int, int]] = {}  # length of each table, by request and sequence
        self._preempted: set[str] = set()

    def step(self, line: Mapping[str, Any], by_id: Mapping[str, Lane], gone: Mapping[str, TracedRequest]) -> None:
        """Put a cell into the lane of everybody who is alive in this step."""
        for request_id in gone:
            by_id[request_id]  # the KeyError names it
        for entry in line["preempted"]:
            by_id[entry["request"]]
            self._preempted.add(entry["request"])
            self._blocks.pop(entry["request"], None)
        rows: dict[str, list[Mapping[str, Any]]] = {}
        for row in line["rows"]:
            rows.setdefault(row["request"], []).append(row)
        for request_id, own in rows.items():
            lane = by_id[request_id]
            self._preempted.discard(request_id)
            tables = self._blocks.setdefault(request_id, {})
            for row in own:
                if "blocks" in row:
                    tables[row["seq"]] = row["blocks_from"] + len(row["blocks"])
                if row.get("samples") and not line.get("error"):
                    sample = row.get("sample", 0)
                    lane.sampled[sample] = lane.sampled.get(sample, 0) + 1
            tokens = sum(row["tokens"] for row in own)
            lane.put(_state(own, lane.added["prompt_tokens"]), line["step"], tokens, sum(tables.values()))
        for request_id, lane in by_id.items():
            if request_id in rows or request_id in gone:
                continue
            blocks = sum(self._blocks.get(request_id, {}).values())
            if request_id in self._preempted:
                lane.put("preempted", line["step"], 0, 0)
            else:
                lane.put("paused" if blocks else "waiting", line["step"], 0, blocks)
        for request_id in gone:
            self._preempted.discard(request_id)
            self._blocks.pop(request_id, None)


def _state(rows: Sequence[Mapping[str, Any]], prompt_tokens: int) -> State:
    """Of a request that has rows."""
    busy = [row for row in rows if not row.get("idle")]
    if not busy:
        return "held"
    if any(row["start"] >= prompt_tokens and row["tokens"] == 1 and row.get("samples") for row in busy):
        return "decode"
    return "prefill"


def _tell_held_from_paused(lane: Lane) -> None:
    """Whoever has had its last row and ended by itself was held, not paused, from then on."""
    if lane.ended is None or lane.ended.finish_reason not in ("stop", "length"):
        return
    for span in reversed(lane.spans):
        if span.state == "paused":
            span.state = "held"
        elif span.state != "held":
            return


def _figures(lanes: Sequence[Lane], steps: Sequence[StepView]) -> Figures:
    if not steps:
        return Figures(
            steps=0, seconds=0.0, prompt_tokens=0, new_tokens=0, mean_batch=0.0, idle_rows=0, preemptions=0,
            used=0.0, wasted=0.0, free=1.0, policy_s=0.0,
        )  # fmt: skip
    busy = sum(step.seconds for step in steps)
    weights = [step.seconds if busy else 1.0 for step in steps]
    pool = (steps[0].used + steps[0].wasted + steps[0].free) * sum(weights)
    used, wasted = (
        sum(weight * slots for weight, slots in zip(weights, each, strict=True)) / pool
        for each in ([step.used for step in steps], [step.wasted for step in steps])
    )
    idle = sum(step.idle for step in steps)
    return Figures(
        steps=len(steps),
        seconds=steps[-1].time + steps[-1].seconds - steps[0].time,
        prompt_tokens=sum(
            lane.added["prompt_tokens"]
            for lane in lanes
            if lane.first_row is not None and steps[0].step <= lane.first_row <= steps[-1].step
        ),
        new_tokens=sum(step.new_tokens for step in steps),
        mean_batch=(sum(step.rows for step in steps) - idle) / len(steps),
        idle_rows=idle,
        preemptions=sum(step.preempted for step in steps),
        used=used,
        wasted=wasted,
        free=1.0 - used - wasted,
        policy_s=sum(step.policy_s for step in steps),
    )


def figure_rows(figures: Figures) -> list[tuple[str, str]]:
    """The figures with their names, as every view prints them."""
    seconds = figures.seconds

    def rate(tokens: int) -> str:
        return f"{tokens / seconds:,.1f} tok/s" if seconds else "-"

    return [
        ("steps", f"{figures.steps:,}"),
        ("seconds", f"{seconds:,.4g}"),
        ("prompt", rate(figures.prompt_tokens)),
        ("generated", rate(figures.new_tokens)),
        ("mean batch", f"{figures.mean_batch:.2f}"),
        ("idle rows", f"{figures.idle_rows:,}"),
        ("preemptions", f"{figures.preemptions:,}"),
        ("KV used", f"{figures.used:.1%}"),
        ("KV wasted", f"{figures.wasted:.1%}"),
        ("KV free", f"{figures.free:.1%}"),
        ("in policy", f"{figures.policy_s * 1e3:,.1f} ms"),
    ]
