"""What policies keep between steps without knowing when a request comes or goes: they look, and forget what has gone.

A policy is not told of arrivals, aborts and failures. These books read it off the queues, at a cost that depends on
what has changed and not on how many wait.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from ..queues import QueueView
from ..sequence import Sequence, Status

__all__ = ["PerSequence", "Progress", "Rank", "RankedQueue", "WaitingBook", "expected_output"]

T = TypeVar("T")
Rank = tuple[float, int]
"""A number, and the sequence's id, so that no two are equal and ties go to the older."""

_SLACK = 64  # entries of sequences that have gone, beyond as many as there are live ones, before they are swept out


def expected_output(seq: Sequence) -> float:
    """How many tokens `seq` is expected to generate: ``length_hint``, between 1 and ``max_tokens``; else the latter."""
    hint, declared = seq.request.length_hint, seq.request.max_tokens
    return declared if hint is None else max(1, min(hint, declared))


class WaitingBook:
    """Which of the waiting sequences are known already.

    New sequences stand at the end of the queue and those that lost their seat at its front, so two walks that stop at
    the first known one find all others.
    """

    def __init__(self) -> None:
        self._known: dict[int, Sequence] = {}

    def __contains__(self, seq: Sequence) -> bool:
        return seq.id in self._known

    def find_new(self, waiting: QueueView) -> list[Sequence]:
        """Those that were not known, oldest first; they are known now. Costs as many as it finds."""
        found: list[Sequence] = []
        for walk in (iter(waiting), reversed(waiting)):
            for seq in walk:
                if seq.id in self._known:
                    break
                self._known[seq.id] = seq
                found.append(seq)
        return sorted(found, key=lambda seq: seq.id)

    def forget(self, seq: Sequence) -> None:
        """It waits no more."""
        self._known.pop(seq.id, None)

    def is_stale(self, waiting: QueueView) -> bool:
        """Whether most of what is known has gone, by aborts, so that everything built on it should be built anew."""
        return len(self._known) > 2 * len(waiting) + _SLACK

    def clear(self) -> None:
        """Know nothing."""
        self._known.clear()


class RankedQueue:
    """The waiting sequences, the lowest rank first.

    A rank may not change while a sequence waits, unless `push` says so. An arrival and an admission cost the logarithm
    of the queue.
    """

    def __init__(self, rank: Callable[[Sequence], Rank]) -> None:
        self._rank = rank
        self._book = WaitingBook()
        self._heap: list[tuple[Rank, int, Sequence]] = []
        self._places: dict[int, tuple[Rank, int]] = {}  # an entry of the heap that says otherwise is an old one
        self._taken: list[Sequence] = []  # what the last walk took out of the heap
        self._count = itertools.count()

    def __len__(self) -> int:
        return len(self._places)

    def push(self, seq: Sequence) -> None:
        """Put a waiting sequence where its rank is now."""
        place = self._places[seq.id] = self._rank(seq), next(self._count)
        heappush(self._heap, (*place, seq))

    def update(self, waiting: QueueView) -> list[Sequence]:
        """Take in what has come to wait since; returns it, oldest first."""
        self.settle()
        found = self._book.find_new(waiting)
        for seq in found:
            self.push(seq)
        if self._book.is_stale(waiting) or len(self._heap) > 2 * len(self._places) + _SLACK:
            self.rebuild(waiting)
        return found

    def rebuild(self, waiting: QueueView) -> None:
        """Rank everything anew: costs the whole queue."""
        self._book.clear()
        self._book.find_new(waiting)
        self._taken.clear()
        self._places = {seq.id: (self._rank(seq), next(self._count)) for seq in waiting}
        self._heap = [(*self._places[seq.id], seq) for seq in waiting]
        heapify(self._heap)

    def settle(self) -> None:
        """After a walk: forget who was admitted, and put the others back."""
        taken, self._taken = self._taken, []
        for seq in taken:
            del self._places[seq.id]
            if seq.status is Status.WAITING:
                self.push(seq)
            else:
                self._book.forget(seq)

    def __iter__(self) -> Iterator[Sequence]:
        """By rank. One walk at a time; what it yields may be admitted meanwhile."""
        self.settle()
        while self._heap:
            rank, count, seq = heappop(self._heap)
            if self._places.get(seq.id) != (rank, count):
                continue
            self._taken.append(seq)
            if seq.status is Status.WAITING:
                yield seq


class PerSequence(Generic[T]):
    """A value for each of some live sequences. Those of sequences that have gone are swept out as it grows."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[Sequence, T]] = {}
        self._limit = _SLACK

    def __len__(self) -> int:
        return len(self._values)

    def get(self, seq: Sequence, default: T) -> T:
        """The value of `seq`."""
        held = self._values.get(seq.id)
        return default if held is None else held[1]

    def set(self, seq: Sequence, value: T) -> None:
        """Give `seq` a value."""
        self._values[seq.id] = (seq, value)
        if len(self._values) > self._limit:
            live = {i: held for i, held in self._values.items() if held[0].status is not Status.FINISHED}
            self._values, self._limit = live, 2 * len(live) + _SLACK


class Progress:
    """Whether the last step has given tokens: one that failed gives none."""

    def __init__(self) -> None:
        self._lengths: dict[int, int] = {}

    def was_made(self, running: QueueView) -> bool:
        """Whether a sequence that runs has more tokens than at the last `note`. A sequence's last one may go by."""
        return any(len(seq.output) > self._lengths.get(seq.id, len(seq.output)) for seq in running)

    def note(self, running: QueueView) -> None:
        """At the end of a step: how far everybody is."""
        self._lengths = {seq.id: len(seq.output) for seq in running}
