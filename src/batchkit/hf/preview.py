"""What a model would run with, found out from its configuration alone: nothing is loaded but the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ..errors import UnsupportedModel
from ..types import KVGeometry
from .attention import probe_layers
from .backends import block_size_for, choose_backend
from .backends.reference import ReferenceBackend
from .grammar import Grammars
from .graphs import check_devices
from .kv_pool import block_bytes, free_memory, num_blocks_for
from .loading import default_device
from .runner import eos_token_ids, model_len
from .tokenizer import HFTokenizer

if TYPE_CHECKING:
    from .backends.base import LayerSpec

__all__ = ["Preview", "preview", "without_weights"]


@dataclass(frozen=True, slots=True)
class Preview:
    """What was found.

    Attributes:
        tokenizer: the model's.
        geometry: as the runner's would be. By default the number of blocks depends on the memory that is free at the
            time, so that it is about right.
        attention: the backend that would be chosen, or why nobody knows.
        grammars: checks what structured outputs a request asks for.
    """

    tokenizer: HFTokenizer
    geometry: KVGeometry
    attention: str
    grammars: Grammars


def preview(
    name_or_path: str,
    *,
    device: str | None = None,
    dtype: str = "auto",
    kv_memory: int | str | None = None,
    num_kv_blocks: int | None = None,
    block_size: int | None = None,
    max_model_len: int | None = None,
    max_num_seqs: int = 256,
    attention: str | None = None,
    cuda_graphs: bool = False,
) -> Preview:
    """Look at a model without loading its weights. The arguments are those of `TransformersRunner` and `load_model`.

    Raises:
        UnsupportedModel: its attention cannot be replaced, or not by the backend that is asked for, with every reason
            that shows without weights.
        ValueError: the backend cannot have blocks of this size, or the device no graphs.
        OSError: there is no such model.
    """
    config = AutoConfig.from_pretrained(name_or_path)
    where = torch.device(default_device() if device is None else device)
    if cuda_graphs:
        check_devices({where})
    length = model_len(config, max_model_len)
    model = without_weights(config, dtype)
    try:
        layers = [replace(layer, device=where) for layer in probe_layers(model)]
    except UnsupportedModel:
        raise
    except Exception:  # some models look at values on their way, and there are none
        found = "not known before the model is loaded, nor how much KV memory there will be"
        size = ReferenceBackend.default_block_size if block_size is None else block_size
        num_blocks = max_num_seqs * -(-length // size) if num_kv_blocks is None else num_kv_blocks
    else:
        backend = choose_backend(attention, layers, type(model).__name__, block_size=block_size)
        found, size = backend.name, block_size_for(backend, block_size)
        max_blocks = max_num_seqs * -(-length // size)
        num_blocks = num_blocks_for(
            layers, block_size=size, kv_memory=kv_memory, num_kv_blocks=num_kv_blocks, max_blocks=max_blocks
        )
        if kv_memory is None and num_kv_blocks is None:
            num_blocks = min(num_blocks, _beside_weights(model, layers, size, where, num_blocks))
    geometry = KVGeometry(
        num_blocks=num_blocks,
        block_size=size,
        max_model_len=length,
        vocab_size=model.get_input_embeddings().weight.shape[0],
        eos_token_ids=eos_token_ids(model),
    )
    tokenizer = HFTokenizer(AutoTokenizer.from_pretrained(name_or_path))
    grammars = Grammars(tokenizer, geometry.eos_token_ids, geometry.vocab_size)
    return Preview(tokenizer, geometry, found, grammars)


def without_weights(config: Any, dtype: str) -> Any:
    """The model of a configuration on the meta device: shapes, and no memory for them."""
    stored = {} if dtype == "auto" else {"dtype": dtype}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, **stored).eval()


def _beside_weights(model: Any, layers: list[LayerSpec], size: int, where: torch.device, num_blocks: int) -> int:
    """The default number of blocks once the weights have taken their memory, at least one."""
    free = free_memory(where)
    if free is None:
        return num_blocks
    weights = sum(tensor.numel() * tensor.itemsize for tensor in model.state_dict().values())
    each = sum(block_bytes(layers, size).values())
    return max(1, int(free - weights) // 2 // each)
