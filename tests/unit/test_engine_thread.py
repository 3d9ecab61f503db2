"""EngineThread: any thread asks, one answers. Steps are held by gates, so that nothing depends on who is faster."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import random
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from typing import Any

import pytest

from batchkit import (
    ChunkedPrefillScheduler,
    DuplicateRequest,
    DynamicScheduler,
    Engine,
    EngineBusy,
    EngineClosed,
    EngineFailed,
    EngineFull,
    EngineThread,
    InvariantError,
    KVGeometry,
    PagedAllocator,
    PagedScheduler,
    RequestError,
    RequestTooLong,
    SamplingParams,
    SchedulerStalled,
    SimulatedRunner,
)
from unit.helpers import Rig, tokens

HANG_S = 60.0  # what takes as long as this hangs


class Gate:
    """Holds the steps of a rig: each waits in the runner until it is let through."""

    def __init__(self, rig: Rig) -> None:
        self._entered = threading.Semaphore(0)
        self._passes = threading.Semaphore(0)
        self._is_open = False
        rig.runner.before = self._hold

    def _hold(self, out: Any) -> None:
        self._entered.release()
        if not self._is_open:
            assert self._passes.acquire(timeout=HANG_S), "nobody let this step through"

    def wait(self) -> None:
        """Until a step is held."""
        assert self._entered.acquire(timeout=HANG_S), "no step was begun"

    def let_one(self) -> None:
        """Let the held step through, and wait for the next."""
        self._passes.release()
        self.wait()

    def open(self) -> None:
        """Hold nothing any more."""
        self._is_open = True
        self._passes.release()


class Front(EngineThread):
    """Of a rig, with the rig's way of naming prompts; the books are checked when it has ended."""

    def __init__(self, rig: Rig, **options: Any) -> None:
        self.rig = rig
        super().__init__(rig.engine, **options)

    def ask(self, name: str, prompt: int = 4, *, options: dict[str, Any] | None = None, **params: Any) -> Future[Any]:
        return self.submit(*self.job(name, prompt, **params), request_id=name, **(options or {}))

    def job(self, name: str, prompt: int = 4, **params: Any) -> tuple[list[int], SamplingParams]:
        ids = tokens(name, prompt)
        params = {"temperature": 0, "max_tokens": 8, **params}
        self.rig.jobs[name] = (ids, params)
        return ids, SamplingParams(**params)

    def alone(self, name: str) -> tuple[int, ...]:
        return self.rig.alone(name).token_ids

    def assert_has_ended(self) -> None:
        assert not self._thread.is_alive()
        assert self.rig.runner.closed
        self.rig.assert_empty()
        self.rig.engine.check()


def result(future: Future[Any]) -> Any:
    return future.result(timeout=HANG_S)


def in_thread(function: Any, *args: Any, **options: Any) -> Future[Any]:
    """A thread that ends with the test whatever happens."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **options))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def wait_for_entrants(front: EngineThread, count: int) -> None:
    """Until so many submitters stand in the queue for room."""
    arrived = threading.Event()
    while len(front._entrants) < count:
        arrived.wait(0.001)


# ------------------------------------------------------------------------------- results


def test_many_threads_each_get_what_their_request_gets_alone() -> None:
    with Front(Rig(PagedScheduler, blocks=24, seats=8)) as front:
        names = [f"r{i}" for i in range(100)]
        with ThreadPoolExecutor(16) as pool:
            outputs = list(pool.map(lambda name: result(front.ask(name, 3 + len(name))), names))
        for name, output in zip(names, outputs, strict=True):
            assert (output.request_id, output.finished, output.finish_reason) == (name, True, "length")
            assert output.token_ids == front.alone(name)
        assert front.stats().finished == {"length": 100}
    front.assert_has_ended()


def test_a_refused_request_gets_its_error_and_disturbs_nobody() -> None:
    with Front(Rig(PagedScheduler)) as front:
        good = front.ask("good")
        with pytest.raises(RequestTooLong, match="can never run"):
            result(front.ask("long", 1000))
        with pytest.raises(RequestError, match="needs a tokenizer"):
            result(front.submit("text"))
        with pytest.raises(TypeError, match="params must be"):
            result(front.submit([1], {"max_tokens": 3}))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="unknown"):
            result(front.submit([1], unknown=1))  # type: ignore[call-arg]
        with pytest.raises(RequestError, match="needs a tokenizer"):
            next(front.stream("text"))
        assert result(good).token_ids == front.alone("good")


def test_a_loop_begun_before_the_first_request_waits_for_it() -> None:
    with Front(Rig(PagedScheduler)) as front:
        for name in ("first", "second"):
            assert result(front.call(lambda engine: engine.has_unfinished())) is False
            assert result(front.ask(name)).token_ids == front.alone(name)


def test_options_reach_the_engine_and_arrival_is_the_time_of_the_call() -> None:
    rig = Rig(PagedScheduler)
    gate = Gate(rig)
    with Front(rig) as front:
        first = front.ask("first")
        gate.wait()
        before = rig.clock()
        late = front.ask("late", options={"priority": 3, "metadata": {"tenant": "t"}, "deadline": 9.0})
        dated = front.ask("dated", options={"arrival": 0.25})
        gate.let_one()  # time passes until the engine hears of them
        request = rig.seq("late").request
        assert (request.priority, request.metadata, request.deadline) == (3, {"tenant": "t"}, 9.0)
        assert request.arrival == before < rig.clock()
        gate.open()
        assert result(late).timings.arrival == before and result(dated).timings.arrival == 0.25
        assert result(first).finish_reason == "length"


def test_n_samples_come_with_one_future() -> None:
    with Front(Rig(PagedScheduler, blocks=64)) as front:
        output = result(front.ask("several", n=3))
        assert [(sample.index, sample.num_tokens) for sample in output.outputs] == [(0, 8), (1, 8), (2, 8)]
        last = list(front.stream(*front.job("again", n=2)))[-1]
        assert last.finished and len(last.outputs) == 2


@pytest.mark.parametrize("what", [None, "engine", 7])
def test_what_is_no_engine_is_refused(what: Any) -> None:
    with pytest.raises(TypeError, match="engine must be"):
        EngineThread(what)


def test_bad_arguments_are_refused_at_the_call() -> None:
    rig = Rig(PagedScheduler)
    for wrong, error in ((0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match="max_waiting"):
            EngineThread(rig.engine, max_waiting=wrong)  # type: ignore[arg-type]
    with Front(rig, max_waiting=1) as front:
        for wrong, error in ((0, ValueError), (-1, ValueError), (float("inf"), ValueError), ("1", TypeError)):
            with pytest.raises(error, match="timeout_s"):
                front.submit([1], timeout_s=wrong)
        for wrong, error in ((-1, ValueError), (float("nan"), ValueError), ("1", TypeError)):
            with pytest.raises(error, match="max_wait_s"):
                front.submit([1], max_wait_s=wrong)
    other = Rig(PagedScheduler)
    other.add("live")
    with pytest.raises(ValueError, match="live requests"):
        EngineThread(other.engine)
    other.finish()  # and the engine is as it was


@pytest.mark.parametrize("options", [{"request_id": []}, {"request_id": {}}, {"request_id": 7}, {"nice": 1}])
def test_a_bad_argument_is_the_error_of_its_request_alone(options: dict[str, Any]) -> None:
    with Front(Rig(PagedScheduler)) as front:
        for ask in (front.submit, front.enqueue):
            with pytest.raises(TypeError, match=next(iter(options))):
                result(ask([1], SamplingParams(), **options))
        assert result(front.ask("other")).token_ids == front.alone("other")
    front.assert_has_ended()


@pytest.mark.parametrize("wrong", [[], {}, 7, None, b"id"])
def test_an_abort_of_what_is_no_id_is_refused_at_the_call(wrong: Any) -> None:
    with Front(Rig(PagedScheduler)) as front:
        with pytest.raises(TypeError, match="request_id must be a string"):
            front.abort(wrong)
        assert result(front.ask("other")).token_ids == front.alone("other")
    front.assert_has_ended()


@pytest.mark.parametrize(
    "times", [{"max_wait_s": 1e12}, {"timeout_s": 1e300}, {"max_wait_s": 1e300, "timeout_s": 1e12}]
)
def test_a_wait_may_be_longer_than_python_can_wait(times: dict[str, float]) -> None:
    rig = Rig(PagedScheduler, seats=1)
    gate = Gate(rig)
    with Front(rig, max_waiting=1) as front:
        front.ask("running")
        gate.wait()
        front.ask("waiting")
        patient = in_thread(front.ask, "patient", options=times)
        wait_for_entrants(front, 1)
        gate.open()
        assert result(result(patient)).token_ids == front.alone("patient")
    front.assert_has_ended()


def test_a_time_beyond_every_float_is_refused_at_the_call() -> None:
    with Front(Rig(PagedScheduler), max_waiting=1) as front:
        for name in ("max_wait_s", "timeout_s"):
            with pytest.raises(ValueError, match=f"{name} must be finite"):
                front.submit([1], None, **{name: 10**400})  # type: ignore[arg-type]


# ------------------------------------------------------------------------------- cancelling


def test_cancelling_aborts_in_every_state() -> None:
    rig = Rig(PagedScheduler, seats=1)
    gate = Gate(rig)
    with Front(rig) as front:
        running = front.ask("running")
        gate.wait()
        waiting = front.ask("waiting")
        gate.let_one()  # it is in the scheduler now
        in_mailbox = front.ask("in the mailbox")
        for future in (running, waiting, in_mailbox):
            assert not future.running() and future.cancel() and future.cancel()
        gate.open()
        done, _ = wait([running, waiting, in_mailbox], timeout=HANG_S)
        assert len(done) == 3
        for future in done:
            with pytest.raises(CancelledError):
                future.result()
        finished = front.ask("finished")
        assert result(finished).token_ids == front.alone("finished")
        assert not finished.cancel() and not finished.cancelled()
        assert front.stats().finished == {"abort": 2, "length": 1}
    front.assert_has_ended()


def test_an_id_is_free_again_once_its_future_is_cancelled() -> None:
    rig = Rig(PagedScheduler)
    gate = Gate(rig)
    with Front(rig) as front:
        first = front.ask("id")
        gate.wait()
        with_same_id = front.ask("id")
        gate.let_one()
        with pytest.raises(DuplicateRequest, match="'id'"):
            result(with_same_id)
        first.cancel()
        second = front.ask("id", 5)
        gate.open()
        assert result(second).token_ids == front.alone("id")
        assert front.stats().finished == {"abort": 1, "length": 1}
    front.assert_has_ended()


def test_abort_by_id_gives_the_future_its_last_output() -> None:
    rig = Rig(PagedScheduler)
    gate = Gate(rig)
    with Front(rig) as front:
        future = front.ask("id", max_tokens=20)
        gate.wait()
        gate.let_one()
        front.abort("unknown")
        front.abort("id")
        front.abort("id")
        gate.open()
        output = result(future)
        assert output.finish_reason == "abort"
        assert output.token_ids == front.alone("id")[: len(output.token_ids)] and output.token_ids
        front.abort("id")  # long gone
    front.assert_has_ended()


# ------------------------------------------------------------------------------- streams


def test_a_stream_gives_each_output_and_joins_to_the_whole() -> None:
    with Front(Rig(ChunkedPrefillScheduler, budget=8, seats=4)) as front:

        def read(name: str) -> None:
            outputs = list(front.stream(*front.job(name, 9), request_id=name))
            assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
            assert tuple(token for output in outputs for token in output.new_token_ids) == front.alone(name)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(read, [f"s{i}" for i in range(24)]))
    front.assert_has_ended()


@pytest.mark.parametrize("how", ["break", "close", "with", "garbage", "unread"])
def test_leaving_a_stream_early_aborts(how: str) -> None:
    rig = Rig(PagedScheduler)
    gate = Gate(rig)
    with Front(rig) as front:
        stream = front.stream(*front.job("left"), request_id="left")
        gate.wait()
        gate.let_one()  # so that it has an output, and cannot end before it is left
        if how == "break":
            for output in stream:
                assert not output.finished
                break
            del stream
        elif how == "close":
            next(stream)
            stream.close()
            stream.close()
            assert list(stream) == []
        elif how == "with":
            with stream:
                next(stream)
        elif how == "garbage":
            next(stream)
            knot: list[Any] = [stream]
            knot.append(knot)
            del stream, knot
            gc.collect()
        else:
            del stream
        other = front.ask("other")  # behind it in the mailbox
        gate.open()
        assert result(other).token_ids == front.alone("other")
        front.close()
        assert front.stats().finished == {"abort": 1, "length": 1}
    front.assert_has_ended()


def test_closing_a_stream_ends_the_iteration_of_who_waits_for_it() -> None:
    rig = Rig(PagedScheduler)
    gate = Gate(rig)
    with Front(rig) as front:
        stream = front.stream(*front.job("read"))
        reading = in_thread(list, stream)
        gate.wait()
        stream.close()
        gate.open()
        assert not any(output.finished for output in result(reading))
    front.assert_has_ended()


def test_a_slow_reader_holds_nobody_up_and_loses_nothing() -> None:
    with Front(Rig(PagedScheduler, seats=2)) as front:
        slow = front.stream(*front.job("slow"), request_id="slow")
        for i in range(5):
            assert result(front.ask(f"quick {i}")).finish_reason == "length"
        front.close()
        assert tuple(token for output in slow for token in output.new_token_ids) == front.alone("slow")
        assert list(slow) == []


def test_a_stream_of_the_engines_own_thread_is_refused_instead_of_waited_for() -> None:
    with Front(Rig(PagedScheduler)) as front:
        caught: Future[Any] = Future()

        def read(_: Any) -> None:
            with pytest.raises(EngineBusy, match="own thread") as raised:
                next(front.stream([1, 2]))
            caught.set_result(raised.value)

        front.ask("first").add_done_callback(read)
        assert isinstance(result(caught), EngineBusy)


# ------------------------------------------------------------------------------- back-pressure


def test_beyond_max_waiting_submit_waits_first_come_first_served() -> None:
    rig = Rig(PagedScheduler, seats=1)
    gate = Gate(rig)
    most: list[int] = []
    rig._on_step = lambda report: most.append(report.num_waiting)
    with Front(rig, max_waiting=2) as front:
        running = front.ask("running")
        gate.wait()
        taken = [front.ask(name, options={"max_wait_s": 0}) for name in ("w1", "w2")]
        with pytest.raises(EngineFull, match="max_waiting"):
            front.ask("too many", options={"max_wait_s": 0})
        with pytest.raises(EngineFull, match=r"within 0\.01 s"):
            front.ask("impatient", options={"max_wait_s": 0.01})
        with pytest.raises(EngineFull, match=r"within 0\.01 s"):
            front.ask("in a hurry", options={"max_wait_s": 10, "timeout_s": 0.01})
        blocked = []
        for i in range(4):
            blocked.append(in_thread(front.ask, f"b{i}"))
            wait_for_entrants(front, i + 1)
        assert not any(future.done() for future in blocked)
        gate.open()
        assert result(running).finish_reason == "length"
        for i, future in enumerate(blocked):
            assert result(result(future)).token_ids == front.alone(f"b{i}")
        assert all(result(future).finish_reason == "length" for future in taken)
        assert front.stats().finished == {"length": 7}
    ran = [row.request.id for out in rig.runner.outs for row in out.rows]
    assert list(dict.fromkeys(ran)) == ["running", "w1", "w2", "b0", "b1", "b2", "b3"]
    assert max(most) == 2
    front.assert_has_ended()


def test_refused_and_cancelled_requests_give_their_place_back() -> None:
    rig = Rig(PagedScheduler, seats=1)
    gate = Gate(rig)
    with Front(rig, max_waiting=1) as front:
        running = front.ask("running")
        gate.wait()
        refused = front.submit("text without a tokenizer")
        blocked = in_thread(front.ask, "next")
        wait_for_entrants(front, 1)
        gate.let_one()
        waiting = result(blocked)
        with pytest.raises(RequestError):
            result(refused)
        assert waiting.cancel()
        gate.let_one()
        last = front.ask("last", options={"max_wait_s": 0})
        gate.open()
        assert [result(future).finish_reason for future in (running, last)] == ["length"] * 2
    front.assert_has_ended()


def test_one_bad_request_after_the_other_lets_the_next_in_although_the_engine_is_idle() -> None:
    with Front(Rig(PagedScheduler), max_waiting=1) as front:
        holding = threading.Event()
        front.call(lambda engine: holding.wait(HANG_S))
        refused = front.submit("first")
        blocked = [in_thread(front.submit, f"{i}") for i in range(5)]
        wait_for_entrants(front, 5)
        holding.set()
        for future in (refused, *map(result, blocked)):
            with pytest.raises(RequestError):
                result(future)


def test_a_request_enqueued_can_be_cancelled_before_there_is_room() -> None:
    rig = Rig(PagedScheduler, seats=1)
    gate = Gate(rig)
    with Front(rig, max_waiting=1) as front:
        running = front.ask("running")
        gate.wait()
        waiting = front.ask("waiting")
        assert waiting.accepted.done()
        unwanted, wanted = (front.enqueue(*front.job(name)) for name in ("unwanted", "wanted"))
        assert not unwanted.accepted.done()
        assert unwanted.cancel()
        gate.open()
        assert not wait([unwanted, unwanted.accepted], timeout=HANG_S).not_done
        assert result(wanted).token_ids == front.alone("wanted")
        assert all(result(future).finish_reason == "length" for future in (running, waiting))
    front.assert_has_ended()


# ------------------------------------------------------------------------------- time


def test_a_request_times_out_by_the_engines_clock_from_the_call_on() -> None:
    rig = Rig(PagedScheduler)  # each step takes a second
    gate = Gate(rig)
    with Front(rig) as front:
        slow = front.ask("slow", max_tokens=20, options={"timeout_s": 3.5})
        gate.wait()
        late = front.ask("late", max_tokens=20, options={"timeout_s": 0.5})  # its time is up before the engine hears
        gate.open()
        for future, name, timeout_s in ((slow, "slow", 3.5), (late, "late", 0.5)):
            output = result(future)
            assert output.finish_reason == "timeout"
            assert output.token_ids == front.alone(name)[: len(output.token_ids)]
            # To the step; one that is in the mailbox is ended by the step that follows on that.
            assert timeout_s <= output.timings.finished - output.timings.arrival <= max(timeout_s + 1, 2)
    front.assert_has_ended()


def of_real_time(**options: Any) -> EngineThread:
    """With a policy that waits for a second request, for an hour if need be."""
    geometry = KVGeometry(num_blocks=64, block_size=4, max_model_len=64, vocab_size=100)
    scheduler = DynamicScheduler(PagedAllocator(64, 4), min_batch=2, max_wait_s=3600.0, **options)
    return EngineThread(Engine(SimulatedRunner(geometry), scheduler))


def wait_for_sleep(front: EngineThread) -> None:
    """Until the engine knows of a time to wait for."""
    while front.call(lambda engine: engine.wait_until).result(timeout=HANG_S) is None:
        pass


@pytest.mark.parametrize("why", ["another request", "cancel", "abort", "timeout", "close"])
def test_a_policy_that_waits_is_woken(why: str) -> None:
    params = SamplingParams(max_tokens=2)
    with of_real_time() as front:
        options: dict[str, Any] = {"timeout_s": 0.02} if why == "timeout" else {}
        future = front.submit([1, 2], params, request_id="waits", **options)
        if why == "timeout":
            assert result(future).finish_reason == "timeout"
            return
        wait_for_sleep(front)
        if why == "another request":
            assert result(front.submit([3], params)).finish_reason == "length"
            assert result(future).finish_reason == "length"
        elif why == "cancel":
            assert future.cancel()
            assert not wait([future], timeout=HANG_S).not_done
        elif why == "abort":
            front.abort("waits")
            assert result(future).finish_reason == "abort"
        else:
            front.close(timeout_s=0.01)  # the hour is cut short
            assert result(future).finish_reason == "abort"


def test_a_virtual_clock_jumps_over_the_waiting() -> None:
    with Front(Rig(DynamicScheduler, seats=4, min_batch=4, max_wait_s=3600.0)) as front:
        output = result(front.ask("waits"))
        assert output.timings.first_scheduled - output.timings.arrival == 3600.0


# ------------------------------------------------------------------------------- closing


@pytest.mark.parametrize("drain", [True, False])
@pytest.mark.parametrize("state", ["fresh", "idle", "running", "waiting", "in the mailbox", "all"])
def test_close_in_every_state(state: str, drain: bool) -> None:
    rig = Rig(PagedScheduler, seats=1)
    gate = Gate(rig)
    front = Front(rig)
    futures = []
    if state == "idle":
        gate.open()
        assert result(front.ask("before")).finish_reason == "length"
    if state in ("running", "waiting", "in the mailbox", "all"):
        futures.append(front.ask("running"))
        gate.wait()
    if state in ("waiting", "all"):
        futures.append(front.ask("waiting"))
        gate.let_one()
    if state in ("in the mailbox", "all"):
        futures.append(front.ask("in the mailbox"))
    closing = in_thread(front.close, drain=drain)
    while not front._stage:
        pass
    gate.open()
    result(closing)
    for future in futures:
        assert future.done()
        output = future.result()
        assert output.finish_reason == ("length" if drain else "abort")
        assert output.token_ids == front.alone(output.request_id)[: len(output.token_ids)]
    front.close()
    front.close(drain=False)
    for late in (front.submit, front.stream):
        with pytest.raises(EngineClosed, match="this engine is closed") as raised:
            late([1])
        assert raised.value.__cause__ is None
    with pytest.raises(EngineClosed):
        front.call(print)
    front.abort("anything")
    assert front.stats().num_running == 0
    front.assert_has_ended()


def test_a_drain_may_be_limited_and_cut_short() -> None:
    rig = Rig(PagedScheduler)
    gate = Gate(rig)
    front = Front(rig)
    future = front.ask("endless", max_tokens=200)
    gate.wait()
    draining = in_thread(front.close)
    while not front._stage:
        pass
    aborting = in_thread(front.close, drain=False)
    while front._stage < 2:
        pass
    gate.open()
    result(draining), result(aborting)
    assert result(future).finish_reason == "abort"
    front.assert_has_ended()


def test_leaving_the_block_drains_and_an_exception_in_it_aborts() -> None:
    with Front(Rig(PagedScheduler)) as front:
        kept = front.ask("kept")
    assert kept.done() and kept.result().finish_reason == "length"
    rig = Rig(PagedScheduler)
    gate = Gate(rig)
    with pytest.raises(ZeroDivisionError), Front(rig) as front:
        lost = front.ask("lost", max_tokens=200)
        gate.wait()
        front.close(drain=False, wait=False)
        gate.open()
        raise ZeroDivisionError
    assert lost.result().finish_reason == "abort"
    front.assert_has_ended()


def test_close_wakes_who_waits_for_room_and_who_reads_a_stream() -> None:
    rig = Rig(PagedScheduler, seats=1)
    gate = Gate(rig)
    front = Front(rig, max_waiting=1)
    reading = in_thread(list, front.stream(*front.job("running")))
    gate.wait()
    front.ask("waiting")
    blocked = [in_thread(front.ask, f"b{i}") for i in range(5)]
    wait_for_entrants(front, 5)
    closing = in_thread(front.close, drain=False)
    for future in blocked:
        with pytest.raises(EngineClosed):
            result(future)
    assert not closing.done()  # a step runs still
    gate.open()
    result(closing)
    assert result(reading)[-1].finish_reason == "abort"
    front.assert_has_ended()


def test_many_threads_may_close_at_once_and_the_engines_own_too() -> None:
    rig = Rig(PagedScheduler)
    gate = Gate(rig)
    front = Front(rig)
    future = front.ask("a")
    future.add_done_callback(lambda _: front.close())
    gate.wait()
    closing = [in_thread(front.close) for _ in range(8)]
    gate.open()
    for close in closing:
        result(close)
    assert result(future).finish_reason == "length"
    front.assert_has_ended()


def test_a_signal_handler_may_close_in_the_middle_of_its_threads_own_submit() -> None:
    front = Front(Rig(PagedScheduler))
    has_room = front._has_room

    def interrupted() -> bool:
        signal.raise_signal(signal.SIGTERM)
        return has_room()

    before = signal.signal(signal.SIGTERM, lambda *_: front.close(drain=False, wait=False))
    try:
        front._has_room = interrupted  # type: ignore[method-assign]
        future = front.ask("a")
    finally:
        signal.signal(signal.SIGTERM, before)
    with contextlib.suppress(EngineClosed):  # taken or not, it has its answer
        assert result(future).finish_reason == "abort"
    front.close()
    front.assert_has_ended()


def test_on_step_may_close() -> None:
    rig = Rig(PagedScheduler, on_step=lambda report: front.close(drain=False))
    gate = Gate(rig)
    front = Front(rig)
    future = front.ask("a", max_tokens=100)
    gate.open()
    assert result(future).finish_reason == "abort"
    front.close()
    front.assert_has_ended()


@pytest.mark.parametrize(
    ("timeout_s", "error"),
    [("x", TypeError), (True, TypeError), (float("nan"), ValueError), (-1, ValueError), (float("inf"), ValueError)],
)
def test_a_bad_time_to_close_in_closes_nothing(timeout_s: Any, error: Any) -> None:
    with Front(Rig(PagedScheduler)) as front:
        for wait in (True, False):
            with pytest.raises(error, match=f"timeout_s must .*got '?{timeout_s}"):
                front.close(timeout_s=timeout_s, wait=wait)
        assert front.is_open
        assert result(front.ask("after")).token_ids == front.alone("after")
    front.assert_has_ended()


def test_a_drain_may_be_given_longer_than_python_can_wait() -> None:
    front = Front(Rig(PagedScheduler))
    future = front.ask("drained")
    front.close(timeout_s=1e300)
    assert future.result(0).finish_reason == "length"
    front.assert_has_ended()


@pytest.mark.parametrize("by", ["call", "on_output", "a callback of a future", "on_step", "another thread"])
def test_who_closes_the_engine_itself_closes_the_front(by: str) -> None:
    armed: list[str] = []

    def close_if(where: str) -> None:
        if where in armed:
            armed.clear()
            close()

    rig = Rig(PagedScheduler, seats=2, on_step=lambda report: close_if("on_step"))
    gate = Gate(rig)
    front = Front(rig, max_waiting=1)
    close = rig.engine.close
    deliver = front._deliver

    def deliver_late(output: Any) -> None:
        result(in_thread(close_if, "another thread"))
        deliver(output)

    front._deliver = deliver_late  # type: ignore[method-assign]
    running = front.submit([1, 2], SamplingParams(max_tokens=100), on_output=lambda _: close_if("on_output"))
    gate.wait()
    short = front.ask("short", max_tokens=1)
    gate.let_one()
    reading = in_thread(list, front.stream(*front.job("waiting")))
    blocked = in_thread(front.ask, "blocked")
    wait_for_entrants(front, 1)
    armed.append(by)
    if by == "call":
        closing = front.call(lambda engine: engine.close())
    elif by == "a callback of a future":
        short.add_done_callback(lambda _: close_if(by))
    gate.open()

    with pytest.raises(EngineClosed, match="this engine is closed"):
        result(running)
    for future in (reading, blocked):
        with pytest.raises(EngineClosed, match="this engine is closed"):
            ended = result(future)
            result(ended)  # it may have found room before
    with contextlib.suppress(EngineClosed):
        assert result(short).finish_reason == "length"
    if by == "call":
        assert {output.finish_reason for output in result(closing)} <= {"abort", "length"}
    front._thread.join(HANG_S)
    assert not front.is_open
    with pytest.raises(EngineClosed, match="this engine is closed") as late:
        front.submit([1])
    assert late.value.__cause__ is None
    front.close()
    front.assert_has_ended()


# ------------------------------------------------------------------------------- failures


class Broken(PagedScheduler):
    """A policy with a bug that strikes at the third step with two running."""

    error: BaseException = ValueError("a bug")

    def schedule(self, step: Any) -> None:
        if len(self.running) == 2:
            raise self.error
        super().schedule(step)


@pytest.mark.parametrize("error", [ValueError("a bug"), InvariantError("books"), SystemExit(3)], ids=repr)
def test_an_error_of_the_loop_reaches_every_waiter(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(Broken, seats=2)
    rig.scheduler.error = error
    gate = Gate(rig)
    front = Front(rig, max_waiting=1)
    first = front.ask("first")
    gate.wait()
    second = front.stream(*front.job("second"))
    reading = in_thread(list, second)
    blocked = [in_thread(front.ask, f"b{i}") for i in range(3)]
    wait_for_entrants(front, 3)
    called = front.call(lambda engine: first.add_done_callback(lambda _: None))
    gate.open()

    expected: Any = (EngineFailed if isinstance(error, SystemExit) else type(error),)
    with pytest.raises(expected) as raised:
        result(first)
    failure = raised.value
    assert failure is error or failure.__cause__ is error
    with pytest.raises(expected):
        result(reading)
    assert result(called) is None
    for future in blocked:  # in the queue for room, or let in meanwhile
        try:
            result(result(future))
        except EngineClosed as closed:
            assert closed.__cause__ is failure
        except expected as same:
            assert same is failure
        else:
            raise AssertionError("nobody can have got an output")
    front.close()
    for late in (front.submit, front.stream, front.enqueue):
        with pytest.raises(EngineClosed, match="has failed") as closed_late:
            late([1])
        assert closed_late.value.__cause__ is failure
    with pytest.raises(EngineClosed, match="has failed"):
        front.call(print)
    assert rig.runner.closed
    assert "the engine's thread ends by an error" in caplog.text


def test_a_stalled_policy_and_a_failing_runner_reach_the_waiters() -> None:
    class Lazy(PagedScheduler):
        def schedule(self, step: Any) -> None:
            pass

    with Front(Rig(Lazy)) as front, pytest.raises(SchedulerStalled):
        result(front.ask("a"))

    rig = Rig(PagedScheduler)
    rig.runner.before = lambda out: 1 // 0
    with Front(rig) as front:
        holding = threading.Event()
        front.call(lambda engine: holding.wait(HANG_S))
        futures = [front.ask(name) for name in "abcd"]
        holding.set()
        for future in futures:
            with pytest.raises(EngineFailed, match="ZeroDivisionError"):
                result(future)
    front.assert_has_ended()


def test_what_had_ended_in_the_failing_step_keeps_its_result() -> None:
    def hook(report: Any) -> None:
        if report.num_finished:
            raise OSError("the hook's own fault")

    front = Front(Rig(PagedScheduler, on_step=hook))
    holding = threading.Event()
    front.call(lambda engine: holding.wait(HANG_S))
    short, long = front.ask("short", max_tokens=3), front.ask("long", max_tokens=20)
    holding.set()
    with pytest.raises(OSError, match="own fault"):
        result(long)
    assert result(short).token_ids == front.alone("short")
    front.close()
    front.assert_has_ended()


def test_a_failing_request_ends_alone() -> None:
    rig = Rig(PagedScheduler)

    def fail(out: Any) -> None:
        if any(row.request.id == "bad" for row in out.rows):
            raise OSError("cannot compute bad")

    rig.runner.before = fail
    with Front(rig) as front:
        bad, good = front.ask("bad"), front.ask("good")
        assert (result(bad).finish_reason, result(bad).error) == ("error", "OSError: cannot compute bad")
        assert result(good).token_ids == front.alone("good")
    front.assert_has_ended()


# ------------------------------------------------------------------------------- callbacks


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_a_callback_that_raises_kills_nobody(error: Any, caplog: pytest.LogCaptureFixture) -> None:
    def raises(_: Any) -> None:
        raise error

    with Front(Rig(PagedScheduler)) as front:
        future = front.ask("a")
        future.add_done_callback(raises)
        assert result(future).finish_reason == "length"
        front.call(lambda engine: None).add_done_callback(raises)
        assert result(front.ask("b")).token_ids == front.alone("b")
    front.assert_has_ended()


def test_a_callback_that_raises_while_a_stream_is_abandoned_kills_nobody() -> None:
    rig = Rig(PagedScheduler, seats=1)
    gate = Gate(rig)

    def leave(_: Any) -> None:
        raise SystemExit

    with Front(rig) as front:
        stream = front.stream(*front.job("left"))
        stream._request.add_done_callback(leave)
        gate.wait()
        stream.close()
        other = front.ask("other")
        gate.open()
        assert result(other).token_ids == front.alone("other")
        assert front.stats().finished == {"abort": 1, "length": 1}
    front.assert_has_ended()


def test_a_callback_may_submit_and_is_never_made_to_wait_for_room() -> None:
    rig = Rig(PagedScheduler, seats=1)
    gate = Gate(rig)
    with Front(rig, max_waiting=1) as front:
        chained: Future[Any] = Future()

        def chain(done: Any) -> None:
            front.ask("second").add_done_callback(lambda last: chained.set_result(last.result()))
            try:
                front.ask("third")
            except EngineFull as error:
                refused.set_result(error)

        refused: Future[Any] = Future()
        first = front.ask("first", max_tokens=1)
        first.add_done_callback(chain)
        gate.open()
        assert result(chained).token_ids == front.alone("second")
        assert isinstance(result(refused), EngineFull)


@pytest.mark.parametrize("at", [1, 8])
def test_on_output_sees_every_output_and_its_exception_ends_its_request_alone(at: int) -> None:
    with Front(Rig(PagedScheduler)) as front:
        seen: list[int] = []

        def on_output(output: Any) -> None:
            seen.append(len(output.token_ids))
            if len(seen) == at:
                raise ZeroDivisionError("the caller's own")

        bad = front.ask("bad", options={"on_output": on_output})
        good = front.ask("good")
        with pytest.raises(ZeroDivisionError, match="own"):
            result(bad)
        assert result(good).token_ids == front.alone("good")
        assert seen == list(range(1, at + 1))  # and is called no more
    front.assert_has_ended()


def test_on_output_may_cancel_its_own_request() -> None:
    with Front(Rig(PagedScheduler)) as front:
        asked: Future[Any] = Future()
        future = front.ask("a", max_tokens=50, options={"on_output": lambda output: result(asked).cancel()})
        asked.set_result(future)
        assert wait([future], timeout=HANG_S).done
        assert future.cancelled()
        front.close()
        assert front.stats().finished == {"abort": 1}
    front.assert_has_ended()


def test_call_runs_between_steps_and_gives_what_it_returns_or_raises() -> None:
    rig = Rig(PagedScheduler)
    gate = Gate(rig)
    with Front(rig) as front:
        future = front.ask("a")
        gate.wait()
        steps = front.call(lambda engine: (threading.current_thread().name, engine.stats().num_running))
        unwanted = front.call(lambda engine: 1 // 0)
        fault = front.call(lambda engine: 1 // 0)
        assert unwanted.cancel()
        assert not steps.done()  # a step runs
        gate.open()
        assert result(steps) == ("batchkit", 1)
        assert isinstance(result(front.call(lambda engine: KeyError())), KeyError)
        with pytest.raises(ZeroDivisionError):
            result(fault)
        assert result(future).token_ids == front.alone("a")


def test_weights_changed_from_any_thread_computes_anew() -> None:
    rig = Rig(PagedScheduler)
    gate = Gate(rig)
    with Front(rig) as front:
        future = front.ask("a")
        gate.wait()
        gate.let_one()
        changing = in_thread(front.weights_changed)
        by_callback: Future[Any] = Future()
        future.add_done_callback(lambda _: by_callback.set_result(front.weights_changed()))
        while not front._mailbox.qsize():
            pass
        gate.open()
        result(changing)
        assert result(future).token_ids == front.alone("a")
        assert result(future).timings.recomputed_tokens > 0
        result(by_callback)


# ------------------------------------------------------------------------------- the program around


def test_two_engines_in_one_process_do_not_meet() -> None:
    rigs = [Rig(PagedScheduler, vocab=vocab) for vocab in (100, 1000)]
    with Front(rigs[0]) as one, Front(rigs[1]) as other:
        futures = [front.submit(tokens("same", 4, 100), SamplingParams(max_tokens=8)) for front in (one, other)]
        few, many = (result(future).token_ids for future in futures)
        assert max(few) < 100 < max(many)
        one.close()
        assert result(other.ask("still")).finish_reason == "length"


def test_the_host_program_stays_as_it_was() -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    threads = set(threading.enumerate())
    with Front(Rig(PagedScheduler)) as front:
        assert result(front.ask("a")).finish_reason == "length"
        assert {number: signal.getsignal(number) for number in handlers} == handlers
    assert set(threading.enumerate()) == threads


PROGRAM = """
import os, sys, threading
from concurrent.futures import ThreadPoolExecutor
from batchkit import (
    Engine, EngineClosed, EngineThread, KVGeometry, PagedAllocator, PagedScheduler, SamplingParams, SimulatedRunner
)

def front(**options):
    geometry = KVGeometry(num_blocks=100_000, block_size=16, max_model_len=1_000_000, vocab_size=100)
    runner = SimulatedRunner(geometry, check_kv=False)
    return EngineThread(Engine(runner, PagedScheduler(PagedAllocator(100_000, 16))), **options)

endless = SamplingParams(max_tokens=900_000, ignore_eos=True)
"""


@pytest.mark.parametrize(
    "code",
    [
        "f = front()",
        "f = front(); s = f.stream([1], endless); next(s); future = f.submit([1], endless)",
        "front().submit([1], endless); raise SystemExit",
        "f = front(); ThreadPoolExecutor().submit(lambda: f.submit([1], SamplingParams(max_tokens=9)).result())",
        """
        f = front()
        pid = os.fork()
        if pid == 0:
            for ask in (lambda: f.submit([1]), lambda: f.stream([1]), lambda: f.call(print)):
                try:
                    ask()
                except EngineClosed as error:
                    assert "fork" in str(error)
                else:
                    os._exit(1)
            f.close()
            raise SystemExit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert len(f.submit([1], SamplingParams(max_tokens=3)).result().token_ids) == 3
        """,
    ],
    ids=["idle", "running", "exit", "a thread waits", "fork"],
)
def test_the_interpreter_exits_although_nobody_closed(code: str) -> None:
    if "fork" in code and not hasattr(__import__("os"), "fork"):
        pytest.skip("no fork on this system")
    program = PROGRAM + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S)
    assert (done.returncode, done.stderr) == (0, "")


# ------------------------------------------------------------------------------- all at once


@pytest.mark.parametrize("seed", range(4))
def test_hundreds_of_threads_that_cancel_time_out_and_leave(seed: int) -> None:
    rng = random.Random(seed)
    front = Front(Rig(PagedScheduler, blocks=24, seats=6), max_waiting=rng.choice([1, 4, 50]))
    plans = [(f"r{i}", rng.randint(1, 12), rng.randint(1, 20), rng.random(), rng.random()) for i in range(300)]

    def live(plan: tuple[str, int, int, float, float]) -> str:
        name, prompt, max_tokens, fate, chance = plan
        ids, params = front.job(name, prompt, max_tokens=max_tokens)
        if fate < 0.3:
            future = front.submit(ids, params, request_id=name)
            if chance < 0.5:
                wait([future], timeout=0)
            if future.cancel():
                assert wait([future], timeout=HANG_S).done
                return "cancelled"
            return str(result(future).finish_reason)
        if fate < 0.5:
            output = result(front.submit(ids, params, request_id=name, timeout_s=1 + 20 * chance))
            assert output.finish_reason in ("length", "timeout")
        elif fate < 0.8:
            count = 1 + int(chance * 10)
            outputs = []
            with front.stream(ids, params, request_id=name) as stream:
                for output in stream:
                    outputs.append(output)
                    if len(outputs) == count:
                        break
            assert [token for output in outputs for token in output.new_token_ids] == list(output.token_ids)
        else:
            front.abort(name if chance < 0.5 else "r1")
            output = result(front.submit(ids, params, request_id=name))
        assert output.token_ids == front.alone(name)[: len(output.token_ids)]
        if output.finish_reason == "length":
            assert len(output.token_ids) == max_tokens
        return str(output.finish_reason)

    with ThreadPoolExecutor(len(plans)) as pool:
        fates = [future.result(timeout=HANG_S) for future in [pool.submit(live, plan) for plan in plans]]
    assert len(fates) == 300 and "length" in fates
    front.close()
    front.assert_has_ended()
    assert not front._requests and not front._entrants and front._num_entering == 0


def test_threads_that_submit_while_others_close() -> None:
    for drain in (True, False):
        front = Front(Rig(PagedScheduler, seats=4), max_waiting=3)
        started = threading.Barrier(21)

        def ask(i: int, front: Front = front, started: threading.Barrier = started) -> str:
            started.wait()
            reason = ""
            for j in range(20):
                try:
                    reason = result(front.ask(f"{i}-{j}", max_tokens=3)).finish_reason
                except EngineClosed:
                    return reason
            return reason

        asking = [in_thread(ask, i) for i in range(20)]
        started.wait()
        front.close(drain=drain)
        assert {result(future) for future in asking} <= {"", "length", "abort"}
        front.assert_has_ended()


def test_a_future_is_one_for_concurrent_futures() -> None:
    with Front(Rig(PagedScheduler)) as front:
        futures = [front.ask(name) for name in "abc"]
        done = [future.result().request_id for future in concurrent.futures.as_completed(futures, timeout=HANG_S)]
        assert sorted(done) == ["a", "b", "c"]
