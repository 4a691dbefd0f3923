"""Characters after each token: against decoding every prefix, over the tiny model's tokens and over awkward ones."""

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from async_grpo.inference.char_ends import char_ends

TINY = AutoTokenizer.from_pretrained(Path(__file__).resolve().parents[2] / "sample-data" / "tiny-model")
EMOJI = "🙂"
CHARACTERS = ["a", " ", "é", "漢", EMOJI, "\ufffd", "\n", "👩\u200d👩\u200d👧", "e\u0301"]


def byte_pieces() -> PreTrainedTokenizerFast:
    """Tokens of one to four bytes that begin and end within characters, as no merging would make them."""
    as_letters = bytes_to_unicode()
    pieces = [bytes([byte]) for byte in range(256)]
    pieces += [b"\x9f\x99\x82\xf0", b"\x82\xf0", b" \xf0\x9f", b"\x99\x82", b"\xa2\xe6", b"\xbc\xa2", b"ab"]
    vocabulary = {"".join(as_letters[byte] for byte in piece): i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def sentence_pieces() -> PreTrainedTokenizerFast:
    """Words with their blank, and single bytes as a way out: the leading blank of a text is dropped."""
    words = ["<unk>", "▁", "▁one", "▁two", "s", "two", "漢", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    blank, strip = decoders.Replace("▁", " "), decoders.Strip(content=" ", left=1)
    tokenizer.decoder = decoders.Sequence([blank, decoders.ByteFallback(), decoders.Fuse(), strip])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


PIECES, SENTENCE = byte_pieces(), sentence_pieces()


def decode(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)


def by_every_prefix(tokenizer: Any, ids: list[int], text: str) -> list[int]:
    """The definition, at quadratic cost."""
    prefixes = [decode(tokenizer, ids[: t + 1]) for t in range(len(ids))]
    return [len(os.path.commonprefix([prefix, text])) for prefix in prefixes]  # noqa: RUF071


def check(tokenizer: Any, ids: list[int], text: str) -> None:
    found = char_ends(tokenizer, ids, text)
    assert found.dtype == "int32" and found.shape == (len(ids),)
    assert found.tolist() == by_every_prefix(tokenizer, ids, text)
    assert sorted(found) == list(found)
    for t, end in enumerate(found):
        prefix = decode(tokenizer, ids[: t + 1])
        assert text[:end] == prefix[:end]  # never beyond what has been written
        assert end == len(prefix) or not text.startswith(prefix)  # and all of it where that is sure
    assert len(ids) == 0 or found[-1] == len(text)


@given(text=st.lists(st.sampled_from(CHARACTERS), max_size=30).map("".join) | st.text(max_size=30))
@settings(max_examples=80, deadline=None)
def test_any_text_is_followed_byte_by_byte(text):
    ids = TINY.encode(text.encode("utf-8", "ignore").decode())
    check(TINY, ids, decode(TINY, ids))


@given(ids=st.lists(st.integers(0, 299), max_size=40), tokenizer=st.sampled_from([TINY, PIECES]))
@settings(max_examples=150, deadline=None)
def test_any_tokens_are_followed_also_those_that_begin_and_end_within_characters(ids, tokenizer):
    ids = [token % len(tokenizer) for token in ids]
    check(tokenizer, ids, decode(tokenizer, ids))


@pytest.mark.parametrize(
    "pattern",
    [[256], [257], [258], [0xF0], [0x80], [0xF0, 0x9F, 0x99], [0xEF, 0xBF, 0xBD], [0xC3, 0xC3, 0xA9]],
)
@pytest.mark.parametrize("before", [[], [0xF0], [0x61]])
def test_a_model_that_repeats_itself_within_a_character_is_followed(pattern, before):
    ids = before + pattern * 40
    check(PIECES, ids, decode(PIECES, ids))


@given(ids=st.lists(st.integers(0, 255), max_size=20), stop=st.sampled_from(["<|im_end|>", "<|endoftext|>"]))
@settings(max_examples=40, deadline=None)
def test_the_end_token_that_the_text_leaves_out_adds_nothing(ids, stop):
    text = decode(TINY, ids)
    found = char_ends(TINY, [*ids, TINY.convert_tokens_to_ids(stop)], text)
    assert found[-1] == len(text)
    assert found[:-1].tolist() == by_every_prefix(TINY, ids, text)


@pytest.mark.parametrize(
    ("text", "tokens", "ends"),
    [
        (f"a{EMOJI}b", 6, [1, 1, 1, 1, 2, 3]),
        (f"a{EMOJI}b", 4, [1, 2, 2, 2]),  # cut off: a replacement character
        ("1</think><|im_start|>2", 4, [1, 9, 21, 22]),
        ("", 0, []),
    ],
)
def test_an_emoji_counts_from_its_last_token_on_and_special_tokens_are_characters(text, tokens, ends):
    ids = TINY.encode(text)[:tokens]
    assert char_ends(TINY, ids, decode(TINY, ids)).tolist() == ends


@pytest.mark.parametrize(
    ("words", "text", "ends"),
    [
        (
            "▁one s <0xF0> <0x9F> <0x99> <0x82> ▁two <0xC3> <0xA9>",
            "ones🙂 twoé",
            [3, 4, 4, 4, 4, 5, 9, 9, 10],
        ),
        # No characters: each counts
        ("▁one <0xC3> <0xC3> <0xA9> s", "one\ufffd\ufffd\ufffds", [3, 4, 5, 6, 7]),
    ],
)
def test_words_that_carry_their_blank_and_characters_of_single_bytes_are_followed(words, text, ends):
    ids = SENTENCE.convert_tokens_to_ids(words.split())
    assert decode(SENTENCE, ids) == text
    assert char_ends(SENTENCE, ids, text).tolist() == ends


def test_what_has_been_counted_stays_counted_although_a_decoder_changes_its_mind():
    ids = SENTENCE.convert_tokens_to_ids(["<0xC3>", "<0xA9>", "<0x80>"])
    text = decode(SENTENCE, ids)
    assert [decode(SENTENCE, ids[:2]), text] == ["é", "\ufffd\ufffd\ufffd"]
    assert by_every_prefix(SENTENCE, ids, text) == [1, 0, 3]
    assert char_ends(SENTENCE, ids, text).tolist() == [1, 1, 3]


def test_a_text_that_the_decoder_does_not_yield_ends_with_the_last_token():
    class Shouting:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return bytes(ids).decode().upper()

    assert char_ends(Shouting(), list(b"Oh no" * 4), "Oh no" * 4).tolist() == [1] * 19 + [20]


@given(ids=st.lists(st.sampled_from(range(len(SENTENCE))), max_size=40))
@settings(max_examples=50, deadline=None)
def test_whatever_the_decoder_makes_of_it_the_ends_rise_to_the_end_of_the_text(ids):
    text = decode(SENTENCE, ids)
    found = char_ends(SENTENCE, ids, text).tolist()
    assert found == sorted(found) and all(0 <= end <= len(text) for end in found)
    assert not ids or found[-1] == len(text)


def test_the_time_grows_with_the_length_and_not_with_its_square():
    class Counting:
        num_decoded = 0

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            self.num_decoded += len(ids)
            return bytes(ids).decode(errors="replace")

    for byte in (0x61, 0x80, 0xF0):  # text, and what never becomes text
        counting, ids = Counting(), [byte] * 4000
        char_ends(counting, ids, bytes(ids).decode(errors="replace"))
        assert counting.num_decoded < 4000 * 20
