"""Builders that the tests of the engine share: a rig around a simulated runner, and toy tokenizers.

A `Rig` checks the books after every step, and that each request gets one final output whose tokens and text are what
was delivered piece by piece. Below it the runner checks every slot that it reads.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from batchkit import (
    ChunkedPrefillScheduler,
    ContiguousAllocator,
    DynamicScheduler,
    Engine,
    KVGeometry,
    Logprob,
    OrcaScheduler,
    PagedAllocator,
    PagedScheduler,
    RequestOutput,
    SamplerOutput,
    SamplingParams,
    SchedulerOutput,
    SimulatedRunner,
    StaticScheduler,
    Swap,
    VirtualClock,
    WaitingServedScheduler,
)

VOCAB = 1000

RESERVING = (StaticScheduler, DynamicScheduler, OrcaScheduler, WaitingServedScheduler)
PREEMPTING = (PagedScheduler, ChunkedPrefillScheduler)
POLICIES = RESERVING + PREEMPTING
# Each with every allocator that it can work with.
PAIRS = [(policy, PagedAllocator) for policy in POLICIES] + [(policy, ContiguousAllocator) for policy in RESERVING]


def tokens(name: str, count: int, vocab: int = VOCAB) -> list[int]:
    """A prompt that is the same in every run and differs from those of other names."""
    start = zlib.crc32(name.encode())
    return [(start + 7 * i) % vocab for i in range(count)]


def eager(policy: type) -> dict[str, Any]:
    """Options under which a policy starts with whatever waits."""
    return {"max_wait_s": 0.0} if policy is DynamicScheduler else {}


class Runner(SimulatedRunner):
    """A simulated runner that keeps what it was given, gives scripted tokens, and can be made to fail.

    `script` maps a request id to its tokens, or "id/index" to those of a sample; where it ends, and for other requests,
    tokens are the simulated ones.
    `before` is called with each step, and `before_copy` with its copies; what they raise is the runner's failure.
    `after` may replace what a step gave.
    """

    def __init__(self, geometry: KVGeometry, script: Mapping[str, Sequence[int]] | None = None, **options: Any) -> None:
        super().__init__(geometry, **options)
        self.script = script or {}
        self.outs: list[SchedulerOutput] = []
        self.before: Callable[[SchedulerOutput], object] | None = None
        self.before_copy: Callable[[Sequence[Any]], object] | None = None
        self.after: Callable[[SchedulerOutput, SamplerOutput], SamplerOutput] | None = None
        self.num_copies = 0
        self.closed = False

    def execute(self, out: SchedulerOutput) -> SamplerOutput:
        self.outs.append(out)
        if self.before is not None:
            self.before(out)
        got = self.compute(out)
        return got if self.after is None else self.after(out, got)

    def compute(self, out: SchedulerOutput, num_rows: int | None = None) -> SamplerOutput:
        """What a sound runner does, with all rows or only the first ones."""
        got = super().execute(out._replace(rows=out.rows[:num_rows]))
        rows = list(got.rows)
        for i, row in enumerate(out.rows[:num_rows]):
            of_request = self.script.get(row.request.id, ())
            script = self.script.get(f"{row.request.id}/{row.sample_index}", of_request)
            if row.samples and row.num_output < len(script):
                token = script[row.num_output]
                scores = None if rows[i].logprobs is None else ({token: Logprob(-1.0, 1)},)
                rows[i] = rows[i]._replace(token_ids=(token,), logprobs=scores)
        return got._replace(rows=tuple(rows))

    def copy_blocks(self, copies: Sequence[Any]) -> None:
        if self.before_copy is not None:
            self.before_copy(copies)
        super().copy_blocks(copies)
        self.num_copies += len(copies)

    def lose_kv(self) -> None:
        """Whoever reads what was written so far is caught."""
        for pool in self._tags.values():
            for block in pool:
                block[:] = [None] * len(block)

    def close(self) -> None:
        super().close()
        self.closed = True


_alone: dict[Any, RequestOutput] = {}


class Rig:
    """An engine with its parts at hand."""

    def __init__(
        self,
        policy: type = PagedScheduler,
        *,
        blocks: int = 64,
        block_size: int = 4,
        host_blocks: int = 0,
        model_len: int = 256,
        vocab: int = VOCAB,
        eos: Sequence[int] = (),
        seats: int | None = None,
        budget: int | None = None,
        allocator: type = PagedAllocator,
        script: Mapping[str, Sequence[int]] | None = None,
        tokenizer: Any = None,
        on_step: Any = None,
        prefix_caching: bool = False,
        **policy_args: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self.geometry = KVGeometry(
            num_blocks=blocks,
            block_size=block_size,
            host_blocks=host_blocks,
            max_model_len=model_len,
            vocab_size=vocab,
            eos_token_ids=tuple(eos),
        )
        self.clock = VirtualClock()
        self.runner = Runner(self.geometry, script, clock=self.clock, cost=lambda out: 1.0)
        self.host = PagedAllocator(host_blocks, block_size) if host_blocks else None
        self.allocator = allocator(blocks, block_size, **({"prefix_caching": True} if prefix_caching else {}))
        self.scheduler = policy(
            self.allocator,
            max_model_len=model_len,
            max_num_seqs=seats,
            max_tokens_per_step=budget,
            preemption=Swap(self.host) if self.host else None,
            **policy_args,
        )
        self.reports: list[Any] = []
        self._on_step = on_step
        self.engine = Engine(self.runner, self.scheduler, tokenizer=tokenizer, clock=self.clock, on_step=self._report)
        self.jobs: dict[str, tuple[Any, dict[str, Any]]] = {}
        self.outputs: dict[str, list[RequestOutput]] = {}

    def _report(self, report: Any) -> None:
        self.reports.append(report)
        if self._on_step is not None:
            self._on_step(report)

    def add(self, name: str, prompt: int | str | Sequence[int] = 4, **params: Any) -> str:
        """Queue a request; a prompt that is a number is so many tokens. Greedy, 8 tokens unless told."""
        ids = tokens(name, prompt, self.geometry.vocab_size) if isinstance(prompt, int) else prompt
        named = ("priority", "arrival", "deadline", "length_hint", "metadata", "timeout_s", "cache_salt")
        options = {key: params.pop(key) for key in named if key in params}
        params = {"temperature": 0, "max_tokens": 8, **params}
        added = self.engine.add_request(ids, SamplingParams(**params), request_id=name, **options)
        assert added == name
        # The limit in force, which another pool might not give.
        self.jobs[name] = (ids, {**params, "max_tokens": self.seqs(name)[0].request.max_tokens})
        self.outputs[name] = []
        return name

    def step(self) -> list[RequestOutput]:
        """One step; whether it raises or not, the books balance after it."""
        try:
            outputs = self.engine.step()
        finally:
            self.engine.check()
        self.keep(outputs)
        return outputs

    def keep(self, outputs: Sequence[RequestOutput]) -> None:
        """Take outputs in and check what was delivered so far."""
        for output in outputs:
            life = self.outputs.setdefault(output.request_id, [])
            assert not (life and life[-1].finished), f"{output.request_id} has an output after its last one"
            life.append(output)
            for index, completion in enumerate(output.outputs):
                pieces = [earlier.outputs[index] for earlier in life]
                assert completion.index == index
                assert tuple(token for piece in pieces for token in piece.new_token_ids) == completion.token_ids
                assert "".join(piece.new_text for piece in pieces) == completion.text
                assert completion.logprobs is None or len(completion.logprobs) == len(completion.token_ids)
            assert output.finished == all(completion.finish_reason for completion in output.outputs)

    def run(self, max_steps: int = 3000) -> dict[str, RequestOutput]:
        """Step to the end; the final outputs so far by id."""
        for _ in range(max_steps):
            if not self.engine.has_unfinished():
                return self.finals
            self.step()
            self.engine.wait()
        raise AssertionError(f"unfinished after {max_steps} steps: {self.scheduler.waiting}, {self.scheduler.running}")

    def finish(self, *, but: Sequence[str] = ()) -> dict[str, RequestOutput]:
        """Run to the end: nothing is left behind, and each request but some got what it gets alone."""
        finals = self.run()
        self.assert_empty()
        assert set(finals) == set(self.jobs)
        for name in finals:
            if name not in but:
                self.assert_as_alone(name)
        return finals

    def assert_empty(self) -> None:
        assert self.allocator.num_free_blocks == self.allocator.num_blocks
        assert self.host is None or self.host.num_free_blocks == self.host.num_blocks
        assert not self.scheduler.waiting and not self.scheduler.running

    def assert_as_alone(self, name: str) -> None:
        have, want = self.finals[name], self.alone(name)
        assert told(have) == told(want)

    def alone(self, name: str) -> RequestOutput:
        """What the request gives by itself, in a pool without end."""
        prompt, params = self.jobs[name][0], SamplingParams(**self.jobs[name][1])
        mine = {key: t for key, t in self.runner.script.items() if key.split("/")[0] == name}
        script = {key.replace(name, "alone", 1): t for key, t in mine.items()}
        geometry = replace(self.geometry, num_blocks=1, block_size=self.geometry.max_model_len, host_blocks=0)
        key = (geometry, tuple(prompt), params, repr(script), self.tokenizer)
        if key not in _alone:
            runner = Runner(geometry, script)
            scheduler = OrcaScheduler(PagedAllocator(1, geometry.block_size))
            engine = Engine(runner, scheduler, tokenizer=self.tokenizer, clock=VirtualClock())
            engine.add_request(prompt, params, request_id="alone")
            outputs: list[RequestOutput] = []
            while engine.has_unfinished():
                outputs += engine.step()
            assert outputs[-1].finished
            _alone[key] = outputs[-1]
        return _alone[key]

    @property
    def finals(self) -> dict[str, RequestOutput]:
        return {name: life[-1] for name, life in self.outputs.items() if life and life[-1].finished}

    def seqs(self, name: str) -> list[Any]:
        """The sequences of a request that the scheduler has, by index."""
        queues = (self.scheduler.waiting, self.scheduler.running)
        return sorted((s for q in queues for s in q if s.request.id == name), key=lambda s: s.index)

    def seq(self, name: str) -> Any:
        """The live sequence of a request that has one sample."""
        (found,) = self.seqs(name)
        return found

    @property
    def history(self) -> list[str]:
        """The rows of each step that was executed, in order: "a5 b1 c~" is 5 tokens of a, 1 of b, an idle row of c."""
        return [shown(out) for out in self.runner.outs]

    def names(self, queue: Any) -> str:
        """The ids in a queue, in order."""
        return " ".join(seq.request.id for seq in queue)

    def state(self) -> Any:
        """Everything that a call which was refused must leave alone."""
        queues = [
            [(s, s.num_computed, s.status, s.seat) for s in q] for q in (self.scheduler.waiting, self.scheduler.running)
        ]
        tables = {
            s.id: tuple(self.allocator.table(s.id)) for q in (self.scheduler.waiting, self.scheduler.running) for s in q
        }
        return self.engine.stats(), self.engine.has_unfinished(), queues, tables, self.clock()


def told(output: RequestOutput) -> Any:
    """What a request got, whatever else ran."""
    samples = [(c.token_ids, c.text, c.finish_reason, c.logprobs, c.cumulative_logprob) for c in output.outputs]
    return samples, output.prompt_token_ids, output.prompt_logprobs, output.error


def shown(out: SchedulerOutput) -> str:
    return " ".join(f"{row.request.id}{'~' if row.idle else row.num_tokens}" for row in out.rows)


class Pieces:
    """A tokenizer whose tokens are the strings given; those in angle brackets are special."""

    def __init__(self, pieces: Sequence[str], eos: str | None = None) -> None:
        self.pieces = list(pieces)
        self.eos_token_id = None if eos is None else self.pieces.index(eos)

    def ids(self, *pieces: str) -> list[int]:
        return [self.pieces.index(piece) for piece in pieces]

    def encode(self, text: str) -> list[int]:
        return self.ids(*text)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        kept = [self.pieces[i] for i in token_ids]
        return "".join(p for p in kept if not (skip_special_tokens and p[0] == "<" and p[-1] == ">"))


class Bytes:
    """A byte-level tokenizer: token k is byte k; 256 is the end of a text and has none of its own."""

    eos_token_id = 256
    vocab = 257

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(i for i in token_ids if i < 256).decode(errors="replace")
