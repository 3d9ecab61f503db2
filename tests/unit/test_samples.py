"""Several samples of one prompt: they share its blocks, and each is what it is without the others."""

from itertools import pairwise

import pytest

from batchkit import (
    ChunkedPrefillScheduler,
    ContiguousAllocator,
    OrcaScheduler,
    RowResult,
    StaticScheduler,
)
from unit.helpers import PAIRS, PREEMPTING, Rig, eager, told


def most_blocks(prompt: int, max_tokens: int, n: int, size: int) -> int:
    """The blocks of one prompt and of `n` tails."""
    shared = (prompt - 1) // size
    return shared + n * (-(-(prompt + max_tokens - 1) // size) - shared)


@pytest.mark.parametrize(("policy", "allocator"), PAIRS)
@pytest.mark.parametrize("prompt", [1, 4, 5, 11])
def test_each_sample_is_what_it_is_alone(policy, allocator, prompt) -> None:
    rig = Rig(policy, allocator=allocator, blocks=40, seats=6, budget=12, eos=(3, 5, 8), vocab=12, **eager(policy))
    rig.add("one", prompt)
    rig.add("four", prompt, n=4, logprobs=0)
    rig.add("three", prompt + 2, n=3, prompt_logprobs=0)
    finals = rig.finish()
    assert [c.index for c in finals["four"].outputs] == [0, 1, 2, 3]
    assert len({c.token_ids for c in finals["four"].outputs}) > 1


def test_a_sample_does_not_depend_on_their_number() -> None:
    prompt = [1, 2, 3, 4, 5]
    seen = []
    for n in (1, 2, 5):
        rig = Rig(blocks=40)
        rig.add("x", prompt, n=n)
        seen.append([c.token_ids for c in rig.finish()["x"].outputs])
    assert seen[0] == seen[1][:1] and seen[1] == seen[2][:2]
    assert len(set(seen[2])) == 5


@pytest.mark.parametrize("policy", [*PREEMPTING, OrcaScheduler])
@pytest.mark.parametrize("prompt", [4, 20, 21])
def test_the_prompt_is_computed_and_held_once(policy, prompt) -> None:
    rig = Rig(policy, blocks=64, block_size=4)
    rig.add("x", prompt, n=4, max_tokens=7)
    rig.finish()
    stats = rig.engine.stats()
    assert stats.peak_used_blocks <= most_blocks(prompt, 7, 4, 4)
    shared = (prompt - 1) // 4 * 4
    assert stats.cached_tokens == 3 * shared
    assert stats.computed_tokens == 4 * (prompt + 6) - 3 * shared


def test_tokens_in_shared_blocks_are_counted_once() -> None:
    rig = Rig(ChunkedPrefillScheduler, prefix_caching=True)
    rig.add("x", 21, n=4, max_tokens=7)
    rig.finish()
    # The first sample is one token ahead of the others when it ends.
    assert max(report.kv_tokens for report in rig.reports) == 20 + 7 + 3 * 6
    for report in rig.reports:
        assert report.kv_tokens <= report.num_used_blocks * 4


def test_the_bound_of_blocks_suffices() -> None:
    blocks = most_blocks(20, 7, 4, 4)
    rig = Rig(ChunkedPrefillScheduler, blocks=blocks)
    rig.add("x", 20, n=4, max_tokens=7)
    rig.finish()
    assert rig.engine.stats().num_preemptions == 0


def test_samples_are_not_shared_where_a_table_is_one_piece() -> None:
    rig = Rig(OrcaScheduler, allocator=ContiguousAllocator, blocks=64)
    rig.add("x", 21, n=3)
    rig.finish()
    assert rig.engine.stats().cached_tokens == 0


def test_seats_are_counted_by_sample() -> None:
    rig = Rig(blocks=64, seats=2)
    rig.add("x", 9, n=5)
    while rig.engine.has_unfinished():
        rig.step()
        assert len(rig.scheduler.running) <= 2
    rig.finish()


def test_samples_go_before_those_that_wait() -> None:
    rig = Rig(blocks=64, seats=4)
    for name in ("first", "second"):
        rig.add(name, 5, n=3)
    rig.add("third", 5)
    rig.finish()
    assert rig.history[:2] == ["first5 second5 third5", "first1"]


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("prompt", [1, 12, 13])
@pytest.mark.parametrize("policy", [*PREEMPTING, OrcaScheduler, StaticScheduler])
def test_the_first_ends_with_its_first_token(policy, prompt, prefix_caching) -> None:
    """VLLM-11953: the others are delivered all the same, one prompt's blocks and their tails still suffice."""
    rig = Rig(policy, blocks=64, script={"x/0": [7], "x/1": [7]}, eos=(7,), prefix_caching=prefix_caching)
    rig.add("x", prompt, n=4, max_tokens=5)
    (final,) = rig.finish().values()
    assert [len(c.token_ids) for c in final.outputs[:2]] == [1, 1]
    assert rig.engine.stats().peak_used_blocks <= most_blocks(prompt, 5, 4, 4)
    assert len({c.token_ids for c in final.outputs[2:]}) == 2


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("policy", [*PREEMPTING, OrcaScheduler])
@pytest.mark.parametrize("blocks", [6, 64])
def test_samples_of_one_token_compute_the_prompt_once(policy, prefix_caching, blocks) -> None:
    """Votes: each sample ends with its first token, and the next ones have the prompt all the same."""
    rig = Rig(policy, blocks=blocks, block_size=4, seats=None if blocks > 6 else 6, prefix_caching=prefix_caching)
    rig.add("x", 23, n=8, max_tokens=1)
    rig.finish()
    computed = [sum(row.num_tokens for row in out.rows) for out in rig.runner.outs]
    assert computed[0] == 23 and sum(computed) <= 23 + 7 * 3
    if blocks > 6:
        assert len(computed) <= 3


def test_a_prompt_that_is_not_the_first_to_end_is_handed_on_under_faults_too() -> None:
    rig = Rig(ChunkedPrefillScheduler, blocks=16, host_blocks=8)
    failing = iter([False, True] * 20)

    def fail(out):
        if next(failing, False):
            raise OSError("now and then")

    rig.runner.before = fail
    for name in "abc":
        rig.add(name, 9, n=5, max_tokens=1, logprobs=0)
    rig.finish()


def test_what_a_step_costs_does_not_grow_with_samples_that_have_ended() -> None:
    rig = Rig(seats=2)
    rig.add("x", 2, n=60, max_tokens=3)
    rig.finish()
    completions = [output.outputs for output in rig.outputs["x"]]
    for before, after in pairwise(completions):
        quiet = [c for c in after if not c.new_token_ids and c.finish_reason]
        assert sum(any(c is other for other in before) for c in quiet) >= len(quiet) - 4


@pytest.mark.parametrize("policy", PREEMPTING)
def test_vllm_1556_samples_that_end_at_different_times_free_shared_blocks_once(policy) -> None:
    script = {f"{name}/{i}": [*range(10, 10 + i % 6), 7] for name in "abc" for i in range(8)}
    rig = Rig(policy, blocks=20, block_size=4, script=script, eos=(7,))
    for name in "abc":
        rig.add(name, 6, n=8, max_tokens=8)
    finals = rig.finish()
    for name in "abc":
        assert [len(c.token_ids) for c in finals[name].outputs] == [i % 6 + 1 for i in range(8)]
        assert {c.finish_reason for c in finals[name].outputs} == {"stop"}


@pytest.mark.parametrize("host_blocks", [0, 1, 4, 40])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("policy", PREEMPTING)
def test_vllm_787_several_samples_under_preemption(policy, n, host_blocks) -> None:
    rig = Rig(policy, blocks=12, block_size=2, host_blocks=host_blocks, budget=16)
    for name in "abcd":
        rig.add(name, 7, n=n, max_tokens=9)
    rig.finish()
    assert rig.engine.stats().num_preemptions > 0


def test_vllm_16805_streamed_samples_with_logprobs_lose_nothing() -> None:
    rig = Rig(script={"x/1": [7]}, eos=(7,))
    rig.add("x", 5, n=2, max_tokens=2, logprobs=0)
    (final,) = rig.finish().values()
    for completion in final.outputs:
        assert len(completion.logprobs) == len(completion.token_ids)
        assert completion.cumulative_logprob == sum(
            entry[token].logprob for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)
        )


def test_an_early_sample_is_delivered_when_it_ends() -> None:
    rig = Rig(script={"x/1": [10, 7]}, eos=(7,))
    rig.add("x", 5, n=2, max_tokens=6)
    rig.finish()
    life = rig.outputs["x"]
    at = next(i for i, output in enumerate(life) if output.outputs[1].finish_reason)
    assert life[at].outputs[1].token_ids == (10, 7)
    assert at < len(life) - 1 and not life[at].finished and life[at].outputs[0].finish_reason is None
    assert [output.finished for output in life].count(True) == 1


@pytest.mark.parametrize("when", range(6))
def test_an_abort_ends_all_samples(when) -> None:
    rig = Rig(script={"x/1": [7]}, eos=(7,), seats=3)
    rig.add("x", 5, n=4, max_tokens=6)
    for _ in range(when):
        rig.step()
    seen = rig.outputs["x"][-1].outputs[1].finish_reason if when else None
    assert rig.engine.abort("x") and not rig.engine.abort("x")
    final = rig.run()["x"]
    rig.assert_empty()
    assert [c.finish_reason for c in final.outputs] == ["abort", seen or "abort", "abort", "abort"]
    assert rig.engine.stats().finished == {"abort": 1}


def test_a_fault_of_one_sample_ends_its_request_alone() -> None:
    rig = Rig(blocks=64)
    rig.add("x", 5, n=3)
    rig.add("y", 5, n=3)

    def break_one(out, got):
        rows = [
            RowResult(error="burnt") if (row.request.id, row.sample_index, row.num_output) == ("x", 1, 2) else result
            for row, result in zip(out.rows, got.rows, strict=True)
        ]
        return type(got)(tuple(rows))

    rig.runner.after = break_one
    finals = rig.finish(but=["x"])
    assert [c.finish_reason for c in finals["x"].outputs] == ["error"] * 3
    assert finals["x"].error == "burnt"
    assert rig.engine.stats().finished == {"error": 1, "length": 1}


def test_vllm_10583_ids_of_samples_clash_with_no_other() -> None:
    rig = Rig(blocks=64)
    for name in ("x", "x-0", "x-1", "0"):
        rig.add(name, 5, n=2)
    rig.finish()


def test_samples_after_the_kv_cache_is_lost() -> None:
    from batchkit import KVLost

    rig = Rig(blocks=64)
    rig.add("x", 9, n=3)
    lost = []

    def lose(out):
        if len(rig.runner.outs) in (2, 4) and len(rig.runner.outs) not in lost:
            lost.append(len(rig.runner.outs))
            rig.runner.lose_kv()
            raise KVLost("gone")

    rig.runner.before = lose
    rig.finish()
    assert lost == [2, 4]


def test_the_prompt_is_handed_on_where_samples_run_one_by_one() -> None:
    rig = Rig(seats=1)
    rig.add("x", 9, n=3, max_tokens=3)
    rig.finish()
    assert rig.engine.stats().cached_tokens == 2 * 8


@pytest.mark.parametrize("drop_finished", [False, True])
def test_a_static_batch_stays_as_it_was_picked(drop_finished) -> None:
    rig = Rig(StaticScheduler, script={"x/0": [7]}, eos=(7,), drop_finished=drop_finished)
    rig.add("x", 9, n=3, max_tokens=3)
    rig.add("y", 5, max_tokens=6)
    rig.finish()
    first_batch = [{row.seq_id for row in out.rows} for out in rig.runner.outs[:6]]
    assert len(set.union(*first_batch)) == 2  # the first sample and y


def test_a_sample_whose_siblings_hold_nothing_computes_the_prompt_itself() -> None:
    rig = Rig(seats=1, allocator=ContiguousAllocator, policy=OrcaScheduler)
    rig.add("x", 9, n=3, max_tokens=3)
    rig.finish()
    assert rig.engine.stats().cached_tokens == 0


def test_a_sample_may_take_the_seat_of_the_one_that_has_the_prompt() -> None:
    class Swapping(ChunkedPrefillScheduler):
        """In the second step, the sample that waits takes the only seat."""

        turn = 0

        def schedule(self, step):
            self.turn += 1
            if self.turn == 2:
                (first,), (second,) = self.running, self.waiting
                assert step.run(second, reserve=second.num_tokens, victims=[first])
            else:
                super().schedule(step)

    rig = Rig(Swapping, blocks=64, seats=1)
    rig.add("x", 21, n=2, max_tokens=3)
    rig.finish()
    assert rig.outputs["x"][-1].timings.num_preemptions == 1


def test_timings_are_of_the_whole_request() -> None:
    rig = Rig(seats=1)
    rig.add("x", 5, n=2, max_tokens=3)
    final = rig.finish()["x"]
    assert final.timings.first_token == rig.outputs["x"][0].timings.first_token == 1.0
    assert final.timings.finished == 6.0
    assert rig.engine.stats().prompt_tokens == 5 and rig.engine.stats().generated_tokens == 6


def test_told_sees_a_difference() -> None:
    """The comparison that these tests rest on."""
    rig = Rig()
    rig.add("x", 5, n=2)
    rig.add("y", 6, n=2)
    finals = rig.finish()
    assert told(finals["x"]) != told(finals["y"])
