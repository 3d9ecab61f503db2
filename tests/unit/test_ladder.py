"""The ladder: its corners decide as the built-in policies do, and its factors multiply to the whole gain."""

from __future__ import annotations

import json
import math
import random

import pytest

from batchkit import (
    ChunkedPrefillScheduler,
    Engine,
    KVGeometry,
    OrcaScheduler,
    PagedAllocator,
    PagedScheduler,
    RooflineCost,
    SimulatedRunner,
    StaticScheduler,
    TrueLengths,
    VirtualClock,
    WorkloadRecord,
    simulate,
)
from batchkit.experiment.ladder import (
    CHANGES,
    NAIVE,
    ORDERS,
    ChunkedRungScheduler,
    Design,
    RungScheduler,
    climb,
    num_designs,
)
from batchkit.experiment.loads import Requests, all_at_once, exponential, fixed
from batchkit.experiment.targets import SimulatedTarget
from batchkit.testing import check_scheduler

MODEL_LEN = 64
LARGE = 256  # no step of these loads has as many tokens


def random_load(rng):
    load = []
    for _ in range(rng.randint(5, 25)):
        max_tokens = rng.randint(1, 24)
        load.append(
            WorkloadRecord(
                prompt=rng.randint(1, 30),
                max_tokens=max_tokens,
                output_tokens=rng.randint(1, max_tokens),
                arrival=rng.choice([0.0, rng.uniform(0, 30)]),
            )
        )
    return load


def decisions(scheduler, load, *, num_blocks, seats, budget, **arguments):
    """Rows and preemptions of each step."""
    steps = []

    def on_step(report):
        rows = [(row.request.id, row.start, row.num_tokens, row.idle) for row in report.output.rows]
        steps.append((rows, [one.request_id for one in report.output.preempted]))

    clock = VirtualClock()
    geometry = KVGeometry(num_blocks=num_blocks, block_size=4, max_model_len=MODEL_LEN, vocab_size=50)
    policy = scheduler(
        PagedAllocator(num_blocks, 4),
        max_num_seqs=seats,
        max_tokens_per_step=budget,
        max_model_len=MODEL_LEN,
        **arguments,
    )
    runner = SimulatedRunner(geometry, clock=clock, cost=lambda out: 1.0)
    with Engine(TrueLengths(runner), policy, clock=clock, on_step=on_step) as engine:
        outputs = simulate(engine, load)
    assert [output.outputs[0].num_tokens for output in outputs] == [record.output_tokens for record in load]
    return steps


STEP = {"drop_finished": True, "join": "step"}
CORNERS = {
    "static": (StaticScheduler, {}, RungScheduler, {"reserve": "max_tokens"}, LARGE),
    "static in pieces": (StaticScheduler, {}, ChunkedRungScheduler, {"reserve": "max_tokens"}, 12),
    "static padded": (StaticScheduler, {"pad_to": 24}, RungScheduler, {"reserve": "max_tokens", "pad_to": 24}, LARGE),
    "static dropping": (
        StaticScheduler,
        {"drop_finished": True},
        ChunkedRungScheduler,
        {"reserve": "max_tokens", "drop_finished": True},
        12,
    ),
    **{
        f"Orca {reserve}, budget {budget}": (
            OrcaScheduler,
            {"reserve": reserve},
            RungScheduler,
            {**STEP, "reserve": reserve, "mix": True},
            budget,
        )
        for reserve in ("model_len", "pow2", "max_tokens")
        for budget in (LARGE, 32)
    },
    "paged": (PagedScheduler, {"watermark_blocks": 0}, RungScheduler, {**STEP, "reserve": "now"}, 32),
    "chunked": (ChunkedPrefillScheduler, {}, ChunkedRungScheduler, {**STEP, "reserve": "now", "mix": True}, 12),
}


@pytest.mark.parametrize("corner", CORNERS)
def test_a_corner_decides_as_the_built_in_policy_does(corner):
    built_in, arguments, rung, rung_arguments, budget = CORNERS[corner]
    for seed in range(20):
        rng = random.Random(seed)
        load = random_load(rng)
        sizes = {"num_blocks": rng.randint(16, 40), "seats": rng.randint(1, 12), "budget": budget}
        expected = decisions(built_in, load, **arguments, **sizes)
        assert decisions(rung, load, **rung_arguments, **sizes) == expected, f"load {seed}"


def test_the_corners_with_just_in_time_blocks_do_preempt():
    load = [WorkloadRecord(prompt=8, max_tokens=24, output_tokens=24) for _ in range(6)]
    for corner in ("paged", "chunked"):
        rung, arguments, budget = CORNERS[corner][2:]
        steps = decisions(rung, load, num_blocks=16, seats=6, budget=budget, **arguments)
        assert any(gone for _, gone in steps), corner


def test_a_power_of_two_is_reserved_up_to_the_models_length():
    prompt, max_tokens = 40, 20  # 40 + 32 - 1 slots would be more than 64
    policy = RungScheduler(PagedAllocator(16, 4), **STEP, reserve="pow2", mix=True, max_model_len=MODEL_LEN)
    geometry = KVGeometry(num_blocks=16, block_size=4, max_model_len=MODEL_LEN, vocab_size=50)
    reserved = []
    with Engine(
        SimulatedRunner(geometry), policy, on_step=lambda report: reserved.append(report.num_used_blocks)
    ) as engine:
        simulate(engine, [WorkloadRecord(prompt=prompt, max_tokens=max_tokens)])
    assert set(reserved) == {16}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"join": "never"}, "join must be one of batch, step, got 'never'"),
        ({"reserve": "all"}, "reserve must be one of model_len, pow2, max_tokens, now, got 'all'"),
        ({"pad_to": 0}, "pad_to=0 must be at least 1"),
        ({"pad_to": 8, "drop_finished": True}, "pad_to=8 .* keeps finished sequences"),
        ({"join": "step"}, 'join="step" needs drop_finished=True'),
        ({"mix": True}, 'join="batch" goes neither with mix=True'),
        ({"reserve": "now"}, "got False and 'now'"),
        ({"reserve": "model_len"}, "needs max_model_len"),
    ],
)
def test_choices_that_do_not_go_together_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        RungScheduler(PagedAllocator(8, 4), **{"reserve": "max_tokens", **arguments})


def test_pieces_of_prompts_need_mixed_steps():
    with pytest.raises(ValueError, match="needs mix=True"):
        ChunkedRungScheduler(PagedAllocator(8, 4), **STEP, reserve="now")


@pytest.mark.parametrize(
    ("scheduler", "arguments"),
    [
        (RungScheduler, {"reserve": "pow2", "pad_to": 5}),
        (RungScheduler, {**STEP, "reserve": "max_tokens"}),
        (RungScheduler, {**STEP, "reserve": "now"}),
        (RungScheduler, {**STEP, "reserve": "now", "mix": True}),
        (ChunkedRungScheduler, {**STEP, "reserve": "max_tokens", "mix": True}),
        (ChunkedRungScheduler, {**STEP, "reserve": "now", "mix": True}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else value.__name__,
)
def test_rungs_keep_the_rules_of_policies(scheduler, arguments):
    def make(allocator, **options):
        return scheduler(allocator, **arguments, **options)

    check_scheduler(make, num_workloads=5)


# --- the climb -------------------------------------------------------------------------------------------------------

COST = RooflineCost(num_params=1.3e9, kv_bytes_per_token=100_000, bandwidth=1e12, flops=1e14)
TARGET = SimulatedTarget(cost=COST, kv_tokens=1024, max_model_len=256, vocab_size=100)
WORKLOAD = all_at_once(
    Requests(prompts=fixed(64), outputs=exponential(24, 96), declared=96),
    num_requests=40,
)


@pytest.fixture(scope="module")
def ladder():
    return climb(WORKLOAD, target=TARGET, seeds=(0, 1, 2), max_num_seqs=64, chunk_tokens=128)


@pytest.mark.parametrize("order", ORDERS)
def test_the_factors_multiply_to_the_whole_gain(ladder, order):
    first, *rungs = ladder.rungs(order)
    gain = ladder.gain(order)
    assert math.prod(rung.factor.mean for rung in rungs) == pytest.approx(gain.mean, rel=1e-12)
    assert math.fsum(rung.share for rung in rungs) == pytest.approx(1.0)
    assert rungs[-1].cumulative == gain
    assert gain.low < gain.mean < gain.high
    assert gain.num == 3
    assert first.factor is None
    assert first.cumulative.mean == 1.0


def test_both_orders_have_the_same_ends_and_differ_between(ladder):
    ways = [ladder.designs[order] for order in ("A", "B")]
    assert {way[0] for way in ways} == {NAIVE}
    assert len({way[-1] for way in ways}) == 1
    assert ladder.gain("A") == ladder.gain("B")
    assert {rung.change for rung in ladder.rungs("A")} == {rung.change for rung in ladder.rungs("B")}
    # Joining late gives less where nobody leaves room than where memory has been made for it.
    joins = [next(rung.factor.mean for rung in ladder.rungs(order) if rung.change == "join") for order in ("A", "B")]
    assert joins[0] != joins[1]
    # What is in both orders was run once.
    assert len({design for way in ways for design in way}) == num_designs(with_seats=False) < sum(map(len, ways))
    assert len(ladder.comparison.runs) == 3 * num_designs(with_seats=False)


def test_every_rung_changes_one_thing(ladder):
    for order, designs in ladder.designs.items():
        assert ladder.rungs(order)[0].title == "naive static batching"
        for change, before, after in zip(ladder.changes[order], designs, designs[1:], strict=False):
            names = [name for name in Design.__dataclass_fields__ if getattr(before, name) != getattr(after, name)]
            assert names == list(CHANGES[change][1]), change


def test_the_first_rung_is_the_naive_policy_of_the_experiment(ladder):
    # 1024 slots hold 4 sequences of the model's length of 256, and each batch is as slow as the longest of all.
    assert ladder.comparison.figure(NAIVE.name, "peak_rows").mean == 4
    by_name = {rung.change: rung.factor for rung in ladder.rungs("A")}
    assert by_name["drop"].low > 1.0
    assert by_name["join"].low > 1.0


def test_the_same_seeds_give_the_same_text(ladder):
    again = climb(WORKLOAD, target=TARGET, seeds=(0, 1, 2), max_num_seqs=64, chunk_tokens=128)
    assert json.dumps(again.to_json(), allow_nan=False) == json.dumps(ladder.to_json(), allow_nan=False)


def test_a_batch_set_by_hand_has_a_rung_of_its_own():
    target = SimulatedTarget(cost=COST, kv_tokens=4096, max_model_len=256, vocab_size=100)
    found = climb(WORKLOAD, target=target, seeds=(0,), static_batch=4, max_num_seqs=64, chunk_tokens=128)
    for order in ORDERS:
        rungs = found.rungs(order)
        seats = next(number for number, rung in enumerate(rungs) if rung.change == "seats")
        assert all(rung.design.few_seats is (number < seats) for number, rung in enumerate(rungs))
        few, many = (found.comparison.figure(rungs[at].design.name, "peak_rows").mean for at in (seats - 1, seats))
        assert few == 4 < many
        assert rungs[seats].factor.mean > 1.0
        assert rungs[seats].factor.low is None, "one load has no interval"
        product = math.prod(rung.factor.mean for rung in rungs[1:])
        assert product == pytest.approx(found.gain(order).mean, rel=1e-12)


def test_a_batch_of_more_than_all_seats_is_refused():
    with pytest.raises(ValueError, match=r"static_batch must be between 1 and max_num_seqs \(8\), got 9"):
        climb(WORKLOAD, target=TARGET, static_batch=9, max_num_seqs=8)


def test_a_budget_without_room_for_all_seats_is_refused():
    with pytest.raises(ValueError, match=r"chunk_tokens must be at least max_num_seqs \(256\), got 128"):
        climb(WORKLOAD, target=TARGET, chunk_tokens=128)
    with pytest.raises(ValueError, match=r"step_tokens must be at least max_num_seqs \(256\), got 255"):
        climb(WORKLOAD, target=TARGET, step_tokens=255)


def test_an_interrupted_climb_says_what_is_missing():
    runs = []

    def on_run(run):
        runs.append(run)
        if len(runs) == 3:
            raise KeyboardInterrupt

    found = climb(WORKLOAD, target=TARGET, seeds=(0,), max_num_seqs=64, chunk_tokens=128, on_run=on_run)
    names = list(dict.fromkeys(design.name for order in ORDERS for design in found.designs[order]))
    assert list(found.comparison.missing) == [(name, 0) for name in names[3:]]
    rungs = found.rungs("A")
    assert [rung.figures is not None for rung in rungs[:4]] == [True, True, True, False]
    assert rungs[2].factor is not None
    assert rungs[3].factor is rungs[3].share is rungs[3].cumulative is None
    assert found.gain("A") is None
    assert found.to_json()["missing"] == [[name, 0] for name in names[3:]]


def test_a_gain_that_cannot_be_told_from_none_is_not_shared_out():
    # With one request at a time there is nothing to gain, and the loads differ.
    alone = all_at_once(Requests(prompts=fixed(8), outputs=exponential(4, 12)), num_requests=1)
    found = climb(alone, target=TARGET, seeds=range(3), max_num_seqs=4, step_tokens=64, chunk_tokens=16)
    for order in ORDERS:
        gain = found.gain(order)
        assert gain.low <= 1 <= gain.high and not found.is_certain(order)
        assert {rung.share for rung in found.rungs(order)} == {None}
