"""A trace as a page, in a terminal and for Perfetto: what is drawn is what happened."""

from __future__ import annotations

import importlib.util
import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from batchkit import (
    Engine,
    KVGeometry,
    PagedAllocator,
    PagedScheduler,
    SamplingParams,
    SimulatedRunner,
    TrueLengths,
    cli,
)
from batchkit.show import Lane, View, chrome_trace, drawing, page, view
from batchkit.trace import read_trace

ROOT = Path(__file__).resolve().parents[2]


def tool():
    spec = importlib.util.spec_from_file_location("first_picture", ROOT / "tools" / "draw_first_picture.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=["StaticScheduler", "OrcaScheduler", "PagedScheduler"])
def trace(request, tmp_path: Path) -> Path:
    path = tmp_path / "run.jsonl"
    module = tool()
    policy = next(policy for policy in module.POLICIES.values() if policy.__name__ == request.param)
    module.run(policy, path)
    return path


def seen(path: Path) -> View:
    return view(read_trace(path), path.name)


def test_the_first_picture_is_what_the_engine_does() -> None:
    assert (ROOT / "docs" / "pictures" / "first.svg").read_text(encoding="utf-8") == tool().first_picture()


def test_figures_add_up(trace: Path) -> None:
    run = seen(trace)
    assert run.complete and run.figures.new_tokens == 3 + 10 + 4 + 6
    assert run.figures.prompt_tokens == 4 * 4
    assert all(step.used + step.wasted + step.free == 8 * 4 for step in run.steps)
    for lane in run.lanes:
        assert sum(lane.sampled.values()) == lane.ended.output_tokens
        assert all(one.last + 1 == two.first for one, two in zip(lane.spans, lane.spans[1:], strict=False))


def test_perfetto_has_slices_and_counters(trace: Path) -> None:
    events = json.loads(json.dumps(chrome_trace([seen(trace)])))["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "C", "X"}
    for event in events:
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())


def test_a_page_needs_no_network_and_an_id_is_no_markup(trace: Path) -> None:
    trace.write_text(trace.read_text().replace('"request":"A"', '"request":"</script><b>"'))
    text = page([seen(trace)])
    assert "<b>" not in text and "src=" not in text and "http" not in text


def test_lines_fit_the_terminal(trace: Path) -> None:
    text = drawing(seen(trace), width=60)
    assert max(map(len, text.split("\n\n")[1].splitlines())) <= 60
    assert "mean batch" in text


def test_a_program_that_died_and_a_part(trace: Path, capsys) -> None:
    trace.write_text("\n".join(trace.read_text().splitlines()[:6]) + "\n")
    assert cli.main(["show", str(trace), "--text", "--steps", "2:3"]) == 0
    out = capsys.readouterr().out
    assert "steps 2 to 3" in out and "no end" in out


@pytest.mark.parametrize("keep", [0, 1])
def test_nothing_to_show_is_one_line(trace: Path, keep: int, capsys) -> None:
    trace.write_text("".join(trace.read_text().splitlines(keepends=True)[:keep]))
    assert cli.main(["show", str(trace)]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_row_of_nobody(trace: Path, capsys) -> None:
    lines = trace.read_text().splitlines(keepends=True)
    lines[2] = lines[2].replace('"request":"A"', '"request":"Z"')
    trace.write_text("".join(lines))
    assert cli.main(["show", str(trace)]) == 1
    assert "line 3: request 'Z' was never added" in capsys.readouterr().err


def test_a_decision_that_was_changed_is_found(trace: Path, capsys) -> None:
    lines = trace.read_text().splitlines(keepends=True)
    lines[3] = lines[3].replace('"tokens":1', '"tokens":2', 1)
    trace.write_text("".join(lines))
    assert cli.main(["replay", str(trace)]) == 0
    assert "up to step 3" in capsys.readouterr().out


def test_show_overwrites_no_trace(trace: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(trace.parent)
    other, named_as_a_page, hard = Path("other.jsonl"), Path("page.html"), Path("hard.jsonl")
    for path in (other, named_as_a_page):
        path.write_bytes(trace.read_bytes())
    hard.hardlink_to(trace)
    before = {path: path.read_bytes() for path in Path().iterdir()}
    for options in (
        ["run.jsonl", "-o", "run.jsonl"],
        ["run.jsonl", "-o", "hard.jsonl"],
        ["run.jsonl", "--perfetto", "./run.jsonl"],
        ["run.jsonl", "other.jsonl", "-o", "other.jsonl"],
        ["run.jsonl", "other.jsonl", "-o", "new.html", "--perfetto", str(trace.parent / "other.jsonl")],
        ["page.html"],
        ["run.jsonl", "-o", "new", "--perfetto", "./new"],
        ["run.jsonl", "--perfetto", ""],
    ):
        assert cli.main(["show", *options]) == 1, options
        (line,) = capsys.readouterr().err.splitlines()
        assert "would be overwritten" in line or "cannot be" in line
        assert {path: path.read_bytes() for path in Path().iterdir()} == before


def test_characters_that_no_file_can_hold(trace: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(trace.parent)
    odd = "run-\udcff.jsonl"
    try:
        Path(odd).write_text(trace.read_text().replace('"request":"A"', '"request":"\\udcff"'))
    except (OSError, UnicodeError):
        pytest.skip("this system has no such file names")
    assert cli.main(["show", odd, "--text"]) == 0
    out = capsys.readouterr().out
    assert "run-\\udcff.jsonl" in out and "\n  \\udcff  " in out.replace("   ", "")
    assert cli.main(["show", odd, "-o", "odd.html", "--perfetto", "odd.json"]) == 0
    assert "run-\\udcff.jsonl" in Path("odd.html").read_text(encoding="utf-8")
    lines = Path(odd).read_text().splitlines(keepends=True)
    lines[3] = lines[3].replace('"tokens":1', '"tokens":2', 1)
    Path(odd).write_text("".join(lines))
    assert cli.main(["replay", odd]) == 0
    assert "\\udcff [" in capsys.readouterr().out


def test_a_full_pool_is_not_less_than_empty(trace: Path, capsys) -> None:
    first, *steps, end = (json.loads(line) for line in trace.read_text().splitlines())
    first["stats"]["num_blocks"] = 25
    steps = [{**step, "used_blocks": 25, "kv_tokens": at} for at, step in enumerate(steps)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in (first, *steps, end)))
    for some in ([], *(["--steps", f"{at}:{at}"] for at in range(1, len(steps) + 1))):
        assert cli.main(["show", str(trace), "--text", *some]) == 0
        assert "KV free 0.0%" in capsys.readouterr().out


def test_who_was_aborted_before_a_step_did_not_end_it(trace: Path) -> None:
    before = seen(trace).steps
    *lines, last, end = trace.read_text().splitlines()
    step = json.loads(last)
    step["added"].append(dict(json.loads(lines[1])["added"][0], request="late"))
    step["ended"] = [{**step["ended"][0], "request": "late", "reason": "abort", "finished": step["time"]}]
    step.update(schedule_s=1.0, execute_s=2.0, sample_s=4.0)
    trace.write_text("\n".join([*lines, json.dumps(step), end]) + "\n")
    assert [step.seconds for step in seen(trace).steps] == [
        *(step.seconds for step in before[:-1]), pytest.approx(7.0),
    ]  # fmt: skip


def test_a_sample_that_has_ended_has_no_blocks(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    geometry = KVGeometry(num_blocks=24, block_size=4, max_model_len=32, vocab_size=100)
    scheduler = PagedScheduler(PagedAllocator(24, 4))
    with Engine(TrueLengths(SimulatedRunner(geometry)), scheduler, trace=path) as engine:
        params = SamplingParams(max_tokens=16, n=3, stop_token_ids=(0,))
        engine.add_request(range(1, 5), params, metadata={"output_tokens": [2, 9, 16]})
        while engine.has_unfinished():
            engine.step()
    (lane,) = seen(path).lanes
    used = [line["used_blocks"] for line in read_trace(path).steps]
    assert [span.blocks for span in lane.spans for _ in range(span.first, span.last + 1)] == used  # none is shared


def test_who_waits_costs_nothing_in_a_step(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "run.jsonl"
    geometry = KVGeometry(num_blocks=4, block_size=4, max_model_len=16, vocab_size=100)
    with Engine(SimulatedRunner(geometry), PagedScheduler(PagedAllocator(4, 4), max_num_seqs=2), trace=path) as engine:
        engine.generate([[1, 2, 3]] * 50, SamplingParams(max_tokens=8))
    said = []
    put = Lane.put
    monkeypatch.setattr(Lane, "put", lambda lane, *cell: (said.append(cell), put(lane, *cell)))
    run = seen(path)
    rows = sum(step.rows for step in run.steps)
    assert rows + 50 <= len(said) <= 2 * rows + 50 < sum(step.waiting for step in run.steps)
    for lane in run.lanes:  # and it has its cells all the same
        assert lane.spans[0].first == 1
        assert all(one.last + 1 == two.first for one, two in zip(lane.spans, lane.spans[1:], strict=False))
        assert sum(lane.sampled.values()) == 8


def test_text_goes_wherever_stdout_does(trace: Path) -> None:
    with redirect_stdout(StringIO()) as out:
        assert cli.main(["show", str(trace), "--text"]) == 0
    assert "mean batch" in out.getvalue()


STATS = ["scheduler", "allocator", "num_blocks", "block_size", "max_model_len", "max_num_seqs", "max_tokens_per_step"]
STEP = [
    "step", "time", "added", "ended", "rows", "preempted", "copies", "waiting", "running", "used_blocks", "kv_tokens",
    "new_tokens", "schedule_s", "execute_s", "sample_s", "error",
]  # fmt: skip


@pytest.mark.parametrize("command", ["show", "replay"])
@pytest.mark.parametrize(
    ("number", "place", "names"),
    [
        (1, lambda line: line, ["time", "stats"]),
        (1, lambda line: line["stats"], STATS),
        (2, lambda line: line, STEP),
        (2, lambda line: line["rows"][0], ["request", "seq", "start", "tokens"]),
        (2, lambda line: line["added"][0], ["request", "arrival", "prompt_tokens", "max_tokens", "priority", "n"]),
    ],
)
def test_a_field_that_is_missing_or_of_another_kind(command, number, place, names, trace: Path, capsys) -> None:
    whole = trace.read_text().splitlines()

    def said(change) -> str:
        line = json.loads(whole[number - 1])
        change(place(line))
        trace.write_text("\n".join([*whole[: number - 1], json.dumps(line), *whole[number:]]) + "\n")
        assert cli.main([command, str(trace)]) == 1
        (message,) = capsys.readouterr().err.splitlines()
        return message

    for name in names:
        assert f"line {number}: " in (message := said(lambda part: part.pop(name))) and repr(name) in message  # noqa: B023
        if name not in ("seq", "stats"):
            assert f"line {number}: " in said(lambda part: part.update({name: {"a": 1}}))  # noqa: B023
