"""K and V of a step's tokens go into the pool with one kernel where triton works, and with two elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import torch

from .base import LayerKV, said_by, write_plainly

logger = logging.getLogger("batchkit")

__all__ = ["write"]

_Write = Callable[[LayerKV, torch.Tensor, torch.Tensor, torch.Tensor], None]


def write(kv: LayerKV, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """As `AttentionBackend.write`."""
    _writer(key.device)(kv, slots, key, value)


@cache
def _writer(device: torch.device) -> _Write:
    """The kernel, if it has just written right on this device."""
    try:
        from .kv_write_kernel import write as write_at_once

        _try(write_at_once, device)
    except ImportError:
        return write_plainly
    except Exception as error:  # triton, and the compilers that it calls, raise whatever they like
        logger.warning("K and V are written by two kernels a layer on %s: %s", device, said_by(error))
        return write_plainly
    return write_at_once


def _try(write_at_once: _Write, device: torch.device) -> None:
    tokens = torch.arange(2 * 3 * 24, dtype=torch.float16, device=device).view(2, 3, 24)
    slots = torch.tensor([5, 1], device=device)
    pools = []
    for each in (write_plainly, write_at_once):
        key, value = (torch.zeros(3, 8, width, dtype=tokens.dtype, device=device) for width in (16, 8))
        kv = LayerKV(key, value, block_size=4, zero_block=1)
        each(kv, slots, tokens[..., :16], tokens[..., 16:])
        pools.append(kv)
    if not all(torch.equal(getattr(pools[0], side), getattr(pools[1], side)) for side in ("key", "value")):
        raise RuntimeError("it wrote something else than it was given")
