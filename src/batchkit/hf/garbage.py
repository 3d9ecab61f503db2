"""Python's garbage collector while much is made that stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["seldom_collected"]

_OBJECTS = 10_000  # more, and the single collections that are left take longer in sum


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Collect garbage less often, for as long as it is open.

    Importing torch and transformers makes 400,000 objects, of which next to none is garbage. By Python's own setting,
    a collection after each 700 of them, the search takes an eighth of the time until a model is loaded.

    It holds for the whole process, so keep it short. Whoever has switched collection off, or set it to be rarer yet,
    keeps that.
    """
    before = gc.get_threshold()
    if before[0]:  # 0 means never
        gc.set_threshold(max(before[0], _OBJECTS), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
