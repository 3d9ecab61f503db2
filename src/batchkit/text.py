"""From tokens to text: the tokenizer protocol, incremental decoding, and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from .types import Request

__all__ = ["IncrementalDecoder", "OutputText", "StreamingTokenizer", "TextStream", "Tokenizer", "num_shared"]

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

    Three more methods are used where a tokenizer has them:

    * ``decode_stream(prompt_ids, skip_special_tokens)``, see `StreamingTokenizer`: saves time;
    * ``apply_chat_template(messages, **kwargs) -> list[int]``: the prompt of a conversation, with its special tokens;
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


def num_shared(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two sequences have in common at their beginning.

    Of ``encode("")`` and a text's tokens: how many special ones (BOS) stand in front of any text.
    """
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    return count


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

    __slots__ = ("_base", "_context", "_head", "_pending", "_sent", "_skip", "_stream", "_tokenizer", "_undecided")

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._context: list[int] = []
        self._undecided = 0  # marks at the end of its text that may still become a character, counted as pending
        self._base: str | None = None  # its text without them; None: not decoded yet
        self._pending: list[int] = []  # the tokens after it
        self._sent = 0  # how much of the pending text was returned
        self._head = ""  # the pending text that is the prompt's
        self._prime(prompt_ids)
        self._stream: TextStream | None = None
        if not self._head and isinstance(tokenizer, StreamingTokenizer):
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
        text = self._text()
        start, end = self._start(text), _decided(text)
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
        text = self._text() if self._pending or self._undecided else ""
        return text[self._start(text) :]

    def _prime(self, prompt_ids: Sequence[int]) -> None:
        size = _PROMPT_TOKENS
        while True:
            context = list(prompt_ids[-size:])
            text = self._decode(context)
            if size >= len(prompt_ids) or (text and text[0] != _MARK):
                break
            size *= 4
        if not text:  # nothing but special tokens
            context = context[-_PROMPT_TOKENS:]
        undecided = len(text) - _decided(text)
        self._move_context(context, undecided)
        for size in range(1, undecided + 1):
            if self._decode(context[:-size])[-1:] != _MARK:  # what lies behind begins a character
                self._move_context(context[:-size])
                self._pending = context[-size:]
                break
        if undecided:
            self._head = self._text()
            self._sent = len(self._head)

    def _text(self) -> str:
        """The pending text."""
        if self._base is None:
            text = self._decode(self._context)
            self._base = text[: len(text) - self._undecided]
        text = self._decode(self._context + self._pending)
        if text.startswith(self._base):
            return text[len(self._base) :]
        return self._decode(self._pending)  # the tokens change the text before them, which stays as it is

    def _start(self, text: str) -> int:
        """Where the pending text goes on after what was returned."""
        if self._head and not text.startswith(self._head):  # the output completed a character of the prompt
            self._sent = 0
            while text[self._sent : self._sent + 1] == self._head[self._sent]:
                self._sent += 1
            self._head = ""
        return self._sent

    def _shorten(self, text: str) -> int:
        """Bound the number of pending tokens, whose text this is; returns how much of it is decided now."""
        self._stream = None  # it would keep the tokens that are let go here
        own = self._decode(self._pending)
        if not own:
            self._pending = []  # as context they would not do: the space before a word would be lost behind them
            return _decided(text)
        # What the old context left undecided is given up.
        undecided = min(len(text) - _decided(text), len(own) - _decided(own))
        end = len(text) - undecided
        sent, head = max(self._sent, end) - end, self._head[end:]
        self._move_context(self._pending, undecided)
        self._sent, self._head = sent, head
        return end

    def _move_context(self, token_ids: list[int], undecided: int = 0) -> None:
        self._context, self._undecided, self._base = token_ids, undecided, None
        self._pending = []
        self._sent = 0
        self._head = ""

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)


def _decided(text: str) -> int:
    """The length of the text without the marks at its end that may still become a character."""
    end = len(text)
    while end and text[end - 1] == _MARK and len(text) - end < _MAX_MARKS:
        end -= 1
    return end


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
