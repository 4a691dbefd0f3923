"""GiGPO against its definition, written out turn by turn, and from an environment's own states to advantages."""

import random
from dataclasses import replace
from statistics import mean, stdev

import numpy as np
import pytest
import torch

from async_grpo.algorithm.advantages import ADVANTAGE_ESTIMATORS
from async_grpo.algorithm.process_advantages import turn_numbers, turn_states
from async_grpo.experience.config import BatchConfig, RunFacts
from async_grpo.experience.group_advantages import GroupAdvantages
from async_grpo.testing import completion
from async_grpo.types import AdapterResult, Group, Outcome, Prompt, RewardStatus, Sample, Turn, Verdict

GAMMA, OMEGA, EPS = 0.9, 0.5, 1e-6


def standardised(value: float, pool: list[float]) -> float:
    if len(pool) < 2 or len(set(pool)) == 1:
        return 0.0
    return (value - mean(pool)) / (stdev(pool) + EPS)


def definition(samples: list[list[tuple[int, int, float]]]) -> list[list[float]]:
    """Of one group; a sample is a list of turns (state, tokens, reward)."""
    totals = [sum(reward for _, _, reward in turns) for turns in samples]
    worth = [
        [sum(GAMMA ** (u - t) * turns[u][2] for u in range(t, len(turns))) for t in range(len(turns))]
        for turns in samples
    ]
    found = []
    for i, turns in enumerate(samples):
        tokens = []
        for t, (state, length, _) in enumerate(turns):
            peers = [
                worth[j][u]
                for j, other in enumerate(samples)
                for u, one in enumerate(other)
                if one[0] == state
            ]
            step = standardised(worth[i][t], peers) if state else 0.0
            tokens += [standardised(totals[i], totals) + OMEGA * step] * length
        found.append(tokens)
    return found


@pytest.mark.parametrize("seed", range(60))
def test_gigpo_is_its_definition(seed):
    dice = random.Random(seed)
    groups = [
        [
            [
                (dice.randrange(4), dice.randint(1, 3), dice.choice([0.0, 0.0, 1.0, -0.5]))
                for _ in range(dice.randint(1, 5))
            ]
            for _ in range(dice.randint(2, 5))
        ]
        for _ in range(3)
    ]
    rows = [(number, turns) for number, group in enumerate(groups) for turns in group]
    dice.shuffle(rows)
    width = max(sum(length for _, length, _ in turns) for _, turns in rows) + 2
    rewards, numbers, states = (torch.full((len(rows), width), float("nan")).double() for _ in range(3))
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, (_, turns) in enumerate(rows):
        at = 0
        for number, (state, length, reward) in enumerate(turns):
            rewards[row, at : at + length], numbers[row, at : at + length] = 0.0, number
            states[row, at : at + length], mask[row, at : at + length] = state, True
            at += length
            rewards[row, at - 1] = reward
    ids = torch.tensor([number for number, _ in rows])
    found = ADVANTAGE_ESTIMATORS["gigpo"](
        rewards, mask, ids, turns=numbers, states=states, gamma=GAMMA, omega=OMEGA, eps=EPS
    )
    for number, group in enumerate(groups):
        own = [row for row, (of, _) in enumerate(rows) if of == number]
        order = [rows[row][1] for row in own]
        for row, expected in zip(own, definition(order), strict=True):
            assert found[row][mask[row]].tolist() == pytest.approx(expected, abs=1e-9)
        assert len(group) == len(own)
    assert not found[~mask].any()


def played(member: int, states: tuple[str, ...], rewards: tuple[float, ...]) -> Sample:
    """Two tokens a turn."""
    turns = tuple(Turn(np.array([7], np.int32), 2, number == 0) for number in range(len(states)))
    outcome = Outcome(sum(rewards), turn_rewards=rewards, states=states)
    said = completion(2 * len(states))
    vars(said).update(turns=turns, outcome=outcome, member=member)
    steps = tuple((2 * number + 1, reward) for number, reward in enumerate(rewards))
    result = AdapterResult("environment_turns", RewardStatus.OK, sum(rewards), steps=steps)
    return Sample(
        Prompt(0, np.array([1], np.int32), {}), said, Verdict(RewardStatus.OK, sum(rewards), (result,))
    )


def test_turns_that_found_the_same_state_are_compared_with_each_other():
    lone = "left \ud83d"  # half a character, as JSON can hold
    samples = played(0, ("start", lone), (0.0, 1.0)), played(1, ("start", "right"), (0.0, 0.0))
    assert turn_numbers(samples[0]).tolist() == [0, 0, 1, 1]
    assert turn_states(samples[0])[0] == turn_states(samples[1])[0] != turn_states(samples[0])[2]
    config = BatchConfig(samples_per_question=2, advantage_estimator="gigpo")
    facts = RunFacts(process_rewards=("environment_turns",))
    (group,) = GroupAdvantages(config, facts)([Group(samples[0].prompt, samples, 0, 0)], 0)
    assert group.samples[0].advantages.tolist() == pytest.approx([2**0.5] * 2 + [0.5**0.5] * 2, abs=1e-4)
    assert group.samples[1].advantages.tolist() == pytest.approx(
        [-(2**0.5)] * 2 + [-(0.5**0.5)] * 2, abs=1e-4
    )


def test_a_group_that_failed_before_its_first_token_ends_no_run():
    samples = tuple(played(member, (), ()) for member in range(2))
    failed = AdapterResult("environment_turns", RewardStatus.FAILED, reason="no board")
    samples = tuple(replace(one, verdict=Verdict(failed.status, None, (failed,))) for one in samples)
    config = BatchConfig(samples_per_question=2, advantage_estimator="gigpo")
    facts = RunFacts(process_rewards=("environment_turns",))
    (group,) = GroupAdvantages(config, facts)([Group(samples[0].prompt, samples, 0, 0)], 0)
    assert [sample.advantages for sample in group.samples] == [None, None]


def test_without_states_it_is_grpo():
    samples = tuple(played(member, ("", ""), (0.0, float(member))) for member in range(3))
    facts = RunFacts(process_rewards=("environment_turns",))
    found = {}
    for name in ("gigpo", "grpo"):
        config = BatchConfig(samples_per_question=3, advantage_estimator=name)
        (group,) = GroupAdvantages(config, facts if name == "gigpo" else RunFacts())(
            [Group(samples[0].prompt, samples, 0, 0)], 0
        )
        found[name] = [sample.advantages.tolist() for sample in group.samples]
    assert np.allclose(found["gigpo"], found["grpo"])
