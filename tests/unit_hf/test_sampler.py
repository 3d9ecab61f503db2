"""Sampling: filters, temperatures, and a randomness that knows neither neighbours nor time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from batchkit.hf import sampler
from batchkit.hf.grammar import Grammars
from batchkit.hf.sampler import Sampler, sample
from batchkit.hf.uniform import uniform
from batchkit.types import SamplingParams, ScheduledSequence
from unit_hf.helpers import GREEDY, PLAIN, random_logits, row

VOCAB = 1000


def draws(logits: torch.Tensor, params: SamplingParams, count: int) -> list[int]:
    """Many tokens from one row of logits, at different positions."""
    return sample(logits.expand(count, -1), [row(params, num_output=i) for i in range(count)])


def kept(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """[rows, vocabulary]: what the filters leave."""
    return sampler._weights(logits, params) > 0


def kept_by_transformers(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    scores = TemperatureLogitsWarper(params.temperature)(None, logits[None])  # type: ignore[arg-type]
    if params.top_k > 0:
        scores = TopKLogitsWarper(params.top_k)(None, scores)  # type: ignore[arg-type]
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)  # type: ignore[arg-type]
    if params.min_p > 0:
        scores = MinPLogitsWarper(params.min_p)(None, scores)  # type: ignore[arg-type]
    return scores[0] > -math.inf


MIXED = [
    SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
    for t in (0.7, 1.0, 1.8)
    for k in (0, 1, 7, 100)
    for p in (1.0, 0.95, 0.6, 0.1)
    for m in (0.0, 0.02, 0.3)
]


# ---- filters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [50, VOCAB, 5000])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_kept_set_equals_the_warpers_of_transformers(vocab: int, scale: float) -> None:
    """SGLJAX-1563: the order of the filters, and what each sees of the ones before."""
    # Without ties: tokens with equal logits are kept or dropped together here, and cut anywhere there.
    logits = random_logits(len(MIXED), vocab, seed=1, scale=scale)
    assert all(len(r.unique()) == vocab for r in logits) or vocab == 5000
    got = kept(logits, MIXED)
    for i, params in enumerate(MIXED):
        # A token 4e12 times less probable than the best one is never drawn, filter or not.
        ever_drawn = ((logits[i] - logits[i].max()) / params.temperature).exp() * sampler._ONE >= 1
        assert torch.equal(got[i], kept_by_transformers(logits[i], params) & ever_drawn), params


def test_either_way_of_sorting_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(len(MIXED), 2500, seed=2, scale=2.0)
    logits[:, ::7] = -math.inf
    batches = [logits.to(dtype) for dtype in (torch.float32, torch.bfloat16)]
    expected = [sampler._weights(batch, MIXED) for batch in batches]
    for batch, weights in zip(batches, expected, strict=True):
        for i in range(0, len(MIXED), 25):
            assert torch.equal(sampler._weights(batch[i : i + 1], MIXED[i : i + 1])[0], weights[i])
    monkeypatch.setattr(sampler, "_sorted", lambda logits: logits.sort(dim=-1).values)  # as elsewhere than on the CPU
    for batch, weights in zip(batches, expected, strict=True):
        assert torch.equal(sampler._weights(batch, MIXED), weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_p=5e-324),
        SamplingParams(top_p=1e-9),
        SamplingParams(top_p=1e-4),
        SamplingParams(top_k=1),
        SamplingParams(min_p=1.0),
        SamplingParams(top_p=1e-9, top_k=1, min_p=1.0),
    ],
    ids=str,
)
def test_best_token_survives_the_strictest_filter(params: SamplingParams, dtype: torch.dtype) -> None:
    """HF-19839, MLXLM-1912: a tiny top_p leaves the best token, in any precision."""
    logits = random_logits(20, 4096).to(dtype)
    logits[torch.arange(20), torch.arange(20)] = 30.0  # one best token, whatever the precision
    assert sample(logits, [row(params, num_output=i) for i in range(20)]) == list(range(20))


@pytest.mark.parametrize(
    "params", [SamplingParams(top_k=k, top_p=1.0) for k in (0, -1, 4096, 4101)] + [SamplingParams(min_p=0.0)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_filters_that_are_off_keep_every_token(params: SamplingParams, dtype: torch.dtype) -> None:
    assert kept(random_logits(3, 4096).to(dtype), [params] * 3).all()


def test_min_p_is_relative_to_the_most_probable_token() -> None:
    """MAMBA-927: min_p measures by the best token, not by the first of the vocabulary."""
    assert kept(torch.tensor([[0.5, 0.3, 0.2]]).log(), [SamplingParams(min_p=0.5)]).tolist() == [[True, True, False]]
    # The best token is not the first of the vocabulary, and differs between the rows.
    logits = torch.full((3, 8), 0.01)
    for i, best in enumerate((5, 0, 7)):
        logits[i, best], logits[i, 3] = 0.6, 0.31
    got = kept(logits.log(), [SamplingParams(min_p=0.5), SamplingParams(min_p=0.6), SamplingParams(min_p=0.5)])
    assert [r.nonzero().flatten().tolist() for r in got] == [[3, 5], [0], [3, 7]]


def test_top_p_sees_what_top_k_left() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()
    assert kept(logits, [SamplingParams(top_k=2, top_p=0.6)]).tolist() == [[True, False, False, False]]
    assert kept(logits, [SamplingParams(top_p=0.6)]).tolist() == [[True, True, False, False]]


def test_temperature_applies_before_the_filters() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    # Squared: 25 to 9 to 4.
    assert kept(logits, [SamplingParams(temperature=0.5, min_p=0.5)]).tolist() == [[True, False, False]]


def test_tied_tokens_are_kept_or_dropped_together() -> None:
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]])
    expected = [[True, True, True, True, False]]
    assert kept(logits, [SamplingParams(top_k=2)]).tolist() == expected
    share = math.exp(3) / (math.exp(3) + 3 * math.exp(1) + 1)
    assert kept(logits, [SamplingParams(top_p=share + 0.01)]).tolist() == expected
    assert kept(logits, [SamplingParams(top_p=share - 0.01)]).tolist() == [[True, False, False, False, False]]


def test_each_row_has_its_own_filters() -> None:
    logits = random_logits(1, VOCAB, scale=1.0)[0].expand(5, -1)
    params = [PLAIN, SamplingParams(top_k=20), SamplingParams(top_p=0.5), SamplingParams(min_p=0.5), GREEDY]
    counts = kept(logits[:4], params[:4]).sum(dim=-1).tolist()
    assert counts[0] == VOCAB
    assert counts[1] == 20
    assert len(set(counts)) == 4
    best = int(logits[0].argmax())
    assert all(sample(logits, [row(p, num_output=i) for p in params])[4] == best for i in range(50))


# ---- temperatures --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-40, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3])
def test_tiny_temperatures_equal_greedy(temperature: float, dtype: torch.dtype) -> None:
    """VLLM-3063, VLLM-2937: a tiny temperature does not overflow in half precision."""
    logits = (random_logits(16, 4096).clamp(-12, 10)).to(dtype)
    logits[torch.arange(16), torch.arange(16)] = 12.0
    params = SamplingParams(temperature=temperature)
    assert sample(logits, [row(params, num_output=i) for i in range(16)]) == list(range(16))


def test_a_huge_temperature_is_flat_and_keeps_masked_tokens_out() -> None:
    logits = torch.tensor([100.0, -math.inf, 0.0, -100.0])
    counts = Counter(draws(logits, SamplingParams(temperature=1e308), 3000))
    assert set(counts) == {0, 2, 3}
    assert min(counts.values()) > 850


def test_infinite_logits_are_the_best_ones() -> None:
    logits = torch.tensor([1.0, math.inf, -math.inf, math.inf])
    assert set(draws(logits, SamplingParams(temperature=0.5), 50)) == {1, 3}


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_rows_without_a_number_disturb_no_other(bad: float) -> None:
    logits = random_logits(6, VOCAB)
    params = [PLAIN, SamplingParams(top_k=5), SamplingParams(top_p=0.5), GREEDY, SamplingParams(min_p=0.1), PLAIN]
    rows = [row(p, seed=i) for i, p in enumerate(params)]
    expected = sample(logits, rows)
    for i in range(6):
        broken = logits.clone()
        broken[i] = bad
        got = sample(broken, rows)
        assert 0 <= got[i] < VOCAB
        assert got[:i] + got[i + 1 :] == expected[:i] + expected[i + 1 :]


def test_one_nan_among_logits_gives_some_token() -> None:
    logits = random_logits(1, VOCAB)[0]
    logits[17] = math.nan
    for params in (PLAIN, GREEDY, SamplingParams(top_k=5, top_p=0.5, min_p=0.1)):
        assert all(0 <= token < VOCAB for token in draws(logits, params, 5))


# ---- drawing -------------------------------------------------------------------------------------------------------


def test_drawn_tokens_are_kept_ones_in_the_right_proportions() -> None:
    """METAL-622: no token that the filters exclude is ever drawn."""
    # 20,000 draws of one setting, in batches with others in between.
    logits = random_logits(1, 100, scale=1.5, seed=5)[0]
    params = SamplingParams(top_p=0.8, top_k=20)
    others = [GREEDY, PLAIN, SamplingParams(top_k=3), SamplingParams(min_p=0.2)]
    counts: Counter[int] = Counter()
    for batch in range(100):
        rows = [row(params, num_output=200 * batch + i) for i in range(200)]
        for i in range(0, len(rows), 2):
            rows.insert(2 * i, row(others[i % len(others)], seed=9, num_output=200 * batch + i))
        tokens = sample(logits.expand(len(rows), -1), rows)
        counts.update(token for token, r in zip(tokens, rows, strict=True) if r.request.params is params)
    total = sum(counts.values())
    assert total == 20_000
    allowed = kept_by_transformers(logits, params)
    assert 5 < allowed.sum() <= 20
    assert all(allowed[token] for token in counts)
    probabilities = logits.double().masked_fill(~allowed, -math.inf).softmax(-1)
    chi_square = sum(
        (counts[i] - total * p) ** 2 / (total * p) for i, p in enumerate(probabilities.tolist()) if allowed[i]
    )
    freedom = int(allowed.sum()) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


def test_plain_sampling_has_the_right_proportions() -> None:
    probabilities = torch.tensor([0.4, 0.1, 1e-13, 0.3, 0.2])
    counts = Counter(draws(probabilities.log(), PLAIN, 20_000))
    assert set(counts) == {0, 1, 3, 4}
    for token, count in counts.items():
        p = float(probabilities[token])
        assert abs(count - 20_000 * p) < 4 * math.sqrt(20_000 * p * (1 - p))


@pytest.mark.parametrize("number", [0.0, 1e-300, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_number_draws_a_token_of_probability_zero(
    monkeypatch: pytest.MonkeyPatch, number: float, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(sampler, "uniform", lambda *args: number)
    for size in (1, 3, 1000, 50_000):
        logits = torch.full((1, size + 2000), -math.inf, dtype=dtype)
        logits[0, 1000 : 1000 + size] = torch.linspace(-3, 3, size).to(dtype)
        for params in (PLAIN, SamplingParams(top_p=0.9), SamplingParams(top_k=7), SamplingParams(min_p=0.5)):
            (token,) = sample(logits, [row(params)])
            assert kept(logits, [params])[0, token]
            assert 1000 <= token < 1000 + size


def test_greedy_takes_the_first_of_equal_tokens() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        logits = torch.zeros(3, 50_000, dtype=dtype)
        logits[:, [123, 40_000]] = 5.0
        logits[1, 7] = 5.0
        assert sample(logits, [row(GREEDY)] * 3) == [123, 7, 123]


# ---- independence --------------------------------------------------------------------------------------------------


def mixed_rows(count: int) -> list[ScheduledSequence]:
    params = [*MIXED, GREEDY, SamplingParams(temperature=1e-3)]
    return [row(params[i * 37 % len(params)], seed=i, num_output=i % 5) for i in range(count)]


@pytest.mark.parametrize("vocab", [997, 3001])
def test_a_row_alone_equals_the_row_in_any_batch(vocab: int) -> None:
    rows = mixed_rows(60)
    logits = random_logits(60, vocab)
    expected = sample(logits, rows)
    assert [sample(logits[i : i + 1], [rows[i]])[0] for i in range(60)] == expected
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1)).tolist()
    assert sample(logits[order], [rows[i] for i in order]) == [expected[i] for i in order]
    assert sample(logits[:23], rows[:23]) == expected[:23]
    # Rows of a wider, padded buffer.
    padded = torch.full((60, vocab + 9), math.nan)
    padded[:, :vocab] = logits
    assert sample(padded[:, :vocab], rows) == expected


def test_memory_is_bounded_by_drawing_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = mixed_rows(60)
    logits = random_logits(60, VOCAB)
    expected = sample(logits, rows)
    weights, sizes = sampler._weights, []

    def recorded(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
        sizes.append(len(params))
        return weights(logits, params)

    monkeypatch.setattr(sampler, "_weights", recorded)
    for rows_at_once in (1, 7, 30):
        monkeypatch.setattr(sampler, "_CHUNK_CPU", rows_at_once * VOCAB + 1)
        sizes.clear()
        assert sample(logits, rows) == expected
        assert max(sizes) == rows_at_once
    monkeypatch.setattr(sampler, "_CHUNK_CPU", 1)  # a single row exceeds it
    assert sample(logits, rows) == expected


def test_the_same_row_gives_the_same_token_again() -> None:
    rows = mixed_rows(20)
    logits = random_logits(20, VOCAB)
    first = sample(logits, rows)
    assert all(sample(logits, rows) == first for _ in range(3))


def test_randomness_stays_with_the_request_when_the_batch_shrinks() -> None:
    """TTVLLM-356: randomness belongs to the request, not to its place in the batch."""
    # Requests of different lengths, each with its seed; the batch is compacted as they end.
    lengths = [2, 9, 5, 12]
    logits = [random_logits(12, VOCAB, seed=i) for i in range(4)]

    def alone(i: int) -> list[int]:
        return [sample(logits[i][j][None], [row(seed=i, num_output=j)])[0] for j in range(lengths[i])]

    together: list[list[int]] = [[] for _ in lengths]
    for j in range(max(lengths)):
        live = [i for i in range(4) if j < lengths[i]]
        tokens = sample(torch.stack([logits[i][j] for i in live]), [row(seed=i, num_output=j) for i in live])
        for i, token in zip(live, tokens, strict=True):
            together[i].append(token)
    assert together == [alone(i) for i in range(4)]


def test_seeds_samples_and_positions_differ() -> None:
    flat = torch.zeros(1, 2**20)
    rows = [
        row(seed=seed, sample_index=index, num_output=n)
        for seed in (0, 1, -1, 2**64 - 2, 10**30)
        for index in range(3)
        for n in range(3)
    ]
    tokens = sample(flat.expand(len(rows), -1), rows)
    assert len(set(tokens)) == len(tokens)
    # The position counts, wherever the prompt ends in it: a folded prompt changes nothing.
    assert sample(flat, [row(prompt=(1,) * 3, num_output=4)]) == sample(flat, [row(prompt=(1,) * 6, num_output=1)])


def test_sample_of_one_index_does_not_depend_on_their_number() -> None:
    """VLLM-11898: samples of one seed differ, and none depends on how many there are."""
    logits = random_logits(1, VOCAB).expand(8, -1)
    eight = sample(logits, [row(sample_index=i) for i in range(8)])
    assert sample(logits[:4], [row(sample_index=i) for i in range(4)]) == eight[:4]
    assert len(set(eight)) > 1


def test_uniform_numbers_are_uniform_and_independent() -> None:
    for key in (lambda i: (i, 0, 7), lambda i: (7, i, 0), lambda i: (7, 0, i), lambda i: (-i, 0, 0)):
        numbers = [uniform(*key(i)) for i in range(20_000)]
        assert all(0 <= u < 1 for u in numbers)
        assert len(set(numbers)) == 20_000
        buckets = Counter(int(u * 100) for u in numbers)
        assert sum((buckets[i] - 200) ** 2 / 200 for i in range(100)) < 99 + 4 * math.sqrt(2 * 99)
        pairs = Counter((int(a * 10), int(b * 10)) for a, b in pairwise(numbers))
        assert sum((pairs[i, j] - 199.99) ** 2 / 199.99 for i in range(10) for j in range(10)) < 99 + 4 * math.sqrt(198)


def test_uniform_numbers_stay_the_same() -> None:
    # A release that changes them changes what every seed gives.
    expected = [0.13870941014555427, 0.8062073084370032, 0.1519798560054627]
    assert [uniform(0, 0, 0), uniform(1, 0, 3), uniform(-5, 2, 100)] == expected


def test_global_random_state_and_settings_are_untouched() -> None:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    sample(random_logits(20, VOCAB), mixed_rows(20))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_logits_are_not_changed() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits = random_logits(60, VOCAB).to(dtype)
        before = logits.clone()
        sample(logits, mixed_rows(60))
        sample(logits, [row(GREEDY)] * 60)
        assert torch.equal(logits, before)


def test_default_dtype_of_the_host_program_does_not_matter() -> None:
    logits, rows = random_logits(60, VOCAB), mixed_rows(60)
    expected = sample(logits, rows)
    torch.set_default_dtype(torch.float64)
    try:
        assert sample(logits, rows) == expected
    finally:
        torch.set_default_dtype(torch.float32)


# ---- the shape of the call -----------------------------------------------------------------------------------------


def test_empty_batch() -> None:
    assert sample(torch.zeros(0, VOCAB), []) == []


def test_wrong_number_of_rows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(3, 1000\) for 2 rows"):
        sample(torch.zeros(3, VOCAB), [row()] * 2)


def plain_sampler() -> Sampler:
    return Sampler(Grammars(None, (), VOCAB))


def never(*args: object, **kwargs: object) -> None:
    raise AssertionError("no row asked for it")


def test_greedy_costs_nothing_that_only_others_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "_draw", never)
    monkeypatch.setattr(sampler, "uniform", never)
    monkeypatch.setattr(sampler, "_sorted", never)
    for name in ("topk", "softmax", "exp_", "float", "to", "clone", "index_put", "index_select"):
        monkeypatch.setattr(torch.Tensor, name, never)
    results = plain_sampler().sample(torch.eye(4), [row(GREEDY, stop_ids=[1])] * 4)
    assert [result.token_ids for result in results] == [(0,), (1,), (2,), (3,)]


def test_features_cost_nothing_where_no_row_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "_sorted", never)
    for name in ("topk", "masked_fill_", "index_put", "index_select", "logsumexp"):
        monkeypatch.setattr(torch.Tensor, name, never)
    assert len(plain_sampler().sample(random_logits(4, VOCAB), [row(num_output=i) for i in range(4)])) == 4
