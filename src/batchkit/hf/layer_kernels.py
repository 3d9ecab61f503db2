"""The kernels for layers of a model on CPUs, called with tensors (`backends/kernels/layers.cpp`, `linear.cpp`).

Each takes what it says and checks nothing: `fused` decides where they are used.
"""

from __future__ import annotations

import functools
from ctypes import byref, c_float, c_int64, c_void_p
from typing import Any

import torch

from .backends.native import kernels

__all__ = ["DTYPES", "GELU_TANH", "SILU", "Packed", "best", "gated", "linear", "norm", "num_threads", "rotary"]

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
"""What the kernels take, and how their names end."""
SILU, GELU_TANH = 0, 1
"""Activations of `gated`."""
_FOR_THREADS = 1 << 17
"""It costs more to wake threads than to go over fewer numbers."""


@functools.cache
def _function(name: str, dtype: torch.dtype) -> Any:
    """A kernel for a dtype.

    Raises:
        BuildError: this machine cannot have it.
    """
    ints = (c_int64,) * 3
    arguments: dict[str, tuple[Any, ...]] = {
        "norm": (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float, c_float, c_int64),
        "gated": (c_void_p, c_void_p, c_void_p, *ints),
        "rotary": (*(c_void_p, c_void_p, *ints) * 2, c_void_p, c_void_p, *ints),
        "best": (c_void_p, c_void_p, c_void_p, *ints, c_int64),
        "linear": (c_void_p, c_void_p, c_void_p, c_void_p, *ints, c_int64, c_void_p, c_int64),
        "pack": (c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64),
        "unpack_all": (c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64),
        "unpack": (c_void_p, c_void_p, c_void_p, *ints),
    }
    library = kernels("linear" if name in ("linear", "pack", "unpack", "unpack_all") else "layers")
    function = getattr(library, f"batchkit_{name}_{DTYPES[dtype]}")
    function.argtypes, function.restype = arguments[name], None
    return function


@functools.cache
def _linear_floats() -> Any:
    function = kernels("linear").batchkit_linear_floats
    function.argtypes, function.restype = (c_int64,) * 3, c_int64
    return function


@functools.cache
def _panel() -> int:
    """How many outputs are packed together."""
    function = kernels("linear").batchkit_panel
    function.argtypes, function.restype = (), c_int64
    panel: int = function()
    return panel


def num_threads(numbers: int) -> int:
    """All or one: OpenMP ends threads when it is asked for fewer than before, and starts them anew when for more."""
    return torch.get_num_threads() if numbers >= _FOR_THREADS else 1


def norm(x: torch.Tensor, weight: torch.Tensor | None, *, eps: float, offset: float = 0.0) -> torch.Tensor:
    """``x`` divided by the root of its mean square, times ``weight + offset``: RMSNorm (Zhang, Sennrich, 2019).

    Args:
        x: [..., width].
        weight: [width], of the same dtype; None: ones.
        eps: is added to the mean square.
        offset: of the weights.
    """
    width = x.shape[-1]
    x = x.contiguous()
    out = torch.empty_like(x)
    pointer = None if weight is None else weight.data_ptr()
    _function("norm", x.dtype)(
        x.data_ptr(), pointer, out.data_ptr(), x.numel() // width, width, eps, offset, num_threads(x.numel())
    )
    return out


def gated(gate: torch.Tensor, up: torch.Tensor, activation: int) -> torch.Tensor:
    """The activation of ``gate``, times ``up``; of one shape and dtype."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    count = gate.numel()
    _function("gated", gate.dtype)(
        gate.data_ptr(), up.data_ptr(), out.data_ptr(), count, activation, num_threads(count)
    )
    return out


def rotary(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys turned by their positions: RoPE (Su et al., 2021), with halves of a head as pairs.

    Args:
        query: [1, heads, T, width].
        key: [1, KV heads, T, width].
        cos: [1, T, width].
        sin: [1, T, width].

    Returns:
        The same shapes. Heads of a token are side by side in memory, as attention wants them.
    """
    tokens, width = query.shape[2], query.shape[3]
    sides: list[Any] = []
    turned = []
    for x in (query, key):
        out = x.new_empty(1, tokens, x.shape[1], width).transpose(1, 2)
        sides += (x.data_ptr(), out.data_ptr(), x.shape[1], x.stride(2), x.stride(1))
        turned.append(out)
    cos, sin = cos.contiguous(), sin.contiguous()
    threads = num_threads(query.numel() + key.numel())
    _function("rotary", query.dtype)(*sides, cos.data_ptr(), sin.data_ptr(), tokens, width, threads)
    return turned[0], turned[1]


def best(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row the highest logit, in float32, and the first index that has it; of NaN the first, as `torch.max`.

    Args:
        logits: [rows, V], on the CPU.
    """
    if logits.dtype not in DTYPES:
        values, found = logits.max(dim=-1)
        return values.float(), found
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, width = logits.shape
    values = torch.empty(rows, dtype=torch.float32, device="cpu")
    found = torch.empty(rows, dtype=torch.int64, device="cpu")
    _function("best", logits.dtype)(
        logits.data_ptr(),
        found.data_ptr(),
        values.data_ptr(),
        rows,
        width,
        logits.stride(0),
        num_threads(logits.numel()),
    )
    return values, found


class Packed:
    """Weights of a linear layer in the order in which its kernel reads them (`backends/kernels/packed.h`).

    Attributes:
        numbers: all of them, [outputs rounded up to whole panels, inputs]; what is where is the kernel's business.
        outputs: of the layer.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        """Pack a copy of weights, [outputs, inputs], on the CPU, of a dtype in `DTYPES`."""
        self._hold(weight, weight.new_empty(-(-weight.shape[0] // _panel()) * _panel(), weight.shape[1]))
        self.fill(weight)

    @classmethod
    def within(cls, weight: torch.Tensor) -> Packed | None:
        """What packs weights in their own memory, at `fill(numbers)`; None: it is not one piece, or of whole panels."""
        if weight.shape[0] % _panel() or not weight.is_contiguous():
            return None
        made = cls.__new__(cls)
        made._hold(weight, weight)
        return made

    def _hold(self, weight: torch.Tensor, numbers: torch.Tensor) -> None:
        self.outputs = weight.shape[0]
        self.numbers = numbers
        # The kernel says so: between its end and whatever is said here, an interrupt may come.
        self._is_packed = c_int64(0)

    @property
    def shape(self) -> tuple[int, int]:
        """[outputs, inputs]."""
        return self.outputs, self.numbers.shape[1]

    def fill(self, weight: torch.Tensor) -> None:
        """Pack other weights of the same shape and dtype, or `numbers` that are not packed yet."""
        weight = weight.contiguous()
        self._call("pack", weight.data_ptr())

    def undone(self) -> torch.Tensor:
        """The weights as they were, [outputs, inputs], in the memory of `numbers`. It is of no other use then."""
        if self._is_packed.value:
            self._call("unpack_all")
        return self.numbers[: self.outputs]

    def _call(self, name: str, *pointers: int) -> None:
        outputs, inputs = self.shape
        threads = torch.get_num_threads()
        scratch = self.numbers.new_empty(threads, _panel(), inputs)
        _function(name, self.numbers.dtype)(
            *pointers, self.numbers.data_ptr(), outputs, inputs, scratch.data_ptr(), byref(self._is_packed), threads
        )

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Rows of the weights as they were, [..., inputs].

        Raises:
            IndexError: an index is not in [0, outputs).
        """
        indices = indices.long().contiguous()
        if indices.numel():
            low, high = (int(end) for end in indices.aminmax())
            if low < 0 or high >= self.outputs:
                raise IndexError(f"indices are from {low} to {high}, and there are {self.outputs} rows")
        inputs = self.numbers.shape[1]
        out = self.numbers.new_empty(*indices.shape, inputs)
        count = indices.numel()
        _function("unpack", out.dtype)(
            self.numbers.data_ptr(), indices.data_ptr(), out.data_ptr(), count, inputs, num_threads(out.numel())
        )
        return out

    def unpacked(self) -> torch.Tensor:
        """The weights as they were, [outputs, inputs]."""
        return self.rows(torch.arange(self.outputs, device="cpu"))


def linear(x: torch.Tensor, weight: torch.Tensor | Packed, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As `torch.nn.functional.linear`.

    Args:
        x: [..., inputs].
        weight: [outputs, inputs], contiguous; or packed, and then a row's result does not depend on how many there are.
        bias: [outputs].
    """
    outputs, inputs = weight.shape
    numbers = weight.numbers if isinstance(weight, Packed) else weight
    x = x.contiguous()
    rows = x.numel() // inputs
    out = x.new_empty(*x.shape[:-1], outputs)
    threads = num_threads(outputs * inputs * rows)
    scratch = torch.empty(_linear_floats()(rows, inputs, threads), dtype=torch.float32, device="cpu")
    _function("linear", x.dtype)(
        x.data_ptr(),
        numbers.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows,
        inputs,
        outputs,
        isinstance(weight, Packed),
        scratch.data_ptr(),
        threads,
    )
    return out
