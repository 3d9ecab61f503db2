"""``benchmarks/gpu_check.sh`` without a GPU: a rehearsal, and what it says of what fails, lacks or takes too long."""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from batchkit.experiment.policies import POLICIES
from batchkit.hf.runner import TransformersRunner
from tiny_models import tiny

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_check.sh"
TINY = ["--device", "cpu", "--tiny"]


sys.path.insert(0, str(SCRIPT.parent))
gpu_check, gpu_rig, gpu_throughput = map(importlib.import_module, ("gpu_check", "gpu_rig", "gpu_throughput"))
sys.path.remove(str(SCRIPT.parent))


def start(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run([str(SCRIPT), *options], capture_output=True, text=True, env=environment, check=False)


@pytest.mark.slow
def test_a_rehearsal_runs_everything_and_says_that_it_is_one(tmp_path: Path) -> None:
    done = start(*TINY, "--json", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("REHEARSAL")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["rehearsal"] and not found["errors"] and not found["cut"]
    assert found["versions"]["torch"] == torch.__version__
    assert " passed" in found["tests"]["outcome"] and "failed" not in found["tests"]["outcome"]
    assert found["device"]["bandwidth"] > 0 and found["device"]["flops"] > 0
    decoded = {(one["model"], one["batch"], one["layout"]) for one in found["decode"]}
    sizes = gpu_rig.SMALL
    assert len(decoded) == len(found["decode"]) == len(gpu_check.SHAPES) * len(sizes.batches) * 2
    assert {one["attention"] for one in found["decode"]} == {"reference"}
    assert [one["policy"] for one in found["throughput"]] == list(POLICIES)
    assert all(one["layers"] == 2 and one["factor"] > 0 and one["simulated_factor"] > 0 for one in found["throughput"])
    assert any("attention backend varlen: it needs a CUDA device" in one for one in found["missing"])
    goals = done.stdout.split("Goals:\n")[1].split("\n\n")[0].splitlines()
    assert len(goals) == 4 and all(goal.endswith("not measured") for goal in goals)


@pytest.fixture
def one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "SHAPES", gpu_check.SHAPES[:1])


@pytest.mark.slow
@pytest.mark.usefixtures("one_shape")
def test_a_part_that_fails_stops_no_other(monkeypatch, capsys, tmp_path: Path) -> None:
    def fails(check: object) -> None:
        raise RuntimeError("no such speed")

    monkeypatch.setattr(gpu_check, "device_speed", fails)
    path = tmp_path / "found.json"
    assert gpu_check.main([*TINY, "--skip", "tests", "--json", str(path)]) == 1
    output = capsys.readouterr()
    found = json.loads(path.read_text())
    assert found["errors"]["device"] == "RuntimeError: no such speed"
    assert "speed of the device" in found["errors"]["throughput"]
    assert found["decode"] and all(one["ms"] > 0 and one["floor_ms"] is None for one in found["decode"])
    assert "Failed:\n  device: RuntimeError: no such speed" in output.out
    assert "Traceback" in output.err


def test_a_step_that_fails_stops_no_other(monkeypatch) -> None:
    true = gpu_check.execute

    def fails(runner, step) -> None:
        if len(step.rows) == 4:
            raise torch.OutOfMemoryError("4 rows")
        true(runner, step)

    monkeypatch.setattr(gpu_check, "execute", fails)
    check = gpu_check.Check(torch.device("cpu"), tiny=True, skip=["tests", "device", "throughput"], budget_s=100)
    model = tiny(vocab_size=512, max_position_embeddings=256)
    monkeypatch.setattr(gpu_check, "build", lambda *_: model)
    cells: list[dict[str, object]] = []
    gpu_check._decode_shape(check, ROOT / "benchmarks" / "models" / "opt-13b", cells, float("inf"))
    assert [one["batch"] for one in cells] == [1, 1]
    assert list(check.errors.values()) == ["OutOfMemoryError: 4 rows"] * 2


@pytest.mark.slow
@pytest.mark.usefixtures("one_shape")
def test_on_a_gpu_there_are_graphs_and_the_memory_bounds_the_context(monkeypatch, tmp_path: Path) -> None:
    """With stand-ins for what only a device can do."""
    wanted = []

    def runner(model, *, attention, cuda_graphs, **options):
        wanted.append((attention, cuda_graphs))
        if attention == "xformers" and cuda_graphs:
            logging.getLogger("batchkit").warning("decode steps run without CUDA graphs: because")
        return TransformersRunner(model, attention="reference", **options)

    true = gpu_check.build
    on_cpu = gpu_check.Check(torch.device("cpu"), tiny=True, skip=[], budget_s=1)
    a_token = 2 * 2 * 64 * 2  # bytes of KV: two layers of keys and values, each 64 numbers
    room = 3 * gpu_rig.SMALL.block_size * a_token
    properties = SimpleNamespace(name="Some GPU", major=9, minor=0, total_memory=10 * room)
    for name, value in {
        "is_available": True,
        "get_device_properties": properties,
        "mem_get_info": (room + 0.15 * 10 * room, 10 * room),
        "synchronize": None,
        "empty_cache": None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    for module in (gpu_check, gpu_throughput):
        monkeypatch.setattr(module, "build", lambda check, folder: true(on_cpu, folder))
    monkeypatch.setattr(gpu_check, "device_speed", lambda check: {"bandwidth": 1e9, "flops": 1e12})
    monkeypatch.setattr(gpu_rig, "TransformersRunner", runner)
    path = tmp_path / "found.json"
    assert gpu_check.main(["--tiny", "--skip", "tests", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["versions"]["device"] == "Some GPU" and found["versions"]["capability"] == "9.0"
    modes = [("xformers", True), ("varlen", True), ("xformers", False), ("varlen", False), ("reference", False)]
    assert wanted == [*modes, ("xformers", True)]  # the last is that of the experiment
    assert {one["batch"] for one in found["decode"]} == {1}
    assert len(found["cut"]) == len(modes) * 2
    assert all(", 4 rows, " in one and one.endswith(": 3 KV blocks are not one for each row") for one in found["cut"])
    by_mode = {(one["attention"], one["graphs"]) for one in found["decode"]}
    assert by_mode == {("xformers", False), ("varlen", True), ("varlen", False), ("reference", False)}
    assert {one["graphs"] for one in found["throughput"]} == {False}


@pytest.mark.slow
@pytest.mark.usefixtures("one_shape")
def test_what_there_is_no_time_for_is_named(capsys, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    assert gpu_check.main([*TINY, "--skip", "tests", "--budget-s", "0", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    sizes = gpu_rig.SMALL
    assert not found["decode"] and not found["throughput"] and not found["errors"]
    assert len(found["cut"]) == len(gpu_check.SHAPES) * len(sizes.batches) * 2 + len(POLICIES)
    left_out = capsys.readouterr().out.split("Left out:\n")[1]
    assert all(cut in left_out for cut in found["cut"])


def test_goals_are_met_or_missed(monkeypatch) -> None:
    check = gpu_check.Check(torch.device("cuda"), tiny=False, skip=[], budget_s=1)
    check.found["decode"] = [
        {"model": "opt-13b", "graphs": graphs, "attention": "varlen", "layout": layout, "batch": batch, "ms": ms}
        | {"weights_floor_ms": 10.0, "floor_ms": 12.0}
        for graphs, layout, batch, ms in [
            (True, "paged", 1, 13.0),
            (True, "paged", 16, 14.0),
            (True, "paged", 64, 11.0),
            (True, "contiguous", 64, 10.0),
            (False, "paged", 1, 99.0),
        ]
    ]
    check.found["throughput"] = [{"factor": 2.0, "simulated_factor": 2.2}, {"factor": 2.0, "simulated_factor": 3.0}]
    one, sixteen, layouts, factors = gpu_check.goals(check)
    assert one.endswith("varlen (1.08x of reading the KV too) 1.30x: met")
    assert sixteen.endswith("1.40x: missed")
    assert layouts.endswith("varlen 1.10x: met")
    assert factors.endswith("1 of 2 are: missed")


@pytest.mark.parametrize("tied", [True, False])
def test_weights_that_are_only_looked_up_are_not_read(tied: bool) -> None:
    model = tiny(tie_word_embeddings=tied)
    table = model.get_input_embeddings().weight
    total = sum(weights.nbytes for weights in model.parameters())
    assert gpu_check.weights_read(model) == total - (0 if tied else table.nbytes)


@pytest.mark.parametrize("contiguous", [True, False])
def test_rows_of_a_step_share_no_block(contiguous: bool) -> None:
    step = gpu_check.make_step(3, 100, 32, contiguous=contiguous)
    assert step.num_tokens == 3 and all(
        row.start == 99 and isinstance(row.blocks, range) == contiguous for row in step.rows
    )
    assert sorted(block for row in step.rows for block in row.blocks) == list(range(3 * 4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "cpu"], "only --tiny is reasonable"),
        ([*TINY, "--skip", "decoding"], "unknown decoding; there are tests, device, decode, throughput"),
        ([*TINY, "--skip", "tests,device,decode,throughput"], "nothing is left to run"),
        ([*TINY, "--layers", "0"], "OPT-13B has 40, got 0"),
    ],
)
def test_wrong_arguments(options: list[str], message: str, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        gpu_check.main(options)
    assert message in capsys.readouterr().err


def test_no_gpu(monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        gpu_check.main([])
    assert "torch finds no CUDA device; --device cpu --tiny is a rehearsal" in capsys.readouterr().err


@pytest.mark.slow
def test_a_wheel_is_installed_for_the_run_alone(tmp_path: Path) -> None:
    pytest.importorskip("pip")
    wheel, found = tmp_path / "xformers-0.0.1-py3-none-any.whl", tmp_path / "found.json"
    about = "xformers-0.0.1.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("xformers/__init__.py", "")
        archive.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: xformers\nVersion: 0.0.1\nRequires-Dist: none\n"
        )
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    some = [*TINY, "--skip", "tests,decode,throughput", "--json", str(found)]
    assert start(*some, XFORMERS_WHEEL=str(wheel), TMPDIR=str(tmp_path)).returncode == 0
    assert json.loads(found.read_text())["versions"]["xformers"] == "0.0.1"
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    done = start(*some, XFORMERS_WHEEL=str(tmp_path / "absent.whl"), TMPDIR=str(tmp_path))
    assert done.returncode == 0 and "could not be installed; going on without it" in done.stderr
