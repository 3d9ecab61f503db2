"""``batchkit bench`` on a real, tiny model, and ``batchkit simulate`` with a shape from a configuration."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import json

import pytest

from batchkit import cli
from tiny_models import tiny

SMALL = ["--n", "6", "--prompt", "8", "--fixed", "4", "--seeds", "0", "--policies", "static-batch,chunked"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    tiny("llama").save_pretrained(path)
    return str(path)


@pytest.mark.parametrize(
    ("experiment", "options"),
    [("variance", ["--caps", "4,8"]), ("latency", ["--arrivals", "burst"]), ("latency", ["--rates", "100"])],
)
def test_measured(experiment, options, folder, tmp_path, capsys) -> None:
    path = tmp_path / "out.json"
    assert cli.main(["bench", experiment, folder, "--device", "cpu", *SMALL, *options, "--json", str(path)]) == 0
    assert capsys.readouterr().out.startswith(f"MEASURED: {folder} in float32 on cpu")
    found = json.loads(path.read_text())
    assert found["versions"]["torch"] and found["command"] == f"bench {experiment}"
    for cell in found["cells"]:
        assert not cell["simulated"] and len(cell["runs"]) == 2
        for run in cell["runs"]:
            assert (run["requests"], run["generated_tokens"], run["failed"]) == (6, 24, 0)
            assert run["policy_ms_per_step"] > 0


def test_simulated_from_a_configuration(folder, capsys) -> None:
    command = ["simulate", "variance", f"{folder}/config.json", "--device", "h100", "--dtype", "float16"]
    assert cli.main([*command, *SMALL, "--caps", "4"]) == 0
    assert "on h100, by a cost model" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command", [["bench", "variance", "./none"], ["simulate", "variance", "./none", "--device", "h100"]]
)
def test_no_such_model(command, capsys) -> None:
    assert cli.main([*command, *SMALL]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "there is no" in line and "none" in line
