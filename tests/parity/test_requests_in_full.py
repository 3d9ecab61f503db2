"""For every parameter: what a request gets is the same alone and under everything that an engine may do to it.

Neighbours, preemption (recomputed and swapped), chunks of 1, 3 and whole prompts, cached prefixes, and more samples. In
float32, where the shape of a batch moves logits by less than any margin here; log-probabilities are compared within
1e-4.
"""

from __future__ import annotations

import json
import re

import pytest
import torch

from batchkit import (
    ChunkedPrefillScheduler,
    Engine,
    PagedScheduler,
    RequestOutput,
    SamplingParams,
    StaticScheduler,
    StructuredOutputsParams,
)
from tiny_models import tiny

VOCAB = 97
PROMPT = [(7 * i) % 60 + 5 for i in range(13)]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "é"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def halve(prompt_ids, output_ids, logits):
    """Depends on all that a processor is given."""
    logits[(sum(prompt_ids) + len(output_ids)) % VOCAB] += 3
    return logits / 2


PARAMS = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 1.3},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "presence_penalty": {"presence_penalty": 1.5, "temperature": 0},
    "frequency_penalty": {"frequency_penalty": 0.7},
    "repetition_penalty": {"repetition_penalty": 1.8, "temperature": 0},
    "logit_bias": {"logit_bias": {11: 2.0, 12: 2.5, 13: -100}},
    "allowed_token_ids": {"allowed_token_ids": [3, 5, 8, 13, 21]},
    "bad_words": {"bad_words": ["ab", "c"], "allowed_token_ids": [65, 66, 67]},
    "logits_processors": {"logits_processors": [halve]},
    "stop_token_ids": {"stop_token_ids": list(range(0, VOCAB, 9))},
    "min_tokens": {"stop_token_ids": list(range(0, VOCAB, 3)), "min_tokens": 6},
    "stop": {"stop": ["e", "oo"]},
    "logprobs": {"logprobs": 3},
    "prompt_logprobs": {"prompt_logprobs": 2, "logprobs": 0},
    "all": {
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.01,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.2,
        "logit_bias": {11: 1.0},
        "logits_processors": [halve],
        "logprobs": 1,
        "prompt_logprobs": 0,
    },
}


class Letters:
    """Token k is character k + 32."""

    eos_token_id = 2

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 32 for letter in text]

    def decode(self, token_ids, *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(token + 32) for token in token_ids)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    model = tiny()
    with torch.no_grad():  # flat logits would give margins of nothing
        model.lm_head.weight.mul_(12)
    return model


def engine_of(model: torch.nn.Module, scheduler: type = PagedScheduler, **options) -> Engine:
    options = {"num_kv_blocks": 64, "block_size": 4, "max_num_seqs": 8, **options}
    return Engine.from_model(model, Letters(), scheduler=scheduler, **options)


def params_of(name: str, **changes) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 14, "seed": 3, **PARAMS[name], **changes})


def run(engine: Engine, prompts: list, params: list) -> list[RequestOutput]:
    with engine:
        return engine.generate(prompts, params)


@pytest.fixture(scope="module")
def alone(model):
    """What each request gets by itself, in one piece; each is computed once."""
    known: dict = {}

    def get(name: str, n: int = 1, prompt=PROMPT) -> RequestOutput:
        key = name, n, tuple(prompt)
        if key not in known:
            (known[key],) = run(engine_of(model), [prompt], [params_of(name, n=n)])
        return known[key]

    return get


def assert_same(have: RequestOutput, want: RequestOutput) -> None:
    assert have.error is None and want.error is None
    for mine, other in zip(have.outputs, want.outputs, strict=True):
        assert (mine.token_ids, mine.text, mine.finish_reason) == (other.token_ids, other.text, other.finish_reason)
        assert_close(mine.logprobs, other.logprobs)
        assert mine.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)
    assert_close(have.prompt_logprobs, want.prompt_logprobs)


def assert_close(have, want) -> None:
    assert (have is None) == (want is None)
    for mine, other in zip(have or (), want or (), strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            assert list(mine) == list(other)
            for token in mine:
                assert mine[token].rank == other[token].rank
                assert mine[token].logprob == pytest.approx(other[token].logprob, abs=1e-4)


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("name", PARAMS)
class TestTheSame:
    def test_beside_all_others(self, model, alone, name, n) -> None:
        prompts = [PROMPT, *([PROMPT[i % 9 :] for i in range(len(PARAMS))])]
        params = [params_of(name, n=n), *(params_of(other, seed=i) for i, other in enumerate(PARAMS))]
        outputs = run(engine_of(model, ChunkedPrefillScheduler, max_tokens_per_step=17), prompts, params)
        assert_same(outputs[0], alone(name, n))

    @pytest.mark.parametrize("swap_memory", [None, "1MiB"])
    def test_preempted(self, model, alone, name, n, swap_memory) -> None:
        engine = engine_of(model, num_kv_blocks=9, swap_memory=swap_memory)
        with engine:
            ids = [engine.add_request(PROMPT, params_of(name, n=n)) for _ in range(3)]
            finals = {}
            for step in range(1000):
                if step in (1, 3, 5, 8):  # one that runs, whoever it is
                    for seq in list(engine._scheduler.running)[-1:]:
                        engine._scheduler._evict(seq)
                finals.update({out.request_id: out for out in engine.step() if out.finished})
                engine.check()
                if not engine.has_unfinished():
                    break
            num_preemptions = sum(out.timings.num_preemptions for out in finals.values())
        assert num_preemptions >= 2
        for request_id in ids:
            assert_same(finals[request_id], alone(name, n))

    @pytest.mark.parametrize("chunk", [1, 3, 13])
    def test_in_chunks(self, model, alone, name, n, chunk) -> None:
        engine = engine_of(model, ChunkedPrefillScheduler, max_num_seqs=1, max_tokens_per_step=chunk)
        assert_same(run(engine, [PROMPT], [params_of(name, n=n)])[0], alone(name, n))

    def test_behind_a_cached_prefix(self, model, alone, name, n) -> None:
        engine = engine_of(model, ChunkedPrefillScheduler, prefix_caching=True)
        with engine:
            engine.generate([PROMPT], params_of("greedy"))
            before = engine.stats().cached_tokens
            (output,) = engine.generate([PROMPT], params_of(name, n=n))
            hits = engine.stats().cached_tokens - before
        assert_same(output, alone(name, n))
        scored = "prompt_logprobs" in PARAMS[name]
        assert output.timings.cached_tokens == (0 if scored else 12)
        assert hits == 12 * (n - scored)

    def test_in_a_static_batch(self, model, alone, name, n) -> None:
        outputs = run(engine_of(model, StaticScheduler, max_num_seqs=3), [PROMPT] * 2, [params_of(name, n=n)] * 2)
        for output in outputs:
            assert_same(output, alone(name, n))

    def test_as_the_first_of_more(self, model, alone, name, n) -> None:
        more, one = alone(name, 4), alone(name, n)
        for mine, other in zip(one.outputs, more.outputs[:n], strict=True):
            assert (mine.token_ids, mine.finish_reason) == (other.token_ids, other.finish_reason)


@pytest.mark.parametrize("name", PARAMS)
def test_each_parameter_has_an_effect(alone, name) -> None:
    """Else the comparisons above would hold for nothing."""
    if name in ("logprobs", "prompt_logprobs"):
        assert alone(name).outputs[0].logprobs is not None
    elif name not in ("greedy", "temperature"):
        plain = alone("greedy" if PARAMS[name].get("temperature") == 0 else "temperature")
        assert alone(name).token_ids != plain.token_ids


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_scores_are_those_of_the_model(model, chunk) -> None:
    with torch.inference_mode():
        want = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    engine = engine_of(model, ChunkedPrefillScheduler, max_num_seqs=1, max_tokens_per_step=chunk)
    (output,) = run(engine, [PROMPT], [SamplingParams(max_tokens=0, prompt_logprobs=2)])
    assert output.token_ids == () and output.finish_reason == "length"
    assert output.prompt_logprobs[0] is None
    for at in range(1, len(PROMPT)):
        entry, row = output.prompt_logprobs[at], want[at - 1]
        assert entry[PROMPT[at]].logprob == pytest.approx(float(row[PROMPT[at]]), abs=1e-4)
        assert entry[PROMPT[at]].rank == int((row > row[PROMPT[at]]).sum()) + 1
        assert [t for t in entry if entry[t].rank <= 2] == row.topk(2).indices.tolist()


# ---- structured outputs, with a tokenizer that has merges ----------------------------------------------------------


@pytest.fixture(scope="module")
def wild(smollm2):
    """A random model over a real vocabulary: every token is as likely as any other."""
    from transformers import AutoTokenizer

    return tiny(vocab_size=49152, max_position_embeddings=512), AutoTokenizer.from_pretrained(smollm2)


STRUCTURES = {
    "json": StructuredOutputsParams(json=SCHEMA),
    "regex": StructuredOutputsParams(regex="[a-f]{3,9}-(é|中)[0-9]+!"),
    "choice": StructuredOutputsParams(choice=["yes", "no", "naïve", "yes please"]),
}


def matches(kind: str, text: str) -> bool:
    if kind == "json":
        found = json.loads(text)
        return set(found) == {"a", "b"} and isinstance(found["a"], bool) and found["b"] in ("x", "é")
    if kind == "regex":
        return re.fullmatch("[a-f]{3,9}-(é|中)[0-9]+!", text) is not None
    return text in ("yes", "no", "naïve", "yes please")


@pytest.mark.parametrize("kind", STRUCTURES)
def test_structured_outputs_parse_and_are_the_same_under_everything(wild, kind) -> None:
    model, tokenizer = wild
    params = SamplingParams(structured_outputs=STRUCTURES[kind], max_tokens=100, n=3, seed=5)

    def generate(*, tight: bool = False, **options) -> list[RequestOutput]:
        options = {"num_kv_blocks": 29 if tight else 400, "block_size": 4, **options}
        with Engine.from_model(model, tokenizer, **options) as engine:
            outputs = engine.generate([PROMPT, PROMPT[:4]], params)
            assert engine.stats().num_preemptions or not tight
        return outputs

    want = generate()
    for completion in [completion for output in want for completion in output.outputs]:
        if completion.finish_reason == "stop":
            assert matches(kind, completion.text), completion.text
        else:
            assert completion.finish_reason == "length" and completion.num_tokens == 100
    assert any(completion.finish_reason == "stop" for output in want for completion in output.outputs)
    for options in (
        {"scheduler": ChunkedPrefillScheduler, "max_num_seqs": 1, "max_tokens_per_step": 1},
        {"scheduler": StaticScheduler},
        {"prefix_caching": True},
        *([{"tight": True}, {"tight": True, "swap_memory": "1MiB"}] if kind == "json" else []),
    ):
        for have, expected in zip(generate(**options), want, strict=True):
            assert_same(have, expected)
