"""The ladder from naive static batching to paged memory with chunked prefill, one change at a time.

Two policies that are compared as they come differ in several things, and the gain between them belongs to none. Here
one policy has all these things as arguments, and each rung changes one of them. What a change gives depends on the
changes before it, so that there are two orders; and on what requests declare, which is the workload's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

from typing_extensions import Unpack, override

from ..allocators import BlockAllocator
from ..metrics import interval_95
from ..scheduler import Scheduler, SchedulerOptions, Step
from ..schedulers.orca import reserved_slots
from ..sequence import Sequence as Seq
from ..sequence import Status
from ..types import Refusal
from .compare import FIGURES, Comparison, Run, compare
from .loads import Workload
from .policies import Policy
from .targets import Target

__all__ = [
    "CHANGES",
    "NAIVE",
    "ORDERS",
    "SHOWN",
    "ChunkedRungScheduler",
    "Design",
    "Factor",
    "Ladder",
    "Rung",
    "RungScheduler",
    "climb",
    "num_designs",
]

Join = Literal["batch", "step"]
Reservation = Literal["model_len", "pow2", "max_tokens", "now"]


class RungScheduler(Scheduler):
    """Every policy of the ladder, by its arguments. Corners of it decide as the built-in policies do.

    First come first served; selection stops at the first request that does not fit. Prompts run whole, unless one is
    longer than the token budget. When blocks run out, the newest sequence is preempted.

    Args:
        pad_to: a batch runs for this many output tokens at least, see `StaticScheduler`.
        drop_finished: finished sequences of a batch give up seat, blocks and compute at once.
        join: "batch": only when the batch before has ended; "step": whenever there is room.
        reserve: memory taken on admission: for the model's length; for the prompt and the next power of two of the
            declared output, up to the model's length; for the declared output; or for the tokens there are ("now").
        mix: decoding rows run in the step of a prefill too; otherwise prefills come first, in steps of their own.

    Raises:
        ValueError: the arguments do not go together.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        pad_to: int | None = None,
        drop_finished: bool = False,
        join: Join = "batch",
        reserve: Reservation = "model_len",
        mix: bool = False,
        **options: Unpack[SchedulerOptions],
    ) -> None:
        super().__init__(allocator, **options)
        for name, value, known in (("join", join, Join), ("reserve", reserve, Reservation)):
            if value not in get_args(known):
                raise ValueError(f"{name} must be one of {', '.join(get_args(known))}, got {value!r}")
        if pad_to is not None and (drop_finished or pad_to < 1):
            raise ValueError(f"pad_to={pad_to} must be at least 1, and keeps finished sequences")
        if join == "step" and not drop_finished:
            raise ValueError('join="step" needs drop_finished=True: nobody can join while finished ones stay')
        if join == "batch" and (mix or reserve == "now"):
            raise ValueError(
                f'join="batch" goes neither with mix=True nor with reserve="now", got {mix} and {reserve!r}'
            )
        if reserve == "model_len" and self.max_model_len is None:
            raise ValueError('reserve="model_len" needs max_model_len')
        if self.chunked and join == "step" and not mix:
            raise ValueError("pieces of prompts fill the steps of decoding rows, which needs mix=True")
        self.pad_to = pad_to
        self.drop_finished = drop_finished
        self.join: Join = join
        self.reserve: Reservation = reserve
        self.mix = mix
        self._open = True  # whether sequences may still join the batch
        self._num_decodes = 0

    def reservation(self, seq: Seq) -> int:
        """KV slots that `seq` takes when it is admitted."""
        if self.reserve == "now":
            return seq.num_tokens
        return reserved_slots(self.reserve, seq.num_prompt, seq.request.max_tokens, self.max_model_len)

    @override
    def may_leave(self, seq: Seq) -> bool:
        if self.drop_finished:
            return True
        # The first of the pad_to tokens came with the prefill.
        is_padded = self.pad_to is None or self._num_decodes >= self.pad_to - 1
        return is_padded and not self._open and self.num_held == len(self.running)

    @override
    def schedule(self, step: Step) -> None:
        if self.join == "step":
            self._open = True
        elif not self.running:
            self._open, self._num_decodes = True, 0
        prefilling = []
        for seq in self.running:
            if seq.num_uncomputed > 1:
                prefilling.append(seq)
            elif self.mix:
                step.run(seq, victims=self.victims(seq))
        for seq in prefilling:
            step.run(seq, victims=self.victims(seq))
        if self._open:
            self._open = False
            for seq in self.order(step.now):
                if not step.run(seq, reserve=self.reservation(seq)):
                    # Only the budget of this step stopped the filling; seats and memory close the batch.
                    self._open = step.refused is Refusal.TOKENS
                    break
        if not step:
            # Held ones last: with a budget cut for lack of memory, their idle rows could leave no room for any other.
            held = [seq for seq in self.running if seq.status is Status.HELD]
            for seq in self.running:
                if seq.status is not Status.HELD:
                    step.run(seq, victims=self.victims(seq))
            for seq in held:
                step.run(seq)
            self._num_decodes += 1


class ChunkedRungScheduler(RungScheduler):
    """The same with prompts cut to what is left of the token budget."""

    chunked: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Design:
    """One policy of the ladder: its choice on every axis. See `RungScheduler`.

    Attributes:
        pad: what a batch is padded to: the longest output of the whole load, or of the batch.
        drop, join, reserve, mix: see `RungScheduler`.
        few_seats: a batch is as large as somebody said; otherwise as memory allows.
        chunk: prompts are cut to a token budget.
    """

    pad: Literal["global", "batch"] = "global"
    drop: bool = False
    join: Join = "batch"
    few_seats: bool = False
    reserve: Reservation = "model_len"
    mix: bool = False
    chunk: bool = False

    @property
    def name(self) -> str:
        """Its choices, in one word."""
        return "-".join(
            (
                f"pad_{self.pad}",
                "drop" if self.drop else "keep",
                self.join,
                *(["few_seats"] if self.few_seats else []),
                self.reserve,
                *(["mix"] if self.mix else []),
                *(["chunk"] if self.chunk else []),
            )
        )

    def policy(self, *, static_batch: int | None, max_num_seqs: int, step_tokens: int, chunk_tokens: int) -> Policy:
        """To run it; the arguments are those of `climb`."""
        return Policy(
            name=self.name,
            scheduler=ChunkedRungScheduler if self.chunk else RungScheduler,
            arguments={"drop_finished": self.drop, "join": self.join, "reserve": self.reserve, "mix": self.mix},
            pad_to_longest=self.pad == "global",
            max_num_seqs=static_batch if self.few_seats else max_num_seqs,
            max_tokens_per_step=chunk_tokens if self.chunk else step_tokens,
        )


NAIVE = Design()
"""Where the ladder begins: static batching as in the 2023 experiment."""

CHANGES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "pad": ("pad to the longest output of the batch, not of all", {"pad": "batch"}),
    "drop": ("drop finished rows", {"drop": True}),
    "join": ("join at every iteration", {"join": "step"}),
    "seats": ("batch as large as memory allows", {"few_seats": False}),
    "pow2": ("reserve the next power of two, not the model's length", {"reserve": "pow2"}),
    "exact": ("reserve the declared length", {"reserve": "max_tokens"}),
    "now": ("take blocks just in time", {"reserve": "now"}),
    "mix": ("mix prefill with decode", {"mix": True}),
    "chunk": ("cut prompts to the token budget", {"chunk": True}),
}
"""The rungs by name: for people, and what of a `Design` changes."""

ORDERS: dict[str, tuple[str, ...]] = {
    "A": ("pad", "drop", "join", "seats", "pow2", "exact", "now", "mix", "chunk"),
    "B": ("pad", "seats", "pow2", "exact", "drop", "join", "mix", "chunk", "now"),
}
"""Two ways up. A: first who runs, then memory. B: first memory, as far as a static batch can; blocks just in time last.
"seats" is a rung only where the batch is set by hand."""

SHOWN = ("prompt_per_s", "generated_per_s", "tokens_per_s", "mean_rows", "kv_used", "preemptions")
"""Figures of `compare.FIGURES` that are reported of each rung."""


@dataclass(frozen=True, slots=True)
class Factor:
    """Throughput after a change in units of that before: a geometric mean over loads, so that factors multiply.

    Attributes:
        mean: of the ratios, paired by load.
        low, high: its 95 % interval; None of one load.
        num: loads.
    """

    mean: float
    low: float | None
    high: float | None
    num: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """One change and what it gave; the first of an order is where it begins.

    Attributes:
        change: key of `CHANGES`; None of the first.
        design: what runs now.
        figures: means over the loads, by the names in `SHOWN`; None if it was not run.
        factor: against the rung before; None of the first, or if one of the two was not run.
        share: of the whole gain, by logarithms; they add up to 1. None if the gain cannot be told from none.
        cumulative: against the first rung.
    """

    change: str | None
    design: Design
    figures: Mapping[str, float] | None
    factor: Factor | None
    share: float | None
    cumulative: Factor | None

    @property
    def title(self) -> str:
        """For people."""
        return "naive static batching" if self.change is None else CHANGES[self.change][0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ladder:
    """A workload's ladder, in each order.

    Attributes:
        comparison: the runs; a design that is in both orders was run once.
        designs: by order, the first and what each change makes of it.
        changes: by order, as in `CHANGES`.
    """

    comparison: Comparison
    designs: Mapping[str, tuple[Design, ...]]
    changes: Mapping[str, tuple[str, ...]]

    def factor(self, after: Design, before: Design) -> Factor | None:
        """Of both kinds of tokens per second; None if no load was served by both."""
        speed = FIGURES["tokens_per_s"]
        base = {run.seed: speed(run) for run in self.comparison.of(before.name) if speed(run)}
        logs = [
            math.log(speed(run) / base[run.seed])
            for run in self.comparison.of(after.name)
            if run.seed in base and speed(run)
        ]
        if not logs:
            return None
        found = interval_95(logs)
        half = found.half_width
        low, high = (None, None) if half is None else (math.exp(found.mean - half), math.exp(found.mean + half))
        return Factor(math.exp(found.mean), low, high, found.num)

    def gain(self, order: str) -> Factor | None:
        """Of the last rung against the first."""
        designs = self.designs[order]
        return self.factor(designs[-1], designs[0])

    def is_certain(self, order: str) -> bool:
        """Whether there is a gain or a loss that can be told from none."""
        gain = self.gain(order)
        return gain is not None and (
            gain.mean != 1 if gain.low is None or gain.high is None else not gain.low <= 1 <= gain.high
        )

    def rungs(self, order: str) -> list[Rung]:
        """All rungs, those that were not run too."""
        designs = self.designs[order]
        gain = self.gain(order)
        whole = math.log(gain.mean) if gain is not None and self.is_certain(order) else 0.0
        known = set(self.comparison.policies)
        rungs = []
        for number, (change, design) in enumerate(zip((None, *self.changes[order]), designs, strict=True)):
            factor = self.factor(design, designs[number - 1]) if number else None
            has_run = design.name in known
            rungs.append(
                Rung(
                    change=change,
                    design=design,
                    figures={name: self.comparison.figure(design.name, name).mean for name in SHOWN}
                    if has_run
                    else None,
                    factor=factor,
                    share=math.log(factor.mean) / whole if factor is not None and whole else None,
                    cumulative=self.factor(design, designs[0]),
                )
            )
        return rungs

    def to_json(self) -> dict[str, Any]:
        """As JSON takes it; of a simulation the same for the same seeds."""
        return {
            "workload": self.comparison.workload,
            "simulated": self.comparison.is_simulated,
            "missing": [list(one) for one in self.comparison.missing],
            "orders": {
                order: [
                    {
                        "change": rung.change,
                        "title": rung.title,
                        "policy": rung.design.name,
                        "figures": rung.figures,
                        "factor": _json(rung.factor),
                        "share": rung.share,
                        "cumulative": _json(rung.cumulative),
                    }
                    for rung in self.rungs(order)
                ]
                for order in self.designs
            },
        }


def _json(factor: Factor | None) -> dict[str, float | None] | None:
    if factor is None:
        return None
    return {"mean": factor.mean, "low": factor.low, "high": factor.high, "loads": factor.num}


def _ways(
    orders: Mapping[str, Sequence[str]], *, with_seats: bool
) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[Design, ...]]]:
    """The changes of each order, and the designs from the first to the last."""
    changes = {order: tuple(name for name in names if name != "seats" or with_seats) for order, names in orders.items()}
    designs: dict[str, tuple[Design, ...]] = {}
    for order, names in changes.items():
        way = [replace(NAIVE, few_seats=with_seats)]
        for name in names:
            way.append(replace(way[-1], **CHANGES[name][1]))
        designs[order] = tuple(way)
    return changes, designs


def num_designs(orders: Mapping[str, Sequence[str]] = ORDERS, *, with_seats: bool) -> int:
    """As many designs `climb` runs with each load; `with_seats` if the batch is set by hand."""
    return len({design for way in _ways(orders, with_seats=with_seats)[1].values() for design in way})


def climb(
    workload: Workload,
    *,
    target: Target,
    seeds: Iterable[int] = (0,),
    static_batch: int | None = None,
    max_num_seqs: int = 256,
    step_tokens: int = 2048,
    chunk_tokens: int = 512,
    orders: Mapping[str, Sequence[str]] = ORDERS,
    on_run: Callable[[Run], None] | None = None,
) -> Ladder:
    """Run every rung of every order on the same loads.

    Ctrl-C ends it early, as in `compare`.

    Args:
        workload: makes a load from a seed.
        target: see `Target`.
        seeds: one load for each.
        static_batch: the batch as somebody sets it by hand, until the rung "seats". Default: memory alone bounds it.
        max_num_seqs: seats on all other rungs.
        step_tokens: the token budget of a step until the rung "chunk".
        chunk_tokens: the token budget from there on.
        orders: keys of `CHANGES`, by the order's name.
        on_run: called with each run as it is there.

    Raises:
        ValueError: a number is too small, or see `compare`.
    """
    if static_batch is not None and not 1 <= static_batch <= max_num_seqs:
        raise ValueError(f"static_batch must be between 1 and max_num_seqs ({max_num_seqs}), got {static_batch}")
    for name, tokens in (("step_tokens", step_tokens), ("chunk_tokens", chunk_tokens)):
        if tokens < max_num_seqs:
            raise ValueError(f"{name} must be at least max_num_seqs ({max_num_seqs}), got {tokens}")
    changes, designs = _ways(orders, with_seats=static_batch is not None)
    different = dict.fromkeys(design for way in designs.values() for design in way)
    comparison = compare(
        [
            design.policy(
                static_batch=static_batch,
                max_num_seqs=max_num_seqs,
                step_tokens=step_tokens,
                chunk_tokens=chunk_tokens,
            )
            for design in different
        ],
        workload,
        target=target,
        seeds=seeds,
        on_run=on_run,
    )
    return Ladder(comparison=comparison, designs=designs, changes=changes)
