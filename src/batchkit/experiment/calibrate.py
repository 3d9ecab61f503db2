"""A cost model of the device that is here, fitted to step traces and tried on steps that the fit has not seen."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate, pairwise
from typing import Any

from ..costs import MeasuredCost, attended
from ..trace import Trace

__all__ = ["Calibration", "FitError", "Observation", "calibrate", "fit", "observations", "predict"]

VERSION = 1

_FEWEST = 20
"""Steps that a fit needs at least."""
_POINTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""Where the curve over a step's tokens may bend."""
_ROUNDS = 4
"""Fits, each with the seconds that the one before expects."""
_GAP = 1.5
"""A next step that begins later than this many times the step's own seconds began after a wait."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One step that was measured.

    Attributes:
        num_tokens: computed, idle ones among them.
        context_tokens, pairs: see `batchkit.costs.attended`.
        seconds: from its beginning to the next step's, so that everything the engine does is in it.
    """

    num_tokens: int
    context_tokens: int
    pairs: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FitError:
    """How far a cost model is from steps that were measured.

    Attributes:
        num_steps: how many.
        measured_s, predicted_s: their sums, in seconds.
        mean_step_error: mean over the steps of the error's share of what was measured.

    Raises:
        ValueError: one is not finite, or below 0; or nothing was measured.
    """

    num_steps: int
    measured_s: float
    predicted_s: float
    mean_step_error: float

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 <= (value := getattr(self, field.name)) < math.inf:
                raise ValueError(f"{field.name} must be finite and at least 0, got {value}")
        if not self.num_steps or not self.measured_s:
            raise ValueError(f"nothing was measured: {self.num_steps} steps of {self.measured_s} s")

    @property
    def total_error(self) -> float:
        """How much too large the sum is, as a share of what was measured."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """A fitted cost model, and where it comes from.

    Attributes:
        cost: the model.
        fitted: the error on the steps it was fitted to.
        held_out: on others.
        about: what was measured: model, dtype, threads.
    """

    cost: MeasuredCost
    fitted: FitError
    held_out: FitError
    about: Mapping[str, Any]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON."""
        text = json.dumps({"kind": "calibration", "version": VERSION, **asdict(self)}, indent=1)
        with open(path, "w", encoding="utf-8", newline="\n") as file:
            file.write(text + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Read it back.

        Raises:
            OSError: it cannot be read.
            ValueError: it is no calibration, or of another version.
        """
        with open(path, encoding="utf-8") as file:
            try:
                raw = json.load(file)
                if raw["kind"] != "calibration" or raw["version"] != VERSION:
                    raise ValueError("another version")
                if not isinstance(raw["about"], dict):
                    raise ValueError(f"about must be an object, got {raw['about']!r}")
                cost = raw["cost"]
                return cls(
                    cost=MeasuredCost(
                        **{**cost, "tokens": tuple(cost["tokens"]), "seconds": tuple(cost["seconds"])},
                    ),
                    fitted=FitError(**raw["fitted"]),
                    held_out=FitError(**raw["held_out"]),
                    about=raw["about"],
                )
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise ValueError(
                    f"{os.fspath(path)} is no calibration of version {VERSION} ({type(error).__name__}: {error})"
                ) from None


def observations(trace: Trace) -> list[Observation]:
    """The steps of a trace that had rows and did not fail.

    Raises:
        ValueError: a step lacks a field, or has one that cannot be; or most steps end long before the next one begins,
            or after it: the clock is a virtual one, whose seconds the steps' own are not, or the engine mostly waited.
    """
    found = []
    num_followed = num_apart = 0
    for step, after in pairwise([*trace.steps, None]):
        assert step is not None
        try:
            if not step["rows"] or step["error"] is not None:
                continue
            own = step["schedule_s"] + step["execute_s"] + step["sample_s"]
            whole = own if after is None else after["time"] - step["time"]
            rows = [(row["start"], row["tokens"]) for row in step["rows"]]
            context_tokens, pairs = attended(rows)
            num_tokens = sum(count for _, count in rows)
            if not (0 < own < math.inf and math.isfinite(whole) and num_tokens > 0):
                raise ValueError(f"{own} s of its own, {whole} s until the next one, {num_tokens} tokens")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            number = step.get("step", "of a number that is not said")
            raise ValueError(f"step {number} cannot be taken ({type(error).__name__}: {error})") from None
        num_followed += after is not None
        num_apart += not own / _GAP <= whole <= _GAP * own
        seconds = whole if own <= whole <= _GAP * own else own
        found.append(Observation(num_tokens, context_tokens, pairs, seconds))
    if 2 * num_apart > num_followed:
        raise ValueError(
            f"{num_apart:,} of {num_followed:,} steps took less than 1/{_GAP:g} of the time until the next one began, "
            f"or more than {_GAP:g} times that: the trace is one of a virtual clock, so that its steps' own seconds "
            f"are not those it simulates, or of an engine that mostly waited"
        )
    return found


def fit(steps: Sequence[Observation]) -> MeasuredCost:
    """The cost model that is nearest to the steps, by least squares.

    A step's square is divided by the seconds that are expected of it: the sum over all steps then comes out right,
    which squares of relative errors would put too low. No constant is below 0, and the curve nowhere falls: few steps
    tell its points apart from contexts and pairs.

    Raises:
        ValueError: there are too few steps, or all have equally many tokens.
    """
    counts = sorted({step.num_tokens for step in steps})
    if len(steps) < _FEWEST or len(counts) < 2:
        raise ValueError(
            f"a fit needs at least {_FEWEST} steps and two different numbers of tokens, got {len(steps)} and {counts}"
        )
    points = _points(counts)
    features = [_features(step, points) for step in steps]
    expected = [step.seconds for step in steps]
    found: list[float] = []
    for _ in range(_ROUNDS):
        found = _least_squares(features, steps, expected, len(points) + 2)
        expected = [sum([found[at] * value for at, value in row]) for row in features]
    curve = tuple(accumulate(found[: len(points)]))
    return MeasuredCost(tokens=points, seconds=curve, context_s=found[-2], pair_s=found[-1])


def _least_squares(
    features: Sequence[list[tuple[int, float]]], steps: Sequence[Observation], expected: Sequence[float], size: int
) -> list[float]:
    """The unknowns: the first point, the rise to each next one, and the shares of contexts and pairs."""
    gram = [[0.0] * size for _ in range(size)]
    right = [0.0] * size
    for row, step, seconds in zip(features, steps, expected, strict=True):
        weight = 1 / max(seconds, 1e-9)
        for at, value in row:
            right[at] += weight * value * step.seconds
            for other, factor in row:
                gram[at][other] += weight * value * factor
    return _non_negative(gram, right)


def _points(counts: Sequence[int]) -> tuple[int, ...]:
    """Points of the curve: the ends, and between them those that have steps on both sides near by."""
    inner = []
    for before, at in pairwise(_POINTS):
        if counts[0] < at < counts[-1] and any(before < count <= at for count in counts):
            inner.append(at)
    return tuple(dict.fromkeys((counts[0], *inner, counts[-1])))


def _features(step: Observation, points: Sequence[int]) -> list[tuple[int, float]]:
    """What a step multiplies each unknown by."""
    rises = [
        (at, min(1.0, (step.num_tokens - low) / (high - low)))
        for at, (low, high) in enumerate(pairwise(points), 1)
        if step.num_tokens > low
    ]
    shares = [(len(points), float(step.context_tokens)), (len(points) + 1, float(step.pairs))]
    return [(0, 1.0), *rises, *shares]


def _non_negative(gram: list[list[float]], right: list[float]) -> list[float]:
    """The least squares solution without negative numbers, one coordinate after the other until nothing moves."""
    size = len(right)
    scale = [gram[at][at] ** 0.5 or 1.0 for at in range(size)]
    found = [0.0] * size
    for _ in range(20_000):
        moved = 0.0
        for at in range(size):
            if not gram[at][at]:
                continue
            rest = right[at] - sum([gram[at][other] * found[other] for other in range(size)])
            after = max(0.0, found[at] + rest / gram[at][at])
            moved = max(moved, abs(after - found[at]) * scale[at])
            found[at] = after
        if moved < 1e-9 * len(right):
            break
    return found


def predict(cost: MeasuredCost, steps: Iterable[Observation]) -> FitError:
    """Compare a cost model with steps that were measured.

    Raises:
        ValueError: there are none.
    """
    given = list(steps)
    if not given:
        raise ValueError("an error needs at least one step")
    guesses = [cost.of(step.num_tokens, step.context_tokens, step.pairs) for step in given]
    return FitError(
        num_steps=len(given),
        measured_s=sum(step.seconds for step in given),
        predicted_s=sum(guesses),
        mean_step_error=sum(abs(guess / step.seconds - 1) for guess, step in zip(guesses, given, strict=True))
        / len(given),
    )


def calibrate(
    traces: Iterable[Trace], *, about: Mapping[str, Any], held_out: Iterable[Trace] | None = None
) -> Calibration:
    """Fit a cost model to traces.

    Args:
        traces: of runs on one device with one model.
        about: see `Calibration`.
        held_out: traces that the fit does not see. Default: every fifth step is held out.

    Raises:
        ValueError: see `observations` and `fit`; or `held_out` has no steps.
    """
    steps = _all_observations(traces, "trace")
    if held_out is None:
        others = steps[4::5]
        steps = [step for number, step in enumerate(steps) if number % 5 != 4]
    else:
        others = _all_observations(held_out, "held-out trace")
        if not others:
            raise ValueError("the traces that are held out have no steps")
    cost = fit(steps)
    return Calibration(cost=cost, fitted=predict(cost, steps), held_out=predict(cost, others), about=dict(about))


def _all_observations(traces: Iterable[Trace], what: str) -> list[Observation]:
    found = []
    for number, trace in enumerate(traces, 1):
        try:
            found += observations(trace)
        except ValueError as error:
            raise ValueError(f"{what} {number}: {error}") from None
    return found
