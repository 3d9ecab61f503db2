"""Stand-ins for what a device has: graphs that run the forward pass again, and attention whose shapes stay the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from batchkit import Engine, SamplingParams
from batchkit.hf import graphs
from batchkit.hf.backends.base import StepGroups, power_of_two, to_device
from batchkit.hf.backends.reference import ReferenceBackend


class Tape:
    """Operators, replayed on the very tensors that were recorded, as a graph does. It keeps alive only what it made."""

    def __init__(self, compute: Any) -> None:
        self.num_replays = 0
        self._ops: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        self._inside: set[int] = set()
        self._outside: dict[int, StorageWeakRef] = {}
        with _Recording(self):
            compute()

    def record(self, func: Any, args: Any, kwargs: Any) -> Any:
        taken = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        for tensor in taken:
            if _storage(tensor) not in self._inside:
                self._outside[_storage(tensor)] = StorageWeakRef(tensor.untyped_storage())
        result = func(*args, **kwargs)
        given = [value for value in tree_leaves(result) if isinstance(value, torch.Tensor)]
        views = {_storage(tensor) for tensor in taken}
        made = [tensor for tensor in given if _storage(tensor) not in views]
        self._inside.update(map(_storage, made))
        if made or func._schema.is_mutable:
            self._ops.append((func, *tree_map(self._weakly, (args, kwargs)), made))
        return result

    def _weakly(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or _storage(value) in self._inside:
            return value
        place = (value.dtype, value.storage_offset(), value.shape, value.stride())
        return _Outside(self._outside[_storage(value)], *place)

    def __call__(self) -> None:
        self.num_replays += 1
        for func, args, kwargs, made in self._ops:
            found_args, found_kwargs = tree_map(_found, (args, kwargs))
            result = func(*found_args, **found_kwargs)
            for old, new in zip(made, _made_of(result, (found_args, found_kwargs)), strict=True):
                old.copy_(new)


class Rerun:
    """The function, called again: for kernels that are no operators of torch. What the host decides is not frozen."""

    def __init__(self, compute: Any) -> None:
        self.num_replays = 0
        self._compute = compute

    def __call__(self) -> None:
        self.num_replays += 1
        self._compute()


@dataclass(frozen=True)
class _Outside:
    """A tensor that a tape reads or writes, and does not keep."""

    storage: StorageWeakRef
    dtype: torch.dtype
    offset: int
    shape: Any
    strides: Any

    def tensor(self) -> torch.Tensor:
        assert not self.storage.expired(), f"a tensor of {self.dtype} {tuple(self.shape)} is gone"
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.strides)


class _Recording(TorchDispatchMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._tape.record(func, args, kwargs or {})


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _found(value: Any) -> Any:
    return value.tensor() if isinstance(value, _Outside) else value


def _made_of(result: Any, taken: Any) -> list[torch.Tensor]:
    views = {_storage(value) for value in tree_leaves(taken) if isinstance(value, torch.Tensor)}
    return [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and _storage(t) not in views]


class Recorder:
    """In the place of `graphs.CudaRecorder`, on any device.

    Args:
        kind: of what stands for a graph.
    """

    made: ClassVar[list[Any]] = []

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def renew(self) -> None:
        pass

    def prepare(self, compute: Any) -> Any:
        return compute()

    def capture(self, compute: Any) -> Any:
        self.made.append(self._kind(compute))
        return self.made[-1]


def _stand_in(monkeypatch: pytest.MonkeyPatch, kind: Any) -> list[Any]:
    monkeypatch.setattr(Recorder, "made", [])
    monkeypatch.setattr(graphs, "_DEVICES", frozenset({"cpu"}))
    monkeypatch.setattr(graphs, "CudaRecorder", lambda device: Recorder(kind))
    return Recorder.made


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> list[Tape]:
    """`cuda_graphs=True` on the CPU, by `Tape`; all that were made."""
    return _stand_in(monkeypatch, Tape)


@pytest.fixture
def reruns(monkeypatch: pytest.MonkeyPatch) -> list[Rerun]:
    """The same by `Rerun`."""
    return _stand_in(monkeypatch, Rerun)


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
