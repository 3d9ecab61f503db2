"""Requests from files: the public formats, our own, and what is said of a file that is wrong."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchkit import Session, WorkloadRecord
from batchkit.experiment import loads
from batchkit.experiment.trace_files import read_requests, write_requests

AZURE_2023 = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 23:59:59.9799600,4808,10
2023-11-17 00:00:00.0319601,3180,8
2023-11-17 00:00:02,110,27
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 02:00:00.509930+02:00,2399,6
2024-05-10 00:00:01+00:00,76,15
"""
BURST_GPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45.5,GPT-4,1087,0,1087,API log
118,GPT-4,417,276,693,API log
"""
OURS = """{"prompt": 7, "max_tokens": 9, "arrival": 0}
{"prompt": [3, 1, 4], "max_tokens": 8, "output_tokens": 2, "predicted": 3, "arrival": 1.5, "deadline": 4.5,
"""


def written(folder: Path, text: str | bytes, name: str = "requests.csv") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def lengths(records) -> list[tuple[int, int, int]]:
    return [(record.prompt, record.max_tokens, record.output_tokens) for record in records]


# --- formats ---------------------------------------------------------------------------------------------------------


def test_azure_2023(tmp_path: Path) -> None:
    """Seven digits of a second, none at all, and a day that ends."""
    read = read_requests(written(tmp_path, AZURE_2023))
    assert lengths(read.records) == [(4808, 10, 10), (3180, 8, 8), (110, 27, 27)]
    assert [record.arrival for record in read.records] == [0, 0.0520001, 2.02004]
    assert "requests.csv (Azure LLM inference): 3 requests" in read.name


def test_azure_2024_with_zones(tmp_path: Path) -> None:
    read = read_requests(written(tmp_path, AZURE_2024))
    assert [record.arrival for record in read.records] == [0, 0.5, 0.99007]


def test_burst_gpt_leaves_out_what_had_failed(tmp_path: Path) -> None:
    read = read_requests(written(tmp_path, BURST_GPT))
    assert lengths(read.records) == [(472, 18, 18), (417, 276, 276)]
    assert [record.arrival for record in read.records] == [0, 113]
    assert read.num_failed == 1
    assert "1 that had failed are left out" in read.name
    assert read.records[1].metadata == {"model": "GPT-4", "log_type": "API log"}


def test_columns_may_stand_in_any_order_among_others_and_numbers_have_a_point(tmp_path: Path) -> None:
    text = "Session ID,GeneratedTokens,TIMESTAMP,ContextTokens\nx,3.0,2023-11-16T18:17:03Z,5\n"
    assert lengths(read_requests(written(tmp_path, text)).records) == [(5, 3, 3)]


def test_lengths_of_0_run_as_1_and_are_counted(tmp_path: Path) -> None:
    path = written(tmp_path, AZURE_2023.replace("3180,8", "0,0"))
    facts = loads.facts(read_requests(path).records)
    assert (facts.num_raised, facts.prompt_tokens, facts.output_tokens) == (2, 4808 + 1 + 110, 10 + 1 + 27)


@pytest.mark.parametrize("text", [AZURE_2023, BURST_GPT, '{"prompt": 4, "max_tokens": 2, "arrival": 1}\n'])
@pytest.mark.parametrize("how", ["gzip", "windows", "no line end"])
def test_the_same_file_otherwise_saved(tmp_path: Path, text: str, how: str) -> None:
    plain = read_requests(written(tmp_path, text)).records
    ways = {
        "gzip": gzip.compress(text.encode()),
        "windows": b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode(),
        "no line end": text.rstrip().encode(),
    }
    assert read_requests(written(tmp_path, ways[how], "other")).records == plain


tokens = st.integers(1, 10**6)
seconds = st.floats(0, 1e6)


@st.composite
def record_lists(draw) -> list[WorkloadRecord]:
    records = []
    for arrival in sorted(draw(st.lists(seconds, min_size=1, max_size=8))):
        output = draw(st.none() | tokens)
        records.append(
            WorkloadRecord(
                prompt=draw(tokens | st.lists(st.integers(0, 99), min_size=1, max_size=5)),
                max_tokens=draw(st.integers(output or 1, 10**6)),
                output_tokens=output,
                predicted=draw(st.none() | tokens),
                arrival=arrival,
                deadline=draw(st.none() | seconds),
                priority=draw(st.integers(-9, 9)),
                metadata=draw(st.dictionaries(st.text(), st.text() | st.integers(), max_size=2)),
            )
        )
    return records


@given(records=record_lists(), name=st.sampled_from(["r.jsonl", "r.jsonl.gz"]))
def test_what_was_written_is_read_again(tmp_path_factory, records: list[WorkloadRecord], name: str) -> None:
    path = tmp_path_factory.mktemp("own") / name
    assert write_requests(path, records) == len(records)
    data = path.read_bytes()
    assert (data[:2] == b"\x1f\x8b") == name.endswith(".gz")
    assert read_requests(path).records == tuple(records)
    write_requests(path, iter(records))
    assert path.read_bytes() == data


def test_a_trace_can_be_kept_in_our_format(tmp_path: Path) -> None:
    read = read_requests(written(tmp_path, BURST_GPT))
    write_requests(tmp_path / "own.jsonl", read.records)
    assert read_requests(tmp_path / "own.jsonl").records == read.records


# --- settings --------------------------------------------------------------------------------------------------------


def test_limit_counts_what_is_taken_and_looks_no_further(tmp_path: Path) -> None:
    path = written(tmp_path, BURST_GPT + "not a line\n")
    assert len(read_requests(path, limit=2).records) == 2
    with pytest.raises(ValueError, match="line 5"):
        read_requests(path, limit=3)


def test_speed_divides_arrivals_and_keeps_the_time_until_a_deadline(tmp_path: Path) -> None:
    record = WorkloadRecord(prompt=1, max_tokens=1, arrival=10, deadline=13)
    path = tmp_path / "own.jsonl"
    write_requests(path, [record])
    assert read_requests(path, speed=4).records == (replace(record, arrival=2.5, deadline=5.5),)


def test_a_declared_length_leaves_the_true_one_and_takes_no_longer_ones(tmp_path: Path) -> None:
    read = read_requests(written(tmp_path, AZURE_2023), declared=16)
    assert lengths(read.records) == [(4808, 16, 10), (3180, 16, 8)]
    assert read.num_too_long == 1
    assert "declared: 16 tokens; 1 that are too long are left out" in read.name
    assert loads.facts(read.records).longest_declared == 16


@pytest.mark.parametrize(("max_model_len", "declared", "left"), [(137, None, 1), (136, None, 0), (137, 28, 0)])
def test_what_does_not_fit_the_model_is_left_out(tmp_path: Path, max_model_len, declared, left: int) -> None:
    path = written(tmp_path, AZURE_2023)
    if not left:
        with pytest.raises(ValueError, match="no request to run: 0 had failed when recorded, 3 are too long"):
            read_requests(path, max_model_len=max_model_len, declared=declared)
        return
    read = read_requests(path, max_model_len=max_model_len, declared=declared)
    assert lengths(read.records) == [(110, 27, 27)]
    assert read.records[0].arrival == 2.02004, "arrivals do not depend on what is left out"


def test_a_file_as_a_workload(tmp_path: Path) -> None:
    read = read_requests(written(tmp_path, AZURE_2023))
    assert read.workload().make(0) == read.workload().make(1) == read.records
    guessing = read.workload(prediction_sigma=0.5)
    assert guessing.make(1) == guessing.make(1) != guessing.make(2)
    assert "predicted" in guessing.name
    oracle = read.workload(prediction_sigma=0).make(0)
    assert [turn.predicted for turn, _ in loads.turns(oracle)] == [10, 8, 27]


@pytest.mark.parametrize(
    "setting", [{"limit": 0}, {"speed": 0}, {"speed": float("nan")}, {"declared": 0}, {"max_model_len": -1}]
)
def test_a_setting_without_meaning_is_refused(tmp_path: Path, setting) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(setting)).split('_')[0]}.* must be .*, got"):
        read_requests(written(tmp_path, AZURE_2023), **setting)


# --- files that are wrong --------------------------------------------------------------------------------------------


def own(**changes) -> str:
    values = {"prompt": 4, "max_tokens": 8, "arrival": 2.0, **changes}
    first = json.dumps({"prompt": 4, "max_tokens": 8, "arrival": 1.0})
    return f"{first}\n\n{json.dumps({key: value for key, value in values.items() if value != 'gone'})}\n"


A, B = "TIMESTAMP,ContextTokens,GeneratedTokens\n", "2023-11-16 18:17:03.1"


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("", "", "is empty"),
        ("a,b\n1,2\n", "line 1", "neither JSON nor"),
        ("[1]\n", "line 1", "neither JSON nor"),
        ("TIMESTAMP,ContextTokens\n", "line 1", "'GeneratedTokens' of Azure LLM inference is missing"),
        ("Timestamp,Model,Request tokens,Log Type\n", "line 1", "'Response tokens' of BurstGPT is missing"),
        (A, "", "no request to run"),
        (f"{A}{B},5\n", "line 2, field 'GeneratedTokens'", "is missing"),
        (f"{A}{B},5,6\n,5,6\n", "line 3, field 'TIMESTAMP'", "is missing"),
        (f"{A}{B},5,6\n\n{B},,6\n", "line 4, field 'ContextTokens'", "is missing"),
        (f"{A}{B},5,6,7\n", "line 2, field '7'", "is beyond the last column"),
        (f"{A}{B},-5,6\n", "line 2, field 'ContextTokens'", "is negative: -5"),
        (f"{A}{B},5,-6\n", "line 2, field 'GeneratedTokens'", "is negative: -6"),
        (f"{A}{B},5,6.5\n", "line 2, field 'GeneratedTokens'", "is not a whole number: 6.5"),
        (f"{A}{B},5,x\n", "line 2, field 'GeneratedTokens'", "cannot be read: 'x'"),
        (f"{A}{B},5,nan\n", "line 2, field 'GeneratedTokens'", "cannot be read: 'nan'"),
        (f"{A}{B},5,1e99999999\n", "line 2, field 'GeneratedTokens'", "cannot be read: '1e99999999'"),
        (f"{A}yesterday,5,6\n", "line 2, field 'TIMESTAMP'", "cannot be read: 'yesterday'"),
        (f"{A}2023-13-16 18:17:03,5,6\n", "line 2, field 'TIMESTAMP'", "cannot be read"),
        (f"{A}{B}5,5,6\n{B},5,6\n", "line 3, field 'TIMESTAMP'", "is not sorted: 0.05 s before the line above"),
        (f'{A}{B},"5,6\n', "line 2", "unexpected end of data"),
        (BURST_GPT.replace("45.5", "4"), "line 3, field 'Timestamp'", "is not sorted: 1 s before"),
        (BURST_GPT.replace("45.5", "inf"), "line 3, field 'Timestamp'", "cannot be read: 'inf'"),
        (OURS, "line 2", "not JSON"),
        ('{"prompt": 4, "max_tokens": 8, "arrival": 1}\n3\n', "line 2", "an object is needed, got int"),
        (own(arrival="gone"), "line 3, field 'arrival'", "is missing"),
        (own(arrival=0.5), "line 3, field 'arrival'", "is not sorted: 0.5 s before"),
        (own(arrival=-1), "line 3, field 'arrival'", "must be a time in seconds, at least 0, got -1"),
        (own(arrival=float("nan")), "line 3, field 'arrival'", "must be a time"),
        (own(arrival=10**400), "line 3, field 'arrival'", "must be a time"),
        (own(arrival="1"), "line 3, field 'arrival'", "must be a time .* got '1'"),
        (own(deadline=True), "line 3, field 'deadline'", "must be a time in seconds, got True"),
        (own(prompt="gone"), "line 3, field 'prompt'", "is missing"),
        (own(prompt=0), "line 3, field 'prompt'", "got 0"),
        (own(prompt=[]), "line 3, field 'prompt'", "list of token ids, got []"),
        (own(prompt=[1, -1]), "line 3, field 'prompt'", "list of token ids, got [1, -1]"),
        (own(prompt="hello"), "line 3, field 'prompt'", "list of token ids, got 'hello'"),
        (own(max_tokens="gone"), "line 3, field 'max_tokens'", "is missing"),
        (own(max_tokens=-8), "line 3, field 'max_tokens'", "got -8"),
        (own(output_tokens=0), "line 3, field 'output_tokens'", "got 0"),
        (own(output_tokens=9), "line 3, field 'output_tokens'", "is 9, above max_tokens (8)"),
        (own(predicted=2.5), "line 3, field 'predicted'", "got 2.5"),
        (own(priority="high"), "line 3, field 'priority'", "must be a whole number, got 'high'"),
        (own(metadata=[1]), "line 3, field 'metadata'", "must be an object, got [1]"),
        (own(max_token=8), "line 3, field 'max_token'", "is unknown; there are prompt, max_tokens"),
    ],
)
def test_one_error_names_the_file_the_line_and_the_field(tmp_path: Path, text: str, where: str, what: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        read_requests(path)
    said = str(caught.value)
    assert "\n" not in said
    assert where in said
    assert what in said or re.search(what, said)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (gzip.compress(AZURE_2023.encode())[:-20], "is not a whole gzip file"),
        (b"\x1f\x8b nothing of the kind", "is not a whole gzip file"),
        (AZURE_2023.encode() + b"\xff\xfe\n", "is not UTF-8 text"),
    ],
)
def test_bytes_that_are_no_text_are_named_too(tmp_path: Path, data: bytes, what: str) -> None:
    with pytest.raises(ValueError, match=f"requests.csv {what}"):
        read_requests(written(tmp_path, data))


def test_a_file_that_is_not_there_is_the_systems_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read_requests(tmp_path / "nowhere.csv")


def test_what_cannot_be_written_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    early, late = (WorkloadRecord(prompt=1, max_tokens=1, arrival=arrival) for arrival in (1.0, 2.0))
    write_requests(path, [early])
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"number 2 is at 1.0 s, the one before at 2.0 s"):
        write_requests(path, [late, early])
    with pytest.raises(TypeError, match="number 1 is a Session"):
        write_requests(path, [Session(turns=(early,))])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        write_requests(path, [replace(early, metadata={"tenant": object()})])
    assert path.read_bytes() == before
