"""An engine for any number of threads: one of its own runs it, the others submit requests and wait for outputs.

::

    submit, stream, cancel, abort, call        any thread: a message into the mailbox, which never blocks
      |
    the engine's thread                        reads the mailbox, steps, hands outputs out, and sleeps when idle
      |
    futures, streams, on_output                the last output, or every one

With `max_waiting`, who submits beyond it stands in a queue before the mailbox, first come first served.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from enum import IntEnum
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from typing_extensions import Unpack, override

from .clocks import VirtualClock
from .engine import Engine, Prompt
from .errors import DuplicateRequest, EngineBusy, EngineClosed, EngineFailed, EngineFull
from .params import SamplingParams
from .schedulers._arguments import check_count, check_number
from .types import EngineStats, RequestOutput

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["EngineThread", "PendingRequest", "RequestOptions", "RequestStream"]

logger = logging.getLogger("batchkit")

T = TypeVar("T")

_LEAST_TIMEOUT_S = 1e-9  # of a request whose time was up before the engine had it; it may not be 0
_EXIT_GRACE_S = 10.0  # so long the interpreter's exit waits for a step to end


class RequestOptions(TypedDict, total=False):
    """Further arguments of `Engine.add_request`, which describes them."""

    request_id: str | None
    priority: int
    arrival: float | None
    deadline: float | None
    length_hint: int | None
    metadata: Mapping[str, Any] | None
    cache_salt: str | None
    chat_template_kwargs: Mapping[str, Any] | None


class _Stage(IntEnum):
    """It only ever rises."""

    OPEN = 0
    DRAINING = 1  # nothing new is taken, what was taken runs to its end
    ABORTING = 2
    CLOSED = 3


class PendingRequest(Future[RequestOutput]):
    """A request on its way through, and the future of its last output.

    It never counts as running: it can be cancelled, which aborts the request, until it has its result.

    Attributes:
        accepted: done when there is room for the request; it has `EngineClosed` if the end comes first.
        request_id: its id, once the engine has taken it.
    """

    def __init__(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        options: RequestOptions,
        *,
        on_output: Callable[[RequestOutput], object] | None,
        timeout_s: float | None,
        submitted: float,
        on_cancel: Callable[[PendingRequest], None],
    ) -> None:
        super().__init__()
        self.accepted: Future[None] = Future()
        self.request_id: str | None = None
        # What follows is for the engine's thread.
        self.prompt = prompt
        self.params = params
        self.options = options
        self.on_output = on_output
        self.timeout_s = timeout_s
        self.submitted = submitted  # on the engine's clock
        self.is_ending = False  # its end was asked for, and the engine's last output of it is still to come
        self.fault: BaseException | None = None  # what on_output raised
        self._on_cancel = on_cancel

    @override
    def cancel(self) -> bool:
        """Abort the request. Returns whether the future is cancelled, False if it has its result already."""
        try:
            return super().cancel()
        finally:
            if self.cancelled():  # even if a callback raised
                self._on_cancel(self)


class RequestStream(Iterator[RequestOutput]):
    """The outputs of one request as they come, the last of them with ``finished=True``; see `EngineThread.stream`.

    Not for several readers at once. Closing it, or letting go of it, aborts the request.
    """

    def __init__(
        self,
        request: PendingRequest,
        outputs: queue.SimpleQueue[RequestOutput | Future[RequestOutput]],
        check_may_wait: Callable[[], None],
        abandon: Callable[[PendingRequest], None],
    ) -> None:
        self._request = request
        self._outputs = outputs
        self._check_may_wait = check_may_wait
        self._abandon = abandon
        self._has_ended = False

    @override
    def __next__(self) -> RequestOutput:
        if self._has_ended:
            raise StopIteration
        self._check_may_wait()
        news = self._outputs.get()
        if isinstance(news, RequestOutput):
            return news
        self._has_ended = True
        if not news.cancelled():
            news.result()  # raises what went wrong
        raise StopIteration

    def close(self) -> None:
        """Abort the request, unless it has ended. Idempotent, from any thread; a waiting reader's iteration ends."""
        self._has_ended = True
        # Not by the future's own `cancel`: a garbage collection may call this while this very thread holds its lock.
        self._abandon(self._request)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._has_ended:
            self.close()


class EngineThread:
    """The thread-safe front of an engine, which it owns from now on.

    Every method may be called from any thread. What runs in the engine's own thread (a future's callbacks,
    `on_output`, ``on_step``, a logits processor, what `call` is given) holds up every request while it runs; it may
    submit, cancel and close, and may not wait for what only that thread can give.

    An error that the engine does not survive (`EngineFailed`, `SchedulerStalled`, `InvariantError`, whatever a policy
    or a hook raises) ends the thread: every future and stream raises it, the engine is closed and its memory freed, and
    later calls raise `EngineClosed` with the error as its cause.

    Use it as a context manager, or call `close`. One that is forgotten does not keep the interpreter from exiting:
    what it runs is aborted then. After a fork the child has no such thread, and `submit` says so there; but a future or
    a stream of before the fork, waited for in the child, waits forever: wait in the parent.

    Args:
        engine: a fresh or idle one. Nobody else may step it or add to it; its questions (`Engine.stats`,
            `Engine.encode`, ...) stay open to all. Waiting for a policy is waiting in real time, except with a
            `VirtualClock`, which jumps.
        max_waiting: so many requests are taken that do not run yet; beyond it `submit` waits. Counted are those that
            wait in the scheduler, preempted ones and each of ``n`` samples among them, and those on their way there.
            Default: any number.

    Raises:
        ValueError: the engine has live requests, whose outputs nobody would get.

    >>> from batchkit import Engine, KVGeometry, PagedAllocator, PagedScheduler, SamplingParams, SimulatedRunner
    >>> geometry = KVGeometry(num_blocks=8, block_size=4, max_model_len=32, vocab_size=100)
    >>> engine = Engine(SimulatedRunner(geometry), PagedScheduler(PagedAllocator(8, 4)))
    >>> with EngineThread(engine) as front:
    ...     future = front.submit([1, 2, 3], SamplingParams(max_tokens=5))
    ...     pieces = [len(output.new_token_ids) for output in front.stream([4], SamplingParams(max_tokens=2))]
    >>> len(future.result().token_ids), pieces
    (5, [1, 1])
    """

    def __init__(self, engine: Engine, *, max_waiting: int | None = None) -> None:
        if not isinstance(engine, Engine):
            raise TypeError(f"engine must be an Engine, got {engine!r}")
        if max_waiting is not None:
            check_count("max_waiting", max_waiting, 1)
        if engine.has_unfinished():
            raise ValueError("the engine has live requests, whose outputs nobody would get")
        self._engine = engine
        self._max_waiting = max_waiting
        # Functions for the engine's thread to call. Its `put` takes no lock that a garbage collection could interrupt.
        self._mailbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._requests: dict[str, PendingRequest] = {}  # of the engine, until their last output; its thread's alone
        # Of what follows. Its holder may take it again: a signal handler, or a finalizer, may close this.
        self._lock = threading.RLock()
        self._stage = _Stage.OPEN
        self._failure: BaseException | None = None
        self._entrants: deque[PendingRequest] = deque()  # they wait for room
        self._num_entering = 0  # accepted, and not in the engine yet
        self._num_waiting = 0  # in the engine when it was looked at last, and since
        self._process = os.getpid()
        # A daemon, since the interpreter waits for all others before it calls what is registered for its exit.
        self._thread = threading.Thread(target=self._run, name="batchkit", daemon=True)
        self._thread.start()
        atexit.register(self._close_at_exit)

    # ------------------------------------------------------------------------------- for any thread

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        on_output: Callable[[RequestOutput], object] | None = None,
        timeout_s: float | None = None,
        max_wait_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> PendingRequest:
        """Run a request; its future gets the last output, or the error with which `Engine.add_request` refuses it.

        Cancelling the future aborts the request; that works until it has a result. ``concurrent.futures.wait`` counts
        it as done once the engine has let go of it. Nobody needs to keep the future.

        Args:
            prompt: see `Engine.add_request`. It is tokenized in the engine's thread.
            params: how to sample and when to stop.
            on_output: is called in the engine's thread with every output, before the future gets the last one. If it
                raises, the request is aborted, and the future gets the exception.
            timeout_s: end it with finish reason ``"timeout"`` so many seconds after this call.
            max_wait_s: with `max_waiting`, wait for room no longer than this, and than `timeout_s`; 0 does not wait,
                nor does a call from the engine's own thread. Default: as long as it takes.
            options: see `Engine.add_request`; ``arrival`` is by default the time of this call.

        Raises:
            EngineFull: there was no room.
            EngineClosed: `close` was called, before or while it waited, or the engine has failed.
            ValueError, TypeError: a time is out of its range, or is no number.
        """
        limit = patience(max_wait_s, timeout_s)
        if self._is_own_thread():
            limit = 0.0
        request = self.enqueue(prompt, params, on_output=on_output, timeout_s=timeout_s, **options)
        try:
            request.accepted.result(limit)
        except FutureTimeoutError:
            request.cancel()
            raise no_room(limit) from None
        except BaseException:
            request.cancel()
            raise
        return request

    def enqueue(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        on_output: Callable[[RequestOutput], object] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> PendingRequest:
        """`submit` without waiting for room: that of the result's `accepted` is left to the caller.

        For event loops, which may not be held up; `AsyncEngine` is made of it. Who finds no patience to wait for
        `accepted` cancels the request.

        Args, and what it raises: as `submit`, without EngineFull.
        """
        if timeout_s is not None:
            timeout_s = _seconds("timeout_s", timeout_s, above_0=True)
        request = PendingRequest(
            prompt,
            params,
            options,
            on_output=on_output,
            timeout_s=timeout_s,
            submitted=self._engine.clock(),
            on_cancel=self._post_abandon,
        )
        with self._lock_if_open():
            if not self._has_room():
                self._num_waiting = self._engine.stats().num_waiting  # some may have begun to run in this step
            is_accepted = not self._entrants and self._has_room()
            if is_accepted:
                self._enter(request)
            else:
                self._entrants.append(request)
        if is_accepted:
            request.accepted.set_result(None)
        return request

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
        max_wait_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestStream:
        """Run a request; its outputs come from the iterator returned, as they are made.

        The engine waits for no reader: outputs that have not been read are kept, at most one for each token. Leaving
        the iteration early aborts the request, as soon as the iterator is let go of or closed. What ends the request
        with an error is raised by the iteration, a refused prompt too.

        Args, and what it raises: as `submit`.
        """
        outputs: queue.SimpleQueue[RequestOutput | Future[RequestOutput]] = queue.SimpleQueue()
        request = self.submit(
            prompt, params, on_output=outputs.put, timeout_s=timeout_s, max_wait_s=max_wait_s, **options
        )
        request.add_done_callback(outputs.put)
        return RequestStream(request, outputs, self._check_may_wait, self._post_abandon)

    def abort(self, request_id: str) -> None:
        """End a request with finish reason ``"abort"``, which its future and stream get; an unknown id is nothing.

        Raises:
            TypeError: the id is no text.
        """
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string, got {request_id!r}")
        self._mailbox.put(partial(self._abort_id, request_id))

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Call a function with the engine in the engine's thread, between two steps.

        For what may not happen while a step runs, such as changing the weights or using the model otherwise. It may
        not step the engine nor add to it: whoever waits for an output that it takes waits forever. If it closes the
        engine, this is closed, and what ran gets `EngineClosed`.

        Returns:
            The future of what it returns, or raises.

        Raises:
            EngineClosed: as `submit`.
        """
        future: Future[T] = Future()
        with self._lock_if_open():
            self._mailbox.put(partial(self._call, function, future))
        return future

    def weights_changed(self) -> None:
        """`Engine.weights_changed`, between two steps; returns when it is done."""
        if self._is_own_thread():
            self._engine.weights_changed()
        else:
            self.call(Engine.weights_changed).result()

    def stats(self) -> EngineStats:
        """`Engine.stats`. Requests on their way to the engine are not counted."""
        return self._engine.stats()

    @property
    def engine(self) -> Engine:
        """The engine, for questions: its tokenizer, `Engine.encode`, geometry and clock."""
        return self._engine

    @property
    def max_waiting(self) -> int | None:
        """The bound that it was given, None for none."""
        return self._max_waiting

    @property
    def is_open(self) -> bool:
        """Whether it takes requests: it is neither closed nor closing, and has not failed."""
        return self._stage is _Stage.OPEN and not self._engine.is_closed

    def close(self, *, drain: bool = True, timeout_s: float | None = None, wait: bool = True) -> None:
        """End the thread, and close the engine. Idempotent.

        Nothing new is taken from now on; who waits for room gets `EngineClosed`.

        Args:
            drain: True: what was submitted runs to its end. False: it ends with finish reason ``"abort"``, and its
                futures and streams get that output. A later call with False cuts an earlier one short.
            timeout_s: drain no longer than this; then abort. Default: as long as it takes.
            wait: return when the thread has ended. False returns at once and leaves `timeout_s` unheeded; in the
                engine's own thread there is no waiting.

        Raises:
            ValueError, TypeError: `timeout_s` is not finite and at least 0, or is no number; nothing is closed.
        """
        if timeout_s is not None:
            timeout_s = min(_seconds("timeout_s", timeout_s), threading.TIMEOUT_MAX)
        if os.getpid() != self._process:
            return
        self._raise_stage(_Stage.DRAINING if drain else _Stage.ABORTING)
        if not wait or self._is_own_thread():
            return
        self._thread.join(timeout_s if drain else None)
        if self._thread.is_alive():
            self._raise_stage(_Stage.ABORTING)
            self._thread.join()
        atexit.unregister(self._close_at_exit)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Drain; after an exception, abort."""
        self.close(drain=kind is None)

    def _close_at_exit(self) -> None:
        if os.getpid() == self._process:
            self._raise_stage(_Stage.ABORTING)
            self._thread.join(_EXIT_GRACE_S)

    def _raise_stage(self, stage: _Stage) -> None:
        with self._lock:
            self._stage = max(self._stage, stage)
            refused = list(self._entrants)
            self._entrants.clear()
        for request in refused:
            _settle(request.accepted, error=self._closed())
            _settle(request, error=self._closed())
        self._mailbox.put(_wake)

    @contextmanager
    def _lock_if_open(self) -> Iterator[None]:
        if os.getpid() != self._process:
            raise EngineClosed(f"this process is a fork; the engine's thread is in process {self._process}")
        with self._lock:
            if self._stage is not _Stage.OPEN:
                raise self._closed()
            yield

    def _closed(self) -> EngineClosed:
        error = EngineClosed("this engine is closed" if self._failure is None else "this engine has failed")
        error.__cause__ = self._failure
        return error

    def _has_room(self) -> bool:
        return self._max_waiting is None or self._num_entering + self._num_waiting < self._max_waiting

    def _enter(self, request: PendingRequest) -> None:
        self._num_entering += 1
        self._mailbox.put(partial(self._add, request))

    def _post_abandon(self, request: PendingRequest) -> None:
        self._mailbox.put(partial(self._abandon, request))

    def _is_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def _check_may_wait(self) -> None:
        if self._is_own_thread():
            raise EngineBusy("the engine's own thread cannot wait for an output, which it would have to make")

    # ------------------------------------------------------------------------------- in the engine's thread

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            self._serve()
        except EngineClosed as error:
            if not self._engine.is_closed:
                failure = error
        except BaseException as error:
            failure = error
        self._end(failure)

    def _serve(self) -> None:
        """Until the end is asked for, or somebody has closed the engine itself."""
        while not self._engine.is_closed:
            stage = self._stage  # read first: all that was submitted before it rose is in the mailbox by now
            has_news = self._read_mailbox()
            if self._let_in():
                has_news = self._read_mailbox()
            if stage >= _Stage.ABORTING:
                return
            if self._engine.has_unfinished():
                if not has_news:
                    self._wait_for_policy()
                for output in self._engine.step():
                    self._deliver(output)
            elif stage is _Stage.DRAINING:
                return
            elif not has_news:
                self._mailbox.get()()

    def _let_in(self) -> bool:
        """Accept who waits for room, as far as there is some. Returns whether it was anybody."""
        if self._max_waiting is None:
            return False
        accepted = []
        num_waiting = self._engine.stats().num_waiting
        with self._lock:
            self._num_waiting = num_waiting
            while self._entrants and self._has_room():
                request = self._entrants.popleft()
                self._enter(request)
                accepted.append(request)
        for request in accepted:
            _settle(request.accepted)
        return bool(accepted)

    def _read_mailbox(self) -> bool:
        """Do what was asked for up to now, but nothing that comes meanwhile. Returns whether there was anything."""
        num_messages = self._mailbox.qsize()
        for _ in range(num_messages):
            self._mailbox.get()()
        return num_messages > 0

    def _wait_for_policy(self) -> None:
        """Sleep until the policy wants to go on, or somebody asks for something."""
        due, clock = self._engine.wait_until, self._engine.clock
        if due is None:
            return
        if isinstance(clock, VirtualClock):
            self._engine.wait()
            return
        with suppress(queue.Empty):
            self._mailbox.get(timeout=min(max(due - clock(), 0.0), threading.TIMEOUT_MAX))()

    def _add(self, request: PendingRequest) -> None:
        fault: BaseException | None = None
        try:
            name = request.options.get("request_id")
            earlier = self._requests.get(name) if isinstance(name, str) else None
            if earlier is not None and earlier.is_ending:
                self._mailbox.put(partial(self._add, request))  # the next step gives the last output of the earlier one
                return
            if self._stage is _Stage.CLOSED:
                raise self._closed()
            if earlier is not None:  # it may be due to time out, which the engine knows before this thread does
                raise DuplicateRequest(f"a request with id {name!r} is still alive")
            if not request.cancelled():
                options: RequestOptions = {"arrival": request.submitted, **request.options}
                request.request_id = self._engine.add_request(
                    request.prompt, request.params, timeout_s=self._time_left(request), **options
                )
        except BaseException as error:  # whatever it is, it is this request's
            fault = error
        with self._lock:
            self._num_entering -= 1
            self._num_waiting += request.request_id is not None
        if request.request_id is None:
            _settle(request, error=fault)
        else:
            self._requests[request.request_id] = request

    def _time_left(self, request: PendingRequest) -> float | None:
        if request.timeout_s is None:
            return None
        return max(request.timeout_s - (self._engine.clock() - request.submitted), _LEAST_TIMEOUT_S)

    def _call(self, function: Callable[[Engine], T], future: Future[T]) -> None:
        result: T | None = None
        fault: BaseException | None = None
        try:
            if self._stage is _Stage.CLOSED:
                raise self._closed()
            if not future.cancelled():
                result = function(self._engine)
        except BaseException as error:
            fault = error
        _settle(future, result, fault)

    def _abandon(self, request: PendingRequest) -> None:
        if not request.cancelled():
            with _callbacks_survived():
                request.cancel()  # which comes back here, unless it has its result
            return
        with self._lock:
            stood_in_queue = request in self._entrants
            if stood_in_queue:
                self._entrants.remove(request)
        if stood_in_queue:
            with _callbacks_survived():
                request.accepted.cancel()
            _settle(request.accepted)
            _settle(request)
        elif request.request_id is not None and self._requests.get(request.request_id) is request:
            self._abort(request, request.request_id)

    def _abort_id(self, request_id: str) -> None:
        if request_id in self._requests:
            self._abort(self._requests[request_id], request_id)

    def _abort(self, request: PendingRequest, request_id: str) -> None:
        request.is_ending = True
        self._engine.abort(request_id)

    def _deliver(self, output: RequestOutput) -> None:
        request = self._requests.get(output.request_id)
        if request is None:
            return
        if request.on_output is not None and request.fault is None and not request.cancelled():
            try:
                request.on_output(output)
            except BaseException as fault:
                request.fault = fault
                self._abort(request, output.request_id)
        if output.finished:
            del self._requests[output.request_id]
            _settle(request, output, request.fault)

    def _end(self, failure: BaseException | None) -> None:
        """Nobody is left without an answer."""
        if failure is not None:
            logger.error("the engine's thread ends by an error", exc_info=failure)
            if not isinstance(failure, Exception):  # it would end the threads of those who wait, too
                wrapped = EngineFailed(f"the engine's thread was ended by {type(failure).__name__}: {failure}")
                wrapped.__cause__ = failure
                failure = wrapped
        self._failure = failure
        self._raise_stage(_Stage.CLOSED)
        outputs: list[RequestOutput] = []
        try:
            outputs = self._engine.close()
        except BaseException as error:
            logger.error("closing the engine failed", exc_info=error)
        for output in outputs:
            if self._failure is None or all(sample.finish_reason != "abort" for sample in output.outputs):
                self._deliver(output)
        for request in self._requests.values():
            _settle(request, error=self._failure or self._closed())
        self._requests.clear()
        self._read_mailbox()


@contextmanager
def _callbacks_survived() -> Iterator[None]:
    """Around what calls the callbacks of a future."""
    try:
        yield
    except BaseException:  # concurrent.futures has caught, and logged, every Exception of a callback
        logger.warning("a callback of a future raised", exc_info=True)


def _settle(future: Future[Any], result: object = None, error: BaseException | None = None) -> None:
    """Give a future its result, or the error if there is one, or tell who waits that it is cancelled. Once for each."""
    with _callbacks_survived():
        if not future.set_running_or_notify_cancel():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


def patience(max_wait_s: float | None, timeout_s: float | None) -> float | None:
    """How long to wait for room, and no longer than Python can wait."""
    limits = []
    if max_wait_s is not None:
        limits.append(_seconds("max_wait_s", max_wait_s))
    if timeout_s is not None:
        limits.append(_seconds("timeout_s", timeout_s, above_0=True))
    return min(*limits, threading.TIMEOUT_MAX) if limits else None


def _seconds(name: str, value: float, *, above_0: bool = False) -> float:
    """A length of time, checked."""
    check_number(name, value)
    try:
        seconds = float(value)
    except OverflowError:  # an integer beyond every float
        seconds = math.inf
    if not 0 <= seconds < math.inf or (above_0 and seconds == 0):
        raise ValueError(f"{name} must be finite and {'above' if above_0 else 'at least'} 0 seconds, got {seconds}")
    return seconds


def no_room(waited_s: float | None) -> EngineFull:
    """The error for who has waited in vain."""
    in_vain = f", and there was no room within {waited_s:g} s" if waited_s else ""
    return EngineFull(f"as many requests wait as max_waiting allows{in_vain}")


def _wake() -> None:
    """A message that only makes the engine's thread look around."""
