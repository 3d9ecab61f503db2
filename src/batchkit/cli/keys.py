"""What a row is known by from one run to the next: hashes, and a table of them.

::

    key   0123456789abcdef 0123456789abcdef
          | who it is     | what it asks   |

The first half is a hash of the row's id, the second one of its prompt and its effective sampling parameters. A line
without an id that can be used (it cannot be read, or its id is taken) is known by its number and its bytes.
"""

from __future__ import annotations

import dataclasses
import json
import re
from array import array
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any, NamedTuple

from typing_extensions import override

from ..params import SamplingParams, StructuredOutputsParams

__all__ = ["HashTable", "Key", "hash_of", "told_params"]


_encode = json.JSONEncoder(sort_keys=True).encode
_DEFAULTS = [(field.name, field.default) for field in dataclasses.fields(SamplingParams)]


def hash_of(value: object) -> int:
    """64 bits of what JSON makes of a value; never 0, and the same in every process."""
    return int.from_bytes(blake2b(_encode(value).encode(), digest_size=8).digest(), "big") or 1


class Key(NamedTuple):
    """The two hashes of a row; `str` of it stands in the row's record.

    >>> Key.parse(str(Key(1, 2))) == Key(1, 2)
    True
    """

    who: int
    what: int

    @override
    def __str__(self) -> str:
        return f"{self.who:016x}{self.what:016x}"

    @classmethod
    def parse(cls, text: object) -> Key | None:
        """The key that a record has; None: it is none."""
        if not isinstance(text, str) or not re.fullmatch("[0-9a-f]{32}", text):
            return None
        return cls(int(text[:16], 16), int(text[16:], 16))


def told_params(params: SamplingParams) -> dict[str, Any]:
    """The sampling parameters that are not at their defaults, as JSON has them.

    Only those, so that a version with more parameters makes the same keys.

    >>> told_params(SamplingParams(temperature=0, stop="x"))
    {'temperature': 0.0, 'stop': ['x']}
    """
    told: dict[str, Any] = {}
    for name, default in _DEFAULTS:
        value = getattr(params, name)
        if value == default:
            continue
        if isinstance(value, StructuredOutputsParams):
            value = {kind: given for kind, given in dataclasses.asdict(value).items() if given is not None}
        elif isinstance(value, tuple):
            value = list(value)
        elif isinstance(default, float):
            value = float(value)
        told[name] = value
    return told


class HashTable:
    """Numbers by hashes of 64 bits, in two arrays (open addressing).

    16 bytes a slot, at most two thirds of which are taken: a million entries take 34 MB. That two of a million ids have
    the same hash has a probability of 3e-8.

    >>> table = HashTable()
    >>> table.put(5, 7), table.get(5), table.get(6)
    (None, 7, None)
    """

    def __init__(self) -> None:
        self._num = 0
        self._set_size(1024)

    def __len__(self) -> int:
        return self._num

    def _set_size(self, size: int) -> None:
        self._mask = size - 1
        self._hashes = array("Q", bytes(8 * size))
        self._values = array("Q", bytes(8 * size))

    def _slot(self, key: int) -> int:
        hashes, mask = self._hashes, self._mask
        slot = key & mask
        while hashes[slot] and hashes[slot] != key:
            slot = (slot + 1) & mask
        return slot

    def __iter__(self) -> Iterator[int]:
        return (known for known in self._hashes if known)

    def get(self, key: int) -> int | None:
        """The number of a hash, which is not 0; None: it has none."""
        slot = self._slot(key)
        return self._values[slot] if self._hashes[slot] else None

    def put(self, key: int, value: int) -> None:
        """Give a hash its number."""
        slot = self._slot(key)
        if not self._hashes[slot]:
            self._num += 1
            self._hashes[slot] = key
        self._values[slot] = value
        if 3 * self._num > 2 * (self._mask + 1):
            hashes, values = self._hashes, self._values
            self._set_size(2 * (self._mask + 1))
            for known, number in zip(hashes, values, strict=True):
                if known:
                    slot = self._slot(known)
                    self._hashes[slot], self._values[slot] = known, number
