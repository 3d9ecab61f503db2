"""What the simulated runner computes and what it remembers: that a step costs what is new in it."""

from __future__ import annotations

import importlib

import pytest

from batchkit import (
    ChunkedPrefillScheduler,
    Engine,
    KVGeometry,
    PagedAllocator,
    RooflineCost,
    RowResult,
    SamplerOutput,
    SamplingParams,
    SimulatedRunner,
    StaticScheduler,
    TrueLengths,
    VirtualClock,
    WorkloadRecord,
    simulate,
)

GEOMETRY = KVGeometry(num_blocks=64, block_size=4, max_model_len=64, vocab_size=100)
PROMPTS = [[i + 1] * (3 + i % 7) for i in range(20)]


@pytest.fixture
def hashed(monkeypatch):
    """How often a hash was computed, as the length of a list."""
    calls = []
    module = importlib.import_module("batchkit.simulate")  # the package's `simulate` is a function
    real = module._mix
    monkeypatch.setattr(module, "_mix", lambda state, value: (calls.append(value), real(state, value))[1])
    return calls


def run(runner, *, seats: int) -> list[tuple[int, ...]]:
    engine = Engine(runner, ChunkedPrefillScheduler(PagedAllocator(64, 4), max_num_seqs=seats))
    return [out.token_ids for out in engine.generate(PROMPTS, SamplingParams(max_tokens=6))]


def test_hashes_of_sequences_that_are_gone_are_forgotten_beyond_the_bound() -> None:
    runner = SimulatedRunner(GEOMETRY, check_kv=False)
    want = run(SimulatedRunner(GEOMETRY), seats=2)
    runner._max_hashes = 40
    assert run(runner, seats=2) == want
    kept = sum(map(len, runner._prefixes.values()))
    assert kept == runner._num_hashes
    assert 0 < kept <= 40
    runner.drop_caches()
    assert (runner._num_hashes, len(runner._prefixes)) == (0, 0)
    runner = SimulatedRunner(GEOMETRY, check_kv=False)
    runner._max_prefixes = 3
    assert run(runner, seats=2) == want
    assert len(runner._prefixes) == 3  # many short ones take room as well


def test_hashes_of_a_step_s_own_sequences_are_kept_whatever_the_bound(hashed) -> None:
    runner = SimulatedRunner(GEOMETRY, check_kv=False)
    runner._max_hashes = runner._max_prefixes = 1
    run(runner, seats=len(PROMPTS))
    # One for each position, and one for each token sampled: no history is hashed twice.
    assert len(hashed) == sum(len(prompt) + 5 + 6 for prompt in PROMPTS)


def test_idle_rows_and_parts_of_prompts_cost_no_hash_without_the_check(hashed) -> None:
    def steps_and_hashes(**options) -> tuple[int, int]:
        hashed.clear()
        policy = StaticScheduler(PagedAllocator(64, 4), max_num_seqs=4, **options)
        engine = Engine(SimulatedRunner(GEOMETRY, check_kv=False), policy)
        engine.generate(PROMPTS, SamplingParams(max_tokens=6))
        return engine.stats().num_steps, len(hashed)

    steps, hashes = steps_and_hashes()
    padded_steps, padded_hashes = steps_and_hashes(pad_to=30, max_tokens_per_step=4)
    assert padded_steps > 2 * steps
    assert padded_hashes == hashes


@pytest.mark.parametrize("kind", ["roofline", "function"])
def test_rows_that_stay_idle_take_as_long_in_every_step_as_the_cost_says(kind: str) -> None:
    roofline = RooflineCost(num_params=1e9, kv_bytes_per_token=1e6, bandwidth=1e12, flops=1e14, padded=True)
    asked = []

    def drifting(out) -> float:
        asked.append(out)
        return len(asked) * 1e-3

    def took(check_kv: bool) -> tuple[float, int]:
        asked.clear()
        clock = VirtualClock()
        cost = roofline if kind == "roofline" else drifting
        runner = SimulatedRunner(GEOMETRY, clock=clock, cost=cost, check_kv=check_kv)
        policy = StaticScheduler(PagedAllocator(64, 4), max_num_seqs=4, pad_to=30)
        engine = Engine(runner, policy, clock=clock)
        engine.generate(PROMPTS, [SamplingParams(max_tokens=1 + i % 9) for i in range(len(PROMPTS))])
        return clock(), engine.stats().num_steps

    assert took(False) == took(True)  # with the check, every row is computed
    assert not asked or len(asked) == took(False)[1]


def test_prompt_logprobs_come_with_every_part_of_a_prompt_without_the_check() -> None:
    def scores(check_kv: bool):
        policy = ChunkedPrefillScheduler(PagedAllocator(64, 4), max_num_seqs=2, max_tokens_per_step=2)
        engine = Engine(SimulatedRunner(GEOMETRY, check_kv=check_kv), policy)
        (out,) = engine.generate([list(range(9))], SamplingParams(max_tokens=1, prompt_logprobs=0))
        return out.prompt_logprobs

    assert None not in scores(False)[1:]
    assert scores(False) == scores(True)


def test_true_lengths_hands_on_a_step_that_it_does_not_change() -> None:
    class Watched(SimulatedRunner):
        def execute(self, out):
            given.append(super().execute(out))
            return given[-1]

    class Outer(TrueLengths):
        def execute(self, out):
            got.append(super().execute(out))
            return got[-1]

    given: list[SamplerOutput] = []
    got: list[SamplerOutput] = []
    geometry = KVGeometry(num_blocks=64, block_size=4, max_model_len=64, vocab_size=9999, eos_token_ids=(2,))
    engine = Engine(Outer(Watched(geometry)), ChunkedPrefillScheduler(PagedAllocator(64, 4)))
    (out,) = simulate(engine, [WorkloadRecord(prompt=[5, 6, 7], max_tokens=9, output_tokens=4)])
    assert (out.token_ids[-1], out.finish_reason) == (2, "stop")
    assert [mine is theirs for mine, theirs in zip(got, given, strict=True)] == [True, True, True, False]
    assert (got[-1].rows, given[-1].rows == got[-1].rows) == ((RowResult((2,)),), False)
