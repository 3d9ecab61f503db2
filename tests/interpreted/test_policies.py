"""A whole model through the backend, under every policy."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from batchkit import (
    ChunkedPrefillScheduler,
    ContiguousAllocator,
    DynamicScheduler,
    Engine,
    OrcaScheduler,
    PagedAllocator,
    PagedScheduler,
    SamplingParams,
    StaticScheduler,
    WaitingServedScheduler,
)
from interpreted.rig import OnCPU
from tiny_models import tiny

PROMPTS = [[5, 9, 2, 7], [*range(3, 66)], [11] * 64]  # the second fills its first block with the first token
STEPS = 4
CLOSE = 2e-3
ALLOCATORS = (PagedAllocator, ContiguousAllocator)


def logits_of(model, tokens: list[list[int]] | None, **options) -> tuple[list[list[torch.Tensor]], list[list[int]]]:
    """Logits of each step by prompt, and the tokens: the most probable ones, or those of `tokens`."""
    said: list[list[torch.Tensor]] = [[] for _ in PROMPTS]

    def watcher(index: int):
        def watch(prompt, output, logits):
            said[index].append(logits.float().clone())
            if tokens is not None:
                logits = torch.full_like(logits, -1e4)
                logits[tokens[index][len(output)]] = 0
            return logits

        return watch

    params = [
        SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True, logits_processors=[watcher(index)])
        for index in range(len(PROMPTS))
    ]
    with Engine.from_model(model, num_kv_blocks=12, max_model_len=128, **options) as engine:
        outputs = engine.generate(PROMPTS, params)
    return said, [list(output.token_ids) for output in outputs]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny(head_dim=16).half()


@pytest.fixture(scope="module")
def expected(model) -> tuple[list[list[torch.Tensor]], list[list[int]]]:
    return logits_of(model, None, attention="reference", block_size=64)


@pytest.mark.parametrize(
    ("policy", "allocator"),
    [
        *product((StaticScheduler, DynamicScheduler, OrcaScheduler, WaitingServedScheduler), ALLOCATORS),
        (PagedScheduler, PagedAllocator),
        (ChunkedPrefillScheduler, PagedAllocator),
    ],
)
def test_logits_and_tokens_are_those_of_the_reference(model, expected, policy, allocator) -> None:
    want, tokens = expected
    options = {"scheduler": policy, "allocator": allocator, "attention": OnCPU(), "max_tokens_per_step": 48}
    forced, given = logits_of(model, tokens, **options)
    assert given == tokens
    for mine, theirs in zip(forced, want, strict=True):
        torch.testing.assert_close(torch.stack(mine), torch.stack(theirs), atol=CLOSE, rtol=0)
    _, free = logits_of(model, None, **options)
    for mine, theirs, logits in zip(free, tokens, want, strict=True):
        for step in range(STEPS):
            best = logits[step].topk(2).values
            if best[0] - best[1] <= CLOSE:
                break
            assert mine[step] == theirs[step]
