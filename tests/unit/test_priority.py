"""Priorities: who goes first, who gives way, and what ageing promises. A step takes one second."""

from __future__ import annotations

import math
import random

import pytest

from batchkit import PriorityScheduler
from unit.helpers import Rig

ways = pytest.mark.parametrize("host_blocks", [0, 16], ids=["recompute", "swap"])


def started(rig: Rig) -> list[str]:
    """Names by their first row."""
    return list(dict.fromkeys(row.request.id for out in rig.runner.outs for row in out.rows))


def running(rig: Rig) -> set[str]:
    return {seq.request.id for seq in rig.scheduler.running}


def test_the_lowest_number_goes_first_and_equals_as_they_came() -> None:
    rig = Rig(PriorityScheduler, seats=1)
    rig.add("now", max_tokens=2, priority=-9)
    rig.step()
    for name, priority in (("a", 2), ("b", 0), ("c", 1), ("d", 0), ("e", -1), ("f", 1)):
        rig.add(name, max_tokens=2, priority=priority)
    rig.finish()
    assert started(rig) == ["now", "e", "b", "d", "c", "f", "a"]
    assert rig.engine.stats().num_preemptions == 0


@ways
def test_a_seat_is_taken_from_the_least_urgent_and_not_from_an_equal(host_blocks: int) -> None:
    rig = Rig(PriorityScheduler, seats=3, host_blocks=host_blocks)
    for name, priority in (("a", 1), ("b", 3), ("c", 2)):
        rig.add(name, max_tokens=20, priority=priority)
    rig.step()
    rig.add("equal", max_tokens=2, priority=3)
    rig.step()
    assert running(rig) == {"a", "b", "c"}
    rig.add("urgent", max_tokens=20, priority=0)
    rig.step()
    assert running(rig) == {"a", "c", "urgent"}
    rig.add("next", max_tokens=20, priority=1)
    rig.step()
    assert running(rig) == {"a", "urgent", "next"}  # it comes later than "a", and before "c"
    finals = rig.finish()
    assert {name: finals[name].timings.num_preemptions for name in finals} == {
        "a": 0,
        "b": 1,
        "c": 1,
        "equal": 0,
        "urgent": 0,
        "next": 0,
    }


@ways
def test_who_gives_way_for_memory_leaves_the_step_with_its_blocks_and_budget(host_blocks: int) -> None:
    """Case 18: one placed in the batch was evicted in the same step, and the batch had more rows than were running."""
    rig = Rig(PriorityScheduler, blocks=5, host_blocks=host_blocks, seats=2, budget=16)
    rig.add("low", 8, max_tokens=8, priority=1)
    rig.add("high", 8, max_tokens=8, priority=0)
    while rig.engine.has_unfinished():
        rig.step()
        out = rig.runner.outs[-1]
        ids = [row.seq_id for row in out.rows]
        assert len(set(ids)) == len(ids) and set(ids).isdisjoint(gone.seq_id for gone in out.preempted)
        assert sum(row.num_tokens for row in out.rows) == out.num_tokens <= 16
        assert all(len(row.blocks) * 4 >= row.start + row.num_tokens for row in out.rows)
    # With one block free both need one in the second step: it goes to "high", and "low" leaves the step.
    assert rig.history[:2] == ["high8 low8", "high1"]
    finals = rig.finish()
    assert [finals[name].timings.num_preemptions for name in ("high", "low")] == [0, 1]


@ways
def test_a_preempted_request_keeps_its_place_among_equals_under_a_steady_load(host_blocks: int) -> None:
    """Case 29: a preempted request lost its place to newcomers and was computed over and over."""
    rig = Rig(PriorityScheduler, blocks=12, host_blocks=host_blocks, seats=6, budget=64)
    names = []
    for step in range(300):
        if step % 2 == 0:
            names.append(rig.add(f"r{step:03}", 6, max_tokens=10, priority=5))
        rig.step()
    finals = rig.finish()
    assert rig.engine.stats().num_preemptions > 0
    # One gives way to older ones only, of which at most five run beside it, and to each but once for a block.
    assert max(final.timings.num_preemptions for final in finals.values()) <= 5
    ended = sorted(names, key=lambda name: finals[name].timings.finished)
    assert max(abs(ended.index(name) - i) for i, name in enumerate(names)) <= 6
    assert started(rig) == names


def test_waiting_outweighs_a_level() -> None:
    # At 10 seconds a level, "low" goes before "high" if it has waited more than 20 seconds longer.
    for arrival, order in ((19.5, ["high", "low"]), (20.5, ["low", "high"])):
        rig = Rig(PriorityScheduler, seats=1, ageing_s_per_level=10)
        rig.add("now", max_tokens=22, priority=-9)
        rig.step()
        rig.add("low", max_tokens=2, priority=2, arrival=0.0)
        rig.add("high", max_tokens=2, priority=0, arrival=arrival)
        rig.finish()
        assert started(rig)[1:] == order


def test_one_that_has_waited_is_next_and_takes_no_place_from_a_better_one() -> None:
    rig = Rig(PriorityScheduler, seats=1, ageing_s_per_level=2)
    rig.add("high", max_tokens=6, priority=0)
    rig.step()
    rig.add("low", max_tokens=6, priority=3, arrival=-20.0)
    rig.step()
    assert rig.scheduler.rank(rig.seq("low")) < rig.scheduler.rank(rig.seq("high"))
    rig.add("later", max_tokens=2, priority=0)
    rig.finish()
    assert started(rig) == ["high", "low", "later"]
    assert rig.engine.stats().num_preemptions == 0


def test_without_ageing_who_comes_later_goes_first_for_ever() -> None:
    rig = Rig(PriorityScheduler, seats=1, ageing_s_per_level=math.inf)
    rig.add("low", max_tokens=2, priority=1)
    for number in range(100):
        rig.add(str(number), max_tokens=3, priority=0)
        rig.step()
        rig.step()
    assert rig.seq("low").num_computed == 0 and rig.seq("low").num_preemptions == 0
    rig.finish()
    assert started(rig)[-1] == "low"


@ways
@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_two_never_changes_and_none_is_preempted_for_a_worse_one(host_blocks: int, seed: int) -> None:
    rig = Rig(PriorityScheduler, blocks=16, host_blocks=host_blocks, seats=5, budget=24, ageing_s_per_level=8)
    rng = random.Random(seed)
    ranks: dict[int, tuple[float, int]] = {}
    for step in range(200):
        if rng.random() < 0.3:
            rig.add(str(step), rng.randint(1, 20), max_tokens=rng.randint(1, 24), priority=rng.randint(-1, 2))
        for queue in (rig.scheduler.waiting, rig.scheduler.running):
            for seq in queue:
                assert ranks.setdefault(seq.id, rig.scheduler.rank(seq)) == rig.scheduler.rank(seq)
        rig.step()
        for gone in rig.runner.outs[-1].preempted if rig.runner.outs else ():
            assert gone.for_seq_id is not None and ranks[gone.for_seq_id] < ranks[gone.seq_id]
    rig.finish()
    assert rig.engine.stats().num_preemptions
