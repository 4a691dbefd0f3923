"""Long texts are tokenized to the point where they are too long; refused requests are answered ever more slowly."""

import asyncio
import time

import hypothesis.strategies as st
import numpy as np
import pytest
from chat_templates import MODEL, chat_of
from hypothesis import given, settings
from scripted_play import OneSession, prompt_of, run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from async_grpo.environments import bounded_encoding, refusals
from async_grpo.environments.bounded_encoding import encode_up_to
from async_grpo.environments.chat import Chat, TrajectoryOver
from async_grpo.environments.config import TrajectoryLimits
from async_grpo.environments.played import Played
from async_grpo.environments.refusals import RefusalBrake
from async_grpo.errors import ConfigurationError

CORPUS = [
    "the cat sat on the mat, the dog sat on the log",
    "aaaa aaaa aa hello world 12345 12 1234",
    "été ✓🙂 ✓✓",
] * 20


def trained_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer with merges over several characters, as most models have one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    return tokenizer


TOKENIZER = trained_tokenizer()
WORDS = st.sampled_from(["the ", "cat", " ", "aaaaaaa", "aaa ", "\n", "✓", "🙂", "hello", "12345", "x", "é"])
TEXTS = st.lists(st.lists(WORDS, max_size=60).map("".join), min_size=1, max_size=6)


class Calls:
    """Encodes, and keeps the number of characters of each call."""

    def __init__(self) -> None:
        self.characters: list[int] = []

    def __call__(self, texts):
        self.characters.append(sum(map(len, texts)))
        return [encoding.ids for encoding in TOKENIZER.encode_batch(texts)]


@settings(max_examples=300)
@given(TEXTS, st.integers(0, 200), st.integers(1, 20), st.sampled_from([2, 4]))
def test_texts_that_fit_have_the_same_ids_and_others_are_refused(texts, max_tokens, first, growth):
    """With tiny beginnings, cuts fall everywhere; four tokens are as uncertain as the longest merge here is."""
    expected = [token_id for text in texts for token_id in TOKENIZER.encode(text).ids]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounded_encoding, "FIRST_BEGINNING_CHARACTERS", first)
        patch.setattr(bounded_encoding, "GROWTH", growth)
        patch.setattr(bounded_encoding, "UNCERTAIN_TOKENS", 16)
        token_ids = encode_up_to(Calls(), texts, max_tokens)
    assert token_ids == (expected if len(expected) <= max_tokens else None)


def test_a_text_that_is_far_too_long_is_tokenized_in_a_small_part_only():
    calls = Calls()
    text = "the cat sat on the mat " * 100_000
    assert encode_up_to(calls, [text], 4000) is None
    assert calls.characters == [bounded_encoding.FIRST_BEGINNING_CHARACTERS]
    assert sum(calls.characters) < len(text) / 30


def test_the_beginnings_of_a_long_text_that_fits_have_at_most_four_thirds_of_its_characters(monkeypatch):
    monkeypatch.setattr(bounded_encoding, "FIRST_BEGINNING_CHARACTERS", 2048)
    calls = Calls()
    text = "the cat sat on the mat " * 2000
    token_ids = encode_up_to(calls, [text], 1 << 30)
    assert token_ids == TOKENIZER.encode(text).ids and sum(calls.characters) <= 7 / 3 * len(text)


def test_many_short_pieces_go_into_few_calls_and_stop_early():
    calls = Calls()
    assert encode_up_to(calls, ["cat " * 100] * 1000, 5000) is None
    assert len(calls.characters) == 1 and calls.characters[0] <= bounded_encoding.FIRST_BEGINNING_CHARACTERS


def test_a_tokenizer_that_was_saved_with_cutting_and_padding_reads_whole_texts():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    text = "hello world, this text has more than four tokens"
    pieces = [text[:3], text[3:20], text[20:]]
    expected = [tokenizer.encode(piece, add_special_tokens=False) for piece in pieces]
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding()
    token_ids = Chat(tokenizer).encode(text, breaks=(3, 20))
    assert token_ids.tolist() == [token_id for piece_ids in expected for token_id in piece_ids]


def delays_of(outcomes: str) -> list[float]:
    """Return the delay after each outcome: r for a refused request, s for one that is answered."""
    delays = []
    brake = RefusalBrake()

    async def sleep(seconds):
        delays.append(seconds)

    async def story():
        for outcome in outcomes:
            if outcome == "s":
                brake.succeeded()
                continue
            with pytest.raises(ConfigurationError):
                async with brake.watching(ConfigurationError):
                    raise ConfigurationError("refused")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(refusals.asyncio, "sleep", sleep)
        asyncio.run(story())
    return delays


def test_refusals_are_delayed_from_the_fourth_in_a_row_up_to_five_seconds():
    assert delays_of("r" * 11) == pytest.approx([0, 0, 0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5])
    assert delays_of("rrrrsrrrr") == pytest.approx([0, 0, 0, 0.1, 0, 0, 0, 0.1])
    assert delays_of("r" * 5000)[-1] == 5


def test_an_error_that_passes_two_watchers_is_one_refusal():
    brake = RefusalBrake()

    async def story():
        for _ in range(3):
            with pytest.raises(ConfigurationError):
                async with brake.watching(ConfigurationError), brake.watching(ConfigurationError):
                    raise ConfigurationError("refused")

    asyncio.run(story())
    assert brake._num_refusals == 3


def test_a_program_that_only_retries_is_slowed_down_and_ends_at_its_time_limit():
    num_requests = 0

    async def retries(prompt, policy):
        nonlocal num_requests
        await policy.complete(prompt.token_ids)
        while True:
            try:
                num_requests += 1
                await policy.complete(np.zeros(0, np.int32))
            except (ConfigurationError, TrajectoryOver):
                continue

    async def play():
        playing = Played(
            OneSession(lambda: "hm"), retries, chat_of("appends"), TrajectoryLimits(3, 2000, None, 1.0)
        )
        return [one async for one in playing.generate(prompt_of(), 1)]

    begin = time.monotonic()
    (trajectory,) = run(play())
    # 3 at once, then after 0.1, 0.3 and 0.7 s; a slow machine makes fewer
    assert num_requests <= 8 and trajectory.truncated and time.monotonic() - begin < 20
