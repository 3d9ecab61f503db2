"""Rows into the engine, and what becomes of a prompt that is too long: an error, or the part that fits."""

from __future__ import annotations

from typing import Literal

from ..engine import Engine
from ..errors import RequestTooLong
from ..text import num_shared
from .rows import Row

__all__ = ["OnTooLong", "most_tokens", "prompt_ids", "submit"]

OnTooLong = Literal["error", "truncate-left", "truncate-right"]


def submit(engine: Engine, row: Row, on_too_long: OnTooLong) -> tuple[str, int]:
    """Add a row's request.

    Returns:
        The engine's id for it, and how many tokens were cut off its prompt.

    Raises:
        Whatever `Engine.add_request` and the tokenizer raise.
    """
    ask = row.ask
    try:
        return engine.add_request(
            ask.prompt, ask.params, chat_template_kwargs=ask.chat_template_kwargs, **ask.options
        ), 0
    except RequestTooLong as error:
        if on_too_long == "error":
            raise
        if ask.params.max_tokens is None:
            raise RequestTooLong(f"{error}; to cut it, max_tokens must say how much room the answer needs") from None
        token_ids = prompt_ids(engine, row)
        room = most_tokens(engine) - ask.params.max_tokens
        cut = _cut(token_ids, room, on_too_long, _special_prefix(engine, token_ids))
        if cut is None:
            raise
        return engine.add_request(cut, ask.params, **ask.options), len(token_ids) - len(cut)


def prompt_ids(engine: Engine, row: Row) -> tuple[int, ...]:
    """The tokens of a row's prompt, as the engine makes them."""
    return engine.encode(row.ask.prompt, chat_template_kwargs=row.ask.chat_template_kwargs)


def most_tokens(engine: Engine) -> int:
    """How long a prompt and its answer may be together."""
    stats = engine.stats()
    # The last token generated is never written, so that it needs no KV slot.
    return min(stats.max_model_len, stats.num_blocks * stats.block_size + 1)


def _special_prefix(engine: Engine, token_ids: tuple[int, ...]) -> int:
    """How many tokens the tokenizer puts in front of any text (BOS): models count on them."""
    specials = engine.tokenizer.encode("") if engine.tokenizer is not None else []
    return num_shared(specials, token_ids)


def _cut(token_ids: tuple[int, ...], room: int, how: OnTooLong, num_special: int) -> list[int] | None:
    """`room` of the tokens, the special ones in front among them; None: not one other would be left."""
    left = room - num_special
    if left < 1:
        return None
    head, rest = token_ids[:num_special], token_ids[num_special:]
    return [*head, *(rest[-left:] if how == "truncate-left" else rest[:left])]
