"""``batchkit plan`` on a configuration: what it prints, and what it refuses in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchkit import cli

OPT_13B = Path(__file__).resolve().parents[2] / "benchmarks" / "models" / "opt-13b"
A100 = ["--device", "a100-40", "--dtype", "float16"]


def test_the_original_card(capsys) -> None:
    assert cli.main(["plan", str(OPT_13B), *A100]) == 0
    out = capsys.readouterr().out
    assert "arithmetic, nothing was run or measured" in out
    assert "0.05 of the memory kept for activations" in out
    assert "819,200 bytes" in out and "14,992, in 937 blocks of 16" in out
    rows = {line[:14].strip(): line[14:].split() for line in out.partition("that fit, prompt")[2].splitlines()[:6]}
    assert rows["as declared"] == ["29", "7"]


def test_json_has_the_exact_numbers(capsys) -> None:
    numbers = ["--memory", "42.3GB", "--bandwidth", "1.555e12", "--flops", "312e12", "--memory-fraction", "0.9"]
    assert cli.main(["plan", str(OPT_13B / "config.json"), *numbers, "--lengths", "300,2048", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["kv_bytes"] == 38_070_000_000 - record["weight_bytes"]
    assert [load["prompt"] + load["output"] for load in record["lengths"]] == [300, 2048]
    assert [one["reservation"] for one in record["speeds"]] == ["model_len", "pow2", "max_tokens", "now"]
    assert record["device"]["flops"] == 312e12


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--device", "a100"], 2, "a100-40"),
        ([], 2, "--device (one of a100-40, a100-80, h100, h200) is missing, or --memory and --bandwidth and --flops"),
        (["--device", "h100", "--lengths", "12,x"], 2, "--lengths: must be a whole number of at least 1, got 'x'"),
        (["--device", "h100", "--memory-fraction", "nan"], 2, "above 0 and at most 1, got 'nan'"),
        ([*A100, "--memory", "24GB"], 1, "opt-13b does not fit: its weights are 25,706,946,560 bytes"),
        ([*A100, "--lengths", "4096"], 1, "a length of 4,096 tokens is not from 2 to 2,048"),
        ([*A100, "--dtype", "half-a-byte"], 1, "half-a-byte"),
    ],
)
def test_one_line_says_what_is_wrong(options: list[str], code: int, words: str, capsys) -> None:
    try:
        found = cli.main(["plan", str(OPT_13B), *options])
    except SystemExit as error:
        found = error.code
    shown = capsys.readouterr()
    assert (found, shown.out) == (code, "")
    assert words in shown.err and shown.err.count("\n") == 1


def test_a_configuration_that_is_not_there_or_lacks_a_field(tmp_path: Path, capsys) -> None:
    assert cli.main(["plan", str(tmp_path / "config.json"), *A100]) == 1
    assert f"there is no {tmp_path / 'config.json'}" in capsys.readouterr().err
    raw = json.loads((OPT_13B / "config.json").read_text(encoding="utf-8"))
    del raw["num_hidden_layers"]
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    assert cli.main(["plan", str(tmp_path), *A100]) == 1
    shown = capsys.readouterr().err
    assert "has no field 'num_hidden_layers'" in shown and shown.count("\n") == 1
