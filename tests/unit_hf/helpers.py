"""What tests of sampling share: rows without a scheduler, random logits, a tokenizer of single bytes."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from batchkit.types import Request, SamplingParams, ScheduledSequence

PLAIN = SamplingParams()
GREEDY = SamplingParams(temperature=0)
NUM_BYTES = 256
EOS, SECOND_EOS = NUM_BYTES, NUM_BYTES + 1


def row(
    params: SamplingParams = PLAIN,
    *,
    seq_id: int = 1,
    seed: int = 0,
    sample_index: int = 0,
    prompt: Sequence[int] = (1, 1, 1),
    output: Sequence[int] = (),
    num_output: int | None = None,
    stop_ids: Sequence[int] = (),
    bad_words: Sequence[tuple[int, ...]] = (),
    request: Request | None = None,
) -> ScheduledSequence:
    """A row that samples, behind all of `output` or its first `num_output` tokens."""
    request = request or Request(
        id="r",
        prompt_token_ids=tuple(prompt),
        params=params,
        max_tokens=10**6,
        seed=seed,
        stop_token_ids=frozenset(stop_ids),
        bad_words=tuple(bad_words),
    )
    return ScheduledSequence(
        seq_id=seq_id,
        row=0,
        seat=0,
        request=request,
        sample_index=sample_index,
        start=0,
        num_tokens=1,
        token_ids=(1,),
        output_ids=output,
        num_output=len(output) if num_output is None else num_output,
        blocks=(),
        samples=True,
        idle=False,
    )


def random_logits(rows: int, vocab: int, *, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


@functools.cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, then two that end a text, of which the tokenizer knows the first."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({character: i for i, character in enumerate(characters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>", "<|stop|>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
