"""The engine's ordinary face: loops, whole batches, figures."""

from __future__ import annotations

import random

import pytest

from batchkit import (
    ChunkedPrefillScheduler,
    DynamicScheduler,
    Engine,
    KVGeometry,
    MonotonicClock,
    OrcaScheduler,
    PagedAllocator,
    PagedScheduler,
    RequestTimings,
    SamplingParams,
    SimulatedRunner,
    StaticScheduler,
    WaitingServedScheduler,
)
from unit.helpers import PAIRS, POLICIES, PREEMPTING, Bytes, Pieces, Rig, eager, tokens

everywhere = pytest.mark.parametrize(("policy", "allocator"), PAIRS)


def params(max_tokens: int = 4, **options) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **options)


def plain(policy=OrcaScheduler, **options) -> Engine:
    geometry = KVGeometry(num_blocks=32, block_size=4, max_model_len=64, vocab_size=100)
    return Engine(SimulatedRunner(geometry), policy(PagedAllocator(32, 4)), **options)


# ---- the loop ------------------------------------------------------------------------------------------------------


@everywhere
def test_add_and_step_are_the_whole_loop(policy, allocator) -> None:
    rig = Rig(policy, allocator=allocator, blocks=24, seats=4, budget=16)
    lengths = {f"r{i}": 1 + (3 * i) % 11 for i in range(12)}
    for name, length in lengths.items():
        rig.add(name, 1 + length % 7, max_tokens=length)
    finals = rig.finish()
    assert {name: len(final.token_ids) for name, final in finals.items()} == lengths
    assert {final.finish_reason for final in finals.values()} == {"length"}


@everywhere
def test_requests_that_come_while_others_run(policy, allocator) -> None:
    rng = random.Random(3)
    rig = Rig(policy, allocator=allocator, blocks=24, seats=4, budget=16)
    for i in range(60):
        if i < 40 and rng.random() < 0.5:
            rig.add(f"r{i}", rng.randint(1, 20), max_tokens=rng.randint(1, 12))
        rig.step()
        rig.engine.wait()
    rig.finish()


def test_a_request_id_of_its_own() -> None:
    engine = plain()
    engine.add_request([1], request_id="request-2")
    ids = [engine.add_request([1]) for _ in range(3)]
    assert ids == ["request-1", "request-3", "request-4"]


def test_an_outputs_view_does_not_change_afterwards() -> None:
    rig = Rig(OrcaScheduler, vocab=Bytes.vocab, tokenizer=Bytes(), script={"a": list(b"hello")})
    rig.add("a", "x", max_tokens=5)
    rig.finish()
    assert [output.text for output in rig.outputs["a"]] == ["h", "he", "hel", "hell", "hello"]
    assert [output.token_ids for output in rig.outputs["a"]] == [tuple(b"hello"[:n]) for n in range(1, 6)]
    assert [output.outputs[0].num_tokens for output in rig.outputs["a"]] == [1, 2, 3, 4, 5]
    assert rig.finals["a"].prompt == "x"


@pytest.mark.parametrize("policy", [StaticScheduler, DynamicScheduler])
def test_policies_that_do_not_stream_deliver_once(policy) -> None:
    rig = Rig(policy, **eager(policy))
    for name, length in (("a", 2), ("b", 7), ("c", 4)):
        rig.add(name, max_tokens=length)
    finals = rig.finish()
    assert [len(life) for life in rig.outputs.values()] == [1, 1, 1]
    times = {(final.timings.first_token, final.timings.finished) for final in finals.values()}
    assert times == {(7.0, 7.0)}  # the batch's longest


@pytest.mark.parametrize(
    "policy", sorted(set(POLICIES) - {StaticScheduler, DynamicScheduler}, key=lambda p: p.__name__)
)
def test_policies_that_stream_deliver_each_token(policy) -> None:
    rig = Rig(policy)
    rig.add("a", max_tokens=5)
    for count in range(1, 6):
        (output,) = rig.step()
        assert (len(output.new_token_ids), output.finished) == (1, count == 5)


# ---- timings and figures -------------------------------------------------------------------------------------------


def test_timings() -> None:
    """Each step takes a second, and a step's tokens are there when it is over."""
    rig = Rig(OrcaScheduler, seats=1)
    rig.add("a", 4, max_tokens=3)
    rig.add("b", 4, max_tokens=2)
    rig.step()
    assert rig.outputs["a"][0].timings == RequestTimings(arrival=0.0, first_scheduled=0.0, first_token=1.0)
    rig.add("c", 4, max_tokens=1, arrival=0.25)
    finals = rig.finish()
    assert finals["a"].timings == RequestTimings(arrival=0.0, first_scheduled=0.0, first_token=1.0, finished=3.0)
    assert finals["b"].timings == RequestTimings(arrival=0.0, first_scheduled=3.0, first_token=4.0, finished=5.0)
    assert finals["c"].timings == RequestTimings(arrival=0.25, first_scheduled=5.0, first_token=6.0, finished=6.0)


def test_timings_of_one_that_was_aborted_before_it_ran() -> None:
    rig = Rig(OrcaScheduler, seats=1)
    rig.add("a")
    rig.add("b")
    rig.step()
    rig.engine.abort("b")
    rig.finish(but=["b"])
    assert rig.finals["b"].timings == RequestTimings(arrival=0.0, finished=1.0)


@pytest.mark.parametrize("host_blocks", [0, 8])
def test_timings_and_figures_of_a_preempted_request(host_blocks: int) -> None:
    rig = Rig(PagedScheduler, blocks=4, host_blocks=host_blocks)
    rig.add("a", 7, max_tokens=6)
    rig.add("b", 7, max_tokens=4)
    finals = rig.finish()
    # Both fill two blocks; at position 8 there is none for "a", so that "b" gives way with 8 tokens computed.
    assert rig.history == ["a7 b7", "a1 b1", *["a1"] * 4, *(["b1"] * 2 if host_blocks else ["b9", "b1"])]
    recomputed = 0 if host_blocks else 8
    assert finals["b"].timings == RequestTimings(
        arrival=0.0,
        first_scheduled=0.0,
        first_token=1.0,
        finished=8.0,
        num_preemptions=1,
        recomputed_tokens=recomputed,
    )
    assert finals["a"].timings.num_preemptions == finals["a"].timings.recomputed_tokens == 0
    stats = rig.engine.stats()
    assert (stats.num_steps, stats.num_preemptions, stats.recomputed_tokens) == (8, 1, recomputed)
    assert (stats.prompt_tokens, stats.generated_tokens) == (14, 10)
    assert stats.computed_tokens == 12 + 10 + recomputed
    assert (stats.peak_used_blocks, stats.num_free_blocks) == (4, 4)
    assert stats.finished == {"length": 2}


def test_stats_say_what_is_in_force() -> None:
    for policy in POLICIES:
        rig = Rig(policy, blocks=20, seats=3, budget=17)
        stats = rig.engine.stats()
        assert (stats.scheduler, stats.allocator) == (policy.__name__, "PagedAllocator")
        assert (stats.num_blocks, stats.block_size, stats.max_model_len) == (20, 4, 256)
        assert (stats.max_num_seqs, stats.max_tokens_per_step) == (3, 17)
        assert (stats.num_free_blocks, stats.num_waiting, stats.num_running) == (20, 0, 0)
    assert Rig(OrcaScheduler, blocks=20).engine.stats().max_num_seqs == 20
    assert Rig(OrcaScheduler, blocks=300).engine.stats().max_num_seqs == 256
    assert Rig(OrcaScheduler).engine.stats().max_tokens_per_step == 2048
    assert Rig(OrcaScheduler, seats=4000, blocks=8).engine.stats().max_tokens_per_step == 4000
    assert Rig(OrcaScheduler, budget=5).engine.stats().max_num_seqs == 5
    assert Rig(ChunkedPrefillScheduler).engine.stats().max_tokens_per_step == 512


def test_the_report_of_each_step() -> None:
    rig = Rig(OrcaScheduler, blocks=16, seats=2)
    rig.add("a", 5, max_tokens=1)
    rig.add("b", 5, max_tokens=2)
    rig.add("c", 3, max_tokens=2)
    rig.finish()
    figures = [
        (r.step, r.time, r.num_new_tokens, r.num_waiting, r.num_running, r.num_finished, r.num_used_blocks, r.kv_tokens)
        for r in rig.reports
    ]
    assert figures == [
        (1, 0.0, 2, 1, 1, 1, 4, 10),
        (2, 1.0, 2, 0, 1, 1, 3, 9),
        (3, 2.0, 1, 0, 0, 1, 1, 4),
    ]
    assert [report.output for report in rig.reports] == rig.runner.outs
    assert [report.output.num_tokens for report in rig.reports] == [10, 4, 1]
    assert all(report.error is None for report in rig.reports)
    assert all(min(r.schedule_s, r.execute_s, r.sample_s) >= 0 for r in rig.reports)


def test_the_report_says_why_the_first_was_refused() -> None:
    def refusals(**options) -> list[str | None]:
        rig = Rig(OrcaScheduler, **options)
        rig.add("a", 8, max_tokens=5)
        rig.add("b", 8, max_tokens=5)
        rig.finish()
        return [report.output.blocked and report.output.blocked.why.value for report in rig.reports]

    assert refusals(seats=1)[:5] == ["seats"] * 5
    assert refusals(seats=2, budget=12)[:2] == ["tokens", None]
    assert refusals(blocks=5)[:5] == ["blocks"] * 5


def test_there_is_no_report_of_a_step_without_work() -> None:
    rig = Rig(DynamicScheduler, max_wait_s=5.0)
    rig.step()
    rig.add("a")
    assert rig.step() == []  # it waits
    assert rig.reports == []


# ---- waiting -------------------------------------------------------------------------------------------------------


def test_a_step_never_sleeps_and_wait_does() -> None:
    rig = Rig(DynamicScheduler, max_wait_s=5.0, seats=4)
    rig.add("a", max_tokens=1, arrival=1.0)
    for _ in range(3):
        assert rig.step() == []
    assert rig.clock() == 0.0
    rig.engine.wait(2.5)
    assert rig.clock() == 2.5
    assert rig.step() == []
    rig.engine.wait()
    assert rig.clock() == 6.0
    rig.engine.wait()  # nothing more to wait for
    assert rig.clock() == 6.0
    (final,) = rig.step()
    assert final.timings == RequestTimings(arrival=1.0, first_scheduled=6.0, first_token=7.0, finished=7.0)


def test_others_may_call_while_wait_sleeps() -> None:
    class Clock:
        now = 0.0

        def __call__(self) -> float:
            return self.now

        def sleep_until(self, t: float) -> None:
            self.now = t
            engine.add_request([2], params(), request_id="late")

    engine = plain(DynamicScheduler, clock=Clock())
    engine.add_request([1], params())
    engine.step()
    engine.wait()
    assert engine.stats().num_waiting == 2


def test_the_default_clock_is_the_systems() -> None:
    engine = plain()
    before = MonotonicClock()()
    engine.add_request([1], params(1))
    (output,) = engine.step()
    assert before <= output.timings.arrival <= output.timings.finished <= MonotonicClock()()


# ---- generate ------------------------------------------------------------------------------------------------------


@everywhere
def test_generate_gives_the_outputs_in_the_order_of_the_prompts(policy, allocator) -> None:
    rig = Rig(policy, allocator=allocator, blocks=24, seats=4, budget=32)
    prompts = [tokens(f"p{i}", 1 + i % 5) for i in range(15)]
    lengths = [1 + (7 * i) % 10 for i in range(15)]
    outputs = rig.engine.generate(prompts, [params(length) for length in lengths])
    assert [output.prompt_token_ids for output in outputs] == [tuple(prompt) for prompt in prompts]
    assert [len(output.token_ids) for output in outputs] == lengths
    assert all(output.finished for output in outputs)
    rig.assert_empty()
    assert not rig.engine.has_unfinished()


def test_generate_takes_any_iterable() -> None:
    engine = plain()
    want = [output.token_ids for output in engine.generate([[1], [2], [3]], params())]
    for prompts in (([1], [2], [3]), iter([[1], [2], [3]]), ((i,) for i in (1, 2, 3)), map(list, [[1], [2], [3]])):
        assert [output.token_ids for output in engine.generate(prompts, params())] == want
    each = (params(n) for n in (1, 2, 3))
    assert [len(output.token_ids) for output in engine.generate(iter([[1], [2], [3]]), each)] == [1, 2, 3]
    assert engine.generate(iter([])) == []
    assert [len(output.token_ids) for output in engine.generate([[1] * 60])] == [4]  # up to the model's length


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("window", [1, 3])
def test_generate_keeps_to_its_window(policy, window: int) -> None:
    rig = Rig(policy, seats=8, **eager(policy))
    read = 0

    def prompts():
        nonlocal read
        for i in range(10):
            stats = rig.engine.stats()
            assert stats.num_waiting + stats.num_running < window
            read += 1
            yield [i]

    most = []
    rig.runner.before = lambda out: most.append(len(rig.scheduler.waiting) + len(rig.scheduler.running))
    outputs = rig.engine.generate(prompts(), params(3), window=window)
    assert [output.prompt_token_ids for output in outputs] == [(i,) for i in range(10)]
    assert max(most) == window
    assert read == 10


def test_generate_beside_other_requests_leaves_them_their_outputs() -> None:
    for policy in POLICIES:
        rig = Rig(policy, seats=8, **eager(policy))
        rig.add("before", max_tokens=3)
        rig.add("beyond", max_tokens=20)
        rig.step()
        outputs = rig.engine.generate([[1], [2]], params(5))
        assert [len(output.token_ids) for output in outputs] == [5, 5]
        assert rig.engine.has_unfinished()
        rig.finish()


def test_generate_does_not_take_anothers_last_output_for_its_own() -> None:
    """An id is free once its request has ended, also if nobody has taken the last output yet."""
    engine = plain()
    engine.add_request([7, 7], params(), request_id="request-1")
    engine.abort("request-1")
    (output,) = engine.generate([[1]], params(3))
    assert (output.prompt_token_ids, output.finish_reason, len(output.token_ids)) == ((1,), "length", 3)
    (other,) = engine.step()
    assert (other.request_id, other.prompt_token_ids, other.finish_reason) == ("request-1", (7, 7), "abort")


def test_a_request_of_generate_may_be_aborted() -> None:
    rig = Rig(OrcaScheduler)
    rig._on_step = lambda report: rig.engine.abort(report.output.rows[0].request.id) if report.step == 2 else None
    outputs = rig.engine.generate([[1], [2]], params(4))
    assert [(output.finish_reason, len(output.token_ids)) for output in outputs] == [("abort", 2), ("length", 4)]


def test_generate_from_text() -> None:
    geometry = KVGeometry(num_blocks=32, block_size=4, max_model_len=64, vocab_size=3)
    engine = Engine(SimulatedRunner(geometry), PagedScheduler(PagedAllocator(32, 4)), tokenizer=Pieces("abc"))
    outputs = engine.generate(["ab", [0, 1]], params(5))
    assert [output.prompt for output in outputs] == ["ab", None]
    assert outputs[0].token_ids == outputs[1].token_ids
    assert outputs[0].text == outputs[1].text == "".join("abc"[i] for i in outputs[0].token_ids)


@pytest.mark.parametrize("sized", [True, False])
def test_the_progress_bar_is_on_stderr(sized: bool, capsys) -> None:
    pytest.importorskip("tqdm")
    engine = plain()
    prompts = [[1], [2], [100]]
    engine.generate(prompts if sized else iter(prompts), params(), progress=True, on_error="return")
    shown = capsys.readouterr()
    assert shown.out == ""
    assert ("3/3" if sized else "3req") in shown.err
    engine.generate(prompts[:2], params())
    assert capsys.readouterr() == ("", "")


# ---- weights, and the end ------------------------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("host_blocks", [0, 16])
def test_changed_weights_need_everything_computed_anew(policy, allocator, host_blocks: int) -> None:
    rig = Rig(policy, allocator=allocator, blocks=16, host_blocks=host_blocks, seats=5, budget=32, **eager(policy))
    told = []
    rig.runner.weights_changed = lambda: told.append(len(rig.runner.outs))
    for i, name in enumerate("abcde"):
        rig.add(name, 6, max_tokens=6 + i)
    for _ in range(7):
        rig.step()
    computed = {seq.request.id: seq.num_computed for q in (rig.scheduler.waiting, rig.scheduler.running) for seq in q}
    held = rig.scheduler.num_held
    rig.engine.weights_changed()
    rig.engine.check()
    assert told == [7]
    assert not rig.scheduler.running
    assert rig.allocator.num_free_blocks == 16
    assert rig.host is None or rig.host.num_free_blocks == host_blocks
    assert all(seq.num_computed == 0 for seq in rig.scheduler.waiting)
    assert len(rig.scheduler.waiting) == len(computed) - held
    order = [seq.id for seq in rig.scheduler.waiting]
    assert order == sorted(order)
    rig.runner.lose_kv()  # nothing of the old may be read again
    rig.finish()


def test_close_gives_what_was_not_delivered() -> None:
    rig = Rig(StaticScheduler, seats=3)
    for name, length in (("held", 1), ("running", 9), ("gone", 9)):
        rig.add(name, max_tokens=length)
    rig.add("waiting")
    rig.step()
    rig.engine.abort("gone")
    outputs = {output.request_id: output for output in rig.engine.close()}
    assert set(outputs) == {"held", "running", "gone", "waiting"}
    assert {output.finish_reason for output in outputs.values()} == {"abort"}
    assert {name: len(output.token_ids) for name, output in outputs.items()} == {
        "held": 1,
        "running": 1,
        "gone": 1,
        "waiting": 0,
    }
    assert rig.engine.close() == []
    assert rig.runner.closed
    rig.assert_empty()


def test_leaving_the_with_block_after_an_exception_closes() -> None:
    rig = Rig(OrcaScheduler)
    with pytest.raises(ZeroDivisionError), rig.engine as engine:
        assert engine is rig.engine
        rig.add("a")
        rig.step()
        raise ZeroDivisionError
    assert rig.runner.closed
    rig.assert_empty()
    with rig.engine:  # closing twice is harmless
        pass


def test_a_runner_that_fails_to_close_leaves_the_engine_closed() -> None:
    rig = Rig(OrcaScheduler)
    rig.add("a")

    def fail() -> None:
        raise OSError("cannot close")

    rig.runner.close = fail
    with pytest.raises(OSError, match="cannot close"):
        rig.engine.close()
    assert rig.engine.close() == []
    rig.assert_empty()


def test_closing_from_the_hook() -> None:
    rig = Rig(OrcaScheduler)
    closed = []
    rig._on_step = lambda report: closed.extend(rig.engine.close())
    rig.add("a")
    rig.engine.add_request(tokens("b", 3), params(1), request_id="b")
    assert rig.engine.step() == []
    assert [(output.request_id, output.finish_reason) for output in closed if output.finished] == [
        ("b", "length"),
        ("a", "abort"),
    ]


def test_two_engines_never_meet() -> None:
    one, two = Rig(WaitingServedScheduler), Rig(PagedScheduler, blocks=8)
    for name in "abc":
        one.add(name, 5)
        two.add(name, 7)
    while one.engine.has_unfinished() or two.engine.has_unfinished():
        one.step()
        two.step()
    one.finish()
    two.finish()


@pytest.mark.parametrize("policy", PREEMPTING)
def test_seats_are_constant_while_a_sequence_runs(policy) -> None:
    rig = Rig(policy, blocks=10, seats=4, budget=24)
    for i in range(12):
        rig.add(f"r{i}", 3 + i % 5, max_tokens=6 + i % 7)
    seats: dict[int, int] = {}

    def watch(out) -> None:
        for eviction in out.preempted:
            seats.pop(eviction.seq_id, None)
        for row in out.rows:
            assert seats.setdefault(row.seq_id, row.seat) == row.seat
        taken = [row.seat for row in out.rows]
        assert len(set(taken)) == len(taken) and set(taken) <= set(range(4))

    rig.runner.before = watch
    rig.finish()
    assert rig.engine.stats().num_preemptions > 0


def test_a_request_keeps_the_metadata_that_it_came_with() -> None:
    rig = Rig()
    metadata = {"tenant": "a"}
    rig.add("first", metadata=metadata)
    metadata["tenant"] = "b"
    rig.add("second", metadata=metadata)
    assert [rig.seq(name).request.metadata["tenant"] for name in ("first", "second")] == ["a", "b"]
