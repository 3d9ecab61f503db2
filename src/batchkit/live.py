"""What the engine knows of a live request beyond its scheduling state."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from .errors import RunnerError
from .sequence import Sequence, Status
from .text import OutputText
from .types import Completion, FinishReason, Request, RequestOutput, RequestTimings, RowResult, TokenLogprobs

__all__ = ["LiveRequest", "LiveSample"]


class LiveSample:
    """One sample of a live request: its sequence, its text, and what of them has been delivered.

    Attributes:
        seq: its scheduling state.
        text: its text; None: it gets none.
        reason: why it ended; None while it runs, and while its policy holds it.
        due: why it will have ended as soon as its policy lets it go.
    """

    __slots__ = (
        "_cumulative_logprob",
        "_delivered",
        "_logprobs",
        "_quiet",
        "due",
        "reason",
        "seq",
        "text",
    )

    def __init__(self, seq: Sequence, text: OutputText | None) -> None:
        self.seq = seq
        self.text = text
        self.reason: FinishReason | None = None
        self.due: FinishReason | None = None
        wanted = seq.request.params.logprobs is not None
        self._logprobs: list[TokenLogprobs] | None = [] if wanted else None
        self._cumulative_logprob = 0.0
        # As of the last completion: how many tokens, how many pieces of text, and `reason`.
        self._delivered: tuple[int, int, FinishReason | None] = (0, 0, None)
        # Of many samples few have news in a step: what a step costs is not to grow with all of them.
        self._quiet: Completion | None = None

    @property
    def is_delivered(self) -> bool:
        """Whether a completion has said why it ended."""
        return self._delivered[2] is not None

    def append(self, result: RowResult) -> None:
        """Take the token of a row that sampled."""
        (token,) = result.token_ids
        if self._logprobs is not None:
            if result.logprobs is None or len(result.logprobs) != 1 or token not in result.logprobs[0]:
                raise RunnerError(f"the runner gave no log-probability of token {token}: {result.logprobs}")
            self._logprobs.append(result.logprobs[0])
            self._cumulative_logprob += result.logprobs[0][token].logprob
        self.seq.output.append(token)

    def completion(self) -> Completion:
        """All of it, with what is new since the last call; the same object while nothing is."""
        ids, pieces = self.seq.output, self.text.pieces if self.text else ()
        now = (len(ids), len(pieces), self.reason)
        is_quiet = now == self._delivered
        if is_quiet and self._quiet is not None:
            return self._quiet
        num_ids, num_pieces, _ = self._delivered
        completion = Completion(
            index=self.seq.index,
            ids=ids,
            new_token_ids=tuple(ids[num_ids:]),
            pieces=pieces,
            new_text="".join(pieces[num_pieces:]),
            finish_reason=self.reason,
            logprobs=self._logprobs,
            cumulative_logprob=None if self._logprobs is None else self._cumulative_logprob,
        )
        self._delivered = now
        self._quiet = completion if is_quiet else None
        return completion


class LiveRequest:
    """A request with all its samples.

    Attributes:
        request: what was asked for.
        samples: by index.
        unqueued: samples that the scheduler has not been given yet, by index. The first one computes the prompt.
        position: of its prompt in a `Engine.stream`.
        inbox: of the stream that it belongs to.
        first_scheduled, first_token, finished: see `RequestTimings`.
        error: what went wrong.
        ending: why it is to end, whatever its samples do: the caller's wish, or its time is up.
    """

    __slots__ = (
        "_timings",
        "ending",
        "error",
        "finished",
        "first_scheduled",
        "first_token",
        "inbox",
        "position",
        "prompt_logprobs",
        "request",
        "samples",
        "unqueued",
    )

    def __init__(
        self, request: Request, samples: list[LiveSample], position: int | None, inbox: deque[RequestOutput] | None
    ) -> None:
        self.request = request
        self.samples = samples
        self.unqueued = deque(samples)
        self.position = position
        self.inbox = inbox
        self.first_scheduled: float | None = None
        self.first_token: float | None = None
        self.finished: float | None = None
        self.error: str | None = None
        self.ending: FinishReason | None = None
        wanted = request.params.prompt_logprobs is not None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = (
            [None] * len(request.prompt_token_ids) if wanted else None
        )
        self._timings = RequestTimings(arrival=request.arrival)

    @property
    def has_ended(self) -> bool:
        """Whether all samples have."""
        return all(sample.reason is not None for sample in self.samples)

    def heir_of(self, sample: LiveSample) -> LiveSample | None:
        """The next sample that has nothing computed and could take over what `sample` holds; None if another runs."""
        if any(other is not sample and other.seq.status is Status.RUNNING for other in self.samples):
            return None
        waiting = (o for o in self.samples if o.seq.status is Status.WAITING and not o.seq.num_computed)
        return next(waiting, None)

    def take_prompt_logprobs(self, given: Mapping[int, TokenLogprobs] | None, num_computed: int) -> None:
        """Take what a row gave; by position, so that what is computed again is no harm.

        Raises:
            RunnerError: it is not what the prompt's computed tokens predict.
        """
        known = self.prompt_logprobs
        if known is None:
            return
        for position, entry in (given or {}).items():
            if not 0 < position < len(known) or self.request.prompt_token_ids[position] not in entry:
                raise RunnerError(f"the runner gave log-probabilities {entry} for position {position} of the prompt")
            known[position] = entry
        if num_computed >= len(known) and None in known[1:]:
            raise RunnerError(f"the runner gave no log-probabilities for position {known.index(None, 1)} of the prompt")

    def output(self, now: float) -> RequestOutput:
        """What is new since the last call; the last output once all samples have ended."""
        first = self.samples[0].seq
        final = self.has_ended
        if self.first_token is None and any(sample.seq.output for sample in self.samples):
            self.first_token = now
        if final:
            self.finished = now
        known = self._timings
        preemptions = sum([sample.seq.num_preemptions for sample in self.samples])
        if final or known.first_token is None or known.num_preemptions != preemptions:
            self._timings = RequestTimings(
                arrival=self.request.arrival,
                first_scheduled=self.first_scheduled,
                first_token=self.first_token,
                finished=self.finished,
                num_preemptions=preemptions,
                cached_tokens=first.num_cached,
                recomputed_tokens=sum([sample.seq.num_recomputed for sample in self.samples]),
            )
        return RequestOutput(
            request_id=self.request.id,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=tuple([sample.completion() for sample in self.samples]),
            finished=final,
            timings=self._timings,
            error=self.error,
            prompt=self.request.prompt,
            position=self.position,
            prompt_logprobs=self.prompt_logprobs,
        )
