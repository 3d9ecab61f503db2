"""Stand-ins for what a device has: graphs that run the forward pass again, and attention whose shapes stay the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from batchkit import Engine, SamplingParams
from batchkit.hf import graphs, runner
from batchkit.hf.backends.base import StepGroups, power_of_two, to_device
from batchkit.hf.backends.reference import ReferenceBackend


class Rerun:
    """Not a graph: it keeps the function and calls it again. What the host decides in it is not frozen."""

    made: ClassVar[list[Rerun]] = []

    def __init__(self) -> None:
        self.num_replays = 0
        self.made.append(self)

    def capture(self, compute: Any) -> None:
        self._compute = compute

    def replay(self) -> None:
        self.num_replays += 1
        self._compute()


@pytest.fixture
def reruns(monkeypatch: pytest.MonkeyPatch) -> list[Rerun]:
    """`cuda_graphs=True` on the CPU, by `Rerun`; all that were made."""
    monkeypatch.setattr(Rerun, "made", [])
    monkeypatch.setattr(runner, "DEVICES", frozenset({"cpu"}))
    monkeypatch.setattr(graphs, "CudaGraph", lambda device, pool: Rerun())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    return Rerun.made


@dataclass
class _Rows:
    table: torch.Tensor
    seen: torch.Tensor


class SameShapes(ReferenceBackend):
    """Steps of single tokens by one gather of `Batch.min_width` blocks for each row; the reference for all others."""

    name = "same shapes"
    captures_decodes = True

    def plan(self, batch: Any) -> Any:
        return StepGroups(batch, _rows) if batch.num_rows == batch.num_tokens else super().plan(batch)

    def attend(self, layer: Any, kv: Any, plan: Any, query: Any, key: Any, value: Any, **others: Any) -> torch.Tensor:
        (rows, *more) = plan.groups(layer.window, query.device, kv.zero_block)
        if not isinstance(rows, _Rows):
            return super().attend(layer, kv, plan, query, key, value, **others)
        assert not more
        assert layer.softcap is None
        assert others["sinks"] is None
        k, v = (self._blocks(pool, kv.block_size, rows) for pool in (kv.key, kv.value))
        q = query.view(len(query), layer.num_kv_heads, -1, layer.key_dim)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=rows.seen[:, None, None], scale=others["scaling"])
        return out.reshape(len(query), layer.num_heads, layer.value_dim)

    def _blocks(self, pool: torch.Tensor, size: int, rows: _Rows) -> torch.Tensor:
        """[R, heads, slots, width], with zeros where a row sees nothing."""
        found = pool.view(pool.shape[0], -1, size, pool.shape[2])[:, rows.table].flatten(2, 3).transpose(0, 1)
        return torch.where(rows.seen[:, None, :, None], found, 0.0)


def _rows(batch: Any, window: int | None, device: torch.device, zero_block: int) -> list[_Rows]:
    all_rows = np.arange(batch.num_rows)
    width = power_of_two(max(batch.min_width, int(np.diff(batch.table_starts).max())))
    table = batch.padded_tables(all_rows, 0 * all_rows, width, zero_block)
    positions = np.arange(width * batch.block_size)
    seen = positions < batch.kv_lens[:, None]
    if window is not None:
        seen &= positions >= batch.kv_lens[:, None] - window
    return [_Rows(to_device(table, device), to_device(seen, device))]


def forced_logits(model: torch.nn.Module, prompts: list[list[int]], lengths: tuple[int, ...], **options: Any) -> Any:
    """Logits of every token that is sampled, in order, when the tokens themselves are 7, 8, 9 ... whatever they are."""
    said = []

    def watch(prompt: Any, output: Any, logits: torch.Tensor) -> torch.Tensor:
        said.append(logits.float().clone())
        forced = torch.full_like(logits, -1e4)
        forced[7 + len(output)] = 0
        return forced

    params = [
        SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, logits_processors=[watch])
        for length in lengths
    ]
    with Engine.from_model(model, **options) as engine:
        engine.generate(prompts, params)
    return torch.stack(said)
