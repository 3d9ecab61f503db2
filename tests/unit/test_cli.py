"""`batchkit generate`: records, their order, streams, and what ends it early."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from batchkit import RunnerOutOfMemory, cli
from batchkit.cli import job
from batchkit.cli.rows import RowReader
from unit.cli_rig import jsonl, num_written, one_line, prompt, read


def test_each_line_gives_one_record_in_its_place(command, capsys):
    code, records = command([{"id": "a", **prompt()}, prompt("xy", max_tokens=2), {"id": 7, **prompt([1, 2, 3])}])
    assert code == 0
    assert [record["id"] for record in records] == ["a", 2, 7]
    assert records[0].keys() == {"id", "text", "finish_reason", "usage"}
    assert records[0]["finish_reason"] == "length"
    assert records[0]["usage"] == {"prompt_tokens": 3, "completion_tokens": 4}
    assert records[1]["usage"] == {"prompt_tokens": 2, "completion_tokens": 2}
    assert len(records[1]["text"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    for part in ("3 ok, 0 failed", "8 (", "length 3", "of 64 blocks of 4 tokens", "preemptions", "ChunkedPrefill"):
        assert part in shown.err, shown.err
    assert "10 (" in shown.err, "generated tokens"


def test_an_error_names_the_row_by_its_own_id_where_it_has_one(command):
    _, records = command([{"id": "mine", "prompt": 5}])
    assert records == [{"id": "mine", "error": "line 1: prompt must be text or a list of token ids, got 5"}]


def test_the_first_faults_stand_under_the_figures(command, capsys):
    rows = [prompt(), "?", prompt("!"), {"id": "x"}, prompt(top_p=3), prompt("\ud800"), "?", "?"]
    code, _ = command(rows)
    assert code == 3
    lines = capsys.readouterr().err.splitlines()
    faults = [line for line in lines if line.startswith("batchkit: ")]
    assert lines[-6:] == faults
    assert sorted(line.split()[2].rstrip(":") for line in faults[:5]) == ["2", "4", "5", "6", "7"]
    assert faults[0].startswith("batchkit: line 2 is not JSON: ")
    assert faults[5] == "batchkit: and 2 more"
    assert command(rows[2:3], "--overwrite")[0] == 3
    assert capsys.readouterr().err.splitlines()[-1] == "batchkit: line 1: the device is on fire"


def test_bytes_that_are_not_utf8(command):
    code, records = command(jsonl([prompt()]) + b'{"prompt": "\xff"}\n' + jsonl([prompt()]))
    assert code == 3
    assert records[1] == {"id": 2, "error": "line 2 is not UTF-8: byte 12 is 0xff"}


@pytest.mark.parametrize("keep_order", [True, False])
def test_ids_are_copied_as_they_are(command, keep_order):
    ids = ["a", 7, "7", -1, 10**30, ""]
    code, records = command([{"id": row_id, **prompt()} for row_id in ids], keep_order=keep_order)
    assert code == 0
    assert [record["id"] for record in records] == ids


def test_what_a_line_does_not_say_comes_from_the_options(command):
    rows = [{"prompt": "a"}, {"prompt": "a", "params": {"max_tokens": 2}}, {"prompt": "a", "params": None}]
    code, records = command(rows, "--max-tokens", "5", "--temperature", "0", "--seed", "3")
    assert code == 0
    assert [record["usage"]["completion_tokens"] for record in records] == [5, 2, 5]


def test_filters_and_stop_strings_come_from_the_options_too(command, capsys):
    words = ["--max-tokens", "5", "--top-k", "1", "--top-p", "0.5", "--min-p", "0.1"]
    rows = [{"prompt": "a"}, {"prompt": "a", "params": {"stop": ["zz"]}}]
    _, (record, other) = command(rows, *words)
    assert record["text"] == other["text"] and record["finish_reason"] == "length"
    _, records = command(rows, *words, "--stop", "zz", "--stop", record["text"][2], "--overwrite")
    assert [found["finish_reason"] for found in records] == ["stop", "length"]
    assert records[0]["text"] == record["text"].partition(record["text"][2])[0]
    args = cli.options.parse(["generate", "in", "-o", "out", "--model", "toy", *words, "--stop", "a", "--stop", "b"])
    assert args.defaults == {"max_tokens": 5, "top_k": 1, "top_p": 0.5, "min_p": 0.1, "stop": ["a", "b"]}


def test_empty_lines_marks_and_line_ends(command):
    data = b"\xef\xbb\xbf" + b'{"prompt": "a"}\r\n\r\n   \n{"prompt": "b"}\n\n{"prompt": "c"}'
    code, records = command(data, "--max-tokens", "1")
    assert code == 0
    assert [record["id"] for record in records] == [1, 4, 6]


def test_every_record_is_one_line_of_utf8_for_every_reader(command):
    ids = ["\u2028x\u2029\x85", "\ud800", 'quo"te\n', "\N{GREEK SMALL LETTER ALPHA}"]
    code, records = command([{"id": row_id, **prompt()} for row_id in ids])
    assert code == 0
    assert [record["id"] for record in records] == ids
    data = Path("out.jsonl").read_bytes()
    assert len(data.decode().splitlines()) == 4  # splits at U+2028 too
    assert "\N{GREEK SMALL LETTER ALPHA}".encode() in data  # readable where it can be


@pytest.mark.parametrize("scheduler", cli.SCHEDULERS)
def test_every_policy_gives_the_same_records(command, scheduler, capsys):
    rows = [prompt("abc" * (1 + i % 5), max_tokens=1 + i * 7 % 13) for i in range(30)]
    want = command(rows, "--scheduler", "orca", target="want.jsonl")
    assert command(rows, "--scheduler", scheduler, "--max-num-seqs", "4") == want
    assert cli.SCHEDULERS[scheduler].__name__ in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------- order, laziness


def test_records_are_written_as_soon_as_all_before_them_are_there(command):
    written = []

    def look(report):
        written.append(num_written())

    rows = [prompt(max_tokens=n) for n in (3, 9, 1, 6)]
    code, records = command(rows, on_step=look)
    assert code == 0
    assert [record["usage"]["completion_tokens"] for record in records] == [3, 9, 1, 6]
    # The hook of a step comes before the command gets its outputs: the first record stands there in the fourth.
    assert written == [0, 0, 0, 1, 1, 1, 1, 1, 1]


def test_rows_are_read_as_there_is_room(command, monkeypatch):
    monkeypatch.setattr(job, "_MOST_HELD", 2)
    read, read_so_far, live, held = RowReader.read, [0], [], []

    def counted(*args):
        read_so_far[0] += 1
        return read(*args)

    def look(report):
        live.append(report.num_waiting + report.num_running)
        held.append(read_so_far[0] - num_written())

    monkeypatch.setattr(RowReader, "read", counted)
    # The first is the longest, and everything after it has to wait for it.
    rows = [prompt(max_tokens=60)] + [prompt("a", max_tokens=1)] * 6000
    code, records = command(rows, "--max-num-seqs", "64", on_step=look)
    assert code == 0 and len(records) == len(rows)
    assert max(live) <= 1024
    assert 2 * 1024 <= max(held) <= 3 * 1024
    assert live[-1] <= 64


def test_a_file_of_bad_lines_only_is_longer_than_what_may_wait(command, monkeypatch):
    monkeypatch.setattr(job, "_MOST_HELD", 1)
    code, records = command(["?"] * 3000, "--max-first-failures", "0")
    assert code == 3
    assert [record["id"] for record in records] == list(range(1, 3001))


# ----------------------------------------------------------------------------------------------- stdin and stdout


def stdin_of(monkeypatch, data):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_from_stdin_to_stdout(command, monkeypatch, capsysbinary):
    stdin_of(monkeypatch, jsonl([prompt(), "?", prompt("b")]))
    code, _ = command(None, source="-", target="-")
    shown = capsysbinary.readouterr()
    assert code == 3
    assert [json.loads(line)["id"] for line in shown.out.splitlines()] == [1, 2, 3]
    assert b"2 ok, 1 failed" in shown.err


def test_a_row_from_a_pipe_is_answered_before_the_next_comes(command, monkeypatch):
    reading, writing = os.pipe()
    waited = []

    def feed():
        with os.fdopen(writing, "wb", buffering=0) as pipe:
            for number in range(3):
                deadline = time.monotonic() + 20
                while time.monotonic() < deadline:
                    if num_written() == number:
                        break
                    time.sleep(0.005)
                waited.append(time.monotonic() < deadline)
                pipe.write(jsonl([prompt(max_tokens=number + 1)]))

    with os.fdopen(reading) as source:
        monkeypatch.setattr(sys, "stdin", source)
        feeder = threading.Thread(target=feed)
        feeder.start()
        code, records = command(None, source="-")
        feeder.join()
    assert code == 0
    assert waited == [True] * 3
    assert [record["usage"]["completion_tokens"] for record in records] == [1, 2, 3]


def test_a_reader_that_goes_away_is_one_line(command, monkeypatch, capsys):
    reading, writing = os.pipe()
    os.close(reading)
    out = os.fdopen(writing, "w")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        code, _ = command([prompt()], "--quiet", target="-")
    out.close()
    assert code == 1
    assert capsys.readouterr().err == "batchkit: nobody reads the output any more\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("target", ["full.jsonl", "full.jsonl.gz"])
def test_a_full_disk_is_not_done(command, capsys, target):
    os.symlink("/dev/full", target)
    code, _ = command([prompt(), prompt()], "--quiet", target=target)
    assert code == 1
    told = f"stopped after 2 rows were read: cannot write {target}: No space left on device"
    assert one_line(capsys) == f"batchkit: {told}\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_what_ended_a_job_is_told_before_a_fault_of_closing(command, capsys):
    os.symlink("/dev/full", "full.jsonl.gz")

    def before(out):
        raise KeyboardInterrupt

    code, _ = command(["?", prompt()], "--quiet", before=before, target="full.jsonl.gz")
    assert code == 130
    assert one_line(capsys) == "batchkit: interrupted\n"


# ----------------------------------------------------------------------------------------------- not done


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        (None, {}, "cannot read in.jsonl: No such file"),
        (None, {"source": "."}, "cannot read .: Is a directory"),
        (b"", {}, "in.jsonl has no rows"),
        (b"\n  \r\n", {}, "in.jsonl has no rows"),
        ([prompt()], {"target": "in.jsonl"}, "in.jsonl is the input"),
        ([prompt()], {"target": "./../{}/in.jsonl"}, "is the input"),
        ([prompt()], {"target": "."}, "cannot write .: it is a folder"),
        ([prompt()], {"target": "no/out.jsonl"}, "cannot write no/out.jsonl: there is no folder no"),
    ],
)
def test_a_file_that_is_in_the_way_or_missing(command, capsys, lines, options, message, tmp_path):
    options = {name: value.format(tmp_path.name) for name, value in options.items()}
    code, _ = command(lines, **options)
    assert code == 1
    assert message in one_line(capsys)
    assert lines is None or isinstance(lines, bytes) or read("in.jsonl") == lines


def test_the_input_is_never_overwritten(command, capsys):
    code, _ = command([prompt()], "--overwrite", target="in.jsonl")
    assert code == 1
    assert "in.jsonl is the input" in one_line(capsys)
    assert read("in.jsonl") == [prompt()]


def test_results_of_another_run_are_kept_unless_told(command, capsys):
    Path("out.jsonl").write_text('{"id": "old"}\n')
    code, records = command([prompt()])
    assert code == 1
    assert "out.jsonl exists" in one_line(capsys)
    assert records == [{"id": "old"}]
    code, records = command([prompt()], "--overwrite")
    assert code == 0
    assert [record["id"] for record in records] == [1]
    Path("out.jsonl").write_text("")
    assert command([prompt()])[0] == 0


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError("toy is not a folder\nand not on the hub"), "toy: toy is not a folder and not on the hub"),
        (ValueError("cannot be bound: no attention"), "toy: cannot be bound: no attention"),
        (ImportError("No module named 'torch'"), "toy: ImportError: No module named 'torch'"),
        (RuntimeError(), "toy: RuntimeError"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_one_line(command, monkeypatch, capsys, error, message):
    def make_engine(args):
        raise error

    Path("out.jsonl").write_text("old\n")
    Path("in.jsonl").write_bytes(jsonl([prompt()]))
    monkeypatch.setattr(cli, "make_engine", make_engine)
    assert cli.main(["generate", "in.jsonl", "-o", "out.jsonl", "--overwrite", "--model", "toy"]) == 1
    assert f"cannot load the model {message}\n" in one_line(capsys)
    assert Path("out.jsonl").read_text() == "old\n"


@pytest.mark.parametrize("model", ["./nothing", "/nothing/here", "~/nothing/here"])
def test_a_folder_that_is_not_there_is_never_looked_for_elsewhere(capsys, tmp_path, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_bytes(jsonl([prompt()]))
    assert cli.main(["generate", "in.jsonl", "-o", "out.jsonl", "--model", model]) == 1
    assert f"there is no folder {model}" in one_line(capsys)


def test_an_engine_that_fails_loses_nothing_that_is_finished(command, capsys):
    steps = []

    def before(out):
        steps.append(out)
        if len(steps) > 3:
            raise OSError("the device is gone")

    rows = [prompt(max_tokens=n) for n in (2, 50, 3, 50, 50)]
    code, records = command(rows, before=before, keep_order=False)
    assert code == 1
    assert [record["id"] for record in records] == [1, 3]  # the second never ended
    shown = capsys.readouterr().err
    assert "stopped after 5 rows were read: EngineFailed" in shown and "the device is gone" in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize("target", ["out.jsonl", "out.jsonl.gz"])
def test_ctrl_c_keeps_what_is_finished_in_whole_lines(command, capsys, target):
    steps = []

    def before(out):
        steps.append(out)
        if len(steps) == 4:
            raise KeyboardInterrupt

    rows = [prompt(max_tokens=n) for n in (2, 50, 3, 50)]
    code, records = command(rows, before=before, target=target, keep_order=False)
    assert code == 130
    assert [record["id"] for record in records] == [1, 3]
    shown = capsys.readouterr().err
    assert "requests          2 in" in shown
    assert shown.endswith("batchkit: interrupted\n")


def test_quiet_says_nothing(command, capsys):
    code, _ = command([prompt(), "?"], "--quiet", "--keep", "nothing")
    assert code == 3
    shown = capsys.readouterr()
    assert shown.out == shown.err == ""


def test_warnings_are_shown_without_tracebacks_and_the_logger_is_left_as_it_was(command, capsys):
    handlers = list(logging.getLogger("batchkit").handlers)
    failed = []

    def before(out):
        if not failed:
            failed.append(out)
            raise RunnerOutOfMemory("too much")

    code, records = command([prompt("abcdef")], before=before)
    assert code == 0 and len(records) == 1
    shown = capsys.readouterr().err
    assert "batchkit: out of memory with 6 tokens in a step, trying 3\n" in shown
    assert logging.getLogger("batchkit").handlers == handlers


# ----------------------------------------------------------------------------------------------- as a program


def test_the_version_from_a_shell():
    import batchkit

    done = subprocess.run(
        [sys.executable, "-m", "batchkit", "--version"], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == f"batchkit {batchkit.__version__}\n"


SHELL = """
import sys
from unit import cli_rig
from batchkit import ChunkedPrefillScheduler, Engine, PagedAllocator, cli
cli.make_engine = lambda args: Engine(
    cli_rig.Runner(), ChunkedPrefillScheduler(PagedAllocator(64, 4)), tokenizer=cli_rig.Letters()
)
sys.exit(cli.main())
"""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize(
    ("redirected", "code", "num_records", "message"),
    [
        ("- -o - <&-", 1, 0, "batchkit: cannot read stdin: it is closed\n"),
        ("in.jsonl -o - >&-", 1, 0, "batchkit: cannot write stdout: it is closed\n"),
        ("in.jsonl -o out.jsonl >&-", 0, 0, ""),
        ("in.jsonl -o - 2>&-", 0, 2, ""),
        ("- -o - <in.jsonl", 0, 2, ""),
        ("in.jsonl -o - 2>/dev/full", 0, 2, ""),
        ("in.jsonl -o - --keep none --quiet 2>/dev/full", 0, 2, ""),
        ("in.jsonl -o no/out.jsonl 2>/dev/full", 1, 0, ""),
        ("in.jsonl -o - --quiet >/dev/full", 1, 0, "No space left on device\n"),
        ("in.jsonl --dry-run >/dev/full", 1, 0, "batchkit: [Errno 28] No space left on device\n"),
        ("in.jsonl --dry-run | gone", 1, 0, "batchkit: nobody reads the output any more\n"),
        ("in.jsonl -o - --quiet | gone", 1, 0, "batchkit: nobody reads the output any more\n"),
    ],
)
def test_streams_that_are_closed_or_full(redirected, code, num_records, message, tmp_path):
    (tmp_path / "in.jsonl").write_bytes(jsonl([prompt(), prompt()]))
    options, gone, _ = redirected.partition("| gone")
    reading, writing = os.pipe()
    os.close(reading)
    script = f'"{sys.executable}" -c "$SHELL_CODE" generate --model toy {options}'
    environment = {**os.environ, "SHELL_CODE": SHELL, "PYTHONUNBUFFERED": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        ["sh", "-c", script],
        cwd=tmp_path,
        env=environment,
        stdout=writing if gone else subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    os.close(writing)
    assert done.returncode == code, done
    records = [json.loads(line) for line in (done.stdout or "").splitlines()]
    assert len(records) == num_records
    assert done.stderr.endswith(message) and "Traceback" not in done.stderr and "ignored" not in done.stderr


def test_importing_it_imports_no_torch():
    code = "import sys, batchkit.cli; print(sorted({'torch', 'transformers', 'numpy', 'tqdm'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n"
