"""Log-probabilities of outputs and prompts: the model's own, with ranks, at the right positions."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import math
import random
from collections.abc import Iterator, Mapping, Sequence

import pytest
import torch

import batchkit.hf.logprobs as logprobs_module
import batchkit.hf.runner as runner_module
from batchkit.hf.grammar import Grammars
from batchkit.hf.logprobs import token_logprobs
from batchkit.hf.runner import TransformersRunner
from batchkit.hf.sampler import Sampler
from batchkit.hf.scoring import passes, scored_positions
from batchkit.types import Logprob, Request, RowResult, SamplingParams, ScheduledSequence, SchedulerOutput
from tiny_models import tiny
from unit_hf.helpers import random_logits, row

BLOCK, BLOCKS_EACH = 4, 8


def twin(logits: torch.Tensor, token: int, count: int) -> list[tuple[int, float, int]]:
    """``(token, logprob, rank)`` at one position, by sorting in plain Python."""
    values = logits.float().tolist()
    log_softmax = logits.float().log_softmax(-1).tolist()
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    best = order if count == -1 else order[:count]
    listed = [*best] if token in best else [*best, token]
    return [(i, log_softmax[i], order.index(i) + 1) for i in listed]


def check(entry: object, expected: Sequence[tuple[int, float, int]], atol: float = 1e-5) -> None:
    assert isinstance(entry, dict)
    assert [(token, found.rank) for token, found in entry.items()] == [(t, rank) for t, _, rank in expected]
    assert [found.logprob for found in entry.values()] == pytest.approx([lp for _, lp, _ in expected], abs=atol)


# ---- one position --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_they_equal_a_slow_twin_also_with_equal_logits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    vocab = 300  # in half precision many logits are equal
    logits = random_logits(24, vocab, scale=2.0).to(dtype)
    logits[3:6] = logits[3:6].round()
    logits[4, ::3] = -math.inf
    rng = random.Random(0)
    ids = [rng.randrange(vocab) for _ in range(24)]
    counts = [rng.choice([0, 1, 2, 5, 299, 300, 301, -1]) for _ in range(24)]
    before = logits.clone()
    expected = token_logprobs(logits, ids, counts)
    assert torch.equal(logits, before)
    for values, token, count, entry in zip(logits, ids, counts, expected, strict=True):
        check(entry, twin(values, token, count))
    for rows_at_once in (1, 7):
        monkeypatch.setattr(logprobs_module, "_CHUNK", rows_at_once * vocab + 1)
        assert token_logprobs(logits, ids, counts) == expected
    monkeypatch.setattr(logprobs_module, "_CHUNK", 1)  # a single position exceeds it
    assert token_logprobs(logits, ids, counts) == expected


def test_zero_and_minus_zero_are_equally_probable() -> None:
    (entry,) = token_logprobs(torch.tensor([[-0.0, 0.0, -0.0, -1.0]]), [2], [2])
    assert list(entry) == [0, 1, 2]
    assert entry[2].rank == 3


def test_the_given_token_comes_last_unless_it_is_among_the_best() -> None:
    logits = torch.tensor([[1.0, 4.0, 3.0, 2.0]])
    assert [list(token_logprobs(logits, [token], [2])[0]) for token in range(4)] == [
        [1, 2, 0],
        [1, 2],
        [1, 2],
        [1, 2, 3],
    ]
    assert list(token_logprobs(logits, [3], [0])[0]) == [3]


def test_rows_that_ask_get_them_and_the_others_do_not() -> None:
    logits = random_logits(4, 50)
    params = [SamplingParams(logprobs=k, temperature=0.8, top_k=5, presence_penalty=1) for k in (None, 0, 3, -1)]
    rows = [row(p, output=[7, 8]) for p in params]
    results = Sampler(Grammars(None, (), 50)).sample(logits, rows)
    assert results[0].logprobs is None
    for i, count in ((1, 0), (2, 3), (3, -1)):
        (token,), (entry,) = results[i].token_ids, results[i].logprobs or ()
        # Before penalties, temperature and filters.
        check(entry, twin(logits[i], token, count))


# ---- which positions -----------------------------------------------------------------------------------------------


def piece(request: Request, start: int, end: int, **changes: object) -> ScheduledSequence:
    """Positions [start, end) of the prompt and, behind it, of tokens that are all 9."""
    known = [*request.prompt_token_ids, *[9] * 20]
    of = row(request=request, seq_id=int(request.id))
    return of._replace(
        start=start,
        num_tokens=end - start,
        token_ids=tuple(known[start:end]),
        output_ids=[9] * 20,
        num_output=max(0, end - len(request.prompt_token_ids)),
        blocks=range(of.seq_id * BLOCKS_EACH, (of.seq_id + 1) * BLOCKS_EACH),
        samples=end >= len(request.prompt_token_ids),
    )._replace(**changes)


def scoring(number: int, prompt: Sequence[int], count: int | None = 2, **params: object) -> Request:
    given = SamplingParams(prompt_logprobs=count, **params)
    return Request(id=str(number), prompt_token_ids=tuple(prompt), params=given, max_tokens=9, seed=number)


PROMPT = [5, 9, 14, 3, 80, 33, 12, 7, 9, 41, 60, 2]


def test_positions_that_score_are_those_before_the_last_of_the_prompt() -> None:
    request = scoring(0, PROMPT)
    assert scored_positions(piece(request, 0, 12)) == range(0, 11)
    assert scored_positions(piece(request, 3, 5)) == range(3, 5)
    assert scored_positions(piece(request, 10, 14)) == range(10, 11)  # computed again, with outputs behind
    assert not scored_positions(piece(request, 11, 12))
    assert not scored_positions(piece(request, 13, 14))
    assert not scored_positions(piece(request, 0, 12, sample_index=1))
    assert not scored_positions(piece(scoring(0, PROMPT, None), 0, 12))
    assert not scored_positions(piece(scoring(0, [4]), 0, 1))


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 11, 12, 100])
def test_passes_are_short_and_hold_each_position_once(limit: int) -> None:
    rng = random.Random(limit)
    rows = []
    for i in range(12):
        start = rng.randrange(11)
        rows.append(piece(scoring(i, PROMPT, rng.choice([None, 0, 1])), start, rng.randint(start + 1, 16)))
    made = passes(rows, limit)
    for part in made:
        assert sum(len(scored_positions(r)) for _, r in part) <= limit
        assert len({index for index, _ in part}) == len(part) > 0
    pieces = [(index, r) for part in made for index, r in part]
    assert [index for index, _ in pieces] == sorted(index for index, _ in pieces)
    for i, whole in enumerate(rows):
        parts = [r for index, r in pieces if index == i]
        assert [r.start for r in parts[1:]] == [r.start + r.num_tokens for r in parts[:-1]]
        assert all(len(r.token_ids) == r.num_tokens > 0 for r in parts)
        assert sum((r.token_ids for r in parts), ()) == whole.token_ids
        assert [r.samples for r in parts] == [False] * (len(parts) - 1) + [whole.samples]
        last = parts[-1]
        assert parts[0].start == whole.start
        assert last._replace(start=0, num_tokens=0, token_ids=()) == whole._replace(start=0, num_tokens=0, token_ids=())
    if limit == 100:
        assert len(made) == 1
        assert [r for _, r in made[0]] == rows  # untouched


# ---- through a model -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["llama", "gemma2", "no logits_to_keep"])
def model(request: pytest.FixtureRequest) -> Iterator[torch.nn.Module]:
    made = tiny("llama" if request.param == "no logits_to_keep" else request.param)
    if request.param == "no logits_to_keep":
        family = type(made)

        class Plain(family):  # type: ignore[misc, valid-type]
            def forward(self, *args: object, logits_to_keep: object = 0, **kwargs: object) -> object:
                return super().forward(*args, **kwargs)

        made.__class__ = Plain
    return made


def execute(runner: TransformersRunner, *rows: ScheduledSequence) -> tuple[RowResult, ...]:
    results = runner.execute(SchedulerOutput(rows=rows, num_tokens=sum(r.num_tokens for r in rows))).rows
    assert [result.error for result in results] == [None] * len(rows)
    return results


def log_softmax(model: torch.nn.Module, tokens: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)


def check_prompt(
    entries: Mapping[int, Mapping[int, Logprob]], model: torch.nn.Module, prompt: Sequence[int], k: int
) -> None:
    assert sorted(entries) == list(range(1, len(prompt)))
    truth = log_softmax(model, prompt)
    for position, entry in entries.items():
        check(entry, twin(truth[position - 1], prompt[position], k), atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 3, 5, 12])
@pytest.mark.parametrize("limit", [None, 1, 4])
def test_scores_of_a_prompt_equal_one_plain_pass(
    model: torch.nn.Module, chunk: int, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM-29216, VLLM-5846: entry i is that of token i, each once, whatever the chunks and neighbours."""
    if limit is not None:
        monkeypatch.setattr(runner_module, "_MAX_SCORED", limit * 97)
    runner = TransformersRunner(model, num_kv_blocks=32, block_size=BLOCK)
    runner._pool.fill(float("nan"))
    # Decoding rows stand before and behind; another prompt is scored in the same steps.
    decoding, other = scoring(1, PROMPT[::-1], None, temperature=0), scoring(2, [7, 8], None, logprobs=1)
    first, second = scoring(0, PROMPT), scoring(3, PROMPT[3:], -1)
    execute(runner, piece(decoding, 0, 12), piece(other, 0, 2))
    best = int(log_softmax(model, [*PROMPT[::-1], 9])[-1].argmax())
    behind = log_softmax(model, [7, 8, 9])[2]
    found: dict[str, dict[int, Mapping[int, Logprob]]] = {first.id: {}, second.id: {}}
    for start in range(0, len(PROMPT), chunk):
        parts = [piece(first, start, min(start + chunk, 12))]
        if start < 9:
            parts.append(piece(second, start, min(start + chunk, 9)))
        rows = [piece(decoding, 12, 13), parts[0], piece(other, 2, 3), *parts[1:]]
        results = execute(runner, *rows)
        assert [len(result.token_ids) for result in results] == [r.samples for r in rows]
        assert results[0] == RowResult((best,))
        check((results[2].logprobs or ())[0], twin(behind, results[2].token_ids[0], 1), 1e-4)
        assert results[2].prompt_logprobs is None
        for of, result in zip(rows, results, strict=True):
            entries = result.prompt_logprobs or {}
            assert list(entries) == [position + 1 for position in scored_positions(of)]
            found.setdefault(of.request.id, {}).update(entries)
    check_prompt(found[first.id], model, PROMPT, 2)
    check_prompt(found[second.id], model, PROMPT[3:], -1)


def test_computing_positions_again_gives_the_same_scores(model: torch.nn.Module) -> None:
    runner = TransformersRunner(model, num_kv_blocks=32, block_size=BLOCK)
    request = scoring(0, PROMPT, 0)
    (first,) = execute(runner, piece(request, 0, 12))
    runner.drop_caches()
    (resumed,) = execute(runner, piece(request, 0, 15))  # after a preemption: the outputs behind it
    assert resumed.prompt_logprobs is not None
    check_prompt(resumed.prompt_logprobs, model, PROMPT, 0)
    assert first.prompt_logprobs is not None
    assert list(first.prompt_logprobs) == list(range(1, 12))
    # A prompt that is scored and not continued, a single token, and an idle row.
    (nothing,) = execute(runner, piece(request, 0, 12)._replace(samples=False))
    assert nothing._replace(prompt_logprobs=None) == RowResult() and nothing.prompt_logprobs is not None
    # With one logit less, several threads round otherwise.
    for (at, mine), (there, theirs) in zip(nothing.prompt_logprobs.items(), first.prompt_logprobs.items(), strict=True):
        assert at == there and list(mine) == list(theirs)
        for token, (logprob, rank) in mine.items():
            assert logprob == pytest.approx(theirs[token].logprob, abs=1e-5) and rank == theirs[token].rank
    (single,) = execute(runner, piece(scoring(1, [4]), 0, 1)._replace(samples=False))
    assert single == RowResult()
    (idle,) = execute(runner, piece(request, 13, 14)._replace(samples=False, idle=True))
    assert idle == RowResult()


def test_a_long_chunk_has_no_logits_of_its_own_length(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    runner = TransformersRunner(model, num_kv_blocks=32, block_size=BLOCK)
    monkeypatch.setattr(runner_module, "_MAX_SCORED", 5 * 97)
    sizes: list[int] = []
    forward, compute = runner._forward, runner._compute
    monkeypatch.setattr(runner, "_forward", lambda b, t: sizes.append(len(t)) or forward(b, t))

    def computed(rows: object) -> object:
        logits, scores = compute(rows)
        assert logits.untyped_storage().nbytes() <= 97 * 4  # nothing keeps those of the other positions
        return logits, scores

    monkeypatch.setattr(runner, "_compute", computed)
    prompt = [(7 * i) % 97 for i in range(31)]
    execute(runner, piece(scoring(0, prompt), 0, 31))
    assert sizes == [5, 5, 5, 5, 5, 6]  # of which the last one is sampled from
    sizes.clear()
    execute(runner, piece(scoring(0, prompt, None), 0, 31))
    assert sizes == [1]


def test_scores_that_are_not_finite_end_their_row(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = TransformersRunner(tiny(), num_kv_blocks=32, block_size=BLOCK)
    forward = runner._forward

    def broken(*args: object) -> torch.Tensor:
        logits = forward(*args)
        logits[10, 5] = math.nan
        return logits

    monkeypatch.setattr(runner, "_forward", broken)
    rows = (piece(scoring(0, PROMPT), 0, 11), piece(scoring(1, PROMPT[:5]), 0, 5))
    bad, good = runner.execute(SchedulerOutput(rows=rows, num_tokens=16)).rows
    assert bad == RowResult(error="the model's logits at position 10 are not finite")
    assert good.error is None
    assert set(good.prompt_logprobs or {}) == {1, 2, 3, 4}
