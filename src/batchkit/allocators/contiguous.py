"""One run of neighbouring blocks for each sequence."""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Sequence
from typing import ClassVar

from typing_extensions import override

from ..errors import InvariantError
from ..types import BlockCopy
from .base import BlockAllocator

__all__ = ["ContiguousAllocator"]


class ContiguousAllocator(BlockAllocator):
    """One run of neighbouring blocks for each sequence, taken once; a table is a ``range``.

    First fit, so that holes of freed reservations stay open between others: the external fragmentation that the
    PagedAttention paper measures (section 3.1). `fits` and `grow` cost the number of reservations.

    >>> pool = ContiguousAllocator(num_blocks=8, block_size=16)
    >>> pool.grow(1, 5, reserve=48), pool.table(1)
    ((), range(0, 3))
    >>> pool.grow(1, 49) is None
    True
    """

    growable: ClassVar[bool] = False

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._tables: dict[int, range] = {}
        self._extents: list[tuple[int, int, int]] = []  # (first block, end, seq_id), sorted
        self._num_free = num_blocks

    @property
    @override
    def num_free_blocks(self) -> int:
        return self._num_free

    @override
    def table(self, seq_id: int, row: int = 0) -> Sequence[int]:
        return self._tables.get(seq_id, ())

    def _hole(self, need: int, freeing: Collection[int]) -> int | None:
        """The first block of the first hole of `need` blocks."""
        if need > self.num_blocks:
            return None
        at = 0
        for first, end, owner in self._extents:
            if owner in freeing:
                continue
            if first - at >= need:
                return at
            at = end
        return at if self.num_blocks - at >= need else None

    @override
    def fits(
        self,
        seq_id: int,
        num_tokens: int,
        *,
        computed: int = 0,
        hit: Sequence[int] = (),
        rows: int = 1,
        reserve: int = 0,
        freeing: Collection[int] = (),
    ) -> bool:
        need = self._blocks_for(num_tokens, reserve, rows, hit)
        if seq_id in self._tables:
            return need <= len(self._tables[seq_id])
        return self._hole(need, freeing) is not None

    @override
    def grow(
        self,
        seq_id: int,
        num_tokens: int,
        *,
        computed: int = 0,
        hit: Sequence[int] = (),
        rows: int = 1,
        reserve: int = 0,
    ) -> tuple[BlockCopy, ...] | None:
        table = self._tables.get(seq_id)
        if table and num_tokens <= len(table) * self.block_size and not reserve and not hit and rows == 1:
            return ()  # most decode steps
        need = self._blocks_for(num_tokens, reserve, rows, hit)
        if table is not None:
            return () if need <= len(table) else None
        at = self._hole(need, ())
        if at is None:
            return None
        self._tables[seq_id] = range(at, at + need)
        insort(self._extents, (at, at + need, seq_id))
        self._num_free -= need
        return ()

    @override
    def free(self, seq_id: int) -> None:
        table = self._tables.pop(seq_id, None)
        if table is not None:
            self._extents.remove((table.start, table.stop, seq_id))
            self._num_free += len(table)

    @override
    def check(self) -> None:
        held = sorted((table.start, table.stop, seq_id) for seq_id, table in self._tables.items())
        at = 0
        for first, end, _ in held:
            if first < at or end <= first:
                raise InvariantError(f"reservations overlap or are empty: {held}")
            at = end
        free = self.num_blocks - sum(end - first for first, end, _ in held)
        if at > self.num_blocks or held != self._extents or free != self._num_free:
            raise InvariantError(
                f"{self.num_blocks} blocks, {self._num_free} counted as free, reservations {held}, "
                f"extents {self._extents}"
            )
