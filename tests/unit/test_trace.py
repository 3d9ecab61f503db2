"""The step trace: what is written, and that reading it back gives the figures that the engine gave."""

from __future__ import annotations

import json
import logging
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from batchkit import (
    Engine,
    KVGeometry,
    OrcaScheduler,
    PagedAllocator,
    PagedScheduler,
    RequestOutput,
    SamplingParams,
    SimulatedRunner,
    StaticScheduler,
    Swap,
    VirtualClock,
    trace,
)
from batchkit.trace import Trace, read_trace
from unit.helpers import PAIRS, VOCAB, Runner, eager, tokens

NUMBER, TEXT, LIST, NULL = (int, float), str, list, type(None)
# Of each kind of line and of each object in one: the fields and their types.
SCHEMA: dict[str, dict[str, Any]] = {
    "engine": {"kind": TEXT, "version": int, "batchkit": TEXT, "time": NUMBER, "stats": dict},
    "end": {"kind": TEXT, "time": NUMBER, "added": LIST, "ended": LIST},
    "step": {
        "kind": TEXT,
        "step": int,
        "time": NUMBER,
        "added": LIST,
        "ended": LIST,
        "rows": LIST,
        "preempted": LIST,
        "copies": LIST,
        "blocked": (dict, NULL),
        "waiting": int,
        "running": int,
        "used_blocks": int,
        "free_blocks": int,
        "kv_tokens": int,
        "new_tokens": int,
        "schedule_s": NUMBER,
        "execute_s": NUMBER,
        "sample_s": NUMBER,
        "error": (str, NULL),
    },
    "added": {
        "request": TEXT,
        "arrival": NUMBER,
        "prompt_tokens": int,
        "max_tokens": int,
        "priority": NUMBER,
        "n": int,
    },
    "ended": {
        "request": TEXT,
        "reason": TEXT,
        "error": (str, NULL),
        "prompt_tokens": int,
        "output_tokens": int,
        "arrival": NUMBER,
        "first_scheduled": (*NUMBER, NULL),
        "first_token": (*NUMBER, NULL),
        "finished": NUMBER,
        "num_preemptions": int,
        "cached_tokens": int,
        "recomputed_tokens": int,
    },
    "preempted": {"request": TEXT, "for": (str, NULL)},
    "blocked": {
        "request": TEXT,
        "why": (str, NULL),
        "tokens_needed": int,
        "tokens_left": int,
        "blocks_needed": int,
        "blocks_free": int,
        "seats_free": int,
    },
}
ROW = {"request": TEXT, "seq": int, "start": int, "tokens": int}
ROW_OPTIONAL = {"sample": int, "samples": bool, "idle": bool, "blocks_from": int, "blocks": LIST}


def check_fields(what: str, line: dict[str, Any]) -> None:
    assert set(line) == set(SCHEMA[what]), what
    for name, kind in SCHEMA[what].items():
        assert isinstance(line[name], kind), (what, name, line[name])


def check_schema(path: Path) -> None:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert lines[0]["kind"] == "engine" and lines[0]["version"] == trace.VERSION
    assert [line["step"] for line in lines[1:-1]] == list(range(1, len(lines) - 1))
    assert lines[-1]["kind"] == "end"
    for line in lines:
        check_fields(line["kind"], line)
        for part in ("added", "ended", "preempted"):
            for entry in line.get(part, ()):
                check_fields(part, entry)
        if line.get("blocked"):
            check_fields("blocked", line["blocked"])
        for row in line.get("rows", ()):
            assert set(ROW) <= set(row) <= {*ROW, *ROW_OPTIONAL}
            for name, value in row.items():
                assert isinstance(value, {**ROW, **ROW_OPTIONAL}[name])


def traced_run(
    path: Path, policy: type, allocator: type = PagedAllocator, *, blocks: int = 12, host: int = 0, count: int = 12
) -> tuple[Engine, Runner, list[RequestOutput]]:
    geometry = KVGeometry(num_blocks=blocks, block_size=4, host_blocks=host, max_model_len=64, vocab_size=VOCAB)
    clock = VirtualClock()
    runner = Runner(geometry, clock=clock, cost=lambda out: 0.5)
    scheduler = policy(
        allocator(blocks, 4),
        max_model_len=64,
        max_num_seqs=4,
        max_tokens_per_step=24,
        preemption=Swap(PagedAllocator(host, 4)) if host else None,
        **eager(policy),
    )
    engine = Engine(runner, scheduler, clock=clock, trace=path)
    for i in range(count):
        params = SamplingParams(temperature=0, max_tokens=1 + 5 * i % 17, n=2 if i % 4 == 3 else 1)
        engine.add_request(tokens(f"p{i}", 1 + 3 * i % 11), params, request_id=f"r{i}", arrival=-float(i))
    outputs: list[RequestOutput] = []
    while engine.has_unfinished():
        outputs += engine.step()
        engine.wait()
        if engine.stats().num_steps == 6 and engine.abort("r7"):
            engine.add_request([1, 2], SamplingParams(max_tokens=2, temperature=0), request_id="later")
    return engine, runner, outputs


def tables(read: Trace) -> list[dict[int, list[int]]]:
    """Every step's block tables by sequence, put together from what changed."""
    known: dict[int, list[int]] = {}
    steps = []
    for step in read.steps:
        for row in step["rows"]:
            if "blocks" in row:
                known[row["seq"]] = known.get(row["seq"], [])[: row["blocks_from"]] + row["blocks"]
        steps.append({row["seq"]: known[row["seq"]] for row in step["rows"]})
    return steps


@pytest.mark.parametrize(("policy", "allocator"), PAIRS)
@pytest.mark.parametrize("host", [0, 8])
def test_what_is_read_back_is_what_happened(policy, allocator, host: int, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    engine, runner, outputs = traced_run(path, policy, allocator, host=host)
    stats = engine.stats()
    engine.close()
    check_schema(path)
    read = read_trace(path)
    assert read.complete
    finals = {output.request_id: output for output in outputs if output.finished}
    assert {r.request_id: r.timings for r in read.requests} == {name: o.timings for name, o in finals.items()}
    assert {r.request_id: r.finish_reason for r in read.requests} == {n: o.finish_reason for n, o in finals.items()}
    lengths = {name: sum(c.num_tokens for c in output.outputs) for name, output in finals.items()}
    assert {r.request_id: r.output_tokens for r in read.requests} == lengths
    assert Counter(r.finish_reason for r in read.requests) == stats.finished

    # The steps say the same as the requests.
    rows = [row for step in read.steps for row in step["rows"]]
    sampled = Counter(row["request"] for row in rows if row.get("samples"))
    preempted = Counter(gone["request"] for step in read.steps for gone in step["preempted"])
    first_steps = {row["request"]: step["time"] for step in reversed(read.steps) for row in step["rows"]}
    for request in read.requests:
        if request.finish_reason == "length":
            assert sampled[request.request_id] == request.output_tokens
        assert preempted[request.request_id] == request.timings.num_preemptions
        assert first_steps.get(request.request_id) == request.timings.first_scheduled
    assert sum(row["tokens"] for row in rows) == stats.computed_tokens
    assert sum(step["new_tokens"] for step in read.steps) == stats.generated_tokens
    assert max(step["used_blocks"] for step in read.steps) == stats.peak_used_blocks
    assert len(read.steps) == stats.num_steps
    assert sum(preempted.values()) == stats.num_preemptions
    assert {added["request"] for step in read.steps for added in step["added"]} == set(finals)
    for found, out in zip(tables(read), runner.outs, strict=True):
        assert found == {row.seq_id: list(row.blocks) for row in out.rows}


def test_something_is_preempted_for_somebody(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    traced_run(path, PagedScheduler)[0].close()
    gone = [entry for step in read_trace(path).steps for entry in step["preempted"]]
    assert gone and all(entry["for"] is not None for entry in gone)
    assert any(entry["for"] == entry["request"] for entry in gone)  # another sample of the same


def test_it_says_why_the_first_one_waits(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    traced_run(path, OrcaScheduler)[0].close()
    why = {step["blocked"] and step["blocked"]["why"] for step in read_trace(path).steps}
    assert {"blocks", None} <= why
    traced_run(path, StaticScheduler)[0].close()
    blocked = [step["blocked"] for step in read_trace(path).steps if step["blocked"]]
    assert any(entry["why"] is None for entry in blocked)  # a batch is under way: the policy tries nobody


def test_whole_lines_are_there_before_the_engine_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    engine, _, _ = traced_run(path, PagedScheduler)
    read = read_trace(path)
    assert not read.complete and len(read.steps) == engine.stats().num_steps
    text = path.read_text()
    path.write_text(text[:-30])  # the program died in the middle of a line
    assert len(read_trace(path).steps) == len(read.steps) - 1
    engine.close()


def test_a_trace_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("something else\n")
    traced_run(path, PagedScheduler, count=2)[0].close()
    assert read_trace(path).complete


def engine_with_trace(path: Path, **options: Any) -> Engine:
    geometry = KVGeometry(num_blocks=8, block_size=4, max_model_len=32, vocab_size=100)
    return Engine(SimulatedRunner(geometry), PagedScheduler(PagedAllocator(8, 4)), trace=path, **options)


def test_a_failing_step_is_in_it(tmp_path: Path) -> None:
    geometry = KVGeometry(num_blocks=8, block_size=4, max_model_len=32, vocab_size=100)
    runner = Runner(geometry)
    failures = iter([OSError("no device")])

    def fail_once(out: object) -> None:
        for failure in failures:
            raise failure

    runner.before = fail_once
    path = tmp_path / "trace.jsonl"
    with Engine(runner, PagedScheduler(PagedAllocator(8, 4)), trace=path) as engine:
        engine.generate([[1, 2]], SamplingParams(max_tokens=2))
    first, second, _ = read_trace(path).steps
    assert first["error"] == "OSError: no device" and first["new_tokens"] == 0
    assert second["error"] is None and [row["request"] for row in second["rows"]] == ["request-1"]


def test_what_ends_outside_of_a_step_is_in_the_next_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    engine = engine_with_trace(path)
    engine.add_request([1], request_id="a")
    engine.add_request([2], request_id="b")
    engine.abort("a")
    engine.step()
    engine.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(e["request"], e["reason"]) for e in lines[1]["ended"]] == [("a", "abort")]
    assert [(e["request"], e["reason"]) for e in lines[2]["ended"]] == [("b", "abort")]


def test_numbers_that_are_not_pythons_own(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    geometry = KVGeometry(num_blocks=8, block_size=4, max_model_len=32, vocab_size=100)
    with Engine(SimulatedRunner(geometry), PagedScheduler(PagedAllocator(8, 4)), trace=path) as engine:
        engine.add_request([1], SamplingParams(max_tokens=2), priority=Fraction(1, 2), arrival=Fraction(3))
        while engine.has_unfinished():
            engine.step()
    trace = read_trace(path)
    assert trace.steps[0]["added"][0]["priority"] == 0.5
    assert trace.requests[0].timings.arrival == 3


@pytest.mark.parametrize("path", [1, True])
def test_a_number_is_no_path(path) -> None:
    geometry = KVGeometry(num_blocks=8, block_size=4, max_model_len=32, vocab_size=100)
    with pytest.raises(TypeError, match="PathLike"):
        Engine(SimulatedRunner(geometry), PagedScheduler(PagedAllocator(8, 4)), trace=path)


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    geometry = KVGeometry(num_blocks=8, block_size=4, max_model_len=32, vocab_size=100)
    runner, scheduler = SimulatedRunner(geometry), PagedScheduler(PagedAllocator(8, 4))
    with pytest.raises(OSError, match="nowhere"):
        Engine(runner, scheduler, trace=tmp_path / "nowhere" / "trace.jsonl")
    Engine(runner, scheduler).close()  # the parts are free


def test_a_full_disk_ends_the_trace_and_not_the_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    with caplog.at_level(logging.WARNING, logger="batchkit"):
        engine = engine_with_trace(full)
        outputs = engine.generate([[1], [2]], SamplingParams(max_tokens=5))
        engine.close()
    assert [len(output.token_ids) for output in outputs] == [5, 5]
    assert [record.message for record in caplog.records] == [
        "the trace /dev/full ends here: [Errno 28] No space left on device"
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is empty"),
        ('{"a": 1}', "its first line has no end"),
        ("[" * 100_000 + "\n", "line 1: this is no line of a trace"),
        ("not json\n", "line 1: this is no line of a trace"),
        ('{"kind": "engine", "version": 99}\n', "no trace of version 1: .* version 99"),
        ('{"kind": "step"}\n', "its first line has kind 'step'"),
        ('{"kind": "engine", "version": 1}\n[]\n', "line 2: this is no line of a trace"),
        ('{"kind": "engine", "version": 1}\n{"kind": "step"}\n', "line 2: this is no line of a trace: .*ended"),
        ('{"kind": "engine", "version": 1}\n{"kind": "end", "ended": [{}]}\n', "line 2: .*request"),
    ],
)
def test_what_is_no_trace(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_trace(path)
