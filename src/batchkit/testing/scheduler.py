"""`check_scheduler`: a policy under the real engine, over tight pools, with every invariant asserted in every step."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from ..allocators import BlockAllocator, ContiguousAllocator, PagedAllocator
from ..clocks import VirtualClock
from ..engine import Engine
from ..errors import BatchkitError, ConformanceError, SchedulerStalled
from ..preemption import Swap
from ..scheduler import Scheduler, Step
from ..schedulers import OrcaScheduler
from ..sequence import Sequence, Status
from ..simulate import SimulatedRunner
from ..types import KVGeometry, RequestOutput, SamplerOutput, SamplingParams, ScheduledSequence, SchedulerOutput

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
) -> None:
    """Run a policy over random workloads and raise at the first rule that it breaks.

    Prompts, outputs, arrivals, block sizes, pools, seats and budgets are random; pools are tight, some requests are
    aborted, some steps of the runner fail, and preempted sequences are recomputed or swapped. The policy must serve
    every request to its end, in a bounded number of steps, by the verbs of its `Step` alone.

    Args:
        make: the policy's class, or a function ``(allocator, **options) -> Scheduler`` that passes the options of
            `SchedulerOptions` on.
        num_workloads: how many workloads, each over every allocator that the policy can work with.
        seed: of the workloads.
        max_wait_steps: the longest that a live sequence may go without a row while others have one, under a steady
            load of twice as many short requests as there are seats. None: starving is allowed, as in shortest-first.

    Raises:
        ConformanceError: with the rule, the step and the rows that show it.
    """
    name = getattr(make, "__name__", "the scheduler")
    for number in range(num_workloads):
        rng = random.Random(f"{seed}/{number}")
        for pool in ("paged", "paged with swap", "contiguous"):
            trial = _Trial(make, name, rng, f"workload {number} of seed {seed}, {pool}", pool)
            if trial.possible:
                trial.run_all()
    if max_wait_steps is not None:
        for pool in ("paged", "contiguous"):
            trial = _Trial(make, name, random.Random(seed), f"a steady load, {pool}", pool, steady=True)
            if trial.possible:
                trial.run_steady(max_wait_steps)


@dataclass(frozen=True, slots=True)
class _Job:
    prompt: tuple[int, ...]
    max_tokens: int
    arrival: float


class _FlakyRunner(SimulatedRunner):
    """Fails before, in the middle of, or after a step now and then, but never twice in a row; asserts rules of rows."""

    def __init__(self, geometry: KVGeometry, clock: VirtualClock, rng: random.Random, rate: float) -> None:
        super().__init__(geometry, clock=clock)
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
            raise OSError(f"the device failed after {done} of {len(out.rows)} rows")
        return super().execute(out)


class _Trial:
    """One policy over one pool."""

    def __init__(
        self, make: MakeScheduler, name: str, rng: random.Random, where: str, pool: str, *, steady: bool = False
    ) -> None:
        self.name, self.rng, self.where = name, rng, where
        self.steps = 0
        size = rng.choice([1, 2, 4, 8])
        longest = 16 if steady else _MODEL_LEN // 2
        self.jobs = [self._job(longest) for _ in range(rng.randint(1, 16))]
        need = -(-(2 * longest) // size)
        blocks = need * 4 if steady else need + rng.choice([0, 0, 1, 2, need, 2 * need])
        host = rng.choice([1, 2, blocks]) if pool == "paged with swap" else 0
        seats = min(blocks, 8 if steady else rng.choice([1, 2, 4, 8]))
        budget = seats + rng.choice([0, 1, 4, 8, 64])
        allocator: BlockAllocator
        allocator = ContiguousAllocator(blocks, size) if pool == "contiguous" else PagedAllocator(blocks, size)
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
        self.runner = _FlakyRunner(geometry, self.clock, rng, 0.0 if steady else rng.choice([0.0, 0.1]))
        self.engine = Engine(self.runner, self.scheduler, clock=self.clock)
        self.abort_rate = 0.0 if steady else rng.choice([0.0, 0.0, 0.02])
        self.seats, self.budget = seats, budget
        self._audit_schedule()

    def _job(self, longest: int) -> _Job:
        prompt = tuple(self.rng.randrange(_VOCAB) for _ in range(self.rng.randint(1, longest)))
        return _Job(prompt, self.rng.randint(1, longest), self.rng.random() * 0.05)

    def broken(self, rule: str, details: str = "") -> ConformanceError:
        rows = ", ".join(
            f"{row.request.id}: {row.num_tokens} tokens from {row.start}"
            for row in (self.runner.last.rows[:6] if self.runner.last else ())
        )
        state = (
            f"Step {self.steps} of {self.where} ({self.scheduler.allocator.num_blocks} blocks of "
            f"{self.scheduler.allocator.block_size}, {self.seats} seats, {self.budget} tokens a step). "
            f"{details}{'; ' if details else ''}last rows computed: {rows or 'none'}; waiting: "
            f"{self.scheduler.waiting!r}; running: {self.scheduler.running!r}"
        )
        return ConformanceError(self.name, rule, state)

    # ------------------------------------------------------------------------------- the whole workload

    def run_all(self) -> None:
        engine, rng = self.engine, self.rng
        todo = sorted(range(len(self.jobs)), key=lambda i: self.jobs[i].arrival)
        finals: dict[str, RequestOutput] = {}
        aborted: set[str] = set()
        streamed: dict[str, list[int]] = {}
        # Served one by one, with a step for each token and each piece of a prompt, twice for failures, and then some.
        alone = sum(len(job.prompt) + job.max_tokens for job in self.jobs)
        bound = 200 + 20 * alone
        while todo or engine.has_unfinished():
            while todo and self.jobs[todo[0]].arrival <= self.clock():
                index = todo.pop(0)
                job = self.jobs[index]
                engine.add_request(
                    job.prompt,
                    SamplingParams(max_tokens=job.max_tokens, temperature=0),
                    request_id=str(index),
                    arrival=job.arrival,
                    length_hint=job.max_tokens,
                    priority=index % 3,
                    metadata={"tenant": f"tenant-{index % 2}"},
                )
            arrival = self.jobs[todo[0]].arrival if todo else None
            if not engine.has_unfinished():
                assert arrival is not None
                self.clock.sleep_until(arrival)
                continue
            for output in self._step():
                streamed.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finished:
                    if output.request_id in finals:
                        raise self.broken("a request has exactly one final output", f"{output.request_id} has two")
                    finals[output.request_id] = output
            engine.wait(arrival)
            if self.abort_rate and rng.random() < self.abort_rate:
                victim = str(rng.randrange(len(self.jobs)))
                if engine.abort(victim):
                    aborted.add(victim)
            if self.steps > bound:
                counts = [
                    f"{seq.request.id} preempted {seq.num_preemptions} times"
                    for queue in (self.scheduler.waiting, self.scheduler.running)
                    for seq in queue
                ]
                raise self.broken(f"a workload that needs {alone} steps at most ends within {bound}", ", ".join(counts))
        self._ended(finals, aborted, streamed)

    def _ended(self, finals: dict[str, RequestOutput], aborted: set[str], streamed: dict[str, list[int]]) -> None:
        for index, job in enumerate(self.jobs):
            final = finals.get(str(index))
            if final is None:
                raise self.broken("every request gets a final output", f"request {index} has none")
            if tuple(streamed[str(index)]) != final.token_ids:
                raise self.broken("what is delivered adds up to the final output", f"request {index}")
            if str(index) in aborted:
                continue
            want = self._alone(job)
            if final.token_ids != want:
                raise self.broken(
                    "a request gets the tokens that it gets alone",
                    f"request {index} ended by {final.finish_reason} ({final.error}) with {final.token_ids}, "
                    f"not {want}",
                )
        allocator, host = self.scheduler.allocator, getattr(self.scheduler.preemption, "host", None)
        for pool in (allocator, host):
            if isinstance(pool, BlockAllocator) and pool.num_free_blocks != pool.num_blocks:
                raise self.broken(
                    "after the last request every block is free", f"{pool.num_free_blocks} of {pool.num_blocks} are"
                )
        self.engine.close()

    def _alone(self, job: _Job) -> tuple[int, ...]:
        geometry = KVGeometry(num_blocks=_MODEL_LEN, block_size=1, max_model_len=_MODEL_LEN, vocab_size=_VOCAB)
        engine = Engine(SimulatedRunner(geometry), OrcaScheduler(PagedAllocator(_MODEL_LEN, 1)))
        return engine.generate([job.prompt], SamplingParams(max_tokens=job.max_tokens, temperature=0))[0].token_ids

    # ------------------------------------------------------------------------------- a steady load

    def run_steady(self, max_wait_steps: int) -> None:
        """Keep twice as many requests alive as there are seats; nobody may go without a row for too long."""
        engine, scheduler = self.engine, self.scheduler
        last_row: dict[int, int] = {}
        live = 0
        for _ in range(4 * max_wait_steps + 50):
            while live < 2 * self.seats:
                job = self._job(16)
                engine.add_request(
                    job.prompt,
                    SamplingParams(max_tokens=job.max_tokens, temperature=0),
                    length_hint=job.max_tokens,
                    metadata={"tenant": f"tenant-{live % 2}"},
                )
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
                            f"{seq!r} went without for {waited} steps",
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
            raise self.broken("with live work a step has a row or a later time to wait for", str(stalled)) from stalled
        except BatchkitError as error:
            raise self.broken("a policy uses the verbs of its step as they are meant", str(error)) from error
        except Exception as error:
            raise self.broken("schedule does not raise", f"{type(error).__name__}: {error}") from error
        self._check_rows()
        try:
            self.engine.check()
        except AssertionError as error:
            raise self.broken("the books balance after every step", str(error)) from error
        return outputs

    def _check_rows(self) -> None:
        out = self.runner.last
        if out is None:
            return
        ids = [row.seq_id for row in out.rows]
        if len(set(ids)) != len(ids):
            raise self.broken("no sequence has two rows in a step", f"rows of sequences {ids}")
        if len(ids) > self.seats:
            raise self.broken("no more rows than seats", f"{len(ids)} rows, {self.seats} seats")
        tokens = sum(row.num_tokens for row in out.rows)
        if tokens > self.budget or tokens != out.num_tokens:
            raise self.broken("the rows keep to the token budget", f"{tokens} tokens, {out.num_tokens} counted")
        gave_way = {eviction.seq_id for eviction in out.preempted} & set(ids)
        if gave_way:
            raise self.broken("no sequence that gave way has a row in the same step", f"sequences {sorted(gave_way)}")

    # ------------------------------------------------------------------------------- behind the step's back

    def _audit_schedule(self) -> None:
        """Compare everything before and after the policy's own code with what its step recorded."""
        schedule = self.scheduler.schedule

        def audited(step: Step) -> None:
            before = _Snapshot(self.scheduler)
            schedule(step)
            changed = before.unexplained(_Snapshot(self.scheduler), step)
            if changed:
                raise self.broken("only the verbs of a step change queues, blocks and progress", changed)

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

    def unexplained(self, after: _Snapshot, step: Step) -> str:
        """What differs between self and `after` beyond what `step` did; empty if nothing."""
        chosen = [seq for seq, _, _ in step._chosen.values()]
        admitted = [seq for seq in chosen if self.of.get(seq.id, {}).get("status") is Status.WAITING]
        preempted = list(step._preempted)
        gone_in, gone_out = {seq.id for seq in admitted}, set(preempted)
        by_id = {seq.id: seq for seq in self.running}
        if any(seq_id not in by_id for seq_id in preempted):
            return "a sequence was preempted that did not run"
        waiting = [by_id[i] for i in reversed(preempted)] + [s for s in self.waiting if s.id not in gone_in]
        running = [s for s in self.running if s.id not in gone_out] + admitted
        for queue, want, have in (("waiting", waiting, after.waiting), ("running", running, after.running)):
            if want != have:
                return f"the {queue} queue is {_ids(have)}, by the step's verbs it would be {_ids(want)}"
        if after.copies[: len(self.copies)] != self.copies:
            return "copies that had not been made were dropped"
        for seq_id, old in self.of.items():
            new = after.of[seq_id]
            if new["output"] != old["output"]:
                return f"the output of sequence {seq_id} changed from {old['output']} to {new['output']}"
            if seq_id in gone_out:
                continue
            if seq_id in step._chosen:
                if new["num_computed"] != old["num_computed"] and seq_id not in gone_in:
                    return (
                        f"num_computed of sequence {seq_id} changed from {old['num_computed']} to {new['num_computed']}"
                    )
                continue
            for what, value in old.items():
                if new[what] != value:
                    return f"{what} of sequence {seq_id}, which is not in the step, changed from {value} to {new[what]}"
        return ""


def _ids(queue: list[Sequence]) -> list[int]:
    return [seq.id for seq in queue]
