"""`check_scheduler`: a policy under the real engine, over tight pools, with every invariant asserted in every step."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from ..allocators import BlockAllocator, ContiguousAllocator, PagedAllocator
from ..clocks import VirtualClock
from ..engine import Engine
from ..errors import BatchkitError, ConformanceError, InvariantError, SchedulerStalled
from ..params import SamplingParams
from ..preemption import Swap
from ..scheduler import Scheduler, Step
from ..schedulers import OrcaScheduler
from ..sequence import Sequence, Status
from ..simulate import SimulatedRunner
from ..types import KVGeometry, RequestOutput, SamplerOutput, ScheduledSequence, SchedulerOutput

__all__ = ["check_scheduler"]

MakeScheduler = Callable[..., Scheduler]

_VOCAB = 1000
_MODEL_LEN = 64


def check_scheduler(
    make: MakeScheduler,
    *,
    num_workloads: int = 25,
    seed: int = 0,
    max_wait_steps: int | None = None,
    step_s: float = 1e-3,
) -> None:
    """Run a policy over random workloads and raise at the first rule that it breaks.

    Prompts, outputs, arrivals, block sizes, pools, seats and budgets are random; pools are tight, some requests are
    aborted, some steps of the runner fail, and preempted sequences are recomputed or swapped. Requests have several
    samples or generate nothing, priorities, tenants, deadlines that can be kept or not, and length hints that are
    right, wrong, or missing; some prefixes are cached. The policy must serve every request to its end, in a bounded
    number of steps, by the verbs of its `Step` alone.

    Args:
        make: the policy's class, or a function ``(allocator, **options) -> Scheduler`` that passes the options of
            `SchedulerOptions` on.
        num_workloads: how many workloads, each over every allocator that the policy can work with.
        seed: of the workloads.
        max_wait_steps: the longest that a live sequence may go without a row while others have one, under a steady
            load of twice as many short requests as there are seats. None: starving is allowed.
        step_s: how many seconds a step takes on the simulated clock: for policies whose ageing reckons with time.

    Raises:
        ConformanceError: the rule and the step in one sentence, what happened in another, and below them the sequences
            that show it.
    """
    if isinstance(make, Scheduler):
        raise TypeError(f"check_scheduler makes many schedulers: give the class, {type(make).__name__}")
    name = getattr(make, "__name__", "the scheduler")
    with _failures_unlogged():
        for number in range(num_workloads):
            rng = random.Random(f"{seed}/{number}")
            for pool in ("paged", "paged with swap", "contiguous"):
                trial = _Trial(make, name, rng, f"workload {number} of seed {seed}", pool, step_s)
                if trial.possible:
                    trial.run_all()
    if max_wait_steps is not None:
        where = f"a steady load of seed {seed}"
        for pool in ("paged", "contiguous"):
            trial = _Trial(make, name, random.Random(seed), where, pool, step_s, steady=True)
            if trial.possible:
                trial.run_steady(max_wait_steps)


class _DeviceFailure(OSError):
    """What `_FlakyRunner` raises."""


@contextmanager
def _failures_unlogged() -> Iterator[None]:
    """Keep the engine's warnings about failures that are meant from the user's screen, and no others."""

    def is_shown(record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], _DeviceFailure))

    logger = logging.getLogger("batchkit")
    logger.addFilter(is_shown)
    try:
        yield
    finally:
        logger.removeFilter(is_shown)


@dataclass(frozen=True, slots=True)
class _Job:
    prompt: tuple[int, ...]
    params: SamplingParams
    arrival: float  # in steps
    due: float | None  # in steps after the arrival
    hint: int | None
    metadata: Mapping[str, Any]


class _FlakyRunner(SimulatedRunner):
    """Fails before, in the middle of, or after a step now and then, but never twice in a row; asserts rules of rows."""

    def __init__(
        self, geometry: KVGeometry, clock: VirtualClock, rng: random.Random, rate: float, step_s: float
    ) -> None:
        super().__init__(geometry, clock=clock, cost=lambda out: step_s)
        self._rng = rng
        self._rate = rate
        self._failed = False
        self.last: SchedulerOutput | None = None

    @override
    def execute(self, out: SchedulerOutput) -> SamplerOutput:
        self.last = out
        self._failed = not self._failed and self._rng.random() < self._rate
        if self._failed:
            done = self._rng.randint(0, len(out.rows))
            for row in out.rows[:done]:
                self._row(row)
            raise _DeviceFailure(f"the device failed after {done} of {len(out.rows)} rows")
        return super().execute(out)


class _Trial:
    """One policy over one pool."""

    def __init__(
        self,
        make: MakeScheduler,
        name: str,
        rng: random.Random,
        where: str,
        pool: str,
        step_s: float,
        *,
        steady: bool = False,
    ) -> None:
        self.name, self.rng, self.where, self.pool, self.step_s = name, rng, where, pool, step_s
        self.steps = 0
        self.planned: Step | None = None
        size = rng.choice([1, 2, 4, 8])
        longest = 16 if steady else _MODEL_LEN // 2
        self.jobs = [self._job(longest, steady) for _ in range(rng.randint(1, 16))]
        need = -(-(2 * longest) // size)
        blocks = need * 4 if steady else need + rng.choice([0, 0, 1, 2, need, 2 * need])
        host = rng.choice([1, 2, blocks]) if pool == "paged with swap" else 0
        seats = min(blocks, 8 if steady else rng.choice([1, 2, 4, 8]))
        budget = seats + rng.choice([0, 1, 4, 8, 64])
        allocator: BlockAllocator = ContiguousAllocator(blocks, size)
        if pool != "contiguous":
            allocator = PagedAllocator(blocks, size, prefix_caching=rng.random() < 0.3)
        options: dict[str, Any] = {
            "max_model_len": _MODEL_LEN,
            "max_num_seqs": seats,
            "max_tokens_per_step": budget,
            "preemption": Swap(PagedAllocator(host, size)) if host else None,
        }
        self.possible = True
        try:
            self.scheduler = make(allocator, **options)
        except ValueError:
            if pool != "contiguous":
                raise
            self.possible = False  # a policy that lets tables grow says so
            return
        self.clock = VirtualClock()
        geometry = KVGeometry(
            num_blocks=blocks, block_size=size, host_blocks=host, max_model_len=_MODEL_LEN, vocab_size=_VOCAB
        )
        self.runner = _FlakyRunner(geometry, self.clock, rng, 0.0 if steady else rng.choice([0.0, 0.1]), step_s)
        self.engine = Engine(self.runner, self.scheduler, clock=self.clock)
        self.abort_rate = 0.0 if steady else rng.choice([0.0, 0.0, 0.02])
        self.seats, self.budget = seats, budget
        self._audit_schedule()

    def _job(self, longest: int, steady: bool) -> _Job:
        rng = self.rng
        start, length = rng.choice([0, rng.randrange(_VOCAB)]), rng.randint(1, longest)
        prompt = tuple((start + i * (1 + start % 7)) % _VOCAB for i in range(length))  # some begin in the same way
        max_tokens = rng.randint(1, longest)
        params = SamplingParams(max_tokens=max_tokens, temperature=0)
        if not steady:
            n, most = rng.choice([(1, max_tokens)] * 3 + [(2, max_tokens), (4, max_tokens), (1, 0)])
            params = SamplingParams(n=n, max_tokens=most, temperature=0)
        return _Job(
            prompt,
            params,
            arrival=rng.random() * 50,
            due=rng.choice([None, -10.0, 2.0 * max_tokens, 100.0]),
            hint=rng.choice([None, max_tokens, max_tokens, 1, rng.randint(1, longest), 3 * longest, 0]),
            metadata=rng.choice([{}, {"tenant": "a"}, {"tenant": "a"}, {"tenant": 2}]),
        )

    def _add(self, job: _Job, name: str | None = None) -> None:
        """Add a request; one without a name arrives now."""
        arrival = self.clock() if name is None else job.arrival * self.step_s
        self.engine.add_request(
            job.prompt,
            job.params,
            request_id=name,
            arrival=arrival,
            deadline=None if job.due is None else arrival + job.due * self.step_s,
            length_hint=job.hint,
            priority=len(job.prompt) % 3,
            metadata=job.metadata,
        )

    # ------------------------------------------------------------------------------- what is said of a broken rule

    def broken(self, rule: str, what: str, show: Iterable[Sequence] = ()) -> ConformanceError:
        """The error: `what` is a sentence about this step, `show` those it is about; by default the first ones."""
        waiting, running = list(self.scheduler.waiting), list(self.scheduler.running)
        shown = list(show) or running[:3] + waiting[:3]
        allocator = self.scheduler.allocator
        rows = {row.seq_id: row for row in (self.runner.last.rows if self.runner.last else ())}
        lines = [
            f"{len(running)} running, {len(waiting)} waiting; {allocator.num_free_blocks} of {allocator.num_blocks} "
            f"blocks of {allocator.block_size} tokens free; {self.seats} seats; {self.budget} tokens a step",
            *(self._line(seq, rows.get(seq.id)) for seq in shown[:6]),
        ]
        if not show and len(shown) < len(running) + len(waiting):
            lines.append(f"and {len(running) + len(waiting) - len(shown)} more")
        lines.append(f"in {self.where}, over a pool that is {self.pool}")
        return ConformanceError(self.name, rule, "\n  ".join([f"{what}.", *lines]), f"in step {self.steps}")

    def _line(self, seq: Sequence, row: ScheduledSequence | None) -> str:
        return (
            f"request {seq.request.id!r}: {seq.status.value}, {seq.num_computed} of {seq.num_tokens} tokens computed, "
            f"{len(self.scheduler.allocator.table(seq.id))} blocks"
            f"{f', preempted {seq.num_preemptions} times' if seq.num_preemptions else ''}"
            f"{f', its last row: {row.num_tokens} tokens from {row.start}' if row else ''}"
        )

    @property
    def live(self) -> list[Sequence]:
        return [*self.scheduler.running, *self.scheduler.waiting]

    def _plain(self, error: Exception) -> tuple[str, list[Sequence]]:
        """An error's message with sequences by the names of their requests, and those sequences."""
        message = str(error).partition("; waiting [")[0]  # what follows are whole queues
        named = [seq for seq in self.live if repr(seq) in message]
        for seq in named:
            message = message.replace(repr(seq), f"request {seq.request.id!r}")
        return message[:1].upper() + message[1:], named

    # ------------------------------------------------------------------------------- the whole workload

    def run_all(self) -> None:
        engine, rng = self.engine, self.rng
        todo = sorted(range(len(self.jobs)), key=lambda i: self.jobs[i].arrival)
        finals: dict[str, RequestOutput] = {}
        aborted: set[str] = set()
        streamed: dict[tuple[str, int], list[int]] = {}
        # Served one by one, with a step for each token and each piece of a prompt, twice for failures, and then some.
        alone = sum(job.params.n * (len(job.prompt) + (job.params.max_tokens or 0)) for job in self.jobs)
        bound = 200 + 20 * alone
        while todo or engine.has_unfinished():
            while todo and self.jobs[todo[0]].arrival * self.step_s <= self.clock():
                index = todo.pop(0)
                self._add(self.jobs[index], str(index))
            arrival = self.jobs[todo[0]].arrival * self.step_s if todo else None
            if not engine.has_unfinished():
                assert arrival is not None
                self.clock.sleep_until(arrival)
                continue
            for output in self._step():
                for sample in output.outputs:
                    streamed.setdefault((output.request_id, sample.index), []).extend(sample.new_token_ids)
                if output.finished:
                    if output.request_id in finals:
                        raise self.broken(
                            "a request has exactly one final output", f"Request {output.request_id} has two"
                        )
                    finals[output.request_id] = output
            engine.wait(arrival)
            if self.abort_rate and rng.random() < self.abort_rate:
                victim = str(rng.randrange(len(self.jobs)))
                if engine.abort(victim):
                    aborted.add(victim)
            if self.steps > bound:
                left = sorted(self.live, key=lambda seq: -seq.num_preemptions)
                raise self.broken(
                    f"a workload that takes {alone} steps one by one ends within {bound}",
                    f"There are {len(left)} requests left, {self.scheduler.num_held} of them held, and "
                    f"{left[0].request.id!r} was preempted {left[0].num_preemptions} times",
                    left[:3],
                )
        self._ended(finals, aborted, streamed)

    def _ended(
        self, finals: dict[str, RequestOutput], aborted: set[str], streamed: dict[tuple[str, int], list[int]]
    ) -> None:
        for index, job in enumerate(self.jobs):
            final = finals.get(str(index))
            if final is None:
                raise self.broken("every request gets a final output", f"Request {index} has none")
            tokens = [sample.token_ids for sample in final.outputs]
            if [tuple(streamed[str(index), sample.index]) for sample in final.outputs] != tokens:
                raise self.broken("what is delivered adds up to the final output", f"That of request {index} does not")
            if str(index) in aborted:
                continue
            want = self._alone(job)
            if tokens != want:
                raise self.broken(
                    "a request gets the tokens that it gets alone",
                    f"Request {index} ended by {final.finish_reason} ({final.error}) with {tokens} in place of {want}",
                )
        allocator, host = self.scheduler.allocator, getattr(self.scheduler.preemption, "host", None)
        for pool in (allocator, host):
            if isinstance(pool, BlockAllocator) and pool.num_free_blocks != pool.num_blocks:
                raise self.broken(
                    "after the last request every block is free",
                    f"Only {pool.num_free_blocks} of {pool.num_blocks} are",
                )
        self.engine.close()

    def _alone(self, job: _Job) -> list[tuple[int, ...]]:
        geometry = KVGeometry(num_blocks=_MODEL_LEN, block_size=1, max_model_len=_MODEL_LEN, vocab_size=_VOCAB)
        engine = Engine(SimulatedRunner(geometry), OrcaScheduler(PagedAllocator(_MODEL_LEN, 1)))
        return [sample.token_ids for sample in engine.generate([job.prompt], job.params)[0].outputs]

    # ------------------------------------------------------------------------------- a steady load

    def run_steady(self, max_wait_steps: int) -> None:
        """Keep twice as many requests alive as there are seats; nobody may go without a row for too long."""
        engine, scheduler = self.engine, self.scheduler
        last_row: dict[int, int] = {}
        live = 0
        for _ in range(4 * max_wait_steps + 50):
            while live < 2 * self.seats:
                self._add(self._job(16, steady=True))
                live += 1
            self.runner.last = None
            live -= sum(output.finished for output in self._step())
            engine.wait()
            for queue in (scheduler.waiting, scheduler.running):
                for seq in queue:
                    last_row.setdefault(seq.id, self.steps)
            computed: tuple[ScheduledSequence, ...] = self.runner.last.rows if self.runner.last else ()
            for row in computed:
                last_row[row.seq_id] = self.steps
            for queue in (scheduler.waiting, scheduler.running):
                for seq in queue:
                    waited = self.steps - last_row[seq.id]
                    if waited > max_wait_steps:
                        raise self.broken(
                            f"no live sequence goes without a row for more than {max_wait_steps} steps",
                            f"Request {seq.request.id!r} has gone without for {waited}",
                            [seq],
                        )

    # ------------------------------------------------------------------------------- one step

    def _step(self) -> list[RequestOutput]:
        self.steps += 1
        self.runner.last = None
        try:
            outputs = self.engine.step()
        except ConformanceError:
            raise
        except SchedulerStalled as stalled:
            refused = self.planned.refused if self.planned is not None else None
            raise self.broken(
                "with live work a step has a row or a later time to wait for",
                "Nobody was chosen and no time named; "
                + (f"the last refusal was for lack of {refused.value}" if refused else "Step.run refused nobody"),
            ) from stalled
        except InvariantError as error:
            raise self.broken("every row finds the KV that was written for it", *self._plain(error)) from error
        except BatchkitError as error:
            raise self.broken("a policy uses the verbs of its step as they are meant", *self._plain(error)) from error
        except Exception as error:
            raise self.broken("schedule does not raise", f"It raised {type(error).__name__}: {error}") from error
        self._check_rows()
        try:
            self.engine.check()
        except AssertionError as error:
            raise self.broken("the books balance after every step", *self._plain(error)) from error
        return outputs

    def _check_rows(self) -> None:
        out = self.runner.last
        if out is None:
            return
        ids = [row.seq_id for row in out.rows]
        if len(set(ids)) != len(ids):
            raise self.broken("no sequence has two rows in a step", f"The rows are of the sequences {ids}")
        if len(ids) > self.seats:
            raise self.broken("no more rows than seats", f"There are {len(ids)} rows and {self.seats} seats")
        tokens = sum(row.num_tokens for row in out.rows)
        if tokens > self.budget or tokens != out.num_tokens:
            raise self.broken("the rows keep to the token budget", f"They have {tokens}, {out.num_tokens} counted")
        gave_way = {eviction.seq_id for eviction in out.preempted} & set(ids)
        if gave_way:
            raise self.broken(
                "no sequence that gave way has a row in the same step",
                f"{len(gave_way)} have",
                [seq for seq in self.live if seq.id in gave_way],
            )

    # ------------------------------------------------------------------------------- behind the step's back

    def _audit_schedule(self) -> None:
        """Compare everything before and after the policy's own code with what its step recorded."""
        schedule = self.scheduler.schedule

        def audited(step: Step) -> None:
            self.planned = step
            before = _Snapshot(self.scheduler)
            schedule(step)
            changed = before.unexplained(_Snapshot(self.scheduler), step)
            if changed:
                raise self.broken("only the verbs of a step change queues, blocks and progress", *changed)

        self.scheduler.schedule = audited  # type: ignore[method-assign]


class _Snapshot:
    """All scheduling state at one time."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.waiting = list(scheduler.waiting)
        self.running = list(scheduler.running)
        self.copies = list(scheduler._copies)
        host = getattr(scheduler.preemption, "host", None)
        pools = [scheduler.allocator, host] if isinstance(host, BlockAllocator) else [scheduler.allocator]
        self.of = {
            seq.id: {
                "status": seq.status,
                "num_computed": seq.num_computed,
                "output": list(seq.output),
                "seat": seq.seat,
                "blocks": [tuple(pool.table(seq.id)) for pool in pools],
            }
            for seq in (*self.waiting, *self.running)
        }

    def unexplained(self, after: _Snapshot, step: Step) -> tuple[str, list[Sequence]] | None:
        """What differs between self and `after` beyond what `step` did, and of which sequences."""
        chosen = [seq for seq, *_ in step._chosen.values()]
        admitted = [seq for seq in chosen if self.of.get(seq.id, {}).get("status") is Status.WAITING]
        preempted = list(step._preempted)
        gone_in, gone_out = {seq.id for seq in admitted}, set(preempted)
        by_id = {seq.id: seq for seq in self.running}
        if any(seq_id not in by_id for seq_id in preempted):
            return "A sequence was preempted that did not run", []
        waiting = [by_id[i] for i in reversed(preempted)] + [s for s in self.waiting if s.id not in gone_in]
        running = [s for s in self.running if s.id not in gone_out] + admitted
        for queue, want, have in (("waiting", waiting, after.waiting), ("running", running, after.running)):
            if want != have:
                same = next((i for i, pair in enumerate(zip(want, have, strict=False)) if pair[0] != pair[1]), None)
                first = min(len(want), len(have)) if same is None else same
                return (
                    f"From place {first} the {queue} queue is {_names(have[first:])}, by the step's verbs it would be "
                    f"{_names(want[first:])}",
                    [*want[first : first + 1], *have[first : first + 1]],
                )
        if after.copies[: len(self.copies)] != self.copies:
            return "Copies that had not been made were dropped", []
        everybody = {seq.id: seq for seq in (*self.waiting, *self.running)}
        for seq_id, old in self.of.items():
            new, seq = after.of[seq_id], everybody[seq_id]
            # By its verbs a step moves a sequence and its blocks; what it has computed and said is the engine's.
            if seq_id in gone_out:
                may_change = {"status", "seat", "blocks", "num_computed"}
            elif seq_id in step._chosen:
                may_change = {"status", "seat", "blocks"} | ({"num_computed"} if seq_id in gone_in else set())
            else:
                may_change = set()
            for what, value in old.items():
                if what not in may_change and new[what] != value:
                    beside = ", which is not in the step," if seq_id not in step._chosen else ""
                    return f"The {what} of request {seq.request.id!r}{beside} went from {value} to {new[what]}", [seq]
        return None


def _names(queue: list[Sequence]) -> str:
    more = f" and {len(queue) - 4} more" if len(queue) > 4 else ""
    return f"[{', '.join(repr(seq.request.id) for seq in queue[:4])}]{more}"
