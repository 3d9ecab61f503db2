"""Workloads: the 2023 experiment's lists, distributions, who sends what when, and what a load adds up to."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    simulate,
)
from batchkit.experiment import loads
from batchkit.experiment.loads import Requests, Workload

SMALL = Requests(prompts=loads.uniform(1, 9), outputs=loads.exponential(4, 12))

EVERY_KIND = [
    loads.all_at_once(SMALL, num_requests=7),
    loads.open_loop(SMALL, num_requests=7, arrivals=loads.poisson(2)),
    loads.closed_loop(SMALL, clients=3, requests_per_client=2, think=loads.exponential_think(1.5)),
    loads.conversations(
        SMALL, sessions=2, turns_each=3, prefix_tokens=5, think=loads.fixed_think(2), arrivals=loads.evenly(4)
    ),
]
every_kind = pytest.mark.parametrize("workload", EVERY_KIND, ids=["at_once", "open", "closed", "conversations"])


def requests_of(workload: Workload, seed: int) -> list[WorkloadRecord]:
    return [record for record, _ in loads.turns(workload.make(seed))]


# --- lengths ---------------------------------------------------------------------------------------------------------


def rank(values: list[int], percent: float) -> float:
    """A percentile by linear interpolation."""
    place = (len(values) - 1) * percent / 100
    low = math.floor(place)
    ordered = sorted(values)
    return ordered[low] + (place - low) * (ordered[min(low + 1, len(values) - 1)] - ordered[low])


@pytest.mark.parametrize(
    ("cap", "seats", "n", "mean", "p50", "p90", "p99", "longest", "total", "steps_global", "steps_batch", "zeros"),
    [
        (32, 16, 1008, 15.67, 16, 29, 32, 32, 15_799, 2_016, 1_929, 20),
        (128, 12, 1008, 54.94, 49, 110, 127, 128, 55_377, 10_752, 9_478, 7),
        (512, 8, 1000, 122.11, 91, 286, 464, 510, 122_107, 63_750, 39_458, 1),
        (1536, 4, 1000, 129.57, 92, 299, 567, 843, 129_569, 210_750, 66_942, 1),
    ],
)
def test_the_lists_of_the_2023_experiment(
    cap, seats, n, mean, p50, p90, p99, longest, total, steps_global, steps_batch, zeros
) -> None:
    """The figures published for the authors' lists; the zeros stand in them as zeros."""
    lengths = loads.original_lengths(cap, n)
    assert (len(lengths), sum(lengths), max(lengths), lengths.count(0)) == (n, total, longest, zeros)
    assert round(sum(lengths) / n, 2) == mean
    assert (round(median(lengths)), round(rank(lengths, 90)), round(rank(lengths, 99))) == (p50, p90, p99)
    batches = [lengths[first : first + seats] for first in range(0, n, seats)]
    assert len(batches) * longest == steps_global
    assert sum(max(batch) for batch in batches) == steps_batch


def test_the_2023_list_as_a_workload_is_the_same_for_every_seed_and_runs_zeros_as_1() -> None:
    requests = Requests(prompts=loads.fixed(512), outputs=loads.original(32))
    workload = loads.all_at_once(requests, num_requests=1008)
    load = workload.make(0)
    assert load == workload.make(1)
    facts = loads.facts(load)
    assert (facts.output_tokens, facts.num_raised) == (15_799 + 20, 20)
    assert "20 lengths of 0 run as 1" in facts.describe()


@given(mean=st.floats(0.5, 60), cap=st.integers(1, 100), seed=st.integers(0, 99))
def test_exponential_lengths_are_rejected_and_not_clipped(mean: float, cap: int, seed: int) -> None:
    """What is kept is what a longer list without a cap holds at or below the cap, in its order."""
    kept = loads.exponential_lengths(20, mean=mean, cap=cap, rng=random.Random(seed))
    free = loads.exponential_lengths(6000, mean=mean, cap=10**9, rng=random.Random(seed))
    assert kept == [length for length in free if length <= cap][:20]


def test_a_cap_that_rejects_nearly_everything_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mean 1e\+06 only one in 666,667 is 1 or below"):
        loads.exponential(1e6, 1)


@given(low=st.integers(1, 50), more=st.integers(0, 50), seed=st.integers())
def test_uniform_lengths_stay_between_their_ends(low: int, more: int, seed: int) -> None:
    lengths = loads.uniform(low, low + more).draw(50, random.Random(seed))
    assert low <= min(lengths) <= max(lengths) <= low + more


def test_uniform_lengths_reach_both_ends() -> None:
    assert set(loads.uniform(3, 5).draw(100, random.Random(0))) == {3, 4, 5}


# --- arrivals --------------------------------------------------------------------------------------------------------


@given(rate=st.floats(0.01, 100), seed=st.integers())
def test_another_rate_stretches_the_same_poisson_arrivals(rate: float, seed: int) -> None:
    times = loads.poisson(rate).draw(30, random.Random(seed))
    assert times == sorted(times)
    assert times[0] > 0
    once = loads.poisson(1).draw(30, random.Random(seed))
    assert [time * rate for time in times] == pytest.approx(once)


def test_poisson_arrivals_have_their_rate_and_the_spread_of_an_exponential() -> None:
    times = loads.poisson(4).draw(20_000, random.Random(1))
    gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    assert 20_000 / times[-1] == pytest.approx(4, rel=0.02)
    assert sum(gap > 0.25 for gap in gaps) / 20_000 == pytest.approx(math.exp(-1), abs=0.01)


def test_even_burst_and_recorded_arrivals() -> None:
    rng = random.Random(0)
    assert loads.evenly(4).draw(3, rng) == [0, 0.25, 0.5]
    assert loads.burst().draw(3, rng) == [0, 0, 0]
    assert loads.recorded([10.0, 12.0, 12.0, 20.0], speed=2).draw(3, rng) == [0, 1, 1]
    with pytest.raises(ValueError, match="5 requests, and 4 arrivals are recorded"):
        loads.recorded([10.0, 12.0, 12.0, 20.0]).draw(5, rng)
    with pytest.raises(ValueError, match=r"number 2 is at 11.0 s, the one before at 12.0 s"):
        loads.recorded([10.0, 12.0, 11.0])


# --- workloads -------------------------------------------------------------------------------------------------------


@every_kind
def test_the_same_seed_gives_the_same_load_and_another_one_another(workload: Workload) -> None:
    assert workload.make(3) == workload.make(3)
    assert workload.make(3) != workload.make(4)
    assert "\n" not in workload.name


def test_a_load_is_the_same_in_every_process() -> None:
    """The hash of strings differs between processes; nothing may depend on it."""
    code = (
        "from batchkit.experiment import loads as l\n"
        "r = l.Requests(prompts=l.uniform(1, 9), outputs=l.exponential(4, 12), prediction_sigma=0.5)\n"
        "print(l.conversations(r, sessions=3, turns_each=2, prefix_tokens=4, arrivals=l.poisson(3),"
        " think=l.exponential_think(2)).make(5))"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1
    assert "keeps_context=True" in said.pop()


def test_a_rate_or_a_declared_length_changes_nothing_else() -> None:
    """Else two points of a sweep would differ by chance too."""
    slow = requests_of(loads.open_loop(SMALL, num_requests=9, arrivals=loads.poisson(1)), 0)
    declared = Requests(prompts=SMALL.prompts, outputs=SMALL.outputs, declared=16, prediction_sigma=0.3)
    fast = requests_of(loads.open_loop(declared, num_requests=9, arrivals=loads.poisson(8)), 0)
    assert [(r.prompt, r.output_tokens) for r in slow] == [(r.prompt, r.output_tokens) for r in fast]
    assert [r.max_tokens for r in slow] == [r.output_tokens for r in slow]
    assert {r.max_tokens for r in fast} == {16}


@every_kind
def test_an_engine_gets_the_lengths_that_a_load_names(workload: Workload) -> None:
    geometry = KVGeometry(num_blocks=64, block_size=4, max_model_len=128, vocab_size=1000)
    clock = VirtualClock()
    runner = TrueLengths(SimulatedRunner(geometry, clock=clock))
    load = workload.make(0)
    with Engine(runner, ChunkedPrefillScheduler(PagedAllocator(64, 4)), clock=clock) as engine:
        outputs = simulate(engine, load)
    given = [(len(output.prompt_token_ids), output.outputs[0].num_tokens) for output in outputs]
    assert given == [(prompt, record.output_tokens) for record, prompt in loads.turns(load)]
    facts = loads.facts(load)
    assert (len(given), *map(sum, zip(*given, strict=True))) == (
        facts.num_requests,
        facts.prompt_tokens,
        facts.output_tokens,
    )


def test_an_output_longer_than_declared_is_refused() -> None:
    requests = Requests(prompts=loads.fixed(4), outputs=loads.fixed(9), declared=8)
    with pytest.raises(ValueError, match=r"between 1 and max_tokens \(8\), got 9"):
        loads.all_at_once(requests, num_requests=1).make(0)


def test_a_closed_loop_has_a_session_for_each_client() -> None:
    load = EVERY_KIND[2].make(0)
    assert len(load) == 3
    begins = []
    for session in load:
        assert isinstance(session, Session)
        assert not session.keeps_context
        assert (len(session.turns), len(session.think_s)) == (2, 1)
        assert session.think_s[0] > 0
        begins.append(session.turns[0].arrival)
    assert len(set(begins)) == 3, "each begins by thinking"


def test_conversations_begin_alike_and_keep_what_was_said() -> None:
    load = EVERY_KIND[3].make(0)
    first, second = load
    assert isinstance(first, Session)
    assert isinstance(second, Session)
    assert first.keeps_context
    assert (first.turns[0].arrival, second.turns[0].arrival) == (0, 0.25)
    assert first.think_s == second.think_s == (2.0, 2.0)
    mine, theirs = first.turns[0].prompt, second.turns[0].prompt
    assert not isinstance(mine, int)
    assert not isinstance(theirs, int)
    assert mine[:5] == theirs[:5]
    assert mine[5:] != theirs[5:]
    lengths = [prompt for _, prompt in loads.turns([first])]
    expected = len(mine)
    for number, turn in enumerate(first.turns):
        assert lengths[number] == expected
        if number + 1 < len(first.turns):
            following = first.turns[number + 1].prompt
            assert isinstance(following, int)
            assert turn.output_tokens is not None
            expected += turn.output_tokens + following


# --- predictions -----------------------------------------------------------------------------------------------------


def test_predictions_have_the_error_that_was_asked_for() -> None:
    requests = Requests(prompts=loads.fixed(1), outputs=loads.fixed(1000), declared=10**6, prediction_sigma=0.5)
    records = requests_of(loads.all_at_once(requests, num_requests=4000), 0)
    errors = [math.log(record.predicted / 1000) for record in records if record.predicted]
    assert len(errors) == 4000
    mean = sum(errors) / 4000
    assert mean == pytest.approx(0, abs=0.03)
    assert math.sqrt(sum((error - mean) ** 2 for error in errors) / 4000) == pytest.approx(0.5, rel=0.05)


@given(sigma=st.floats(0, 3), seed=st.integers(0, 9))
def test_predictions_are_between_1_and_what_is_declared(sigma: float, seed: int) -> None:
    records = loads.with_predictions(SMALL.make(seed, [0.0] * 20), sigma, seed)
    for record in records:
        assert record.predicted is not None
        assert 1 <= record.predicted <= record.max_tokens
        assert sigma or record.predicted == record.output_tokens


# --- facts -----------------------------------------------------------------------------------------------------------


def test_facts_of_an_open_loop() -> None:
    records = [
        loads.make_record(10, 3, max_tokens=8, arrival=1),
        loads.make_record(0, 0, arrival=2),
        loads.make_record(5, 7, arrival=5),
    ]
    assert loads.facts(records) == loads.LoadFacts(
        num_requests=3,
        prompt_tokens=16,
        output_tokens=11,
        longest_output=7,
        longest_declared=8,
        span_s=4,
        offered_per_s=0.5,
        num_raised=2,
    )


def test_facts_of_sessions_count_what_is_repeated_and_have_no_rate() -> None:
    session = Session(
        turns=tuple(WorkloadRecord(prompt=p, max_tokens=9, output_tokens=o) for p, o in ((10, 3), (2, 4))),
        think_s=(1.0,),
        keeps_context=True,
    )
    facts = loads.facts([session, loads.make_record(1, 1, arrival=3)])
    assert (facts.num_requests, facts.prompt_tokens, facts.output_tokens) == (3, 10 + 15 + 1, 8)
    assert (facts.span_s, facts.offered_per_s) == (3, None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: loads.fixed(0), "a length must be"),
        (lambda: loads.uniform(0, 3), "got 0 and 3"),
        (lambda: loads.uniform(4, 3), "got 4 and 3"),
        (lambda: loads.exponential(0, 3), "the mean length must be .* got 0"),
        (lambda: loads.exponential(3, 0), "cap of exponential lengths must be at least 1, got 0"),
        (lambda: loads.poisson(0), "the rate must be .* got 0"),
        (lambda: loads.evenly(math.nan), "the rate must be .* got nan"),
        (lambda: loads.recorded([0.0], speed=-1), "the speed must be .* got -1"),
        (lambda: loads.fixed_think(-1), "at least 0, got -1"),
        (lambda: Requests(prompts=loads.fixed(1), outputs=loads.fixed(1), declared=0), "declared must be .* got 0"),
        (lambda: Requests(prompts=loads.fixed(1), outputs=loads.fixed(1), prediction_sigma=-1.0), "sigma .* got -1"),
        (lambda: loads.all_at_once(SMALL, num_requests=0), "num_requests must be .* got 0"),
        (lambda: loads.closed_loop(SMALL, clients=0, requests_per_client=1), "clients must be .* got 0"),
        (lambda: loads.conversations(SMALL, sessions=1, turns_each=0), "turns_each must be .* got 0"),
        (lambda: loads.conversations(SMALL, sessions=1, turns_each=1, prefix_tokens=-2), "prefix_tokens .* got -2"),
        (lambda: loads.facts([]), "at least one request"),
    ],
)
def test_mistakes_raise_where_they_are_made(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
