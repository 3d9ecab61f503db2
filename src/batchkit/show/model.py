"""What a trace shows: for each request what it did in each step, for each step what the blocks held, and figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any, Literal, get_args

from ..trace import Trace, TracedRequest

__all__ = [
    "STATES",
    "Figures",
    "Lane",
    "Names",
    "Span",
    "State",
    "StepView",
    "View",
    "cut",
    "figure_rows",
    "stats_of",
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
        """Say what it does from this step on. Its last span is open until the next one, or until `close`."""
        if self.spans:
            last = self.spans[-1]
            if (last.state, last.tokens, last.blocks) == (state, tokens, blocks):
                return
            last.last = step - 1
        self.spans.append(Span(state, step, step, tokens, blocks))

    def close(self, step: int) -> None:
        """Say that this was its last step."""
        if self.spans:
            self.spans[-1].last = step

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
        # Who was aborted before the step ended no step.
        ends = [ended["finished"] for ended in step["ended"] if ended["finished"] > step["time"]]
        if after is not None and step["running"]:
            until = after["time"]
        elif ends:
            until = max(ends)
        else:
            until = step["time"] + step["schedule_s"] + step["execute_s"] + step["sample_s"]
        seconds.append(max(0.0, until - step["time"]))
    return seconds


class Names:
    """Which request a line of a trace means by an id: it may come again after it has ended.

    Attributes:
        lanes: by id, numbers of those that are there in the line's step, in the order in which they came.
    """

    def __init__(self, trace: Trace) -> None:
        self.lanes: dict[str, int] = {}
        self._ends = iter(trace.requests)
        self._num = 0
        self._left: list[str] = []

    def take(self, line: Mapping[str, Any]) -> list[tuple[int, TracedRequest]]:
        """Go on to the next step's line. Returns the lanes that ended, and their ends.

        A lane whose id came again ended before the step; the others ended in it, or before it.

        Raises:
            ValueError: the line ends a request that was never added, or adds one that is still there.
        """
        for request_id in self._left:
            del self.lanes[request_id]
        ends = [next(self._ends) for _ in line["ended"]]
        found = []
        for added in line["added"]:
            request_id = added["request"]
            if request_id in self.lanes:
                end = next((end for end in ends if end.request_id == request_id), None)
                if end is None:
                    raise ValueError(f"request {request_id!r} was added while it was there")
                ends.remove(end)
                found.append((self.lanes.pop(request_id), end))
            self.lanes[request_id] = self._num
            self._num += 1
        self._left = []
        for end in ends:
            if end.request_id in self._left:
                raise ValueError(f"request {end.request_id!r} ended twice")
            found.append((self[end.request_id], end))
            self._left.append(end.request_id)
        return found

    def take_last(self) -> list[tuple[int, TracedRequest]]:
        """The same after the last step. Who came after it has no lane."""
        for request_id in self._left:
            del self.lanes[request_id]
        return [(self.lanes.pop(end.request_id), end) for end in self._ends if end.request_id in self.lanes]

    def __getitem__(self, request_id: str) -> int:
        """Its lane in the line's step.

        Raises:
            ValueError: nobody of that name is there.
        """
        lane = self.lanes.get(request_id)
        if lane is None:
            raise ValueError(f"request {request_id!r} was never added")
        return lane


def stats_of(trace: Trace, name: str) -> Mapping[str, Any]:
    """The engine's values, checked; `name` is the file's.

    Raises:
        ValueError: one is missing, or no such value.
    """
    with _faults_of(name, 1):
        _check_fields(trace.engine, _ENGINE)
        stats: Mapping[str, Any] = trace.engine["stats"]
        _check_fields(stats, _STATS)
        if stats["num_blocks"] < 1 or stats["block_size"] < 1:
            raise ValueError(f"{stats['num_blocks']} blocks of {stats['block_size']} tokens")
    return stats


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
    names = Names(trace)
    stats = stats_of(trace, name)
    block_size = stats["block_size"]
    pool = stats["num_blocks"] * block_size
    last_rows: dict[int, int] = {}  # by sequence, the step
    for number, line in enumerate(trace.steps, 2):
        with _faults_of(name, number):
            _check_step(line)
            if line["step"] != trace.steps[0]["step"] + number - 2:
                raise ValueError(f"step {line['step']} is out of order")
            for row in line["rows"]:
                last_rows[row["seq"]] = line["step"]
    books = _Books(names, lanes, last_rows)
    for number, line in enumerate(trace.steps, 2):
        with _faults_of(name, number):
            lanes += [Lane(added["request"], added) for added in line["added"]]
            ended = names.take(line)
            for ended_lane, end in ended:
                lanes[ended_lane].ended = end
            books.step(line, {ended_lane for ended_lane, _ in ended})
    for lane in lanes:
        if lane.ended is None:
            lane.close(trace.steps[-1]["step"])
    for line, took in zip(trace.steps, step_seconds(trace), strict=True):
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
        stats=stats,
        lanes=tuple(lanes),
        steps=tuple(steps),
        figures=_figures(lanes, steps),
        complete=trace.complete,
    )


_Kinds = Mapping[str, type | tuple[type, ...]]
_NUMBER = (int, float)
# What is read of each line, and what it has to be; of rows it shows.
_ENGINE: _Kinds = {"time": _NUMBER, "stats": dict}
_STATS: _Kinds = {
    "scheduler": str, "allocator": str, "num_blocks": int, "block_size": int, "max_model_len": int,
    "max_num_seqs": int, "max_tokens_per_step": int,
}  # fmt: skip
_STEP: _Kinds = {
    "step": int, "time": _NUMBER, "added": list, "ended": list, "rows": list, "preempted": list, "copies": list,
    "waiting": int, "running": int, "used_blocks": int, "kv_tokens": int, "new_tokens": int, "schedule_s": _NUMBER,
    "execute_s": _NUMBER, "sample_s": _NUMBER, "error": (str, NoneType),
}  # fmt: skip
_ADDED: _Kinds = {
    "request": str, "arrival": _NUMBER, "prompt_tokens": int, "max_tokens": int, "priority": _NUMBER, "n": int,
}  # fmt: skip
_ENDED: _Kinds = {"request": str, "finished": _NUMBER}


def _check_fields(part: Mapping[str, Any], kinds: _Kinds) -> None:
    for field_name, kind in kinds.items():
        if field_name not in part:
            raise ValueError(f"the field {field_name!r} is missing")
        if not isinstance(part[field_name], kind):
            raise ValueError(f"the field {field_name!r} cannot be {part[field_name]!r:.40}")


def _check_step(line: Mapping[str, Any]) -> None:
    _check_fields(line, _STEP)
    for added in line["added"]:
        _check_fields(added, _ADDED)
    for ended in line["ended"]:
        _check_fields(ended, _ENDED)


@contextmanager
def _faults_of(name: str, number: int) -> Iterator[None]:
    """What is wrong with a line is said with its number."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}, line {number}: {error}") from None
    except KeyError as error:
        raise ValueError(f"{name}, line {number}: the field {error} is missing") from None
    except TypeError as error:
        raise ValueError(f"{name}, line {number}: this is no line of a trace: {error}") from None


class _Books:
    """What is known of the sequences between one line and the next."""

    def __init__(self, names: Names, lanes: Sequence[Lane], last_rows: Mapping[int, int]) -> None:
        self._names = names
        self._lanes = lanes
        self._last_rows = last_rows  # by sequence, the step
        self._blocks: dict[int, dict[int, int]] = {}  # length of each table, by lane and sequence
        self._preempted: set[int] = set()
        self._in_step: set[int] = set()  # the step before
        self._num_known = 0

    def step(self, line: Mapping[str, Any], ended: AbstractSet[int]) -> None:
        """Take down in the lanes what changes with this step: many requests may wait for thousands of steps."""
        changed = self._in_step | set(range(self._num_known, len(self._lanes)))
        self._num_known = len(self._lanes)
        for entry in line["preempted"]:
            number = self._names[entry["request"]]
            self._preempted.add(number)
            self._blocks.pop(number, None)
            changed.add(number)
        rows: dict[int, list[Mapping[str, Any]]] = {}
        for row in line["rows"]:
            rows.setdefault(self._names[row["request"]], []).append(row)
        for number, own in rows.items():
            lane = self._lanes[number]
            self._preempted.discard(number)
            tables = self._blocks.setdefault(number, {})
            for row in own:
                if "blocks" in row:
                    tables[row["seq"]] = row["blocks_from"] + len(row["blocks"])
                if row.get("samples") and not line["error"]:
                    sample = row.get("sample", 0)
                    lane.sampled[sample] = lane.sampled.get(sample, 0) + 1
            if lane.added["n"] > 1:  # a sample that has had its last row has left, and its blocks are another's
                for seq in [seq for seq in tables if self._last_rows[seq] < line["step"]]:
                    del tables[seq]
            tokens = sum(row["tokens"] for row in own)
            lane.put(_state(own, lane.added["prompt_tokens"]), line["step"], tokens, sum(tables.values()))
        for number in changed - rows.keys() - ended:
            blocks = sum(self._blocks.get(number, {}).values())
            if number in self._preempted:
                self._lanes[number].put("preempted", line["step"], 0, 0)
            else:
                self._lanes[number].put("paused" if blocks else "waiting", line["step"], 0, blocks)
        for number in ended:
            self._lanes[number].close(line["step"] if number in rows else line["step"] - 1)
            self._preempted.discard(number)
            self._blocks.pop(number, None)
        self._in_step = set(rows) - ended


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
    used, wasted, free = (
        sum(weight * slots for weight, slots in zip(weights, each, strict=True)) / pool
        for each in ([step.used for step in steps], [step.wasted for step in steps], [step.free for step in steps])
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
        free=free,
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
