"""What all tests share: the demo model's path, and hypothesis without deadlines."""

from __future__ import annotations

import os
from pathlib import Path

# Before anything imports torch. Several processes of several threads each, that wait for each other, are many times
# slower than of one each.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent

# Shared machines are slow at times, and a failure that nobody can repeat helps nobody.
settings.register_profile(
    "batchkit", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
settings.load_profile("batchkit")


def smollm2_path() -> Path | None:
    """The folder of the demo model, or None where nobody has made it."""
    folder = Path(os.environ.get("BATCHKIT_SMOLLM2") or ROOT / ".cache" / "smollm2")
    folder = folder if folder.is_absolute() else ROOT / folder
    return folder if (folder / "config.json").is_file() else None


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The path of SmolLM2-135M-Instruct, made by `make model` or named by BATCHKIT_SMOLLM2."""
    folder = smollm2_path()
    if folder is None:
        message = "the demo model is missing; `make model` makes it, BATCHKIT_SMOLLM2 says where it lies"
        # A skip that goes unnoticed would leave the whole real model untested.
        (pytest.fail if "CI" in os.environ else pytest.skip)(message)
    return str(folder)


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test may reach for a model hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
