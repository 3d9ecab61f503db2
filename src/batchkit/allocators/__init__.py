"""KV-cache blocks: who holds which, and every block table.

Both allocators hand out the same thing, a table of block numbers for each sequence, from one flat pool of
``num_blocks`` blocks of ``block_size`` tokens. `PagedAllocator` takes any free blocks, whenever a sequence needs one
(PagedAttention, SOSP'23, section 4), and lets sequences share them. `ContiguousAllocator` takes one run of
neighbouring blocks, once, as systems did before. Nothing here knows of tensors.
"""

from .base import BlockAllocator
from .contiguous import ContiguousAllocator
from .paged import PagedAllocator

__all__ = ["BlockAllocator", "ContiguousAllocator", "PagedAllocator"]
