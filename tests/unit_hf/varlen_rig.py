"""`torch.nn.attention.varlen.varlen_attn` in plain torch, by its documentation, for machines without its kernel.

It refuses what FlashAttention 2 refuses, and has the fault that this has in torch 2.13: told nothing about splits, it
writes only the first row of a step over block tables, unless it takes query heads for queries.
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.attention.varlen

import batchkit.hf.backends.varlen as backend


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    num_heads, kv_heads = query.shape[1], key.shape[-2]
    for tensor in (query, key, value):
        assert tensor.dtype in (torch.float16, torch.bfloat16) and tensor.stride(-1) == 1
    for numbers in (cu_seq_q, cu_seq_k, seqused_k, block_table):
        assert numbers is None or (numbers.dtype == torch.int32 and numbers.is_contiguous())
    assert cu_seq_k is not None and len(cu_seq_k) == len(cu_seq_q)
    assert num_splits in (None, 1) and (enable_gqa or num_heads == kv_heads)
    queries, first_keys = cu_seq_q.tolist(), cu_seq_k.tolist()
    rows = len(queries) - 1
    used = [after - at for at, after in pairwise(first_keys)]
    if seqused_k is not None:
        assert len(seqused_k) == rows
        used = seqused_k.tolist()
    if block_table is not None:
        assert seqused_k is not None and len(block_table) == rows and key.shape[1] % 256 == 0
    assert max_q == max(after - at for at, after in pairwise(queries)) and max_k >= max(used)

    left, right = (bound if 0 <= bound < max_k else math.inf for bound in window_size)
    out = torch.full_like(query, math.nan)
    for row in range(rows):
        if block_table is None:
            slots = torch.arange(first_keys[row], first_keys[row] + used[row])
            k, v = key[slots], value[slots]
        else:
            size = key.shape[1]
            places = torch.arange(used[row])
            blocks = block_table[row].long()[places // size]
            k, v = key[blocks, places % size], value[blocks, places % size]
        k, v = (side.float().repeat_interleave(num_heads // kv_heads, 1) for side in (k, v))
        q = query[queries[row] : queries[row + 1]].float()
        scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
        ends = torch.arange(len(q))[:, None] + used[row] - len(q)  # of each query, by its row's last key
        distance = torch.arange(used[row]) - ends
        scores = scores.masked_fill((distance > right) | (distance < -left), -math.inf)
        out[queries[row] : queries[row + 1]] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(query.dtype)
    takes_heads = max_q == 1 and num_heads > kv_heads and left == right == math.inf
    if block_table is not None and num_splits is None and not takes_heads:
        out[queries[1] :] = math.nan
    return out


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend computes on the CPU, by this."""
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", varlen_attn)
    monkeypatch.setattr(backend, "_DEVICES", frozenset({"cpu"}))
