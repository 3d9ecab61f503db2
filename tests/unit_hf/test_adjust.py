"""What requests add to their logits, penalise and forbid, against a slow twin in plain Python."""

from __future__ import annotations

import copy
import math
import pickle
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from batchkit.hf.adjust import LogitsAdjuster
from batchkit.hf.grammar import Grammars
from batchkit.hf.penalties import TokenCounts
from batchkit.hf.sampler import Sampler
from batchkit.hf.token_states import TokenStates
from batchkit.types import RowResult, SamplingParams, ScheduledSequence
from unit_hf.helpers import GREEDY, PLAIN, random_logits, row

VOCAB = 40


def new_sampler() -> Sampler:
    return Sampler(Grammars(None, (), VOCAB))


def adjusted(logits: torch.Tensor, rows: Sequence[ScheduledSequence]) -> torch.Tensor:
    made = LogitsAdjuster(Grammars(None, (), VOCAB)).adjust(logits, rows)
    return logits if made is None else made.logits


def tokens(results: Sequence[RowResult]) -> list[int]:
    assert [result.error for result in results] == [None] * len(results)
    return [result.token_ids[0] for result in results]


def twin(logits: list[float], of: ScheduledSequence) -> list[float]:
    """One row, token by token."""
    request, params = of.request, of.request.params
    output = list(of.output_ids[: of.num_output])
    made = list(logits)
    for token, bias in (params.logit_bias or {}).items():
        made[token] += bias
    for processor in params.logits_processors:
        made = processor(request.prompt_token_ids, tuple(output), torch.tensor(made)).tolist()
    for token in {*request.prompt_token_ids, *output}:
        factor = params.repetition_penalty
        made[token] = made[token] / factor if made[token] > 0 else made[token] * factor
    for token, count in Counter(output).items():
        made[token] -= params.frequency_penalty * count + params.presence_penalty
    for token in range(len(made)):
        early = len(output) < params.min_tokens and token in request.stop_token_ids
        unlisted = params.allowed_token_ids is not None and token not in params.allowed_token_ids
        bad = any([*output, token][-len(word) :] == list(word) for word in request.bad_words)
        if early or unlisted or bad:
            made[token] = -math.inf
    return made


def push(prompt: Sequence[int], output: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """A processor that changes what it is given, and depends on all that it is told."""
    logits[(sum(prompt) + 3 * len(output)) % VOCAB] += 2.5
    return logits


def halve(prompt: Sequence[int], output: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """A processor that makes a new tensor, of another type."""
    return (logits / 2).double()


def random_params(rng: random.Random) -> SamplingParams:
    def maybe(value: object, otherwise: object) -> object:
        return value if rng.random() < 0.4 else otherwise

    ids = range(VOCAB)
    return SamplingParams(
        temperature=rng.choice([0, 0.6, 1, 1.5]),
        top_k=maybe(rng.randint(1, 30), 0),
        top_p=maybe(rng.uniform(0.3, 1), 1.0),
        min_p=maybe(rng.uniform(0, 0.3), 0.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        repetition_penalty=maybe(rng.choice([0.5, 1.3, 2.0]), 1.0),
        logit_bias=maybe({token: rng.uniform(-5, 5) for token in rng.sample(ids, 4)}, None),
        allowed_token_ids=maybe(rng.sample(ids, 25), None),
        logits_processors=maybe(rng.choice([[push], [halve], [push, halve]]), ()),
        min_tokens=maybe(5, 0),
        logprobs=maybe(rng.randint(-1, 4), None),
    )


def random_rows(count: int, rng: random.Random, first: int = 0) -> list[ScheduledSequence]:
    return [
        row(
            random_params(rng),
            seq_id=first + i,
            seed=i,
            prompt=[rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))],
            output=[rng.randrange(VOCAB // 2) for _ in range(rng.randint(0, 12))],
            stop_ids=[2, 7] if rng.random() < 0.5 else [],
            bad_words=[(4,), (0, 1), (3, 3, 5)] if rng.random() < 0.5 else [],
        )
        for i in range(count)
    ]


# ---- each parameter ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adjusted_logits_equal_the_slow_twin(seed: int, dtype: torch.dtype) -> None:
    rows = random_rows(40, random.Random(seed))
    logits = random_logits(40, VOCAB, seed=seed).to(dtype)
    before = logits.clone()
    got = adjusted(logits, rows)
    assert torch.equal(logits, before)
    expected = torch.tensor([twin(values, r) for values, r in zip(logits.float().tolist(), rows, strict=True)])
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_presence_and_frequency_look_at_the_output_and_repetition_at_the_prompt_too() -> None:
    """METAL-69, TRTLLM-5623, VLLM-1577: the scope of each penalty."""
    # Token 5 stands in the prompt three times, and nothing has been generated.
    logits = torch.zeros(1, VOCAB)
    logits[0, 5], logits[0, 6] = 3.0, -3.0
    prompt = [5, 6, 5, 5]
    first = row(SamplingParams(presence_penalty=2, frequency_penalty=2), prompt=prompt)
    assert torch.equal(adjusted(logits, [first]), logits)
    repeated = adjusted(logits, [row(SamplingParams(repetition_penalty=2.0), prompt=prompt)])
    assert repeated[0, [5, 6, 7]].tolist() == [1.5, -6.0, 0.0]
    # Once it is in the output as well, the repetition penalty still applies once.
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=1)
    later = adjusted(logits, [row(params, prompt=prompt, output=[5, 5, 8])])
    assert later[0, [5, 6, 7, 8]].tolist() == [1.5 - 0.5 - 1, -6.0, 0.0, -1.25]


@pytest.mark.parametrize("penalty", [1e-50, 1e300])
def test_an_absurd_repetition_penalty_gives_no_nan(penalty: float) -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0, 5.0]])
    got = adjusted(logits, [row(SamplingParams(repetition_penalty=penalty), prompt=[0, 1, 2])])
    assert not got.isnan().any()


def test_no_token_sampled_is_one_that_is_not_allowed() -> None:
    params = SamplingParams(allowed_token_ids=[3, 9, 9, 20], temperature=2.0)
    logits = random_logits(1, VOCAB).expand(300, -1)
    drawn = tokens(new_sampler().sample(logits, [row(params, seed=i) for i in range(300)]))
    assert set(drawn) == {3, 9, 20}
    # Nor a stop token that is not in the list.
    hit = torch.zeros(1, VOCAB)
    hit[0, 2] = 50
    assert tokens(new_sampler().sample(hit, [row(params, stop_ids=[2])]))[0] in {3, 9, 20}


def test_bad_words_are_not_completed() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 6], logits[0, 8] = 9.0, 5.0
    words = [(4, 5, 6), (7,)]

    def best(output: Sequence[int], prompt: Sequence[int] = (1,)) -> int:
        return tokens(new_sampler().sample(logits, [row(GREEDY, prompt=prompt, output=output, bad_words=words)]))[0]

    assert best([]) == best([5]) == best([4, 6]) == best([4, 5, 6]) == 6
    assert best([4, 5]) == best([9, 4, 5]) == 8
    # What the prompt has begun was not generated.
    assert best([5], prompt=[4]) == best([], prompt=[4, 5]) == 6


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p)), replace])
def test_min_tokens_masks_every_stop_token_also_in_a_copy_of_the_params(again: Callable[..., SamplingParams]) -> None:
    """VLLM-5849, VLLM-15407: a second EOS token ended it, or the mask was lost with a copy."""
    logits = torch.zeros(1, VOCAB)
    logits[0, [2, 7]] = 50.0
    logits[0, 4] = 25.0
    for temperature in (0.0, 1.0):
        params = again(SamplingParams(temperature=temperature, min_tokens=4))
        rows = [row(params, output=[4] * n, stop_ids=[2, 7, VOCAB, 99]) for n in range(7)]
        drawn = [tokens(new_sampler().sample(logits, [r]))[0] for r in rows]
        assert drawn[:4] == [4] * 4
        assert set(drawn[4:]) <= {2, 7}


@pytest.mark.parametrize("minimum", range(6))
def test_min_tokens_is_exactly_the_number_of_tokens_before_the_stop_token(minimum: int) -> None:
    """VLLM-46243, VLLM-21987: off by one."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 2] = 50.0
    output: list[int] = []
    while 2 not in output:
        params = SamplingParams(min_tokens=minimum, temperature=0)
        output += tokens(new_sampler().sample(logits, [row(params, output=output, stop_ids=[2])]))
    assert len(output) == minimum + 1


def test_minimum_of_one_row_does_not_touch_the_others() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, 2] = 50.0
    logits[:, 4] = 25.0
    rows = [row(SamplingParams(temperature=t, min_tokens=m), stop_ids=[2]) for t, m in [(0, 0), (0, 1), (1, 0)]]
    assert tokens(new_sampler().sample(logits, rows)) == [2, 4, 2]


def test_the_filters_see_what_the_masks_left() -> None:
    # The best token is forbidden: top_k takes the best of the rest, and nothing allows it again.
    logits = torch.arange(VOCAB, dtype=torch.float32)[None]
    params = SamplingParams(top_k=1, allowed_token_ids=[5, 6], logit_bias={39: 100}, repetition_penalty=0.001)
    assert tokens(new_sampler().sample(logits, [row(params, prompt=[39])])) == [6]


# ---- processors ----------------------------------------------------------------------------------------------------


def test_a_processor_gets_prompt_output_and_logits_and_can_harm_no_one_else() -> None:
    seen: list[tuple[object, object, torch.Tensor]] = []

    def processor(prompt: Sequence[int], output: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append((prompt, output, logits.clone()))
        logits.fill_(-math.inf)[11] = 0.0
        return logits

    logits = random_logits(3, VOCAB).bfloat16()
    before = logits.clone()
    output = [4, 5, 6, 7]
    params = SamplingParams(logits_processors=[processor], logprobs=0, logit_bias={0: 1.0})
    rows = [row(GREEDY), row(params, prompt=[1, 2], output=output, num_output=3), row(GREEDY)]
    results = new_sampler().sample(logits, rows)
    best = logits.float().argmax(-1).tolist()
    assert tokens(results) == [best[0], 11, best[2]]
    assert torch.equal(logits, before)
    (told,) = seen
    assert told[:2] == ((1, 2), (4, 5, 6))
    assert (told[2].dtype, told[2].shape) == (torch.float32, (VOCAB,))
    assert torch.equal(told[2][1:], logits[1, 1:].float())  # before the penalties, after the bias
    assert told[2][0] == logits[1, 0].float() + 1
    # Log-probabilities are the model's own.
    assert results[1].logprobs[0][11].logprob == pytest.approx(float(logits[1].float().log_softmax(-1)[11]))


def failing(prompt: object, output: object, logits: torch.Tensor) -> torch.Tensor:
    raise KeyError("ouch")


@pytest.mark.parametrize(
    ("processor", "words"),
    [
        (failing, "failing failed: KeyError: 'ouch'"),
        (lambda *_: None, "TypeError: it must return the logits, a floating-point tensor, and returned None"),
        (lambda p, o, x: x > 0, "TypeError: it must return the logits, a floating-point tensor"),
        (lambda p, o, x: x[:-1], rf"ValueError: it must return logits of shape \({VOCAB},\), and returned \(39,\)"),
        (lambda p, o, x: x[None], r"and returned \(1, 40\)"),
        (lambda p, o, x: x * math.nan, "ValueError: it returned NaN"),
        (lambda p, o, x: x - math.inf, "logits_processors left no token to sample"),
    ],
)
def test_a_processor_that_fails_ends_its_own_row(processor: Callable[..., object], words: str) -> None:
    logits = random_logits(3, VOCAB)
    later: list[object] = []
    bad = row(SamplingParams(logits_processors=[processor, lambda p, o, x: later.append(o) or x]))
    good = row(SamplingParams(presence_penalty=1), output=[3])
    sampler = new_sampler()
    alone = sampler.sample(logits[:1], [good]) + sampler.sample(logits[2:], [row(seed=5)])
    results = sampler.sample(logits, [good, bad, row(seed=5)])
    assert [results[0], results[2]] == alone
    assert (results[1].token_ids, results[1].logprobs) == ((), None)
    with pytest.raises(ValueError, match=words):
        raise ValueError(results[1].error)


def test_an_interrupt_in_a_processor_is_not_an_error_of_the_row() -> None:
    def interrupted(*_: object) -> torch.Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        new_sampler().sample(torch.zeros(1, VOCAB), [row(SamplingParams(logits_processors=[interrupted]))])


# ---- what leaves no token ------------------------------------------------------------------------------------------


def test_a_row_without_a_token_left_names_the_parameters() -> None:
    logits = random_logits(4, VOCAB)
    logits[3, 5] = -math.inf
    both = SamplingParams(allowed_token_ids=[4, 2], min_tokens=3)
    rows = [
        row(both, bad_words=[(4,)], stop_ids=[2]),
        row(both, bad_words=[(4,)], stop_ids=[2], output=[1, 1, 1]),
        row(SamplingParams(allowed_token_ids=[4])),
        row(SamplingParams(allowed_token_ids=[5])),  # which the model itself forbids
    ]
    results = new_sampler().sample(logits, rows)
    assert results[0].error == "allowed_token_ids and bad_words and min_tokens left no token to sample"
    assert [r.token_ids for r in results[1:3]] == [(2,), (4,)]
    assert results[3].error == "allowed_token_ids left no token to sample"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_end_their_row_whatever_it_asks_for(bad: float) -> None:
    logits = random_logits(4, VOCAB)
    logits[1:3] = bad
    rows = [row(), row(SamplingParams(repetition_penalty=2.0, logprobs=2)), row(), row(SamplingParams(logprobs=1))]
    results = new_sampler().sample(logits, rows)
    message = "the model's logits at position 0 are not finite"
    assert [result.error for result in results] == [None, message, message, None]
    assert results[3].logprobs is not None


# ---- independence --------------------------------------------------------------------------------------------------


def everything(results: Sequence[RowResult]) -> list[RowResult]:
    assert all(result.error is None or "left no token" in result.error for result in results)
    return list(results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_with_any_parameters_alone_equals_the_row_in_any_batch(dtype: torch.dtype) -> None:
    rows = random_rows(60, random.Random(3))
    logits = random_logits(60, VOCAB, seed=3).to(dtype)
    expected = everything(new_sampler().sample(logits, rows))
    assert sum(result.error is None for result in expected) > 50
    sampler = new_sampler()
    for _ in range(2):  # with nothing kept, and with everything kept
        assert [sampler.sample(logits[i : i + 1], [rows[i]])[0] for i in range(60)] == expected
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1)).tolist()
    assert sampler.sample(logits[order], [rows[i] for i in order]) == [expected[i] for i in order]
    assert sampler.sample(logits, rows) == expected
    sampler.drop_caches()
    assert sampler.sample(logits, rows) == expected


def test_settings_stay_with_their_request_when_rows_come_and_go() -> None:
    """MLXLM-1225, OMLX-1824: a request ran with a neighbour's processor, or without its own."""
    # A without settings ends; then B with a hook joins C, which is greedy, and D with a penalty.
    called: list[tuple[int, ...]] = []

    def hook(prompt: Sequence[int], output: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        called.append((*prompt, len(output)))
        logits[17] += 100.0
        return logits

    of = {
        "a": row(PLAIN, seq_id=1, prompt=[1]),
        "b": row(SamplingParams(logits_processors=[hook], top_k=1), seq_id=2, prompt=[2]),
        "c": row(GREEDY, seq_id=3, prompt=[3]),
        "d": row(SamplingParams(frequency_penalty=2.0, temperature=0), seq_id=4, prompt=[4]),
    }
    logits = {name: random_logits(10, VOCAB, seed=ord(name), scale=1.0) for name in of}
    steps = ["ac", "dca", "cdb", "bd", "dbc", "db"]

    def run(steps: Sequence[str]) -> dict[str, list[int]]:
        sampler, output = new_sampler(), {name: [] for name in of}
        for names in steps:
            rows = [of[n]._replace(output_ids=output[n], num_output=len(output[n])) for n in names]
            batch = torch.stack([logits[n][len(output[n])] for n in names])
            for name, token in zip(names, tokens(sampler.sample(batch, rows)), strict=True):
                output[name].append(token)
        return output

    together = run(steps)
    assert called == [(2, i) for i in range(4)]
    assert together["b"] == [17] * 4
    for name in of:
        assert run([name for names in steps if name in names])[name] == together[name]


# ---- what is kept between steps ------------------------------------------------------------------------------------


def test_counts_take_in_each_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    take = TokenCounts.take
    monkeypatch.setattr(TokenCounts, "take", lambda self, ids: taken.extend(ids) or take(self, ids))
    sampler, output = new_sampler(), [0] * 500
    of = row(SamplingParams(presence_penalty=1.0), output=output)
    for n in range(50):
        step = of._replace(num_output=len(output))
        for _ in range(2):  # the same step twice
            (result,) = sampler.sample(random_logits(1, VOCAB, seed=n), [step])
        output += result.token_ids
    assert len(taken) == 500 + 49


def test_a_state_is_that_of_its_row_whatever_came_before() -> None:
    class Seen:
        def __init__(self, request: object) -> None:
            self.request, self.tokens = request, []

        def take(self, token_ids: Sequence[int]) -> None:
            if 99 in token_ids:
                raise ValueError("99")
            self.tokens += token_ids

    states = TokenStates(Seen, size=3)
    output = [1, 2, 3, 4]
    of = row(output=output)

    def at(n: int, r: ScheduledSequence = of) -> list[int]:
        state = states.at(r._replace(num_output=n))
        assert state.request is r.request
        return state.tokens

    assert at(2) == [1, 2]
    assert at(2) == [1, 2]
    assert at(4) == output
    assert at(1) == [1]  # back
    assert at(3) == [1, 2, 3]
    assert at(2, row(output=output)) == [1, 2]  # another request under the same number
    assert at(2, of._replace(output_ids=[7, 8])) == [7, 8]  # another buffer
    assert at(3) == [1, 2, 3]
    output.append(99)
    for _ in range(2):
        with pytest.raises(ValueError, match="99"):
            at(5)
    assert at(4) == [1, 2, 3, 4]
    for i in range(10):
        at(4, of._replace(seq_id=10 + i))
    states.trim(num_rows=5)  # within a step as many as it has rows
    assert len(states) == 5
    states.trim(num_rows=1)
    assert len(states) == 3
    states.clear()
    assert len(states) == 0
    assert at(3) == [1, 2, 3]


def test_what_is_kept_is_bounded() -> None:
    sampler = new_sampler()
    adjuster = sampler._adjuster
    params = SamplingParams(presence_penalty=1.0, allowed_token_ids=[3])
    for i in range(600):
        sampler.sample(torch.zeros(1, VOCAB), [row(params, seq_id=i)])
    assert len(adjuster._counts) == len(adjuster._allowed) == 256
    sampler.drop_caches()
    assert len(adjuster._counts) == len(adjuster._allowed) == 0
