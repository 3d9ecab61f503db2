"""What follows from a sequence's tokens, kept from step to step instead of computed anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from ..types import Request, ScheduledSequence

__all__ = ["TokenState", "TokenStates"]


class TokenState(Protocol):
    """Something made from a request that takes in the tokens of one of its sequences, one after the other."""

    def take(self, token_ids: Sequence[int]) -> None:
        """Take in the next tokens of the output. After an exception it is not used again."""
        ...


S = TypeVar("S", bound=TokenState)


@dataclass(slots=True)
class _Kept(Generic[S]):
    state: S
    request: Request
    output_ids: Sequence[int]
    num_taken: int = 0


class TokenStates(Generic[S]):
    """One state for each sequence, always that which its row describes.

    A state takes in the tokens that are new since its last use. It is made anew from all of them if it is not there,
    if the row has fewer tokens than it took in, or if it belongs to another request or buffer of outputs: a buffer
    only grows, so the same one has the same beginning. Whether anything was kept therefore changes no result.

    Args:
        make: a state before any output.
        size: how many are kept between steps; within one, as many as it has rows.
    """

    def __init__(self, make: Callable[[Request], S], *, size: int = 256) -> None:
        self._make = make
        self._size = size
        self._kept: dict[tuple[int, int], _Kept[S]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def at(self, row: ScheduledSequence) -> S:
        """The state after the row's output. What making it or `TokenState.take` raises is raised."""
        key = (row.seq_id, row.row)
        kept = self._kept.pop(key, None)
        if (
            kept is None
            or kept.request is not row.request
            or kept.output_ids is not row.output_ids
            or kept.num_taken > row.num_output
        ):
            kept = _Kept(self._make(row.request), row.request, row.output_ids)
        if kept.num_taken < row.num_output:
            kept.state.take(row.output_ids[kept.num_taken : row.num_output])
            kept.num_taken = row.num_output
        self._kept[key] = kept  # to the end: the order is that of the last use
        return kept.state

    def trim(self, num_rows: int) -> None:
        """Forget the states used longest ago, after a step of so many rows."""
        while len(self._kept) > max(self._size, num_rows):
            del self._kept[next(iter(self._kept))]

    def clear(self) -> None:
        """Forget all of them."""
        self._kept.clear()
