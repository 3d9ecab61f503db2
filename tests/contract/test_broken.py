"""The checks catch what they are for: parts that are broken in one way each."""

import itertools
import logging
import re

import pytest

from batchkit import (
    ChunkedPrefillScheduler,
    ConformanceError,
    ContiguousAllocator,
    KVGeometry,
    Logprob,
    PagedAllocator,
    RowResult,
    SamplerOutput,
    Scheduler,
    SimulatedRunner,
    Status,
)
from batchkit.testing import check_allocator, check_runner, check_scheduler

# ------------------------------------------------------------------------------------------ schedulers


class Sound(Scheduler):
    """First come first served; what the broken ones below start from."""

    chunked = True

    def schedule(self, step):
        for seq in self.running:
            step.run(seq, victims=self.victims(seq))
        self.admit(step)

    def admit(self, step):
        for seq in self.waiting:
            if not step.run(seq, reserve=seq.num_tokens):
                break


class ForgetsRunning(Sound):
    def schedule(self, step):
        self.admit(step)


class NeverAdmits(Sound):
    def admit(self, step):
        pass


class IgnoresFalse(Sound):
    """Takes it for granted that a running sequence gets its next block."""

    def schedule(self, step):
        for seq in self.running:
            step.run(seq)
        self.admit(step)


class RunsTwice(Sound):
    def schedule(self, step):
        super().schedule(step)
        for seq in self.running:
            step.run(seq)


class PreemptsWhatRuns(Sound):
    def schedule(self, step):
        super().schedule(step)
        for seq in list(self.running)[:1]:
            step.preempt(seq)


class Raises(Sound):
    def schedule(self, step):
        if len(self.running) > 2:
            raise KeyError("a bug")
        super().schedule(step)


class StarvesTheOldest(Sound):
    def admit(self, step):
        for seq in reversed(list(self.waiting)):
            if not step.run(seq, reserve=seq.num_tokens):
                break


class PreemptsForEver(Sound):
    """Lets those who cannot run together take turns, and each starts again from nothing."""

    def schedule(self, step):
        if self.waiting:
            for seq in self.running:
                step.preempt(seq)
        for seq in self.running:
            step.run(seq)
        for seq in self.waiting:
            step.run(seq, max_tokens=1)


class LetsNobodyLeave(Sound):
    def may_leave(self, seq):
        return False


class ReordersWaiting(Sound):
    def schedule(self, step):
        first = next(iter(self.waiting), None)
        if first is not None:
            self._waiting.remove(first)
            self._waiting.append(first)
        super().schedule(step)


class DropsWaiting(Sound):
    def schedule(self, step):
        super().schedule(step)
        for seq in list(self.waiting)[:1]:
            self._waiting.remove(seq)


class AdmitsByHand(Sound):
    def schedule(self, step):
        super().schedule(step)
        for seq in list(self.waiting)[:1]:
            self._waiting.remove(seq)
            self._running.append(seq)
            seq.status = Status.RUNNING


class FreesBlocks(Sound):
    def schedule(self, step):
        super().schedule(step)
        for seq in self.running:
            if seq not in step:
                self.allocator.free(seq.id)


class TakesBlocks(Sound):
    def schedule(self, step):
        super().schedule(step)
        self.allocator.grow(10**12, self.allocator.block_size)


class ChangesProgress(Sound):
    def schedule(self, step):
        for seq in self.running:
            seq.num_computed -= 1
        super().schedule(step)


class ChangesOutput(Sound):
    def schedule(self, step):
        for seq in self.running:
            if len(seq.output) > 2:
                seq.output[1] = 7
        super().schedule(step)


class ChangesSeats(Sound):
    def schedule(self, step):
        super().schedule(step)
        for seq in self.running:
            seq.seat = 0


class DropsCopies(Sound):
    """Loses the copies of a swapped sequence."""

    def schedule(self, step):
        super().schedule(step)
        self._copies.clear()


class TrustsHints(Sound):
    """Takes it for granted that every request has a hint, as the next two do of tenants and deadlines."""

    def admit(self, step):
        for seq in sorted(self.waiting, key=lambda seq: seq.request.length_hint):
            step.run(seq, reserve=seq.num_tokens)


class TrustsTenants(Sound):
    def admit(self, step):
        for seq in sorted(self.waiting, key=lambda seq: seq.request.metadata["tenant"]):
            step.run(seq, reserve=seq.num_tokens)


class TrustsDeadlines(Sound):
    def admit(self, step):
        for seq in sorted(self.waiting, key=lambda seq: seq.request.deadline):
            step.run(seq, reserve=seq.num_tokens)


BACK = "only the verbs of a step change queues, blocks and progress"
VERBS = "a policy uses the verbs of its step as they are meant"
STALL = "with live work a step has a row or a later time to wait for"

BROKEN = {
    ForgetsRunning: STALL,
    NeverAdmits: STALL,
    IgnoresFalse: STALL,
    RunsTwice: VERBS,
    PreemptsWhatRuns: VERBS,
    Raises: "schedule does not raise",
    PreemptsForEver: "ends within",
    LetsNobodyLeave: "ends within",
    ReordersWaiting: BACK,
    DropsWaiting: BACK,
    AdmitsByHand: BACK,
    FreesBlocks: BACK,
    TakesBlocks: "the books balance",
    ChangesProgress: BACK,
    ChangesOutput: BACK,
    ChangesSeats: "the books balance",
    DropsCopies: "finds the KV that was written for it",
    TrustsHints: "schedule does not raise",
    TrustsTenants: "schedule does not raise",
    TrustsDeadlines: "schedule does not raise",
}


def test_what_they_start_from_is_sound():
    check_scheduler(Sound, num_workloads=10, max_wait_steps=100)


# It takes as many steps as a workload may take.
SLOW = {PreemptsForEver: pytest.mark.slow}


@pytest.mark.parametrize("make", [pytest.param(m, marks=SLOW.get(m, ()), id=m.__name__) for m in BROKEN])
def test_a_broken_scheduler_is_caught(make):
    with pytest.raises(ConformanceError) as caught:
        check_scheduler(make)
    assert BROKEN[make] in caught.value.rule
    assert_short(str(caught.value), make.__name__)


def assert_short(message, name):
    """The rule and the step in the first sentence, what happened in the second, then a few lines of state."""
    first, *state = message.split("\n")
    assert re.match(rf"{name} breaks a rule in step \d+: [^.]+\. [A-Z]", first), first
    assert len(first) < 300 and len(state) <= 9 and max(map(len, state)) < 160
    assert "free" in state[0] and "of seed 0" in state[-1]
    assert "Sequence(" not in message


def test_a_message_says_what_happened_and_shows_whom_it_is_about():
    with pytest.raises(ConformanceError) as caught:
        check_scheduler(ChangesOutput)
    first, *state = str(caught.value).split("\n")
    name = re.search(r"The output of request '(\d+)' went from \[.*\] to \[\d+, 7, \d+\]", first)[1]
    assert [line for line in state if "request '" in line] == [state[1]]
    assert state[1].startswith(f"  request '{name}': running, ")


def test_a_stalled_policy_is_told_its_last_refusal():
    with pytest.raises(ConformanceError, match=r"Nobody was chosen and no time named; Step\.run refused nobody"):
        check_scheduler(ForgetsRunning)
    with pytest.raises(ConformanceError, match="the last refusal was for lack of blocks"):
        check_scheduler(IgnoresFalse)


def test_failures_that_are_meant_are_not_logged_and_all_else_is(caplog):
    logger = logging.getLogger("batchkit")

    class Warns(Sound):
        def schedule(self, step):
            logger.warning("its own")
            super().schedule(step)

    check_scheduler(Warns)
    assert {record.message for record in caplog.records} == {"its own"}
    with pytest.raises(ConformanceError):
        check_scheduler(ChangesOutput)
    assert not logger.filters


def test_the_clock_takes_the_seconds_of_a_step_that_were_asked_for():
    seen = []

    class Looks(Sound):
        def schedule(self, step):
            seen.append(step.now)
            super().schedule(step)

    check_scheduler(Looks, num_workloads=0, max_wait_steps=100, step_s=0.25)
    assert {after - before for before, after in itertools.pairwise(seen) if after > before} == {0.25}


def test_starving_is_caught_with_a_bound_and_allowed_without():
    check_scheduler(StarvesTheOldest, num_workloads=5)
    with pytest.raises(ConformanceError, match="no live sequence goes without a row for more than 100 ste") as caught:
        check_scheduler(StarvesTheOldest, num_workloads=1, max_wait_steps=100)
    assert_short(str(caught.value), "StarvesTheOldest")
    assert str(caught.value).count("request '") == 1  # only the one that starves is shown


def test_a_scheduler_that_cannot_be_made_says_why():
    def make(allocator, **options):
        return ChunkedPrefillScheduler(allocator, **{**options, "max_tokens_per_step": 0})

    with pytest.raises(ValueError, match="max_tokens_per_step must be at least 1, got 0"):
        check_scheduler(make)


# ------------------------------------------------------------------------------------------ allocators


class DoubleFrees(PagedAllocator):
    def free(self, seq_id):
        table = self.table(seq_id)
        super().free(seq_id)
        if len(table) > 2:
            self._free.append(table[0])

    def check(self):
        pass


class Leaks(PagedAllocator):
    def free(self, seq_id):
        if len(self.table(seq_id)) > 3:
            self._tables[seq_id] = self.table(seq_id)[1:]
        super().free(seq_id)

    def check(self):
        pass


class GrowsInPart(PagedAllocator):
    """Takes what there is before it says no."""

    def grow(self, seq_id, num_tokens, **more):
        done = super().grow(seq_id, num_tokens, **more)
        if done is None and self._free:
            self._tables[seq_id] = (*self.table(seq_id), self._free.pop())
        return done


class FitsTooMuch(PagedAllocator):
    def fits(self, seq_id, num_tokens, *, freeing=(), **more):
        return super().fits(seq_id, num_tokens, freeing=freeing, **more) or len(freeing) > 1


class IgnoresFragmentation(ContiguousAllocator):
    def fits(self, seq_id, num_tokens, *, reserve=0, freeing=(), **more):
        if len(self.table(seq_id)):
            return super().fits(seq_id, num_tokens, reserve=reserve, freeing=freeing, **more)
        back = sum(len(self.table(other)) for other in freeing)
        return self._blocks_for(num_tokens, reserve, 1, ()) <= self.num_free_blocks + back


class MovesBlocks(PagedAllocator):
    def grow(self, seq_id, num_tokens, **more):
        done = super().grow(seq_id, num_tokens, **more)
        if len(self.table(seq_id)) > 1:
            self._tables[seq_id] = self._tables[seq_id][::-1]
        return done


class NewTableEachTime(PagedAllocator):
    def table(self, seq_id, row=0):
        return list(super().table(seq_id))


class ForgetsReserve(PagedAllocator):
    def grow(self, seq_id, num_tokens, *, reserve=0, **more):
        return super().grow(seq_id, num_tokens, **more)


class TooShort(PagedAllocator):
    def _blocks_for(self, num_tokens, reserve, rows, hit):
        return max(1, super()._blocks_for(num_tokens, reserve, rows, hit) - 1)


class Caching(PagedAllocator):
    """What the ones below start from: they break what prefix caching promises."""

    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size, prefix_caching=True)

    def check(self):
        """The kit must find it out by itself."""


class PinsLate(Caching):
    """Evicts for what is new before it holds the hit."""

    def _make_room(self, hit, need):
        room = super()._make_room((), need)
        return room and super()._make_room(hit, 0)


class CountsHitsAsFree(Caching):
    """A hit that nobody holds is taken, and stays among the free ones."""

    def fits(self, seq_id, num_tokens, *, hit=(), freeing=(), reserve=0, **more):
        if not hit:
            return super().fits(seq_id, num_tokens, freeing=freeing, reserve=reserve, **more)
        back = sum(len(self.table(other)) for other in freeing)
        return self._blocks_for(num_tokens, reserve, 1, hit) - len(hit) <= self.num_free_blocks + back


class CountsSharersTwice(Caching):
    """A block that two hold counts twice when both give it back."""

    def fits(self, seq_id, num_tokens, *, hit=(), freeing=(), reserve=0, **more):
        if hit:
            return super().fits(seq_id, num_tokens, hit=hit, freeing=freeing, reserve=reserve, **more)
        back = sum(len(self.table(other)) for other in freeing)
        need = self._blocks_for(num_tokens, reserve, 1, hit) - len(self.table(seq_id))
        return need <= self.num_free_blocks + back


class FreesWhatOthersHold(Caching):
    def free(self, seq_id):
        self._shared.clear()
        super().free(seq_id)


class FindsWhatIsGone(Caching):
    """An evicted block stays in the index."""

    def _make_room(self, hit, need):
        stale = {salt: dict(root.children) for salt, root in self._index._roots.items()}
        room = super()._make_room(hit, need)
        for salt, root in self._index._roots.items():
            root.children = {**stale.get(salt, {}), **root.children}
        return room


class MixesSalts(Caching):
    """Tells no salt from an empty one."""

    def match(self, token_ids, limit, salt=None):
        return super().match(token_ids, limit, salt or None)

    def publish(self, seq_id, row, token_ids, num_computed, salt=None):
        super().publish(seq_id, row, token_ids, num_computed, salt or None)


class TakesHashesForTokens(Caching):
    """Looks at the sum of a block's tokens in place of the tokens."""

    def _summed(self, token_ids):
        size = self.block_size
        return [t for i in range(0, len(token_ids), size) for t in (sum(token_ids[i : i + size]), *[0] * (size - 1))]

    def match(self, token_ids, limit, salt=None):
        return super().match(self._summed(token_ids), limit, salt)

    def publish(self, seq_id, row, token_ids, num_computed, salt=None):
        super().publish(seq_id, row, self._summed(token_ids), num_computed, salt)


class ForgetsToPublish(Caching):
    """As if one path left it out."""

    def publish(self, seq_id, row, token_ids, num_computed, salt=None):
        if num_computed > self.block_size:
            super().publish(seq_id, row, token_ids, num_computed, salt)


class IgnoresTheLimit(Caching):
    def match(self, token_ids, limit, salt=None):
        return super().match(token_ids, len(token_ids), salt)


class ForgetsInPart(Caching):
    """Publishes again what was written before."""

    def forget(self):
        super().forget()
        self._index._outdated.clear()


class DropsItsHit(Caching):
    def grow(self, seq_id, num_tokens, *, hit=(), **more):
        return super().grow(seq_id, num_tokens, **more)


class RenamesACopy(Caching):
    """The old one keeps its table."""

    def rename(self, old, new):
        self._tables[new] = self._tables[old]


class CountsSharedBlocksOnce(Caching):
    @property
    def num_shares(self):
        return len(self._shared)


BROKEN_ALLOCATORS = {
    CountsSharedBlocksOnce: "num_shares counts",
    RenamesACopy: "rename moves a table",
    DoubleFrees: "add up to the pool",
    Leaks: "add up to the pool",
    GrowsInPart: "has changed nothing",
    FitsTooMuch: "fits is exact",
    IgnoresFragmentation: "fits is exact",
    MovesBlocks: "grows at its end",
    NewTableEachTime: "the same object",
    ForgetsReserve: "",  # fits and grow disagree before the reserve is asked for
    TooShort: "a table covers its tokens",
    PinsLate: "a block stands in a table once",
    CountsHitsAsFree: "fits is exact",
    CountsSharersTwice: "fits is exact",
    FreesWhatOthersHold: "num_shares counts",
    FindsWhatIsGone: "match finds only",
    MixesSalts: "match finds only",
    TakesHashesForTokens: "match finds only",
    ForgetsToPublish: "what is published is found",
    IgnoresTheLimit: "match keeps to its limit",
    ForgetsInPart: "match finds only",
    DropsItsHit: "",
}


@pytest.mark.parametrize("make", BROKEN_ALLOCATORS, ids=lambda make: make.__name__)
def test_a_broken_allocator_is_caught(make):
    if issubclass(make, Caching):
        check_allocator(Caching, num_workloads=3)
    with pytest.raises(ConformanceError) as caught:
        check_allocator(make)
    assert BROKEN_ALLOCATORS[make] in caught.value.rule
    assert "Verb " in str(caught.value)


# ------------------------------------------------------------------------------------------ runners

GEOMETRY = KVGeometry(num_blocks=32, block_size=4, host_blocks=16, max_model_len=100, vocab_size=50)


class WrongOrder(SimulatedRunner):
    def execute(self, out):
        return SamplerOutput(tuple(sorted(super().execute(out).rows, key=lambda row: row.token_ids)))


class RemembersSteps(SimulatedRunner):
    """Its result depends on an earlier step."""

    last = 0

    def execute(self, out):
        rows = tuple(
            RowResult(tuple((token + self.last) % 50 for token in row.token_ids)) for row in super().execute(out).rows
        )
        self.last = sum(sum(row.token_ids) for row in rows)
        return SamplerOutput(rows)


class SamplesByBatch(SimulatedRunner):
    """Its result depends on the neighbours."""

    def execute(self, out):
        got = super().execute(out).rows
        return SamplerOutput(tuple(RowResult(tuple((t + len(got)) % 50 for t in row.token_ids)) for row in got))


class NeedsItsCache(SimulatedRunner):
    def drop_caches(self):
        for known in self._prefixes.values():
            known[:] = [0] * len(known)


class SamplesEveryRow(SimulatedRunner):
    def execute(self, out):
        return SamplerOutput(tuple(RowResult(row.token_ids or (1,)) for row in super().execute(out).rows))


class LosesARow(SimulatedRunner):
    def execute(self, out):
        return SamplerOutput(super().execute(out).rows[:3])


class SwapsNothingOut(SimulatedRunner):
    def copy_blocks(self, copies):
        super().copy_blocks([copy for copy in copies if copy.kind != "swap_out"])


class WritesIntoOutput(SimulatedRunner):
    def execute(self, out):
        got = super().execute(out)
        for row, result in zip(out.rows, got.rows, strict=True):
            row.output_ids.extend(result.token_ids)
        return got


class ScoresNothingInChunks(SimulatedRunner):
    """Gives a prompt's scores only where it samples."""

    def execute(self, out):
        rows = super().execute(out).rows
        return SamplerOutput(tuple(r if r.token_ids else r._replace(prompt_logprobs={}) for r in rows))


class ScoresOneOff(SimulatedRunner):
    def execute(self, out):
        def moved(scores):
            return scores and {position - 1: entry for position, entry in scores.items()}

        rows = super().execute(out).rows
        return SamplerOutput(tuple(r._replace(prompt_logprobs=moved(r.prompt_logprobs)) for r in rows))


class ScoresAnother(SimulatedRunner):
    def execute(self, out):
        rows = super().execute(out).rows
        return SamplerOutput(tuple(r._replace(logprobs=r.logprobs and ({0: Logprob(0.0, 1)},)) for r in rows))


class ScoresUnasked(SimulatedRunner):
    def execute(self, out):
        rows = super().execute(out).rows
        return SamplerOutput(tuple(r._replace(logprobs=tuple({t: Logprob(0.0, 1)} for t in r.token_ids)) for r in rows))


BROKEN_RUNNERS = {
    ScoresNothingInChunks: "a row over positions",
    ScoresOneOff: "a row over positions",
    ScoresAnother: "log-probabilities are one entry for each token",
    ScoresUnasked: "log-probabilities are one entry for each token",
    WrongOrder: "results come in the order of the rows|a row gives one token if it samples",
    RemembersSteps: "the same rows executed twice give the same result",
    SamplesByBatch: "a request gets the tokens that it gets alone",
    NeedsItsCache: ".",
    SamplesEveryRow: "a row gives one token if it samples, and else none",
    LosesARow: "there is one result for each row",
    WritesIntoOutput: "a runner changes nothing that it is given",
}


@pytest.mark.parametrize("make", BROKEN_RUNNERS, ids=lambda make: make.__name__)
def test_a_broken_runner_is_caught(make):
    with pytest.raises(AssertionError, match=BROKEN_RUNNERS[make]):
        check_runner(lambda: make(GEOMETRY))


def test_a_runner_that_loses_swapped_blocks_is_caught():
    with pytest.raises(AssertionError, match="reads position"):
        check_runner(lambda: SwapsNothingOut(GEOMETRY))


def test_a_scheduler_in_place_of_its_class():
    with pytest.raises(TypeError, match="give the class, Sound"):
        check_scheduler(Sound(PagedAllocator(4, 4)))
