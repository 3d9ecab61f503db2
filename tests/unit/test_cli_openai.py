"""OpenAI batch files in and out, and the records of what a row may ask for in full."""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path

import pytest

from batchkit import Completion, Logprob, RequestOutput, RequestTimings, SamplingParams, cli
from batchkit.cli.records import Records, encoded
from unit.cli_rig import ids, jsonl, one_line, prompt, read

TALK = [{"role": "user", "content": "hi"}]


def line(custom_id, body=None, *, chat=True, **changes):
    body = ({"messages": TALK} if chat else {"prompt": "abc"}) | {"model": "gpt", "max_tokens": 4} | (body or {})
    url = "/v1/chat/completions" if chat else "/v1/completions"
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body, **changes}


def test_a_batch_file_is_answered_in_its_own_form(command):
    prompts = []
    code, (chat, text) = command([line("a"), line("b", chat=False)], prompts=prompts)
    assert code == 0
    assert prompts == [ids("<user>hi"), ids("abc")]
    assert chat.keys() == text.keys() == {"id", "custom_id", "response", "error"}
    assert chat["custom_id"] == "a" and chat["error"] is None
    assert chat["response"].keys() == {"status_code", "request_id", "body"}
    assert chat["response"]["status_code"] == 200
    body = chat["response"]["body"]
    assert (body["object"], body["model"]) == ("chat.completion", "toy"), "the model that has answered"
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant" and len(choice["message"]["content"]) == 4
    assert choice["finish_reason"] == "length"
    assert body["usage"]["prompt_tokens"] == 8 and body["usage"]["completion_tokens"] == 4
    body = text["response"]["body"]
    assert body["object"] == "text_completion" and len(body["choices"][0]["text"]) == 4
    assert len({record["id"] for record in (chat, text)}) == 2


def test_the_client_can_read_the_answers(command):
    openai = pytest.importorskip("openai")
    _, (chat, text) = command([line("a", {"logprobs": True, "top_logprobs": 2, "n": 2}), line("b", chat=False)])
    completion = openai.types.chat.ChatCompletion.model_validate(chat["response"]["body"])
    assert len(completion.choices) == 2
    assert all(len(choice.logprobs.content) == 4 for choice in completion.choices)
    openai.types.Completion.model_validate(text["response"]["body"])


BAD_LINES = {
    "no custom_id": ({**line("x"), "custom_id": None}, "invalid_request", "custom_id must be text, got null"),
    "custom_id of a wrong type": (line(5), "invalid_request", "custom_id must be text, got 5"),
    "the same custom_id": (line("before"), "duplicate_custom_id", 'its id "before" is that of line 1 too'),
    "not JSON": ("?", "invalid_json_line", "line 2 is not JSON"),
    "not an object": ("[]", "invalid_json_line", "must be an object"),
    "no body": ({"custom_id": "x", "method": "POST"}, "invalid_request", "there is no url and no body"),
    "a row of another form": ({"prompt": "a"}, "invalid_request", "custom_id must be text, got null"),
    "another method": (line("x", method="GET"), "invalid_request", 'method must be POST, got "GET"'),
    "another endpoint": (
        line("x", url="/v1/embeddings"),
        "invalid_request",
        "url must be /v1/chat/completions or /v1",
    ),
    "body of a wrong type": ({**line("x"), "body": []}, "invalid_request", "body must be an object, got an empty list"),
    "stream": (line("x", {"stream": True}), "invalid_request", "stream must be false in a file, got true"),
    "tools": (line("x", {"tools": [{}]}), "invalid_request", "tools is not supported, got a list"),
    "unknown field": (line("x", {"max_token": 4}), "invalid_request", "unknown field 'max_token'; is it max_tokens?"),
    "no messages": (line("x", {"messages": None}), "invalid_request", "there is no field 'messages'"),
    "several prompts": (
        line("x", {"prompt": ["a", "b"]}, chat=False),
        "invalid_request",
        "there are 2 prompts, and",
    ),
    "more samples than there may be": (line("x", {"n": 1025}), "invalid_request", "n must be in [1, 1024], got 1025"),
    "too long": (line("x", {"max_tokens": 100}), "invalid_request", "100 to generate can never run"),
    "fails while it runs": (line("x", {"prompt": "!"}, chat=False), "server_error", "the device is on fire"),
}


@pytest.mark.parametrize(("bad", "code", "message"), BAD_LINES.values(), ids=BAD_LINES.keys())
def test_a_bad_line_of_a_batch_file_has_an_error_with_a_code(command, bad, code, message):
    lines = [line("before"), bad, line("after")]
    exit_code, records = command(lines)
    assert exit_code == 3
    assert [record["error"] is None for record in records] == [True, False, True]
    assert records[1]["error"]["code"] == code
    assert message in records[1]["error"]["message"]
    assert records[1]["response"] is None
    assert records[1]["custom_id"] == ("x" if '"x"' in json.dumps(bad) and bad["custom_id"] else None)
    before = Path("out.jsonl").read_bytes()
    assert command(None, "--resume", "--retry-errors")[0] == 3
    again = Path("out.jsonl").read_bytes().splitlines()
    assert sorted(again) == sorted(before.splitlines())


def test_values_that_ask_for_nothing_are_no_errors(command):
    code, _ = command([line("a", {"stream": False, "tools": [], "audio": None, "user": "me", "store": True})])
    assert code == 0


def test_what_the_options_say_is_for_what_a_body_does_not(command):
    _, records = command([line("a", {"max_tokens": None}), line("b")], "--max-tokens", "2")
    used = [record["response"]["body"]["usage"]["completion_tokens"] for record in records]
    assert used == [2, 4]


def test_columns_are_kept_in_a_batch_file_too(command):
    _, (record,) = command([line("a", tenant="t")], "--keep", "tenant")
    assert record["tenant"] == "t"


@pytest.mark.parametrize(
    ("first", "options", "is_batch"),
    [
        (line("a"), (), True),
        ("?", ("--format", "openai"), True),
        (line("a"), ("--format", "jsonl"), False),
        (line("a"), ("--chat",), False),
        (line("a"), ("--template", "{url}"), False),
        ({"custom_id": "a", "prompt": "x", "params": {"max_tokens": 1}}, (), False),
    ],
)
def test_a_batch_file_is_known_by_its_first_line_or_because_it_is_said(command, first, options, is_batch):
    _, (record,) = command([first], "--max-tokens", "2", *options)
    assert ("response" in record) == is_batch


UNCLEAR = ["?", "[]", '{"custom_id": "x"}', {"custom_id": "y", "method": "POST"}]


@pytest.mark.parametrize("source", ["in.jsonl", "-"])
@pytest.mark.parametrize(
    ("shows", "is_batch"),
    [
        (line("a"), True),
        ({"custom_id": "a", "url": "/v1/completions"}, True),
        ({"method": "POST", "body": {}}, True),
        (prompt(), False),
        ({"messages": TALK, "params": {"max_tokens": 1}}, False),
        ({"url": "x", "body": "y"}, False),
        ({"custom_id": "z"}, False),
    ],
)
def test_what_a_file_is_is_told_by_the_first_line_that_shows_it(command, monkeypatch, source, shows, is_batch):
    lines = [*UNCLEAR, shows, line("b"), prompt("c")]
    if source == "-":
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(jsonl(lines))))
    _, records = command(None if source == "-" else lines, source=source)
    is_batch = is_batch or shows in ({"url": "x", "body": "y"}, {"custom_id": "z"})  # which show nothing
    assert [("custom_id" in record) for record in records] == [is_batch] * 7
    if is_batch and source != "-":
        before = sorted(Path("out.jsonl").read_bytes().splitlines())
        command(lines, "--resume", "--retry-errors")
        assert [("custom_id" in json.loads(found)) for found in before] == [True] * 7
        assert len(read("out.jsonl")) == 7


def test_a_file_that_never_shows_what_it_is(command, monkeypatch):
    monkeypatch.setattr(cli.rows, "_MOST_UNCLEAR", 3)
    for lines in (UNCLEAR, [*UNCLEAR, line("a")]):
        _, records = command(lines, "--overwrite")
        assert len(records) == len(lines)
        assert all("custom_id" not in record for record in records)


def test_only_lines_within_the_limit_show_what_a_file_is(command):
    _, records = command(["?", line("a")], "--limit", "1")
    assert [record["id"] for record in records] == [1]


@pytest.mark.parametrize("option", [["--chat"], ["--template", "{body}"]])
def test_what_is_not_for_batch_files(capsys, option):
    with pytest.raises(SystemExit):
        cli.main(["generate", "in", "-o", "out", "--model", "toy", "--format", "openai", *option])
    assert f"{option[0]} is not for OpenAI batch files" in one_line(capsys)


def test_a_batch_file_is_resumed(command):
    lines = [line(f"c{i}") for i in range(10)]
    command(lines, "--limit", "4")
    prompts = []
    code, records = command(lines, "--resume", prompts=prompts)
    assert code == 0 and len(prompts) == 6
    assert [record["custom_id"] for record in records] == [f"c{i}" for i in range(10)]
    lines[2]["body"]["max_tokens"] = 3
    assert command(lines, "--resume")[0] == 1


# ----------------------------------------------------------------------------------------------- records in full


def test_parameters_in_json(command):
    reader = cli.rows.RowReader(keep={}, defaults={})
    given = {"logit_bias": {"5": 1, "7": -2.5}, "structured_outputs": {"json": {"type": "object"}}, "stop": ["a"]}
    ask = reader.read(1, json.dumps({"prompt": "a", "params": given}).encode()).ask
    assert ask.params.logit_bias == {5: 1.0, 7: -2.5}
    assert ask.params.structured_outputs.json == '{"type": "object"}'
    code, (record,) = command([prompt(logits_processors=[])])
    assert code == 3
    assert record["error"] == "line 1: logits_processors are functions, which JSON cannot hold"


def test_the_key_of_a_row_does_not_depend_on_how_its_parameters_are_written():
    def key(**params):
        reader = cli.rows.RowReader(keep={}, defaults={"max_tokens": 4})
        return reader.read(1, json.dumps({"prompt": "a", "params": params}).encode()).key

    assert key() == key(max_tokens=4) == key(temperature=1) == key(temperature=1.0, n=1)
    assert key(stop="x") == key(stop=["x"]) != key()
    assert key(logit_bias={"5": 1, "6": 2}) == key(logit_bias={"6": 2.0, "5": 1.0}) != key()
    assert key(structured_outputs={"regex": "a"}) != key(structured_outputs={"regex": "b"})


def test_every_parameter_is_part_of_the_key():
    others = {
        "n": 2,
        "max_tokens": 9,
        "min_tokens": 1,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.5,
        "min_p": 0.5,
        "presence_penalty": 1,
        "frequency_penalty": 1,
        "repetition_penalty": 2,
        "logit_bias": {3: 1.0},
        "allowed_token_ids": [3],
        "bad_words": ["x"],
        "seed": 3,
        "stop": ["x"],
        "stop_token_ids": [3],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "detokenize": False,
        "logprobs": 1,
        "prompt_logprobs": 1,
        "structured_outputs": {"choice": ["a"]},
    }
    assert others.keys() == {*SamplingParams.__dataclass_fields__} - {"logits_processors"}

    def key(**params):
        reader = cli.rows.RowReader(keep={}, defaults={})
        return reader.read(1, json.dumps({"prompt": "a", "params": params}).encode()).key

    keys = {key(), *(key(**{name: value}) for name, value in others.items())}
    assert len(keys) == len(others) + 1
    assert len({found.who for found in keys}) == 1


def test_log_probabilities_in_a_record(command):
    code, (record,) = command([prompt("abc", logprobs=2, prompt_logprobs=0)])
    assert code == 0
    assert len(record["logprobs"]) == 4
    for entry in record["logprobs"]:
        assert entry.keys() == {"token_id", "logprob", "rank", "best"}
        own = {name: entry[name] for name in ("token_id", "logprob", "rank")}
        assert own in entry["best"]
    assert record["cumulative_logprob"] == pytest.approx(sum(entry["logprob"] for entry in record["logprobs"]))
    scores = record["prompt_logprobs"]
    assert scores[0] is None
    assert [entry["token_id"] for entry in scores[1:]] == ids("bc")


def test_a_prompt_that_is_only_scored(command):
    code, (record,) = command([prompt("abc", max_tokens=0, prompt_logprobs=0)])
    assert code == 0
    assert (record["text"], record["finish_reason"]) == ("", "length")
    assert len(record["prompt_logprobs"]) == 3


def test_samples_have_log_probabilities_of_their_own(command):
    _, (record,) = command([prompt("abc", n=2, logprobs=0, temperature=1.0)])
    assert [len(found["logprobs"]) for found in record["outputs"]] == [4, 4]
    assert record["logprobs"] == record["outputs"][0]["logprobs"]


def test_a_probability_of_zero_is_json_for_every_reader():
    row = cli.rows.RowReader(keep={}, defaults={}).read(1, b'{"prompt": [1], "params": {"logprobs": 0}}')
    impossible = {5: Logprob(-math.inf, 9)}
    completion = Completion(
        index=0,
        ids=[5],
        new_token_ids=(5,),
        pieces=["x"],
        new_text="x",
        finish_reason="length",
        logprobs=[impossible],
        cumulative_logprob=-math.inf,
    )
    output = RequestOutput(
        request_id="r",
        prompt_token_ids=(1,),
        outputs=(completion,),
        finished=True,
        timings=RequestTimings(arrival=0.0),
    )
    line = encoded(Records(model="toy", decode=str).of_output(row, output))
    assert json.loads(line, parse_constant=pytest.fail)["logprobs"] == [
        {"token_id": 5, "logprob": None, "rank": 9, "best": [{"token_id": 5, "logprob": None, "rank": 9}]}
    ]
