"""A trace stepped once more: the same requests and ends give the same decisions, or a line says why not."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from typing_extensions import override

from batchkit import (
    Engine,
    KVGeometry,
    PagedAllocator,
    PagedScheduler,
    RowResult,
    SamplerOutput,
    SamplingParams,
    Scheduler,
    SimulatedRunner,
    Swap,
    TrueLengths,
    VirtualClock,
    cli,
)
from batchkit.show import view
from batchkit.trace import read_trace
from unit.helpers import POLICIES

BLOCK_SIZE, LONGEST = 4, 32
ENDED = {
    "request": "X", "reason": "abort", "error": None, "prompt_tokens": 4, "output_tokens": 0, "arrival": 0.0,
    "first_scheduled": None, "first_token": None, "finished": 0.0, "num_preemptions": 0, "cached_tokens": 0,
    "recomputed_tokens": 0,
}  # fmt: skip


class Unknown(PagedScheduler):
    """A policy that is none of batchkit's."""


class Never(Scheduler):
    """A policy that runs nothing."""

    @override
    def schedule(self, step):
        pass


class Stumbles(SimulatedRunner):
    """Fails in its third step."""

    num_steps = 0

    @override
    def execute(self, out):
        self.num_steps += 1
        if self.num_steps == 3:
            raise RuntimeError("out of luck")
        return super().execute(out)


class Interrupted(SimulatedRunner):
    """Calls `then` in its third step, and gives some rows an error instead of a token."""

    num_steps = 0
    failing: frozenset[str] = frozenset()

    def then(self):
        pass

    @override
    def execute(self, out):
        self.num_steps += 1
        got = super().execute(out)
        if self.num_steps != 3:
            return got
        self.then()
        rows = [
            RowResult(error="no such number") if row.request.id in self.failing else result
            for row, result in zip(out.rows, got.rows, strict=True)
        ]
        return SamplerOutput(tuple(rows))


def engine(path: Path, policy: type[Scheduler] = PagedScheduler, *, num_blocks=12, runner=SimulatedRunner, **options):
    """An engine that writes a trace; with `host_blocks` it swaps."""
    host_blocks = options.pop("host_blocks", 0)
    geometry = KVGeometry(
        num_blocks=num_blocks, block_size=BLOCK_SIZE, host_blocks=host_blocks, max_model_len=LONGEST, vocab_size=100
    )
    clock = VirtualClock()
    preemption = Swap(PagedAllocator(host_blocks, BLOCK_SIZE)) if host_blocks else None
    scheduler = policy(PagedAllocator(num_blocks, BLOCK_SIZE, **options), preemption=preemption)
    return Engine(TrueLengths(runner(geometry, clock=clock)), scheduler, clock=clock, trace=path)


def ask(engine: Engine, prompt: int, declared: int, *real: int, **options) -> str:
    """A request of so many tokens, declared and, for each sample, real."""
    params = SamplingParams(max_tokens=declared, n=len(real), stop_token_ids=(0,))
    return engine.add_request(range(1, prompt + 1), params, metadata={"output_tokens": real}, **options)


def run(engine: Engine) -> None:
    """To the end, closed."""
    while engine.has_unfinished():
        engine.step()
        engine.wait()
    engine.close()


def play_at_random(engine: Engine, rng: random.Random, *, samples: int = 3) -> None:
    """Requests that come, are aborted and time out between steps; others with up to so many samples."""
    alive: list[str] = []
    for _ in range(60):
        prompt = rng.randint(1, 12)
        declared = rng.randint(1, LONGEST - prompt)
        if rng.random() < 0.4:
            more = {"timeout_s": rng.uniform(0, 0.02)} if rng.random() < 0.2 else {}
            alive.append(ask(engine, prompt, declared, rng.randint(1, declared), **more))
        if rng.random() < 0.1:
            ask(engine, prompt, declared, *[rng.randint(1, declared) for _ in range(rng.randint(1, samples))])
        if alive and rng.random() < 0.1:
            engine.abort(alive.pop(rng.randrange(len(alive))))
        engine.step()
        engine.wait()
    run(engine)


def replayed(path: Path, *options: str) -> int:
    return cli.main(["replay", str(path), *options])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(6))
def test_whatever_callers_did_the_decisions_are_the_same(policy, seed, tmp_path, capsys) -> None:
    path = tmp_path / "run.jsonl"
    play_at_random(engine(path, policy), random.Random(f"{policy.__name__}-{seed}"))
    steps = path.read_text().count('"kind":"step"')
    assert replayed(path) == 0
    assert f"the same decisions in all {steps:,} steps" in capsys.readouterr().out


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_left_of_a_program_that_died(policy, tmp_path, capsys) -> None:
    path = tmp_path / "run.jsonl"
    play_at_random(engine(path, policy), random.Random(policy.__name__), samples=1)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[: len(lines) // 2]))
    assert replayed(path) == 0
    assert f"the same decisions in all {len(lines) // 2 - 1} steps" in capsys.readouterr().out


def test_another_policy_serves_the_same_requests(tmp_path, capsys) -> None:
    path, again = tmp_path / "run.jsonl", tmp_path / "again.jsonl"
    play_at_random(engine(path), random.Random(1))
    assert replayed(path, "--scheduler", "orca,reserve=pow2", "-o", str(again)) == 0
    assert "OrcaScheduler in place of PagedScheduler" in capsys.readouterr().out

    def served(path: Path) -> list[tuple[int, int]]:
        ended = [one for line in path.read_text().splitlines() for one in json.loads(line).get("ended", ())]
        assert ended
        return sorted((one["prompt_tokens"], one["output_tokens"]) for one in ended if one["reason"] == "stop")

    # What nobody aborted in the one run may have been in time for the abort in the other.
    assert len(set(served(again)) & set(served(path))) > 10


def test_what_cannot_be_replayed_is_said(tmp_path, capsys) -> None:
    def refused(said: str, *options: str) -> None:
        assert replayed(path, *options) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line

    path = tmp_path / "run.jsonl"
    cached = engine(path, prefix_caching=True)
    for _ in range(2):
        ask(cached, 9, 4, 4)
        while cached.has_unfinished():
            cached.step()
    run(cached)
    refused("found 8 tokens in the prefix cache")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:7]))  # the program died while the second one ran
    refused("line 6: a row of request 'request-2' starts at token 8, not at 0, as if from the prefix cache")

    squeezed = engine(path, prefix_caching=True, num_blocks=6)
    for number in range(3):
        ask(squeezed, 4 + number, 12, 12)
    run(squeezed)
    assert all(one.timings.cached_tokens == 0 for one in read_trace(path).requests)  # found again, after a preemption
    refused("as if from the prefix cache")

    swapping = engine(path, num_blocks=6, host_blocks=12)
    for _ in range(3):
        ask(swapping, 4, 14, 14)
    run(swapping)
    refused("swapped to host memory")

    failing = engine(path, runner=Stumbles)
    ask(failing, 4, 6, 6)
    run(failing)
    refused("line 4: step 3 failed (RuntimeError: out of luck)")

    unknown = engine(path, Unknown)
    ask(unknown, 4, 6, 6)
    run(unknown)
    refused("the trace was made by Unknown, which is none of batchkit's: say --scheduler module:Unknown")
    refused("is the trace itself, and would be overwritten", "-o", str(path), "--scheduler", "paged")
    refused("SchedulerStalled: Never chose nothing", "--scheduler", f"{__name__}:Never")
    with pytest.raises(SystemExit):
        replayed(path, "--scheduler", "paged,max_num_seqs=2")
    assert "max_num_seqs is not given here but by the trace" in capsys.readouterr().err
    assert replayed(path, "--scheduler", f"{__name__}:Unknown") == 0
    assert "Unknown: the same decisions in all 6 steps" in capsys.readouterr().out


def test_an_id_may_come_again(tmp_path, capsys) -> None:
    path = tmp_path / "run.jsonl"
    running = engine(path)
    ask(running, 9, 9, 9, request_id="X")
    ask(running, 4, 9, 7, request_id="Y")
    for _ in range(2):
        running.step()
    for length in (8, 7, 6):  # all in one line
        running.abort("X")
        ask(running, 4, length, length, request_id="X")
    running.step()
    running.abort("X")  # and one that has ended comes again
    running.step()
    ask(running, 4, 3, 3, request_id="X")
    run(running)
    seen = view(read_trace(path), path.name)
    lanes = [(lane.request_id, lane.added["max_tokens"], sum(lane.sampled.values())) for lane in seen.lanes]
    assert lanes == [("X", 9, 2), ("Y", 9, 7), ("X", 8, 0), ("X", 7, 0), ("X", 6, 1), ("X", 3, 3)]
    assert [lane.ended.finish_reason for lane in seen.lanes] == ["abort", "stop", "abort", "abort", "abort", "length"]
    assert [(lane.spans[0].first, lane.spans[-1].last) for lane in seen.lanes if lane.spans] == [
        (1, 2), (1, 9), (3, 3), (5, 7),
    ]  # fmt: skip
    assert cli.main(["show", str(path), "--text"]) == 0
    capsys.readouterr()
    assert replayed(path) == 0
    assert "the same decisions in all 9 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda line: line["ended"].append(dict(ENDED, request="Z")), "request 'Z' was never added"),
        (lambda line: line["ended"].extend([dict(ENDED), dict(ENDED)]), "request 'X' ended twice"),
        (lambda line: line["added"].append(dict(line["added"][0])), "request 'X' was added while it was there"),
    ],
)
def test_ends_that_are_nobodys(change, said, tmp_path, capsys) -> None:
    path = tmp_path / "run.jsonl"
    running = engine(path)
    ask(running, 4, 4, 4, request_id="X")
    run(running)
    lines = path.read_text().splitlines()
    line = json.loads(lines[1])
    change(line)
    path.write_text("\n".join([lines[0], json.dumps(line), *lines[2:]]) + "\n")
    assert replayed(path) == 1
    assert f"line 2: {said}" in capsys.readouterr().err


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("cost", [0.0, 1e-3])
def test_what_ends_within_a_step(policy, cost, tmp_path, capsys) -> None:
    path = tmp_path / "run.jsonl"
    made = []

    def runner(geometry, clock):
        made.append(Interrupted(geometry, clock=clock, cost=lambda out: cost))
        return made[0]

    running = engine(path, policy, runner=runner)
    runner, *_ = made
    names = [ask(running, 5 + number, 14, 3 + 2 * number) for number in range(6)]
    if cost:
        runner.then = lambda: [running.abort(names[0]), running.abort(names[5])]
    runner.failing = frozenset(names[1:2])
    run(running)
    steps = path.read_text().count('"kind":"step"')
    assert sum(one.finish_reason == "error" for one in read_trace(path).requests) == 1
    assert replayed(path) == 0
    assert f"the same decisions in all {steps:,} steps" in capsys.readouterr().out
