"""Sizes as people write them."""

from __future__ import annotations

import re
from fractions import Fraction

__all__ = ["parse_bytes"]

_UNITS = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}


def parse_bytes(name: str, value: int | str) -> int:
    """A number of bytes from an integer or from text such as ``"2GiB"``, ``"500MB"`` or ``"1.5 GiB"``.

    Args:
        name: of the argument, for messages.
        value: kB, MB, GB, TB are powers of 1000; KiB, MiB, GiB, TiB powers of 1024. Case does not matter.

    Raises:
        TypeError: neither an integer nor text.
        ValueError: text that is no size, or a size below 1 byte.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError(f'{name} must be a number of bytes or text such as "2GiB", got {value!r}')
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise ValueError(f'{name} must be a number of bytes or text such as "2GiB" or "500MB", got {value!r}')
        size = int(Fraction(match[1]) * unit)
    else:
        size = value
    if size < 1:
        raise ValueError(f"{name} must be at least 1 byte, got {value!r}")
    return size
