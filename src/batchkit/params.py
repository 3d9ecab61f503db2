"""How a request samples, what it must look like, and when it stops."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

__all__ = ["MOST_SAMPLES", "LogitsProcessor", "SamplingParams", "StructuredOutputsParams", "integer"]

MOST_SAMPLES = 1024
"""The largest ``n``: what a step costs grows with the samples of each request. For more, send more requests."""

LogitsProcessor = Callable[[Sequence[int], Sequence[int], Any], Any]
"""``(prompt_ids, output_ids, logits) -> logits``, of one row: a float32 tensor [vocabulary], before the penalties.

It may change and return the tensor it is given, or return another of the same shape. It is called once for each token,
and after a preemption or a failed step again for the same one, so that it must be a function of its arguments.
"""


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(
            f"{name} must be a number that a float can hold, got one of {len(str(value))} digits"
        ) from None
    if math.isnan(number):
        raise ValueError(f"{name} must be a number, got NaN")
    return number


def integer(name: str, value: object) -> int:
    """A whole number of any kind.

    Raises:
        TypeError: it is none, by the name of what it is for.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    return int(value)


def _items(name: str, value: object) -> tuple[Any, ...]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a sequence, got {value!r}")
    return tuple(value)


def _strings(name: str, one: str, value: object) -> tuple[str, ...]:
    found = _items(name, value)
    for string in found:
        if not isinstance(string, str):
            raise TypeError(f"{one} must be a string, got {string!r}")
        if not string:
            raise ValueError(f"{one} must not be empty")
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOutputsParams:
    """What the generated text must match. Exactly one of them.

    The text then ends when it matches and cannot go on, or when the model ends it where it matches; only a limit
    (``max_tokens``), a stop string or a stop token of the caller's own can cut it short.

    Args:
        json: a JSON schema, as an object or as its text; True for any JSON object. Where JSON allows spaces and line
            ends, there are at most 20.
        regex: a regular expression that the whole text matches.
        choice: the text is one of these.
        grammar: a context-free grammar in the notation of the library that enforces it (Lark).

    Raises:
        ValueError: none or several are given, or what is given can match nothing. Whether a grammar can be compiled is
            found out when a request with it is added.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("json", "regex", "choice", "grammar") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"structured outputs take exactly one of json, regex, choice and grammar, "
                f"got {' and '.join(given) or 'none'}"
            )
        for name in ("regex", "grammar"):
            if (text := getattr(self, name)) is not None and not isinstance(text, str):
                raise TypeError(f"{name} must be text, got {text!r}")
        if self.choice is not None:
            choice = _strings("choice", "a choice", self.choice)
            if not choice:
                raise ValueError("there must be something to choose from, got no choice")
            object.__setattr__(self, "choice", choice)
        if self.json is not None:
            object.__setattr__(self, "json", self._schema())

    def _schema(self) -> str:
        """The schema as text, so that equal ones are one key of a cache."""
        schema = self.json
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"json must be a JSON schema, and this is not JSON: {error}") from None
        elif schema is True:
            schema = {"type": "object"}
        if not isinstance(schema, Mapping):
            raise TypeError(f"json must be a JSON schema, an object, got {self.json!r}")
        try:
            return json.dumps(schema, default=dict)
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"json must be a JSON schema: {error}") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one request samples and when it stops. Names and meanings are vLLM's.

    From logits to a token: `logit_bias`, `logits_processors`, `repetition_penalty`, `frequency_penalty` and
    `presence_penalty`; then what is forbidden gets probability 0 (`allowed_token_ids`, `bad_words`, `min_tokens`,
    `structured_outputs`), so that nothing can allow it again; then the filters in the order of transformers' logits
    warpers: temperature, top_k, top_p, min_p. The most probable token always survives them.

    Args:
        n: samples of the prompt, at most `MOST_SAMPLES`. Sample i is the same whatever n is. The prompt is computed
            once, unless preemption takes it from all of them, or the policy or the allocator cannot share.
        max_tokens: the most tokens to generate. None: as many as the model's length and the KV pool allow, whichever is
            less; reaching either is finish reason ``"length"``. 0 generates nothing: with `prompt_logprobs` it scores
            the prompt, which may then be as long as the model allows; without, it only computes it. Either ends with
            ``"length"``.
        min_tokens: stop tokens are not sampled, and stop strings not looked for, before this many tokens.
        temperature: 0 is greedy; larger is flatter.
        top_k: keep the k most probable tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of most probable tokens whose probability reaches top_p, in (0, 1].
        min_p: drop tokens less probable than min_p times the most probable one, in [0, 1].
        presence_penalty: is subtracted from the logits of tokens that the output has, in [-2, 2].
        frequency_penalty: is subtracted once for each time that the output has the token, in [-2, 2].
        repetition_penalty: divides the positive logits, and multiplies the negative ones, of tokens that the prompt or
            the output has; above 0, and 1 for none.
        logit_bias: is added to logits, by token id; each in [-100, 100].
        allowed_token_ids: no other token is sampled, no stop token either.
        bad_words: texts that are not generated, as the tokens that the tokenizer makes of them, at the beginning of a
            text and behind a space: the last of them is not sampled where the output ends with the others. Other tokens
            may spell the same.
        logits_processors: functions of your own, in turn; see `LogitsProcessor`.
        seed: a token is a function of (logits, seed, position), so the same seed gives the same tokens whatever
            else runs. None: a fresh seed for each request.
        stop: a string or strings that end the request when they appear in the generated text.
        stop_token_ids: token ids that end the request, besides the model's own EOS tokens.
        ignore_eos: the model's EOS tokens do not end the request; `stop_token_ids` still do.
        include_stop_str_in_output: keep the stop string, or the text of the stop token, in the text.
        skip_special_tokens: leave special tokens out of the text.
        detokenize: False leaves `text` empty and saves the work; stop strings then cannot be used.
        logprobs: give the log-probabilities of so many of the best tokens at each position, and of the token sampled:
            those of the model itself, before anything above. 0: the sampled one's alone; -1: all.
        prompt_logprobs: the same for each token of the prompt but the first. Such a prompt is computed even where a
            cached prefix could be used.
        structured_outputs: what the text must match.

    Raises:
        ValueError, TypeError: a value out of its range, or two that contradict each other; with the name and the range.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    logits_processors: Sequence[LogitsProcessor] = field(default=(), hash=False)
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        self._make_tuples()
        self._check_counts()
        self._check_numbers()
        self._check_together()

    def _make_tuples(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        for name in ("stop", "bad_words", "stop_token_ids", "logits_processors"):
            if getattr(self, name) is None:  # clients pass through what they were not given
                put(name, ())
        put("stop", _strings("stop", "a stop string", (self.stop,) if isinstance(self.stop, str) else self.stop))
        put("bad_words", _strings("bad_words", "a bad word", self.bad_words))
        ids = _items("stop_token_ids", self.stop_token_ids)
        put("stop_token_ids", tuple(integer("a token id of stop_token_ids", token) for token in ids))
        if self.allowed_token_ids is not None:
            ids = _items("allowed_token_ids", self.allowed_token_ids)
            put("allowed_token_ids", tuple(integer("a token id of allowed_token_ids", token) for token in ids))
            if not ids:
                raise ValueError("allowed_token_ids must have at least one token, got none")
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise TypeError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}")
            bias = {
                integer("a token id of logit_bias", t): _number("a value of logit_bias", b)
                for t, b in self.logit_bias.items()
            }
            for token, value in bias.items():
                if not -100 <= value <= 100:
                    raise ValueError(f"logit_bias must be in [-100, 100], got {value} for token {token}")
            put("logit_bias", bias or None)
        put("logits_processors", _items("logits_processors", self.logits_processors))
        for processor in self.logits_processors:
            if not callable(processor):
                raise TypeError(f"a logits processor must be a function of (prompt, output, logits), got {processor!r}")

    def _check_counts(self) -> None:
        for name in ("n", "max_tokens", "min_tokens", "top_k", "logprobs", "prompt_logprobs", "seed"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, integer(name, getattr(self, name)))
        for name in ("n", "min_tokens", "top_k"):
            if getattr(self, name) is None:
                raise TypeError(f"{name} must be an integer, got None")
        if not 1 <= self.n <= MOST_SAMPLES:
            raise ValueError(f"n must be in [1, {MOST_SAMPLES}], got {self.n}")
        if self.max_tokens is not None and self.max_tokens < 0:
            raise ValueError(f"max_tokens must be at least 1, or 0 to generate nothing, got {self.max_tokens}")
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens must be at least 0, got {self.min_tokens}")
        if self.top_k < -1:
            raise ValueError(f"top_k must be at least 1, or 0 or -1 to keep all tokens, got {self.top_k}")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and count < -1:
                raise ValueError(f"{name} must be at least 0, or -1 for all tokens, got {count}")

    def _check_numbers(self) -> None:
        if _number("temperature", self.temperature) < 0 or math.isinf(self.temperature):
            raise ValueError(f"temperature must be finite and at least 0, got {self.temperature}")
        if not 0 < _number("top_p", self.top_p) <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= _number("min_p", self.min_p) <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= _number(name, getattr(self, name)) <= 2:
                raise ValueError(f"{name} must be in [-2, 2], got {getattr(self, name)}")
        if not 0 < _number("repetition_penalty", self.repetition_penalty) < math.inf:
            raise ValueError(f"repetition_penalty must be finite and above 0, got {self.repetition_penalty}")

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens})")
        if self.max_tokens == 0 and self.n > 1:
            raise ValueError(f"max_tokens=0 generates nothing, and n={self.n} wants it {self.n} times; n must be 1")
        if self.stop and not self.detokenize:
            raise ValueError("stop strings are looked for in the text, so they need detokenize=True")
        if self.structured_outputs is None:
            return
        if not isinstance(self.structured_outputs, StructuredOutputsParams):
            raise TypeError(f"structured_outputs must be StructuredOutputsParams, got {self.structured_outputs!r}")
        if self.ignore_eos:
            raise ValueError("ignore_eos lets a text go on behind its end, and structured_outputs say where that is")
        if self.min_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}, and structured_outputs say where the text may end")
