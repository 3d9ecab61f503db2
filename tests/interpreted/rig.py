"""Rows over a pool, and the backend with what has no kernel on a CPU computed by its mask."""

from __future__ import annotations

import torch
from typing_extensions import override

from batchkit.hf.backends.base import LayerSpec
from batchkit.hf.backends.trial import TrialStep, make_step
from batchkit.hf.backends.xformers import XformersBackend

BLOCK = 64
CPU = torch.device("cpu")


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


def case(
    spec: LayerSpec, rows: list[tuple[int, int]], *, scattered: bool, num_blocks: int = 24, seed: int = 0
) -> TrialStep:
    """`rows` are (tokens before the step, tokens of the step)."""
    return make_step(spec, rows, block_size=BLOCK, scattered=scattered, num_blocks=num_blocks, seed=seed)
