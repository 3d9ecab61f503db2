"""The cost model, by hand."""

from __future__ import annotations

import math

import pytest

from batchkit import BlockCopy, KVGeometry, ModelShape, RooflineCost, SimulatedRunner, StepCost, VirtualClock
from batchkit.costs import DEVICES, MeasuredCost
from batchkit.types import Request, SamplingParams, ScheduledSequence, SchedulerOutput

SHAPE = ModelShape(
    name="toy",
    num_params=1000,
    active_params=400,
    bytes_per_param=2.0,
    kv_bytes_per_token=10,
    attention_width=5,
    max_model_len=100,
    vocab_size=10,
)
PLAIN = RooflineCost(
    num_params=1000, kv_bytes_per_token=10, bandwidth=1000.0, flops=1e6, efficiency=0.5, overhead_s=0.25
)


def step(*rows: tuple[int, int]) -> SchedulerOutput:
    """Rows that begin at a position and compute so many tokens."""
    request = Request(id="a", prompt_token_ids=(1,) * 50, params=SamplingParams(), max_tokens=5)
    made = tuple(
        ScheduledSequence(i, 0, i, request, 0, start, count, (1,) * count, [], 0, range(20), True, False)
        for i, (start, count) in enumerate(rows)
    )
    return SchedulerOutput(rows=made, num_tokens=sum(count for _, count in rows))


def test_a_decode_step_reads_weights_and_contexts():
    # 2,000 bytes of weights and 30 + 41 tokens of 10 bytes, at 1,000 bytes a second.
    assert PLAIN(step((29, 1), (40, 1))) == pytest.approx(0.25 + 2.0 + 0.71)


def test_a_long_prefill_is_bound_by_arithmetic():
    slow = RooflineCost(num_params=1000, kv_bytes_per_token=10, bandwidth=1e9, flops=1e4, efficiency=0.5, overhead_s=0)
    assert slow(step((0, 40))) == pytest.approx(2 * 1000 * 40 / 5000, rel=1e-5)


def test_only_active_parameters_are_computed_and_all_are_read():
    cost = RooflineCost.of(SHAPE, DEVICES["a100-40"], overhead_s=0.0, efficiency=1.0)
    assert cost.seconds(1, 0) == pytest.approx(2000 / 1.555e12)
    assert cost.seconds(10**6, 0) == pytest.approx(2 * 400 * 10**6 / 312e12)


def test_pairs_are_tokens_and_what_they_attend_to():
    wide = RooflineCost(
        num_params=0, kv_bytes_per_token=0, bandwidth=1.0, flops=4.0, efficiency=1.0, overhead_s=0, attention_width=1
    )
    # Three tokens from position 2 on see 3 + 4 + 5 positions, a decode at position 7 sees 8.
    assert wide(step((2, 3), (7, 1))) == pytest.approx(3 + 4 + 5 + 8)


def test_padding_costs_as_much_as_the_longest_row():
    padded = RooflineCost(
        num_params=1000,
        kv_bytes_per_token=10,
        bandwidth=1000.0,
        flops=1e6,
        efficiency=0.5,
        overhead_s=0.25,
        padded=True,
    )
    assert padded(step((29, 1), (40, 1))) == pytest.approx(0.25 + 2.0 + 2 * 0.41)
    assert padded(step((0, 30), (0, 10))) == pytest.approx(PLAIN(step((0, 30), (0, 30))))
    assert padded(step((9, 1), (9, 1))) == PLAIN(step((9, 1), (9, 1)))


def test_a_batch_begins_with_rows_that_all_begin():
    cost = RooflineCost(num_params=0, kv_bytes_per_token=0, bandwidth=1.0, flops=1.0, overhead_s=1, batch_overhead_s=10)
    assert cost.seconds(0, 0) == 1
    assert cost(step((0, 2), (0, 3))) == 11
    assert cost(step((0, 2), (4, 1))) == 1


def test_rows_cost_beyond():
    cost = RooflineCost(num_params=0, kv_bytes_per_token=0, bandwidth=1.0, flops=1.0, overhead_s=1, row_s=0.5)
    assert cost(step((3, 1), (4, 1), (5, 1))) == 2.5


def test_copies_take_time_of_the_clock():
    cost = RooflineCost(
        num_params=0, kv_bytes_per_token=0, bandwidth=100.0, flops=1.0, block_bytes=10.0, host_bandwidth=2.0
    )
    copies = (BlockCopy("copy", 0, 1), BlockCopy("swap_out", 0, 0), BlockCopy("swap_in", 0, 3))
    assert isinstance(cost, StepCost)
    assert cost.copying(copies) == pytest.approx(2 * 10 / 100 + 2 * 10 / 2)
    assert RooflineCost(num_params=0, kv_bytes_per_token=0, bandwidth=100.0, flops=1.0).copying(copies) == 0
    clock = VirtualClock()
    geometry = KVGeometry(num_blocks=4, block_size=2, host_blocks=4, max_model_len=8, vocab_size=5)
    SimulatedRunner(geometry, clock=clock, cost=cost).copy_blocks(copies)
    assert clock() == cost.copying(copies)


def test_the_presets_are_the_data_sheets():
    assert {name: (d.memory_bytes / 1e9, d.bandwidth / 1e9, d.flops / 1e12) for name, d in DEVICES.items()} == {
        "a100-40": (40, 1555, 312),
        "a100-80": (80, 2039, 312),
        "h100": (80, 3350, 989),
        "h200": (141, 4800, 989),
    }


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -0.001])
@pytest.mark.parametrize("name", ["seconds", "context_s", "pair_s"])
def test_measured_seconds_are_finite_and_not_negative(name, wrong):
    right = {"tokens": (1, 8), "seconds": (0.0, 0.5), "context_s": 0.0, "pair_s": 1e-9}
    assert MeasuredCost(**right).curve(8) == 0.5
    with pytest.raises(ValueError, match=f"finite and at least 0, got {wrong}"):
        MeasuredCost(**{**right, name: (0.0, wrong) if name == "seconds" else wrong})
