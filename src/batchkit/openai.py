"""Requests and answers as JSON, in the form of the OpenAI API's ``/v1/chat/completions`` and ``/v1/completions``.

Functions from a request's body to what `Engine.add_request` takes, and from what the engine gives to the body of a
response; a server and the batch files of ``batchkit generate`` share them. Nothing here speaks HTTP, and nothing needs
the ``openai`` package. ``chat`` tells the two endpoints apart everywhere.

>>> body = {"prompt": "Tea is", "max_tokens": 8, "stop": "."}
>>> prompts_of(body, chat=False), params_of(body, chat=False).max_tokens
(['Tea is'], 8)
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from .intake import Prompt
from .params import SamplingParams, StructuredOutputsParams, integer
from .types import Completion, RequestOutput, TokenLogprobs

__all__ = [
    "Response",
    "error_body",
    "messages_of",
    "options_of",
    "params_of",
    "params_of_json",
    "prompts_of",
    "shown",
]

_PARAMS = {field.name for field in dataclasses.fields(SamplingParams)}
_STRUCTURED = {field.name for field in dataclasses.fields(StructuredOutputsParams)}

# What stands in a body under the name that SamplingParams has for it: OpenAI's own fields, and vLLM's in addition.
_OWN = {
    "frequency_penalty",
    "logit_bias",
    "max_tokens",
    "n",
    "presence_penalty",
    "seed",
    "stop",
    "temperature",
    "top_p",
}
_MORE = {
    "allowed_token_ids",
    "bad_words",
    "ignore_eos",
    "include_stop_str_in_output",
    "min_p",
    "min_tokens",
    "repetition_penalty",
    "skip_special_tokens",
    "stop_token_ids",
    "structured_outputs",
    "top_k",
}
_TRANSLATED = {True: {"logprobs", "max_completion_tokens", "response_format", "top_logprobs"}}
_TRANSLATED[False] = {"logprobs", "response_format"}
# What other functions read, and `stream`, which is the caller's.
_PROMPT = {True: {"messages", "chat_template_kwargs"}, False: {"prompt"}}
_OPTIONS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "chat_template_kwargs": (dict, "an object"),
    "cache_salt": (str, "text"),
    "priority": ((int, float), "a number"),
}
_CALLERS = {"model", "stream", "stream_options"}
# What cannot change an answer here.
_NO_EFFECT = {
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "request_id",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}
# What is not to be had here, with the values at which it asks for nothing.
_NEUTRAL: dict[bool, dict[str, tuple[Any, ...]]] = {
    True: {
        "add_generation_prompt": (True,),
        "add_special_tokens": (False,),
        "audio": (),
        "continue_final_message": (False,),
        "echo": (False,),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "modalities": (["text"],),
        "moderation": (),
        "prediction": (),
        "reasoning_effort": (),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "verbosity": (),
        "web_search_options": (),
    },
    False: {"add_special_tokens": (True,), "best_of": (1,), "echo": (False,), "suffix": ("",)},
}
for _fields in _NEUTRAL.values():
    _fields["length_penalty"] = (1,)
    _fields["prompt_logprobs"] = ()
    _fields["use_beam_search"] = (False,)

_COMPLETION_TOKENS = 16
"""``max_tokens`` of /v1/completions where nobody says; a chat's answer may be as long as the model's length allows."""
_MOST_LOGPROBS = 20
"""The API's limit: each entry is made in Python, and nobody may ask a server for the whole vocabulary at each token."""
_LEAST_LOGPROB = -9999.0
"""JSON knows no minus infinity; the API puts this in its place."""


def params_of(body: Mapping[str, Any], *, chat: bool, defaults: Mapping[str, Any] | None = None) -> SamplingParams:
    """The sampling parameters of a request's body. A field that is null counts as not given.

    Besides the fields of the API, those of vLLM with the names of `SamplingParams` are taken. What is not to be had
    here (tools, audio, ``echo``, ...) is refused, except at a value that asks for nothing. ``model``, ``stream`` and
    ``stream_options`` are left to the caller; what only concerns an account (``user``, ``metadata``, ``store``, ...) is
    passed over.

    Args:
        body: of the request.
        chat: it is one to /v1/chat/completions.
        defaults: fields of `SamplingParams` for what the body does not say.

    Raises:
        ValueError, TypeError: a field is unknown, cannot be had, or out of its range; with its name.
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        _check_known(name, value, chat=chat)
    fields = {name: given[name] for name in given if name in _OWN | _MORE}
    if "max_completion_tokens" in given:
        limit = given["max_completion_tokens"]
        if fields.setdefault("max_tokens", limit) != limit:
            raise ValueError(f"max_completion_tokens ({limit}) and max_tokens ({fields['max_tokens']}) differ")
    logprobs = _logprobs(given, chat=chat)
    if logprobs is not None:
        fields["logprobs"] = logprobs
    if "response_format" in given:
        structured = _response_format(given["response_format"])
        if structured is not None and "structured_outputs" in fields:
            raise ValueError("response_format and structured_outputs both say what the answer must look like")
        if structured is not None:
            fields["structured_outputs"] = structured
    own_default = {} if chat else {"max_tokens": _COMPLETION_TOKENS}
    return params_of_json(fields, {**own_default, **(defaults or {})})


def params_of_json(given: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> SamplingParams:
    """Sampling parameters from a JSON object with the names of `SamplingParams`.

    The keys of ``logit_bias``, which JSON makes text, become integers again, and ``structured_outputs`` is an object
    with one field of `StructuredOutputsParams`.

    Args:
        given: what the object says.
        defaults: for what it does not say.

    Raises:
        ValueError, TypeError: as `SamplingParams`, and for what is no parameter, or is a function.

    >>> params_of_json({"logit_bias": {"50256": -100}, "structured_outputs": {"choice": ["yes", "no"]}}).logit_bias
    {50256: -100.0}
    """
    for name in given:
        if name not in _PARAMS:
            raise ValueError(_unknown("parameter", name, _PARAMS))
    fields = {**(defaults or {}), **given}
    if "logits_processors" in given:
        raise ValueError("logits_processors are functions, which JSON cannot hold")
    if isinstance(bias := fields.get("logit_bias"), dict):
        fields["logit_bias"] = {_token_id(token): value for token, value in bias.items()}
    if isinstance(structured := fields.get("structured_outputs"), dict):
        for name in structured:
            if name not in _STRUCTURED:
                raise ValueError(_unknown("field of structured_outputs", name, _STRUCTURED))
        fields["structured_outputs"] = StructuredOutputsParams(**structured)
    return SamplingParams(**fields)


def prompts_of(body: Mapping[str, Any], *, chat: bool) -> list[Prompt]:
    """What a body asks to be continued: of a chat one list of messages, else one prompt or several.

    Raises:
        ValueError, TypeError: there is none, or it is not what it should be.
    """
    name = "messages" if chat else "prompt"
    prompt = body.get(name)
    if prompt is None:
        raise ValueError(f"there is no field {name!r}, only {', '.join(map(repr, body)) or 'an empty object'}")
    if chat:
        return [messages_of(prompt)]
    if isinstance(prompt, str) or _is_token_ids(prompt):
        return [prompt]
    if isinstance(prompt, list) and prompt and all(isinstance(item, str) or _is_token_ids(item) for item in prompt):
        return list(prompt)
    raise TypeError(f"prompt must be text, a list of token ids, or a list of such prompts, got {shown(prompt)}")


def messages_of(messages: Any) -> list[dict[str, Any]]:
    """Messages, checked, with contents of several parts of text made one.

    Raises:
        ValueError, TypeError: it is no list of objects with role and content, or a part is not text.
    """
    if not isinstance(messages, list) or not messages:
        raise TypeError(f"messages must be a list of objects with role and content, got {shown(messages)}")
    return [_message(index, message) for index, message in enumerate(messages)]


def options_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Further arguments for `Engine.add_request`: vLLM's ``chat_template_kwargs``, ``priority`` and ``cache_salt``.

    Raises:
        TypeError: one of them is not what it should be.
    """
    options = {}
    for name, (kinds, wanted) in _OPTIONS.items():
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise TypeError(f"{name} must be {wanted}, got {shown(value)}")
        options[name] = value
    return options


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """Makes the bodies of one response, whole or in pieces.

    A ``finish_reason`` that the API does not have (``"abort"``, ``"timeout"``) stays what it is.

    Args:
        chat: for /v1/chat/completions.
        id: of the response.
        model: the model's name.
        created: seconds since 1970.
        params: those of the request.
        decode: the text of tokens, special ones too, such as ``partial(tokenizer.decode, skip_special_tokens=False)``;
            used where log-probabilities are asked for.
    """

    chat: bool
    id: str
    model: str
    created: int
    params: SamplingParams
    decode: Callable[[list[int]], str]

    def body(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The whole: a ``chat.completion`` or a ``text_completion``.

        Choices are numbered over the prompts and their samples: sample i of prompt p is choice ``p * n + i``.

        Args:
            outputs: the last ones, without error, one for each prompt.
        """
        choices: list[dict[str, Any]] = []
        for output in outputs:
            for completion in output.outputs:
                text = completion.text
                said = {"message": {"role": "assistant", "content": text, "refusal": None}}
                choices.append(self._choice(len(choices), completion, said if self.chat else {"text": text}))
        return self._body("chat.completion", choices) | {"usage": _usage(outputs)}

    def chunk(self, completion: Completion, *, prompt: int = 0) -> dict[str, Any]:
        """A piece of a streamed response: what a sample has that is new.

        The caller leaves out samples that have nothing new and have not ended since the last piece.

        Args:
            completion: the sample.
            prompt: the number of its prompt, counted from 0.
        """
        num_before = completion.num_tokens - len(completion.new_token_ids)
        # Clients put the pieces of each field together, so that the role comes with the first tokens alone.
        delta = {**({} if num_before else {"role": "assistant"}), "content": completion.new_text}
        said = {"delta": delta} if self.chat else {"text": completion.new_text}
        choice = self._choice(prompt * self.params.n + completion.index, completion, said, num_before)
        return self._body("chat.completion.chunk", [choice])

    def usage_chunk(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The piece at the end that ``stream_options.include_usage`` asks for.

        Args:
            outputs: the last ones, one for each prompt.
        """
        return self._body("chat.completion.chunk", []) | {"usage": _usage(outputs)}

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _choice(self, index: int, completion: Completion, said: dict[str, Any], num_before: int = 0) -> dict[str, Any]:
        logprobs = self._logprobs(completion, num_before)
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": completion.finish_reason}

    def _logprobs(self, completion: Completion, num_before: int) -> dict[str, Any] | None:
        """The log-probabilities of the tokens behind the first `num_before`."""
        if self.params.logprobs is None or completion.logprobs is None:
            return None
        tokens = list(zip(completion.token_ids, completion.logprobs, strict=True))[num_before:]
        if self.chat:
            return {"content": [self._chat_token(token, found) for token, found in tokens], "refusal": None}
        texts = [self.decode([token]) for token, _ in tokens]
        offset = len(completion.text) - len(completion.new_text) if num_before else 0
        return {
            "tokens": texts,
            "token_logprobs": [_finite(found[token].logprob) for token, found in tokens],
            "top_logprobs": [self._by_text(found) for _, found in tokens],
            "text_offset": [offset + length for length in accumulate(map(len, texts[:-1]), initial=0)][: len(texts)],
        }

    def _chat_token(self, token: int, found: TokenLogprobs) -> dict[str, Any]:
        count = self.params.logprobs
        best = [other for other, logprob in found.items() if count == -1 or logprob.rank <= (count or 0)]
        return {**self._token(token, found), "top_logprobs": [self._token(other, found) for other in best]}

    def _token(self, token: int, found: TokenLogprobs) -> dict[str, Any]:
        text = self.decode([token])
        # A token that is a part of a character has no text of its own, so that its bytes are not known from it.
        known = None if "\ufffd" in text else list(text.encode("utf-8", "surrogatepass"))
        return {"token": text, "logprob": _finite(found[token].logprob), "bytes": known}

    def _by_text(self, found: TokenLogprobs) -> dict[str, float]:
        """Of tokens with the same text, the most probable one."""
        by_text: dict[str, float] = {}
        for token, logprob in found.items():
            value = _finite(logprob.logprob)
            text = self.decode([token])
            by_text[text] = max(value, by_text.get(text, value))
        return by_text


def error_body(
    message: str, *, kind: str = "invalid_request_error", param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The body of a response that is an error: ``{"error": {"message", "type", "param", "code"}}``."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def shown(value: object) -> str:
    """A JSON value in a message: what kind of thing it is, or itself if it is short.

    >>> shown([1, 2]), shown({}), shown([]), shown("x"), shown(None)
    ('a list', 'an object', 'an empty list', '"x"', 'null')
    """
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    text = json.dumps(value, default=repr)
    return text if len(text) <= 40 else text[:37] + "..."


def _check_known(name: str, value: Any, *, chat: bool) -> None:
    neutral = _NEUTRAL[chat]
    options = _OPTIONS.keys() - _PROMPT[not chat]
    taken = _OWN | _MORE | _TRANSLATED[chat] | _PROMPT[chat] | options | _CALLERS | _NO_EFFECT
    if name in neutral:
        if value not in neutral[name]:
            raise ValueError(f"{name} is not supported, got {shown(value)}")
    elif name not in taken:
        if name in _PROMPT[not chat] | _TRANSLATED[not chat] | _NEUTRAL[not chat].keys():
            raise ValueError(f"{name} does not belong to a {'chat' if chat else 'text'} completion")
        raise ValueError(_unknown("field", name, taken))


def _unknown(what: str, name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"unknown {what} {name!r}; " + (f"is it {near[0]}?" if near else f"there are {', '.join(sorted(known))}")


def _logprobs(given: Mapping[str, Any], *, chat: bool) -> int | None:
    if not chat:
        return _logprob_count("logprobs", given)
    logprobs = given.get("logprobs")
    best = _logprob_count("top_logprobs", given)
    if logprobs is not None and not isinstance(logprobs, bool):
        raise TypeError(f"logprobs of a chat must be true or false, got {shown(logprobs)}; top_logprobs says how many")
    if logprobs:
        return 0 if best is None else best
    if best:
        raise ValueError(f"top_logprobs is {best}, which needs logprobs to be true")
    return None


def _logprob_count(name: str, given: Mapping[str, Any]) -> int | None:
    if name not in given:
        return None
    count = integer(name, given[name])
    if not 0 <= count <= _MOST_LOGPROBS:
        raise ValueError(f"{name} must be in [0, {_MOST_LOGPROBS}], got {shown(count)}")
    return count


def _response_format(given: Any) -> StructuredOutputsParams | None:
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json=True)
    if kind != "json_schema":
        what = shown(given) if kind is None else shown(kind)
        raise ValueError(f"the type of response_format must be text, json_object or json_schema, got {what}")
    named = given.get("json_schema")
    schema = named.get("schema") if isinstance(named, dict) else None
    if not isinstance(schema, dict):
        raise TypeError(f"response_format.json_schema must have an object 'schema', got {shown(schema)}")
    return StructuredOutputsParams(json=schema)


def _token_id(text: Any) -> int:
    try:
        return int(text)
    except (TypeError, ValueError):
        raise ValueError(f"a key of logit_bias must be a token id, got {shown(text)}") from None


def _is_token_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)


def _message(index: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise TypeError(f"message {index} must be an object with role and content, got {shown(message)}")
    missing = [name for name in ("role", "content") if name not in message]
    if missing:
        raise ValueError(f"message {index} has no {' and no '.join(missing)}")
    if not isinstance(message["role"], str):
        raise TypeError(f"the role of message {index} must be text, got {shown(message['role'])}")
    content = message["content"]
    if not isinstance(content, list):
        return message
    for part in content:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            kind = part.get("type") if isinstance(part, dict) else part
            raise ValueError(f"the content of message {index} may have parts of text only, got {shown(kind)}")
    return {**message, "content": "".join(part["text"] for part in content)}


def _usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    completion_tokens = sum(completion.num_tokens for output in outputs for completion in output.outputs)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(output.timings.cached_tokens for output in outputs)},
    }


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
