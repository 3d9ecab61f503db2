"""Repetition, frequency and presence penalties."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from .backends.base import to_device

if TYPE_CHECKING:
    from ..params import SamplingParams
    from ..types import Request

__all__ = ["TokenCounts", "has_penalties", "penalize"]


class TokenCounts:
    """The different tokens that a sequence's penalties look at, and how often its output has each.

    Taking in a token costs the same however many there are.

    Args:
        request: its prompt counts only for the repetition penalty.
    """

    def __init__(self, request: Request) -> None:
        prompt = request.prompt_token_ids if request.params.repetition_penalty != 1 else ()
        self._ids = np.unique(np.array(prompt, np.int64))
        self._counts = np.zeros(len(self._ids), np.float32)
        self._places = {token: place for place, token in enumerate(self._ids.tolist())}

    def take(self, token_ids: Sequence[int]) -> None:
        """Count the next tokens of the output."""
        for token in token_ids:
            place = self._places.setdefault(token, len(self._places))
            if place == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros(max(16, place), np.int64)))
                self._counts = np.concatenate((self._counts, np.zeros(max(16, place), np.float32)))
            self._ids[place] = token
            self._counts[place] += 1

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """[N], the tokens."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """[N], how often the output has each; 0 for one that only the prompt has."""
        return self._counts[: len(self._places)]


def has_penalties(params: SamplingParams) -> bool:
    """Whether a request has any penalty."""
    return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0


def penalize(
    logits: torch.Tensor, rows: Sequence[int], params: Sequence[SamplingParams], counts: Sequence[TokenCounts]
) -> None:
    """Apply the penalties of some rows in place.

    The repetition penalty divides positive logits and multiplies the others, once however often the token was there;
    then the frequency penalty is subtracted for each time that the output has the token, and the presence penalty if it
    has it at all.

    Args:
        logits: [rows, vocabulary], float32.
        rows: which rows of `logits`.
        params: of each of them.
        counts: of each of them.
    """
    lens = [len(count.ids) for count in counts]
    limits = np.finfo(np.float32)

    def upload(array: npt.NDArray[np.generic]) -> torch.Tensor:
        return to_device(array, logits.device)

    def each(values: Sequence[float]) -> torch.Tensor:
        return upload(np.repeat(np.array(values, np.float32), lens))

    at = (upload(np.repeat(np.array(rows, np.int64), lens)), upload(np.concatenate([count.ids for count in counts])))
    times = upload(np.concatenate([count.counts for count in counts]))
    # A penalty that float32 cannot hold would give 0/0.
    repetition = each([min(max(p.repetition_penalty, float(limits.tiny)), float(limits.max)) for p in params])
    values = logits[at]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= times * each([p.frequency_penalty for p in params])
    values -= (times > 0) * each([p.presence_penalty for p in params])
    logits[at] = values
