"""Transformers' tokenizers behind the `Tokenizer` protocol; every vocabulary is built here."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from batchkit.hf.tokenizer import HFTokenizer
from batchkit.text import IncrementalDecoder, OutputText, StreamingTokenizer, Tokenizer
from batchkit.types import Request, SamplingParams

MARK = "\ufffd"
CORPUS = [
    "far away over there, a fox; it's far , far away .",
    "héé 世界 世界 한글 👩\u200d👩\u200d👧 don't",
    "  two  spaces\n",
] * 20
SPECIAL = ["<|start|>", "<|end|>"]


def byte_level(**kwargs: object) -> PreTrainedTokenizerFast:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|start|>", eos_token="<|end|>", **kwargs)


def byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2 has it: words start with "▁", what is not in the vocabulary comes byte by byte."""
    words = ["far", "away", "over", "there", "don", "a"]
    pieces = ["<unk>", *SPECIAL, *(f"<0x{i:02X}>" for i in range(256)), "▁", ",", ".", "'", *"abcdefghinorstvwy"]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    merges: list[tuple[str, str]] = []
    for word in words:
        start = "▁"
        for char in word:
            if start + char not in vocab:
                vocab[start + char] = len(vocab)
                merges.append((start, char))
            start += char
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", unk_token="<unk>")


def metaspace() -> PreTrainedTokenizerFast:
    """As SentencePiece's unigram models have it, without bytes: what is not in the vocabulary is lost."""
    pieces = [
        "<unk>",
        *SPECIAL,
        "▁",
        "▁far",
        "▁away",
        "▁over",
        "▁there",
        "▁a",
        "世界",
        *"abdefhrtvwy,.'é한世👩\u200d\n",
    ]
    backend = Backend(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", unk_token="<unk>")


def word_piece() -> PreTrainedTokenizerFast:
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]", *SPECIAL], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", unk_token="[UNK]", clean_up_tokenization_spaces=True
    )


def slow() -> PreTrainedTokenizerBase:
    return ByT5Tokenizer(extra_ids=3)


MAKERS = [byte_level, byte_fallback, metaspace, word_piece, slow]
TOKENIZERS = {make.__name__: HFTokenizer(make()) for make in MAKERS}
each = pytest.mark.parametrize("name", list(TOKENIZERS))
texts = st.text(st.sampled_from("ab far,.' é世界한👩\u200d\n"), max_size=30)


def deltas(tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int], *, skip: bool = True) -> list[str]:
    decoder = IncrementalDecoder(tokenizer, prompt, skip_special_tokens=skip)
    return [decoder.step(token) for token in output] + [decoder.finish()]


def difference(tokenizer: Tokenizer, prompt: list[int], output: list[int], *, skip: bool = True) -> str:
    """decode(prompt + output) - decode(prompt); with the whole character if the prompt ends with half of it."""
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    text = tokenizer.decode(prompt + output, skip_special_tokens=skip)
    while not text.startswith(before):
        assert before.endswith(MARK)
        if tokenizer is TOKENIZERS["byte_fallback"]:  # there, half a character turns whole ones before it into marks
            prompt = prompt[:-1]
            before = tokenizer.decode(prompt, skip_special_tokens=skip)
        else:
            before = before[:-1]
    return text[len(before) :]


@each
@given(prompt=texts, text=texts, skip=st.booleans())
def test_joined_deltas_are_the_difference_of_decodes(name: str, prompt: str, text: str, skip: bool) -> None:
    tokenizer = TOKENIZERS[name]
    tokens = tokenizer.encode(prompt + text)
    for cut in {0, len(tokenizer.encode(prompt)), len(tokens) // 2}:
        given = deltas(tokenizer, tokens[:cut], tokens[cut:], skip=skip)
        assert "".join(given) == difference(tokenizer, tokens[:cut], tokens[cut:], skip=skip)


@pytest.mark.parametrize("name", ["byte_level", "metaspace", "word_piece"])
@given(data=st.data(), skip=st.booleans())
def test_joined_deltas_are_the_decode_of_any_tokens(name: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = TOKENIZERS[name]
    ids = st.integers(0, len(tokenizer.inner) - 1)
    prompt, output = data.draw(st.lists(ids, max_size=12)), data.draw(st.lists(ids, max_size=40))
    assert "".join(deltas(tokenizer, prompt, output, skip=skip)) == difference(tokenizer, prompt, output, skip=skip)


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@given(prompt=texts, text=texts)
def test_a_stream_gives_what_the_generic_way_gives(name: str, prompt: str, text: str) -> None:
    class Generic:
        eos_token_id = None
        encode, decode = TOKENIZERS[name].encode, TOKENIZERS[name].decode

    tokens = TOKENIZERS[name].encode(prompt + text)
    cut = len(tokens) // 2
    assert deltas(TOKENIZERS[name], tokens[:cut], tokens[cut:]) == deltas(Generic(), tokens[:cut], tokens[cut:])


@each
def test_characters_split_over_tokens(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    tokens = tokenizer.encode("a 🦊\u200d👧 é世 b")
    given = deltas(tokenizer, tokens[:1], tokens[1:])
    assert MARK not in "".join(given)
    if name in ("byte_level", "byte_fallback", "slow"):
        assert any(not piece for piece in given[:-1])  # some characters were really split
        assert "".join(given).endswith("🦊\u200d👧 é世 b")


def test_half_a_character_at_the_end() -> None:
    for name in ("byte_level", "byte_fallback"):
        tokenizer = TOKENIZERS[name]
        prompt = tokenizer.encode("a")
        tokens = tokenizer.encode("a 🦊")
        given = deltas(tokenizer, prompt, tokens[len(prompt) : -1])
        assert set("".join(given).strip()) == {MARK}
        assert given[-1].endswith(MARK)


def test_bad_byte_after_a_complete_character() -> None:
    # The whole run of bytes turns into marks when decoded at once; what was returned stays, and nothing is repeated.
    tokenizer = TOKENIZERS["byte_fallback"]
    byte = [tokenizer.inner.convert_tokens_to_ids(f"<0x{b:02X}>") for b in "世".encode()]
    (word,) = tokenizer.inner.convert_tokens_to_ids(["▁far"])
    assert "".join(deltas(tokenizer, [word], [*byte, byte[0], word, *byte, word])) == f"世{MARK} far世 far"
    assert "".join(deltas(tokenizer, [word], [*byte, *[byte[1]] * 50, word])) == "世" + MARK * 50 + " far"


def test_leading_spaces() -> None:
    for name in ("byte_level", "byte_fallback", "metaspace"):
        tokenizer = TOKENIZERS[name]
        prompt = tokenizer.encode("far")
        output = tokenizer.encode("far away over there")[len(prompt) :]
        assert "".join(deltas(tokenizer, prompt, output)) == " away over there", name


def test_special_tokens_in_between() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    far, end, over = tokenizer.inner.convert_tokens_to_ids(["▁far", "<|end|>", "▁over"])
    assert "".join(deltas(tokenizer, [far], [*[end] * 60, over])) == " over"
    assert "".join(deltas(tokenizer, [far], [end, over], skip=False)) == "<|end|> over"
    assert "".join(deltas(tokenizer, [far, *[end] * 60], [over])) == " over"


def test_stop_string_in_real_text() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    prompt = tokenizer.encode("far away")
    output = tokenizer.encode("far away over there, a fox 世界 한글")[len(prompt) :]
    request = Request(
        id="r", prompt_token_ids=tuple(prompt), params=SamplingParams(stop=["fox 世", "there."]), max_tokens=99
    )
    text = OutputText(tokenizer, request)
    assert any(text.append(token, i + 1) for i, token in enumerate(output))
    text.finish()
    assert "".join(text.pieces) == " over there, a "


@each
def test_clean_up_of_spaces_is_never_applied(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    if name == "word_piece":
        tokens = tokenizer.encode("far , far away .")
        assert tokenizer.inner.decode(tokens) == "far, far away."
        assert tokenizer.decode(tokens) == "".join(deltas(tokenizer, [], tokens)) == "far , far away ."
    else:
        inner = MAKERS[[make.__name__ for make in MAKERS].index(name)]()
        inner.clean_up_tokenization_spaces = True
        tokens = tokenizer.encode("far , far away .")
        assert HFTokenizer(inner).decode(tokens) == tokenizer.decode(tokens)


def test_fast_tokenizers_stream_and_slow_ones_do_not() -> None:
    for name, tokenizer in TOKENIZERS.items():
        assert isinstance(tokenizer, StreamingTokenizer)
        assert (tokenizer.decode_stream([], True) is None) == (name == "slow"), name


def test_a_class_that_changes_the_decoded_text_does_not_stream() -> None:
    class Shouting(PreTrainedTokenizerFast):
        def decode(self, *args: object, **kwargs: object) -> str:
            return super().decode(*args, **kwargs).upper()  # type: ignore[arg-type,union-attr]

    tokenizer = HFTokenizer(Shouting(tokenizer_object=byte_level().backend_tokenizer))
    assert tokenizer.decode_stream([], True) is None
    tokens = tokenizer.encode("far away")
    assert "".join(deltas(tokenizer, [], tokens)) == "FAR AWAY"


def test_encode_adds_special_tokens_by_default() -> None:
    assert TOKENIZERS["byte_level"].encode("far")[0] == 0
    assert TOKENIZERS["slow"].encode("a")[-1] == TOKENIZERS["slow"].eos_token_id
    assert all(type(token) is int for token in TOKENIZERS["byte_level"].encode("far away"))


def test_ids_of_special_tokens() -> None:
    tokenizer = HFTokenizer(byte_level())
    assert tokenizer.eos_token_id == tokenizer.special_token_id("<|end|>") == 1
    assert tokenizer.special_token_id("far") is None
    assert tokenizer.special_token_id("<|nothing|>") is None
    inner = byte_level()
    inner.add_tokens([AddedToken("<|im_end|>", special=True), AddedToken("<plain>", special=False)])
    tokenizer = HFTokenizer(inner)
    assert tokenizer.special_token_id("<|im_end|>") == inner.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.special_token_id("<plain>") is None  # it appears in the text, so a stop string finds it there
    assert tokenizer.decode(inner.convert_tokens_to_ids(["<plain>", "<|im_end|>"])) == "<plain>"
    assert TOKENIZERS["slow"].special_token_id("</s>") == TOKENIZERS["slow"].eos_token_id


def test_no_eos_token() -> None:
    assert HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=byte_level().backend_tokenizer)).eos_token_id is None


def test_tokens_outside_the_vocabulary_have_no_text() -> None:
    # A model's logits may be wider than its tokenizer's vocabulary.
    for name in ("byte_level", "byte_fallback"):
        tokenizer = TOKENIZERS[name]
        tokens = tokenizer.encode("far away")
        outside = len(tokenizer.inner) + 100
        assert "".join(deltas(tokenizer, tokens[:1], [*tokens[1:], outside])) == difference(
            tokenizer, tokens[:1], tokens[1:]
        )


def test_inner_tokenizer_is_kept() -> None:
    inner = byte_level()
    assert HFTokenizer(inner).inner is inner


def test_environment_is_untouched() -> None:
    before = dict(os.environ)
    tokenizer = HFTokenizer(byte_level())
    deltas(tokenizer, [], tokenizer.encode("far away"))
    assert dict(os.environ) == before


# ---- conversations -------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}"
    "{% if shout %}!{% endif %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
CHAT = [{"role": "user", "content": "far away"}]


def test_a_chat_template_sets_the_only_special_tokens() -> None:
    tokenizer = HFTokenizer(byte_level(chat_template=TEMPLATE))
    token_ids = tokenizer.apply_chat_template(CHAT)
    assert all(type(token) is int for token in token_ids)
    assert token_ids.count(0) == 1  # encoding the template's text would add a second one
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == "<|start|>[user]far away[assistant]"


def test_arguments_of_a_chat_template() -> None:
    tokenizer = HFTokenizer(byte_level(chat_template=TEMPLATE))
    for kwargs, text in (
        ({"shout": True}, "[user]far away![assistant]"),
        ({"add_generation_prompt": False}, "[user]far away"),
        ({"continue_final_message": True}, "[user]far away"),
        ({"chat_template": "{{ messages[0]['content'] }}"}, "far away"),
    ):
        assert tokenizer.decode(tokenizer.apply_chat_template(CHAT, **kwargs)) == text


def test_a_tokenizer_without_a_chat_template() -> None:
    with pytest.raises(ValueError, match="chat_template is not set"):
        HFTokenizer(byte_level()).apply_chat_template(CHAT)
