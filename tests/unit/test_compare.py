"""Comparisons: paired loads, intervals, windows, and what an interruption leaves."""

from __future__ import annotations

import json
import math
import os
import signal

import pytest

from batchkit import (
    ChunkedPrefillScheduler,
    ContiguousAllocator,
    OrcaScheduler,
    PagedScheduler,
    RooflineCost,
    StaticScheduler,
    WorkloadRecord,
)
from batchkit.costs import MeasuredCost
from batchkit.experiment.compare import FIGURES, Goal, compare, run
from batchkit.experiment.loads import (
    Requests,
    Workload,
    all_at_once,
    closed_loop,
    conversations,
    evenly,
    exponential,
    exponential_think,
    fixed,
    fixed_think,
    open_loop,
    poisson,
)
from batchkit.experiment.policies import POLICIES, Policy, System, one_per_class
from batchkit.experiment.targets import SimulatedTarget, longest_output, longest_sequence
from batchkit.trace import read_trace

COST = RooflineCost(num_params=1e9, kv_bytes_per_token=1e5, bandwidth=1e12, flops=1e14)
TARGET = SimulatedTarget(cost=COST, kv_tokens=480, max_model_len=256)
REQUESTS = Requests(prompts=fixed(20), outputs=exponential(16, 64))
WORKLOAD = all_at_once(REQUESTS, num_requests=40)


def test_the_built_in_policies_run_the_experiment():
    found = compare(POLICIES.values(), WORKLOAD, target=TARGET, seeds=(0, 1))
    assert found.policies == tuple(POLICIES)
    assert len(found.runs) == 2 * len(POLICIES) and not found.missing and found.is_simulated
    for one in found.runs:
        load = WORKLOAD.make(one.seed)
        assert (len(one.requests), one.num_unfinished, one.num_failed) == (40, 0, 0)
        assert one.prompt_tokens == 40 * 20
        assert one.generated_tokens == sum(record.output_tokens for record in load)
    speed = {name: found.figure(name, "tokens_per_s").mean for name in found.policies}
    assert speed["static-global"] < speed["static-batch"] < speed["static-drop"] < speed["orca-max_tokens"]
    assert speed["orca-model_len"] < speed["orca-pow2"] <= speed["orca-max_tokens"]


def test_loads_are_paired():
    found = compare([POLICIES["paged"], POLICIES["chunked"]], WORKLOAD, target=TARGET, seeds=(3, 4, 5))
    for seed, one, other in zip((3, 4, 5), found.of("paged"), found.of("chunked"), strict=True):
        assert one.seed == other.seed == seed
        assert sorted(r.output_tokens for r in one.requests) == sorted(r.output_tokens for r in other.requests)
    ratio = found.ratio("chunked", "paged", "tokens_per_s")
    ratios = [
        FIGURES["tokens_per_s"](b) / FIGURES["tokens_per_s"](a)
        for a, b in zip(found.of("paged"), found.of("chunked"), strict=True)
    ]
    assert ratio.mean == pytest.approx(math.fsum(ratios) / 3)
    assert ratio.half_width is not None and ratio.num == 3
    assert found.ratio("paged", "paged", "tokens_per_s").half_width == 0


def test_the_same_seeds_give_the_same_text():
    texts = [
        json.dumps(compare(POLICIES.values(), WORKLOAD, target=TARGET, seeds=(0,)).to_json(Goal(ttft_s=1)))
        for _ in range(2)
    ]
    assert texts[0] == texts[1]
    other = compare(POLICIES.values(), WORKLOAD, target=TARGET, seeds=(1,)).to_json(Goal(ttft_s=1))
    assert json.dumps(other) != texts[0]


def test_what_arrives_before_the_window_is_served_and_not_counted():
    workload = open_loop(REQUESTS, num_requests=20, arrivals=evenly(10.0))  # at 0, 0.1, ... 1.9 s
    whole = run(TARGET, POLICIES["chunked"], workload.make(0))
    later = run(TARGET, POLICIES["chunked"], workload.make(0), warm_up_s=0.95)
    assert (len(whole.requests), len(later.requests)) == (20, 10)
    assert later.window_s == pytest.approx(whole.window_s - 0.95)
    assert later.requests == whole.requests[-10:]
    for late in (99, (1.9 + whole.window_s) / 2):  # after the run; after the last arrival, while it is served
        with pytest.raises(ValueError, match=f"nothing arrived after the warm-up of {late:g} s"):
            run(TARGET, POLICIES["chunked"], workload.make(0), warm_up_s=late)
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="warm_up_s must be finite and at least 0 seconds"):
            run(TARGET, POLICIES["chunked"], workload.make(0), warm_up_s=wrong)
    with pytest.raises(ValueError, match="until_s must be more than the warm-up of 1 s, got 1"):
        run(TARGET, POLICIES["chunked"], workload.make(0), warm_up_s=1, until_s=1)


def test_the_window_ends_when_time_is_up_though_nothing_runs_then():
    workload = open_loop(REQUESTS, num_requests=3, arrivals=evenly(0.01))  # at 0, 100, 200 s
    found = run(TARGET, POLICIES["chunked"], workload.make(0), until_s=150)
    assert (len(found.requests), found.window_s) == (2, pytest.approx(150))


def test_what_is_not_done_in_time_is_counted():
    load = WORKLOAD.make(0)
    whole = run(TARGET, POLICIES["static-batch"], load)
    half = run(TARGET, POLICIES["static-batch"], load, until_s=whole.window_s / 2)
    assert 0 < half.num_unfinished < 40
    assert half.num_unfinished + len(half.requests) == 40


def test_a_policys_system_and_memory_are_its_own():
    policies = [
        POLICIES["chunked"],
        Policy(name="slow", scheduler=ChunkedPrefillScheduler, system=System(overhead_s=1.0)),
        Policy(name="small", scheduler=ChunkedPrefillScheduler, kv_tokens=160),
    ]
    found = compare(policies, WORKLOAD, target=TARGET)
    plain, slow, small = (found.of(policy.name)[0] for policy in policies)
    assert slow.steps.num_steps == plain.steps.num_steps
    assert slow.window_s == pytest.approx(plain.window_s + slow.steps.num_steps * (1.0 - COST.overhead_s))
    assert small.steps.peak_rows < plain.steps.peak_rows


def test_a_measured_cost_will_do_and_takes_no_system():
    cost = MeasuredCost(tokens=(1, 1001), seconds=(1.0, 2.0))
    target = SimulatedTarget(cost=cost, kv_tokens=480, max_model_len=256)
    one = run(target, POLICIES["chunked"], WORKLOAD.make(0))
    assert one.window_s == pytest.approx(one.steps.num_steps * 0.999 + one.steps.num_tokens / 1000)
    slow = Policy(name="slow", scheduler=ChunkedPrefillScheduler, system=System(overhead_s=1.0))
    with pytest.raises(ValueError, match="slow has a System of its own"):
        run(target, slow, WORKLOAD.make(0))


def test_a_policy_of_ones_own_and_another_allocator():
    mine = one_per_class("mine", OrcaScheduler, {"reserve": "pow2"})
    contiguous = Policy(name="contiguous", scheduler=OrcaScheduler, allocator=ContiguousAllocator)
    static = one_per_class("static", StaticScheduler, {"drop_finished": True})
    found = compare([mine, contiguous, static, POLICIES["static-drop"]], WORKLOAD, target=TARGET)
    assert found.of("contiguous")[0].steps.kv.external > 0 == found.of("mine")[0].steps.kv.external
    assert found.figure("static", "window_s") == found.figure("static-drop", "window_s")


@pytest.mark.parametrize(
    "workload",
    [
        closed_loop(REQUESTS, clients=5, requests_per_client=4, think=exponential_think(0.3)),
        conversations(
            REQUESTS, sessions=4, turns_each=3, prefix_tokens=32, think=fixed_think(0.1), arrivals=poisson(3.0)
        ),
    ],
    ids=["closed loop", "conversations"],
)
def test_clients_that_wait_for_answers(workload):
    target = SimulatedTarget(cost=COST, kv_tokens=1600, max_model_len=512, prefix_caching=True)
    found = compare([POLICIES["paged"], POLICIES["chunked"]], workload, target=target, seeds=(0, 1))
    for one in found.runs:
        assert len(one.requests) == sum(len(session.turns) for session in workload.make(one.seed))
    assert found.figure("paged", "e2e_p50").mean > 0


def test_the_longest_of_a_load():
    load = (*WORKLOAD.make(0), WorkloadRecord(prompt=[1] * 30, max_tokens=100, output_tokens=3))
    assert longest_output(load) == longest_output(WORKLOAD.make(0))
    assert longest_sequence(load) == 129


def test_goodput_counts_what_keeps_all_promises():
    workload = open_loop(REQUESTS, num_requests=20, arrivals=poisson(50.0))
    one = run(TARGET, POLICIES["chunked"], workload.make(0))
    assert one.goodput(Goal()) == pytest.approx(20 / one.window_s)
    limit = one.of("ttft_s", 50)
    assert 0 < one.goodput(Goal(ttft_s=limit)) < one.goodput(Goal())
    assert one.goodput(Goal(ttft_s=limit, tpot_s=0.0)) < one.goodput(Goal(ttft_s=limit))


def test_each_run_leaves_a_trace(tmp_path):
    compare([POLICIES["paged"]], WORKLOAD, target=TARGET, seeds=(0, 1), trace_folder=tmp_path)
    traces = [read_trace(tmp_path / f"paged-{seed}.jsonl") for seed in (0, 1)]
    assert all(trace.complete and len(trace.requests) == 40 for trace in traces)


class Interrupting(PagedScheduler):
    """Somebody presses Ctrl-C while it decides."""

    def schedule(self, step):
        super().schedule(step)
        if not self.waiting:
            os.kill(os.getpid(), signal.SIGINT)


def test_an_interruption_keeps_what_was_measured():
    interrupting = Policy(name="interrupting", scheduler=Interrupting)
    seen = []
    found = compare(
        [POLICIES["paged"], interrupting, POLICIES["chunked"]],
        WORKLOAD,
        target=TARGET,
        seeds=(0, 1),
        on_run=lambda one: seen.append(one.policy),
    )
    assert [one.policy for one in found.runs] == seen == ["paged"]
    assert found.missing == (
        ("interrupting", 0),
        ("chunked", 0),
        ("paged", 1),
        ("interrupting", 1),
        ("chunked", 1),
    )
    with pytest.raises(KeyboardInterrupt):
        compare([interrupting], WORKLOAD, target=TARGET)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: compare([], WORKLOAD, target=TARGET), "got 0 and 1"),
        (lambda: compare([POLICIES["paged"]] * 2, WORKLOAD, target=TARGET), "different names, got paged, paged"),
        (lambda: compare([POLICIES["paged"]], WORKLOAD, target=TARGET, seeds=(1, 1)), "must differ"),
        (
            lambda: compare([Policy(name="small", scheduler=PagedScheduler, kv_tokens=40)], WORKLOAD, target=TARGET),
            r"small: the longest sequence declares \d+ KV slots, \d+ blocks of 16; the KV budget is 2 blocks",
        ),
        (
            lambda: compare([Policy(name="none", scheduler=PagedScheduler, kv_tokens=15)], WORKLOAD, target=TARGET),
            "a KV budget of 15 tokens is not one block of 16",
        ),
        (lambda: run(TARGET, POLICIES["paged"], ()), "at least one request"),
        (lambda: compare([POLICIES["paged"]], Workload(name="empty", make=lambda seed: ()), target=TARGET), "at least"),
    ],
)
def test_what_cannot_be_compared_is_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call()
