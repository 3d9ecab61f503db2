"""AsyncEngine: coroutines ask, a thread answers, and no event loop is held up."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

import pytest

from batchkit import (
    ChunkedPrefillScheduler,
    EngineClosed,
    EngineFull,
    PagedScheduler,
    RequestError,
    SamplingParams,
)
from batchkit.aio import AsyncEngine
from unit.helpers import Rig, tokens

T = TypeVar("T")

HANG_S = 60.0  # what takes as long as this hangs


def run(main: Callable[[], Awaitable[T]]) -> T:
    """`asyncio.run`, which fails instead of hanging, and on what the loop was not told of."""
    complaints: list[Any] = []

    async def guarded() -> T:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        return await asyncio.wait_for(main(), HANG_S)

    got = asyncio.run(guarded())
    gc.collect()
    assert not complaints
    return got


class Held:
    """Holds a rig's steps, behind so many first ones, until it is opened; `begun` is awaited for the first one held."""

    def __init__(self, rig: Rig, *, behind: int = 0) -> None:
        self._behind = behind
        self._began = threading.Event()
        self._opened = threading.Event()
        rig.runner.before = self._hold

    def _hold(self, out: Any) -> None:
        if self._behind:
            self._behind -= 1
            return
        self._began.set()
        assert self._opened.wait(HANG_S), "nobody let this step through"

    async def begun(self) -> None:
        assert await asyncio.to_thread(self._began.wait, HANG_S), "no step was begun"

    def open(self) -> None:
        self._opened.set()


def job(rig: Rig, name: str, prompt: int = 4, **params: Any) -> tuple[list[int], SamplingParams]:
    params = {"temperature": 0, "max_tokens": 8, **params}
    rig.jobs[name] = (tokens(name, prompt), params)
    return tokens(name, prompt), SamplingParams(**params)


def assert_ended(rig: Rig) -> None:
    assert rig.runner.closed
    rig.assert_empty()
    rig.engine.check()


async def settle() -> None:
    """Let every coroutine go on that can."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_many_coroutines_each_get_what_their_request_gets_alone() -> None:
    rig = Rig(ChunkedPrefillScheduler, blocks=32, seats=6, budget=16)

    async def main() -> None:
        async with AsyncEngine(rig.engine, max_waiting=5) as engine:

            async def whole(name: str) -> None:
                output = await engine.generate(*job(rig, name, 9), request_id=name)
                assert (output.request_id, output.token_ids) == (name, rig.alone(name).token_ids)

            async def pieces(name: str) -> None:
                outputs = [output async for output in engine.stream(*job(rig, name, 5), request_id=name)]
                assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
                joined = tuple(token for output in outputs for token in output.new_token_ids)
                assert joined == rig.alone(name).token_ids

            await asyncio.gather(*(whole(f"w{i}") for i in range(40)), *(pieces(f"p{i}") for i in range(40)))
            assert engine.stats().finished == {"length": 80}

    run(main)
    assert_ended(rig)


def test_a_refused_request_raises_and_disturbs_nobody() -> None:
    rig = Rig(PagedScheduler)

    async def main() -> None:
        async with AsyncEngine(rig.engine) as engine:
            good = asyncio.create_task(engine.generate(*job(rig, "good")))
            with pytest.raises(RequestError, match="needs a tokenizer"):
                await engine.generate("text")
            with pytest.raises(RequestError, match="can never run"):
                async for _ in engine.stream([1] * 1000):
                    raise AssertionError("there is no output")
            with pytest.raises(ValueError, match="timeout_s"):
                await engine.generate([1], timeout_s=0)
            with pytest.raises(ValueError, match="max_wait_s"):
                await engine.generate([1], max_wait_s=-1)
            assert (await good).token_ids == rig.alone("good").token_ids

    run(main)


def test_cancelling_a_task_aborts_its_request() -> None:
    rig = Rig(PagedScheduler, seats=1)
    held = Held(rig)

    async def main() -> None:
        async with AsyncEngine(rig.engine) as engine:
            running = asyncio.create_task(engine.generate(*job(rig, "running")))
            await held.begun()

            async def read() -> None:
                async for _ in engine.stream(*job(rig, "waiting")):
                    raise AssertionError("there is no output")

            waiting = asyncio.create_task(read())
            other = asyncio.create_task(engine.generate(*job(rig, "other")))
            await settle()
            for task in (running, waiting):
                assert task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            held.open()
            assert (await other).token_ids == rig.alone("other").token_ids
            await engine.close()
            assert engine.stats().finished["length"] == 1

    run(main)
    assert_ended(rig)


@pytest.mark.parametrize("how", ["break", "aclosing", "exception", "unread"])
def test_leaving_a_stream_early_aborts(how: str) -> None:
    rig = Rig(PagedScheduler)
    held = Held(rig, behind=1)  # so that it has an output, and cannot end before it is left

    async def main() -> None:
        async with AsyncEngine(rig.engine) as engine:
            stream: AsyncGenerator[Any, None] = engine.stream(*job(rig, "left"))
            if how == "break":
                async for output in stream:
                    assert not output.finished
                    break
                del stream
                await settle()
            elif how == "aclosing":
                async with aclosing(stream):
                    await stream.__anext__()
            elif how == "exception":
                with pytest.raises(ZeroDivisionError):
                    async with aclosing(stream):
                        async for _ in stream:
                            raise ZeroDivisionError
            else:
                await stream.aclose()  # nothing was submitted
            held.open()
            output = await engine.generate(*job(rig, "other"))
            assert output.token_ids == rig.alone("other").token_ids
            await engine.close()
            assert engine.stats().finished == ({} if how == "unread" else {"abort": 1}) | {"length": 1}

    run(main)
    assert_ended(rig)


def test_waiting_for_room_holds_no_loop_up_and_is_first_come_first_served() -> None:
    rig = Rig(PagedScheduler, seats=1)
    held = Held(rig)

    async def main() -> None:
        async with AsyncEngine(rig.engine, max_waiting=1) as engine:
            order: list[str] = []

            async def ask(name: str) -> None:
                output = await engine.generate(*job(rig, name))
                assert output.token_ids == rig.alone(name).token_ids
                order.append(name)

            tasks = [asyncio.create_task(ask("running"))]
            await held.begun()
            for name in ("taken", "b0", "b1", "b2", "b3"):
                tasks.append(asyncio.create_task(ask(name)))
                await settle()
            with pytest.raises(EngineFull):
                await engine.generate([1], max_wait_s=0)
            with pytest.raises(EngineFull, match=r"0\.01 s"):
                await engine.generate([1], timeout_s=0.01)
            with pytest.raises(EngineFull):
                async for _ in engine.stream([1], max_wait_s=0):
                    raise AssertionError("there is no output")
            tasks[3].cancel()  # while it waits for room
            await settle()
            held.open()
            got = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(one) for one in got] == [type(None)] * 3 + [asyncio.CancelledError] + [type(None)] * 2
            assert order == ["running", "taken", "b0", "b2", "b3"]
            assert engine.stats().finished == {"length": 5}

    run(main)
    assert_ended(rig)


def test_a_request_times_out() -> None:
    rig = Rig(PagedScheduler)  # each step takes a second

    async def main() -> None:
        async with AsyncEngine(rig.engine) as engine:
            output = await engine.generate(*job(rig, "slow", max_tokens=100), request_id="slow", timeout_s=5)
            assert output.finish_reason == "timeout"
            assert output.token_ids == rig.alone("slow").token_ids[: len(output.token_ids)]

    run(main)


def test_a_bad_argument_is_the_error_of_its_call_alone() -> None:
    rig = Rig(PagedScheduler)

    async def main() -> None:
        async with AsyncEngine(rig.engine) as engine:
            for wrong in ([], {}, 7):
                with pytest.raises(TypeError, match="request_id must be a string"):
                    await engine.generate([1], request_id=wrong)  # type: ignore[arg-type]
                with pytest.raises(TypeError, match="request_id must be a string"):
                    engine.abort(wrong)  # type: ignore[arg-type]
            for times in ({"max_wait_s": "1", "timeout_s": 1}, {"max_wait_s": 1, "timeout_s": "1"}):
                with pytest.raises(TypeError, match="_s must be a number"):
                    await engine.generate([1], **times)  # type: ignore[arg-type]
            for late in (float("nan"), -1, 10**400):
                with pytest.raises(ValueError, match="timeout_s must be finite and at least 0"):
                    await engine.close(timeout_s=late)
            assert (await engine.generate(*job(rig, "good"), request_id="good")).finish_reason == "length"

    run(main)
    assert_ended(rig)


def test_a_wait_may_be_longer_than_python_can_wait() -> None:
    rig = Rig(PagedScheduler, seats=1)
    held = Held(rig)

    async def main() -> None:
        async with AsyncEngine(rig.engine, max_waiting=1) as engine:
            running = asyncio.create_task(engine.generate(*job(rig, "running")))
            await held.begun()
            waiting = [
                asyncio.create_task(engine.generate(*job(rig, f"w{i}"), max_wait_s=1e300, timeout_s=1e12))
                for i in range(2)
            ]
            await settle()
            held.open()
            outputs = await asyncio.gather(running, *waiting)
            assert {output.finish_reason for output in outputs} == {"length"}
            await engine.close(timeout_s=1e300)

    run(main)
    assert_ended(rig)


def test_a_call_that_closes_the_engine_leaves_nobody_waiting() -> None:
    rig = Rig(PagedScheduler)
    held = Held(rig, behind=1)

    async def main() -> None:
        engine = AsyncEngine(rig.engine)
        running = asyncio.create_task(engine.generate(*job(rig, "running", max_tokens=100)))
        await held.begun()
        closing = asyncio.create_task(engine.call(lambda inner: inner.close()))
        await settle()
        held.open()
        (aborted,) = await closing
        assert aborted.finish_reason == "abort"
        with pytest.raises(EngineClosed, match="this engine is closed"):
            await running
        assert not engine.thread.is_open
        await engine.close()

    run(main)
    assert_ended(rig)


def test_abort_by_id_and_call() -> None:
    rig = Rig(PagedScheduler)
    held = Held(rig)

    async def main() -> None:
        async with AsyncEngine(rig.engine) as engine:
            task = asyncio.create_task(engine.generate(*job(rig, "a", max_tokens=100), request_id="a"))
            await held.begun()
            engine.abort("a")
            held.open()
            assert (await task).finish_reason == "abort"
            assert await engine.call(lambda inner: inner is rig.engine)
            with pytest.raises(ZeroDivisionError):
                await engine.call(lambda inner: 1 // 0)

    run(main)


@pytest.mark.parametrize("drain", [True, False])
def test_close_with_requests_in_flight(drain: bool) -> None:
    rig = Rig(PagedScheduler, seats=1)
    held = Held(rig)

    async def main() -> None:
        engine = AsyncEngine(rig.engine, max_waiting=1)
        running = asyncio.create_task(engine.generate(*job(rig, "running")))
        await held.begun()
        waiting = asyncio.create_task(engine.generate(*job(rig, "waiting")))
        blocked = asyncio.create_task(engine.generate(*job(rig, "blocked")))
        await settle()
        closing = asyncio.create_task(engine.close(drain=drain))
        with pytest.raises(EngineClosed):
            await blocked
        assert not closing.done()  # and this loop goes on
        held.open()
        await closing
        reason = "length" if drain else "abort"
        assert [(await task).finish_reason for task in (running, waiting)] == [reason] * 2
        await engine.close()
        with pytest.raises(EngineClosed):
            await engine.generate([1])
        with pytest.raises(EngineClosed):
            await engine.call(print)

    run(main)
    assert_ended(rig)


def test_a_drain_that_is_cancelled_aborts() -> None:
    rig = Rig(PagedScheduler)
    held = Held(rig)

    async def main() -> None:
        engine = AsyncEngine(rig.engine)
        running = asyncio.create_task(engine.generate(*job(rig, "running", max_tokens=200)))
        await held.begun()
        closing = asyncio.create_task(engine.close())
        await settle()
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        held.open()
        assert (await running).finish_reason == "abort"

    run(main)
    assert_ended(rig)


def test_an_error_of_the_loop_reaches_every_coroutine() -> None:
    class Broken(PagedScheduler):
        def schedule(self, step: Any) -> None:
            if self.running and self.waiting:
                raise ZeroDivisionError("a bug of the policy")
            super().schedule(step)

    rig = Rig(Broken, seats=2)
    held = Held(rig)

    async def main() -> None:
        async with AsyncEngine(rig.engine, max_waiting=2) as engine:
            running = asyncio.create_task(engine.generate(*job(rig, "running")))
            await held.begun()

            async def read() -> list[Any]:
                return [output async for output in engine.stream(*job(rig, "read"))]

            others = [asyncio.create_task(read()) for _ in range(2)]
            await settle()
            blocked = asyncio.create_task(engine.generate(*job(rig, "blocked")))
            await settle()
            held.open()
            for task in (running, *others):
                with pytest.raises(ZeroDivisionError, match="a bug"):
                    await task
            with pytest.raises(EngineClosed, match="has failed"):
                await blocked
            with pytest.raises(EngineClosed, match="has failed"):
                await engine.generate([1])

    run(main)
    assert rig.runner.closed


def test_coroutines_of_several_loops_and_threads_share_one_engine() -> None:
    rig = Rig(PagedScheduler, blocks=48, seats=4)
    engine = AsyncEngine(rig.engine, max_waiting=2)

    async def main(place: int) -> None:
        async def ask(name: str) -> None:
            output = await engine.generate(*job(rig, name), request_id=name)
            assert output.token_ids == rig.alone(name).token_ids

        await asyncio.gather(*(ask(f"{place}-{i}") for i in range(10)))

    errors: list[BaseException] = []

    def loop(place: int) -> None:
        try:
            asyncio.run(main(place))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=loop, args=(place,), daemon=True) for place in range(4)]
    for thread in threads:
        thread.start()
    beside = engine.thread.submit(*job(rig, "beside"), request_id="beside")
    for thread in threads:
        thread.join(HANG_S)
        assert not thread.is_alive()
    assert not errors
    assert beside.result(timeout=HANG_S).token_ids == rig.alone("beside").token_ids
    engine.thread.close()
    assert_ended(rig)


def test_a_loop_that_ends_first_takes_its_requests_with_it() -> None:
    rig = Rig(PagedScheduler)
    engine = AsyncEngine(rig.engine)
    held = Held(rig)

    async def main() -> None:
        asyncio.create_task(engine.generate(*job(rig, "left", max_tokens=200)))  # noqa: RUF006 - asyncio.run cancels it
        await held.begun()

    run(main)
    held.open()
    output = engine.thread.submit(*job(rig, "later")).result(timeout=HANG_S)
    assert output.token_ids == rig.alone("later").token_ids
    engine.thread.close()
    assert rig.engine.stats().finished == {"abort": 1, "length": 1}
    assert_ended(rig)


def test_a_loop_that_is_closed_under_a_stream_costs_that_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(PagedScheduler)
    held = Held(rig, behind=1)
    engine = AsyncEngine(rig.engine)
    loop = asyncio.new_event_loop()
    stream = engine.stream(*job(rig, "left", max_tokens=200))
    assert loop.run_until_complete(stream.__anext__()).new_token_ids
    loop.close()
    held.open()
    output = engine.thread.submit(*job(rig, "other")).result(timeout=HANG_S)
    assert output.token_ids == rig.alone("other").token_ids
    engine.thread.close()
    assert rig.engine.stats().finished == {"abort": 1, "length": 1}
    assert "Event loop is closed" in caplog.text
    assert_ended(rig)


@pytest.mark.parametrize("seed", range(3))
def test_hundreds_of_coroutines_that_are_cancelled_time_out_and_leave(seed: int) -> None:
    rng = random.Random(seed)
    rig = Rig(PagedScheduler, blocks=24, seats=6)
    plans = [(f"r{i}", rng.randint(1, 12), rng.randint(1, 20), rng.random(), rng.random()) for i in range(300)]

    async def main() -> list[str]:
        async with AsyncEngine(rig.engine, max_waiting=rng.choice([1, 4, 50])) as engine:

            async def live(plan: tuple[str, int, int, float, float]) -> str:
                name, prompt, max_tokens, fate, chance = plan
                ids, params = job(rig, name, prompt, max_tokens=max_tokens)
                if fate < 0.3:
                    task = asyncio.create_task(engine.generate(ids, params, request_id=name))
                    for _ in range(int(chance * 200)):
                        await asyncio.sleep(0)
                    task.cancel()
                    try:
                        output = await task
                    except asyncio.CancelledError:
                        return "cancelled"
                elif fate < 0.5:
                    output = await engine.generate(ids, params, request_id=name, timeout_s=30 + 300 * chance)
                elif fate < 0.8:
                    count = 1 + int(chance * 10)
                    async with aclosing(engine.stream(ids, params, request_id=name)) as stream:
                        async for output in stream:
                            count -= 1
                            last = output
                            if not count:
                                break
                    output = last
                else:
                    output = await engine.generate(ids, params, request_id=name)
                assert output.token_ids == rig.alone(name).token_ids[: len(output.token_ids)]
                return str(output.finish_reason)

            return list(await asyncio.gather(*map(live, plans)))

    fates = run(main)
    assert len(fates) == 300 and {"length", "cancelled"} <= set(fates)
    assert_ended(rig)
