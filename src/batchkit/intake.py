"""What a caller asks for, made a `Request` with every default resolved, or refused with the numbers."""

from __future__ import annotations

import math
import operator
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

from .clocks import Clock
from .errors import RequestError, RequestTooLong
from .params import SamplingParams
from .text import OutputText, Tokenizer, num_shared
from .types import KVGeometry, Request

__all__ = ["Intake", "Prompt", "named"]

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or the messages of a conversation, each with ``role`` and ``content``."""


class Intake:
    """Knows what an engine can take. Holds nothing of any request.

    Args:
        geometry: the runner's.
        tokenizer: for text, messages and stop strings.
        clock: gives the arrival of requests that name none.
        max_model_len: the most tokens of prompt and output together.
    """

    def __init__(self, geometry: KVGeometry, tokenizer: Tokenizer | None, clock: Clock, max_model_len: int) -> None:
        self._geometry = geometry
        self._tokenizer = tokenizer
        self._clock = clock
        self._max_model_len = max_model_len
        self._eos_token_ids = frozenset(geometry.eos_token_ids)
        if tokenizer is not None and tokenizer.eos_token_id is not None:
            self._eos_token_ids |= {tokenizer.eos_token_id}

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        *,
        fresh_id: Callable[[], str],
        request_id: str | None = None,
        priority: int = 0,
        arrival: float | None = None,
        deadline: float | None = None,
        length_hint: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Request:
        """The request. Arguments and errors are those of `Engine.add_request`; `fresh_id` names one without an id."""
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, got {params!r}")
        for name, text in (("request_id", request_id), ("cache_salt", cache_salt)):
            if text is not None and not isinstance(text, str):
                raise TypeError(f"{name} must be a string, got {text!r}")
        # For policies, which are to be spared what they cannot compute with.
        policy_values: tuple[tuple[str, Any, str], ...] = (
            ("arrival", arrival, "a time in seconds"),
            ("deadline", deadline, "a time in seconds"),
            ("length_hint", length_hint, "a number of tokens"),
            ("priority", priority, "a number"),
        )
        for name, value, unit in policy_values:
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, Real):
                raise TypeError(f"{name} must be {unit}, got {value!r}")
            if not _is_finite(value):
                raise RequestError(f"{name} must be {unit}, got {value}")
        if metadata is not None and not isinstance(metadata, Mapping):
            raise TypeError(f"metadata must be a mapping, got {metadata!r}")
        token_ids = self.token_ids(prompt, chat_template_kwargs)
        stop_token_ids = self._stop_token_ids(params)
        vocab_size = self._geometry.vocab_size
        for kind, ids in (
            ("prompt token", token_ids),
            ("stop token", stop_token_ids),
            ("allowed token", params.allowed_token_ids or ()),
            ("logit_bias token", params.logit_bias or ()),
        ):
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise RequestError(f"{kind} id {token} is not in the vocabulary of {vocab_size}")
        return Request(
            id=request_id if request_id is not None else fresh_id(),
            prompt_token_ids=token_ids,
            params=params,
            max_tokens=self._max_tokens(len(token_ids), params),
            seed=params.seed if params.seed is not None else secrets.randbits(63),
            stop_token_ids=frozenset(stop_token_ids if params.ignore_eos else stop_token_ids | self._eos_token_ids),
            arrival=self._clock() if arrival is None else arrival,
            prompt=prompt if isinstance(prompt, str) else None,
            bad_words=tuple(dict.fromkeys(ids for word in params.bad_words for ids in self._bad_word(word))),
            cache_salt=cache_salt,
            priority=priority,
            deadline=deadline,
            length_hint=length_hint,
            # A copy: whoever changes theirs for the next request means only that.
            metadata={} if metadata is None else dict(metadata),
        )

    def text(self, request: Request) -> OutputText | None:
        """What will make the request's text; None: it gets none."""
        if self._tokenizer is None or not request.params.detokenize:
            return None
        try:
            return OutputText(self._tokenizer, request)
        except Exception as fault:
            raise RequestError(f"the tokenizer cannot decode the prompt: {named(fault)}") from fault

    def token_ids(self, prompt: Prompt, chat_template_kwargs: Mapping[str, Any] | None = None) -> tuple[int, ...]:
        """What a prompt becomes; see `Engine.encode`."""
        if isinstance(prompt, Mapping):
            raise TypeError("a conversation is a list of messages; for a single message, [message]")
        if isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
            raise TypeError(
                f"a prompt is text, a sequence of token ids, or a list of messages, got {type(prompt).__name__}"
            )
        try:
            items: str | tuple[Any, ...] = prompt if isinstance(prompt, str) else tuple(prompt)
        except Exception as fault:
            raise RequestError(f"the prompt cannot be read: {named(fault)}") from fault
        is_chat = not isinstance(items, str) and any(isinstance(item, Mapping) for item in items)
        if chat_template_kwargs is not None and not is_chat:
            raise RequestError("chat_template_kwargs are for messages, and this prompt is not a list of messages")
        if isinstance(items, str):
            token_ids = self._encode(items, "prompt")
        elif is_chat:
            token_ids = self._apply_chat_template(items, chat_template_kwargs or {})
        else:
            try:
                token_ids = tuple(map(operator.index, items))
            except TypeError:
                raise TypeError(
                    "a prompt is text, a sequence of token ids, or a list of messages; not all of these are integers"
                ) from None
        if not token_ids:
            raise RequestError("the prompt is empty: there is no token to continue from")
        return token_ids

    def _encode(self, text: str, what: str) -> tuple[int, ...]:
        if self._tokenizer is None:
            raise RequestError("a text prompt needs a tokenizer, and this engine has none; give token ids")
        try:
            return tuple(map(operator.index, self._tokenizer.encode(text)))
        except Exception as fault:
            raise RequestError(f"the tokenizer cannot encode the {what}: {named(fault)}") from fault

    def _apply_chat_template(self, messages: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or "role" not in message:
                raise RequestError(f"message {index} must be an object with a role and content, got {message!r:.80}")
        apply = getattr(self._tokenizer, "apply_chat_template", None)
        if apply is None:
            what = "this engine has no tokenizer" if self._tokenizer is None else "this tokenizer has none"
            raise RequestError(f"messages need a tokenizer with a chat template, and {what}; give text or token ids")
        try:
            return tuple(map(operator.index, apply(messages, **kwargs)))
        except Exception as fault:
            raise RequestError(f"the chat template cannot be applied: {named(fault)}") from fault

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        stop_token_ids = frozenset(params.stop_token_ids)
        if params.stop and self._tokenizer is None:
            raise RequestError(f"stop strings {params.stop} need a tokenizer, and this engine has none")
        special = getattr(self._tokenizer, "special_token_id", None)
        if special is not None:
            # The text of a special token may never appear in the output, so it is looked for as a token.
            stop_token_ids |= {found for s in params.stop if (found := special(s)) is not None}
        return stop_token_ids

    def _bad_word(self, word: str) -> Iterator[tuple[int, ...]]:
        """The tokens of a word, at the beginning of a text and behind a space."""
        if self._tokenizer is None:
            raise RequestError(f"the bad word {word!r} needs a tokenizer, and this engine has none")
        specials = self._encode("", "empty text")
        for text in (word, " " + word.lstrip()):
            token_ids = self._encode(text, "bad word")
            count = num_shared(specials, token_ids)
            behind = specials[count:]
            end = len(token_ids) - len(behind) if behind and token_ids[-len(behind) :] == behind else len(token_ids)
            if count < end:
                yield token_ids[count:end]

    def _max_tokens(self, num_prompt: int, params: SamplingParams) -> int:
        """The limit in force, by the arithmetic that the allocator uses."""
        length, geometry = self._max_model_len, self._geometry
        slots = geometry.num_blocks * geometry.block_size
        pool = f"{geometry.num_blocks} blocks of {geometry.block_size} tokens"
        # The last token generated is never written, so it needs room in the model's length but no KV slot.
        most = min(length - num_prompt, slots - num_prompt + 1)
        asked = params.max_tokens
        if asked == 0 and num_prompt <= min(length, slots):
            return 0
        if most < 1 or (asked is not None and asked > most):
            raise RequestTooLong(
                f"a prompt of {num_prompt} tokens and {asked if asked is not None else 'at least 1'} to generate "
                f"can never run: the model takes {length} tokens in all, and the KV cache {slots} ({pool}) without "
                f"the last one generated, which leaves room to generate {max(0, most)}; "
                + ("the model's length binds" if length <= slots else "a larger KV cache would take more")
            )
        if asked is None and params.min_tokens > most:
            raise RequestTooLong(
                f"min_tokens is {params.min_tokens}, but a prompt of {num_prompt} tokens leaves room for {most} "
                f"(model length {length}, KV cache of {pool})"
            )
        return most if asked is None else asked


def _is_finite(value: Real) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def named(fault: Exception) -> str:
    """A fault in a message: its class and what it says."""
    return f"{type(fault).__name__}: {fault}"
