"""When a sample ends, and with which text."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence

import pytest

from batchkit.stopping import advance
from batchkit.text import OutputText
from batchkit.types import FinishReason, Request, SamplingParams

EOS = 0
VOCAB = ["<eos>", "a", "b", "Z", "<7>", "<9>", "the ", "END", "!!"]


class Letters:
    """Each token is a string; nothing is special, so that every text can be seen."""

    eos_token_id = EOS

    def encode(self, text: str) -> list[int]:
        return [VOCAB.index(char) for char in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(VOCAB[i] for i in token_ids)


def run(
    script: Sequence[str],
    *,
    max_tokens: int = 100,
    stop_ids: Sequence[str] = ("<eos>",),
    params: SamplingParams | None = None,
) -> tuple[str, list[str], FinishReason | None]:
    """Feed the script until it ends: the text, the tokens taken, the reason."""
    request = Request(
        id="r",
        prompt_token_ids=(1,),
        params=params or SamplingParams(),
        max_tokens=max_tokens,
        stop_token_ids=frozenset(map(VOCAB.index, stop_ids)),
    )
    text = OutputText(Letters(), request)
    output: list[int] = []
    for piece in script:
        output.append(VOCAB.index(piece))
        reason = advance(request, output, text)
        if reason is not None:
            return "".join(text.pieces), [VOCAB[i] for i in output], reason
    return "".join(text.pieces), [VOCAB[i] for i in output], None


@pytest.mark.parametrize(
    ("eos_at", "reason", "num_tokens"),
    [(1, "stop", 1), (4, "stop", 4), (5, "stop", 5), (6, "length", 5), (99, "length", 5)],
)
def test_reason_at_the_token_limit(eos_at: int, reason: str, num_tokens: int) -> None:
    script = ["<eos>" if i == eos_at else "a" for i in range(1, 100)]
    _, tokens, got = run(script, max_tokens=5)
    assert (got, len(tokens)) == (reason, num_tokens)


def test_stop_string_with_the_last_token_is_a_stop() -> None:
    assert run(["a", "Z"], max_tokens=2, params=SamplingParams(stop="Z")) == ("a", ["a", "Z"], "stop")


@pytest.mark.parametrize(("stop_ids", "end"), [(["<eos>", "<7>", "<9>"], "<7>"), (["<9>"], "<9>")])
def test_ignored_eos_leaves_the_stop_tokens_of_the_user(stop_ids: list[str], end: str) -> None:
    # The engine leaves the model's own EOS tokens out of Request.stop_token_ids if they are to be ignored.
    _, tokens, reason = run(["a", "<7>", "<eos>", "<9>", "a"], stop_ids=stop_ids)
    assert (tokens[-1], reason) == (end, "stop")


@pytest.mark.parametrize("minimum", range(6))
@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_every_stop_token_waits_for_the_minimum(minimum: int, clone: object) -> None:
    params = clone(SamplingParams(min_tokens=minimum))  # type: ignore[operator]
    for token in ("<eos>", "<7>"):
        _, tokens, reason = run([token] * 20, stop_ids=["<eos>", "<7>"], params=params)
        assert (len(tokens), reason) == (minimum + 1, "stop")


def test_stop_string_waits_for_the_minimum() -> None:
    script = ["a", "Z", "b", "b", "b", "b", "Z", "b"]
    assert run(script, params=SamplingParams(stop="Z", min_tokens=6)) == ("aZbbbb", script[:7], "stop")


def test_text_of_a_stop_token_is_left_out() -> None:
    script = ["a", "b", "Z", "a"]
    assert run(script, stop_ids=["Z"]) == ("ab", ["a", "b", "Z"], "stop")
    include = SamplingParams(include_stop_str_in_output=True)
    assert run(script, stop_ids=["Z"], params=include) == ("abZ", ["a", "b", "Z"], "stop")


def test_text_of_a_stop_token_within_the_minimum_is_kept() -> None:
    params = SamplingParams(min_tokens=2)
    assert run(["Z", "a", "Z"], stop_ids=["Z"], params=params) == ("Za", ["Z", "a", "Z"], "stop")


@pytest.mark.parametrize(("script", "max_tokens"), [(["the ", "END", "<eos>"], 9), (["the ", "END"], 2)])
def test_held_text_is_released_at_every_ending(script: list[str], max_tokens: int) -> None:
    text, _, reason = run(script, max_tokens=max_tokens, params=SamplingParams(stop="END!!"))
    assert (text, reason) == ("the END", "stop" if "<eos>" in script else "length")


def test_held_text_is_not_released_before_the_end() -> None:
    text, _, reason = run(["the ", "END"], params=SamplingParams(stop="END!!"))
    assert (text, reason) == ("the ", None)


def test_stop_string_in_the_text_of_a_stop_token() -> None:
    params = SamplingParams(stop="<e", include_stop_str_in_output=True)
    assert run(["a", "<eos>"], params=params) == ("a<e", ["a", "<eos>"], "stop")


def test_without_text() -> None:
    request = Request(
        id="r", prompt_token_ids=(1,), params=SamplingParams(), max_tokens=3, stop_token_ids=frozenset({EOS})
    )
    assert advance(request, [1], None) is None
    assert advance(request, [1, EOS], None) == "stop"
    assert advance(request, [1, 1, 1], None) == "length"
