"""What arrives, when, and how long it really gets; and the loop that plays it to an engine."""

from __future__ import annotations

import math
import random
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import accumulate
from numbers import Integral
from typing import Any, Protocol

from .clocks import Clock
from .params import SamplingParams
from .types import KVGeometry, RequestOutput

__all__ = ["Played", "Session", "WorkloadRecord", "play", "simulate"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadRecord:
    """One request of a workload: what is declared, what really happens, and what is guessed.

    Args:
        prompt: token ids, or how many; random ones are then made.
        max_tokens: declared: what reservation and admission see.
        output_tokens: what really happens, under a `TrueLengths` runner. Default: `max_tokens`.
        predicted: a guess of `output_tokens` that a policy may read as ``request.length_hint``.
        arrival, deadline: seconds from the start.
        priority, metadata: see `Request`.
    """

    prompt: int | Sequence[int]
    max_tokens: int
    output_tokens: int | None = None
    predicted: int | None = None
    arrival: float = 0.0
    deadline: float | None = None
    priority: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not math.isfinite(self.arrival):
            raise ValueError(f"arrival must be a time in seconds, got {self.arrival}")
        if isinstance(self.prompt, int) and self.prompt < 1:
            raise ValueError(f"a prompt needs at least 1 token, got {self.prompt}")
        if self.output_tokens is not None and not 1 <= self.output_tokens <= self.max_tokens:
            raise ValueError(
                f"output_tokens must be between 1 and max_tokens ({self.max_tokens}), got {self.output_tokens}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """Requests of one client, each sent when the one before has ended and the client has thought.

    A closed loop is some sessions of unrelated requests; a conversation is a session with `keeps_context`.

    Args:
        turns: the requests, at least one. The first arrives at its `arrival`; those of the others must be 0.
        think_s: seconds between the end of a request and the next one's arrival: one for each turn but the first.
        keeps_context: each prompt is preceded by all that was said before: prompts and outputs of the turns so far.
    """

    turns: tuple[WorkloadRecord, ...]
    think_s: tuple[float, ...] = ()
    keeps_context: bool = False

    def __post_init__(self) -> None:
        if not self.turns:
            raise ValueError("a session needs at least one turn")
        if len(self.think_s) != len(self.turns) - 1:
            raise ValueError(f"{len(self.turns)} turns need {len(self.turns) - 1} times to think, got {self.think_s}")
        for seconds in self.think_s:
            if not 0 <= seconds < math.inf:
                raise ValueError(f"think_s must be finite and at least 0 seconds, got {seconds}")
        for number, turn in enumerate(self.turns[1:], 2):
            if turn.arrival or turn.deadline is not None:
                raise ValueError(
                    f"turn {number} of a session arrives when the one before has ended, and cannot have an arrival "
                    f"({turn.arrival}) or a deadline ({turn.deadline}) of its own"
                )


class _Engine(Protocol):
    """What `simulate` needs of an engine."""

    @property
    def clock(self) -> Clock: ...
    @property
    def geometry(self) -> KVGeometry: ...
    def add_request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        priority: int,
        arrival: float,
        deadline: float | None,
        length_hint: int | None,
        metadata: Mapping[str, Any],
    ) -> str: ...
    def abort(self, request_id: str) -> bool: ...
    def step(self) -> list[RequestOutput]: ...
    def wait(self, until: float | None = None) -> None: ...
    def has_unfinished(self) -> bool: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """A request of a load that has ended.

    Attributes:
        session, turn: which it was: the place in the load, and in its session.
        record: as given.
        output: its last one.
    """

    session: int
    turn: int
    record: WorkloadRecord
    output: RequestOutput


def play(
    engine: _Engine, load: Iterable[WorkloadRecord | Session], *, seed: int = 0, until_s: float | None = None
) -> Generator[Played, None, None]:
    """Play a load to an engine: add each request when it is due, step, and give each that ends.

    Works on any engine; with a `VirtualClock` it takes as long as the bookkeeping takes, with a real clock as long as
    the load. Greedy; the model's EOS tokens are not masked, see `TrueLengths`. Nothing is kept of what was given.

    Args:
        engine: without other requests.
        load: in any order; a record alone is a session of one turn.
        seed: of the prompts that are given as a length. A prompt depends on it, on its place in the load, and on
            nothing else.
        until_s: end after so many seconds. Requests that have arrived by then and are not done are aborted and given
            with that finish reason; those due later never come.

    Raises:
        ValueError: a record says ``output_tokens``, and the runner does not heed it.
    """
    clock, vocabulary = engine.clock, range(engine.geometry.vocab_size)
    has_eos = bool(engine.geometry.eos_token_ids)
    start = clock()
    sessions = [item if isinstance(item, Session) else Session(turns=(item,)) for item in load]
    firsts = [0, *accumulate(len(session.turns) for session in sessions)]
    due = [(session.turns[0].arrival, index, 0) for index, session in enumerate(sessions)]
    heapify(due)
    said: dict[int, list[int]] = {}  # by session, where the context is kept
    live: dict[str, tuple[int, int]] = {}

    def add(arrival: float, index: int, turn: int) -> None:
        session = sessions[index]
        record = session.turns[turn]
        prompt = _prompt(record, f"{seed}-{firsts[index] + turn}", vocabulary)
        if session.keeps_context:
            prompt = said[index] = [*said.get(index, ()), *prompt]
        length = record.output_tokens or record.max_tokens
        params = SamplingParams(
            temperature=0,
            max_tokens=record.max_tokens,
            detokenize=False,
            # `TrueLengths` needs something that ends a request.
            stop_token_ids=() if has_eos or length == record.max_tokens else (0,),
        )
        request_id = engine.add_request(
            prompt,
            params,
            priority=record.priority,
            arrival=start + arrival,
            deadline=None if record.deadline is None else start + record.deadline,
            length_hint=record.predicted,
            metadata={**record.metadata, "output_tokens": length},
        )
        live[request_id] = index, turn

    def taken(output: RequestOutput) -> Played:
        index, turn = live.pop(output.request_id)
        session = sessions[index]
        record = session.turns[turn]
        _check_length(record, output)
        if turn + 1 < len(session.turns):
            if session.keeps_context:
                said[index] += output.token_ids
            ended = output.timings.finished
            assert ended is not None
            heappush(due, (ended - start + session.think_s[turn], index, turn + 1))
        else:
            said.pop(index, None)
        return Played(session=index, turn=turn, record=record, output=output)

    end = math.inf if until_s is None else start + until_s
    while (due or live) and (clock() < end):
        while due and start + due[0][0] <= clock():
            add(*heappop(due))
        coming = min(end, start + due[0][0]) if due else end
        if not engine.has_unfinished():
            clock.sleep_until(coming)
            continue
        for output in engine.step():
            if output.finished:
                yield taken(output)
        engine.wait(None if math.isinf(coming) else coming)
    while due and start + due[0][0] <= end:  # they came while the last step ran
        add(*heappop(due))
    for request_id in list(live):
        engine.abort(request_id)
    while live:
        for output in engine.step():
            if output.finished:
                yield taken(output)


def simulate(engine: _Engine, load: Iterable[WorkloadRecord | Session], *, seed: int = 0) -> list[RequestOutput]:
    """`play` a load to its end, and return the final outputs in its order, turn after turn within a session."""
    results = {(one.session, one.turn): one.output for one in play(engine, load, seed=seed)}
    return [results[place] for place in sorted(results)]


def true_length(lengths: int | Sequence[int], sample_index: int) -> int:
    """What a sample gives, of a length for all samples of a request or one for each."""
    return int(lengths) if isinstance(lengths, (int, Integral)) else int(lengths[sample_index])


def _check_length(record: WorkloadRecord, output: RequestOutput) -> None:
    wanted, given = record.output_tokens, output.outputs[0].num_tokens
    if wanted is not None and given != wanted and output.finish_reason in ("stop", "length"):
        raise ValueError(
            f"a record has output_tokens={wanted}, and the request gave {given}: put TrueLengths around the runner"
        )


def _prompt(record: WorkloadRecord, seed: str, vocabulary: range) -> Sequence[int]:
    if not isinstance(record.prompt, int):
        return record.prompt
    return random.Random(seed).choices(vocabulary, k=record.prompt)
