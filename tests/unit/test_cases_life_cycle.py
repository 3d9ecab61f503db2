"""Ids, aborts, life cycle, and the host program (cases 63 to 71)."""

from __future__ import annotations

import random

import pytest

from batchkit import (
    ChunkedPrefillScheduler,
    DuplicateRequest,
    OrcaScheduler,
    PagedAllocator,
    PagedScheduler,
    SamplingParams,
    StaticScheduler,
    Status,
)
from unit.helpers import PAIRS, POLICIES, PREEMPTING, Pieces, Rig, eager

everywhere = pytest.mark.parametrize(("policy", "allocator"), PAIRS)


class PreemptsA(PagedScheduler):
    """Preempts "a" once, after its second token, and keeps it out as long as `out` is set."""

    out = True

    def schedule(self, step) -> None:
        for seq in self.running:
            if seq.request.id == "a" and len(seq.output) == 2 and not seq.num_preemptions:
                step.preempt(seq)
        step.wait_until(step.now + 1)
        super().schedule(step)

    def order(self, now):
        return (seq for seq in self.waiting if not (seq.num_preemptions and self.out))


def in_state(state: str) -> Rig:
    """A rig whose request "a" is in this state, beside others."""
    if state == "mid-chunk":
        rig = Rig(ChunkedPrefillScheduler, budget=8, seats=4)
        rig.add("a", 20)
        rig.step()
        assert 0 < rig.seq("a").num_computed < 20
    elif state in ("preempted", "swapped out"):
        rig = Rig(PreemptsA, host_blocks=0 if state == "preempted" else 8)
        rig.add("a", 5)
        for _ in range(3):
            rig.step()
        assert (rig.seq("a").status, rig.seq("a").num_preemptions) == (Status.WAITING, 1)
        assert rig.host is None or rig.host.num_free_blocks == 6
    elif state == "held":
        rig = Rig(StaticScheduler)
        rig.add("a", 5, max_tokens=1)
        rig.add("b", 5)
        rig.step()
        assert rig.seq("a").status is Status.HELD
    else:
        rig = Rig(OrcaScheduler, seats=1 if state == "waiting" else 4)
        if state == "waiting":
            rig.add("b")
        if state != "unknown":
            rig.add("a")
        rig.step()
        if state == "finished":
            rig.run()
        elif state == "aborted":
            rig.engine.abort("a")
    for name in "bcd":
        if name not in rig.jobs:
            rig.add(name)
    return rig


LIVE = ["waiting", "mid-chunk", "running", "preempted", "swapped out", "held"]


@pytest.mark.parametrize("state", LIVE)
def test_second_request_with_a_live_id_is_refused(state: str) -> None:
    """Case 63: two live requests with one id gave wrong counts, a hang, or a crash."""
    rig = in_state(state)
    before = rig.state()
    with pytest.raises(DuplicateRequest, match="'a' is still alive"):
        rig.engine.add_request([1, 2, 3], request_id="a")
    assert rig.state() == before
    if hasattr(rig.scheduler, "out"):
        rig.scheduler.out = False
    rig.finish()


@pytest.mark.parametrize("state", ["unknown", *LIVE, "finished", "aborted"])
def test_abort_in_any_state_and_twice(state: str) -> None:
    """Case 66: abort of a waiting or an ended request, or a repeated one, stopped the loop or gave two last outputs."""
    rig = in_state(state)
    assert rig.engine.abort("a") is (state in LIVE)
    rig.engine.check()
    assert rig.engine.abort("a") is False
    if state in LIVE:
        last = rig.engine.step()
        assert [output.finish_reason for output in last if output.request_id == "a" and output.finished] == ["abort"]
        rig.keep(last)
    assert rig.engine.abort("a") is False
    finals = rig.finish(but=["a"])
    if state != "unknown":
        assert finals["a"].finish_reason == ("length" if state == "finished" else "abort")


@pytest.mark.parametrize("state", LIVE)
def test_an_aborted_request_gives_back_its_blocks_at_once(state: str) -> None:
    """Case 66: and its host blocks, and its seat."""
    rig = in_state(state)
    seq = rig.seq("a")
    free, held = rig.allocator.num_free_blocks, len(rig.allocator.table(seq.id))
    assert bool(held) == (state in ("mid-chunk", "running", "held"))
    rig.engine.abort("a")
    assert rig.allocator.num_free_blocks == free + held
    assert rig.host is None or rig.host.num_free_blocks == 8
    assert seq not in rig.scheduler.waiting and seq not in rig.scheduler.running
    assert (seq.status, seq.seat) == (Status.FINISHED, -1)


@pytest.mark.parametrize("state", LIVE)
def test_an_id_may_be_used_again_after_its_request_ended(state: str) -> None:
    rig = in_state(state)
    rig.engine.abort("a")
    rig.keep(rig.engine.step())
    assert rig.finals["a"].finish_reason == "abort"
    rig.add("a", 7, max_tokens=2)
    assert rig.finish()["a"].finish_reason == "length"


def test_an_id_may_be_used_again_before_the_last_output_was_taken() -> None:
    rig = Rig(OrcaScheduler)
    rig.add("a", max_tokens=5)
    rig.step()
    rig.engine.abort("a")
    rig.engine.add_request([9, 9], SamplingParams(temperature=0, max_tokens=2), request_id="a")
    outputs = [output for _ in range(2) for output in rig.engine.step()]
    assert [(output.finish_reason, len(output.token_ids)) for output in outputs] == [
        ("abort", 1),
        (None, 1),
        ("length", 2),
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_calls_of_generate_one_after_the_other(policy) -> None:
    """Case 65: the second call on an engine returned nothing, for its numbers had gone on counting."""
    rig = Rig(policy, seats=2, **eager(policy))
    params = SamplingParams(temperature=0, max_tokens=3)
    prompts = [[1], [2, 2], [3, 3, 3]]
    first = [output.token_ids for output in rig.engine.generate(prompts, params)]
    for count in [2, 0, 3] * 10:
        outputs = rig.engine.generate(prompts[:count], params)
        assert [output.prompt_token_ids for output in outputs] == [tuple(p) for p in prompts[:count]]
        assert [output.token_ids for output in outputs] == first[:count]
        assert not rig.engine.has_unfinished()
    rig.assert_empty()


@everywhere
@pytest.mark.parametrize("max_tokens", [1, 3])
def test_abort_in_the_step_that_ends_the_request(policy, allocator, max_tokens: int) -> None:
    """Case 67: it was reported as a normal end. What abort promised holds: one last output, and its reason is abort."""
    rig = Rig(policy, allocator=allocator, **eager(policy))
    rig.add("a", max_tokens=max_tokens)
    rig.add("b", max_tokens=6)
    promised = []

    def abort_in_the_last(out) -> None:
        if any(row.request.id == "a" and row.samples and row.num_output == max_tokens - 1 for row in out.rows):
            promised.append(rig.engine.abort("a"))

    rig.runner.before = abort_in_the_last
    finals = rig.finish(but=["a"])
    assert promised == [True]
    assert finals["a"].finish_reason == "abort"
    assert rig.engine.stats().finished == {"abort": 1, "length": 1}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("at", [1, 2, 3])
def test_abort_while_the_results_are_taken_in(policy, at: int) -> None:
    """Case 67: too late for this step's commit; of a request that this commit ends, it is the reason all the same."""

    class Aborts(Pieces):
        def decode(self, token_ids, *, skip_special_tokens: bool = True) -> str:
            if token_ids[-1:] == [at]:
                promised.append(rig.engine.abort("a"))
            return super().decode(token_ids)

    promised: list[bool] = []
    rig = Rig(policy, vocab=5, tokenizer=Aborts("_abcd"), script={"a": [1, 2, 3]}, **eager(policy))
    rig.add("a", [4], max_tokens=3)
    final = rig.run()["a"]
    rig.assert_empty()
    assert promised[0] is True and not any(promised[1:])
    assert (final.finish_reason, final.token_ids) == ("abort", (1, 2, 3)[:at])


@pytest.mark.parametrize("policy", POLICIES)
def test_abort_from_the_hook_of_the_last_step(policy) -> None:
    """Case 67: once the step is over the request has ended, and abort says so."""
    said = []
    rig = Rig(
        policy,
        on_step=lambda report: said.append(rig.engine.abort("a")) if report.num_finished else None,
        **eager(policy),
    )
    rig.add("a", max_tokens=2)
    assert rig.finish()["a"].finish_reason == "length"
    assert said == [False]


@pytest.mark.parametrize(
    ("policy", "allocator", "host_blocks"),
    [(*pair, 0) for pair in PAIRS] + [(policy, PagedAllocator, 3) for policy in PREEMPTING],
)
def test_aborts_while_the_pool_is_full(policy, allocator, host_blocks: int) -> None:
    """Case 69: a client that left while the cache was saturated ended the engine."""
    for seed in range(3):
        rng = random.Random(seed)
        rig = Rig(policy, allocator=allocator, blocks=10, host_blocks=host_blocks, seats=6, budget=24, **eager(policy))
        aborted = []
        for i in range(50):
            if rng.random() < 0.7:
                rig.add(f"r{i}", rng.randint(1, 15), max_tokens=rng.randint(1, 20))
            live = [name for name in rig.jobs if name not in rig.finals and name not in aborted]
            if live and rng.random() < 0.2:
                aborted.append(rng.choice(live))
                assert rig.engine.abort(aborted[-1])
            rig.step()
        finals = rig.finish(but=aborted)
        assert {name for name in finals if finals[name].finish_reason == "abort"} == set(aborted)
        assert aborted
        if policy in PREEMPTING:
            assert rig.engine.stats().num_preemptions > 0


@everywhere
def test_steps_before_the_first_request(policy, allocator) -> None:
    """Case 70: a loop that was started before the first request came died at once."""
    rig = Rig(policy, allocator=allocator, **eager(policy))
    for _ in range(3):
        assert rig.step() == []
        rig.engine.wait()
    assert rig.engine.generate([]) == []
    assert rig.clock() == 0.0 and rig.engine.stats().num_steps == 0
    rig.add("a")
    rig.finish()
    assert rig.step() == []


@pytest.mark.parametrize("policy", POLICIES)
def test_the_global_random_state_is_untouched(policy) -> None:
    """Case 71: seeding the engine froze or disturbed the caller's random numbers."""
    random.seed(71)
    before = random.getstate()
    rig = Rig(policy, **eager(policy))
    rig.add("a", temperature=1.0)
    rig.add("b", temperature=1.0, seed=5)
    rig.run()
    rig.engine.close()
    assert random.getstate() == before


def test_requests_without_a_seed_get_different_ones() -> None:
    """Case 71: a default seed made every process give the same "random" output."""
    seeds = []
    for _ in range(2):
        random.seed(0)
        rig = Rig(OrcaScheduler)
        for name in "abc":
            rig.add(name, temperature=1.0)
        rig.add("seeded", temperature=1.0, seed=7)
        seeds += [rig.seq(name).request.seed for name in "abc"]
        assert rig.seq("seeded").request.seed == 7
    assert len(set(seeds)) == 6
