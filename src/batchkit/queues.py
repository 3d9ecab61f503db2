"""The two queues of a scheduler: ordered, with every change in constant time, and safe to iterate while they change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .errors import InvariantError

if TYPE_CHECKING:
    from .sequence import Sequence

__all__ = ["QueueView", "SequenceQueue"]


class _Node:
    __slots__ = ("after", "before", "linked", "seq")

    def __init__(self, seq: Sequence | None) -> None:
        self.seq = seq
        self.before: _Node = self
        self.after: _Node = self
        self.linked = True


class SequenceQueue:
    """A doubly linked list of sequences with an index by id.

    A policy walks a queue while its own `Step.run` takes sequences out of it and `Step.preempt` puts others in front.
    A deque forbids that and a copy would cost a step the length of the queue, so an unlinked node keeps its links: a
    walk that stands on it finds its way back to the nodes that are still there.

    All methods but iteration and indexing take constant time.

    Attributes:
        ids: of the sequences in it. Looking into it costs a policy's every row a call less than ``seq in queue``.
    """

    __slots__ = ("_end", "_nodes", "ids")

    def __init__(self) -> None:
        self._end = _Node(None)
        self._nodes: dict[int, _Node] = {}
        self.ids = self._nodes.keys()

    def _link(self, seq: Sequence, after: _Node) -> None:
        if seq.id in self._nodes:
            raise InvariantError(f"{seq!r} is in the queue already")
        node = _Node(seq)
        node.before, node.after = after, after.after
        node.before.after = node.after.before = node
        self._nodes[seq.id] = node

    def append(self, seq: Sequence) -> None:
        """Put `seq` last."""
        self._link(seq, self._end.before)

    def appendleft(self, seq: Sequence) -> None:
        """Put `seq` first."""
        self._link(seq, self._end)

    def remove(self, seq: Sequence) -> None:
        """Take `seq` out; KeyError if it is not in."""
        node = self._nodes.pop(seq.id)
        node.before.after, node.after.before = node.after, node.before
        node.linked = False

    @property
    def first(self) -> Sequence | None:
        """What `__iter__` gives first; None: the queue is empty."""
        return self._end.after.seq

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, seq: Sequence) -> bool:
        return seq.id in self._nodes

    def __iter__(self) -> Iterator[Sequence]:
        """First to last. Sees what is in the queue when the walk gets there."""
        node = self._end.after
        while node is not self._end:
            if node.linked:
                assert node.seq is not None
                yield node.seq
            node = node.after

    def __reversed__(self) -> Iterator[Sequence]:
        """Last to first, under the same rule."""
        node = self._end.before
        while node is not self._end:
            if node.linked:
                assert node.seq is not None
                yield node.seq
            node = node.before

    def check(self) -> None:
        """Raise InvariantError unless the links and the index agree."""
        ahead = [seq.id for seq in self]
        back = [seq.id for seq in reversed(self)]
        if ahead != back[::-1] or sorted(ahead) != sorted(self._nodes):
            raise InvariantError(f"a queue is broken: forwards {ahead}, backwards {back}, index {sorted(self._nodes)}")


class QueueView:
    """What a policy sees of a queue: everything but the verbs that change it."""

    __slots__ = ("_queue",)

    def __init__(self, queue: SequenceQueue) -> None:
        self._queue = queue

    def __len__(self) -> int:
        return len(self._queue.ids)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._queue

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)

    def __reversed__(self) -> Iterator[Sequence]:
        return reversed(self._queue)

    def __getitem__(self, index: int) -> Sequence:
        """The sequence at `index`, negative from the end; takes as many steps as it is away from that end."""
        walk = iter(self._queue) if index >= 0 else reversed(self._queue)
        for _ in range(index if index >= 0 else -index - 1):
            next(walk, None)
        found = next(walk, None)
        if found is None:
            raise IndexError(f"index {index} of a queue of {len(self._queue)}")
        return found

    def __repr__(self) -> str:
        shown = [repr(seq) for _, seq in zip(range(8), self._queue, strict=False)]
        more = len(self._queue) - len(shown)
        return f"[{', '.join(shown)}{f', and {more} more' if more > 0 else ''}]"
