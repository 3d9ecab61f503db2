"""What happens when something fails: who ends, who goes on, and that nothing is lost."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest

from batchkit import (
    ChunkedPrefillScheduler,
    EngineFailed,
    InvariantError,
    KVLost,
    OrcaScheduler,
    PagedScheduler,
    RowResult,
    RunnerOutOfMemory,
    SamplingParams,
    SchedulerStalled,
    StaticScheduler,
)
from unit.helpers import PAIRS, POLICIES, PREEMPTING, RESERVING, Bytes, Pieces, Rig, eager

everywhere = pytest.mark.parametrize(("policy", "allocator"), PAIRS)
swapping = pytest.mark.parametrize("policy", PREEMPTING)


def fill(rig: Rig, count: int = 6, *, prompt: int = 6, max_tokens: int = 10) -> Rig:
    for i in range(count):
        rig.add("abcdefghij"[i], prompt + i % 3, max_tokens=max_tokens - i % 4)
    return rig


def has(out, *names: str) -> bool:
    return any(row.request.id in names for row in out.rows)


def errors_of(rig: Rig) -> dict[str, str | None]:
    return {name: final.error for name, final in rig.finals.items() if final.finish_reason == "error"}


# ---- execute -------------------------------------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("when", ["before all rows", "in mid-row", "after all rows"])
def test_a_runner_that_fails_now_and_then_loses_nothing(policy, allocator, when: str) -> None:
    for seed in range(2):
        rng = random.Random(seed)
        rig = fill(Rig(policy, allocator=allocator, blocks=12, seats=4, budget=16, **eager(policy)))
        failed = [False]

        def now_and_then(out, rng=rng, rig=rig, failed=failed) -> None:
            failed[0] = not failed[0] and rng.random() < 0.4
            if failed[0]:
                # What was computed of the step has left its traces in the KV cache.
                count = {"before all rows": 0, "in mid-row": rng.randint(0, len(out.rows))}.get(when, len(out.rows))
                rig.runner.compute(out, count)
                raise OSError("the device hiccuped")

        rig.runner.before = now_and_then
        rig.finish()
        reported = [report.error for report in rig.reports if report.error is not None]
        assert len(reported) > 3
        assert {str(error) for error in reported} == {"the device hiccuped"}


@everywhere
def test_a_request_that_always_fails_ends_alone(policy, allocator) -> None:
    for bad in "af":
        rig = fill(Rig(policy, allocator=allocator, blocks=16, seats=6, budget=64, **eager(policy)))

        def on_one(out, bad=bad) -> None:
            if has(out, bad):
                raise OSError(f"cannot compute {bad}")

        rig.runner.before = on_one
        rig.finish(but=[bad])
        assert errors_of(rig) == {bad: f"OSError: cannot compute {bad}"}
        assert rig.finals[bad].token_ids == ()


@everywhere
@pytest.mark.parametrize("bad", ["be", "abdef"])
@pytest.mark.parametrize("later", [False, True])
def test_several_requests_that_always_fail_end_alone(policy, allocator, bad: str, later: bool) -> None:
    rig = fill(Rig(policy, allocator=allocator, blocks=32, seats=6, budget=64, **eager(policy)))

    def on_several(out) -> None:
        if any(row.request.id in bad and row.num_output >= 2 * later for row in out.rows):
            raise OSError(f"cannot compute {bad}")

    rig.runner.before = on_several
    rig.finish(but=list(bad))
    assert set(errors_of(rig)) == set(bad)
    for name in bad:  # what they had was delivered
        assert len(rig.finals[name].token_ids) == 2 * later
        assert rig.finals[name].token_ids == rig.alone(name).token_ids[: 2 * later]


def test_failing_rows_are_found_by_halves() -> None:
    rig = fill(Rig(OrcaScheduler, blocks=64, seats=8, budget=128), 8)

    def on_one(out) -> None:
        if has(out, "c"):
            raise OSError("no")

    rig.runner.before = on_one
    rig.step()  # planned anew
    rig.step()
    # Each part is executed once more; a part that works is kept, and executed no further.
    sizes = [len(out.rows) for out in rig.runner.outs]
    assert sizes == [8, 8, 8, 4, 2, 2, 1, 1, 4]
    assert all(out.copies == () for out in rig.runner.outs)
    assert [len(rig.outputs[name]) for name in "abcdefgh"] == [1] * 8
    assert rig.engine.stats().computed_tokens == sum(len(ids) for name, (ids, _) in rig.jobs.items() if name != "c")
    rig.finish(but=["c"])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_dead_runner_ends_at_most_two_requests(policy) -> None:
    """With many rows in the step it ends none; and the requests are still there, to be stepped, aborted or closed."""

    def dead(out) -> None:
        raise OSError("the device is gone")

    rig = fill(Rig(policy, blocks=64, seats=8, budget=128, **eager(policy)))
    rig.step()
    rig.runner.before = dead
    rig.keep(rig.engine.step())
    for _ in range(3):
        with pytest.raises(EngineFailed, match=r"each of 6 rows .* last: OSError: the device is gone"):
            rig.step()
        assert len(rig.scheduler.running) == 6
    assert rig.engine.abort("b")
    rig.runner.before = None  # it came back
    rig.finish(but=["b"])
    assert rig.finals["b"].finish_reason == "abort"


def test_a_dead_runner_under_one_row_at_a_time() -> None:
    def dead(out) -> None:
        raise OSError("the device is gone")

    rig = fill(Rig(OrcaScheduler, seats=1, budget=64), 5)
    rig.runner.before = dead
    with pytest.raises(EngineFailed, match=r"each of 1 rows .* 2 requests before them"):
        for _ in range(20):
            rig.step()
    assert set(errors_of(rig)) == {"a", "b"}
    assert len(rig.scheduler.running) + len(rig.scheduler.waiting) == 3
    outputs = rig.engine.close()
    assert {output.request_id: output.finish_reason for output in outputs} == dict.fromkeys("cde", "abort")
    rig.assert_empty()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_that_failed_is_planned_anew(policy) -> None:
    """What arrived or was aborted in between counts."""

    def once(out) -> None:
        rig.runner.before = None
        raise OSError("once")

    rig = Rig(policy, seats=4, budget=64, **eager(policy))
    rig.add("a")
    rig.add("b")
    rig.runner.before = once
    assert rig.step() == []
    rig.engine.abort("b")
    rig.add("c")
    rig.finish(but=["b"])
    assert all(not has(out, "b") for out in rig.runner.outs[1:])


@pytest.mark.parametrize("policy", [*RESERVING, PagedScheduler])
def test_a_joining_step_that_failed_is_served_next_under_whole_prompt_policies(policy) -> None:
    def when_b_joins(out) -> None:
        if has(out, "b"):
            rig.runner.before = None
            raise OSError("once")

    rig = Rig(policy, seats=4, budget=32, **eager(policy))
    rig.add("a", 4, max_tokens=6)
    rig.step()
    rig.add("b", 9, max_tokens=6)
    rig.add("c", 9, max_tokens=6)
    rig.runner.before = when_b_joins
    while rig.runner.before is not None:
        rig.step()
    assert not rig.seq("b").output
    rig.add("d", 9, max_tokens=6)  # a newcomer does not come before it
    rig.step()
    assert len(rig.seq("b").output) == 1
    rig.finish()


# ---- one row -------------------------------------------------------------------------------------------------------


def give(got, index: int, **changes):
    rows = list(got.rows)
    rows[index] = rows[index]._replace(**changes)
    return got._replace(rows=tuple(rows))


@everywhere
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"error": "the row is bad"}, "the row is bad"),
        ({"token_ids": (1000,)}, "the runner sampled token 1000, the vocabulary has 1000"),
        ({"token_ids": (-1,)}, "the runner sampled token -1, the vocabulary has 1000"),
        ({"token_ids": ()}, "the runner sampled 0 tokens where 1 was due"),
        ({"token_ids": (1, 2)}, "the runner sampled 2 tokens where 1 was due"),
    ],
)
def test_one_bad_row_ends_its_request_alone(policy, allocator, changes, message: str) -> None:
    rig = fill(Rig(policy, allocator=allocator, blocks=32, seats=6, budget=64, **eager(policy)))

    def bad_row(out, got):
        for i, row in enumerate(out.rows):
            if row.request.id == "c" and row.num_output == 3 and not row.idle:
                got = give(got, i, **changes)
        return got

    rig.runner.after = bad_row
    rig.finish(but=["c"])
    assert errors_of(rig) == {"c": message}
    assert rig.finals["c"].token_ids == rig.alone("c").token_ids[:3]


def test_a_token_of_a_row_that_does_not_sample_ends_its_request() -> None:
    rig = Rig(ChunkedPrefillScheduler, budget=8)
    rig.add("a", 20)
    rig.add("b", 4)
    rig.runner.after = lambda out, got: give(got, 0, token_ids=(1,)) if not out.rows[0].samples else got
    rig.finish(but=["a"])
    assert errors_of(rig) == {"a": "the runner sampled 1 tokens where 0 was due"}


@pytest.mark.parametrize("change", [lambda rows: rows[:-1], lambda rows: (*rows, RowResult((1,)))])
def test_wrong_number_of_results(change) -> None:
    """Once: the step is done again. Always: no row is right, and EngineFailed says so."""
    rig = fill(Rig(OrcaScheduler, blocks=64, seats=6, budget=64))

    def once(out, got):
        rig.runner.after = None
        return got._replace(rows=change(got.rows))

    rig.runner.after = once
    rig.finish()
    rig = fill(Rig(OrcaScheduler, blocks=64, seats=6, budget=64))
    rig.runner.after = lambda out, got: got._replace(rows=change(got.rows))
    rig.step()
    with pytest.raises(EngineFailed, match=r"the runner returned \d results for 1 rows"):
        rig.step()
    rig.runner.after = None
    rig.finish()


class Stumbling(Bytes):
    """Cannot decode byte 200."""

    def decode(self, token_ids, *, skip_special_tokens: bool = True) -> str:
        if 200 in token_ids:
            raise LookupError("no byte 200")
        return super().decode(token_ids)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_tokenizer_that_fails_on_one_request(policy) -> None:
    script = {name: [65 + i % 26 for i in range(8)] for name in "abc"}
    script["b"] = [66, 200, 66, 66, 66, 66, 66, 66]
    rig = Rig(policy, vocab=Bytes.vocab, tokenizer=Stumbling(), script=script, **eager(policy))
    for name in "abc":
        rig.add(name, "text", max_tokens=8)
    rig.finish(but=["b"])
    assert set(errors_of(rig)) == {"b"}
    assert "LookupError: no byte 200" in rig.finals["b"].error
    assert rig.finals["b"].text == "B"


def test_a_tokenizer_that_fails_at_the_end_of_an_aborted_request() -> None:
    class AtTheEnd(Pieces):
        broken = False

        def decode(self, token_ids, *, skip_special_tokens: bool = True) -> str:
            if self.broken:
                raise LookupError("no more")
            return super().decode(token_ids)

    tokenizer = AtTheEnd(["a", "b", "\ufffd"])
    rig = Rig(OrcaScheduler, vocab=3, tokenizer=tokenizer, script={"a": [1, 2, 2, 2]})
    rig.add("a", "a")
    rig.step()
    rig.step()
    tokenizer.broken = True
    assert rig.engine.abort("a")
    (final,) = rig.step()
    assert (final.finish_reason, final.text) == ("abort", "b")
    rig.assert_empty()


# ---- memory --------------------------------------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("limit", [1, 3, 7])
def test_out_of_memory_above_a_size(policy, allocator, limit: int) -> None:
    rig = fill(Rig(policy, allocator=allocator, blocks=24, seats=4, budget=16, **eager(policy)))

    def above(out) -> None:
        assert out.num_tokens == sum(row.num_tokens for row in out.rows)
        if out.num_tokens > limit:
            raise RunnerOutOfMemory(f"{out.num_tokens} tokens are too many")

    rig.runner.before = above
    rig.finish()
    failed = [report.output.num_tokens for report in rig.reports if report.error is not None]
    assert failed and max(failed) <= 16


def test_the_budget_is_halved_and_grows_back() -> None:
    rig = Rig(ChunkedPrefillScheduler, blocks=128, seats=4, budget=64)
    rig.add("a", 200, max_tokens=1)
    rig.runner.before = lambda out: rig.clock() < 2 and out.num_tokens > 10 and fail(RunnerOutOfMemory("too many"))

    def fail(error) -> None:
        raise error

    rig.finish()
    assert [out.num_tokens for out in rig.runner.outs] == [64, 32, 16, 8, 16, 8, 16, 32, 64, 64, 8]


def test_out_of_memory_with_a_single_token_ends_that_request() -> None:
    for bad, policy in (("a", OrcaScheduler), ("c", OrcaScheduler), ("b", PagedScheduler), ("b", StaticScheduler)):
        rig = fill(Rig(policy, blocks=32, seats=4, budget=32), 4)

        def on_one(out, bad=bad) -> None:
            if has(out, bad):
                raise RunnerOutOfMemory("too large")

        rig.runner.before = on_one
        rig.finish(but=[bad])
        assert errors_of(rig) == {bad: "RunnerOutOfMemory: too large"}


@pytest.mark.parametrize("policy", POLICIES)
def test_out_of_memory_whatever_the_size(policy) -> None:
    def always(out) -> None:
        raise RunnerOutOfMemory("no memory at all")

    rig = fill(Rig(policy, blocks=64, seats=8, budget=64, **eager(policy)))
    rig.runner.before = always
    with pytest.raises(EngineFailed, match="no memory at all"):
        for _ in range(100):
            rig.step()
    assert len(errors_of(rig)) == 2
    assert len(rig.scheduler.waiting) + len(rig.scheduler.running) == 4
    rig.runner.before = None
    rig.finish(but=list(errors_of(rig)))


# ---- the KV cache --------------------------------------------------------------------------------------------------


@swapping
@pytest.mark.parametrize("when", ["before", "in the middle", "after"])
def test_copies_that_fail_now_and_then_lose_nothing(policy, when: str) -> None:
    rng = random.Random(0)
    rig = fill(Rig(policy, blocks=8, host_blocks=8, seats=6, budget=32))

    def now_and_then(copies) -> None:
        if rng.random() < 0.5:
            done = {"before": 0, "in the middle": len(copies) // 2}.get(when, len(copies))
            before, rig.runner.before_copy = rig.runner.before_copy, None
            rig.runner.copy_blocks(copies[:done])
            rig.runner.before_copy = before
            raise OSError("the bus failed")

    rig.runner.before_copy = now_and_then
    rig.finish()
    reported = [str(report.error) for report in rig.reports if report.error is not None]
    assert reported and set(reported) == {"copying KV blocks failed: the bus failed"}


@everywhere
def test_a_lost_kv_cache_is_computed_anew(policy, allocator) -> None:
    rig = fill(Rig(policy, allocator=allocator, blocks=16, seats=4, budget=32, **eager(policy)))

    def lost(out) -> None:
        if len(rig.runner.outs) in (2, 3, 7):
            rig.runner.lose_kv()
            raise KVLost("the device was reset")

    rig.runner.before = lost
    rig.finish()
    assert rig.engine.stats().recomputed_tokens > 0
    assert sum(isinstance(report.error, KVLost) for report in rig.reports) == 3


def test_a_lost_kv_cache_takes_what_was_swapped_out_with_it() -> None:
    rig = fill(Rig(PagedScheduler, blocks=8, host_blocks=16, seats=6, budget=64))
    while rig.host.num_free_blocks == 16:
        rig.step()

    def lost(out) -> None:
        rig.runner.before = None
        raise KVLost("the device was reset")

    rig.runner.before = lost
    order = sorted(seq.request.id for queue in (rig.scheduler.running, rig.scheduler.waiting) for seq in queue)
    rig.step()
    assert rig.host.num_free_blocks == 16
    assert rig.allocator.num_free_blocks == 8
    assert rig.names(rig.scheduler.waiting).split() == order
    rig.finish()


def test_held_rows_end_when_the_kv_cache_is_lost() -> None:
    rig = Rig(StaticScheduler)
    rig.add("short", max_tokens=1)
    rig.add("long", max_tokens=6)
    rig.step()
    assert rig.scheduler.num_held == 1

    def lost(out) -> None:
        rig.runner.before = None
        raise KVLost("the device was reset")

    rig.runner.before = lost
    assert [output.request_id for output in rig.step()] == ["short"]
    rig.finish()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_kv_cache_that_is_always_lost(policy) -> None:
    def lost(out) -> None:
        raise KVLost("gone again")

    rig = fill(Rig(policy, blocks=64, seats=6, budget=64, **eager(policy)))
    rig.runner.before = lost
    rig.step()
    rig.step()
    with pytest.raises(EngineFailed, match="lost 3 times in a row: gone again"):
        rig.step()
    rig.runner.before = None
    rig.finish()
    assert errors_of(rig) == {}


def test_a_broken_invariant_is_raised_and_never_handled() -> None:
    def stale(out) -> None:
        raise InvariantError("a row reads what was never written")

    rig = fill(Rig(OrcaScheduler))
    rig.runner.before = stale
    for _ in range(3):
        with pytest.raises(InvariantError, match="never written"):
            rig.step()
    rig.runner.before = None
    rig.finish()


# ---- the policy ----------------------------------------------------------------------------------------------------


class Breaks(PagedScheduler):
    """Paged, but a few of its answers are an exception, at the place named."""

    place = ""
    calls = 0

    def broken(self, place: str) -> None:
        if place == self.place:
            self.calls += 1
            if self.calls in (2, 5, 9, 20):
                raise ZeroDivisionError(f"in {place}")

    def schedule(self, step) -> None:
        self.broken("schedule")
        if self.place.endswith("preempt") and len(self.running) > 1:
            self.calls += 1
            if self.calls in (2, 5, 9, 20):
                newest = self.running[-1]
                if self.place == "after preempt":
                    step.preempt(newest)
                raise ZeroDivisionError(f"in {self.place}")
        super().schedule(step)
        self.broken("after schedule")

    def order(self, now):
        self.broken("order")
        for seq in super().order(now):
            yield seq
            self.broken("mid-order")

    def victims(self, seq):
        self.broken("victims")
        return super().victims(seq)


@pytest.mark.parametrize(
    "place",
    ["schedule", "after schedule", "before preempt", "after preempt", "order", "mid-order", "victims"],
)
@pytest.mark.parametrize("host_blocks", [0, 2, 16])
def test_a_policy_that_raises_loses_nothing(place: str, host_blocks: int) -> None:
    rig = fill(Rig(Breaks, blocks=8, host_blocks=host_blocks, seats=6, budget=32))
    rig.scheduler.place = place
    raised = 0
    for _ in range(500):
        if not rig.engine.has_unfinished():
            break
        try:
            rig.step()
        except ZeroDivisionError:
            raised += 1
    rig.finish()
    assert raised > 1


def test_may_leave_that_raises_loses_nothing() -> None:
    class Stays(OrcaScheduler):
        calls = 0

        def may_leave(self, seq) -> bool:
            self.calls += 1
            if self.calls in (1, 2, 5):
                raise ZeroDivisionError("in may_leave")
            return True

    rig = fill(Rig(Stays, blocks=64))
    raised = 0
    for _ in range(100):
        if not rig.engine.has_unfinished():
            break
        try:
            rig.step()
        except ZeroDivisionError:
            raised += 1
    rig.finish()
    assert raised == 3


def test_a_stall_names_the_numbers_and_can_be_mended() -> None:
    class Refuses(PagedScheduler):
        refuses = True

        def schedule(self, step) -> None:
            if not self.refuses:
                super().schedule(step)

    rig = fill(Rig(Refuses, blocks=8, seats=4, budget=32))
    with pytest.raises(SchedulerStalled) as stalled:
        rig.step()
    for part in (
        "Refuses",
        "6 waiting",
        "0 running",
        "8 of 8 blocks free",
        "4 of 4 seats free",
        "32 tokens left",
        "'a'",
    ):
        assert part in str(stalled.value)
    rig.scheduler.refuses = False
    rig.step()
    rig.step()
    rig.scheduler.refuses = True
    with pytest.raises(SchedulerStalled, match=r"running \(0 held\)"):
        rig.step()
    rig.scheduler.refuses = False
    rig.finish()


# ---- hooks, interrupts, and whole batches --------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_hook_that_raises_loses_no_output(policy) -> None:
    def on_step(report) -> None:
        if report.step % 2:
            raise ZeroDivisionError("in the hook")

    rig = fill(Rig(policy, on_step=on_step, **eager(policy)))
    raised = 0
    for _ in range(100):
        if not rig.engine.has_unfinished():
            break
        try:
            rig.step()
        except ZeroDivisionError:
            raised += 1
    rig.finish()
    assert raised > 2


@everywhere
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_out_of_execute_leaves_a_usable_engine(policy, allocator, when: str) -> None:
    rig = fill(Rig(policy, allocator=allocator, blocks=12, seats=4, budget=16, **eager(policy)))

    def interrupt(out) -> None:
        if len(rig.runner.outs) % 3 == 2:
            if when == "after":
                rig.runner.compute(out)
            raise KeyboardInterrupt

    rig.runner.before = interrupt
    interrupted = 0
    for _ in range(500):
        if not rig.engine.has_unfinished():
            break
        try:
            rig.step()
            rig.engine.wait()
        except KeyboardInterrupt:
            interrupted += 1
    rig.finish()
    assert interrupted > 2


class TakesTurns(PagedScheduler):
    """One runs, and each second step another one, so that blocks go out and come in at once."""

    calls = 0

    def schedule(self, step) -> None:
        self.calls += 1
        if self.calls % 2 and self.running and self.waiting:
            oldest = list(self.waiting)[-1]
            step.preempt(self.running[0])
            step.run(oldest, reserve=oldest.num_tokens)
        if not step:
            super().schedule(step)


@pytest.mark.parametrize("policy", [TakesTurns, *PREEMPTING])
@pytest.mark.parametrize("part", [0, 1, 2])
def test_an_interrupt_out_of_copy_blocks_leaves_a_usable_engine(policy, part: int) -> None:
    """None, half, or all of the copies were made when it came; whatever is repeated must not harm."""
    tight = {"blocks": 4, "seats": 1} if policy is TakesTurns else {"blocks": 8, "seats": 6}
    rig = fill(Rig(policy, host_blocks=24, budget=32, **tight), 6 if policy is TakesTurns else 10)
    rng = random.Random(part)
    interrupted = 0

    def interrupt(copies) -> None:
        nonlocal interrupted
        if rng.random() < 0.5:
            interrupted += 1
            hook, rig.runner.before_copy = rig.runner.before_copy, None
            rig.runner.copy_blocks(copies[: len(copies) * part // 2])
            rig.runner.before_copy = hook
            raise KeyboardInterrupt

    rig.runner.before_copy = interrupt
    for _ in range(500):
        if not rig.engine.has_unfinished():
            break
        with suppress(KeyboardInterrupt):
            rig.step()
    rig.finish()
    assert interrupted > 1


def interrupts(rig: Rig, where: str):
    """Make something in the middle of `generate` raise KeyboardInterrupt; the prompts to give it."""
    prompts = [[i + 1] * 4 for i in range(6)]

    def interrupt(*_) -> None:
        raise KeyboardInterrupt

    def in_third(out) -> None:
        if len(rig.runner.outs) == 4:
            interrupt()

    def prompts_that_raise():
        yield from prompts[:3]
        interrupt()

    if where == "execute":
        rig.runner.before = in_third
    elif where == "prompts":
        return prompts_that_raise()
    elif where == "hook":
        rig._on_step = lambda report: interrupt() if report.step == 4 else None
    return prompts


@pytest.mark.parametrize("where", ["execute", "prompts", "hook", "bar"])
@pytest.mark.parametrize("policy", [OrcaScheduler, PagedScheduler, ChunkedPrefillScheduler])
def test_generate_interrupted_aborts_what_it_started_and_keeps_what_is_others(policy, where: str, monkeypatch) -> None:
    rig = Rig(policy, blocks=32, seats=8, budget=32)
    rig.add("other", 4, max_tokens=9)
    rig.add("ends", 4, max_tokens=2)
    rig.step()
    prompts = interrupts(rig, where)
    if where == "bar":
        tqdm = pytest.importorskip("tqdm")

        def interrupt(self, n: float = 1) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(tqdm.tqdm, "update", interrupt)
    with pytest.raises(KeyboardInterrupt):
        rig.engine.generate(prompts, SamplingParams(temperature=0, max_tokens=3), progress=where == "bar", window=4)
    rig.runner.before = rig._on_step = None
    rig.engine.check()
    alive = {seq.request.id for queue in (rig.scheduler.waiting, rig.scheduler.running) for seq in queue}
    assert alive <= {"other", "ends"}
    rig.finish()


@pytest.mark.parametrize("policy", RESERVING)
def test_a_failing_request_in_a_batch_gives_an_output_with_its_error(policy) -> None:
    rig = Rig(policy, blocks=64, seats=8, budget=64, **eager(policy))

    def on_one(out) -> None:
        if any(row.request.prompt_token_ids == (3, 3) for row in out.rows):
            raise OSError("cannot compute 3")

    rig.runner.before = on_one
    outputs = rig.engine.generate([[i, i] for i in range(6)], SamplingParams(temperature=0, max_tokens=3))
    assert [output.finish_reason for output in outputs] == ["length"] * 3 + ["error"] + ["length"] * 2
    assert outputs[3].error == "OSError: cannot compute 3"
    assert [output.prompt_token_ids for output in outputs] == [(i, i) for i in range(6)]


def test_generate_on_a_dead_runner_aborts_what_it_started() -> None:
    def dead(out) -> None:
        raise OSError("the device is gone")

    rig = Rig(OrcaScheduler, blocks=64, seats=8)
    rig.runner.before = dead
    with pytest.raises(EngineFailed):
        rig.engine.generate([[i, i] for i in range(6)], SamplingParams(max_tokens=3))
    assert not rig.engine.has_unfinished()
    rig.assert_empty()
