"""KV-cache blocks: who holds which, and every block table.

Both allocators hand out the same thing, a table of block numbers for each sequence, from one flat pool of
``num_blocks`` blocks of ``block_size`` tokens. `PagedAllocator` takes any free blocks, whenever a sequence needs one
(PagedAttention, SOSP'23, section 4). `ContiguousAllocator` takes one run of neighbouring blocks, once, as systems did
before. Nothing here knows of tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Collection, Sequence
from typing import ClassVar

from typing_extensions import override

from .errors import InvariantError
from .types import BlockCopy

__all__ = ["BlockAllocator", "ContiguousAllocator", "PagedAllocator"]


class BlockAllocator(ABC):
    """Owns the free list, the tables and the counts of one pool of KV blocks.

    Check, then act: `fits` is exact and changes nothing; `grow` does all or nothing. After any number of verbs every
    block is free, cached, or in tables, and `check` proves it.

    Sequences are known by `Sequence.id`. ``rows`` (the width of a beam group) and ``hit`` (blocks found by `match`)
    are part of the interface from the start; an allocator that supports neither refuses ``rows > 1`` and gets no hit,
    since its `match` finds none.

    Args:
        num_blocks: blocks in the pool, at least 1.
        block_size: tokens per block, at least 1.
    """

    growable: ClassVar[bool] = True
    """False: a table never grows past its first reservation."""
    shares_blocks: ClassVar[bool] = False
    """True: `grow` takes a `hit`, of blocks that another sequence holds or that `match` found."""
    prefix_caching: bool = False
    """True: `match` may find something, and `publish` is worth calling."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks and tokens in them, got {num_blocks} blocks of {block_size} tokens")
        self.num_blocks = num_blocks
        self.block_size = block_size

    @property
    @abstractmethod
    def num_free_blocks(self) -> int:
        """Blocks that can be given out now: free ones and cached ones that nobody holds."""

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that nobody holds and that `match` can still find; `num_free_blocks` counts them too."""
        return 0

    @abstractmethod
    def table(self, seq_id: int, row: int = 0) -> Sequence[int]:
        """The block table, empty if it has none. The same object until the table changes."""

    @abstractmethod
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
        """Whether `grow` with the same arguments would succeed after `free` of every sequence in `freeing`.

        Exact: it counts fragmentation, sharing, copies, and hits that only one of `freeing` holds. Changes nothing.
        """

    @abstractmethod
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
        """Make the table cover `num_tokens` tokens, and take blocks for `reserve` tokens in all if that is more.

        Args:
            seq_id: a new one gets a table, starting with the blocks of `hit`.
            num_tokens: tokens that the table must cover.
            computed: how many of them are computed already, in `hit` or in the table.
            hit: full blocks whose contents are the first tokens: found by `match`, or the first blocks in the table of
                another sequence. Only for a sequence without a table, and only where `shares_blocks`.
            rows: tables of a beam group.
            reserve: tokens to take blocks for now, capped at the pool.

        Returns:
            Copies that must be made before anything is written, mostly none; or None: it does not fit, and nothing
            has changed.
        """

    @abstractmethod
    def free(self, seq_id: int) -> None:
        """Give back all blocks of a sequence. One without a table is no error."""

    @abstractmethod
    def check(self) -> None:
        """Raise InvariantError, printing the tables, unless the books balance."""

    def missing(self, seq_id: int, num_tokens: int) -> int:
        """About how many blocks a table lacks for `num_tokens` tokens: an estimate for policies."""
        return max(0, -(-num_tokens // self.block_size) - len(self.table(seq_id)))

    def match(self, token_ids: Sequence[int], limit: int, salt: str | None = None) -> tuple[int, ...]:
        """Cached full blocks that hold the first tokens of `token_ids`, within `limit` tokens. Pins nothing.

        The default has no cache.
        """
        return ()

    def publish(  # noqa: B027
        self, seq_id: int, row: int, token_ids: Sequence[int], num_computed: int, salt: str | None = None
    ) -> None:
        """Let `match` with the same salt find the full blocks among the first `num_computed` tokens.

        Called when those have been written, whenever another block of a sequence is full. The default has no cache.
        """

    def reassign(self, seq_id: int, parents: Sequence[int]) -> None:
        """Row k of a beam group goes on from row ``parents[k]``. The default knows no beam groups."""
        raise NotImplementedError(f"{type(self).__name__} knows no beam groups")

    def forget(self) -> None:  # noqa: B027
        """Empty the prefix index: what the blocks held is no longer true. The default has none."""

    def _blocks_for(self, num_tokens: int, reserve: int, rows: int, hit: Sequence[int]) -> int:
        """Blocks that a single table needs in all; refuses what this class does not know."""
        if rows != 1:
            raise NotImplementedError(f"{type(self).__name__} knows no beam groups, got rows={rows}")
        if hit:
            raise NotImplementedError(f"{type(self).__name__} has no prefix index, got hit={tuple(hit)}")
        size = self.block_size
        return max(-(-num_tokens // size), min(-(-reserve // size), self.num_blocks))


class PagedAllocator(BlockAllocator):
    """Any free blocks, as they are needed. At most ``block_size - 1`` slots of a sequence are ever wasted.

    `grow` costs the blocks that it adds; where the table suffices already, as in most decode steps, it costs a
    division. `fits` costs the number of sequences in `freeing`.

    >>> pool = PagedAllocator(num_blocks=4, block_size=16)
    >>> pool.grow(7, 20), len(pool.table(7)), pool.num_free_blocks
    ((), 2, 2)
    >>> pool.grow(8, 48) is None, pool.num_free_blocks
    (True, 2)
    >>> pool.fits(8, 48, freeing=[7])
    True
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._free = list(range(num_blocks))[::-1]
        self._tables: dict[int, tuple[int, ...]] = {}

    @property
    @override
    def num_free_blocks(self) -> int:
        return len(self._free)

    @override
    def table(self, seq_id: int, row: int = 0) -> Sequence[int]:
        return self._tables.get(seq_id, ())

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
        need = self._blocks_for(num_tokens, reserve, rows, hit) - len(self._tables.get(seq_id, ()))
        back = sum(len(self._tables.get(other, ())) for other in set(freeing) - {seq_id})
        return need <= len(self._free) + back

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
        table = self._tables.get(seq_id, ())
        if num_tokens <= len(table) * self.block_size and not reserve and not hit and rows == 1:
            return ()  # most decode steps
        need = self._blocks_for(num_tokens, reserve, rows, hit) - len(table)
        if need > 0:
            free = self._free
            if need > len(free):
                return None
            # A new tuple, never an extended list: whoever kept the old one can tell by identity that it changed.
            self._tables[seq_id] = (*table, *free[: -need - 1 : -1])
            del free[-need:]
        return ()

    @override
    def free(self, seq_id: int) -> None:
        self._free.extend(reversed(self._tables.pop(seq_id, ())))

    @override
    def check(self) -> None:
        seen = sorted([*self._free, *(block for table in self._tables.values() for block in table)])
        if seen != list(range(self.num_blocks)):
            raise InvariantError(
                f"each of {self.num_blocks} blocks must be free or in one table: free {self._free}, "
                f"tables {self._tables}"
            )


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
        need = self._blocks_for(num_tokens, reserve, rows, hit)
        if seq_id in self._tables:
            return () if need <= len(self._tables[seq_id]) else None
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
