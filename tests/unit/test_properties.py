"""Random workloads: under every policy, allocator and preemption, a request gets the tokens that it gets alone."""

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchkit import (
    ChunkedPrefillScheduler,
    ContiguousAllocator,
    DynamicScheduler,
    Engine,
    FairScheduler,
    FeedbackScheduler,
    KVGeometry,
    LeastSlackScheduler,
    OptimisticScheduler,
    OrcaScheduler,
    PagedAllocator,
    PagedScheduler,
    PriorityScheduler,
    SamplingParams,
    ShortestFirstScheduler,
    ShortestRemainingScheduler,
    SimulatedRunner,
    SkipAheadScheduler,
    StaticScheduler,
    Status,
    Swap,
    TrueLengths,
    VirtualClock,
    WaitingServedScheduler,
    WorkloadRecord,
    simulate,
)

MODEL_LEN = 10_000  # longer than any pool here, so that a reservation of it has to be capped
RESERVING = [
    (StaticScheduler, {}),
    (StaticScheduler, {"drop_finished": True}),
    (StaticScheduler, {"pad_to": 9}),
    (DynamicScheduler, {"max_wait_s": 0.01}),
    (OrcaScheduler, {}),
    (OrcaScheduler, {"reserve": "pow2"}),
    (OrcaScheduler, {"reserve": "model_len"}),
    (WaitingServedScheduler, {}),
]
GROWING = [
    (PagedScheduler, {}),
    (PagedScheduler, {"watermark_blocks": 0}),
    (ChunkedPrefillScheduler, {}),
    (ShortestFirstScheduler, {}),
    (ShortestRemainingScheduler, {}),
    (FairScheduler, {}),
    (FeedbackScheduler, {"quantum_tokens": 2, "promote_after_s": 0.01}),
    (LeastSlackScheduler, {"undated_due_s": 0.01}),
    (PriorityScheduler, {"ageing_s_per_level": 0.01}),
    (SkipAheadScheduler, {"max_skips": 2}),
    (OptimisticScheduler, {}),
]


@dataclass(frozen=True)
class Workload:
    records: list
    block_size: int
    num_blocks: int
    host_blocks: int
    seats: int
    budget: int


@st.composite
def workloads(draw):
    record = st.builds(
        lambda prompt, declared, share, arrival, predicted, due, priority, metadata: WorkloadRecord(
            prompt=prompt,
            max_tokens=declared,
            output_tokens=max(1, round(declared * share)),
            arrival=arrival,
            predicted=predicted,
            deadline=None if due is None else arrival + due,
            priority=priority,
            metadata=metadata,
        ),
        prompt=st.integers(1, 24),
        declared=st.integers(1, 20),
        share=st.sampled_from([0.2, 1.0, 1.0]),
        arrival=st.sampled_from([0.0, 0.0, 0.003, 0.02]),
        predicted=st.sampled_from([None, 1, 5, 100]),
        due=st.sampled_from([None, -1.0, 0.01, 0.1]),
        priority=st.integers(-1, 1),
        metadata=st.sampled_from([{}, {"tenant": "a"}, {"tenant": "b"}]),
    )
    records = draw(st.lists(record, min_size=1, max_size=9))
    size = draw(st.sampled_from([1, 2, 4, 8]))
    need = max(-(-(r.prompt + r.max_tokens - 1) // size) for r in records)
    seats = draw(st.integers(1, 6))
    return Workload(
        records=records,
        block_size=size,
        num_blocks=need + draw(st.sampled_from([0, 0, 1, 2, need])),
        host_blocks=draw(st.sampled_from([1, need, 3 * need])),
        seats=seats,
        budget=seats + draw(st.sampled_from([0, 3, 40])),
    )


def make_engine(policy, args, work, *, allocator=PagedAllocator, swap=False, true_lengths=True):
    clock = VirtualClock()
    geometry = KVGeometry(
        num_blocks=work.num_blocks,
        block_size=work.block_size,
        host_blocks=work.host_blocks,
        max_model_len=MODEL_LEN,
        vocab_size=1000,
        eos_token_ids=(0, 5),
    )
    runner = SimulatedRunner(geometry, clock=clock)
    scheduler = policy(
        allocator(work.num_blocks, work.block_size),
        max_model_len=MODEL_LEN,
        max_num_seqs=min(work.seats, work.num_blocks),
        max_tokens_per_step=work.budget,
        preemption=Swap(PagedAllocator(work.host_blocks, work.block_size)) if swap else None,
        **args,
    )
    return Engine(TrueLengths(runner) if true_lengths else runner, scheduler, clock=clock), scheduler


class Checked:
    """An engine whose books are checked after every step."""

    def __init__(self, engine):
        self.engine = engine

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def step(self):
        outputs = self.engine.step()
        self.engine.check()
        return outputs


def run(work, policy, args, **how):
    engine, scheduler = make_engine(policy, args, work, **how)
    outputs = [(out.token_ids, out.finish_reason) for out in simulate(Checked(engine), work.records)]
    pools = [scheduler.allocator] + ([scheduler.preemption.host] if how.get("swap") else [])
    assert all(pool.num_free_blocks == pool.num_blocks for pool in pools)
    return outputs, engine.stats()


def check_all_alike(work):
    ample = Workload(work.records, 1, 1000, 1, 50, 1000)
    alone, _ = run(ample, StaticScheduler, {})
    for record, (token_ids, _) in zip(work.records, alone, strict=True):
        assert len(token_ids) == record.output_tokens
    for policy, args in RESERVING:
        for allocator in (PagedAllocator, ContiguousAllocator):
            outputs, stats = run(work, policy, args, allocator=allocator)
            assert outputs == alone, (policy, args, allocator)
            assert stats.num_preemptions == 0
    for policy, args in GROWING:
        for swap in (False, True):
            outputs, _ = run(work, policy, args, swap=swap)
            assert outputs == alone, (policy, args, swap)


@given(workloads())
@settings(max_examples=10)
def test_every_policy_gives_the_same_tokens(work):
    check_all_alike(work)


@pytest.mark.slow
@given(workloads())
@settings(max_examples=500)
def test_every_policy_gives_the_same_tokens_500_times(work):
    check_all_alike(work)


# A policy that does whatever its verbs allow, and then comes to its senses.


class Chaos(ChunkedPrefillScheduler):
    def __init__(self, allocator, *, rng, **options):
        super().__init__(allocator, **options)
        self.rng = rng
        self.turns = 0

    def state(self):
        queues = [[(s.id, s.status, s.num_computed, s.seat) for s in q] for q in (self.waiting, self.running)]
        tables = [self.allocator.table(s.id) for q in (self.waiting, self.running) for s in q]
        return queues, tables, self.allocator.num_free_blocks, list(self._copies)

    def schedule(self, step):
        self.turns += 1
        if self.turns > 400:
            super().schedule(step)
            return
        rng = self.rng
        everybody = [*self.running, *self.waiting]
        rng.shuffle(everybody)
        for seq in everybody:
            before = self.state()
            if not step.run(
                seq,
                max_tokens=rng.choice([None, 1, 3]),
                reserve=rng.choice([0, seq.num_tokens, seq.max_kv]),
                victims=rng.sample(everybody, len(everybody)),
            ):
                assert self.state() == before, "a run that returned False has changed something"
                assert step.refused is not None
            if rng.random() < 0.05:
                gone = [v for v in self.running if v not in step and v.status is Status.RUNNING]
                if gone:
                    step.preempt(rng.choice(gone))
                    if rng.random() < 0.5:
                        raise KeyError("a policy's bug, after a preemption")


@pytest.mark.parametrize("swap", [False, True], ids=["recompute", "swap"])
@pytest.mark.parametrize("seed", range(6))
def test_chaos_corrupts_nothing_and_ends(seed, swap):
    rng = random.Random(seed)
    records = [WorkloadRecord(prompt=rng.randint(1, 30), max_tokens=rng.randint(5, 60)) for _ in range(12)]
    size = rng.choice([1, 4, 8])
    need = -(-89 // size)
    work = Workload(records, size, need + rng.choice([0, 3, need]), rng.choice([2, need]), 6, rng.choice([6, 16, 80]))
    outputs = {}
    engine, scheduler = make_engine(Chaos, {"rng": rng}, work, swap=swap, true_lengths=False)
    prompts = [[rng.randrange(1, 1000) for _ in range(r.prompt)] for r in records]
    params = [SamplingParams(max_tokens=r.max_tokens, ignore_eos=True) for r in records]
    for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(prompt, param, request_id=str(i))
    bugs = 0
    while engine.has_unfinished():
        try:
            for out in engine.step():
                if out.finished:
                    outputs[int(out.request_id)] = out.token_ids
        except KeyError:
            bugs += 1
        engine.check()
        assert scheduler.turns < 5000
    assert bugs and engine.stats().num_preemptions
    ample = Workload(records, 1, 2000, 1, 50, 2000)
    reference, _ = make_engine(OrcaScheduler, {}, ample, true_lengths=False)
    assert [outputs[i] for i in range(len(records))] == [out.token_ids for out in reference.generate(prompts, params)]
    assert scheduler.allocator.num_free_blocks == scheduler.allocator.num_blocks
