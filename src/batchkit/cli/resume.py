"""``--resume``: what the output of an earlier run holds, and what of the input is left to do.

Everything is found out before the model is loaded, by reading the output and the input once. If records have to go, or
the end of the file is torn, the file is written anew and put in the place of the old one in one step; from then on
records are only appended. A record goes only where its row has been seen in the input: whatever ends the command then,
the row has no record, and a later run does it.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import BinaryIO

from ..openai import shown
from .faults import NotDone, say
from .keys import HashTable, Key
from .rows import AGAIN, Rows, nameless

__all__ = ["Earlier", "Plan", "plan"]

_CHUNK = 1 << 20
_SHOWN = 3
_MOST_ZEROS = 8
"""As many may belong to the end of a gzip member: its checksum and its length have 4 bytes each."""
_BEGINNING = b'{"id": '
"""Of every record, so that the torn end of one can be told from other people's text."""
_NOTHING = b"\0 \t\r\n"
"""What a line without anything is made of; zeros are what a machine that went down may leave of a block."""


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
        done: hashes of what was asked, by the hashes of ids; `AGAIN` for errors that may be tried again.
        errors: lines whose record is an error, by the hashes of their ids; 0: there is another record of the row.
        unwanted: lines that are to go: torn and empty ones, and further records of the same row.
        is_torn: the file does not end with a whole record.
    """

    done: HashTable = field(default_factory=HashTable)
    errors: HashTable = field(default_factory=HashTable)
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
            is_empty = not line.strip(_NOTHING)
            earlier.is_torn |= not is_whole or is_empty
            if is_empty:
                earlier.unwanted.add(number)
                continue
            found = _key_and_error(line)
            if found is None and (is_whole or not line.startswith(_BEGINNING[: len(line)])):
                raise NotDone(f"cannot resume {path}: line {number} is no record of this command with a key")
            if found is None:
                earlier.unwanted.add(number)
                continue
            key, is_error = found
            known = earlier.done.get(key.who)
            if known is None:
                earlier.done.put(key.who, AGAIN if is_error and retry_errors else key.what)
                if is_error:
                    earlier.errors.put(key.who, number)
            elif known == AGAIN and not is_error:
                earlier.unwanted.add(earlier.errors.get(key.who) or number)
                earlier.errors.put(key.who, 0)
                earlier.done.put(key.who, key.what)
            else:
                earlier.unwanted.add(number)
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
    retried: set[int] = set()
    first: list[str] = []
    while (row := rows.get(wait=True)) is not None:
        # What was known by its number alone may have an id by now.
        records = {who: earlier.done.get(who) for who in (row.key.who, nameless(row.number))}
        retried.update(who for who, what in records.items() if what == AGAIN)
        changed = [who for who, what in records.items() if what not in (None, AGAIN)]
        stale.update(changed)
        if changed and len(first) < _SHOWN:
            first.append(shown(row.id))
    if any(earlier.done.get(who) == AGAIN for who in earlier.errors):
        # Of a line that is known by its number: what stands there now has a record, or gets one.
        numbers = (nameless(number) for number in range(1, rows.num_lines + 1))
        retried.update(who for who in numbers if earlier.done.get(who) == AGAIN)
    names = ", ".join(first) + (", ..." if len(stale) > len(first) else "")
    if stale and not redo_changed:
        raise NotDone(
            f"{len(stale):,} rows are not what their records in {path} have answered (ids {names}): their prompts or "
            "sampling parameters have changed; --redo-changed does them again"
        )
    gone = stale | retried
    if gone or earlier.unwanted or earlier.is_torn:
        _rewrite(path, earlier.unwanted, gone)
    num_kept = len(earlier.done) - len(gone)
    num_errors = sum(1 for who in earlier.errors if earlier.errors.get(who) and who not in gone)
    num_gone = num_kept - rows.num_passed
    if not quiet:
        say(f"batchkit: {path} has {num_kept:,} records, {rows.num:,} rows are left")
        for count, note in (
            (earlier.is_torn, "its end was torn, and is mended"),
            (len(retried), f"{len(retried):,} records with an error are taken out, and done again"),
            (len(stale), f"{len(stale):,} rows have changed, and are done again (ids {names})"),
            (num_errors, f"{num_errors:,} records have an error, and are kept; --retry-errors does them again"),
            (num_gone, f"{num_gone:,} records have no row in the input any more, and are kept"),
        ):
            if count:
                say(f"batchkit: {note}")
    return Plan(earlier.done, rows.num, num_errors)


class _Lines:
    """The lines of a file or a gzip file, up to where it is torn. The last one may have no end.

    Attributes:
        is_torn: the file ends with zeros, which are passed over, or a gzip file in the middle of a member.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.is_torn = False

    def __iter__(self) -> Iterator[bytes]:
        rest = b""
        try:
            with open(self._path, "rb") as raw:
                size, num_zeros = _size(raw)
                self.is_torn = num_zeros > 0
                chunks = _chunks(raw, size)
                for chunk in self._unpacked(chunks, num_zeros) if self._path.endswith(".gz") else chunks:
                    first, *others = chunk.split(b"\n")
                    rest += first
                    for line in others:
                        yield rest + b"\n"
                        rest = line
        except OSError as error:
            raise NotDone(f"cannot read {self._path}: {error.strerror or error}") from None
        if rest:
            yield rest

    def _unpacked(self, chunks: Iterator[bytes], num_zeros: int) -> Iterator[bytes]:
        """What a gzip file's members hold, as much of it as there is. The usual reader gives less of a torn one."""
        member, fresh = zlib.decompressobj(wbits=31), True
        for chunk in chunks:
            while chunk:
                try:
                    fresh = False
                    yield member.decompress(chunk)
                except zlib.error as error:  # what was only cut short gives none
                    raise NotDone(f"cannot resume {self._path}: it is damaged, or no gzip file: {error}") from None
                chunk = member.unused_data
                if member.eof:
                    member, fresh = zlib.decompressobj(wbits=31), True
        if not fresh:
            # A whole member may end with a few zeros, of its length. What a torn one makes of more is nothing.
            with suppress(zlib.error):
                rest = member.decompress(bytes(min(num_zeros, _MOST_ZEROS)))
                if member.eof:
                    yield rest
                    num_zeros -= min(num_zeros, _MOST_ZEROS) - len(member.unused_data)
                    fresh = True
        self.is_torn = not fresh or num_zeros > 0


def _size(raw: BinaryIO) -> tuple[int, int]:
    """Bytes of a file up to its last one that is not zero, and the number of zeros behind them."""
    end = size = raw.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - _CHUNK)
        raw.seek(start)
        if found := raw.read(end - start).rstrip(b"\0"):
            return start + len(found), size - start - len(found)
        end = start
    return 0, size


def _chunks(raw: BinaryIO, size: int) -> Iterator[bytes]:
    """The first so many bytes of a file."""
    raw.seek(0)
    while chunk := raw.read(min(_CHUNK, size)):
        size -= len(chunk)
        yield chunk


def _key_and_error(line: bytes) -> tuple[Key, bool] | None:
    """Of a record: its key, and whether it is an error. None: it is no record."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    key = Key.parse(record.get("key")) if isinstance(record, dict) else None
    return None if key is None else (key, record.get("error") is not None)


def _rewrite(path: str, unwanted: set[int], gone: set[int]) -> None:
    """Leave out lines by their numbers, and records by the hashes of their ids; end the last line."""
    target = os.path.realpath(path)  # a link stays one
    try:
        number, fresh = tempfile.mkstemp(prefix="batchkit-", suffix=".tmp", dir=os.path.dirname(target))
        try:
            _write_without(number, path, unwanted, gone)
            shutil.copymode(target, fresh)
            os.replace(fresh, target)
        except BaseException:
            with suppress(OSError):  # it may take what is left of the disk
                os.unlink(fresh)
            raise
    except OSError as error:
        raise NotDone(f"cannot write {path}: {error.strerror or error}") from None


def _write_without(fresh: int, path: str, unwanted: set[int], gone: set[int]) -> None:
    """The same into a file that is open, given by its number, which is closed."""
    with open(fresh, "wb") as raw:
        with gzip.GzipFile("", "wb", 6, raw) if path.endswith(".gz") else nullcontext(raw) as out:
            for number, line in enumerate(_Lines(path), 1):
                if number in unwanted:
                    continue
                if gone:
                    found = _key_and_error(line)
                    if found is not None and found[0].who in gone:
                        continue
                out.write(line.rstrip(b"\n") + b"\n")
        raw.flush()
        os.fsync(raw.fileno())
