"""What a model asks of a device, computed from its configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from batchkit.hf.runner import TransformersRunner
from batchkit.hf.shape import model_shape

OPT_13B = Path(__file__).resolve().parents[2] / "benchmarks" / "models" / "opt-13b"

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 128,
}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 300, "bos_token_id": 1}
GPT2["eos_token_id"] = 1


def written(folder: Path, config: object) -> Path:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_opt_13b_has_the_published_size():
    shape = model_shape(OPT_13B, dtype="float16")
    assert shape.num_params == shape.active_params == 12_853_473_280
    assert shape.kv_bytes_per_token == 2 * 40 * 5120 * 2 == 819_200
    assert shape.attention_width == 40 * 5120
    assert (shape.max_model_len, shape.vocab_size, shape.bytes_per_param) == (2048, 50_272, 2.0)


@pytest.mark.parametrize("config", [LLAMA, MIXTRAL, GPT2], ids=lambda config: config["model_type"])
def test_the_size_is_that_of_the_model_with_weights(tmp_path, config):
    folder = written(tmp_path, config)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    shape = model_shape(folder, dtype="float32")
    assert shape.num_params == sum(parameter.numel() for parameter in model.parameters())
    assert shape.weight_bytes == 4 * shape.num_params
    runner = TransformersRunner(model.eval(), kv_memory=10 * 16 * shape.kv_bytes_per_token)
    assert runner.geometry.num_blocks == 10
    assert shape.vocab_size == runner.geometry.vocab_size
    assert shape.max_model_len == runner.geometry.max_model_len
    runner.close()


def test_half_precision_halves_weights_and_kv(tmp_path):
    folder = written(tmp_path, LLAMA)
    full, half = model_shape(folder, dtype="float32"), model_shape(folder / "config.json", dtype="bfloat16")
    assert half.weight_bytes * 2 == full.weight_bytes
    assert half.kv_bytes_per_token * 2 == full.kv_bytes_per_token
    assert half.name == full.name == tmp_path.name


def test_a_token_goes_through_a_part_of_the_experts(tmp_path):
    shape = model_shape(written(tmp_path, MIXTRAL))
    experts = 3 * 8 * 3 * 64 * 96
    assert shape.num_params - shape.active_params == experts - experts * 2 // 8


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "no field 'model_type'"),
        ([], "no field 'model_type'"),
        ({"model_type": "nonesuch"}, "knows no model_type 'nonesuch'"),
        ({"model_type": "llama", "num_hidden_layers": 3}, "no field 'hidden_size'"),
        ({"model_type": "gpt2", "n_embd": 64}, "no field 'n_layer'"),
    ],
)
def test_a_field_that_is_missing_is_named(tmp_path, config, said):
    with pytest.raises(ValueError, match=said):
        model_shape(written(tmp_path, config))


def test_what_is_no_configuration_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(OSError, match="is no JSON"):
        model_shape(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no"):
        model_shape(tmp_path / "missing")
    with pytest.raises(ValueError, match="dtype must be"):
        model_shape(OPT_13B, dtype="half-ish")
