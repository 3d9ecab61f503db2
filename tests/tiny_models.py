"""Tiny random models that several files of tests use."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny(family: str = "llama", *, seed: int = 0, **changes: object) -> torch.nn.Module:
    """A model of a family in float32 and eval mode; `changes` are to `COMMON`."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**COMMON, **changes})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
