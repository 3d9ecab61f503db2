"""Attention by xformers, on GPUs: its Triton split-K kernel for decoding, its fused kernels for everything longer.

A step's rows are put into at most two groups, each of which is one call per layer:

* Rows of one token read the pool where it lies. With block tables that are a ``range`` (contiguous reservations) the
  kernel gets the first slot of each row, and looks nothing up; with any other tables it goes through them.
* Rows of several tokens have no such kernel: what they see is gathered from the pool into consecutive tokens, or, if
  all of them begin at 0, taken as the model has just computed it.

With one query per row "causal" means "all", and the window of a sliding layer is where a row's keys begin. With several
queries the kernel of xformers 0.0.35 would be wrong under a mask with gaps: all but a row's last query see keys that
they must not, wherever the row does not begin at slot 0. It never gets them (`_decode_mask`).
"""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from typing_extensions import override

from . import kv_write
from .base import AttentionBackend, StepGroups, power_of_two, to_device
from .requirements import unmet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..batch import Batch, IntArray
    from .base import LayerKV, LayerSpec

__all__ = ["XformersBackend"]

_HEAD_DIMS = (16, 32, 64, 128, 256)  # 512 has no kernel for prompts on every device
_DEVICES = frozenset({"cuda"})
_MOST_ELEMENTS = (1 << 31) - 1
_TRITON = ("triton", "triton-windows", "pytorch-triton")
_NO_BLOCK_POINTERS = (3, 9)  # the version of triton that removed what the kernel is written with


@dataclass(frozen=True, slots=True)
class _Names:
    """Everything that is used of xformers. The next version moves it to another package: then this changes alone."""

    forward: Any
    split_k: Any
    paged_mask: Any
    paged_gappy_mask: Any
    gappy_mask: Any
    prefill_mask: Any


@cache
def _names() -> _Names:
    from xformers.ops import memory_efficient_attention_forward
    from xformers.ops.fmha import attn_bias, triton_splitk

    return _Names(
        forward=memory_efficient_attention_forward,
        split_k=triton_splitk.FwOp,
        paged_mask=attn_bias.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask,
        paged_gappy_mask=attn_bias.PagedBlockDiagonalCausalWithOffsetGappyKeysMask,
        gappy_mask=attn_bias.BlockDiagonalCausalWithOffsetGappyKeysMask,
        prefill_mask=attn_bias.BlockDiagonalCausalFromBottomRightMask,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Rows that one call computes.

    Attributes:
        tokens: of the step, which are its queries; None: all, in order. Padding repeats the last one.
        num_tokens: how many of them are no padding.
        slots: of the pool, what is gathered as keys and values; None: nothing is.
        reads_pool: the mask is over the pool itself.
        mask: of xformers.
    """

    tokens: torch.Tensor | None
    num_tokens: int
    slots: torch.Tensor | None
    reads_pool: bool
    mask: Any


class XformersBackend(AttentionBackend):
    """See the module. For GPUs of compute capability 8.0 and up, in float16 and bfloat16."""

    name = "xformers"
    default_block_size = 64
    block_size_multiple = 64
    captures_decodes = True

    @override
    def unsupported_reasons(self, layers: Sequence[LayerSpec]) -> list[str]:
        reasons = _missing_parts()
        for layer in layers:
            reasons += unmet(layer, devices=_DEVICES, widths=_HEAD_DIMS, said=", ".join(map(str, _HEAD_DIMS)))
        return list(dict.fromkeys(reasons))

    @override
    def plan(self, batch: Batch) -> StepGroups[_Group]:
        return StepGroups(batch, _make_groups)

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
        plan: StepGroups[_Group],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        if kv.key.numel() > _MOST_ELEMENTS:
            raise ValueError(
                f"the keys of a layer take {kv.key.numel():,} elements, and xformers' kernel counts only up to "
                f"{_MOST_ELEMENTS:,}: use fewer KV blocks"
            )
        groups = plan.groups(layer.window, query.device, kv.zero_block)
        out = None
        for group in groups:
            part = self._attend_group(layer, kv, group, query, key, value, scaling)[: group.num_tokens]
            if len(groups) == 1:  # all tokens, in order
                return part
            if out is None:
                out = query.new_empty(query.shape[0], layer.num_heads, layer.value_dim)
            assert group.tokens is not None
            out.index_copy_(0, group.tokens[: group.num_tokens], part)
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
        scaling: float | None,
    ) -> torch.Tensor:
        """[tokens of the group, num_heads, value_dim]."""
        q = query if group.tokens is None else query.index_select(0, group.tokens)
        if group.reads_pool:
            k, v = kv.key.transpose(0, 1), kv.value.transpose(0, 1)
        elif group.slots is not None:
            k = kv.key.index_select(1, group.slots).transpose(0, 1)
            v = kv.value.index_select(1, group.slots).transpose(0, 1)
        else:
            k = key if group.tokens is None else key.index_select(0, group.tokens)
            v = value if group.tokens is None else value.index_select(0, group.tokens)
        return self._call(layer, q, k, v, group.mask, scaling, decodes=group.reads_pool)

    def _call(
        self,
        layer: LayerSpec,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        scaling: float | None,
        *,
        decodes: bool,
    ) -> torch.Tensor:
        """[Q, num_heads, width], of [Q, num_heads, width] and twice [S, num_kv_heads, width]."""
        shared = layer.num_heads // layer.num_kv_heads
        q = query.view(1, -1, layer.num_kv_heads, shared, layer.key_dim)
        # Triton launches on the current device, whatever device the tensors are on.
        with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
            out = self._forward(q, _repeated(key, shared), _repeated(value, shared), mask, scaling, decodes=decodes)
        return out.reshape(query.shape)

    def _forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        scaling: float | None,
        *,
        decodes: bool,
    ) -> torch.Tensor:
        """[1, Q, groups, heads of a group, width] of each, and of the result."""
        names = _names()
        # The dispatcher never picks the split-K kernel for these masks; the kernels for the others it picks itself.
        op = names.split_k if decodes else None
        out: torch.Tensor = names.forward(query, key, value, attn_bias=mask, scale=scaling, op=op)
        return out


def _repeated(packed: torch.Tensor, times: int) -> torch.Tensor:
    """[S, KV heads, width] -> [1, S, KV heads, times, width], without a copy: heads of a group share their stride."""
    return packed[None, :, :, None].expand(1, -1, -1, times, -1)


def _missing_parts() -> list[str]:
    triton = next(filter(None, map(_installed, _TRITON)), None)
    if triton is None:
        return ["triton is not installed: pip install 'triton>=3.6,<3.9'"]
    found = re.match(r"(\d+)\.(\d+)", triton)
    if found is not None and (int(found[1]), int(found[2])) >= _NO_BLOCK_POINTERS:
        return [f"triton {triton} has not what its kernels are written with: pip install 'triton>=3.6,<3.9'"]
    try:
        _names()
    except Exception as error:  # a package that was built for another torch raises whatever it likes
        return [f"xformers cannot be imported ({type(error).__name__}: {error})"]
    return []


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _make_groups(batch: Batch, window: int | None, device: torch.device, zero_block: int) -> list[_Group]:
    single = batch.query_lens == 1
    groups = []
    for rows, make in ((np.flatnonzero(single), _decode_group), (np.flatnonzero(~single), _prefill_group)):
        if len(rows):
            groups.append(make(batch, rows, window, device, zero_block))
    return groups


def _first_keys(batch: Batch, rows: IntArray, window: int | None) -> IntArray:
    """Position of the first key that any query of a row sees."""
    if window is None:
        return np.zeros(len(rows), np.int64)
    first: IntArray = np.maximum(batch.kv_lens[rows] - batch.query_lens[rows] + 1 - window, 0)
    return first


def _decode_group(batch: Batch, rows: IntArray, window: int | None, device: torch.device, zero_block: int) -> _Group:
    num = len(rows)
    # The kernel is compiled anew for every number of rows and of keys that it meets.
    padded = np.pad(rows, (0, power_of_two(num) - num), mode="edge")
    everything = num == batch.num_tokens == len(padded)
    return _Group(
        tokens=None if everything else to_device(batch.query_starts[padded], device),
        num_tokens=num,
        slots=None,
        reads_pool=True,
        mask=_decode_mask(batch, padded, num, window, device, zero_block),
    )


def _decode_mask(
    batch: Batch, rows: IntArray, num: int, window: int | None, device: torch.device, zero_block: int
) -> Any:
    """For rows of one token. Those from `num` on are padding, and see one key.

    Raises:
        ValueError: a row has more tokens. Masks with gaps then give wrong results, and say nothing.
    """
    lens = batch.query_lens[rows]
    if (lens != 1).any():
        raise ValueError(f"the decode kernels are for one token per row, got rows of {lens.tolist()}")
    names, size = _names(), batch.block_size
    first = _first_keys(batch, rows, window)
    counts = batch.kv_lens[rows] - first
    counts[num:] = 1
    first_block = first // size
    width = -(-int((batch.kv_lens[rows] - first_block * size).max()) // size)
    most = batch.min_width if window is None else min(batch.min_width, window // size + 2)
    width = power_of_two(max(width, most))
    ones, seen = [1] * len(rows), counts.tolist()
    if batch.contiguous[rows].all():
        starts = batch.tables[batch.table_starts[rows]] * size + first
        total = (zero_block + 1) * size
        mask = names.gappy_mask.from_seqlens(ones, [*starts.tolist(), total], seen, device=device)
        return _launched_for(mask, width * size)
    tables = to_device(batch.padded_tables(rows, first_block, width, zero_block).astype(np.int32), device)
    starts = first - first_block * size
    if window is None:
        return _launched_for(names.paged_mask.from_seqlens(ones, seen, tables, size, device=device), width * size)
    # Its own `from_seqlens` asks for two different numbers of starts at once, in 0.0.35.
    padding = width * size
    at = (starts + np.arange(len(rows)) * padding).tolist()
    mask = names.gappy_mask.from_seqlens(ones, [*at, len(rows) * padding], seen, device=device)
    return _launched_for(mask.make_paged(tables, size, padding, names.paged_gappy_mask), width * size)


def _launched_for(mask: Any, num_keys: int) -> Any:
    """The mask, with bounds of the number of keys that its rows see. They size the launch, and hide nothing."""
    mask.k_seqinfo.min_seqlen, mask.k_seqinfo.max_seqlen = 1, num_keys
    return mask


def _prefill_group(batch: Batch, rows: IntArray, window: int | None, device: torch.device, zero_block: int) -> _Group:
    lens, starts = batch.query_lens[rows], batch.query_starts[rows]
    everything = int(lens.sum()) == batch.num_tokens
    first = _first_keys(batch, rows, window)
    counts = batch.kv_lens[rows] - first
    slots = None  # rows that begin at 0 see what they compute
    if (batch.kv_lens[rows] > lens).any():
        positions = _ranges(first, counts)
        tables = np.repeat(batch.table_starts[rows], counts)
        blocks = batch.tables[tables + positions // batch.block_size]
        slots = to_device(blocks * batch.block_size + positions % batch.block_size, device)
    mask = _names().prefill_mask.from_seqlens(lens.tolist(), counts.tolist(), device=device)
    if window is not None and int(batch.kv_lens[rows].max()) > window:
        mask = mask.make_local_attention_from_bottomright(window)
    return _Group(
        tokens=None if everything else to_device(_ranges(starts, lens), device),
        num_tokens=int(lens.sum()),
        slots=slots,
        reads_pool=False,
        mask=mask,
    )


def _ranges(starts: IntArray, lens: IntArray) -> IntArray:
    """``starts[0] .. starts[0] + lens[0] - 1``, then the next."""
    ends = np.cumsum(lens)
    ranges: IntArray = np.arange(int(ends[-1])) + np.repeat(starts - (ends - lens), lens)
    return ranges
