"""The command line over an engine without a model, put in place of `batchkit.cli.make_engine`."""

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

from batchkit import (
    Engine,
    KVGeometry,
    PagedAllocator,
    RowResult,
    RunnerOutOfMemory,
    SamplerOutput,
    SimulatedRunner,
    cli,
)

GEOMETRY = KVGeometry(num_blocks=64, block_size=4, max_model_len=64, vocab_size=1000)


class Letters:
    """A tokenizer: one token for each character."""

    eos_token_id = None

    def encode(self, text):
        if "\ud800" in text:
            raise RuntimeError("half a character")
        return [ord(letter) % 1000 for letter in text]

    def decode(self, token_ids, *, skip_special_tokens=True):
        return "".join(chr(0x3B1 + token % 25) for token in token_ids)


class Runner(SimulatedRunner):
    """Calls `before` with the rows of each step; fails the requests whose prompt begins with an exclamation mark."""

    def __init__(self, before=lambda out: None):
        super().__init__(GEOMETRY)
        self.before = before

    def execute(self, out):
        self.before(out)
        got = super().execute(out)
        rows = [
            RowResult(error="the device is on fire") if row.request.prompt_token_ids[0] == ord("!") else result
            for row, result in zip(out.rows, got.rows, strict=True)
        ]
        return SamplerOutput(tuple(rows))


@pytest.fixture
def command(tmp_path, monkeypatch):
    """``command(lines, *options)`` runs ``batchkit generate`` in an empty folder; gives exit code and records."""
    monkeypatch.chdir(tmp_path)

    def run(lines, *options, before=lambda out: None, on_step=None, source="in.jsonl", target="out.jsonl"):
        def make_engine(args):
            policy = cli.SCHEDULERS[args.scheduler](
                PagedAllocator(GEOMETRY.num_blocks, GEOMETRY.block_size),
                max_model_len=GEOMETRY.max_model_len,
                max_num_seqs=args.max_num_seqs,
            )
            return Engine(Runner(before), policy, tokenizer=Letters(), on_step=on_step)

        monkeypatch.setattr(cli, "make_engine", make_engine)
        if lines is not None:
            Path("in.jsonl").write_bytes(lines if isinstance(lines, bytes) else jsonl(lines))
        code = cli.main(["generate", source, "-o", target, "--model", "toy", *options])
        return code, read(target) if Path(target).is_file() else None

    return run


def jsonl(rows):
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows).encode()


def read(path):
    data = Path(path).read_bytes()
    assert not data or data.endswith(b"\n"), "the last line is torn"
    return [json.loads(line) for line in data.decode().splitlines()]


def num_written():
    path = Path("out.jsonl")
    return path.read_bytes().count(b"\n") if path.exists() else 0


def prompt(text="abc", **params):
    return {"prompt": text, "params": {"max_tokens": 4, "temperature": 0, **params}}


# ----------------------------------------------------------------------------------------------- records


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


BAD_LINES = {
    "not JSON": ("{'prompt': 1}", "is not JSON"),
    "half a line": ('{"prompt": "abc', "is not JSON"),
    "too deep": ("[" * 100_000, "is not JSON"),
    "a list": ("[1, 2]", "must be an object with a prompt, got a list"),
    "a number": ("17", "must be an object with a prompt, got 17"),
    "null": ("null", "must be an object with a prompt, got null"),
    "empty object": ("{}", "there is no prompt"),
    "no prompt": ('{"text": "abc"}', "there is no prompt, only 'text'"),
    "prompt of a wrong type": ('{"prompt": 5}', "prompt must be text or a list of token ids, got 5"),
    "prompt null": ('{"prompt": null}', "got null"),
    "prompt of strings": ('{"prompt": ["a"]}', "not all of these are integers"),
    "prompt of booleans": ('{"prompt": [true]}', "not all of these are integers"),
    "empty prompt": ('{"prompt": ""}', "the prompt is empty"),
    "no tokens": ('{"prompt": []}', "the prompt is empty"),
    "token out of the vocabulary": ('{"prompt": [1000]}', "token id 1000 is not in the vocabulary of 1000"),
    "text that cannot be encoded": ('{"prompt": "\\ud800"}', "half a character"),
    "prompt too long": (json.dumps({"prompt": "a" * 65}), "65 tokens"),
    "output too long": (json.dumps(prompt("a", max_tokens=64)), "room to generate 63"),
    "id of a wrong type": ('{"id": 1.5, "prompt": "a"}', "id must be text or an integer, got 1.5"),
    "id true": ('{"id": true, "prompt": "a"}', "id must be text or an integer, got true"),
    "params of a wrong type": ('{"prompt": "a", "params": [1]}', "params must be an object, got a list"),
    "unknown parameter": ('{"prompt": "a", "params": {"max_token": 1}}', "'max_token'; is it max_tokens?"),
    "very unknown parameter": ('{"prompt": "a", "params": {"zzz": 1}}', "'zzz'; there are detokenize, ignore_eos"),
    "parameter beside params": ('{"prompt": "a", "max_tokens": 1}', "max_tokens must stand in params"),
    "max_tokens zero": (json.dumps(prompt(max_tokens=0)), "max_tokens must be at least 1, got 0"),
    "max_tokens of a wrong type": (json.dumps(prompt(max_tokens="9")), "max_tokens must be an integer, got '9'"),
    "temperature NaN": ('{"prompt": "a", "params": {"temperature": NaN}}', "temperature must be a number, got NaN"),
    "top_p": (json.dumps(prompt(top_p=1.5)), "top_p must be in (0, 1], got 1.5"),
    "flag of a wrong type": (json.dumps(prompt(ignore_eos="no")), "ignore_eos must be True or False"),
    "stop of a wrong type": (json.dumps(prompt(stop=5)), "stop must be a sequence, got 5"),
    "stop id of a wrong type": (json.dumps(prompt(stop_token_ids=["x"])), "a stop token id must be an integer"),
    "fails while it runs": (json.dumps(prompt("!")), "the device is on fire"),
}


@pytest.mark.parametrize(("line", "message"), BAD_LINES.values(), ids=BAD_LINES.keys())
def test_a_bad_line_gives_an_error_and_the_others_go_on(command, capsys, line, message):
    code, records = command([prompt("before"), line, {"id": "after", **prompt("after")}])
    assert code == 3
    before, bad, after = records
    assert before["id"] == 1 and after["id"] == "after" and before["text"] and after["text"]
    assert bad.keys() == {"id", "error"}
    assert bad["id"] == 2
    assert message in bad["error"]
    assert "\n" not in bad["error"] and len(bad["error"]) < 400
    shown = capsys.readouterr().err
    assert "2 ok, 1 failed" in shown and "length 2, error 1" in shown


def test_an_error_names_the_row_by_its_own_id_where_it_has_one(command):
    _, records = command([{"id": "mine", "prompt": 5}])
    assert records == [{"id": "mine", "error": "line 1: prompt must be text or a list of token ids, got 5"}]


def test_bytes_that_are_not_utf8(command):
    code, records = command(jsonl([prompt()]) + b'{"prompt": "\xff"}\n' + jsonl([prompt()]))
    assert code == 3
    assert records[1] == {"id": 2, "error": "line 2 is not UTF-8: byte 12 is 0xff"}


def test_an_id_may_stand_once_in_a_file_as_text_or_number_or_line(command):
    rows = [{"id": "a"}, {"id": "a"}, {"id": 7}, {"id": "7"}, {"id": 6}, {}, {}, {"id": 9}]
    code, records = command([{**row, **prompt()} for row in rows])
    assert code == 3
    assert [record["id"] for record in records] == ["a", "a", 7, "7", 6, 6, 7, 9]
    assert [i for i, record in enumerate(records, 1) if "error" in record] == [2, 4, 6, 7]
    assert records[3]["error"] == "line 4: id '7' is that of line 3 already"


def test_what_a_line_does_not_say_comes_from_the_options(command):
    rows = [{"prompt": "a"}, {"prompt": "a", "params": {"max_tokens": 2}}, {"prompt": "a", "params": None}]
    code, records = command(rows, "--max-tokens", "5", "--temperature", "0", "--seed", "3")
    assert code == 0
    assert [record["usage"]["completion_tokens"] for record in records] == [5, 2, 5]


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
    monkeypatch.setattr(cli, "_MOST_HELD", 2)
    parse, read_so_far, live, held = cli._parse, [0], [], []

    def counted(*args):
        read_so_far[0] += 1
        return parse(*args)

    def look(report):
        live.append(report.num_waiting + report.num_running)
        held.append(read_so_far[0] - num_written())

    monkeypatch.setattr(cli, "_parse", counted)
    # The first is the longest, and everything after it has to wait for it.
    rows = [prompt(max_tokens=60)] + [prompt("a", max_tokens=1)] * 6000
    code, records = command(rows, "--max-num-seqs", "64", on_step=look)
    assert code == 0 and len(records) == len(rows)
    assert max(live) <= 1024
    assert 2 * 1024 <= max(held) <= 3 * 1024
    assert live[-1] <= 64


def test_a_file_of_bad_lines_only_is_longer_than_what_may_wait(command, monkeypatch):
    monkeypatch.setattr(cli, "_MOST_HELD", 1)
    code, records = command(["?"] * 3000)
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
def test_a_full_disk_is_not_done(command, capsys):
    code, _ = command([prompt()], "--quiet", target="/dev/full")
    assert code == 1
    assert "No space left" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------- not done


def one_line(capsys):
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("batchkit: ") and shown.err.count("\n") == 1, shown.err
    return shown.err


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
    code, records = command(rows, before=before)
    assert code == 1
    assert [record["id"] for record in records] == [1, 3]  # the second never ended
    shown = capsys.readouterr().err
    assert "stopped after 5 rows were read: EngineFailed" in shown and "the device is gone" in shown
    assert "Traceback" not in shown


def test_ctrl_c_keeps_what_is_finished_in_whole_lines(command, capsys):
    steps = []

    def before(out):
        steps.append(out)
        if len(steps) == 4:
            raise KeyboardInterrupt

    rows = [prompt(max_tokens=n) for n in (2, 50, 3, 50)]
    code, records = command(rows, before=before)
    assert code == 130
    assert [record["id"] for record in records] == [1, 3]
    shown = capsys.readouterr().err
    assert "requests          2 in" in shown
    assert shown.endswith("batchkit: interrupted\n")


# ----------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["nonsense"],
        ["generate"],
        ["generate", "in.jsonl", "-o", "out.jsonl"],
        ["generate", "in.jsonl", "--model", "toy"],
        *(
            ["generate", "in.jsonl", "-o", "out.jsonl", "--model", "toy", *wrong]
            for wrong in (
                ["--scheduler", "best"],
                ["--max-num-seqs", "0"],
                ["--max-num-seqs", "many"],
                ["--kv-memory", "1GiB", "--num-kv-blocks", "8"],
                ["--temperature", "-1"],
                ["--temperature", "nan"],
                ["--max-tokens", "0"],
                ["--unknown"],
            )
        ),
    ],
)
def test_wrong_usage(options, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(options)
    assert stopped.value.code == 2
    assert "usage: batchkit" in capsys.readouterr().err


def test_options_reach_the_engine(monkeypatch, tmp_path):
    got = {}

    def from_pretrained(name, **options):
        got.update(options, name=name)
        raise OSError("that will do")

    monkeypatch.setattr(Engine, "from_pretrained", from_pretrained)
    source = tmp_path / "in.jsonl"
    source.write_bytes(jsonl([prompt()]))
    words = (
        "--model toy --dtype float32 --device cpu --kv-memory 2GiB --block-size 32 --swap-memory 1GiB "
        "--max-model-len 512 --max-num-seqs 8 --max-tokens-per-step 64 --scheduler waiting-served"
    )
    assert cli.main(["generate", str(source), "-o", str(tmp_path / "out.jsonl"), *words.split()]) == 1
    assert got == {
        "name": "toy",
        "dtype": "float32",
        "device": "cpu",
        "kv_memory": "2GiB",
        "num_kv_blocks": None,
        "block_size": 32,
        "swap_memory": "1GiB",
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_tokens_per_step": 64,
        "scheduler": cli.WaitingServedScheduler,
    }


def test_quiet_says_nothing(command, capsys):
    code, _ = command([prompt(), "?"], "--quiet")
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


def test_a_bar_only_on_a_terminal(command, capsys, monkeypatch):
    pytest.importorskip("tqdm")
    rows = [prompt()] * 5
    assert command(rows)[0] == 0
    assert "req" not in capsys.readouterr().err.replace("requests", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert command(rows, "--overwrite")[0] == 0
    assert "5/5" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------- as a program


def test_the_version_from_a_shell():
    import batchkit

    done = subprocess.run(
        [sys.executable, "-m", "batchkit", "--version"], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == f"batchkit {batchkit.__version__}\n"


def test_importing_it_imports_no_torch():
    code = "import sys, batchkit.cli; print(sorted({'torch', 'transformers', 'numpy', 'tqdm'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n"
