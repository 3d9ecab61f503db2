"""Rows over a pool, and the backend with what has no kernel on a CPU computed by its mask."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from typing_extensions import override

from batchkit.hf.backends.base import AttentionBackend, LayerKV, LayerSpec
from batchkit.hf.backends.xformers import XformersBackend
from batchkit.hf.batch import Batch, BatchBuilder
from batchkit.hf.kv_pool import KVPool
from batchkit.types import Request, SamplingParams, ScheduledSequence

BLOCK = 64
CPU = torch.device("cpu")
REQUEST = Request(id="r", prompt_token_ids=(1,), params=SamplingParams(), max_tokens=1)


class OnCPU(XformersBackend):
    """Decoding goes through xformers' kernel, in the interpreter; what is longer through its mask, written out."""

    @override
    def _forward(self, query, key, value, mask, scaling, *, decodes: bool) -> torch.Tensor:
        if decodes:
            return super()._forward(query, key, value, mask, scaling, decodes=decodes)
        bias = mask.materialize((query.shape[1], key.shape[1]))
        scores = torch.einsum("bqghd,bkghd->bghqk", query.float(), key.float())
        scores = scores * (query.shape[-1] ** -0.5 if scaling is None else scaling) + bias
        return torch.einsum("bghqk,bkghd->bqghd", scores.softmax(-1), value.float()).to(query.dtype)


def layer(kv_heads: int = 2, shared: int = 1, width: int = 64, window: int | None = None) -> LayerSpec:
    return LayerSpec(0, kv_heads * shared, kv_heads, width, width, torch.float16, CPU, window=window)


@dataclass
class Case:
    """A step whose K and V are in the pool. Slots that nobody wrote hold NaN."""

    layer: LayerSpec
    kv: LayerKV
    batch: Batch
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    def run(self, backend: AttentionBackend, scaling: float | None = None) -> torch.Tensor:
        plan = backend.plan(self.batch)
        return backend.attend(self.layer, self.kv, plan, self.query, self.key, self.value, scaling=scaling, sinks=None)


def case(spec: LayerSpec, rows: list[tuple[int, int]], *, scattered: bool, num_blocks: int = 24, seed: int = 0) -> Case:
    """`rows` are (tokens before the step, tokens of the step)."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    pool = KVPool([spec], num_blocks=num_blocks, block_size=BLOCK)
    pool.fill(float("nan"))
    kv = pool.layers[0]
    free = list(range(num_blocks))
    scheduled, keys, values = [], [], []
    rng.shuffle(free)
    first = num_blocks
    for seq_id, (start, count) in enumerate(rows):
        total = start + count
        need = -(-total // BLOCK)
        if scattered:
            blocks: range | tuple[int, ...] = tuple(free.pop() for _ in range(need))
        else:  # from the end, so that rows do not come in the order of their slots, with a gap between them
            first -= need + 1
            blocks = range(first, first + need)
        key, value = (torch.randn(spec.num_kv_heads, total, spec.key_dim).half() for _ in range(2))
        slots = torch.tensor([blocks[at // BLOCK] * BLOCK + at % BLOCK for at in range(total)])
        kv.key[:, slots], kv.value[:, slots] = key, value
        keys.append(key[:, start:])
        values.append(value[:, start:])
        scheduled.append(
            ScheduledSequence(
                seq_id, 0, 0, REQUEST, 0, start, count, (1,) * count, [], 0, blocks, samples=True, idle=False
            )
        )
    batch = BatchBuilder(BLOCK).build(scheduled)
    query = torch.randn(batch.num_tokens, spec.num_heads, spec.key_dim).half()
    return Case(spec, kv, batch, query, torch.cat(keys, 1).transpose(0, 1), torch.cat(values, 1).transpose(0, 1))
