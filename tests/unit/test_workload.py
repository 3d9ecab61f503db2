"""Loads played to an engine: sessions, prompts that depend on the seed alone, and an end before the end."""

from __future__ import annotations

import pytest

from batchkit import (
    ChunkedPrefillScheduler,
    Engine,
    KVGeometry,
    PagedAllocator,
    Session,
    SimulatedRunner,
    TrueLengths,
    VirtualClock,
    WorkloadRecord,
    play,
    simulate,
)


def engine(*, num_blocks=64, vocab_size=1000, eos=(), **options):
    clock = VirtualClock(100.0)
    geometry = KVGeometry(
        num_blocks=num_blocks, block_size=4, max_model_len=128, vocab_size=vocab_size, eos_token_ids=eos
    )
    allocator = PagedAllocator(num_blocks, 4, **options)
    runner = TrueLengths(SimulatedRunner(geometry, clock=clock, cost=lambda out: 1.0))
    return Engine(runner, ChunkedPrefillScheduler(allocator), clock=clock)


def turn(prompt=3, tokens=2, **more):
    return WorkloadRecord(prompt=prompt, max_tokens=tokens, **more)


def test_a_turn_comes_when_the_one_before_has_ended_and_the_client_has_thought():
    with engine() as run:
        found = list(play(run, [Session(turns=(turn(arrival=2.0), turn(), turn()), think_s=(10.0, 0.5))]))
    assert [one.turn for one in found] == [0, 1, 2]
    times = [one.output.timings for one in found]
    assert times[0].arrival == 102.0
    assert times[1].arrival == times[0].finished + 10.0
    assert times[2].arrival == times[1].finished + 0.5


def test_a_conversation_repeats_all_that_was_said():
    with engine() as run:
        first, second, third = simulate(
            run, [Session(turns=(turn([7, 8]), turn([9]), turn([5])), think_s=(0.0, 0.0), keeps_context=True)]
        )
    assert second.prompt_token_ids == (7, 8, *first.token_ids, 9)
    assert third.prompt_token_ids == (*second.prompt_token_ids, *second.token_ids, 5)


def test_a_conversation_finds_its_prefix():
    load = [Session(turns=(turn(32), turn(4)), think_s=(1.0,), keeps_context=True)]
    with engine(prefix_caching=True) as run:
        _, second = simulate(run, load)
    assert second.timings.cached_tokens == 32


def test_a_prompt_depends_on_the_seed_and_its_place_alone():
    load = [turn(5), Session(turns=(turn(6), turn(7)), think_s=(3.0,)), turn(8, arrival=50.0)]
    later = [turn(5, arrival=9.0), Session(turns=(turn(6), turn(7, tokens=4)), think_s=(0.0,)), turn(8)]
    with engine() as run:
        prompts = [output.prompt_token_ids for output in simulate(run, load, seed=1)]
    with engine() as run:
        assert [output.prompt_token_ids for output in simulate(run, later, seed=1)] == prompts
    with engine() as run:
        assert [output.prompt_token_ids for output in simulate(run, load, seed=2)] != prompts
    assert [len(prompt) for prompt in prompts] == [5, 6, 7, 8]


@pytest.mark.parametrize("eos", [(), (3,)])
def test_a_request_ends_where_its_record_says(eos):
    with engine(vocab_size=4, eos=eos) as run:
        outputs = simulate(run, [turn(tokens=20, output_tokens=tokens) for tokens in (1, 7, 20)])
    assert [output.outputs[0].num_tokens for output in outputs] == [1, 7, 20]
    assert [output.finish_reason for output in outputs] == ["stop", "stop", "length"]


def test_time_runs_out_for_what_is_not_done():
    load = [turn(tokens=2), turn(tokens=50), turn(arrival=4.5), turn(arrival=99.0)]
    with engine() as run:
        found = {one.session: one.output for one in play(run, load, until_s=5.0)}
        assert not run.has_unfinished()
        assert run.clock() <= 107.0
    assert found.keys() == {0, 1, 2}
    assert [found[i].finish_reason for i in range(3)] == ["length", "abort", "abort"]
    assert found[1].outputs[0].num_tokens == 5


def test_what_comes_at_once_is_played_at_its_times():
    with engine() as run:
        outputs = simulate(run, [turn(arrival=7.0), turn(arrival=0.0), turn(arrival=-1.0)])
    assert [output.timings.arrival for output in outputs] == [107.0, 100.0, 99.0]
    assert [output.timings.first_scheduled for output in outputs] == [107.0, 100.0, 100.0]


def test_nothing_is_played_of_nothing():
    with engine() as run:
        assert simulate(run, []) == []


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Session(turns=()), "at least one turn"),
        (lambda: Session(turns=(turn(), turn())), "2 turns need 1 times to think"),
        (lambda: Session(turns=(turn(), turn()), think_s=(-1.0,)), "think_s must be finite and at least 0"),
        (lambda: Session(turns=(turn(), turn(arrival=1.0)), think_s=(0.0,)), "turn 2 of a session"),
        (lambda: turn(0), "at least 1 token, got 0"),
        (lambda: turn(arrival=float("nan")), "arrival must be a time"),
        (lambda: turn(tokens=3, output_tokens=4), r"between 1 and max_tokens \(3\), got 4"),
    ],
)
def test_what_makes_no_sense_is_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()
