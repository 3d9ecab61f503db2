"""The adapter for transformers' tokenizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..text import TextStream, Tokenizer

__all__ = ["HFTokenizer", "as_tokenizer"]


class _Stream:
    """A `TextStream` of the tokenizers library."""

    __slots__ = ("_backend", "_stream")

    def __init__(self, backend: Any, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        from tokenizers.decoders import DecodeStream

        self._backend = backend
        self._stream = DecodeStream(ids=list(prompt_ids), skip_special_tokens=skip_special_tokens)

    def step(self, token_id: int) -> str | None:
        text: str | None = self._stream.step(self._backend, token_id)
        return text


class HFTokenizer:
    """A `batchkit.text.Tokenizer` made of a transformers tokenizer, fast or slow.

    ``clean_up_tokenization_spaces`` is never applied: it changes text that a stream has already given.

    Args:
        inner: the transformers tokenizer. It is used as it is and not changed.

    Attributes:
        inner: the same.
    """

    def __init__(self, inner: PreTrainedTokenizerBase) -> None:
        self.inner: Any = inner
        special = dict(zip(inner.all_special_tokens, inner.all_special_ids, strict=True))
        special.update({token.content: id for id, token in inner.added_tokens_decoder.items() if token.special})
        self._special = special
        self._backend: Any = None
        self._backend = self._plain_backend()

    @property
    def is_plain(self) -> bool:
        """Whether it is of the tokenizers library, and leaves its text as the library makes it."""
        return self._backend is not None

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's end of sequence."""
        token_id: int | None = self.inner.eos_token_id
        return token_id

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt, with the special tokens that the tokenizer adds by default."""
        token_ids: list[int] = self.inner.encode(text)
        return token_ids

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> list[int]:
        """The prompt of a conversation, by the tokenizer's own template, which sets the special tokens.

        It opens the assistant's turn, unless `kwargs` say ``add_generation_prompt=False`` or
        ``continue_final_message=True``.
        """
        kwargs.setdefault("add_generation_prompt", not kwargs.get("continue_final_message", False))
        messages = [dict(message) for message in messages]
        token_ids: list[int] = self.inner.apply_chat_template(messages, **kwargs, tokenize=True, return_dict=False)
        return token_ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of the tokens, as they are: without cleaning up spaces."""
        text: str
        if self._backend is not None:  # the same text in a fifth of the time
            text = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        else:
            text = self.inner.decode(
                list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        return text

    def decode_stream(self, prompt_ids: Sequence[int], skip_special_tokens: bool) -> TextStream | None:
        """A stream of the tokenizers library behind a prompt; None if this tokenizer has none or decodes otherwise."""
        return None if self._backend is None else _Stream(self._backend, prompt_ids, skip_special_tokens)

    def special_token_id(self, text: str) -> int | None:
        """The id of the special token with exactly this text."""
        return self._special.get(text)

    def _plain_backend(self) -> Any:
        """The backend, if it is of the tokenizers library and its text is that of the tokenizer itself."""
        backend = getattr(self.inner, "backend_tokenizer", None)
        if backend is None:
            return None
        # Some classes work on the text after the backend has decoded it; a stream would not have that.
        probe = list(range(min(512, len(self.inner))))
        same = backend.decode(probe, skip_special_tokens=False) == self.decode(probe, skip_special_tokens=False)
        return backend if same else None


def as_tokenizer(tokenizer: Any) -> Tokenizer | None:
    """A transformers tokenizer adapted; None, and a `Tokenizer` of the caller's own, as it is."""
    from transformers import PreTrainedTokenizerBase

    if isinstance(tokenizer, PreTrainedTokenizerBase):
        return HFTokenizer(tokenizer)
    checked: Tokenizer | None = tokenizer
    return checked
