"""EOS, stop token ids, minimum length (cases 43 to 47)."""

from __future__ import annotations

import copy
import pickle

import pytest

from batchkit import OrcaScheduler, SamplingParams
from unit.helpers import POLICIES, Pieces, Rig

everywhere = pytest.mark.parametrize("policy", POLICIES)


def ended(rig: Rig, **params) -> tuple[int, ...]:
    rig.add("a", 3, max_tokens=20, **params)
    final = rig.finish()["a"]
    assert final.finish_reason == ("length" if len(final.token_ids) == 20 else "stop")
    return final.token_ids


@everywhere
@pytest.mark.parametrize(
    ("params", "length"),
    [
        ({}, 1),
        ({"stop_token_ids": [9]}, 1),
        ({"ignore_eos": True, "stop_token_ids": [9]}, 3),
        ({"ignore_eos": True, "stop_token_ids": [2]}, 2),
        ({"ignore_eos": True}, 20),
    ],
)
def test_ignored_eos_leaves_the_users_stop_ids(policy, params, length: int) -> None:
    """Case 43: further EOS ids were merged into the user's stop ids; a cure ignored those too."""
    rig = Rig(policy, eos=[2, 7], script={"a": [7, 2, 9] + [1] * 17})
    assert len(ended(rig, **params)) == length


def test_unknown_option_is_not_swallowed() -> None:
    """Case 43: the option that the caller sent had no effect at all."""
    with pytest.raises(TypeError, match="ignore_eos_token"):
        SamplingParams(ignore_eos_token=True)


def test_the_tokenizers_eos_ends_a_text_too() -> None:
    tokenizer = Pieces(["<eos>", "a", "<eot>"], eos="<eos>")
    for script, params, length in (
        ([1, 0, 1, 2], {}, 2),
        ([1, 2, 1, 0], {}, 2),
        ([1, 2, 0, 1] + [1] * 16, {"ignore_eos": True}, 20),
    ):
        rig = Rig(OrcaScheduler, vocab=3, eos=[2], script={"a": script}, tokenizer=tokenizer)
        assert len(ended(rig, **params)) == length


@everywhere
@pytest.mark.parametrize("favoured", [2, 7, 9])
def test_minimum_holds_off_every_stop_id_for_exactly_so_many_tokens(policy, favoured: int) -> None:
    """Cases 45 and 46: only the main EOS was held off, and one token too many was forced."""
    for minimum in range(6):
        rig = Rig(policy, eos=[2, 7], script={"a": [favoured] * 20})
        assert len(ended(rig, min_tokens=minimum, stop_token_ids=[9])) == minimum + 1


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_params_survive_a_copy(clone) -> None:
    """Case 45: what held off the EOS was lost when the parameters were copied."""
    params = SamplingParams(min_tokens=4, max_tokens=20, temperature=0, stop_token_ids=[9], stop="x")
    assert clone(params) == params
    rig = Rig(OrcaScheduler, eos=[2, 7], vocab=10, script={"request-1": [7] * 20}, tokenizer=Pieces("abcdefghij"))
    (final,) = rig.engine.generate([[1]], clone(params))
    assert len(final.token_ids) == 5


@everywhere
@pytest.mark.parametrize("minimum", [0, 1, 2, 6])
def test_stop_string_within_the_minimum_does_not_end_the_request(policy, minimum: int) -> None:
    """Case 46: one found before the minimum ended the request. It is passed over, and stays in the text."""
    rig = Rig(policy, vocab=4, script={"a": [1, 3, 2, 2, 2, 2, 3, 2]}, tokenizer=Pieces(["_", "a", "b", "Z"]))
    rig.add("a", [1], min_tokens=minimum, stop="Z")
    final = rig.finish()["a"]
    text, count = ("a", 2) if minimum < 2 else ("aZbbbb", 7)
    assert (final.text, len(final.token_ids), final.finish_reason) == (text, count, "stop")


@everywhere
@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abZ")])
def test_text_of_a_stop_id_does_not_leak(policy, include: bool, text: str) -> None:
    """Case 47: it was in the deltas or in the text. Its id stays among the token ids."""
    rig = Rig(policy, vocab=4, script={"a": [1, 2, 3]}, tokenizer=Pieces(["_", "a", "b", "Z"]))
    rig.add("a", [1], stop_token_ids=[3], include_stop_str_in_output=include)
    final = rig.finish()["a"]
    assert (final.text, final.token_ids) == (text, (1, 2, 3))
    assert "".join(output.new_text for output in rig.outputs["a"]) == text
