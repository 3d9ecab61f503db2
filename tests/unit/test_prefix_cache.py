"""Shared and cached blocks: cases 2, 5, 6, 102 to 107, and what the index promises."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchkit import ContiguousAllocator, InvariantError, PagedAllocator


def caching(num_blocks: int, block_size: int = 4) -> PagedAllocator:
    return PagedAllocator(num_blocks, block_size, prefix_caching=True)


def compute(pool: PagedAllocator, seq_id: int, tokens, *, salt: str | None = None, publish: bool = True) -> int:
    """A sequence computes its tokens, all of which it finds but the last. Returns how many it found."""
    hit = pool.match(tokens, len(tokens) - 1, salt)
    found = len(hit) * pool.block_size
    assert pool.grow(seq_id, len(tokens), computed=found, hit=hit) == ()
    if publish:
        pool.publish(seq_id, 0, tokens, len(tokens), salt)
    pool.check()
    return found


def use(pool: PagedAllocator, seq_id: int, tokens, **how) -> int:
    """As `compute`, and then it ends."""
    found = compute(pool, seq_id, tokens, **how)
    pool.free(seq_id)
    pool.check()
    return found


def numbers(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


# ------------------------------------------------------------------------------------------ books


def test_a_shared_block_is_free_when_the_last_gives_it_back_and_then_once() -> None:
    """Case 2: a block that was named twice in one call was counted as free twice."""
    pool = PagedAllocator(6, 4)
    pool.grow(1, 12)
    for seq_id in (2, 3):
        assert pool.grow(seq_id, 12, computed=8, hit=pool.table(1)[:2]) == ()
    assert pool.num_free_blocks == 1
    pool.check()
    free = []
    for seq_id in (1, 1, 3, 3, 2, 2):
        pool.free(seq_id)
        pool.check()
        free.append(pool.num_free_blocks)
    assert free == [2, 2, 3, 3, 6, 6]
    pool.grow(4, 12)
    pool.grow(5, 12)
    assert sorted([*pool.table(4), *pool.table(5)]) == list(range(6))


def test_fits_knows_that_two_victims_give_a_shared_block_back_once_and_one_of_them_does_not() -> None:
    pool = PagedAllocator(4, 4)
    pool.grow(1, 12)
    pool.grow(2, 12, computed=8, hit=pool.table(1)[:2])
    assert pool.num_free_blocks == 0
    assert not pool.fits(3, 5, freeing=[1])
    assert pool.fits(3, 4, freeing=[1])
    assert pool.fits(3, 16, freeing=[1, 2])
    assert not pool.fits(3, 17, freeing=[1, 2])


def test_fits_counts_a_hit_that_only_a_victim_holds() -> None:
    pool = caching(4)
    tokens = numbers(0, 16)
    compute(pool, 1, tokens)
    hit = pool.match(tokens, 11)
    assert hit == pool.table(1)[:2]
    assert pool.fits(2, 16, computed=8, hit=hit, freeing=[1])
    assert not pool.fits(2, 17, computed=8, hit=hit, freeing=[1])
    pool.free(1)
    assert pool.grow(2, 16, computed=8, hit=hit) == ()
    assert pool.table(2)[:2] == hit
    pool.check()


def test_a_hit_that_is_lost_with_its_last_holder_does_not_fit() -> None:
    pool = PagedAllocator(8, 4)
    pool.grow(1, 8)
    hit = pool.table(1)[:1]
    assert pool.fits(2, 8, computed=4, hit=hit)
    assert not pool.fits(2, 8, computed=4, hit=hit, freeing=[1])
    pool.grow(3, 8, computed=4, hit=hit)
    assert pool.fits(2, 8, computed=4, hit=hit, freeing=[1])


def test_the_later_of_two_that_compute_the_same_keeps_its_own_blocks() -> None:
    """Case 5: what was recognised as a duplicate was freed, and a table still named it."""
    pool = caching(8)
    tokens = numbers(0, 9)
    hits = [pool.match(tokens, 8) for _ in (1, 2)]  # both look before either has computed
    for seq_id, hit in zip((1, 2), hits, strict=True):
        pool.grow(seq_id, 9, hit=hit)
    for seq_id in (1, 2):
        pool.publish(seq_id, 0, tokens, 9)
        pool.check()
    assert not set(pool.table(1)) & set(pool.table(2))
    assert pool.match(tokens, 9) == pool.table(1)[:2]
    own = pool.table(2)
    pool.grow(3, 8)
    assert pool.table(2) is own and not set(own) & set(pool.table(3))
    # What it computes from here on is published behind the other's blocks.
    pool.free(3)
    more = [*tokens, *numbers(50, 3)]
    pool.grow(2, 12)
    pool.publish(2, 0, more, 12)
    assert pool.match(more, 12) == (*pool.table(1)[:2], pool.table(2)[2])
    pool.check()
    for seq_id in (2, 1):
        pool.free(seq_id)
        pool.check()
    assert pool.num_free_blocks == 8


def test_blocks_published_behind_those_of_another_leave_the_index_with_them_and_come_again() -> None:
    pool = caching(7)
    tokens = numbers(0, 8)
    for seq_id in (1, 2):
        pool.grow(seq_id, 8)
    for seq_id in (1, 2):
        pool.publish(seq_id, 0, tokens, 8)
    more = [*tokens, *numbers(50, 4)]
    pool.grow(2, 12)
    pool.publish(2, 0, more, 12)
    own = pool.table(2)
    pool.free(1)
    assert (pool.num_cached_blocks, len(pool.match(more, 12))) == (2, 3)
    pool.grow(3, 16)  # takes all that is left, the two that were cached among it
    pool.check()
    assert pool.num_free_blocks == pool.num_cached_blocks == 0
    assert pool.match(more, 12) == ()
    # Its next block says what all its blocks hold.
    pool.free(3)
    most = [*more, *numbers(60, 4)]
    pool.grow(2, 16)
    pool.publish(2, 0, most, 16)
    pool.check()
    assert pool.match(most, 16) == pool.table(2)
    assert pool.table(2)[:3] == own


def test_a_block_that_somebody_holds_takes_the_place_of_its_like_that_nobody_holds() -> None:
    pool = caching(8)
    tokens = numbers(0, 8)
    use(pool, 1, tokens)
    assert pool.num_cached_blocks == 2
    assert compute(pool, 2, tokens) == 4  # the last token is always computed, and with it its block
    assert pool.num_cached_blocks == 0 and pool.num_free_blocks == 6
    assert pool.match(tokens, 8) == pool.table(2)


def test_free_and_cached_add_up_when_four_have_shared_a_prefix() -> None:
    """Case 6: a shared block was counted once for each user, so that more was free than there is."""
    pool = caching(16)
    prefix = numbers(0, 12)
    assert [compute(pool, seq_id, [*prefix, *numbers(100 * seq_id, 2 + seq_id)]) for seq_id in range(1, 5)] == [
        0,
        12,
        12,
        12,
    ]
    held = {block for seq_id in range(1, 5) for block in pool.table(seq_id)}
    assert pool.num_free_blocks == 16 - len(held) == 16 - 3 - 1 - 1 - 2 - 2
    for seq_id in range(1, 5):
        pool.free(seq_id)
        pool.check()
    assert pool.num_free_blocks == 16
    assert pool.num_cached_blocks == 3 + 3  # the prefix, and the full blocks behind it


def test_check_finds_books_that_do_not_balance() -> None:
    def broken(break_it) -> None:
        pool = caching(8)
        compute(pool, 1, numbers(0, 9))
        compute(pool, 2, numbers(0, 9))
        use(pool, 3, numbers(50, 9))
        break_it(pool)
        with pytest.raises(InvariantError):
            pool.check()

    broken(lambda pool: pool._free.pop())
    broken(lambda pool: pool._free.append(pool._free[0]))
    broken(lambda pool: pool._shared.clear())
    broken(lambda pool: pool._tables.pop(1))
    broken(lambda pool: pool._tables.update({1: (*pool.table(1), pool.table(1)[0])}))
    broken(lambda pool: pool._index._cached.popitem())
    broken(lambda pool: pool._index._entries.pop(pool.table(1)[0]))
    broken(lambda pool: pool._index._roots.clear())
    broken(lambda pool: pool._index._roots.update({"bare": type(pool._index._roots[None])(None, "bare", -1)}))
    broken(lambda pool: next(iter(pool._index._roots[None].children.values())).children.clear())
    broken(lambda pool: pool._index._outdated.add(pool._free[0]))


# ------------------------------------------------------------------------------------------ finding


class Collides(int):
    """A token whose hash is that of all others."""

    def __hash__(self) -> int:
        return 0


def test_equal_hashes_are_no_hit() -> None:
    """Case 102: a block was taken for another by its hash, and its KV used for other tokens."""
    pool = caching(8)
    tokens = [Collides(number) for number in range(9)]
    use(pool, 1, tokens)
    for place in range(8):
        other = [*tokens[:place], Collides(77), *tokens[place + 1 :]]
        assert hash(tuple(other[:4])) == hash(tuple(tokens[:4]))
        assert len(pool.match(other, 8)) == place // 4
    assert len(pool.match([Collides(number) for number in range(9)], 8)) == 2


def test_equal_tokens_behind_other_ones_are_no_hit() -> None:
    """Case 102: the block before belongs to what is compared."""
    pool = caching(8)
    use(pool, 1, [1, 1, 1, 1, 5, 5, 5, 5])
    assert pool.match([2, 2, 2, 2, 5, 5, 5, 5], 8) == ()
    assert pool.match([5, 5, 5, 5], 4) == ()


def test_salts_keep_apart_and_no_salt_is_not_an_empty_one() -> None:
    """Case 103: of two ways to tell tenants apart, one's name hit what the other had cached."""
    pool = caching(16)
    tokens = numbers(0, 9)
    salts = [None, "", "s", "None"]
    for seq_id, salt in enumerate(salts):
        assert use(pool, seq_id, tokens, salt=salt) == 0
    assert [use(pool, 10, tokens, salt=salt) for salt in salts] == [8, 8, 8, 8]
    assert len({pool.match(tokens, 8, salt) for salt in salts}) == 4
    assert pool.match(tokens, 8, "t") == ()


def test_a_block_is_never_found_under_two_salts() -> None:
    pool = caching(8)
    tokens = numbers(0, 12)
    compute(pool, 1, tokens[:8], salt="a")
    pool.grow(1, 12)
    pool.publish(1, 0, tokens, 12, "b")
    pool.check()
    assert (pool.match(tokens, 12, "b"), len(pool.match(tokens, 12, "a"))) == ((), 2)


def test_salts_that_are_used_once_leave_nothing_behind() -> None:
    pool = caching(4)
    for number in range(100):
        use(pool, number, numbers(0, 9), salt=str(number))
        pool.publish(1000, 0, [], 0, f"nothing {number}")
    assert len(pool._index._roots) <= 2
    assert not pool._index._published.keys() - {1000}


def test_no_more_is_found_than_the_limit_allows_and_only_whole_blocks() -> None:
    pool = caching(8)
    tokens = numbers(0, 12)
    use(pool, 1, tokens)
    assert [len(pool.match(tokens, limit)) for limit in (0, 3, 4, 7, 8, 11, 12, 99)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len(pool.match(tokens[:6], 12)) == 1


def test_what_is_not_full_or_not_computed_is_not_found() -> None:
    pool = caching(8)
    tokens = numbers(0, 16)
    pool.grow(1, 16)
    found = []
    for num_computed in (3, 4, 7, 8, 11, 16):
        pool.publish(1, 0, tokens[:num_computed], num_computed)
        found.append(len(pool.match(tokens, 16)))
    assert found == [0, 1, 1, 2, 2, 4]


def test_a_sequence_of_tokens_of_any_kind_is_found() -> None:
    pool = caching(8)
    pool.grow(1, 8)
    pool.publish(1, 0, tuple(range(8)), 8)
    for tokens in (list(range(8)), tuple(range(8)), range(8)):
        assert pool.match(tokens, 8) == pool.table(1)


def test_what_cannot_have_been_computed_is_refused_with_the_numbers() -> None:
    pool = caching(8)
    pool.grow(1, 8)
    with pytest.raises(ValueError, match=r"sequence 1 cannot have computed 12 tokens: 12 are given.* 2 blocks of 4"):
        pool.publish(1, 0, numbers(0, 12), 12)
    with pytest.raises(ValueError, match="cannot have computed 8 tokens: 4 are given"):
        pool.publish(1, 0, numbers(0, 4), 8)
    hit = pool.table(1)[:1]
    with pytest.raises(ValueError, match=r"without a table.* hit of 1 blocks of 4 tokens for a table of 2"):
        pool.grow(1, 12, computed=4, hit=hit)
    with pytest.raises(ValueError, match="computed=3"):
        pool.fits(2, 12, computed=3, hit=hit)
    with pytest.raises(NotImplementedError, match="PagedAllocator knows no beam groups, got rows=2"):
        pool.grow(2, 4, rows=2)
    with pytest.raises(NotImplementedError, match=r"ContiguousAllocator shares no blocks, got hit=\(1,\)"):
        ContiguousAllocator(4, 4).grow(1, 8, computed=4, hit=(1,))


def test_an_allocator_without_the_index_finds_nothing() -> None:
    pool = PagedAllocator(4, 4)
    pool.grow(1, 8)
    pool.publish(1, 0, numbers(0, 8), 8)
    pool.free(1)
    pool.forget()
    assert pool.match(numbers(0, 8), 8) == () and pool.num_cached_blocks == 0
    pool.check()


# ------------------------------------------------------------------------------------------ evicting


def test_a_hit_is_held_before_anything_is_evicted_and_is_not_free_besides() -> None:
    """Case 105: cached blocks stood in the free list, and the hit itself was given away as a new block."""
    pool = caching(4)
    tokens = numbers(0, 9)
    use(pool, 1, tokens)
    pool.grow(2, 8)
    pool.free(2)
    hit = pool.match(tokens, 8)
    assert (len(hit), pool.num_cached_blocks, pool.num_free_blocks) == (2, 2, 4)
    assert not pool.fits(3, 20, computed=8, hit=hit)
    assert pool.grow(3, 20, computed=8, hit=hit) is None
    assert (pool.match(tokens, 8), pool.num_cached_blocks, pool.num_free_blocks) == (hit, 2, 4)
    assert pool.grow(3, 16, computed=8, hit=hit) == ()
    assert len(set(pool.table(3))) == 4 and pool.table(3)[:2] == hit
    pool.check()


def test_an_evicted_block_is_not_found_any_more() -> None:
    """Case 106: a block was found by its old hash after somebody else had written into it."""
    pool = caching(4)
    first, second = numbers(0, 13), numbers(50, 16)
    use(pool, 1, first)
    assert use(pool, 2, second) == 0
    assert pool.match(first, 12) == ()
    assert use(pool, 3, first) == 0
    assert len(pool.match(first, 12)) == 3 and not set(pool.match(second, 16)) & set(pool.match(first, 12))


def test_of_one_chain_the_last_block_goes_first() -> None:
    """Case 107: the first block of a chain was evicted, and the rest took up space without being found."""
    pool = caching(3)
    tokens = numbers(0, 12)
    use(pool, 1, tokens)
    use(pool, 2, numbers(50, 3))
    assert len(pool.match(tokens, 12)) == 2
    assert use(pool, 3, tokens) == 8


def test_what_was_let_go_first_goes_first() -> None:
    pool = caching(6)
    chains = [numbers(100 * number, 8) for number in range(3)]
    for seq_id, chain in enumerate(chains):
        use(pool, seq_id, chain)
    use(pool, 9, [*chains[0], 1])  # used once more, so that it is the last to go
    pool.check()
    lengths = []
    for count in range(1, 7):
        pool.grow(10, 4 * count)
        lengths.append([len(pool.match(chain, 8)) for chain in chains])
        pool.check()
    assert lengths == [[2, 1, 2], [2, 0, 2], [2, 0, 1], [2, 0, 0], [1, 0, 0], [0, 0, 0]]


def test_free_blocks_are_taken_before_cached_ones() -> None:
    pool = caching(6)
    tokens = numbers(0, 12)
    use(pool, 1, tokens)
    pool.grow(2, 12)
    assert len(pool.match(tokens, 12)) == 3


def test_a_hit_of_more_blocks_than_are_asked_for_takes_those_and_no_others() -> None:
    pool = caching(4)
    tokens = numbers(0, 8)
    use(pool, 1, tokens)
    pool.grow(2, 8)
    hit = pool.match(tokens, 8)
    assert (len(hit), pool.num_free_blocks) == (2, 2)
    assert pool.fits(3, 4, computed=8, hit=hit)
    assert pool.grow(3, 4, computed=8, hit=hit) == ()
    assert (pool.table(3), pool.num_free_blocks) == (hit, 0)
    pool.check()


# ------------------------------------------------------------------------------------------ forgetting


def test_after_forget_nothing_is_found_and_what_was_written_before_never_again() -> None:
    pool = caching(12)
    tokens = numbers(0, 16)
    compute(pool, 1, tokens[:9])
    use(pool, 2, numbers(50, 9))
    table = pool.table(1)
    pool.forget()
    pool.check()
    assert (pool.num_cached_blocks, pool.num_free_blocks, pool.match(tokens, 16)) == (0, 9, ())
    assert pool.table(1) is table
    pool.grow(3, 9, computed=8, hit=table[:2])  # its sample
    pool.grow(1, 16)
    for seq_id, known in ((1, tokens), (3, tokens[:9])):
        pool.publish(seq_id, 0, known, len(known))
        pool.check()
    assert pool.match(tokens, 16) == ()
    for seq_id in (1, 3):
        pool.free(seq_id)
        pool.check()
    assert (pool.num_cached_blocks, pool.num_free_blocks) == (0, 12)
    assert use(pool, 4, tokens) == 0 and use(pool, 5, tokens) == 12


# ------------------------------------------------------------------------------------------ costs


class Counted(list):
    """Tokens that count how many of them are read."""

    read = 0

    def __getitem__(self, place):
        got = super().__getitem__(place)
        Counted.read += len(got) if isinstance(place, slice) else 1
        return got


def test_publishing_costs_what_is_new() -> None:
    pool = caching(100)
    tokens = Counted(numbers(0, 400))
    pool.grow(1, 400)
    costs = []
    for num_computed in range(4, 401, 4):
        Counted.read = 0
        pool.publish(1, 0, tokens, num_computed)
        costs.append(Counted.read)
    assert set(costs) == {4}


# ------------------------------------------------------------------------------------------ anything at all


@st.composite
def lives(draw):
    """Sequences of few different tokens, so that they begin alike; and what happens to them."""
    size = draw(st.sampled_from([1, 2, 4]))
    num_blocks = draw(st.integers(1, 12))
    verbs = draw(
        st.lists(
            st.tuples(
                st.sampled_from(["begin", "begin", "sample", "grow", "grow", "publish", "free", "free", "forget"]),
                st.integers(0, 1 << 30),
            ),
            max_size=60,
        )
    )
    return size, num_blocks, verbs


def run_life(size: int, num_blocks: int, verbs) -> None:
    """After every verb the books balance, and everything that is found was written there by its name."""
    pool = PagedAllocator(num_blocks, size, prefix_caching=True)
    tokens: dict[int, list[int]] = {}
    written: dict[int, tuple[int, ...]] = {}
    for seq_id, (verb, seed) in enumerate(verbs):
        rng = random.Random(seed)
        live = rng.choice(list(tokens)) if tokens else None
        more = rng.choices((1, 2), k=rng.randint(1, 2 * size))
        if verb == "begin":
            new = rng.choices((1, 2), k=rng.randint(1, num_blocks * size))
            hit = pool.match(new, len(new) - 1)
        elif live is None:
            continue
        elif verb == "sample":
            hit = pool.table(live)[: rng.randint(0, len(tokens[live]) // size)]
            new = tokens[live][: len(hit) * size] + more
        if verb in ("begin", "sample"):
            fits = pool.fits(seq_id, len(new), computed=len(hit) * size, hit=hit)
            assert (pool.grow(seq_id, len(new), computed=len(hit) * size, hit=hit) is not None) == fits
            if fits:
                assert pool.table(seq_id)[: len(hit)] == hit
                tokens[seq_id] = new
                writer, first = seq_id, len(hit)
        elif verb == "grow":
            writer, first = live, len(tokens[live]) // size
            fits = pool.grow(live, len(tokens[live]) + len(more)) is not None
            if fits:
                tokens[live] += more
        elif verb == "publish":
            pool.publish(live, 0, tokens[live], len(tokens[live]))
        elif verb == "free":
            pool.free(live)
            del tokens[live]
        else:
            pool.forget()
            written.clear()
            # What others are to find is computed anew, as the engine does after a loss.
            for seq in list(tokens):
                pool.free(seq)
            tokens.clear()
        if verb in ("begin", "sample", "grow") and fits:
            for number in range(first, len(pool.table(writer))):
                written[pool.table(writer)[number]] = tuple(tokens[writer][: (number + 1) * size])
        pool.check()
        for known in tokens.values():
            for number, block in enumerate(pool.match(known, len(known))):
                assert written[block] == tuple(known[: (number + 1) * size])
    for seq_id in tokens:
        pool.free(seq_id)
    pool.check()
    assert pool.num_free_blocks == num_blocks


@given(lives())
@settings(max_examples=60)
def test_whatever_happens_the_books_balance_and_what_is_found_is_there(life) -> None:
    run_life(*life)


@pytest.mark.slow
@given(lives())
@settings(max_examples=3000)
def test_whatever_happens_the_books_balance_and_what_is_found_is_there_3000_times(life) -> None:
    run_life(*life)


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_cached_can_be_found(seed: int) -> None:
    """Case 107, over a long run: no block is cached whose chain is broken before it."""
    rng = random.Random(seed)
    pool = caching(40, 2)
    live: list[int] = []
    texts: list[list[int]] = [[1]]
    num_cached = 0
    for seq_id in range(1000):
        tokens = rng.choice(texts[-30:])[: rng.randint(1, 20)] + rng.choices((1, 2, 3), k=rng.randint(1, 8))
        # Some look too early, and compute what others compute.
        hit = pool.match(tokens, len(tokens) - 1) if rng.random() < 0.7 else ()
        while pool.grow(seq_id, len(tokens), computed=2 * len(hit), hit=hit) is None:
            pool.free(live.pop(rng.randrange(len(live))))
            hit = ()
        live.append(seq_id)
        pool.publish(seq_id, 0, tokens, len(tokens))
        texts.append(tokens)
        pool.check()
        if seq_id % 20 == 0:
            found = {block for text in texts for block in pool.match(text, len(text))}
            held = {block for other in live for block in pool.table(other)}
            assert len(found - held) == pool.num_cached_blocks
            num_cached += pool.num_cached_blocks
    assert num_cached
