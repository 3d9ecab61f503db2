"""Chunked prefill and fairness (cases 31 to 35)."""

from __future__ import annotations

import pytest

from batchkit import ChunkedPrefillScheduler
from unit.helpers import POLICIES, Bytes, Rig, eager


@pytest.mark.parametrize("budget", [3, 8, 16, 64])
@pytest.mark.parametrize("prompt", [30, 160])
def test_a_long_prompt_does_not_hold_up_those_that_decode(budget: int, prompt: int) -> None:
    """Case 31: it took the whole budget, and everybody else waited for its end."""
    rig = Rig(ChunkedPrefillScheduler, blocks=256, seats=3, budget=budget)
    rig.add("a", 1, max_tokens=200)
    rig.add("b", 1, max_tokens=200)
    rig.step()
    rig.add("long", prompt)
    chunks = 0
    while "long" not in rig.finals:
        news = {output.request_id for output in rig.step()}
        assert news >= {"a", "b"}
        chunks += not rig.outputs["long"]
    assert chunks == -(-prompt // (budget - 2)) - 1  # nothing of the budget was left unused
    rig.finish()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("prompt", [39, 40, 41])
def test_a_prompt_longer_than_the_budget_goes_on_where_it_stopped(policy, prompt: int) -> None:
    """Case 33: it started again with every chunk, and ate the whole pool."""
    rig = Rig(policy, blocks=32, block_size=4, seats=2, budget=8, **eager(policy))
    rig.add("a", prompt, max_tokens=3)
    rig.step()
    rig.add("b", 3, max_tokens=3)
    held = []
    rig.runner.before = lambda out: held.extend(len(row.blocks) for row in out.rows if row.request.id == "a")
    rig.finish()
    starts = [row.start for out in rig.runner.outs for row in out.rows if row.request.id == "a" and not row.idle]
    ends = [
        row.start + row.num_tokens
        for out in rig.runner.outs
        for row in out.rows
        if row.request.id == "a" and not row.idle
    ]
    assert starts == [0, *ends[:-1]]
    assert ends[-1] == prompt + 2
    assert max(held) <= -(-(prompt + 2) // 4)


@pytest.mark.parametrize("ending", ["abort", "preempt"])
@pytest.mark.parametrize("host_blocks", [0, 8])
def test_blocks_of_an_unfinished_prompt_are_never_read_by_others(ending: str, host_blocks: int) -> None:
    """Case 34: blocks of a prompt that was aborted between two chunks were read by the next one with that prompt."""

    class Once(ChunkedPrefillScheduler):
        preempt_now = False

        def schedule(self, step) -> None:
            if self.preempt_now:
                step.preempt(self.running[0])
                self.preempt_now = False
                step.wait_until(step.now + 1)
            super().schedule(step)

    rig = Rig(Once, blocks=16, host_blocks=host_blocks, budget=8)
    rig.add("first", 24)
    rig.step()
    rig.step()
    assert rig.seq("first").num_computed == 16
    if ending == "abort":
        rig.engine.abort("first")
    else:
        rig.scheduler.preempt_now = True
    rig.add("again", rig.jobs["first"][0])
    rig.add("other", 20)
    rig.finish(but=["first"] if ending == "abort" else [])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("with_text", [False, True])
def test_a_part_of_a_prompt_gives_no_output(policy, with_text: bool) -> None:
    """Case 35: a dummy token reached the caller, and the first chunk's time was taken for the first token's."""
    tokenizer = Bytes() if with_text else None
    rig = Rig(policy, seats=2, budget=4, vocab=Bytes.vocab, tokenizer=tokenizer, **eager(policy))
    rig.add("a", "eleven char" if with_text else 11, max_tokens=2)
    assert rig.step() == []
    assert rig.step() == []
    outputs = rig.step()
    final = rig.finish()["a"]
    assert final.timings.first_scheduled == 0.0
    if rig.scheduler.streams:
        assert [output.new_token_ids for output in outputs] == [final.token_ids[:1]]
        assert final.timings.first_token == 3.0
    else:
        assert outputs == []
        assert final.timings.first_token == final.timings.finished
    # Three chunks, and a step for the second token.
    assert final.timings.finished == 4.0
    assert len(rig.runner.outs) == 4
