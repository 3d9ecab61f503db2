"""How much memory the largest steps take beside weights and KV cache, found out by running them.

What a forward pass needs for itself depends on the model, the attention backend and the sampler; nobody knows it better
than the device that has just run it. So the default size of the KV cache is a part of what the largest steps leave.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..params import SamplingParams
from ..types import Request, SchedulerOutput
from .batch import row_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

__all__ = ["DEVICES", "largest_steps", "peak_bytes"]

DEVICES = frozenset({"cuda"})
"""Types of devices that count what is allocated on them."""

# What takes most memory in the sampler: sorted probabilities, and the counts of tokens that were generated.
_REQUEST = Request(
    id="profile",
    prompt_token_ids=(0,),
    params=SamplingParams(temperature=1.0, top_p=0.9, frequency_penalty=0.1, logprobs=1),
    max_tokens=2,
)


def largest_steps(
    *, max_tokens: int, max_rows: int, max_len: int, block_size: int
) -> Iterator[tuple[str, SchedulerOutput]]:
    """Steps of which one takes most memory, and what they are of.

    All rows have the same blocks, which is good enough for numbers that nobody reads.

    Args:
        max_tokens: of a step.
        max_rows: of a step, each of which samples.
        max_len: tokens of a sequence. So many must fit into the KV cache.
        block_size: tokens per block.
    """
    rows = min(max_rows, max_tokens)
    share, more = divmod(max_tokens, rows)
    prompts = [(0, min(share + (index < more), max_len)) for index in range(rows)]
    chunk = min(max_tokens, max_len)
    blocks = tuple(range(-(-max_len // block_size)))
    for what, spans in (
        ("prompts", prompts),
        ("the end of a long prompt", [(max_len - chunk, chunk)]),
        ("decoding", [(max_len - 1, 1)] * rows),
    ):
        # Rows at full length share one tuple, which may be long.
        made = tuple(
            row_of(
                _REQUEST,
                index,
                start=start,
                token_ids=(0,) * count,
                blocks=blocks[: -(-(start + count) // block_size)],
                output=(0,),
            )
            for index, (start, count) in enumerate(spans)
        )
        yield what, SchedulerOutput(made, num_tokens=sum(count for _, count in spans))


def peak_bytes(compute: Callable[[], object], devices: Collection[torch.device]) -> dict[torch.device, int]:
    """The most memory that `compute` takes on CUDA devices and gives back again.

    It counts what torch's allocator takes from the device, which is more than what is in use at once: memory is in
    pieces.
    """
    before = {}
    for device in devices:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before[device] = torch.cuda.memory_reserved(device)
    compute()
    peaks = {}
    for device, reserved in before.items():
        torch.cuda.synchronize(device)
        peaks[device] = max(0, torch.cuda.max_memory_reserved(device) - reserved)
    torch.cuda.empty_cache()
    return peaks
