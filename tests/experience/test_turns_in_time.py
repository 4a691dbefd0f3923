"""What a turn earned reaches the tokens before it in time, in whatever order the sequences of a trajectory stand.

The references are loops over the turns in time; they know nothing of sequences.
"""

import asyncio
import random
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.algorithm.advantages import ADVANTAGE_ESTIMATORS
from async_grpo.environments.call_formats import ReadTurn
from async_grpo.environments.trajectory import TrajectoryRecorder
from async_grpo.errors import RunFailed
from async_grpo.experience.config import BatchConfig, RunFacts
from async_grpo.experience.group_advantages import GroupAdvantages
from async_grpo.testing import completion
from async_grpo.types import AdapterResult, Group, Outcome, Prompt, RewardStatus, Sample, Turn, Verdict

EPS = 1e-6
FACTS = RunFacts(process_rewards=("environment_turns",))
PROMPT = Prompt(0, np.array([1], np.int32), {})


@dataclass
class Played:
    """One turn, in the order in which turns were played."""

    sequence: int
    num_tokens: int
    reward: float
    state: str
    kl: list[float]  # of each token, log-prob of the policy less that of the reference


def trajectory(turns: list[Played], member: int) -> tuple[Sample, list[int]]:
    """Return the sample as an environment's recorder lays it out, and the place in time of each of its tokens."""
    sequences = sorted(
        {turn.sequence for turn in turns},
        key=lambda sequence: max(number for number, turn in enumerate(turns) if turn.sequence == sequence),
    )
    order = [
        number for sequence in sequences for number, turn in enumerate(turns) if turn.sequence == sequence
    ]
    begins = [sum(turn.num_tokens for turn in turns[:number]) for number in range(len(turns))]
    recorded, times, steps, kl, seen = [], [], [], [], set()
    for number in order:
        turn = turns[number]
        fresh = turn.sequence not in seen
        seen.add(turn.sequence)
        recorded.append(Turn(np.array([7], np.int32), turn.num_tokens, fresh, number=number))
        times += range(begins[number], begins[number] + turn.num_tokens)
        steps.append((len(times) - 1, turn.reward))
        kl += turn.kl
    said = completion(len(times))
    outcome = Outcome(None, "", tuple(r for _, r in steps), tuple(turns[number].state for number in order))
    vars(said).update(turns=tuple(recorded), outcome=outcome, member=member)
    total = sum(turn.reward for turn in turns)
    result = AdapterResult("environment_turns", RewardStatus.OK, total, steps=tuple(steps))
    reference = said.logprobs - np.array(kl, np.float32)
    return Sample(PROMPT, said, Verdict(RewardStatus.OK, total, (result,)), ref_logprobs=reference), times


@st.composite
def groups(draw) -> list[list[Played]]:
    dice = random.Random(draw(st.integers(0, 2**32)))
    return [
        [
            Played(
                dice.randrange(3),
                tokens := dice.randint(1, 3),
                dice.choice([0.0, 0.0, 1.0, -0.5, 10.0]),
                dice.choice(["", "a", "b"]),
                [dice.choice([0.0, 0.5, -0.25]) for _ in range(tokens)],
            )
            for _ in range(dice.randint(1, 6))
        ]
        for _ in range(dice.randint(2, 4))
    ]


def advantages_in_time(group: list[list[Played]], estimator: str, **options) -> list[list[float]]:
    """Return the library's answer for every trajectory, its tokens put into time."""
    built = [trajectory(turns, member) for member, turns in enumerate(group)]
    config = BatchConfig(samples_per_question=len(group), advantage_estimator=estimator, **options)
    baseline = Verdict(RewardStatus.OK, 0.25)
    samples = tuple(sample for sample, _ in built)
    (got,) = GroupAdvantages(config, FACTS)([Group(PROMPT, samples, 0, 0, baseline)], 0)
    found = []
    for sample, (_, times) in zip(got.samples, built, strict=True):
        in_time = np.empty(len(times))
        in_time[times] = sample.advantages
        found.append(in_time.tolist())
    return found


def token_rewards(turns: list[Played], kl_coef: float = 0.0) -> list[float]:
    """Return what each token earned, in time: the turn's reward on its last one, less the KL of each."""
    rewards = []
    for turn in turns:
        own = [-kl_coef * kl for kl in turn.kl]
        own[-1] += turn.reward
        rewards += own
    return rewards


def returns(rewards: list[float], gamma: float = 1.0) -> list[float]:
    count = len(rewards)
    return [sum(gamma ** (u - t) * rewards[u] for u in range(t, count)) for t in range(count)]


def whitened(rows: list[list[float]]) -> list[list[float]]:
    pool = [value for row in rows for value in row]
    deviation = (stdev(pool) ** 2 + 1e-8) ** 0.5 if len(pool) > 1 else 1.0
    return [[(value - fmean(pool)) / deviation for value in row] for row in rows]


def reinforce_plus_plus(group, gamma=1.0, kl=0.0):
    return whitened([returns(token_rewards(turns, kl), gamma) for turns in group])


def remax(group, kl=0.0):
    return [[value - 0.25 for value in returns(token_rewards(turns, kl))] for turns in group]


def grpo_process(group):
    pool = [turn.reward for turns in group for turn in turns]
    deviation = stdev(pool) if len(pool) > 1 else 0.0

    def z(reward: float) -> float:
        return (reward - fmean(pool)) / (deviation + EPS) if len(set(pool)) > 1 else 0.0

    rows = []
    for turns in group:
        rows.append([])
        for number, turn in enumerate(turns):
            rows[-1] += [sum(z(later.reward) for later in turns[number:])] * turn.num_tokens
    return rows


def prime_rloo(group):
    size = len(group)
    means = sum(fmean(turn.reward for turn in turns) for turns in group)
    rows = []
    for turns in group:
        rows.append([])
        for number, turn in enumerate(turns):
            left_out = [(later.reward * size - means) / (size - 1) for later in turns[number:]]
            rows[-1] += [sum(left_out)] * turn.num_tokens
    return whitened(rows)


def gigpo(group, gamma=0.95):
    def standardised(value: float, pool: list[float]) -> float:
        return (value - fmean(pool)) / (stdev(pool) + EPS) if len(set(pool)) > 1 else 0.0

    totals = [sum(turn.reward for turn in turns) for turns in group]
    worth = [returns([turn.reward for turn in turns], gamma) for turns in group]
    rows = []
    for turns, total, own in zip(group, totals, worth, strict=True):
        rows.append([])
        for number, turn in enumerate(turns):
            peers = [
                values[place]
                for other, values in zip(group, worth, strict=True)
                for place, one in enumerate(other)
                if one.state == turn.state
            ]
            step = standardised(own[number], peers) if turn.state else 0.0
            rows[-1] += [standardised(total, totals) + step] * turn.num_tokens
    return rows


KL = dict(kl_coef=0.5, kl_kind="k1", kl_in_reward=True)
CASES = {
    "reinforce_plus_plus": ({}, reinforce_plus_plus),
    "reinforce_plus_plus discounted": (
        {"estimator_options": "gamma=0.5"},
        lambda group: reinforce_plus_plus(group, gamma=0.5),
    ),
    "reinforce_plus_plus with a kl": (KL, lambda group: reinforce_plus_plus(group, kl=0.5)),
    "remax": ({}, remax),
    "remax with a kl": (KL, lambda group: remax(group, kl=0.5)),
    "grpo_process": ({}, grpo_process),
    "prime_rloo": ({}, prime_rloo),
    "gigpo": ({}, gigpo),
}


@pytest.mark.parametrize("case", CASES)
@given(group=groups())
@settings(max_examples=15, deadline=None)
def test_every_estimator_sums_over_the_turns_in_time(case, group):
    options, reference = CASES[case]
    got = advantages_in_time(group, case.split()[0], **options)
    for row, expected in zip(got, reference(group), strict=True):
        assert row == pytest.approx(expected, abs=2e-4, rel=1e-5)


def test_a_turn_learns_nothing_from_what_was_earned_before_it():
    """Turns 11 and 13 are of one sequence, 12 and 14 of another; 12 earned 10."""
    turns = [Played(number % 2, 1, 10.0 if number == 1 else 0.0, "", [0.0]) for number in range(4)]
    plain = [Played(0, 1, 0.0, "", [0.0])]
    got = advantages_in_time([turns, plain], "remax")
    assert [value + 0.25 for value in got[0]] == [10, 10, 0, 0]


@given(group=groups())
@settings(max_examples=20, deadline=None)
def test_for_a_critic_every_sequence_carries_the_places_of_its_tokens_in_time(group):
    built = [trajectory(turns, member) for member, turns in enumerate(group)]
    samples = tuple(sample for sample, _ in built)
    config = BatchConfig(samples_per_question=len(group), advantage_estimator="gae")
    (got,) = GroupAdvantages(config, FACTS)([Group(PROMPT, samples, 0, 0)], 0)
    for sample, turns, (_, times) in zip(got.samples, group, built, strict=True):
        parts = sample.sequences
        if len(parts) == 1:
            assert sample.times is None
            continue
        assert np.concatenate([part.times for part in parts]).tolist() == times
        earned = np.concatenate([part.advantages for part in parts])
        assert earned.tolist() == [token_rewards(turns)[time] for time in times]


async def asks_and_adds(recorder, context, turn):
    ask = await recorder.prepare_tokens(context)
    await recorder.add(ask, turn)


def test_the_recorder_numbers_the_turns_as_they_came():
    recorder = TrajectoryRecorder(
        Mock(
            decode=lambda ids, before: "",
            images_of_tokens=lambda ids, images: (),
            reader=Mock(read=AsyncMock(return_value=ReadTurn(None, ""))),
        )
    )
    first, second = np.array([1], np.int32), np.array([2], np.int32)
    for place in range(4):
        context = (first, second)[place % 2]
        turn = completion(2)
        asyncio.run(asks_and_adds(recorder, context, turn))
        grown = np.concatenate([context, turn.token_ids, [9]]).astype(np.int32)
        first, second = (grown, second) if place % 2 == 0 else (first, grown)
    finished = recorder.finish(0, Outcome(), None)
    assert [turn.number for turn in finished.turns] == [0, 2, 1, 3]
    assert finished.times.tolist() == [0, 1, 4, 5, 2, 3, 6, 7]


def test_tokens_that_stand_in_time_need_no_other_order():
    turns = [Played(number // 2, 2, 1.0, "", [0.0, 0.0]) for number in range(4)]
    sample, times = trajectory(turns, 0)
    assert sample.completion.times is None and times == [*range(8)] and len(sample.sequences) == 2
    assert completion(3).times is None


def empty(member: int) -> Sample:
    said = completion(0)
    vars(said).update(member=member, outcome=Outcome(0.5))
    verdict = Verdict(RewardStatus.OK, 0.5, (AdapterResult("environment_turns", RewardStatus.OK, 0.5),))
    return Sample(PROMPT, said, verdict, ref_logprobs=np.zeros(0, np.float32))


BY_TOKEN = {
    "gigpo": {},
    "grpo_process": {},
    "prime_rloo": {},
    "remax": KL,
    "reinforce_plus_plus": {"estimator_options": "gamma=0.9"},
    "reinforce_plus_plus_baseline": {},
    "grpo": {},
    "opo": {},
}


@pytest.mark.parametrize("estimator", BY_TOKEN)
def test_a_completion_without_tokens_counts_for_none_in_any_layout(estimator):
    group = [[Played(0, 1, float(member), "s", [0.0])] for member in range(2)]
    samples = [trajectory(turns, member)[0] for member, turns in enumerate(group)]
    config = BatchConfig(samples_per_question=3, advantage_estimator=estimator, **BY_TOKEN[estimator])
    baseline, found = Verdict(RewardStatus.OK, 0.25), []
    for members in (samples, [*samples, empty(2)], [empty(2), *samples]):
        (got,) = GroupAdvantages(config, FACTS)([Group(PROMPT, tuple(members), 0, 0, baseline)], 0)
        found.append([s.advantages.tolist() for s in got.samples if s.advantages is not None])
    assert found[0] == found[1] == found[2] and found[0][0] != found[0][1]


def test_gigpo_is_not_moved_by_a_completion_without_tokens():
    samples = [trajectory([Played(0, 1, float(m), "", [0.0])], m)[0] for m in range(2)]
    config = BatchConfig(samples_per_question=3, advantage_estimator="gigpo")
    (got,) = GroupAdvantages(config, FACTS)([Group(PROMPT, (*samples, empty(2)), 0, 0)], 0)
    assert got.samples[0].advantages.tolist() == pytest.approx([-(0.5**0.5)], abs=1e-5)
    assert got.samples[1].advantages.tolist() == pytest.approx([0.5**0.5], abs=1e-5)


def test_a_completion_without_tokens_makes_no_signal():
    samples = [trajectory([Played(0, 1, 1.0, "", [0.0])], m)[0] for m in range(2)]
    config = BatchConfig(samples_per_question=3, advantage_estimator="grpo", zero_variance="filter")
    plan, group = GroupAdvantages(config), Group(PROMPT, (*samples, empty(2)), 0, 0)
    assert not plan.has_signal(group)
    assert [sample.advantages for sample in plan([group], 0)[0].samples] == [None] * 3


@pytest.mark.parametrize("estimator", sorted(ADVANTAGE_ESTIMATORS))
def test_a_group_of_completions_without_tokens_is_left_out(estimator):
    config = BatchConfig(samples_per_question=2, advantage_estimator=estimator)
    group = Group(PROMPT, (empty(0), replace(empty(1))), 0, 0, Verdict(RewardStatus.OK, 0.25))
    (got,) = GroupAdvantages(config, FACTS)([group], 0)
    assert [sample.advantages for sample in got.samples] == [None, None]


@pytest.mark.parametrize("estimator", ["dr_grpo", "rloo", "opo", "gpg", "remax", "gae"])
def test_advantages_beyond_float32_end_the_run_by_name(estimator):
    samples = [trajectory([Played(0, 1, 1e39 * m, "", [0.0])], m)[0] for m in range(2)]
    config = BatchConfig(samples_per_question=2, advantage_estimator=estimator)
    group = Group(PROMPT, tuple(samples), 0, 0, Verdict(RewardStatus.OK, 0.25))
    with pytest.raises(
        RunFailed, match=r"prompt 0, member \d: with the reward .* an advantage is .*e\+3[89]"
    ):
        GroupAdvantages(config, FACTS)([group], 0)
