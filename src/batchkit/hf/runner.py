"""Runs a causal language model of transformers over the paged KV pool."""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from typing_extensions import override

from ..errors import EngineClosed, RunnerOutOfMemory
from ..runner import ModelRunner
from ..sizes import parse_bytes
from ..types import KVGeometry, RowResult, SamplerOutput
from . import profiling
from .attention import StepContext, bind
from .backends import block_size_for, choose_backend
from .backends.base import to_device
from .backends.native import BuildError
from .batch import BatchBuilder
from .decoder import DecoderLayer
from .fused import optimized
from .grammar import Grammars
from .graphs import DecodeGraphs, check_devices
from .kv_pool import KVPool, block_bytes, num_blocks_for
from .layer_kernels import best
from .packing import is_given_up, pack_again, unpack
from .sampler import Sampler
from .scoring import passes, score, scored_positions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from transformers import PreTrainedModel

    from ..text import Tokenizer
    from ..types import BlockCopy, Request, ScheduledSequence, SchedulerOutput
    from .attention import BoundModel
    from .backends.base import AttentionBackend, LayerSpec
    from .batch import Batch, IntArray
    from .fused import PackWeights

logger = logging.getLogger("batchkit")

__all__ = ["TransformersRunner", "eos_token_ids", "model_len"]

_MAX_SCORED = 1 << 25
"""The most logits that one forward pass gives for log-probabilities of prompts: 128 MiB in float32."""


class TransformersRunner(ModelRunner):
    """Any causal language model of transformers that passes the probe (`batchkit.hf.attention.bind`).

    The caller's model is not taken over: the runner has a clone of its structure that shares its weights. The original
    keeps its attention, mode, configuration, hooks and gradients, and can be run, trained and saved at any time, though
    not from another thread during a step. Weights that the caller changes in place are used from the next step on.
    Forward hooks that the model has when it is bound run in the clone too, since they may shape its output.

    Args:
        model: a model of transformers.
        kv_memory: KV memory on the device, in bytes or as text such as ``"2GiB"``. Default: the smaller of half the
            memory that is free and what `max_num_seqs` sequences of full length can use. It is not touched before use.
            On CUDA devices the largest steps are run first, and what they take is not counted as free.
        num_kv_blocks: the number of KV blocks, instead of `kv_memory`.
        block_size: tokens per KV block; by default what suits the backend, 16 for the reference. One that is given
            rules out backends that cannot have it.
        max_model_len: the most tokens of prompt and output together; at most, and by default, what the model can take
            (`model_len`).
        max_num_seqs: sequences that are expected to run at once; only the default of `kv_memory` depends on it, and
            which steps are captured.
        max_tokens_per_step: tokens that are expected in the largest step, which only the default of `kv_memory` depends
            on.
        swap_memory: KV memory on the host for swapping, in bytes or as text. Default: none.
        attention: a backend, or its name: ``"xformers"``, ``"varlen"``, ``"cpu"`` or ``"reference"``. Default: the
            first of those for the model's device that computes its layers right, by trial, else the reference.
        cuda_graphs: compute decode steps by CUDA graphs (`batchkit.hf.graphs`). What cannot be captured is computed
            without, and a warning says why. A model's forward hooks run when a graph is captured, and not with it; and
            weights may change in place, but new memory of theirs is not found before `weights_changed`.
        optimize: on CPUs, compute layers by kernels of our own, where these give the same (`batchkit.hf.fused`).
        pack_weights: whether linear layers that such kernels compute have their weights in the order of the kernels,
            which is faster (`batchkit.hf.packing`). ``"copy"``: beside the model's, which takes as much memory again,
            and follows a change of those only at `weights_changed`. ``"move"``: in their place; the model must not be
            used for anything else before `close`, and its weights cannot change. None: they stay as they are.
        tokenizer: for structured outputs, which need an `HFTokenizer`; other requests never need one here.

    Raises:
        UnsupportedModel: the model cannot be computed right, with every reason.
        OutOfKVMemory: not one KV block fits, or the memory cannot be had.
        ValueError, TypeError: an argument that makes no sense, graphs for a model that is not on one CUDA device, or a
            model whose weights another engine has.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        kv_memory: int | str | None = None,
        num_kv_blocks: int | None = None,
        block_size: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        swap_memory: int | str | None = None,
        max_tokens_per_step: int = 2048,
        attention: AttentionBackend | str | None = None,
        cuda_graphs: bool = False,
        optimize: bool = True,
        pack_weights: PackWeights | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        if pack_weights not in (None, "copy", "move"):
            raise ValueError(f'pack_weights must be None, "copy" or "move", got {pack_weights!r}')
        for name, flag in (("cuda_graphs", cuda_graphs), ("optimize", optimize)):
            if not isinstance(flag, bool):
                raise TypeError(f"{name} must be True or False, got {flag!r}")
        for name, value in (
            ("block_size", 1 if block_size is None else block_size),
            ("max_num_seqs", max_num_seqs),
            ("max_tokens_per_step", max_tokens_per_step),
        ):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an integer, got {value!r}")
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if any(map(is_given_up, model.parameters() if hasattr(model, "parameters") else ())):
            raise ValueError('the weights of this model have been moved into another engine, by pack_weights="move"')
        bound = bind(model)
        self._caller = weakref.ref(model)
        with _whole_on_error(bound.model):
            if optimize and not cuda_graphs:
                bound = _optimized(bound, pack_weights)
            layers = list(bound.layers.values())
            length = model_len(bound.model.config, max_model_len)
            backend = choose_backend(attention, layers, type(model).__name__, block_size=block_size)
            size = block_size_for(backend, block_size)
            embeddings = bound.model.get_input_embeddings()
            devices = {layer.device for layer in layers} | {embeddings.weight.device}
            if cuda_graphs:
                check_devices(devices)
            self._pool: KVPool | None = None
            self._bound: BoundModel | None = bound
            self._backend: AttentionBackend | None = backend
            self._device: torch.device = embeddings.weight.device
            self._builder = BatchBuilder(size)
            eos = eos_token_ids(bound.model)
            self._grammars = Grammars(tokenizer, eos, bound.num_logits)
            self._sampler = Sampler(self._grammars) if bound.fused is None else Sampler(self._grammars, best)
            self._graphs: DecodeGraphs | None = None

            sized = partial(num_blocks_for, layers, block_size=size, kv_memory=kv_memory, num_kv_blocks=num_kv_blocks)
            geometry = partial(
                KVGeometry,
                block_size=size,
                max_model_len=length,
                vocab_size=min(bound.num_logits, embeddings.weight.shape[0]),
                eos_token_ids=eos,
            )
            per_sequence = -(-length // size)
            taken: Mapping[torch.device, int] = {}
            fits = 0
            if (
                kv_memory is None
                and num_kv_blocks is None
                and all(device.type in profiling.DEVICES for device in devices)
            ):
                torch.cuda.empty_cache()  # what torch keeps of loading the model is free as well
                # Into the pool of one sequence, which all rows share.
                self._hold(layers, geometry(num_blocks=sized(max_blocks=per_sequence)))
                taken = self._taken_by_steps(
                    max_tokens=max(max_tokens_per_step, max_num_seqs), max_rows=max_num_seqs, has_graphs=cuda_graphs
                )
                fits = self._geometry.num_blocks
                self.drop_caches()
                self._pool = None
                torch.cuda.empty_cache()  # what it held is free, and torch would keep it
            each = sum(block_bytes(layers, size).values())
            host_blocks = 0 if swap_memory is None else parse_bytes("swap_memory", swap_memory) // each
            num_blocks = sized(max_blocks=max_num_seqs * per_sequence, min_blocks=fits, taken=taken)
            self._hold(layers, geometry(num_blocks=num_blocks, host_blocks=host_blocks), has_spare=cuda_graphs)
            if cuda_graphs:
                self._graphs = DecodeGraphs(
                    self._run, backend, self._device, spare_block=num_blocks, max_rows=max_num_seqs
                )

    def _hold(self, layers: Sequence[LayerSpec], geometry: KVGeometry, *, has_spare: bool = False) -> None:
        self._geometry = geometry
        self._pool = KVPool(
            layers,
            num_blocks=geometry.num_blocks,
            block_size=geometry.block_size,
            host_blocks=geometry.host_blocks,
            has_spare=has_spare,
        )

    def _taken_by_steps(self, *, max_tokens: int, max_rows: int, has_graphs: bool) -> dict[torch.device, int]:
        """Bytes that the largest steps take on each device of the model, those that do not fit apart."""
        assert self._bound is not None and self._pool is not None
        self._pool.fill(0.0)  # a row whose logits are not finite is not sampled
        g = self._geometry
        devices = {layer.device for layer in self._bound.layers.values()} | {self._device}
        taken = dict.fromkeys(devices, 0)
        steps = profiling.largest_steps(
            max_tokens=max_tokens,
            max_rows=max_rows,
            max_len=min(g.max_model_len, g.num_blocks * g.block_size),
            block_size=g.block_size,
        )
        for what, step in steps:
            try:
                peaks = profiling.peak_bytes(partial(self.execute, step), devices)
            except RunnerOutOfMemory as error:
                logger.warning("the largest step, %s, does not fit beside the KV of one sequence: %s", what, error)
                peaks = {}
            taken = {device: max(size, peaks.get(device, 0)) for device, size in taken.items()}
        if has_graphs:  # decoding comes last, and graphs have memory of their own
            taken = {device: size + peaks.get(device, 0) for device, size in taken.items()}
        return taken

    @property
    @override
    def geometry(self) -> KVGeometry:
        return self._geometry

    @override
    def execute(self, out: SchedulerOutput) -> SamplerOutput:
        if self._bound is None:
            raise EngineClosed("the runner is closed")
        if not out.rows:
            return SamplerOutput(())
        try:
            return self._execute(out.rows)
        except torch.OutOfMemoryError as error:
            message = str(error)
        except RuntimeError as error:
            # What the allocators of other devices and of cuBLAS raise has no type of its own.
            message = str(error)
            if not any(sign in message for sign in ("DefaultCPUAllocator", "out of memory", "ALLOC_FAILED")):
                raise
        # Raised out here, because an exception keeps the frames of its context alive, and their tensors with them.
        raise RunnerOutOfMemory(f"{len(out.rows)} rows with {out.num_tokens} tokens are too many: {message}")

    def _execute(self, rows: Sequence[ScheduledSequence]) -> SamplerOutput:
        assert self._bound is not None
        results = [RowResult()] * len(rows)
        logits = []
        # Not under the caller's autocast or gradient mode: a result depends on the rows alone.
        with torch.inference_mode(), torch.autocast(self._device.type, enabled=False):
            parts = passes(rows, max(1, _MAX_SCORED // self._bound.num_logits))
            for part in parts:
                computed, scores = self._compute([row for _, row in part])
                logits.append(computed if len(parts) == 1 else computed.clone())  # the next may overwrite them
                for (index, _), result in zip(part, scores, strict=True):
                    results[index] = _joined(results[index], result)
            sampling = [index for index, row in enumerate(rows) if row.samples]
            if not sampling:
                return SamplerOutput(tuple(results))
            timer = _Timer(self._device)
            sampled = self._sample(
                logits[0] if len(logits) == 1 else torch.cat(logits), [rows[index] for index in sampling]
            )
            sample_s = timer.stop()
        for index, result in zip(sampling, sampled, strict=True):
            results[index] = _joined(results[index], result)
        return SamplerOutput(tuple(results), sample_s)

    def _compute(self, rows: Sequence[ScheduledSequence]) -> tuple[torch.Tensor, list[RowResult]]:
        """Logits of the rows that sample, [number of them, V], and what each row says about its prompt."""
        batch = self._builder.build(rows)
        longest = int(batch.kv_lens.max())
        if longest > self._geometry.max_model_len:
            raise ValueError(f"a row reaches {longest} tokens, and max_model_len is {self._geometry.max_model_len}")
        scored = [
            first + np.arange(len(scored_positions(row)))
            for first, row in zip(batch.query_starts[:-1], rows, strict=True)
        ]
        keep = np.concatenate([*scored, batch.sampled])
        logits = self._forward(batch, keep if len(keep) else batch.query_starts[-1:] - 1)[: len(keep)]
        num_scored = len(keep) - len(batch.sampled)
        if not num_scored:
            return logits, [RowResult()] * len(rows)
        # A copy, since a view would keep the logits of all scored positions until every pass is done.
        return logits[num_scored:].clone(), score(logits[:num_scored], rows)

    def _forward(self, batch: Batch, tokens: IntArray) -> torch.Tensor:
        """Logits of some tokens of the batch, [number of them, V]."""
        assert self._backend is not None
        if self._graphs is not None:
            logits = self._graphs.logits(batch)
            if logits is not None:
                is_all = np.array_equal(tokens, np.arange(len(logits)))
                return logits if is_all else logits.index_select(0, self._tensor(tokens))
        return self._run(self._tensor(batch.inputs), self._backend.plan(batch), self._tensor(tokens))

    def _run(self, inputs: torch.Tensor, plan: Any, keep: torch.Tensor) -> torch.Tensor:
        """Logits of the tokens at `keep`, of `Batch.inputs` and the backend's plan. It sends nothing to the device."""
        bound, pool, backend = self._bound, self._pool, self._backend
        assert bound is not None and pool is not None and backend is not None
        ids, positions, slots = inputs
        arguments: dict[str, Any] = {"logits_to_keep": keep} if bound.keeps_logits else {}
        logits: torch.Tensor = bound.model(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            batchkit=StepContext(bound.layers, pool, backend, plan, slots),
            **arguments,
        ).logits[0]
        return logits if bound.keeps_logits else logits.index_select(0, keep.to(logits.device))

    def _sample(self, logits: torch.Tensor, rows: Sequence[ScheduledSequence]) -> list[RowResult]:
        """Results of rows that sample; `logits` are theirs, [rows, V]."""
        return self._sampler.sample(logits, rows)

    def _tensor(self, array: IntArray) -> torch.Tensor:
        return to_device(array, self._device)

    @override
    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        if self._pool is None:
            raise EngineClosed("the runner is closed")
        self._pool.copy(copies)

    @override
    def check_request(self, request: Request) -> None:
        self._grammars.check(request)

    @override
    def drop_caches(self) -> None:
        self._builder.drop_caches()
        self._grammars.drop_caches()
        self._sampler.drop_caches()
        if self._backend is not None:
            self._backend.drop_caches()
        if self._graphs is not None:
            self._graphs.drop()

    @override
    def weights_changed(self) -> None:
        if self._graphs is not None:
            self._graphs.drop()
        if self._bound is not None:
            pack_again(self._bound.model)
            for module in self._bound.model.modules():
                forward = vars(module).get("forward")
                if isinstance(forward, DecoderLayer):
                    forward.weights_changed()

    @override
    def close(self) -> None:
        """Free everything. A model whose weights were moved has them again, if anybody still has it."""
        if self._bound is not None and self._caller() is not None:
            unpack(self._bound.model)  # first, since what raises here can be done again
        self.drop_caches()
        if self._bound is not None:
            for module in self._bound.model.modules():
                for name in ("forward", "packed"):  # they hold their module, and would hold weights until collected
                    vars(module).pop(name, None)
        self._bound = self._pool = self._backend = self._graphs = None


@contextlib.contextmanager
def _whole_on_error(model: PreTrainedModel) -> Iterator[None]:
    """Weights that have been moved are put back if what comes next raises."""
    try:
        yield
    except BaseException:
        unpack(model)
        raise


def _optimized(bound: BoundModel, pack_weights: PackWeights | None) -> BoundModel:
    """With fused layers, if all of the model is on a CPU that can have them."""
    model = bound.model
    if any(tensor.device.type != "cpu" for tensors in (model.parameters(), model.buffers()) for tensor in tensors):
        return bound
    try:
        return optimized(bound, pack_weights)
    except BuildError as error:
        logger.debug("%s: no fused layers: %s", type(bound.model).__name__, error)
        return bound


def _joined(first: RowResult, second: RowResult) -> RowResult:
    """What two parts of a row's computation gave, of which only the second may have sampled."""
    if error := first.error or second.error:
        return RowResult(error=error)
    prompt = {**(first.prompt_logprobs or {}), **(second.prompt_logprobs or {})}
    return RowResult(second.token_ids, second.logprobs, prompt or None)


class _Timer:
    """Seconds of work on a device between construction and `stop`.

    On CUDA the host's clock would count the forward pass, which is still running when sampling begins.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        if self._stream is None:
            self._started = time.perf_counter()
        else:
            self._event = self._mark()

    def stop(self) -> float:
        if self._stream is None:
            return time.perf_counter() - self._started
        end = self._mark()
        end.synchronize()
        return float(self._event.elapsed_time(end)) / 1000

    def _mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event


def eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """What ends a text by the model's configuration and its generation configuration together, ascending."""
    sources = (model.config, model.config.get_text_config(decoder=True), getattr(model, "generation_config", None))
    found: set[int] = set()
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        found.update(ids if isinstance(ids, (list, tuple)) else [] if ids is None else [ids])
    return tuple(sorted(found))


def model_len(config: Any, wanted: int | None = None) -> int:
    """The most tokens of prompt and output together.

    Models whose rotary frequencies depend on the longest sequence in the batch (RoPE types ``dynamic`` and
    ``longrope``) are kept to the length up to which they do not: else a neighbour would change a result.

    Args:
        config: the model's.
        wanted: by the caller.

    Raises:
        ValueError: `wanted` exceeds the model's length; or neither says one.
    """
    if wanted is not None and (isinstance(wanted, bool) or not isinstance(wanted, int)):
        raise TypeError(f"max_model_len must be an integer, got {wanted!r}")
    if wanted is not None and wanted < 1:
        raise ValueError(f"max_model_len must be at least 1, got {wanted}")
    text = config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None)
    why = "the model's max_position_embeddings"
    for rope in _rope_parameters(text):
        kind = rope.get("rope_type", "default")
        if kind == "longrope" or "dynamic" in kind:
            original = rope.get("original_max_position_embeddings") if kind == "longrope" else None
            original = original or getattr(text, "original_max_position_embeddings", None) or limit
            if original is not None and (limit is None or original < limit):
                limit, why = original, f"the original length of its RoPE type {kind}"
    if limit is None:
        if wanted is None:
            raise ValueError("the model's configuration states no length: give max_model_len")
        return wanted
    if wanted is not None and wanted > limit:
        raise ValueError(f"max_model_len is {wanted}, but {why} is {limit}")
    return limit if wanted is None else wanted


def _rope_parameters(text: Any) -> list[dict[str, Any]]:
    """RoPE parameters of a configuration; several where layer types have their own."""
    rope = getattr(text, "rope_parameters", None) or {}
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]
