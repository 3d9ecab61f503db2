"""The packed index arrays of one step, built from its rows.

Everything here is integers in numpy, made by whole rows: the only Python loop runs over rows, never over tokens. A
backend turns the arrays into whatever its kernels want (`backends/base.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..types import ScheduledSequence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..types import Request

__all__ = ["Batch", "BatchBuilder", "IntArray", "row_of"]

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step as packed arrays: R rows with T tokens in all, row after row. Arrays of numbers are int64.

    Block tables are ragged: those of row r are ``tables[table_starts[r] : table_starts[r + 1]]``, exactly the blocks
    that hold its ``kv_lens[r]`` tokens.

    Attributes:
        block_size: tokens per block.
        input_ids: [T].
        positions: [T], of each token in its own sequence.
        slots: [T], where each token's K and V go: ``block * block_size + position % block_size``.
        query_starts: [R + 1], the first token of each row, then T.
        kv_lens: [R], tokens of the sequence once this step's are written.
        tables: block numbers of all rows.
        table_starts: [R + 1].
        contiguous: [R], whether the row's table is consecutive by construction.
        sampled: the last token of every row that samples.
        min_width: a plan may pad block tables of rows of one token to so many blocks, to have few shapes.
    """

    block_size: int
    input_ids: IntArray
    positions: IntArray
    slots: IntArray
    query_starts: IntArray
    kv_lens: IntArray
    tables: IntArray
    table_starts: IntArray
    contiguous: npt.NDArray[np.bool_]
    sampled: IntArray
    min_width: int = 1

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.kv_lens)

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.input_ids)

    @property
    def query_lens(self) -> IntArray:
        """[R], tokens of each row in this step."""
        lens: IntArray = np.diff(self.query_starts)
        return lens

    @property
    def inputs(self) -> IntArray:
        """[3, T]: token ids, positions and slots, to be sent to a device together."""
        return np.stack((self.input_ids, self.positions, self.slots))

    def padded_tables(self, rows: IntArray, first: IntArray, width: int, pad: int) -> IntArray:
        """Block tables of `rows` as one rectangle.

        Args:
            rows: [G], row numbers.
            first: [G], the first entry wanted of each table.
            width: W, entries per row.
            pad: stands where a table has ended.

        Returns:
            [G, W] block numbers.
        """
        at = (self.table_starts[rows] + first)[:, None] + np.arange(width)
        end = self.table_starts[rows + 1][:, None]
        padded: IntArray = self.tables[np.minimum(at, len(self.tables) - 1)]
        padded[at >= end] = pad
        return padded


def row_of(
    request: Request,
    index: int,
    *,
    start: int,
    token_ids: Sequence[int],
    blocks: Sequence[int],
    output: Sequence[int] = (),
) -> ScheduledSequence:
    """A row that no scheduler made, to try something with. It samples.

    Args:
        request: whose it is.
        index: tells it from the other rows of its step.
        start: tokens that are computed already.
        token_ids: those of the step.
        blocks: at least as many as it takes.
        output: what it has generated before.
    """
    return ScheduledSequence(
        seq_id=index,
        row=0,
        seat=index,
        request=request,
        sample_index=0,
        start=start,
        num_tokens=len(token_ids),
        token_ids=tuple(token_ids),
        output_ids=tuple(output),
        num_output=len(output),
        blocks=blocks,
        samples=True,
        idle=False,
    )


class BatchBuilder:
    """Builds a `Batch` from rows, keeping the arrays of tables that have not changed.

    A table counts as unchanged while the row's ``blocks`` *is* the same object; the builder holds that object, so that
    its identity cannot be given to another. At most `max_cached` tables are kept, and those of the present step.

    Args:
        block_size: tokens per block.
        max_cached: tables to keep.
    """

    def __init__(self, block_size: int, *, max_cached: int = 1024) -> None:
        self._block_size = block_size
        self._max_cached = max_cached
        self._tables: dict[tuple[int, int], tuple[Sequence[int], IntArray]] = {}

    def drop_caches(self) -> None:
        """Forget every table."""
        self._tables.clear()

    def build(self, rows: Sequence[ScheduledSequence]) -> Batch:
        """Pack `rows`, at least one.

        Raises:
            ValueError: a row has no token, a number of tokens that is not ``num_tokens``, or too few blocks.
        """
        bs, count = self._block_size, len(rows)
        lens = np.fromiter((row.num_tokens for row in rows), np.int64, count)
        starts = np.fromiter((row.start for row in rows), np.int64, count)
        query_starts = _cumulative(lens)
        input_ids = np.fromiter(chain.from_iterable(row.token_ids for row in rows), np.int64)
        if len(input_ids) != query_starts[-1] or int(lens.min()) < 1:
            raise ValueError(f"rows announce {lens.tolist()} tokens and hold {[len(row.token_ids) for row in rows]}")

        kv_lens = starts + lens
        needed = -(-kv_lens // bs)
        cache = self._tables
        parts = []
        for row, need in zip(rows, needed.tolist(), strict=True):
            blocks = row.blocks
            key = (row.seq_id, row.row)
            kept = cache.get(key)
            if kept is None or kept[0] is not blocks:
                kept = cache[key] = (blocks, np.array(blocks, np.int64))
            table = kept[1]
            if len(table) < need:
                raise ValueError(
                    f"sequence {row.seq_id} has {len(table)} blocks of {bs} for {row.start + row.num_tokens} tokens"
                )
            parts.append(table[:need])
        if len(cache) > self._max_cached:
            present = {(row.seq_id, row.row) for row in rows}
            self._tables = {key: kept for key, kept in cache.items() if key in present}

        tables, table_starts = np.concatenate(parts), _cumulative(needed)
        # Position of token t: its row's start, plus its distance from the row's first token.
        positions = np.arange(len(input_ids)) + np.repeat(starts - query_starts[:-1], lens)
        blocks_of_tokens = tables[np.repeat(table_starts[:-1], lens) + positions // bs]
        samples = np.fromiter((row.samples for row in rows), np.bool_, count)
        return Batch(
            block_size=bs,
            input_ids=input_ids,
            positions=positions,
            slots=blocks_of_tokens * bs + positions % bs,
            query_starts=query_starts,
            kv_lens=kv_lens,
            tables=tables,
            table_starts=table_starts,
            contiguous=np.fromiter((isinstance(row.blocks, range) for row in rows), np.bool_, count),
            sampled=query_starts[1:][samples] - 1,
        )


def _cumulative(lens: IntArray) -> IntArray:
    total = np.zeros(len(lens) + 1, np.int64)
    np.cumsum(lens, out=total[1:])
    return total
