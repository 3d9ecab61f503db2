"""``--resume``: what the output of an earlier run holds, and what of the input is left to do.

Everything is found out before the model is loaded, by reading the output and the input once. If records have to go, or
the end of the file is torn, the file is written anew and put in the place of the old one in one step; from then on
records are only appended.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sys
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import BinaryIO

from ..openai import shown
from .faults import NotDone
from .keys import HashTable, Key
from .rows import Rows, nameless

__all__ = ["Earlier", "Plan", "plan"]

_CHUNK = 1 << 20
_SHOWN = 3
_BEGINNING = b'{"id": '
"""Of every record, so that the torn end of one can be told from other people's text."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is left to do.

    Attributes:
        done: hashes of what was asked, by the hashes of ids, of the records that stay.
        num_left: rows without a record.
        num_errors: records that stay and are errors.
    """

    done: HashTable
    num_left: int
    num_errors: int


@dataclass(slots=True)
class Earlier:
    """The records of an output file.

    Attributes:
        done: hashes of what was asked, by the hashes of ids.
        errors: the hashes of the ids whose record is an error.
        num_retried: errors that are to go.
        unwanted: lines that are to go: torn ones, errors, and further records of the same row.
        is_torn: the file does not end with a whole line.
    """

    done: HashTable = field(default_factory=HashTable)
    errors: HashTable = field(default_factory=HashTable)
    num_retried: int = 0
    unwanted: set[int] = field(default_factory=set)
    is_torn: bool = False

    @classmethod
    def read(cls, path: str, *, retry_errors: bool) -> Earlier:
        """Read a file.

        Raises:
            NotDone: it holds something else than records.
        """
        earlier = cls()
        source = _Lines(path)
        for number, line in enumerate(source, 1):
            is_whole = line.endswith(b"\n")
            earlier.is_torn |= not is_whole
            found = _key_and_error(line)
            if found is None and (is_whole or not line.startswith(_BEGINNING[: len(line)])):
                raise NotDone(f"cannot resume {path}: line {number} is no record of this command with a key")
            if found is None:
                earlier.unwanted.add(number)
                continue
            key, is_error = found
            if is_error and retry_errors:
                earlier.num_retried += 1
                earlier.unwanted.add(number)
            elif earlier.done.get(key.who) is not None:
                earlier.unwanted.add(number)
            else:
                earlier.done.put(key.who, key.what)
                if is_error:
                    earlier.errors.put(key.who, 1)
        earlier.is_torn |= source.is_torn
        return earlier


def plan(path: str, rows: Rows, earlier: Earlier, *, redo_changed: bool, quiet: bool) -> Plan:
    """Compare an output file with its input, say how it stands, and make the file ready for more records.

    A row is known by its id. One whose prompt or parameters are not those of its record has changed.

    Args:
        path: of the output.
        rows: of the input, those of `earlier` passed over; read to their end.
        earlier: the records of the file.
        redo_changed: do such rows again.
        quiet: say nothing.

    Raises:
        NotDone: rows have changed, and are not to be done again; or the input or the output cannot be read or written.
    """
    stale: set[int] = set()
    first: list[str] = []
    while (row := rows.get(wait=True)) is not None:
        # What was known by its number alone may have an id by now.
        known = row.key.who, nameless(row.number)
        changed = [who for who in known if earlier.done.get(who) is not None]
        stale.update(changed)
        if changed and len(first) < _SHOWN:
            first.append(shown(row.id))
    names = ", ".join(first) + (", ..." if len(stale) > len(first) else "")
    if stale and not redo_changed:
        raise NotDone(
            f"{len(stale):,} rows are not what their records in {path} have answered (ids {names}): their prompts or "
            "sampling parameters have changed; --redo-changed does them again"
        )
    if stale or earlier.unwanted or earlier.is_torn:
        _rewrite(path, earlier.unwanted, stale)
    num_kept = len(earlier.done) - len(stale)
    num_errors = sum(1 for who in earlier.errors if who not in stale)
    num_gone = num_kept - rows.num_passed
    if not quiet:
        print(f"batchkit: {path} has {num_kept:,} records, {rows.num:,} rows are left", file=sys.stderr)
        for count, note in (
            (earlier.is_torn, "its end was torn, and is mended"),
            (earlier.num_retried, f"{earlier.num_retried:,} records with an error are taken out, and done again"),
            (len(stale), f"{len(stale):,} rows have changed, and are done again (ids {names})"),
            (num_errors, f"{num_errors:,} records have an error, and are kept; --retry-errors does them again"),
            (num_gone, f"{num_gone:,} records have no row in the input any more, and are kept"),
        ):
            if count:
                print(f"batchkit: {note}", file=sys.stderr)
    return Plan(earlier.done, rows.num, num_errors)


class _Lines:
    """The lines of a file or a gzip file, up to where it is torn. The last one may have no end.

    Attributes:
        is_torn: a gzip file ends in the middle of a member.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.is_torn = False

    def __iter__(self) -> Iterator[bytes]:
        rest = b""
        try:
            with open(self._path, "rb") as raw:
                for chunk in self._unpacked(raw) if self._path.endswith(".gz") else _chunks(raw):
                    first, *others = chunk.split(b"\n")
                    rest += first
                    for line in others:
                        yield rest + b"\n"
                        rest = line
        except OSError as error:
            raise NotDone(f"cannot read {self._path}: {error.strerror or error}") from None
        if rest:
            yield rest

    def _unpacked(self, raw: BinaryIO) -> Iterator[bytes]:
        """What a gzip file's members hold, as much of it as there is. The usual reader gives less of a torn one."""
        member, fresh = zlib.decompressobj(wbits=31), True
        for chunk in _chunks(raw):
            while chunk:
                try:
                    fresh = False
                    yield member.decompress(chunk)
                except zlib.error as error:  # what was only cut short gives none
                    raise NotDone(f"cannot resume {self._path}: it is damaged, or no gzip file: {error}") from None
                chunk = member.unused_data
                if member.eof:
                    member, fresh = zlib.decompressobj(wbits=31), True
        self.is_torn = not fresh


def _chunks(raw: BinaryIO) -> Iterator[bytes]:
    while chunk := raw.read(_CHUNK):
        yield chunk


def _key_and_error(line: bytes) -> tuple[Key, bool] | None:
    """Of a record: its key, and whether it is an error. None: it is no record."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    key = Key.parse(record.get("key")) if isinstance(record, dict) else None
    return None if key is None else (key, record.get("error") is not None)


def _rewrite(path: str, unwanted: set[int], stale: set[int]) -> None:
    """Leave out lines by their numbers, and records by the hashes of their ids; end the last line."""
    target = os.path.realpath(path)  # a link stays one
    fresh = f"{target}.tmp"
    try:
        with ExitStack() as stack:
            raw = stack.enter_context(open(fresh, "wb"))
            is_packed = path.endswith(".gz")
            out = stack.enter_context(gzip.GzipFile("", "wb", 6, raw)) if is_packed else raw
            for number, line in enumerate(_Lines(path), 1):
                if number in unwanted:
                    continue
                if stale:
                    found = _key_and_error(line)
                    if found is not None and found[0].who in stale:
                        continue
                out.write(line.rstrip(b"\n") + b"\n")
            out.flush()
        with open(fresh, "rb") as written:
            os.fsync(written.fileno())
        shutil.copymode(target, fresh)
        os.replace(fresh, target)
    except OSError as error:
        with suppress(OSError):  # it may take what is left of the disk
            os.unlink(fresh)
        raise NotDone(f"cannot write {path}: {error.strerror or error}") from None
