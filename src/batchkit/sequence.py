"""The only mutable scheduling state of a request."""

from __future__ import annotations

import itertools
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .types import Request

__all__ = ["Sequence", "Status"]

_ids = itertools.count(1)


class Status(Enum):
    """Where a sequence stands. Only WAITING and RUNNING ones have work left."""

    WAITING = "waiting"
    RUNNING = "running"
    HELD = "held"
    """Finished, but its policy keeps it in the batch (`Scheduler.may_leave`)."""
    FINISHED = "finished"


class Sequence:
    """One sample of a request on its way.

    Progress is two numbers: `num_computed` tokens have their KV in the cache, `num_tokens` are known. A step moves the
    first towards the second; when they meet, a token is sampled. Prefill, chunked prefill, decode and resuming after
    preemption are this one rule, so there is no phase anywhere.

    A policy reads sequences and never changes one: `output` is written by the engine's commit, `num_computed` by the
    commit, by admission and by preemption, `status` and `seat` by the scheduler's verbs.

    Attributes:
        id: counts up in order of creation, unique in the process. A higher id is a newer sequence.
        request: what was asked for.
        index: which of the request's samples this is.
        output: the tokens generated so far; append-only.
        num_computed: see above.
        status: see `Status`.
        seat: 0 .. max_num_seqs - 1 while running, else -1.
        num_preemptions: how often it lost its blocks.
        num_cached: tokens whose KV it found, in the prefix cache or with a sibling, on its first admission.
        num_recomputed: tokens whose KV was thrown away by preemption.
        samples: all samples of the request by index, this one among them, whether they live or not; empty if there is
            only this one.
    """

    __slots__ = (
        "id",
        "index",
        "num_cached",
        "num_computed",
        "num_preemptions",
        "num_prompt",
        "num_recomputed",
        "output",
        "request",
        "samples",
        "seat",
        "status",
    )

    def __init__(self, request: Request, index: int = 0) -> None:
        self.id = next(_ids)
        self.request = request
        self.index = index
        self.num_prompt = len(request.prompt_token_ids)
        self.output: list[int] = []
        self.num_computed = 0
        self.status = Status.WAITING
        self.seat = -1
        self.num_preemptions = 0
        self.num_cached = 0
        self.num_recomputed = 0
        self.samples: tuple[Sequence, ...] = ()

    @classmethod
    def samples_of(cls, request: Request) -> tuple[Sequence, ...]:
        """The sequences of a request, one for each sample, which know each other."""
        samples = tuple([cls(request, index) for index in range(request.params.n)])
        for seq in samples[: len(samples) if len(samples) > 1 else 0]:
            seq.samples = samples
        return samples

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and output."""
        return self.num_prompt + len(self.output)

    @property
    def num_uncomputed(self) -> int:
        """Tokens known whose KV is not in the cache; 1 while decoding."""
        return self.num_prompt + len(self.output) - self.num_computed

    @property
    def max_kv(self) -> int:
        """The most KV slots it can ever need. The last token sampled is never written, hence the - 1."""
        return self.num_prompt + max(self.request.max_tokens, 1) - 1

    def token_ids(self, start: int, stop: int) -> tuple[int, ...]:
        """The tokens at positions ``start .. stop - 1``; costs what it returns, not the history."""
        num_prompt = self.num_prompt
        if start >= num_prompt:
            if stop - start == 1:  # every decoding row of every step
                return (self.output[start - num_prompt],)
            return tuple(self.output[start - num_prompt : stop - num_prompt])
        head = self.request.prompt_token_ids[start:stop]
        return head if stop <= num_prompt else head + tuple(self.output[: stop - num_prompt])

    def __repr__(self) -> str:
        return (
            f"Sequence(id={self.id}, request={self.request.id!r}, {self.status.value}, "
            f"computed {self.num_computed} of {self.num_tokens}, prompt {self.num_prompt}, output {len(self.output)})"
        )
