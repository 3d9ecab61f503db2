"""Decode steps that are run again on other numbers, with the masks of xformers. See `unit_hf.graph_rig`."""

from __future__ import annotations

import pytest
import torch

from batchkit import ContiguousAllocator, OrcaScheduler, PagedAllocator, PagedScheduler
from batchkit.hf import graphs
from interpreted.rig import OnCPU
from tiny_models import tiny
from unit_hf.graph_rig import forced_logits, reruns  # noqa: F401 - a fixture

PROMPTS = [[5, 9, 2, 7], [*range(3, 66)], [11] * 64]  # the second goes on to its second block


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(
    ("policy", "allocator"), [(PagedScheduler, PagedAllocator), (OrcaScheduler, ContiguousAllocator)]
)
def test_logits_are_those_without_graphs(reruns, monkeypatch, policy, allocator, window) -> None:  # noqa: F811
    monkeypatch.setattr(graphs, "_MIN_WIDTH", 2)  # the interpreter takes its time for every key
    family = {"family": "mistral", "sliding_window": window} if window else {}
    model = tiny(head_dim=16, num_hidden_layers=1, **family).half()

    work = (model, PROMPTS, (4, 2, 3))
    options = {"scheduler": policy, "allocator": allocator, "attention": OnCPU(), "max_tokens_per_step": 160}
    options |= {"num_kv_blocks": 12, "max_model_len": 128}
    want = forced_logits(*work, **options)
    assert not reruns
    got = forced_logits(*work, cuda_graphs=True, **options)
    assert 1 <= len(reruns) <= 3  # of 4, 2 and 1 rows
    assert sum(graph.num_replays for graph in reruns) == 3
    torch.testing.assert_close(got, want, atol=2e-3, rtol=0)
