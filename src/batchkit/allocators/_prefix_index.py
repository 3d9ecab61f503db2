"""Which blocks hold which tokens: the index behind prefix caching."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from ..errors import InvariantError

__all__ = ["PrefixIndex"]


class _Entry:
    """A full block that can be found: below the block before it, by exactly its tokens. A root has a salt instead."""

    __slots__ = ("block", "children", "is_live", "key", "parent")

    def __init__(self, parent: _Entry | None, key: Any, block: int) -> None:
        self.parent = parent
        self.key = key  # the tokens; of a root, the salt
        self.block = block
        self.children: dict[tuple[int, ...], _Entry] = {}
        self.is_live = True


class PrefixIndex:
    """Full blocks by the tokens they hold and by all before them; those that nobody holds by their age.

    ::

        salt None --- (5, 1, 7, 7) block 3 --- (2, 2, 9, 4) block 8
                  |                        `-- (2, 6, 6, 1) block 0
                  `-- (5, 1, 8, 0) block 5
        salt "a" ---- (5, 1, 7, 7) block 2

    An entry is found by the tokens of its block, compared one by one, below the entry of the block before: equal hashes
    of different tokens cannot be mistaken for each other. Each salt has a root of its own.

    What is cached, that is indexed and held by nobody, leaves in the order in which it was let go. A table is let go
    from its last block to its first, so that of one chain the last goes first. An entry that leaves takes all entries
    below it along, for nothing could find them any more: every entry's parent is in the index, be it cached or held.

    `match` costs the blocks that it finds, `publish` those that are new to it.

    Args:
        block_size: tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._roots: dict[str | None, _Entry] = {}
        self._entries: dict[int, _Entry] = {}  # by block
        self._cached: OrderedDict[int, None] = OrderedDict()  # the next one to go first
        self._published: dict[int, tuple[int, _Entry, str | None]] = {}  # by sequence: blocks, the last entry, salt
        self._outdated: set[int] = set()  # blocks still held that were written before the last `forget`

    @property
    def num_cached(self) -> int:
        """Blocks that are indexed and that nobody holds."""
        return len(self._cached)

    def __contains__(self, block: int) -> bool:
        return block in self._entries

    def is_cached(self, block: int) -> bool:
        """Whether the block is indexed and nobody holds it."""
        return block in self._cached

    def match(self, token_ids: Sequence[int], limit: int, salt: str | None) -> tuple[int, ...]:
        """The blocks of the first tokens, as many as are indexed, within `limit` tokens."""
        hit: list[int] = []
        entry = self._roots.get(salt)
        size = self.block_size
        for end in range(size, limit + 1, size):
            if entry is None:
                break
            entry = entry.children.get(tuple(token_ids[end - size : end]))
            if entry is not None:
                hit.append(entry.block)
        return tuple(hit)

    def publish(
        self, seq_id: int, table: Sequence[int], token_ids: Sequence[int], num_blocks: int, salt: str | None
    ) -> list[int]:
        """Index the first `num_blocks` blocks of a table, which hold the first tokens of `token_ids`.

        A block whose like is in the index stays out of it, and what follows goes below the other one. If nobody holds
        the other one, it is given up for the one that somebody holds.

        Returns:
            Blocks given up, which are free.
        """
        count, entry, known_salt = self._published.get(seq_id, (0, None, salt))
        if entry is None or not entry.is_live or known_salt != salt:
            # What it went below has been evicted, and its own blocks after it have left the index: once more, with
            # its own in the place of those.
            count, entry = 0, self._roots.get(salt)
            if entry is None:
                entry = self._roots[salt] = _Entry(None, salt, -1)
        given_up: list[int] = []
        size = self.block_size
        for number in range(count, num_blocks):
            block = table[number]
            if block in self._outdated:
                break
            key = tuple(token_ids[number * size : (number + 1) * size])
            child = entry.children.get(key)
            if child is None:
                if block in self._entries:
                    break  # under another salt: nobody may find it under two
                child = entry.children[key] = self._entries[block] = _Entry(entry, key, block)
            elif child.block in self._cached and block not in self._entries:
                del self._cached[child.block], self._entries[child.block]
                given_up.append(child.block)
                child.block = block
                self._entries[block] = child
            count, entry = number + 1, child
        self._published[seq_id] = count, entry, salt
        self._drop_if_bare(entry)
        return given_up

    def leave(self, seq_id: int) -> None:
        """The sequence gives up its table."""
        self._published.pop(seq_id, None)

    def hold(self, block: int) -> None:
        """Somebody takes a cached block."""
        del self._cached[block]

    def let_go(self, block: int) -> bool:
        """Nobody holds the block any more. Returns whether it is cached now; else it is free."""
        self._outdated.discard(block)
        if block not in self._entries:
            return False
        self._cached[block] = None
        return True

    def evict(self) -> list[int]:
        """Forget the cached block that was let go first, and what only it leads to. Returns the blocks that are free.

        There must be one. Of what it leads to, blocks that somebody holds are forgotten too, but are not free.
        """
        oldest = self._entries[next(iter(self._cached))]
        assert oldest.parent is not None
        del oldest.parent.children[oldest.key]
        self._drop_if_bare(oldest.parent)
        return self._drop([oldest])

    def forget(self, held: Iterable[int]) -> list[int]:
        """Empty the index; what `held` blocks hold now is never indexed. Returns the blocks that are free."""
        freed = self._drop(list(self._roots.values()))
        self._roots.clear()
        self._outdated = set(held)
        return freed

    def _drop(self, entries: list[_Entry]) -> list[int]:
        """Take entries out, with all below them. Returns those of their blocks that were cached."""
        freed: list[int] = []
        while entries:
            entry = entries.pop()
            entry.is_live = False
            entries += entry.children.values()
            entry.children = {}
            if entry.parent is not None:
                del self._entries[entry.block]
                if entry.block in self._cached:
                    del self._cached[entry.block]
                    freed.append(entry.block)
        return freed

    def _drop_if_bare(self, entry: _Entry) -> None:
        """Forget a salt below which nothing is left."""
        if entry.parent is None and not entry.children:
            entry.is_live = False
            del self._roots[entry.key]

    def check(self, held: Collection[int]) -> None:
        """Raise InvariantError unless index and blocks agree both ways."""
        found: list[int] = []
        below = [(entry, salt) for salt, root in self._roots.items() for entry in root.children.values()]
        while below:
            entry, salt = below.pop()
            found.append(entry.block)
            below += [(child, salt) for child in entry.children.values()]
            if not (entry.parent and entry.is_live and entry.parent.children.get(entry.key) is entry):
                raise InvariantError(f"block {entry.block} does not lie below its parent, under salt {salt!r}")
            if self._entries.get(entry.block) is not entry:
                raise InvariantError(f"block {entry.block} is found by its tokens, and is no block of the index")
            if entry.block not in self._cached and entry.block not in held:
                raise InvariantError(f"block {entry.block} is indexed, and neither cached nor held")
        if sorted(found) != sorted(self._entries) or not self._cached.keys() <= self._entries.keys():
            raise InvariantError(
                f"the index leads to blocks {sorted(found)}, it knows {sorted(self._entries)}, of which "
                f"{sorted(self._cached)} are cached"
            )
        if any(not root.children for root in self._roots.values()) or not self._outdated <= set(held):
            raise InvariantError(f"a salt has no blocks, or one of {self._outdated} is not held")
