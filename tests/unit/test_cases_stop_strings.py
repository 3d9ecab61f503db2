"""Stop strings, through the engine: what is delivered joins to the text at every ending (cases 49 to 55).

`Rig` compares the joined deltas with the text after every output.
"""

from __future__ import annotations

from itertools import product

import pytest

from batchkit import DynamicScheduler, OrcaScheduler, PagedScheduler, StaticScheduler
from unit.helpers import POLICIES, Pieces, Rig

everywhere = pytest.mark.parametrize("policy", POLICIES)


def served(policy, pieces, script, *, stop, end=None, host_blocks: int = 0, blocks: int = 64, **params):
    """The final output of a request that gets these pieces as its tokens, beside another request."""
    tokenizer = Pieces(list(dict.fromkeys(["<eos>", "p", *pieces, *script])), eos="<eos>")
    ids = tokenizer.ids(*script)
    rig = Rig(policy, vocab=len(tokenizer.pieces), tokenizer=tokenizer, script={"a": ids, "b": [1] * 30})
    rig.add("a", [1, 1], stop=stop, **{"max_tokens": 20, **params})
    rig.add("b", [1, 1, 1], max_tokens=12)
    if end == "abort":
        while rig.engine.stats().generated_tokens < 2 * len(ids):
            rig.step()
            rig.engine.wait()
        rig.engine.abort("a")
        final = rig.finish(but=["a"])["a"]
    else:
        final = rig.finish()["a"]
    return final, [output.new_text for output in rig.outputs["a"]]


def splits(text: str):
    """The text cut into pieces of 1 to 3 characters, in every way."""
    if not text:
        yield []
    for size in (1, 2, 3)[: len(text)]:
        for rest in splits(text[size:]):
            yield [text[:size], *rest]


def test_a_stop_string_spread_over_tokens_is_found() -> None:
    """Case 49: it never was."""
    for pieces in splits("..xyz.."):
        final, _ = served(OrcaScheduler, [], [*pieces, *"pppppppp"], stop="xyz")
        assert (final.text, final.finish_reason) == ("..", "stop")
        assert len(final.token_ids) == next(n for n in range(9) if "xyz" in "".join(pieces[:n]))


@everywhere
@pytest.mark.parametrize(("include", "text"), [(False, "hi!"), (True, "hi!#")])
def test_text_before_the_stop_string_in_its_token_is_delivered(policy, include: bool, text: str) -> None:
    """Case 50: it was lost, when streaming only."""
    final, deltas = served(policy, [], ["hi", "!#", "p"], stop="#", include_stop_str_in_output=include)
    assert (final.text, final.finish_reason, len(final.token_ids)) == (text, "stop", 2)
    if policy not in (StaticScheduler, DynamicScheduler):
        assert deltas == ["hi", text[2:]]


@everywhere
@pytest.mark.parametrize("ending", ["stop", "length", "abort"])
def test_held_text_is_released_at_every_ending(policy, ending: str) -> None:
    """Case 51: text held back as a possible beginning of a stop string was lost with EOS, limit or abort."""
    script = ["the ", "EN", "D", *(["<eos>"] if ending == "stop" else [])]
    limit = 3 if ending == "length" else 20
    final, deltas = served(policy, [], script, stop="END!!", end=ending, max_tokens=limit)
    assert final.finish_reason == ending
    assert final.text.startswith("the END")
    if ending != "abort":
        assert final.text == "the END"
    if policy in (OrcaScheduler, PagedScheduler):
        assert deltas[0] == "the "
        assert not any("E" in delta for delta in deltas[:-1])


@everywhere
def test_the_earliest_stop_string_wins_then_the_longest(policy) -> None:
    """Case 53: one with spaces was missed, and of two the shorter stayed in the text."""
    words = ["far ", "away ", "over ", "there", " and", " so on"]
    for stop, text in (
        (["far away here", "there"], "far away over "),
        (["over", "away over"], "far "),
        (["over", "over there"], "far away "),  # "over" is complete before "there" comes
        (["there", "there and"], "far away over "),
    ):
        final, _ = served(policy, [], words, stop=stop)
        assert (final.text, final.finish_reason) == (text, "stop")


@everywhere
@pytest.mark.parametrize(("stop", "text"), [("..", "a"), (".", "a"), ("...", "a"), (".b", "a..")])
def test_a_stop_string_inside_a_token_cuts_the_text_and_not_the_tokens(policy, stop: str, text: str) -> None:
    """Case 54: the cut by characters and the cut by tokens disagreed. Token ids keep the whole token."""
    final, _ = served(policy, [], ["a", "...", "b", "p"], stop=stop)
    assert final.text == text
    assert len(final.token_ids) == (3 if stop == ".b" else 2)
    assert final.finish_reason == "stop"


class WithSpecial(Pieces):
    def special_token_id(self, text: str) -> int | None:
        return self.pieces.index(text) if text in self.pieces and text[0] == "<" else None


@everywhere
def test_a_stop_string_that_is_a_special_token_ends_the_request(policy) -> None:
    """Case 55: special tokens are left out of the text, so it never matched."""
    tokenizer = WithSpecial(["p", "a", "<end>", "b"])
    rig = Rig(policy, vocab=4, tokenizer=tokenizer, script={"a": [1, 2, 3, 3], "b": [1, 2, 3, 3]})
    rig.add("a", "p", stop="<end>")
    rig.add("b", "p", stop="b")
    finals = rig.finish()
    assert (finals["a"].text, finals["a"].token_ids, finals["a"].finish_reason) == ("a", (1, 2), "stop")
    assert (finals["b"].text, finals["b"].token_ids, finals["b"].finish_reason) == ("a", (1, 2, 3), "stop")


def test_stop_strings_of_several_requests_do_not_mix() -> None:
    tokenizer = Pieces("pabcdef")
    script = {f"r{i}": tokenizer.ids(*"abcdef"[i:], *"abcdef"[:i]) for i in range(6)}
    for policy in POLICIES:
        rig = Rig(policy, vocab=7, tokenizer=tokenizer, script=script, blocks=8, block_size=1)
        for (i, name), stop in zip(enumerate(script), "cdefab", strict=True):
            rig.add(name, "p", max_tokens=6, stop=stop)
            assert i < 6
        finals = rig.finish()
        assert [finals[name].text for name in script] == ["ab", "bc", "cd", "de", "ef", "fa"]


def test_stop_strings_hold_over_preemption() -> None:
    tokenizer = Pieces(["p", "E", "N", "D", "!"])
    for at, host_blocks in product((1, 2, 3), (0, 8)):

        class Once(PagedScheduler):
            def schedule(self, step) -> None:
                for seq in self.running:
                    if len(seq.output) == at and not seq.num_preemptions:  # noqa: B023
                        step.preempt(seq)
                        step.wait_until(step.now + 1)
                super().schedule(step)

        rig = Rig(Once, vocab=5, host_blocks=host_blocks, tokenizer=tokenizer, script={"a": [1, 2, 3, 4, 1, 1]})
        rig.add("a", "p", stop="END!")
        final = rig.finish()["a"]
        assert (final.text, final.finish_reason, final.timings.num_preemptions) == ("", "stop", 1)
