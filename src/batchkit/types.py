"""The values that pass between the parts. All are frozen; none holds the object that made it.

``Request -> Sequence -> SchedulerOutput (rows) -> SamplerOutput -> RequestOutput``: what is known at each arrow is in
one record here, except `Sequence`, which is the only mutable one and has a module of its own.

Units: token counts and block counts are plain integers, times are seconds of the engine's clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, NamedTuple

__all__ = [
    "BlockCopy",
    "Blocked",
    "Completion",
    "CopyKind",
    "EngineStats",
    "Eviction",
    "FinishReason",
    "KVGeometry",
    "Refusal",
    "Request",
    "RequestOutput",
    "RequestTimings",
    "RowResult",
    "SamplerOutput",
    "SamplingParams",
    "ScheduledSequence",
    "SchedulerOutput",
    "StepReport",
]

FinishReason = Literal["stop", "length", "abort", "error"]
"""Why a request ended: a stop token or string, its length limit, the caller, or its own fault."""

CopyKind = Literal["copy", "swap_out", "swap_in"]
"""Where a block copy goes: within the device, from device to host, from host to device."""


class Refusal(Enum):
    """Why `Step.run` said no, tested in this order."""

    PREEMPTED = "preempted"
    """It was preempted earlier in the same step."""
    SEATS = "seats"
    """Every one of the ``max_num_seqs`` seats is taken."""
    TOKENS = "tokens"
    """What is left of the token budget is too small."""
    BLOCKS = "blocks"
    """The KV blocks do not suffice, even after all victims offered."""


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if math.isnan(value):
        raise ValueError(f"{name} must be a number, got NaN")
    return float(value)


def _integer(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one request samples and when it stops. Names and meanings are vLLM's.

    The filters apply in the order of transformers' logits warpers: temperature, top_k, top_p, min_p. The most
    probable token always survives them.

    Args:
        max_tokens: the most tokens to generate, at least 1. None: as many as the model's length and the KV pool
            allow, whichever is less; reaching either is finish reason ``"length"``.
        min_tokens: stop tokens are not sampled, and stop strings not looked for, before this many tokens.
        temperature: 0 is greedy; larger is flatter.
        top_k: keep the k most probable tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of most probable tokens whose probability reaches top_p, in (0, 1].
        min_p: drop tokens less probable than min_p times the most probable one, in [0, 1].
        seed: a token is a function of (logits, seed, position), so the same seed gives the same tokens whatever
            else runs. None: a fresh seed for each request.
        stop: a string or strings that end the request when they appear in the generated text.
        stop_token_ids: token ids that end the request, besides the model's own EOS tokens.
        ignore_eos: the model's EOS tokens do not end the request; `stop_token_ids` still do.
        include_stop_str_in_output: keep the stop string, or the text of the stop token, in the text.
        skip_special_tokens: leave special tokens out of the text.
        detokenize: False leaves `text` empty and saves the work; stop strings then cannot be used.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name in ("stop", "stop_token_ids"):
            given = getattr(self, name)
            if isinstance(given, (bytes, Mapping)) or not isinstance(given, Iterable):
                raise TypeError(f"{name} must be a sequence, got {given!r}")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(_integer("a stop token id", t) for t in self.stop_token_ids))
        if self.max_tokens is not None and _integer("max_tokens", self.max_tokens) < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if _integer("min_tokens", self.min_tokens) < 0:
            raise ValueError(f"min_tokens must be at least 0, got {self.min_tokens}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens})")
        if _number("temperature", self.temperature) < 0 or math.isinf(self.temperature):
            raise ValueError(f"temperature must be finite and at least 0, got {self.temperature}")
        if _integer("top_k", self.top_k) < -1:
            raise ValueError(f"top_k must be at least 1, or 0 or -1 to keep all tokens, got {self.top_k}")
        if not 0 < _number("top_p", self.top_p) <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= _number("min_p", self.min_p) <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")
        if self.seed is not None:
            _integer("seed", self.seed)
        for string in stop:
            if not isinstance(string, str):
                raise TypeError(f"a stop string must be a string, got {string!r}")
            if not string:
                raise ValueError("a stop string must not be empty")
        if stop and not self.detokenize:
            raise ValueError("stop strings are looked for in the text, so they need detokenize=True")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Request:
    """What was asked for, with every default resolved. Compared by identity.

    Attributes:
        id: the caller's id, unique among live requests.
        prompt_token_ids: the prompt, never empty.
        params: what the caller gave.
        max_tokens: the resolved limit; ``len(prompt_token_ids) + max_tokens - 1`` KV slots suffice for it, since
            the last sampled token is never written.
        seed: the resolved seed.
        stop_token_ids: the ids that end it: `SamplingParams.stop_token_ids`, and EOS unless ``ignore_eos``.
        arrival: seconds on the engine's clock.
        prompt: the text it was given as, if it was text.
        priority, deadline, length_hint, metadata: for policies; the engine never reads them.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    arrival: float = 0.0
    prompt: str | None = None
    priority: int = 0
    deadline: float | None = None
    length_hint: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class KVGeometry:
    """The shape of a runner's KV cache and of its model; fixed once the runner is constructed.

    Attributes:
        num_blocks: KV blocks on the device.
        block_size: tokens per block.
        host_blocks: KV blocks in host memory, for `Swap`.
        max_model_len: the most tokens of prompt and output together that the model can take.
        vocab_size: token ids are in ``range(vocab_size)``.
        eos_token_ids: what the model's own configuration says ends a text.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    host_blocks: int = 0
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_model_len", "vocab_size"):
            if _integer(name, getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.host_blocks < 0:
            raise ValueError(f"host_blocks must be at least 0, got {self.host_blocks}")


class ScheduledSequence(NamedTuple):
    """One row of a step: values only, so that a step can run again, later, or in another process.

    A named tuple because hundreds are made in every step, in a fifth of the time that a frozen dataclass takes.

    ::

        positions   0 ........ start ............ start + num_tokens
                    | KV is in   | computed and     |
                    | `blocks`   | written now      |

    Position p lies in slot ``blocks[p // block_size] * block_size + p % block_size``.

    Attributes:
        seq_id: the engine's own number of the sequence, never used twice in a process.
        row: 0, except in a beam group.
        seat: 0 .. max_num_seqs - 1, constant while the sequence runs.
        request: what was asked for.
        sample_index: which of the request's samples this is.
        start: positions before it are in the KV cache.
        num_tokens: how many positions to compute, at least 1.
        token_ids: exactly those tokens, never the history.
        output_ids: an append-only buffer of the tokens generated so far; only the first `num_output` count.
        num_output: see `output_ids`.
        blocks: the block table. The same object until the table changes; a ``range`` where it is consecutive by
            construction. It may be longer than needed.
        samples: whether the last position's logits are to be sampled from.
        idle: a held row of a static batch: it computes its last computed position again and changes nothing.
    """

    seq_id: int
    row: int
    seat: int
    request: Request
    sample_index: int
    start: int
    num_tokens: int
    token_ids: tuple[int, ...]
    output_ids: Sequence[int]
    num_output: int
    blocks: Sequence[int]
    samples: bool
    idle: bool


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """One KV block to copy before the rows are computed. `source` and `target` are block numbers."""

    kind: CopyKind
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Eviction:
    """One preemption: the sequence that lost its blocks, and the one that needed them (None: the policy's wish)."""

    seq_id: int
    request_id: str
    for_seq_id: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocked:
    """Why a waiting sequence was not admitted in a step. ``str`` of it is a sentence.

    Attributes:
        request_id: whose.
        why: the answer of `Step.run`; None: the policy did not try it.
        tokens_needed, tokens_left: what it has to compute, and what is left of the token budget.
        blocks_needed, blocks_free: KV blocks; the first as in `BlockAllocator.missing`.
        seats_free: of ``max_num_seqs``.
    """

    request_id: str
    why: Refusal | None
    tokens_needed: int
    tokens_left: int
    blocks_needed: int
    blocks_free: int
    seats_free: int

    def __str__(self) -> str:
        who = f"request {self.request_id!r}"
        if self.why is Refusal.SEATS:
            return f"{who} waits for a seat: {self.seats_free} are free"
        if self.why is Refusal.TOKENS:
            return f"{who} waits for the token budget: it needs {self.tokens_needed}, {self.tokens_left} are left"
        if self.why is Refusal.BLOCKS:
            apart = ", but not side by side" if self.blocks_needed <= self.blocks_free else ""
            return f"{who} waits for KV blocks: it needs {self.blocks_needed}, {self.blocks_free} are free{apart}"
        if self.why is Refusal.PREEMPTED:
            return f"{who} was preempted in this step"
        return (
            f"{who} was not tried by the policy: it needs {self.tokens_needed} tokens and {self.blocks_needed} KV "
            f"blocks; {self.tokens_left} and {self.blocks_free} are free, and {self.seats_free} seats"
        )


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """What one step is to do.

    Attributes:
        rows: in the order in which the policy ran them.
        preempted: who gave way; none of them has a row.
        copies: to be made before the rows, in this order, also when there is no row.
        num_tokens: the sum over the rows.
        wait_until: with no row: when to step again.
        blocked: why nobody else was admitted, if somebody waits still; see `Step.explain`.
    """

    rows: tuple[ScheduledSequence, ...]
    preempted: tuple[Eviction, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    num_tokens: int = 0
    wait_until: float | None = None
    blocked: Blocked | None = None


@dataclass(frozen=True, slots=True)
class RowResult:
    """What a row gave.

    Attributes:
        token_ids: empty if the row does not sample, else one token.
        logprobs: of the sampled tokens.
        prompt_logprobs: by position, so that computing a position again overwrites it.
        error: ends this request alone.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: Mapping[int, float] | None = None
    prompt_logprobs: Mapping[int, float] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """One `RowResult` per row, sampling or not, in row order; and the seconds spent sampling."""

    rows: tuple[RowResult, ...]
    sample_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestTimings:
    """When things happened to a request, in seconds of the engine's clock, and what it cost.

    Attributes:
        arrival: when it was added, or the arrival that the caller gave.
        first_scheduled: when it was first in a step; the queueing time ends here. Preemption does not reset it.
        first_token: when its first token was delivered. Preemption does not reset it.
        finished: when it ended.
        num_preemptions: how often it lost its blocks.
        cached_tokens: prompt tokens that a prefix hit saved.
        recomputed_tokens: tokens whose KV was computed once more after a preemption.
    """

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    num_preemptions: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0


class Completion:
    """One sample of a request as of one step. `text` and `token_ids` are made on access.

    Attributes:
        index: which of the request's samples this is.
        new_text: the text that this output adds. It never splits a character and never holds a part of a stop string.
        new_token_ids: the tokens that this output adds.
        finish_reason: None while it runs.
        logprobs: of the tokens, if asked for.
    """

    __slots__ = (
        "_ids",
        "_num_ids",
        "_num_pieces",
        "_pieces",
        "finish_reason",
        "index",
        "logprobs",
        "new_text",
        "new_token_ids",
    )

    def __init__(
        self,
        *,
        index: int,
        ids: Sequence[int],
        new_token_ids: tuple[int, ...],
        pieces: Sequence[str],
        new_text: str,
        finish_reason: FinishReason | None,
        logprobs: Sequence[Mapping[int, float]] | None = None,
    ) -> None:
        self.index = index
        self.new_text = new_text
        self.new_token_ids = new_token_ids
        self.finish_reason = finish_reason
        self.logprobs = logprobs
        # Append-only buffers that go on growing while the request runs; the counts freeze what this output saw.
        self._ids, self._num_ids = ids, len(ids)
        self._pieces, self._num_pieces = pieces, len(pieces)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens generated so far, a stop token among them. Linear in their number."""
        return tuple(self._ids[: self._num_ids])

    @property
    def num_tokens(self) -> int:
        """``len(token_ids)`` without making them."""
        return self._num_ids

    @property
    def text(self) -> str:
        """All text so far. Linear in its length."""
        return "".join(self._pieces[: self._num_pieces])

    def __repr__(self) -> str:
        return (
            f"Completion(index={self.index}, text={self.text!r}, token_ids={self.token_ids}, "
            f"finish_reason={self.finish_reason!r})"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """What a request has given as of one step; each request has exactly one with ``finished=True``.

    Attributes:
        request_id: the caller's id.
        prompt_token_ids: the prompt.
        outputs: one `Completion` per sample.
        finished: nothing follows.
        timings: see `RequestTimings`.
        error: what went wrong, with finish reason ``"error"``.
        prompt: the prompt's text, if it was given as text.
        position: of the prompt among those of `Engine.generate` or `Engine.stream`, counted from 0.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Completion, ...]
    finished: bool
    timings: RequestTimings
    error: str | None = None
    prompt: str | None = None
    position: int | None = None

    @property
    def text(self) -> str:
        """The text of the first sample."""
        return self.outputs[0].text

    @property
    def new_text(self) -> str:
        """What this output adds to the text of the first sample."""
        return self.outputs[0].new_text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The generated tokens of the first sample."""
        return self.outputs[0].token_ids

    @property
    def new_token_ids(self) -> tuple[int, ...]:
        """What this output adds to the tokens of the first sample."""
        return self.outputs[0].new_token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the first sample ended; None while it runs."""
        return self.outputs[0].finish_reason


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What one step did and what it cost, for the ``on_step`` hook.

    Attributes:
        step: counts the engine's steps from 1.
        time: the engine's clock when the step began.
        output: the plan: rows, preemptions, copies.
        num_new_tokens: tokens sampled in this step and kept.
        num_waiting, num_running, num_finished: sequences after the step; finished: in this step.
        num_used_blocks: blocks that were held while the rows were computed.
        kv_tokens: tokens whose KV those blocks hold once the rows are computed; the rest is reserved or wasted.
        schedule_s, execute_s, sample_s: seconds in the policy, in the forward pass, and in sampling.
        error: the runner's fault, if it failed; its rows are then planned anew by the next step.
    """

    step: int
    time: float
    output: SchedulerOutput
    num_new_tokens: int
    num_waiting: int
    num_running: int
    num_finished: int
    num_used_blocks: int
    kv_tokens: int
    schedule_s: float
    execute_s: float
    sample_s: float
    error: Exception | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """The values an engine works with, and what it has done so far.

    Attributes:
        scheduler, allocator: class names.
        num_blocks, block_size, max_model_len, max_num_seqs, max_tokens_per_step: the values in force.
        num_steps: steps that had rows or copies.
        num_waiting, num_running: sequences now.
        num_free_blocks: blocks that may be given out now.
        peak_used_blocks: the most blocks that were held while rows were computed.
        num_preemptions: how often a sequence lost its blocks.
        prompt_tokens, generated_tokens: of requests that have been scheduled, each counted once.
        computed_tokens: tokens that went through the model, idle rows and recomputation among them.
        recomputed_tokens: tokens whose KV was thrown away.
        finished: how many requests ended for each reason.
    """

    scheduler: str
    allocator: str
    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_tokens_per_step: int
    num_steps: int
    num_waiting: int
    num_running: int
    num_free_blocks: int
    peak_used_blocks: int
    num_preemptions: int
    prompt_tokens: int
    generated_tokens: int
    computed_tokens: int
    recomputed_tokens: int
    finished: Mapping[FinishReason, int]
