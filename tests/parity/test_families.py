"""Families that are said to run give what plain eager attention gives, whatever the schedule; others are refused.

Models are tiny and random, in float32 on the CPU. The truth is one sequence alone, in one pass without any cache.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny matrices: threads only get in each other's way

import functools
import random
import re
import threading
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from batchkit.errors import UnsupportedModel
from batchkit.hf.runner import TransformersRunner
from batchkit.types import BlockCopy, Request, RowResult, SamplingParams, ScheduledSequence, SchedulerOutput
from tiny_models import COMMON

BLOCK, NUM_BLOCKS = 4, 48
WINDOW = 8
GENERIC = {**COMMON, "num_hidden_layers": 3}
ABSENT = object()
NO_GQA = {"head_dim": ABSENT, "num_key_value_heads": ABSENT}
NO_HEAD_DIM = {"head_dim": ABSENT}
GPT2 = dict(NO_GQA, intermediate_size=ABSENT)
MLA = {
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "kv_lora_rank": 16,
    "num_key_value_heads": 4,
    "head_dim": ABSENT,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
SLIDING = {"sliding_window": WINDOW}
# Alternately sliding and full.
MIXED = dict(SLIDING, layer_types=["sliding_attention", "full_attention", "sliding_attention"])

# Name of the test: (model type, what differs from GENERIC).
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "apertus": ("apertus", {}),
    "arcee": ("arcee", {}),
    "biogpt": ("biogpt", NO_GQA),
    "bitnet": ("bitnet", NO_HEAD_DIM),
    "codegen": ("codegen", dict(GPT2, rotary_dim=4)),
    "cohere": ("cohere", NO_HEAD_DIM),
    "cohere2": ("cohere2", MIXED),
    "deepseek_v2": ("deepseek_v2", dict(MLA, **EXPERTS, q_lora_rank=12, n_routed_experts=4, first_k_dense_replace=1)),
    "deepseek_v3": (
        "deepseek_v3",
        dict(MLA, **EXPERTS, q_lora_rank=12, n_routed_experts=4, first_k_dense_replace=1, n_group=2, topk_group=1),
    ),
    "ernie4_5": ("ernie4_5", {}),
    "exaone4": ("exaone4", MIXED),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", MIXED),
    "gemma3_text": ("gemma3_text", MIXED),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "gpt2": ("gpt2", GPT2),
    "gpt2-scaled": ("gpt2", dict(GPT2, scale_attn_by_inverse_layer_idx=True)),
    "gpt_bigcode": ("gpt_bigcode", GPT2),
    "gpt_neox": ("gpt_neox", NO_GQA),
    "gpt_oss": ("gpt_oss", dict(MIXED, num_local_experts=4, num_experts_per_tok=2)),
    "gptj": ("gptj", dict(GPT2, rotary_dim=4)),
    "granite": ("granite", NO_HEAD_DIM),
    "granitemoe": ("granitemoe", dict(NO_HEAD_DIM, num_local_experts=4)),
    "helium": ("helium", {}),
    "llama": ("llama", {}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-yarn": ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}),
    "mistral": ("mistral", SLIDING),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "olmo": ("olmo", NO_HEAD_DIM),
    "olmo2": ("olmo2", NO_HEAD_DIM),
    "olmo3": ("olmo3", dict(MIXED, head_dim=ABSENT)),
    "olmoe": ("olmoe", dict(NO_HEAD_DIM, num_experts=4, num_experts_per_tok=2)),
    "opt": ("opt", dict(NO_GQA, intermediate_size=ABSENT, ffn_dim=48, word_embed_proj_dim=32)),
    "persimmon": ("persimmon", NO_GQA),
    "phi": ("phi", NO_HEAD_DIM),
    "phi3": ("phi3", dict(SLIDING, head_dim=ABSENT)),
    "qwen2": ("qwen2", dict(NO_HEAD_DIM, **SLIDING, use_sliding_window=True, max_window_layers=1)),
    "qwen2_moe": (
        "qwen2_moe",
        dict(EXPERTS, head_dim=ABSENT, num_experts=4, shared_expert_intermediate_size=16),
    ),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", dict(EXPERTS, num_experts=4)),
    "seed_oss": ("seed_oss", {}),
    "smollm3": ("smollm3", NO_HEAD_DIM),
    "starcoder2": ("starcoder2", dict(SLIDING, head_dim=ABSENT)),
    "vaultgemma": ("vaultgemma", MIXED),
}
WITH_WINDOW = ["cohere2", "gemma2", "gemma3_text", "gpt_oss", "mistral", "phi3", "qwen2", "starcoder2"]


def tiny(model_type: str, changes: dict[str, object], auto: type = AutoModelForCausalLM) -> torch.nn.Module:
    """A random model of a family, in eval mode with eager attention."""
    arguments = {k: v for k, v in {**GENERIC, **changes}.items() if v is not ABSENT}
    try:
        config = AutoConfig.for_model(model_type, **arguments)
    except ValueError as error:
        if "nrecognized model identifier" not in str(error):
            raise
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = auto.from_config(config, attn_implementation="eager").eval().float()
    for parameter in model.parameters():
        # Norms, biases and sinks start out as ones and zeros, under which a mistake could hide.
        if parameter.dim() < 2:
            parameter.data += torch.rand(parameter.shape) * 0.2 - 0.1
    return model


def truth(model: torch.nn.Module, sequence: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0]


class Driver:
    """Feeds known tokens through a runner and keeps the logits that come out, by sequence and position."""

    def __init__(self, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> None:
        self.runner = TransformersRunner(model, num_kv_blocks=NUM_BLOCKS, block_size=BLOCK, swap_memory="1MB")
        self.pool = self.runner._pool
        self.pool.fill(float("nan"))
        self.rng = random.Random(seed)
        self.free = list(range(NUM_BLOCKS))
        self.free_host = list(range(self.runner.geometry.host_blocks))
        self.rng.shuffle(self.free)
        self.rng.shuffle(self.free_host)
        self.request = Request(id="r", prompt_token_ids=(1,), params=SamplingParams(temperature=0), max_tokens=1)
        self.logits: dict[tuple[int, int], torch.Tensor] = {}
        self.tables: dict[int, tuple[int, ...]] = {}
        monkeypatch.setattr(self.runner, "_sample", self.keep)

    def keep(self, logits: torch.Tensor, rows: list[ScheduledSequence]) -> list[RowResult]:
        assert len(logits) == len(rows)
        for values, row in zip(logits, rows, strict=True):
            self.logits[row.seq_id, row.start + row.num_tokens - 1] = values.clone()
        return [RowResult((5,)) for _ in rows]

    def row(self, seq_id: int, sequence: list[int], start: int, num: int, samples: bool = True) -> ScheduledSequence:
        table = self.tables.get(seq_id, ())
        more = -(-(start + num) // BLOCK) - len(table)
        if more > 0:
            self.tables[seq_id] = table = table + tuple(self.free.pop() for _ in range(more))
        return ScheduledSequence(
            seq_id=seq_id,
            row=0,
            seat=seq_id,
            request=self.request,
            sample_index=0,
            start=start,
            num_tokens=num,
            token_ids=tuple(sequence[start : start + num]),
            output_ids=[],
            num_output=0,
            blocks=table,
            samples=samples,
            idle=False,
        )

    def step(self, rows: list[ScheduledSequence]) -> None:
        out = SchedulerOutput(rows=tuple(rows), num_tokens=sum(row.num_tokens for row in rows))
        for row, result in zip(rows, self.runner.execute(out).rows, strict=True):
            assert result.error is None
            assert result.token_ids == ((5,) if row.samples else ())

    def release(self, blocks: tuple[int, ...]) -> None:
        """Give blocks back, poisoned."""
        for pool in self.pool._pools:
            pool[:, list(blocks)] = float("nan")
        self.free[:0] = blocks

    def everything(self, sequences: list[list[int]]) -> None:
        """Compute all sequences under a random schedule with preemption, swapping and copied blocks."""
        rng = self.rng
        done = [0] * len(sequences)
        swapped: dict[int, tuple[int, ...]] = {}
        for _ in range(1000):
            rows, copies, released = [], [], []
            for i, sequence in enumerate(sequences):
                if done[i] == len(sequence):
                    continue
                chance = rng.random()
                if i in swapped:
                    if chance < 0.5:
                        host = swapped.pop(i)
                        self.tables[i] = tuple(self.free.pop() for _ in host)
                        copies += [BlockCopy("swap_in", a, b) for a, b in zip(host, self.tables[i], strict=True)]
                        self.free_host += host
                    continue
                if done[i] and chance < 0.06:  # preempted, to be recomputed
                    released.append(self.tables.pop(i))
                    done[i] = 0
                    continue
                if done[i] and chance < 0.16:  # preempted, to be swapped
                    table = self.tables.pop(i)
                    used = table[: -(-done[i] // BLOCK)]
                    swapped[i] = tuple(self.free_host.pop() for _ in used)
                    copies += [BlockCopy("swap_out", a, b) for a, b in zip(used, swapped[i], strict=True)]
                    released.append(table)
                    continue
                if done[i] and chance < 0.25:  # its last block moves, as a shared one does before it is written
                    table = self.tables[i]
                    target = self.free.pop()
                    copies.append(BlockCopy("copy", table[-1], target))
                    released.append(table[-1:])
                    self.tables[i] = (*table[:-1], target)
                wish = rng.choices([0, 1, 2, 3, 5, 64], [2, 20, 2, 2, 1, 0.1 if done[i] else 4])[0]
                num = min(len(sequence) - done[i], wish)
                if num:
                    rows.append(self.row(i, sequence, done[i], num, samples=rng.random() < 0.9 or num > 1))
                    done[i] += num
            rng.shuffle(rows)
            if copies:
                self.runner.copy_blocks(copies)
            for blocks in released:
                self.release(blocks)
            if rows:
                self.step(rows)
            if all(d == len(s) for d, s in zip(done, sequences, strict=True)):
                return
        raise AssertionError("the schedule did not end")

    def worst(self, expected: list[torch.Tensor]) -> float:
        assert self.logits
        return max((values - expected[i][at]).abs().max().item() for (i, at), values in self.logits.items())


def some_sequences(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 97, (length,), generator=generator).tolist() for length in lengths]


# Earlier versions of transformers do not route their attention through AttentionInterface.
SINCE = {"codegen": (5, 24), "gptj": (5, 24)}


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_eager(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if tuple(map(int, transformers.__version__.split(".")[:2])) < SINCE.get(family, (5, 17)):
        pytest.skip(f"{family} is refused under transformers {transformers.__version__}")
    model = tiny(*FAMILIES[family])
    sequences = some_sequences(9, 23, 1, 17, 40, 12)
    expected = [truth(model, sequence) for sequence in sequences]
    driver = Driver(model, monkeypatch)
    driver.everything(sequences)
    assert len(driver.logits) > 25, "the schedule was too coarse"
    assert driver.worst(expected) < 1e-5


@pytest.mark.parametrize("family", WITH_WINDOW)
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_window_borders(family: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM-4380: lengths around the window, by prefill, by chunks and by decode, each row alone and all together."""
    model = tiny(*FAMILIES[family])
    sequences = some_sequences(7, 8, 9, 10, 17)
    expected = [truth(model, sequence) for sequence in sequences]
    for together in (False, True):
        driver = Driver(model, monkeypatch)
        for start in range(0, 17, chunk):
            rows = [
                driver.row(i, sequence, start, min(chunk, len(sequence) - start))
                for i, sequence in enumerate(sequences)
                if start < len(sequence)
            ]
            for step in [rows] if together else [[row] for row in rows]:
                driver.step(step)
        assert driver.worst(expected) < 1e-5
        if chunk == 1:
            assert len(driver.logits) == sum(map(len, sequences))


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_pool_contents_do_not_matter(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM-936: what unwritten slots hold changes no bit of a result."""
    model = tiny(*FAMILIES[family])
    sequences = some_sequences(*range(1, 2 * BLOCK + 2))
    seen = []
    for value in (0.0, 1e4, float("nan")):
        driver = Driver(model, monkeypatch)
        driver.pool.fill(value)
        for start, num in ((0, 1), (1, 1), (2, 3), (5, 4)):
            rows = [
                driver.row(i, sequence, start, min(num, len(sequence) - start))
                for i, sequence in enumerate(sequences)
                if start < len(sequence)
            ]
            driver.step(rows)
        seen.append(driver.logits)
    for other in seen[1:]:
        assert other.keys() == seen[0].keys()
        assert all(torch.equal(other[key], seen[0][key]) for key in other)


@pytest.mark.parametrize("family", ["gpt2", "opt", "biogpt"])
def test_learned_positions_reach_the_last_one(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """HF-33121: OPT's table of positions has an offset of two; the last position does not look beyond it."""
    model_type, changes = FAMILIES[family]
    model = tiny(model_type, dict(changes, max_position_embeddings=16))
    (sequence,) = some_sequences(16)
    driver = Driver(model, monkeypatch)
    assert driver.runner.geometry.max_model_len == 16
    for start in range(0, 16, 4):
        driver.step([driver.row(0, sequence, start, 4)])
    assert driver.worst([truth(model, sequence)]) < 1e-5
    with pytest.raises(ValueError, match=r"17 tokens.*16"):
        driver.step([driver.row(0, [*sequence, 5], 16, 1)])


@pytest.mark.parametrize("chunk", [1, 3, 5, 12])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_mlxlm_1805_positions_count_what_is_computed(family: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The query was rotated by the length after its chunk was written. Also after resuming at each length."""
    model = tiny(*FAMILIES[family])
    (sequence,) = some_sequences(12)
    expected = truth(model, sequence)
    for stop in range(12, 0, -1):
        driver = Driver(model, monkeypatch)
        for end in (stop, 12):  # up to there, then everything once more in other blocks
            for start in range(0, end, chunk):
                driver.step([driver.row(0, sequence, start, min(chunk, end - start))])
            driver.release(driver.tables.pop(0))
        assert driver.worst([expected]) < 1e-5


@pytest.mark.parametrize("together", [False, True])
def test_mlxvlm_1543_what_is_masked_follows_from_lengths(together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of six lengths, one of which really contains the padding's and the end's ids."""
    model = tiny(*FAMILIES["llama"])
    sequences = [*some_sequences(1, 3, 9, 14, 20), [5, 2, 0, 2, 0, 0, 7]]
    driver = Driver(model, monkeypatch)
    rows = [driver.row(i, sequence, 0, len(sequence)) for i, sequence in enumerate(sequences)]
    for step in [rows] if together else [[row] for row in rows]:
        driver.step(step)
    assert driver.worst([truth(model, sequence) for sequence in sequences]) < 1e-5


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_batch_is_capped(rope_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rope: dict[str, object] = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0}
    changes: dict[str, object] = {"rope_parameters": rope}
    if rope_type == "longrope":
        rope.update(
            short_factor=[1.0] * 4,
            long_factor=[4.0] * 4,
            original_max_position_embeddings=32,
            partial_rotary_factor=1.0,
        )
        changes.update(original_max_position_embeddings=32, head_dim=ABSENT)
    model = tiny("phi3" if rope_type == "longrope" else "llama", changes)
    sequences = some_sequences(9, 32, 20)
    expected = [truth(model, sequence) for sequence in sequences]
    driver = Driver(model, monkeypatch)
    assert driver.runner.geometry.max_model_len == (32 if rope_type == "longrope" else 128)
    driver.everything(sequences)
    assert driver.worst(expected) < 1e-5
    # The caller may go beyond, before and after.
    (long,) = some_sequences(100)
    before = truth(model, long)
    driver.step([driver.row(9, sequences[0], 0, 9)])
    assert torch.equal(truth(model, long), before)


# Name of the test: (model type, what differs from GENERIC, every word that its reasons must have).
REFUSED: dict[str, tuple[str, dict[str, object], tuple[str, ...]]] = {
    "alibi-bloom": ("bloom", NO_GQA, ("AttentionInterface",)),
    "alibi-mpt": ("mpt", GPT2, ("AttentionInterface",)),
    "bidirectional": ("bert", NO_GQA, ("not causal",)),
    "chunked": ("llama4_text", {"num_local_experts": 2}, ("chunked_attention",)),
    "convolution": ("lfm2", {"full_attn_idxs": [1]}, ("conv", "1 attention calls for 3 layers", "outside")),
    "differential": ("diffllama", NO_HEAD_DIM, ("6 attention calls for 3 layers", "more than once")),
    "dynamic-mask": ("doge", {}, ("its own attention mask",)),
    "falcon": ("falcon", NO_GQA, ("AttentionInterface",)),
    "offset-positions": ("roberta", dict(NO_GQA, is_decoder=True), ("place in the batch",)),
    "parallel-ssm": (
        "falcon_h1",
        {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8},
        ("outside of attention",),
    ),
    "recurrent": ("mamba", NO_GQA, ("AttentionInterface",)),
    "window-not-told": ("hunyuan_v1_dense", SLIDING, ("window 8", "window None")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    model_type, changes, words = REFUSED[case]
    model = tiny(model_type, changes)
    with pytest.raises(UnsupportedModel) as caught:
        TransformersRunner(model, num_kv_blocks=4)
    for word in words:
        assert word in "; ".join(caught.value.reasons)
    assert type(model).__name__ in str(caught.value)
    assert model.config._attn_implementation == "eager"


def test_refused_encoder_decoder() -> None:
    changes = dict(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, **NO_GQA, intermediate_size=ABSENT)
    model = tiny("t5", dict(changes, num_hidden_layers=ABSENT, hidden_size=ABSENT), AutoModelForSeq2SeqLM)
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        TransformersRunner(model, num_kv_blocks=4)


def test_refused_without_logits() -> None:
    with pytest.raises(UnsupportedModel, match=r"no logits.*causal language model"):
        TransformersRunner(tiny("llama", {}).model, num_kv_blocks=4)


def test_refused_lists_every_reason() -> None:
    model = tiny("llama", {})
    model.config.layer_types = ["sliding_attention", "full_attention", "linear_attention"]
    model.config.sliding_window = 8
    model.model.layers[2] = model.model.layers[1]
    plain = model.model.norm.forward
    model.model.norm.forward = lambda hidden: plain(hidden.cumsum(1))
    with pytest.raises(UnsupportedModel) as caught:
        TransformersRunner(model, num_kv_blocks=4)
    reasons = caught.value.reasons
    for word in ("linear_attention", "more than once", "layer 0 is sliding_attention", "outside of attention"):
        assert any(word in reason for reason in reasons), reasons
    assert len(reasons) == 4


def test_refused_unknown_keyword() -> None:
    model = tiny("llama", {})
    attention = model.model.layers[1].self_attn
    attention.forward = functools.partial(attention.forward, position_bias=torch.zeros(1), block_ids=[3], quiet=None)
    with pytest.raises(UnsupportedModel, match="is given block_ids, position_bias, whose meaning is unknown"):
        TransformersRunner(model, num_kv_blocks=4)


def test_refused_that_cannot_be_copied_or_run() -> None:
    model = tiny("llama", {})
    model.lock = threading.Lock()
    with pytest.raises(UnsupportedModel, match=r"deep-copied.*lock"):
        TransformersRunner(model, num_kv_blocks=4)
    del model.lock

    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("out of order")

    plain = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = broken
    with pytest.raises(UnsupportedModel, match="RuntimeError: out of order"):
        TransformersRunner(model, num_kv_blocks=4)
    model.model.layers[1].mlp.forward = plain
    with pytest.raises(TypeError, match="causal language model"):
        TransformersRunner(torch.nn.Linear(2, 2), num_kv_blocks=4)
    assert model.config._attn_implementation == "eager"
    assert truth(model, [3, 4]).isfinite().all()


def test_the_document_lists_them_all() -> None:
    """docs/supported-models.md is written by tools/supported_models.py."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "supported-models.md").read_text(encoding="utf-8")
    tested, refused = (re.findall(r"^\| (\w[\w.-]*) \|", part, re.M) for part in text.split("\n## ")[1:])
    assert [name for name in tested if name != "model"] == list(FAMILIES)
    assert [name for name in refused if name != "model"] == [model_type for model_type, _, _ in REFUSED.values()]
