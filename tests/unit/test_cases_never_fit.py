"""Requests that never fit, and queues that stop (cases 10 to 17)."""

from __future__ import annotations

import random
from itertools import product

import pytest

from batchkit import (
    OrcaScheduler,
    RequestTooLong,
    Scheduler,
)
from unit.helpers import PAIRS, POLICIES, PREEMPTING, RESERVING, Rig, eager

everywhere = pytest.mark.parametrize(("policy", "allocator"), PAIRS)


@everywhere
def test_request_longer_than_the_pool_is_refused_at_add(policy, allocator) -> None:
    """Case 10: it was accepted and the engine waited for ever."""
    rig = Rig(policy, allocator=allocator, blocks=4)
    before = rig.state()
    with pytest.raises(RequestTooLong, match=r"prompt of 20 tokens .* KV cache 16 \(4 blocks of 4 tokens\)"):
        rig.add("a", 20)
    assert rig.state() == before
    rig.add("b", 4)
    rig.finish()


@everywhere
def test_a_prompt_up_to_the_last_slot_of_the_pool_runs(policy, allocator) -> None:
    """Case 11: a prompt between one block less and the whole pool was accepted and never scheduled."""
    for prompt in range(27, 33):
        rig = Rig(policy, allocator=allocator, blocks=8, model_len=64)
        rig.add("a", prompt, max_tokens=None)
        final = rig.finish()["a"]
        assert (len(final.token_ids), final.finish_reason) == (32 - prompt + 1, "length")


@everywhere
def test_a_prompt_beyond_the_last_slot_is_refused(policy, allocator) -> None:
    """Case 11, the other side of the border."""
    rig = Rig(policy, allocator=allocator, blocks=8)
    for prompt, max_tokens in product([33, 34, 64], [1, None]):
        with pytest.raises(RequestTooLong, match=rf"prompt of {prompt} tokens .*32.*8 blocks of 4"):
            rig.add("a", prompt, max_tokens=max_tokens)
    assert not rig.engine.has_unfinished()


@everywhere
@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
def test_a_request_that_fits_exactly_is_not_refused_for_one_block_more(policy, allocator, block_size: int) -> None:
    """Case 13: 33 slots were wanted where 32 do, since the last token is never written."""
    for max_tokens in (11, 12, 13):
        rig = Rig(policy, allocator=allocator, blocks=32 // block_size, block_size=block_size, model_len=64)
        rig.add("a", 20, max_tokens=max_tokens)
        assert len(rig.finish()["a"].token_ids) == max_tokens
    with pytest.raises(RequestTooLong, match=r"20 tokens and 14 to generate .* room to generate 13"):
        rig.add("a", 20, max_tokens=14)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_large_request_at_the_head_is_not_passed(policy) -> None:
    """Case 14: the built-in policies are first come first served; nobody behind a request that waits may join."""
    rig = Rig(policy, blocks=24, seats=8, budget=256, **eager(policy))
    rig.add("first", 60, max_tokens=5)  # 16 blocks, 8 are free
    rig.step()
    rig.add("large", 76, max_tokens=5)  # 20 blocks
    rig.add("small", 5, max_tokens=4)
    rig.add("tiny", 5, max_tokens=4)
    rig.finish()
    started = list(dict.fromkeys(row.request.id for out in rig.runner.outs for row in out.rows))
    assert started == ["first", "large", "small", "tiny"]


class Passing(OrcaScheduler):
    """Lets others pass a request that does not fit, each at most three times."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.passed: dict[int, int] = {}

    def schedule(self, step) -> None:
        for seq in self.running:
            step.run(seq)
        refused: list[int] = []
        for seq in self.waiting:
            if any(self.passed.get(other, 0) >= 3 for other in refused):
                break
            if not step.run(seq, reserve=seq.max_kv):
                refused.append(seq.id)
                continue
            for other in refused:
                self.passed[other] = self.passed.get(other, 0) + 1


def test_a_policy_may_pass_a_large_request_a_bounded_number_of_times() -> None:
    """Case 14: a policy that lets small ones pass bounds it, and the verbs let it go on after a refusal."""
    rig = Rig(Passing, blocks=24, seats=8, budget=256)
    rig.add("first", 60, max_tokens=5)
    rig.step()
    rig.add("large", 76, max_tokens=5)
    for i in range(20):
        rig.add(f"small{i}", 5, max_tokens=4)
    rig.finish()
    started = list(dict.fromkeys(row.request.id for out in rig.runner.outs for row in out.rows))
    assert started[:5] == ["first", "small0", "small1", "small2", "large"]


class Skipping(Scheduler):
    """Tries waiting requests at random, and preempts at random."""

    reserves_all = True
    rng = random.Random(15)

    def schedule(self, step) -> None:
        for seq in list(self.running):
            if self.rng.random() < 0.3:
                step.preempt(seq)
        for seq in self.running:
            step.run(seq)
        for seq in self.waiting:
            if self.rng.random() < 0.5:
                step.run(seq, reserve=seq.max_kv)
        step.wait_until(step.now + 1)


def test_skipped_requests_keep_their_order() -> None:
    """Case 15: requests skipped in a pass were put back in front in the wrong order, and slid back."""
    rig = Rig(Skipping, blocks=12, seats=3, budget=64)
    names = [f"r{i:02}" for i in range(30)]
    for name in names:
        rig.add(name, 6, max_tokens=6)
    for _ in range(50):
        rig.step()
        rig.engine.wait()
        never_ran = [seq.request.id for seq in rig.scheduler.waiting if not seq.num_preemptions]
        assert never_ran == sorted(never_ran)
        ran = [bool(seq.num_preemptions) for seq in rig.scheduler.waiting]
        assert ran == sorted(ran, reverse=True)  # those that were preempted are in front
    rig.finish()


@pytest.mark.parametrize("policy", PREEMPTING)
@pytest.mark.parametrize("host_blocks", [0, 4, 64])
def test_requests_that_all_want_the_last_block_do_not_deadlock(policy, host_blocks: int) -> None:
    """Case 17: all were admitted by the size of their prompts, and none could get its next block."""
    rig = Rig(policy, blocks=8, host_blocks=host_blocks, budget=64)
    for name in "abcd":
        rig.add(name, 8, max_tokens=12)
    rig.step()
    assert rig.names(rig.scheduler.running) == "a b c d"
    finals = rig.finish()
    ended = sorted(finals, key=lambda name: finals[name].timings.finished)
    assert ended[0] == "a"
    assert finals["a"].timings.num_preemptions == 0
    # Each of the three newer ones gives way at most once for each block that an older one takes beyond its prompt.
    assert 0 < rig.engine.stats().num_preemptions <= 9
    assert rig.engine.stats().recomputed_tokens <= 3 * (8 + 11)


@pytest.mark.parametrize("policy", RESERVING)
def test_requests_that_reserve_run_one_after_the_other(policy) -> None:
    """Case 17: 5 of 8 blocks for each, so one at a time, and nobody is preempted."""
    rig = Rig(policy, blocks=8, budget=64, **eager(policy))
    for name in "abcd":
        rig.add(name, 8, max_tokens=12)
    finals = rig.finish()
    assert max(len(out.rows) for out in rig.runner.outs) == 1
    assert sorted(finals, key=lambda name: finals[name].timings.finished) == list("abcd")
    assert rig.engine.stats().num_preemptions == 0
