"""Torch's number of threads belongs to the host program; the command line's process is its own."""

import pytest
import torch

from batchkit import Engine, SamplingParams
from batchkit.hf import environment
from tiny_models import tiny


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


def test_an_engine_leaves_them_alone(threads: int) -> None:
    torch.set_num_threads(3)
    with Engine.from_model(tiny(), num_kv_blocks=8) as engine:
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3))
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize(("have", "usable", "given", "then"), [(4, 2, None, 2), (1, 2, None, 1), (4, 2, "4", 4)])
def test_the_command_line_limits_them(monkeypatch, threads: int, have: int, usable: int, given, then: int) -> None:
    torch.set_num_threads(have)
    monkeypatch.setattr(environment, "usable_cpus", lambda: usable)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    environment.limit_threads()
    assert torch.get_num_threads() == then
