"""What a policy's arguments must be: one of a wrong type would otherwise raise in the middle of a job."""

from __future__ import annotations

from numbers import Integral, Real

__all__ = ["check_count", "check_number", "check_switch"]


def check_count(name: str, value: object, at_least: int | None = None) -> None:
    """Raise unless `value` is a whole number, and large enough."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if at_least is not None and value < at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {value}")


def check_number(name: str, value: object) -> None:
    """Raise TypeError unless `value` is a number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")


def check_switch(name: str, value: object) -> None:
    """Raise TypeError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
