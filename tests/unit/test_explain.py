"""`Step.explain`: why a waiting sequence was not admitted, in a sentence with the numbers."""

from __future__ import annotations

import pytest

from batchkit import (
    Blocked,
    ChunkedPrefillScheduler,
    ContiguousAllocator,
    OrcaScheduler,
    PagedScheduler,
    Refusal,
    Scheduler,
    SchedulerStalled,
    Step,
)
from unit.helpers import Rig


def sentences(rig: Rig) -> list[str]:
    rig.finish()
    return [str(report.output.blocked) for report in rig.reports if report.output.blocked]


def rig_with(policy: type = OrcaScheduler, **options) -> Rig:
    rig = Rig(policy, **options)
    rig.add("a", 8, max_tokens=5)
    rig.add("b", 8, max_tokens=5)
    return rig


def test_seats() -> None:
    assert sentences(rig_with(seats=1))[0] == "request 'b' waits for a seat: 0 are free"


def test_tokens() -> None:
    assert sentences(rig_with(seats=2, budget=12))[0] == (
        "request 'b' waits for the token budget: it needs 8, 4 are left"
    )


def test_blocks() -> None:
    # Each reserves 12 slots, 3 blocks of 4.
    assert sentences(rig_with(blocks=5))[0] == "request 'b' waits for KV blocks: it needs 3, 2 are free"


def test_blocks_that_are_free_but_not_side_by_side() -> None:
    rig = Rig(OrcaScheduler, blocks=8, allocator=ContiguousAllocator)
    for name in ("a", "b", "c", "d"):
        rig.add(name, 4, max_tokens=1 if name in "ac" else 5)  # 1 or 2 blocks
    rig.step()
    rig.add("e", 12, max_tokens=1)
    rig.step()
    assert str(rig.reports[-1].output.blocked) == (
        "request 'e' waits for KV blocks: it needs 3, 4 are free, but not side by side"
    )
    rig.finish()


def test_preempted() -> None:
    rig = Rig(ChunkedPrefillScheduler, blocks=6, seats=2, budget=24)
    rig.add("a", 8, max_tokens=16)
    rig.add("b", 8, max_tokens=16)
    assert "request 'b' was preempted in this step" in sentences(rig)


def test_the_policy_did_not_try() -> None:
    class OneByOne(OrcaScheduler):
        def schedule(self, step: Step) -> None:
            for seq in self.running or self.order(step.now):
                step.run(seq, reserve=seq.max_kv)
                break

    assert sentences(rig_with(OneByOne, blocks=16))[0] == (
        "request 'b' was not tried by the policy: it needs 8 tokens and 2 KV blocks; 2040 and 13 are free, and 15 seats"
    )


def test_nobody_waits() -> None:
    rig = Rig(PagedScheduler)
    rig.add("a")
    rig.finish()
    assert [report.output.blocked for report in rig.reports] == [None] * len(rig.reports)


class Curious(Scheduler):
    """Asks about everybody after trying them."""

    def schedule(self, step: Step) -> None:
        self.said: dict[str, Blocked | None] = {}
        waiting = list(self.waiting)
        self.before = step.explain()
        for seq in self.running:
            step.run(seq)
        for seq in waiting:
            step.run(seq)
        self.said = {seq.request.id: step.explain(seq) for seq in (*waiting, *self.running)}
        self.head = step.explain()


def test_a_policy_may_ask_about_any_sequence() -> None:
    rig = Rig(Curious, blocks=8, seats=2, budget=16)
    for name, length in (("a", 8), ("b", 12), ("c", 4), ("d", 4)):
        rig.add(name, length, max_tokens=3)
    rig.step()
    policy = rig.scheduler
    assert policy.before is not None
    assert (policy.before.request_id, policy.before.why) == ("a", None)  # not tried yet
    # b needs 12 tokens of the 8 that a left; c was admitted behind it; d has no seat.
    assert policy.said["a"] is None and policy.said["c"] is None
    assert policy.said["b"] == Blocked(
        request_id="b",
        why=Refusal.TOKENS,
        tokens_needed=12,
        tokens_left=4,
        blocks_needed=3,
        blocks_free=5,
        seats_free=0,
    )
    assert policy.said["d"] is not None and policy.said["d"].why is Refusal.SEATS
    assert policy.head == policy.said["b"]
    rig.finish()


def test_a_stall_says_why() -> None:
    class Lazy(Scheduler):
        def schedule(self, step: Step) -> None:
            """Admits nobody."""

    rig = Rig(Lazy)
    rig.add("a", 4)
    with pytest.raises(SchedulerStalled, match=r"Lazy chose nothing .* request 'a' was not tried by the policy"):
        rig.step()
