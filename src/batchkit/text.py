"""From tokens to text: the tokenizer protocol, incremental decoding, and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from os.path import commonprefix
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from .types import Request

__all__ = ["IncrementalDecoder", "OutputText", "StreamingTokenizer", "TextStream", "Tokenizer"]

_MARK = "\ufffd"
"""What decoders put where bytes are no character, or not one yet."""
_MAX_MARKS = 3
"""Marks at the end of a text that may still become a character, of at most 4 bytes: each byte may be a mark."""
_PROMPT_TOKENS = 8
"""Tokens of the prompt that suffice as context, unless their text is empty or starts within a character."""
_MAX_PENDING = 16
"""Tokens kept for a text that is not complete; a character whose bytes lie further apart may be given up."""


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer.

    Two more methods are used where a tokenizer has them:

    * ``decode_stream(prompt_ids, skip_special_tokens)``, see `StreamingTokenizer`: saves time;
    * ``special_token_id(text: str) -> int | None``: the id of the special token with exactly this text. With it, a
      stop string that is a special token works although such tokens are left out of the text: it becomes a stop token.
    """

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text, if there is one."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt, with the special tokens that prompts of this model have."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of the tokens. Bytes that are no character, or half of one, become U+FFFD."""


class TextStream(Protocol):
    """Decodes one sample token by token."""

    def step(self, token_id: int) -> str | None:
        """The text that is complete with this token and was not given before; None or empty: nothing yet.

        Text is given up to the end of the tokens or not at all. Whatever it raises makes `IncrementalDecoder` go on
        without it.
        """


@runtime_checkable
class StreamingTokenizer(Protocol):
    """The optional part of a tokenizer that decodes token by token, faster than with `Tokenizer.decode`."""

    def decode_stream(self, prompt_ids: Sequence[int], skip_special_tokens: bool) -> TextStream | None:
        """Start a stream behind a prompt, of which the last tokens are given; None: not for this tokenizer."""


class IncrementalDecoder:
    """The text of one sample, token by token.

    What `step` and `finish` return, joined, is ``decode(prompt + output)`` without ``decode(prompt)`` in front. Text
    that was returned never changes, and an incomplete character is only returned by `finish`, as U+FFFD. A character
    that the prompt began and the output completes belongs to the output. Where a tokenizer rewrites the text of earlier
    tokens (byte fallback turns complete characters into marks when a bad byte follows), what was returned stays.

    A token costs the decoding of a few tokens before it, whatever the length of the text: decoding in the context of
    the tokens that last gave text keeps leading spaces right, and starts at the beginning of a character.

    Args:
        tokenizer: where it has a ``decode_stream``, that is used for all but the difficult tokens.
        prompt_ids: the prompt; only its end is decoded.
        skip_special_tokens: leave special tokens out.
    """

    __slots__ = ("_context", "_context_text", "_head", "_pending", "_sent", "_skip", "_stream", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._context: list[int] = []
        self._context_text: str | None = ""  # None: not decoded yet
        self._pending: list[int] = []  # tokens after the context, whose text is not complete
        self._sent = 0  # characters of their text that were returned
        self._head = ""  # what the prompt's part of them looked like before the output
        self._stream: TextStream | None = None
        self._prime(prompt_ids)
        if not self._pending and isinstance(tokenizer, StreamingTokenizer):
            self._stream = tokenizer.decode_stream(self._context, skip_special_tokens)

    def step(self, token_id: int) -> str:
        """Take the next token; the text that is now complete, often empty."""
        self._pending.append(token_id)
        if self._stream is not None:
            try:
                piece = self._stream.step(token_id)
            except Exception:
                # tokenizers gives up with a plain Exception when a token changes the text before it.
                self._stream = piece = None
            if piece:
                piece = piece[self._sent :]
                self._move_context(self._pending)
                return piece
        text = self._text_of(self._pending)
        start = self._start(text)
        end = len(text)
        while end and text[end - 1] == _MARK and len(text) - end < _MAX_MARKS:
            end -= 1
        if text and end == len(text):
            self._move_context(self._pending)
            self._stream = None  # it would give this text once more
        else:
            self._sent = max(start, end)
            if len(self._pending) >= _MAX_PENDING:
                end = self._shorten(text)
        return text[start:end]

    def finish(self) -> str:
        """The text of what is incomplete. Nothing may follow."""
        text = self._text_of(self._pending) if self._pending else ""
        text = text[self._start(text) :]
        self._pending = []
        self._sent = 0
        return text

    def _prime(self, prompt_ids: Sequence[int]) -> None:
        size = _PROMPT_TOKENS
        while True:
            context = list(prompt_ids[-size:])
            text = self._decode(context)
            if size >= len(prompt_ids) or (text and text[0] != _MARK):
                break
            size *= 4
        while context and text[-1:] == _MARK and len(self._pending) <= _MAX_MARKS:
            self._pending.insert(0, context.pop())
            text = self._decode(context)
        self._context, self._context_text = context, text
        if self._pending:
            self._head = self._text_of(self._pending)
            self._sent = len(self._head)

    def _start(self, text: str) -> int:
        """Where the text of the pending tokens goes on after what was returned."""
        if self._head and not text.startswith(self._head):  # the output completed a character of the prompt
            self._sent = len(commonprefix((self._head, text)))
            self._head = ""
        return self._sent

    def _shorten(self, text: str) -> int:
        """Make context of the oldest pending tokens, to bound their number; returns how much of `text` is then out."""
        pending = self._pending
        # Four tokens stay, so that no undecided character is cut. Within a decided one, the texts do not add up.
        for size in range(len(pending) - 4, 0, -1):
            old = pending[:size]
            old_text = self._text_of(old)
            # Tokens without text would be no context: the space before a word would be lost behind them.
            context = old if old_text else self._context
            if old_text + self._text_of(pending[size:], context) == text:
                sent = max(self._sent, len(old_text))
                if old_text:
                    self._move_context(old)
                self._pending = pending[size:]
                self._sent = sent - len(old_text)
                break
        else:
            sent = len(text)
            self._move_context(pending)
        self._stream = None  # it still has the tokens that were just let go
        return sent

    def _move_context(self, token_ids: list[int]) -> None:
        self._context, self._context_text = token_ids, None
        self._pending = []
        self._sent = 0
        self._head = ""

    def _text_of(self, token_ids: list[int], context: list[int] | None = None) -> str:
        """The text of the tokens behind a context, by default the present one."""
        if context is None or context is self._context:
            context = self._context
            if self._context_text is None:
                self._context_text = self._decode(context)
            context_text = self._context_text
        else:
            context_text = self._decode(context)
        text = self._decode(context + token_ids)
        if text.startswith(context_text):
            return text[len(context_text) :]
        return self._decode(token_ids)  # they change the text before them, which stays as it is

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)


class _StopString:
    """Looks for one string in a text that comes in pieces (Knuth, Morris and Pratt); each character is seen once."""

    __slots__ = ("_back", "matched", "string")

    def __init__(self, string: str) -> None:
        self.string = string
        self.matched = 0  # the longest beginning of `string` that the text so far ends with, never all of it
        # _back[n]: the longest beginning of `string`, shorter than n, that its first n characters end with.
        self._back = back = [0, 0]
        for char in string[1:]:
            n = back[-1]
            while n and string[n] != char:
                n = back[n]
            back.append(n + (string[n] == char))

    def feed(self, piece: str) -> list[int]:
        """Take more text; where in it the string ends (offsets just behind it), every time that it does."""
        string, back, n = self.string, self._back, self.matched
        if not n and string[0] not in piece:
            return []
        ends = []
        for i, char in enumerate(piece):
            while n and string[n] != char:
                n = back[n]
            if string[n] == char:
                n += 1
                if n == len(string):
                    ends.append(i + 1)
                    n = back[n]
        self.matched = n
        return ends


class OutputText:
    """The text of one sample: decodes its tokens, looks for its stop strings.

    Text that may be the beginning of a stop string, or half of a character, is held back until it is decided; `finish`
    releases it at any ending. The request ends with the first token that completes a stop string. If that token
    completes several, the one that begins first counts, and of those the longest. One that is complete within the
    first ``min_tokens`` tokens is passed over. `append` costs the same however long the text is.

    ``token_ids`` of the request are not cut: they go up to the token in which the stop string ends.

    Attributes:
        pieces: the text released so far; append-only.
    """

    __slots__ = ("_decoder", "_ended", "_held", "_include_stop", "_min_tokens", "_stops", "pieces")

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        params = request.params
        self.pieces: list[str] = []
        self._decoder = IncrementalDecoder(
            tokenizer, request.prompt_token_ids, skip_special_tokens=params.skip_special_tokens
        )
        self._stops = [_StopString(string) for string in params.stop]
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self._held = ""  # decoded, but perhaps the beginning of a stop string
        self._ended = False

    def append(self, token_id: int, num_output: int) -> bool:
        """Take the next token and release the text that is safe.

        Args:
            token_id: the token.
            num_output: the number of output tokens, this one included.

        Returns:
            Whether a stop string was found. The text then ends before it, or after it with
            ``include_stop_str_in_output``, and nothing may follow.
        """
        piece = self._decoder.step(token_id)
        if not piece:
            return False
        if not self._stops:
            self.pieces.append(piece)
            return False
        text = self._held + piece
        found = [
            (len(self._held) + end - len(stop.string), -len(stop.string))
            for stop in self._stops
            for end in stop.feed(piece)
        ]
        if found and num_output > self._min_tokens:
            start, negative_length = min(found)
            self._held = ""
            self._ended = True
            self._release(text[: start - negative_length if self._include_stop else start])
            return True
        safe = len(text) - max(stop.matched for stop in self._stops)
        self._held = text[safe:]
        self._release(text[:safe])
        return False

    def finish(self) -> None:
        """Release what was held back; half a character as U+FFFD. Idempotent; nothing may follow."""
        if not self._ended:
            self._ended = True
            self._release(self._held + self._decoder.finish())
            self._held = ""

    def _release(self, text: str) -> None:
        if text:
            self.pieces.append(text)
