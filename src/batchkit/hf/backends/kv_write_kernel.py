"""A Triton kernel that puts K and V of a step's tokens into a layer's pool. It is imported where triton is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from .base import power_of_two

if TYPE_CHECKING:
    from .base import LayerKV

__all__ = ["write"]


# The compiler looks annotations up, and knows no other names in them than its own.
@triton.jit  # type: ignore[untyped-decorator]
def _write(  # type: ignore[no-untyped-def]
    slots,
    key,
    key_token,
    key_head,
    key_unit,
    key_pool,
    key_pool_head,
    value,
    value_token,
    value_head,
    value_unit,
    value_pool,
    value_pool_head,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    # int64: a pool may have more numbers than int32 counts.
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + token)
    units = tl.arange(0, WIDTH)
    is_key, is_value = units < KEY_DIM, units < VALUE_DIM
    k = tl.load(key + token * key_token + head * key_head + units * key_unit, mask=is_key)
    v = tl.load(value + token * value_token + head * value_head + units * value_unit, mask=is_value)
    tl.store(key_pool + head * key_pool_head + slot * KEY_DIM + units, k, mask=is_key)
    tl.store(value_pool + head * value_pool_head + slot * VALUE_DIM + units, v, mask=is_value)


def write(kv: LayerKV, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """As `AttentionBackend.write`."""
    tokens, heads, key_dim = key.shape
    value_dim = value.shape[2]
    # Triton launches on the current device, whatever device the tensors are on.
    with torch.cuda.device_of(key):  # type: ignore[no-untyped-call]
        _write[(tokens, heads)](
            slots,
            key,
            *key.stride(),
            kv.key,
            kv.key.stride(0),
            value,
            *value.stride(),
            kv.value,
            kv.value.stride(0),
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            WIDTH=power_of_two(max(key_dim, value_dim)),
            num_warps=1,
        )
