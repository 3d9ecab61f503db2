"""xformers' Triton kernels on a CPU, in Triton's interpreter. `make test-xformers` runs these in their environment."""

from __future__ import annotations

import os

import pytest

# It is read when triton is imported, and would slow down everything else that uses triton in this process.
if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
else:
    import torch

    import batchkit.hf.backends as backends
    import batchkit.hf.backends.xformers as backend

    @pytest.fixture(autouse=True)
    def kernels_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(backend, "_DEVICES", frozenset({"cpu"}))
        monkeypatch.setattr(backend._names().split_k, "SUPPORTED_DEVICES", {"cpu"})
        # It is asked for, to choose how many warps a kernel gets.
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (8, 0))
        # Trials take seconds here, for every engine that is made. Tests of them call `trial.faults`.
        monkeypatch.setattr(backends, "faults", lambda *given: [])
