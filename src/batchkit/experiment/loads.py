"""Workloads: how long requests are, what they declare, when they arrive, and who sends them.

A `Workload` is a pure function of a seed. Every quantity has a source of randomness of its own, so that the same seed
gives the same lengths at another rate of arrivals, and at another declared length.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, Generic, Literal, TypeVar

from ..workload import Session, WorkloadRecord

__all__ = [
    "Draws",
    "LoadFacts",
    "Requests",
    "Workload",
    "all_at_once",
    "burst",
    "check_speed",
    "closed_loop",
    "conversations",
    "evenly",
    "exponential",
    "exponential_lengths",
    "exponential_think",
    "facts",
    "fixed",
    "fixed_think",
    "make_record",
    "named_sigma",
    "open_loop",
    "original",
    "original_lengths",
    "poisson",
    "recorded",
    "turns",
    "uniform",
    "with_predictions",
]

T = TypeVar("T")

Load = tuple["WorkloadRecord | Session", ...]

_RAISED = "zeros_raised"
"""Key in a record's metadata: how many of its lengths were 0 and run as 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What is played to every policy of a comparison.

    Attributes:
        name: one line for people, with all settings.
        make: the load of a seed; the same one in every process.
    """

    name: str
    make: Callable[[int], Load]


@dataclass(frozen=True, slots=True)
class Draws(Generic[T]):
    """Where numbers come from: lengths in tokens, arrivals in seconds from the start, times to think in seconds.

    Attributes:
        name: for people, with its settings.
        draw: gives as many as asked for.
    """

    name: str
    draw: Callable[[int, random.Random], list[T]]


def _above_zero(what: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{what} must be a finite number above 0, got {value}")


def check_speed(speed: float) -> None:
    """Raise `ValueError` unless time can run so many times as fast."""
    _above_zero("the speed", speed)


def _exponential(mean: float, rng: random.Random) -> float:
    return mean * -math.log(1.0 - rng.random())


# --- lengths ---------------------------------------------------------------------------------------------------------


def fixed(tokens: int) -> Draws[int]:
    """All of one length."""
    _above_zero("a length", tokens)
    return Draws(f"{tokens:,} tokens", lambda n, rng: [tokens] * n)


def uniform(low: int, high: int) -> Draws[int]:
    """Each length from `low` to `high` tokens, both included, equally likely."""
    if not 1 <= low <= high:
        raise ValueError(f"uniform lengths need 1 <= low <= high, got {low} and {high}")
    return Draws(f"{low:,} to {high:,} tokens", lambda n, rng: [rng.randint(low, high) for _ in range(n)])


def exponential(mean: float, cap: int) -> Draws[int]:
    """See `exponential_lengths`."""
    _check_exponential(mean, cap)
    return Draws(
        f"Exp({mean:,g}) tokens, {cap:,} at most by rejection",
        lambda n, rng: exponential_lengths(n, mean=mean, cap=cap, rng=rng),
    )


def exponential_lengths(n: int, *, mean: float, cap: int, rng: random.Random) -> list[int]:
    """Exponential lengths by rejection: drawn and rounded, and drawn again while above the cap.

    Their mean is below `mean`: the cap cuts the distribution and does not pile up what is above it. Zeros are among
    them; `make_record` runs those as 1.

    Raises:
        ValueError: the cap is so far below the mean that nearly all would be rejected.
    """
    _check_exponential(mean, cap)
    lengths: list[int] = []
    while len(lengths) < n:
        length = round(_exponential(mean, rng))
        if length <= cap:
            lengths.append(length)
    return lengths


def _check_exponential(mean: float, cap: int) -> None:
    _above_zero("the mean length", mean)
    if cap < 1:
        raise ValueError(f"the cap of exponential lengths must be at least 1, got {cap}")
    kept = -math.expm1(-(cap + 0.5) / mean)
    if kept < 1e-3:
        raise ValueError(f"of exponential lengths with mean {mean:,g} only one in {1 / kept:,.0f} is {cap} or below")


def original(cap: int) -> Draws[int]:
    """The output lengths of the 2023 experiment, see `original_lengths`. The same for every seed."""
    _check_exponential(128, cap)
    return Draws(f"the 2023 list, {cap:,} at most", lambda n, rng: original_lengths(cap, n))


def original_lengths(cap: int, n: int) -> list[int]:
    """The output lengths that the authors of the 2023 experiment drew for `n` prompts of 512 tokens.

    Their program seeded Python's generator with 0xCADE, drew the prompts, seeded numpy's with the next number, and drew
    exponential lengths of mean 128 by rejection. numpy's old generator is the Mersenne Twister of Python with another
    way of seeding, so it is not needed. Zeros are among them.

    Source: anyscale/llm-continuous-batching-benchmarks.
    """
    return exponential_lengths(n, mean=128, cap=cap, rng=_numpy_random(_original_seed(n)))


@cache
def _original_seed(n: int) -> int:
    """The number that comes after all prompts: which one depends on how many there are."""
    rng = random.Random(0xCADE)
    for length in [rng.randint(512, 512) for _ in range(n)]:  # a choice of one takes random bits all the same
        for _ in range(length):
            rng.randint(10, 50_000)
    return rng.randint(0, 1_000_000)


def _numpy_random(seed: int) -> random.Random:
    """A generator in the state of ``numpy.random.seed(seed)``: Knuth's filling of the Mersenne Twister."""
    words = [seed]
    for number in range(1, 624):
        last = words[-1]
        words.append((1_812_433_253 * (last ^ (last >> 30)) + number) & 0xFFFF_FFFF)
    rng = random.Random()
    rng.setstate((3, (*words, 624), None))
    return rng


# --- times -----------------------------------------------------------------------------------------------------------


def burst() -> Draws[float]:
    """All at the start."""
    return Draws("all at once", lambda n, rng: [0.0] * n)


def evenly(rate: float) -> Draws[float]:
    """So many per second, at equal distances, the first at the start."""
    _above_zero("the rate", rate)
    return Draws(f"evenly at {rate:g}/s", lambda n, rng: [number / rate for number in range(n)])


def poisson(rate: float) -> Draws[float]:
    """So many per second in the mean, each independent of the others. Another rate stretches the same arrivals."""
    _above_zero("the rate", rate)
    return Draws(
        f"Poisson at {rate:g}/s", lambda n, rng: list(accumulate(_exponential(1, rng) / rate for _ in range(n)))
    )


def recorded(times_s: Sequence[float], *, speed: float = 1.0) -> Draws[float]:
    """Arrivals that happened, `speed` times as fast; the first comes at the start.

    Raises:
        ValueError: they are not sorted; or, when drawn, there are fewer than needed.
    """
    check_speed(speed)
    for number, (before, after) in enumerate(pairwise(times_s), 1):
        if not before <= after:
            raise ValueError(f"arrivals must be sorted: number {number} is at {after} s, the one before at {before} s")

    def draw(n: int, rng: random.Random) -> list[float]:
        if n > len(times_s):
            raise ValueError(f"{n:,} requests, and {len(times_s):,} arrivals are recorded")
        return [(time_s - times_s[0]) / speed for time_s in times_s[:n]]

    return Draws(f"as recorded at {speed:g} times the speed", draw)


def fixed_think(seconds: float) -> Draws[float]:
    """Every client thinks equally long."""
    if not 0 <= seconds < math.inf:
        raise ValueError(f"a time to think must be finite and at least 0, got {seconds}")
    return Draws(f"{seconds:g} s", lambda n, rng: [float(seconds)] * n)


def exponential_think(mean_s: float) -> Draws[float]:
    """Exponential times to think."""
    _above_zero("the mean time to think", mean_s)
    return Draws(f"Exp({mean_s:g}) s", lambda n, rng: [_exponential(mean_s, rng) for _ in range(n)])


# --- requests --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Requests:
    """What the requests of a workload are like.

    Attributes:
        prompts, outputs: lengths; an output's is what really happens.
        declared: what a request says as ``max_tokens``: its true length, or the same number for all.
        prediction_sigma: `WorkloadRecord.predicted` is the true length times a log-normal error with this sigma; 0 is
            an oracle, None no prediction.
    """

    prompts: Draws[int]
    outputs: Draws[int]
    declared: int | Literal["true"] = "true"
    prediction_sigma: float | None = None

    def __post_init__(self) -> None:
        if self.declared != "true" and (not isinstance(self.declared, int) or self.declared < 1):
            raise ValueError(f"declared must be 'true' or a number of tokens, got {self.declared!r}")
        _check_sigma(self.prediction_sigma)

    @property
    def name(self) -> str:
        """One line for people."""
        declared = "their true lengths" if self.declared == "true" else f"{self.declared:,} tokens"
        return f"prompts: {self.prompts.name}; outputs: {self.outputs.name}; declared: {declared}" + named_sigma(
            self.prediction_sigma
        )

    def make(self, seed: int, arrivals_s: Sequence[float]) -> list[WorkloadRecord]:
        """A request for each arrival.

        Raises:
            ValueError: an output is longer than `declared`.
        """
        n = len(arrivals_s)
        prompts = self.prompts.draw(n, random.Random(f"{seed}-prompts"))
        outputs = self.outputs.draw(n, random.Random(f"{seed}-outputs"))
        cap = None if self.declared == "true" else self.declared
        records = [
            make_record(prompt, output, max_tokens=cap, arrival=arrival)
            for prompt, output, arrival in zip(prompts, outputs, arrivals_s, strict=True)
        ]
        return with_predictions(records, self.prediction_sigma, seed)


def make_record(
    prompt_tokens: int,
    output_tokens: int,
    *,
    max_tokens: int | None = None,
    arrival: float = 0.0,
    metadata: Mapping[str, Any] | None = None,
) -> WorkloadRecord:
    """A record of lengths that were drawn or recorded; those of 0 run as 1, and `LoadFacts` counts them.

    Args:
        prompt_tokens: of the prompt.
        output_tokens: what really happens.
        max_tokens: declared. Default: the true length.
        arrival: see `WorkloadRecord`.
        metadata: see `WorkloadRecord`.

    Raises:
        ValueError: a length is negative, or the output is longer than declared.
    """
    raised = (prompt_tokens == 0) + (output_tokens == 0)
    output = output_tokens or 1
    return WorkloadRecord(
        prompt=prompt_tokens or 1,
        max_tokens=output if max_tokens is None else max_tokens,
        output_tokens=output,
        arrival=arrival,
        metadata={**(metadata or {}), **({_RAISED: raised} if raised else {})},
    )


def with_predictions(records: Iterable[WorkloadRecord], sigma: float | None, seed: int) -> list[WorkloadRecord]:
    """The records with a guess of each output: the true length times a log-normal error, at most what is declared.

    Args:
        records: left as they are if `sigma` is None.
        sigma: of the error's logarithm; 0 guesses right.
        seed: of the errors.
    """
    _check_sigma(sigma)
    if sigma is None:
        return list(records)
    rng = random.Random(f"{seed}-predictions")

    def guess(record: WorkloadRecord) -> int:
        output = record.output_tokens or record.max_tokens
        return min(record.max_tokens, max(1, round(output * math.exp(sigma * rng.gauss(0, 1)))))

    return [replace(record, predicted=guess(record)) for record in records]


def _check_sigma(sigma: float | None) -> None:
    if sigma is not None and not 0 <= sigma < 10:
        raise ValueError(f"the sigma of predictions must be at least 0 and below 10, got {sigma}")


def named_sigma(sigma: float | None) -> str:
    """What a workload's name says of its predictions."""
    return "" if sigma is None else f"; predicted: the true lengths times exp(N(0, {sigma:g}))"


# --- workloads -------------------------------------------------------------------------------------------------------


def open_loop(requests: Requests, *, num_requests: int, arrivals: Draws[float]) -> Workload:
    """Requests that arrive whatever the engine does."""
    _above_zero("num_requests", num_requests)

    def make(seed: int) -> Load:
        return tuple(requests.make(seed, arrivals.draw(num_requests, random.Random(f"{seed}-arrivals"))))

    return Workload(name=f"{num_requests:,} requests {arrivals.name}; {requests.name}", make=make)


def all_at_once(requests: Requests, *, num_requests: int) -> Workload:
    """All requests at the start, as a throughput test sends them."""
    return open_loop(requests, num_requests=num_requests, arrivals=burst())


def closed_loop(
    requests: Requests, *, clients: int, requests_per_client: int, think: Draws[float] | None = None
) -> Workload:
    """Clients that each send a request, wait for its end, think, and send the next.

    Each begins by thinking, so that they do not all come at once unless no one thinks, which is the default.
    """
    think = think or fixed_think(0)
    _above_zero("clients", clients)
    _above_zero("requests_per_client", requests_per_client)

    def make(seed: int) -> Load:
        pauses = think.draw(clients * requests_per_client, random.Random(f"{seed}-think"))
        records = requests.make(seed, [0.0] * len(pauses))
        load = []
        for first in range(0, len(records), requests_per_client):
            turns = records[first : first + requests_per_client]
            begins, *others = pauses[first : first + requests_per_client]
            load.append(Session(turns=(replace(turns[0], arrival=begins), *turns[1:]), think_s=tuple(others)))
        return tuple(load)

    name = f"{clients:,} clients with {requests_per_client:,} requests each, thinking {think.name}; {requests.name}"
    return Workload(name=name, make=make)


def conversations(
    requests: Requests,
    *,
    sessions: int,
    turns_each: int,
    prefix_tokens: int = 0,
    think: Draws[float] | None = None,
    arrivals: Draws[float] | None = None,
    vocab_size: int = 1000,
) -> Workload:
    """Sessions in which each prompt is preceded by all that was said before, and all of which begin alike.

    Args:
        requests: `Requests.prompts` is what a turn adds.
        sessions: how many.
        turns_each: requests of each.
        prefix_tokens: that all sessions begin with, such as a system prompt; the same token ids in all of them.
        think: seconds between the end of an answer and the next prompt. Default: none.
        arrivals: of the sessions. Default: all at once.
        vocab_size: ids of the first prompts are below; a model's vocabulary must be as large.
    """
    think, arrivals = think or fixed_think(0), arrivals or burst()
    _above_zero("sessions", sessions)
    _above_zero("turns_each", turns_each)
    _above_zero("vocab_size", vocab_size)
    if prefix_tokens < 0:
        raise ValueError(f"prefix_tokens must be at least 0, got {prefix_tokens}")

    def make(seed: int) -> Load:
        begins = arrivals.draw(sessions, random.Random(f"{seed}-arrivals"))
        pauses = think.draw(sessions * (turns_each - 1), random.Random(f"{seed}-think"))
        records = requests.make(seed, [0.0] * (sessions * turns_each))
        ids = random.Random(f"{seed}-ids")
        prefix = ids.choices(range(vocab_size), k=prefix_tokens)
        load = []
        for number, arrival in enumerate(begins):
            first, *others = records[number * turns_each : (number + 1) * turns_each]
            assert isinstance(first.prompt, int)
            prompt = (*prefix, *ids.choices(range(vocab_size), k=first.prompt))
            load.append(
                Session(
                    turns=(replace(first, prompt=prompt, arrival=arrival), *others),
                    think_s=tuple(pauses[number * (turns_each - 1) : (number + 1) * (turns_each - 1)]),
                    keeps_context=True,
                )
            )
        return tuple(load)

    name = (
        f"{sessions:,} conversations of {turns_each:,} turns {arrivals.name}, thinking {think.name}, "
        f"with {prefix_tokens:,} tokens in common; {requests.name}"
    )
    return Workload(name=name, make=make)


# --- facts -----------------------------------------------------------------------------------------------------------


def turns(load: Iterable[WorkloadRecord | Session]) -> Iterator[tuple[WorkloadRecord, int]]:
    """Every request of a load in its order, with the tokens of its prompt: in a conversation, with all before it."""
    for item in load:
        if isinstance(item, WorkloadRecord):
            yield item, _prompt_tokens(item)
            continue
        before = 0
        for turn in item.turns:
            prompt = before + _prompt_tokens(turn)
            yield turn, prompt
            if item.keeps_context:
                before = prompt + (turn.output_tokens or turn.max_tokens)


def _prompt_tokens(record: WorkloadRecord) -> int:
    return record.prompt if isinstance(record.prompt, int) else len(record.prompt)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadFacts:
    """What a load adds up to; see `facts`.

    Attributes:
        num_requests: turns of sessions each count.
        prompt_tokens: of all, with what is repeated in conversations.
        output_tokens: of all, as it really happens.
        longest_output: tokens, as it really happens.
        longest_declared: the greatest ``max_tokens``.
        span_s: seconds between the first and the last arrival, of sessions that of their first requests.
        offered_per_s: requests per second between them; None if all come at once, or when others have ended.
        num_raised: lengths of 0 that run as 1.
    """

    num_requests: int
    prompt_tokens: int
    output_tokens: int
    longest_output: int
    longest_declared: int
    span_s: float
    offered_per_s: float | None
    num_raised: int

    def describe(self) -> str:
        """One line for people."""
        rate, span = self.offered_per_s, f"{self.span_s:,.1f} s"
        offered = "" if rate is None else f", {rate:.3g} requests/s over {span}"
        raised = f"; {self.num_raised:,} lengths of 0 run as 1" if self.num_raised else ""
        return (
            f"{self.num_requests:,} requests, {self.prompt_tokens:,} prompt and {self.output_tokens:,} output tokens, "
            f"longest output {self.longest_output:,} of {self.longest_declared:,} declared{offered}{raised}"
        )


def facts(load: Sequence[WorkloadRecord | Session]) -> LoadFacts:
    """Add up a load.

    Raises:
        ValueError: it is empty.
    """
    if not load:
        raise ValueError("a load needs at least one request")
    requests = list(turns(load))
    outputs = [record.output_tokens or record.max_tokens for record, _ in requests]
    arrivals = [item.arrival if isinstance(item, WorkloadRecord) else item.turns[0].arrival for item in load]
    span_s = max(arrivals) - min(arrivals)
    is_open = len(requests) == len(load)
    return LoadFacts(
        num_requests=len(requests),
        prompt_tokens=sum(prompt for _, prompt in requests),
        output_tokens=sum(outputs),
        longest_output=max(outputs),
        longest_declared=max(record.max_tokens for record, _ in requests),
        span_s=span_s,
        offered_per_s=(len(load) - 1) / span_s if is_open and span_s > 0 else None,
        num_raised=sum(record.metadata.get(_RAISED, 0) for record, _ in requests),
    )
