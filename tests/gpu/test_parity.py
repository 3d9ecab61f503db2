"""Both backends for GPUs give the logits of the reference backend, as far as the dtype allows: ten families."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from typing_extensions import override

from batchkit.hf.backends.reference import ReferenceBackend
from gpu.rig import BACKENDS, DTYPES, FAMILIES, POLICIES, backend, check_close, model_of, reference, serve, truth

# What torch or a kernel warns of on a device is no fault of the device.
pytestmark = pytest.mark.filterwarnings("default")

WITH_WINDOW = [family for family, changes in FAMILIES.items() if "sliding_window" in changes]


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_reference(family: str, dtype: torch.dtype, attention: str, policy: str) -> None:
    exact, want = truth(family, dtype), reference(family, dtype)
    got = serve(model_of(family, dtype), attention=backend(attention, dtype), policy=policy, forced=exact.tokens)
    check_close(got, want, exact)


@pytest.mark.parametrize("policy", ["paged", "contiguous"])
@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_give_the_same_logits(
    cuda: torch.device, family: str, attention: str, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    dtype = torch.bfloat16
    exact, want = truth(family, dtype), reference(family, dtype)
    got = serve(model_of(family, dtype), attention=attention, policy=policy, forced=exact.tokens, cuda_graphs=True)
    check_close(got, want, exact)
    assert not [record.message for record in caplog.records if "graph" in record.message]  # none fell back


class Overlooks(ReferenceBackend):
    """Overlooks the oldest key that a sliding window shows."""

    @override
    def attend(self, layer, *arguments, **options):
        narrower = layer if layer.window is None else replace(layer, window=layer.window - 1)
        return super().attend(narrower, *arguments, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("family", WITH_WINDOW)
def test_the_bound_is_sharp(family: str, dtype: torch.dtype) -> None:
    exact, want = truth(family, dtype), reference(family, dtype)
    got = serve(model_of(family, dtype), attention=Overlooks(), forced=exact.tokens)
    with pytest.raises(AssertionError):
        check_close(got, want, exact)
