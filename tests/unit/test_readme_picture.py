"""The picture at the top of the README is what the engine does."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchkit import (
    ChunkedPrefillScheduler,
    Engine,
    KVGeometry,
    OrcaScheduler,
    PagedAllocator,
    SamplingParams,
    SimulatedRunner,
    StaticScheduler,
    StepReport,
)

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
LENGTHS = dict(zip("ABCDEFGH", [3, 12, 5, 2, 6, 4, 9, 3], strict=True))


def drawn(policy: type, blocks: int) -> tuple[int, list[str]]:
    """The number of steps, and a line for each seat that was used."""
    geometry = KVGeometry(num_blocks=blocks, block_size=4, max_model_len=32, vocab_size=100)
    steps: list[dict[int, str]] = []

    def note(report: StepReport) -> None:
        steps.append({row.seat: "~" if row.idle else row.request.id for row in report.output.rows})

    engine = Engine(SimulatedRunner(geometry), policy(PagedAllocator(blocks, 4), max_num_seqs=4), on_step=note)
    for name, length in LENGTHS.items():
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=length, temperature=0), request_id=name)
    while engine.has_unfinished():
        engine.step()
    seats = sorted({seat for step in steps for seat in step})
    return len(steps), ["".join(step.get(seat, ".") for step in steps) for seat in seats]


@pytest.mark.parametrize(
    ("policy", "blocks", "column", "num_steps"),
    [(StaticScheduler, 16, 0, 21), (OrcaScheduler, 16, 1, 14), (OrcaScheduler, 8, 2, 20)],
)
def test_each_column(policy: type, blocks: int, column: int, num_steps: int) -> None:
    picture = README.partition("```text\n")[2].partition("```")[0].splitlines()
    table = [line.split() for line in picture]
    assert [int(words[2 * column]) for words in table if words[1:2] == ["steps"]] == [num_steps]
    shown = [words[column] for words in table if words and set(words[0]) <= set("ABCDEFGH~.") and len(words[0]) > 9]
    steps, lines = drawn(policy, blocks)
    assert steps == num_steps
    assert shown[: len(lines)] == lines


def test_blocks_as_tokens_come() -> None:
    assert drawn(ChunkedPrefillScheduler, 8)[0] == drawn(OrcaScheduler, 16)[0] == 14
