"""Requests from files: public traces of real services, and our own format, which can be written too.

The format is told by the first line; a file may be packed by gzip.

* Azure LLM inference, 2023 and 2024: CSV with ``TIMESTAMP`` (a date and time, with or without a zone),
  ``ContextTokens``, ``GeneratedTokens``.
* BurstGPT: CSV with ``Timestamp`` (seconds), ``Model``, ``Request tokens``, ``Response tokens``, ``Log Type``. A
  request that failed has 0 response tokens.
* Ours: a line of JSON for each request, with the fields of `WorkloadRecord`; ``prompt``, ``max_tokens`` and
  ``arrival`` are needed. A ``prompt`` is a number of tokens or a list of token ids.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import datetime, timezone
from decimal import Decimal, InvalidOperation
from itertools import chain
from typing import Any, Protocol, TextIO

from ..workload import WorkloadRecord
from .loads import Workload, check_speed, make_record, named_sigma, with_predictions

__all__ = ["RequestFile", "read_requests", "write_requests"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestFile:
    """What was read from a file.

    Attributes:
        name: one line for people: the file, its format, the settings, and what was left out.
        records: in the order of their arrival.
        num_failed: requests left out because they had failed when they were recorded.
        num_too_long: requests left out because the model's length, or what they were made to declare, is below theirs.
    """

    name: str
    records: tuple[WorkloadRecord, ...]
    num_failed: int
    num_too_long: int

    def workload(self, *, prediction_sigma: float | None = None) -> Workload:
        """The same requests for every seed; prompts that are given as a length, and predictions, depend on it.

        Args:
            prediction_sigma: see `Requests`; replaces what the file predicts.
        """
        return Workload(
            name=self.name + named_sigma(prediction_sigma),
            make=lambda seed: tuple(with_predictions(self.records, prediction_sigma, seed)),
        )


def read_requests(
    path: str | os.PathLike[str],
    *,
    limit: int | None = None,
    speed: float = 1.0,
    declared: int | None = None,
    max_model_len: int | None = None,
) -> RequestFile:
    """Read requests from a file, see above for the formats.

    Arrivals of the CSV formats count from the first row; those of our own are kept. Lengths of 0 run as 1, see
    `make_record`; a negative one is a mistake.

    Args:
        path: of the file.
        limit: so many requests are taken, without those left out, and the rest of the file is not looked at.
        speed: so many times as fast as recorded. The time between a request's arrival and its deadline is kept.
        declared: each request's ``max_tokens``; one with a longer output is left out. Default: what the file declares;
            the CSV formats know only the true length.
        max_model_len: a request whose prompt and ``max_tokens`` are longer together is left out.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not of these formats, or a line is wrong, by its number and field; or nothing is left.
    """
    check_speed(speed)
    for what, value in (("limit", limit), ("declared", declared), ("max_model_len", max_model_len)):
        if value is not None and value < 1:
            raise ValueError(f"{what} must be at least 1, got {value}")
    name = os.fspath(path)
    records: list[WorkloadRecord] = []
    num_failed = num_too_long = 0
    with _opened(path) as file:
        kind, lines = _lines(name, file)
        for record in lines:
            if record is None:
                num_failed += 1
                continue
            if declared is not None:
                record = _declaring(record, declared)
            if record is None or (max_model_len is not None and _length(record) > max_model_len):
                num_too_long += 1
                continue
            records.append(_faster(record, speed))
            if len(records) == limit:
                break
    said = [
        f"{os.path.basename(name)} ({kind}): {len(records):,} requests at {speed:g} times the recorded speed",
        *([f"declared: {declared:,} tokens"] if declared is not None else []),
        *([f"{num_failed:,} that had failed are left out"] if num_failed else []),
        *([f"{num_too_long:,} that are too long are left out"] if num_too_long else []),
    ]
    if not records:
        raise ValueError(
            f"{name} has no request to run: {num_failed:,} had failed when recorded, {num_too_long:,} are too long"
        )
    return RequestFile(name="; ".join(said), records=tuple(records), num_failed=num_failed, num_too_long=num_too_long)


def write_requests(path: str | os.PathLike[str], records: Iterable[WorkloadRecord]) -> int:
    """Write records in our own format; packed by gzip if the path ends in ``.gz``. The same records, the same bytes.

    Args:
        path: overwritten if it exists, unless the records are at fault.
        records: sorted by arrival.

    Returns:
        How many there were.

    Raises:
        OSError: it cannot be written.
        TypeError: a session is among them, or metadata that JSON does not take.
        ValueError: they are not sorted, or a number in them is not finite.
    """
    lines: list[str] = []
    last = -math.inf
    for number, record in enumerate(records, 1):
        if not isinstance(record, WorkloadRecord):
            raise TypeError(f"only records can be written; number {number} is a {type(record).__name__}")
        if record.arrival < last:
            raise ValueError(
                f"records must be sorted by arrival: number {number} is at {record.arrival} s, "
                f"the one before at {last} s"
            )
        last = record.arrival
        values = {field.name: getattr(record, field.name) for field in fields(record)}
        values["prompt"] = record.prompt if isinstance(record.prompt, int) else list(record.prompt)
        values["metadata"] = dict(record.metadata) or None
        kept = {key: value for key, value in values.items() if value is not None}
        lines.append(json.dumps(kept, allow_nan=False) + "\n")
    data = "".join(lines).encode()
    with open(path, "wb") as file:
        # A time in the header would make two files of the same records differ.
        file.write(gzip.compress(data, mtime=0) if os.fspath(path).endswith(".gz") else data)
    return len(lines)


def _declaring(record: WorkloadRecord, max_tokens: int) -> WorkloadRecord | None:
    output = record.output_tokens or record.max_tokens
    return None if output > max_tokens else replace(record, max_tokens=max_tokens, output_tokens=output)


def _length(record: WorkloadRecord) -> int:
    prompt = record.prompt
    return (prompt if isinstance(prompt, int) else len(prompt)) + record.max_tokens


def _faster(record: WorkloadRecord, speed: float) -> WorkloadRecord:
    arrival, deadline = record.arrival / speed, record.deadline
    if deadline is not None:
        deadline += arrival - record.arrival  # in this order a speed of 1 changes no bit
    return replace(record, arrival=arrival, deadline=deadline)


# --- reading lines ---------------------------------------------------------------------------------------------------


class _Fault(Exception):
    """A field that is wrong; `_lines` says where."""

    def __init__(self, field: str, what: str) -> None:
        super().__init__(f"field {field!r} {what}")


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[TextIO]:
    with open(path, "rb") as raw:
        is_packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        try:
            with (
                gzip.GzipFile(fileobj=raw, mode="rb") if is_packed else raw as plain,
                io.TextIOWrapper(plain, encoding="utf-8-sig", newline="") as file,
            ):
                yield file
        except UnicodeDecodeError as error:
            raise ValueError(f"{os.fspath(path)} is not UTF-8 text: {error}") from None
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{os.fspath(path)} is not a whole gzip file: {error}") from None


def _lines(name: str, file: TextIO) -> tuple[str, Iterator[WorkloadRecord | None]]:
    """The format's name, and each request, None for one that had failed; with the order of arrivals checked."""
    first = file.readline()
    if not first:
        raise ValueError(f"{name} is empty")
    lines = chain([first], file)
    if first.startswith("{"):
        return "JSON lines", _ordered(name, "arrival", _from_json(name, lines))
    reader = csv.reader(lines, strict=True)
    try:
        columns = next(reader)
    except csv.Error as error:
        raise ValueError(f"{name}, line {reader.line_num}: {error}") from None
    kind = max(_FORMATS, key=lambda one: len(set(one.columns).intersection(columns)))
    missing = [column for column in kind.columns if column not in columns]
    if missing == list(kind.columns):
        known = "; ".join(f"{one.name}: {', '.join(one.columns)}" for one in _FORMATS)
        raise ValueError(f"{name}, line 1: neither JSON nor the columns of a format that is known ({known})")
    if missing:
        raise ValueError(f"{name}, line 1: the column {missing[0]!r} of {kind.name} is missing")
    return kind.name, _ordered(name, kind.columns[0], _from_csv(name, columns, reader, kind))


_GREATEST = 10**15
"""Numbers from here on are no tokens or seconds, and some would take all memory."""

_Line = tuple[int, "WorkloadRecord | None", float]
"""The number of the line, its request, its arrival."""


def _ordered(name: str, field: str, lines: Iterator[_Line]) -> Iterator[WorkloadRecord | None]:
    last = -math.inf
    for number, record, arrival in lines:
        if arrival < last:
            raise ValueError(
                f"{name}, line {number}, field {field!r} is not sorted: {last - arrival:g} s before the line above"
            )
        last = arrival
        yield record


# --- CSV -------------------------------------------------------------------------------------------------------------


class _Reader(Protocol):
    """What `csv.reader` gives; its own type has no public name."""

    @property
    def line_num(self) -> int: ...
    def __next__(self) -> list[str]: ...
    def __iter__(self) -> Iterator[list[str]]: ...


@dataclass(frozen=True, slots=True)
class _Format:
    """A CSV format: the columns of its time, prompt and output first, and how its times are read."""

    name: str
    columns: tuple[str, ...]
    seconds: Callable[[str], Decimal]
    has_failed: bool = False
    metadata: Mapping[str, str] | None = None
    """Columns that go into the metadata, by their key there."""


def _from_csv(name: str, columns: list[str], reader: _Reader, kind: _Format) -> Iterator[_Line]:
    start: Decimal | None = None
    when, prompt, output, *_ = kind.columns
    while True:
        try:
            values = next(reader, None)
            if values is None:
                return
            if not values:
                continue
            row = dict(zip(columns, values, strict=False))
            if len(values) > len(columns):
                raise _Fault(values[len(columns)], "is beyond the last column")
            for column in kind.columns:
                if not row.get(column, "").strip():
                    raise _Fault(column, "is missing")
            time = _number(when, row[when], kind.seconds)
            start = time if start is None else start
            arrival = float(time - start)
            lengths = [_count(column, row[column]) for column in (prompt, output)]
        except csv.Error as error:
            raise ValueError(f"{name}, line {reader.line_num}: {error}") from None
        except _Fault as fault:
            raise ValueError(f"{name}, line {reader.line_num}, {fault}") from None
        if kind.has_failed and lengths[1] == 0:
            yield reader.line_num, None, arrival
            continue
        metadata = {key: row[column] for key, column in (kind.metadata or {}).items()}
        yield reader.line_num, make_record(*lengths, arrival=arrival, metadata=metadata), arrival


def _number(field: str, text: str, read: Callable[[str], Decimal]) -> Decimal:
    try:
        number = read(text.strip())
    except (ValueError, InvalidOperation):
        number = Decimal("NaN")
    if not (number.is_finite() and number.copy_abs() < _GREATEST):
        raise _Fault(field, f"cannot be read: {text!r}")
    return number


def _count(field: str, text: str) -> int:
    """A length, which tables that had gaps write with a point."""
    number = _number(field, text, Decimal)
    if number < 0:
        raise _Fault(field, f"is negative: {text}")
    if number != int(number):
        raise _Fault(field, f"is not a whole number: {text}")
    return int(number)


_MOMENT = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(\.\d+)?(?:Z|([+-]\d\d):?(\d\d))?", re.ASCII)


def _moment(text: str) -> Decimal:
    """Seconds since 1970 of a date and time, in UTC where it names no zone.

    `datetime.fromisoformat` keeps six digits of a second, and until Python 3.11 refuses the seven that stand there.
    """
    found = _MOMENT.fullmatch(text)
    if not found:
        raise ValueError(text)
    day, clock, fraction, hours, minutes = found.groups()
    zone = f"{hours}:{minutes}" if hours else "+00:00"
    since = datetime.fromisoformat(f"{day}T{clock}{zone}") - datetime(1970, 1, 1, tzinfo=timezone.utc)
    return since.days * 86_400 + since.seconds + Decimal(fraction or 0)


_FORMATS = (
    _Format("Azure LLM inference", ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _moment),
    _Format(
        "BurstGPT",
        ("Timestamp", "Request tokens", "Response tokens", "Model", "Log Type"),
        Decimal,
        has_failed=True,
        metadata={"model": "Model", "log_type": "Log Type"},
    ),
)


# --- JSON lines ------------------------------------------------------------------------------------------------------


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return (_is_int(value) or isinstance(value, float)) and abs(value) < _GREATEST


def _is_prompt(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(_is_int(token) and token >= 0 for token in value)
    return _is_positive(value)


def _is_positive(value: Any) -> bool:
    return _is_int(value) and 1 <= value < _GREATEST


_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "prompt": (_is_prompt, "a number of tokens above 0, or a list of token ids"),
    "max_tokens": (_is_positive, "a number of tokens above 0"),
    "output_tokens": (_is_positive, "a number of tokens above 0"),
    "predicted": (_is_positive, "a number of tokens above 0"),
    "arrival": (lambda value: _is_number(value) and value >= 0, "a time in seconds, at least 0"),
    "deadline": (_is_number, "a time in seconds"),
    "priority": (_is_int, "a whole number"),
    "metadata": (lambda value: isinstance(value, dict), "an object"),
}
_NEEDED = ("prompt", "max_tokens", "arrival")


def _from_json(name: str, lines: Iterable[str]) -> Iterator[_Line]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = _record(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name}, line {number}: not JSON: {error}") from None
        except _Fault as fault:
            raise ValueError(f"{name}, line {number}, {fault}") from None
        yield number, record, record.arrival


def _record(values: Any) -> WorkloadRecord:
    if not isinstance(values, dict):
        raise ValueError(f"an object is needed, got {type(values).__name__}")
    values = {key: value for key, value in values.items() if value is not None}
    for field, value in values.items():
        if field not in _FIELDS:
            raise _Fault(field, f"is unknown; there are {', '.join(_FIELDS)}")
        is_right, wanted = _FIELDS[field]
        if not is_right(value):
            raise _Fault(field, f"must be {wanted}, got {value!r:.60}")
    for field in _NEEDED:
        if field not in values:
            raise _Fault(field, "is missing")
    if values.get("output_tokens", 1) > values["max_tokens"]:
        raise _Fault("output_tokens", f"is {values['output_tokens']}, above max_tokens ({values['max_tokens']})")
    return WorkloadRecord(**values)
