"""Incremental decoding and stop strings, on toy tokenizers and against references that look at the whole text."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchkit.text import IncrementalDecoder, OutputText, StreamingTokenizer, Tokenizer
from batchkit.types import Request, SamplingParams

MARK = "\ufffd"


class Toy:
    """A tokenizer whose vocabulary grows as a test names pieces; counts what it decodes."""

    eos_token_id = None
    special = ("<end>", "<pad>")

    def __init__(self) -> None:
        self.pieces: list[str | bytes] = []
        self.num_decoded = 0

    def ids(self, pieces: Sequence[str] | Sequence[bytes]) -> list[int]:
        for piece in pieces:
            if piece not in self.pieces:
                self.pieces.append(piece)
        return [self.pieces.index(piece) for piece in pieces]

    def encode(self, text: str) -> list[int]:
        return self.ids(text)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.num_decoded += len(token_ids)
        pieces = [self.pieces[i] for i in token_ids]
        return self.join([p for p in pieces if not (skip_special_tokens and p in self.special)])

    def join(self, pieces: list[str | bytes]) -> str:
        raise NotImplementedError


class CharToy(Toy):
    """Tokens are strings of one or more characters."""

    def join(self, pieces: list[str | bytes]) -> str:
        return "".join(map(str, pieces))


class ByteToy(Toy):
    """Tokens are bytes, as in byte-level BPE: a character may lie in several. Special tokens are strings."""

    def join(self, pieces: list[str | bytes]) -> str:
        return b"".join(p.encode() if isinstance(p, str) else p for p in pieces).decode(errors="replace")


class PieceToy(Toy):
    """Like SentencePiece: "▁" starts a word, the first space is dropped, rare characters come as tokens of one byte.

    Of bytes that are no character, each becomes a mark.
    """

    def join(self, pieces: list[str | bytes]) -> str:
        data = b"".join(p if isinstance(p, bytes) else p.replace("▁", " ").encode() for p in pieces)
        return data.decode(errors=mark_each_byte).removeprefix(" ")


def _mark_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return MARK * (error.end - error.start), error.end


mark_each_byte = "batchkit-tests-mark-each-byte"
codecs.register_error(mark_each_byte, _mark_each_byte)


class Stream:
    """Decodes behind the tokens that last gave text, holds back everything while the text ends in a mark."""

    def __init__(self, toy: Toy, ids: Sequence[int], skip: bool) -> None:
        self.toy, self.context, self.pending, self.skip = toy, list(ids), [], skip  # type: ignore[var-annotated]

    def step(self, token_id: int) -> str | None:
        self.pending.append(token_id)
        before = self.toy.decode(self.context, skip_special_tokens=self.skip)
        text = self.toy.decode(self.context + self.pending, skip_special_tokens=self.skip)
        if len(text) <= len(before) or text.endswith(MARK):
            return None
        if not text.startswith(before):
            raise Exception("this token changes the text before it")
        self.context, self.pending = self.pending, []
        return text[len(before) :]


class StreamMixin(Toy):
    num_streams = 0

    def decode_stream(self, prompt_ids: Sequence[int], skip_special_tokens: bool) -> Stream:
        self.num_streams += 1
        return Stream(self, prompt_ids, skip_special_tokens)


class ByteStreamToy(ByteToy, StreamMixin):
    pass


class PieceStreamToy(PieceToy, StreamMixin):
    pass


both_byte_toys = pytest.mark.parametrize("make", [ByteToy, ByteStreamToy])
both_piece_toys = pytest.mark.parametrize("make", [PieceToy, PieceStreamToy])


def deltas(toy: Tokenizer, prompt: Sequence[int], output: Sequence[int], *, skip: bool = True) -> list[str]:
    """What each token gave, and at last what the end gave."""
    decoder = IncrementalDecoder(toy, prompt, skip_special_tokens=skip)
    return [decoder.step(token) for token in output] + [decoder.finish()]


def difference(toy: Tokenizer, prompt: list[int], output: list[int]) -> str:
    """decode(prompt + output) - decode(prompt); with the whole character if the prompt ends with half of it."""
    before, text = toy.decode(prompt), toy.decode(prompt + output)
    while not text.startswith(before):
        assert before.endswith(MARK)
        before = before[:-1]
    return text[len(before) :]


def request(prompt: Sequence[int] = (), *, max_tokens: int = 1000, **params: object) -> Request:
    return Request(
        id="r",
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(**params),
        max_tokens=max_tokens,  # type: ignore[arg-type]
    )


def cut(data: str | bytes, places: list[int]) -> list[str | bytes]:
    """The data in pieces, cut at these places (modulo its length)."""
    if not data:
        return []
    edges = sorted({0, len(data), *(p % len(data) for p in places)})
    return [data[a:b] for a, b in pairwise(edges)]


texts = st.text(st.sampled_from("ab ,é世界한글👩\u200d👧\U0001f469" + "\n\u0301\ufffd"), max_size=30)
places = st.lists(st.integers(0, 300), max_size=60)


# ---- incremental decoding ------------------------------------------------------------------------------------------


@both_byte_toys
@pytest.mark.parametrize("char", ["é", "中", "👩\u200d👩\u200d👧"])
def test_characters_split_over_tokens(make: type[Toy], char: str) -> None:
    # n=2: two samples of one request, their tokens coming in turns.
    toy = make()
    prompt = toy.ids([b"x"])
    output = toy.ids([bytes([b]) for b in f"{char} {char}".encode()])
    samples = [IncrementalDecoder(toy, prompt) for _ in range(2)]
    given = [[sample.step(token) for sample in samples] for token in output]
    for i, sample in enumerate(samples):
        pieces = [row[i] for row in given]
        assert "".join(pieces) == f"{char} {char}"
        assert MARK not in "".join(pieces)
        assert sample.finish() == ""


def test_nothing_before_the_last_byte_of_a_character() -> None:
    toy = ByteToy()
    assert deltas(toy, toy.ids([b"x"]), toy.ids([b"\xe4", b"\xb8", b"\xad", b"a"])) == ["", "", "中", "a", ""]


@both_byte_toys
def test_finished_characters_come_before_a_half_one(make: type[Toy]) -> None:
    toy = make()
    assert deltas(toy, toy.ids([b"x"]), toy.ids([b"a \xe4\xb8", b"\xad!\xe4", b"\xb8\xadz"])) == [
        "a ",
        "中!",
        "中z",
        "",
    ]


@both_byte_toys
def test_sent_offset_never_goes_back(make: type[Toy]) -> None:
    toy = make()
    output = toy.ids([b"A", b" ", b"\xe4\xb8\x96", b"\xe7", b"\x95", b"b", b"\xe7", b"\x95\x8c", b"c", b"d"])
    assert "".join(deltas(toy, toy.ids([b"x"]), output)) == f"A 世{MARK}b界cd"


@both_byte_toys
@given(text=texts, output_cuts=places, prompt_size=st.integers(0, 40))
def test_joined_deltas_are_the_full_decode_of_split_bytes(
    make: type[Toy], text: str, output_cuts: list[int], prompt_size: int
) -> None:
    toy = make()
    tokens = toy.ids(cut(text.encode(), output_cuts))
    prompt, output = tokens[:prompt_size], tokens[prompt_size:]
    given = deltas(toy, prompt, output)
    assert "".join(given) == difference(toy, prompt, output)
    if MARK not in text:
        assert MARK not in "".join(given)


@both_byte_toys
@given(
    data=st.lists(st.sampled_from([b"a", b"\x80", b"\xbf", b"\xc3", b"\xe4", b"\xb8", b"\xad", b"\xf0", b"\x9f"])),
    prompt_size=st.integers(0, 40),
    repeat=st.integers(1, 5),
)
def test_joined_deltas_are_the_full_decode_of_any_bytes(
    make: type[Toy], data: list[bytes], prompt_size: int, repeat: int
) -> None:
    toy = make()
    tokens = toy.ids(data * repeat)
    prompt, output = tokens[:prompt_size], tokens[prompt_size:]
    assert "".join(deltas(toy, prompt, output)) == difference(toy, prompt, output)


@both_byte_toys
@given(text=texts, output_cuts=places, counts=st.lists(st.integers(0, 3), min_size=1), skip=st.booleans())
def test_special_tokens_in_between(
    make: type[Toy], text: str, output_cuts: list[int], counts: list[int], skip: bool
) -> None:
    toy = make()
    output: list[str | bytes] = []
    for i, piece in enumerate(cut(text.encode(), output_cuts)):
        output += [piece, *["<pad>"] * counts[i % len(counts)]]
    ids = toy.ids(output)
    assert "".join(deltas(toy, [], ids, skip=skip)) == toy.decode(ids, skip_special_tokens=skip)


@both_piece_toys
@given(
    pieces=st.lists(st.sampled_from(["▁", "▁far", "▁a", "way", "▁▁", "é", ",", *(bytes([b]) for b in "世é".encode())])),
    prompt_size=st.integers(0, 12),
)
def test_joined_deltas_are_the_full_decode_of_word_pieces(
    make: type[Toy], pieces: list[str | bytes], prompt_size: int
) -> None:
    toy = make()
    tokens = toy.ids(pieces)
    prompt, output = tokens[:prompt_size], tokens[prompt_size:]
    assert "".join(deltas(toy, prompt, output)) == difference(toy, prompt, output)


@both_piece_toys
def test_leading_spaces_of_words(make: type[Toy]) -> None:
    toy = make()
    output = ["▁words", "▁do", "▁not", "▁run", "▁to", "gether"]
    assert "".join(deltas(toy, toy.ids(["▁Say"]), toy.ids(output))) == " words do not run together"
    assert "".join(deltas(toy, [], toy.ids(output))) == "words do not run together"


@both_piece_toys
def test_a_prompt_that_ends_in_special_tokens_keeps_the_leading_space(make: type[Toy]) -> None:
    toy = make()
    assert deltas(toy, toy.ids(["▁Hi", *["<end>"] * 20]), toy.ids(["▁you"])) == [" you", ""]


@both_piece_toys
def test_space_after_many_skipped_tokens(make: type[Toy]) -> None:
    toy = make()
    output = toy.ids(["▁one", *["<pad>"] * 100, "▁two"])
    assert "".join(deltas(toy, toy.ids(["▁x"]), output)) == " one two"


@both_byte_toys
def test_first_output_is_a_space(make: type[Toy]) -> None:
    toy = make()
    assert deltas(toy, toy.ids([b"x"]), toy.ids([b" ", b"y"])) == [" ", "y", ""]
    assert deltas(toy, [], toy.ids([b" ", b"y"])) == [" ", "y", ""]


@both_piece_toys
def test_first_output_is_a_lone_space_mark(make: type[Toy]) -> None:
    toy = make()
    assert deltas(toy, toy.ids(["▁x"]), toy.ids(["▁", "y"])) == [" ", "y", ""]


@both_byte_toys
def test_half_a_character_at_the_end_becomes_one_mark(make: type[Toy]) -> None:
    toy = make()
    assert deltas(toy, toy.ids([b"x"]), toy.ids([b"a", b"\xf0", b"\x9f", b"\x91"])) == ["a", "", "", "", MARK]


@both_byte_toys
def test_half_a_character_before_a_space(make: type[Toy]) -> None:
    toy = make()
    assert deltas(toy, toy.ids([b"x"]), toy.ids([b"\xe4", b" ", b"b"])) == ["", f"{MARK} ", "b", ""]


def test_bad_bytes_are_not_held_for_ever() -> None:
    toy = ByteToy()
    given = deltas(toy, toy.ids([b"x"]), toy.ids([b"\x80"] * 100))
    assert "".join(given) == MARK * 100
    assert len(given[-1]) <= 3


@both_byte_toys
def test_character_begun_by_the_prompt(make: type[Toy]) -> None:
    toy = make()
    assert deltas(toy, toy.ids([b"x", b"\xe4", b"\xb8"]), toy.ids([b"\xad", b"y"])) == ["中", "y", ""]
    assert deltas(toy, toy.ids([b"x", b"\xe4", b"\xb8"]), toy.ids([b"y"])) == ["y", ""]
    assert deltas(toy, toy.ids([b"x", b"\xe4", b"\xb8"]), []) == [""]
    # The space, in the same token as half of the character, is the prompt's.
    assert deltas(toy, toy.ids([b"x", b" \xe4"]), toy.ids([b"\xb8\xad", b"y"])) == ["中", "y", ""]


class RunToy(PieceToy):
    """Turns every byte of a run of bytes into a mark if there is a bad one among them, as byte fallback does."""

    def join(self, pieces: list[str | bytes]) -> str:
        text, run = "", b""
        for piece in [*pieces, ""]:
            if isinstance(piece, bytes):
                run += piece
                continue
            try:
                text += run.decode()
            except UnicodeDecodeError:
                text += MARK * len(run)
            text, run = text + piece, b""
        return text


def single(text: str) -> list[str | bytes]:
    return [bytes([b]) for b in text.encode()]


def test_prompt_context_starts_at_a_character() -> None:
    # The 8 last tokens of this prompt begin within a character.
    toy = RunToy()
    assert "".join(deltas(toy, toy.ids(["a", *single("世界世")]), toy.ids(single("界")))) == "界"


def test_prompt_ends_within_a_character_after_a_whole_one() -> None:
    toy = RunToy()
    assert "".join(deltas(toy, toy.ids(["a", *single("世"), b"\xe7", b"\x95"]), toy.ids([b"\x8c", "b"]))) == "界b"


def test_a_bad_byte_does_not_change_what_was_returned() -> None:
    toy = RunToy()
    assert "".join(deltas(toy, toy.ids(["a"]), toy.ids([*single("世"), b"\xe4", "b"]))) == f"世{MARK}b"


@pytest.mark.parametrize("make", [ByteToy, ByteStreamToy, PieceToy, RunToy])
@pytest.mark.parametrize("prompt", [["a"], [b"\x80"] * 5], ids=["text", "bad bytes"])
@pytest.mark.parametrize("pads", [0, 3, 20])
def test_no_bad_byte_is_lost(make: type[Toy], prompt: list[str | bytes], pads: int) -> None:
    toy = make()
    head = toy.ids(prompt)
    for count in range(60):
        for last in (b"\x80", b"\xe4"):
            output = toy.ids([*[b"\x80"] * count, last, *["<pad>"] * pads])
            assert "".join(deltas(toy, head, output)) == MARK * (count + 1)


def test_character_of_the_prompt_completed_after_many_skipped_tokens() -> None:
    for make in (ByteToy, PieceToy):
        toy = make()
        prompt = toy.ids(["a", *single("👩")[:3]])
        assert "".join(deltas(toy, prompt, toy.ids([*["<pad>"] * 14, *single("👩")[3:], "b"]))) == "👩b"
        assert "".join(deltas(toy, prompt, toy.ids([*["<pad>"] * 14, "b"]))) == "b"


def test_a_stream_may_be_late() -> None:
    class Late(ByteStreamToy):
        def decode_stream(self, prompt_ids: Sequence[int], skip_special_tokens: bool) -> Stream:
            stream = super().decode_stream(prompt_ids, skip_special_tokens)
            held: list[str] = []
            step = stream.step

            def two_at_a_time(token_id: int) -> str | None:
                held.append(step(token_id) or "")
                if len(held) < 2:
                    return None
                text = "".join(held)
                held.clear()
                return text

            stream.step = two_at_a_time  # type: ignore[method-assign]
            return stream

    toy = Late()
    assert deltas(toy, toy.ids([b"x"]), toy.ids([b"a", b"b", b"c", b"d", b"e"])) == ["a", "b", "c", "d", "e", ""]


@pytest.mark.parametrize("make", [ByteToy, PieceToy, ByteStreamToy, PieceStreamToy])
@pytest.mark.parametrize(
    "output",
    [
        pytest.param([b"a", b"b"], id="text"),
        pytest.param(["<end>"], id="skipped"),
        pytest.param([b"\x80"], id="bad bytes"),
        pytest.param([b"\xe4"], id="half characters"),
        pytest.param([b"\xe4", "<end>", "<end>", "<end>"], id="half characters and skipped"),
    ],
)
def test_cost_of_a_token_does_not_grow_with_the_text(make: type[Toy], output: list[str | bytes]) -> None:
    toy = make()
    ids = toy.ids(output)
    decoder = IncrementalDecoder(toy, ids * 1000)
    costs = []
    for i in range(2000):
        toy.num_decoded = 0
        decoder.step(ids[i % len(ids)])
        costs.append(toy.num_decoded)
    assert max(costs[1000:]) <= max(costs[:1000])
    assert sum(costs) < 150 * len(costs)


def test_only_the_end_of_the_prompt_is_decoded() -> None:
    toy = ByteToy()
    prompt = toy.ids([b"x"]) * 10_000
    IncrementalDecoder(toy, prompt)
    assert toy.num_decoded < 20


def test_a_stream_is_used_and_left_when_it_fails() -> None:
    class Failing(ByteStreamToy):
        def decode_stream(self, prompt_ids: Sequence[int], skip_special_tokens: bool) -> Stream:
            stream = super().decode_stream(prompt_ids, skip_special_tokens)
            step = stream.step

            def fail_at_b(token_id: int) -> str | None:
                if self.pieces[token_id] == b"b":
                    raise Exception("no")
                return step(token_id)

            stream.step = fail_at_b  # type: ignore[method-assign]
            return stream

    toy = Failing()
    assert isinstance(toy, StreamingTokenizer)
    assert deltas(toy, toy.ids([b"x"]), toy.ids([b"a", b"b", b"\xe4", b"\xb8\xad"])) == ["a", "b", "", "中", ""]
    assert toy.num_streams == 1


def test_a_tokenizer_may_refuse_to_stream() -> None:
    class Refusing(ByteToy):
        def decode_stream(self, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
            return None

    toy = Refusing()
    assert deltas(toy, [], toy.ids([b"a", b"b"])) == ["a", "b", ""]


# ---- stop strings --------------------------------------------------------------------------------------------------


def run(toy: Tokenizer, output: Sequence[int], req: Request) -> tuple[str, int | None, list[str]]:
    """The final text, the number of tokens after which a stop string was found, and the text after each token."""
    text = OutputText(toy, req)
    found = None
    after: list[str] = []
    for i, token in enumerate(output):
        stopped = text.append(token, i + 1)
        after.append("".join(text.pieces))
        if stopped:
            found = i + 1
            break
    text.finish()
    text.finish()
    return "".join(text.pieces), found, after


def reference(texts: list[str], stops: Sequence[str], min_tokens: int, include: bool) -> tuple[str, int | None]:
    """The same from the whole text after each number of tokens."""
    for k in range(1, len(texts)):
        matches = [
            (start, -len(stop))
            for stop in stops
            for start in range(len(texts[k]))
            if texts[k].startswith(stop, start) and len(texts[k - 1]) < start + len(stop)
        ]
        if matches and k > min_tokens:
            start, length = min(matches)
            return texts[k][: start - length if include else start], k
    return texts[-1], None


stop_lists = st.lists(st.text(st.sampled_from("ab"), min_size=1, max_size=5), min_size=1, max_size=4)


@given(
    pieces=st.lists(st.text(st.sampled_from("ab"), min_size=1, max_size=4), max_size=20),
    stops=stop_lists,
    min_tokens=st.integers(0, 6),
    include=st.booleans(),
)
def test_stop_strings_equal_a_reference_that_sees_the_whole_text(
    pieces: list[str], stops: list[str], min_tokens: int, include: bool
) -> None:
    toy = CharToy()
    req = request(stop=stops, min_tokens=min_tokens, include_stop_str_in_output=include)
    text, found, after = run(toy, toy.ids(pieces), req)
    whole = list(accumulate(pieces, initial=""))
    assert (text, found) == reference(whole, stops, min_tokens, include)
    # No more and no less is held back than what may be the beginning of a stop string.
    for k, released in enumerate(after[: None if found is None else found - 1], 1):
        beginnings = {stop[:n] for stop in stops for n in range(len(stop))}
        held = max(len(b) for b in beginnings if whole[k].endswith(b))
        assert released == whole[k][: len(whole[k]) - held]


@both_byte_toys
@given(text=texts, output_cuts=places, stops=st.lists(st.text(st.sampled_from("ab ,é世👩"), min_size=1), max_size=3))
def test_stop_strings_in_split_bytes(make: type[Toy], text: str, output_cuts: list[int], stops: list[str]) -> None:
    toy = make()
    text = text.replace(MARK, "")
    pieces = cut(text.encode(), output_cuts)
    decoder = codecs.getincrementaldecoder("utf-8")()
    whole = list(accumulate((decoder.decode(bytes(p)) for p in pieces), initial=""))  # type: ignore[arg-type]
    got = run(toy, toy.ids(pieces), request(stop=stops))
    assert got[:2] == reference(whole, stops, 0, False)


@given(pieces=st.lists(st.text(min_size=1), max_size=10))
def test_pieces_are_only_appended(pieces: list[str]) -> None:
    toy = CharToy()
    text = OutputText(toy, request(stop="ab"))
    released = text.pieces
    for i, token in enumerate(toy.ids(pieces)):
        before = list(released)
        if text.append(token, i + 1):
            break
        assert released[: len(before)] == before
    text.finish()
    assert text.pieces is released
    assert all(released)


@pytest.mark.parametrize("splits", list(product([1, 2, 3], repeat=4)))
def test_stop_string_spread_over_tokens(splits: tuple[int, ...]) -> None:
    toy = CharToy()
    output = cut("..xyz..", list(accumulate(splits)))
    text, found, after = run(toy, toy.ids(output), request(stop="xyz"))
    assert text == ".."
    assert "xyz" in "".join(map(str, output[:found]))
    assert "xyz" not in "".join(map(str, output[: found and found - 1]))
    assert all("..".startswith(released) for released in after)


def test_text_before_the_stop_string_in_the_same_token() -> None:
    toy = CharToy()
    assert run(toy, toy.ids(["hi", "!#"]), request(stop="#")) == ("hi!", 2, ["hi", "hi!"])


def test_stop_string_inside_a_token() -> None:
    toy = CharToy()
    assert run(toy, toy.ids(["a", "..."]), request(stop=".."))[:2] == ("a", 2)
    assert run(toy, toy.ids(["a", "..."]), request(stop="..", include_stop_str_in_output=True))[:2] == ("a..", 2)


def test_stop_strings_with_spaces() -> None:
    toy = PieceToy()
    output = toy.ids(["▁far", "▁away", "▁over", "▁there", "▁now"])
    req = request(toy.ids(["▁So"]), stop=["far away here", "there"])
    assert run(toy, output, req)[:2] == (" far away over ", 4)
    req = request(toy.ids(["▁So"]), stop=["far away over", "over"])
    assert run(toy, output, req)[:2] == (" ", 3)


def test_earliest_stop_string_wins_then_the_longest() -> None:
    toy = CharToy()
    output = toy.ids(["xabcdx"])
    include = {"include_stop_str_in_output": True}
    assert run(toy, output, request(stop=["bc", "abcd"], **include))[0] == "xabcd"
    assert run(toy, output, request(stop=["bc", "bcd"], **include))[0] == "xabcd"
    assert run(toy, output, request(stop=["d", "b"], **include))[0] == "xab"


@pytest.mark.parametrize("make", [CharToy, PieceToy])
def test_stop_string_within_the_minimum_is_passed_over(make: Callable[[], Toy]) -> None:
    toy = make()
    output = toy.ids(["a", "#", "b", "#", "c"])
    assert run(toy, output, request(stop="#", min_tokens=2))[:2] == ("a#b", 4)
    assert run(toy, output, request(stop="#", min_tokens=6))[:2] == ("a#b#c", None)
    # It begins within the minimum and ends behind it.
    assert run(toy, output, request(stop="#b", min_tokens=2))[:2] == ("a", 3)


def test_long_repetitive_stop_string_costs_each_character_once() -> None:
    # A naive search would look at each character once for each of the thousands before it.
    toy = CharToy()
    stop = "a" * 20_000 + "b"
    text, found, _ = run(toy, toy.ids(["a"] * 5 + ["a" * 50_000, "b"]), request(stop=stop))
    assert (text, found) == ("a" * 30_005, 7)


def test_finish_releases_a_beginning_of_a_stop_string_and_half_a_character() -> None:
    toy = ByteToy()
    text, found, after = run(toy, toy.ids([b"the END", b"\xe4"]), request(stop="END!!"))
    assert (text, found, after) == (f"the END{MARK}", None, ["the ", "the "])


def test_special_tokens_in_the_text() -> None:
    toy = CharToy()
    assert run(toy, toy.ids(["a", "<end>", "b"]), request())[0] == "ab"
    assert run(toy, toy.ids(["a", "<end>", "b"]), request(skip_special_tokens=False))[0] == "a<end>b"
    assert run(toy, toy.ids(["a", "<end>", "b"]), request(skip_special_tokens=False, stop="<end>"))[:2] == ("a", 2)
