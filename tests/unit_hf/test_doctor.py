"""`batchkit doctor`, and what `generate --dry-run` finds out about a model without its weights."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import json
import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from typing_extensions import override

from batchkit import cli
from batchkit.errors import OutOfKVMemory, UnsupportedModel
from batchkit.hf import kv_pool
from batchkit.hf import preview as preview_module
from batchkit.hf.backends.cpu import CpuBackend
from batchkit.hf.backends.reference import ReferenceBackend
from batchkit.hf.doctor import examine
from batchkit.hf.preview import preview
from batchkit.hf.runner import TransformersRunner
from tiny_models import tiny

WINDOW = {"sliding_window": 8}
MIXED = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}


def saved(folder: Path, family: str = "llama", **changes: object) -> str:
    """A model's folder, with a tokenizer of words w0, w1, ..."""
    tiny(family, **changes).save_pretrained(folder)
    inner = Tokenizer(WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    inner.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w0").save_pretrained(folder)
    return str(folder)


class Deaf(ReferenceBackend):
    """Forgets about attention in the steps that `when` says."""

    def __init__(self, when) -> None:
        super().__init__()
        self.when = when

    @override
    def attend(self, layer, kv, plan, query, key, value, *, scaling, sinks):
        if self.when(plan.batch):
            return value.repeat_interleave(layer.num_heads // layer.num_kv_heads, 1)
        return super().attend(layer, kv, plan, query, key, value, scaling=scaling, sinks=sinks)


@pytest.mark.parametrize(("family", "changes"), [("llama", {}), ("gemma2", MIXED), ("mistral", WINDOW)])
def test_a_sound_model_comes_out_right(family, changes):
    model = tiny(family, **changes)
    found = examine(model)
    assert found.is_right
    assert found.worst < 1e-4  # well below what is allowed
    assert found.num_same == found.num_compared > 20
    assert model.config._attn_implementation != "batchkit"
    assert ("a window of 8" in found.layers) is bool(changes)
    assert dict(found.lines())["verdict"] == "it comes out right"


def test_another_seed_is_another_schedule():
    model = tiny()
    seen = {(found.num_compared, found.worst) for found in (examine(model, seed=seed) for seed in range(4))}
    assert len(seen) > 1
    assert examine(model, seed=1) == examine(model, seed=1)


@pytest.mark.parametrize(
    "when",
    [
        lambda batch: True,
        lambda batch: batch.num_tokens == 1,  # in decoding only
        lambda batch: bool((batch.query_lens < batch.kv_lens).any() and (batch.query_lens > 1).any()),  # second pieces
    ],
)
def test_a_backend_that_computes_wrong_at_times_is_found(when):
    found = examine(tiny(), attention=Deaf(when))
    assert not found.is_right
    assert found.worst > 2 * found.allowed
    assert "WRONG" in dict(found.lines())["verdict"]


def test_logits_that_are_no_numbers_are_not_right():
    model = tiny()
    model.lm_head.weight.data[5] = float("nan")
    assert not examine(model).is_right


def test_half_precision_is_judged_more_kindly():
    assert examine(tiny().bfloat16()).is_right
    assert not examine(tiny().bfloat16(), attention=Deaf(lambda batch: True)).worst < 0.05


def test_short_models_are_examined_up_to_their_length():
    found = examine(tiny(max_position_embeddings=9))
    assert found.is_right
    assert found.at[1] in (5, 9)


def test_the_command_prints_what_it_found(tmp_path, capsys):
    assert cli.main(["doctor", saved(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert "LlamaForCausalLM, float32, cpu" in shown.out and "it comes out right" in shown.out
    assert "2 with 4 heads of 8 over 2 KV heads" in shown.out
    assert cli.main(["doctor", str(tmp_path), "--dtype", "bfloat16", "--seed", "3"]) == 0
    assert "bfloat16" in capsys.readouterr().out


def test_the_command_prints_every_reason_of_a_refusal(tmp_path, capsys):
    changes = {"hidden_size": 64, "n_head": 4, "n_layer": 2}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("bloom", vocab_size=97, **changes)).save_pretrained(tmp_path)
    assert cli.main(["doctor", str(tmp_path)]) == 1
    first, *reasons = capsys.readouterr().out.splitlines()
    assert first == "BloomForCausalLM is refused:"
    assert any("AttentionInterface" in reason for reason in reasons)


def test_the_command_over_what_is_no_model(tmp_path, capsys):
    assert cli.main(["doctor", str(tmp_path / "nothing")]) == 1
    assert "there is no folder" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert cli.main(["doctor", str(tmp_path)]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("batchkit: cannot load the model") and shown.count("\n") == 1


# ----------------------------------------------------------------------------------------------- without weights


@pytest.mark.parametrize(("family", "changes"), [("llama", {}), ("gemma2", MIXED)])
@pytest.mark.parametrize(
    "options",
    [
        {"num_kv_blocks": 9},
        {"kv_memory": "1MB", "block_size": 8},
        {"max_num_seqs": 5, "max_model_len": 100},
        {"kv_memory": 100_000, "dtype": "bfloat16"},
    ],
)
def test_the_geometry_is_that_of_the_real_runner(tmp_path, family, changes, options):
    path = saved(tmp_path, family, **changes)
    found = preview(path, device="cpu", **options)
    dtype = options.pop("dtype", "float32")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    runner = TransformersRunner(model, **options)
    assert found.geometry == runner.geometry
    assert found.attention == runner._backend.name
    runner.close()


def test_the_weights_take_their_share_of_the_memory(tmp_path, monkeypatch):
    path = saved(tmp_path)
    weights = sum(tensor.numel() for tensor in tiny().state_dict().values()) * 4
    each = 2 * 16 * 2 * (8 + 8) * 4
    for module in (preview_module, kv_pool):
        monkeypatch.setattr(module, "free_memory", lambda device: weights + 20 * each)
    assert preview(path, device="cpu").geometry.num_blocks == 10


def test_what_is_refused_without_weights_is_refused(tmp_path):
    path = saved(tmp_path, "llama4_text", num_local_experts=2)
    with pytest.raises(UnsupportedModel):
        preview(path, device="cpu")
    with pytest.raises(OutOfKVMemory):
        preview(saved(tmp_path / "other"), device="cpu", kv_memory=10)
    with pytest.raises(ValueError, match="cuda_graphs needs the whole model on one CUDA device, and it is on cpu"):
        preview(saved(tmp_path / "third"), device="cpu", cuda_graphs=True)


def test_a_model_that_needs_its_weights_is_not_known(tmp_path, monkeypatch):
    def look(model):
        raise RuntimeError("Tensor.item() cannot be called on meta tensors")

    path = saved(tmp_path)
    monkeypatch.setattr(preview_module, "probe_layers", look)
    found = preview(path, device="cpu", max_num_seqs=3)
    assert found.attention.startswith("not known")
    assert (found.geometry.num_blocks, found.geometry.vocab_size) == (3 * 8, 97)


def test_a_dry_run_of_the_command(tmp_path, capsys):
    path = saved(tmp_path / "model")
    source = tmp_path / "in.jsonl"
    no_grammar = {"body": "w5", "params": {"structured_outputs": {"regex": "("}}}
    rows = [{"body": "w5 w6"}, {"body": "w7 " * 200}, {"other": "w8"}, no_grammar]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--template", "w1 {body}", "--max-tokens", "8", "--num-kv-blocks", "50", "--max-num-seqs", "7"]
    assert cli.main(["generate", str(source), "--dry-run", "--model", path, *options]) == 3
    shown, said = capsys.readouterr()
    for part in ("rows              4\n", "bad rows          2\n", "too long          1\n", "min 2, ", "max 201"):
        assert part in shown
    assert "line 4: structured_outputs: llguidance cannot use this tokenizer" in said
    for part in (
        "seats             7\n",
        "KV cache          50 blocks of 16 tokens\n",
        f"attention         {'reference' if CpuBackend().unsupported_reasons([]) else 'cpu'}\n",
    ):
        assert part in shown


def test_env_names_the_device_and_the_backend(capsys):
    assert cli.main(["env"]) == 0
    shown = capsys.readouterr().out
    assert f"torch             {torch.__version__.partition('+')[0]}" in shown
    assert "default device" in shown and "attention         cpu on CPUs, xformers, else varlen on CUDA devices" in shown
    assert re.search(r"^CPU kernels       (compiled for AVX\w+( and its bfloat16)?, in /|none: )", shown, re.MULTILINE)
    assert "cpu, " in shown
