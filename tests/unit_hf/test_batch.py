"""The packed arrays of a step, against a slow reading of the rows token by token."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from batchkit.hf.batch import BatchBuilder
from batchkit.types import Request, SamplingParams, ScheduledSequence

REQUEST = Request(id="r", prompt_token_ids=(1,), params=SamplingParams(), max_tokens=1)


def make_row(
    seq_id: int, start: int, token_ids: tuple[int, ...], blocks: Sequence[int], *, samples: bool = True, row: int = 0
) -> ScheduledSequence:
    return ScheduledSequence(
        seq_id=seq_id,
        row=row,
        seat=0,
        request=REQUEST,
        sample_index=0,
        start=start,
        num_tokens=len(token_ids),
        token_ids=token_ids,
        output_ids=[],
        num_output=0,
        blocks=blocks,
        samples=samples,
        idle=False,
    )


def test_every_array_equals_a_loop_over_tokens() -> None:
    rng = random.Random(0)
    for _ in range(50):
        bs = rng.choice([1, 3, 4, 16])
        rows, ids, positions, slots, sampled = [], [], [], [], []
        for seq_id in range(rng.randint(1, 9)):
            start, num = rng.randint(0, 40), rng.choice([1, 1, 2, 7, 20])
            spare = rng.randint(0, 3)  # a table may be longer than needed
            blocks = tuple(rng.randrange(1000) for _ in range(-(-(start + num) // bs) + spare))
            tokens = tuple(rng.randrange(50_000) for _ in range(num))
            rows.append(make_row(seq_id, start, tokens, blocks, samples=rng.random() < 0.7))
            ids += tokens
            positions += range(start, start + num)
            slots += [blocks[p // bs] * bs + p % bs for p in range(start, start + num)]
            if rows[-1].samples:
                sampled.append(len(ids) - 1)
        batch = BatchBuilder(bs).build(rows)
        assert batch.input_ids.tolist() == ids
        assert batch.positions.tolist() == positions
        assert batch.slots.tolist() == slots
        assert batch.sampled.tolist() == sampled
        assert batch.query_lens.tolist() == [row.num_tokens for row in rows]
        assert batch.kv_lens.tolist() == [row.start + row.num_tokens for row in rows]
        assert (batch.num_rows, batch.num_tokens) == (len(rows), len(ids))
        for at, row in enumerate(rows):
            table = batch.tables[batch.table_starts[at] : batch.table_starts[at + 1]]
            assert table.tolist() == list(row.blocks[: -(-(row.start + row.num_tokens) // bs)])


def test_padded_tables() -> None:
    rows = [make_row(0, 9, (1,), (7, 8, 9)), make_row(1, 0, (1,), (5,)), make_row(2, 4, (1,), (3, 4))]
    batch = BatchBuilder(4).build(rows)
    which, first = np.array([0, 2, 1]), np.array([1, 0, 0])
    assert batch.padded_tables(which, first, 3, 99).tolist() == [[8, 9, 99], [3, 4, 99], [5, 99, 99]]
    assert batch.padded_tables(which[:1], first[:1], 2, 99).tolist() == [[8, 9]]


def test_a_range_is_a_table() -> None:
    batch = BatchBuilder(4).build([make_row(0, 6, (1, 2, 3), range(10, 20))])
    assert batch.tables.tolist() == [10, 11, 12]
    assert batch.slots.tolist() == [46, 47, 48]


class Counted(Sequence[int]):
    """A table that knows how often it was read."""

    def __init__(self, blocks: list[int]) -> None:
        self.blocks = blocks
        self.reads = 0

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        self.reads += 1
        return self.blocks[index]

    def __len__(self) -> int:
        return len(self.blocks)


def test_an_unchanged_table_is_read_once() -> None:
    builder = BatchBuilder(4)
    table = Counted([5, 6, 7])
    for start in range(8):
        assert builder.build([make_row(1, start, (1,), table)]).slots.tolist() == [
            [5, 6, 7][start // 4] * 4 + start % 4
        ]
    once = table.reads
    builder.build([make_row(1, 8, (1,), table)])
    assert table.reads == once
    builder.drop_caches()
    builder.build([make_row(1, 8, (1,), table)])
    assert table.reads > once


def test_an_equal_but_new_table_and_another_row_are_read() -> None:
    builder = BatchBuilder(4)
    assert builder.build([make_row(1, 0, (1,), (5,))]).slots.tolist() == [20]
    assert builder.build([make_row(1, 0, (1,), (6,))]).slots.tolist() == [24]
    assert builder.build([make_row(1, 0, (1,), (7,), row=1)]).slots.tolist() == [28]
    assert builder.build([make_row(1, 0, (1,), (6,))]).slots.tolist() == [24]


def test_the_cache_is_bounded() -> None:
    builder = BatchBuilder(4, max_cached=10)
    for seq_id in range(200):
        builder.build([make_row(seq_id, 0, (1,), (3,))])
        assert len(builder._tables) <= 10
    builder.build([make_row(seq_id, 0, (1,), (3,)) for seq_id in range(50)])
    assert len(builder._tables) == 50  # those of the present step
    builder.build([make_row(51, 0, (1,), (3,))])
    assert len(builder._tables) <= 10


def test_broken_rows_are_refused_with_numbers() -> None:
    builder = BatchBuilder(4)
    with pytest.raises(ValueError, match="sequence 3 has 1 blocks of 4 for 5 tokens"):
        builder.build([make_row(3, 4, (1,), (3,))])
    row = make_row(0, 0, (1, 2), (3,))._replace(num_tokens=3)
    with pytest.raises(ValueError, match=r"\[3\] tokens and hold \[2\]"):
        builder.build([row])
    with pytest.raises(ValueError, match=r"\[0\] tokens"):
        builder.build([make_row(0, 0, (), (3,))])
