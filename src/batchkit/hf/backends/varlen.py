"""Attention by torch's own `varlen_attn`, on GPUs: FlashAttention over block tables, one call for a step and layer.

The kernel takes rows of any number of queries together, finds each row's keys through its block table, and aligns the
causal mask to the row's end. So a step needs no groups: tokens that are decoded, prompts and chunks are all rows of it.
Contiguous tables are tables as well, since an entry stands for 256 tokens or more. A step of whole prompts alone reads
nothing from the pool, and needs no table.

FlashAttention 2 can split a row's keys among several thread blocks. As torch 2.13 has it, the parts are then joined in
the wrong place, for packed rows over block tables (pytorch issue 194167). One case is computed in another way, and
joined right: rows of one query each, whose heads share KV heads, without a window. So only there may it split. Anywhere
else it is told not to, and then a row's result does not depend on its neighbours.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from typing_extensions import override

from . import kv_write
from .base import AttentionBackend, StepGroups, to_device
from .requirements import unmet

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..batch import Batch
    from .base import LayerKV, LayerSpec

__all__ = ["VarlenBackend"]

_DEVICES = frozenset({"cuda"})
_WIDTHS = range(8, 257, 8)
_NEEDED = ("block_table", "seqused_k", "window_size", "enable_gqa", "scale")
_SPLITS_SINCE = (2, 13)
"""The version of torch from which on FlashAttention 2 splits keys by itself, and can be told not to."""
_ALL = (-1, -1)
"""A window without bounds, for rows of one query each: a causal mask would hide nothing from them."""


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """What `varlen_attn` is told of a step with R rows.

    Attributes:
        query_starts: [R + 1], int32.
        key_starts: [R + 1], int32. Beside block tables they say nothing: FlashAttention 2 wants them, others refuse.
        key_lens: [R], int32, how many keys each row has; None: as `key_starts` say.
        tables: [R, blocks], int32; None: the keys are those of the step's tokens.
        max_q: the most queries of a row.
        max_k: as many keys as a row may have; with tables, as many as these can hold.
        window: how far a query sees to the left and to the right; -1: as far as there are keys.
    """

    query_starts: torch.Tensor
    key_starts: torch.Tensor | None
    key_lens: torch.Tensor | None
    tables: torch.Tensor | None
    max_q: int
    max_k: int
    window: tuple[int, int]


class VarlenBackend(AttentionBackend):
    """See the module. For GPUs of compute capability 8.0 and up, in float16 and bfloat16, with torch 2.12 and up."""

    name = "varlen"
    default_block_size = 256
    block_size_multiple = 256
    captures_decodes = True

    @override
    def unsupported_reasons(self, layers: Sequence[LayerSpec]) -> list[str]:
        reasons = _missing_parts()
        for layer in layers:
            reasons += unmet(layer, devices=_DEVICES, widths=_WIDTHS, said="multiples of 8 up to 256")
        return list(dict.fromkeys(reasons))

    @override
    def plan(self, batch: Batch) -> StepGroups[_Step]:
        return StepGroups(batch, _make_step)

    @override
    def drop_caches(self) -> None:
        pass

    @override
    def write(self, kv: LayerKV, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        kv_write.write(kv, slots, key, value)

    @override
    def attend(
        self,
        layer: LayerSpec,
        kv: LayerKV,
        plan: StepGroups[_Step],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        (step,) = plan.groups(layer.window, query.device, kv.zero_block)
        if step.tables is not None:
            key, value = _by_block(kv.key, kv.block_size), _by_block(kv.value, kv.block_size)
        is_grouped = layer.num_heads != layer.num_kv_heads
        splits_right = is_grouped and step.window == _ALL
        whole = {} if splits_right or not _splits_wrong() else {"num_splits": 1}
        # Not every implementation launches on the device that the tensors are on by itself.
        with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
            out: torch.Tensor = _varlen_attn()(
                query,
                key,
                value,
                step.query_starts,
                step.key_starts,
                step.max_q,
                step.max_k,
                scale=scaling,
                window_size=step.window,
                enable_gqa=is_grouped,
                seqused_k=step.key_lens,
                block_table=step.tables,
                **whole,
            )
        return out


def _by_block(pool: torch.Tensor, block_size: int) -> torch.Tensor:
    """[heads, slots, width] -> [blocks, block_size, heads, width], the same memory."""
    heads, _, width = pool.shape
    return pool.view(heads, -1, block_size, width).permute(1, 2, 0, 3)


def _make_step(batch: Batch, window: int | None, device: torch.device, zero_block: int) -> list[_Step]:
    lens = batch.query_lens
    max_q = int(lens.max())
    starts = to_device(batch.query_starts.astype(np.int32), device)
    # Not for single tokens: whether they are prompts must not change what a recorded step calls.
    if max_q > 1 and (batch.kv_lens == lens).all():
        return [_Step(starts, starts, None, None, max_q, max_q, _window(max_q, max_q, window))]
    rows = np.arange(batch.num_rows)
    width = max(int(np.diff(batch.table_starts).max()), batch.min_width)
    max_k = width * batch.block_size
    key_starts = None
    if _is_flash_2():
        key_starts = to_device(np.concatenate(([0], np.cumsum(batch.kv_lens))).astype(np.int32), device)
    tables = batch.padded_tables(rows, np.zeros_like(rows), width, zero_block)
    return [
        _Step(
            query_starts=starts,
            key_starts=key_starts,
            key_lens=to_device(batch.kv_lens.astype(np.int32), device),
            tables=to_device(tables.astype(np.int32), device),
            max_q=max_q,
            max_k=max_k,
            window=_window(max_q, max_k, window),
        )
    ]


def _window(max_q: int, max_k: int, window: int | None) -> tuple[int, int]:
    """`window` counts the query's own position, `varlen_attn` the keys before it."""
    if window is not None and window < max_k:
        return window - 1, 0
    return _ALL if max_q == 1 else (-1, 0)


def _varlen_attn() -> Callable[..., Any]:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


def _missing_parts() -> list[str]:
    try:
        parameters = inspect.signature(_varlen_attn()).parameters
    except ImportError:
        return [f"torch {torch.__version__} has no varlen_attn: torch >= 2.12 has one that takes block tables"]
    missing = [name for name in _NEEDED if name not in parameters]
    if missing:
        return [f"torch {torch.__version__}'s varlen_attn takes no {', no '.join(missing)}: torch >= 2.12 has it"]
    return []


def _is_flash_2() -> bool:
    """Whether the program has activated no other implementation of FlashAttention."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return current is None or current() is None


def _splits_wrong() -> bool:
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    return version >= _SPLITS_SINCE and _is_flash_2()
