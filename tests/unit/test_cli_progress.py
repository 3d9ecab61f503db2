"""Progress, under a clock of the test's, and the figures."""

from __future__ import annotations

import sys

import pytest

from batchkit.cli import progress
from batchkit.cli.progress import Progress
from unit.cli_rig import prompt


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_a_line_every_half_minute(capsys):
    clock = Clock()
    shown = Progress(shown=True, clock=clock)
    due = []
    for now in (100, 129.9, 130, 131, 160):
        clock.now = now
        due.append(shown.is_due())
        if due[-1]:
            shown.show(num_done=int(now) * 10, num_failed=2, total=10_000, num_tokens=int(now - 100) * 60)
    shown.close(num_done=1600, total=1600)
    assert due == [False, False, True, False, True]
    assert capsys.readouterr().err.splitlines() == [
        "batchkit: 1,300 of about 10,000 rows done (13.0%), 2 failed, 60 tokens per second, about 3 min left",
        "batchkit: 1,600 of about 10,000 rows done (16.0%), 2 failed, 60 tokens per second, about 5 min left",
    ]


def test_a_line_without_a_total_or_a_row(capsys):
    clock = Clock()
    shown = Progress(shown=True, clock=clock)
    clock.now += 30
    shown.show(num_done=5, num_failed=0, total=None, num_tokens=30)
    shown.show(num_done=0, num_failed=0, total=7, num_tokens=30)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "batchkit: 5 rows done, 0 failed, 1 tokens per second"
    assert second == "batchkit: 0 of about 7 rows done (0.0%), 0 failed, 0 tokens per second"


def test_a_dry_run_says_how_far_it_is(command, capsys, monkeypatch):
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    assert command(["?", prompt(), prompt()], "--dry-run")[0] == 3
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("batchkit: 0 of about ")
    assert lines[2].startswith("batchkit: 2 of about 3 rows done (66.7%), 1 failed, about ")


def test_nothing_is_due_in_quiet(capsys):
    clock = Clock()
    shown = Progress(shown=False, clock=clock)
    clock.now += 1000
    assert not shown.is_due()


def test_lines_during_a_job_tell_the_rows_in_all(command, capsys, monkeypatch):
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    rows = [prompt("abc", max_tokens=5)] * 40 + ["?"]
    assert command(rows, "--window", "4")[0] == 3
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("batchkit: ")]
    assert lines.pop().startswith("batchkit: line 41 is not JSON")
    assert lines[0].startswith("batchkit: 0 of about 4")
    assert lines[-1].startswith("batchkit: 41 of about 41 rows done (100.0%), 1 failed, ")
    assert all("tokens per second" in line for line in lines)


def test_the_estimate_knows_of_the_limit(command, capsys, monkeypatch):
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    assert command([prompt()] * 40, "--window", "4", "--limit", "10")[0] == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("batchkit: ")]
    assert all(" of about 10 rows" in line for line in lines)


@pytest.mark.parametrize("source", ["in.jsonl", "in.jsonl.gz"])
def test_a_bar_only_on_a_terminal(command, capsys, monkeypatch, source):
    pytest.importorskip("tqdm")
    rows = [prompt()] * 5
    assert command(rows, source=source)[0] == 0
    assert "row/s" not in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert command(rows, "--overwrite", source=source)[0] == 0
    shown = capsys.readouterr().err
    assert "5/5" in shown
    assert "batchkit: " not in shown
    assert command(rows, "--overwrite", "--quiet", source=source)[0] == 0
    assert capsys.readouterr().err == ""
