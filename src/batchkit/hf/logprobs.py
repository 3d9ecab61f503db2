"""Log-probabilities of tokens, by the model's own logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..types import Logprob

if TYPE_CHECKING:
    from ..types import TokenLogprobs

__all__ = ["token_logprobs"]

_CHUNK = 1 << 20
"""The most logits worked on at once, which bounds the temporary memory at about 25 MiB."""


@torch.inference_mode()
def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """The log-probabilities of the best tokens and of a given one, at each of some positions.

    They are ``log_softmax`` in float32. Ranks count from 1; of tokens with equal logits the lower id comes first. The
    device is waited for.

    Args:
        logits: [positions, vocabulary], floating point; not changed.
        token_ids: the given token of each position.
        counts: how many of the best tokens each position gets; -1, and more than there are, for all.

    Returns:
        For each position the best tokens in their order, and behind them the given one, unless it is among them.
    """
    vocab = logits.shape[-1]
    counts = [vocab if not 0 <= count < vocab else count for count in counts]
    size = max(1, _CHUNK // vocab)
    found: list[TokenLogprobs] = []
    for i in range(0, len(counts), size):
        found += _part(logits[i : i + size].float(), token_ids[i : i + size], counts[i : i + size])
    return found


def _part(logits: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    given = torch.tensor(token_ids, dtype=torch.int64).to(logits.device, non_blocking=True)[:, None]
    total = logits.logsumexp(dim=-1, keepdim=True)
    keys = _keys(logits)
    ranks = (keys > keys.gather(1, given)).count_nonzero(dim=-1) + 1
    best = keys.topk(max(counts), dim=-1).indices
    ids = torch.cat((best, given), dim=-1)
    values = logits.gather(1, ids) - total
    found: list[TokenLogprobs] = []
    for count, token, tokens, logprobs, rank in zip(
        counts, token_ids, ids.tolist(), values.tolist(), ranks.tolist(), strict=True
    ):
        entry = {tokens[i]: Logprob(logprobs[i], i + 1) for i in range(count)}
        entry.setdefault(token, Logprob(logprobs[-1], rank))
        found.append(entry)
    return found


def _keys(logits: torch.Tensor) -> torch.Tensor:
    """[rows, vocabulary] of different integers in the order of the logits, of equal ones the lower id above."""
    # The bits of floats of one sign are ordered like the floats; adding zero makes one zero of the two.
    bits = (logits + 0.0).view(torch.int32)
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64).mul_(1 << 32)
    return keys.add_(torch.arange(logits.shape[-1] - 1, -1, -1, device=logits.device))
