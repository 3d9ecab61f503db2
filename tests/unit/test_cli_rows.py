"""What a line of the input may be, and what a bad one gives."""

from __future__ import annotations

import gzip
import io
import json
import sys
from types import SimpleNamespace

import pytest

from unit.cli_rig import LETTERS, WithBOS, ids, jsonl, one_line, prompt

BAD_LINES = {
    "not JSON": ("{'prompt': 1}", "is not JSON"),
    "half a line": ('{"prompt": "abc', "is not JSON"),
    "too deep": ("[" * 100_000, "is not JSON"),
    "a list": ("[1, 2]", "must be an object with a prompt, got a list"),
    "a number": ("17", "must be an object with a prompt, got 17"),
    "null": ("null", "must be an object with a prompt, got null"),
    "empty object": ("{}", "there is no prompt"),
    "no prompt": ('{"text": "abc"}', "only 'text'; --template makes a prompt of columns"),
    "prompt and messages": ('{"prompt": "a", "messages": []}', "both a prompt and messages"),
    "no messages": ('{"messages": []}', "must be a list of objects with role and content, got an empty list"),
    "messages of a wrong type": ('{"messages": "hi"}', 'must be a list of objects with role and content, got "hi"'),
    "message of a wrong type": ('{"messages": [5]}', "message 0 must be an object with role and content, got 5"),
    "half a message": ('{"messages": [{"role": "user"}]}', "message 0 has no content"),
    "role of a wrong type": ('{"messages": [{"role": 5, "content": ""}]}', "the role of message 0 must be text, got 5"),
    "template arguments without messages": (
        '{"prompt": "a", "chat_template_kwargs": {}}',
        "chat_template_kwargs are for messages, and there are none",
    ),
    "template arguments of a wrong type": (
        '{"messages": [{"role": "user", "content": ""}], "chat_template_kwargs": 5}',
        "chat_template_kwargs must be an object, got 5",
    ),
    "template arguments that the template does not take": (
        '{"messages": [{"role": "user", "content": ""}], "chat_template_kwargs": {"x": 5}}',
        "the chat template cannot be applied: TypeError: no such thing: ['x']",
    ),
    "prompt of a wrong type": ('{"prompt": 5}', "prompt must be text or a list of token ids, got 5"),
    "prompt null": ('{"prompt": null}', "got null"),
    "prompt of strings": ('{"prompt": ["a"]}', "not all of these are integers"),
    "prompt of booleans": ('{"prompt": [true]}', "not all of these are integers"),
    "empty prompt": ('{"prompt": ""}', "the prompt is empty"),
    "no tokens": ('{"prompt": []}', "the prompt is empty"),
    "token out of the vocabulary": ('{"prompt": [1000]}', "token id 1000 is not in the vocabulary of 1000"),
    "text that cannot be encoded": ('{"prompt": "\\ud800"}', "half a character"),
    "prompt too long": (json.dumps({"prompt": "a" * 65}), "65 tokens"),
    "output too long": (json.dumps(prompt("a", max_tokens=64)), "room to generate 63"),
    "id of a wrong type": ('{"id": 1.5, "prompt": "a"}', "id must be text or an integer, got 1.5"),
    "id true": ('{"id": true, "prompt": "a"}', "id must be text or an integer, got true"),
    "params of a wrong type": ('{"prompt": "a", "params": [1]}', "params must be an object, got a list"),
    "unknown parameter": ('{"prompt": "a", "params": {"max_token": 1}}', "'max_token'; is it max_tokens?"),
    "very unknown parameter": (
        '{"prompt": "a", "params": {"zzz": 1}}',
        "'zzz'; there are allowed_token_ids, bad",
    ),
    "parameter beside params": ('{"prompt": "a", "max_tokens": 1}', "max_tokens must stand in params"),
    "max_tokens below zero": (json.dumps(prompt(max_tokens=-1)), "or 0 to generate nothing, got -1"),
    "max_tokens of a wrong type": (json.dumps(prompt(max_tokens="9")), "max_tokens must be an integer, got '9'"),
    "temperature NaN": ('{"prompt": "a", "params": {"temperature": NaN}}', "temperature must be a number, got NaN"),
    "top_p": (json.dumps(prompt(top_p=1.5)), "top_p must be in (0, 1], got 1.5"),
    "more samples than there may be": (json.dumps(prompt(n=1025)), "n must be in [1, 1024], got 1025"),
    "flag of a wrong type": (json.dumps(prompt(ignore_eos="no")), "ignore_eos must be True or False"),
    "stop of a wrong type": (json.dumps(prompt(stop=5)), "stop must be a sequence, got 5"),
    "stop id of a wrong type": (
        json.dumps(prompt(stop_token_ids=["x"])),
        "a token id of stop_token_ids must be an integer",
    ),
    "fails while it runs": (json.dumps(prompt("!")), "the device is on fire"),
}


@pytest.mark.parametrize(("line", "message"), BAD_LINES.values(), ids=BAD_LINES.keys())
def test_a_bad_line_gives_an_error_and_the_others_go_on(command, capsys, line, message):
    code, records = command([prompt("before"), line, {"id": "after", **prompt("after")}])
    assert code == 3
    before, bad, after = records
    assert before["id"] == 1 and after["id"] == "after" and before["text"] and after["text"]
    assert bad.keys() == {"id", "error"}
    assert bad["id"] == 2
    assert message in bad["error"]
    assert "\n" not in bad["error"] and len(bad["error"]) < 500
    shown = capsys.readouterr().err
    assert "2 ok, 1 failed" in shown and "length 2, error 1" in shown


# ----------------------------------------------------------------------------------------------- messages, templates


def test_messages_go_through_the_chat_template(command):
    prompts = []
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    rows = [
        {"messages": talk},
        {"messages": talk, "chat_template_kwargs": {"opening": "!!"[:1] + "?"}},
        {"messages": talk, "chat_template_kwargs": None},
    ]
    code, records = command(rows, "--max-tokens", "2", prompts=prompts, tokenizer=WithBOS)
    assert code == 0 and len(records) == 3
    assert prompts == [[1, *ids(f"{opening}<system>s<user>u")] for opening in ("", "!?", "")]


def test_prompts_and_templates_as_messages_of_a_user(command):
    prompts = []
    rows = [
        {"prompt": "a", "chat_template_kwargs": {"opening": "?"}},
        {"messages": [{"role": "x", "content": "b"}]},
        prompt([1, 2]),
    ]
    code, records = command(rows, "--chat", "--max-tokens", "2", prompts=prompts)
    assert code == 3
    assert prompts == [ids("?<user>a"), ids("<x>b")]
    assert records[2]["error"] == "line 3: with --chat a prompt must be text, and this is a list of token ids"
    options = ("--chat", "--max-tokens", "2", "--template", "On {it}:", "--overwrite")
    assert command([{"it": "c", "messages": 5}], *options, prompts=prompts)[0] == 0
    assert prompts[-1] == ids("<user>On c:")


def test_a_template_makes_the_prompt_of_other_columns(command):
    prompts = []
    rows = [
        {"title": "Tea", "body": "{leaves}", "prompt": "no", "temperature": 30},
        {"title": 2, "body": [1.5, "\N{GREEK SMALL LETTER ALPHA}"], "params": {"max_tokens": 3}},
    ]
    code, records = command(rows, "--template", "{{{title}}}: {body}", "--max-tokens", "2", prompts=prompts)
    assert code == 0
    assert prompts == [ids("{Tea}: {leaves}"), ids('{2}: [1.5, "\N{GREEK SMALL LETTER ALPHA}"]')]
    assert [record["usage"]["completion_tokens"] for record in records] == [2, 3]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"title": "Tea"}, "line 1: there is no column 'body' for the template, only 'title'"),
        ({}, "line 1: there is no column 'body' for the template, only none at all"),
        ({"body": None}, "line 1: column 'body' of the template is null"),
    ],
)
def test_a_template_without_its_column_fails_that_row(command, row, message):
    code, records = command([row, {"body": "abc"}], "--template", "Sum: {body}", "--max-tokens", "1")
    assert code == 3
    assert records[0] == {"id": 1, "error": message}
    assert records[1]["text"]


# ----------------------------------------------------------------------------------------------- columns kept


def test_columns_are_kept_under_the_name_asked_for(command):
    rows = [
        {**prompt(), "lang": "en", "text": {"a": [1]}, "seed": 3},
        {**prompt("!"), "lang": None},
        {"prompt": 5, "lang": "de", "id": "x"},
        "?",
    ]
    options = ("--keep", "lang, text=source", "--keep", "seed")
    code, records = command(rows, *options)
    assert code == 3
    kept = [{key: value for key, value in record.items() if key in ("lang", "source", "seed")} for record in records]
    assert kept == [
        {"lang": "en", "source": {"a": [1]}, "seed": 3},
        {"lang": None, "source": None, "seed": None},
        {"lang": "de", "source": None, "seed": None},
        {},
    ]
    assert [sorted(record.keys() - kept[i].keys()) for i, record in enumerate(records)] == [
        ["finish_reason", "id", "text", "usage"],
        *[["error", "id"]] * 3,
    ]


def test_numbers_that_json_does_not_know_are_kept_as_null(command):
    rows = [
        '{"prompt": "a", "x": NaN, "y": [1.5, {"z": -Infinity}], "params": {"max_tokens": 1}}',
        '{"prompt": 5, "x": 1e999, "y": {"z": [Infinity, "NaN"]}}',
        '{"prompt": "!", "x": 2.0, "y": [[NaN]], "params": {"max_tokens": 1}}',
    ]
    command(rows, "--keep", "x,y")
    with open("out.jsonl") as lines:
        records = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    kept = [(record["x"], record["y"]) for record in records]
    assert kept == [(None, [1.5, {"z": None}]), (None, {"z": [None, "NaN"]}), (2.0, [[None]])]


def test_a_column_that_no_row_has_is_told_at_the_end(command, capsys):
    code, records = command([{"a": None, **prompt()}, prompt()], "--keep", "a,b=c")
    assert code == 0
    assert [(record["a"], record["c"]) for record in records] == [(None, None)] * 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "batchkit: column 'b' was in no row (there are: 'a', 'prompt', 'params')"


# ----------------------------------------------------------------------------------------------- text, gzip, limits


@pytest.mark.parametrize(
    ("source", "options", "told"),
    [
        ("in", (), True),
        ("prompts.csv.gz", (), True),
        ("in.jsonl.gz", (), False),
        ("in.json", (), False),
        ("in", ("--format", "jsonl"), False),
    ],
)
def test_a_line_that_may_be_text_names_the_option(command, source, options, told):
    _, records = command(["Tea is"], *options, source=source)
    assert records[0]["error"].startswith("line 1 is not JSON: ")
    assert ("; --format text takes each line as a prompt" in records[0]["error"]) == told


@pytest.mark.parametrize(("source", "options"), [("in.txt", ()), ("in.txt.gz", ()), ("in.log", ("--format", "text"))])
def test_a_line_of_text_is_a_prompt(command, source, options):
    prompts = []
    data = b"\xef\xbb\xbf" + 'one\r\n\n  \n{"x": 1}\n\N{GREEK SMALL LETTER ALPHA}'.encode()
    code, records = command(data, "--max-tokens", "1", *options, source=source, prompts=prompts)
    assert code == 0
    assert [record["id"] for record in records] == [1, 4, 5]
    assert prompts == [ids("one"), ids('{"x": 1}'), [0x3B1]]


def test_a_line_of_text_in_a_template(command):
    prompts = []
    code, _ = command(b"tea\n", "--template", "On {prompt}:", "--max-tokens", "1", source="in.txt", prompts=prompts)
    assert code == 0
    assert prompts == [ids("On tea:")]


@pytest.mark.parametrize("source", ["in.jsonl", "in.txt"])
def test_a_mark_on_an_empty_first_line_is_passed_over(command, capsys, source):
    code, records = command(b"\xef\xbb\xbf\r\n" + jsonl([{"prompt": "a"}]), "--max-tokens", "1", source=source)
    assert code == 0
    assert [record["id"] for record in records] == [2]
    capsys.readouterr()
    assert command(b"\xef\xbb\xbf", "--overwrite", source=source)[0] == 1
    assert f"{source} has no rows" in one_line(capsys)


def test_text_may_be_called_jsonl(command):
    code, records = command([prompt()], "--format", "jsonl", source="in.txt")
    assert code == 0 and len(records) == 1


def test_gzip_in_and_out(command):
    code, records = command([prompt(), "?", prompt("b")], source="in.jsonl.gz", target="out.jsonl.gz")
    assert code == 3
    assert [record["id"] for record in records] == [1, 2, 3]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[: len(data) // 2], "Compressed file ended"),
        (lambda data: data[:200] + bytes(50) + data[250:], "cannot read in.jsonl.gz"),
    ],
)
def test_a_damaged_gzip_file_gives_what_can_be_read(command, capsys, damage, message):
    rows = [prompt("".join(chr(97 + i * j % 26) for j in range(40))) for i in range(3000)]
    with open("in.jsonl.gz", "wb") as out:
        out.write(damage(gzip.compress(jsonl(rows), compresslevel=1)))
    code, records = command(None, source="in.jsonl.gz")
    assert code == 1
    assert [record["id"] for record in records or ()] == list(range(1, len(records or ()) + 1))
    assert message in capsys.readouterr().err


def test_not_a_gzip_file(command, capsys):
    with open("in.jsonl.gz", "wb") as out:
        out.write(jsonl([prompt()]))
    assert command(None, source="in.jsonl.gz")[0] == 1
    assert "cannot read in.jsonl.gz: Not a gzipped file" in one_line(capsys)


def test_only_the_first_rows(command):
    lines = [prompt(), "", "?", prompt("b"), prompt("c")]
    code, records = command(lines, "--limit", "3")
    assert code == 3
    assert [record["id"] for record in records] == [1, 3, 4]
    assert len(command(lines, "--limit", "9", "--overwrite")[1]) == 4


def test_a_read_that_fails_in_the_middle_delivers_what_was_running(command, monkeypatch, capsys):
    class Broken(io.RawIOBase):
        lines = iter([jsonl([prompt(max_tokens=9)]), jsonl([prompt("b")])])

        def readline(self, size=-1):
            line = next(self.lines, None)
            if line is None:
                raise OSError(5, "Input/output error")
            return line

    monkeypatch.setattr(sys, "stdin", SimpleNamespace(fileno=lambda: _no_number(), buffer=Broken()))
    code, records = command(None, source="-")
    assert code == 1
    assert [record["usage"]["completion_tokens"] for record in records] == [9, 4]
    assert "stopped after 2 rows were read: cannot read stdin: Input/output error" in capsys.readouterr().err


def _no_number():
    raise io.UnsupportedOperation("fileno")


# ----------------------------------------------------------------------------------------------- too long


@pytest.mark.parametrize(
    ("how", "left"), [("truncate-left", LETTERS[-59:]), ("truncate-right", LETTERS[:59]), ("error", None)]
)
def test_a_prompt_that_is_too_long_fails_or_loses_an_end(command, capsys, how, left):
    prompts = []
    rows = [prompt(), prompt(LETTERS), prompt([1, *ids(LETTERS)]), prompt("b")]
    code, records = command(rows, "--on-too-long", how, prompts=prompts, tokenizer=WithBOS)
    if left is None:
        assert code == 3
        assert ["error" in record for record in records] == [False, True, True, False]
        assert "a prompt of 81 tokens and 4 to generate" in records[1]["error"]
        return
    assert code == 0
    # 64 tokens in all, 4 of them to generate; the special token in front stays.
    assert prompts[1:3] == [[1, *ids(left)]] * 2
    usage = {"prompt_tokens": 60, "completion_tokens": 4, "dropped_prompt_tokens": 21}
    assert [record["usage"] for record in records[1:3]] == [usage] * 2
    assert records[0]["usage"].keys() == {"prompt_tokens", "completion_tokens"}
    assert "prompts cut       2\n" in capsys.readouterr().err


def test_messages_that_are_too_long_are_cut_as_tokens(command):
    prompts = []
    row = {"messages": [{"role": "u", "content": LETTERS}], "params": {"max_tokens": 14}}
    code, _ = command([row], "--on-too-long", "truncate-left", prompts=prompts)
    assert code == 0
    assert prompts == [ids(LETTERS[-50:])]


@pytest.mark.parametrize(
    ("params", "message"),
    [({}, "max_tokens must say how much room the answer needs"), ({"max_tokens": 70}, "70 to generate can never run")],
)
def test_what_cannot_be_cut_right_is_an_error(command, params, message):
    code, records = command([{"prompt": LETTERS, "params": params}], "--on-too-long", "truncate-right")
    assert code == 3
    assert message in records[0]["error"]
