"""``benchmarks/smoke.py`` on little work: what is counted is within its bounds, and what is made slower is found."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from batchkit import Engine
from batchkit.hf import runner
from batchkit.hf.backends.cpu import CpuBackend
from batchkit.hf.backends.native import BuildError, kernels
from batchkit.hf.batch import BatchBuilder
from batchkit.hf.sampler import Sampler
from batchkit.scheduler import Step

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

sys.path.insert(0, str(BENCHMARKS))
smoke = importlib.import_module("smoke")
sys.path.remove(str(BENCHMARKS))


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few policies and rows; all of them take a quarter of a minute."""
    monkeypatch.setattr(smoke, "ROWS", 8)
    monkeypatch.setattr(smoke, "SCHEDULERS", {name: smoke.SCHEDULERS[name] for name in ("chunked", "priority")})


@pytest.fixture
def has_kernels() -> None:
    try:
        kernels("layers")
    except BuildError as error:
        pytest.skip(str(error))


def verdicts(tmp_path: Path, *options: str) -> dict[str, str]:
    """Of what is counted and compared with the record, by name."""
    path = tmp_path / "found.json"
    status = smoke.main(["--tiny", "--json", str(path), *options])
    checks = json.loads(path.read_text())["checks"]
    assert status == any(check["verdict"] == "SLOWER" for check in checks)
    return {check["name"]: check["verdict"] for check in checks if check["kind"] != "time"}


@pytest.mark.slow
def test_what_is_counted_is_within_its_bounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = verdicts(tmp_path)
    assert set(found.values()) <= {"ok", "not measured"}, capsys.readouterr().out
    checks = json.loads((tmp_path / "found.json").read_text())["checks"]
    assert {check["name"] for check in checks} == set(smoke.BOUNDS)
    assert all(check["value"] is None or check["value"] > 0 for check in checks)


def test_the_same_code_has_the_same_counts(little: None) -> None:
    _, first = smoke.python_checks(smoke.TINY, None)
    _, second = smoke.python_checks(smoke.TINY, first)
    assert first == second


def test_a_loop_over_blocks_is_found(little: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    build = BatchBuilder.build

    def slower(self: BatchBuilder, rows: Sequence) -> object:
        for row in rows:
            sum(1 for _ in row.blocks)
        return build(self, rows)

    monkeypatch.setattr(BatchBuilder, "build", slower)
    found = verdicts(tmp_path, "--parts", "python")
    assert found["context"] == found["record"] == "SLOWER"
    assert found["queue"] == "ok"


def test_a_loop_over_the_queue_is_found(little: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    step = Engine.step

    def slower(self: Engine) -> list:
        sum(1 for _ in self._waiting)
        return step(self)

    monkeypatch.setattr(Engine, "step", slower)
    found = verdicts(tmp_path, "--parts", "python")
    assert found["queue"] == found["admission"] == "SLOWER"
    assert found["context"] == "ok"


@pytest.mark.slow
def test_a_row_that_costs_more_is_found_by_the_record(
    little: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    record = tmp_path / "record.json"
    options = ("--parts", "python", "--record-file", str(record))
    assert verdicts(tmp_path, *options)["record"] == "not measured"
    assert verdicts(tmp_path, *options, "--record")["record"] == "not measured"
    assert verdicts(tmp_path, *options)["record"] == "ok"
    run = Step.run

    def slower(self: Step, *args: object, **kwargs: object) -> bool:
        sum(range(3)), sum(range(3)), sum(range(3)), sum(range(3))
        return run(self, *args, **kwargs)

    monkeypatch.setattr(Step, "run", slower)
    found = verdicts(tmp_path, *options)
    assert [name for name, verdict in found.items() if verdict == "SLOWER"] == ["record"]


def test_layers_that_are_not_fused_are_found(has_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_optimized", lambda bound, *options: bound)
    found = {check.name: check for check in smoke.ModelChecks(smoke.TINY).operators()}
    assert found["fused operators"].value == 1 and found["fused operators"].verdict == "SLOWER"


def test_sampling_row_by_row_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = Sampler.sample

    def slower(self: Sampler, logits, rows):
        return [sample(self, logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]

    monkeypatch.setattr(Sampler, "sample", slower)
    found = {check.name: check.verdict for check in smoke.ModelChecks(smoke.TINY).operators()}
    assert found["operators by rows"] == found["sampling operators by rows"] == "SLOWER"


@pytest.fixture
def slow_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """So slow that no noise hides it."""
    attend = CpuBackend.attend

    def slower(self, *args, **kwargs):
        until = time.thread_time() + 0.01
        while time.thread_time() < until:
            pass
        return attend(self, *args, **kwargs)

    monkeypatch.setattr(CpuBackend, "attend", slower)


@pytest.mark.slow
def test_slow_kernels_are_found(has_kernels: None, slow_attention: None) -> None:
    found = {check.name: check.verdict for check in smoke.model_checks(smoke.TINY)}
    assert found["attention, decode"] == found["attention, prefill"] == "SLOWER"
    assert found["fused operators"] == "ok"


def test_without_kernels_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> None:
        raise BuildError("there is no compiler")

    monkeypatch.setattr("batchkit.hf.backends.native.kernels", fails)
    checks = smoke.model_checks(smoke.TINY)
    assert {check.name for check in checks} == set(smoke.MODEL_NAMES)
    assert {(check.verdict, check.note) for check in checks} == {("not measured", "there is no compiler")}
