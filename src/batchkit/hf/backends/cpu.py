"""Attention on the CPU by kernels in C++, for x86 with AVX2 or AVX-512: the fast twin of the reference.

The kernels read the pool through the block tables, so nothing is gathered and nothing is padded. A step is made into
items of a few queries and a range of keys, which threads take one by one; `kernels/attention.cpp` says how each is
computed. Where items begin and end depends on nothing but their row. So a row's result is the same, bit for bit,
whatever else is in the step and however many threads there are.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import byref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from typing_extensions import override

from .base import AttentionBackend
from .native import BuildError, kernels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..batch import Batch, IntArray
    from .base import LayerKV, LayerSpec

__all__ = ["CpuBackend"]

_ATTEND = {
    torch.float32: "batchkit_attend_float32",
    torch.bfloat16: "batchkit_attend_bfloat16",
    torch.float16: "batchkit_attend_float16",
}

_ROWS = 96
"""An item has as many queries as make up to so many rows of a matrix: each query has one for every head of a group."""
_SPAN = 256
"""An item has up to so many keys if its row has queries for one item, and n times as many if for n.

So there is work for many threads, whether a row is one long prompt or one query behind a long one. What items leave to
be joined takes less than half the memory of the row's KV in one layer.
"""


class _Call(ctypes.Structure):
    """`Call` of the kernels."""

    _fields_ = (
        ("items", ctypes.c_void_p),
        ("num_items", ctypes.c_int64),
        ("work", ctypes.c_int64),
        ("tables", ctypes.c_void_p),
        ("block_size", ctypes.c_int64),
        ("max_rows", ctypes.c_int64),
        ("num_partials", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("key_dim", ctypes.c_int64),
        ("value_dim", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scaling", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("sinks", ctypes.c_void_p),
        ("num_slots", ctypes.c_int64),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("query", ctypes.c_void_p),
        ("token_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("num_threads", ctypes.c_int64),
    )


class _Tokens(ctypes.Structure):
    """`Tokens` of the kernels."""

    _fields_ = (
        ("slots", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("num_slots", ctypes.c_int64),
        ("num_threads", ctypes.c_int64),
    )


class _Side(ctypes.Structure):
    """`Side` of the kernels."""

    _fields_ = (
        ("pool", ctypes.c_void_p),
        ("source", ctypes.c_void_p),
        ("token_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("width", ctypes.c_int64),
    )


class _Items:
    """The items of a step, for layers that have one window and one number of heads for each KV head.

    Attributes:
        items: [N, 9], int64, `Item` of the kernels: the one with the most work first.
        call: what the kernels are told of them.
    """

    def __init__(self, batch: Batch, window: int | None, shared: int) -> None:
        lens = batch.query_lens
        most = max(1, _ROWS // shared)
        tiles = -(-lens // most)
        rows, nth = _repeated(tiles)
        offset = nth * most
        token = batch.query_starts[rows] + offset
        count = np.minimum(lens[rows] - offset, most)
        position = (batch.kv_lens - lens)[rows] + offset
        end = position + count
        begin = np.zeros_like(end) if window is None else np.maximum(position - window + 1, 0)

        # The queries of each tile are one item for every span of keys that they see something of.
        span = _SPAN * tiles[rows]
        begun = begin // span
        parts = (end - 1) // span - begun + 1
        tile, nth = _repeated(parts)
        low = np.maximum(begin[tile], (begun[tile] + nth) * span[tile])
        high = np.minimum(end[tile], (begun[tile] + nth + 1) * span[tile])
        kept = np.where(parts > 1, parts * count, 0)  # results, in queries
        first = np.cumsum(kept) - kept
        partial = first[tile] + nth * count[tile]

        work = count[tile] * (high - low)
        of_tile = np.stack((token, count, position, batch.table_starts[rows], parts, first), axis=1)
        items = np.column_stack((of_tile[tile], low, high, partial))
        self.items: IntArray = items[np.argsort(-work, kind="stable")]
        self._tables = batch.tables  # their address is handed over
        self.call = _Call(
            items=self.items.ctypes.data,
            num_items=len(self.items),
            work=int(work.sum()),
            tables=self._tables.ctypes.data,
            block_size=batch.block_size,
            max_rows=most * shared,
            num_partials=int(kept.sum()),
            window=window or 0,
        )


class _Step:
    """A step's plan: its items, made when the first layer of a kind asks for them."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._items: dict[tuple[int | None, int], _Items] = {}

    def items(self, window: int | None, shared: int) -> _Items:
        found = self._items.get((window, shared))
        if found is None:
            found = self._items[window, shared] = _Items(self._batch, window, shared)
        return found


class CpuBackend(AttentionBackend):
    """See the module. For layers on x86 CPUs with AVX2, in float32, bfloat16 and float16; needs a C++ compiler."""

    name = "cpu"
    default_block_size = 16
    block_size_multiple = 1
    captures_decodes = False

    def __init__(self) -> None:
        self._scratch = torch.empty(0, dtype=torch.float32, device="cpu")

    @override
    def unsupported_reasons(self, layers: Sequence[LayerSpec]) -> list[str]:
        reasons = []
        for layer in layers:
            if layer.device.type != "cpu":
                reasons.append(f"it computes on the CPU, and the model is on {layer.device}")
            if layer.dtype not in _ATTEND:
                dtype = str(layer.dtype).removeprefix("torch.")
                reasons.append(f"it computes in float32, bfloat16 and float16, and the model is in {dtype}")
        if not reasons:
            try:
                _library()
            except BuildError as error:
                reasons.append(str(error))
        return list(dict.fromkeys(reasons))

    @override
    def plan(self, batch: Batch) -> _Step:
        return _Step(batch)

    @override
    def drop_caches(self) -> None:
        self._scratch = self._scratch.new_empty(0)

    @override
    def write(self, kv: LayerKV, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        slots = slots.contiguous()
        key, value = _readable(key, kv.key.dtype), _readable(value, kv.value.dtype)
        heads, num_slots, _ = kv.key.shape
        tokens = _Tokens(slots.data_ptr(), len(slots), heads, num_slots, torch.get_num_threads())
        _library().batchkit_write(byref(tokens), byref(_side(kv.key, key)), byref(_side(kv.value, value)))

    @override
    def attend(
        self,
        layer: LayerSpec,
        kv: LayerKV,
        plan: _Step,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        query = _readable(query, kv.key.dtype)
        out = query.new_empty(len(query), layer.num_heads, layer.value_dim)
        call = plan.items(layer.window, layer.num_heads // layer.num_kv_heads).call
        call.num_heads = layer.num_heads
        call.num_kv_heads = layer.num_kv_heads
        call.key_dim = layer.key_dim
        call.value_dim = layer.value_dim
        call.scaling = layer.key_dim**-0.5 if scaling is None else scaling
        call.softcap = layer.softcap or 0.0
        sinks = None if sinks is None else sinks.float().contiguous()
        call.sinks = None if sinks is None else sinks.data_ptr()
        call.num_slots = kv.key.shape[1]
        call.keys, call.values = kv.key.data_ptr(), kv.value.data_ptr()
        call.query, call.out = query.data_ptr(), out.data_ptr()
        call.token_stride, call.head_stride, _ = query.stride()
        call.num_threads = torch.get_num_threads()
        library = _library()
        needed = library.batchkit_scratch_floats(byref(call))
        if len(self._scratch) < needed:
            self._scratch = self._scratch.new_empty(needed)
        call.scratch = self._scratch.data_ptr()
        getattr(library, _ATTEND[query.dtype])(byref(call))
        return out


def _readable(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In this dtype, and with the numbers of a head side by side; tokens and heads may be anywhere."""
    if tensor.dtype != dtype:
        tensor = tensor.to(dtype)
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


def _side(pool: torch.Tensor, new: torch.Tensor) -> _Side:
    size = new.element_size()
    token_stride, head_stride, _ = new.stride()
    return _Side(pool.data_ptr(), new.data_ptr(), token_stride * size, head_stride * size, pool.shape[2] * size)


def _repeated(counts: IntArray) -> tuple[IntArray, IntArray]:
    """Each index as many times as it counts, and of each of them which one of its kind it is."""
    index = np.repeat(np.arange(len(counts)), counts)
    return index, np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)


@functools.cache
def _library() -> Any:
    """The library of the kernels, compiled if need be.

    Raises:
        BuildError: this machine cannot have them, and why.
    """
    library = kernels("attention")
    library.batchkit_scratch_floats.restype = ctypes.c_int64
    return library
