"""`check_allocator`: random verbs against what the interface promises."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass

from ..allocators import BlockAllocator
from ..errors import ConformanceError

__all__ = ["check_allocator"]

_SALTS = (None, "", "a")


def check_allocator(make: Callable[[int, int], BlockAllocator], *, num_workloads: int = 60, seed: int = 0) -> None:
    """Drive an allocator with random verbs and raise at the first rule that it breaks.

    `fits` is compared with what `grow` then does, on a deep copy where sequences are to be freed first; tables are
    compared with each other, and counts with tables. Where the allocator says `shares_blocks`, sequences begin with
    blocks of others; where it says `prefix_caching`, what was written into each block is compared with what `match`
    says of it.

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


@dataclass
class _Held:
    """A sequence with a table. The last `num_uncomputed` of its tokens have not been written."""

    tokens: tuple[int, ...]
    salt: str | None
    table: tuple[int, ...] = ()
    num_uncomputed: int = 0
    is_outdated: bool = False  # it holds what was written before a `forget`

    @property
    def num_computed(self) -> int:
        return len(self.tokens) - self.num_uncomputed


class _Trial:
    def __init__(self, pool: BlockAllocator, name: str, rng: random.Random, where: str, blocks: int, size: int) -> None:
        self.pool, self.name, self.rng, self.where = pool, name, rng, where
        self.held: dict[int, _Held] = {}
        # Texts that begin alike, so that prefixes are found in part.
        self.texts = [tuple(rng.choices((1, 2), k=blocks * size))]
        for _ in range(3):
            alike = rng.randint(0, blocks * size)
            self.texts.append(self.texts[0][:alike] + tuple(rng.choices((1, 2), k=blocks * size - alike)))
        self.written: dict[int, tuple[str | None, tuple[int, ...]]] = {}  # by block: its tokens and all before them
        self.published: set[tuple[str | None, tuple[int, ...]]] = set()
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
            f"{self.pool.num_cached_blocks} of them cached, "
            f"tables { ({s: tuple(self.pool.table(s)) for s in self.held}) }",
        )

    def run(self) -> None:
        rng = self.rng
        next_id = 1
        for self.verbs in range(1, 121):
            act = rng.random()
            if act < 0.35:
                self.begin(next_id)
                next_id += 1
            elif act < 0.7 and self.held:
                seq_id = rng.choice(list(self.held))
                more = rng.choices((1, 2), k=rng.choice([0, 1, 1, self.pool.block_size]))
                self.grow(seq_id, (*self.held[seq_id].tokens, *more), self.held[seq_id].salt)
            elif act < 0.75:
                self.free(next_id + 1000)  # one that was never there
            elif act < 0.77:
                self.forget()
            elif act < 0.82 and self.held and self.pool.shares_blocks:
                self.rename(rng.choice(list(self.held)), next_id)
                next_id += 1
            elif self.held:
                seq_id = rng.choice(list(self.held))
                self.free(seq_id)
                if rng.random() < 0.3:
                    self.free(seq_id)
            self.check()
        for seq_id in list(self.held):
            self.free(seq_id)
            self.check()
        if self.pool.num_free_blocks != self.pool.num_blocks:
            raise self.broken("after the last free every block is free")

    # ------------------------------------------------------------------------------- verbs

    def rename(self, old: int, new: int) -> None:
        self.verb = f"rename({old}, {new})"
        free, table = self.pool.num_free_blocks, self.pool.table(old)
        self.pool.rename(old, new)
        if len(self.pool.table(old)) or self.pool.table(new) is not table or self.pool.num_free_blocks != free:
            raise self.broken("rename moves a table and changes nothing else", f"it was {tuple(table)}")
        self.held[new] = self.held.pop(old)

    def begin(self, seq_id: int) -> None:
        """A new sequence, which may begin with blocks that are there."""
        pool, rng = self.pool, self.rng
        tokens = rng.choice(self.texts)[: rng.randint(1, pool.num_blocks * pool.block_size)]
        salt = rng.choice(_SALTS)
        donors = [held for held in self.held.values() if held.num_computed >= pool.block_size]
        if pool.shares_blocks and donors and rng.random() < 0.3:
            donor = rng.choice(donors)
            count = rng.randint(1, donor.num_computed // pool.block_size)
            more = rng.choices((1, 2), k=rng.randint(1, pool.block_size))
            tokens = (*donor.tokens[: count * pool.block_size], *more)
            self.grow(seq_id, tokens, donor.salt, donor.table[:count], donor.is_outdated)
        elif pool.prefix_caching and rng.random() < 0.7:
            self.grow(seq_id, tokens, salt, self.match(tokens, len(tokens) - 1, salt))
        else:
            self.grow(seq_id, tokens, salt)

    def grow(
        self,
        seq_id: int,
        tokens: tuple[int, ...],
        salt: str | None,
        hit: tuple[int, ...] = (),
        is_outdated: bool = False,
    ) -> None:
        pool, rng = self.pool, self.rng
        num_tokens = len(tokens)
        reserve = rng.choice([0, 0, num_tokens, num_tokens + rng.randint(0, 3 * pool.block_size), 10**9])
        held = self.held.get(seq_id) or _Held(tokens[: len(hit) * pool.block_size], salt, (), 0, is_outdated)
        computed = held.num_computed
        self.verb = f"grow({seq_id}, {num_tokens}, computed={computed}, hit={hit}, reserve={reserve})"
        if pool.missing(seq_id, num_tokens) < 0:
            raise self.broken("missing is at least 0")
        others = [other for other in self.held if other != seq_id]
        freeing = rng.sample(others, rng.randint(0, len(others)))
        after_free = copy.deepcopy(pool)
        for other in freeing:
            after_free.free(other)
        still_held = {block for other in others if other not in freeing for block in pool.table(other)}
        hit_stays = still_held.issuperset(hit) or after_free.match(tokens, len(hit) * pool.block_size, salt) == hit
        would = (
            hit_stays and after_free.grow(seq_id, num_tokens, computed=computed, hit=hit, reserve=reserve) is not None
        )
        if pool.fits(seq_id, num_tokens, computed=computed, hit=hit, reserve=reserve, freeing=freeing) != would:
            raise self.broken(
                "fits is exact", f"with freeing={freeing} it said {not would}, grow then did the opposite"
            )
        fits = pool.fits(seq_id, num_tokens, computed=computed, hit=hit, reserve=reserve)
        self.check()  # asking changed nothing
        free, cached, table = pool.num_free_blocks, pool.num_cached_blocks, pool.table(seq_id)
        copies = pool.grow(seq_id, num_tokens, computed=computed, hit=hit, reserve=reserve)
        if fits != (copies is not None):
            raise self.broken("fits is exact", f"it said {fits}, grow returned {copies}")
        if copies is None:
            now = pool.num_free_blocks, pool.num_cached_blocks
            if now != (free, cached) or pool.table(seq_id) is not table:
                raise self.broken("a grow that returns None has changed nothing")
            return
        begins = (*hit, *table)
        new = tuple(pool.table(seq_id))
        if new[: len(begins)] != begins:
            raise self.broken("a table begins with the hit and grows at its end", f"from {begins} it became {new}")
        if new == tuple(table) and pool.table(seq_id) is not table:
            raise self.broken("table returns the same object until the table changes")
        if copies:
            raise self.broken("a sequence that writes into no shared block needs no copy", f"grow returned {copies}")
        held.tokens, held.table, held.num_uncomputed = tokens, new, num_tokens - computed
        self.held[seq_id] = held
        for block in new[len(begins) :]:
            if owner := next((other for other in others if block in self.held[other].table), None):
                raise self.broken("what is taken belonged to nobody", f"block {block} is in the table of {owner}")
            self.written.pop(block, None)
        promised = min(reserve, pool.num_blocks * pool.block_size)
        if promised > num_tokens and not pool.fits(seq_id, promised):
            raise self.broken("what is reserved can be had later", f"reserved {promised} tokens")
        self.check()
        self.write(seq_id, held)

    def write(self, seq_id: int, held: _Held) -> None:
        """Its tokens are computed, some of them or all, and mostly published."""
        pool, rng, size = self.pool, self.rng, self.pool.block_size
        first = held.num_computed // size
        held.num_uncomputed -= rng.choice([held.num_uncomputed, rng.randint(0, held.num_uncomputed)])
        num_full = held.num_computed // size
        if not held.is_outdated:
            for number in range(first, num_full):
                self.written[held.table[number]] = held.salt, held.tokens[: (number + 1) * size]
        if rng.random() < 0.2:
            return
        known = held.tokens[: held.num_computed]
        self.verb = f"publish({seq_id}, 0, {known}, {len(known)}, {held.salt!r})"
        before = pool.num_free_blocks
        pool.publish(seq_id, 0, known, len(known), held.salt)
        if pool.num_free_blocks != before:
            raise self.broken("publish takes and gives no block", f"{before} were free")
        if pool.prefix_caching and not held.is_outdated:
            self.published.update((held.salt, known[: (number + 1) * size]) for number in range(num_full))
            if len(found := self.match(known, len(known), held.salt)) != num_full:
                raise self.broken("what is published is found", f"of its {num_full} full blocks only {found}")

    def match(self, tokens: tuple[int, ...], limit: int, salt: str | None) -> tuple[int, ...]:
        """What the pool finds, compared with what was written and published."""
        pool = self.pool
        hit = pool.match(tokens, limit, salt)
        if len(hit) * pool.block_size > limit:
            raise self.broken("match keeps to its limit", f"{hit} for {limit} tokens")
        for number, block in enumerate(hit):
            want = salt, tokens[: (number + 1) * pool.block_size]
            if self.written.get(block) != want or want not in self.published:
                raise self.broken(
                    "match finds only blocks that hold these tokens, published under this salt",
                    f"for {want[1]} under {salt!r} it found block {block}, which holds {self.written.get(block)}",
                )
        return hit

    def forget(self) -> None:
        pool = self.pool
        self.verb = "forget()"
        free = pool.num_free_blocks
        pool.forget()
        self.written.clear()
        self.published.clear()
        for held in self.held.values():
            held.is_outdated = True
        if pool.num_cached_blocks or pool.num_free_blocks != free:
            raise self.broken("forget makes cached blocks free, and no others", f"{free} were free before")

    def free(self, seq_id: int) -> None:
        self.verb = f"free({seq_id})"
        self.pool.free(seq_id)
        self.held.pop(seq_id, None)
        if len(self.pool.table(seq_id)):
            raise self.broken("a freed sequence has no table")

    # ------------------------------------------------------------------------------- the books

    def check(self) -> None:
        pool = self.pool
        for seq_id, held in self.held.items():
            table = pool.table(seq_id)
            if tuple(table) != held.table:
                raise self.broken("only its own verbs change a table", f"sequence {seq_id} had {held.table}")
            if table is not pool.table(seq_id):
                raise self.broken("table returns the same object until the table changes")
            if len(table) * pool.block_size < len(held.tokens):
                raise self.broken("a table covers its tokens", f"sequence {seq_id} has {len(held.tokens)}")
            if not pool.growable and tuple(table) != tuple(range(table[0], table[0] + len(table))):
                raise self.broken("a table that never grows is consecutive", f"sequence {seq_id}")
            if len(set(table)) < len(table):
                raise self.broken("a block stands in a table once", f"sequence {seq_id}")
            for block in table:
                if not 0 <= block < pool.num_blocks:
                    raise self.broken("blocks are numbered from 0", f"block {block}")
        num_held = len({block for held in self.held.values() for block in held.table})
        more = sum(len(held.table) for held in self.held.values()) - num_held
        if pool.num_shares != more:
            raise self.broken(
                "num_shares counts what tables hold together", f"it says {pool.num_shares}, they share {more}"
            )
        spare = pool.num_blocks - pool.num_free_blocks - num_held
        if spare < 0:
            raise self.broken("free blocks and blocks in tables add up to the pool", f"{-spare} too many")
        if spare > 0:
            raise self.broken("free blocks and blocks in tables add up to the pool", f"{spare} blocks leaked")
        if not 0 <= pool.num_cached_blocks <= (pool.num_free_blocks if pool.prefix_caching else 0):
            raise self.broken("cached blocks are some of the free ones, where prefixes are cached")
        try:
            pool.check()
        except AssertionError as error:
            raise self.broken("check passes", str(error)) from error
