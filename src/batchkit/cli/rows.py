"""A line of the input made a row: what to ask, how, and what to keep."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

from ..intake import Prompt
from ..openai import messages_of, options_of, params_of, params_of_json, prompts_of, shown
from ..params import SamplingParams
from .keys import HashTable, Key, hash_of, told_params
from .lines import Lines
from .templates import Template

__all__ = ["AGAIN", "Ask", "BadRow", "Row", "RowReader", "Rows", "Shard", "is_batch_file", "nameless"]

_PARAMS = {field.name for field in dataclasses.fields(SamplingParams)}
_ENDPOINTS = {"/v1/chat/completions": True, "/v1/completions": False}
_BATCH_FIELDS = ("custom_id", "method", "url", "body")
_MOST_UNCLEAR = 1000
"""As many lines are looked at for what a file is."""

AGAIN = 0
"""In place of the hash of what a row asks: its record is an error, and it is to be done again."""


class Ask(NamedTuple):
    """What a row asks for.

    Attributes:
        prompt: text, token ids, or messages.
        params: how to sample.
        chat_template_kwargs: for messages.
        options: further arguments for `Engine.add_request`.
        chat: which endpoint of the OpenAI API a line of a batch file names; None: it is no such line.
    """

    prompt: Prompt
    params: SamplingParams
    chat_template_kwargs: dict[str, Any] | None = None
    options: Mapping[str, Any] = MappingProxyType({})
    chat: bool | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One good line.

    Attributes:
        number: of the line, counted from 1.
        id: its own, or the number.
        key: see `keys`.
        kept: columns for the record.
        ask: the rest.
    """

    number: int
    id: str | int
    key: Key
    kept: dict[str, Any]
    ask: Ask


class BadRow(Exception):
    """A line that cannot be taken.

    Attributes:
        id: what its record gets: the line's number, if it has no id that can be used.
        number: of the line.
        key: see `keys`.
        kept: as in `Row`, as far as it could be read.
        code: of the error, in an OpenAI batch file.
        is_batch: its record is one of an OpenAI batch file.
    """

    def __init__(
        self,
        row_id: str | int,
        message: str,
        *,
        number: int,
        key: Key,
        kept: dict[str, Any],
        code: str = "invalid_request",
        is_batch: bool = False,
    ) -> None:
        self.id = row_id
        self.number = number
        self.key = key
        self.kept = kept
        self.code = code
        self.is_batch = is_batch
        super().__init__(message)


class RowReader:
    """Reads the rows of one file, in turn.

    An id stands for one row: a line whose id an earlier line has gives an error, under its own number. A line without
    an id has its number for one, so that an explicit id that is the number of another line is taken by whichever comes
    first. All ids are remembered for that, as hashes: 34 MB for a million rows (see `HashTable`).

    Args:
        text: a line is a prompt (the column ``prompt``), not JSON.
        maybe_text: a line that is not JSON may be meant as a prompt.
        batch: it is an OpenAI batch file.
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
        batch: bool = False,
        template: Template | None = None,
        chat: bool = False,
        keep: Mapping[str, str],
        defaults: Mapping[str, Any],
    ) -> None:
        self._text = text
        self._hint = "; --format text takes each line as a prompt" if maybe_text else ""
        self._batch = batch
        self._template = template
        self._chat = chat
        self._keep = keep
        self._defaults = defaults
        self._params = SamplingParams(**defaults)
        self._columns: list[str] | None = None  # of the first row
        self._absent = list(dict.fromkeys(keep.values()))
        self._lines_of_ids = HashTable()

    def read(self, number: int, line: bytes) -> Row:
        """The row of a line.

        Raises:
            BadRow: it is none.
        """
        try:
            decoded = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            found = f"byte {error.start} is {line[error.start]:#04x}"
            raise self._bad(number, line, f"line {number} is not UTF-8: {found}", code="invalid_json_line") from None
        row = {"prompt": decoded.rstrip("\r\n")} if self._text else self._object(number, line, decoded)
        if self._columns is None:
            self._columns = list(row)
        if self._absent:
            self._absent = [column for column in self._absent if column not in row]
        kept: dict[str, Any] = {}
        try:
            kept = {name: _kept(row.get(column)) for name, column in self._keep.items()}
            row_id = self._id(number, row)
        except (TypeError, ValueError, RecursionError) as error:
            raise self._bad(number, line, f"line {number}: {error}", kept) from None
        who = hash_of(["id", row_id])
        first = self._lines_of_ids.get(who)
        if first is not None:
            told = f"line {number}: its id {shown(row_id)} is that of line {first} too"
            raise self._bad(number, line, told, kept, code="duplicate_custom_id")
        self._lines_of_ids.put(who, number)
        try:
            ask = self._of_batch(row) if self._batch else self._plain_ask(row)
            key = Key(
                who,
                hash_of([ask.prompt, told_params(ask.params), ask.chat_template_kwargs, dict(ask.options), ask.chat]),
            )
        except (TypeError, ValueError, RecursionError) as error:
            key = Key(who, _hash_of_line(line))
            told = f"line {number}: {error}"
            raise BadRow(row_id, told, number=number, key=key, kept=kept, is_batch=self._batch) from None
        return Row(number, row_id, key, kept, ask)

    def absent(self) -> list[str]:
        """What to say of the columns to keep that no row has had."""
        if self._columns is None:
            return []
        there = ", ".join(map(repr, self._columns)) or "none"
        return [f"column {column!r} was in no row (there are: {there})" for column in self._absent]

    def _bad(
        self,
        number: int,
        line: bytes,
        message: str,
        kept: dict[str, Any] | None = None,
        *,
        code: str = "invalid_request",
    ) -> BadRow:
        """A line without an id that can be used."""
        key = Key(nameless(number), _hash_of_line(line))
        return BadRow(number, message, number=number, key=key, kept=kept or {}, code=code, is_batch=self._batch)

    def _object(self, number: int, line: bytes, text: str) -> dict[str, Any]:
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            told = f"line {number} is not JSON: {error}{self._hint}"
            raise self._bad(number, line, told, code="invalid_json_line") from None
        if not isinstance(row, dict):
            told = f"line {number} must be an object with a prompt, got {shown(row)}"
            raise self._bad(number, line, told, code="invalid_json_line")
        return row

    def _id(self, number: int, row: dict[str, Any]) -> str | int:
        if self._batch:
            if not isinstance(row.get("custom_id"), str):
                raise TypeError(f"custom_id must be text, got {shown(row.get('custom_id'))}")
            return str(row["custom_id"])
        row_id = row.get("id")
        if row_id is None:
            return number
        if isinstance(row_id, bool) or not isinstance(row_id, (str, int)):
            raise TypeError(f"id must be text or an integer, got {shown(row_id)}")
        return row_id

    def _of_batch(self, row: dict[str, Any]) -> Ask:
        """What a line of an OpenAI batch file asks for. The model that its body names is not looked at."""
        missing = [name for name in _BATCH_FIELDS if name not in row]
        if missing:
            raise ValueError(f"there is no {' and no '.join(missing)}, and a batch file's lines have them")
        if row["method"] != "POST":
            raise ValueError(f"method must be POST, got {shown(row['method'])}")
        chat = _ENDPOINTS.get(row["url"]) if isinstance(row["url"], str) else None
        if chat is None:
            raise ValueError(f"url must be {' or '.join(_ENDPOINTS)}, got {shown(row['url'])}")
        body = row["body"]
        if not isinstance(body, dict):
            raise TypeError(f"body must be an object, got {shown(body)}")
        if body.get("stream"):
            raise ValueError(f"stream must be false in a file, got {shown(body['stream'])}")
        prompts = prompts_of(body, chat=chat)
        if len(prompts) > 1:
            raise ValueError(f"there are {len(prompts)} prompts, and each needs a line of its own")
        options = options_of(body)
        options.pop("chat_template_kwargs", None)
        params = params_of(body, chat=chat, defaults=self._defaults)
        return Ask(prompts[0], params, _template_kwargs(body), options, chat)

    def _plain_ask(self, row: dict[str, Any]) -> Ask:
        if self._template is not None:
            return self._of_prompt(self._template.fill(row), row)
        misplaced = [name for name in row if name in _PARAMS and name not in self._keep.values()]
        if misplaced:
            raise ValueError(f"{', '.join(misplaced)} must stand in params")
        if "messages" in row:
            if "prompt" in row:
                raise ValueError("there are both a prompt and messages")
            return Ask(messages_of(row["messages"]), self._sampling(row), _template_kwargs(row))
        if "chat_template_kwargs" in row and not self._chat:
            raise ValueError("chat_template_kwargs are for messages, and there are none")
        if "prompt" not in row:
            there = ", ".join(map(repr, row)) or "an empty object"
            raise ValueError(f"there is no prompt and no messages, only {there}; --template makes a prompt of columns")
        return self._of_prompt(_plain_prompt(row["prompt"]), row)

    def _of_prompt(self, prompt: str | list[int], row: dict[str, Any]) -> Ask:
        if not self._chat:
            return Ask(prompt, self._sampling(row))
        if not isinstance(prompt, str):
            raise TypeError("with --chat a prompt must be text, and this is a list of token ids")
        return Ask([{"role": "user", "content": prompt}], self._sampling(row), _template_kwargs(row))

    def _sampling(self, row: dict[str, Any]) -> SamplingParams:
        given = row.get("params")
        if given is None:
            return self._params
        if not isinstance(given, dict):
            raise TypeError(f"params must be an object, got {shown(given)}")
        return params_of_json(given, self._defaults)


@dataclass(frozen=True, slots=True)
class Shard:
    """One of several parts of a file, by a hash of the row's id.

    So that a row stays in its part when others are put in or taken out, and rows with the same id meet in one part.
    Lines without an id are known by their numbers, which do change then.

    Attributes:
        index: counted from 1.
        count: of the parts.
    """

    index: int
    count: int

    def has(self, key: Key) -> bool:
        """Whether the row with this key is in this part."""
        return key.who % self.count == self.index - 1

    def __str__(self) -> str:
        return f"{self.index}-of-{self.count}"


class Rows:
    """The rows of a file that are to be done.

    Args:
        lines: of the file.
        reader: makes rows of them; each line goes through it.
        shard: only this part.
        done: hashes of what is asked, by the hashes of ids: such rows are passed over. Those with `AGAIN` are not.
        num_left: how many there are to be done, if it is known.

    Attributes:
        num: given so far.
        num_passed: passed over so far, because they are done.
    """

    def __init__(
        self,
        lines: Lines,
        reader: RowReader,
        *,
        shard: Shard | None = None,
        done: HashTable | None = None,
        num_left: int | None = None,
    ) -> None:
        self.num = self.num_passed = 0
        self._lines, self._reader = lines, reader
        self._shard, self._done, self._num_left = shard, done, num_left

    @property
    def ended(self) -> bool:
        """There are no more."""
        return self._lines.ended

    @property
    def num_lines(self) -> int:
        """Lines of the file that have been read, empty ones among them."""
        return self._lines.num_lines

    def is_again(self, row: Row | BadRow) -> bool:
        """Whether a row has failed in an earlier run."""
        return self._done is not None and self._done.get(row.key.who) == AGAIN

    def has_more(self) -> bool:
        """Whether there are more, or there may be: a pipe is not waited for. To be asked once, in the end.

        Raises:
            NotDone: as `get`.
        """
        if self._num_left is not None:
            return self.num < self._num_left
        return self.get(wait=False) is not None or not self.ended

    def get(self, *, wait: bool) -> Row | BadRow | None:
        """The next one, or what is wrong with it. None: there is no more, or not yet and `wait` is False.

        Raises:
            NotDone: the input cannot be read. There is no more after that.
        """
        while (line := self._lines.get(wait=wait)) is not None:
            found: Row | BadRow
            try:
                found = self._reader.read(*line)
            except BadRow as bad:
                found = bad
            if self._shard is not None and not self._shard.has(found.key):
                continue
            if self._done is not None and self._done.get(found.key.who) == found.key.what:
                self.num_passed += 1
                continue
            self.num += 1
            return found
        return None

    def estimate(self) -> int | None:
        """How many there are in all, about; None: nothing is known."""
        if self._num_left is not None:
            return self._num_left
        num_lines = self._lines.estimate()
        if num_lines is None or self._shard is None or not self._lines.num_rows:
            return num_lines
        return round(num_lines * self.num / self._lines.num_rows)


def is_batch_file(lines: Lines) -> bool:
    """Whether a file is one of OpenAI's batch API, by its first line that shows what it is.

    Bad lines before that show nothing. Lines have the fields of the API, or a prompt or messages.
    """
    for line in islice(lines.peek(), _MOST_UNCLEAR):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(row, dict):
            continue
        if ("custom_id" in row or "method" in row) and ("url" in row or "body" in row):
            return True
        if "prompt" in row or "messages" in row:
            return False
    return False


def nameless(number: int) -> int:
    """The hash by which a line without an id that can be used is known."""
    return hash_of(["line", number])


def _kept(value: Any) -> Any:
    """A value as a record may have it: null for numbers that JSON does not know (NaN, infinity)."""
    if isinstance(value, (dict, list, float)):
        # What is nested so deep that it can be read and not written is this row's fault, and raises here.
        return json.loads(json.dumps(value), parse_constant=lambda name: None)
    return value


def _plain_prompt(prompt: Any) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list):
        if all(type(token) is int for token in prompt):
            return prompt
        raise TypeError("prompt must be text or a list of token ids; not all of these are integers")
    raise TypeError(f"prompt must be text or a list of token ids, got {shown(prompt)}")


def _template_kwargs(row: dict[str, Any]) -> dict[str, Any] | None:
    given = row.get("chat_template_kwargs")
    if given is not None and not isinstance(given, dict):
        raise TypeError(f"chat_template_kwargs must be an object, got {shown(given)}")
    return given


def _hash_of_line(line: bytes) -> int:
    return hash_of(line.strip(b"\r\n").decode("latin-1"))
