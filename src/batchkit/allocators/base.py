"""What every allocator of KV blocks promises."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import ClassVar

from ..types import BlockCopy

__all__ = ["BlockAllocator"]


class BlockAllocator(ABC):
    """Owns the free list, the tables and the counts of one pool of KV blocks.

    Check, then act: `fits` is exact and changes nothing; `grow` does all or nothing. After any number of verbs every
    block is free, cached, or in tables, and `check` proves it.

    Sequences are known by `Sequence.id`. An allocator that knows no beam groups refuses ``rows > 1``; one that does not
    say `shares_blocks` is given no ``hit``.

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

    @property
    def num_shares(self) -> int:
        """By how much the tables' lengths add up to more than the blocks they hold; needed where `shares_blocks`."""
        if self.shares_blocks:
            raise NotImplementedError(f"{type(self).__name__} does not say how many of its blocks are shared")
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

        Exact: it counts fragmentation, sharing, copies, and hits that only one of `freeing` holds: if `match` would not
        find such a block then, it is lost, and nothing fits. Changes nothing.
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
                another sequence, and nothing was taken in between. Only for a sequence without a table, and only where
                `shares_blocks`.
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

    def rename(self, old: int, new: int) -> None:
        """Give the table of sequence `old` to `new`, which has none; needed where `shares_blocks`."""
        raise NotImplementedError(f"{type(self).__name__} shares no blocks")

    def forget(self) -> None:  # noqa: B027
        """Empty the prefix index: what the blocks held is no longer true. The default has none."""

    def _blocks_for(self, num_tokens: int, reserve: int, rows: int, hit: Sequence[int]) -> int:
        """Blocks that a single table needs in all; refuses what this class does not know."""
        if rows != 1:
            raise NotImplementedError(f"{type(self).__name__} knows no beam groups, got rows={rows}")
        if hit and not self.shares_blocks:
            raise NotImplementedError(f"{type(self).__name__} shares no blocks, got hit={tuple(hit)}")
        size = self.block_size
        return max(-(-num_tokens // size), min(-(-reserve // size), self.num_blocks))
