"""Structured output: what is produced matches, whatever the model would rather say."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import copy
import json
import random
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import llguidance
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, ByT5Tokenizer

from batchkit import Engine, RequestError
from batchkit.hf.grammar import Grammars, Matcher
from batchkit.hf.sampler import Sampler
from batchkit.hf.tokenizer import HFTokenizer
from batchkit.params import StructuredOutputsParams
from batchkit.types import Request, SamplingParams, ScheduledSequence
from tiny_models import tiny
from unit_hf.helpers import EOS, NUM_BYTES, SECOND_EOS, byte_tokenizer, row

VOCAB = NUM_BYTES + 10  # some ids more than the tokenizer has

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "score": {"type": "number"},
        "alive": {"type": "boolean"},
        "home": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Zürich", "東京", 'a "b"']},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "home"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "nested": PERSON,
    "list": {
        "type": "array",
        "items": {"anyOf": [{"type": "null"}, {"type": "integer"}]},
        "minItems": 1,
        "maxItems": 4,
    },
    "objects": {"type": "array", "items": {**PERSON, "required": ["age"]}, "maxItems": 2},
    "enum": {"enum": [1, "two", None, [3], {"four": 4.5}]},
    "text": {"type": "string", "maxLength": 20},
    "number": {"type": "number"},
}
TYPES = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None)}


def conforms(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value is what a schema asks for; of the keywords, those used above."""
    if "enum" in schema:
        return value in schema["enum"]
    if "anyOf" in schema:
        return any(conforms(value, one) for one in schema["anyOf"])
    if schema["type"] == "array":
        least, most = schema.get("minItems", 0), schema.get("maxItems", 10**9)
        return (
            isinstance(value, list) and least <= len(value) <= most and all(conforms(v, schema["items"]) for v in value)
        )
    if schema["type"] == "object":
        known = schema["properties"]
        return (
            isinstance(value, dict)
            and set(schema["required"]) <= set(value) <= set(known)
            and all(conforms(v, known[k]) for k, v in value.items())
        )
    if not isinstance(value, TYPES[schema["type"]]) or (isinstance(value, bool) and schema["type"] != "boolean"):
        return False
    if isinstance(value, str):
        length = len(value)
        return (
            schema.get("minLength", 0) <= length <= schema.get("maxLength", length)
            and re.search(schema.get("pattern", ""), value) is not None
        )
    return value is None or schema.get("minimum", value) <= value <= schema.get("maximum", value)


def is_sum(text: str) -> bool:
    """Whether a text is what `GRAMMAR` says."""
    term = "(?:[0-9]{1,3}|t)"
    before = ""
    while text != before:
        before, text = text, re.sub(rf"\({term}(\+{term})*\)", "t", text)
    return re.fullmatch(rf"{term}(\+{term})*", text) is not None


REGEXES = [
    r"[0-9]{3}-[0-9]{4}",
    r"(ab|c)*d?",
    r"[^\x00-\x7f]{2,5}",
    r"",
    r"-?(0|[1-9][0-9]{0,5})(\.[0-9]+)?",
    r"a\.b\\c[\]\-]",
]
CHOICES = [
    ["yes", "no"],
    ["a", "ab", "abc"],
    ["Ja!", "naïve\n", "😀😀", '"q"', "a|b", "(?:x", "\\d", " space ", "\x00"],
]
GRAMMAR = """
start: sum
sum: term ("+" term)*
term: /[0-9]{1,3}/ | "(" sum ")"
"""

Case = tuple[StructuredOutputsParams, Callable[[str], bool]]


def parses(schema: dict[str, Any]) -> Callable[[str], bool]:
    return lambda text: conforms(json.loads(text), schema)


CASES: dict[str, Case] = {
    **{f"json-{name}": (StructuredOutputsParams(json=s), parses(s)) for name, s in SCHEMAS.items()},
    "json-object": (StructuredOutputsParams(json=True), lambda text: isinstance(json.loads(text), dict)),
    **{
        f"regex-{i}": (StructuredOutputsParams(regex=r), lambda text, r=r: re.fullmatch(r, text) is not None)
        for i, r in enumerate(REGEXES)
    },
    **{f"choice-{i}": (StructuredOutputsParams(choice=c), c.__contains__) for i, c in enumerate(CHOICES)},
    "grammar": (StructuredOutputsParams(grammar=GRAMMAR), is_sum),
}


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2: str) -> HFTokenizer:
    return HFTokenizer(AutoTokenizer.from_pretrained(smollm2))


def request(wanted: StructuredOutputsParams, *, stop_ids: Sequence[int] = (EOS, SECOND_EOS), **params: Any) -> Request:
    given = SamplingParams(structured_outputs=wanted, **params)
    return Request(
        id="r", prompt_token_ids=(65,), params=given, max_tokens=1000, stop_token_ids=frozenset(stop_ids), seed=3
    )


def byte_grammars(vocab: int = VOCAB) -> Grammars:
    return Grammars(HFTokenizer(byte_tokenizer()), (EOS, SECOND_EOS), vocab)


def generated(
    sampler: Sampler, of: Request, logits: Callable[[int], torch.Tensor], most: int = 400
) -> tuple[list[int], bool]:
    """Tokens of one request under random logits, without what ended it; and whether it ended by itself."""
    output: list[int] = []
    while len(output) < most:
        (result,) = sampler.sample(logits(len(output))[None], [row(request=of, output=output)])
        assert result.error is None
        if result.token_ids[0] in of.stop_token_ids:
            return output, True
        output += result.token_ids
    return output, False


def wild(vocab: int, seed: int, closing: Sequence[int] = ()) -> Callable[[int], torch.Tensor]:
    """Logits of a model that wants anything but what it should, and somewhat rather the tokens that come to an end."""

    def logits(position: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * seed + position)
        return (torch.randn(vocab, generator=generator) * 4).index_add_(
            0, torch.tensor(closing, dtype=torch.int64), torch.full((len(closing),), 8.0)
        )

    return logits


# ---- what is produced matches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_what_is_produced_matches_byte_by_byte(name: str) -> None:
    wanted, matches = CASES[name]
    grammars = byte_grammars()
    sampler, ended = Sampler(grammars), 0
    for seed in range(6):
        of = request(wanted, temperature=[1.0, 0.7, 0.0][seed % 3])
        output, done = generated(sampler, of, wild(VOCAB, seed))
        ended += done
        if done:
            assert matches(bytes_of(output).decode()), output
    assert ended >= 3


def bytes_of(output: Sequence[int]) -> bytes:
    return HFTokenizer(byte_tokenizer()).decode(output).encode()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_what_is_produced_matches_with_a_real_vocabulary(name: str, smollm2_tokenizer: HFTokenizer) -> None:
    wanted, matches = CASES[name]
    vocab = len(smollm2_tokenizer.inner) + 37
    sampler, ended = Sampler(Grammars(smollm2_tokenizer, (2,), vocab)), 0
    closing = [2, *(token for mark in '"}],:' for token in smollm2_tokenizer.encode(mark))]
    for seed in range(6):
        of = request(wanted, stop_ids=[2], temperature=1.0)
        output, done = generated(sampler, of, wild(vocab, seed, closing))
        ended += done
        if done:
            assert matches(smollm2_tokenizer.decode(output, skip_special_tokens=False)), output
    assert ended >= 3


@pytest.mark.slow
def test_what_an_engine_produces_matches_with_a_real_vocabulary(smollm2_tokenizer: HFTokenizer) -> None:
    # Random weights give nearly equal logits: the wildest model there is.
    model = tiny("llama", vocab_size=len(smollm2_tokenizer.inner) + 64, max_position_embeddings=512)
    names = [name for name in CASES for _ in range(2)]
    params = [SamplingParams(structured_outputs=CASES[name][0], max_tokens=200, seed=i) for i, name in enumerate(names)]
    with Engine.from_model(model, smollm2_tokenizer, num_kv_blocks=200, max_num_seqs=16) as engine:
        outputs = engine.generate([f"Say {i}:" for i in range(len(names))], params)
    assert sum(output.finish_reason == "stop" for output in outputs) > len(names) // 2
    for name, output in zip(names, outputs, strict=True):
        assert output.finish_reason in ("stop", "length")
        if output.finish_reason == "stop":
            assert output.token_ids[-1] == 2
            assert CASES[name][1](output.text), (name, output.text)


# ---- the end of the text -------------------------------------------------------------------------------------------


def allowed(matcher: Matcher, vocab: int = VOCAB) -> set[int]:
    return set(np.flatnonzero(matcher.allowed(vocab)).tolist())


def encoded(text: str) -> list[int]:
    return HFTokenizer(byte_tokenizer()).encode(text)


def test_it_may_end_exactly_where_the_text_matches() -> None:
    matcher = byte_grammars().matcher(request(StructuredOutputsParams(choice=["ab", "abcé"])))
    a, b, c, *rest = encoded("abcé")
    steps = []
    for token in (a, b, c, *rest):
        steps.append(allowed(matcher))
        matcher.take([token])
    # Any of the EOS tokens, of which the tokenizer knows one; and nothing else once the text can only end.
    assert steps == [{a}, {b}, {c, EOS, SECOND_EOS}, {rest[0]}, {rest[1]}]
    assert allowed(matcher) == {EOS, SECOND_EOS}


def test_only_eos_tokens_that_end_the_request_end_the_text() -> None:
    grammars = byte_grammars()
    for stop_ids, expected in (
        [[EOS], {EOS}],
        [[SECOND_EOS, 65], {SECOND_EOS}],
        [[EOS, SECOND_EOS, 3], {EOS, SECOND_EOS}],
    ):
        matcher = grammars.matcher(request(StructuredOutputsParams(regex=""), stop_ids=stop_ids))
        assert allowed(matcher) == expected


def test_an_eos_token_that_spells_text_only_ends_it() -> None:
    (brace,) = encoded("}")
    grammars = Grammars(HFTokenizer(byte_tokenizer()), (EOS, brace), VOCAB)
    matcher = grammars.matcher(request(StructuredOutputsParams(regex="[ab}]{2}"), stop_ids=[EOS, brace]))
    assert allowed(matcher) == set(encoded("ab"))
    matcher.take(encoded("ab"))
    assert allowed(matcher) == {EOS, brace}


@pytest.mark.parametrize("vocab", [NUM_BYTES + 2, NUM_BYTES + 2 + 100, NUM_BYTES + 1])
def test_the_vocabulary_may_differ_from_the_tokenizers(vocab: int) -> None:
    matcher = byte_grammars(vocab).matcher(request(StructuredOutputsParams(regex="a*")))
    assert allowed(matcher, vocab) == {*encoded("a"), EOS, SECOND_EOS} & set(range(vocab))


def test_a_request_ends_with_stop_when_the_grammar_can_only_stop() -> None:
    model = tiny("llama", vocab_size=VOCAB, eos_token_id=[EOS, SECOND_EOS])
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes", "nö"]), n=8, seed=1, logprobs=1)
    with Engine.from_model(model, byte_tokenizer(), num_kv_blocks=64) as engine:
        (output,) = engine.generate(["?"], params)
    assert {completion.text for completion in output.outputs} == {"yes", "nö"}
    assert {completion.finish_reason for completion in output.outputs} == {"stop"}
    assert {completion.token_ids[-1] for completion in output.outputs} == {EOS, SECOND_EOS}
    assert len(output.outputs[0].logprobs or ()) == len(output.outputs[0].token_ids)


def test_stop_tokens_of_the_callers_own_may_cut_the_text_short() -> None:
    model = tiny("llama", vocab_size=VOCAB, eos_token_id=EOS)
    (b,) = encoded("b")
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="aaab+c"), stop_token_ids=[b], seed=1)
    with Engine.from_model(model, byte_tokenizer(), num_kv_blocks=64) as engine:
        (output,) = engine.generate(["?"], params)
    assert (output.text, output.finish_reason, output.token_ids[-1]) == ("aaa", "stop", b)


# ---- what is kept --------------------------------------------------------------------------------------------------


def test_a_grammar_is_compiled_once_and_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, made = llguidance.LLMatcher, []

    class Counting:
        grammar_from_json_schema = plain.grammar_from_json_schema
        grammar_from_regex = plain.grammar_from_regex

        def __new__(cls, tokenizer: Any, grammar: str, **kwargs: Any) -> Any:
            made.append(grammar)
            return plain(tokenizer, grammar, **kwargs)

    monkeypatch.setattr(llguidance, "LLMatcher", Counting)
    grammars = Grammars(HFTokenizer(byte_tokenizer()), (EOS,), VOCAB, size=3)
    for _ in range(5):
        # Equal params, and schemas that are equal as objects or as text, are one grammar.
        grammars.check(request(StructuredOutputsParams(json={"type": "string"})))
        grammars.check(request(StructuredOutputsParams(json='{"type": "string"}')))
        grammars.check(request(StructuredOutputsParams(choice=("a", "b"))))
    assert len(made) == 2
    for i in range(10):
        grammars.check(request(StructuredOutputsParams(regex=str(i))))
    assert len(made) == 12
    assert len(grammars._compiled) == 3
    grammars.drop_caches()
    assert len(grammars._compiled) == 0
    matcher = grammars.matcher(request(StructuredOutputsParams(regex="7")))
    assert allowed(matcher) == set(encoded("7"))


def test_a_matcher_is_a_function_of_the_output() -> None:
    grammars = byte_grammars()
    of = {name: request(CASES[name][0]) for name in ("json-nested", "json-list", "regex-1", "choice-1")}
    alone = {name: generated(Sampler(grammars), r, wild(VOCAB, 7), most=60)[0] for name, r in of.items()}
    assert all(alone.values())
    sampler, rng = Sampler(grammars), random.Random(0)
    logits = wild(VOCAB, 7)

    def step(rows: Sequence[ScheduledSequence]) -> list[int]:
        results = sampler.sample(torch.stack([logits(r.num_output) for r in rows]), rows)
        assert [result.error for result in results] == [None] * len(rows)
        return [result.token_ids[0] for result in results]

    # At any place, in any order, with neighbours, siblings and another request under the same number.
    for _ in range(150):
        rows = []
        for number, name in enumerate(rng.sample(sorted(of), rng.randint(1, 4))):
            at = rng.randrange(len(alone[name]))
            rows.append(
                row(request=of[name], seq_id=rng.choice([number, 100 + number]), output=alone[name], num_output=at)
            )
        names = [next(n for n, r in of.items() if r is x.request) for x in rows]
        assert step(rows) == [alone[n][x.num_output] for n, x in zip(names, rows, strict=True)]
        if rng.random() < 0.1:
            sampler.drop_caches()
            grammars.drop_caches()


def test_new_tokens_alone_are_taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    take = Matcher.take
    monkeypatch.setattr(Matcher, "take", lambda self, ids: taken.extend(ids) or take(self, ids))
    output, of = [], request(StructuredOutputsParams(regex="[a-z]{40}"))
    sampler = Sampler(byte_grammars())
    for position in range(30):
        (result,) = sampler.sample(wild(VOCAB, 1)(position)[None], [row(request=of, output=output)])
        output += result.token_ids
    assert taken == output[:-1]


def test_an_output_that_does_not_match_ends_its_own_row() -> None:
    sampler = Sampler(byte_grammars())
    bad = row(request=request(StructuredOutputsParams(regex="[0-9]+")), seq_id=1, output=encoded("12x"))
    good = row(request=request(StructuredOutputsParams(regex="[0-9]+")), seq_id=2, output=encoded("12"))
    for _ in range(2):
        results = sampler.sample(torch.zeros(2, VOCAB), [bad, good])
        assert results[0].error is not None
        assert results[0].error.startswith("the structured output cannot go on: ")
        assert results[1].error is None


def test_other_masks_may_leave_nothing_of_a_grammar() -> None:
    of = request(StructuredOutputsParams(choice=["a", "b"]), allowed_token_ids=encoded("xyz"))
    (result,) = Sampler(byte_grammars()).sample(torch.zeros(1, VOCAB), [row(request=of)])
    assert result.error == "allowed_token_ids and structured_outputs left no token to sample"


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"regex": "(a"}, "cannot be compiled: .*unclosed group"),
        ({"regex": "(?=a)b"}, "cannot be compiled: .*look-around"),
        ({"regex": r"[^\s\S]"}, "can match nothing"),
        ({"json": {"type": "nonsense"}}, "cannot be compiled: .*nonsense"),
        ({"json": {"not": {"type": "string"}}}, "cannot be compiled: .*not"),
        ({"json": {"type": "string", "minLength": 5, "maxLength": 2}}, "cannot be compiled: .*minLength"),
        ({"grammar": "start: nothing"}, "cannot be compiled: .*nothing"),
        ({"grammar": "start: " + "(" * 2000}, "cannot be compiled: .* \\.\\.\\.$"),
        ({"choice": ["\ud800"]}, "cannot be compiled"),
    ],
)
def test_a_grammar_that_cannot_be_compiled_is_refused_when_it_is_added(wanted: dict[str, Any], words: str) -> None:
    model = tiny("llama", vocab_size=VOCAB, eos_token_id=EOS)
    with Engine.from_model(model, byte_tokenizer(), num_kv_blocks=8) as engine:
        params = SamplingParams(structured_outputs=StructuredOutputsParams(**wanted))
        with pytest.raises(RequestError, match=words) as caught:
            engine.add_request("?", params)
        assert len(str(caught.value)) < 700
        assert not engine.has_unfinished()
        engine.add_request("?", SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), max_tokens=1))


class Own:
    eos_token_id = EOS


def test_a_tokenizer_that_cannot_be_used_is_refused() -> None:
    of = request(StructuredOutputsParams(regex="a"))
    for tokenizer, words in (
        (None, "the runner has none"),
        (Own(), "this Own is not one"),
        (HFTokenizer(ByT5Tokenizer(extra_ids=3)), "this HFTokenizer is not one"),
    ):
        with pytest.raises(RequestError, match=f"need a fast tokenizer of transformers .*{words}"):
            Grammars(tokenizer, (EOS,), VOCAB).check(of)
    pieces = copy.deepcopy(byte_tokenizer())
    pieces.backend_tokenizer.decoder = None
    with pytest.raises(RequestError, match="llguidance cannot use this tokenizer"):
        Grammars(HFTokenizer(pieces), (EOS,), VOCAB).check(of)


def test_a_request_that_no_eos_token_ends_is_refused() -> None:
    of = request(StructuredOutputsParams(regex="a"), stop_ids=[5])
    with pytest.raises(RequestError, match="need an EOS token"):
        byte_grammars().check(of)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=re.escape("pip install batchkit[structured]")):
        byte_grammars().check(request(StructuredOutputsParams(regex="a")))
    byte_grammars().check(Request(id="r", prompt_token_ids=(1,), params=SamplingParams(), max_tokens=1))
