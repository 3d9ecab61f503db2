"""Requests with every parameter through whole engines: what each gives alone, it gives under any circumstances."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from batchkit import (
    ChunkedPrefillScheduler,
    Engine,
    OrcaScheduler,
    PagedScheduler,
    RequestOutput,
    SamplingParams,
    StaticScheduler,
)
from batchkit.params import StructuredOutputsParams
from tiny_models import tiny
from unit_hf.helpers import EOS, NUM_BYTES, SECOND_EOS, byte_tokenizer

VOCAB = NUM_BYTES + 10


def lean(prompt: Sequence[int], output: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """A processor that depends on the split between prompt and output."""
    logits[(7 * len(prompt) + 3 * len(output)) % NUM_BYTES] += 6.0
    return logits


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 14, "seed": 3, "temperature": 1.0, **changes})


REQUESTS: dict[str, SamplingParams] = {
    "plain": params(),
    "greedy": params(temperature=0, presence_penalty=1.5),
    "presence": params(presence_penalty=2.0, top_k=3),
    "frequency": params(frequency_penalty=2.0, top_k=3),
    "repetition": params(repetition_penalty=1.8, top_k=3),
    "bias": params(logit_bias={65: 3.0, 66: 3.0, 67: -100}),
    "allowed": params(allowed_token_ids=range(60, 70), logprobs=2),
    "bad words": params(allowed_token_ids=range(32, 35), bad_words=["A", "BC"]),
    "minimum": params(min_tokens=9, logit_bias={EOS: 100.0, SECOND_EOS: 99.0}),
    "processor": params(logits_processors=[lean], top_p=0.8),
    "json": params(structured_outputs=StructuredOutputsParams(json={"type": "array", "items": {"enum": [1, "é"]}})),
    "choice": params(structured_outputs=StructuredOutputsParams(choice=["yes", "no", "maybe"]), logprobs=0),
    "scores": params(prompt_logprobs=1, logprobs=1, min_p=0.01, frequency_penalty=0.5),
    "only scores": SamplingParams(max_tokens=0, prompt_logprobs=0),
    "stop": params(stop=["C", "AB"], allowed_token_ids=range(31, 36)),
    "stop tokens": params(stop_token_ids=range(0, VOCAB, 9), ignore_eos=True, min_p=0.001),
    "regex": params(structured_outputs=StructuredOutputsParams(regex="[a-c]{5,9}")),
}


def request(name: str, n: int) -> SamplingParams:
    return dataclasses.replace(REQUESTS[name], n=n if REQUESTS[name].max_tokens else 1)


PROMPTS = {name: f"One beginning of all: {name * (1 + i % 2)}" for i, name in enumerate(REQUESTS)}


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny("llama", vocab_size=VOCAB, eos_token_id=[EOS, SECOND_EOS])


def new_engine(model: torch.nn.Module, **arguments: Any) -> Engine:
    arguments = {"num_kv_blocks": 400, "block_size": 4, **arguments}
    return Engine.from_model(model, byte_tokenizer(), **arguments)


def run(engine: Engine, names: Sequence[str], n: int = 1) -> dict[str, RequestOutput]:
    outputs = engine.generate([PROMPTS[name] for name in names], [request(name, n) for name in names])
    return dict(zip(names, outputs, strict=True))


def same(got: RequestOutput, expected: RequestOutput) -> None:
    """Equal, with log-probabilities equal but for rounding."""
    assert got.error is expected.error is None
    for one, other in zip(got.outputs, expected.outputs, strict=True):
        assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)
        close(one.logprobs, other.logprobs)
    close(got.prompt_logprobs, expected.prompt_logprobs)


def close(got: Sequence[Any] | None, expected: Sequence[Any] | None) -> None:
    assert (got is None) == (expected is None)
    for one, other in zip(got or (), expected or (), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert {t: p.rank for t, p in one.items()} == {t: p.rank for t, p in other.items()}
            assert [p.logprob for p in one.values()] == pytest.approx([p.logprob for p in other.values()], abs=1e-4)


@pytest.fixture(scope="module")
def alone(model: torch.nn.Module) -> dict[str, RequestOutput]:
    found = {}
    for name in REQUESTS:
        with new_engine(model) as engine:
            found.update(run(engine, [name]))
    return found


def test_parameters_do_what_they_say(alone: dict[str, RequestOutput]) -> None:
    assert {name for name, output in alone.items() if output.finish_reason == "error"} == set()
    assert set(alone["allowed"].token_ids) <= set(range(60, 70))
    assert set(alone["bad words"].text) == {"B", "C"}
    assert "BC" not in alone["bad words"].text
    assert len(alone["minimum"].token_ids) == 10
    assert alone["minimum"].token_ids[-1] in (EOS, SECOND_EOS)
    assert alone["choice"].text in ("yes", "no", "maybe")
    assert alone["choice"].finish_reason == "stop"
    assert alone["stop"].finish_reason == alone["stop tokens"].finish_reason == "stop"
    scores = alone["only scores"]
    assert (scores.token_ids, scores.finish_reason) == ((), "length")
    assert scores.prompt_logprobs is not None
    assert [entry is None for entry in scores.prompt_logprobs] == [True] + [False] * (len(scores.prompt_token_ids) - 1)


CIRCUMSTANCES: dict[str, dict[str, Any]] = {
    "neighbours": {},
    "whole prompts": {"scheduler": OrcaScheduler},
    "static batches": {"scheduler": StaticScheduler, "max_num_seqs": 5},
    "chunks of one": {"max_num_seqs": 1, "max_tokens_per_step": 1},
    "chunks of three": {"max_num_seqs": 1, "max_tokens_per_step": 3},
    "small chunks": {"max_num_seqs": 3, "max_tokens_per_step": 8},
    "recompute": {"scheduler": PagedScheduler, "num_kv_blocks": 45},
    "recompute chunks": {"num_kv_blocks": 30, "max_tokens_per_step": 16, "max_num_seqs": 10},
    "swap": {"scheduler": PagedScheduler, "num_kv_blocks": 45, "swap_memory": "1MB"},
    "prefixes": {"prefix_caching": True},
    "prefixes and recompute": {"prefix_caching": True, "num_kv_blocks": 45, "scheduler": ChunkedPrefillScheduler},
}


@pytest.fixture(scope="module")
def four_alone(model: torch.nn.Module) -> dict[str, RequestOutput]:
    found = {}
    for name in REQUESTS:
        with new_engine(model) as engine:
            found.update(run(engine, [name], 4))
    return found


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("circumstances", CIRCUMSTANCES)
def test_each_request_gives_what_it_gives_alone(
    model: torch.nn.Module,
    alone: dict[str, RequestOutput],
    four_alone: dict[str, RequestOutput],
    circumstances: str,
    n: int,
) -> None:
    """VLLM-5349: after a preemption outputs still count as outputs, for penalties and processors too."""
    expected = alone if n == 1 else four_alone
    with new_engine(model, **CIRCUMSTANCES[circumstances]) as engine:
        for names in [list(REQUESTS), list(REQUESTS)[::-1]][: engine.stats().max_num_seqs]:
            for name, output in run(engine, names, n).items():
                same(output, expected[name])
        stats = engine.stats()
    assert (stats.num_preemptions > 0) == ("recompute" in circumstances or circumstances == "swap")
    if "prefixes" in circumstances:
        assert stats.cached_tokens > 400


def test_caches_dropped_in_every_step_change_nothing(model: torch.nn.Module, alone: dict[str, RequestOutput]) -> None:
    with new_engine(model) as engine:
        for name in REQUESTS:
            engine.add_request(PROMPTS[name], REQUESTS[name], request_id=name)
        while engine.has_unfinished():
            for output in engine.step():
                if output.finished:
                    same(output, alone[output.request_id])
            engine._runner.drop_caches()


def test_a_sample_does_not_depend_on_their_number(
    alone: dict[str, RequestOutput], four_alone: dict[str, RequestOutput]
) -> None:
    """VLLM-11898: sample i is the same whatever n is."""
    for name, output in four_alone.items():
        assert output.token_ids == alone[name].token_ids
    assert len({completion.token_ids for completion in four_alone["plain"].outputs}) == 4


def test_the_same_request_gives_the_same_each_time(model: torch.nn.Module, alone: dict[str, RequestOutput]) -> None:
    """CASCADIA-20: the second call with a seed differed from the first."""
    with new_engine(model) as engine:
        for _ in range(3):
            same(run(engine, ["plain"])["plain"], alone["plain"])


def test_what_a_processor_raises_ends_its_own_request(model: torch.nn.Module, alone: dict[str, RequestOutput]) -> None:
    def late(prompt: Sequence[int], output: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output) == 3:
            raise LookupError("nothing there")
        return logits

    with new_engine(model) as engine:
        engine.add_request("Fine so far", params(logits_processors=[late]), request_id="bad")
        for name in ("plain", "json", "presence"):
            engine.add_request(PROMPTS[name], REQUESTS[name], request_id=name)
        finished = {}
        while engine.has_unfinished():
            finished.update({output.request_id: output for output in engine.step() if output.finished})
    bad = finished.pop("bad")
    assert bad.finish_reason == "error"
    assert "the logits processor late failed: LookupError: nothing there" in str(bad.error)
    assert len(bad.token_ids) == 3
    for name, output in finished.items():
        same(output, alone[name])
