"""Greedy output of every policy equals `model.generate`, token for token, on a real model in float32."""

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from batchkit import (
    ChunkedPrefillScheduler,
    ContiguousAllocator,
    DynamicScheduler,
    Engine,
    OrcaScheduler,
    PagedScheduler,
    SamplingParams,
    StaticScheduler,
    WaitingServedScheduler,
)

NUM_PROMPTS = 32
RESERVING = [StaticScheduler, DynamicScheduler, OrcaScheduler, WaitingServedScheduler]
GROWING = [PagedScheduler, ChunkedPrefillScheduler]
AMPLE = 16384
TIGHT = 512  # tokens of KV; the longest request needs 363


@pytest.fixture(scope="module")
def model(smollm2):
    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="module")
def work(tokenizer):
    """Prompts of 1 to 300 tokens of real text, and outputs of 1 to 64 tokens."""
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    ids = tokenizer.encode(text)
    rng = random.Random(0)
    # Mostly short, so that the test takes minutes and not an hour.
    lengths = [300, 1, 2, 15, 16, 17, 64] + [rng.randint(1, rng.choice([20, 60, 150])) for _ in range(NUM_PROMPTS - 7)]
    prompts = [ids[(start := rng.randrange(len(ids) - n)) : start + n] for n in lengths]
    max_tokens = [64, 50, 1, 2] + [rng.randint(1, rng.choice([5, 10, 20])) for _ in range(NUM_PROMPTS - 4)]
    return prompts, max_tokens


@pytest.fixture(scope="module")
def expected(model, work):
    outputs = []
    for prompt, n in zip(*work, strict=True):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=n,
                do_sample=False,
                eos_token_id=model.generation_config.eos_token_id,
                pad_token_id=0,
                repetition_penalty=1.0,
            )
        outputs.append(tuple(out[0, len(prompt) :].tolist()))
    assert len({len(output) for output in outputs}) > 10
    return outputs


def run(model, tokenizer, work, policy, block_size, tokens, **options):
    prompts, max_tokens = work
    params = [SamplingParams(temperature=0, max_tokens=n) for n in max_tokens]
    with Engine.from_model(
        model,
        tokenizer,
        scheduler=policy,
        block_size=block_size,
        num_kv_blocks=tokens // block_size,
        max_num_seqs=12,
        max_tokens_per_step=256,  # less than the longest prompts
        **options,
    ) as engine:
        outputs = engine.generate(prompts, params)
        engine.check()
        stats = engine.stats()
    assert all(out.error is None for out in outputs)
    return [out.token_ids for out in outputs], stats


@pytest.mark.parametrize("tokens", [AMPLE, TIGHT], ids=["ample", "tight"])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("policy", RESERVING)
def test_a_policy_that_reserves(policy, block_size, tokens, model, tokenizer, work, expected):
    allocator = {} if tokens == AMPLE else {"allocator": ContiguousAllocator}
    outputs, stats = run(model, tokenizer, work, policy, block_size, tokens, **allocator)
    assert outputs == expected
    assert stats.num_preemptions == 0


@pytest.mark.parametrize("swap", [None, "1GiB"], ids=["recompute", "swap"])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("policy", GROWING)
def test_a_policy_that_preempts(policy, block_size, swap, model, tokenizer, work, expected):
    outputs, stats = run(model, tokenizer, work, policy, block_size, TIGHT, swap_memory=swap)
    assert outputs == expected
    assert stats.num_preemptions > 0
    assert (stats.recomputed_tokens > 0) == (swap is None)


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("policy", GROWING)
def test_a_policy_that_could_preempt_with_room_for_all(policy, block_size, model, tokenizer, work, expected):
    outputs, stats = run(model, tokenizer, work, policy, block_size, AMPLE)
    assert outputs == expected
    assert stats.num_preemptions == 0
