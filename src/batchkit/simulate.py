"""An engine without a device: a runner that fakes the model and checks the KV cache, and one that sets lengths.

`SimulatedRunner` stands where a real runner stands, under the same engine, schedulers and allocators. It samples
tokens by a fixed rule, keeps a tag where a real runner keeps a key and a value, and lets a `VirtualClock` pass by what
a cost function says of each step.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from numbers import Integral

from typing_extensions import override

from .clocks import VirtualClock
from .costs import StepCost
from .errors import InvariantError, RequestError
from .runner import ModelRunner
from .types import (
    BlockCopy,
    KVGeometry,
    Logprob,
    Request,
    RowResult,
    SamplerOutput,
    ScheduledSequence,
    SchedulerOutput,
)
from .workload import true_length

__all__ = ["SimulatedRunner", "TrueLengths"]

_MASK = (1 << 64) - 1
_NOTHING = RowResult()


def _mix(state: int, value: int) -> int:
    """One step of a 64-bit hash: multiply, add, and fold the high half down."""
    state = ((state ^ value) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _MASK
    return state ^ (state >> 29)


def _made_up(prefix: int, token: int) -> dict[int, Logprob]:
    """What stands for the log-probability of a token behind a prefix."""
    return {token: Logprob(-(_mix(prefix, token) % 1000) / 100, 1)}


class SimulatedRunner(ModelRunner):
    """A runner without a model, for tests, for policies in the making, and for simulation.

    The token it samples is a fixed function of all tokens before it and of the sample's index, so that every policy
    must give the same output. In place of keys and values, each slot of its KV memory holds a tag: a hash of the
    tokens up to that position, with the token, the position and the sequence that wrote it. A row that reads a slot
    which does not hold its own context raises InvariantError, naming both. Log-probabilities are made up in the same
    way, of the one token alone, and rank 1; what else `SamplingParams` says of sampling has no effect.

    Args:
        geometry: the KV memory's shape.
        clock: passes by `cost` in each step that has rows. Default: none.
        cost: seconds of a step with rows; a `StepCost` says what copies take too. Default: a thousandth. Any other
            function is asked in every step, and may answer differently each time.
        check_kv: False keeps no tags, for long simulations; a wrong block table then goes unnoticed.

    >>> from batchkit import Engine, KVGeometry, PagedAllocator, PagedScheduler, SamplingParams, SimulatedRunner
    >>> geometry = KVGeometry(num_blocks=8, block_size=4, max_model_len=32, vocab_size=100)
    >>> engine = Engine(SimulatedRunner(geometry), PagedScheduler(PagedAllocator(8, 4)))
    >>> [len(out.token_ids) for out in engine.generate([[1, 2, 3], [4]], SamplingParams(max_tokens=5))]
    [5, 5]
    """

    def __init__(
        self,
        geometry: KVGeometry,
        *,
        clock: VirtualClock | None = None,
        cost: Callable[[SchedulerOutput], float] | None = None,
        check_kv: bool = True,
    ) -> None:
        self._geometry = geometry
        self._clock = clock
        self._cost = cost
        self._copy_cost = cost.copying if isinstance(cost, StepCost) else None
        self._check_kv = check_kv
        self._tags: dict[str, list[list[int | None]]] = {}
        self._names: dict[str, list[list[str]]] = {}
        if check_kv:
            for place, blocks in (("device", geometry.num_blocks), ("host", geometry.host_blocks)):
                self._tags[place] = [[None] * geometry.block_size for _ in range(blocks)]
                self._names[place] = [["nothing was ever written"] * geometry.block_size for _ in range(blocks)]
        # The hash of each prefix of a sequence: it costs the whole history, and a row adds mostly one token to it.
        self._prefixes: OrderedDict[tuple[int, int], list[int]] = OrderedDict()
        self._num_hashes = 0
        self._max_hashes, self._max_prefixes = 1_000_000, 4096
        # A function that is no StepCost may say another time for the same rows.
        self._keeps_idle = not check_kv and (cost is None or isinstance(cost, StepCost))
        self._idle_rows: tuple[ScheduledSequence, ...] | None = None  # of the last step that had no others
        self._idle_step: tuple[SamplerOutput, float] = SamplerOutput(()), 0.0

    @property
    @override
    def geometry(self) -> KVGeometry:
        return self._geometry

    @override
    def execute(self, out: SchedulerOutput) -> SamplerOutput:
        if out.rows == self._idle_rows:  # a batch that is padded to its end has the same in most steps
            got, seconds = self._idle_step
        else:
            got, seconds = self._compute(out)
        if self._clock is not None:
            self._clock.advance(seconds)
        return got

    def _compute(self, out: SchedulerOutput) -> tuple[SamplerOutput, float]:
        skips_idle = not self._check_kv
        rows = tuple([_NOTHING if skips_idle and row.idle else self._row(row) for row in out.rows])
        # Those of the step itself are the newest. To forget them would cost the next step their whole histories.
        prefixes = self._prefixes
        while len(prefixes) > len(rows) and (len(prefixes) > self._max_prefixes or self._num_hashes > self._max_hashes):
            self._num_hashes -= len(prefixes.popitem(last=False)[1])
        got, seconds = SamplerOutput(rows), 1e-3
        if self._clock is not None and self._cost is not None:
            seconds = self._cost(out)
        if self._keeps_idle and all(row.idle for row in out.rows):
            self._idle_rows, self._idle_step = out.rows, (got, seconds)
        return got, seconds

    def _row(self, row: ScheduledSequence) -> RowResult:
        params = row.request.params
        scores_prompt = params.prompt_logprobs is not None and row.sample_index == 0
        if not (row.samples or self._check_kv or scores_prompt):
            return _NOTHING
        end = row.start + row.num_tokens
        prefixes = self._prefix_hashes(row, end)
        if self._check_kv:
            self._read(row, prefixes)
            self._write(row, prefixes, end)
        scores = None
        if scores_prompt:
            prompt = row.request.prompt_token_ids
            predicted = range(row.start + 1, min(end + 1, len(prompt)))
            scores = {at: _made_up(prefixes[at - 1], prompt[at]) for at in predicted}
        if not row.samples:
            return RowResult(prompt_logprobs=scores)
        token = _mix(prefixes[end - 1], row.sample_index) % self._geometry.vocab_size
        logprobs = None if params.logprobs is None else (_made_up(prefixes[end - 1], token),)
        return RowResult((token,), logprobs, scores)

    def _prefix_hashes(self, row: ScheduledSequence, end: int) -> list[int]:
        key = (row.seq_id, row.row)
        known = self._prefixes.get(key)
        if known is None:
            known = self._prefixes[key] = []
        else:
            self._prefixes.move_to_end(key)
        if len(known) < end:
            self._num_hashes += end - len(known)
            prompt = row.request.prompt_token_ids
            state = known[-1] if known else 0
            for position in range(len(known), end):
                in_output = position - len(prompt)
                state = _mix(state, prompt[position] if in_output < 0 else row.output_ids[in_output])
                known.append(state)
        return known

    def _read(self, row: ScheduledSequence, prefixes: list[int]) -> None:
        size, tags = self._geometry.block_size, self._tags["device"]
        for first in range(0, row.start, size):
            count = min(size, row.start - first)
            block = row.blocks[first // size]
            if tags[block][:count] != prefixes[first : first + count]:
                bad = next(i for i in range(count) if tags[block][i] != prefixes[first + i])
                raise InvariantError(
                    f"request {row.request.id!r} (sequence {row.seq_id}) reads position {first + bad} from slot {bad} "
                    f"of block {block}, where {self._names['device'][block][bad]}"
                )

    def _write(self, row: ScheduledSequence, prefixes: list[int], end: int) -> None:
        size, tags, names = self._geometry.block_size, self._tags["device"], self._names["device"]
        if end > len(row.blocks) * size:
            raise InvariantError(
                f"request {row.request.id!r} (sequence {row.seq_id}) writes up to position {end - 1}, "
                f"its {len(row.blocks)} blocks of {size} tokens end before"
            )
        for position, token in zip(range(row.start, end), row.token_ids, strict=True):
            block, slot = row.blocks[position // size], position % size
            tags[block][slot] = prefixes[position]
            names[block][slot] = (
                f"sequence {row.seq_id} of request {row.request.id!r} wrote token {token} at position {position}"
            )

    @override
    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        if self._clock is not None and self._copy_cost is not None:
            self._clock.advance(self._copy_cost(copies))
        if not self._check_kv:
            return
        ways = {"copy": ("device", "device"), "swap_out": ("device", "host"), "swap_in": ("host", "device")}
        for copy in copies:
            source, target = ways[copy.kind]
            self._tags[target][copy.target] = list(self._tags[source][copy.source])
            self._names[target][copy.target] = list(self._names[source][copy.source])

    @override
    def drop_caches(self) -> None:
        self._prefixes.clear()
        self._num_hashes = 0
        self._idle_rows = None

    @override
    def close(self) -> None:
        self._tags.clear()
        self._names.clear()
        self.drop_caches()


class TrueLengths(ModelRunner):
    """Ends each sequence where its workload record says it really ended, whatever ``max_tokens`` declared.

    A policy sees ``max_tokens`` and reserves by it; what happens is another number. This wrapper, around a simulated
    or a real runner alike, replaces the last token by one that ends the request, and any earlier such token by one
    that does not. The request needs something that ends it: an EOS token, or a stop token id. The log-probability of a
    token that was put in another's place is NaN, with rank 0.

    Args:
        runner: computes.
        output_tokens: how many tokens a request gives in all, or each of its samples; None leaves it alone. Default:
            what `WorkloadRecord` puts into the request's metadata.
    """

    def __init__(
        self, runner: ModelRunner, output_tokens: Callable[[Request], int | Sequence[int] | None] | None = None
    ) -> None:
        self._runner = runner
        self._output_tokens = output_tokens or (lambda request: request.metadata.get("output_tokens"))

    @property
    @override
    def geometry(self) -> KVGeometry:
        return self._runner.geometry

    @override
    def execute(self, out: SchedulerOutput) -> SamplerOutput:
        got = self._runner.execute(out)
        for result in got.rows:
            if result.token_ids:
                break
        else:
            return got  # nobody has sampled, as in most steps of a batch that is padded to its end
        rows = tuple(
            [
                self._end(row, result) if result.token_ids else result
                for row, result in zip(out.rows, got.rows, strict=True)
            ]
        )
        return got if rows == got.rows else SamplerOutput(rows, got.sample_s)

    def _end(self, row: ScheduledSequence, result: RowResult) -> RowResult:
        lengths = self._output_tokens(row.request)
        if lengths is None:
            return result
        length = true_length(lengths, row.sample_index)
        stops = row.request.stop_token_ids
        if row.num_output + 1 >= length and length < row.request.max_tokens:
            if not stops:
                return result._replace(error=f"no token ends request {row.request.id!r} after {length} tokens")
            return _with_token(result, min(stops))
        if result.token_ids[0] not in stops:
            return result
        return _with_token(result, next(t for t in range(len(stops) + 1) if t not in stops))

    @override
    def check_request(self, request: Request) -> None:
        lengths = self._output_tokens(request)
        if lengths is not None and not isinstance(lengths, (int, Integral)) and len(lengths) != request.params.n:
            raise RequestError(
                f"request {request.id!r} has {request.params.n} samples, and {len(lengths)} output lengths"
            )
        self._runner.check_request(request)

    @override
    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        self._runner.copy_blocks(copies)

    @override
    def drop_caches(self) -> None:
        self._runner.drop_caches()

    @override
    def weights_changed(self) -> None:
        self._runner.weights_changed()

    @override
    def close(self) -> None:
        self._runner.close()


def _with_token(result: RowResult, token: int) -> RowResult:
    """The result with another token, whose log-probability is not known unless it is among those given."""
    logprobs = result.logprobs
    if logprobs is not None and token not in logprobs[0]:
        logprobs = ({**logprobs[0], token: Logprob(math.nan, 0)},)
    return result._replace(token_ids=(token,), logprobs=logprobs)
