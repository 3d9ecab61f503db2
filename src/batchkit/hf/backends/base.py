"""What an attention backend is."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch

from ...errors import InvariantError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy.typing as npt

    from ..batch import Batch

__all__ = [
    "AttentionBackend",
    "LayerKV",
    "LayerSpec",
    "StepGroups",
    "overwrite",
    "power_of_two",
    "said_by",
    "to_device",
    "write_plainly",
]

G = TypeVar("G")


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """An array as a tensor on `device`, without waiting for the device."""
    tensor = torch.from_numpy(array)
    # Pinned memory is given out again only when the copy from it has been made.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def said_by(error: Exception) -> str:
    """An exception's class and what it says, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def power_of_two(number: int) -> int:
    """The first one from `number` on."""
    return 1 << (number - 1).bit_length()


def overwrite(old: Any, new: Any) -> None:
    """Put the numbers of one object into the tensors of another one of the same kind, field by field.

    Raises:
        InvariantError: they differ in more than what their tensors hold. Lists and tuples of numbers are passed over:
            they are what the host knows of the tensors.
    """
    if isinstance(old, torch.Tensor):
        if old.shape != new.shape or old.dtype != new.dtype:
            raise InvariantError(f"a tensor of {new.dtype} {tuple(new.shape)} for {old.dtype} {tuple(old.shape)}")
        old.copy_(new)
    elif is_dataclass(old):
        for field in fields(old):
            overwrite(getattr(old, field.name), getattr(new, field.name))
    elif not isinstance(old, (list, tuple)) and old != new:
        raise InvariantError(f"{new!r} for {old!r}")


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One attention layer as the probe saw it.

    Attributes:
        index: counts the attention calls of a forward pass from 0.
        num_heads: query heads.
        num_kv_heads: K and V heads; divides `num_heads`.
        key_dim: width of a query and key head.
        value_dim: width of a value head; another one in multi-head latent attention.
        dtype: of K and V.
        device: where the layer computes, and where its KV lives.
        window: a query sees this many of the latest positions, its own among them; None sees all.
        softcap: scores are bounded smoothly to plus and minus this; None leaves them.
        has_sinks: every head has one more score that takes weight and gives no value.
    """

    index: int
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class LayerKV:
    """One layer's pool. Heads come first, so that a head's consecutive tokens are consecutive in memory.

    Slots are ``block * block_size + offset``. One block more than the pool gives out stands at the end and is always
    zero: padding of block tables points to it, since any other block may hold NaN.

    Attributes:
        key: [num_kv_heads, slots, key_dim].
        value: [num_kv_heads, slots, value_dim].
        block_size: tokens per block.
        zero_block: the number of the block of zeros.
    """

    key: torch.Tensor
    value: torch.Tensor
    block_size: int
    zero_block: int


def write_plainly(kv: LayerKV, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """As `AttentionBackend.write`, on any device."""
    kv.key.index_copy_(1, slots, key.transpose(0, 1))
    kv.value.index_copy_(1, slots, value.transpose(0, 1))


class StepGroups(Generic[G]):
    """A plan that puts the rows of a step into groups, when the first layer with a given window and device asks.

    Args:
        batch: the step.
        make: the groups, of the batch, a window, a device, and the number of the block of zeros.
    """

    def __init__(self, batch: Batch, make: Callable[[Batch, int | None, torch.device, int], Iterable[G]]) -> None:
        self.batch = batch
        self._make = make
        self._groups: dict[tuple[int | None, torch.device, int], list[G]] = {}

    def groups(self, window: int | None, device: torch.device, zero_block: int) -> list[G]:
        """The groups for layers with this window on this device."""
        key = (window, device, zero_block)
        found = self._groups.get(key)
        if found is None:
            found = self._groups[key] = list(self._make(self.batch, *key))
        return found

    def take(self, batch: Batch) -> None:
        """Put the numbers of another step into the tensors of these groups, for a recorded step that is replayed.

        Raises:
            InvariantError: its groups have other shapes.
        """
        for key, groups in self._groups.items():
            for old, new in zip(groups, self._make(batch, *key), strict=True):
                overwrite(old, new)


class AttentionBackend(Protocol):
    """Computes attention of a step's rows over the pool. Holds no state that a result depends on.

    Attributes:
        name: what `TransformersRunner` calls it.
        default_block_size: tokens per KV block, where nobody says otherwise.
        block_size_multiple: a block size must be a multiple of it.
        captures_decodes: whether plans of single tokens have one shape for each number of rows and `Batch.min_width`
            (contiguous tables apart), and a method ``take`` as `StepGroups` has, so that a step can be replayed.
    """

    name: str
    default_block_size: int
    block_size_multiple: int
    captures_decodes: bool

    def unsupported_reasons(self, layers: Sequence[LayerSpec]) -> list[str]:
        """Everything about these layers that it cannot compute right; empty if nothing."""
        ...

    def plan(self, batch: Batch) -> Any:
        """What all layers of one step share. Called once per step; handed back to each `attend`."""
        ...

    def write(self, kv: LayerKV, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put a step's K and V of one layer into its pool.

        Args:
            kv: the layer's pool.
            slots: [T], int64, where each token's go.
            key: [T, num_kv_heads, key_dim].
            value: [T, num_kv_heads, value_dim].
        """
        write_plainly(kv, slots, key, value)

    def attend(
        self,
        layer: LayerSpec,
        kv: LayerKV,
        plan: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of one layer.

        The step's K and V are in the pool already and are handed over packed as well, for rows that need nothing else.

        Args:
            layer: the layer.
            kv: its pool.
            plan: what `plan` returned for this step.
            query: [T, num_heads, key_dim].
            key: [T, num_kv_heads, key_dim].
            value: [T, num_kv_heads, value_dim].
            scaling: factor of the scores; None is ``key_dim ** -0.5``.
            sinks: [num_heads], if the layer has sinks.

        Returns:
            [T, num_heads, value_dim].
        """
        ...

    def drop_caches(self) -> None:
        """Free whatever can be made again."""
        ...
