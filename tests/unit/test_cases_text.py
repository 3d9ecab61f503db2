"""Text as it comes, through the engine and a byte-level tokenizer (cases 57 to 62).

`Rig` compares the joined deltas with the text after every output.
"""

from __future__ import annotations

import random

import pytest

from batchkit import OrcaScheduler
from unit.helpers import POLICIES, PREEMPTING, Bytes, Pieces, Rig

everywhere = pytest.mark.parametrize("policy", POLICIES)
MARK = "\ufffd"
BYTES = {"vocab": Bytes.vocab, "tokenizer": Bytes()}
CHARACTERS = ["é", "中", "👩\u200d👩\u200d👧", "한국어", "a"]


def script_of(*parts: str | bytes) -> list[int]:
    return [*b"".join(p.encode() if isinstance(p, str) else p for p in parts), 256]


@everywhere
def test_characters_split_over_tokens_arrive_whole(policy) -> None:
    """Case 57: one token decoded at a time destroyed accents, CJK and emoji."""
    script = {f"r{i}": script_of(char, " ", char) for i, char in enumerate(CHARACTERS)}
    rig = Rig(policy, blocks=128, script=script, **BYTES)
    for name in script:
        rig.add(name, "say it", max_tokens=64)
    finals = rig.finish()
    assert [finals[f"r{i}"].text for i in range(len(CHARACTERS))] == [f"{char} {char}" for char in CHARACTERS]
    deltas = [output.new_text for life in rig.outputs.values() for output in life]
    assert not any(MARK in delta for delta in deltas)


def test_nothing_is_delivered_before_a_character_is_complete() -> None:
    """Case 57: the delta is empty until then, and the token ids come all the same."""
    rig = Rig(OrcaScheduler, script={"a": script_of("中a")}, **BYTES)
    rig.add("a", "x", max_tokens=8)
    rig.finish()
    assert [output.new_text for output in rig.outputs["a"]] == ["", "", "中", "a", ""]
    assert [len(output.new_token_ids) for output in rig.outputs["a"]] == [1] * 5


@pytest.mark.parametrize("policy", PREEMPTING)
@pytest.mark.parametrize("host_blocks", [0, 16])
def test_joined_deltas_are_the_whole_text_under_preemption(policy, host_blocks: int) -> None:
    """Cases 58 and 59: finished characters were dropped, or sent twice, behind a half one."""
    rng = random.Random(58)
    texts = ["".join(rng.choices([*CHARACTERS, "世", "b", " ", "\n"], k=8)) for _ in range(8)]
    script = {f"r{i}": script_of(text) for i, text in enumerate(texts)}
    rig = Rig(policy, blocks=40, host_blocks=host_blocks, script=script, **BYTES)
    for name in script:
        rig.add(name, "ab", max_tokens=130)
    finals = rig.finish()
    assert [finals[f"r{i}"].text for i in range(8)] == texts
    assert rig.engine.stats().num_preemptions > 0


@everywhere
def test_a_half_character_before_letters_is_sent_once(policy) -> None:
    """Case 59: what had been sent moved back between two incomplete steps, so a character came twice."""
    rig = Rig(policy, script={"a": script_of("A 世", b"\xe7\x95", "bcd")}, **BYTES)
    rig.add("a", "x", max_tokens=20)
    assert rig.finish()["a"].text == f"A 世{MARK}bcd"


class Words(Pieces):
    """Like SentencePiece: "_" starts a word, and the first space of a text is dropped."""

    def decode(self, token_ids, *, skip_special_tokens: bool = True) -> str:
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens).replace("_", " ").removeprefix(" ")


@everywhere
def test_words_keep_the_spaces_between_them(policy) -> None:
    """Cases 61 and 62: tokens decoded alone lost their leading space, and all words ran together."""
    tokenizer = Words(["<eos>", "_say", "_it", "_all", "to", "gether", "_", "x"], eos="<eos>")
    rig = Rig(
        policy, vocab=8, tokenizer=tokenizer, script={"a": tokenizer.ids("_it", "_all", "_", "to", "gether", "<eos>")}
    )
    rig.add("a", tokenizer.ids("_say"))
    prompt, output = tokenizer.ids("_say"), list(rig.finish()["a"].token_ids)
    whole = tokenizer.decode(prompt + output).removeprefix(tokenizer.decode(prompt))
    assert rig.finals["a"].text == whole == " it all together"


@everywhere
def test_a_lone_space_comes_first(policy) -> None:
    """Case 62: a leading space was stripped, or stripped twice."""
    rig = Rig(policy, script={"a": script_of(" ", "y")}, **BYTES)
    rig.add("a", "x")
    assert rig.finish()["a"].text == " y"


@everywhere
@pytest.mark.parametrize("ending", ["stop", "length", "abort"])
def test_half_a_character_at_the_end_becomes_one_mark(policy, ending: str) -> None:
    """Case 62: bytes that are no character were held for ever. At the end they are one replacement mark."""
    half = [ord("a"), 0xF0, 0x9F, 0x91]
    rig = Rig(policy, script={"a": half + [256] * (ending == "stop")}, **BYTES)
    rig.add("a", "x", max_tokens=4 if ending == "length" else 30)
    if ending == "abort":
        while rig.engine.stats().generated_tokens < 4:
            rig.step()
            rig.engine.wait()
        assert [output.new_text for output in rig.outputs["a"]] == (["a", "", "", ""] if rig.scheduler.streams else [])
        rig.engine.abort("a")
        final = rig.finish(but=["a"])["a"]
    else:
        final = rig.finish()["a"]
    assert (final.text, final.finish_reason) == ("a" + MARK, ending)


def test_bad_bytes_are_not_held_for_ever() -> None:
    """Case 62: at most three marks may still become a character."""
    rig = Rig(OrcaScheduler, script={"a": [0x80] * 40}, **BYTES)
    rig.add("a", "x", max_tokens=40)
    for count in range(1, 40):
        rig.step()
        assert len(rig.outputs["a"][-1].text) >= count - 3
    assert rig.finish()["a"].text == MARK * 40


def test_without_detokenizing_there_is_no_text() -> None:
    rig = Rig(OrcaScheduler, script={"a": script_of("abc")}, **BYTES)
    rig.add("a", "x", detokenize=False)
    final = rig.finish()["a"]
    assert (final.text, len(final.token_ids), final.prompt) == ("", 4, "x")


def test_special_tokens_in_the_text() -> None:
    tokenizer = Pieces(["p", "<pad>", "a"])
    for skip, text in ((True, "aa"), (False, "a<pad>a")):
        rig = Rig(OrcaScheduler, vocab=3, tokenizer=tokenizer, script={"a": [2, 1, 2]})
        rig.add("a", "p", max_tokens=3, skip_special_tokens=skip)
        assert rig.finish()["a"].text == text
