"""Random numbers without a state."""

from __future__ import annotations

__all__ = ["uniform"]

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio


def uniform(seed: int, sample_index: int, position: int) -> float:
    """A number in [0, 1) that depends on the three integers alone; of 53 random bits.

    For given seed and sample, the numbers at positions 0, 1, 2 ... are a SplitMix64 sequence (Steele, Lea and Flood,
    "Fast splittable pseudorandom number generators", 2014) that starts at a place hashed from both.
    """
    state = _mix(seed + _STEP)
    state = _mix(state + (sample_index + 1) * _STEP)
    state = _mix(state + (position + 1) * _STEP)
    return (state >> 11) / (1 << 53)


def _mix(x: int) -> int:
    """SplitMix64's hash of the lowest 64 bits."""
    x &= _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31
