"""`check_runner`: results that depend on the rows alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from ..errors import ConformanceError
from ..params import SamplingParams
from ..runner import ModelRunner
from ..types import BlockCopy, Request, RowResult, ScheduledSequence, SchedulerOutput

__all__ = ["check_runner"]


def check_runner(make: Callable[[], ModelRunner], *, num_workloads: int = 5, seed: int = 0, exact: bool = True) -> None:
    """Drive a runner with rows as a scheduler would make them and raise at the first rule that it breaks.

    Each request is first run alone: its whole prompt in one row, then one token a step. Then all run together in
    random pieces, random order and scattered blocks, some left out of a step, steps executed twice, caches dropped,
    blocks moved on the device and out to the host and back, finished sequences computed again as idle rows: every
    request must get the same tokens.

    Args:
        make: gives a new runner; its pool needs at least 8 blocks.
        num_workloads: how many sets of requests.
        seed: of the requests.
        exact: False leaves out the comparison with the request alone. In half precision logits depend on the shape
            of the batch, and a token whose probability is close to another's may change with it.

    Raises:
        ConformanceError: with the rule and the step.
    """
    runner = make()
    name = type(runner).__name__
    try:
        for number in range(num_workloads):
            _Trial(runner, name, random.Random(f"{seed}/{number}"), f"workload {number} of seed {seed}").run(exact)
    finally:
        runner.close()
        runner.close()  # idempotent


class _Row:
    """A sequence on its way through a runner, with no scheduler behind it."""

    def __init__(self, seq_id: int, request: Request) -> None:
        self.seq_id, self.request = seq_id, request
        self.output: list[int] = []
        self.computed = 0
        self.blocks: tuple[int, ...] = ()
        self.host: tuple[int, ...] = ()

    @property
    def known(self) -> tuple[int, ...]:
        return self.request.prompt_token_ids + tuple(self.output)

    @property
    def done(self) -> bool:
        return len(self.output) == self.request.max_tokens

    def scheduled(self, num_tokens: int, seat: int, *, idle: bool = False) -> ScheduledSequence:
        start = self.computed - 1 if idle else self.computed
        return ScheduledSequence(
            seq_id=self.seq_id,
            row=0,
            seat=seat,
            request=self.request,
            sample_index=0,
            start=start,
            num_tokens=num_tokens,
            token_ids=self.known[start : start + num_tokens],
            output_ids=self.output,
            num_output=len(self.output),
            blocks=self.blocks,
            samples=not idle and start + num_tokens == len(self.known),
            idle=idle,
        )


_next_seq_id = 10**9  # apart from those of engines in the same process


class _Trial:
    def __init__(self, runner: ModelRunner, name: str, rng: random.Random, where: str) -> None:
        self.runner, self.name, self.rng, self.where = runner, name, rng, where
        self.geometry = geometry = runner.geometry
        if geometry.num_blocks < 8:
            raise ValueError(f"check_runner needs a pool of at least 8 blocks, got {geometry.num_blocks}")
        self.steps = 0
        count = 4
        # Each may use a quarter of the pool but one block, so that blocks can be moved.
        longest = min((geometry.num_blocks // count) * geometry.block_size, geometry.max_model_len) - 1
        longest = max(2, min(longest - geometry.block_size, 40))
        self.requests = []
        for index in range(count):
            prompt = tuple(rng.randrange(geometry.vocab_size) for _ in range(rng.randint(1, max(1, longest // 2))))
            scored = index > 1
            params = SamplingParams(
                temperature=index % 2,
                seed=index,
                logprobs=1 if scored else None,
                prompt_logprobs=0 if scored else None,
            )
            request = Request(
                id=f"request-{index}",
                prompt_token_ids=prompt,
                params=params,
                max_tokens=rng.randint(1, max(1, longest // 2)),
                seed=index,
            )
            self.requests.append(request)

    def broken(self, rule: str, details: str) -> ConformanceError:
        return ConformanceError(self.name, rule, f"Step {self.steps} of {self.where}: {details}")

    def _new(self, request: Request) -> _Row:
        global _next_seq_id
        _next_seq_id += 1
        return _Row(_next_seq_id, request)

    def run(self, exact: bool) -> None:
        alone = [self._alone(request) for request in self.requests]
        together = self._together()
        if not exact:
            return
        for request, want, have in zip(self.requests, alone, together, strict=True):
            if want != have:
                raise self.broken(
                    "a request gets the tokens that it gets alone", f"{request.id} gave {have}, alone {want}"
                )

    def _alone(self, request: Request) -> list[int]:
        row = self._new(request)
        row.blocks = tuple(range(-(-(len(request.prompt_token_ids) + request.max_tokens) // self.geometry.block_size)))
        while not row.done:
            self._execute([(row, len(row.known) - row.computed)])
        return row.output

    def _together(self) -> list[list[int]]:
        rng = self.rng
        rows = [self._new(request) for request in self.requests]
        free = list(range(self.geometry.num_blocks))
        rng.shuffle(free)
        free_host = list(range(self.geometry.host_blocks))
        while not all(row.done for row in rows):
            if rng.random() < 0.2:
                self.runner.drop_caches()
            self._move(rng.choice(rows), free, free_host)
            chosen: list[tuple[_Row, int]] = []
            for row in rng.sample(rows, rng.randint(1, len(rows))):
                left = len(row.known) - row.computed
                count = left if rng.random() < 0.4 else rng.randint(1, left)
                if row.host or (row.done and not row.computed):
                    continue
                if not row.done:
                    while len(row.blocks) * self.geometry.block_size < row.computed + count:
                        row.blocks = (*row.blocks, free.pop())
                chosen.append((row, 0 if row.done else count))
            if chosen:
                self._execute(chosen)
        return [row.output for row in rows]

    def _move(self, row: _Row, free: list[int], free_host: list[int]) -> None:
        """Move a sequence's blocks: to others on the device, out to the host, or back in."""
        copies: list[BlockCopy] = []
        if row.host:
            row.blocks = tuple(free.pop() for _ in row.host)
            copies = [BlockCopy("swap_in", a, b) for a, b in zip(row.host, row.blocks, strict=True)]
            free_host += row.host
            row.host = ()
        elif row.computed and self.rng.random() < 0.3:
            old = row.blocks
            if len(free_host) >= len(old) and self.rng.random() < 0.5:
                row.host = tuple(free_host.pop() for _ in old)
                row.blocks = ()
                copies = [BlockCopy("swap_out", a, b) for a, b in zip(old, row.host, strict=True)]
            elif free:
                new = free.pop()
                row.blocks = (new, *old[1:])
                copies = [BlockCopy("copy", old[0], new)]
                old = old[:1]
            else:
                return
            free += old
            self.rng.shuffle(free)
        if copies:
            self.runner.copy_blocks(copies)

    def _execute(self, chosen: Sequence[tuple[_Row, int]]) -> None:
        self.steps += 1
        rows = tuple([row.scheduled(count or 1, seat, idle=not count) for seat, (row, count) in enumerate(chosen)])
        results = self._results(rows)
        if self.rng.random() < 0.4:
            self._again(rows, results)
        for (row, count), result in zip(chosen, results, strict=True):
            row.computed += count
            row.output += result.token_ids

    def _again(self, rows: tuple[ScheduledSequence, ...], results: tuple[RowResult, ...]) -> None:
        """The same rows once more; then one of them alone in between, and all of them backwards."""
        tokens = [result.token_ids for result in results]
        again = [result.token_ids for result in self._results(rows)]
        if again != tokens:
            raise self.broken("the same rows executed twice give the same result", f"first {tokens}, then {again}")
        self._results((self.rng.choice(rows),))
        backwards = [result.token_ids for result in self._results(rows[::-1])]
        if backwards[::-1] != tokens:
            raise self.broken(
                "results come in the order of the rows, and do not depend on an earlier step",
                f"first {tokens}, with the rows reversed {backwards}",
            )

    def _results(self, rows: tuple[ScheduledSequence, ...]) -> tuple[RowResult, ...]:
        out = SchedulerOutput(rows=rows, num_tokens=sum(row.num_tokens for row in rows))
        kept = [(row, list(row.output_ids)) for row in rows]
        results = self.runner.execute(out).rows
        if kept != [(row, list(row.output_ids)) for row in rows]:
            raise self.broken("a runner changes nothing that it is given", "a row or its output has changed")
        if self.runner.geometry != self.geometry:
            raise self.broken("the geometry is fixed", f"it was {self.geometry}, it is {self.runner.geometry}")
        if len(results) != len(rows):
            raise self.broken("there is one result for each row", f"{len(results)} results for {len(rows)} rows")
        for row, result in zip(rows, results, strict=True):
            if result.error is not None:
                raise self.broken("a sound row gives no error", f"{row.request.id}: {result.error}")
            if len(result.token_ids) != row.samples:
                raise self.broken(
                    "a row gives one token if it samples, and else none",
                    f"{row.request.id}: samples={row.samples}, tokens {result.token_ids}",
                )
            if any(not 0 <= token < self.geometry.vocab_size for token in result.token_ids):
                raise self.broken("tokens are in the vocabulary", f"{row.request.id}: {result.token_ids}")
            self._check_scores(row, result)
        return results

    def _check_scores(self, row: ScheduledSequence, result: RowResult) -> None:
        """A runner may know no log-probabilities; those that it gives are the ones asked for."""
        if result.logprobs is not None and (
            row.request.params.logprobs is None
            or len(result.logprobs) != len(result.token_ids)
            or any(token not in entry for token, entry in zip(result.token_ids, result.logprobs, strict=True))
        ):
            raise self.broken(
                "log-probabilities are one entry for each token, with that token in it, where they are asked for",
                f"{row.request.id}: tokens {result.token_ids}, logprobs {result.logprobs}",
            )
        if result.prompt_logprobs is None:
            return
        prompt = row.request.prompt_token_ids
        wanted = range(row.start + 1, min(row.start + row.num_tokens + 1, len(prompt)))
        given = result.prompt_logprobs
        if (
            row.request.params.prompt_logprobs is None
            or sorted(given) != list(wanted)
            or any(prompt[position] not in given[position] for position in wanted)
        ):
            raise self.broken(
                "a row over positions [s, e) gives the log-probabilities of the prompt's tokens s+1 .. min(e, P-1), "
                "where they are asked for",
                f"{row.request.id}: s={row.start}, e={row.start + row.num_tokens}, P={len(prompt)}, given {given}",
            )
