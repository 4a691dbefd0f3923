"""Which sequence a turn goes on with, where several would fit: every token that was sampled stays a sampled one."""

import asyncio

import numpy as np
from chat_templates import MODEL
from transformers import AutoTokenizer

from async_grpo.environments.call_reader import CallReader
from async_grpo.environments.control_tokens import Rendered
from async_grpo.environments.sequence import EngineInput
from async_grpo.environments.trajectory import TrajectoryRecorder
from async_grpo.experience.prompts import PromptRenderer
from async_grpo.testing import completion
from async_grpo.types import Completion, Outcome, Prompt, RewardStatus, Sample, Verdict

PAIRS = {
    1000: "CD",
    1001: "GH",
    1002: "KL",
    1003: "OP",
}  # tokens of two letters each, that no text is encoded to


class Letters:
    """A `Chat` whose tokens are letters, but for the pairs."""

    reader = CallReader(PromptRenderer(AutoTokenizer.from_pretrained(MODEL)))

    def encode(self, text: str, *, begins: bool = False, breaks: tuple[int, ...] = ()) -> np.ndarray:
        return np.array([ord(letter) for letter in text], np.int32)

    def with_features(self, token_ids: np.ndarray, images: tuple) -> np.ndarray:
        return token_ids

    def images_of_tokens(self, token_ids: np.ndarray, prompt_images: tuple) -> tuple:
        return ()

    def decode(self, token_ids: np.ndarray, after: np.ndarray) -> str:
        return "".join(PAIRS.get(token) or chr(token) for token in token_ids.tolist())


def sampled(*token_ids: int) -> Completion:
    said = completion(len(token_ids))
    vars(said).update(
        token_ids=np.array(token_ids, np.int32), text=Letters().decode(np.array(token_ids), None)
    )
    return said


def tokens(text: str) -> np.ndarray:
    return Letters().encode(text)


def asks_text(recorder: TrajectoryRecorder, text: str) -> EngineInput:
    return asyncio.run(recorder.prepare_text(Rendered(text)))


def asks_tokens(recorder: TrajectoryRecorder, text: str) -> EngineInput:
    return asyncio.run(recorder.prepare_tokens(tokens(text)))


def adds(recorder: TrajectoryRecorder, ask: EngineInput, turn: Completion) -> None:
    asyncio.run(recorder.add(ask, turn))


def test_a_turn_goes_on_from_the_longest_of_the_histories_that_it_begins_with():
    recorder = TrajectoryRecorder(Letters())
    first = asks_tokens(recorder, "a")
    second = asks_tokens(recorder, "a")  # before the first has ended
    adds(recorder, first, sampled(ord("b")))
    adds(recorder, second, sampled(ord("b"), ord("c")))
    for ask in (asks_tokens(recorder, "abcd"), asks_text(recorder, "abcd")):
        assert ask.num_new == 1 and ask.token_ids.tolist() == tokens("abcd").tolist()
        assert ask.continued.token_ids.tolist() == tokens("abc").tolist()


def test_a_turn_that_turns_off_keeps_the_tokens_of_the_longest_history_that_fits():
    recorder = TrajectoryRecorder(Letters())
    first = asks_text(recorder, "ab")
    second = asks_text(recorder, "ab")  # before the first has ended
    adds(recorder, first, sampled(1000))
    adds(recorder, second, sampled(1000))
    for text, token in (("abCDef", 1001), ("abCDefGHij", 1002)):
        adds(recorder, asks_text(recorder, text), sampled(token))
    adds(recorder, asks_text(recorder, "abCDmn"), sampled(1003))  # the other one goes on elsewhere
    ask = asks_text(recorder, "abCDefGHxy")
    assert ask.continued is None
    assert ask.token_ids.tolist() == [*tokens("ab"), 1000, *tokens("ef"), 1001, *tokens("xy")]


def test_two_turns_that_were_asked_after_the_same_end_are_recorded_as_they_were_seen():
    recorder = TrajectoryRecorder(Letters())
    adds(recorder, asks_text(recorder, "ab"), sampled(1000))
    asks = [asks_text(recorder, "abCDef"), asks_text(recorder, "abCDef")]
    for ask, token in zip(asks, (1001, 1002), strict=True):
        adds(recorder, ask, sampled(token))
    finished = recorder.finish(0, Outcome(1.0), None)
    whole = Sample(Prompt(0, tokens("?"), {}), finished, Verdict(RewardStatus.OK, 1.0))
    seen = [*tokens("ab"), 1000, *tokens("ef")]
    assert [part.token_ids.tolist() for part in whole.sequences] == [[*seen, 1001], [*seen, 1002]]
    assert [part.completion.token_ids.tolist() for part in whole.sequences] == [[1000, 1001], [1002]]
