"""What each policy does, by the rows of every step.

A step is written "a5 b1 c~": 5 tokens of a, 1 of b, an idle row of c.
"""

from __future__ import annotations

import pytest

from batchkit import (
    ChunkedPrefillScheduler,
    ContiguousAllocator,
    DynamicScheduler,
    OrcaScheduler,
    PagedAllocator,
    PagedScheduler,
    Refusal,
    Request,
    SamplingParams,
    Scheduler,
    Sequence,
    StaticScheduler,
    Status,
    WaitingServedScheduler,
)
from unit.helpers import PAIRS, POLICIES, RESERVING, Rig, eager

everywhere = pytest.mark.parametrize(("policy", "allocator"), PAIRS)


def rows(policy, jobs: str, **options) -> list[str]:
    """The history of jobs like "a5+3 b2+1": a has 5 prompt tokens and 3 to generate."""
    rig = Rig(policy, **options)
    for job in jobs.split():
        prompt, length = job[1:].split("+")
        rig.add(job[0], int(prompt), max_tokens=int(length))
    rig.finish()
    return rig.history


# ---- static --------------------------------------------------------------------------------------------------------


def test_static_holds_finished_rows_until_the_last_one_ends() -> None:
    assert rows(StaticScheduler, "a4+1 b3+3 c2+2 d5+2", seats=3) == [
        "a4 b3 c2",
        "b1 c1 a~",
        "b1 a~ c~",
        "d5",
        "d1",
    ]


def test_static_returns_a_batch_together() -> None:
    rig = Rig(StaticScheduler, seats=2)
    for name, length in (("a", 1), ("b", 3), ("c", 2), ("d", 1)):
        rig.add(name, max_tokens=length)
    delivered = []
    while rig.engine.has_unfinished():
        delivered.append(" ".join(sorted(output.request_id for output in rig.step())))
    assert delivered == ["", "", "a b", "", "c d"]


def test_static_lets_finished_rows_go_with_drop_finished() -> None:
    rig = Rig(StaticScheduler, seats=3, drop_finished=True)
    for name, length in (("a", 1), ("b", 3), ("c", 2), ("d", 1)):
        rig.add(name, 4, max_tokens=length)
    assert [output.request_id for output in rig.step()] == ["a"]
    assert rig.engine.stats().num_free_blocks == 64 - 2 - 2
    rig.finish()
    assert rig.history == ["a4 b4 c4", "b1 c1", "b1", "d4"]  # the seat stays empty


def test_static_pads_a_batch_to_so_many_tokens() -> None:
    assert rows(StaticScheduler, "a4+1 b3+2 c2+1", seats=2, pad_to=4) == [
        "a4 b3",
        "b1 a~",
        "a~ b~",
        "a~ b~",
        "c2",
        "c~",
        "c~",
        "c~",
    ]
    assert rows(StaticScheduler, "a4+1", pad_to=1) == ["a4"]
    assert rows(StaticScheduler, "a4+3", pad_to=2) == ["a4", "a1", "a1"]


def test_static_fills_its_batch_over_several_steps() -> None:
    """A prompt is cut to what is left of the budget, and nobody decodes before the batch is full."""
    assert rows(StaticScheduler, "a5+2 b6+2 c3+1 d1+1", seats=3, budget=8) == ["a5 b3", "b3 c3", "a1 b1 c~", "d1"]


def test_static_picks_a_batch_once() -> None:
    """By seats and by memory; who comes later waits for the next, though a seat is free."""
    rig = Rig(StaticScheduler, seats=4)
    rig.add("a", 4, max_tokens=3)
    rig.step()
    rig.add("b", 4, max_tokens=1)
    rig.finish()
    assert rig.history == ["a4", "a1", "a1", "b4"]
    # 8 blocks: a and b reserve 3 each.
    assert rows(StaticScheduler, "a4+9 b4+9 c4+9 d4+1", blocks=8)[0] == "a4 b4"


# ---- dynamic -------------------------------------------------------------------------------------------------------


def test_dynamic_starts_with_enough_requests() -> None:
    rig = Rig(DynamicScheduler, seats=4, min_batch=2, max_wait_s=100.0)
    rig.add("a", max_tokens=1)
    assert rig.step() == [] and rig.history == []
    rig.add("b", max_tokens=1)
    rig.step()
    assert rig.history == ["a4 b4"]
    assert rig.clock() == 1.0
    rig.finish()


def test_dynamic_starts_when_the_oldest_has_waited_enough() -> None:
    rig = Rig(DynamicScheduler, seats=4, min_batch=3, max_wait_s=10.0)
    rig.add("a", max_tokens=2, arrival=0.0)
    rig.clock.advance(4.0)
    rig.add("b", max_tokens=2)
    rig.step()
    rig.engine.wait()
    assert rig.clock() == 10.0
    rig.step()
    rig.add("c", max_tokens=1)  # at 11: the batch is picked
    rig.finish()
    assert rig.history == ["a4 b4", "a1 b1", "c4"]
    times = {name: final.timings for name, final in rig.finals.items()}
    assert [times[name].first_scheduled for name in "abc"] == [10.0, 10.0, 21.0]
    assert [times[name].finished for name in "abc"] == [12.0, 12.0, 22.0]


def test_dynamic_waits_for_a_full_batch_by_default() -> None:
    rig = Rig(DynamicScheduler, seats=3)
    for name in "ab":
        rig.add(name, max_tokens=1)
    rig.step()
    rig.engine.wait()
    assert rig.clock() == 0.05
    rig.finish()
    assert rig.history == ["a4 b4"]
    assert rows(DynamicScheduler, "a4+1 b4+1 c4+1 d4+1", seats=3) == ["a4 b4 c4", "d4"]


def test_dynamic_takes_statics_options() -> None:
    assert rows(DynamicScheduler, "a4+1 b4+2", seats=2, pad_to=3) == ["a4 b4", "b1 a~", "a~ b~"]
    assert rows(DynamicScheduler, "a4+1 b4+2", seats=2, drop_finished=True) == ["a4 b4", "b1"]


# ---- orca ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reserve", "blocks"),
    [
        ("max_tokens", 4),  # 8 + 6 - 1 = 13 slots
        ("pow2", 4),  # 8 + 8 - 1 = 15
        ("model_len", 10),  # 40
    ],
)
def test_orca_reserves(reserve: str, blocks: int) -> None:
    rig = Rig(OrcaScheduler, model_len=40, reserve=reserve)
    rig.add("a", 8, max_tokens=6)
    rig.step()
    assert len(rig.allocator.table(rig.seq("a").id)) == blocks
    rig.finish()
    assert len({id(out.rows[0].blocks) for out in rig.runner.outs}) == 1


def test_orca_reserves_powers_of_two() -> None:
    for max_tokens, slots in ((1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 16)):
        rig = Rig(OrcaScheduler, block_size=1, reserve="pow2")
        rig.add("a", 8, max_tokens=max_tokens)
        seq = rig.seq("a")
        assert rig.scheduler.reservation(seq) == 8 + slots - 1 >= seq.max_kv
        rig.finish()


def test_orca_stops_at_the_first_that_does_not_fit() -> None:
    """First come first served: "c" would fit beside "a"."""
    assert rows(OrcaScheduler, "a8+5 b20+5 c4+1", blocks=8) == [
        "a8",
        "a1",
        "a1",
        "a1",
        "a1",
        "b20 c4",
        "b1",
        "b1",
        "b1",
        "b1",
    ]


def test_orca_runs_whole_prompts_with_decodes() -> None:
    rig = Rig(OrcaScheduler, budget=10, seats=4)
    rig.add("a", 4, max_tokens=4)
    rig.step()
    for name in "bc":
        rig.add(name, 6, max_tokens=2)
    rig.finish()
    assert rig.history == ["a4", "a1 b6", "a1 b1 c6", "a1 c1"]


def test_orca_with_a_model_longer_than_the_pool_runs() -> None:
    rig = Rig(OrcaScheduler, blocks=8, model_len=1000, reserve="model_len")
    rig.add("a", 4, max_tokens=3)
    rig.add("b", 4, max_tokens=1)
    rig.step()
    assert len(rig.allocator.table(rig.seq("a").id)) == 8  # all there is
    rig.finish()
    assert rig.history == ["a4", "a1", "a1", "b4"]
    rig = Rig(OrcaScheduler, allocator=ContiguousAllocator, blocks=8, model_len=1000, reserve="model_len")
    rig.add("a", 4, max_tokens=29)
    rig.finish()


# ---- waiting-served ------------------------------------------------------------------------------------------------


def served(ratio: float, steps: int, newcomers: int, at: int = 2, **options) -> list[str]:
    """Four requests decode; after `at` steps others come."""
    rig = Rig(
        WaitingServedScheduler, seats=16, waiting_served_ratio=ratio, max_waiting_steps=steps, blocks=64, **options
    )
    for name in "abcd":
        rig.add(name, 4, max_tokens=12)
    for _ in range(at):
        rig.step()
    for name in "uvwxyz"[:newcomers]:
        rig.add(name, 4, max_tokens=1)
    rig.finish()
    return rig.history


def test_waiting_served_lets_enough_newcomers_join_and_prefills_them_alone() -> None:
    assert served(0.5, 100, 2)[1:4] == ["a1 b1 c1 d1", "u4 v4", "a1 b1 c1 d1"]
    assert served(1.2, 100, 4)[1:4] == ["a1 b1 c1 d1", "u4 v4 w4 x4", "a1 b1 c1 d1"]
    # floor(1.2 * 4) = 4 would have to wait.
    assert served(1.2, 100, 3)[1:] == ["a1 b1 c1 d1"] * 11 + ["u4 v4 w4"]


def test_waiting_served_lets_one_join_after_so_many_steps() -> None:
    history = served(1.2, 5, 1)
    assert history.index("u4") == 6  # the prefill, and 5 steps of decoding
    history = served(1.2, 0, 1)
    assert history.index("u4") == 2


def test_waiting_served_counts_who_would_fit_before_anything_runs() -> None:
    """Two wait and the ratio wants two, but only one of them fits: nobody is prefilled for one alone."""
    history = served(0.5, 100, 2, budget=16)
    assert history[2] == "u4 v4"
    assert served(0.5, 100, 2, budget=17)[2] == "u4 v4"
    rig = Rig(WaitingServedScheduler, blocks=5, seats=16, waiting_served_ratio=1.0, max_waiting_steps=100)
    for name in "ab":
        rig.add(name, 4, max_tokens=5)
    rig.step()
    for name in "uv":
        rig.add(name, 4, max_tokens=1)
    rig.finish()
    assert rig.history == ["a4 b4", *["a1 b1"] * 4, "u4 v4"]


def test_waiting_served_goes_on_with_a_long_prompt_before_all_else() -> None:
    rig = Rig(WaitingServedScheduler, budget=8, seats=8, waiting_served_ratio=0.0)
    rig.add("a", 4, max_tokens=3)
    rig.step()
    rig.add("b", 20, max_tokens=2)
    rig.step()
    rig.add("c", 4, max_tokens=1)
    rig.finish()
    assert rig.history == ["a4", "b8", "b8", "b4", "c4", "a1 b1", "a1"]


# ---- paged ---------------------------------------------------------------------------------------------------------


def test_paged_prefills_alone() -> None:
    rig = Rig(PagedScheduler)
    rig.add("a", 4, max_tokens=4)
    rig.step()
    rig.add("b", 4, max_tokens=3)
    rig.finish()
    assert rig.history == ["a4", "b4", "a1 b1", "a1 b1", "a1"]


def test_paged_takes_blocks_as_tokens_come() -> None:
    rig = Rig(PagedScheduler, blocks=8)
    rig.add("a", 3, max_tokens=7)
    held = []
    while rig.engine.has_unfinished():
        rig.step()
        held.append(8 - rig.engine.stats().num_free_blocks)
    assert held == [1, 1, 2, 2, 2, 2, 0]


def test_paged_preempts_the_newest() -> None:
    rig = Rig(PagedScheduler, blocks=6)
    for name in "abc":
        rig.add(name, 7, max_tokens=6)
    rig.finish()
    evictions = [(e.request_id, e.for_seq_id) for report in rig.reports for e in report.output.preempted]
    first_ids = {row.request.id: row.seq_id for row in rig.runner.outs[0].rows}
    assert evictions == [("c", first_ids["a"])]
    assert rig.history[:3] == ["a7 b7 c7", "a1 b1 c1", "a1 b1"]


def test_paged_leaves_the_watermark_free_while_others_run() -> None:
    def joined(watermark: int | None, blocks: int = 8) -> str:
        rig = Rig(PagedScheduler, blocks=blocks, watermark_blocks=watermark)
        for name in "abcd":
            rig.add(name, 8, max_tokens=1)
        rig.step()
        rig.finish()
        return rig.history[0]

    assert joined(0) == "a8 b8 c8 d8"
    assert joined(None) == "a8 b8 c8 d8"  # a hundredth of 8
    assert joined(1) == "a8 b8 c8"
    assert joined(2) == "a8 b8 c8"
    assert joined(3) == "a8 b8"
    assert joined(100) == "a8"  # alone it may always run
    assert Rig(PagedScheduler, blocks=250).scheduler.watermark_blocks == 2


# ---- chunked -------------------------------------------------------------------------------------------------------


def test_chunked_decodes_first_and_fills_the_budget() -> None:
    rig = Rig(ChunkedPrefillScheduler, seats=4, budget=8)
    rig.add("a", 2, max_tokens=6)
    rig.add("b", 12, max_tokens=2)
    rig.add("c", 3, max_tokens=2)
    rig.finish()
    assert rig.history == ["a2 b6", "a1 b6 c1", "a1 b1 c2", "a1 c1", "a1", "a1"]


def test_chunked_never_lets_a_decode_wait() -> None:
    rig = Rig(ChunkedPrefillScheduler, blocks=256, seats=6, budget=12)
    for i, (prompt, length) in enumerate([(1, 40), (30, 20), (50, 10), (2, 30), (40, 5), (25, 12)]):
        rig.add(f"r{i}", prompt, max_tokens=length)
    decoding: set[str] = set()
    while rig.engine.has_unfinished():
        news = {output.request_id for output in rig.step()}
        assert decoding <= news
        decoding = (decoding | news) - set(rig.finals)
    rig.finish()


# ---- all of them ---------------------------------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("budget", [1, 3, 8])
def test_prompts_longer_than_the_budget_run(policy, allocator, budget: int) -> None:
    rig = Rig(policy, allocator=allocator, seats=1 if budget == 1 else 3, budget=budget, **eager(policy))
    for name, prompt in (("a", 20), ("b", 2), ("c", 9), ("d", 8)):
        rig.add(name, prompt, max_tokens=5)
    rig.finish()
    assert max(out.num_tokens for out in rig.runner.outs) <= budget


@pytest.mark.parametrize("policy", [PagedScheduler, ChunkedPrefillScheduler])
def test_resumed_sequences_longer_than_the_budget_run(policy) -> None:
    rig = Rig(policy, blocks=12, seats=3, budget=6)
    for name in "abc":
        rig.add(name, 5, max_tokens=20)
    rig.finish()
    resumed = [row for out in rig.runner.outs for row in out.rows if row.num_output and row.num_tokens > 1]
    assert any(row.num_output + 5 > 6 for row in resumed)
    assert rig.engine.stats().num_preemptions > 0


@pytest.mark.parametrize("policy", RESERVING)
def test_reserving_policies_never_preempt(policy) -> None:
    for blocks in (6, 8, 13):
        rig = Rig(policy, blocks=blocks, seats=4, budget=16, **eager(policy))
        for i in range(8):
            rig.add(f"r{i}", 3 + i, max_tokens=12 - i)
        rig.finish()
        assert rig.engine.stats().num_preemptions == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_seats_bound_how_many_run(policy) -> None:
    rig = Rig(policy, seats=3, **eager(policy))
    for i in range(8):
        rig.add(f"r{i}", max_tokens=2 + i % 3)
    most = []
    rig.runner.before = lambda out: most.append(len(rig.scheduler.running))
    rig.finish()
    assert max(most) == 3


# ---- overriding ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_overriding_the_order(policy) -> None:
    class ShortestFirst(policy):
        def order(self, now):
            return sorted(self.waiting, key=lambda seq: seq.max_kv)

    rig = Rig(ShortestFirst, seats=1, **eager(policy))
    for name, length in (("a", 9), ("b", 3), ("c", 6)):
        rig.add(name, max_tokens=length)
    rig.finish()
    assert list(dict.fromkeys(row.request.id for out in rig.runner.outs for row in out.rows)) == ["b", "c", "a"]


@pytest.mark.parametrize("policy", [PagedScheduler, ChunkedPrefillScheduler])
def test_overriding_the_victims(policy) -> None:
    class LongestPromptGivesWay(policy):
        def victims(self, seq):
            return sorted(super().victims(seq), key=lambda other: -other.num_prompt)

    def gave_way(policy) -> str:
        rig = Rig(policy, blocks=6, seats=3)
        for name, prompt in (("a", 8), ("b", 7), ("c", 6)):
            rig.add(name, prompt, max_tokens=9)
        rig.finish()
        assert rig.history[:2] in (["a8 b7 c6", "a1 b1"], ["a8 b7 c6", "a1 c1"])
        return next(eviction.request_id for report in rig.reports for eviction in report.output.preempted)

    assert gave_way(policy) == "c"
    assert gave_way(LongestPromptGivesWay) == "b"


def test_overriding_may_leave() -> None:
    class InPairs(OrcaScheduler):
        def may_leave(self, seq) -> bool:
            return self.num_held >= 2 or len(self.running) == 1

    rig = Rig(InPairs)
    for name, length in (("a", 1), ("b", 3), ("c", 4)):
        rig.add(name, max_tokens=length)
    rig.finish()
    assert rig.history == ["a4 b4 c4", "a~ b1 c1", "a~ b1 c1", "c1"]
    # What is held was delivered, token by token; only its end comes later.
    assert [(len(o.new_token_ids), o.finished) for o in rig.outputs["a"]] == [(1, False), (0, True)]
    assert rig.finals["a"].timings.first_token == 1.0
    assert rig.finals["a"].timings.finished == 3.0


# ---- the verbs of a step -------------------------------------------------------------------------------------------


def test_the_two_naive_loops_do_what_they_say() -> None:
    class Naive(Scheduler):
        chunked = True

        def schedule(self, step) -> None:
            for seq in self.running:
                step.run(seq, victims=reversed(self.running))
            for seq in self.waiting:
                step.run(seq)

    assert rows(Naive, "a4+2 b4+3 c4+1") == ["a4 b4 c4", "a1 b1", "b1"]
    rig = Rig(Naive, blocks=6, seats=4, budget=64)
    for name in "abcd":
        rig.add(name, 4, max_tokens=12)
    rig.finish()
    assert rig.history[0] == "a4 b4 c4 d4"  # each of the waiting, although they leave the queue meanwhile
    # Each wants a second block, and two are free: the newest gives way for "c", and nobody else.
    assert rig.history[1] == "a1 b1 c1"
    assert [e.request_id for e in rig.reports[1].output.preempted] == ["d"]
    assert rig.engine.stats().num_preemptions > 1


class Told(OrcaScheduler):
    """Orca, but a test may say what to do in the next step."""

    act = None

    def schedule(self, step) -> None:
        if self.act is None:
            super().schedule(step)
        else:
            act, self.act = self.act, None
            act(step)


@pytest.mark.parametrize(
    ("allocator", "blocks", "too_few", "enough"),
    [(PagedAllocator, 8, ["", "b", "e"], "be"), (ContiguousAllocator, 6, ["", "b"], "e")],
)
def test_a_refused_run_with_victims_changed_nothing(allocator, blocks: int, too_few: list[str], enough: str) -> None:
    """Of 8 blocks, "b" and "e" hold one each; the holes before, between and behind them are 1, 3 and 2 blocks long."""
    rig = Rig(Told, allocator=allocator, blocks=8, seats=8)
    for name, held, length in (("a", 1, 1), ("b", 1, 4), ("c", 2, 1), ("d", 1, 1), ("e", 1, 4), ("f", 2, 1)):
        rig.add(name, 4 * held - length + 1, max_tokens=length)
    rig.step()
    b, e = rig.seq("b"), rig.seq("e")
    assert [list(rig.allocator.table(seq.id)) for seq in (b, e)] == [[1], [5]]
    assert rig.engine.stats().num_free_blocks == 6
    rig.add("wide", 4 * blocks, max_tokens=1)
    wide = rig.seq("wide")

    def act(step) -> None:
        before = rig.state(), step.tokens_left
        for names in too_few:
            offered = [rig.seq(name) for name in names]
            assert step.run(wide, victims=offered) is False
            assert step.refused is Refusal.BLOCKS
            assert (rig.state(), step.tokens_left) == before
            assert not step and wide not in step
        assert step.run(wide, victims=[rig.seq(name) for name in enough]) is True
        assert wide in step and step.tokens_left == before[1] - 4 * blocks

    rig.scheduler.act = act
    rig.step()
    assert sorted(e.request_id for e in rig.reports[-1].output.preempted) == sorted(enough)
    rig.finish()


def test_seats_are_refused_before_all_else_and_the_preempted_before_seats() -> None:
    rig = Rig(Told, blocks=4, seats=1, budget=12)
    rig.add("a", 4, max_tokens=4)
    rig.add("b", 12, max_tokens=3)  # neither its tokens nor its blocks would fit beside "a"
    rig.step()
    a, b = rig.seq("a"), rig.seq("b")

    def act(step) -> None:
        step.run(a)
        assert not step.run(b, reserve=b.max_kv)
        assert step.refused is Refusal.SEATS

    rig.scheduler.act = act
    rig.step()

    def act(step) -> None:
        step.preempt(a)
        assert a in rig.scheduler.waiting
        assert not step.run(a)
        assert step.refused is Refusal.PREEMPTED
        assert step.run(b, reserve=10**6)  # capped at the pool
        assert len(rig.allocator.table(b.id)) == 4
        assert not step.run(a)
        assert step.refused is Refusal.PREEMPTED

    rig.scheduler.act = act
    rig.step()
    rig.finish()
    assert rig.history == ["a4", "a1", "b12", "b1", "b1", "a6", "a1"]


def test_a_row_may_be_cut() -> None:
    rig = Rig(Told, budget=8)
    rig.add("a", 6, max_tokens=2)
    a = rig.seq("a")

    def act(step) -> None:
        assert not step.run(a, max_tokens=0)
        assert step.refused is Refusal.TOKENS
        assert step.run(a, max_tokens=4)

    rig.scheduler.act = act
    assert rig.step() == []
    rig.finish()
    assert rig.history == ["a4", "a2", "a1"]


def test_tokens_are_refused_before_blocks() -> None:
    said = []

    class Asks(Scheduler):
        def schedule(self, step) -> None:
            for seq in self.running:
                step.run(seq)
            for seq in self.waiting:
                if not step.run(seq, reserve=seq.max_kv):
                    said.append((seq.request.id, step.refused))

    rig = Rig(Asks, blocks=4, seats=3, budget=10)
    rig.add("a", 8, max_tokens=3)  # 3 of 4 blocks, 8 of 10 tokens
    rig.add("b", 8, max_tokens=3)
    rig.add("c", 2, max_tokens=7)
    rig.step()
    assert said == [("b", Refusal.TOKENS), ("c", Refusal.BLOCKS)]
    rig.finish()


def test_a_victim_may_give_its_seat() -> None:
    class Newest(Scheduler):
        def schedule(self, step) -> None:
            newest = max([*self.running, *self.waiting], key=lambda seq: seq.id)
            assert step.run(newest, victims=self.running)

    rig = Rig(Newest, seats=1)
    for name in "abc":
        rig.add(name, 4, max_tokens=2)
        rig.step()
    rig.finish()
    assert rig.history == ["a4", "b4", "c4", "c1", "b5", "a5"]


def test_a_queue_may_be_walked_while_those_ahead_leave_it() -> None:
    walked = []

    class Walks(OrcaScheduler):
        def schedule(self, step) -> None:
            if rig.clock() == 1:
                for seq in self.running:
                    walked.append(seq.request.id)
                    if seq.request.id == "b":
                        for name in "bcd":
                            step.preempt(rig.seq(name))
            super().schedule(step)

    rig = Rig(Walks)
    for name in "abcde":
        rig.add(name)
    rig.finish()
    assert "".join(walked) == "abe"


def test_victims_are_taken_one_at_a_time_and_read_only_as_needed() -> None:
    read = []

    class Reads(PagedScheduler):
        def victims(self, seq):
            for other in super().victims(seq):
                read.append(other.request.id)
                yield other

    rig = Rig(Reads, blocks=6, seats=3)
    for name in "abc":
        rig.add(name, 8, max_tokens=3)
    rig.step()
    assert read == []
    rig.step()
    # One block is wanted by each of "a" and "b"; "c" had two.
    assert read == ["c"]
    assert rig.history[-1] == "a1 b1"
    rig.finish()


def test_sequences_in_the_step_or_not_running_are_no_victims() -> None:
    class Offers(Scheduler):
        def schedule(self, step) -> None:
            for seq in self.running:
                step.run(seq)
            for seq in self.waiting:
                everybody = [*self.running, *self.waiting, seq]
                if not step.run(seq, reserve=seq.max_kv, victims=everybody):
                    break

    rig = Rig(Offers, blocks=8, seats=2)
    for name in "abcd":
        rig.add(name, 8, max_tokens=6)
    rig.finish()
    assert rig.engine.stats().num_preemptions == 0


def test_idle_rows_compute_the_last_position_again() -> None:
    rig = Rig(StaticScheduler)
    rig.add("a", 5, max_tokens=2)
    rig.add("b", 5, max_tokens=4)
    rig.finish()
    idle = [row for out in rig.runner.outs for row in out.rows if row.idle]
    assert len(idle) == 2
    output = rig.finals["a"].token_ids
    for row in idle:
        # The last sampled token was never computed; position 5 holds the first one.
        assert (row.start, row.num_tokens, row.token_ids, row.samples) == (5, 1, output[:1], False)


def test_status_and_seat_over_a_life() -> None:
    rig = Rig(StaticScheduler, seats=2)
    rig.add("a", 4, max_tokens=1)
    rig.add("b", 4, max_tokens=2)
    a, b = rig.seq("a"), rig.seq("b")
    assert (a.status, a.seat) == (Status.WAITING, -1)
    rig.step()
    assert (a.status, a.seat, b.status, b.seat) == (Status.HELD, 0, Status.RUNNING, 1)
    rig.step()
    assert (a.status, a.seat, b.status, b.seat) == (Status.FINISHED, -1, Status.FINISHED, -1)


@pytest.mark.parametrize(("declared", "max_model_len", "slots"), [(5, 64, 12 + 8 - 1), (9, 20, 20), (9, 64, 12 + 15)])
def test_a_power_of_two_beyond_the_models_length_is_not_reserved(declared, max_model_len, slots):
    scheduler = OrcaScheduler(PagedAllocator(32, 1), reserve="pow2", max_model_len=max_model_len)
    request = Request(id="a", prompt_token_ids=(1,) * 12, params=SamplingParams(), max_tokens=declared)
    assert scheduler.reservation(Sequence(request)) == slots
