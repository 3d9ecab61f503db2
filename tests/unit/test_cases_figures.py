"""What figures mean: times, counts of tokens, throughput; faults that other engines had with them.

The clock passes by one second a step.
"""

import pytest

from batchkit import ChunkedPrefillScheduler, Recompute
from unit.helpers import PREEMPTING, Rig


@pytest.mark.parametrize("policy", PREEMPTING)
def test_vllm_8115_one_first_token_time_for_each_request_that_delivered(policy) -> None:
    """20 requests: some aborted while they wait, some of three samples, some preempted."""
    rig = Rig(policy, blocks=14, block_size=4, seats=4)
    for i in range(20):
        rig.add(str(i), 7, n=3 if i % 5 == 1 else 1, max_tokens=9)
    for i in (15, 18):
        rig.engine.abort(str(i))
    finals = rig.finish(but=["15", "18"])
    stats = rig.engine.stats()
    assert stats.num_preemptions > 0
    firsts = {name: final.timings.first_token for name, final in finals.items()}
    assert {name for name, first in firsts.items() if first is None} == {"15", "18"}
    for name, first in firsts.items():
        lives = [out for out in rig.outputs[name] if any(c.new_token_ids for c in out.outputs)]
        assert first == (lives[0].timings.first_token if lives else None)
        assert all(out.timings.first_token == first for out in lives)


@pytest.mark.parametrize("outputs", [0, 3])
def test_vllm_13169_times_of_a_preempted_request(outputs) -> None:
    """Preempted before and after its first token: first token and first step stay, tokens are counted once."""
    rig = Rig(ChunkedPrefillScheduler, budget=6, seats=2)
    rig.clock.advance(100)
    rig.add("x", 12, arrival=97.0)
    for _ in range(outputs + (2 if outputs else 1)):
        rig.step()
    (seq,) = rig.scheduler.running
    computed = seq.num_computed
    rig.scheduler._evict(seq)
    final = rig.finish()["x"]
    times, stats = final.timings, rig.engine.stats()
    assert (times.arrival, times.first_scheduled) == (97.0, 100.0)
    # Two steps of prompt; before the first token, the step that was thrown away comes on top.
    assert times.first_token == (102.0 if outputs else 103.0)
    assert (times.num_preemptions, times.recomputed_tokens) == (1, computed)
    assert stats.generated_tokens == 8 and stats.prompt_tokens == 12
    assert sum(len(c.new_token_ids) for out in rig.outputs["x"] for c in out.outputs) == 8
    assert stats.computed_tokens == 12 + 7 + computed
    assert stats.recomputed_tokens == computed
    assert isinstance(rig.scheduler.preemption, Recompute)


def test_ttvllm_64_throughput_counts_tokens_and_not_steps() -> None:
    rig = Rig(blocks=64)
    rig.add("x", 5, n=4, max_tokens=6)
    rig.finish()
    tokens_of_steps = [report.num_new_tokens for report in rig.reports]
    # The first sample's first token, the first tokens of the others, then the rest.
    assert tokens_of_steps == [1, 3, 4, 4, 4, 4, 4]
    stats = rig.engine.stats()
    assert stats.generated_tokens == sum(tokens_of_steps) == 24
    assert stats.generated_tokens / rig.clock() == pytest.approx(24 / 7)
    assert [report.time for report in rig.reports] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
