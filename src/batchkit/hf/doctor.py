"""Whether a model comes out right: its logits under the runner against those of plain eager attention.

Random tokens go through the runner in random pieces, several sequences to a step, over scattered KV blocks, and at the
end one by one, as in decoding. Wherever a piece ends, the logits must be those of one pass over the whole sequence by
transformers alone, but for rounding.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from ..params import SamplingParams
from ..types import Request, RowResult, ScheduledSequence, SchedulerOutput
from .attention import structural_clone
from .backends.trial import described
from .batch import row_of
from .runner import TransformersRunner, model_len

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from .backends.base import AttentionBackend, LayerSpec
    from .fused import Fused

__all__ = ["Diagnosis", "examine"]

_LENGTHS = (5, 33, 90)
_PIECES = (1, 1, 2, 5, 16, 19, 64)
_DECODED = 3
"""So many tokens at the end of each sequence come one by one."""
_BLOCK_SIZE = 16
"""No backend's blocks are smaller; tables may be longer than needed."""
_SPARE_BLOCKS = 3
_WINDOW_UP_TO = 512
"""A sliding window no longer than this gets a sequence that is longer."""
_ALLOWED = {torch.float64: 1e-3, torch.float32: 1e-3}
"""What is put down to rounding. A key too many, or a position that is off by one, makes more of a difference."""
_ALLOWED_ELSE = 0.5
"""In half precision two right ways of computing differ by a quarter at times; only gross mistakes show there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """What was compared, and how it came out.

    Attributes:
        model: its class, dtype and device.
        layers: kinds of attention layers, and how many of each.
        backend: the attention backend.
        fused: which modules kernels of our own compute; None: none.
        num_compared: positions.
        num_same: those with the same most probable token on both sides.
        worst: the difference at the worst position: the root mean square over its logits, as a part of their standard
            deviation. NaN if a logit is no number.
        at: that position, and its sequence's length.
        allowed: the difference that is put down to rounding.
    """

    model: str
    layers: str
    backend: str
    fused: Fused | None
    num_compared: int
    num_same: int
    worst: float
    at: tuple[int, int]
    allowed: float

    @property
    def is_right(self) -> bool:
        """Whether the model comes out right; False also where a logit is no number."""
        return self.worst <= self.allowed

    def lines(self) -> list[tuple[str, str]]:
        """Names and what is to be said of each, for people."""
        position, length = self.at
        return [
            ("model", self.model),
            ("layers", self.layers),
            ("attention", self.backend),
            ("fused", "nothing" if self.fused is None else str(self.fused)),
            ("compared", f"{self.num_compared} positions with eager attention, in random pieces over scattered blocks"),
            ("difference", f"at most {self.worst:.2g} of the logits' spread, at position {position} of {length}"),
            ("allowed", f"{self.allowed:g}"),
            ("best token", f"the same at {self.num_same} of {self.num_compared}"),
            ("verdict", "it comes out right" if self.is_right else "it comes out WRONG: do not use this model here"),
        ]


class _Listener(TransformersRunner):
    """Keeps the logits by sequence and position, and samples nothing."""

    def __init__(
        self, model: PreTrainedModel, lengths: Sequence[int], attention: AttentionBackend | str | None
    ) -> None:
        super().__init__(
            model,
            num_kv_blocks=sum(map(_num_blocks, lengths)) + _SPARE_BLOCKS,
            max_model_len=max(lengths),
            attention=attention,
        )
        self.heard: dict[tuple[int, int], torch.Tensor] = {}

    @property
    def layers(self) -> list[LayerSpec]:
        assert self._bound is not None
        return list(self._bound.layers.values())

    @property
    def fused(self) -> Fused | None:
        assert self._bound is not None
        return self._bound.fused

    @property
    def backend(self) -> str:
        assert self._backend is not None
        return self._backend.name

    @override
    def _sample(self, logits: torch.Tensor, rows: Sequence[ScheduledSequence]) -> list[RowResult]:
        for values, row in zip(logits, rows, strict=True):
            self.heard[row.seq_id, row.start + row.num_tokens - 1] = values.clone()
        return [RowResult((0,)) for _ in rows]


def examine(model: PreTrainedModel, *, seed: int = 0, attention: AttentionBackend | str | None = None) -> Diagnosis:
    """Compare a model under the runner with the same model under plain eager attention.

    Args:
        model: a causal language model of transformers. It is not changed.
        seed: of the tokens, the pieces and the blocks.
        attention: see `TransformersRunner`.

    Raises:
        UnsupportedModel: it cannot be bound, with every reason.
    """
    window = getattr(model.config.get_text_config(decoder=True), "sliding_window", None)
    wanted = (*_LENGTHS, window + _BLOCK_SIZE + 1) if window and window <= _WINDOW_UP_TO else _LENGTHS
    try:
        limit = model_len(model.config)
    except ValueError:  # the configuration states none, so that it allows any
        limit = max(wanted)
    lengths = sorted({min(length, limit) for length in wanted})
    rng = random.Random(seed)
    runner = _Listener(model, lengths, attention)
    try:
        vocab_size = runner.geometry.vocab_size
        sequences = [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]
        _run(runner, sequences, rng)
        kinds = Counter(described(layer) for layer in runner.layers)
        parameter = next(model.parameters())
        return _compare(
            model,
            runner,
            sequences,
            layers="; ".join(f"{count} with {kind}" for kind, count in kinds.items()),
            allowed=_ALLOWED.get(parameter.dtype, _ALLOWED_ELSE),
        )
    finally:
        runner.close()


def _num_blocks(length: int) -> int:
    return -(-length // _BLOCK_SIZE)


def _run(runner: _Listener, sequences: list[list[int]], rng: random.Random) -> None:
    blocks = list(range(runner.geometry.num_blocks))
    rng.shuffle(blocks)
    tables = [tuple(blocks.pop() for _ in range(_num_blocks(len(sequence)))) for sequence in sequences]
    request = Request(id="doctor", prompt_token_ids=(0,), params=SamplingParams(), max_tokens=1)
    done = [0] * len(sequences)
    while left := [i for i, sequence in enumerate(sequences) if done[i] < len(sequence)]:
        rows = []
        for i in rng.sample(left, rng.randint(1, len(left))):
            sequence, start = sequences[i], done[i]
            prefill = len(sequence) - _DECODED - start
            num = min(rng.choice(_PIECES), prefill) if prefill > 0 else 1
            done[i] += num
            tokens = sequence[start : start + num]
            rows.append(row_of(request, i, start=start, token_ids=tokens, blocks=tables[i]))
        runner.execute(SchedulerOutput(rows=tuple(rows), num_tokens=sum(row.num_tokens for row in rows)))


def _compare(
    model: PreTrainedModel, runner: _Listener, sequences: list[list[int]], *, layers: str, allowed: float
) -> Diagnosis:
    plain = structural_clone(model)
    plain.set_attn_implementation("eager")
    embeddings = plain.get_input_embeddings().weight
    worst, at, num_same = -1.0, (0, 0), 0
    for i, sequence in enumerate(sequences):
        positions = [position for seq_id, position in runner.heard if seq_id == i]
        with torch.inference_mode(), torch.autocast(embeddings.device.type, enabled=False):
            ids = torch.tensor([sequence], device=embeddings.device)
            expected = plain(input_ids=ids, use_cache=False).logits[0, positions].float().cpu()
        got = torch.stack([runner.heard[i, position] for position in positions]).float().cpu()
        num_same += int((expected.argmax(-1) == got.argmax(-1)).sum())
        differences = (got - expected).square().mean(-1).sqrt() / expected.std(-1)
        found, index = differences.max(0)  # NaN counts as the largest
        if not float(found) <= worst:
            worst, at = float(found), (positions[int(index)], len(sequence))
        if math.isnan(worst):
            break
    return Diagnosis(
        model=f"{type(model).__name__}, {embeddings.dtype}, {embeddings.device}".replace("torch.", ""),
        layers=layers,
        backend=runner.backend,
        fused=runner.fused,
        num_compared=len(runner.heard),
        num_same=num_same,
        worst=worst,
        at=at,
        allowed=allowed,
    )
