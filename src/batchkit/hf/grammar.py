"""Structured output: which tokens may come next, by the llguidance library.

A request's grammar is compiled once and shared; what a sequence has matched is a copy of it that took in the tokens of
the output (`TokenStates`), and never the prompt. Nothing here is state that a result depends on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import RequestError
from .lru import LRU
from .tokenizer import HFTokenizer

if TYPE_CHECKING:
    from ..params import StructuredOutputsParams
    from ..types import Request

__all__ = ["Grammars", "Matcher"]

_MAX_MESSAGE = 500
_WHITESPACE = r"[ \n\t]{0,20}"
"""Between the parts of JSON. Without a bound some models never find out of it."""


class Matcher:
    """What may follow the tokens taken in so far.

    Args:
        matcher: llguidance's, this object's own.
        eos_token_id: the one id that llguidance takes for the end.
        ends: the ids that end the request; they are allowed exactly where the text matches.
    """

    def __init__(self, matcher: Any, eos_token_id: int, ends: Sequence[int]) -> None:
        self._matcher = matcher
        self._eos_token_id = eos_token_id
        self._ends = list(ends)

    def take(self, token_ids: Sequence[int]) -> None:
        """Take in the next tokens of the output.

        Raises:
            RequestError: they do not match, or following them exceeds llguidance's limits.
        """
        self._matcher.consume_tokens(list(token_ids))
        self._check()

    def allowed(self, vocab_size: int) -> npt.NDArray[np.bool_]:
        """[vocab_size], whether each token may come next. Ids that the tokenizer does not have may not.

        Raises:
            RequestError: finding out exceeds llguidance's limits.
        """
        allowed = np.zeros(vocab_size, np.bool_)
        if not self._matcher.is_stopped():
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            known = np.unpackbits(bits, count=min(vocab_size, 8 * len(bits)), bitorder="little")
            allowed[: len(known)] = known
        self._check()
        # An id that ends the request may spell text too, which it never stands for.
        allowed[[token for token in (self._eos_token_id, *self._ends) if token < vocab_size]] = False
        if self._matcher.is_accepting():
            allowed[self._ends] = True
        return allowed

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError(f"the structured output cannot go on: {_shortened(self._matcher.get_error())}")


class Grammars:
    """The grammars of requests, compiled for one tokenizer.

    Args:
        tokenizer: whose tokens are matched. A grammar needs an `HFTokenizer` of the tokenizers library.
        eos_token_ids: what the model says ends a text.
        vocab_size: width of the logits.
        size: how many grammars are kept compiled.
    """

    def __init__(self, tokenizer: object, eos_token_ids: Iterable[int], vocab_size: int, *, size: int = 128) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._vocab_size = vocab_size
        self._compiled: LRU[StructuredOutputsParams, Any] = LRU(size)
        self._tokens: Any = None

    def check(self, request: Request) -> None:
        """Compile what a request asks for.

        Raises:
            RequestError: it cannot be compiled or can match nothing; or llguidance, a tokenizer that it can use, or a
                token that ends the text is missing.
        """
        if request.params.structured_outputs is not None:
            self.matcher(request)

    def matcher(self, request: Request) -> Matcher:
        """A new matcher, before any token. Raises what `check` raises."""
        wanted = request.params.structured_outputs
        assert wanted is not None
        eos = self._eos(request)
        compiled = self._compiled.get(wanted, lambda: self._compile(wanted, eos[0]))
        return Matcher(compiled.deep_copy(), self._tokens.eos_token, eos)

    def drop_caches(self) -> None:
        """Forget the compiled grammars."""
        self._compiled.clear()

    def _eos(self, request: Request) -> list[int]:
        """The ids that end the text: EOS tokens that end the request, ascending."""
        own = getattr(self._tokenizer, "eos_token_id", None)
        known = self._eos_token_ids | ({own} if own is not None else set())
        ends = sorted(token for token in known & request.stop_token_ids if token < self._vocab_size)
        if not ends:
            raise RequestError(
                "structured_outputs need an EOS token to end the text with, and neither the model nor the tokenizer "
                "has one that ends the request"
            )
        return ends

    def _compile(self, wanted: StructuredOutputsParams, eos_token_id: int) -> Any:
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise RequestError("structured_outputs need llguidance: pip install batchkit[structured]") from None
        if self._tokens is None:
            self._tokens = _tokens(self._tokenizer, eos_token_id)
        try:
            compiled = LLMatcher(self._tokens, _grammar(wanted), log_level=0)
        except ValueError as error:  # a text that is no schema at all; other faults are found in the matcher
            raise RequestError(f"structured_outputs cannot be compiled: {_shortened(str(error))}") from None
        if compiled.is_error():
            raise RequestError(f"structured_outputs cannot be compiled: {_shortened(compiled.get_error())}")
        # What can match nothing is found here, and the copies need not find their first tokens again.
        if not any(compiled.compute_bitmask()) or compiled.is_error():
            raise RequestError(f"structured_outputs can match nothing: {_shortened(compiled.get_error())}")
        return compiled


def _tokens(tokenizer: object, eos_token_id: int) -> Any:
    """The tokenizer as llguidance has it. It takes about a second."""
    from llguidance.hf import from_tokenizer

    if not isinstance(tokenizer, HFTokenizer) or not tokenizer.is_plain:
        what = "the runner has none" if tokenizer is None else f"this {type(tokenizer).__name__} is not one"
        raise RequestError(
            "structured_outputs need a fast tokenizer of transformers that leaves its text as the tokenizers library "
            f"makes it, and {what}"
        )
    own = tokenizer.eos_token_id
    try:
        return from_tokenizer(tokenizer.inner, eos_token=eos_token_id if own is None else own)
    except Exception as error:
        raise RequestError(
            f"structured_outputs: llguidance cannot use this tokenizer: {_shortened(str(error))}"
        ) from error


def _grammar(wanted: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher

    if wanted.json is not None:
        return LLMatcher.grammar_from_json_schema(str(wanted.json), defaults={"whitespace_pattern": _WHITESPACE})
    if wanted.regex is not None:
        return LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.choice is not None:
        # By the number of each character, so that none has a meaning.
        texts = ("".join(f"\\x{{{ord(character):x}}}" for character in text) for text in wanted.choice)
        return LLMatcher.grammar_from_regex("|".join(texts))
    assert wanted.grammar is not None
    return LLMatcher.grammar_from_lark(wanted.grammar)


def _shortened(message: str) -> str:
    # Behind the first sentence come the parser's state and the whole grammar.
    message = " ".join(message.partition("<state>")[0].split())
    return message if len(message) <= _MAX_MESSAGE else message[:_MAX_MESSAGE] + " ..."
