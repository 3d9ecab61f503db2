"""Capacity by arithmetic: what a device holds of a model, and how fast it decodes. Nothing is run or measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, Literal, get_args

from ..costs import Device, ModelShape, RooflineCost
from ..schedulers.orca import Reserve, reserved_slots

__all__ = ["MEMORY_FRACTION", "RESERVATIONS", "Holding", "Load", "Plan", "Rates", "Speed", "kv_budget", "plan"]

MEMORY_FRACTION = 0.95
"""Of a data sheet's memory, for weights and KV together.

A card has more bytes than its data sheet's GB: one of 40 GB reports 42.3e9, and servers of models commonly take 0.9 of
that, 38.1e9, and leave the rest to activations, the runtime and the allocator. That is 0.95 of 40e9. Beside OPT-13B in
half precision it leaves 15,006 KV tokens, 937 blocks of 16, where vLLM found 984 on that card; 0.9 leaves 12,564, and
1.0, with nothing for anything else, 17,447.
"""

RESERVATIONS: tuple[Reserve | Literal["now"], ...] = ("model_len", "pow2", "max_tokens", "now")
"""From the greatest to the least: the three of `OrcaScheduler`, and blocks that are taken just in time."""

assert set(RESERVATIONS) == {*get_args(Reserve), "now"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """What one sequence holds under a reservation, in the mean over its steps.

    Attributes:
        reservation: one of `RESERVATIONS`.
        blocks: that it holds. Whole, except just in time.
        used_slots: that have keys and values in them.
        wasted_slots: that it holds beyond.
        wasted_blocks: those slots, in blocks.
        num_seqs: that many fit at a time. Just in time, in the mean: more while they are young, fewer at their ends.
    """

    reservation: str
    blocks: float
    used_slots: float
    wasted_slots: float
    wasted_blocks: float
    num_seqs: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Sequences that are all alike.

    Attributes:
        prompt: tokens.
        output: tokens that come.
        declared: output tokens that the request says may come.
        holdings: one for each of `RESERVATIONS`.
    """

    prompt: int
    output: int
    declared: int
    holdings: tuple[Holding, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """A throughput. Of tokens per second the second counts prompt and generated tokens together."""

    requests_per_s: float
    generated_per_s: float
    tokens_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """How fast the sequences that fit are served, if others always wait.

    Attributes:
        reservation: one of `RESERVATIONS`.
        num_seqs: that run at a time: all that fit, or the seats there are.
        decode_step_s: seconds of a step in which all of them decode, at their mean context.
        prefill_step_s: seconds of a step that computes one prompt and nothing else.
        alone: every prompt is computed in a step of its own.
        mixed: prompts are computed in the decode steps, their tokens spread evenly over them. No order of the same
            work, at the same number of sequences, is faster.
    """

    reservation: str
    num_seqs: int
    decode_step_s: float
    prefill_step_s: float
    alone: Rates
    mixed: Rates


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What fits, and how fast it is.

    Attributes:
        model: see `ModelShape`.
        device: see `Device`.
        block_size: tokens in a KV block.
        weight_bytes: of the model.
        kv_bytes: for KV blocks.
        other_bytes: of the device's memory that are left to everything else.
        num_blocks: whole blocks in `kv_bytes`.
        kv_tokens: slots in them.
        lengths: loads of the lengths asked for.
        mean: the load that the speeds are of.
        speeds: one for each of `RESERVATIONS`.
        efficiency: see `RooflineCost`.
        overhead_s: see `RooflineCost`.
    """

    model: ModelShape
    device: Device
    block_size: int
    weight_bytes: float
    kv_bytes: int
    other_bytes: float
    num_blocks: int
    kv_tokens: int
    lengths: tuple[Load, ...]
    mean: Load
    speeds: tuple[Speed, ...]
    efficiency: float
    overhead_s: float


def kv_budget(
    model: ModelShape, device: Device, *, memory_fraction: float = MEMORY_FRACTION, kv_memory: int | None = None
) -> int:
    """Bytes for KV blocks.

    Args:
        model: gives the weights.
        device: gives the memory.
        memory_fraction: of the memory, for weights and KV together.
        kv_memory: instead, as many bytes.

    Raises:
        ValueError: the weights do not fit, or `kv_memory` does not fit beside them; or the model has no KV, or an
            argument is out of range.
    """
    if not 0 < memory_fraction <= 1:
        raise ValueError(f"memory_fraction must be above 0 and at most 1, got {memory_fraction:g}")
    if model.kv_bytes_per_token < 1:
        raise ValueError(
            f"{model.name} has no KV to plan for: its kv_bytes_per_token is {model.kv_bytes_per_token}, as where "
            f"num_hidden_layers is 0"
        )
    usable = device.memory_bytes * (memory_fraction if kv_memory is None else 1)
    left = int(usable - model.weight_bytes)
    of = f"{usable:,.0f} bytes, {memory_fraction:g} of the memory" if kv_memory is None else f"{usable:,.0f} bytes"
    if left < 1:
        raise ValueError(
            f"{model.name} does not fit: its weights are {model.weight_bytes:,.0f} bytes, {device.name} has {of}"
        )
    if kv_memory is None:
        return left
    if kv_memory > left:
        raise ValueError(
            f"kv_memory of {kv_memory:,} bytes does not fit: {device.name} has {of}, and {left:,} beside the weights"
        )
    return kv_memory


def plan(
    model: ModelShape,
    device: Device,
    *,
    block_size: int = 16,
    lengths: Sequence[int] | None = None,
    prompt: int | None = None,
    output: int | None = None,
    cap: int | None = None,
    max_num_seqs: int | None = None,
    memory_fraction: float = MEMORY_FRACTION,
    kv_memory: int | None = None,
    **constants: Any,
) -> Plan:
    """Compute what of a model fits on a device, and how fast it is then.

    A sequence holds KV of all its tokens but the last, which is never an input. All sequences of a load have the same
    lengths; a real load with the same means fits fewer, by as much as its lengths vary. KV memory is cut into blocks
    that may lie anywhere; a reservation in one piece loses memory between the pieces too. As in `OrcaScheduler`, a
    power of two stays within the model's length, and no reservation exceeds the memory.

    Where attention looks back over a window only, KV is counted as if it looked at everything, since the blocks are
    kept. Of a mixture of experts all weights are read in every step; a small batch may read fewer.

    Args:
        model: see `ModelShape`.
        device: see `Device`.
        block_size: tokens in a KV block.
        lengths: of prompt and output together, to count the sequences of. Each is divided as `prompt` and `output`
            are, with one token of each at least. Default: 512 and 2048, or the model's length where that is less.
        prompt: tokens, in the mean. Default: 512, or four fifths of the model's length where that is less.
        output: tokens that are generated, in the mean. Default: 128, or one fifth of the model's length.
        cap: output that every request declares, up to the model's length, and none exceeds. Default: each declares
            what comes.
        max_num_seqs: sequences that run at a time at most; only the speeds depend on it. Default: memory decides.
        memory_fraction: see `kv_budget`.
        kv_memory: see `kv_budget`.
        constants: further arguments of `RooflineCost`, such as ``overhead_s``.

    Raises:
        ValueError: the model does not fit, or has no KV, or the KV memory is below one sequence, or a length exceeds
            the model's; or an argument is out of range, or the speeds are.
    """
    longest = model.max_model_len
    prompt = max(1, min(512, longest * 4 // 5)) if prompt is None else prompt
    output = max(1, min(128, longest // 5)) if output is None else output
    lengths = sorted({min(512, longest), min(2048, longest)}) if lengths is None else lengths
    for name, value in (
        ("block_size", block_size),
        ("prompt", prompt),
        ("output", output),
        ("cap", cap),
        ("max_num_seqs", max_num_seqs),
    ):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if cap is not None and output > cap:
        raise ValueError(f"output of {output} tokens in the mean exceeds the cap of {cap}")
    kv_bytes = kv_budget(model, device, memory_fraction=memory_fraction, kv_memory=kv_memory)
    num_blocks = kv_bytes // (block_size * model.kv_bytes_per_token)
    cost = RooflineCost.of(model, device, block_size=block_size, **constants)

    def load(prompt: int, output: int) -> Load:
        declared = output if cap is None else max(output, min(cap, longest - prompt))
        return Load(
            prompt=prompt,
            output=output,
            declared=declared,
            holdings=_holdings(prompt, output, declared, longest, num_blocks, block_size),
        )

    both = f"prompt of {prompt:,} and output of {output:,} tokens"
    for what, length in (*((f"length of {length:,} tokens", length) for length in lengths), (both, prompt + output)):
        if not 2 <= length <= longest:
            raise ValueError(f"a {what} is not from 2 to {longest:,}, the most that {model.name} takes")
        need = -(-(length - 1) // block_size)
        if need > num_blocks:
            raise ValueError(
                f"one sequence of {length:,} tokens needs {need:,} blocks of {block_size}; {kv_bytes:,} bytes of KV "
                f"memory are {num_blocks:,} blocks"
            )
    shares = [round(length * output / (prompt + output)) for length in lengths]
    outputs = [min(cap or length, length - 1, max(1, share)) for length, share in zip(lengths, shares, strict=True)]
    mean = load(prompt, output)
    try:
        speeds = tuple(_speed(cost, mean, holding, max_num_seqs) for holding in mean.holdings)
    except (ZeroDivisionError, OverflowError):
        speeds = ()
    if not speeds or not all(map(_is_sound, speeds)):
        raise ValueError(
            f"no speeds can be computed of {device.name}: bandwidth {device.bandwidth:g} bytes/s, {device.flops:g} "
            f"FLOP/s, efficiency {cost.efficiency:g}, {cost.overhead_s:g} s a step"
        )
    return Plan(
        model=model,
        device=device,
        block_size=block_size,
        weight_bytes=model.weight_bytes,
        kv_bytes=kv_bytes,
        other_bytes=device.memory_bytes - model.weight_bytes - kv_bytes,
        num_blocks=num_blocks,
        kv_tokens=num_blocks * block_size,
        lengths=tuple(load(length - out, out) for length, out in zip(lengths, outputs, strict=True)),
        mean=mean,
        speeds=speeds,
        efficiency=cost.efficiency,
        overhead_s=cost.overhead_s,
    )


def _holdings(
    prompt: int, output: int, declared: int, longest: int, num_blocks: int, block_size: int
) -> tuple[Holding, ...]:
    """Of a sequence that has `prompt` slots after its first step and one more after each of the others."""
    used = prompt + (output - 1) / 2
    before, after = _blocks_up_to(prompt - 1, block_size), _blocks_up_to(prompt + output - 1, block_size)
    found = []
    for reservation in RESERVATIONS:
        # What all sequences of one pool hold in `output` steps; whole numbers, so that the division is exact.
        if reservation == "now":
            held = after - before
        else:
            held = output * min(num_blocks, -(-reserved_slots(reservation, prompt, declared, longest) // block_size))
        blocks = held / output
        wasted = blocks * block_size - used
        found.append(
            Holding(
                reservation=reservation,
                blocks=blocks,
                used_slots=used,
                wasted_slots=wasted,
                wasted_blocks=wasted / block_size,
                num_seqs=num_blocks * output // held,
            )
        )
    return tuple(found)


def _blocks_up_to(slots: int, block_size: int) -> int:
    """The blocks for 1 slot, for 2, and so on up to `slots`, added up.

    >>> _blocks_up_to(5, 2), 1 + 1 + 2 + 2 + 3
    (9, 9)
    """
    whole, rest = divmod(slots, block_size)
    return block_size * whole * (whole + 1) // 2 + rest * (whole + 1)


def _is_sound(speed: Speed) -> bool:
    """Whether everything in it is a finite number above 0."""
    rates = [value for rates in (speed.alone, speed.mixed) for value in astuple(rates)]
    return all(0 < value < math.inf for value in (speed.decode_step_s, speed.prefill_step_s, *rates))


def _speed(cost: RooflineCost, load: Load, holding: Holding, max_num_seqs: int | None) -> Speed:
    prompt, output = load.prompt, load.output
    num_seqs = holding.num_seqs if max_num_seqs is None else min(holding.num_seqs, max_num_seqs)
    context = prompt + output / 2  # of a decoding row, in the mean over its output - 1 steps
    prompt_pairs = prompt * (prompt + 1) / 2

    decode = cost.seconds(num_seqs, num_seqs * context, num_rows=num_seqs, pairs=num_seqs * context)
    prefill = cost.seconds(prompt, prompt, num_rows=1, pairs=prompt_pairs)
    begun = num_seqs / output  # in a step of the mean; as many end, and the others decode
    decoding = num_seqs - begun
    both = cost.seconds(
        decoding + begun * prompt,
        decoding * context + begun * prompt,
        num_rows=num_seqs,
        pairs=decoding * context + begun * prompt_pairs,
    )

    def rates(requests_per_s: float) -> Rates:
        return Rates(
            requests_per_s=requests_per_s,
            generated_per_s=requests_per_s * output,
            tokens_per_s=requests_per_s * (prompt + output),
        )

    return Speed(
        reservation=holding.reservation,
        num_seqs=num_seqs,
        decode_step_s=decode,
        prefill_step_s=prefill,
        alone=rates(num_seqs / ((output - 1) * decode + num_seqs * prefill)),
        mixed=rates(begun / both),
    )
