"""Capacity by arithmetic: against the policies, against sums written out, and against the simulator."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batchkit.allocators import PagedAllocator
from batchkit.cli import main
from batchkit.costs import DEVICES, ModelShape, RooflineCost
from batchkit.experiment.compare import compare
from batchkit.experiment.loads import Requests, all_at_once, fixed
from batchkit.experiment.plan import RESERVATIONS, Holding, Load, plan
from batchkit.experiment.policies import POLICIES
from batchkit.experiment.targets import SimulatedTarget
from batchkit.params import SamplingParams
from batchkit.schedulers import OrcaScheduler
from batchkit.sequence import Sequence
from batchkit.types import Request

OPT_13B = ModelShape(
    name="opt-13b",
    num_params=12_853_473_280,
    active_params=12_853_473_280,
    bytes_per_param=2.0,
    kv_bytes_per_token=819_200,
    attention_width=204_800,
    max_model_len=2048,
    vocab_size=50_272,
)
A100 = DEVICES["a100-40"]


def of(load: Load, reservation: str) -> Holding:
    return load.holdings[RESERVATIONS.index(reservation)]


def fitting(found: Load, reservation: str = "max_tokens") -> int:
    return of(found, reservation).num_seqs


def test_the_table_of_2023() -> None:
    """28 sequences of 512 tokens and 7 of 2048, it said, of 14 GB at 1 MB a token."""
    found = plan(OPT_13B, A100, lengths=[512, 2048])
    short, long = found.lengths
    assert fitting(long) == 7
    assert 27 <= fitting(short) <= 30
    assert fitting(short, "model_len") == fitting(long, "model_len") == 7
    assert found.kv_tokens == found.num_blocks * 16 == 14_992
    assert found.kv_bytes + found.weight_bytes + found.other_bytes == 40e9


def test_with_as_many_blocks_as_vllm_had() -> None:
    found = plan(OPT_13B, A100, lengths=[512, 2048], kv_memory=984 * 16 * 819_200)
    assert found.num_blocks == 984
    assert [fitting(load) for load in found.lengths] == [30, 7]


@pytest.mark.parametrize(("prompt", "output", "cap"), [(512, 128, None), (17, 33, None), (512, 100, 700), (1, 1, None)])
def test_reservations_are_those_of_the_policy(prompt: int, output: int, cap: int | None) -> None:
    found = plan(OPT_13B, A100, prompt=prompt, output=output, cap=cap)
    declared = cap or output
    request = Request(
        id="a",
        prompt_token_ids=tuple(range(prompt)),
        params=SamplingParams(max_tokens=declared),
        max_tokens=declared,
    )
    for reserve in ("model_len", "pow2", "max_tokens"):
        policy = OrcaScheduler(PagedAllocator(found.num_blocks, 16), reserve=reserve, max_model_len=2048)
        slots = policy.reservation(Sequence(request))
        assert of(found.mean, reserve).blocks == -(-slots // 16)


def test_a_cap_declares_up_to_the_models_length_and_bounds_outputs() -> None:
    found = plan(OPT_13B, A100, prompt=512, output=128, cap=1800, lengths=[512, 2048])
    assert found.mean.declared == 2048 - 512
    assert of(found.mean, "now") == of(plan(OPT_13B, A100, prompt=512, output=128).mean, "now")
    capped = plan(OPT_13B, A100, prompt=512, output=128, cap=200, lengths=[2048]).lengths[0]
    assert (capped.prompt, capped.output, capped.declared) == (1848, 200, 200)


@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize(("prompt", "output"), [(512, 128), (1, 1), (63, 2), (100, 61)])
def test_just_in_time_is_the_mean_over_the_steps(prompt: int, output: int, block_size: int) -> None:
    found = plan(OPT_13B, A100, prompt=prompt, output=output, block_size=block_size)
    slots = range(prompt, prompt + output)  # after each step
    blocks = [-(-used // block_size) for used in slots]
    now = of(found.mean, "now")
    assert now.blocks == pytest.approx(sum(blocks) / output)
    assert now.used_slots == pytest.approx(sum(slots) / output)
    assert now.wasted_slots == pytest.approx(now.blocks * block_size - now.used_slots)
    assert now.wasted_blocks * block_size == pytest.approx(now.wasted_slots)
    assert now.num_seqs == found.num_blocks * output // sum(blocks)
    waste = [holding.wasted_slots for holding in found.mean.holdings]
    assert waste == sorted(waste, reverse=True)


def test_steps_cost_what_the_roofline_says() -> None:
    found = plan(OPT_13B, A100, prompt=100, output=60, overhead_s=0.01, efficiency=0.5)
    cost = RooflineCost.of(OPT_13B, A100, overhead_s=0.01, efficiency=0.5)
    speed = found.speeds[RESERVATIONS.index("max_tokens")]
    n = speed.num_seqs
    contexts = range(101, 160)
    decodes = [cost.seconds(n, n * context, num_rows=n, pairs=n * context) for context in contexts]
    prefill = cost.seconds(100, 100, num_rows=1, pairs=sum(range(1, 101)))
    assert speed.decode_step_s == pytest.approx(sum(decodes) / 59)
    assert speed.prefill_step_s == pytest.approx(prefill)
    assert speed.alone.requests_per_s == pytest.approx(n / (sum(decodes) + n * prefill))
    assert speed.alone.generated_per_s == pytest.approx(60 * speed.alone.requests_per_s)
    assert speed.mixed.tokens_per_s == pytest.approx(160 * speed.mixed.requests_per_s)


@pytest.mark.parametrize("reserve", ["model_len", "max_tokens"])
def test_the_simulator_is_between_the_two_rates(reserve: str) -> None:
    """Orca computes whole prompts in the steps of the decoding rows: better than alone, worse than evenly."""
    found = plan(OPT_13B, A100, prompt=100, output=60)
    speed = found.speeds[RESERVATIONS.index(reserve)]
    target = SimulatedTarget(cost=RooflineCost.of(OPT_13B, A100), kv_tokens=found.kv_tokens, max_model_len=2048)
    load = all_at_once(Requests(prompts=fixed(100), outputs=fixed(60)), num_requests=3 * speed.num_seqs)
    run = compare([POLICIES[f"orca-{reserve}"]], load, target=target)
    rate = run.figure(f"orca-{reserve}", "requests_per_s").mean
    assert speed.alone.requests_per_s < rate < speed.mixed.requests_per_s


def test_seats_bound_what_runs_and_not_what_fits() -> None:
    free, seated = (plan(OPT_13B, A100, max_num_seqs=seats) for seats in (None, 10))
    assert seated.mean == free.mean
    assert [speed.num_seqs for speed in seated.speeds] == [7, 10, 10, 10]
    assert seated.speeds[0] == free.speeds[0]
    assert seated.speeds[3].mixed.requests_per_s < free.speeds[3].mixed.requests_per_s


def test_short_models_have_short_defaults() -> None:
    found = plan(replace(OPT_13B, max_model_len=100), A100)
    assert (found.mean.prompt, found.mean.output) == (80, 20)
    assert [load.prompt + load.output for load in found.lengths] == [100]


def test_a_length_keeps_a_token_of_prompt_and_one_of_output() -> None:
    for prompt, output, divided in ((1, 1000, [(1, 99), (1, 1)]), (1000, 1, [(99, 1), (1, 1)])):
        found = plan(OPT_13B, A100, prompt=prompt, output=output, lengths=[100, 2])
        assert [(load.prompt, load.output) for load in found.lengths] == divided


@pytest.mark.parametrize(
    ("changes", "constants"),
    [
        ({"bandwidth": 1e-320}, {}),
        ({"flops": 1e-320}, {}),
        ({"flops": 1e-200}, {"efficiency": 1e-200}),
        ({"bandwidth": 1e-300}, {"overhead_s": 0.0}),
        ({}, {"overhead_s": 1e308}),
    ],
)
def test_speeds_that_are_no_numbers_are_refused(changes: dict, constants: dict) -> None:
    with pytest.raises(ValueError, match="no speeds can be computed of a100-40: bandwidth "):
        plan(OPT_13B, replace(A100, **changes), **constants)


def test_a_model_without_kv_is_refused() -> None:
    with pytest.raises(ValueError, match=r"opt-13b has no KV to plan for: its kv_bytes_per_token is 0, .* num_hidden"):
        plan(replace(OPT_13B, kv_bytes_per_token=0), A100)


def test_the_table_says_what_is_counted_just_in_time(monkeypatch, capsys) -> None:
    monkeypatch.setattr("batchkit.cli.plan._shape", lambda path, dtype: OPT_13B)
    assert main(["plan", "opt-13b", "--device", "a100-40"]) == 0
    found = capsys.readouterr().out.partition("Sequences of 512, 2,048 tokens")[2].partition("\n\n")[0]
    head, _, table = found.partition("model length")
    assert "Just in time counts sequences that are\nevenly spread over their steps: more are there than would" in head
    assert "just in time" in table


def test_a_reservation_above_the_memory_is_all_of_it() -> None:
    found = plan(replace(OPT_13B, max_model_len=100_000), A100)
    assert (of(found.mean, "model_len").blocks, fitting(found.mean, "model_len")) == (found.num_blocks, 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"memory_fraction": 0.6}, "weights are 25,706,946,560 bytes, a100-40 has 24,000,000,000 bytes, 0.6 of"),
        ({"memory_fraction": 1.5}, "got 1.5"),
        ({"kv_memory": 20_000_000_000}, "20,000,000,000 bytes does not fit: .* 14,293,053,440 beside the weights"),
        ({"kv_memory": 800_000_000}, "2,048 tokens needs 128 blocks of 16; 800,000,000 bytes of KV memory are 61"),
        ({"kv_memory": 100, "lengths": [512]}, "512 tokens needs 32 blocks of 16; 100 bytes of KV memory are 0 blocks"),
        ({"lengths": [512, 4096]}, "length of 4,096 tokens is not from 2 to 2,048"),
        ({"prompt": 2000, "output": 100}, "prompt of 2,000 and output of 100 tokens is not from 2 to 2,048"),
        ({"output": 100, "cap": 99}, "output of 100 tokens in the mean exceeds the cap of 99"),
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan(OPT_13B, A100, **options)
