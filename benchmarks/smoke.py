"""Whether a change made the engine slower: for noisy machines, in about a minute of processor time.

Nothing here is compared with a number of seconds that was measured before. There are three kinds of figures:

* ``count``: Python's bytecodes, and torch's operators. They are exact: the same code gives the same number on every
  machine, whatever else runs there. Bounds are tight.
* ``record``: bytecodes per row beside those in benchmarks/results/smoke.json, which differ from one minor version of
  Python to the next. ``--record`` writes those of the Python that runs it, after a change that is meant to cost them.
* ``time``: two engines step in turn, A B A B, and the medians of a step are divided. Seconds are those that the thread
  had a processor, and torch has one thread, so that other processes can disturb but not stop it. The best of up to
  three tries counts, since noise passes and a slower engine stays one. They see what counts cannot: loops within C,
  where one bytecode copies a list of any length, and kernels. Bounds are loose where the processor decides.

What one bound is, and why, is said in `BOUNDS`. The exit status is 1 if one is broken.

    python benchmarks/smoke.py [--parts python,model] [--json FILE] [--record] [--tiny]

Not seen by it: threads of the kernels (it computes on one), CUDA, loading and start-up, and whatever takes as much
longer in both of two engines that are compared, unless it is Python.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

import batchkit
from batchkit import (
    ChunkedPrefillScheduler,
    Engine,
    FeedbackScheduler,
    KVGeometry,
    ModelRunner,
    PagedAllocator,
    RowResult,
    SamplerOutput,
    SamplingParams,
    Scheduler,
    SchedulerOutput,
    VirtualClock,
)
from batchkit.cli import SCHEDULERS
from batchkit.hf.batch import BatchBuilder

if TYPE_CHECKING:
    from batchkit.types import BlockCopy

RECORD = Path(__file__).with_name("results") / "smoke.json"
BLOCK_SIZE = 16
ROWS = 64
"""Rows of a decode step whose bytecodes are counted."""
STEP_S = 0.03
"""Virtual seconds of a step: what policies that observe it assume, so that none computes its queue anew."""
TRIES = 3

GROWTH = 1.02
"""Of counts that should not grow: they are equal today, but for what happens once to some sequence."""
FREE_GROWTH = 1.4
"""Of the time where counts do not grow. It is 1.0 to 1.2, with copies of block tables for kernels, which are an entry
for every 16 tokens. One copy of each row's tokens, or of the queue, in every step makes it 1.5 to 2.5."""
BOUNDS = {
    "context": GROWTH,
    "queue": GROWTH,
    "admission": GROWTH,
    "rows": GROWTH,
    "output": GROWTH,
    "prompt": GROWTH,
    # Three in a hundred: a test or a call more for every row is seen, one for every step is not.
    "record": 1.03,
    "context, time": FREE_GROWTH,
    "output, time": FREE_GROWTH,
    "admission, time": FREE_GROWTH,
    # 0.18 in a Llama of four layers, each of which is two calls. With its modules fused one by one it is 0.58.
    "fused operators": 0.3,
    # Equal today. An operator for every row would make it several times that.
    "operators by rows": GROWTH,
    "sampling operators by rows": GROWTH,
    # 0.5 to 0.6 with AVX2. The reference gathers the rows' KV; a backend that is no better gives 1.
    "attention, decode": 0.8,
    # 0.8 to 0.95: matrix products are most of it. Only kernels that are worse than what they replace are found.
    "attention, prefill": 1.1,
    # 0.5 with AVX2, of one row in float32. Without kernels it is 1.
    "fused, decode": 0.8,
    # 0.9 with AVX2 and below with instructions for bfloat16. As torch multiplies without these, it is 2 to 3.
    "bfloat16": 1.4,
    # 0.1 to 0.2. One row costs the weights and the calls, which rows share; 1 is none of that.
    "batching": 0.5,
    # 1.2, of a model whose forward pass takes some milliseconds only.
    "overhead": 1.6,
    # 1.3 to 1.6. Where the vocabulary is gone through once more for each row, it is several times that.
    "sampling": 2.5,
}
"""The most that a figure may be."""


@dataclass(frozen=True)
class Check:
    """One line of the table.

    Attributes:
        name: a key of `BOUNDS`.
        kind: ``count``, ``record`` or ``time``; see the module.
        what: what is divided by what.
        value: None: it was not measured.
        note: which policy is the worst, or why there is no value.
    """

    name: str
    kind: str
    what: str
    value: float | None
    note: str = ""

    @property
    def bound(self) -> float:
        """The most that the value may be."""
        return BOUNDS[self.name]

    @property
    def verdict(self) -> str:
        """``ok``, ``SLOWER``, or ``not measured``."""
        if self.value is None:
            return "not measured"
        return "ok" if self.value <= self.bound else "SLOWER"


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        context, queue, output: tokens of each row, requests waiting, and tokens generated: few and many of them.
        rows, long: of steps that are timed, and the many tokens of each row there.
        rounds: steps of each of two engines in turn.
        hidden, layers, vocab, attended, prompt: of the model; tokens behind a decode step and of a prompt, where
            attention is compared.
    """

    context: tuple[int, int] = (100, 4_000)
    queue: tuple[int, int] = (100, 10_000)
    long: int = 10_000
    output: tuple[int, int] = (100, 12_000)
    rows: int = 256
    rounds: int = 30
    hidden: int = 128
    layers: int = 4
    vocab: int = 4_096
    attended: int = 3_000
    prompt: int = 2_048


TINY = Sizes(
    context=(100, 400),
    queue=(100, 400),
    long=800,
    output=(100, 300),
    rows=32,
    rounds=3,
    hidden=32,
    layers=2,
    vocab=256,
    attended=200,
    prompt=64,
)
"""To try this script. What it then says of times means nothing."""


# --- how it is measured -------------------------------------------------------------------------------------------


@contextmanager
def undisturbed() -> Iterator[None]:
    """Without the garbage collector, which runs when it wants to."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def bytecodes(call: Callable[[], object]) -> int:
    """How many bytecodes of Python a call takes in this thread, those of numpy, torch and transformers apart."""
    others = tuple(
        os.path.dirname(module.__file__) + os.sep
        for module in map(sys.modules.get, ("numpy", "torch", "transformers"))
        if module is not None and module.__file__ is not None
    )
    with undisturbed():
        return _monitored(call, others) if sys.version_info >= (3, 12) else _traced(call, others)


def _traced(call: Callable[[], object], others: tuple[str, ...]) -> int:
    count = 0

    def in_frame(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        count += event == "opcode"
        return in_frame

    def entered(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_filename.startswith(others):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return in_frame

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def _monitored(call: Callable[[], object], others: tuple[str, ...]) -> int:
    """The same where tracing is made of `sys.monitoring`, and is not always told of bytecodes."""
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]
    instruction, tool = monitoring.events.INSTRUCTION, monitoring.PROFILER_ID
    count = 0

    def on_instruction(code: CodeType, offset: int) -> Any:
        nonlocal count
        if code.co_filename.startswith(others):
            return monitoring.DISABLE
        count += 1
        return None

    monitoring.use_tool_id(tool, "batchkit")
    try:
        monitoring.register_callback(tool, instruction, on_instruction)
        monitoring.set_events(tool, instruction)
        call()
    finally:
        monitoring.set_events(tool, 0)
        monitoring.free_tool_id(tool)
    return count


def per_step(engine: Engine, steps: int = BLOCK_SIZE) -> float:
    """Bytecodes of a step; of so many steps that every row of a decode step takes one block."""

    def run() -> None:
        for _ in range(steps):
            engine.step()

    return bytecodes(run) / steps


def ratio(one: Callable[[], object], other: Callable[[], object], rounds: int, bound: float) -> float:
    """Time of one call over that of another, in turn; the best of some tries, or the first within the bound."""
    best = math.inf
    with undisturbed():
        for _ in range(TRIES):
            seconds: tuple[list[float], list[float]] = ([], [])
            for _ in range(rounds):
                for call, times in zip((one, other), seconds, strict=True):
                    started = time.thread_time()
                    call()
                    times.append(time.thread_time() - started)
            best = min(best, statistics.median(seconds[0]) / statistics.median(seconds[1]))
            if best <= bound:
                break
    return best


def timed(name: str, what: str, one: Callable[[], object], other: Callable[[], object], rounds: int) -> Check:
    """A check of kind ``time``."""
    return Check(name, "time", what, ratio(one, other, rounds, BOUNDS[name]))


# --- Python: policies, allocation, packing, the engine's bookkeeping ----------------------------------------------


LETTERS = "abcdefghijklmnopqrstuvwxy"
"""Not z, which begins the stop string."""


class Packer(ModelRunner):
    """Packs every step as a real runner does, and samples the same token for every row."""

    def __init__(self, geometry: KVGeometry, clock: VirtualClock) -> None:
        self._geometry, self._clock = geometry, clock
        self._builder = BatchBuilder(geometry.block_size)

    @property
    @override
    def geometry(self) -> KVGeometry:
        return self._geometry

    @override
    def execute(self, out: SchedulerOutput) -> SamplerOutput:
        self._builder.build(out.rows)
        self._clock.advance(STEP_S)
        return SamplerOutput(tuple([RowResult((7,) if row.samples else ()) for row in out.rows]))

    @override
    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        pass

    @override
    def close(self) -> None:
        pass


class Letters:
    """A tokenizer of which every token is a letter."""

    eos_token_id = None

    def encode(self, text: str) -> list[int]:
        """One token for each letter."""
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """One letter for each token."""
        return "".join(chr(ord("a") + token) for token in token_ids)


def packing(
    policy: Callable[..., Scheduler],
    rows: int,
    context: int,
    *,
    max_tokens: int = 256,
    waiting: int = 0,
    text: bool = False,
    prefix_caching: bool = False,
    **options: Any,
) -> Engine:
    """An engine without a model, which has computed the prompts of `rows` sequences; `waiting` others stand behind."""
    blocks = rows * (-(-(context + max_tokens) // BLOCK_SIZE) + 1)
    clock = VirtualClock()
    geometry = KVGeometry(
        num_blocks=blocks, block_size=BLOCK_SIZE, max_model_len=context + max_tokens, vocab_size=len(LETTERS)
    )
    scheduler = policy(
        PagedAllocator(blocks, BLOCK_SIZE, prefix_caching=prefix_caching),
        max_model_len=geometry.max_model_len,
        max_num_seqs=rows,
        max_tokens_per_step=rows * (context + 1),
        **options,
    )
    engine = Engine(Packer(geometry, clock), scheduler, clock=clock, tokenizer=Letters() if text else None)
    params = SamplingParams(max_tokens=max_tokens, stop=("zz",) if text else (), temperature=0)
    for length, number in ((context, rows), (32, waiting)):
        for request in range(number):
            engine.add_request([(request + position) % len(LETTERS) for position in range(length)], params)
    while engine.stats().num_waiting > waiting:
        engine.step()
    return engine


def decoding(policy: Callable[..., Scheduler], rows: int, context: int, **options: Any) -> Engine:
    """The same after some steps, when what a policy does once has been done."""
    engine = packing(policy, rows, context, **options)
    for _ in range(2 * BLOCK_SIZE):
        engine.step()
    return engine


def admitting(policy: Callable[..., Scheduler], waiting: int) -> Callable[[], None]:
    """What takes a request and serves the one that is in front of so many."""
    engine = packing(policy, 1, 32, max_tokens=1, waiting=waiting)
    params = SamplingParams(max_tokens=1, temperature=0)

    def one() -> None:
        engine.add_request(range(16), params)
        engine.step()

    for _ in range(3):
        one()
    return one


def prefill(tokens: int) -> float:
    """Bytecodes of the step that computes a prompt."""
    engine = packing(ChunkedPrefillScheduler, 1, tokens, max_tokens=1, waiting=1)
    engine.step()
    engine.add_request([0] * tokens, SamplingParams(max_tokens=1, temperature=0))
    return per_step(engine, 1)


def generated(tokens: int, rows: int) -> Engine:
    """An engine whose rows have generated so many tokens, which become text with a stop string to look for."""
    engine = packing(ChunkedPrefillScheduler, rows, 16, max_tokens=tokens + 512, text=True)
    for _ in range(tokens):
        engine.step()
    return engine


def python_checks(sizes: Sizes, record: dict[str, float] | None) -> tuple[list[Check], dict[str, float]]:
    """What needs no torch.

    Args:
        sizes: of what is measured.
        record: bytecodes per row by policy, as they were; None: there are none of this Python.

    Returns:
        The checks, and the bytecodes per row by policy, as they are.
    """
    near, far = sizes.context
    few, many = sizes.queue
    per_row: dict[str, float] = {}
    growth: dict[str, dict[str, float]] = {"context": {}, "queue": {}, "admission": {}}
    variants: dict[str, tuple[Callable[..., Scheduler], dict[str, Any]]] = {
        **{name: (policy, {}) for name, policy in SCHEDULERS.items()},
        # Else those that run sink below those that wait, which preempt them.
        "feedback": (FeedbackScheduler, {"quantum_tokens": 1 << 20}),
        "chunked, prefixes kept": (ChunkedPrefillScheduler, {"prefix_caching": True}),
    }
    for name, (policy, options) in variants.items():
        base = per_step(decoding(policy, ROWS, near, waiting=few, **options))
        per_row[name] = base / ROWS
        growth["context"][name] = per_step(decoding(policy, ROWS, far, waiting=few, **options)) / base
        growth["queue"][name] = per_step(decoding(policy, ROWS, near, waiting=many, **options)) / base
        growth["admission"][name] = bytecodes(admitting(policy, many)) / bytecodes(admitting(policy, few))
    whats = {
        "context": f"a decode step, context {far:,} : {near:,}",
        "queue": f"a decode step, {many:,} waiting : {few:,}",
        "admission": f"a request taken and one admitted, {many:,} waiting : {few:,}",
    }
    checks = [_worst(name, "count", whats[name], found) for name, found in growth.items()]
    what = "a row of a decode step : the record's"
    if record is None:
        why = f"no record of Python {python_version()}"
        checks.append(Check("record", "record", what, None, why))
    else:
        # One that has no record yet counts as slower, so that it gets one.
        checks.append(_worst("record", "record", what, {n: v / record.get(n, 1.0) for n, v in per_row.items()}))

    chunked = ChunkedPrefillScheduler
    wide = per_step(decoding(chunked, 4 * ROWS, near, waiting=few)) / 4 / ROWS
    checks.append(
        Check("rows", "count", f"a row of a decode step, {4 * ROWS} rows : {ROWS}", wide / per_row["chunked"])
    )
    checks.append(Check("prompt", "count", f"a prefill, {far:,} tokens : {near:,}", prefill(far) / prefill(near)))
    short, long = (generated(tokens, 8) for tokens in sizes.output)
    what = "a decode step with text, {1:,} tokens generated : {0:,}".format(*sizes.output)
    checks.append(Check("output", "count", what, per_step(long) / per_step(short)))
    checks.append(timed("output, time", what, long.step, short.step, sizes.rounds))
    deep, shallow = (decoding(chunked, sizes.rows, context) for context in (sizes.long, near))
    what = f"a decode step, context {sizes.long:,} : {near:,}"
    checks.append(timed("context, time", what, deep.step, shallow.step, sizes.rounds))
    behind, soon = (admitting(chunked, waiting) for waiting in (4 * many, few))
    what = f"a request taken and one admitted, {4 * many:,} waiting : {few:,}"
    checks.append(timed("admission, time", what, behind, soon, 3 * sizes.rounds))
    return checks, per_row


def _worst(name: str, kind: str, what: str, found: dict[str, float]) -> Check:
    worst = max(found, key=lambda one: found[one])
    return Check(name, kind, what, found[worst], f"worst: {worst}")


def python_version() -> str:
    """The minor version, on which bytecodes depend."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


# --- the model: kernels, operators, the step around it ------------------------------------------------------------

GREEDY: dict[str, Any] = {"temperature": 0}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "frequency_penalty": 0.1, "logprobs": 2}


class ModelChecks:
    """Checks of a small Llama with random weights, on one thread of the CPU."""

    def __init__(self, sizes: Sizes) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        self._sizes = sizes
        config = AutoConfig.for_model(
            "llama",
            vocab_size=sizes.vocab,
            hidden_size=sizes.hidden,
            intermediate_size=3 * sizes.hidden,
            num_hidden_layers=sizes.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=8192,
        )
        torch.manual_seed(0)
        self._model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        self._half = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()

    def engine(
        self, rows: int, context: int, *, model: Any = None, params: dict[str, Any] = GREEDY, **options: Any
    ) -> Engine:
        """An engine whose rows decode behind one prompt, which is computed once."""
        max_tokens = 12 * self._sizes.rounds * TRIES
        blocks = rows * (-(-(context + max_tokens) // BLOCK_SIZE) + 1)
        engine = Engine.from_model(
            model or self._model,
            num_kv_blocks=blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=rows,
            max_tokens_per_step=max(rows, self._sizes.prompt),
            prefix_caching=True,
            **options,
        )
        prompt = [position % self._sizes.vocab for position in range(context)]
        for seed in range(rows):
            engine.add_request(
                prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True, detokenize=False, seed=seed, **params)
            )
        while engine.stats().generated_tokens < 3 * rows:
            engine.step()
        return engine

    def prefill(self, **options: Any) -> Callable[[], None]:
        """What computes a prompt, anew in each call."""
        engine = Engine.from_model(
            self._model,
            num_kv_blocks=self._sizes.prompt // BLOCK_SIZE + 1,
            block_size=BLOCK_SIZE,
            max_num_seqs=1,
            max_tokens_per_step=self._sizes.prompt,
            **options,
        )
        prompt = [position % self._sizes.vocab for position in range(self._sizes.prompt)]
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)

        def one() -> None:
            engine.add_request(prompt, params)
            engine.step()

        one()
        return one

    def operators(self) -> list[Check]:
        """Which are as exact as bytecodes."""
        checks = [
            Check(
                "fused operators",
                "count",
                "operators of a decode step, optimize=True : False",
                operators(self.engine(4, 100).step) / operators(self.engine(4, 100, optimize=False).step),
            )
        ]
        for name, params, kind in (
            ("operators by rows", GREEDY, "greedy"),
            ("sampling operators by rows", SAMPLED, "sampled"),
        ):
            many, few = (operators(self.engine(rows, 100, params=params).step) for rows in (ROWS, 4))
            checks.append(Check(name, "count", f"operators of a decode step, {kind}, {ROWS} rows : 4", many / few))
        return checks

    def times(self) -> list[Check]:
        """Pairs of engines that step in turn."""
        rounds, attended, prompt = self._sizes.rounds, self._sizes.attended, self._sizes.prompt
        some, one = self.engine(16, 100), self.engine(1, 100)
        half = self.engine(16, 100, model=self._half)
        batching = ratio(some.step, one.step, rounds, 16 * BOUNDS["batching"]) / 16
        return [
            timed(
                "attention, decode",
                f"a decode step of 8 rows, context {attended:,}, attention default : reference",
                self.engine(8, attended).step,
                self.engine(8, attended, attention="reference").step,
                rounds,
            ),
            timed(
                "attention, prefill",
                f"a prefill of {prompt:,} tokens, attention default : reference",
                self.prefill(),
                self.prefill(attention="reference"),
                max(1, rounds // 6),
            ),
            timed(
                "fused, decode",
                "a decode step of 1 row, optimize=True : False",
                one.step,
                self.engine(1, 100, optimize=False).step,
                rounds,
            ),
            timed("bfloat16", "a decode step of 16 rows, bfloat16 : float32", half.step, some.step, rounds),
            Check("batching", "time", "a decode step of 16 rows : 16 of 1 row", batching),
            Check("overhead", "time", "a decode step of 16 rows : the model's forward in it", self._overhead()),
            timed(
                "sampling",
                "a decode step of 16 rows, sampled : greedy",
                self.engine(16, 100, params=SAMPLED).step,
                some.step,
                rounds,
            ),
        ]

    def _overhead(self) -> float:
        """Time of a step over that of the model within the same step, by hooks; a median."""
        started, forward, found = 0.0, 0.0, []

        def before(*given: Any) -> None:
            nonlocal started
            started = time.thread_time()

        def after(*given: Any) -> None:
            nonlocal forward
            forward = time.thread_time() - started

        # An engine's clone of the model has the hooks of the model.
        hooks = [self._model.register_forward_pre_hook(before), self._model.register_forward_hook(after)]
        try:
            engine = self.engine(16, 100)
        finally:
            for hook in hooks:
                hook.remove()
        with undisturbed():
            for _ in range(self._sizes.rounds):
                began = time.thread_time()
                engine.step()
                found.append((time.thread_time() - began) / forward)
        return statistics.median(found)


def operators(call: Callable[[], object]) -> int:
    """How many of torch's operators a call takes; kernels of our own are none."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
        count = 0

        @override
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    counter = Counter()  # type: ignore[no-untyped-call]
    with counter, torch.inference_mode():
        call()
    return counter.count


MODEL_NAMES = (
    "fused operators",
    "operators by rows",
    "sampling operators by rows",
    "attention, decode",
    "attention, prefill",
    "fused, decode",
    "bfloat16",
    "batching",
    "overhead",
    "sampling",
)


def model_checks(sizes: Sizes) -> list[Check]:
    """What needs torch, transformers, and kernels that this machine can have."""
    try:
        import torch
        import transformers

        from batchkit.hf.backends.native import BuildError, kernels
    except ImportError as error:
        return [Check(name, "", name, None, str(error)) for name in MODEL_NAMES]
    try:
        for library in ("attention", "layers", "linear"):
            kernels(library)
    except BuildError as error:
        return [Check(name, "", name, None, str(error)) for name in MODEL_NAMES]
    transformers.utils.logging.set_verbosity_error()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        checks = ModelChecks(sizes)
        return checks.operators() + checks.times()
    finally:
        torch.set_num_threads(threads)


# --- what is said of it -------------------------------------------------------------------------------------------


def show(checks: Sequence[Check]) -> None:
    """The table."""
    width = max(len(check.what) for check in checks)
    print(f"{'':<6}  {'':<{width}}  {'value':>7}  {'bound':>5}")
    for check in checks:
        value = "-" if check.value is None else f"{check.value:.3f}"
        note = f"  ({check.note})" if check.note else ""
        print(f"{check.kind:<6}  {check.what:<{width}}  {value:>7}  {check.bound:>5.2f}  {check.verdict}{note}")


def read_record(path: Path) -> dict[str, dict[str, float]]:
    """Bytecodes per row, by version of Python and policy."""
    if not path.exists():
        return {}
    found: dict[str, dict[str, float]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """See the module. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="python,model", help="what to measure; comma-separated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--record", action="store_true", help="make the bytecodes per row of today the record's")
    parser.add_argument("--record-file", type=Path, default=RECORD, metavar="FILE")
    parser.add_argument("--tiny", action="store_true", help="to try this script; what it says of times means nothing")
    args = parser.parse_args(argv)
    parts = args.parts.split(",")
    if not set(parts) <= {"python", "model"}:
        parser.error(f"--parts takes python and model, got {args.parts!r}")
    sizes = TINY if args.tiny else Sizes()
    checks: list[Check] = []
    if "python" in parts:
        record = read_record(args.record_file)
        found, per_row = python_checks(sizes, record.get(python_version()))
        checks += found
        if args.record:
            record[python_version()] = {name: round(value, 2) for name, value in per_row.items()}
            args.record_file.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    if "model" in parts:
        checks += model_checks(sizes)
    show(checks)
    if args.json:
        head = {"batchkit": batchkit.__version__, "python": platform.python_version(), "numpy": np.__version__}
        lines = [{**asdict(check), "bound": check.bound, "verdict": check.verdict} for check in checks]
        args.json.write_text(json.dumps({**head, "checks": lines}, indent=1) + "\n", encoding="utf-8")
    slower = [check.what for check in checks if check.verdict == "SLOWER"]
    unknown = sum(check.verdict == "not measured" for check in checks)
    print(f"\n{len(checks)} checks, {len(slower)} SLOWER, {unknown} not measured")
    return int(bool(slower))


if __name__ == "__main__":
    sys.exit(main())
