"""The values that pass between the parts. All are frozen; none holds the object that made it.

``Request -> Sequence -> SchedulerOutput (rows) -> SamplerOutput -> RequestOutput``: what is known at each arrow is in
one record here, except `Sequence`, which is the only mutable one and has a module of its own.

Units: token counts and block counts are plain integers, times are seconds of the engine's clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, NamedTuple

from .params import SamplingParams, integer

__all__ = [
    "BlockCopy",
    "Blocked",
    "Completion",
    "CopyKind",
    "EngineStats",
    "Eviction",
    "FinishReason",
    "KVGeometry",
    "Logprob",
    "Refusal",
    "Request",
    "RequestOutput",
    "RequestTimings",
    "RowResult",
    "SamplerOutput",
    "ScheduledSequence",
    "SchedulerOutput",
    "StepReport",
    "TokenLogprobs",
]

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]
"""Why a sample ended: a stop token or string, its length limit, the caller, its ``timeout_s``, or its own fault."""

CopyKind = Literal["copy", "swap_out", "swap_in"]
"""Where a block copy goes: within the device, from device to host, from host to device."""


class Logprob(NamedTuple):
    """How probable a token was.

    Attributes:
        logprob: natural logarithm of its probability, by the model's own logits.
        rank: 1 for the most probable token, 2 for the next; of equally probable ones the lower id comes first.
    """

    logprob: float
    rank: int


TokenLogprobs = Mapping[int, Logprob]
"""By token id, at one position: the best ones in their order, and the token that stands there, last if it is none."""


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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Request:
    """What was asked for, with every default resolved. Compared by identity.

    Attributes:
        id: the caller's id, unique among live requests.
        prompt_token_ids: the prompt, never empty.
        params: what the caller gave.
        max_tokens: the resolved limit; ``len(prompt_token_ids) + max(max_tokens, 1) - 1`` KV slots suffice for it,
            since the last sampled token is never written.
        seed: the resolved seed.
        stop_token_ids: the ids that end it: `SamplingParams.stop_token_ids`, and EOS unless ``ignore_eos``.
        arrival: seconds on the engine's clock.
        prompt: the text it was given as, if it was text.
        bad_words: `SamplingParams.bad_words` as tokens.
        cache_salt: only requests with the same one share cached prefixes.
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
    bad_words: tuple[tuple[int, ...], ...] = ()
    cache_salt: str | None = None
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
            if integer(name, getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.host_blocks < 0:
            raise ValueError(f"host_blocks must be at least 0, got {self.host_blocks}")


class ScheduledSequence(NamedTuple):
    """One row of a step: values only, so that a step can run again, later, or in another process.

    A named tuple, as all that the scheduler and the engine make in every step: it takes a fifth of the time that a
    frozen dataclass takes.

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


class Blocked(NamedTuple):
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


class SchedulerOutput(NamedTuple):
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


class RowResult(NamedTuple):
    """What a row gave.

    Attributes:
        token_ids: empty if the row does not sample, else one token.
        logprobs: one for each of `token_ids`, where the request asks for them.
        prompt_logprobs: where sample 0 of the request asks for them: those of the prompt's tokens that the row's
            positions predict, by the position of the token predicted, so that computing a position again overwrites it.
            A row over positions ``[s, e)`` gives ``s + 1 .. min(e, P - 1)`` of a prompt of P tokens.
        error: ends this request alone.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: Mapping[int, TokenLogprobs] | None = None
    error: str | None = None


class SamplerOutput(NamedTuple):
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
        cached_tokens: prompt tokens of the first sample that a prefix hit saved.
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
        cumulative_logprob: the sum of the log-probabilities of `token_ids`, if `SamplingParams.logprobs` asks for them.
    """

    __slots__ = (
        "_ids",
        "_logprobs",
        "_num_ids",
        "_num_pieces",
        "_pieces",
        "cumulative_logprob",
        "finish_reason",
        "index",
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
        logprobs: Sequence[TokenLogprobs] | None = None,
        cumulative_logprob: float | None = None,
    ) -> None:
        self.index = index
        self.new_text = new_text
        self.new_token_ids = new_token_ids
        self.finish_reason = finish_reason
        self.cumulative_logprob = cumulative_logprob
        # Append-only buffers that go on growing while the request runs; the counts freeze what this output saw.
        self._ids, self._num_ids = ids, len(ids)
        self._pieces, self._num_pieces = pieces, len(pieces)
        self._logprobs = logprobs

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

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """One for each of `token_ids`, if `SamplingParams.logprobs` asks for them. Linear in their number."""
        return None if self._logprobs is None else tuple(self._logprobs[: self._num_ids])

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
        outputs: one `Completion` for each of the ``n`` samples, by index.
        finished: nothing follows, of any sample.
        timings: see `RequestTimings`.
        error: what went wrong. Samples that were not done have finish reason ``"error"``; one that was keeps its own.
        prompt: the prompt's text, if it was given as text.
        position: of the prompt among those of `Engine.generate` or `Engine.stream`, counted from 0.
        prompt_logprobs: one for each token of the prompt, None for the first, if `SamplingParams.prompt_logprobs` asks
            for them. Complete from the first output on.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Completion, ...]
    finished: bool
    timings: RequestTimings
    error: str | None = None
    prompt: str | None = None
    position: int | None = None
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None

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


class StepReport(NamedTuple):
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
        num_cached_blocks: of those, blocks that hold a cached prefix.
        peak_used_blocks: the most blocks that were held while rows were computed.
        num_preemptions: how often a sequence lost its blocks.
        prompt_tokens, generated_tokens: of requests that have been scheduled, each counted once.
        cached_tokens: tokens that went not through the model, because their KV was found: in the prefix cache, or with
            another sample of the same request.
        computed_tokens: tokens that went through the model, idle rows and recomputation among them.
        recomputed_tokens: tokens whose KV was thrown away.
        finished: how many requests ended for each reason, which of several samples is the first one's.
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
    num_cached_blocks: int
    peak_used_blocks: int
    num_preemptions: int
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    computed_tokens: int
    recomputed_tokens: int
    finished: Mapping[FinishReason, int]
