"""The hashes that rows are known by, and the table of them."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from batchkit.cli.keys import HashTable, Key, hash_of

HASHES = st.one_of(st.integers(1, 40), st.integers(1, 2**64 - 1), st.integers(1, 60).map(lambda n: n << 12))


@given(st.lists(st.tuples(HASHES, st.integers(0, 2**64 - 1)), max_size=200), st.integers(0, 3000))
def test_a_table_is_a_dictionary(entries, num_more):
    table, want = HashTable(), {}
    for key, value in [*entries, *((hash_of(n), n) for n in range(num_more))]:
        table.put(key, value)
        want[key] = value
    assert len(table) == len(want)
    assert sorted(table) == sorted(want)
    assert all(table.get(key) == value for key, value in want.items())
    assert all(table.get(key) is None for key in range(41, 60) if key not in want)


@given(st.integers(1, 2**64 - 1), st.integers(1, 2**64 - 1))
def test_a_key_is_read_as_it_was_written(who, what):
    assert Key.parse(str(Key(who, what))) == Key(who, what)


def test_what_is_no_key():
    for text in (None, 5, "", "0" * 31, "0" * 33, "g" * 32, "A" * 32, "0" * 32 + "\n", "+" + "0" * 31):
        assert Key.parse(text) is None


def test_a_hash_is_the_same_in_every_process():
    code = "from batchkit.cli.keys import hash_of; print(hash_of(['id', 'a', 1, None, {'b': 2.5, 'a': 1}]))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert int(done.stdout) == hash_of(["id", "a", 1, None, {"a": 1, "b": 2.5}]) == KNOWN


KNOWN = 9345941402647554103
"""A record written by one version is known by the next."""
