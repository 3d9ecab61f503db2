"""Calls that come at the wrong moment, and parts that are put together wrongly."""

import pickle
import threading

import pytest

from batchkit import (
    ChunkedPrefillScheduler,
    ConformanceError,
    DynamicScheduler,
    Engine,
    KVGeometry,
    OrcaScheduler,
    PagedAllocator,
    PagedScheduler,
    PolicyError,
    RunnerOutOfMemory,
    SamplingParams,
    SimulatedRunner,
    Swap,
    TrueLengths,
    UnsupportedModel,
    VirtualClock,
    WorkloadRecord,
    simulate,
)

GEOMETRY = KVGeometry(num_blocks=16, block_size=4, max_model_len=64, vocab_size=256)


def make(policy=ChunkedPrefillScheduler, *, geometry=GEOMETRY, tokenizer=None, clock=None, on_step=None, **options):
    scheduler = policy(PagedAllocator(geometry.num_blocks, geometry.block_size), **options)
    return Engine(SimulatedRunner(geometry), scheduler, tokenizer=tokenizer, clock=clock, on_step=on_step)


class Letters:
    eos_token_id = None

    def encode(self, text):
        return list(text.encode())

    def decode(self, token_ids, *, skip_special_tokens=True):
        return "".join(chr(97 + token % 26) for token in token_ids)


def test_an_abort_from_another_thread_is_left_to_the_owner():
    engine = make()
    request_id = engine.add_request([1, 2])
    engine.step()
    answers = []
    thread = threading.Thread(target=lambda: answers.append(engine.abort(request_id)))
    thread.start()
    thread.join()
    assert answers == [True]
    assert engine.has_unfinished()  # its last output is still to come
    assert [out.finish_reason for out in engine.step()] == ["abort"]
    assert not engine.has_unfinished()


def test_an_id_is_free_after_an_abort_from_another_thread():
    engine = make()
    engine.add_request([1, 2], request_id="a")
    thread = threading.Thread(target=engine.abort, args=("a",))
    thread.start()
    thread.join()
    engine.add_request([3], SamplingParams(max_tokens=1), request_id="a")
    assert [out.finish_reason for out in engine.step()] == ["abort", "length"]


def test_an_engine_that_could_not_be_made_leaves_its_parts_free():
    runner, scheduler = SimulatedRunner(GEOMETRY), ChunkedPrefillScheduler(PagedAllocator(16, 4))
    with pytest.raises(TypeError, match="tokenizer"):
        Engine(runner, scheduler, tokenizer=object())
    Engine(runner, scheduler)


@pytest.mark.parametrize("at", range(4, 20))
def test_an_interrupt_in_the_commit_ends_that_request_and_no_other(at):
    class Interrupting(Letters):
        calls = 0

        def decode(self, token_ids, *, skip_special_tokens=True):
            self.calls += 1
            if self.calls == at:
                raise KeyboardInterrupt
            return super().decode(token_ids)

    engine = make(OrcaScheduler, geometry=KVGeometry(num_blocks=4, block_size=4, max_model_len=64, vocab_size=256))
    alone = engine.generate([[3, 4]], SamplingParams(max_tokens=7, temperature=0))[0].token_ids
    engine = make(
        OrcaScheduler,
        geometry=KVGeometry(num_blocks=4, block_size=4, max_model_len=64, vocab_size=256),
        tokenizer=Interrupting(),
    )
    engine.add_request([1, 2], SamplingParams(max_tokens=7, temperature=0), request_id="a")
    engine.add_request([3, 4], SamplingParams(max_tokens=7, temperature=0, detokenize=False), request_id="b")
    finals, interrupts = {}, 0
    while engine.has_unfinished():
        try:
            finals.update((out.request_id, out) for out in engine.step() if out.finished)
        except KeyboardInterrupt:
            interrupts += 1
        engine.check()
    assert finals["b"].token_ids == alone
    assert finals["a"].finish_reason == ("error" if interrupts else "length")


def test_an_interrupt_when_the_engine_was_just_taken_does_not_keep_it_taken():
    engine = make()
    engine.add_request([1, 2], SamplingParams(max_tokens=3))

    class Interrupted:
        """A lock whose taking is interrupted when it has just been done."""

        def __init__(self, lock):
            self.lock = lock
            self.release = lock.release

        def acquire(self, **options):
            engine._turn_lock = self.lock
            self.lock.acquire(**options)
            raise KeyboardInterrupt

    engine._turn_lock = Interrupted(engine._turn_lock)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert not engine.step()[0].finished
    outputs = []
    other = threading.Thread(target=lambda: outputs.extend(engine.step()))  # it is not taken once too often either
    other.start()
    other.join()
    assert len(outputs) == 1
    assert engine.generate([[3]], SamplingParams(max_tokens=2))[0].finish_reason == "length"
    engine.check()
    engine.close()


def test_a_workload_without_a_time_is_refused():
    for arrival in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="arrival must be a time in seconds"):
            WorkloadRecord(prompt=3, max_tokens=2, arrival=arrival)


def test_a_workload_whose_true_lengths_nobody_heeds_is_refused():
    records = [WorkloadRecord(prompt=[1, 2], max_tokens=9, output_tokens=3)]
    for wrap in (TrueLengths, lambda runner: runner):
        geometry = KVGeometry(num_blocks=16, block_size=4, max_model_len=64, vocab_size=100, eos_token_ids=(2,))
        engine = Engine(wrap(SimulatedRunner(geometry)), OrcaScheduler(PagedAllocator(16, 4)))
        if wrap is TrueLengths:
            assert len(simulate(engine, records)[0].token_ids) == 3
        else:
            with pytest.raises(ValueError, match="output_tokens=3, and the request gave 9: put TrueLengths around"):
                simulate(engine, records)


def test_exceptions_survive_pickling():
    error = pickle.loads(pickle.dumps(UnsupportedModel("Model", ["one", "two"])))
    assert error.reasons == ("one", "two") and str(error) == "Model cannot be bound: one; two"
    error = pickle.loads(pickle.dumps(ConformanceError("Policy", "a rule", "In step 3.")))
    assert error.rule == "a rule" and str(error) == "Policy breaks a rule: a rule. In step 3."


def test_a_prompt_that_the_tokenizer_refuses_does_not_end_the_batch():
    engine = make(tokenizer=Letters())
    outputs = engine.generate(["ok", "\ud800", "ok"], SamplingParams(max_tokens=2), on_error="return")
    assert [out.finish_reason for out in outputs] == ["length", "error", "length"]
    assert "UnicodeEncodeError" in outputs[1].error


def test_out_of_memory_while_failing_rows_are_looked_for():
    class Failing(SimulatedRunner):
        calls = 0

        def execute(self, out):
            self.calls += 1
            if self.calls <= 2:
                raise OSError("driver")
            if out.num_tokens > 8:
                raise RunnerOutOfMemory("too large")
            return super().execute(out)

    prompts, params = [[1] * 20, [2] * 20], SamplingParams(max_tokens=3, temperature=0)
    engine = Engine(Failing(GEOMETRY), ChunkedPrefillScheduler(PagedAllocator(16, 4)))
    outputs = engine.generate(prompts, params)
    assert [out.token_ids for out in outputs] == [out.token_ids for out in make().generate(prompts, params)]


def test_verbs_used_while_victims_are_read():
    class Nested(PagedScheduler):
        def schedule(self, step):
            for seq in list(self.running):

                def victims(seq=seq):
                    step.preempt(seq)
                    yield from self.running

                step.run(seq, victims=victims())
            for seq in self.waiting:
                if not step.run(seq):
                    break

    engine = make(Nested, geometry=KVGeometry(num_blocks=8, block_size=4, max_model_len=32, vocab_size=256))
    for token in range(6):
        engine.add_request([token] * 6, SamplingParams(max_tokens=20))
    with pytest.raises(PolicyError, match="while one of them reads its victims"):
        while engine.has_unfinished():
            engine.step()
            engine.check()
    engine.check()


def test_a_held_sequence_of_another_scheduler():
    class Holding(OrcaScheduler):
        def may_leave(self, seq):
            return False

    class Foreign(ChunkedPrefillScheduler):
        def schedule(self, step):
            step.run(held)

    first = make(Holding)
    first.add_request([1], SamplingParams(max_tokens=1))
    first.step()
    (held,) = first._scheduler.running
    second = make(Foreign)
    second.add_request([1])
    with pytest.raises(PolicyError, match="neither waiting nor running in this scheduler"):
        second.step()


@pytest.mark.parametrize("change", ["abort", "add"])
def test_waiting_ends_when_there_is_something_to_do(change):
    clock = VirtualClock()
    engine = make(DynamicScheduler, clock=clock, min_batch=2, max_wait_s=100)
    request_id = engine.add_request([1])
    engine.step()
    if change == "abort":
        engine.abort(request_id)
    else:
        engine.add_request([2])
    engine.wait()
    assert clock() == 0


def test_an_id_that_is_reused_in_the_step_in_which_it_ends():
    got = []

    def hook(report):
        if report.num_finished and not got:
            got.append(engine.add_request([5], request_id="request-1"))
            engine.abort("request-1")

    engine = make(on_step=hook)
    assert engine.generate([[1]], SamplingParams(max_tokens=2))[0].finish_reason == "length"
    assert [out.finish_reason for out in engine.step()] == ["abort"]


def test_one_allocator_for_the_device_and_the_host():
    geometry = KVGeometry(num_blocks=6, block_size=4, host_blocks=6, max_model_len=24, vocab_size=256)
    pool = PagedAllocator(6, 4)
    with pytest.raises(ValueError, match="an allocator of its own"):
        Engine(SimulatedRunner(geometry), PagedScheduler(pool, preemption=Swap(pool)))
