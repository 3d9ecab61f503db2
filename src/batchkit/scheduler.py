"""Which sequences compute how many tokens in a step: the `Scheduler` that is asked, the `Step` that it answers with.

The two are one unit. A policy writes `Scheduler.schedule` and calls the verbs of the `Step` it is given; only those
verbs change queues, seats, tables and status, each of them checks first and then acts, and a verb that says no has
changed nothing. So a policy may be wrong without being dangerous: it cannot leak a block, schedule a sequence twice,
overrun a budget or corrupt the KV cache. It can starve somebody, and then `SchedulerStalled` or
`batchkit.testing.check_scheduler` says so.

Side effects of one step, in order: `Step.run` and `Step.preempt` move sequences between the queues, take and free
blocks, and record copies; `Scheduler.next_step` turns what was chosen into rows of plain values. The copies belong to
the scheduler until `Scheduler.copies_done`, so that a policy that raises after a preemption leaves them for the next
step. Progress (`Sequence.num_computed`) is the engine's: if the rows then fail to compute, the next step plans anew.

Invariants, asserted by `Scheduler.check`:

* a live sequence is in exactly one of ``waiting`` and ``running``, as its status says;
* running sequences have distinct seats, and they alone hold device blocks;
* the blocks of a running sequence cover what is computed;
* every block is free, cached, or in the table of a running sequence.

Asserted in `Scheduler.next_step`: with live work, a step has a row or a time to wait for.
"""

from __future__ import annotations

import collections.abc
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import ClassVar, TypedDict, final

from .allocators import BlockAllocator
from .errors import InvariantError, PolicyError, SchedulerStalled
from .preemption import Preemption, Recompute
from .queues import QueueView, SequenceQueue
from .sequence import Sequence, Status
from .types import BlockCopy, Blocked, Eviction, Refusal, ScheduledSequence, SchedulerOutput

__all__ = ["Scheduler", "SchedulerOptions", "Step"]

API_VERSION = 1
_WAITING, _HELD = Status.WAITING, Status.HELD  # an enum looks each up anew, which shows in what is done for every row
Blocks = collections.abc.Sequence[int]


class SchedulerOptions(TypedDict, total=False):
    """The keyword arguments that every scheduler takes; see `Scheduler`. For subclasses with arguments of their own."""

    max_model_len: int | None
    max_num_seqs: int | None
    max_tokens_per_step: int | None
    preemption: Preemption | None


class Step:
    """One step in the making. A policy gets it in `Scheduler.schedule` and may not keep it.

    Attributes:
        now: seconds of the engine's clock.
        tokens_left: what is left of the token budget.
        refused: why the last `run` that returned False said no.
    """

    __slots__ = (
        "_budget",
        "_chosen",
        "_preempted",
        "_reading_victims",
        "_refusals",
        "_scheduler",
        "_wait_until",
        "now",
        "refused",
        "tokens_left",
    )

    def __init__(self, scheduler: Scheduler, now: float, budget: int) -> None:
        self._scheduler = scheduler
        self.now = now
        self.tokens_left = self._budget = budget
        self.refused: Refusal | None = None
        self._chosen: dict[int, tuple[Sequence, int, bool]] = {}  # by id: how many tokens, and whether it samples
        self._preempted: dict[int, Eviction] = {}
        self._refusals: dict[int, tuple[Sequence, Refusal, int]] = {}  # waiting ones; the slots each would have taken
        self._wait_until: float | None = None
        self._reading_victims = False

    def __bool__(self) -> bool:
        """Whether any sequence has been chosen."""
        return bool(self._chosen)

    def __contains__(self, seq: Sequence) -> bool:
        """Whether `seq` has been chosen."""
        return seq.id in self._chosen

    def run(
        self,
        seq: Sequence,
        *,
        max_tokens: int | None = None,
        reserve: int = 0,
        victims: Iterable[Sequence] = (),
    ) -> bool:
        """Let `seq` compute its next tokens in this step, and admit it if it is waiting.

        It computes all tokens whose KV is missing, or as many as `max_tokens` and the token budget leave. A row is
        cut to the budget only in a ``chunked`` scheduler, or if the sequence is longer than the whole budget.

        Args:
            seq: a waiting or running sequence that is not in the step yet.
            max_tokens: at most so many tokens now.
            reserve: take blocks for so many tokens in all, if that is more than the step needs; capped at the pool.
            victims: who may be preempted for the seat and the blocks, in this order and no more of them than it
                takes. Sequences that are in the step already, or do not run, are passed over, and a sample of the same
                prompt whose blocks it shares. Read only as needed.

        Returns:
            False: nothing has changed, and `refused` says why.

        Raises:
            PolicyError: `seq` is in the step already, or is not this scheduler's.
        """
        scheduler = self._scheduler
        seq_id, status = seq.id, seq.status
        if seq_id in self._chosen:
            raise PolicyError(f"{seq!r} is in this step already")
        if self._reading_victims:
            raise PolicyError("the verbs of a step may not be used while one of them reads its victims")
        if status is _HELD and seq_id in scheduler._held:
            if self.tokens_left < 1:
                return self._refuse(seq, Refusal.TOKENS)
            self._chosen[seq_id] = (seq, 0, False)
            self.tokens_left -= 1
            return True
        waiting = status is _WAITING
        if seq_id not in (scheduler._waiting if waiting else scheduler._running).ids:
            raise PolicyError(f"{seq!r} is neither waiting nor running in this scheduler")
        if seq_id in self._preempted:
            return self._refuse(seq, Refusal.PREEMPTED)

        # The order of the four refusals is a promise: seats, tokens, blocks.
        allocator = scheduler.allocator
        evict: list[Sequence] = []
        more: Iterator[Sequence] | None = None
        if waiting and not scheduler._seats:
            more = self._eligible(seq, victims)
            victim = next(more, None)
            if victim is None:
                return self._refuse(seq, Refusal.SEATS)
            evict.append(victim)

        known = seq.num_prompt + len(seq.output)  # num_tokens, without the call: this runs for every row
        done = seq.num_computed
        hit: Blocks = ()
        if waiting and not done:  # looked up before anything is counted
            hit, donor = scheduler._find_hit(seq, leaving=evict)
            done = len(hit) * allocator.block_size
            if donor is not None:
                more = (victim for victim in more or self._eligible(seq, victims) if victim is not donor)
        left = known - done
        count = left if max_tokens is None else min(left, max_tokens)
        if count > self.tokens_left:
            count = self.tokens_left if scheduler.chunked or known > self._budget else 0
        if count <= 0:
            return self._refuse(seq, Refusal.TOKENS)

        grown = None if evict else allocator.grow(seq_id, done + count, computed=done, hit=hit, reserve=reserve)
        if grown is None:
            more = more or self._eligible(seq, victims)
            while not allocator.fits(
                seq_id, done + count, computed=done, hit=hit, reserve=reserve, freeing=[v.id for v in evict]
            ):
                victim = next(more, None)
                if victim is None:
                    return self._refuse(seq, Refusal.BLOCKS, max(done + count, reserve))
                evict.append(victim)
            for victim in evict:
                self._evict(victim, seq_id)
            grown = allocator.grow(seq_id, done + count, computed=done, hit=hit, reserve=reserve)
            if grown is None:
                raise InvariantError(
                    f"{type(allocator).__name__}.fits said that {done + count} tokens fit for {seq!r}; "
                    f"grow did not do it"
                )
        if waiting:
            scheduler._admit(seq, done)
        if grown:
            scheduler._copies.extend(grown)
        self._chosen[seq_id] = (seq, count, done + count == known and seq.request.max_tokens > 0)
        self.tokens_left -= count
        return True

    def _eligible(self, seq: Sequence, victims: Iterable[Sequence]) -> Iterator[Sequence]:
        offered = {seq.id}
        source = iter(victims)
        while True:
            self._reading_victims = True
            try:
                victim = next(source, None)
            finally:
                self._reading_victims = False
            if victim is None:
                return
            if victim.id in offered or victim.id in self._chosen or victim.status is not Status.RUNNING:
                continue
            offered.add(victim.id)
            yield victim

    def _refuse(self, seq: Sequence, why: Refusal, slots: int = 0) -> bool:
        self.refused = why
        if seq.status is Status.WAITING:
            self._refusals[seq.id] = (seq, why, slots)
        return False

    def _evict(self, seq: Sequence, for_seq_id: int | None) -> None:
        self._preempted[seq.id] = Eviction(seq.id, seq.request.id, for_seq_id)
        self._scheduler._evict(seq)

    def preempt(self, seq: Sequence) -> None:
        """Take the blocks and the seat of a running sequence; it goes to the front of the waiting ones.

        Raises:
            PolicyError: it is in this step, or it does not run.
        """
        if self._reading_victims:
            raise PolicyError("the verbs of a step may not be used while one of them reads its victims")
        if seq.id in self._chosen:
            raise PolicyError(f"{seq!r} is in this step and cannot be preempted")
        if seq.status is not Status.RUNNING or seq not in self._scheduler._running:
            raise PolicyError(f"{seq!r} does not run and cannot be preempted")
        self._evict(seq, None)

    def cached_tokens(self, seq: Sequence) -> int:
        """How many tokens of a waiting sequence need not be computed now, since their KV is there."""
        if seq.status is not Status.WAITING or seq.num_computed:
            return 0
        return len(self._scheduler._find_hit(seq)[0]) * self._scheduler.allocator.block_size

    def explain(self, seq: Sequence | None = None) -> Blocked | None:
        """Why a waiting sequence has not been admitted in this step so far; ``str`` of it is a sentence.

        Args:
            seq: Default: the first that was refused and waits still; if none was, the first of the queue.

        Returns:
            None: it does not wait, or nothing does. The numbers are those of now, not of the refusal.
        """
        scheduler = self._scheduler
        allocator = scheduler.allocator
        if seq is None and self._refusals:
            seq = next((seq for seq, _, _ in self._refusals.values() if seq.status is _WAITING), None)
        if seq is None:
            seq = scheduler._waiting.first
            if seq is None:
                return None
        elif seq.id not in scheduler._waiting.ids:
            return None
        known = slots = seq.num_prompt + len(seq.output)
        why: Refusal | None = None
        if seq.id in self._refusals:
            _, why, tried = self._refusals[seq.id]
            slots = min(tried or known, allocator.num_blocks * allocator.block_size)
        return Blocked(  # by position: see `Scheduler.next_step`
            seq.request.id,
            why,
            known - seq.num_computed,  # tokens needed
            self.tokens_left,
            allocator.missing(seq.id, slots),
            allocator.num_free_blocks,
            len(scheduler._seats),
        )

    def wait_until(self, t: float) -> None:
        """If the step stays empty, nothing is to be done before time `t`, in seconds of the engine's clock."""
        if not math.isfinite(t):
            raise PolicyError(f"cannot wait until {t}")
        self._wait_until = t


def argument_names(policy: type[Scheduler]) -> list[str]:
    """The keyword arguments that a scheduler's class takes, those that it hands on to its bases among them."""
    names: list[str] = []
    for base in policy.__mro__:
        if "__init__" not in base.__dict__:
            continue
        parameters = list(inspect.signature(base.__dict__["__init__"]).parameters.values())[1:]
        names += [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return list(dict.fromkeys(names))


_FINAL = (
    "add",
    "finish",
    "abort",
    "hand_over",
    "retire",
    "next_step",
    "copies_done",
    "recompute_all",
    "check",
    "waiting",
    "running",
    "num_held",
)


class Scheduler(ABC):
    """A policy: subclasses write `schedule`, or override `order`, `victims` or `may_leave` of a built-in one.

    Everything else here is final. The interface is versioned: a class made for another ``api_version`` than the
    engine's is refused.

    Args:
        allocator: the KV blocks it schedules over.
        max_model_len: the most tokens of prompt and output together; needed by policies that reserve by it.
        max_num_seqs: seats: the most sequences that run at a time. Default: `default_max_num_seqs`, but no more than
            there are blocks or tokens in a step.
        max_tokens_per_step: the token budget of a step, at least one for each seat. Default:
            `default_max_tokens_per_step`, but no less than the seats.
        preemption: what becomes of a preempted sequence's KV. Default: `Recompute`.

    Attributes:
        allocator, max_model_len, max_num_seqs, max_tokens_per_step, preemption: the values in force.
        num_cached_tokens: tokens so far that were not computed on an admission, because their KV was there.
        waiting: the sequences that do not run, those preempted and further samples of a prompt in front, then by time
            of adding.
        running: the sequences that run, by time of admission, held ones among them.

    Both queues may be iterated, forwards and reversed, while `Step.run` and `Step.preempt` change them.

    Raises:
        ValueError: the numbers do not go together, or the policy cannot work with this allocator.
    """

    api_version: ClassVar[int] = API_VERSION
    chunked: ClassVar[bool] = False
    """Whether a row may be cut to what is left of the budget. One longer than the whole budget is always cut."""
    reserves_all: ClassVar[bool] = False
    """Whether it reserves `Sequence.max_kv` on admission: required on an allocator that is not growable."""
    streams: ClassVar[bool] = True
    """False: nothing is delivered, and no first-token time is set, before a sequence leaves."""
    default_max_num_seqs: ClassVar[int] = 256
    default_max_tokens_per_step: ClassVar[int] = 2048

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        taken = [name for name in _FINAL if name in cls.__dict__]
        if taken:
            raise TypeError(f"{cls.__name__} overrides {', '.join(taken)}, which a Scheduler subclass must leave alone")

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_tokens_per_step: int | None = None,
        preemption: Preemption | None = None,
    ) -> None:
        name = type(self).__name__
        if not isinstance(allocator, BlockAllocator):
            raise TypeError(f"{name} needs a BlockAllocator, got {allocator!r}")
        if not allocator.growable and not self.reserves_all:
            raise ValueError(
                f"{name} lets tables grow while sequences run, which {type(allocator).__name__} cannot; "
                f"use a PagedAllocator, or a policy that reserves all on admission"
            )
        for given, value in (
            ("max_model_len", max_model_len),
            ("max_num_seqs", max_num_seqs),
            ("max_tokens_per_step", max_tokens_per_step),
        ):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"{given} must be an integer, got {value!r}")
            if value is not None and value < 1:
                raise ValueError(f"{given} must be at least 1, got {value}")
        if max_num_seqs is None:
            max_num_seqs = min(
                self.default_max_num_seqs, allocator.num_blocks, max_tokens_per_step or allocator.num_blocks
            )
        if max_tokens_per_step is None:
            max_tokens_per_step = max(self.default_max_tokens_per_step, max_num_seqs)
        if max_tokens_per_step < max_num_seqs:
            raise ValueError(
                f"max_tokens_per_step ({max_tokens_per_step}) must have room for one token of each of the "
                f"max_num_seqs ({max_num_seqs}) sequences"
            )
        self.allocator = allocator
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.max_tokens_per_step = max_tokens_per_step
        self.preemption: Preemption = preemption if preemption is not None else Recompute()
        self._waiting = SequenceQueue()
        self._running = SequenceQueue()
        self._waiting_view = QueueView(self._waiting)
        self._running_view = QueueView(self._running)
        self._seats = list(range(max_num_seqs))[::-1]
        self._held: dict[int, Sequence] = {}
        self._idle_rows: dict[int, ScheduledSequence] = {}  # of held ones, by id
        self._released: set[int] = set()
        self._copies: list[BlockCopy] = []
        self.num_cached_tokens = 0

    # ------------------------------------------------------------------------------- what a policy writes

    @abstractmethod
    def schedule(self, step: Step) -> None:
        """Choose who computes in this step by calling `step`'s verbs.

        It may be called again for the same time, after a step that failed. Sequences that run without having
        computed their whole prompt are the policy's to go on with.
        """

    def order(self, now: float) -> Iterable[Sequence]:
        """The waiting sequences in the order in which the built-in policies admit them. Default: first come first."""
        return self.waiting

    def victims(self, seq: Sequence) -> Iterable[Sequence]:
        """Whom the built-in policies preempt so that `seq` can go on. Default: the newest first, none older than it.

        That none is older keeps two sequences from preempting each other for ever.
        """
        yield from sorted((other for other in self.running if other.id > seq.id), key=lambda s: s.id, reverse=True)

    def may_leave(self, seq: Sequence) -> bool:
        """Whether a finished sequence gives up its seat and blocks now. Default: yes."""
        return True

    # ------------------------------------------------------------------------------- what a policy reads

    @property
    def waiting(self) -> QueueView:
        """The sequences that do not run."""
        return self._waiting_view

    @property
    def running(self) -> QueueView:
        """The sequences that run, held ones among them."""
        return self._running_view

    @property
    def num_held(self) -> int:
        """How many of the running ones have finished and may not leave yet."""
        return len(self._held)

    # ------------------------------------------------------------------------------- what the engine calls

    @final
    def next_step(self, now: float, *, max_tokens: int | None = None) -> SchedulerOutput:
        """Ask the policy, and make rows of its answer.

        Args:
            now: seconds of the engine's clock.
            max_tokens: a token budget below the usual one, after the device ran out of memory.

        Raises:
            SchedulerStalled: sequences are live, none was chosen, and no later time was named.
        """
        budget = self.max_tokens_per_step if max_tokens is None else min(max_tokens, self.max_tokens_per_step)
        step = Step(self, now, budget)
        self.schedule(step)
        later = step._wait_until is not None and step._wait_until > now
        if not step._chosen and (self._waiting or self._running) and not later:
            raise SchedulerStalled(self._stall_message(step))
        table, idle_rows = self.allocator.table, self._idle_rows
        rows = tuple(
            [
                ScheduledSequence(  # by position: by keyword it takes twice as long
                    seq_id,
                    0,  # row
                    seq.seat,
                    seq.request,
                    seq.index,
                    start := seq.num_computed,
                    count,
                    seq.token_ids(start, start + count),
                    seq.output,
                    len(seq.output),
                    table(seq_id),
                    samples,
                    False,  # idle
                )
                if count
                else idle_rows.get(seq_id) or self._idle_row(seq)
                for seq_id, (seq, count, samples) in step._chosen.items()
            ]
        )
        return SchedulerOutput(
            rows,
            tuple(step._preempted.values()),
            tuple(self._copies),
            budget - step.tokens_left,
            None if rows else step._wait_until,
            step.explain() if self._waiting.ids else None,  # blocked
        )

    def _idle_row(self, seq: Sequence) -> ScheduledSequence:
        """The row of a held sequence, which stays the same one until the sequence goes or loses its KV."""
        last = seq.num_computed - 1
        row = self._idle_rows[seq.id] = ScheduledSequence(  # by position: see `next_step`
            seq.id,
            0,  # row
            seq.seat,
            seq.request,
            seq.index,
            last,
            1,  # num_tokens
            seq.token_ids(last, last + 1),
            seq.output,
            len(seq.output),
            self.allocator.table(seq.id),
            False,  # samples
            True,  # idle
        )
        return row

    def _stall_message(self, step: Step) -> str:
        allocator = self.allocator
        until = step._wait_until
        waits = "no time to wait for" if until is None else f"a time that is not later than now ({until} <= {step.now})"
        blocked = step.explain()
        return (
            f"{type(self).__name__} chose nothing and named {waits}, with {len(self._waiting)} waiting, "
            f"{len(self._running)} running ({len(self._held)} held), {allocator.num_free_blocks} of "
            f"{allocator.num_blocks} blocks free, {len(self._seats)} of {self.max_num_seqs} seats free, "
            f"{step.tokens_left} tokens left{f'; {blocked}' if blocked else ''}"
        )

    @final
    def copies_done(self) -> None:
        """The copies of the last step have been made."""
        self._copies.clear()

    @final
    def add(self, seq: Sequence, *, front: bool = False) -> None:
        """Queue a new sequence, last; or first, if it belongs to one that was admitted already."""
        if front:
            self._waiting.appendleft(seq)
        else:
            self._waiting.append(seq)

    @final
    def finish(self, seq: Sequence) -> None:
        """A running sequence has all its tokens. It is held until `retire` lets it go."""
        seq.status = Status.HELD
        self._held[seq.id] = seq

    @final
    def hand_over(self, seq: Sequence, heir: Sequence) -> bool:
        """Let a finished sequence go, and one with the same prompt that has nothing have its seat and its blocks.

        The heir, which waits or has not been added, goes on from the prompt's last token: it is computed again for its
        logits, and with it the last block of the prompt is written.

        Returns:
            False: nothing has changed. The policy keeps `seq`, or its batches as they are (`streams`), or others might
            find that block.
        """
        allocator = self.allocator
        if seq.id in self._released or allocator.prefix_caching or not allocator.shares_blocks:
            return False
        if not self.streams or not self.may_leave(seq):
            return False
        allocator.rename(seq.id, heir.id)
        if heir.id in self._waiting.ids:
            self._waiting.remove(heir)
        self._let_go(seq)
        self._running.append(heir)
        heir.seat, seq.seat = seq.seat, -1
        heir.status, seq.status = Status.RUNNING, Status.FINISHED
        heir.num_computed = heir.num_prompt - 1
        if not heir.num_preemptions:
            heir.num_cached = heir.num_computed
        self.num_cached_tokens += heir.num_computed
        return True

    @final
    def retire(self) -> list[Sequence]:
        """Let every held sequence go that may leave; they give up seats and blocks, and are returned."""
        if not self._held:
            return []
        released, may_leave = self._released, self.may_leave
        leaving = [seq for seq in self._held.values() if seq.id in released or may_leave(seq)]
        for seq in leaving:
            self._leave(seq)
        return leaving

    @final
    def abort(self, seq: Sequence) -> None:
        """End a live sequence in whatever state it is."""
        if seq.status is Status.WAITING:
            self._waiting.remove(seq)
            self.preemption.drop(seq)
            seq.status = Status.FINISHED
        elif seq.status is not Status.FINISHED:
            self._leave(seq)

    @final
    def recompute_all(self) -> None:
        """The KV cache is lost: every running sequence goes back to the front of the queue, in order, with nothing.

        Held ones leave at the next `retire`, for their KV cannot be computed again.
        """
        for seq in reversed(self._running):
            self.allocator.free(seq.id)
            if seq.status is Status.HELD:
                self._released.add(seq.id)
                continue
            self._running.remove(seq)
            self._give_up_seat(seq)
            seq.status = Status.WAITING
            self._waiting.appendleft(seq)
        for seq in self._waiting:
            self.preemption.drop(seq)
            seq.num_recomputed += seq.num_computed
            seq.num_computed = 0
        self.allocator.forget()
        self._copies.clear()
        self._idle_rows.clear()

    @final
    def check(self) -> None:
        """Raise InvariantError, printing the state, unless everything in this module's docstring holds."""

        def broken(rule: str) -> InvariantError:
            return InvariantError(
                f"{type(self).__name__}: {rule}; waiting {self.waiting!r}, running {self.running!r}, "
                f"{self.allocator.num_free_blocks} of {self.allocator.num_blocks} blocks free"
            )

        self._waiting.check()
        self._running.check()
        self.allocator.check()
        self.preemption.check()
        held_blocks: set[int] = set()
        for seq in self._waiting:
            if seq.status is not Status.WAITING or seq in self._running:
                raise broken(f"{seq!r} is in the waiting queue")
            if self.allocator.table(seq.id):
                raise broken(f"{seq!r} waits and holds blocks {self.allocator.table(seq.id)}")
        for seq in self._running:
            table = self.allocator.table(seq.id)
            if seq.status not in (Status.RUNNING, Status.HELD) or (seq.status is Status.HELD) != (seq.id in self._held):
                raise broken(f"{seq!r} is in the running queue")
            if seq.id not in self._released and len(table) * self.allocator.block_size < seq.num_computed:
                raise broken(f"{seq!r} holds only blocks {table}")
            held_blocks.update(table)
        seats = sorted([*self._seats, *(seq.seat for seq in self._running)])
        if seats != list(range(self.max_num_seqs)):
            raise broken(f"seats are {seats}")
        if len(held_blocks) + self.allocator.num_free_blocks != self.allocator.num_blocks:
            raise broken(f"the running sequences hold {len(held_blocks)} blocks; some block has no owner or two")

    # ------------------------------------------------------------------------------- the verbs' hands

    def _admit(self, seq: Sequence, num_cached: int) -> None:
        self._copies.extend(self.preemption.restore(seq, self.allocator))
        self._waiting.remove(seq)
        self._running.append(seq)
        seq.seat = self._seats.pop()
        seq.status = Status.RUNNING
        if num_cached > seq.num_computed:
            if not seq.num_preemptions:
                seq.num_cached = num_cached
            seq.num_computed = num_cached
            self.num_cached_tokens += num_cached

    def _find_hit(
        self, seq: Sequence, leaving: collections.abc.Sequence[Sequence] = ()
    ) -> tuple[Blocks, Sequence | None]:
        """Full blocks that hold the first tokens of a waiting sequence, and the sibling that has them, if one does.

        At least the last token is always computed. Who asks for the prompt's log-probabilities computes all of it. A
        sibling that is `leaving` has nothing to give.
        """
        allocator = self.allocator
        hit: Blocks = ()
        if not allocator.shares_blocks:
            return hit, None
        params = seq.request.params
        if allocator.prefix_caching and (params.prompt_logprobs is None or seq.index):
            known = seq.num_tokens
            hit = allocator.match(seq.token_ids(0, known), known - 1, seq.request.cache_salt)
        count = (seq.num_prompt - 1) // allocator.block_size
        for other in seq.samples if count > len(hit) else ():
            if other in leaving or other.id not in self._running.ids:
                continue
            if other.num_computed >= count * allocator.block_size:
                table = allocator.table(other.id)
                if len(table) >= count:  # a held one has none once its KV cache was lost
                    return table[:count], other
        return hit, None

    def _evict(self, seq: Sequence) -> None:
        self._copies.extend(self.preemption.evict(seq, self.allocator))
        self._running.remove(seq)
        self._give_up_seat(seq)
        self._waiting.appendleft(seq)
        seq.status = Status.WAITING
        seq.num_preemptions += 1

    def _leave(self, seq: Sequence) -> None:
        self._let_go(seq)
        self._give_up_seat(seq)
        self.allocator.free(seq.id)
        seq.status = Status.FINISHED

    def _let_go(self, seq: Sequence) -> None:
        self._running.remove(seq)
        self._held.pop(seq.id, None)
        self._idle_rows.pop(seq.id, None)
        self._released.discard(seq.id)

    def _give_up_seat(self, seq: Sequence) -> None:
        self._seats.append(seq.seat)
        seq.seat = -1
