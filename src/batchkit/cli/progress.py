"""How far a job is: a bar on stderr if that is a terminal, else a plain line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from .faults import say

__all__ = ["Progress", "duration"]

LINE_EVERY_S = 30.0
_BAR_EVERY_S = 0.1


class Progress:
    """Shows progress on stderr.

    Args:
        shown: False: never anything.
        clock: seconds.
        line_every_s: between two plain lines; `LINE_EVERY_S` by default.
    """

    def __init__(
        self, *, shown: bool, clock: Callable[[], float] = time.monotonic, line_every_s: float | None = None
    ) -> None:
        self._shown = shown
        self._clock = clock
        self._bar = _bar() if shown and sys.stderr.isatty() else None
        line_every_s = LINE_EVERY_S if line_every_s is None else line_every_s
        self._every_s = line_every_s if self._bar is None else _BAR_EVERY_S
        self._began = self._last = clock()
        self._tokens_then = 0

    def is_due(self) -> bool:
        """Whether it is time to `show` again: what is shown costs something to find out."""
        return self._shown and self._clock() - self._last >= self._every_s

    def show(self, *, num_done: int, num_failed: int, total: int | None, num_tokens: int | None = None) -> None:
        """Say how it stands.

        Args:
            num_done: rows, those that failed among them.
            num_failed: of those.
            total: rows in all, about; None: nobody knows.
            num_tokens: generated so far, where any are.
        """
        now = self._clock()
        news = [f"{num_failed:,} failed"]
        if num_tokens is not None:
            speed = (num_tokens - self._tokens_then) / max(now - self._last, 1e-9)
            news.append(f"{speed:,.0f} tokens per second")
            self._tokens_then = num_tokens
        if self._bar is not None:
            self._bar.total = total
            self._bar.set_postfix_str(", ".join(news), refresh=False)
            with suppress(OSError):
                self._bar.update(num_done - self._bar.n)
        else:
            parts = [f"{num_done:,} rows done"]
            if total:
                parts = [f"{num_done:,} of about {total:,} rows done ({num_done / total:.1%})"]
            parts += news
            if total and num_done:
                parts.append(f"about {duration((now - self._began) / num_done * (total - num_done))} left")
            say("batchkit: " + ", ".join(parts))
        self._last = now

    def say(self, text: str) -> None:
        """A line beside the progress."""
        if self._bar is not None:
            with suppress(OSError):
                self._bar.write(f"batchkit: {text}", file=sys.stderr)
        elif self._shown:
            say(f"batchkit: {text}")

    def close(self, *, num_done: int, total: int | None) -> None:
        """Leave the bar as it stands in the end. A plain line is not said: the figures follow."""
        if self._bar is not None:
            self._bar.total = total
            with suppress(OSError):
                self._bar.update(num_done - self._bar.n)
                self._bar.close()


def duration(seconds: float) -> str:
    """Seconds as people say them.

    >>> duration(42), duration(160), duration(12_345)
    ('42 s', '3 min', '3 h 26 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def _bar() -> Any:
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:  # without it, plain lines do
        return None
    return tqdm(unit="row", file=sys.stderr)
