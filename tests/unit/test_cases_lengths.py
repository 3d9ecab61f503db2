"""Prompt and length edges (cases 37 to 42)."""

from __future__ import annotations

import pytest

from batchkit import Engine, KVGeometry, OrcaScheduler, PagedAllocator, RequestTooLong, SimulatedRunner
from unit.helpers import POLICIES, Rig

everywhere = pytest.mark.parametrize("policy", POLICIES)


@everywhere
@pytest.mark.parametrize(("prompt", "room"), [(14, 2), (15, 1), (16, 0), (17, 0)])
def test_a_prompt_at_the_models_length(policy, prompt: int, room: int) -> None:
    """Case 37: one version took it, the next refused it, and the runner crashed in between.

    A prompt that leaves no room for a token is refused.
    """
    rig = Rig(policy, model_len=16)
    for max_tokens in (1, 10, None):
        if room < (max_tokens or 1):
            with pytest.raises(RequestTooLong, match=rf"prompt of {prompt} .* 16 tokens in all.* generate {room}"):
                rig.add("a", prompt, max_tokens=max_tokens)
            continue
        rig.add("a", prompt, max_tokens=max_tokens)
        final = rig.finish()["a"]
        assert (len(final.token_ids), final.finish_reason) == (max_tokens or room, "length")
    # The last of 16 tokens is generated, and never computed.
    assert max([row.start + row.num_tokens for out in rig.runner.outs for row in out.rows], default=0) <= 15


@everywhere
@pytest.mark.parametrize("lower", ["scheduler", "pool"])
def test_length_is_checked_against_the_limit_in_force(policy, lower: str) -> None:
    """Case 38: the limit had been lowered, admission checked the old one, and the engine ended."""
    geometry = KVGeometry(num_blocks=4 if lower == "pool" else 32, block_size=4, max_model_len=64, vocab_size=100)
    scheduler = policy(PagedAllocator(geometry.num_blocks, 4), max_model_len=16 if lower == "scheduler" else None)
    engine = Engine(SimulatedRunner(geometry), scheduler)
    before = engine.stats()
    assert before.max_model_len == (16 if lower == "scheduler" else 64)
    with pytest.raises(RequestTooLong, match=r"20 tokens .* 16"):
        engine.add_request([1] * 20)
    assert engine.stats() == before
    assert len(engine.generate([[1] * 12])[0].token_ids) == (4 if lower == "scheduler" else 5)


def test_the_models_length_holds_under_a_larger_one_of_the_scheduler() -> None:
    geometry = KVGeometry(num_blocks=32, block_size=4, max_model_len=16, vocab_size=100)
    engine = Engine(SimulatedRunner(geometry), OrcaScheduler(PagedAllocator(32, 4), max_model_len=64))
    assert engine.stats().max_model_len == 16
    with pytest.raises(RequestTooLong, match="takes 16 tokens"):
        engine.add_request([1] * 20)


@everywhere
def test_prompt_and_output_beyond_the_models_length(policy) -> None:
    """Case 39: an empty success, or an error that spoke of something else.

    A max_tokens that does not fit is refused with all three numbers; None is whatever fits.
    """
    rig = Rig(policy, model_len=16)
    with pytest.raises(RequestTooLong, match=r"prompt of 12 tokens and 10 to generate .* 16 .* room to generate 4"):
        rig.add("a", 12, max_tokens=10)
    assert not rig.engine.has_unfinished()
    rig.add("a", 12, max_tokens=None)
    final = rig.finish()["a"]
    assert (len(final.token_ids), final.finish_reason) == (4, "length")


@everywhere
@pytest.mark.parametrize(
    ("eos_at", "reason", "count"), [(1, "stop", 1), (4, "stop", 4), (5, "stop", 5), (6, "length", 5)]
)
def test_finish_reason_at_the_token_limit(policy, eos_at: int, reason: str, count: int) -> None:
    """Case 42: the reason said "stop" although the limit was hit. EOS as the very last token is "stop"."""
    rig = Rig(policy, eos=[0], script={"a": [1] * (eos_at - 1) + [0], "b": [1] * 9})
    rig.add("a", 3, max_tokens=5)
    rig.add("b", 3, max_tokens=9)
    final = rig.finish()["a"]
    assert (final.finish_reason, len(final.token_ids)) == (reason, count)
