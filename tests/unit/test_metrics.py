"""Figures: percentiles, intervals, latencies, and what steps add up to."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchkit import (
    ChunkedPrefillScheduler,
    ContiguousAllocator,
    Engine,
    KVGeometry,
    OrcaScheduler,
    PagedAllocator,
    RequestError,
    SamplingParams,
    SimulatedRunner,
    StaticScheduler,
    TrueLengths,
    VirtualClock,
    WaitingServedScheduler,
    WorkloadRecord,
    simulate,
)
from batchkit.metrics import StepRecorder, interval_95, latency, percentile

FLOATS = st.floats(-1e6, 1e6)


@given(st.lists(FLOATS, min_size=1), st.floats(0, 100))
def test_a_percentile_lies_among_the_values_and_grows(values, percent):
    found = percentile(values, percent)
    assert min(values) <= found <= max(values)
    assert found <= percentile(values, min(100, percent + 1)) + 1e-6
    assert percentile(values, 50) == pytest.approx(statistics.median(values))


def test_percentiles_refuse_what_has_none():
    with pytest.raises(ValueError, match="at least one value"):
        percentile([], 50)
    with pytest.raises(ValueError, match="between 0 and 100, got 101"):
        percentile([1.0], 101)


def test_the_interval_is_students():
    # By tables: n = 5, s = 1.5811, t = 2.776.
    found = interval_95([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.mean == 3.0
    assert found.half_width == pytest.approx(2.776 * math.sqrt(2.5) / math.sqrt(5), rel=1e-3)
    assert interval_95([7.0]).half_width is None
    assert interval_95([4.0] * 100).half_width == 0.0
    with pytest.raises(ValueError, match="at least one value"):
        interval_95([])


def engine_of(scheduler, clock, num_blocks, on_step=None, block_size=4):
    geometry = KVGeometry(num_blocks=num_blocks, block_size=block_size, max_model_len=64, vocab_size=50)
    runner = SimulatedRunner(geometry, clock=clock, cost=lambda out: 1.0)
    return Engine(TrueLengths(runner), scheduler, clock=clock, on_step=on_step)


def played(scheduler, records, *, num_blocks):
    clock = VirtualClock()
    recorder = StepRecorder(scheduler, clock)
    with engine_of(scheduler, clock, num_blocks, recorder) as engine:
        outputs = simulate(engine, records)
    return recorder.figures(), outputs, recorder


def test_latencies_of_one_request_by_hand():
    clock = VirtualClock(5.0)
    with engine_of(OrcaScheduler(PagedAllocator(4, 4), max_num_seqs=1), clock, 4) as engine:
        # One seat: the second waits for the three steps of the first.
        first, second = simulate(
            engine, [WorkloadRecord(prompt=2, max_tokens=3), WorkloadRecord(prompt=2, max_tokens=1)]
        )
    took = latency(first)
    assert (took.queue_s, took.ttft_s, took.tpot_s, took.e2e_s, took.normalised_s) == (0.0, 1.0, 1.0, 3.0, 1.0)
    took = latency(second)
    assert (took.queue_s, took.ttft_s, took.tpot_s, took.e2e_s, took.normalised_s) == (3.0, 4.0, None, 4.0, 4.0)


def test_no_token_no_latency():
    with engine_of(OrcaScheduler(PagedAllocator(4, 4)), VirtualClock(), 4) as engine:
        rid = engine.add_request([1, 2], SamplingParams(max_tokens=3))
        engine.abort(rid)
        (output,) = engine.step()
    with pytest.raises(ValueError, match="no latency"):
        latency(output)


def test_kv_classes_of_a_reservation_by_hand():
    # 8 slots in two blocks; prompt 2, one output of 3 although 6 are declared: 7 slots reserved (2 blocks), 4 used in
    # the end. Steps hold 2, 3, 4 tokens; of the rest, 2, 1, 0 will be filled; the last 4 never.
    records = [WorkloadRecord(prompt=2, max_tokens=6, output_tokens=3)]
    figures, _, _ = played(OrcaScheduler(PagedAllocator(4, 4)), records, num_blocks=4)
    assert (figures.num_steps, figures.busy_s, figures.num_rows, figures.num_tokens) == (3, 3.0, 3, 4)
    assert figures.kv.used == pytest.approx((2 + 3 + 4) / 3 / 16)
    assert figures.kv.reserved == pytest.approx((2 + 1 + 0) / 3 / 16)
    assert figures.kv.internal == pytest.approx(4 / 16)
    assert figures.kv.external == 0
    assert figures.kv.free == pytest.approx(8 / 16)


def test_just_in_time_reserves_nothing_but_the_rest_of_a_block():
    records = [WorkloadRecord(prompt=4, max_tokens=40, output_tokens=9)]
    figures, _, _ = played(ChunkedPrefillScheduler(PagedAllocator(16, 4)), records, num_blocks=16)
    # 12 slots in the end; blocks are taken one by one and all are filled.
    assert figures.kv.internal == pytest.approx(0)
    assert 0 < figures.kv.reserved <= 3 / 64
    assert figures.num_preemptions == 0


def test_finished_rows_that_are_held_are_idle():
    records = [WorkloadRecord(prompt=1, max_tokens=5), WorkloadRecord(prompt=1, max_tokens=1)]
    figures, _, _ = played(StaticScheduler(PagedAllocator(8, 4)), records, num_blocks=8)
    assert (figures.num_steps, figures.num_rows, figures.num_idle_rows, figures.peak_rows) == (5, 10, 4, 2)
    assert figures.mean_rows == pytest.approx(6 / 5)
    assert figures.slot_use == pytest.approx(6 / 10)


def test_samples_that_end_apart_reserve_what_each_will_fill():
    # Two samples of 4 + 8 declared: one gives 2 tokens, the other 8. Both have 3 blocks of 4 from their first step on.
    lengths = [2, 8]
    clock = VirtualClock()
    scheduler = OrcaScheduler(PagedAllocator(6, 4))
    recorder = StepRecorder(scheduler, clock)
    reports = []

    def on_step(report):
        recorder(report)
        reports.append(report)

    with engine_of(scheduler, clock, 6, on_step) as engine:
        params = SamplingParams(max_tokens=8, n=2, stop_token_ids=(0,))
        engine.add_request([1, 2, 3, 4], params, metadata={"output_tokens": lengths})
        while engine.has_unfinished():
            outputs = engine.step()
    assert [sample.num_tokens for sample in outputs[-1].outputs] == lengths
    assert sum(report.num_finished for report in reports) == 2
    kv = recorder.figures().kv
    assert kv.used + kv.reserved + kv.internal + kv.external + kv.free == pytest.approx(1)


def test_lengths_are_one_for_each_sample():
    clock = VirtualClock()
    with engine_of(OrcaScheduler(PagedAllocator(6, 4)), clock, 6) as engine:
        params = SamplingParams(max_tokens=8, n=2, stop_token_ids=(0,))
        with pytest.raises(RequestError, match="has 2 samples, and 3 output lengths"):
            engine.add_request([1, 2, 3, 4], params, metadata={"output_tokens": [1, 2, 3]})


def test_blocks_that_are_free_but_apart_are_external():
    # A, B, C take 2 blocks each of 6; when A and C have gone, 4 are free, and D, which needs 3, does not fit.
    records = [
        WorkloadRecord(prompt=4, max_tokens=2),
        WorkloadRecord(prompt=4, max_tokens=5),
        WorkloadRecord(prompt=4, max_tokens=2),
        WorkloadRecord(prompt=8, max_tokens=2),
    ]
    contiguous, _, _ = played(OrcaScheduler(ContiguousAllocator(6, 4)), records, num_blocks=6)
    paged, _, _ = played(OrcaScheduler(PagedAllocator(6, 4)), records, num_blocks=6)
    assert contiguous.kv.external > 0
    assert paged.kv.external == 0


@pytest.mark.parametrize("scheduler", [StaticScheduler, OrcaScheduler, WaitingServedScheduler, ChunkedPrefillScheduler])
def test_the_classes_add_up(scheduler):
    records = [WorkloadRecord(prompt=3 + i % 5, max_tokens=20, output_tokens=1 + 3 * i % 17) for i in range(30)]
    figures, outputs, recorder = played(scheduler(PagedAllocator(12, 4), max_num_seqs=6), records, num_blocks=12)
    kv = figures.kv
    assert kv.used + kv.reserved + kv.internal + kv.external + kv.free == pytest.approx(1)
    assert min(kv.used, kv.reserved, kv.internal, kv.external, kv.free) >= -1e-9
    assert figures.num_rows - figures.num_idle_rows >= sum(output.outputs[0].num_tokens for output in outputs)
    recorder.clear()
    assert recorder.figures().num_steps == 0 and recorder.figures().mean_rows == 0
