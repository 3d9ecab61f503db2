"""OVMS-4428: thousands of steps of everything that may happen, at a pool that is always too small.

Requests come with several samples, scores, salts, priorities and timeouts; they are aborted, preempted, and hit by
faults of the runner before, within and after a step and in a copy. The books are checked after every step (by `Rig`),
every slot that is read is checked by the simulated runner, and whoever ends by itself has what it gets alone.
"""

import random
from contextlib import suppress

import pytest

from batchkit import (
    ChunkedPrefillScheduler,
    EngineFailed,
    FairScheduler,
    KVLost,
    OrcaScheduler,
    PagedScheduler,
    PriorityScheduler,
    RunnerOutOfMemory,
    Scheduler,
    ShortestRemainingScheduler,
    StaticScheduler,
    WaitingServedScheduler,
)
from unit.helpers import Rig, tokens

STEPS = 2000


class Chaotic(Scheduler):
    """Runs anybody in any order with any victims, preempts now and then, and sometimes raises."""

    chunked = True
    rng = random.Random(0)

    def schedule(self, step) -> None:
        rng = self.rng
        anybody = [*self.running, *self.waiting]
        rng.shuffle(anybody)
        for seq in anybody:
            if seq in step:
                continue
            most, reserve = rng.choice([None, 1, 3]), rng.choice([0, seq.num_tokens])
            step.run(seq, max_tokens=most, reserve=reserve, victims=rng.sample(anybody, len(anybody)))
            if rng.random() < 0.02:
                for victim in [s for s in self.running if s not in step and s.status.value == "running"][:1]:
                    step.preempt(victim)
            if rng.random() < 0.01:
                raise ZeroDivisionError("a bug of the policy")
        if not step:
            step.wait_until(step.now + 1)


POLICIES = [
    Chaotic,
    PagedScheduler,
    ChunkedPrefillScheduler,
    PriorityScheduler,
    FairScheduler,
    ShortestRemainingScheduler,
    StaticScheduler,
    OrcaScheduler,
    WaitingServedScheduler,
]


class Faults:
    """A runner's faults, now and then; at most so many in a row that the engine does not give up."""

    def __init__(self, rig: Rig, rng: random.Random) -> None:
        self.rig, self.rng = rig, rng
        self.num = 0
        rig.runner.before, rig.runner.after, rig.runner.before_copy = self.before, self.after, self.in_copy

    def happens(self, chance: float) -> bool:
        if self.rng.random() >= chance:
            return False
        self.num += 1
        return True

    def before(self, out) -> None:
        if self.happens(0.02):
            self.rig.runner.compute(out, self.rng.randint(0, len(out.rows)))  # some rows are written
            if self.rng.random() < 0.2:
                self.rig.runner.lose_kv()
                raise KVLost("the device was reset")
            raise self.rng.choice([OSError("a fault"), RunnerOutOfMemory("too large")])

    def after(self, out, got):
        if self.happens(0.02):
            raise OSError("a fault once all is written")
        return got

    def in_copy(self, copies) -> None:
        if self.happens(0.02):
            raise OSError("a fault in a copy")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_ovms_4428_books_balance_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    policy = POLICIES[seed % len(POLICIES)]
    Chaotic.rng = random.Random(seed)
    size = rng.choice([1, 2, 4])
    rig = Rig(
        policy,
        blocks=28 // size,
        block_size=size,
        host_blocks=rng.choice([0, 8, 80]),
        seats=rng.randint(2, 6),
        budget=rng.choice([6, 9, 40]),
        eos=(3, 30, 60),
        vocab=100,
        prefix_caching=rng.random() < 0.7,
    )
    faults = Faults(rig, rng)
    num_added = 0
    ended_by_chance = {"abort", "timeout", "error"}
    for _ in range(STEPS):
        if rng.random() < 0.4 and len(rig.scheduler.waiting) < 8:
            num_added += 1
            add(rig, rng, str(num_added))
        if rng.random() < 0.2 and rig.jobs:
            rig.engine.abort(rng.choice([*rig.outputs]))
        with suppress(ZeroDivisionError, EngineFailed):
            rig.step()
        rig.engine.wait()
        for name in [name for name, life in rig.outputs.items() if life and life[-1].finished]:
            if not ended_by_chance & {c.finish_reason for c in rig.outputs[name][-1].outputs}:
                rig.assert_as_alone(name)
            del rig.outputs[name], rig.jobs[name]
    rig.runner.before = rig.runner.after = rig.runner.before_copy = None
    Chaotic.rng = random.Random(seed)
    for _ in range(20 * STEPS):
        if not rig.engine.has_unfinished():
            break
        with suppress(ZeroDivisionError):
            rig.step()
        rig.engine.wait()
    rig.assert_empty()
    assert set(rig.finals) == set(rig.jobs)
    assert num_added > 100 and faults.num > 20


def add(rig: Rig, rng: random.Random, name: str) -> None:
    prompt = tokens(rng.choice("abc"), rng.randint(1, 12), 100)
    options = {
        "n": rng.choice([1, 1, 2, 3]),
        "max_tokens": rng.randint(1, 12),
        "logprobs": rng.choice([None, 0]),
        "prompt_logprobs": rng.choice([None, None, 0]),
    }
    if rng.random() < 0.1:
        options.update(n=1, max_tokens=0)
    rig.add(
        name,
        prompt,
        priority=rng.randint(0, 2),
        cache_salt=rng.choice([None, "tenant"]),
        timeout_s=rng.choice([None, None, None, 30.0]),
        metadata={"tenant": rng.choice("xy")},
        **options,
    )
