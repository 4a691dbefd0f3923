"""A critic's advantages go along a trajectory in time, whatever its sequences, their micro-batches and their ranks.

The reference is a loop over the tokens in time, in float64; it knows nothing of sequences.
"""

import random
import threading
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.algorithm.config import AlgorithmConfig
from async_grpo.experience.config import BatchConfig, RunFacts
from async_grpo.experience.group_advantages import GroupAdvantages
from async_grpo.experience.packing import pack
from async_grpo.messages import MicroBatch, dummy_micro_batch
from async_grpo.testing import completion
from async_grpo.training.batch_tensors import BatchTensors
from async_grpo.training.distributed import Ranks
from async_grpo.training.objective import Objective
from async_grpo.training.whole_step import _estimate_advantages
from async_grpo.types import AdapterResult, Group, Prompt, RewardStatus, Sample, Turn, Verdict

STEP, MAX_TOKEN_STALENESS = 5, 2
FACTS = RunFacts(process_rewards=("environment_turns",))


class Meeting:
    """The point at which the threads of a test, as ranks, add up what each of them has."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=30)
        self.values: dict[int, tuple] = {}


@dataclass(frozen=True)
class ThreadRanks(Ranks):
    meeting: Meeting

    def sum_and_max(self, sums, maxima):
        mine = [torch.as_tensor(values, dtype=torch.float64) for values in (sums, maxima)]
        self.meeting.values[self.rank] = mine
        self.meeting.barrier.wait()
        added, highest = (list(column) for column in zip(*self.meeting.values.values(), strict=True))
        result = (
            torch.stack(added).sum(dim=0),
            torch.stack(highest).amax(dim=0) if len(maxima) else highest[0],
        )
        self.meeting.barrier.wait()
        return result


@dataclass
class Token:
    """One token of a trajectory; its number is its id in the vocabulary of the test, too."""

    number: int
    reward: float
    value: float
    is_trained: bool


def trajectory(dice: random.Random, prompt: Prompt, member: int, numbers) -> tuple[Sample, list[Token]]:
    """Return a sample of random turns in random sequences, and its tokens in time."""
    turns = [
        (dice.randrange(3), dice.randint(1, 3), dice.choice([0.0, 1.0, -0.5, 4.0]))
        for _ in range(dice.randint(1, 6))
    ]
    ages = sorted(
        (dice.randint(0, 4) for _ in turns), reverse=dice.random() < 0.7
    )  # or holes, which no run makes
    tokens_of_turn = []
    for (_, length, reward), age in zip(turns, ages, strict=True):
        tokens = [
            Token(next(numbers), 0.0, dice.uniform(-2, 2), age <= MAX_TOKEN_STALENESS) for _ in range(length)
        ]
        tokens[-1].reward = reward
        tokens_of_turn.append(tokens)
    last_turn = {sequence: place for place, (sequence, _, _) in enumerate(turns)}
    order = sorted(range(len(turns)), key=lambda place: (last_turn[turns[place][0]], place))
    recorded, steps, ids, versions, seen = [], [], [], [], set()
    for place in order:
        sequence, length, reward = turns[place]
        before = np.zeros(dice.randint(1, 3), np.int32)
        recorded.append(Turn(before, length, sequence not in seen, number=place))
        seen.add(sequence)
        ids += [token.number for token in tokens_of_turn[place]]
        versions += [STEP - ages[place]] * length
        steps.append((len(ids) - 1, reward))
    said = completion(len(ids))
    vars(said).update(
        token_ids=np.array(ids, np.int32),
        versions=np.array(versions, np.int32),
        turns=tuple(recorded),
        member=member,
    )
    total = sum(reward for _, reward in steps)
    result = AdapterResult("environment_turns", RewardStatus.OK, total, steps=tuple(steps))
    sample = Sample(prompt, said, Verdict(RewardStatus.OK, total, (result,)))
    return sample, [token for tokens in tokens_of_turn for token in tokens]


def brute_force(tokens: list[Token], gamma: float, lam: float) -> dict[int, tuple[float, float]]:
    """Return advantage and return of every trained token; those left out neither pay nor discount."""
    trained = [token for token in tokens if token.is_trained]
    found = {}
    for place, token in enumerate(trained):
        advantage = 0.0
        for distance, later in enumerate(trained[place:]):
            following = trained[place + distance + 1].value if place + distance + 1 < len(trained) else 0.0
            advantage += (gamma * lam) ** distance * (later.reward + gamma * following - later.value)
        found[token.number] = advantage, advantage + token.value
    return found


def dealt(dice: random.Random, samples: list[Sample], world_size: int) -> list[list[MicroBatch]]:
    """Return the micro-batches of every rank: sequences in any order, dummies where a rank has fewer."""
    sequences = [
        sequence for sample in samples if sample.advantages is not None for sequence in sample.sequences
    ]
    dice.shuffle(sequences)
    hands: list[list[MicroBatch]] = [[] for _ in range(world_size)]
    while sequences:
        count = dice.randint(1, 4)
        dice.choice(hands).append(pack(sequences[:count]))
        sequences = sequences[count:]
    most = max(map(len, hands))
    for hand in hands:
        hand += [dummy_micro_batch(0)] * (most - len(hand))
    return hands


def estimate(
    rank: int, meeting: Meeting, hand: list[MicroBatch], objective: Objective, values: dict[int, float]
):
    """Return {token: (advantage, return)} of one rank."""
    rows = [BatchTensors(batch, torch.device("cpu")) for batch in hand]
    for row in rows:
        row.old_values = torch.tensor([[values.get(token, float("nan")) for token in row.input_ids.tolist()]])
    ranks = ThreadRanks(rank, meeting.barrier.parties, torch.device("cpu"), meeting)
    _estimate_advantages(rows, objective, ranks)
    found = {}
    for row in rows:
        for place in row.mask[0].nonzero().flatten().tolist():
            found[int(row.input_ids[place])] = row.advantages[0, place].item(), row.returns[0, place].item()
        assert not row.advantages[~row.mask].any()
    return found


def estimated(hands: list[list[MicroBatch]], objective: Objective, values: dict[int, float]):
    meeting, found, errors = Meeting(len(hands)), {}, []

    def run(rank: int) -> None:
        try:
            found.update(estimate(rank, meeting, hands[rank], objective, values))
        except Exception as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(hands))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors
    return found


@given(seed=st.integers(0, 2**32), world_size=st.integers(1, 3), whitens=st.booleans())
@settings(max_examples=60, deadline=None)
def test_gae_is_its_sum_over_the_turns_in_time(seed, world_size, whitens):
    dice = random.Random(seed)
    gamma, lam = dice.choice([(1.0, 1.0), (0.9, 0.8), (1.0, 0.5), (0.5, 0.0)])
    numbers = iter(range(1, 10_000))
    samples, expected, values = [], {}, {}
    config = BatchConfig(
        samples_per_question=4,
        advantage_estimator="gae",
        max_token_staleness=MAX_TOKEN_STALENESS,
        min_valid_samples=1,
    )
    for ordinal in range(dice.randint(1, 3)):
        prompt = Prompt(ordinal, np.array([1], np.int32), {})
        members = []
        for member in range(dice.randint(1, 4)):
            sample, tokens = trajectory(dice, prompt, member, numbers)
            members.append(sample)
            expected |= brute_force(tokens, gamma, lam)
            values |= {token.number: token.value for token in tokens}
        (group,) = GroupAdvantages(config, FACTS)([Group(prompt, tuple(members), 0, ordinal)], STEP)
        samples += group.samples
    options = f"gamma={gamma},lam={lam},whiten={str(whitens).lower()}"
    objective = Objective(AlgorithmConfig(advantage_estimator="gae", estimator_options=options))
    found = estimated(dealt(dice, samples, world_size), objective, values)
    assert found.keys() == expected.keys()
    pool = np.array([advantage for advantage, _ in expected.values()])
    mean, deviation = 0.0, 1.0
    if whitens and len(pool):
        mean = pool.mean()
        deviation = np.sqrt((pool.var(ddof=1) if len(pool) > 1 else 0.0) + 1e-8)
    for token, (advantage, value_target) in expected.items():
        assert found[token][0] == pytest.approx((advantage - mean) / deviation, abs=1e-3, rel=1e-4)
        assert found[token][1] == pytest.approx(value_target, abs=1e-5)


def test_what_a_second_sequence_earns_reaches_the_first():
    """Two turns of two tokens, the history rewritten between them, reward 1 for the whole, and a critic that says 0."""
    prompt = Prompt(0, np.array([1], np.int32), {})
    said = completion(4)
    turns = tuple(Turn(np.array([7], np.int32), 2, True, number=number) for number in range(2))
    vars(said).update(turns=turns)
    sample = Sample(prompt, said, Verdict(RewardStatus.OK, 1.0))
    config = BatchConfig(samples_per_question=2, advantage_estimator="gae", min_valid_samples=1)
    (group,) = GroupAdvantages(config)([Group(prompt, (sample,), 0, 0)], 0)
    objective = Objective(AlgorithmConfig(advantage_estimator="gae", estimator_options="whiten=false"))
    first, second = group.samples[0].sequences
    for hands in ([[pack([first, second])]], [[pack([second])], [pack([first])]]):
        found = estimated(hands, objective, dict.fromkeys(range(1, 5), 0.0))
        assert [found[token] for token in range(1, 5)] == [(1.0, 1.0)] * 4


def test_a_step_without_rewritten_histories_brings_nothing_together():
    prompt = Prompt(0, np.array([1], np.int32), {})
    sample = Sample(
        prompt, completion(2), Verdict(RewardStatus.OK, 1.0), np.ones(2, np.float32), np.ones(2, bool)
    )
    batch = pack(sample.sequences)
    assert batch.times is None and batch.members is None
