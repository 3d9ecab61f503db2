"""What a GPU computes. Without one every test here is skipped; `benchmarks/gpu_check.sh` runs them where there is one.

A rehearsal, which says nothing about GPUs: with ``BATCHKIT_GPU_TESTS_DEVICE=cpu`` the same tests run on the CPU, so
that their code is known to work before a GPU meets it. The reference backend then stands where the others would. In
Triton's interpreter (``TRITON_INTERPRET=1``, and the environment of `make test-xformers`) xformers' decode kernels run
too. What is CUDA's alone stays skipped.
"""

from __future__ import annotations

import gc

import pytest
import torch

from gpu import rig

if rig.INTERPRETED:
    from interpreted.conftest import kernels_on_the_cpu  # noqa: F401 - a fixture for every test here


@pytest.fixture(autouse=True, scope="session")
def device() -> torch.device:
    if rig.REHEARSAL is None and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return rig.DEVICE


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    """For what is CUDA's alone."""
    if device.type != "cuda":
        pytest.skip("CUDA's alone, and this is a rehearsal on the CPU")
    return device


@pytest.fixture(autouse=True)
def _tidy() -> object:
    """No test's memory meets the next one."""
    yield
    gc.collect()
