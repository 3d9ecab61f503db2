"""``batchkit explain``: simulated on a preset, measured on a tiny model."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import json
import math

import pytest

from batchkit import cli
from batchkit.costs import MeasuredCost
from batchkit.experiment import ladder
from batchkit.experiment.calibrate import Calibration, FitError
from tiny_models import tiny

SMALL = ["--n", "8", "--prompt", "8", "--mean", "4", "--cap", "12", "--seeds", "0,1", "--kv-sequences", "3"]
BUDGETS = ["--block-size", "4", "--max-num-seqs", "8", "--step-tokens", "64", "--chunk-tokens", "16"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    tiny("llama").save_pretrained(path)
    return str(path)


def explain(folder, *more, device="a100-40"):
    return cli.main(["explain", folder, "--device", device, *SMALL, *BUDGETS, *more])


def test_simulated_twice_gives_the_same_file(folder, tmp_path, capsys) -> None:
    paths = [tmp_path / "1.json", tmp_path / "2.json"]
    for path in paths:
        assert explain(folder, "--json", str(path)) == 0
    assert paths[0].read_bytes() == paths[1].read_bytes()
    found = json.loads(paths[0].read_text())
    assert [one["case"] for one in found["ladders"]] == ["true lengths declared", "12 tokens declared"]
    for one in found["ladders"]:
        assert one["simulated"] and one["missing"] == []
        for first, *rungs in one["orders"].values():
            assert first["factor"] is None
            product = math.prod(rung["factor"]["mean"] for rung in rungs)
            assert product == pytest.approx(rungs[-1]["cumulative"]["mean"])
    text = capsys.readouterr().out
    assert "SIMULATED: " in text and "Whole gain: " in text
    for said in ("order A", "order B", "drop finished rows", "gen./s", "KV used %", "share %"):
        assert said in text


def test_measured_with_a_batch_set_by_hand(folder, tmp_path, capsys) -> None:
    path = tmp_path / "out.json"
    more = ["--declared", "12", "--seeds", "0", "--static-batch", "2", "--json", str(path)]
    assert explain(folder, *more, device="cpu") == 0
    (one,) = json.loads(path.read_text())["ladders"]
    assert not one["simulated"]
    assert "seats" in [rung["change"] for rung in one["orders"]["A"]]
    text = capsys.readouterr().out
    assert text.startswith("MEASURED: ")
    assert "whole gain: " in text


def test_on_a_device_that_was_calibrated(folder, tmp_path, capsys) -> None:
    error = FitError(num_steps=9, measured_s=2.0, predicted_s=2.0, mean_step_error=0.0)
    cost = MeasuredCost(tokens=(1, 101), seconds=(0.5, 1.5))
    Calibration(cost=cost, fitted=error, held_out=error, about={"model": "m"}).save(tmp_path / "cost.json")
    path = tmp_path / "out.json"
    calibrated = ["--calibration", str(tmp_path / "cost.json"), "--seeds", "0", "--json", str(path)]
    assert cli.main(["explain", folder, *SMALL, *BUDGETS, *calibrated]) == 0
    text = capsys.readouterr().out
    assert "fitted to measured steps (model: m)" in text and "Whole gain: " in text
    found = json.loads(path.read_text())
    assert found["cost"]["tokens"] == [1, 101]
    assert all(one["simulated"] and one["missing"] == [] for one in found["ladders"])


def test_recorded_requests_all_at_once(folder, tmp_path, capsys) -> None:
    path = tmp_path / "load.jsonl"
    lines = [
        {"prompt": 8, "max_tokens": 12, "output_tokens": tokens, "arrival": 100.0 * tokens} for tokens in (1, 6, 9)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["explain", folder, "--device", "h100", *BUDGETS, "--seeds", "0", "--requests", str(path)]
    assert cli.main(command) == 0
    text = capsys.readouterr().out
    assert "3 requests" in text
    assert "true lengths declared" in text
    assert "12 tokens declared" in text


def test_a_plot(folder, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.svg"
    assert explain(folder, "--plot", str(path)) == 0
    assert path.read_text().startswith("<?xml")


def test_interrupted(folder, tmp_path, capsys, monkeypatch) -> None:
    runs = []
    one_run = ladder.compare.__globals__["run"]

    def run(*args, **more):
        if len(runs) == 3:
            raise KeyboardInterrupt
        runs.append(one_run(*args, **more))
        return runs[-1]

    monkeypatch.setitem(ladder.compare.__globals__, "run", run)
    path = tmp_path / "out.json"
    assert explain(folder, "--json", str(path)) == 130
    out, err = capsys.readouterr()
    assert "not run" in out and "unknown, runs are missing" in out
    assert "true lengths declared: missing " in err
    assert "12 tokens declared: missing altogether" in err
    first, second = json.loads(path.read_text())["ladders"]
    assert len(first["missing"]) > 0
    assert second["missing"] == "all"


@pytest.mark.parametrize(
    ("more", "device", "code", "said"),
    [
        ([], "a100-41", 2, "no preset 'a100-41'"),
        (["--kv-tokens", "12"], "a100-40", 1, "declares 15 KV slots; the KV budget is 12 tokens"),
        (["--declared", "5"], "a100-40", 1, "--declared 5 is less than outputs may have with a cap of 12"),
        (["--max-model-len", "15"], "a100-40", 1, "more than --max-model-len 15"),
        (["--static-batch", "9"], "a100-40", 1, "static_batch must be between 1 and max_num_seqs (8), got 9"),
        (["--chunk-tokens", "7"], "a100-40", 1, "chunk_tokens must be at least max_num_seqs (8), got 7"),
        (["--requests", "none.jsonl"], "a100-40", 1, "none.jsonl"),
        (["--attention", "reference"], "a100-40", 1, "--attention is for a model that is measured"),
        (["--attention", "varlen"], "cpu", 1, "varlen: it needs a CUDA device"),
        (["--requests", "none.jsonl", "--n", "3"], "a100-40", 1, "--n does not go with --requests"),
        (["--max-model-len", "50000"], "a100-40", 1, "a sequence may have 50,000 tokens, and the model takes"),
    ],
)
def test_mistakes_are_said_in_one_line(more, device, code, said, folder, capsys) -> None:
    options = [option for option in SMALL if option not in ("--kv-sequences", "3")] if "--kv-tokens" in more else SMALL
    options = ["--seeds", "0,1"] if "--requests" in more else options
    command = ["explain", folder, "--device", device, *options, *BUDGETS, *more]
    try:
        found = cli.main(command)
    except SystemExit as stopped:
        found = stopped.code
    assert found == code
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
