"""What becomes of a preempted sequence's KV: thrown away and computed again, or kept in host memory.

PagedAttention (SOSP'23), section 4.5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from .allocators import BlockAllocator, PagedAllocator
from .types import BlockCopy

if TYPE_CHECKING:
    from .sequence import Sequence

__all__ = ["Preemption", "Recompute", "Swap"]


class Preemption(Protocol):
    """A strategy for the KV of preempted sequences, called by the scheduler's verbs only."""

    def evict(self, seq: Sequence, allocator: BlockAllocator) -> tuple[BlockCopy, ...]:
        """Free the device blocks of a running sequence. Returns copies that must be made before they are written.

        What is not kept must be subtracted from ``seq.num_computed`` and added to ``seq.num_recomputed``.
        """

    def restore(self, seq: Sequence, allocator: BlockAllocator) -> tuple[BlockCopy, ...]:
        """Bring back what `evict` kept, into a device table that covers it. Returns the copies."""

    def drop(self, seq: Sequence) -> None:
        """Forget what was kept for a sequence. Harmless if nothing was."""

    def check(self) -> None:
        """Raise InvariantError unless the books balance."""


class Recompute:
    """Throws the KV away; prompt and output are computed again on return. Costs compute, and no memory."""

    def evict(self, seq: Sequence, allocator: BlockAllocator) -> tuple[BlockCopy, ...]:
        """Free the blocks and start again from the first token."""
        allocator.free(seq.id)
        seq.num_recomputed += seq.num_computed
        seq.num_computed = 0
        return ()

    def restore(self, seq: Sequence, allocator: BlockAllocator) -> tuple[BlockCopy, ...]:
        """Nothing was kept."""
        return ()

    def drop(self, seq: Sequence) -> None:
        """Nothing was kept."""

    def check(self) -> None:
        """There are no books."""


class Swap:
    """Copies the computed blocks to host memory and back. Falls back to `Recompute` when the host pool is full.

    Only blocks that hold computed tokens are copied; a reservation beyond them is not.

    Args:
        host: the books of the runner's host pool; its blocks are numbered from 0 like the device's.

    >>> from batchkit.allocators import PagedAllocator
    >>> Swap(PagedAllocator(num_blocks=64, block_size=16)).host.num_free_blocks
    64
    """

    def __init__(self, host: PagedAllocator) -> None:
        self.host = host
        self._recompute = Recompute()

    def evict(self, seq: Sequence, allocator: BlockAllocator) -> tuple[BlockCopy, ...]:
        """Copy out what is computed, if the host has room, and free the blocks."""
        if not seq.num_computed or self.host.grow(seq.id, seq.num_computed) is None:
            return self._recompute.evict(seq, allocator)
        # The host table is as long as what is computed; the device table may hold a reservation beyond it.
        pairs = zip(allocator.table(seq.id), self.host.table(seq.id), strict=False)
        copies = tuple(BlockCopy("swap_out", device, host) for device, host in pairs)
        allocator.free(seq.id)
        return copies

    def restore(self, seq: Sequence, allocator: BlockAllocator) -> tuple[BlockCopy, ...]:
        """Copy back what was copied out, if anything was."""
        pairs = zip(self.host.table(seq.id), allocator.table(seq.id), strict=False)
        copies = tuple(BlockCopy("swap_in", host, device) for host, device in pairs)
        self.host.free(seq.id)
        return copies

    def drop(self, seq: Sequence) -> None:
        """Free its host blocks."""
        self.host.free(seq.id)

    def check(self) -> None:
        """Check the host pool's books."""
        self.host.check()
