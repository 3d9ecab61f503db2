"""The interface between the engine and whatever computes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .types import BlockCopy, KVGeometry, Request, SamplerOutput, SchedulerOutput

__all__ = ["ModelRunner"]


class ModelRunner(ABC):
    """Computes rows and samples from them. It owns the KV memory, the weights and the device, and nothing else.

    Results depend on the rows alone: the same `SchedulerOutput` executed twice gives the same result, whatever ran
    in between. A runner may cache what it can rebuild from the rows (device copies of block tables, for instance),
    bounded, and `drop_caches` at any time changes no result. `batchkit.testing.check_runner` tests just that.
    """

    @property
    @abstractmethod
    def geometry(self) -> KVGeometry:
        """The KV cache's shape and the model's limits; the same after every call."""

    @abstractmethod
    def execute(self, out: SchedulerOutput) -> SamplerOutput:
        """Compute every row, write its KV, and sample where ``row.samples``.

        `SamplerOutput.rows` has one entry per row, in row order. A fault of one row goes into its `RowResult.error`;
        an exception means that the step as a whole failed: nothing of it is kept, and the engine plans anew. It
        must be harmless to compute a row again after that.

        Raises:
            RunnerOutOfMemory: a smaller step may work.
            KVLost: KV written earlier is gone.
        """

    @abstractmethod
    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy KV blocks in this order, before the rows of the same step. Called once for each copy."""

    @abstractmethod
    def close(self) -> None:
        """Free everything. Idempotent."""

    def check_request(self, request: Request) -> None:  # noqa: B027
        """Called when a request is added: whether this runner can do what it asks for, a grammar for instance.

        The default can do everything. What it finds out may be cached, and dropped like every cache.

        Raises:
            RequestError: it cannot, and why.
        """

    def drop_caches(self) -> None:  # noqa: B027 - a default, not forgotten
        """Forget whatever can be rebuilt from rows. The default has nothing to forget."""

    def weights_changed(self) -> None:  # noqa: B027
        """Drop what was derived from the weights. The default derives nothing."""
