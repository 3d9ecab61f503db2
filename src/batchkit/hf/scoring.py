"""Log-probabilities of prompts: which positions give them, and forward passes short enough for their logits.

A position that is scored needs all its logits at once, and a chunk of 2,048 positions of a vocabulary of 150,000 has
more than a GiB of them. What a model does behind its output projection (scales, caps) differs between families, so
the projection alone cannot be called in slices. A longer row is therefore computed in several forward passes, each
over the KV that the ones before have written, which is what a chunked prefill does in several steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..types import RowResult
from .logprobs import token_logprobs

if TYPE_CHECKING:
    import torch

    from ..types import ScheduledSequence

__all__ = ["passes", "score", "scored_positions"]


def scored_positions(row: ScheduledSequence) -> range:
    """The positions of a row whose logits give log-probabilities of the prompt: each those of the token behind it."""
    if row.request.params.prompt_logprobs is None or row.sample_index != 0:
        return range(0)
    return range(row.start, min(row.start + row.num_tokens, len(row.request.prompt_token_ids) - 1))


def passes(rows: Sequence[ScheduledSequence], limit: int) -> list[list[tuple[int, ScheduledSequence]]]:
    """Distribute rows to forward passes, cutting those that are too long.

    Args:
        rows: of a step.
        limit: the most scored positions of a pass, at least 1.

    Returns:
        For each pass its rows, or pieces of them, with the number of the row. They come in the order of `rows`; only
        the last piece of a row samples.
    """
    made: list[list[tuple[int, ScheduledSequence]]] = [[]]
    room = limit
    for index, row in enumerate(rows):
        rest = row
        while (count := len(scored_positions(rest))) > room:
            if room:
                made[-1].append((index, _part(rest, 0, room)))
                rest = _part(rest, room, rest.num_tokens)
            made.append([])
            room = limit
        room -= count
        made[-1].append((index, rest))
    return made


def score(logits: torch.Tensor, rows: Sequence[ScheduledSequence]) -> list[RowResult]:
    """The log-probabilities of the prompts of some rows.

    Args:
        logits: [scored positions of all rows, vocabulary], row after row.
        rows: in this order.

    Returns:
        A result for each row, with `RowResult.prompt_logprobs` if it has scored positions, or an error where their
        logits are not finite.
    """
    wanted = [(row, position) for row in rows for position in scored_positions(row)]
    finite = iter(logits.amax(-1).isfinite().tolist())
    found = iter(
        token_logprobs(
            logits,
            [row.request.prompt_token_ids[position + 1] for row, position in wanted],
            [row.request.params.prompt_logprobs or 0 for row, _ in wanted],
        )
    )
    results = []
    for row in rows:
        positions = scored_positions(row)
        bad = [position for position in positions if not next(finite)]
        entries = {position + 1: next(found) for position in positions}
        if bad:
            results.append(RowResult(error=f"the model's logits at position {bad[0]} are not finite"))
        else:
            results.append(RowResult(prompt_logprobs=entries or None))
    return results


def _part(row: ScheduledSequence, begin: int, end: int) -> ScheduledSequence:
    return row._replace(
        start=row.start + begin,
        num_tokens=end - begin,
        token_ids=row.token_ids[begin:end],
        samples=row.samples and end == row.num_tokens,
    )
