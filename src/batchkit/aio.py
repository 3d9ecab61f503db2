"""An engine for asyncio: coroutines submit requests, a thread of the engine's own runs them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakValueDictionary

from typing_extensions import Unpack

from .engine import Engine, Prompt
from .params import SamplingParams
from .threads import EngineThread, PendingRequest, RequestOptions, no_room, patience
from .types import EngineStats, RequestOutput

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["AsyncEngine"]

T = TypeVar("T")

News = RequestOutput | Future[RequestOutput]
"""Of a stream: an output, or at its end the future of the request."""


class AsyncEngine:
    """The front of an engine for coroutines. It owns the engine, and runs it in a thread of its own.

    No call holds up the event loop. The coroutines may be those of several loops in several threads, and other threads
    may use `thread` beside them. Cancelling a task aborts what it waits for. What ends the engine, and what becomes of
    one that is forgotten: see `EngineThread`.

    Use it as an asynchronous context manager, or await `close`.

    Args:
        engine, max_waiting: see `EngineThread`; beyond `max_waiting`, requests wait for room without holding up the
            loop.

    Attributes:
        thread: the front for threads, of the same engine.
    """

    def __init__(self, engine: Engine, *, max_waiting: int | None = None) -> None:
        self.thread = EngineThread(engine, max_waiting=max_waiting)
        self._relays: WeakValueDictionary[asyncio.AbstractEventLoop, _Relay] = WeakValueDictionary()

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
        max_wait_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        """Run a request to its end, and return its last output.

        Args: as `EngineThread.submit`.

        Raises:
            RequestError, TypeError: it cannot be taken; see `Engine.add_request`.
            EngineFull, EngineClosed, ValueError: see `EngineThread.submit`.
        """
        limit = patience(max_wait_s, timeout_s)
        request = self.thread.enqueue(prompt, params, timeout_s=timeout_s, **options)
        try:
            await _room(request, limit)
            return await asyncio.wrap_future(request)
        finally:
            request.cancel()  # which does nothing if it has ended

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
        max_wait_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a request, and give its outputs as they are made, the last of them with ``finished=True``.

        It is submitted when the first output is asked for. The engine waits for no reader, as in
        `EngineThread.stream`. Closing the generator aborts the request; leaving ``async for`` early does so when the
        generator is let go of, at once with ``contextlib.aclosing``.

        Args, and what it raises: as `generate`.
        """
        news: asyncio.Queue[News] = asyncio.Queue()
        put = partial(self._relay().put, news)
        limit = patience(max_wait_s, timeout_s)
        request = self.thread.enqueue(prompt, params, on_output=put, timeout_s=timeout_s, **options)
        try:
            await _room(request, limit)
            request.add_done_callback(put)
            while isinstance(output := await news.get(), RequestOutput):
                yield output
            output.result()  # raises what went wrong
        finally:
            request.cancel()

    def abort(self, request_id: str) -> None:
        """See `EngineThread.abort`."""
        self.thread.abort(request_id)

    async def call(self, function: Callable[[Engine], T]) -> T:
        """`EngineThread.call`, awaited."""
        return await asyncio.wrap_future(self.thread.call(function))

    def stats(self) -> EngineStats:
        """See `EngineThread.stats`."""
        return self.thread.stats()

    async def close(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        """See `EngineThread.close`. Being cancelled cuts the draining short."""
        try:
            await asyncio.to_thread(self.thread.close, drain=drain, timeout_s=timeout_s)
        except asyncio.CancelledError:
            self.thread.close(drain=False, wait=False)
            raise

    def _relay(self) -> _Relay:
        """The one to the running loop, which lives as long as a stream uses it."""
        loop = asyncio.get_running_loop()
        relay = self._relays.get(loop)
        if relay is None:
            relay = self._relays[loop] = _Relay(loop)
        return relay

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Drain; after an exception, abort."""
        await self.close(drain=kind is None)


class _Relay:
    """Takes the news of many streams to their event loop, which is woken once for all that one step gives."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: deque[tuple[asyncio.Queue[News], News]] = deque()
        self._is_called = False

    def put(self, queue: asyncio.Queue[News], item: News) -> None:
        """From any thread. Raises RuntimeError if the loop is closed."""
        self._items.append((queue, item))
        if not self._is_called:
            self._is_called = True
            try:
                self._loop.call_soon_threadsafe(self._hand_out)
            except RuntimeError:
                self._is_called = False
                raise

    def _hand_out(self) -> None:
        self._is_called = False  # first: whoever comes from now on calls again
        while self._items:
            queue, item = self._items.popleft()
            queue.put_nowait(item)


async def _room(request: PendingRequest, limit: float | None) -> None:
    """Wait until the request is accepted."""
    if not request.accepted.done():
        accepted = asyncio.wrap_future(request.accepted)
        accepted.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be left to ask
        # Not by `asyncio.wait_for`, which before Python 3.12 may lose the task's cancellation.
        await asyncio.wait([accepted], timeout=limit)
        if not request.accepted.done():
            raise no_room(limit)
    request.accepted.result()
