"""The KV memory: a flat pool of slots per layer, a host pool for swapping, and how large they may be."""

from __future__ import annotations

import logging
import re
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..errors import OutOfKVMemory
from ..machine import control_groups, read_text
from ..sizes import parse_bytes
from .backends.base import LayerKV

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ..types import BlockCopy
    from .backends.base import LayerSpec

logger = logging.getLogger("batchkit")

__all__ = ["KVPool", "block_bytes", "free_memory", "num_blocks_for"]


def block_bytes(layers: Sequence[LayerSpec], block_size: int) -> dict[torch.device, int]:
    """Bytes of one KV block, K and V of all layers together, on each device."""
    total: dict[torch.device, int] = {}
    for layer in layers:
        slot = layer.num_kv_heads * (layer.key_dim + layer.value_dim) * layer.dtype.itemsize
        total[layer.device] = total.get(layer.device, 0) + slot * block_size
    return total


def free_memory(device: torch.device, *, root: Path = Path("/")) -> int | None:
    """Bytes that can really be had on `device` now; None if that cannot be found out.

    For the host that is the least of what the system has available and of what the container's limits leave (control
    groups, both versions; page cache that can be dropped counts as free). On MPS it is what the driver recommends.

    Args:
        device: where.
        root: of the file system, for tests.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    if device.type != "cpu":
        return None
    found = [size for size in (_available(root), *_group_limits(root)) if size is not None]
    return max(min(found), 0) if found else None


def _available(root: Path) -> int | None:
    match = re.search(r"^MemAvailable:\s*(\d+) kB", read_text(root / "proc/meminfo"), re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _group_limits(root: Path) -> Iterator[int]:
    """What each control group that this process is in, and each group above, leaves of its limit."""
    for folder, is_unified in control_groups("memory", root=root):
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        if is_unified:
            names = ("memory.max", "memory.current", "inactive_file")
        limit, used = read_text(folder / names[0]).strip(), read_text(folder / names[1]).strip()
        if limit.isdecimal() and used.isdecimal():
            cache = re.search(rf"^{names[2]} (\d+)$", read_text(folder / "memory.stat"), re.MULTILINE)
            yield int(limit) - int(used) + (int(cache[1]) if cache else 0)


def num_blocks_for(
    layers: Sequence[LayerSpec],
    *,
    block_size: int,
    kv_memory: int | str | None,
    num_kv_blocks: int | None,
    max_blocks: int,
    min_blocks: int = 0,
    taken: Mapping[torch.device, int] | None = None,
) -> int:
    """How many KV blocks to have.

    Args:
        layers: from the probe.
        block_size: tokens per block.
        kv_memory: bytes for all devices together, or text as `parse_bytes` takes it.
        num_kv_blocks: the number itself.
        max_blocks: as many as can ever be used. Bounds the default, which is half of the memory that is free on every
            device involved, less what steps take; a number or size that the caller gave is taken as it is.
        min_blocks: the default is no less. They have just been there, beside what steps take.
        taken: bytes of what is free that steps take for themselves, by device; for the default.

    Raises:
        ValueError: both given, or a number below 1.
        OutOfKVMemory: not one block fits.
    """
    if kv_memory is not None and num_kv_blocks is not None:
        raise ValueError(f"give kv_memory or num_kv_blocks, not both (got {kv_memory!r} and {num_kv_blocks!r})")
    sizes = block_bytes(layers, block_size)
    if num_kv_blocks is not None:
        if isinstance(num_kv_blocks, bool) or not isinstance(num_kv_blocks, int):
            raise TypeError(f"num_kv_blocks must be an integer, got {num_kv_blocks!r}")
        if num_kv_blocks < 1:
            raise ValueError(f"num_kv_blocks must be at least 1, got {num_kv_blocks}")
        _warn_if_beyond(sizes, num_kv_blocks)
        return num_kv_blocks
    each = sum(sizes.values())
    if kv_memory is not None:
        given = parse_bytes("kv_memory", kv_memory)
        if given < each:
            raise OutOfKVMemory(
                f"kv_memory is {given:,} bytes, but one KV block of {block_size} tokens takes {each:,} bytes"
            )
        _warn_if_beyond(sizes, given // each)
        return given // each
    count = max_blocks
    for device, size in sizes.items():
        free = free_memory(device)
        if free is None:
            continue
        steps = (taken or {}).get(device, 0)
        room = max((free - steps) // 2, min_blocks * size)
        if room < size:
            raise OutOfKVMemory(
                f"{free:,} bytes are free on {device}; half of them is less than one KV block of {block_size} tokens, "
                f"{size:,} bytes"
            )
        count = min(count, room // size)
    return count


def _warn_if_beyond(sizes: dict[torch.device, int], count: int) -> None:
    """A cache that is larger than the memory is taken as it is asked for, and fails later, when it is written."""
    for device, size in sizes.items():
        free = free_memory(device)
        if free is not None and count * size > free:
            logger.warning(
                "the KV cache has %s bytes on %s, where %s are free", f"{count * size:,}", device, f"{free:,}"
            )


class KVPool:
    """K and V of all layers, on the device and in host memory.

    Memory is reserved and not touched: on systems that commit memory late it costs nothing before it is written.

    Args:
        layers: from the probe; each layer's KV lives where the layer computes.
        num_blocks: KV blocks on the device. One more is allocated, see `LayerKV`.
        block_size: tokens per block.
        host_blocks: KV blocks in host memory.
        has_spare: one block more, with the number `num_blocks`, for what is written and never read.

    Raises:
        OutOfKVMemory: the memory cannot be had.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        *,
        num_blocks: int,
        block_size: int,
        host_blocks: int = 0,
        has_spare: bool = False,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.host_blocks = host_blocks
        self.layers: list[LayerKV] = []
        each = sum(block_bytes(layers, block_size).values())
        zero_block = num_blocks + has_spare
        try:
            for layer in layers:
                slots = (zero_block + 1) * block_size
                key, value = (
                    torch.empty((layer.num_kv_heads, slots, width), dtype=layer.dtype, device=layer.device)
                    for width in (layer.key_dim, layer.value_dim)
                )
                self.layers.append(LayerKV(key, value, block_size, zero_block))
            self._pools = [self._by_block(pool) for kv in self.layers for pool in (kv.key, kv.value)]
            for pool in self._pools:
                pool[:, num_blocks:].zero_()
        except RuntimeError as error:
            raise OutOfKVMemory(_refused("KV blocks", zero_block + 1, each, error)) from error
        try:
            # Copies from and to pinned memory are several times faster.
            self._host = [
                torch.empty(
                    (pool.shape[0], host_blocks, pool.shape[2]),
                    dtype=pool.dtype,
                    device="cpu",
                    pin_memory=pool.device.type == "cuda" and host_blocks > 0,
                )
                for pool in self._pools
            ]
        except RuntimeError as error:
            raise OutOfKVMemory(_refused("host blocks", host_blocks, each, error)) from error

    def _by_block(self, pool: torch.Tensor) -> torch.Tensor:
        """[heads, slots, width] -> [heads, blocks, block_size * width], the same memory."""
        return pool.view(pool.shape[0], -1, self.block_size * pool.shape[2])

    def fill(self, value: float) -> None:
        """Overwrite every block on the device and in host memory. For tests: no result may depend on it."""
        for pool in self._pools:
            pool[:, : self.num_blocks].fill_(value)
        for pool in self._host:
            pool.fill_(value)

    @torch.inference_mode()
    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks in the order given.

        Neighbours of one kind are made together as long as none reads or overwrites what another has written.

        Raises:
            ValueError: a block number that does not exist. Nothing has been copied.
        """
        limits = {"copy": (self.num_blocks,) * 2, "swap_out": (self.num_blocks, self.host_blocks)}
        limits["swap_in"] = limits["swap_out"][::-1]
        for copy in copies:
            sources, targets = limits[copy.kind]
            if not (0 <= copy.source < sources and 0 <= copy.target < targets):
                raise ValueError(
                    f"{copy} with {self.num_blocks} blocks on the device and {self.host_blocks} on the host"
                )
        for kind, run in groupby(copies, lambda copy: copy.kind):
            read = self._host if kind == "swap_in" else self._pools
            write = self._host if kind == "swap_out" else self._pools
            for part in _independent(run, within=kind == "copy"):
                sources_at, targets_at = (
                    torch.tensor(numbers, device="cpu")
                    for numbers in zip(*((copy.source, copy.target) for copy in part), strict=True)
                )
                for origin, goal in zip(read, write, strict=True):
                    moved = origin.index_select(1, sources_at.to(origin.device)).to(goal.device)
                    goal.index_copy_(1, targets_at.to(goal.device), moved)


def _refused(what: str, count: int, each: int, error: RuntimeError) -> str:
    return f"cannot allocate {count:,} {what} of {each:,} bytes, {count * each:,} bytes in all: {error}"


def _independent(copies: Iterator[BlockCopy], *, within: bool) -> Iterator[list[BlockCopy]]:
    """Runs that may be made at once: no target twice and, `within` one pool, no source that was a target."""
    part: list[BlockCopy] = []
    written: set[int] = set()
    for copy in copies:
        if copy.target in written or (within and copy.source in written):
            yield part
            part, written = [], set()
        part.append(copy)
        written.add(copy.target)
    if part:
        yield part
