"""The experiments on the command line, without a model: a toy's shape on a device's cost."""

from __future__ import annotations

import json
import os
import signal

import pytest
from typing_extensions import override

from batchkit import ChunkedPrefillScheduler, cli
from batchkit.cli import bench
from batchkit.costs import MeasuredCost, ModelShape
from batchkit.experiment.calibrate import Calibration, FitError

TOY = ModelShape(
    name="toy",
    num_params=10**9,
    active_params=10**9,
    bytes_per_param=2.0,
    kv_bytes_per_token=100_000,
    attention_width=4096,
    max_model_len=4096,
    vocab_size=1000,
)


class Interrupting(ChunkedPrefillScheduler):
    """As if somebody pressed Ctrl-C in its first step."""

    @override
    def schedule(self, step):
        os.kill(os.getpid(), signal.SIGINT)
        return super().schedule(step)


class Faulty(ChunkedPrefillScheduler):
    """A policy with a fault."""

    @override
    def schedule(self, step):
        raise RuntimeError("not yet written")


@pytest.fixture(autouse=True)
def toy(monkeypatch) -> None:
    monkeypatch.setattr(bench, "shape_of", lambda args: TOY)


def simulate(experiment: str, *options: str) -> int:
    return cli.main(["simulate", experiment, "toy", "--device", "a100-40", "--block-size", "4", *options])


SMALL = ("--caps", "4,16", "--n", "12", "--prompt", "8", "--seeds", "0,1")
RATES = ("--rates", "20,2000", "--n", "20", "--prompt", "8", "--fixed", "8", "--seeds", "0")
TWO = ("--policies", "static-batch,chunked")


def written(path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def test_variance_in_a_table_and_in_json(tmp_path, capsys) -> None:
    assert simulate("variance", *SMALL, "--json", str(tmp_path / "out.json")) == 0
    out = capsys.readouterr().out
    assert out.startswith("SIMULATED: toy on a100-40") and "for each real second" in out
    assert out.count("\nchunked ") == 2 and out.count("\nstatic-global ") == 2
    found = written(tmp_path / "out.json")
    assert [cell["cap"] for cell in found["cells"]] == [4, 16]
    # 8 sequences of a prompt of 8 and an output of 4, whose last token needs no slot: 3 blocks of 4 each.
    assert [cell["kv_tokens"] for cell in found["cells"]] == [8 * 12, 8 * 24]
    for cell in found["cells"]:
        assert cell["missing"] == [] and len(cell["runs"]) == 10 * 2
        assert {run["requests"] for run in cell["runs"]} == {12}
    assert "versions" not in found and found["settings"]["seeds"] == [0, 1]


def test_a_calibration_takes_the_place_of_a_preset(tmp_path, capsys) -> None:
    error = FitError(num_steps=9, measured_s=2.0, predicted_s=1.9, mean_step_error=0.1)
    cost = MeasuredCost(tokens=(1, 101), seconds=(0.5, 1.5))
    path = tmp_path / "cost.json"
    Calibration(cost=cost, fitted=error, held_out=error, about={"model": "m"}).save(path)
    command = ["simulate", "variance", "toy", "--calibration", str(path), *SMALL, "--policies", "chunked"]
    assert cli.main([*command, "--json", str(tmp_path / "out.json")]) == 0
    assert "fitted to measured steps (model: m)" in (out := capsys.readouterr().out) and "-5.0% off in all" in out
    for run in (run for cell in written(tmp_path / "out.json")["cells"] for run in cell["runs"]):
        figures = run["figures"]
        tokens = 12 * 8 + run["generated_tokens"] - 12  # the last token of each is not computed
        assert figures["preemptions"] == 0
        assert figures["window_s"] == pytest.approx(figures["steps"] * 0.49 + tokens / 100)
    assert cli.main(["simulate", "variance", "toy", "--calibration", str(tmp_path / "out.json"), *SMALL]) == 1
    assert "is no calibration of version 1" in capsys.readouterr().err
    assert cli.main([*command, "--overhead-s", "1"]) == 1
    assert "--overhead-s does not go with --calibration" in capsys.readouterr().err


@pytest.mark.parametrize(("experiment", "options"), [("variance", SMALL), ("latency", RATES)])
def test_the_same_seeds_give_the_same_bytes(experiment, options, tmp_path) -> None:
    for name in ("one.json", "two.json"):
        assert simulate(experiment, *options, *TWO, "--json", str(tmp_path / name)) == 0
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.json", "two.json"]


def test_what_the_table_rests_on_is_said(tmp_path, capsys) -> None:
    few = ("--caps", "16", "--n", "6", "--prompt", "8", "--seeds", "0", "--policies", "chunked")
    assert simulate("variance", *few, "--json", str(tmp_path / "out.json")) == 0
    out, err = capsys.readouterr()
    (run,) = written(tmp_path / "out.json")["cells"][0]["runs"]
    assert f"outputs: {run['generated_tokens'] / 6:.1f} tokens in the mean" in out
    assert "slots: those as a share of the most rows" in out
    fits = written(tmp_path / "out.json")["kv_tokens_that_fit"]
    assert f"memory: {fits:,} KV tokens fit beside the weights" in out and not err
    assert simulate("variance", *few, "--kv-tokens", str(fits + 4)) == 0
    assert f"{fits + 4:,} KV tokens are simulated, and only {fits:,} fit" in capsys.readouterr().err


def test_limits_of_one_policy(capsys) -> None:
    few = ("--caps", "16", "--n", "12", "--prompt", "8", "--seeds", "0", "--policies", "orca-max_tokens")
    assert simulate("variance", *few, "--scheduler", "orca,max_num_seqs=1,max_tokens_per_step=4") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("orca")]
    assert float(lines[0][5]) > 1 and float(lines[1][5]) == 1.0


def test_rates_that_look_alike_are_apart(tmp_path) -> None:
    options = ("--rates", "1000000,1000001", "--n", "4", "--prompt", "8", "--fixed", "8", "--seeds", "0")
    assert simulate("latency", *options, "--policies", "paged", "--json", str(tmp_path / "out.json")) == 0
    assert [(cell["cell"], len(cell["runs"])) for cell in written(tmp_path / "out.json")["cells"]] == [
        ("rate 1000000", 1),
        ("rate 1000001", 1),
    ]


def test_latency_says_which_rate_is_sustained(tmp_path, capsys) -> None:
    goal = ("--goal-ttft-s", "0.05", "--goal-tpot-s", "0.1")
    assert simulate("latency", *RATES, *goal, "--policies", "chunked", "--json", str(tmp_path / "out.json")) == 0
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if line.startswith("chunked") and "%" in line)
    slow, fast = (cell["runs"][0] for cell in written(tmp_path / "out.json")["cells"])
    assert slow["figures"]["kept_up"] >= 0.9 > fast["figures"]["kept_up"]
    assert line.split()[3] == "20"
    assert slow["goodput"] == pytest.approx(slow["figures"]["requests_per_s"]) and "goodput/s" in out


@pytest.mark.parametrize(
    "options",
    [
        ("--arrivals", "burst", "--n", "10"),
        ("--rates", "50", "--arrivals", "evenly", "--n", "10"),
        ("--clients", "3", "--think-s", "0.1", "--requests-per-client", "2"),
        ("--sessions", "3", "--turns", "2", "--shared-prefix", "16", "--prefix-caching"),
    ],
)
def test_every_source_of_requests(options, tmp_path, capsys) -> None:
    lengths = ("--prompt", "4:8", "--mean", "4", "--cap", "8", "--declared", "cap", "--seeds", "0")
    assert simulate("latency", *options, *lengths, "--policies", "paged", "--json", str(tmp_path / "out.json")) == 0
    (cell,) = written(tmp_path / "out.json")["cells"]
    assert cell["runs"][0]["requests"] == {"--clients": 6, "--sessions": 6}.get(options[0], 10)
    assert cell["max_model_len"] == (16 + 2 * 16 if options[0] == "--sessions" else 16)


def test_what_counts(tmp_path) -> None:
    window = ("--warm-up-s", "0.2", "--until-s", "0.5", "--json", str(tmp_path / "out.json"))
    load = ("--rates", "100", "--arrivals", "evenly", "--n", "100", "--fixed", "60", "--seeds", "0")
    assert simulate("latency", *load, *window, "--policies", "chunked") == 0
    (run,) = written(tmp_path / "out.json")["cells"][0]["runs"]
    # Of a request every 10 ms, those from 0.2 s on count, and none comes after 0.5 s and the step that ran then.
    assert 30 <= run["requests"] + run["figures"]["unfinished"] <= 33
    assert run["figures"]["unfinished"] > 0 and run["figures"]["window_s"] == pytest.approx(0.3, abs=0.05)


def test_recorded_requests(tmp_path, capsys) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,8,4\n2023-11-16 18:15:47.68,6,3\n"
    )
    options = ("latency", "--requests", str(trace), "--speed", "2", *TWO)
    assert simulate(*options) == 0
    assert "trace.csv" in capsys.readouterr().out
    trace.write_text(trace.read_text().replace("6,3", "6,6000"))
    assert simulate(*options) == 1
    assert "--max-model-len 4096 leaves such requests out" in capsys.readouterr().err
    assert simulate(*options, "--max-model-len", "4096") == 0
    assert "1 that are too long are left out" in capsys.readouterr().out
    trace.write_text(trace.read_text().replace("6,6000", "6,-3"))
    assert simulate(*options) == 1
    assert "line 3" in capsys.readouterr().err


def test_ctrl_c_keeps_what_was_measured(tmp_path, capsys) -> None:
    options = ("--policies", "static-batch", "--scheduler", f"{__name__}:Interrupting")
    assert simulate("variance", *SMALL, *options, "--json", str(tmp_path / "out.json")) == 130
    out, err = capsys.readouterr()
    name = f"{__name__}:Interrupting"
    assert f"cap 4: missing {name} with seed 0, static-batch with seed 1, {name} with seed 1" in err
    assert "cap 16: missing static-batch with seed 0" in err
    assert out.count("\nstatic-batch ") == 1
    first, second = written(tmp_path / "out.json")["cells"]
    assert [run["policy"] for run in first["runs"]] == ["static-batch"] and second["runs"] == []
    assert first["missing"] == [[name, 0], ["static-batch", 1], [name, 1]] and len(second["missing"]) == 4


def test_ctrl_c_between_two_comparisons(tmp_path, capsys, monkeypatch) -> None:
    whole = bench.compare

    def only_once(*args, **options):
        monkeypatch.setattr(bench, "compare", lambda *args, **options: os.kill(os.getpid(), signal.SIGINT))
        return whole(*args, **options)

    monkeypatch.setattr(bench, "compare", only_once)
    assert simulate("variance", *SMALL, *TWO, "--json", str(tmp_path / "out.json")) == 130
    err = capsys.readouterr().err
    assert "cap 16: missing static-batch with seed 0" in err and "cap 4:" not in err
    first, second = written(tmp_path / "out.json")["cells"]
    assert len(first["runs"]) == 4 and second["runs"] == []


def test_a_faulty_policy_ends_it_and_the_rest_is_kept(tmp_path, capsys) -> None:
    options = ("--policies", "paged", "--scheduler", f"{__name__}:Faulty", "--json", str(tmp_path / "out.json"))
    assert simulate("variance", *SMALL, *options) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("batchkit: cap 4: RuntimeError: not yet written (") and "test_bench.py" in line
    assert len(written(tmp_path / "out.json")["cells"][0]["runs"]) == 1


def test_traces_of_each_run(tmp_path) -> None:
    options = ("--caps", "4", "--n", "3", "--seeds", "7", "--scheduler", "orca,reserve=pow2")
    assert simulate("variance", *options, "--trace-folder", str(tmp_path / "new")) == 0
    assert [path.name for path in (tmp_path / "new" / "cap-4").iterdir()] == ["orca,reserve=pow2-7.jsonl"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--kv-tokens", "8"), "cap 4: static-global: the longest sequence declares"),
        (("--kv-tokens", "3"), "cap 4: a KV budget of 3 tokens is not one block of 4"),
        (("--fixed", "5"), "--fixed 5 is more than the cap of 4"),
        (("--declared", "15"), "--declared 15 is less than outputs may have with a cap of 16"),
        (("--policies", "paged", "--allocator", "contiguous"), "reserve all at admission, unlike paged"),
        (("--policies", "paged", "--scheduler", "paged"), "the policy paged is named twice"),
        (("--scheduler", "orca,reserve=none"), "OrcaScheduler cannot be made with reserve='none'"),
        (("--prompt", "4090"), "cap 16: a request has up to 4,106 tokens, and the model takes 4,096"),
        (("--json", "no/such/folder.json"), "no/such/folder.json cannot be written"),
        (("--plot", "no/such/plot.png"), "there is no folder no/such"),
    ],
)
def test_mistakes_are_one_line_before_anything_runs(options, says, capsys, monkeypatch) -> None:
    monkeypatch.setattr(bench, "compare", lambda *args, **kwargs: pytest.fail("it ran"))
    assert simulate("variance", *SMALL, *options) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("batchkit: ") and says in line


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--device", "a100-20"), "there is no preset 'a100-20'; there are a100-40, a100-80, h100, h200"),
        (("--policies", "vllm"), "there is no policy 'vllm'; there are static-global,"),
        (("--caps", "8,8"), "'8,8' names one twice"),
        (("--seeds", "-1"), "--seeds"),
        (("--efficiency", "1.5"), "above 0 and at most 1"),
        (("--declared", "most"), "must be true, cap or a number"),
        (("--prompt", "9:8"), "1 <= LO <= HI"),
        (("--scheduler", "nosuch"), "there is no policy 'nosuch'"),
    ],
)
def test_wrong_usage(options, says, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        simulate("variance", *options)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "say where requests come from"),
        (("--requests", "none.csv", "--rates", "1"), "--rates does not go with --requests"),
        (("--requests", "none.csv", "--prompt", "8"), "--prompt does not go with --requests"),
        (("--requests", "none.csv"), "none.csv cannot be read: No such file"),
        (("--rates", "1", "--turns", "2"), "--turns does not go with --rates"),
        (("--rates", "1", "--arrivals", "burst"), "--arrivals burst has no rates"),
        (("--rates", "1", "--warm-up-s", "1e6"), "rate 1: nothing arrived after the warm-up"),
    ],
)
def test_mistakes_of_the_latency_experiment(options, says, capsys) -> None:
    assert simulate("latency", *options, *TWO) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_contiguous_memory(capsys) -> None:
    assert simulate("variance", *SMALL, "--policies", "static-batch,orca-pow2", "--allocator", "contiguous") == 0
    assert capsys.readouterr().out.count("\norca-pow2 ") == 2


@pytest.mark.slow  # the first plot of a process takes seconds
def test_plots(tmp_path, capsys) -> None:
    pytest.importorskip("matplotlib")
    for experiment, options in (("variance", SMALL), ("latency", RATES)):
        path = tmp_path / f"{experiment}.svg"
        pictures = set()
        for _ in range(2):
            assert simulate(experiment, *options, *TWO, "--plot", str(path)) == 0
            pictures.add(path.read_text(encoding="utf-8"))
        (picture,) = pictures
        assert "chunked" in picture and "per second" in picture
    assert simulate("variance", *SMALL, "--plot", str(tmp_path / "plot.txt")) == 1
    assert "plot.txt must end with one of" in capsys.readouterr().err


def test_a_plot_needs_matplotlib(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert simulate("variance", *SMALL, "--plot", str(tmp_path / "plot.png")) == 1
    assert "pip install 'batchkit[plots]'" in capsys.readouterr().err
