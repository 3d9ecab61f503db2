"""``--template 'Summarise: {body}'``: a prompt made of a row's columns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from string import Formatter
from typing import Any

__all__ = ["Template"]


class Template:
    """Text with columns in braces; two braces are one.

    Only plain names stand in them: the template is code of the user, the row is not, and neither attributes nor
    widths are to be had from it.

    Args:
        text: as it was typed.

    Raises:
        ValueError: it is no template, or has no column.

    >>> Template("{{{title}}}: {n}").fill({"title": "Tea", "n": 2, "other": None})
    '{Tea}: 2'
    """

    def __init__(self, text: str) -> None:
        try:
            parts = list(Formatter().parse(text))
        except ValueError as error:
            raise ValueError(
                f"the template {text!r} is not well formed ({error}); a brace itself is {{{{ or }}}}"
            ) from None
        self._parts: list[tuple[str, str | None]] = []
        for literal, column, spec, conversion in parts:
            if column is not None and (not column.strip() or set(column) & set(".[]") or spec or conversion):
                raise ValueError(
                    f"the template {text!r} may have plain column names in braces, such as {{body}}, and nothing else"
                )
            self._parts.append((literal, column))
        if all(column is None for _, column in self._parts):
            raise ValueError(f"the template {text!r} names no column, so every prompt would be the same")

    def fill(self, row: Mapping[str, Any]) -> str:
        """The prompt of a row. Text goes in as it is, anything else as JSON.

        Raises:
            ValueError: a column is not there, or null.
        """
        pieces: list[str] = []
        for literal, column in self._parts:
            pieces.append(literal)
            if column is None:
                continue
            if column not in row:
                raise ValueError(
                    f"there is no column {column!r} for the template, only {', '.join(map(repr, row)) or 'none at all'}"
                )
            value = row[column]
            if value is None:
                raise ValueError(f"column {column!r} of the template is null")
            pieces.append(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        return "".join(pieces)
