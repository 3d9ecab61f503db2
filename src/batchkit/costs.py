"""What a step costs on a device, by arithmetic: models, devices, and the roofline between them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from .types import BlockCopy, SchedulerOutput

__all__ = ["DEVICES", "Device", "MeasuredCost", "ModelShape", "RooflineCost", "StepCost", "attended"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """What a model asks of a device. `batchkit.hf.shape.model_shape` computes it from a configuration.

    Attributes:
        name: for people.
        num_params: weights, those that two layers share counted once.
        active_params: of those, what one token goes through: all of a dense model, some of a mixture of experts.
        bytes_per_param: of the weights' dtype.
        kv_bytes_per_token: keys and values of all layers.
        attention_width: query heads x head dimension, summed over the layers; each pair of a token and a token of its
            context takes 4 floating-point operations for each.
        max_model_len: the most tokens of prompt and output together.
        vocab_size: token ids are in ``range(vocab_size)``.
    """

    name: str
    num_params: int
    active_params: int
    bytes_per_param: float
    kv_bytes_per_token: int
    attention_width: int
    max_model_len: int
    vocab_size: int

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        return self.num_params * self.bytes_per_param


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """What a device has, by its data sheet.

    Attributes:
        name: for people.
        memory_bytes: of its memory.
        bandwidth: of its memory, bytes per second.
        flops: dense floating-point operations per second at half precision.
        host_bandwidth: between its memory and the host's, bytes per second in one direction.
    """

    name: str
    memory_bytes: float
    bandwidth: float
    flops: float
    host_bandwidth: float


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device(name="a100-40", memory_bytes=40e9, bandwidth=1.555e12, flops=312e12, host_bandwidth=25e9),
        Device(name="a100-80", memory_bytes=80e9, bandwidth=2.039e12, flops=312e12, host_bandwidth=25e9),
        Device(name="h100", memory_bytes=80e9, bandwidth=3.35e12, flops=989e12, host_bandwidth=50e9),
        Device(name="h200", memory_bytes=141e9, bandwidth=4.8e12, flops=989e12, host_bandwidth=50e9),
    )
}
"""By name, from NVIDIA's data sheets: A100 PCIe 40 GB, A100 SXM 80 GB, H100 SXM, H200 SXM; PCIe 4 or 5 to the host."""


@runtime_checkable
class StepCost(Protocol):
    """Seconds of a step, copies of blocks apart."""

    def __call__(self, out: SchedulerOutput) -> float:
        """Of the rows of `out`, of which it has some; the same for the same rows."""

    def copying(self, copies: Sequence[BlockCopy]) -> float:
        """Of the copies that come before the rows."""


def attended(rows: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """What rows attend to: their contexts in all, and the pairs of a token that is computed and one that it sees.

    Args:
        rows: where each begins, and how many tokens it computes.

    >>> attended([(2, 3), (7, 1)])  # 3 + 4 + 5 positions, and 8
    (13, 20)
    """
    context_tokens = more = 0
    for start, count in rows:
        context_tokens += start + count
        if count > 1:  # most rows have one token
            more += (count - 1) * (2 * start + count) // 2
    return context_tokens, context_tokens + more


def _attended_by(out: SchedulerOutput) -> tuple[int, int]:
    if out.num_tokens == len(out.rows):  # one token each, as in most steps
        context_tokens = sum([row.start for row in out.rows]) + out.num_tokens
        return context_tokens, context_tokens
    return attended([(row.start, row.num_tokens) for row in out.rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineCost(StepCost):
    """Seconds of one step on a device, from its arithmetic and its bandwidth.

    ::

        overhead_s + row_s x rows
            + max(weight bytes / bandwidth, 2 x active params x tokens / (efficiency x flops))
            + KV bytes / bandwidth + 4 x attention width x pairs / (efficiency x flops)

    Every step reads the weights once, however many tokens it computes, and the keys and values of every row's context.
    A pair is a token that is computed and a token that it attends to.

    Args:
        num_params: of the model.
        kv_bytes_per_token: keys and values of all layers.
        bandwidth: bytes per second.
        flops: floating-point operations per second, at the weights' precision.
        bytes_per_param: 2 for half precision.
        efficiency: the part of `flops` that matrix products reach.
        overhead_s: what a step costs beyond.
        active_params: of `num_params`, what one token goes through. Default: all.
        attention_width: see `ModelShape`. Default: pairs cost nothing, which for short contexts is nearly true.
        row_s: what each row costs beyond.
        batch_overhead_s: what a step costs beyond in which every row begins with its first token: a batch's first.
        padded: rows are padded to the longest of the step, and so are their contexts.
        block_bytes: of a KV block, for copies.
        host_bandwidth: bytes per second between device and host. Default: copies to and from the host cost nothing.

    >>> a100 = dict(bandwidth=1.555e12, flops=312e12)
    >>> cost = RooflineCost(num_params=12.85e9, kv_bytes_per_token=819_200, **a100)
    >>> round(cost.seconds(num_tokens=8, context_tokens=8 * 600), 4)
    0.0211
    """

    num_params: float
    kv_bytes_per_token: float
    bandwidth: float
    flops: float
    bytes_per_param: float = 2.0
    efficiency: float = 0.6
    overhead_s: float = 0.002
    active_params: float | None = None
    attention_width: float = 0.0
    row_s: float = 0.0
    batch_overhead_s: float = 0.0
    padded: bool = False
    block_bytes: float = 0.0
    host_bandwidth: float | None = None

    @classmethod
    def of(cls, model: ModelShape, device: Device, *, block_size: int = 16, **constants: Any) -> RooflineCost:
        """Of a model on a device.

        Args:
            model: gives parameters, KV bytes and the attention's width.
            device: gives the bandwidths and FLOP/s.
            block_size: tokens per KV block, for the cost of copies.
            constants: further arguments of the class, such as ``overhead_s``.
        """
        return cls(
            num_params=model.num_params,
            active_params=model.active_params,
            bytes_per_param=model.bytes_per_param,
            kv_bytes_per_token=model.kv_bytes_per_token,
            attention_width=model.attention_width,
            bandwidth=device.bandwidth,
            flops=device.flops,
            host_bandwidth=device.host_bandwidth,
            block_bytes=block_size * model.kv_bytes_per_token,
            **constants,
        )

    def seconds(self, num_tokens: float, context_tokens: float, *, num_rows: float = 0, pairs: float = 0) -> float:
        """Of a step that computes `num_tokens` over rows whose contexts add up to `context_tokens`; or means."""
        weights = self.num_params * self.bytes_per_param / self.bandwidth
        speed = self.efficiency * self.flops
        params = self.num_params if self.active_params is None else self.active_params
        return (
            self.overhead_s
            + self.row_s * num_rows
            + max(weights, 2 * params * num_tokens / speed)
            + context_tokens * self.kv_bytes_per_token / self.bandwidth
            + 4 * self.attention_width * pairs / speed
        )

    def __call__(self, out: SchedulerOutput) -> float:
        """Of the rows of `out`."""
        rows = out.rows
        num_rows, num_tokens = len(rows), out.num_tokens
        if self.padded:
            width, context = 1, 1 + max([row.start for row in rows])
            if num_tokens != num_rows:
                width = max([row.num_tokens for row in rows])
                context = max([row.start + row.num_tokens for row in rows])
            num_tokens, context_tokens = num_rows * width, num_rows * context
            pairs = num_rows * width * (context - (width - 1) // 2)
        else:
            context_tokens, pairs = _attended_by(out)
        seconds = self.seconds(num_tokens, context_tokens, num_rows=num_rows, pairs=pairs)
        if self.batch_overhead_s and all(row.start == 0 for row in rows):
            seconds += self.batch_overhead_s
        return seconds

    def copying(self, copies: Sequence[BlockCopy]) -> float:
        """Of the copies that come before the rows."""
        within = sum([copy.kind == "copy" for copy in copies])
        seconds = 2 * within * self.block_bytes / self.bandwidth  # read and written
        if self.host_bandwidth is not None:
            seconds += (len(copies) - within) * self.block_bytes / self.host_bandwidth
        return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCost(StepCost):
    """Seconds of one step as they were measured; `batchkit.experiment.calibrate` makes it of step traces.

    A curve over the tokens of the step, linear between its points, and linear shares of contexts and pairs. A roofline
    has one corner; matrix products on a CPU have several, wherever another routine takes over.

    Args:
        tokens: of the points, ascending, at least two.
        seconds: at the points.
        context_s: for each token of all contexts.
        pair_s: for each pair; see `attended`.

    Raises:
        ValueError: the points are no curve, or a number of seconds is not finite, or below 0.
    """

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    context_s: float = 0.0
    pair_s: float = 0.0

    def __post_init__(self) -> None:
        rising = all(before < after for before, after in zip(self.tokens, self.tokens[1:], strict=False))
        if len(self.tokens) < 2 or len(self.tokens) != len(self.seconds) or not rising:
            raise ValueError(
                f"a curve needs at least two points in ascending order, got tokens {self.tokens} and "
                f"{len(self.seconds)} times"
            )
        for value in (*self.tokens, *self.seconds, self.context_s, self.pair_s):
            if not 0 <= value < math.inf:
                raise ValueError(f"tokens and seconds of a cost must be finite and at least 0, got {value}")

    def curve(self, num_tokens: int) -> float:
        """Seconds of a step of so many tokens, contexts apart. Beyond its ends it goes on as straight."""
        at = min(max(bisect_left(self.tokens, num_tokens), 1), len(self.tokens) - 1)
        low, high = self.tokens[at - 1], self.tokens[at]
        share = (num_tokens - low) / (high - low)
        return max(0.0, self.seconds[at - 1] * (1 - share) + self.seconds[at] * share)

    def __call__(self, out: SchedulerOutput) -> float:
        """Of the rows of `out`."""
        return self.of(out.num_tokens, *_attended_by(out))

    def of(self, num_tokens: int, context_tokens: int, pairs: int) -> float:
        """Of a step that computes so many tokens over such contexts; see `attended`."""
        return self.curve(num_tokens) + self.context_s * context_tokens + self.pair_s * pairs

    def copying(self, copies: Sequence[BlockCopy]) -> float:
        """Nothing: copies are not calibrated."""
        return 0.0
