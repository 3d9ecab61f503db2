"""The attention function registered with transformers, the structural clone, and the probe that binds a model.

A model is run unchanged; only its attention goes elsewhere. `attention_forward` is registered under `ATTENTION_NAME`
with transformers' documented `AttentionInterface`, and every call of the model carries the step's context as one more
keyword, ``batchkit=...``, which the model's layers pass on. So there is no global state, and a model may be bound by
any number of runners. A name that is unknown to the mask interface gets no mask built.

What a model really does is found out by running it, since its flags say little (`bind`).
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from ..errors import UnsupportedModel
from .backends.base import LayerSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from .backends.base import AttentionBackend
    from .fused import Fused
    from .kv_pool import KVPool

__all__ = [
    "ATTENTION_NAME",
    "AttentionContext",
    "BoundModel",
    "Recorder",
    "StepContext",
    "attention_forward",
    "bind",
    "probe_layers",
    "structural_clone",
]

ATTENTION_NAME = "batchkit"
"""The name of `attention_forward` in transformers' `AttentionInterface`."""

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})

# Keywords that models hand to every attention function and that change nothing about its result here: what is not
# computed (weights, caches), and what was applied before (positions).
_HARMLESS = frozenset(
    {
        "cache_position",
        "layer_idx",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


class _NoContext(RuntimeError):
    pass


class AttentionContext(Protocol):
    """What is passed through a model's forward as ``batchkit=``, and gets every attention call."""

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None,
        scaling: float | None,
        sliding_window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
        others: Mapping[str, Any],
    ) -> torch.Tensor:
        """Heads first, as transformers has it: [1, heads, T, width] in, [1, T, heads, value width] out, contiguous."""
        ...

    def attend_tokens(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Tokens first: [T, heads, width] in, [1, T, heads, value width] out, contiguous."""
        heads_first = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        return self.attend(
            module,
            *heads_first,
            attention_mask=None,
            scaling=scaling,
            sliding_window=None,
            softcap=None,
            sinks=sinks,
            others={},
        )


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    batchkit: AttentionContext | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """One attention call of a bound model, handed to the context that came along.

    Args:
        module: the attention layer.
        query: [1, heads, T, width].
        key: [1, KV heads, T, width].
        value: [1, KV heads, T, value width].
        attention_mask: a bound model builds none.
        batchkit: the step's context.
        scaling: factor of the scores.
        sliding_window: how many of the latest positions a query sees.
        softcap: bound of the scores.
        s_aux: attention sinks, [heads].
        dropout: ignored; a bound model is in eval mode.
        others: judged by the probe.

    Returns:
        The output, [1, T, heads, value width], and None in place of the weights.

    Raises:
        RuntimeError: the model was called by something else than its runner.
    """
    if batchkit is None:
        raise _NoContext("no context came with this attention call: a model bound by batchkit is called by its runner")
    out = batchkit.attend(
        module,
        query,
        key,
        value,
        attention_mask=attention_mask,
        scaling=scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        others=others,
    )
    return out, None


AttentionInterface.register(ATTENTION_NAME, attention_forward)


class StepContext(AttentionContext):
    """The context of one step: writes each layer's K and V to the pool and lets the backend attend.

    Args:
        layers: what the probe found.
        pool: the KV memory.
        backend: computes attention.
        plan: the backend's plan of this step.
        slots: [T], where each token's K and V go, on any device.
    """

    def __init__(
        self,
        layers: Mapping[nn.Module, LayerSpec],
        pool: KVPool,
        backend: AttentionBackend,
        plan: Any,
        slots: torch.Tensor,
    ) -> None:
        self._layers = layers
        self._pool = pool
        self._backend = backend
        self._plan = plan
        self._slots = {slots.device: slots}

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None,
        scaling: float | None,
        sliding_window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
        others: Mapping[str, Any],
    ) -> torch.Tensor:
        """Write K and V, then attend. Window and soft cap are those that the probe saw."""
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        return self.attend_tokens(module, q, k, v, scaling=scaling, sinks=sinks)

    def attend_tokens(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The same."""
        layer = self._layers[module]
        kv = self._pool.layers[layer.index]
        slots = self._slots.get(key.device)
        if slots is None:
            slots = self._slots[key.device] = next(iter(self._slots.values())).to(key.device)
        self._backend.write(kv, slots, key, value)
        out = self._backend.attend(layer, kv, self._plan, query, key, value, scaling=scaling, sinks=sinks)
        return out.contiguous()[None]  # some models view it


@dataclass(frozen=True, slots=True)
class _Call:
    """One attention call as the probe recorded it."""

    module: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scaling: float | None
    has_mask: bool
    window: int | None
    softcap: float | None
    has_sinks: bool
    is_causal: bool
    unknown: tuple[str, ...]


class Recorder(AttentionContext):
    """Records calls, and lets each token attend to itself alone.

    Attributes:
        calls: those so far.
    """

    def __init__(self) -> None:
        self.calls: list[_Call] = []

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None,
        scaling: float | None,
        sliding_window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
        others: Mapping[str, Any],
    ) -> torch.Tensor:
        """As every context; nothing but the values is used."""
        unknown = [
            name for name, value in others.items() if value is not None and value is not False and name not in _HARMLESS
        ]
        is_causal = others.get("is_causal")
        self.calls.append(
            _Call(
                module=module,
                query=query,
                key=key,
                value=value,
                scaling=scaling,
                has_mask=attention_mask is not None,
                window=sliding_window,
                softcap=softcap,
                has_sinks=sinks is not None,
                is_causal=bool(getattr(module, "is_causal", True) if is_causal is None else is_causal),
                unknown=tuple(name for name in unknown if name != "is_causal"),
            )
        )
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2).contiguous()


class _Causal(AttentionContext):
    """Lets each token attend to those of its pass that come before it, and to itself."""

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
        **others: Any,
    ) -> torch.Tensor:
        """As every context; nothing but queries, keys, values and scaling is used."""
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous()


@dataclass(frozen=True, slots=True)
class BoundModel:
    """A clone that is ready to run.

    Attributes:
        model: the clone, in eval mode. Its weights are the caller's.
        layers: the attention layers, in the order in which they run.
        num_logits: width of the logits.
        keeps_logits: whether the model computes the logits of chosen tokens only.
        fused: which of its modules are computed by kernels of batchkit; None: not tried, or it came out otherwise.
    """

    model: PreTrainedModel
    layers: Mapping[nn.Module, LayerSpec]
    num_logits: int
    keeps_logits: bool
    fused: Fused | None = None

    def run_alone(self) -> torch.Tensor:
        """Logits of two tokens, the second of which sees the first, [1, 2, V]: without a pool, window and soft cap."""
        tokens = list(_two_tokens(self.model.config.get_text_config(decoder=True)))
        logits = _probe(self.model, tokens, _Causal())
        assert logits is not None  # as in `bind`
        return logits


def structural_clone(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model's structure, sharing its weights.

    Modules, configuration and mode are the clone's own; parameters and the buffers of the state dict are the very same
    tensors, so that a training step on the original is seen by the clone, and no memory is used twice. Buffers outside
    the state dict are scratch that some models write in place (rotary frequencies): they are copied.

    Forward hooks are kept, since they may be part of what the model computes; the hooks themselves are shared.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        scratch = module._non_persistent_buffers_set
        shared = list(module.parameters(recurse=False))
        shared += [b for name, b in module.named_buffers(recurse=False) if name not in scratch]
        # A weight derived from others, and held as a plain attribute, cannot be deep-copied while it has a history.
        shared += [t for t in vars(module).values() if isinstance(t, torch.Tensor) and t.grad_fn is not None]
        memo.update((id(tensor), tensor) for tensor in shared)
        for kind in ("forward", "forward_pre", "backward", "backward_pre"):
            memo.update((id(hook), hook) for hook in vars(module)[f"_{kind}_hooks"].values())
    clone: PreTrainedModel = copy.deepcopy(model, memo)
    return clone.eval()


def bind(model: PreTrainedModel) -> BoundModel:
    """Clone a model and find out by running it whether it can be computed right, and how.

    Two forward passes of two tokens in which every token attends to itself alone: one plain, one with the tokens
    swapped and their positions given. They show heads, widths, device and window of each layer, and refuse a model
    whose attention does not all go through `attention_forward`, or in which tokens meet anywhere else.

    The caller's model is not touched, whatever the outcome.

    Raises:
        TypeError: not a model of transformers.
        UnsupportedModel: with every reason found.
    """
    if not callable(getattr(model, "set_attn_implementation", None)) or not hasattr(model, "config"):
        raise TypeError(f"expected a causal language model of transformers, got {type(model).__name__}")
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(name, ["it is an encoder-decoder model"])
    try:
        clone = structural_clone(model)
    except Exception as error:
        raise UnsupportedModel(name, [f"its module tree cannot be deep-copied ({_line(error)})"]) from error
    config = clone.config
    config.return_dict = True
    config.output_attentions = config.output_hidden_states = False

    reasons: list[str] = []
    plain, swapped = Recorder(), Recorder()
    try:
        text = config.get_text_config(decoder=True)
        reasons += _unknown_layers(text)
        clone.set_attn_implementation(ATTENTION_NAME)
        first, second = _two_tokens(text)
        logits = _probe(clone, [first, second], plain)
        # Across several devices the model would index with a tensor that lies on another one.
        one_device = len({call.key.device for call in plain.calls}) == 1
        keep = {"logits_to_keep": [1]} if one_device else {}
        other = _probe(clone, [second, first], swapped, position_ids=[1, 0], **keep)
    except _NoContext as error:
        reasons.append("its layers do not pass the context on to their attention")
        raise UnsupportedModel(name, reasons) from error
    except Exception as error:
        reasons.append(f"its forward pass fails when its attention is replaced ({_line(error)})")
        raise UnsupportedModel(name, reasons) from error

    reasons += _unsupported(plain.calls, text)
    if logits is None or other is None:
        reasons.append("it gives no logits: it must be loaded as a causal language model")
        raise UnsupportedModel(name, reasons)
    if logits.shape[:2] != (1, 2) or other.shape[:2] not in ((1, 1), (1, 2)):
        reasons.append(f"its logits have the shape {tuple(logits.shape)}, not one row per token")
    if plain.calls and not _is_swapped(logits, other, plain.calls, swapped.calls):
        reasons.append("tokens meet outside of attention, or their place in the batch matters")
    if reasons:
        raise UnsupportedModel(name, reasons)
    layers = {call.module: _spec(index, call, text) for index, call in enumerate(plain.calls)}
    return BoundModel(model=clone, layers=layers, num_logits=logits.shape[-1], keeps_logits=other.shape[1] == 1)


def probe_layers(model: PreTrainedModel) -> list[LayerSpec]:
    """The attention layers of a model that need not have weights, by the first of the two passes of `bind`.

    What it refuses, `bind` refuses too. The model is changed, and good for nothing else after that.

    Raises:
        UnsupportedModel: with the reasons that show without weights.
        Whatever the model raises where it needs them.
    """
    model.set_attn_implementation(ATTENTION_NAME)
    text = model.config.get_text_config(decoder=True)
    recorder = Recorder()
    reasons = _unknown_layers(text)
    if not reasons:
        _probe(model, list(_two_tokens(text)), recorder)
        reasons = _unsupported(recorder.calls, text)
    if reasons:
        raise UnsupportedModel(type(model).__name__, reasons)
    return [_spec(index, call, text) for index, call in enumerate(recorder.calls)]


def _probe(
    clone: PreTrainedModel, token_ids: list[int], context: AttentionContext, **numbers: list[int]
) -> torch.Tensor | None:
    """Logits of one forward pass; [1, tokens, V] unless ``logits_to_keep`` is heeded. None if the model has none."""
    device = clone.get_input_embeddings().weight.device
    plain = contextlib.nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)
    with torch.inference_mode(), plain:
        tensors = {name: torch.tensor(value, device=device) for name, value in numbers.items()}
        if "position_ids" in tensors:
            tensors["position_ids"] = tensors["position_ids"][None]
        ids = torch.tensor([token_ids], device=device)
        output = clone(input_ids=ids, use_cache=False, batchkit=context, **tensors)
    logits: torch.Tensor | None = getattr(output, "logits", None)
    return logits


def _two_tokens(text: Any) -> tuple[int, int]:
    """Two ordinary token ids."""
    special: set[Any] = set()
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        value = getattr(text, name, None)
        special.update(value if isinstance(value, (list, tuple)) else [value])
    ids = [token for token in range(min(text.vocab_size, 2 + len(special))) if token not in special]
    return (ids[0], ids[1]) if len(ids) > 1 else (0, text.vocab_size - 1)


def _unknown_layers(text: Any) -> list[str]:
    types = set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES
    return [f"layer types {', '.join(sorted(types))} are not full or sliding attention"] if types else []


def _unsupported(calls: Sequence[_Call], text: Any) -> list[str]:
    if not calls:
        return ["no attention call brought the context: its attention does not go through AttentionInterface"]
    reasons = []
    if len(calls) != text.num_hidden_layers:
        reasons.append(f"{len(calls)} attention calls for {text.num_hidden_layers} layers")
    if len({call.module for call in calls}) != len(calls):
        reasons.append("an attention layer is called more than once in a forward pass")
    if any(call.has_mask for call in calls):
        reasons.append("it builds its own attention mask")
    unknown = sorted({name for call in calls for name in call.unknown})
    if unknown:
        reasons.append(f"its attention is given {', '.join(unknown)}, whose meaning is unknown")
    if not all(call.is_causal for call in calls):
        reasons.append("its attention is not causal")
    for call in calls:
        q, k, v = (tuple(tensor.shape) for tensor in (call.query, call.key, call.value))
        fits = all(len(shape) == 4 and shape[0] == 1 and shape[2] == 2 for shape in (q, k, v))
        if not fits or q[3] != k[3] or k[1] != v[1] or q[1] % k[1]:
            reasons.append(f"query, key and value have the shapes {q}, {k} and {v}")
            break
    window = _window(getattr(text, "sliding_window", None), text)
    types = getattr(text, "layer_types", None)
    if types is None:
        types = ["full_attention" if window is None else "sliding_attention"] * len(calls)
    for index, (call, kind) in enumerate(zip(calls, types, strict=False)):
        expected = window if kind == "sliding_attention" else None
        given = _window(call.window, text)
        if given != expected:
            reasons.append(f"layer {index} is {kind} with window {expected}, but its attention is given window {given}")
            break
    return reasons


def _window(window: int | None, text: Any) -> int | None:
    """A window, or None where it cannot hide anything."""
    limit = getattr(text, "max_position_embeddings", None)
    return None if window is None or (limit is not None and window >= limit) else window


def _is_swapped(logits: torch.Tensor, other: torch.Tensor, calls: Sequence[_Call], swapped: Sequence[_Call]) -> bool:
    """Whether swapping the tokens, and telling their positions, swapped all that they gave and changed nothing else."""
    # Token 0 of the plain pass is the last of the other one, which is also the one whose logits were kept.
    return (
        len(calls) == len(swapped)
        and _is_close(logits[:, :1], other[:, -1:], 1e-3, 5e-2)
        and all(
            _is_close(a, b.flip(2), 2e-5, 1e-2)
            for one, two in zip(calls, swapped, strict=True)
            for a, b in ((one.query, two.query), (one.key, two.key), (one.value, two.value))
            if a.dim() == b.dim() == 4
        )
    )


def _is_close(a: torch.Tensor, b: torch.Tensor, single: float, half: float) -> bool:
    """Equal but for what the order of rows in a matrix product may change, as a part of the largest entry.

    The order of two rows hardly ever changes a bit; the logits of one row and of two may come from different kernels.
    """
    if a.shape != b.shape:
        return False
    part = single if a.dtype in (torch.float32, torch.float64) else half
    a, b = a.cpu().double().nan_to_num(), b.cpu().double().nan_to_num()
    return float((a - b).abs().max()) <= part * float(a.abs().max())


def _spec(index: int, call: _Call, text: Any) -> LayerSpec:
    return LayerSpec(
        index=index,
        num_heads=call.query.shape[1],
        num_kv_heads=call.key.shape[1],
        key_dim=call.key.shape[3],
        value_dim=call.value.shape[3],
        dtype=call.key.dtype,
        device=call.key.device,
        window=_window(call.window, text),
        softcap=call.softcap or None,
        has_sinks=call.has_sinks,
    )


def _line(error: BaseException) -> str:
    text = str(error).strip().split("\n", 1)[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
