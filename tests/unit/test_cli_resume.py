"""Jobs that are killed and resumed: what is kept, what is done again, and what is refused."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from batchkit import cli
from unit import cli_toy
from unit.cli_rig import jsonl, one_line, prompt, read, read_whole

OUT = Path("out.jsonl")


def rows(count, **params):
    return [{"id": f"r{i}", **prompt(f"row {i}", max_tokens=1 + i % 7, **params)} for i in range(count)]


def by_id(records):
    """The records by their ids, of which none may be there twice."""
    found = {record["id"]: record for record in records}
    assert len(found) == len(records), "an id is there twice"
    return found


@pytest.fixture
def resume(command):
    """``resume(lines, *options)`` runs the command with ``--resume``, records in the order in which they finish."""

    def run(lines, *options, **more):
        return command(lines, "--resume", *options, keep_order=False, **more)

    return run


# ----------------------------------------------------------------------------------------------- processes


@contextmanager
def running(folder, *options, step_s=0.002, source="in.jsonl"):
    """The command as a process of its own."""
    words = [str(step_s), "generate", source, "-o", "out.jsonl", "--model", "toy", "--max-num-seqs", "8", *options]
    process = subprocess.Popen(
        [sys.executable, cli_toy.__file__, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for_records(process, path, count):
    """Until so many are there, or the process has ended."""
    while process.poll() is None and (not path.exists() or path.read_bytes().count(b"\n") < count):
        time.sleep(0.002)


@pytest.mark.slow
def test_a_job_killed_ten_times_ends_as_if_it_had_never_been(tmp_path):
    chance = random.Random(7)
    (tmp_path / "in.jsonl").write_bytes(jsonl(rows(500)))
    with running(tmp_path, step_s=0) as process:
        assert process.wait(60) == 0
    out = tmp_path / "out.jsonl"
    want = by_id(read(out))
    assert len(want) == 500
    out.unlink()
    num_before, killed = 0, 0
    while killed < 10:
        with running(tmp_path, "--resume") as process:
            wait_for_records(process, out, num_before + chance.randrange(1, 40))
            time.sleep(chance.random() * 0.01)
            assert process.poll() is None, process.communicate()
            process.send_signal(signal.SIGKILL)
            process.wait(60)
            killed += 1
        num_before = out.read_bytes().count(b"\n")
    assert 10 <= num_before < 500
    with running(tmp_path, "--resume") as process:
        assert process.wait(60) == 0
    records = read(out)
    assert len(records) == 500
    assert by_id(records) == want


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_what_runs_finish_and_a_second_does_not(tmp_path, number):
    (tmp_path / "in.jsonl").write_bytes(jsonl([{"id": i, **prompt(max_tokens=30)} for i in range(60)]))
    out = tmp_path / "out.jsonl"
    with running(tmp_path, step_s=0.01) as process:
        wait_for_records(process, out, 1)
        process.send_signal(number)
        stderr = process.communicate(timeout=60)[1]
    assert process.returncode == 4, stderr
    assert re.search(r"^batchkit: stopping when [08] rows are finished; a second signal stops at once$", stderr, re.M)
    assert stderr.endswith("batchkit: stopped, and rows are left; --resume goes on with them\n")
    records = read(out)
    assert 8 <= len(records) <= 24, "the first eight have ended, and those that had begun since"
    assert all(record["usage"]["completion_tokens"] == 30 for record in records)
    # Slow, so that on a busy machine too the second signal comes before what runs has finished.
    with running(tmp_path, "--resume", step_s=0.3) as process:
        wait_for_records(process, out, len(records) + 1)
        process.send_signal(number)
        assert any("a second signal" in line for line in process.stderr)
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == 130
    with running(tmp_path, "--resume", step_s=0) as process:
        assert process.wait(60) == 0
    assert by_id(read(out)).keys() == set(range(60))


def test_a_signal_ends_the_wait_for_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with running(tmp_path, "--keep-order", step_s=0, source="pipe") as process, open(tmp_path / "pipe", "wb") as pipe:
        pipe.write(jsonl([prompt()]))
        pipe.flush()
        wait_for_records(process, tmp_path / "out.jsonl", 1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 4


def test_handlers_are_put_back(command):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    during = []
    command(
        [prompt()],
        before=lambda out: during.append((signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))),
    )
    assert during[0] != before
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_a_signal_that_is_ignored_stays_ignored(command):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        during = []
        command([prompt()], before=lambda out: during.append(signal.getsignal(signal.SIGINT)))
        assert set(during) == {signal.SIG_IGN}
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_stop_drops_rows_that_have_not_begun_and_finishes_the_others(command, capsys):
    steps = []

    def before(out):
        steps.append(out)
        if len(steps) == 3:
            signal.raise_signal(signal.SIGTERM)

    code, records = command(rows(20), "--max-num-seqs", "4", before=before)
    assert code == 4
    assert 4 <= len(records) < 20
    assert all("error" not in record and record["finish_reason"] == "length" for record in records)
    assert "; --resume goes on" in capsys.readouterr().err
    code, records = command(None, "--resume", "--max-num-seqs", "4")
    assert code == 0
    assert [record["id"] for record in records] == [f"r{i}" for i in range(20)], "in order across both runs"


@pytest.mark.parametrize("source", ["in.jsonl", "in.jsonl.gz"])
@pytest.mark.parametrize("options", [(), ("--limit", "3"), ("--resume",), ("--shard", "1/1")])
def test_a_stop_when_all_rows_have_begun_ends_as_a_whole_job(command, capsys, options, source):
    steps = []

    def before(out):
        steps.append(out)
        if len(steps) == 3:
            signal.raise_signal(signal.SIGTERM)

    lines = [{"id": i, **prompt(max_tokens=9)} for i in range(3)]
    if options == ("--resume",):
        command(lines[:1], source=source)
    code, _ = command(lines, *options, "--window", "3", before=before, source=source)
    assert code == 0
    assert "rows are left; --resume" not in capsys.readouterr().err
    out = OUT if options != ("--shard", "1/1") else Path("out.1-of-1.jsonl")
    assert len(by_id(read(out))) == 3


def test_a_stop_one_row_before_the_end_leaves_it(command):
    lines = [{"id": i, **prompt(max_tokens=9)} for i in range(4)]
    steps = []

    def before(out):
        steps.append(out)
        if len(steps) == 3:
            signal.raise_signal(signal.SIGTERM)

    code, records = command(lines, "--window", "3", before=before)
    assert code == 4 and len(records) == 3


@pytest.mark.parametrize("policy", ["static", "orca", "chunked"])
def test_a_stop_under_every_kind_of_policy_leaves_only_whole_answers(command, policy):
    want = by_id(command(rows(12), target="want.jsonl")[1])
    steps = []

    def before(out):
        steps.append(out)
        if len(steps) == 4:
            signal.raise_signal(signal.SIGTERM)

    options = ("--scheduler", policy, "--max-num-seqs", "3", "--window", "6")
    assert command(rows(12), *options, before=before, keep_order=False)[0] == 4
    code, records = command(None, *options, "--resume", keep_order=False)
    assert code == 0
    assert by_id(records) == want


# ----------------------------------------------------------------------------------------------- case 114: torn tails


@pytest.mark.slow
@pytest.mark.parametrize("target", ["out.jsonl", "out.jsonl.gz"])
def test_case_114_a_torn_tail_is_cut_at_any_byte_and_redone(resume, target):
    lines = [{"id": f"\N{GREEK SMALL LETTER ALPHA}{i}", **prompt(f"row {i}")} for i in range(3)]
    code, records = resume(lines, "--quiet", target=target)
    assert code == 0
    want = by_id(records)
    whole = Path(target).read_bytes()
    is_packed = target.endswith(".gz")
    ends = [at for at, byte in enumerate(whole) if byte == ord("\n")]  # of a plain file's records
    for end in range(1 if is_packed else ends[0] + 2, len(whole)):
        Path(target).write_bytes(whole[:end])
        prompts = []
        code, records = resume(None, target=target, prompts=prompts)
        assert code == 0, end
        assert by_id(records) == want, end
        if not is_packed:
            # The one that is whole but for its line's end is kept; half a one is done again.
            assert len(prompts) == sum(at > end for at in ends), end


def test_case_114_half_a_character_and_a_record_without_its_line_end(resume, capsys):
    resume([{"id": "\N{GREEK SMALL LETTER ALPHA}", **prompt()}, {"id": "b", **prompt()}])
    first, second = OUT.read_bytes().splitlines(keepends=True)
    cut = second[: second.index(b'"text"')] + '"text": "\N{GREEK SMALL LETTER BETA}'.encode()[:-1]
    OUT.write_bytes(first + cut)
    capsys.readouterr()
    assert resume(None)[0] == 0
    shown = capsys.readouterr().err
    assert shown.startswith("batchkit: out.jsonl has 1 records, 1 rows are left\nbatchkit: its end was torn")
    assert OUT.read_bytes() == first + second
    OUT.write_bytes(first + second[:-1])
    assert resume(None)[0] == 0
    assert OUT.read_bytes() == first + second
    assert not list(Path().glob("*.tmp"))


@pytest.mark.parametrize("target", ["out.jsonl", "out.jsonl.gz"])
@pytest.mark.parametrize("num_cut", [0, 1, 40])
@pytest.mark.parametrize("num_zeros", [1, 8, 9, 5000])
def test_zeros_that_a_machine_has_left_are_cut(resume, capsys, target, num_cut, num_zeros):
    want = by_id(resume(rows(9), target=target)[1])
    whole = Path(target).read_bytes()
    Path(target).write_bytes(whole[: len(whole) - num_cut].rstrip(b"\0") + bytes(num_zeros))
    if num_cut == 0:  # the length at the end of a gzip file has zeros of its own
        Path(target).write_bytes(whole + bytes(num_zeros))
    capsys.readouterr()
    code, records = resume(None, target=target)
    assert code == 0
    assert by_id(records) == want
    assert "its end was torn, and is mended\n" in capsys.readouterr().err
    assert not Path(target).read_bytes().endswith(bytes(5))
    again = Path(target).read_bytes()
    assert resume(None, target=target)[0] == 0
    assert "torn" not in capsys.readouterr().err
    assert Path(target).read_bytes() == again


def test_more_zeros_than_are_read_at_once(resume, monkeypatch):
    monkeypatch.setattr(cli.resume, "_CHUNK", 64)
    resume(rows(3))
    whole = OUT.read_bytes()
    for tail in (bytes(1000), b'{"id": "r4", "text"' + bytes(64)):
        OUT.write_bytes(whole + tail)
        assert resume(None)[0] == 0
        assert OUT.read_bytes() == whole
    OUT.write_bytes(bytes(1000))
    assert resume(None)[0] == 0
    assert by_id(read(OUT)).keys() == {"r0", "r1", "r2"}


@pytest.mark.parametrize("tail", [b"\n", b"\r\n \n\n", b"   ", b"\0\0\n\0"])
def test_empty_lines_in_an_output_are_cut(resume, tail):
    resume(rows(3))
    whole = OUT.read_bytes()
    first, rest = whole.split(b"\n", 1)
    for content in (whole + tail, first + b"\n\n" + rest):
        OUT.write_bytes(content)
        assert resume(None)[0] == 0
        assert OUT.read_bytes() == whole


def test_a_file_of_the_users_beside_the_output_is_left_alone(resume):
    names = ["out.jsonl.tmp", "batchkit-.tmp"]
    for name in names:
        Path(name).write_bytes(jsonl(rows(3)))
    for source in names:
        OUT.write_bytes(b'{"id"')
        assert resume(None, source=source)[0] == 0
        assert len(by_id(read(OUT))) == 3
    assert all(Path(name).read_bytes() == jsonl(rows(3)) for name in names)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_file_that_cannot_be_put_in_place_is_taken_away(resume, monkeypatch, capsys, error):
    resume(rows(3))
    with open(OUT, "ab") as out:
        out.write(b'{"id"')
    before, there = OUT.read_bytes(), sorted(Path().iterdir())

    def fail(*args):
        raise error

    monkeypatch.setattr(os, "replace", fail)
    capsys.readouterr()
    code = cli.main(["generate", "in.jsonl", "-o", "out.jsonl", "--model", "toy", "--resume"])
    assert code == (1 if isinstance(error, OSError) else 130)
    told = "cannot write out.jsonl: No space left on device" if code == 1 else "interrupted"
    assert told in one_line(capsys)
    assert OUT.read_bytes() == before and sorted(Path().iterdir()) == there


def test_gzip_members_are_added(resume):
    resume(rows(9), "--limit", "3", target="out.jsonl.gz")
    first = Path("out.jsonl.gz").read_bytes()
    code, records = resume(None, target="out.jsonl.gz")
    assert code == 0 and len(by_id(records)) == 9
    assert Path("out.jsonl.gz").read_bytes().startswith(first)


@pytest.mark.parametrize(
    "content",
    [b"hello\n", b'{"id": 1, "text": "a"}\n', b'{"id": 1, "key": "12"}\n', b"[]\n", b"{}\n", b"a treasured text", b"["],
)
def test_a_file_of_something_else_is_left_alone(capsys, tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    OUT.write_bytes(content)
    Path("in.jsonl").write_bytes(jsonl([prompt()]))
    assert cli.main(["generate", "in.jsonl", "-o", "out.jsonl", "--model", "toy", "--resume"]) == 1
    assert "cannot resume out.jsonl: line 1 is no record of this command with a key" in one_line(capsys)
    assert OUT.read_bytes() == content


@pytest.mark.parametrize("damage", [lambda data: gzip.decompress(data), lambda data: data[:60] + b"???" + data[63:]])
def test_a_gzip_file_that_is_damaged_is_left_alone(resume, capsys, damage):
    resume(rows(20), target="out.jsonl.gz")
    content = damage(Path("out.jsonl.gz").read_bytes())
    Path("out.jsonl.gz").write_bytes(content)
    capsys.readouterr()
    assert cli.main(["generate", "in.jsonl", "-o", "out.jsonl.gz", "--model", "toy", "--resume"]) == 1
    assert "cannot resume out.jsonl.gz: it is damaged, or no gzip file" in one_line(capsys)
    assert Path("out.jsonl.gz").read_bytes() == content


# ----------------------------------------------------------------------------------------------- case 115: which rows


def test_case_115_equal_prompts_with_different_ids_are_both_answered(resume):
    lines = [{"id": row_id, **prompt()} for row_id in "abc"]
    resume(lines, "--limit", "1")
    prompts = []
    code, records = resume(None, prompts=prompts)
    assert code == 0 and len(prompts) == 2
    assert sorted(record["id"] for record in records) == ["a", "b", "c"]


def test_case_115_rows_put_in_before_a_resume_are_done_and_no_others(resume):
    lines = rows(10)
    resume(lines, "--limit", "6")
    more = [*rows(13)[10:], *lines]
    prompts = []
    code, records = resume(more, prompts=prompts)
    assert code == 0
    assert len(prompts) == 7
    assert by_id(records).keys() == {row["id"] for row in more}


def test_case_115_an_old_output_is_refused_without_resume(command, capsys):
    command([prompt()])
    capsys.readouterr()
    before = OUT.read_bytes()
    assert command([prompt()])[0] == 1
    assert "out.jsonl exists; --resume goes on with it, --overwrite replaces it" in one_line(capsys)
    assert OUT.read_bytes() == before


def test_numbers_for_ids_notice_an_inserted_line(resume, capsys):
    lines = [prompt(f"row {i}") for i in range(6)]
    resume(lines)
    capsys.readouterr()
    before = OUT.read_bytes()
    assert resume([prompt("new"), *lines])[0] == 1
    assert "6 rows are not what their records in out.jsonl have answered (ids 1, 2, 3, ...)" in one_line(capsys)
    assert OUT.read_bytes() == before


@pytest.mark.parametrize(
    "change", [{"prompt": "other"}, {"params": {"max_tokens": 3}}, {"params": {"max_tokens": 4, "temperature": 0.5}}]
)
def test_changed_rows_are_noticed_and_done_again_when_told(resume, capsys, change):
    lines = [{"id": row_id, **prompt()} for row_id in "abc"]
    _, want = resume(lines)
    lines[1] = {**lines[1], **change}
    before = OUT.read_bytes()
    capsys.readouterr()
    assert resume(lines)[0] == 1
    assert '1 rows are not what their records in out.jsonl have answered (ids "b")' in one_line(capsys)
    assert OUT.read_bytes() == before
    prompts = []
    code, records = resume(lines, "--redo-changed", prompts=prompts)
    assert code == 0 and len(prompts) == 1
    found = by_id(records)
    assert found.keys() == {"a", "b", "c"}
    assert [found["a"], found["c"]] == [want[0], want[2]]
    assert json.loads(before.splitlines()[1])["key"] not in OUT.read_text(), "the old record is gone"


def test_options_and_templates_are_part_of_what_a_row_asks(resume, capsys):
    resume([{"id": "a", "body": "x"}], "--template", "On {body}", "--max-tokens", "3")
    for options in (("--template", "Of {body}", "--max-tokens", "3"), ("--template", "On {body}", "--max-tokens", "4")):
        assert resume(None, *options)[0] == 1
        assert "1 rows are not what" in capsys.readouterr().err
    assert resume(None, "--template", "On {body}", "--max-tokens", "3")[0] == 0


def test_rows_that_are_gone_are_kept_and_told(resume, capsys):
    resume(rows(5))
    capsys.readouterr()
    code, records = resume(rows(5)[2:])
    assert code == 0
    assert len(by_id(records)) == 5
    assert "2 records have no row in the input any more, and are kept\n" in capsys.readouterr().err


def test_nothing_left_loads_no_model(resume, monkeypatch, capsys):
    resume(rows(3))
    before = OUT.read_bytes()
    capsys.readouterr()
    monkeypatch.setattr(cli, "make_engine", lambda args: pytest.fail("the model is loaded"))
    assert cli.main(["generate", "in.jsonl", "-o", "out.jsonl", "--model", "toy", "--resume"]) == 0
    assert one_line(capsys) == "batchkit: out.jsonl has 3 records, 0 rows are left\n"
    assert OUT.read_bytes() == before


def test_the_first_run_may_say_resume_too(resume):
    assert resume(rows(2))[0] == 0
    OUT.write_bytes(b"")
    code, records = resume(None)
    assert code == 0 and len(records) == 2


def test_a_record_that_is_there_twice_stays_once(resume):
    resume(rows(3))
    lines = OUT.read_bytes().splitlines(keepends=True)
    OUT.write_bytes(b"".join([*lines, lines[1]]))
    code, _ = resume(None)
    assert code == 0
    assert OUT.read_bytes().splitlines(keepends=True) == lines


def test_a_link_stays_a_link_and_the_mode_stays(resume, tmp_path):
    resume(rows(3))
    OUT.rename("real.jsonl")
    os.chmod("real.jsonl", 0o640)
    OUT.symlink_to("real.jsonl")
    with open(OUT, "ab") as out:
        out.write(b'{"id"')
    assert resume(None)[0] == 0
    assert OUT.is_symlink() and len(read("real.jsonl")) == 3
    assert os.stat("real.jsonl").st_mode & 0o777 == 0o640


# ----------------------------------------------------------------------------------------------- errors again


def test_errors_are_kept_or_done_again(resume, capsys):
    lines = [
        {"id": "a", **prompt()},
        "?",
        {"id": "b", **prompt("!")},
        {"id": "c", "prompt": 5},
        {"id": "d", **prompt()},
    ]
    code, records = resume(lines)
    assert code == 3 and len(records) == 5
    whole = by_id(records)
    capsys.readouterr()
    prompts = []
    assert resume(None, prompts=prompts)[0] == 3, "the errors stand there"
    assert prompts == []
    assert "3 records have an error, and are kept; --retry-errors does them again\n" in capsys.readouterr().err
    code, records = resume(None, "--retry-errors", prompts=prompts)
    assert code == 3 and len(prompts) == 1
    assert by_id(records) == whole
    lines[1:4] = [{"id": "x", **prompt()}, {"id": "b", **prompt("?")}, {"id": "c", **prompt("c")}]
    code, records = resume(lines, "--retry-errors")
    assert code == 0
    assert sorted(by_id(records)) == ["a", "b", "c", "d", "x"]
    assert "3 records with an error are taken out, and done again\n" in capsys.readouterr().err


def test_a_mended_line_is_a_changed_row(resume, capsys):
    assert resume([{"id": "a", **prompt()}, "?"])[0] == 3
    mended = [{"id": "a", **prompt()}, {"id": "b", **prompt()}]
    capsys.readouterr()
    assert resume(mended)[0] == 1
    assert '1 rows are not what their records in out.jsonl have answered (ids "b")' in one_line(capsys)
    code, records = resume(mended, "--redo-changed")
    assert code == 0
    assert sorted(by_id(records)) == ["a", "b"]


def error_rows(count, first=0):
    return [{"id": f"e{i}", "prompt": 5} for i in range(first, first + count)]


@pytest.mark.parametrize("how", ["limit", "shorter", "other"])
def test_errors_whose_rows_are_not_seen_are_kept(resume, capsys, how):
    lines = [*error_rows(3), "?", {"id": "late", "prompt": None}, "??"]
    assert resume(lines)[0] == 3
    whole = by_id(read_whole(OUT))
    capsys.readouterr()
    options = ("--retry-errors", "--limit", "2") if how == "limit" else ("--retry-errors",)
    if how != "limit":
        Path("in.jsonl").write_bytes(jsonl(lines[:2] if how == "shorter" else rows(2)))
    code, _ = resume(None, *options)
    assert code == 3, "the others stand there"
    found = by_id(read_whole(OUT))
    assert {row_id: found[row_id] for row_id in whole} == whole
    shown = capsys.readouterr().err
    assert f"{6 if how == 'other' else 4} records have an error, and are kept" in shown
    assert ("2 records with an error are taken out" in shown) == (how != "other")


@pytest.mark.parametrize("options", [(), ("--retry-errors",)])
def test_errors_that_were_taken_out_before_a_crash_are_done_by_any_resume(resume, capsys, monkeypatch, options):
    lines = [{"id": "a", **prompt()}, *error_rows(2), "?"]
    _, records = resume(lines)
    want = by_id(records)
    make_engine = cli.make_engine
    monkeypatch.setattr(cli, "make_engine", lambda args: (_ for _ in ()).throw(OSError("crashed")))
    words = ["generate", "in.jsonl", "-o", "out.jsonl", "--model", "toy", "--resume", "--retry-errors"]
    assert cli.main(words) == 1
    assert len(read(OUT)) == 1
    monkeypatch.setattr(cli, "make_engine", make_engine)
    code, records = resume(None, *options)
    assert code == 3
    assert by_id(records) == want


def test_an_error_known_by_its_number_goes_when_lines_were_put_in_before_it(resume):
    lines = [{"id": "a", **prompt()}, "?", {"id": "b", **prompt()}]
    resume(lines)
    code, records = resume([{"id": "new", **prompt()}, *lines])
    assert [record["id"] for record in records if "error" in record] == [2, 3], "the old number and the new one"
    code, records = resume(None, "--retry-errors")
    assert code == 3
    assert [record["id"] for record in records if "error" in record] == [3]


def test_an_error_that_has_an_answer_too_goes(resume):
    resume([{"id": "a", "prompt": 5}])
    error = OUT.read_bytes()
    code, _ = resume([{"id": "a", **prompt()}], "--retry-errors")
    assert code == 0
    answer = OUT.read_bytes()
    for content in (error + answer, answer + error, error + error + answer):
        OUT.write_bytes(content)
        assert resume(None, "--retry-errors")[0] == 0
        assert OUT.read_bytes() == answer


# ----------------------------------------------------------------------------------------------- usage


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--overwrite"], "--resume does not go with --overwrite"),
        (["--dry-run"], "--resume does not go with --dry-run"),
        (["-o", "-"], "--resume does not go with stdout"),
    ],
)
def test_what_does_not_go_with_resume(capsys, options, message):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["generate", "in.jsonl", "-o", "out.jsonl", "--model", "toy", "--resume", *options])
    assert stopped.value.code == 2
    assert message in one_line(capsys)


@pytest.mark.parametrize("option", ["--retry-errors", "--redo-changed"])
def test_what_needs_resume(capsys, option):
    with pytest.raises(SystemExit):
        cli.main(["generate", "in.jsonl", "-o", "out.jsonl", "--model", "toy", option])
    assert f"{option} needs --resume" in one_line(capsys)


def test_stdin_cannot_be_resumed(capsys):
    with pytest.raises(SystemExit):
        cli.main(["generate", "-", "-o", "out.jsonl", "--model", "toy", "--resume"])
    assert "--resume does not go with stdin, which cannot be read twice" in one_line(capsys)


def test_a_pipe_cannot_be_resumed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    assert cli.main(["generate", "pipe", "-o", "out.jsonl", "--model", "toy", "--resume"]) == 1
    assert "--resume reads the input twice, and pipe is no file" in one_line(capsys)


# ----------------------------------------------------------------------------------------------- shards


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shards_are_disjoint_and_make_up_the_whole(command, count):
    lines = [*rows(40), "?", {"id": "r3", **prompt()}, *[prompt(f"{i}") for i in range(10)]]
    want = by_id(command(lines, target="want.jsonl")[1])
    found = []
    for index in range(1, count + 1):
        command(lines, "--shard", f"{index}/{count}")
        found += read(f"out.{index}-of-{count}.jsonl")
    assert by_id(found) == want
    assert len(want) == 52


def test_a_row_stays_in_its_shard_when_others_come_before_it(command):
    lines = rows(30)
    command(lines, "--shard", "1/3")
    first = {record["id"] for record in read("out.1-of-3.jsonl")}
    command([*rows(35)[30:], *lines], "--shard", "1/3", "--overwrite")
    assert first <= {record["id"] for record in read("out.1-of-3.jsonl")}


def test_a_shard_is_resumed(command):
    lines = rows(40)
    command(lines, "--shard", "2/2", "--limit", "10")
    assert command(lines, "--shard", "2/2", "--resume")[0] == 0
    command(lines, "--shard", "1/2", target="part-{shard}.jsonl")
    found = [*read("out.2-of-2.jsonl"), *read("part-1-of-2.jsonl")]
    assert by_id(found).keys() == {row["id"] for row in lines}


def test_a_dry_run_of_a_shard_looks_at_its_rows_alone(command, capsys):
    sizes = []
    for index in (1, 2):
        assert command(rows(20), "--shard", f"{index}/2", "--dry-run")[0] == 0
        sizes.append(int(capsys.readouterr().out.splitlines()[0].split()[1]))
    assert sum(sizes) == 20 and min(sizes) > 0


def test_the_name_of_a_shards_output():
    words = ["generate", "in", "--model", "toy", "--shard", "1/4", "-o"]
    for given, name in (("out", "out.1-of-4"), ("a.b/c.jsonl.gz", "a.b/c.1-of-4.jsonl.gz"), ("-", "-")):
        assert cli.options.parse([*words, given]).output == name


@pytest.mark.parametrize("shard", ["0/4", "5/4", "1", "1/0", "a/b", "-1/4", "1/4/2"])
def test_shards_that_are_none(capsys, shard):
    with pytest.raises(SystemExit):
        cli.main(["generate", "in.jsonl", "-o", "out.jsonl", "--model", "toy", f"--shard={shard}"])
    assert "must be I/N with I from 1 to N, such as 1/4" in one_line(capsys)


# ----------------------------------------------------------------------------------------------- giving up early


def test_a_job_whose_first_rows_all_fail_is_given_up(command, capsys):
    code, records = command([prompt("!")] * 500, "--max-num-seqs", "16")
    assert code == 1
    assert 100 <= len(records) < 200
    assert "the first 100 rows have all failed, this one with: line" in capsys.readouterr().err


@pytest.mark.parametrize(("options", "code"), [(("--max-first-failures", "0"), 3), (("--max-first-failures", "5"), 1)])
def test_how_many_may_fail_is_an_option(command, options, code):
    assert command(["?"] * 120, *options)[0] == code


def test_one_good_row_among_the_first_is_enough(command):
    code, records = command([*["?"] * 60, prompt(), *["?"] * 2000], "--window", "64")
    assert code == 3 and len(records) == 2061


def test_errors_done_again_do_not_stop_the_job(resume, capsys):
    """However many fail again: that they do is why they were chosen."""
    lines = [*error_rows(120), *({"id": f"f{i}", **prompt("!")} for i in range(120)), {"id": "a", **prompt()}]
    code, records = resume(lines, "--max-first-failures", "0")
    assert code == 3
    want = by_id(records)
    for _ in range(2):
        code, records = resume(None, "--retry-errors")
        assert code == 3
        assert by_id(records) == want
    assert "have all failed" not in capsys.readouterr().err


def test_new_rows_that_all_fail_stop_the_job_among_errors_done_again(resume, capsys):
    resume(error_rows(50), "--max-first-failures", "0")
    code, records = resume([*error_rows(50), *error_rows(102, first=50)], "--retry-errors")
    assert code == 1
    assert "the first 100 rows have all failed" in capsys.readouterr().err
    assert len(by_id(records)) == 150


@pytest.mark.parametrize("bad", [{"prompt": 5}, prompt("!")])
@pytest.mark.parametrize("count", [100, 101])
def test_a_job_whose_first_rows_all_fail_ends_well_if_none_are_left(resume, bad, count):
    lines = [{"id": i, **bad} for i in range(count)]
    code, records = resume(lines, "--max-num-seqs", "1")
    assert (code, len(by_id(records))) == ((3, 100) if count == 100 else (1, 100))
    OUT.unlink()
    good = {"id": "a", **prompt()}
    resume([good])
    code, records = resume([good, *lines], "--max-num-seqs", "1")
    assert (code, len(by_id(records))) == ((3, 101) if count == 100 else (1, 101))


# ----------------------------------------------------------------------------------------------- cases 111 and 113


def test_case_111_results_are_in_input_order_where_that_is_asked_for(command):
    lines = [{"id": i, **prompt(f"{i}", max_tokens=12 - i)} for i in range(12)]
    code, records = command(lines)
    assert code == 0
    assert [record["id"] for record in records] == list(range(12)), "numbers, not texts: 10 comes after 9"
    assert [record["usage"]["completion_tokens"] for record in records] == list(range(12, 0, -1))
    _, finished = command(lines, "--overwrite", keep_order=False)
    assert [record["id"] for record in finished] == list(range(11, -1, -1)), "else as they finish"
    assert by_id(finished) == by_id(records)


def test_case_111_samples_are_in_the_order_of_their_index(command):
    code, (record,) = command([prompt("abc", n=3, temperature=1.0)])
    assert code == 0
    assert [found["index"] for found in record["outputs"]] == [0, 1, 2]
    assert record["text"] == record["outputs"][0]["text"]
    assert record["usage"] == {"prompt_tokens": 3, "completion_tokens": 12}


def test_case_113_every_line_has_exactly_one_record(command):
    lines = [
        {"id": "a", **prompt()},
        {"id": "a", **prompt()},
        {"id": 4, **prompt()},
        prompt(),
        {"id": "4", **prompt()},
        {"id": None, **prompt()},
        {"id": [1], **prompt()},
        {"id": "b", "prompt": "x", "params": {"nonsense": 1}},
        {"id": "b", **prompt()},
        "?",
    ]
    code, records = command(lines)
    assert code == 3
    assert [record["id"] for record in records] == ["a", 2, 4, 4, "4", 6, 7, "b", 9, 10]
    errors = {number: record["error"] for number, record in enumerate(records, 1) if "error" in record}
    assert errors.pop(2) == 'line 2: its id "a" is that of line 1 too'
    assert errors.pop(4) == "line 4: its id 4 is that of line 3 too"
    assert errors.pop(7) == "line 7: id must be text or an integer, got a list"
    assert errors.pop(8).startswith("line 8: unknown parameter 'nonsense'")
    assert errors.pop(9) == 'line 9: its id "b" is that of line 8 too'
    assert errors.pop(10).startswith("line 10 is not JSON")
    assert not errors


def test_case_113_a_duplicate_stays_one_when_resumed(resume):
    lines = [{"id": "a", **prompt()}, {"id": "a", **prompt()}, {"id": "b", **prompt()}]
    for limit in ("1", "2", "3", "3"):
        resume(lines, "--limit", limit)
    records = read(OUT)
    assert [record["id"] for record in records] == ["a", 2, "b"]


def test_the_records_of_a_job_have_keys(command):
    command([{"id": "a", **prompt()}, {"id": "b", **prompt()}, {"id": "b", **prompt()}, "?"])
    keys = [record["key"] for record in read_whole(OUT)]
    assert len(set(keys)) == 4
    assert keys[0][16:] == keys[1][16:], "they ask the same"
    command([{"id": "b", **prompt()}], target="other.jsonl")
    assert read_whole("other.jsonl")[0]["key"] == keys[1], "in any file"
    assert json.loads(OUT.read_text().splitlines()[0])["key"] == keys[0]
