"""From the model's logits to those that are sampled from: what a request adds, penalises and forbids."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from ..errors import RequestError
from .backends.base import to_device
from .lru import LRU
from .penalties import TokenCounts, has_penalties, penalize
from .token_states import TokenStates

if TYPE_CHECKING:
    from ..params import LogitsProcessor
    from ..types import Request, ScheduledSequence
    from .grammar import Grammars, Matcher

__all__ = ["Adjusted", "LogitsAdjuster", "forbidding"]

_Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Adjusted:
    """Logits to sample from.

    Attributes:
        logits: [rows, vocabulary], float32; -inf where a token is forbidden.
        faults: what went wrong, by row; such a row's logits mean nothing.
    """

    logits: torch.Tensor
    faults: dict[int, str]


class LogitsAdjuster:
    """Applies what requests ask of their logits, in the order that `SamplingParams` states.

    What it does to a row is a function of the row's logits and of the row alone. Counts and matchers are kept by
    sequence and made again where they are missing.

    Args:
        grammars: for structured outputs.
    """

    def __init__(self, grammars: Grammars) -> None:
        self._counts: TokenStates[TokenCounts] = TokenStates(TokenCounts)
        self._matchers: TokenStates[Matcher] = TokenStates(grammars.matcher)
        self._allowed: LRU[Request, _Ids] = LRU(256)

    def drop_caches(self) -> None:
        """Forget all counts and matchers."""
        self._counts.clear()
        self._matchers.clear()
        self._allowed.clear()

    def adjust(self, logits: torch.Tensor, rows: Sequence[ScheduledSequence]) -> Adjusted | None:
        """Adjust the logits of rows; None if no row asks for it.

        Args:
            logits: [rows, vocabulary], floating point; not changed.
            rows: one for each row of `logits`, in order.
        """
        if not any(map(_asks, rows)):
            return None
        made = Adjusted(logits.to(torch.float32, copy=True), {})
        self._bias(made, rows)
        self._process(made, rows)
        self._penalize(made, rows)
        self._allow(made, rows)
        _forbid(made, rows)
        self._match(made, rows)
        return made

    def _bias(self, made: Adjusted, rows: Sequence[ScheduledSequence]) -> None:
        biases = [(i, bias) for i, row in enumerate(rows) if (bias := row.request.params.logit_bias)]
        if biases:
            at = _places(made.logits, [(i, list(bias)) for i, bias in biases])
            values = np.array([value for _, bias in biases for value in bias.values()], np.float32)
            made.logits[at] += to_device(values, made.logits.device)

    def _process(self, made: Adjusted, rows: Sequence[ScheduledSequence]) -> None:
        for i, row in enumerate(rows):
            for processor in row.request.params.logits_processors:
                try:
                    made.logits[i] = _processed(processor, row, made.logits[i].clone())
                except Exception as error:
                    name = getattr(processor, "__name__", type(processor).__name__)
                    made.faults[i] = f"the logits processor {name} failed: {type(error).__name__}: {error}"
                    break

    def _penalize(self, made: Adjusted, rows: Sequence[ScheduledSequence]) -> None:
        some = [i for i, row in enumerate(rows) if has_penalties(row.request.params)]
        if some:
            counts = [self._counts.at(rows[i]) for i in some]
            penalize(made.logits, some, [rows[i].request.params for i in some], counts)
            self._counts.trim(len(rows))

    def _allow(self, made: Adjusted, rows: Sequence[ScheduledSequence]) -> None:
        allowed = [
            (i, self._allowed.get(row.request, lambda ids=ids: np.array(ids, np.int64)))  # type: ignore[misc]
            for i, row in enumerate(rows)
            if (ids := row.request.params.allowed_token_ids) is not None
        ]
        if allowed:
            at = _places(made.logits, allowed)
            values = made.logits[at]
            made.logits.index_fill_(0, _upload([i for i, _ in allowed], made.logits), -math.inf)
            made.logits[at] = values

    def _match(self, made: Adjusted, rows: Sequence[ScheduledSequence]) -> None:
        found: dict[int, npt.NDArray[np.bool_]] = {}
        for i, row in enumerate(rows):
            if row.request.params.structured_outputs is not None:
                try:
                    found[i] = self._matchers.at(row).allowed(made.logits.shape[-1])
                except RequestError as error:
                    made.faults.setdefault(i, str(error))
        if found:
            some = _upload(list(found), made.logits)
            forbidden = to_device(~np.stack(list(found.values())), made.logits.device)
            masked = made.logits.index_select(0, some).masked_fill_(forbidden, -math.inf)
            made.logits.index_copy_(0, some, masked)
        self._matchers.trim(len(rows))


def forbidding(row: ScheduledSequence) -> list[str]:
    """The parameters of a row that may leave no token."""
    params = row.request.params
    present = {
        "logits_processors": params.logits_processors,
        "repetition_penalty": params.repetition_penalty != 1,
        "allowed_token_ids": params.allowed_token_ids,
        "bad_words": row.request.bad_words,
        "min_tokens": row.num_output < params.min_tokens,
        "structured_outputs": params.structured_outputs,
    }
    return [name for name, value in present.items() if value]


def _asks(row: ScheduledSequence) -> bool:
    params = row.request.params
    return bool(
        params.logit_bias
        or params.logits_processors
        or has_penalties(params)
        or params.allowed_token_ids is not None
        or row.request.bad_words
        or row.num_output < params.min_tokens
        or params.structured_outputs is not None
    )


def _processed(processor: LogitsProcessor, row: ScheduledSequence, logits: torch.Tensor) -> torch.Tensor:
    """What a processor makes of a row's logits, which are its own to change."""
    shape = logits.shape
    made = processor(row.request.prompt_token_ids, tuple(row.output_ids[: row.num_output]), logits)
    if not isinstance(made, torch.Tensor) or not made.is_floating_point():
        raise TypeError(f"it must return the logits, a floating-point tensor, and returned {made!r:.80}")
    if made.shape != shape:
        raise ValueError(f"it must return logits of shape {tuple(shape)}, and returned {tuple(made.shape)}")
    if bool(made.isnan().any()):
        raise ValueError("it returned NaN")
    return made


def _forbid(made: Adjusted, rows: Sequence[ScheduledSequence]) -> None:
    """Forbid bad words, and stop tokens below min_tokens."""
    vocab = made.logits.shape[-1]
    places = [(i, [token for token in _forbidden(row) if 0 <= token < vocab]) for i, row in enumerate(rows)]
    if any(ids for _, ids in places):
        made.logits[_places(made.logits, places)] = -math.inf


def _forbidden(row: ScheduledSequence) -> list[int]:
    request, num_output = row.request, row.num_output
    ids = list(request.stop_token_ids) if num_output < request.params.min_tokens else []
    for *before, last in request.bad_words:
        # The whole word must be of the output: what the prompt has begun is not generated.
        if len(before) <= num_output and list(row.output_ids[num_output - len(before) : num_output]) == before:
            ids.append(last)
    return ids


def _places(logits: torch.Tensor, ids: Sequence[tuple[int, Sequence[int] | _Ids]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The index of tokens given as ``(row, token ids)``."""
    numbers, tokens = zip(*ids, strict=True)
    rows = np.repeat(np.array(numbers, np.int64), [len(part) for part in tokens])
    columns = np.concatenate([np.asarray(part, np.int64) for part in tokens])
    return to_device(rows, logits.device), to_device(columns, logits.device)


def _upload(numbers: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return to_device(np.array(numbers, np.int64), like.device)
