"""The collector's setting while a model is loaded, and behind it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchkit import Engine
from batchkit.hf import loading
from batchkit.hf.garbage import seldom_collected

Thresholds = tuple[int, int, int]


@pytest.fixture(autouse=True)
def own_thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize(
    ("before", "during"),
    [
        ((700, 10, 10), (10_000, 10, 10)),
        ((700, 5, 7), (10_000, 5, 7)),
        ((50_000, 20, 100), (50_000, 20, 100)),
        ((0, 10, 10), (0, 10, 10)),
    ],
    ids=["Python's own", "the older generations", "rarer yet", "never"],
)
def test_collections_are_rarer_and_then_as_before(before: Thresholds, during: Thresholds) -> None:
    gc.set_threshold(*before)
    with seldom_collected():
        assert gc.get_threshold() == during
    assert gc.get_threshold() == before


def test_an_error_leaves_the_setting_as_it_was() -> None:
    gc.set_threshold(700, 10, 10)
    with pytest.raises(KeyError), seldom_collected():
        raise KeyError
    assert gc.get_threshold() == (700, 10, 10)


def test_a_model_is_loaded_under_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[int] = []
    real = loading.load_model

    def load_model(*args: object, **options: object) -> object:
        seen.append(gc.get_threshold()[0])
        return real(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(loading, "load_model", load_model)
    gc.set_threshold(700, 10, 10)
    with pytest.raises(FileNotFoundError):
        Engine.from_pretrained(str(tmp_path / "missing"))
    assert seen == [10_000]
    assert gc.get_threshold() == (700, 10, 10)
