"""Any free blocks, as they are needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import chain
from typing import ClassVar

from typing_extensions import override

from ..errors import InvariantError
from ..types import BlockCopy
from ._prefix_index import PrefixIndex
from .base import BlockAllocator

__all__ = ["PagedAllocator"]


class PagedAllocator(BlockAllocator):
    """Any free blocks, as they are needed. At most ``block_size - 1`` slots of a sequence are ever wasted.

    A new sequence may start with blocks that another one holds, as the samples of one prompt do. With
    `prefix_caching`, full blocks can also be found by what they hold (`publish`, `match`), and stay findable when
    nobody holds them until their place is needed. They go by the time at which they were let go, the earliest first,
    and of one sequence's blocks the last first. Different salts never find each other's blocks; no salt is one of its
    own, and differs from an empty one.

    `grow` costs the blocks that it adds; where the table suffices already, as in most decode steps, it costs a
    division. `match` costs the blocks that it finds, `publish` those that are new, `fits` the number of sequences in
    `freeing`, or of their blocks where blocks are shared.

    Args:
        num_blocks: blocks in the pool, at least 1.
        block_size: tokens per block, at least 1.
        prefix_caching: keep an index of what full blocks hold.

    >>> pool = PagedAllocator(num_blocks=4, block_size=16)
    >>> pool.grow(7, 20), len(pool.table(7)), pool.num_free_blocks
    ((), 2, 2)
    >>> pool.grow(8, 48) is None, pool.num_free_blocks
    (True, 2)
    >>> pool.fits(8, 48, freeing=[7])
    True

    >>> pool = PagedAllocator(num_blocks=4, block_size=2, prefix_caching=True)
    >>> pool.grow(1, 5), pool.publish(1, 0, [3, 1, 4, 1, 5], num_computed=5), pool.free(1)
    ((), None, None)
    >>> hit = pool.match([3, 1, 4, 1, 9, 2], limit=5)
    >>> len(hit), pool.num_cached_blocks, pool.num_free_blocks
    (2, 2, 4)
    >>> pool.grow(2, 6, computed=4, hit=hit), len(pool.table(2)), pool.num_free_blocks
    ((), 3, 1)
    """

    shares_blocks: ClassVar[bool] = True

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = False) -> None:
        super().__init__(num_blocks, block_size)
        self.prefix_caching = prefix_caching
        self._index = PrefixIndex(block_size) if prefix_caching else None
        self._free = list(range(num_blocks))[::-1]
        self._tables: dict[int, tuple[int, ...]] = {}
        self._shared: dict[int, int] = {}  # how many hold it beyond the first, of blocks that more than one holds
        self._num_shares = 0  # the sum of those

    @property
    @override
    def num_free_blocks(self) -> int:
        return len(self._free) if self._index is None else len(self._free) + self._index.num_cached

    @property
    @override
    def num_cached_blocks(self) -> int:
        return 0 if self._index is None else self._index.num_cached

    @property
    @override
    def num_shares(self) -> int:
        return self._num_shares

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
        table = () if seq_id in freeing else self._tables.get(seq_id, ())
        need = self._blocks_for(num_tokens, reserve, rows, hit) - len(table) - len(hit)
        tables = [self._tables.get(other, ()) for other in set(freeing)]
        if hit:
            self._check_hit(hit, table, computed)
        elif not self._shared:
            return need <= self.num_free_blocks + sum(map(len, tables))
        let_go = Counter(chain.from_iterable(tables))
        shared = self._shared
        kept = {block for block in let_go.keys() & shared.keys() if let_go[block] <= shared[block]}
        pinned = [block for block in hit if self._is_cached(block) or (block in let_go and block not in kept)]
        if not all(self._is_indexed(block) for block in pinned):
            return False  # with the last that holds it, such a block is lost
        return need + len(pinned) <= self.num_free_blocks + len(let_go) - len(kept)

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
        need = self._blocks_for(num_tokens, reserve, rows, hit) - len(table) - len(hit)
        free = self._free
        if hit:
            self._check_hit(hit, table, computed)
            need = max(0, need)
        elif need <= 0:
            return ()
        if (hit or need > len(free)) and not self._make_room(hit, need):
            return None
        # A new tuple, never an extended list: whoever kept the old one can tell by identity that it changed.
        self._tables[seq_id] = (*table, *hit, *free[: -need - 1 : -1])
        del free[len(free) - need :]
        return ()

    def _check_hit(self, hit: Sequence[int], table: Sequence[int], computed: int) -> None:
        if table or computed < len(hit) * self.block_size:
            raise ValueError(
                f"a hit is for a sequence without a table, and its tokens are computed; got a hit of {len(hit)} blocks "
                f"of {self.block_size} tokens for a table of {len(table)}, computed={computed}"
            )

    def _make_room(self, hit: Sequence[int], need: int) -> bool:
        """Hold `hit`, and have `need` blocks in the free list; or change nothing."""
        index, shared = self._index, self._shared
        if need + sum(map(self._is_cached, hit)) > self.num_free_blocks:
            return False
        for block in hit:  # before anything is evicted
            if index is not None and index.is_cached(block):
                index.hold(block)
            else:
                shared[block] = shared.get(block, 0) + 1
                self._num_shares += 1
        while index is not None and need > len(self._free):
            self._free += index.evict()
        return True

    def _is_indexed(self, block: int) -> bool:
        return self._index is not None and block in self._index

    def _is_cached(self, block: int) -> bool:
        return self._index is not None and self._index.is_cached(block)

    @override
    def free(self, seq_id: int) -> None:
        table = self._tables.pop(seq_id, ())
        index, shared = self._index, self._shared
        if index is None and not shared:
            self._free.extend(reversed(table))
            return
        for block in reversed(table):
            if block in shared:
                shared[block] -= 1
                self._num_shares -= 1
                if not shared[block]:
                    del shared[block]
            elif index is None or not index.let_go(block):
                self._free.append(block)
        if index is not None:
            index.leave(seq_id)

    @override
    def rename(self, old: int, new: int) -> None:
        self._tables[new] = self._tables.pop(old)
        if self._index is not None:
            self._index.leave(old)

    @override
    def match(self, token_ids: Sequence[int], limit: int, salt: str | None = None) -> tuple[int, ...]:
        return () if self._index is None else self._index.match(token_ids, limit, salt)

    @override
    def publish(
        self, seq_id: int, row: int, token_ids: Sequence[int], num_computed: int, salt: str | None = None
    ) -> None:
        if self._index is None:
            return
        table = self._tables.get(seq_id, ())
        num_full = num_computed // self.block_size
        if num_full > len(table) or num_computed > len(token_ids):
            raise ValueError(
                f"sequence {seq_id} cannot have computed {num_computed} tokens: {len(token_ids)} are given, and its "
                f"table has {len(table)} blocks of {self.block_size}"
            )
        self._free += self._index.publish(seq_id, table, token_ids, num_full, salt)

    @override
    def forget(self) -> None:
        if self._index is not None:
            self._free += self._index.forget(block for table in self._tables.values() for block in table)

    @override
    def check(self) -> None:
        held = Counter(block for table in self._tables.values() for block in table)
        cached = [block for block in range(self.num_blocks) if self._is_cached(block)]
        state = f"free {self._free}, cached {cached}, tables {self._tables}"
        if sorted([*self._free, *cached, *held]) != list(range(self.num_blocks)):
            raise InvariantError(f"each of {self.num_blocks} blocks must be free, cached, or in tables: {state}")
        if any(len(set(table)) < len(table) for table in self._tables.values()):
            raise InvariantError(f"a block stands in a table once: {state}")
        if self._shared != {block: times - 1 for block, times in held.items() if times > 1}:
            raise InvariantError(f"{self._shared} must say how many hold a block beyond the first: {state}")
        if self._num_shares != sum(self._shared.values()):
            raise InvariantError(f"{self._num_shares} must be how many shares there are: {self._shared}")
        if self._index is not None:
            self._index.check(held)
