"""Exact attention in plain torch, on any device: the twin that faster backends are tested against.

Rows are put into a few groups of similar length, padded to a rectangle, and each group is one attention call per
layer:

* rows of one token read the pool through their block tables; what they gather is at most about twice what they need;
* prompts that start at 0 need nothing from the pool; padding on the right is harmless under a causal mask, because no
  real token looks at it;
* rows of several tokens that continue a sequence are one call each.

Padding of a block table points to the pool's block of zeros, and slots that a row has not written are zeroed after
gathering: both get weight 0, and 0 times the NaN that an unwritten slot may hold would be NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from typing_extensions import override

from .base import AttentionBackend, StepGroups, to_device

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ..batch import Batch, IntArray
    from .base import LayerKV, LayerSpec

__all__ = ["ReferenceBackend"]

_SIMILAR = 256
"""Rows up to this many tokens are similar, however much they differ."""
_MAX_GATHER = 1 << 18
"""The most tokens that a group of more than one row gathers."""
_MAX_SCORES = 1 << 26
"""The most entries of a mask or of a score matrix held at once; queries are split above it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """G rows of L queries each, padded.

    Attributes:
        size: G.
        length: L.
        tokens: [G * L], the token of each query; None: all tokens of the step in order.
        put: tokens of the step that the outputs belong to; None: all in order.
        take: outputs that are no padding; None: all.
        table: [G * W], blocks to gather; None: K and V are those of `tokens` themselves.
        key_start: position of the first key gathered.
        num_keys: S, keys that count; only with G = 1 it may end within a block.
        blank: gathered slots, in [0, G * S), that were never written.
        start: position of the first query, with G = 1 or fresh rows.
        mask: [G, 1, 1, S], the keys that the query sees; rows of one token only. None: all.
    """

    size: int
    length: int
    tokens: torch.Tensor | None
    put: torch.Tensor | None
    take: torch.Tensor | None
    table: torch.Tensor | None
    key_start: int
    num_keys: int
    blank: torch.Tensor | None
    start: int
    mask: torch.Tensor | None


class ReferenceBackend(AttentionBackend):
    """See the module. Computes every layer that a `LayerSpec` can describe."""

    name = "reference"
    default_block_size = 16
    block_size_multiple = 1
    captures_decodes = False

    def __init__(self) -> None:
        self._scratch: dict[tuple[torch.dtype, bool], torch.Tensor] = {}

    @override
    def unsupported_reasons(self, layers: Sequence[LayerSpec]) -> list[str]:
        return []

    @override
    def plan(self, batch: Batch) -> StepGroups[_Group]:
        return StepGroups(batch, _make_groups)

    @override
    def drop_caches(self) -> None:
        self._scratch.clear()

    @override
    def attend(
        self,
        layer: LayerSpec,
        kv: LayerKV,
        plan: StepGroups[_Group],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        factor = layer.key_dim**-0.5 if scaling is None else scaling
        groups = plan.groups(layer.window, query.device, kv.zero_block)
        out = None
        for group in groups:
            part = self._attend_group(layer, kv, group, query, key, value, factor, sinks)
            if group.put is None:  # all tokens in order, so it is the only group
                return part
            if out is None:
                out = query.new_empty(query.shape[0], layer.num_heads, layer.value_dim)
            out.index_copy_(0, group.put, part if group.take is None else part.index_select(0, group.take))
        assert out is not None
        return out

    def _attend_group(
        self,
        layer: LayerSpec,
        kv: LayerKV,
        group: _Group,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """[G * L, num_heads, value_dim] of one group."""
        size, length, heads = group.size, group.length, layer.num_heads
        q = query if group.tokens is None else query.index_select(0, group.tokens)
        q = q.reshape(size, length, heads, layer.key_dim).transpose(1, 2)
        if group.table is None:
            k = _rows_of(key.transpose(0, 1), group)
            v = _rows_of(value.transpose(0, 1), group)
        else:
            k = self._gather(kv.key, kv, group, is_value=False)
            v = self._gather(kv.value, kv, group, is_value=True)
        if layer.softcap is not None or sinks is not None:
            out = _attend_by_hand(q, k, v, group, layer, scaling, sinks)
        else:
            out = _attend_fused(q, k, v, group, layer.window, scaling)
        return out.transpose(1, 2).reshape(size * length, heads, layer.value_dim)

    def _gather(self, pool: torch.Tensor, kv: LayerKV, group: _Group, *, is_value: bool) -> torch.Tensor:
        """[G, num_kv_heads, S, width] of a group's keys or values, finite wherever no real token is."""
        table = group.table
        assert table is not None
        heads, _, width = pool.shape
        blocks = pool.view(heads, -1, kv.block_size * width)
        into = None
        if pool.device.type == "cpu":  # a fresh buffer of this size would be mapped, and faulted in, for every layer
            shape = (heads, len(table), kv.block_size * width)
            into = self._buffer(pool, math.prod(shape), is_value).view(shape)
        got = torch.index_select(blocks, 1, table, out=into).view(heads, -1, width)
        if group.blank is not None:
            got.index_fill_(1, group.blank, 0)
        return got.view(heads, group.size, -1, width).transpose(0, 1)[:, :, : group.num_keys]

    def _buffer(self, pool: torch.Tensor, numel: int, is_value: bool) -> torch.Tensor:
        key = (pool.dtype, is_value)
        kept = self._scratch.get(key)
        if kept is None or kept.numel() < numel:
            self._scratch.pop(key, None)
            kept = self._scratch[key] = torch.empty(numel, dtype=pool.dtype, device=pool.device)
        return kept[:numel]


def _rows_of(packed: torch.Tensor, group: _Group) -> torch.Tensor:
    """[H, T, D] -> [G, H, L, D]."""
    chosen = packed if group.tokens is None else packed.index_select(1, group.tokens)
    return chosen.reshape(packed.shape[0], group.size, group.length, packed.shape[2]).transpose(0, 1)


def _visible(group: _Group, window: int | None, begin: int, end: int, device: torch.device) -> torch.Tensor | None:
    """[G or 1, 1, end - begin, S] of which keys the queries ``begin .. end - 1`` see; None: all."""
    if group.length == 1:
        return group.mask
    queries = torch.arange(group.start + begin, group.start + end, device=device)[:, None]
    keys = torch.arange(group.key_start, group.key_start + group.num_keys, device=device)
    seen = keys <= queries
    if window is not None:
        seen &= keys > queries - window
    return seen[None, None]


def _attend_fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: _Group, window: int | None, scaling: float
) -> torch.Tensor:
    size, heads, length, width = q.shape
    kv_heads = k.shape[1]
    if length == 1:
        # Query heads that share a K and V head become its queries, so that nothing is repeated.
        q = q.reshape(size, kv_heads, heads // kv_heads, width)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=scaling)
        return out.reshape(size, heads, 1, v.shape[-1])
    grouped = heads != kv_heads
    if group.table is None and (window is None or window >= length):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)
    parts = [
        F.scaled_dot_product_attention(
            q[:, :, begin:end],
            k,
            v,
            attn_mask=_visible(group, window, begin, end, q.device),
            scale=scaling,
            enable_gqa=grouped,
        )
        for begin, end in _splits(length, group.num_keys)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _attend_by_hand(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: _Group,
    layer: LayerSpec,
    scaling: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Softmax in float32, whatever the dtype, with soft cap and sinks."""
    size, heads, length, width = q.shape
    kv_heads = k.shape[1]
    shared = heads // kv_heads
    parts = []
    for begin, end in _splits(length, size * heads * group.num_keys):
        part = q[:, :, begin:end].reshape(size, kv_heads, shared * (end - begin), width)
        scores = torch.matmul(part, k.transpose(2, 3)).float().mul_(scaling)
        scores = scores.view(size, kv_heads, shared, end - begin, group.num_keys)
        if layer.softcap is not None:
            scores = scores.div_(layer.softcap).tanh_().mul_(layer.softcap)
        seen = _visible(group, layer.window, begin, end, q.device)
        if seen is not None:
            scores.masked_fill_(~seen[:, :, None], -torch.inf)
        if sinks is not None:
            column = sinks.to(scores.dtype).view(1, kv_heads, shared, 1, 1).expand(size, -1, -1, end - begin, 1)
            scores = torch.cat([scores, column], -1)
        weights = scores.softmax(-1)
        if sinks is not None:
            weights = weights[..., :-1]
        weights = weights.to(v.dtype).reshape(size, kv_heads, shared * (end - begin), group.num_keys)
        parts.append(torch.matmul(weights, v).view(size, heads, end - begin, v.shape[-1]))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _splits(length: int, per_query: int) -> Iterator[tuple[int, int]]:
    step = max(1, _MAX_SCORES // per_query)
    for begin in range(0, length, step):
        yield begin, min(begin + step, length)


def _make_groups(batch: Batch, window: int | None, device: torch.device, zero_block: int) -> Iterator[_Group]:
    lens, starts = batch.query_lens, batch.query_starts
    single = lens == 1
    fresh = ~single & (batch.kv_lens == lens)

    # A query of a window sees nothing before this position.
    first = np.maximum(batch.kv_lens - lens + 1 - window, 0) if window is not None else np.zeros_like(lens)
    first_block = first // batch.block_size
    rows = np.flatnonzero(single)
    spans = batch.kv_lens[rows] - first_block[rows] * batch.block_size
    for chosen in _similar(spans):
        yield _single_group(batch, rows[chosen], first, first_block, zero_block, device)

    rows = np.flatnonzero(fresh)
    for chosen in _similar(lens[rows]):
        group = rows[chosen]
        length = int(lens[group].max())
        offsets = np.arange(length)
        real = offsets < lens[group][:, None]
        # Padding repeats the row's last token: finite, and its output is dropped.
        tokens = starts[group][:, None] + np.minimum(offsets, lens[group][:, None] - 1)  # [G, L]
        whole = real.all()
        everything = bool(whole) and tokens.size == batch.num_tokens
        yield _Group(
            size=len(group),
            length=length,
            tokens=None if everything else to_device(tokens.ravel(), device),
            put=None if everything else to_device(tokens[real], device),
            take=None if whole else to_device(np.flatnonzero(real), device),
            table=None,
            key_start=0,
            num_keys=length,
            blank=None,
            start=0,
            mask=None,
        )

    for row in np.flatnonzero(~single & ~fresh):
        begin, end = int(starts[row]), int(starts[row + 1])
        own = None if end - begin == batch.num_tokens else torch.arange(begin, end, device=device)
        yield _Group(
            size=1,
            length=end - begin,
            tokens=own,
            put=own,
            take=None,
            table=to_device(
                batch.tables[batch.table_starts[row] + first_block[row] : batch.table_starts[row + 1]], device
            ),
            key_start=int(first_block[row]) * batch.block_size,
            num_keys=int(batch.kv_lens[row] - first_block[row] * batch.block_size),
            blank=None,
            start=int(batch.kv_lens[row]) - (end - begin),
            mask=None,
        )


def _single_group(
    batch: Batch,
    rows: IntArray,
    first: IntArray,
    first_block: IntArray,
    zero_block: int,
    device: torch.device,
) -> _Group:
    """The group of `rows`, which have one token each."""
    bs = batch.block_size
    base = first_block[rows] * bs
    spans = batch.kv_lens[rows] - base
    width = -(-int(spans.max()) // bs)
    table = batch.padded_tables(rows, first_block[rows], width, zero_block)
    # With one row, what is beyond its last token is cut off; with more, a mask hides it.
    num_keys = int(spans[0]) if len(rows) == 1 else width * bs
    hidden = (first[rows] - base)[:, None]  # gathered with its block, but before the window
    seen = None
    if (spans < num_keys).any() or hidden.any():
        keys = np.arange(num_keys, dtype=np.int32)
        seen = keys < spans[:, None].astype(np.int32)
        if hidden.any():
            seen &= keys >= hidden
    blank = None
    if len(rows) > 1:
        # Only the last block of a table is partly unwritten; the padding behind it is zero already.
        tail = spans[:, None] + np.arange(bs - 1)
        at = np.arange(len(rows))[:, None] * num_keys + tail
        unwritten = at[tail < -(-spans // bs)[:, None] * bs]
        blank = to_device(unwritten, device) if len(unwritten) else None
    everything = len(rows) == batch.num_tokens
    tokens = None if everything else to_device(batch.query_starts[rows], device)
    return _Group(
        size=len(rows),
        length=1,
        tokens=tokens,
        put=tokens,
        take=None,
        table=to_device(table.ravel(), device),
        key_start=0,
        num_keys=num_keys,
        blank=blank,
        start=0,
        mask=None if seen is None else to_device(seen, device)[:, None, None, :],
    )


def _similar(lens: IntArray) -> Iterator[IntArray]:
    """Indices of `lens`, in order, in groups whose padding at most about doubles them."""
    order = np.argsort(-lens, kind="stable")
    descending = lens[order]
    begin = 0
    while begin < len(order):
        longest = int(descending[begin])
        if longest <= _SIMILAR:
            end = len(order)
        else:
            end = int(np.searchsorted(-descending, -max(longest // 2, _SIMILAR), side="right"))
            end = max(end, begin + 1)
        end = min(end, begin + max(1, _MAX_GATHER // longest))
        yield np.sort(order[begin:end])
        begin = end
