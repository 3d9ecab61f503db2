"""`check_allocator`: random verbs against what the interface promises."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

from ..allocators import BlockAllocator
from ..errors import ConformanceError

__all__ = ["check_allocator"]


def check_allocator(make: Callable[[int, int], BlockAllocator], *, num_workloads: int = 60, seed: int = 0) -> None:
    """Drive an allocator with random verbs and raise at the first rule that it breaks.

    `fits` is compared with what `grow` then does, on a deep copy where sequences are to be freed first; tables are
    compared with each other, and counts with tables.

    Args:
        make: the allocator's class, or a function ``(num_blocks, block_size) -> BlockAllocator``.
        num_workloads: how many pools, with 120 verbs each.
        seed: of the verbs.

    Raises:
        ConformanceError: with the rule and the verb.
    """
    name = getattr(make, "__name__", "the allocator")
    for number in range(num_workloads):
        rng = random.Random(f"{seed}/{number}")
        blocks, size = rng.randint(1, 24), rng.choice([1, 2, 4, 16])
        _Trial(make(blocks, size), name, rng, f"pool {number} of seed {seed}", blocks, size).run()


class _Trial:
    def __init__(self, pool: BlockAllocator, name: str, rng: random.Random, where: str, blocks: int, size: int) -> None:
        self.pool, self.name, self.rng, self.where = pool, name, rng, where
        self.tokens: dict[int, int] = {}  # sequence -> tokens that its blocks must cover
        self.tables: dict[int, tuple[int, ...]] = {}
        self.verbs = 0
        self.verb = "construction"
        if (pool.num_blocks, pool.block_size, pool.num_free_blocks) != (blocks, size, blocks):
            raise self.broken("a new pool has the blocks it was made with, all free")

    def broken(self, rule: str, details: str = "") -> ConformanceError:
        return ConformanceError(
            self.name,
            rule,
            f"Verb {self.verbs} of {self.where}, {self.verb}: {details}{'; ' if details else ''}"
            f"{self.pool.num_free_blocks} of {self.pool.num_blocks} blocks of {self.pool.block_size} free, "
            f"tables { ({s: tuple(self.pool.table(s)) for s in self.tables}) }",
        )

    def run(self) -> None:
        next_id = 1
        for self.verbs in range(1, 121):
            act = self.rng.random()
            if act < 0.35:
                self.grow(next_id, self.rng.randint(1, self.pool.num_blocks * self.pool.block_size))
                next_id += 1
            elif act < 0.7 and self.tokens:
                seq_id = self.rng.choice(list(self.tokens))
                self.grow(seq_id, self.tokens[seq_id] + self.rng.choice([0, 1, 1, self.pool.block_size]))
            elif act < 0.75:
                self.free(next_id + 1000)  # one that was never there
            elif self.tokens:
                seq_id = self.rng.choice(list(self.tokens))
                self.free(seq_id)
                if self.rng.random() < 0.3:
                    self.free(seq_id)
            self.check()
        for seq_id in list(self.tokens):
            self.free(seq_id)
            self.check()
        if self.pool.num_free_blocks != self.pool.num_blocks:
            raise self.broken("after the last free every block is free")

    def grow(self, seq_id: int, num_tokens: int) -> None:
        pool, rng = self.pool, self.rng
        reserve = rng.choice([0, 0, num_tokens, num_tokens + rng.randint(0, 3 * pool.block_size), 10**9])
        self.verb = f"grow({seq_id}, {num_tokens}, reserve={reserve})"
        if pool.missing(seq_id, num_tokens) < 0:
            raise self.broken("missing is at least 0")
        others = [other for other in self.tokens if other != seq_id]
        freeing = rng.sample(others, rng.randint(0, len(others)))
        after_free = copy.deepcopy(pool)
        for other in freeing:
            after_free.free(other)
        would = after_free.grow(seq_id, num_tokens, reserve=reserve) is not None
        if pool.fits(seq_id, num_tokens, reserve=reserve, freeing=freeing) != would:
            raise self.broken(
                "fits is exact", f"with freeing={freeing} it said {not would}, grow then did the opposite"
            )
        fits = pool.fits(seq_id, num_tokens, reserve=reserve)
        self.check()  # asking changed nothing
        free, table = pool.num_free_blocks, pool.table(seq_id)
        copies = pool.grow(seq_id, num_tokens, reserve=reserve)
        if fits != (copies is not None):
            raise self.broken("fits is exact", f"it said {fits}, grow returned {copies}")
        if copies is None:
            if pool.num_free_blocks != free or pool.table(seq_id) is not table:
                raise self.broken("a grow that returns None has changed nothing")
            return
        new = tuple(pool.table(seq_id))
        if new[: len(table)] != tuple(table):
            raise self.broken("a table grows at its end", f"it was {tuple(table)}, it is {new}")
        if new == tuple(table) and pool.table(seq_id) is not table:
            raise self.broken("table returns the same object until the table changes")
        if copies:
            raise self.broken("a sequence that shares no block needs no copy", f"grow returned {copies}")
        self.tables[seq_id] = new
        self.tokens[seq_id] = num_tokens
        promised = min(reserve, pool.num_blocks * pool.block_size)
        if promised > num_tokens and not pool.fits(seq_id, promised):
            raise self.broken("what is reserved can be had later", f"reserved {promised} tokens")

    def free(self, seq_id: int) -> None:
        self.verb = f"free({seq_id})"
        self.pool.free(seq_id)
        self.tokens.pop(seq_id, None)
        self.tables.pop(seq_id, None)
        if len(self.pool.table(seq_id)):
            raise self.broken("a freed sequence has no table")

    def check(self) -> None:
        pool = self.pool
        seen: dict[int, int] = {}
        for seq_id, want in self.tables.items():
            table = pool.table(seq_id)
            if tuple(table) != want:
                raise self.broken("only its own verbs change a table", f"sequence {seq_id} had {want}")
            if table is not pool.table(seq_id):
                raise self.broken("table returns the same object until the table changes")
            if len(table) * pool.block_size < self.tokens[seq_id]:
                raise self.broken("a table covers its tokens", f"sequence {seq_id} has {self.tokens[seq_id]}")
            if not pool.growable and tuple(table) != tuple(range(table[0], table[0] + len(table))):
                raise self.broken("a table that never grows is consecutive", f"sequence {seq_id}")
            for block in table:
                if not 0 <= block < pool.num_blocks:
                    raise self.broken("blocks are numbered from 0", f"block {block}")
                if block in seen:
                    raise self.broken("no block has two owners", f"block {block}: {seen[block]} and {seq_id}")
                seen[block] = seq_id
        spare = pool.num_blocks - pool.num_free_blocks - len(seen)
        if spare < 0:
            raise self.broken("free blocks and blocks in tables add up to the pool", f"{-spare} too many")
        if spare > 0:
            raise self.broken("free blocks and blocks in tables add up to the pool", f"{spare} blocks leaked")
        try:
            pool.check()
        except AssertionError as error:
            raise self.broken("check passes", str(error)) from error
