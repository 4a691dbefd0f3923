"""Turns that an agent threw away: found by the tokens before them, left out of training or not, and visible in samples."""

import json

import pytest
from chat_templates import chat_of
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_play import OneSession, prompt_of, run

from async_grpo.environments.config import TrajectoryLimits
from async_grpo.environments.played import Played
from async_grpo.experience.state import _sample, _sample_row
from async_grpo.experience.step_metrics import readable_samples, step_stats
from async_grpo.types import Completion, Group, RewardStatus, Sample, Verdict

QUESTION = [{"role": "user", "content": "2 + 2"}]
MORE = {"role": "user", "content": "more"}


def played(program, texts, *, drops: bool = True, template: str = "appends") -> Completion:
    """Play a program with a policy that says the texts in order."""
    remaining = iter(texts)
    limits = TrajectoryLimits(99, 9000, None, 60, drops_abandoned=drops)
    playing = Played(OneSession(lambda: next(remaining)), program, chat_of(template), limits)

    async def play():
        return [one async for one in playing.generate(prompt_of(), 1)]

    (trajectory,) = run(play())
    assert not trajectory.failure, trajectory.failure
    return trajectory


async def retries_once(prompt, policy):
    await policy.complete(QUESTION)
    second = await policy.complete(QUESTION)
    await policy.complete([*QUESTION, second.message, MORE])
    return policy.trajectory(1.0, turn_rewards=[0.25, 0.5, 0.75], states=["a", "b", "c"])


async def never_retries(prompt, policy):
    first = await policy.complete(QUESTION)
    await policy.complete([*QUESTION, first.message, MORE])
    return policy.trajectory(1.0, turn_rewards=[0.5, 0.75], states=["b", "c"])


def trained(completion: Completion) -> list:
    """Return all that decides what is trained on, but for the numbers of the turns."""
    turns = [
        (turn.before.tolist(), turn.num_tokens, turn.fresh, turn.before_text, turn.text)
        for turn in completion.turns
    ]
    outcome = completion.outcome
    return [completion.token_ids.tolist(), turns, outcome.turn_rewards, outcome.states, completion.text]


def test_a_retry_leaves_no_trace_in_what_is_trained_on():
    completion = played(retries_once, ["bad", "good", "end"])
    assert trained(completion) == trained(played(never_retries, ["good", "end"]))
    assert [turn.number for turn in completion.turns] == [1, 2] and completion.times is None
    assert completion.turn_ranks.tolist() == [0, 1]
    assert [(turn.number, turn.text, len(turn.before)) for turn in completion.abandoned] == [
        (0, "bad<|im_end|>", 0)
    ]
    assert completion.outcome.numbers["abandoned_turns"] == 1
    assert completion.outcome.turn_rewards == (0.5, 0.75) and completion.outcome.states == ("b", "c")


def test_with_train_the_thrown_away_turn_has_a_sequence_of_its_own_as_before():
    completion = played(retries_once, ["bad", "good", "end"], drops=False)
    assert [(turn.number, turn.fresh) for turn in completion.turns] == [(0, True), (1, True), (2, False)]
    assert completion.abandoned == () and completion.outcome.numbers["abandoned_turns"] == 1
    assert completion.outcome.turn_rewards == (0.25, 0.5, 0.75)


@pytest.mark.parametrize("chosen", [0, 1, 2, 3])
def test_of_four_choices_the_one_that_the_agent_goes_on_with_is_trained_on(chosen):
    async def program(prompt, policy):
        first = await policy.complete(QUESTION)
        history = [*QUESTION, first.message, MORE]
        choices = [await policy.complete(history) for _ in range(4)]
        await policy.complete([*history, choices[chosen].message, MORE])
        return policy.trajectory(1.0)

    completion = played(program, ["one", *"abcd", "end"])
    assert [turn.text for turn in completion.turns] == [
        "one<|im_end|>",
        f"{'abcd'[chosen]}<|im_end|>",
        "end<|im_end|>",
    ]
    assert [turn.fresh for turn in completion.turns] == [True, False, False]
    assert [turn.number for turn in completion.abandoned] == [
        1 + place for place in range(4) if place != chosen
    ]


def test_choices_of_which_none_was_continued_all_count():
    async def program(prompt, policy):
        for _ in range(3):
            await policy.complete(QUESTION)
        return policy.trajectory(1.0)

    completion = played(program, "abc")
    assert len(completion.turns) == 3 and not completion.abandoned


def test_conversations_that_were_both_continued_and_those_of_sub_agents_all_count():
    async def program(prompt, policy):
        for _ in range(2):
            reply = await policy.complete(QUESTION)
            await policy.complete([*QUESTION, reply.message, MORE])
        await policy.complete([{"role": "user", "content": "a sub-agent's question"}])
        return policy.trajectory(1.0)

    completion = played(program, "abcde")
    assert len(completion.turns) == 5 and not completion.abandoned


def test_the_answer_of_an_agent_that_started_over_is_trained_on_and_scored():
    async def program(prompt, policy):
        first = await policy.complete(QUESTION)
        await policy.complete([*QUESTION, first.message, MORE])
        await policy.complete(QUESTION)
        return policy.trajectory(1.0, turn_rewards=[0.0, 0.0, 1.0])

    completion = played(program, ["call", "lost", "answer"])
    assert not completion.abandoned and completion.text == "answer"
    assert completion.outcome.turn_rewards == (0.0, 0.0, 1.0)


def test_a_retry_after_the_agent_went_on_is_abandoned_if_the_agent_then_goes_on_without_it():
    async def program(prompt, policy):
        first = await policy.complete(QUESTION)
        await policy.complete([*QUESTION, first.message, MORE])
        await policy.complete(QUESTION)
        await policy.complete([*QUESTION, first.message, MORE, MORE])
        return policy.trajectory(1.0)

    completion = played(program, ["first", "second", "retry", "end"])
    assert [turn.number for turn in completion.abandoned] == [2] and completion.text == "end"


def test_a_retry_with_the_same_tokens_is_the_turn_that_the_agent_goes_on_with():
    completion = played(retries_once, ["good", "good", "end"])
    assert [turn.number for turn in completion.abandoned] == [0]
    assert trained(completion) == trained(played(never_retries, ["good", "end"]))


def test_a_turn_whose_thought_the_template_drops_later_was_continued():
    completion = played(
        retries_once, ["bad", "<think>hm</think>\n\ngood", "end"], template="forgets_thoughts"
    )
    assert [turn.number for turn in completion.turns] == [1, 2]
    assert [turn.number for turn in completion.abandoned] == [0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=5))
def test_an_agent_that_throws_turns_away_is_trained_as_one_that_does_not(steps):
    """Each step samples some choices, and goes on with one of them."""
    num_texts = sum(count for count, _ in steps) + 1
    texts = [f"text {number}" for number in range(num_texts)]
    used_texts = []
    begin = 0
    for count, choice in steps:
        used_texts.append(texts[begin + choice % count])
        begin += count
    used_texts.append(texts[-1])

    async def wasteful(prompt, policy):
        history = list(QUESTION)
        for count, choice in steps:
            replies = [await policy.complete(history) for _ in range(count)]
            history += [replies[choice % count].message, MORE]
        await policy.complete(history)
        return policy.trajectory(1.0)

    async def frugal(prompt, policy):
        history = list(QUESTION)
        for _ in range(len(steps) + 1):
            reply = await policy.complete(history)
            history += [reply.message, MORE]
        return policy.trajectory(1.0)

    completion = played(wasteful, texts)
    assert trained(completion) == trained(played(frugal, used_texts))
    num_dropped = num_texts - len(used_texts)
    assert len(completion.abandoned) == num_dropped == completion.outcome.numbers["abandoned_turns"]


def test_samples_metrics_and_checkpoints_show_abandoned_turns():
    completion = played(retries_once, ["bad", "good", "end"])
    sample = Sample(prompt_of(), completion, Verdict(RewardStatus.OK, 1.0))
    group = Group(prompt_of(), (sample,), 0, 0)
    (row,) = readable_samples([group])
    assert len(row["turns"]) == 2
    (abandoned,) = row["abandoned_turns"]
    assert abandoned["number"] == 1 and abandoned["said"] == "bad<|im_end|>" and "2 + 2" in abandoned["read"]
    assert step_stats(0, [group], 1, 1)["environment/abandoned_turns"] == 1
    assert sample.num_tokens == sum(len(turn.before) for turn in completion.turns) + len(completion)

    saved = json.loads(json.dumps(_sample_row(sample)))
    tokens = saved.pop("tokens")
    arrays = {
        "token_ids": completion.token_ids,
        "logprobs": completion.logprobs,
        "versions": completion.versions,
    }
    restored = _sample(prompt_of(), dict(saved), arrays, None).completion
    assert tokens == len(restored) and trained(restored) == trained(completion)
    assert [(turn.number, turn.text) for turn in restored.abandoned] == [(0, "bad<|im_end|>")]
    del saved["abandoned"]  # as an earlier version saved it
    assert _sample(prompt_of(), saved, arrays, None).completion.abandoned == ()


def test_a_turn_of_equal_length_but_other_history_is_no_sibling():
    async def program(prompt, policy):
        await policy.complete([{"role": "user", "content": "1 + 1"}])
        second = await policy.complete(QUESTION)
        await policy.complete([*QUESTION, second.message, MORE])
        return policy.trajectory(1.0)

    assert not played(program, "abc").abandoned
