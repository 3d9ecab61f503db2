"""One bad request, and everyone else (cases 73 and 74)."""

from __future__ import annotations

import pytest

from batchkit import RequestTooLong, SamplingParams
from unit.helpers import PAIRS, PREEMPTING, Rig, eager

everywhere = pytest.mark.parametrize(("policy", "allocator"), PAIRS)
PARAMS = SamplingParams(temperature=0, max_tokens=6)
PROMPTS = [[1] * 4, [2] * 5, [3] * 100, [4] * 6, [5] * 7]


@everywhere
def test_an_overlong_prompt_costs_only_its_own_result(policy, allocator) -> None:
    """Case 73: it raised, and all the good ones were lost."""
    rig = Rig(policy, allocator=allocator, blocks=16, **eager(policy))
    want = [rig.engine.generate([prompt], PARAMS)[0].token_ids for prompt in PROMPTS if len(prompt) < 100]
    outputs = rig.engine.generate(PROMPTS, PARAMS, on_error="return")
    assert [output.finish_reason for output in outputs] == ["length", "length", "error", "length", "length"]
    assert [output.token_ids for output in outputs if output.finish_reason == "length"] == want
    bad = outputs[2]
    assert bad.finished and bad.token_ids == () and bad.text == ""
    assert "100 tokens" in bad.error and "16 blocks of 4" in bad.error
    rig.assert_empty()


@everywhere
@pytest.mark.parametrize("window", [None, 1, 2])
def test_an_overlong_prompt_that_raises_leaves_nothing_queued(policy, allocator, window) -> None:
    """Case 73, the other mode: it says which prompt it was."""
    rig = Rig(policy, allocator=allocator, blocks=16, **eager(policy))
    with pytest.raises(RequestTooLong, match="prompt 2: a prompt of 100 tokens"):
        rig.engine.generate(PROMPTS, PARAMS, window=window)
    assert not rig.engine.has_unfinished()
    rig.engine.check()
    rig.assert_empty()
    assert len(rig.engine.generate(PROMPTS[:2], PARAMS)) == 2


@everywhere
@pytest.mark.parametrize("host_blocks", [0, 2, 12])
def test_requests_whose_sum_outgrows_the_pool_all_end_well(policy, allocator, host_blocks: int) -> None:
    """Case 74: when the shared cache was full, every generation was aborted."""
    rig = Rig(policy, allocator=allocator, blocks=12, host_blocks=host_blocks, seats=4, budget=64, **eager(policy))
    for name in "abcd":
        rig.add(name, 9, max_tokens=30)
    finals = rig.finish()
    assert {final.finish_reason for final in finals.values()} == {"length"}
    assert (rig.engine.stats().num_preemptions > 0) == (policy in PREEMPTING)
