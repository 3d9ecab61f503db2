"""Time, injected: the engine asks a clock and never the system."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "MonotonicClock", "VirtualClock"]


class Clock(Protocol):
    """Seconds from some fixed point, never going backwards."""

    def __call__(self) -> float:
        """The time now."""

    def sleep_until(self, t: float) -> None:
        """Return when it is `t`, at once if it is later already."""


class MonotonicClock:
    """The real time of ``time.monotonic``; waiting sleeps."""

    def __call__(self) -> float:
        """The time now."""
        return time.monotonic()

    def sleep_until(self, t: float) -> None:
        """Sleep until `t`."""
        while (left := t - time.monotonic()) > 0:
            time.sleep(min(left, 86_400.0))  # the system cannot sleep for any length at once


class VirtualClock:
    """Simulated time: it stands still until somebody moves it; waiting jumps.

    >>> clock = VirtualClock()
    >>> clock.advance(0.5); clock.sleep_until(2.0); clock.sleep_until(1.0); clock()
    2.0
    """

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def __call__(self) -> float:
        """The time now."""
        return self._now

    def sleep_until(self, t: float) -> None:
        """Jump to `t`."""
        self._now = max(self._now, t)

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass, at least 0."""
        if not seconds >= 0:
            raise ValueError(f"time cannot go backwards, got {seconds} s")
        self._now += seconds
