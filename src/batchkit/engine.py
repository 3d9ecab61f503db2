"""The engine: takes requests, steps, and gives outputs.

One step, in this order::

    1  out = scheduler.next_step(now)     queues, tables and status change here, and only here
    2  runner.copy_blocks(out.copies)     also when there is no row; in recorded order; never repeated
    3  no row: nothing more               `wait` sleeps until out.wait_until; `step` itself never sleeps
    4  runner.execute(out)                forward and sample; changes no Python state outside the runner
    5  commit                             rows whose sequence no longer runs are skipped; full blocks are published
    6  finished sequences that may leave go
    7  outputs go into the outbox; then on_step(StepReport) is called, and an exception there loses no output

Aborts that arrive during a step, from another thread or from inside it, take effect before its commit.

What happens when something fails:

* The policy raises, or stalls: `step` raises. What its verbs did stays done, copies not made are kept for the next
  step, and the next step asks it anew.
* `execute` raises: nothing of the step is kept, and the next step plans anew. If that one fails too, its rows are
  executed in halves until the failing ones are found; those requests end with finish reason ``"error"``, the others
  go on. When that would end a third request without a single token in between, the fault is not the requests':
  `step` raises EngineFailed and ends none.
* `RunnerOutOfMemory`: the next steps have half the tokens, down to one; the budget grows back as steps succeed.
* `copy_blocks` raises, or `KVLost`: every running sequence is computed anew, from its tokens; three times in a row
  without a token in between is EngineFailed.
* One row has an error, or its text cannot be made: that request ends with finish reason ``"error"``.
* InvariantError is a bug, not a fault, and is never handled: `step` raises it.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import logging
import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import replace
from heapq import heapify, heappop, heappush
from numbers import Integral, Real
from types import NoneType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, get_args

from .allocators import BlockAllocator, PagedAllocator
from .clocks import Clock, MonotonicClock
from .errors import (
    DuplicateRequest,
    EngineBusy,
    EngineClosed,
    EngineFailed,
    InvariantError,
    KVLost,
    PromptsFailed,
    RequestError,
    RunnerError,
    RunnerOutOfMemory,
)
from .intake import Intake, Prompt, named
from .live import LiveRequest, LiveSample
from .params import SamplingParams
from .preemption import Swap
from .runner import ModelRunner
from .scheduler import API_VERSION, Scheduler, argument_names
from .schedulers import ChunkedPrefillScheduler
from .sequence import Sequence, Status
from .stopping import advance
from .text import Tokenizer
from .trace import TraceWriter
from .types import (
    Completion,
    EngineStats,
    FinishReason,
    KVGeometry,
    RequestOutput,
    RequestTimings,
    RowResult,
    SamplerOutput,
    ScheduledSequence,
    SchedulerOutput,
    StepReport,
)

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Engine", "Prompt"]

logger = logging.getLogger("batchkit")
logger.addHandler(logging.NullHandler())  # what is shown is the host program's choice

OnError = Literal["raise", "return"]

_FAILURES_BEFORE_GIVING_UP = 3
_RUNNING = Status.RUNNING  # see `scheduler`
_SLACK = 64  # timeouts of requests that have ended, beyond as many as there are live ones, before they are swept out
_IN_USE = "_serves_an_engine"


class Engine:
    """Continuous batching over a runner, by a scheduler.

    The parts are built by the caller; `from_pretrained` and `from_model` do the usual wiring. One engine has one
    owner: a call from another thread while a step runs raises EngineBusy, except `abort`, which is queued, and
    questions (`has_unfinished`, `is_closed`, `stats`, `geometry`, `clock`), which are also answered after `close`.
    Leaving a ``with`` block closes it.

    Args:
        runner: computes; see `ModelRunner`.
        scheduler: decides; see `Scheduler`. It may not serve another engine.
        tokenizer: for text prompts, text outputs and stop strings; see `batchkit.text.Tokenizer`. Without one the
            engine takes and gives token ids.
        clock: the source of time. Default: the system's monotonic clock.
        on_step: called with a `StepReport` after each step that had rows or copies and did not raise. It may call
            `add_request`, `abort` and `stats`.
        trace: a file that gets a line of JSON for each of those steps; see `batchkit.trace`. One that exists is
            overwritten.

    Raises:
        ValueError: the parts do not agree about the blocks, or serve another engine.
        TypeError: a part is not what it should be.
        OSError: the trace cannot be written.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        *,
        tokenizer: Tokenizer | None = None,
        clock: Clock | None = None,
        on_step: Callable[[StepReport], None] | None = None,
        trace: str | os.PathLike[str] | None = None,
    ) -> None:
        if not isinstance(runner, ModelRunner):
            raise TypeError(
                f"runner must be a ModelRunner, got {type(runner).__name__}; Engine.from_model takes a model"
            )
        if not isinstance(scheduler, Scheduler):
            raise TypeError(f"scheduler must be an instance of a Scheduler subclass, got {scheduler!r}")
        if scheduler.api_version != API_VERSION:
            raise ValueError(
                f"{type(scheduler).__name__} was written for version {scheduler.api_version} of the scheduler "
                f"interface, this is version {API_VERSION}"
            )
        missing = [name for name in ("encode", "decode", "eos_token_id") if not hasattr(tokenizer, name)]
        if tokenizer is not None and missing:
            raise TypeError(f"tokenizer must be a Tokenizer, and {tokenizer!r} has no {' and no '.join(missing)}")
        if clock is not None and not (callable(clock) and hasattr(clock, "sleep_until")):
            raise TypeError(f"clock must be a Clock, which is called for the time and has sleep_until, got {clock!r}")
        if on_step is not None and not callable(on_step):
            raise TypeError(f"on_step must be a function of a StepReport, got {on_step!r}")
        _check_parts_agree(runner, scheduler)
        host = getattr(scheduler.preemption, "host", None)
        self._parts = [runner, scheduler, scheduler.allocator, *([host] if isinstance(host, BlockAllocator) else [])]
        for part in self._parts:
            if part.__dict__.get(_IN_USE):
                raise ValueError(f"this {type(part).__name__} serves another engine already; each needs its own")
        geometry = runner.geometry
        self._runner = runner
        self._scheduler = scheduler
        self._waiting, self._running = scheduler.waiting, scheduler.running
        self._tokenizer = tokenizer
        self._clock: Clock = clock if clock is not None else MonotonicClock()
        self._on_step = on_step
        self._vocab_size = geometry.vocab_size
        self._max_model_len = min(geometry.max_model_len, scheduler.max_model_len or geometry.max_model_len)
        self._intake = Intake(geometry, tokenizer, self._clock, self._max_model_len)

        self._live: dict[int, LiveRequest] = {}  # by the Sequence.id of each sample that the scheduler has
        self._by_id: dict[str, LiveRequest] = {}  # by the caller's id
        self._outbox: list[RequestOutput] = []
        self._inboxes: dict[int, deque[RequestOutput]] = {}  # of the streams that are read, by their `id`
        self._closed = self._has_closed_runner = False
        # Held while a step or a change is under way. Its thread may take it again, and finds `_in_turn` True, unless an
        # interrupt came just after it was taken or just before it was given back: then that is made good.
        self._turn_lock = threading.RLock()
        self._in_turn = False
        self._owner = threading.get_ident()  # the thread of the last turn
        self._in_hook = False
        # Makes "is it live?" and "mark it aborted" one act. Its holder may take it again: a stream that is thrown away
        # aborts what runs, at whatever line of this thread the garbage is collected.
        self._id_lock = threading.RLock()
        self._aborts: deque[LiveRequest] = deque()
        self._timeouts: list[tuple[float, int, LiveRequest]] = []  # a heap; those that have ended among them
        self._next_id = 0
        self._wait_until: float | None = None
        self._failures = 0  # failed steps in a row
        self._losses = 0  # losses of the KV cache without a step that worked in between
        self._errors = 0  # requests ended by the runner's faults since the last token
        self._token_limit: int | None = None  # after RunnerOutOfMemory

        self._num_steps = self._prompt_tokens = self._generated_tokens = self._computed_tokens = 0
        self._num_preemptions = self._recomputed_tokens = self._peak_used_blocks = 0
        self._finished: Counter[FinishReason] = Counter()
        self._num_left = 0  # sequences that are alive no more
        self._trace = TraceWriter(trace, self.stats(), self._clock()) if trace is not None else None
        for part in self._parts:  # last, so that an engine that could not be made leaves them free
            part.__dict__[_IN_USE] = True

    # ------------------------------------------------------------------------------- wiring

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str,
        *,
        device: str | None = None,
        dtype: str = "auto",
        **options: Any,
    ) -> Engine:
        """Load a model and its tokenizer with transformers, and serve it.

        Args:
            name_or_path: what transformers' ``from_pretrained`` takes.
            device: where to put the weights. Default: the accelerator torch finds, else the CPU.
            dtype: a torch dtype or its name; "auto": the checkpoint's own.
            options: see `from_model`. `pack_weights` is ``"move"`` unless it is given, since nobody else has the model.

        Raises:
            UnsupportedModel: the model cannot be bound; with every reason.
        """
        from .hf.garbage import seldom_collected
        from .hf.loading import load_model

        with seldom_collected():
            model, tokenizer = load_model(name_or_path, device=device, dtype=dtype)
        return cls.from_model(model, tokenizer, **{"pack_weights": "move", **options})

    @classmethod
    def from_model(
        cls,
        model: Any,
        tokenizer: Any = None,
        *,
        scheduler: type[Scheduler] = ChunkedPrefillScheduler,
        allocator: type[BlockAllocator] = PagedAllocator,
        kv_memory: int | str | None = None,
        num_kv_blocks: int | None = None,
        block_size: int | None = None,
        swap_memory: int | str | None = None,
        prefix_caching: bool = False,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_tokens_per_step: int | None = None,
        attention: Any = None,
        cuda_graphs: bool = False,
        optimize: bool = True,
        pack_weights: Literal["copy", "move"] | None = None,
        clock: Clock | None = None,
        on_step: Callable[[StepReport], None] | None = None,
        trace: str | os.PathLike[str] | None = None,
        **scheduler_args: Any,
    ) -> Engine:
        """Serve a transformers model that the caller has already, and keeps.

        The engine runs a structural clone that shares the weights; the caller's model behaves as before.

        Args:
            model: a causal language model of transformers.
            tokenizer: its transformers tokenizer, or any `batchkit.text.Tokenizer`.
            scheduler: the policy's class.
            allocator: the allocator's class.
            kv_memory: the KV cache's size in bytes, or like "2GiB". Default: half of the memory that is free, on CUDA
                half of what the largest steps leave of it, but no more than `max_num_seqs` sequences of full length can
                use.
            num_kv_blocks: the KV cache's size in blocks, instead.
            block_size: tokens per block. Default: the attention backend's choice.
            swap_memory: host memory for preempted sequences, in bytes or like "1GiB". Default: none, they are
                recomputed.
            prefix_caching: keep the KV of prompts and outputs for requests that begin with the same tokens, for as long
                as nobody needs the memory.
            max_model_len: the most tokens of prompt and output together. Default: the model's limit.
            max_num_seqs: see `Scheduler`.
            max_tokens_per_step: see `Scheduler`.
            attention: a backend, or its name; see `batchkit.hf.runner.TransformersRunner`.
            cuda_graphs: see `batchkit.hf.runner.TransformersRunner`.
            optimize: see `batchkit.hf.runner.TransformersRunner`.
            pack_weights: see `batchkit.hf.runner.TransformersRunner`.
            clock: see `Engine`.
            on_step: see `Engine`.
            trace: see `Engine`.
            scheduler_args: further arguments of the policy's class.

        Raises:
            UnsupportedModel: the model cannot be bound, or not with this attention; with every reason.
            OutOfKVMemory: not one block fits.
        """
        from .hf.runner import TransformersRunner
        from .hf.tokenizer import as_tokenizer

        if not (isinstance(scheduler, type) and issubclass(scheduler, Scheduler)):
            raise TypeError(
                f"scheduler must be a class, such as PagedScheduler, got {scheduler!r}; its arguments are given beside "
                "it, as in Engine.from_pretrained(path, scheduler=MyPolicy, most=2), and names are for the command line"
            )
        if not (isinstance(allocator, type) and issubclass(allocator, BlockAllocator)):
            raise TypeError(f"allocator must be a subclass of BlockAllocator, got {allocator!r}")
        _check_arguments(scheduler, scheduler_args)
        if not isinstance(prefix_caching, bool):
            raise TypeError(f"prefix_caching must be True or False, got {prefix_caching!r}")
        if prefix_caching and "prefix_caching" not in inspect.signature(allocator).parameters:
            raise ValueError(f"{allocator.__name__} cannot keep prefixes; prefix_caching needs a PagedAllocator")
        tokenizer = as_tokenizer(tokenizer)
        runner = TransformersRunner(
            model,
            kv_memory=kv_memory,
            num_kv_blocks=num_kv_blocks,
            block_size=block_size,
            swap_memory=swap_memory,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs or scheduler.default_max_num_seqs,
            max_tokens_per_step=max_tokens_per_step or scheduler.default_max_tokens_per_step,
            attention=attention,
            cuda_graphs=cuda_graphs,
            optimize=optimize,
            pack_weights=pack_weights,
            tokenizer=tokenizer,
        )
        try:
            geometry = runner.geometry
            host = PagedAllocator(geometry.host_blocks, geometry.block_size) if geometry.host_blocks else None
            caching = {"prefix_caching": True} if prefix_caching else {}
            policy = scheduler(
                allocator(geometry.num_blocks, geometry.block_size, **caching),
                max_model_len=geometry.max_model_len,
                max_num_seqs=max_num_seqs,
                max_tokens_per_step=max_tokens_per_step,
                preemption=Swap(host) if host else None,
                **scheduler_args,
            )
            return cls(runner, policy, tokenizer=tokenizer, clock=clock, on_step=on_step, trace=trace)
        except BaseException:
            runner.close()
            raise

    # ------------------------------------------------------------------------------- requests in

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        arrival: float | None = None,
        deadline: float | None = None,
        length_hint: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        cache_salt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Queue a request. All or nothing: if it raises, the engine is as it was.

        Args:
            prompt: text, or token ids, or the messages of a conversation (``[{"role": "user", "content": "..."}]``),
                which go through the tokenizer's chat template. That gives the special tokens of the prompt, so that
                none are added; text gets those that the tokenizer adds by default.
            params: how to sample and when to stop. Default: ``SamplingParams()``.
            request_id: a name for it; free again once the request has ended. Default: a fresh one.
            arrival: when it arrived, in seconds of the engine's clock. Default: now.
            priority: for policies; the engine does not read it, nor the next three.
            deadline: in seconds of the engine's clock.
            length_hint: a guess of the number of tokens it will generate.
            metadata: anything, a tenant's name for instance.
            timeout_s: end it with finish reason ``"timeout"`` at the first step so many seconds after this call.
            cache_salt: it shares cached prefixes only with requests that have the same one, or none as well: whether a
                prompt is in the cache can be told from its time, and a tenant's salt keeps that from others.
            chat_template_kwargs: for the chat template of messages, such as ``tools``. By default it opens the
                assistant's turn (``add_generation_prompt``), unless ``continue_final_message`` is set.

        Returns:
            The request's id.

        Raises:
            RequestError: it cannot be taken, now or ever; the message has the numbers.
            TypeError: an argument is not what it should be.
            EngineBusy: another thread is in `step`.
            EngineClosed: after `close`.
        """
        return self._add(
            prompt,
            params,
            request_id=request_id,
            priority=priority,
            arrival=arrival,
            deadline=deadline,
            length_hint=length_hint,
            metadata=metadata,
            timeout_s=timeout_s,
            cache_salt=cache_salt,
            chat_template_kwargs=chat_template_kwargs,
        )

    def _add(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        *,
        position: int | None = None,
        inbox: deque[RequestOutput] | None = None,
        timeout_s: float | None = None,
        **options: Any,
    ) -> str:
        due = None if timeout_s is None else self._clock() + _seconds("timeout_s", timeout_s)
        with self._turn():
            self._apply_aborts()
            request = self._intake.request(prompt, params, fresh_id=self._fresh_id, **options)
            if request.id in self._by_id:
                raise DuplicateRequest(f"a request with id {request.id!r} is still alive")
            self._runner.check_request(request)
            samples = [LiveSample(seq, self._intake.text(request)) for seq in Sequence.samples_of(request)]
            live = LiveRequest(request, samples, position, inbox)
            self._queue(live, 1)
            with self._id_lock:
                self._by_id[request.id] = live
            if due is not None:
                if len(self._timeouts) > 2 * len(self._by_id) + _SLACK:
                    self._timeouts = [entry for entry in self._timeouts if not entry[2].has_ended]
                    heapify(self._timeouts)
                heappush(self._timeouts, (due, samples[0].seq.id, live))
            if self._trace is not None:
                self._trace.added(request)
            return request.id

    def _queue(self, live: LiveRequest, count: int) -> None:
        """Give the scheduler the next `count` samples, in front of who waits unless it is the first."""
        samples = [live.unqueued.popleft() for _ in range(count)]
        for sample in reversed(samples):
            self._scheduler.add(sample.seq, front=sample.seq.index > 0)
            self._live[sample.seq.id] = live
        self._wait_until = None  # it may be what the policy waited for

    def encode(self, prompt: Prompt, *, chat_template_kwargs: Mapping[str, Any] | None = None) -> tuple[int, ...]:
        """The token ids that `add_request` would make of a prompt; to count them, or to cut them.

        Raises:
            RequestError, TypeError: it cannot be encoded, or is empty.
        """
        return self._intake.token_ids(prompt, chat_template_kwargs)

    def _fresh_id(self) -> str:
        while True:
            self._next_id += 1
            if (name := f"request-{self._next_id}") not in self._by_id:
                return name

    def abort(self, request_id: str) -> bool:
        """End a request, whatever state it is in. May be called from any thread and from inside a step.

        Its last output, with finish reason ``"abort"``, comes from the next `step`, or from the running one.

        Returns:
            Whether there was anything to end: False for an id that is unknown, ended, or aborted already.
        """
        with self._id_lock:
            live = self._by_id.get(request_id)
            if live is None or live.ending is not None:
                return False
            live.ending = "abort"
            self._aborts.append(live)
        self._abort_now()
        return True

    def _abort_now(self) -> None:
        # Another thread leaves it to the owner's running or next step; here no step is running, unless the call comes
        # from inside of one.
        if threading.get_ident() == self._owner and self._turn_lock.acquire(blocking=False):
            try:
                if not self._in_turn:
                    self._apply_aborts()
            finally:
                self._turn_lock.release()

    # ------------------------------------------------------------------------------- the loop

    def has_unfinished(self) -> bool:
        """Whether a request is alive, or `step` has an output that it has not delivered yet."""
        return bool(self._live or self._outbox)

    def step(self) -> list[RequestOutput]:
        """Do one step, and return what came of it: one `RequestOutput` for each request that has news.

        What comes of the prompts of a `stream` comes from that, whoever steps.

        Without live requests, and when the policy waits for a later time (see `wait`), it only returns outputs that
        are left over. It never sleeps.

        Raises:
            SchedulerStalled: the policy left live requests without work.
            EngineFailed: the runner keeps failing; every request is still there.
            EngineBusy, EngineClosed: see `add_request`.
            Whatever the policy or the hook raised; no output is lost by it.
        """
        self._step()
        outputs, self._outbox = self._outbox, []
        return outputs

    def _step(self) -> None:
        if self._in_hook:
            raise EngineBusy("step was called from inside on_step")
        self._take_lock()
        try:  # `_turn`, without the cost of its generator
            self._in_turn = True
            self._owner = threading.get_ident()
            report = self._advance()
        finally:
            self._in_turn = False
            self._give_lock_back()
        if report is not None and self._on_step is not None:
            self._in_hook = True
            try:
                self._on_step(report)
            finally:
                self._in_hook = False

    @property
    def wait_until(self) -> float | None:
        """When there is something to do again, in seconds of the engine's clock, as of the last step; None: now.

        For loops that wait by means of their own; others call `wait`.
        """
        due = self._wait_until
        return due if due is None or not self._timeouts else min(due, self._timeouts[0][0])

    def wait(self, until: float | None = None) -> None:
        """Sleep until the time that the last step's policy waits for; return at once if it waits for none.

        Args:
            until: sleep no longer than to this time, in seconds of the engine's clock; a new request may be due.
        """
        if not self._outbox:
            self._wait(until)

    def _wait(self, until: float | None = None) -> None:
        if self._wait_until is None and not (self._in_turn or self._closed):
            return  # after most steps
        with self._turn():
            due, self._wait_until = self.wait_until, None
        if due is not None and not self._aborts:  # others may call while it sleeps
            self._clock.sleep_until(due if until is None else min(until, due))

    def _advance(self) -> StepReport | None:
        if self._timeouts:
            self._time_out()
        if self._aborts:
            self._apply_aborts()
        self._wait_until = None
        if not self._live:
            return None
        scheduler = self._scheduler
        began = time.perf_counter()
        now = self._clock()
        out = scheduler.next_step(now, max_tokens=self._token_limit)
        scheduled = time.perf_counter()
        self._num_preemptions += len(out.preempted)
        allocator = scheduler.allocator
        used = allocator.num_blocks - allocator.num_free_blocks
        if used > self._peak_used_blocks:
            self._peak_used_blocks = used
        is_watched = self._on_step is not None or self._trace is not None
        kv_tokens = self._kv_tokens(out) if is_watched else 0
        if not out.rows and not out.copies:
            self._wait_until = out.wait_until
            return None
        results: Iterable[tuple[ScheduledSequence, RowResult]] = ()
        sample_s, error = 0.0, None
        try:
            if out.copies:
                self._copy(out)
            if out.rows:
                results, sample_s, error = self._execute(out)
        except KVLost as lost:
            error = lost
            self._recompute_all(lost)
        executed = time.perf_counter()
        self._wait_until = out.wait_until
        num_new_tokens, num_finished = self._commit(now, results)
        self._num_steps += 1
        if not is_watched:
            return None
        report = StepReport(  # by position: by keyword it takes twice as long
            self._num_steps,
            now,
            out,
            num_new_tokens,
            len(self._waiting),
            len(self._running),
            num_finished,
            used,
            kv_tokens,
            scheduled - began,
            executed - scheduled - sample_s,
            sample_s,
            error,
        )
        if self._trace is not None:
            self._trace.step(report)
        return report

    def _kv_tokens(self, out: SchedulerOutput) -> int:
        """See `StepReport.kv_tokens`, before the rows are computed."""
        running = self._running
        count = out.num_tokens + sum([row.start for row in out.rows])
        if len(running) > len(out.rows):  # some have no row in this step
            in_step = {row.seq_id for row in out.rows}
            count += sum([seq.num_computed for seq in running if seq.id not in in_step])
        allocator = self._scheduler.allocator
        return count - allocator.num_shares * allocator.block_size  # blocks of several tables are full

    def _copy(self, out: SchedulerOutput) -> None:
        try:
            self._runner.copy_blocks(out.copies)
        except (KVLost, InvariantError):
            raise
        except Exception as failure:
            raise KVLost(f"copying KV blocks failed: {failure}") from failure
        except BaseException:
            # Interrupted; which of the copies were made is unknown, and one made twice would copy what is not meant.
            self._scheduler.recompute_all()
            self._retire()
            raise
        self._scheduler.copies_done()

    # ------------------------------------------------------------------------------- failures

    def _execute(
        self, out: SchedulerOutput
    ) -> tuple[Iterable[tuple[ScheduledSequence, RowResult]], float, Exception | None]:
        """The rows that were computed, the seconds spent sampling, and what went wrong, if anything."""
        try:
            got = self._run_rows(out)
        except (KVLost, InvariantError):
            raise
        except RunnerOutOfMemory as failure:
            if out.num_tokens > 1:
                self._token_limit = out.num_tokens // 2
                logger.warning("out of memory with %d tokens in a step, trying %d", out.num_tokens, self._token_limit)
                return (), 0.0, failure
            return self._isolate(out, failure), 0.0, failure
        except Exception as failure:
            self._failures += 1
            if self._failures < 2:
                logger.warning("a step of %d rows failed, planning anew", len(out.rows), exc_info=failure)
                return (), 0.0, failure
            return self._isolate(out, failure), 0.0, failure
        self._failures = self._losses = 0
        if self._token_limit is not None:
            self._token_limit *= 2
            if self._token_limit >= self._scheduler.max_tokens_per_step:
                self._token_limit = None
        self._computed_tokens += out.num_tokens
        return zip(out.rows, got.rows, strict=True), got.sample_s, None

    def _run_rows(self, out: SchedulerOutput) -> SamplerOutput:
        got = self._runner.execute(out)
        if len(got.rows) != len(out.rows):
            raise RunnerError(f"the runner returned {len(got.rows)} results for {len(out.rows)} rows")
        return got

    def _isolate(self, out: SchedulerOutput, failure: Exception) -> list[tuple[ScheduledSequence, RowResult]]:
        """Execute a failing step in halves. Its rows are independent, so those that work are as good as ever."""
        good: list[tuple[ScheduledSequence, RowResult]] = []
        bad: list[tuple[ScheduledSequence, RowResult]] = []
        groups = [out.rows]
        while groups:
            rows = groups.pop()
            part = out._replace(rows=rows, copies=(), num_tokens=sum(row.num_tokens for row in rows))
            try:
                good += zip(rows, self._run_rows(part).rows, strict=True)
                self._computed_tokens += part.num_tokens
            except (KVLost, InvariantError):
                raise
            except Exception as error:
                failure = error
                if isinstance(error, RunnerOutOfMemory) and len(rows) == 1 and part.num_tokens > 1:
                    self._token_limit = part.num_tokens // 2  # it is too long, not at fault
                elif len(rows) == 1:
                    bad.append((rows[0], RowResult(error=named(error))))
                else:
                    groups += [rows[len(rows) // 2 :], rows[: len(rows) // 2]]
        if not good and self._errors + len(bad) >= _FAILURES_BEFORE_GIVING_UP:
            raise EngineFailed(
                f"the runner failed on each of {len(bad)} rows executed alone, and {self._errors} requests before them "
                f"ended by its faults without a token in between; last: {named(failure)}"
            ) from failure
        self._failures = 0
        self._errors += len(bad)
        logger.warning("%d of %d requests ended by a failing step", len(bad), len(out.rows), exc_info=failure)
        return good + bad

    def _recompute_all(self, failure: KVLost) -> None:
        self._scheduler.recompute_all()
        self._retire()
        self._losses += 1
        if self._losses >= _FAILURES_BEFORE_GIVING_UP:
            raise EngineFailed(f"the KV cache was lost {self._losses} times in a row: {failure}") from failure
        logger.warning("the KV cache is lost, every running sequence is computed anew", exc_info=failure)

    # ------------------------------------------------------------------------------- commit

    def _commit(self, now: float, results: Iterable[tuple[ScheduledSequence, RowResult]]) -> tuple[int, int]:
        """Take the results in. Returns the number of tokens kept and of sequences that have ended."""
        scheduler = self._scheduler
        before = self._num_left
        if self._aborts:
            self._apply_aborts()
        news: dict[str, LiveRequest] = {}
        changed: list[tuple[LiveRequest, LiveSample]] = []
        num_new_tokens = 0
        for row, result in results:
            live = None if row.idle else self._live.get(row.seq_id)
            if live is None:
                continue
            sample = live.samples[row.sample_index]
            if sample.seq.status is not _RUNNING:
                continue
            if live.first_scheduled is None:
                live.first_scheduled = now
                self._prompt_tokens += sample.seq.num_prompt
            try:
                reason = self._take(live, sample, row, result)
            except Exception as fault:
                self._fail(live, str(fault) if isinstance(fault, RunnerError) else named(fault))
                news.pop(live.request.id, None)
                continue
            except BaseException:
                # Interrupted between its token and its text: neither can be taken back. The others are planned anew.
                self._fail(live, "interrupted while its token was taken in")
                raise
            if row.samples:
                num_new_tokens += 1
                self._errors = 0
                news[live.request.id] = live
            if reason is not None:
                sample.due = reason
                scheduler.finish(sample.seq)
            if len(live.samples) > 1 and (reason is not None or len(sample.seq.output) == 1):
                changed.append((live, sample))
        for live, sample in reversed(changed):  # each in front of the one before
            if not live.has_ended:
                self._share(live, sample, news)
        self._generated_tokens += num_new_tokens
        self._retire(news)
        if scheduler.streams and news:
            delivered = self._clock()
            for live in news.values():
                self._deliver(live, live.output(delivered))
        return num_new_tokens, self._num_left - before

    def _take(
        self, live: LiveRequest, sample: LiveSample, row: ScheduledSequence, result: RowResult
    ) -> FinishReason | None:
        """Commit one row. What it raises ends the request."""
        if result.error is not None:
            raise RunnerError(result.error)
        seq = sample.seq
        if len(result.token_ids) != row.samples:
            raise RunnerError(f"the runner sampled {len(result.token_ids)} tokens where {int(row.samples)} was due")
        if row.samples and not 0 <= result.token_ids[0] < self._vocab_size:
            raise RunnerError(f"the runner sampled token {result.token_ids[0]}, the vocabulary has {self._vocab_size}")
        seq.num_computed = end = row.start + row.num_tokens
        allocator = self._scheduler.allocator
        if allocator.prefix_caching and end // allocator.block_size > row.start // allocator.block_size:
            allocator.publish(seq.id, row.row, seq.token_ids(0, end), end, live.request.cache_salt)
        if live.prompt_logprobs is not None and row.sample_index == 0 and row.start < seq.num_prompt:
            live.take_prompt_logprobs(result.prompt_logprobs, end)
        if row.samples:
            sample.append(result)
            return advance(seq.request, seq.output, sample.text)
        return "length" if end == seq.num_tokens and not seq.request.max_tokens else None

    def _retire(self, news: dict[str, LiveRequest] | None = None) -> None:
        """Finished sequences that may leave go, and with its last one a request ends; adds to `news` those that go on.

        What is in `news` of a request that ends is in its last output.
        """
        news = {} if news is None else news
        for seq in self._scheduler.retire():
            live = self._left(seq)
            if live.has_ended:
                news.pop(live.request.id, None)
                self._end(live)
            else:
                news[live.request.id] = live

    def _left(self, seq: Sequence) -> LiveRequest:
        """A finished sample has left the scheduler; whose it was."""
        live = self._live.pop(seq.id)
        self._num_left += 1
        sample = live.samples[seq.index]
        sample.reason = sample.due
        return live

    def _share(self, live: LiveRequest, sample: LiveSample, news: dict[str, LiveRequest]) -> None:
        """Let the other samples have the prompt that `sample` has computed.

        With its first token the others are queued, and find its blocks. If it has ended, and nobody else holds the
        prompt, the next one takes its place, so that the blocks stay. Where that is not to be, there is the prefix
        cache; else the next one computes the prompt anew, before the others.
        """
        is_kept = sample.due is None or self._scheduler.allocator.prefix_caching
        heir = None if sample.due is None else live.heir_of(sample)
        if heir is not None and self._scheduler.hand_over(sample.seq, heir.seq):
            is_kept = True
            if live.unqueued and heir is live.unqueued[0]:
                self._live[live.unqueued.popleft().seq.id] = live
            news[self._left(sample.seq).request.id] = live
        if live.unqueued and len(sample.seq.output) == 1:
            self._queue(live, len(live.unqueued) if is_kept else 1)

    def _fail(self, live: LiveRequest, error: str) -> None:
        live.error = error
        self._end(live, "error")

    def _time_out(self) -> None:
        """Mark those whose time is up."""
        while self._timeouts and self._timeouts[0][0] <= self._clock():
            live = heappop(self._timeouts)[2]
            with self._id_lock:
                if live.ending is None:
                    live.ending = "timeout"
                    self._aborts.append(live)

    def _apply_aborts(self) -> None:
        while self._aborts:
            live = self._aborts.popleft()
            if not live.has_ended:
                assert live.ending is not None
                self._end(live, live.ending)

    def _end(self, live: LiveRequest, reason: FinishReason | None = None) -> None:
        """The last output of a request: its samples have left the scheduler, or leave it here for `reason`."""
        with self._id_lock:
            self._by_id.pop(live.request.id, None)
            # It was promised, even if the request ended in the same step.
            promised = live.ending
        for sample in live.samples:
            if sample.reason is None:
                if self._live.pop(sample.seq.id, None) is not None:
                    self._scheduler.abort(sample.seq)
                    self._num_left += 1
                sample.reason = promised or reason
            elif promised and not sample.is_delivered:
                sample.reason = promised
            if sample.text is not None:
                try:
                    sample.text.finish()
                except Exception as fault:
                    live.error = live.error or named(fault)
                    sample.reason = promised or "error"
        live.unqueued.clear()
        if promised:
            live.error = None
        output = live.output(self._clock())
        self._deliver(live, output)
        if self._trace is not None:
            self._trace.ended(output, [sample.seq.id for sample in live.samples])
        assert output.finish_reason is not None
        self._finished["error" if output.error else output.finish_reason] += 1
        self._recomputed_tokens += output.timings.recomputed_tokens

    def _deliver(self, live: LiveRequest, output: RequestOutput) -> None:
        (self._outbox if live.inbox is None else live.inbox).append(output)

    # ------------------------------------------------------------------------------- whole batches

    def generate(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        progress: bool = False,
        on_output: Callable[[RequestOutput], object] | None = None,
        on_error: OnError = "raise",
        window: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Run prompts to their end; returns their final outputs, in the order of the prompts.

        Other requests of this engine go on beside them; their outputs come from the next `step`. If it raises, or is
        interrupted, what it started is aborted. For more prompts than memory has room for, see `stream`.

        Args:
            prompts: what `add_request` takes, many of them; any iterable, read as there is room.
            params: one for all, or one for each.
            progress: show a bar on stderr.
            on_output: called with each final output as soon as it is there, to save it for instance. If it raises, that
                output's finish reason becomes ``"error"``, and the others go on.
            on_error: what becomes of a prompt that cannot be taken: "raise" raises at once, "return" gives it an
                output with finish reason ``"error"``. A request that fails while it runs always gives such an output.
            window: at most so many of the prompts are in the engine at a time. Default: 1024, or four for each seat.
            chat_template_kwargs: see `add_request`; for all prompts.

        Raises:
            RequestError: a prompt cannot be taken, with its position.
            PromptsFailed: the iterable of prompts or of params raised; what was taken before has run to its end, and
                is in the error's `outputs`.
            ValueError: there are fewer or more params than prompts.
        """
        if on_output is not None and not callable(on_output):
            raise TypeError(f"on_output must be a function of a RequestOutput, got {on_output!r}")
        results: dict[int, RequestOutput] = {}
        bar = None
        outputs = self.stream(
            prompts, params, on_error=on_error, window=window, chat_template_kwargs=chat_template_kwargs
        )
        if progress:
            from tqdm import tqdm

            bar = tqdm(total=_length(prompts), unit="req")
        try:
            for output in outputs:
                if output.finished:
                    assert output.position is not None
                    results[output.position] = output if on_output is None else _handed_on(output, on_output)
                    if bar is not None:
                        bar.update()
        except PromptsFailed as failure:
            failure.outputs = [results[position] for position in sorted(results)]
            raise
        finally:
            outputs.close()
            if bar is not None:
                bar.close()
        return [results[position] for position in range(len(results))]

    def stream(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        on_error: OnError = "raise",
        window: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Run prompts to their end, and give every output as it comes: what is new of which prompt.

        `RequestOutput.position` says of which. The engine steps while the generator is asked for the next output.
        Nothing but the window is held, however many prompts there are. Closing the generator aborts what runs. Several
        streams may be read in turn, and `step` and `generate` called in between: each gets its own outputs.

        Args, and what it raises: as `generate`. `PromptsFailed.outputs` is empty, since everything has been given.
        """
        if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
            way_out = "give its input_ids" if _has_input_ids(prompts) else "for a single one, [prompt]"
            raise TypeError(f"this takes many prompts, got {type(prompts).__name__}; {way_out}")
        if (given := _length(params)) is not None and (count := _length(prompts)) is not None and given != count:
            raise ValueError(f"{count} prompts, but {given} params")
        if isinstance(params, Mapping) or not isinstance(params, (SamplingParams, Iterable, NoneType)):
            raise TypeError(f"params must be SamplingParams, or one for each prompt, got {params!r}")
        if on_error not in get_args(OnError):
            raise ValueError(f'on_error must be "raise" or "return", got {on_error!r}')
        if window is None:
            window = max(1024, 4 * self._scheduler.max_num_seqs)
        if not _is_whole(window):
            raise TypeError(f"window must be a whole number, got {window!r}")
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        if self._closed:
            raise EngineClosed("this engine is closed")
        return self._serve(_pairs(prompts, params), on_error, window, chat_template_kwargs)

    def _serve(
        self,
        pairs: Iterator[tuple[Prompt, SamplingParams | None]],
        on_error: OnError,
        window: int,
        chat_template_kwargs: Mapping[str, Any] | None,
    ) -> Generator[RequestOutput, None, None]:
        with self._turn():  # an engine that is closed or busy takes no prompt
            pass
        inbox: deque[RequestOutput] = deque()
        self._inboxes[id(inbox)] = inbox
        exhausted, failure = False, None
        position = -1
        num_open = 0
        try:
            while True:
                while not exhausted and num_open < window:
                    try:
                        prompt, param = next(pairs)
                    except StopIteration:
                        exhausted = True
                        break
                    except Exception as error:
                        exhausted, failure = True, error
                        break
                    position += 1
                    try:
                        self._add(
                            prompt, param, position=position, inbox=inbox, chat_template_kwargs=chat_template_kwargs
                        )
                        num_open += 1
                    except (RequestError, TypeError) as error:
                        if on_error == "raise":
                            raise type(error)(f"prompt {position}: {error}") from error
                        yield _refused(position, error, self._clock())
                if exhausted and not num_open:
                    break
                if not inbox:
                    self._step()
                while inbox:
                    output = inbox.popleft()
                    num_open -= output.finished
                    yield output
                if not inbox:
                    self._wait()
        finally:
            self._inboxes.pop(id(inbox), None)
            with self._id_lock:
                mine = [live for live in list(self._by_id.values()) if live.inbox is inbox and live.ending is None]
                for live in mine:
                    live.ending = "abort"
                self._aborts.extend(mine)
            self._abort_now()
        if failure is not None:
            raise PromptsFailed(
                f"the prompts or their params raised after {position + 1} of them, {named(failure)}; those have run "
                f"to their end"
            ) from failure

    # ------------------------------------------------------------------------------- the rest

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def clock(self) -> Clock:
        """The engine's source of time."""
        return self._clock

    @property
    def tokenizer(self) -> Tokenizer | None:
        """What makes tokens of text and text of tokens, adapted."""
        return self._tokenizer

    @property
    def geometry(self) -> KVGeometry:
        """The runner's KV cache and model limits."""
        return self._runner.geometry

    def stats(self) -> EngineStats:
        """The values in force, and the figures so far."""
        scheduler, allocator = self._scheduler, self._scheduler.allocator
        return EngineStats(
            scheduler=type(scheduler).__name__,
            allocator=type(allocator).__name__,
            num_blocks=allocator.num_blocks,
            block_size=allocator.block_size,
            max_model_len=self._max_model_len,
            max_num_seqs=scheduler.max_num_seqs,
            max_tokens_per_step=scheduler.max_tokens_per_step,
            num_steps=self._num_steps,
            num_waiting=len(self._waiting),
            num_running=len(self._running),
            num_free_blocks=allocator.num_free_blocks,
            num_cached_blocks=allocator.num_cached_blocks,
            peak_used_blocks=self._peak_used_blocks,
            num_preemptions=self._num_preemptions,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            cached_tokens=scheduler.num_cached_tokens,
            computed_tokens=self._computed_tokens,
            recomputed_tokens=self._recomputed_tokens
            + sum(sample.seq.num_recomputed for live in list(self._by_id.values()) for sample in live.samples),
            finished=dict(self._finished),
        )

    def weights_changed(self) -> None:
        """The model's weights were changed in place: drop what was derived from the old ones, the KV among it.

        Running requests go on with the new weights, their context computed anew.
        """
        with self._turn():
            self._runner.weights_changed()
            self._scheduler.recompute_all()
            self._retire()

    def check(self) -> None:
        """Raise InvariantError unless the engine's and the scheduler's books balance. For tests; slow."""
        self._scheduler.check()
        known = {seq.id for queue in (self._waiting, self._running) for seq in queue}
        if known != set(self._live):
            raise InvariantError(f"the scheduler knows sequences {sorted(known)}, the engine {sorted(self._live)}")

    def close(self) -> list[RequestOutput]:
        """Abort what is alive and free everything, the KV memory above all. Idempotent.

        Returns:
            The outputs that had not been delivered, those of the aborted requests among them.
        """
        if self._closed:
            self._close_runner()
            return []
        with self._turn():
            for inbox in list(self._inboxes.values()):
                self._outbox += inbox
                inbox.clear()
            try:
                for live in list(self._by_id.values()):
                    live.inbox = None
                    self._end(live, "abort")
            finally:
                self._closed = True
                for part in self._parts:
                    part.__dict__[_IN_USE] = False
                try:
                    if self._trace is not None:
                        self._trace.close(self._clock())
                finally:
                    self._close_runner()
        outputs, self._outbox = self._outbox, []
        return outputs

    def _close_runner(self) -> None:
        """Close it, once; after an interrupt (not an error) once more."""
        if not self._has_closed_runner:
            try:
                self._runner.close()
            except Exception:
                self._has_closed_runner = True
                raise
            self._has_closed_runner = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold the engine for one change."""
        self._take_lock()
        try:
            self._in_turn = True
            self._owner = threading.get_ident()
            yield
        finally:
            self._in_turn = False
            self._give_lock_back()

    def _take_lock(self) -> None:
        if self._closed:
            raise EngineClosed("this engine is closed")
        taken = self._turn_lock.acquire(blocking=False)
        if not taken or self._in_turn:
            if taken:
                self._turn_lock.release()
            raise EngineBusy("a step is running; only abort may be called from another thread or from inside a step")

    def _give_lock_back(self) -> None:
        try:
            while True:
                self._turn_lock.release()
        except RuntimeError:  # of the release beyond the last
            pass


def _check_parts_agree(runner: ModelRunner, scheduler: Scheduler) -> None:
    geometry, allocator = runner.geometry, scheduler.allocator
    have = (allocator.num_blocks, allocator.block_size)
    if have != (geometry.num_blocks, geometry.block_size):
        raise ValueError(
            f"the allocator has {have[0]} blocks of {have[1]} tokens, the runner {geometry.num_blocks} of "
            f"{geometry.block_size}"
        )
    host = getattr(scheduler.preemption, "host", None)
    if host is allocator:
        raise ValueError("Swap needs an allocator of its own for the host's blocks, not the scheduler's")
    if isinstance(host, BlockAllocator) and (
        host.num_blocks > geometry.host_blocks or host.block_size != geometry.block_size
    ):
        raise ValueError(
            f"Swap has {host.num_blocks} host blocks of {host.block_size} tokens, the runner {geometry.host_blocks} of "
            f"{geometry.block_size}"
        )
    _ = allocator.num_shares  # one that must have it says so here, and not in the first step
    if allocator.num_free_blocks != allocator.num_blocks or scheduler.waiting or scheduler.running:
        raise ValueError(
            f"the scheduler is in use: {allocator.num_blocks - allocator.num_free_blocks} blocks taken, "
            f"{len(scheduler.waiting)} sequences waiting, {len(scheduler.running)} running"
        )


def _is_whole(number: object) -> bool:
    return isinstance(number, Integral) and not isinstance(number, bool)


def _check_arguments(scheduler: type[Scheduler], given: Mapping[str, object]) -> None:
    """Refuse what neither `Engine.from_model` nor the policy takes, before anything is made."""
    if not scheduler.__module__.startswith(f"{__package__}."):
        return  # a class of the user's own may take what it does not name
    known = argument_names(scheduler)
    for name in given:
        if name not in known or name in ("allocator", "preemption"):
            mine = [*inspect.signature(Engine.from_model).parameters, "device", "dtype"]
            near = [other for other in difflib.get_close_matches(name, [*known, *mine]) if other != name]
            raise TypeError(
                f"neither the engine nor {scheduler.__name__} takes an argument {name!r}"
                + (f"; is it {near[0]}?" if near else "")
            )


def _length(things: object) -> int | None:
    return len(things) if isinstance(things, Sized) else None


def _has_input_ids(prompts: object) -> bool:
    """Whether it is what a tokenizer of transformers returns."""
    return isinstance(prompts, Mapping) and "input_ids" in prompts


def _pairs(
    prompts: Iterable[Prompt], params: SamplingParams | Iterable[SamplingParams] | None
) -> Iterator[tuple[Prompt, SamplingParams | None]]:
    if params is None or isinstance(params, SamplingParams):
        for prompt in prompts:
            yield prompt, params
        return
    rest, count = iter(params), 0
    for count, prompt in enumerate(prompts, 1):
        try:
            param = next(rest)
        except StopIteration:
            raise ValueError(f"only {count - 1} params for more prompts than that") from None
        yield prompt, param
    if next(rest, rest) is not rest:
        raise ValueError(f"more params than the {count} prompts")


def _seconds(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a time in seconds, got {value!r}")
    try:
        seconds = float(value)
    except OverflowError:  # an integer beyond every float
        seconds = math.inf
    if not 0 < seconds < math.inf:
        raise RequestError(f"{name} must be finite and above 0 seconds, got {value}")
    return seconds


def _handed_on(output: RequestOutput, on_output: Callable[[RequestOutput], object]) -> RequestOutput:
    """The output, or one that says that its callback raised."""
    try:
        on_output(output)
    except Exception as fault:
        outputs = tuple([copy.copy(completion) for completion in output.outputs])
        for completion in outputs:
            completion.finish_reason = "error"
        return replace(output, outputs=outputs, error=f"on_output raised {named(fault)}")
    return output


def _refused(position: int, error: Exception, now: float) -> RequestOutput:
    """The output of a prompt that was not taken."""
    nothing = Completion(index=0, ids=(), new_token_ids=(), pieces=(), new_text="", finish_reason="error")
    return RequestOutput(
        request_id=f"prompt-{position}",
        prompt_token_ids=(),
        outputs=(nothing,),
        finished=True,
        timings=RequestTimings(arrival=now, finished=now),
        error=str(error),
        position=position,
    )
