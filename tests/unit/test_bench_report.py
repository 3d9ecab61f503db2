"""The file of figures: replaced as a whole, and nothing but files is replaced."""

from __future__ import annotations

import json
import os
import stat
import threading

import pytest

from batchkit.cli.bench_report import write_json
from batchkit.cli.faults import NotDone

CONTENT = {"cells": [1, 2.5, "ä"]}


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "out.json"
    path.write_text("before", encoding="utf-8")
    write_json(str(path), CONTENT)
    assert json.loads(path.read_text(encoding="utf-8")) == CONTENT
    assert os.listdir(tmp_path) == ["out.json"]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_stays_a_link(tmp_path, is_there):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    if is_there:
        (folder / "real.json").write_text("before", encoding="utf-8")
    link = tmp_path / "link.json"
    link.symlink_to(folder / "real.json")
    write_json(str(link), CONTENT)
    assert link.is_symlink()
    assert json.loads((folder / "real.json").read_text(encoding="utf-8")) == CONTENT
    assert os.listdir(folder) == ["real.json"]


@pytest.mark.parametrize("by_link", [False, True])
def test_a_pipe_is_written_to_and_stays_one(tmp_path, by_link):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    place = tmp_path / "link" if by_link else pipe
    if by_link:
        place.symlink_to(pipe)
    got = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_text(encoding="utf-8")), daemon=True)
    reader.start()
    write_json(str(place), CONTENT)
    # A pipe that was replaced has no writer, and its reader waits for ever: the test does not.
    assert stat.S_ISFIFO(os.stat(pipe).st_mode) and place.is_symlink() == by_link
    reader.join(timeout=60)
    assert json.loads(got[0]) == CONTENT
    assert not (tmp_path / "pipe.part").exists()


def test_a_folder_is_refused_and_nothing_is_left_behind(tmp_path):
    folder = tmp_path / "out.json"
    folder.mkdir()
    with pytest.raises(NotDone, match=r"out\.json cannot be written: Is a directory"):
        write_json(str(folder), CONTENT)
    assert os.listdir(tmp_path) == ["out.json"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_cannot_be_put_in_place_leaves_the_file_before(tmp_path, monkeypatch, error):
    path = tmp_path / "out.json"
    path.write_text("before", encoding="utf-8")

    def replace(source, target):
        assert (source, target) == (f"{path}.part", str(path))
        raise error

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises((NotDone, KeyboardInterrupt)):
        write_json(str(path), CONTENT)
    assert path.read_text(encoding="utf-8") == "before"
    assert os.listdir(tmp_path) == ["out.json"]
