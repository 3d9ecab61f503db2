"""`batchkit generate --dry-run`: what would become of a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unit.cli_rig import LETTERS, Letters, prompt


def report(capsys):
    shown = capsys.readouterr()
    return {line[:18].strip(): line[18:] for line in shown.out.splitlines()}, shown.err


def never(out):
    raise AssertionError("a step was computed")


def test_it_computes_nothing_and_says_what_would_be(command, capsys):
    rows = [prompt("a" * n) for n in (1, 2, 2, 3, 3, 3, 4, 4, 4, 60)]
    options = ("--dry-run", "--max-num-seqs", "8", "--scheduler", "orca,reserve=pow2")
    code, records = command(rows, *options, before=never)
    assert code == 0 and records is None
    said, err = report(capsys)
    assert err == ""
    assert said == {
        "rows": "10",
        "bad rows": "0",
        "too long": "0",
        "prompt tokens": "min 1, mean 8.6, p50 3, p90 4, max 60, 86 in all",
        "max_tokens": "4",
        "model length": "64 tokens of prompt and answer together",
        "scheduler": "OrcaScheduler, reserve=pow2",
        "seats": "8",
        "token budget": "2,048 in a step",
        "KV cache": "64 blocks of 4 tokens",
        "attention": "unknown",
    }


def test_it_names_bad_rows_and_those_that_are_too_long(command, capsys):
    rows = [prompt(), "?", prompt(LETTERS), prompt("a", top_p=3), {"id": 5}, prompt([1000]), prompt("b"), "!"]
    code, records = command(rows, "--dry-run", before=never)
    assert code == 3 and records is None
    said, err = report(capsys)
    assert (said["rows"], said["bad rows"], said["too long"]) == ("8", "5", "1")
    lines = err.splitlines()
    assert [line.split(":")[1] for line in lines[:5]] == [f" line {n}" for n in ("2 is not JSON", 3, 4, 5, 6)]
    assert lines[5:] == ["batchkit: and 1 more"]


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ([4, 32, 8], "4 to 32"),
        ([None, None, None], "none for 3 rows: up to 61 each"),
        ([8, None], "8, none for 1 row: up to 61 each"),
        ([64], "none"),
    ],
)
def test_it_says_how_many_tokens_may_be_generated(command, capsys, limits, said):
    command([prompt(max_tokens=limit) for limit in limits], "--dry-run", before=never)
    assert report(capsys)[0]["max_tokens"] == said


def test_it_names_columns_that_no_row_has(command, capsys):
    rows = ["?", {"review_id": 1, **prompt()}, {"extra": 1, **prompt()}]
    code, _ = command(rows[1:], "--dry-run", "--keep", "review_id,reviewid,extra", before=never)
    assert code == 0
    said = "batchkit: column 'reviewid' was in no row (there are: 'review_id', 'prompt', 'params')\n"
    assert report(capsys)[1] == said
    assert command(rows[:1], "--dry-run", "--keep", "reviewid")[0] == 3
    assert "reviewid" not in report(capsys)[1], "no row could be read"


def test_what_would_be_cut_does_not_fail(command, capsys):
    code, _ = command([prompt(LETTERS), prompt()], "--dry-run", "--on-too-long", "truncate-left", before=never)
    assert code == 0
    said, err = report(capsys)
    assert said["too long"] == "0, and 1 would be cut"
    assert "max 80" in said["prompt tokens"]
    assert err == ""


def test_an_output_may_be_named_and_is_left_alone(command, capsys):
    Path("out.jsonl").write_text(json.dumps({"id": "old"}) + "\n")
    code, records = command([prompt()], "--dry-run", "--overwrite")
    assert code == 0
    assert records == [{"id": "old"}]


def test_a_file_without_a_good_row(command, capsys):
    assert command(["?"], "--dry-run")[0] == 3
    assert report(capsys)[0]["prompt tokens"] == "none"


def test_an_error_of_several_lines_is_one(command, capsys):
    class Verbose(Letters):
        def encode(self, text):
            raise ValueError("no\n\n  such\nletter")

    code, _ = command([prompt()], "--dry-run", tokenizer=Verbose)
    assert code == 3
    shown = capsys.readouterr().err
    assert shown == "batchkit: line 1: the tokenizer cannot encode the prompt: ValueError: no such letter\n"
