"""Decode steps as CUDA graphs: the device is given a whole forward pass at once, recorded from an earlier one.

A decode step is many short kernels, which the host takes longer to launch than a device takes to run them. A graph
holds them with their addresses and shapes. So a step that is to be replayed is padded to one of a few sizes, by rows
that write to a block of their own, and its numbers are copied to where those of the recorded step were.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..errors import InvariantError
from .backends.base import power_of_two, to_device
from .lru import LRU

if TYPE_CHECKING:
    from collections.abc import Callable

    from .backends.base import AttentionBackend
    from .batch import Batch

logger = logging.getLogger("batchkit")

__all__ = ["DecodeGraphs", "check_devices", "find_waits", "padded_decodes"]

T = TypeVar("T")

_DEVICES = frozenset({"cuda"})
"""Types of devices that have graphs."""
_FEW_ROWS = 64
"""Up to here the number of rows is padded to a power of two; beyond, to a multiple of this."""
_MIN_WIDTH = 8
"""Block tables have at least so many columns: shorter ones are not worth a graph of their own."""
_MOST_GRAPHS = 64
"""The least recently replayed go beyond it: each has memory of its own."""
_CAPTURING = threading.Lock()
"""A process may capture one graph at a time."""
_WAITS = frozenset(
    {
        *("item", "is_nonzero", "_local_scalar_dense", "equal", "allclose"),
        *("nonzero", "nonzero_numpy", "argwhere", "masked_select", "bincount", "tensor_split"),
        *("_unique", "_unique2", "unique_dim", "unique_consecutive", "lift_fresh", "resolve_neg"),
    }
)
"""Operators of ATen that give a number to the host, or a shape that depends on numbers, or bring numbers from the host:
``lift_fresh`` is in every `torch.tensor`, ``resolve_neg`` in every `tolist` and `numpy`. Some are made of others, and
show under their own name in inference mode alone."""


class CudaRecorder:
    """Makes CUDA graphs that share their memory, of which none may leave a result in it.

    Args:
        device: where they run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # One of its own: torch's default is for all devices together, and belongs to the first that captures.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.renew()

    def renew(self) -> None:
        """All graphs are gone. Their memory may still be in use for what was first needed in one."""
        self._pool = torch.cuda.graph_pool_handle()

    def prepare(self, compute: Callable[[], T]) -> T:
        """Compute on the stream on which it will be recorded, so that its workspaces are there."""
        with torch.cuda.device(self._device):
            now = torch.cuda.current_stream()
            self._stream.wait_stream(now)
            with torch.cuda.stream(self._stream):
                result = compute()
            now.wait_stream(self._stream)
        return result

    def capture(self, compute: Callable[[], object]) -> Callable[[], None]:
        """Record what `compute` does on the device, without doing it. What comes back does it."""
        graph = torch.cuda.CUDAGraph()
        with _CAPTURING, torch.cuda.device(self._device):
            now = torch.cuda.current_stream()
            try:
                # "thread_local": what other threads do on the device meanwhile is no fault of this one.
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    compute()
            finally:
                torch.cuda.set_stream(now)  # which torch does not after a failure

        def replay() -> None:
            with torch.cuda.device(self._device):
                graph.replay()

        return replay


def check_devices(devices: set[torch.device]) -> None:
    """Raise ValueError unless a model on these devices can be captured: on one CUDA device."""
    if len(devices) > 1 or next(iter(devices)).type not in _DEVICES:
        found = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"cuda_graphs needs the whole model on one CUDA device, and it is on {found}")


class DecodeGraphs:
    """Computes decode steps by replaying graphs, which are captured when first needed.

    Where a model or a backend cannot be captured, it says so once, as a warning, and computes nothing from then on.

    Args:
        forward: of `Batch.inputs` on the device, the backend's plan and the tokens whose logits are wanted: logits.
        backend: makes the plans.
        device: of the model, all of it.
        spare_block: of the KV pool, for the tokens of rows that are padding.
        max_rows: steps with more rows are computed without a graph.
    """

    def __init__(
        self,
        forward: Callable[[torch.Tensor, Any, torch.Tensor], torch.Tensor],
        backend: AttentionBackend,
        device: torch.device,
        *,
        spare_block: int,
        max_rows: int,
    ) -> None:
        self._forward = forward
        self._backend = backend
        self._device = device
        self._spare_block = spare_block
        self._max_rows = max_rows
        self._recorder = CudaRecorder(device)
        self._steps: LRU[tuple[int, int, bool], _Step] = LRU(_MOST_GRAPHS)
        self._logits: torch.Tensor | None = None
        self._is_off = False
        if not backend.captures_decodes:
            self._turn_off(f"attention backend {backend.name} computes every step in other shapes")

    def logits(self, batch: Batch) -> torch.Tensor | None:
        """Logits of a step's tokens, [T, V], which the next call may overwrite; None: compute it without a graph.

        Raises:
            Whatever the forward pass raises when it is computed, before it is captured.
        """
        if self._is_off or batch.num_tokens != batch.num_rows or batch.num_rows > self._max_rows:
            return None
        padded = padded_decodes(batch, self._spare_block)
        key = (padded.num_rows, padded.min_width, bool(padded.contiguous.all()))
        try:
            step = self._steps.get(key, lambda: self._captured(padded))
            step.take(padded)
        except (_NoGraph, InvariantError) as failure:
            # The step has yet to be computed: nothing is lost.
            self._turn_off(str(failure))
            return None
        step.replay()
        assert self._logits is not None
        return self._logits[: batch.num_rows]

    def _captured(self, batch: Batch) -> _Step:
        inputs = to_device(batch.inputs, self._device)
        plan = self._backend.plan(batch)
        tokens = torch.arange(batch.num_tokens, device=self._device)

        def forward() -> torch.Tensor:
            return self._forward(inputs, plan, tokens)

        # Twice outside of the graph. What is compiled or allocated on first use must not be recorded, nor what a plan
        # sends to the device when the first layer asks for it. Keys and values are written anew each time, the same.
        logits = self._recorder.prepare(forward)
        waits = self._recorder.prepare(lambda: find_waits(forward))
        if waits:
            raise _NoGraph(f"the forward pass waits for the device or the host ({', '.join(sorted(waits))})")
        if self._logits is None:
            self._logits = logits.new_empty(_padded(self._max_rows), logits.shape[1])
        out = self._logits[: batch.num_rows]
        try:
            # Into memory of all graphs, since each would else keep some of its own.
            replay = self._recorder.capture(lambda: out.copy_(forward()))
        except Exception as failure:
            # Ending a capture that failed fails as well: the cause is what it was in the middle of.
            context = f", after {failure.__context__!r}" if failure.__context__ is not None else ""
            raise _NoGraph(f"{failure!r}{context}") from failure
        return _Step(inputs, plan, tokens, replay)

    def drop(self) -> None:
        """Forget every graph: the memory that they know is no longer what they were made for."""
        self._steps.clear()
        self._logits = None
        self._recorder.renew()

    def _turn_off(self, reason: str) -> None:
        self._is_off = True
        self.drop()
        logger.warning("decode steps run without CUDA graphs: %s", reason)


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """A captured step, and all that it reads beside weights and KV: a graph keeps nothing alive.

    Attributes:
        inputs, plan: hold the numbers of a step.
        tokens: the same in every step.
        replay: computes.
    """

    inputs: torch.Tensor
    plan: Any
    tokens: torch.Tensor
    replay: Callable[[], None]

    def take(self, batch: Batch) -> None:
        """Put another step of the same shape in the place of this one."""
        self.inputs.copy_(to_device(batch.inputs, self.inputs.device))
        self.plan.take(batch)


def padded_decodes(batch: Batch, spare_block: int) -> Batch:
    """Rows of one token each, with more of the kind behind them, so that few numbers of rows and of blocks occur.

    Args:
        batch: the step.
        spare_block: of the KV pool; what the added rows write and read.
    """
    rows = batch.num_rows
    more = _padded(rows) - rows
    longest = int(np.diff(batch.table_starts).max())

    def pad(array: Any, value: int) -> Any:
        return np.pad(array, (0, more), constant_values=value)

    return replace(
        batch,
        input_ids=pad(batch.input_ids, 0),
        positions=pad(batch.positions, 0),
        slots=pad(batch.slots, spare_block * batch.block_size),
        query_starts=np.arange(rows + more + 1),
        kv_lens=pad(batch.kv_lens, 1),
        tables=pad(batch.tables, spare_block),
        table_starts=np.concatenate((batch.table_starts, batch.table_starts[-1] + 1 + np.arange(more))),
        contiguous=pad(batch.contiguous, bool(batch.contiguous.all())),
        min_width=max(_MIN_WIDTH, power_of_two(longest)),
    )


def _padded(rows: int) -> int:
    return power_of_two(rows) if rows <= _FEW_ROWS else -(-rows // _FEW_ROWS) * _FEW_ROWS


def find_waits(forward: Callable[[], Any]) -> set[str]:
    """Run something, and name the operators in it that wait for the device or bring it numbers from the host.

    A graph cannot hold those. It shows on any device, the CPU among them.
    """
    watch = _Watch()
    with watch:
        forward()
    return watch.found


class _NoGraph(Exception):
    pass


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tensors = [value for value in tree_leaves((args, kwargs, result)) if isinstance(value, torch.Tensor)]
        indices = tree_leaves(args[1]) if name.startswith("index") and len(args) > 1 else ()
        if (
            name in _WAITS
            # A mask as an index is turned into numbers first.
            or any(isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in indices)
            # Without these it looks at the numbers for them.
            or (name == "where" and len(args) == 1)
            or (name == "one_hot" and "num_classes" not in kwargs and len(args) == 1)
            or (name == "histc" and "max" not in kwargs and len(args) < 4)
            or (func._overloadname in ("self_Tensor", "Tensor") and name == "repeat_interleave" and not kwargs)
            # From one device to another. A number on the host may go along with a launch.
            or len({tensor.device for tensor in tensors if tensor.dim()}) > 1
        ):
            self.found.add(name)
        return result
