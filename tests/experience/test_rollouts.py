"""One group or evaluation: which completions are asked for, in which order they stand, and what a reward of groups sees."""

from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest

from async_grpo.errors import ImagesDiffer
from async_grpo.experience.config import BatchConfig, EvaluationConfig, RunFacts
from async_grpo.experience.dataset import Question
from async_grpo.experience.rollouts import Rollouts
from async_grpo.testing import FakeGeneration, FakeVerification
from async_grpo.types import AdapterResult, Outcome, Prompt, RewardStatus

QUESTIONS = [Question(np.array([n], np.int32), {"input": f"q{n}"}) for n in range(3)]
PROMPT = Prompt(4, np.array([1], np.int32), {"input": "x"})


class Watched(FakeVerification):
    """Keeps what rewards of whole groups were shown."""

    def __init__(self):
        super().__init__()
        self.seen = []

    async def post_process(self, samples, verdicts, *, evaluation=False):
        self.seen.append([len(sample["completion"]) for sample in samples])
        return list(verdicts)


def rollouts(
    generation, verification, whole_groups=False, on_change=lambda change: None, unsampled=(), **options
) -> Rollouts:
    config = BatchConfig(samples_per_question=4, **options)
    facts = RunFacts(whole_groups=whole_groups, unsampled_token_ids=unsampled)
    return Rollouts(config, facts, generation, verification, None, None, on_change=on_change)


@pytest.mark.parametrize(("drawn", "parts"), [(4, 1), (9, 3)])
async def test_every_part_of_an_evaluated_question_has_draws_of_its_own(drawn, parts):
    generation = FakeGeneration()
    config = EvaluationConfig(eval_samples=drawn, eval_pinned=True)
    stats = await rollouts(generation, FakeVerification()).evaluate(QUESTIONS, config)
    assert len(generation.asked) == len(set(generation.asked)) == 3 * parts
    assert all(ordinal < 0 for ordinal in generation.asked)  # of no prompt of the training
    assert [row["member"] for row in stats["samples"][:drawn]] == [*range(drawn)]


async def test_samples_stand_by_their_places_in_the_group_whoever_ended_first():
    generation = FakeGeneration(
        length=lambda ordinal, member: 1 + member, delay=lambda ordinal, member: 0.03 * (3 - member)
    )
    group = await rollouts(generation, FakeVerification()).group(PROMPT, 0, 0)
    assert [len(sample.completion) for sample in group.samples] == [1, 2, 3, 4]


@pytest.mark.parametrize("num_good", [0, 1, 3])
async def test_each_completion_stops_counting_once_also_if_the_policy_sampled_an_image(num_good):
    class Sampling(FakeGeneration):
        async def generate(self, prompt, count, sampling=None, session=None):
            number = 0
            async for completion in super().generate(prompt, count, sampling, session):
                if number == num_good:
                    completion = replace(completion, token_ids=np.full_like(completion.token_ids, 77))
                number += 1
                yield completion

    changes = []
    source = rollouts(Sampling(), FakeVerification(), on_change=changes.append, unsampled=(77,))
    with pytest.raises(ImagesDiffer):
        await source.group(PROMPT, 0, 0)
    assert changes[0] == 4 and sum(changes) == 0
    assert min(accumulate(changes)) >= 0


async def test_a_reward_of_whole_groups_sees_the_group_and_not_its_greedy_completion():
    verification = Watched()
    generation = FakeGeneration(length=lambda ordinal, member: 2 + member)
    group = await rollouts(generation, verification, whole_groups=True, advantage_estimator="remax").group(
        PROMPT, 0, 0
    )
    assert verification.seen == [[2, 3, 4, 5]]
    assert group.baseline is not None and group.baseline.reward == 1.0


async def test_numbers_that_rewards_and_environments_name_are_bounded_in_training_and_evaluation():
    class Played(FakeGeneration):
        async def generate(self, prompt, count, sampling=None, session=None):
            async for completion in super().generate(prompt, count, sampling, session):
                numbers = {"tries": 2.0, "a b": 1.0, "huge": 1e308}
                yield replace(completion, outcome=Outcome(1.0, numbers=numbers))

    extra = {"length": 7.0, "\x1b[2J": 1.0, "huge": -1e308}
    verification = FakeVerification(lambda sample: AdapterResult("fake", RewardStatus.OK, 1.0, extra=extra))
    for whole_groups in (False, True):
        source = rollouts(Played(), verification, whole_groups=whole_groups)
        group = await source.group(PROMPT, 0, 0)
        for sample in group.samples:
            assert sample.completion.outcome.numbers == {"tries": 2.0}
            assert sample.verdict.results[0].extra == {"length": 7.0}
        stats = await source.evaluate(QUESTIONS, EvaluationConfig(eval_samples=2, eval_pinned=True))
        assert {name for name in stats if name.startswith("fake/")} == {
            "fake/length",
            "fake/reward",
            "fake/reward_std",
        }
