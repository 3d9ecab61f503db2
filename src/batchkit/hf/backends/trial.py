"""Whether a backend computes layers right on their device, found out by trying it before it is used.

For each kind of layer a few small steps go through the backend and through the reference backend, over one pool whose
unwritten slots are NaN, and are written to it by the backend. So a backend that is used has just shown itself right
where it is used: with these kernels and this driver, on this device, for these heads. What shows only there, such as a
library that does not load, is found the same way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ...params import SamplingParams
from ...types import Request
from ..batch import BatchBuilder, row_of
from .base import LayerKV, said_by
from .reference import ReferenceBackend

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ..batch import Batch
    from .base import AttentionBackend, LayerSpec

__all__ = ["TrialStep", "described", "faults", "make_step"]

_WINDOW_BEYOND = 5
"""A window is a number to a kernel. It is tried with one that is no longer than a block and this, so that it hides
something of short rows, and begins within a block."""
_ROUNDING = 2.0
"""How far a result may be from the reference's: the length of the difference, as a part of a head's length, in units of
the dtype's epsilon.

Weights and results are rounded to the dtype, by half an epsilon at most, and the errors of a head's numbers do not add
up: two right ways of computing these steps are closer than this. One key too few at the end of a row, as wrong as
little can be, makes more, and so does a window or a causal mask that is off by one.
"""
_ROUNDING_AT_LEAST = 1e-3
"""What is allowed in float32 and float64: products may be computed in less."""

_EDGE = 8.0
"""Keys that begin a block or end a row weigh so much more: they are what a kernel most easily misses."""

_REQUEST = Request(id="trial", prompt_token_ids=(0,), params=SamplingParams(), max_tokens=1)


@dataclass(frozen=True, slots=True, eq=False)
class TrialStep:
    """A step of one layer whose K and V are in its pool already.

    Attributes:
        layer: the layer.
        kv: its pool. Slots that no row has written hold NaN.
        batch: the rows.
        query, key, value, sinks: as `AttentionBackend.attend` takes them.
    """

    layer: LayerSpec
    kv: LayerKV
    batch: Batch
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    sinks: torch.Tensor | None

    def is_written_by(self, backend: AttentionBackend) -> bool:
        """Whether it puts the step's K and V where they are, and touches nothing else."""
        slots = torch.from_numpy(self.batch.slots).to(self.layer.device)
        pools = (self.kv.key, self.kv.value)
        wanted = [pool.clone() for pool in pools]
        for pool in pools:
            pool[:, slots] = math.nan
        backend.write(self.kv, slots, self.key, self.value)
        return all(
            bool(((got == want) | (got.isnan() & want.isnan())).all()) for got, want in zip(pools, wanted, strict=True)
        )

    def run(self, backend: AttentionBackend, scaling: float | None = None) -> torch.Tensor:
        """[T, num_heads, value_dim]."""
        plan = backend.plan(self.batch)
        return backend.attend(
            self.layer, self.kv, plan, self.query, self.key, self.value, scaling=scaling, sinks=self.sinks
        )


def make_step(
    layer: LayerSpec,
    rows: Sequence[tuple[int, int]],
    *,
    block_size: int,
    scattered: bool = True,
    num_blocks: int | None = None,
    edge: float = 1.0,
    seed: int = 0,
) -> TrialStep:
    """A step with random queries, keys and values.

    Args:
        layer: the layer.
        rows: of each, the tokens before the step and those of the step.
        block_size: tokens per block.
        scattered: block tables are in no order. Else they are ranges; these come neither in the order of the rows nor
            without gaps.
        num_blocks: of the pool. Default: as many as that takes.
        edge: the values of keys that begin a block or end a row are so many times larger.
        seed: of the numbers and of the tables.
    """
    generator = torch.Generator().manual_seed(seed)  # the same numbers on every device

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(layer.device, layer.dtype)

    needs = [-(-(start + count) // block_size) for start, count in rows]
    num_blocks = num_blocks or sum(needs) + len(rows)
    free = torch.randperm(num_blocks, generator=generator, device="cpu").tolist()
    key_pool, value_pool = (_unwritten(layer, num_blocks + 1, block_size, width) for width in _widths(layer))
    kv = LayerKV(key_pool, value_pool, block_size, num_blocks)
    scheduled, parts = [], []
    end = num_blocks
    for index, ((start, count), need) in enumerate(zip(rows, needs, strict=True)):
        blocks: Sequence[int] = range(end - need, end)
        if scattered:
            blocks = tuple(free.pop() for _ in range(need))
        end -= need + 1
        key, value = (random(layer.num_kv_heads, start + count, width) for width in _widths(layer))
        positions = torch.arange(start + count, device="cpu")
        is_edge = (positions == start + count - 1) | (positions % block_size == 0)
        value[:, is_edge.to(layer.device)] *= edge
        slots = torch.tensor(blocks, device="cpu")[positions // block_size] * block_size + positions % block_size
        for pool, written in ((kv.key, key), (kv.value, value)):
            pool[:, slots.to(layer.device)] = written
        parts.append((key[:, start:], value[:, start:]))
        scheduled.append(row_of(_REQUEST, index, start=start, token_ids=(0,) * count, blocks=blocks))
    batch = BatchBuilder(block_size).build(scheduled)
    key, value = (torch.cat(side, 1).transpose(0, 1) for side in zip(*parts, strict=True))
    query = random(layer.num_heads, batch.num_tokens, layer.key_dim).transpose(0, 1)  # as models hand it over
    sinks = random(layer.num_heads) if layer.has_sinks else None
    return TrialStep(layer, kv, batch, query, key, value, sinks)


def _widths(layer: LayerSpec) -> tuple[int, int]:
    return layer.key_dim, layer.value_dim


def _unwritten(layer: LayerSpec, num_blocks: int, block_size: int, width: int) -> torch.Tensor:
    """A pool of NaN, with a block of zeros at its end."""
    shape = (layer.num_kv_heads, num_blocks * block_size, width)
    pool = torch.full(shape, math.nan, dtype=layer.dtype, device=layer.device)
    pool[:, -block_size:] = 0
    return pool


def _steps(layer: LayerSpec, size: int) -> Iterator[tuple[str, TrialStep, float | None]]:
    """Steps of every kind, with rows that end at and around the borders of blocks; what they are of; and a scaling."""
    decodes = [(0, 1), (size - 1, 1), (size, 1), (2 * size + 2, 1)]
    prompts = [(0, 5), (0, size + 9), (0, 1)]
    mixed = [(0, 7), (size + 3, 7), (3, 5), *decodes[2:]]
    other = 0.5 * layer.key_dim**-0.5
    for what, rows, scattered, scaling in (
        ("decoding over scattered blocks", decodes, True, None),
        ("decoding over contiguous blocks", decodes, False, other),
        ("prompts", prompts, True, None),
        ("prompts, chunks and decoding together", mixed, True, other),
    ):
        yield what, make_step(layer, rows, block_size=size, scattered=scattered, edge=_EDGE), scaling


def faults(backend: AttentionBackend, layers: Iterable[LayerSpec], block_size: int) -> list[str]:
    """What the backend computes wrong, or cannot compute after all; empty if nothing.

    Args:
        backend: has nothing against the layers by its own account.
        layers: those to be computed. Each kind is tried once.
        block_size: tokens per block.
    """
    longest = block_size + _WINDOW_BEYOND
    kinds = {
        replace(layer, index=0, window=None if layer.window is None else min(layer.window, longest)) for layer in layers
    }
    found = []
    with torch.inference_mode():
        for kind in sorted(kinds, key=described):
            try:
                with torch.autocast(kind.device.type, enabled=False):
                    found += _faults_of(backend, kind, block_size)
            except Exception as error:  # kernels, and what loads them, raise whatever they like
                found.append(f"it failed when it was tried, {_where(kind)}: {said_by(error)}")
    backend.drop_caches()
    if any(kind.device.type == "cuda" for kind in kinds):
        torch.cuda.empty_cache()  # what is free decides how large the KV cache may be
    return found


def _faults_of(backend: AttentionBackend, kind: LayerSpec, block_size: int) -> list[str]:
    reference = ReferenceBackend()
    allowed = max(_ROUNDING * torch.finfo(kind.dtype).eps, _ROUNDING_AT_LEAST)
    found = []
    for what, step, scaling in _steps(kind, block_size):
        off = _distance(step.run(backend, scaling), step.run(reference, scaling))
        if not off <= allowed:  # NaN is not
            found.append(
                f"it is wrong, {_where(kind)}: {what} is off by {off:.2g} of a result's length, and rounding explains "
                f"{allowed:.2g}"
            )
        if not step.is_written_by(backend):
            found.append(f"it writes keys or values wrong, {_where(kind)}: {what}")
    return found


def _distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """How far a head's result is from what it should be, as a part of its length; the worst of all tokens and heads."""
    got, wanted = got.float(), wanted.float()
    return float(((got - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())


def _where(kind: LayerSpec) -> str:
    return f"on {kind.device} in {str(kind.dtype).removeprefix('torch.')} with {described(kind)}"


def described(layer: LayerSpec) -> str:
    """What a layer is to a kernel, for people."""
    parts = [f"{layer.num_heads} heads of {layer.key_dim} over {layer.num_kv_heads} KV heads"]
    if layer.window is not None:
        parts.append(f"a window of {layer.window}")
    if layer.softcap is not None:
        parts.append(f"scores up to {layer.softcap:g}")
    if layer.has_sinks:
        parts.append("sinks")
    return ", ".join(parts)
