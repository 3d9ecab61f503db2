"""Preemption, recompute and swap (cases 18 to 30)."""

from __future__ import annotations

import pytest

from batchkit import PagedAllocator, PagedScheduler, Refusal, Scheduler, Swap
from unit.helpers import PREEMPTING, Bytes, Rig, tokens

ways = pytest.mark.parametrize("host_blocks", [0, 1, 4, 32])


class Forced(PagedScheduler):
    """Paged with room for everybody, but the request "a" is preempted when it has so many outputs."""

    at: tuple[int, ...] = ()
    done: int = 0

    def schedule(self, step) -> None:
        for seq in self.running:
            if seq.request.id == "a" and self.done < len(self.at) and len(seq.output) == self.at[self.done]:
                step.preempt(seq)
                self.done += 1
                step.wait_until(step.now + 1)
        super().schedule(step)


def forced(*at: int, **options) -> Rig:
    rig = Rig(Forced, **options)
    rig.scheduler.at = at
    return rig


def test_a_sequence_in_the_step_is_never_evicted_by_a_later_one() -> None:
    """Case 18: one placed in the batch was evicted in the same step, and the batch had more rows than were running."""
    seen = []

    class LowFirst(Scheduler):
        def schedule(self, step) -> None:
            if not self.running:
                for seq in self.waiting:
                    step.run(seq)
                return
            low, high = self.running
            before = rig.state(), step.tokens_left
            assert step.run(low)
            assert low in step and high not in step
            if not step.run(high, victims=[low]):
                seen.append(step.refused)
                assert rig.allocator.table(high.id) == tuple(before[0][3][high.id])
                assert high.num_preemptions == low.num_preemptions == 0

    rig = Rig(LowFirst, blocks=5, block_size=4, seats=2, budget=16)
    rig.add("low", 8, max_tokens=2)
    rig.add("high", 8, max_tokens=2)
    rig.step()
    rig.step()  # one block is free, both need one
    assert seen == [Refusal.BLOCKS]
    assert rig.history == ["low8 high8", "low1"]


@ways
def test_one_that_gives_way_leaves_the_batch_with_its_blocks_and_budget(host_blocks: int) -> None:
    """Case 18: what was left of the evicted one's record shifted its block table when it came back."""

    class HighFirst(Scheduler):
        def schedule(self, step) -> None:
            order = sorted(self.running, key=lambda seq: seq.request.priority, reverse=True)
            for seq in order:
                if seq in self.running:
                    step.run(seq, victims=reversed(order))
            for seq in self.waiting:
                if not step.run(seq, reserve=seq.num_tokens):
                    break

    rig = Rig(HighFirst, blocks=5, host_blocks=host_blocks, seats=2, budget=16)
    for name, priority in (("low", 0), ("high", 1)):
        rig.add(name, 8, max_tokens=8, priority=priority)
    for _ in range(40):
        if not rig.engine.has_unfinished():
            break
        rig.step()
        out = rig.runner.outs[-1]
        assert {row.seq_id for row in out.rows}.isdisjoint(e.seq_id for e in out.preempted)
        assert sum(row.num_tokens for row in out.rows) == out.num_tokens <= 16
    rig.finish()
    assert rig.finals["low"].timings.num_preemptions == 1
    assert rig.finals["high"].timings.num_preemptions == 0


@ways
@pytest.mark.parametrize("block_size", [1, 4])
def test_outputs_so_far_are_computed_again_on_resume(block_size: int, host_blocks: int) -> None:
    """Case 19: only the prompt was computed again, and the rest came from a hole."""
    for at in (1, block_size, block_size + 1, 2 * block_size - 1, 7):
        rig = forced(at, block_size=block_size, host_blocks=host_blocks, model_len=64)
        rig.add("a", 5, max_tokens=12)
        rig.add("b", 3, max_tokens=12)
        finals = rig.finish()
        assert finals["a"].timings.num_preemptions == 1
        # The last sampled token was never in the cache.
        (again,) = [
            row
            for out in rig.runner.outs[1:]
            for row in out.rows
            if row.request.id == "a" and (row.num_tokens > 1 or row.start == 0)
        ] or [None]
        kept = finals["a"].timings.recomputed_tokens == 0
        assert kept == (again is None)
        if again is not None:
            assert (again.start, again.num_tokens, again.num_output) == (0, 5 + at, at)
            assert finals["a"].timings.recomputed_tokens == 5 + at - 1


@ways
def test_nothing_is_streamed_twice_over_preemptions(host_blocks: int) -> None:
    """Cases 19 and 23: tokens were cleared and generated again, and lists that belong to them were not."""
    for at in ((), (3,), (3, 4), (1, 2, 9), (2, 3, 4)):
        rig = forced(*at, host_blocks=host_blocks, vocab=Bytes.vocab, tokenizer=Bytes(), model_len=64)
        rig.add("a", "prompt", max_tokens=10)
        rig.add("b", "other", max_tokens=10)
        finals = rig.finish()
        assert finals["a"].timings.num_preemptions == len(at)
        assert len(finals["a"].token_ids) == 10
        per_step = [len(output.new_token_ids) for output in rig.outputs["a"]]
        assert per_step == [1] * 10


@ways
def test_prompt_length_is_the_prompts_after_a_preemption(host_blocks: int) -> None:
    """Case 21: outputs folded into the prompt made the reported prompt length wrong, and moved the limit."""
    rig = forced(3, host_blocks=host_blocks)
    rig.add("a", 5, max_tokens=8)
    final = rig.finish()["a"]
    assert final.timings.num_preemptions == 1
    assert final.prompt_token_ids == tuple(tokens("a", 5))
    assert (len(final.token_ids), final.finish_reason) == (8, "length")
    stats = rig.engine.stats()
    assert (stats.prompt_tokens, stats.generated_tokens) == (5, 8)


@pytest.mark.parametrize("at", [1, 3, 5])
def test_prompt_and_output_are_told_apart_after_a_preemption(at: int) -> None:
    """Case 22: outputs on the side of the prompt, so that what counts outputs counted wrong."""
    script = {"a": [9, 7, 7, 7, 7, 7, 7, 7]}
    rig = forced(at, script=script, eos=[7])
    rig.add("a", 5, max_tokens=8, min_tokens=4)
    assert len(rig.finish()["a"].token_ids) == 5
    for out in rig.runner.outs:
        for row in out.rows:
            assert row.request.prompt_token_ids == tuple(tokens("a", 5))
            assert list(row.output_ids[: row.num_output]) == script["a"][: row.num_output]


@pytest.mark.parametrize("policy", PREEMPTING)
@ways
@pytest.mark.parametrize("budget", [8, 64])
def test_rows_reach_exactly_to_what_is_known(policy, host_blocks: int, budget: int) -> None:
    """Cases 25 and 26: positions ran past the table, or a preempted request that has outputs was taken for decoding."""
    rig = Rig(policy, blocks=9, host_blocks=host_blocks, seats=4, budget=budget)
    computed: dict[int, int] = {}

    def before(out) -> None:
        for row in out.rows:
            known = row.request.prompt_token_ids + tuple(row.output_ids[: row.num_output])
            end = row.start + row.num_tokens
            assert row.token_ids == known[row.start : end]
            assert row.samples == (end == len(known))
            assert end <= len(row.blocks) * 4
            assert row.start in (0, computed.get(row.seq_id, 0)) or host_blocks
            computed[row.seq_id] = end

    rig.runner.before = before
    for name, prompt in (("a", 14), ("b", 13), ("c", 12), ("d", 3)):
        rig.add(name, prompt, max_tokens=14)
    rig.finish()
    assert rig.engine.stats().num_preemptions > 0
    replayed = [row for out in rig.runner.outs for row in out.rows if row.num_output and row.num_tokens > 1]
    assert replayed or host_blocks == 32


@pytest.mark.parametrize("policy", PREEMPTING)
@pytest.mark.parametrize("host_blocks", [1, 4, 32])
def test_full_swap_space_falls_back_to_recompute(policy, host_blocks: int) -> None:
    """Case 27: swap space ran out and the whole run was aborted, or all stood still."""
    rig = Rig(policy, blocks=8, host_blocks=host_blocks, seats=4, budget=64)
    for i in range(10):
        rig.add(f"r{i}", 8, max_tokens=12)
    finals = rig.finish()
    recomputed = sum(final.timings.recomputed_tokens for final in finals.values())
    assert rig.engine.stats().recomputed_tokens == recomputed
    assert rig.engine.stats().num_preemptions > 0
    assert (recomputed == 0) == (host_blocks == 32)
    assert (rig.runner.num_copies > 0) == (host_blocks > 1)  # every victim here has more than one block


def test_swap_copies_what_is_computed_and_not_what_is_reserved() -> None:
    class Reserving(Forced):
        reserves_all = True

        def schedule(self, step) -> None:
            for seq in list(self.running):
                if len(seq.output) == 2 and not seq.num_preemptions:
                    step.preempt(seq)
                    step.wait_until(step.now + 1)
            for seq in self.running:
                step.run(seq)
            for seq in self.waiting:
                step.run(seq, reserve=seq.max_kv)

    rig = Rig(Reserving, blocks=16, host_blocks=16)
    rig.add("a", 6, max_tokens=20)
    rig.finish()
    copies = [copy.kind for report in rig.reports for copy in report.output.copies]
    assert copies == ["swap_out"] * 2 + ["swap_in"] * 2  # 7 tokens in blocks of 4


def test_no_host_blocks_is_refused() -> None:
    """Case 27: nought host blocks is no swap space."""
    with pytest.raises(ValueError, match="got 0 blocks of 4 tokens"):
        Swap(PagedAllocator(0, 4))


@pytest.mark.parametrize("policy", PREEMPTING)
@pytest.mark.parametrize("host_blocks", [0, 4])
def test_newcomers_do_not_preempt_the_same_request_again_and_again(policy, host_blocks: int) -> None:
    """Case 29: a preempted request lost its place to newcomers and was computed over and over."""
    rig = Rig(policy, blocks=12, host_blocks=host_blocks, seats=6, budget=64)
    names = []
    for step in range(240):
        if step % 2 == 0 and step < 160:
            names.append(rig.add(f"r{step:03}", 6, max_tokens=10))
        rig.step()
    finals = rig.finish()
    assert rig.engine.stats().num_preemptions > 0
    # One gives way to older ones only, of which at most five run beside it.
    assert max(final.timings.num_preemptions for final in finals.values()) <= 5
    ended = sorted(names, key=lambda name: finals[name].timings.finished)
    assert max(abs(ended.index(name) - i) for i, name in enumerate(names)) <= 6
    started = sorted(names, key=lambda name: finals[name].timings.first_scheduled)
    assert started == names


@pytest.mark.parametrize("policy", PREEMPTING)
def test_no_chunk_is_started_whose_rest_does_not_fit(policy) -> None:
    """Case 30: first chunks of a prompt ran although the rest could not fit, were preempted, and ran again."""
    rig = Rig(policy, blocks=8, seats=2, budget=8)
    rig.add("a", 20, max_tokens=6)
    for _ in range(3):
        rig.step()
    rig.add("b", 24, max_tokens=4)  # 6 blocks in 3 chunks; 2 or 3 are free
    while rig.engine.has_unfinished():
        rig.step()
        held = len(rig.allocator.table(rig.seq("b").id)) if "b" not in rig.finals else 6
        assert held in (0, 6, 7)
    finals = rig.finish()
    assert rig.engine.stats().recomputed_tokens == 0
    assert sum(final.timings.num_preemptions for final in finals.values()) == 0


def test_the_last_known_token_is_computed_even_if_all_the_others_are_kept() -> None:
    rig = forced(3, host_blocks=8)
    rig.add("a", 5, max_tokens=5)
    rig.finish()
    assert rig.history == ["a5", "a1", "a1", "a1", "a1"]
    assert [row.start for out in rig.runner.outs for row in out.rows] == [0, 5, 6, 7, 8]


@pytest.mark.parametrize("host_blocks", [0, 32])
def test_preempted_ones_wait_in_front_in_their_old_order(host_blocks: int) -> None:
    class Everybody(PagedScheduler):
        def schedule(self, step) -> None:
            if len(self.running) == 3:
                for seq in reversed(self.running):
                    step.preempt(seq)
                step.wait_until(step.now + 1)
            else:
                super().schedule(step)

    rig = Rig(Everybody, seats=3, host_blocks=host_blocks)
    for name in "abcde":
        rig.add(name)
    rig.step()
    rig.step()
    assert rig.names(rig.scheduler.waiting) == "a b c d e"
    assert (rig.runner.num_copies == 3) == bool(host_blocks)
