"""From logits to tokens, for a batch of rows with different settings.

`Sampler` is the whole of it; `sample` is the draw, which keeps nothing and knows temperatures and filters alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..types import RowResult
from .adjust import LogitsAdjuster, forbidding
from .logprobs import token_logprobs
from .uniform import uniform

if TYPE_CHECKING:
    from ..params import SamplingParams
    from ..types import ScheduledSequence, TokenLogprobs
    from .grammar import Grammars

__all__ = ["Highest", "Sampler", "highest", "sample"]

Highest = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""A function like `highest`."""

_ONE = 1 << 42
"""The weight of the most probable token. Weights are integers: a sum of integers is the same in any order, so that
neither the batch's shape nor the device's way of summing can move a boundary. 2**21 tokens of this weight fit in int64;
a token 4e12 times less probable than the best one has weight 0 and is never drawn."""
_CHUNK = 1 << 24
"""The most logits drawn from at once, which bounds the temporary memory at about half a GiB."""
_CHUNK_CPU = 1 << 20
"""The same on the CPU, where the memory of larger temporaries comes from the system anew each time, at more than
the cost of the computing."""


def highest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row, [rows] each, the highest logit and the first token that has it; NaN is higher than all."""
    # `max` is up to twice as fast as `argmax` for 16-bit logits on the CPU.
    values, tokens = logits.max(dim=-1)
    return values, tokens


class Sampler:
    """Gives each row its token, and the log-probabilities that it asks for.

    What it keeps between calls is made again where it is missing, so that a result depends on logits and row alone.

    Args:
        grammars: for structured outputs.
        highest: computes what `highest` computes.
    """

    def __init__(self, grammars: Grammars, highest: Highest = highest) -> None:
        self._adjuster = LogitsAdjuster(grammars)
        self._highest = highest

    def drop_caches(self) -> None:
        """Forget what can be made again."""
        self._adjuster.drop_caches()

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, rows: Sequence[ScheduledSequence]) -> list[RowResult]:
        """Adjust the logits as the rows ask (`LogitsAdjuster`) and choose a token for each (`sample`).

        The device is waited for once, and once more if a row asks for log-probabilities.

        Args:
            logits: [rows, vocabulary], the model's own; not changed.
            rows: one for each row of `logits`, in order.

        Returns:
            A result for each row. One whose logits are not finite, whose logits processor or grammar fails, or that
            has no token left, has an error and no token.
        """
        adjusted = self._adjuster.adjust(logits, rows)
        found = None
        if adjusted is None and all(row.request.params.temperature == 0 for row in rows):
            top, found = self._highest(logits)
        else:
            top = logits.amax(-1)
        # NaN and plus infinity carry through a maximum; a model may mask tokens with minus infinity.
        bad = ~top.isfinite()
        if adjusted is not None:
            bad = torch.stack((bad, adjusted.logits.amax(-1) == -math.inf))
        flags = torch.empty(bad.shape, dtype=torch.bool, device="cpu", pin_memory=logits.device.type == "cuda")
        # It arrives before the tokens: reading those is the step's one synchronisation.
        flags.copy_(bad, non_blocking=True)
        if found is not None:
            tokens = _tolist(found)
        else:
            tokens = sample(logits if adjusted is None else adjusted.logits, rows, self._highest)
        errors: dict[int, str] = {} if adjusted is None else adjusted.faults
        faulty, empty = flags.tolist() if adjusted is not None else (flags.tolist(), [False] * len(rows))
        for i, row in enumerate(rows):
            if faulty[i]:
                errors[i] = f"the model's logits at position {row.start + row.num_tokens - 1} are not finite"
            elif empty[i] and i not in errors:
                errors[i] = f"{' and '.join(forbidding(row))} left no token to sample"
        logprobs = _logprobs(logits, rows, tokens)
        return [
            RowResult(error=errors[i]) if i in errors else RowResult((token,), logprobs.get(i))
            for i, token in enumerate(tokens)
        ]


def _logprobs(
    logits: torch.Tensor, rows: Sequence[ScheduledSequence], tokens: Sequence[int]
) -> dict[int, tuple[TokenLogprobs]]:
    """Log-probabilities of the rows that ask for them."""
    some = [i for i, row in enumerate(rows) if row.request.params.logprobs is not None]
    if not some:
        return {}
    counts = [rows[i].request.params.logprobs or 0 for i in some]
    found = token_logprobs(_take(logits, some), [tokens[i] for i in some], counts)
    return {i: (entry,) for i, entry in zip(some, found, strict=True)}


@torch.inference_mode()
def sample(logits: torch.Tensor, rows: Sequence[ScheduledSequence], highest: Highest = highest) -> list[int]:
    """Choose one token for each row. The device is waited for once.

    Temperature 0 takes the best token, of several equal ones the first. Otherwise the filters apply in the order of
    transformers' warpers, temperature, top_k, top_p, min_p, each to what the one before left, and keep the same tokens;
    the best token always survives. Tokens whose logits are equal are kept or dropped together, so a filter may keep
    more of them than transformers does. What a filter dropped is never drawn, nor a token 2**42 times less probable
    than the best one.

    A token is a function of the row's logits, the request's seed, the sample's index and the token's position: nothing
    is kept between calls, and neighbours, order and shape of the batch have no influence.

    A row with NaN gives some token of the vocabulary and disturbs no other row.

    Args:
        logits: [rows, vocabulary], floating point of any precision; not changed.
        rows: one for each row of `logits`, in order.
        highest: computes what `highest` computes.

    Returns:
        A token id for each row.

    Raises:
        ValueError: the numbers of rows differ.
    """
    if logits.dim() != 2 or logits.shape[0] != len(rows):
        raise ValueError(f"logits of shape {tuple(logits.shape)} for {len(rows)} rows")
    if not rows:
        return []
    greedy = [i for i, row in enumerate(rows) if row.request.params.temperature == 0]
    if len(greedy) == len(rows):
        return _tolist(highest(logits)[1])
    drawn = [i for i, row in enumerate(rows) if row.request.params.temperature > 0]
    if logits.device.type == "mps":  # it has no float64
        logits = logits.cpu()
    size = max(1, (_CHUNK_CPU if logits.device.type == "cpu" else _CHUNK) // logits.shape[1])
    parts = [drawn[i : i + size] for i in range(0, len(drawn), size)]
    chosen = [_draw(_take(logits, part), [rows[i] for i in part]) for part in parts]
    if greedy:
        chosen.append(highest(_take(logits, greedy))[1])
    tokens = [0] * len(rows)
    for i, token in zip(drawn + greedy, _tolist(torch.cat(chosen)), strict=True):
        tokens[i] = token
    return tokens


def _draw(logits: torch.Tensor, rows: Sequence[ScheduledSequence]) -> torch.Tensor:
    """[rows] of tokens drawn by inverting the cumulative weights at each row's own uniform number."""
    weights = _weights(logits, [row.request.params for row in rows])
    numbers = [
        [uniform(row.request.seed, row.sample_index, len(row.request.prompt_token_ids) + row.num_output)]
        for row in rows
    ]
    sums = weights.cumsum_(dim=-1)
    # The first token whose cumulative weight exceeds the target; one of weight zero never is the first. There is one,
    # for the target is less than the total even if the product is rounded up: the number is at most 1 - 2**-53.
    target = (_upload(numbers, torch.float64, logits.device) * sums[:, -1:]).to(torch.int64)
    return torch.searchsorted(sums, target, right=True).squeeze(-1)


def _weights(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """[rows, vocabulary] of int64 weights in proportion to the probabilities, zero where a filter dropped the token."""
    vocab = logits.shape[-1]
    device = logits.device
    logits = logits.float()
    best = logits.amax(dim=-1, keepdim=True)
    # Temperatures that float32 cannot hold would give 0/0 or inf/inf.
    limits = torch.finfo(torch.float32)
    temperature = _upload([[min(max(p.temperature, limits.tiny), limits.max)] for p in params], torch.float32, device)
    weights = _exp(logits, best, temperature)

    some = [i for i, p in enumerate(params) if 0 < p.top_k < vocab]
    if some:
        k = _upload([[params[i].top_k - 1] for i in some], torch.int64, device)
        lowest = _take(logits, some).topk(max(params[i].top_k for i in some), dim=-1).values.gather(1, k)
        weights.masked_fill_(logits < _put(torch.full_like(best, -math.inf), some, lowest), 0)

    some = [i for i, p in enumerate(params) if p.top_p < 1]
    if some:
        top_p = _upload([[params[i].top_p] for i in some], torch.float64, device)
        needed = (_take(weights, some).sum(dim=-1, keepdim=True) * top_p).ceil().to(torch.int64)
        lowest = _nucleus(_take(logits, some), _take(best, some), _take(temperature, some), needed)
        weights.masked_fill_(logits < _put(torch.full_like(best, -math.inf), some, lowest), 0)

    if any(p.min_p > 0 for p in params):
        least = _upload([[math.ceil(p.min_p * _ONE)] for p in params], torch.int64, device)
        weights.masked_fill_(weights < least, 0)
    return weights


def _exp(logits: torch.Tensor, best: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Integer weights of logits, before any filter.

    The best logit is subtracted first: half precision and tiny temperatures then cannot overflow to anything but -inf,
    which is weight zero. Inf minus inf is NaN: infinite logits are then the best ones, and a row with NaN becomes flat.
    """
    x = (logits - best).nan_to_num_(nan=0.0, neginf=-math.inf).div_(temperature)
    return x.exp_().mul_(_ONE).to(torch.int64)


def _nucleus(logits: torch.Tensor, best: torch.Tensor, temperature: torch.Tensor, needed: torch.Tensor) -> torch.Tensor:
    """[rows, 1]: the lowest logit of the fewest best tokens that have the weight needed.

    Args:
        logits: [rows, vocabulary]; what top_k dropped need not be marked, for it comes after all that it kept.
        best: [rows, 1], the best logit.
        temperature: [rows, 1].
        needed: [rows, 1].
    """
    ordered = _sorted(logits)
    sums = _exp(ordered, best, temperature).cumsum_(dim=-1)
    kept = (sums[:, -1:] - sums < needed).sum(dim=-1, keepdim=True)  # those whose betters have less than is needed
    return ordered.gather(1, logits.shape[-1] - kept)


def _sorted(logits: torch.Tensor) -> torch.Tensor:
    """Each row in ascending order. On the CPU numpy does it in a thirtieth of the time, since it moves no indices."""
    if logits.device.type == "cpu":
        return torch.from_numpy(np.sort(logits.numpy(), axis=-1))
    return logits.sort(dim=-1).values


def _take(tensor: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Some rows of a tensor, in ascending order; a view if they are neighbours."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return tensor[rows[0] : rows[-1] + 1]
    return tensor.index_select(0, _upload(rows, torch.int64, tensor.device))


def _put(tensor: torch.Tensor, rows: list[int], values: torch.Tensor) -> torch.Tensor:
    """The tensor after its `rows` were set to `values`."""
    return tensor.index_copy_(0, _upload(rows, torch.int64, tensor.device), values)


def _upload(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Host numbers on the device, without waiting for it."""
    return torch.tensor(values, dtype=dtype, device="cpu").to(device, non_blocking=True)


def _tolist(tokens: torch.Tensor) -> list[int]:
    result: list[int] = tokens.tolist()
    return result
