"""Decode steps that are run again on other numbers, with the masks of xformers. See `unit_hf.graph_rig`."""

from __future__ import annotations

import pytest
import torch

from batchkit import ContiguousAllocator, Engine, OrcaScheduler, PagedAllocator, PagedScheduler, SamplingParams
from batchkit.hf import graphs
from interpreted.rig import OnCPU
from tiny_models import tiny
from unit_hf.graph_rig import reruns  # noqa: F401 - a fixture

PROMPTS = [[5, 9, 2, 7], [*range(3, 66)], [11] * 64]  # the second goes on to its second block


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(
    ("policy", "allocator"), [(PagedScheduler, PagedAllocator), (OrcaScheduler, ContiguousAllocator)]
)
def test_logits_are_those_without_graphs(reruns, monkeypatch, policy, allocator, window) -> None:  # noqa: F811
    monkeypatch.setattr(graphs, "_MIN_WIDTH", 2)  # the interpreter takes its time for every key
    family = {"family": "mistral", "sliding_window": window} if window else {}
    model = tiny(head_dim=16, num_hidden_layers=1, **family).half()

    def logits(cuda_graphs: bool) -> list[torch.Tensor]:
        said = []

        def watch(prompt, output, logits):
            said.append(logits.float().clone())
            forced = torch.full_like(logits, -1e4)
            forced[7 + len(output)] = 0
            return forced

        params = [
            SamplingParams(temperature=0, max_tokens=k, ignore_eos=True, logits_processors=[watch]) for k in (4, 2, 3)
        ]
        options = {"scheduler": policy, "allocator": allocator, "attention": OnCPU(), "max_tokens_per_step": 160}
        with Engine.from_model(model, num_kv_blocks=12, max_model_len=128, cuda_graphs=cuda_graphs, **options) as one:
            one.generate(PROMPTS, params)
        return said

    want = logits(cuda_graphs=False)
    assert not reruns
    got = logits(cuda_graphs=True)
    assert 1 <= len(reruns) <= 3  # of 4, 2 and 1 rows
    assert sum(graph.num_replays for graph in reruns) == 3
    torch.testing.assert_close(torch.stack(got), torch.stack(want), atol=2e-3, rtol=0)
