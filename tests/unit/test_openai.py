"""Bodies of the OpenAI API: what is asked, what is answered."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from batchkit import Completion, Logprob, RequestOutput, RequestTimings, SamplingParams, StructuredOutputsParams
from batchkit.openai import (
    _NEUTRAL,
    Response,
    error_body,
    messages_of,
    options_of,
    params_of,
    params_of_json,
    prompts_of,
)

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}

TAKEN = [
    # (chat, body, what SamplingParams then has)
    (True, {}, {}),
    (False, {}, {"max_tokens": 16}),
    (False, {"max_tokens": 3}, {"max_tokens": 3}),
    (True, {"max_tokens": 3}, {"max_tokens": 3}),
    (True, {"max_completion_tokens": 3}, {"max_tokens": 3}),
    (True, {"max_completion_tokens": 3, "max_tokens": 3}, {"max_tokens": 3}),
    (True, {"temperature": 0, "top_p": 0.5, "n": 3, "seed": 7}, {"temperature": 0, "top_p": 0.5, "n": 3, "seed": 7}),
    (True, {"stop": "x"}, {"stop": "x"}),
    (True, {"stop": ["x", "y"]}, {"stop": ["x", "y"]}),
    (True, {"presence_penalty": 1, "frequency_penalty": -1}, {"presence_penalty": 1, "frequency_penalty": -1}),
    (True, {"logit_bias": {"12": -100, "7": 1.5}}, {"logit_bias": {12: -100.0, 7: 1.5}}),
    (True, {"logprobs": True}, {"logprobs": 0}),
    (True, {"logprobs": True, "top_logprobs": 4}, {"logprobs": 4}),
    (True, {"logprobs": False, "top_logprobs": 0}, {}),
    (False, {"logprobs": 2}, {"max_tokens": 16, "logprobs": 2}),
    (False, {"logprobs": 20}, {"max_tokens": 16, "logprobs": 20}),
    (True, {"logprobs": True, "top_logprobs": 20}, {"logprobs": 20}),
    (True, {"response_format": {"type": "text"}}, {}),
    (True, {"response_format": {"type": "json_object"}}, {"structured_outputs": StructuredOutputsParams(json=True)}),
    (
        True,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}},
        {"structured_outputs": StructuredOutputsParams(json=SCHEMA)},
    ),
    (True, {"structured_outputs": {"regex": "a+"}}, {"structured_outputs": StructuredOutputsParams(regex="a+")}),
    (
        True,
        {"top_k": 5, "min_p": 0.1, "min_tokens": 2, "ignore_eos": True, "repetition_penalty": 1.1},
        {"top_k": 5, "min_p": 0.1, "min_tokens": 2, "ignore_eos": True, "repetition_penalty": 1.1},
    ),
    (True, {"stop_token_ids": [3], "bad_words": ["x"]}, {"stop_token_ids": [3], "bad_words": ["x"]}),
    # What the caller reads, what only concerns an account, and what asks for nothing.
    (True, {"model": "m", "messages": [], "stream": True, "stream_options": {}, "chat_template_kwargs": {}}, {}),
    (True, {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "flex"}, {}),
    (True, {"tools": [], "tool_choice": "none", "modalities": ["text"], "audio": None, "n": None, "stop": None}, {}),
    (False, {"echo": False, "suffix": None, "best_of": 1}, {"max_tokens": 16}),
]


@pytest.mark.parametrize(("chat", "body", "fields"), TAKEN)
def test_what_a_body_says_is_what_samples(chat, body, fields):
    assert params_of(body, chat=chat) == SamplingParams(**fields)


REFUSED = [
    (True, {"max_token": 3}, "unknown field 'max_token'; is it max_tokens?"),
    (True, {"zzz": 3}, "unknown field 'zzz'; there are"),
    (True, {"tools": [{"type": "function"}]}, "tools is not supported, got a list"),
    (True, {"audio": {"voice": "x"}}, "audio is not supported"),
    (True, {"modalities": ["text", "audio"]}, "modalities is not supported"),
    (True, {"prompt_logprobs": 1}, "prompt_logprobs is not supported, got 1"),
    (False, {"echo": True}, "echo is not supported, got true"),
    (False, {"best_of": 2}, "best_of is not supported, got 2"),
    (False, {"messages": []}, "messages does not belong to a text completion"),
    (True, {"prompt": "a"}, "prompt does not belong to a chat completion"),
    (False, {"tools": []}, "tools does not belong to a text completion"),
    (True, {"max_completion_tokens": 3, "max_tokens": 4}, r"max_completion_tokens \(3\) and max_tokens \(4\) differ"),
    (True, {"logprobs": 2}, "logprobs of a chat must be true or false, got 2"),
    (True, {"top_logprobs": 2}, "top_logprobs is 2, which needs logprobs to be true"),
    (False, {"logprobs": True}, "logprobs must be an integer, got True"),
    (False, {"logprobs": -1}, r"^logprobs must be in \[0, 20\], got -1"),
    (False, {"logprobs": 21}, r"^logprobs must be in \[0, 20\], got 21"),
    (False, {"logprobs": 10**400}, r"^logprobs must be in \[0, 20\], got 1000"),
    (True, {"logprobs": True, "top_logprobs": -1}, r"top_logprobs must be in \[0, 20\], got -1"),
    (True, {"logprobs": True, "top_logprobs": 21}, r"top_logprobs must be in \[0, 20\], got 21"),
    (True, {"logprobs": True, "top_logprobs": "all"}, "top_logprobs must be an integer, got 'all'"),
    (True, {"temperature": math.inf}, "temperature must be finite"),
    (True, {"temperature": 10**400}, "temperature must be"),
    (True, {"n": 1025}, r"n must be in \[1, 1024\], got 1025"),
    (True, {"n": 0}, r"n must be in \[1, 1024\], got 0"),
    (True, {"temperature": "hot"}, "temperature must be a number, got 'hot'"),
    (True, {"logit_bias": {"x": 1}}, 'a key of logit_bias must be a token id, got "x"'),
    (True, {"logit_bias": {"3": 101}}, r"logit_bias must be in \[-100, 100\], got 101"),
    (True, {"logit_bias": [1]}, "logit_bias must map token ids to numbers"),
    (True, {"response_format": "json"}, 'must be text, json_object or json_schema, got "json"'),
    (True, {"response_format": {"type": "xml"}}, 'must be text, json_object or json_schema, got "xml"'),
    (True, {"response_format": {"type": "json_schema"}}, "must have an object 'schema', got null"),
    (True, {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "both say"),
    (True, {"structured_outputs": {"regexp": "a"}}, "unknown field of structured_outputs 'regexp'; is it regex?"),
    (True, {"structured_outputs": 5}, "structured_outputs must be StructuredOutputsParams, got 5"),
]


@pytest.mark.parametrize(("chat", "body", "message"), REFUSED)
def test_what_cannot_be_had_is_named(chat, body, message):
    with pytest.raises((ValueError, TypeError), match=message):
        params_of(body, chat=chat)


@pytest.mark.parametrize("chat", [True, False])
def test_the_table_of_fields_in_the_docs_is_whole(chat):
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in text.partition("| field | of |")[2].partition("\n\n")[0].splitlines()[2:]]
    mine = ("chat" if chat else "text", "both")
    said = [name for row in rows if row[2].strip() in mine for name in re.findall(r"`(\w+)`", row[1])]
    assert len(said) == len(set(said))
    with pytest.raises(ValueError, match="there are") as raised:
        params_of({"zzz": 1}, chat=chat)
    taken = set(str(raised.value).partition("there are ")[2].split(", "))
    assert taken <= set(said)
    for name in set(said) - taken:
        with pytest.raises(ValueError, match=f"{name} is not supported"):
            params_of({name: "something"}, chat=chat)
    assert set(said) - taken == _NEUTRAL[chat].keys()


def test_defaults_are_for_what_a_body_does_not_say():
    defaults = {"max_tokens": 5, "temperature": 0}
    assert params_of({}, chat=False, defaults=defaults) == SamplingParams(**defaults)
    assert params_of({"max_tokens": 6}, chat=True, defaults=defaults) == SamplingParams(max_tokens=6, temperature=0)


def test_functions_cannot_come_from_json():
    with pytest.raises(ValueError, match="logits_processors are functions"):
        params_of_json({"logits_processors": []})


def test_prompts():
    assert prompts_of({"prompt": "a"}, chat=False) == ["a"]
    assert prompts_of({"prompt": [1, 2]}, chat=False) == [[1, 2]]
    assert prompts_of({"prompt": ["a", "b"]}, chat=False) == ["a", "b"]
    assert prompts_of({"prompt": [[1], [2, 3]]}, chat=False) == [[1], [2, 3]]
    talk = [{"role": "user", "content": "a"}]
    assert prompts_of({"messages": talk}, chat=True) == [talk]


@pytest.mark.parametrize("prompt", [5, [], [True], [1, "a"], [[]], {}, [["a"]]])
def test_prompts_that_are_none(prompt):
    with pytest.raises(TypeError, match="prompt must be text, a list of token ids, or a list of such prompts"):
        prompts_of({"prompt": prompt}, chat=False)


@pytest.mark.parametrize(("chat", "name"), [(True, "messages"), (False, "prompt")])
def test_no_prompt_at_all(chat, name):
    with pytest.raises(ValueError, match=f"there is no field '{name}', only 'model'"):
        prompts_of({"model": "m"}, chat=chat)


def test_a_content_of_several_texts_becomes_one():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert messages_of([{"role": "user", "content": parts, "name": "x"}]) == [
        {"role": "user", "content": "ab", "name": "x"}
    ]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "got an empty list"),
        ("a", 'got "a"'),
        ([5], "message 0 must be an object with role and content, got 5"),
        ([{"role": "user"}], "message 0 has no content"),
        ([{"role": 5, "content": ""}], "the role of message 0 must be text, got 5"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], 'may have parts of text only, got "image_url"'),
        ([{"role": "user", "content": [5]}], "may have parts of text only, got 5"),
    ],
)
def test_messages_that_are_none(messages, message):
    with pytest.raises((ValueError, TypeError), match=message):
        messages_of(messages)


def test_options():
    body = {"priority": 3, "cache_salt": None, "chat_template_kwargs": {"tools": []}, "user": "x"}
    assert options_of(body) == {"priority": 3, "chat_template_kwargs": {"tools": []}}


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("priority", [], "a number, got an empty list"),
        ("priority", True, "a number, got true"),
        ("cache_salt", [], "text, got an empty list"),
        ("cache_salt", 5, "text, got 5"),
        ("chat_template_kwargs", [], "an object, got an empty list"),
    ],
)
def test_options_of_a_wrong_kind_are_named(name, value, wanted):
    with pytest.raises(TypeError, match=f"{name} must be {wanted}"):
        options_of({name: value})


# ----------------------------------------------------------------------------------------------- answers


def decode(token_ids):
    return "".join("\ufffd" if token == 9 else chr(96 + token % 26) for token in token_ids)


def completion(index, ids, num_new, reason, logprobs=None):
    return Completion(
        index=index,
        ids=ids,
        new_token_ids=tuple(ids[len(ids) - num_new :]),
        pieces=[decode([token]) for token in ids],
        new_text=decode(ids[len(ids) - num_new :]),
        finish_reason=reason,
        logprobs=logprobs,
    )


def output(*completions, num_prompt=3, cached=0):
    return RequestOutput(
        request_id="r",
        prompt_token_ids=(1,) * num_prompt,
        outputs=completions,
        finished=True,
        timings=RequestTimings(arrival=0.0, cached_tokens=cached),
    )


def response(*, chat, **params):
    return Response(chat=chat, id="x-1", model="toy", created=17, params=SamplingParams(**params), decode=decode)


def test_a_chat_completion():
    outputs = [output(completion(0, [1, 2], 2, "stop"), completion(1, [3], 1, "length"), cached=2)]
    body = response(chat=True, n=2).body(outputs)
    assert json.loads(json.dumps(body)) == {
        "id": "x-1",
        "object": "chat.completion",
        "created": 17,
        "model": "toy",
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None,
                "finish_reason": reason,
            }
            for index, (text, reason) in enumerate([("ab", "stop"), ("c", "length")])
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


def test_choices_count_over_prompts_and_samples():
    outputs = [output(completion(0, [p], 1, "stop"), completion(1, [p + 1], 1, "stop")) for p in (1, 3)]
    body = response(chat=False, n=2).body(outputs)
    assert body["object"] == "text_completion"
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "a"), (1, "b"), (2, "c"), (3, "d")]
    assert body["usage"]["prompt_tokens"] == 6 and body["usage"]["completion_tokens"] == 4


FOUND = [
    {1: Logprob(-0.5, 1), 2: Logprob(-1.5, 2)},
    {3: Logprob(-0.1, 1), 29: Logprob(-0.2, 2), 9: Logprob(-math.inf, 5)},
]


def test_log_probabilities_of_a_chat():
    found = completion(0, [1, 9], 2, "length", FOUND)
    body = response(chat=True, logprobs=2).body([output(found)])
    first, second = body["choices"][0]["logprobs"]["content"]
    assert first == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": "b", "logprob": -1.5, "bytes": [98]},
        ],
    }
    # Half a character has no bytes, and the token itself is not one of the best two.
    assert (second["token"], second["logprob"], second["bytes"]) == ("\ufffd", -9999.0, None)
    assert [other["token"] for other in second["top_logprobs"]] == ["c", "c"]
    alone = response(chat=True, logprobs=0).body([output(found)])
    assert [token["top_logprobs"] for token in alone["choices"][0]["logprobs"]["content"]] == [[], []]


def test_log_probabilities_of_a_text_completion():
    found = completion(0, [1, 9], 2, "length", FOUND)
    body = response(chat=False, logprobs=2).body([output(found)])
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["a", "\ufffd"],
        "token_logprobs": [-0.5, -9999.0],
        "top_logprobs": [{"a": -0.5, "b": -1.5}, {"c": -0.1, "\ufffd": -9999.0}],
        "text_offset": [0, 1],
    }


@pytest.mark.parametrize("chat", [True, False])
def test_pieces_add_up_to_the_whole(chat):
    ids = [1, 2, 3]
    found = [{token: Logprob(-float(token), 1)} for token in ids]
    pieces = []
    for num_tokens, num_new, reason in ((1, 1, None), (3, 2, "stop")):
        piece = completion(1, ids[:num_tokens], num_new, reason, found[:num_tokens])
        pieces.append(response(chat=chat, logprobs=1, n=2).chunk(piece, prompt=1)["choices"][0])
    whole = completion(1, ids, 3, "stop", found)
    want = response(chat=chat, logprobs=1, n=2).body([output(whole)])["choices"][0]
    assert [piece["index"] for piece in pieces] == [3, 3]
    assert [piece["finish_reason"] for piece in pieces] == [None, "stop"]
    if chat:
        assert [piece["delta"].get("role") for piece in pieces] == ["assistant", None]
        assert "".join(piece["delta"]["content"] for piece in pieces) == want["message"]["content"]
        assert [token for piece in pieces for token in piece["logprobs"]["content"]] == want["logprobs"]["content"]
    else:
        assert "".join(piece["text"] for piece in pieces) == want["text"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [token for piece in pieces for token in piece["logprobs"][name]] == want["logprobs"][name]


def test_the_usage_at_the_end_of_a_stream():
    outputs = [output(completion(0, [1, 2], 0, "stop"))]
    body = response(chat=True).usage_chunk(outputs)
    assert body["object"] == "chat.completion.chunk" and body["choices"] == []
    assert body["usage"]["total_tokens"] == 5


def test_an_error():
    assert error_body("no", param="n") == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "n", "code": None}
    }


def test_the_client_can_read_what_is_answered():
    openai = pytest.importorskip("openai")
    found = completion(0, [1, 9], 2, "length", FOUND)
    chat = response(chat=True, logprobs=2)
    parsed = openai.types.chat.ChatCompletion.model_validate(chat.body([output(found)]))
    assert parsed.choices[0].logprobs.content[0].top_logprobs[1].logprob == -1.5
    openai.types.Completion.model_validate(response(chat=False, logprobs=2).body([output(found)]))
    openai.types.chat.ChatCompletionChunk.model_validate(chat.chunk(found))
