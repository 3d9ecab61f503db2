"""A line of the input made a row: what to ask, how, and what to keep."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..params import SamplingParams
from .templates import Template

__all__ = ["BadRow", "Row", "RowReader"]

_PARAMS = {field.name: field for field in dataclasses.fields(SamplingParams)}


@dataclass(frozen=True, slots=True)
class Row:
    """One good line.

    Attributes:
        number: of the line, counted from 1.
        id: its own, or the number.
        prompt: text, token ids, or messages.
        params: how to sample.
        chat_template_kwargs: for messages.
        kept: columns for the record.
    """

    number: int
    id: str | int
    prompt: str | list[int] | list[dict[str, Any]]
    params: SamplingParams
    chat_template_kwargs: dict[str, Any] | None
    kept: dict[str, Any]


class BadRow(Exception):
    """A line that cannot be taken.

    Attributes:
        id: what its record gets.
        kept: as in `Row`, as far as it could be read.
    """

    def __init__(self, row_id: str | int, message: str, kept: dict[str, Any] | None = None) -> None:
        self.id = row_id
        self.kept = kept or {}
        super().__init__(message)


class RowReader:
    """Reads rows.

    An id is copied to the record and otherwise left alone. Rows may share one: to see that they do would take all ids
    of the file in memory, and records are in the order of the rows anyway.

    Args:
        text: a line is a prompt (the column ``prompt``), not JSON.
        maybe_text: a line that is not JSON may be meant as a prompt.
        template: makes the prompt of other columns.
        chat: a prompt of text is a user's message.
        keep: the columns to copy, by the names that they get.
        defaults: sampling parameters for what a row does not say.
    """

    def __init__(
        self,
        *,
        text: bool = False,
        maybe_text: bool = False,
        template: Template | None = None,
        chat: bool = False,
        keep: Mapping[str, str],
        defaults: Mapping[str, Any],
    ) -> None:
        self._text = text
        self._hint = "; --format text takes each line as a prompt" if maybe_text else ""
        self._template = template
        self._chat = chat
        self._keep = keep
        self._defaults = defaults
        self._params = SamplingParams(**defaults)
        self._columns: list[str] | None = None  # of the first row
        self._absent = list(dict.fromkeys(keep.values()))

    def read(self, number: int, line: bytes) -> Row:
        """The row of a line.

        Raises:
            BadRow: it is none.
        """
        try:
            decoded = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            found = f"byte {error.start} is {line[error.start]:#04x}"
            raise BadRow(number, f"line {number} is not UTF-8: {found}") from None
        row = {"prompt": decoded.rstrip("\r\n")} if self._text else self._object(number, decoded)
        if self._columns is None:
            self._columns = list(row)
        if self._absent:
            self._absent = [column for column in self._absent if column not in row]
        kept: dict[str, Any] = {}
        row_id = row.get("id")
        if row_id is None:
            row_id = number
        try:
            kept = {name: _kept(row.get(column)) for name, column in self._keep.items()}
            if isinstance(row_id, bool) or not isinstance(row_id, (str, int)):
                given, row_id = row_id, number
                raise TypeError(f"id must be text or an integer, got {_kind(given)}")
            return Row(number, row_id, *self._prompt(row), kept)
        except (TypeError, ValueError, RecursionError) as error:
            raise BadRow(row_id, f"line {number}: {error}", kept) from None

    def absent(self) -> list[str]:
        """What to say of the columns to keep that no row has had."""
        if self._columns is None:
            return []
        there = ", ".join(map(repr, self._columns)) or "none"
        return [f"column {column!r} was in no row (there are: {there})" for column in self._absent]

    def _object(self, number: int, text: str) -> dict[str, Any]:
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BadRow(number, f"line {number} is not JSON: {error}{self._hint}") from None
        if not isinstance(row, dict):
            raise BadRow(number, f"line {number} must be an object with a prompt, got {_kind(row)}")
        return row

    def _prompt(
        self, row: dict[str, Any]
    ) -> tuple[str | list[int] | list[dict[str, Any]], SamplingParams, dict[str, Any] | None]:
        if self._template is not None:
            return self._plain(self._template.fill(row), row)
        misplaced = [name for name in row if name in _PARAMS and name not in self._keep.values()]
        if misplaced:
            raise ValueError(f"{', '.join(misplaced)} must stand in params")
        if "messages" in row:
            if "prompt" in row:
                raise ValueError("there are both a prompt and messages")
            return _messages(row["messages"]), self._sampling(row), _template_kwargs(row)
        if "chat_template_kwargs" in row and not self._chat:
            raise ValueError("chat_template_kwargs are for messages, and there are none")
        if "prompt" not in row:
            there = ", ".join(map(repr, row)) or "an empty object"
            raise ValueError(f"there is no prompt and no messages, only {there}; --template makes a prompt of columns")
        return self._plain(_plain_prompt(row["prompt"]), row)

    def _plain(
        self, prompt: str | list[int], row: dict[str, Any]
    ) -> tuple[str | list[int] | list[dict[str, Any]], SamplingParams, dict[str, Any] | None]:
        if not self._chat:
            return prompt, self._sampling(row), None
        if not isinstance(prompt, str):
            raise TypeError("with --chat a prompt must be text, and this is a list of token ids")
        return [{"role": "user", "content": prompt}], self._sampling(row), _template_kwargs(row)

    def _sampling(self, row: dict[str, Any]) -> SamplingParams:
        given = row.get("params")
        if given is None:
            return self._params
        if not isinstance(given, dict):
            raise TypeError(f"params must be an object, got {_kind(given)}")
        for name in given:
            if name not in _PARAMS:
                near = difflib.get_close_matches(name, _PARAMS, n=1)
                raise ValueError(f"unknown parameter {name!r}; " + (f"is it {near[0]}?" if near else _known()))
        return SamplingParams(**{**self._defaults, **given})


def _kept(value: Any) -> Any:
    if isinstance(value, (dict, list)):
        json.dumps(value)  # what is nested so deep that it can be read and not written is this row's fault
    return value


def _plain_prompt(prompt: Any) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list):
        if all(type(token) is int for token in prompt):
            return prompt
        raise TypeError("prompt must be text or a list of token ids; not all of these are integers")
    raise TypeError(f"prompt must be text or a list of token ids, got {_kind(prompt)}")


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        what = "an empty list" if messages == [] else _kind(messages)
        raise TypeError(f"messages must be a list of objects with role and content, got {what}")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise TypeError(f"message {index} must be an object with role and content, got {_kind(message)}")
        missing = [name for name in ("role", "content") if name not in message]
        if missing:
            raise ValueError(f"message {index} has no {' and no '.join(missing)}")
        if not isinstance(message["role"], str):
            raise TypeError(f"the role of message {index} must be text, got {_kind(message['role'])}")
    return messages


def _template_kwargs(row: dict[str, Any]) -> dict[str, Any] | None:
    given = row.get("chat_template_kwargs")
    if given is not None and not isinstance(given, dict):
        raise TypeError(f"chat_template_kwargs must be an object, got {_kind(given)}")
    return given


def _known() -> str:
    return f"there are {', '.join(sorted(_PARAMS))}"


def _kind(value: object) -> str:
    """A JSON value in a message."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
