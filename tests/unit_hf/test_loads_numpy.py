"""The 2023 experiment's lists, drawn as its authors drew them: with numpy."""

import random

import numpy as np
import pytest

from batchkit.experiment.loads import original_lengths


@pytest.mark.parametrize(("cap", "n"), [(32, 1008), (128, 1008), (512, 1000), (1536, 1000), (1536, 100)])
def test_the_lists_are_those_that_numpy_gives(cap: int, n: int) -> None:
    rng = random.Random(0xCADE)
    for length in [rng.randint(512, 512) for _ in range(n)]:
        for _ in range(length):
            rng.randint(10, 50_000)
    numpys = np.random.RandomState(rng.randint(0, 1_000_000))
    lengths: list[int] = []
    while len(lengths) < n:
        length = round(numpys.exponential(scale=128))
        if length <= cap:
            lengths.append(length)
    assert original_lengths(cap, n) == lengths
