"""What a model asks of a device, from its configuration alone: nothing is loaded."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from ..costs import ModelShape
from .attention import probe_layers
from .backends.base import LayerSpec
from .kv_pool import block_bytes
from .preview import without_weights
from .runner import model_len

__all__ = ["model_shape"]

# Configurations have defaults for everything; without these two of its own, one would describe another model.
_NEEDED = ("hidden_size", "num_hidden_layers")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")


def model_shape(name_or_path: str | os.PathLike[str], *, dtype: str = "auto") -> ModelShape:
    """Compute a model's parameters, KV bytes and widths from its configuration.

    The model is made without memory for its weights, so that what is counted is what transformers would load. KV heads
    and their widths are those that its attention is called with. Of a mixture of experts a token goes through the
    routed experts' share that the configuration names, and through everything else.

    Args:
        name_or_path: a folder with a config.json, such a file, or a name on the hub.
        dtype: of weights and KV, as a name of torch's; "auto": the configuration's own.

    Raises:
        OSError: there is no such file, or it is no JSON.
        ValueError: it lacks a field that is needed, or is of an unknown kind of model, or there is no such dtype.
    """
    path = os.fspath(name_or_path)
    if os.path.isdir(path):
        path = os.path.join(path, "config.json")
    if os.path.isfile(path):
        _check_fields(path)
    elif path.endswith(".json") or os.path.isabs(path) or path.startswith("."):
        raise FileNotFoundError(f"there is no {path}")
    if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f'dtype must be "auto" or a name such as "float16", got {dtype!r}')
    config = AutoConfig.from_pretrained(path)
    text = config.get_text_config(decoder=True)
    model = without_weights(config, dtype)
    parameters = dict(model.named_parameters())
    num_params = sum(parameter.numel() for parameter in parameters.values())
    routed = sum(parameter.numel() for name, parameter in parameters.items() if ".experts." in name)
    layers = _layers(model)
    heads = text.num_attention_heads
    if layers:
        kv_bytes = sum(block_bytes(layers, 1).values())
        width = sum(layer.num_heads * (layer.key_dim + layer.value_dim) // 2 for layer in layers)
    else:
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        kv_bytes = 2 * text.num_hidden_layers * kv_heads * head_dim * model.dtype.itemsize
        width = text.num_hidden_layers * heads * head_dim
    return ModelShape(
        name=Path(path).parent.name if path.endswith("config.json") else path,
        num_params=num_params,
        active_params=num_params - routed + (round(routed * _share_of_experts(text)) if routed else 0),
        bytes_per_param=sum(p.numel() * p.itemsize for p in parameters.values()) / num_params,
        kv_bytes_per_token=kv_bytes,
        attention_width=width,
        max_model_len=model_len(config),
        vocab_size=model.get_input_embeddings().weight.shape[0],
    )


def _check_fields(path: str) -> None:
    """Refuse a configuration that does not say how large its model is."""
    try:
        with open(path, encoding="utf-8") as file:
            raw = json.load(file)
    except ValueError as error:
        raise OSError(f"{path} is no JSON: {error}") from None
    if not isinstance(raw, dict) or not isinstance(raw.get("model_type"), str):
        raise ValueError(f"{path} has no field 'model_type'")
    try:
        kind = AutoConfig.for_model(raw["model_type"])
    except ValueError:
        raise ValueError(f"{path}: transformers knows no model_type {raw['model_type']!r}") from None
    own = raw | next((raw[name] for name in ("text_config", "llm_config") if isinstance(raw.get(name), dict)), {})
    for name in _NEEDED:
        if own.get(name) is None and own.get(kind.attribute_map.get(name, name)) is None:
            raise ValueError(f"{path} has no field {kind.attribute_map.get(name, name)!r}")


def _layers(model: PreTrainedModel) -> list[LayerSpec]:
    """The attention layers by the probe; none where it needs weights, or refuses the model."""
    try:
        return probe_layers(model)
    except Exception:  # UnsupportedModel; or what models raise that look at values on their way, and there are none
        return []


def _share_of_experts(text: Any) -> float:
    """The part of its routed experts that a token goes through."""
    count, chosen = (
        next((value for name in names if (value := getattr(text, name, None))), None)
        for names in (_EXPERTS, _EXPERTS_PER_TOKEN)
    )
    if count is None or chosen is None:
        raise ValueError(
            f"{type(text).__name__} has experts, and does not say how many or how many a token goes through"
        )
    return float(chosen) / float(count)
