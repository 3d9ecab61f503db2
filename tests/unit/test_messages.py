"""Conversations: messages go through the tokenizer's chat template, which alone sets the special tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from batchkit import OrcaScheduler, RequestError, SamplingParams
from unit.helpers import Pieces, Rig


class Chat(Pieces):
    """Its text gets a BOS in front; its template sets one of its own."""

    def __init__(self) -> None:
        super().__init__([*"abcdef", "<s>", "<user>", "<assistant>"])

    def encode(self, text: str) -> list[int]:
        return self.ids("<s>", *text)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, twice: bool = False
    ) -> list[int]:
        turns = [piece for m in messages for piece in (f"<{m['role']}>", *m["content"] * (1 + twice))]
        return self.ids("<s>", *turns, *(["<assistant>"] if add_generation_prompt else []))


HELLO = [{"role": "user", "content": "ab"}]
PARAMS = SamplingParams(temperature=0, max_tokens=3)


def rig() -> Rig:
    return Rig(OrcaScheduler, vocab=9, tokenizer=Chat())


def test_messages_become_the_templates_tokens() -> None:
    chat = Chat()
    outputs = rig().engine.generate([HELLO, "ab", tuple(HELLO)], PARAMS)
    assert outputs[0].prompt_token_ids == tuple(chat.ids("<s>", "<user>", "a", "b", "<assistant>"))
    assert outputs[1].prompt_token_ids == tuple(chat.ids("<s>", "a", "b"))
    assert outputs[2].token_ids == outputs[0].token_ids
    assert [output.prompt for output in outputs] == [None, "ab", None]


def test_arguments_of_the_template() -> None:
    engine = rig().engine
    engine.add_request(HELLO, PARAMS, chat_template_kwargs={"twice": True, "add_generation_prompt": False})
    (output,) = engine.step()
    assert output.prompt_token_ids == tuple(Chat().ids("<s>", "<user>", "a", "b", "a", "b"))
    engine.close()
    outputs = rig().engine.generate([HELLO], PARAMS, chat_template_kwargs={"add_generation_prompt": False})
    assert outputs[0].prompt_token_ids == tuple(Chat().ids("<s>", "<user>", "a", "b"))
    (first, *_) = rig().engine.stream([HELLO], PARAMS, chat_template_kwargs={"add_generation_prompt": False})
    assert first.prompt_token_ids == outputs[0].prompt_token_ids


@pytest.mark.parametrize(
    ("messages", "kwargs", "message"),
    [
        ([{"role": "user", "content": "xyz"}], None, "the chat template cannot be applied: ValueError: 'x' is not in"),
        ([{"role": "nobody", "content": "a"}], None, "the chat template cannot be applied"),
        ([{"role": "user"}], None, "the chat template cannot be applied: KeyError: 'content'"),
        (HELLO, {"thrice": True}, "the chat template cannot be applied: TypeError: .*thrice"),
        ([{"content": "a"}], None, "message 0 must be an object with a role and content, got {'content': 'a'}"),
        ([*HELLO, "b"], None, "message 1 must be an object with a role and content, got 'b'"),
        ("ab", {"twice": True}, "chat_template_kwargs are for messages, and this prompt is not a list of messages"),
    ],
)
def test_what_cannot_be_taken(messages, kwargs, message: str) -> None:
    r = rig()
    before = r.state()
    with pytest.raises(RequestError, match=message):
        r.engine.add_request(messages, PARAMS, chat_template_kwargs=kwargs)
    assert r.state() == before


@pytest.mark.parametrize("given", ["text", {"input_ids": [1]}, [[1, 2]], [1.5], None, 5])
@pytest.mark.parametrize("prompt", [HELLO, "ab"])
def test_a_tokenizer_that_gives_no_token_ids(prompt, given) -> None:
    class Odd(Chat):
        def encode(self, text):
            return given

        def apply_chat_template(self, messages, **kwargs):
            return given

    engine = Rig(OrcaScheduler, vocab=9, tokenizer=Odd()).engine
    outputs = engine.generate([[1], prompt], PARAMS, on_error="return")
    assert outputs[0].error is None
    assert (outputs[1].error or "").startswith(("the chat template cannot be applied: TypeErr", "the tokenizer cannot"))


def test_encode_is_what_a_request_gets() -> None:
    engine = rig().engine
    for prompt in (HELLO, "ab", [1, 2]):
        engine.add_request(prompt, PARAMS)
        assert engine.step()[-1].prompt_token_ids == engine.encode(prompt)
    assert engine.encode(HELLO, chat_template_kwargs={"add_generation_prompt": False})[-1] == 1
    assert isinstance(engine.tokenizer, Chat)
    with pytest.raises(RequestError, match="the prompt is empty"):
        engine.encode([])


def test_a_tokenizer_without_a_template() -> None:
    engine = Rig(OrcaScheduler, vocab=3, tokenizer=Pieces("abc")).engine
    with pytest.raises(RequestError, match=r"needs? a tokenizer with a chat template, and this tokenizer has none"):
        engine.add_request(HELLO, PARAMS)
