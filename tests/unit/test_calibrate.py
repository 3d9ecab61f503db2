"""Cost models fitted to steps: known ones come out again, and the error is that on other steps."""

from __future__ import annotations

import json
import os
import random
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchkit import ChunkedPrefillScheduler, RooflineCost, RowResult, SamplerOutput, SimulatedRunner, WorkloadRecord
from batchkit.cli import main
from batchkit.costs import MeasuredCost
from batchkit.experiment.calibrate import Calibration, FitError, Observation, calibrate, fit, observations, predict
from batchkit.experiment.compare import run
from batchkit.experiment.policies import Policy
from batchkit.experiment.targets import SimulatedTarget
from batchkit.trace import Trace, read_trace


def steps_by(cost, count, *, noise=0.0, seed=0):
    rng = random.Random(seed)
    steps = []
    for _ in range(count):
        tokens = rng.choice((1, 1, 2, 3, 5, 8, 13, 30, 64, 100, 128, 200, 256, 400))
        context = tokens + rng.randint(0, 4000)
        pairs = tokens * rng.randint(1, 300)
        seconds = cost.curve(tokens) + cost.context_s * context + cost.pair_s * pairs
        steps.append(Observation(tokens, context, pairs, seconds * (1 + noise * rng.uniform(-1, 1))))
    return steps


KNOWN = MeasuredCost(tokens=(1, 8, 64, 400), seconds=(0.01, 0.012, 0.05, 0.3), context_s=1e-6, pair_s=2e-7)


def test_a_known_model_comes_out_again():
    found = fit(steps_by(KNOWN, 400))
    for tokens in (1, 4, 8, 20, 64, 100, 333, 400):
        assert found.curve(tokens) == pytest.approx(KNOWN.curve(tokens), rel=0.01)
    assert found.context_s == pytest.approx(1e-6, rel=0.02)
    assert found.pair_s == pytest.approx(2e-7, rel=0.02)
    assert predict(found, steps_by(KNOWN, 50, seed=1)).mean_step_error < 0.01


def test_noise_is_not_fitted():
    found = fit(steps_by(KNOWN, 400, noise=0.2))
    error = predict(found, steps_by(KNOWN, 200, seed=1))
    assert error.mean_step_error < 0.06
    assert abs(error.total_error) < 0.03


@given(st.integers(0, 1000))
def test_the_curve_never_falls_and_nothing_is_negative(seed):
    rng = random.Random(seed)
    steps = [
        Observation(rng.randint(1, 50), rng.randint(1, 900), rng.randint(1, 900), rng.uniform(0.001, 1))
        for _ in range(30)
    ]
    found = fit(steps)
    assert list(found.seconds) == sorted(found.seconds)
    assert min(*found.seconds, found.context_s, found.pair_s) >= 0


def test_too_little_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match="at least 20 steps and two different numbers of tokens, got 19"):
        fit(steps_by(KNOWN, 19))
    with pytest.raises(ValueError, match=r"got 30 and \[1\]"):
        fit([Observation(1, 1, 1, 0.1)] * 30)
    with pytest.raises(ValueError, match="at least one step"):
        predict(KNOWN, [])


def test_a_curve_goes_on_straight_beyond_its_ends():
    assert KNOWN.curve(736) == pytest.approx(0.55)
    assert [KNOWN.curve(tokens) for tokens in KNOWN.tokens] == pytest.approx(KNOWN.seconds)
    with pytest.raises(ValueError, match="at least two points in ascending order"):
        MeasuredCost(tokens=(1, 1), seconds=(0.1, 0.2))


@pytest.fixture
def simulated(tmp_path):
    """Step traces of a virtual clock."""
    cost = RooflineCost(num_params=1e9, kv_bytes_per_token=1e5, bandwidth=1e11, flops=1e13, overhead_s=0.01)
    target = SimulatedTarget(cost=cost, kv_tokens=2000)
    rng = random.Random(0)
    load = [WorkloadRecord(prompt=rng.randint(1, 90), max_tokens=rng.randint(1, 30)) for _ in range(40)]
    for seats in (2, 9):
        policy = Policy(name=f"p{seats}", scheduler=ChunkedPrefillScheduler, max_num_seqs=seats)
        run(target, policy, load, trace=tmp_path / f"{seats}.jsonl")
    return [tmp_path / "2.jsonl", tmp_path / "9.jsonl"]


@pytest.fixture
def traces(simulated):
    """The same as if they had been measured: the steps' own seconds are 0.95 of those until the next one."""
    for path in simulated:
        lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
        for line, after in pairwise(lines):
            if line["kind"] == "step":
                seconds = after["time"] - line["time"]
                line |= {"schedule_s": 0.01 * seconds, "execute_s": 0.9 * seconds, "sample_s": 0.04 * seconds}
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return simulated


def trace_of(*steps):
    """A trace of steps: when each begins, its own seconds, and other fields."""
    lines = [
        {
            "step": number,
            "time": time,
            "rows": [{"start": 0, "tokens": 4}, {"start": 9, "tokens": 1}],
            "error": None,
            "schedule_s": own / 4,
            "execute_s": own / 2,
            "sample_s": own / 4,
            **fields,
        }
        for number, (time, own, fields) in enumerate(steps, 1)
    ]
    return Trace(engine={}, steps=tuple(lines), requests=(), complete=True)


def test_a_step_takes_until_the_next_one_unless_the_engine_waited():
    steps = [(0, 1, {}), (1.25, 1, {}), (2.5, 1, {"error": "broken"}), (4, 1, {}), (100, 1, {}), (101, 0.5, {})]
    found = observations(trace_of(*steps))
    assert [step.seconds for step in found] == [1.25, 1.25, 1, 1, 0.5]
    assert set(found) <= {Observation(5, 14, 20, seconds) for seconds in (1.25, 1, 0.5)}


@pytest.mark.parametrize("gap", [2.0, 0.5])
def test_a_clock_that_is_not_the_steps_own_is_refused(gap):
    steps = [(number * gap, 1, {}) for number in range(30)]
    with pytest.raises(ValueError, match=r"29 of 29 steps .* virtual clock.* mostly waited"):
        observations(trace_of(*steps))


def test_a_simulation_is_not_fitted(simulated, capsys):
    assert main(["calibrate", "--traces", *map(str, simulated)]) == 1
    shown = capsys.readouterr().err
    assert "trace 1: " in shown and "virtual clock" in shown and shown.count("\n") == 1


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"schedule_s": None}, "TypeError"),
        ({"rows": [{"start": 0}]}, "KeyError: 'tokens'"),
        ({"rows": 7}, "TypeError"),
        ({"execute_s": float("nan")}, "nan s of its own"),
        ({"execute_s": -1}, "-0.5 s of its own"),
        ({"time": float("inf")}, "inf s until"),
        ({"rows": [{"start": 0, "tokens": 0}]}, "0 tokens"),
    ],
)
def test_a_step_that_cannot_be_is_named(fields, said):
    with pytest.raises(ValueError, match=rf"step [12] cannot be taken .*{said}"):
        observations(trace_of((0, 1, {}), (1, 1, fields), (2, 1, {})))


def test_a_step_without_a_field_is_named():
    trace = trace_of((0, 1, {}), (1, 1, {}))
    del trace.steps[1]["schedule_s"]
    with pytest.raises(ValueError, match=r"trace 1: step 2 cannot be taken \(KeyError: 'schedule_s'\)"):
        calibrate([trace], about={})


def test_held_out_traces_without_steps_are_refused(traces):
    with pytest.raises(ValueError, match="held out have no steps"):
        calibrate([read_trace(path) for path in traces], about={}, held_out=[trace_of()])


def test_the_command_fits_traces_and_the_file_comes_back(traces, tmp_path, capsys):
    out = tmp_path / "cost.json"
    assert main(["calibrate", "--traces", str(traces[0]), "--hold-out", str(traces[1]), "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "held out:" in printed and "fitted to:" in printed
    found = Calibration.load(out)
    assert found == calibrate([read_trace(traces[0])], about={"traces": 1}, held_out=[read_trace(traces[1])])
    assert f"{found.held_out.num_steps:,} steps" in printed
    every_fifth = calibrate([read_trace(path) for path in traces], about={})
    total = sum(len(observations(read_trace(path))) for path in traces)
    assert every_fifth.held_out.num_steps == total // 5
    assert every_fifth.fitted.num_steps == total - total // 5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "one of the two"),
        (["model", "--traces", "a"], "one of the two"),
        (["model", "--hold-out", "a"], "--hold-out goes with --traces"),
        (["--traces", "nothing.jsonl"], "nothing.jsonl"),
        (["--traces", "nothing.jsonl", "--device", "cpu"], "--device does not go with --traces"),
        (["--traces", "nothing.jsonl", "--dtype", "auto"], "--dtype does not go with --traces"),
        (["--traces", "nothing.jsonl", "--seed", "0"], "--seed does not go with --traces"),
    ],
)
def test_what_the_command_refuses(arguments, said, capsys):
    assert main(["calibrate", *arguments]) == 1
    shown = capsys.readouterr().err
    assert said in shown and shown.count("\n") == 1


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("no/such/folder.json", "there is no folder"),
        ("folder", "it is a folder"),
        ("locked.json", "there is no permission"),
    ],
)
def test_before_a_model_runs_it_is_known_that_the_result_cannot_be_kept(tmp_path, monkeypatch, capsys, place, said):
    def target_of(args):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("batchkit.cli.calibrate.target_of", target_of)
    monkeypatch.setattr(os, "access", lambda path, mode: path != str(tmp_path))
    (tmp_path / "folder").mkdir()
    assert main(["calibrate", "model", "--json", str(tmp_path / place)]) == 1
    shown = capsys.readouterr().err
    assert said in shown and str(tmp_path / place) in shown and shown.count("\n") == 1


class Broken(SimulatedRunner):
    """Computes nothing but NaN for prompts of an odd length."""

    def execute(self, out):
        got = super().execute(out)
        return SamplerOutput(
            tuple(
                RowResult(error="logits\nare NaN") if len(row.request.prompt_token_ids) % 2 else result
                for row, result in zip(out.rows, got.rows, strict=True)
            )
        )


class BrokenTarget(SimulatedTarget):
    def make_runner(self, policy, num_blocks):
        runner, clock = super().make_runner(policy, num_blocks)
        return Broken(runner.geometry, clock=clock, cost=self.cost), clock


def test_failed_requests_are_not_fitted(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "batchkit.cli.calibrate.target_of", lambda args: (BrokenTarget(cost=KNOWN, kv_tokens=10_000), {})
    )
    out = tmp_path / "cost.json"
    assert main(["calibrate", "model", "--json", str(out)]) == 1
    shown = capsys.readouterr()
    assert re.search(r"batchkit: \d of 3 requests failed, 1 at a time, .*: .*logits are NaN\n$", shown.err)
    assert shown.out == "" and not out.exists()


def test_a_fit_that_cannot_be_kept_is_printed(traces, tmp_path, monkeypatch, capsys):
    def save(self, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Calibration, "save", save)
    out = tmp_path / "cost.json"
    assert main(["calibrate", "--traces", *map(str, traces), "--json", str(out)]) == 1
    shown = capsys.readouterr()
    assert shown.err == f"batchkit: {out} cannot be written: No space left on device\n"
    assert "held out:" in shown.out


@pytest.mark.parametrize(
    "text",
    ["[]", "{", '{"kind": "calibration", "version": 99}', '{"kind": "other"}', pytest.param("[" * 100_000, id="deep")],
)
def test_what_is_no_calibration_is_refused(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="is no calibration of version 1"):
        Calibration.load(path)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("about", ["cpu"]),
        ("held_out.measured_s", 0),
        ("held_out.measured_s", "long"),
        ("held_out.measured_s", float("nan")),
        ("held_out.predicted_s", float("inf")),
        ("fitted.num_steps", 0),
        ("fitted.mean_step_error", -0.1),
        ("fitted", {}),
        ("cost.seconds", [0.1, float("nan")]),
        ("cost.seconds", [0.1, "0.2"]),
        ("cost.seconds", 0.1),
        ("cost.tokens", ["1", "8"]),
        ("cost.tokens", [1]),
        ("cost.context_s", None),
        ("cost.pair_s", -1),
        ("cost.more", 1),
    ],
)
def test_a_calibration_with_a_value_that_cannot_be_is_refused(tmp_path, place, value):
    path = tmp_path / "x.json"
    error = FitError(num_steps=9, measured_s=2.0, predicted_s=2.1, mean_step_error=0.1)
    cost = MeasuredCost(tokens=(1, 8), seconds=(0.1, 0.2))
    right = Calibration(cost=cost, fitted=error, held_out=error, about={"device": "cpu"})
    right.save(path)
    assert Calibration.load(path) == right
    raw = json.loads(path.read_text(encoding="utf-8"))
    within, _, name = place.rpartition(".")
    (raw[within] if within else raw)[name] = value
    path.write_text(json.dumps(raw), encoding="utf-8")
    with pytest.raises(ValueError, match=r"x\.json is no calibration of version 1 \(\w+Error: "):
        Calibration.load(path)
