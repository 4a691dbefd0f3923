"""Which group is trained when, and how samples are laid out: conservation and exact contents, over random arrivals."""

import asyncio
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.errors import ConfigurationError, StalenessViolated
from async_grpo.experience.packing import Packer, pack
from async_grpo.experience.staleness import StalenessBudget, StepAssembler, StepComplete
from async_grpo.testing import completion
from async_grpo.types import PROMPT_TOKEN, Group, Prompt, RewardStatus, Sample, Verdict

OK = Verdict(RewardStatus.OK, 1.0)


def sample(ordinal: int, prompt_length: int, length: int, version: int = 0) -> Sample:
    prompt = Prompt(ordinal, np.full(prompt_length, 100 + ordinal, np.int32), {})
    advantages = np.full(length, float(ordinal), np.float32)
    return Sample(prompt, completion(length, version), OK, advantages, np.ones(length, bool))


def group(ordinal: int, lengths: list[int], version: int = 0) -> Group:
    samples = tuple(sample(ordinal, 2, length, version) for length in lengths)
    return Group(samples[0].prompt, samples, version, sequence_number=ordinal)


class AsTheyCome:
    """Samples that have their advantages already."""

    group_local = True

    def __call__(self, groups, step):
        return list(groups)


def test_packing_lays_prompts_and_completions_end_to_end():
    batch = pack([sample(7, 2, 3, version=4), sample(8, 1, 2, version=5)])
    assert batch.input_ids.tolist() == [107, 107, 1, 2, 3, 108, 1, 2]
    assert batch.cu_seqlens.tolist() == [0, 5, 8]
    assert batch.loss_mask.tolist() == [False, False, True, True, True, False, True, True]
    assert batch.versions.tolist() == [PROMPT_TOKEN] * 2 + [4] * 3 + [PROMPT_TOKEN] + [5] * 2
    assert batch.advantages.tolist() == [0, 0, 7, 7, 7, 0, 8, 8]
    assert batch.behaviour_logprobs.tolist() == [0, 0, -0.5, -0.5, -0.5, 0, -0.5, -0.5]
    assert batch.group_ids.tolist() == [7, 8]
    assert {a.dtype.name for a in (batch.input_ids, batch.cu_seqlens, batch.versions)} == {"int32"}
    assert {a.dtype.name for a in (batch.advantages, batch.behaviour_logprobs)} == {"float32"}


def test_a_sample_that_can_never_fit_is_refused_with_the_numbers():
    with pytest.raises(ConfigurationError, match=r"12 tokens cannot fit --max-tokens-per-gpu 10"):
        Packer(1, 10).add(sample(0, 2, 10))


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=60),
    num_ranks=st.integers(1, 4),
    max_tokens=st.integers(22, 60),
)
def test_every_sample_is_packed_once_and_every_rank_gets_as_many_micro_batches(
    lengths, num_ranks, max_tokens
):
    packer = Packer(num_ranks, max_tokens)
    rounds = [packer.add(sample(i, 2, length)) for i, length in enumerate(lengths)] + [packer.flush()]
    rounds = [micro_batches for micro_batches in rounds if micro_batches]
    assert all(len(micro_batches) == num_ranks for micro_batches in rounds)
    batches = [batch for micro_batches in rounds for batch in micro_batches]
    assert all(len(batch.input_ids) <= max_tokens for batch in batches)
    real = [batch for batch in batches if not batch.is_dummy]
    assert sorted(i for batch in real for i in batch.group_ids) == list(range(len(lengths)))
    assert sum(int(batch.loss_mask.sum()) for batch in batches) == sum(lengths)
    assert all(any(not batch.is_dummy for batch in micro_batches) for micro_batches in rounds)
    assert packer.flush() is None


def assembler_of(groups_per_step: int, max_staleness: int, num_ranks=1, max_tokens=40) -> StepAssembler:
    return StepAssembler(groups_per_step, max_staleness, Packer(num_ranks, max_tokens), AsTheyCome())


def test_ranks_start_on_the_first_full_micro_batch_not_at_the_end_of_the_step():
    assembler = assembler_of(4, 0, max_tokens=20)
    assert assembler.offer(group(0, [8])) == []
    assert assembler.offer(group(1, [8])) == []
    (early,) = assembler.offer(group(2, [8]))  # 30 tokens do not fit 20: the first two leave
    assert isinstance(early, list) and early[0].num_sequences == 2


@pytest.mark.parametrize(
    ("step", "version", "fine"), [(1, 0, True), (1, 1, True), (2, 0, False), (1, 2, False)]
)
def test_a_token_outside_the_staleness_bound_never_reaches_the_trainer(step, version, fine):
    assembler = assembler_of(1, 1)
    for earlier in range(step):
        assembler.offer(group(earlier, [1], version=earlier))
    if fine:
        assembler.offer(group(step, [1], version=version))
    else:
        with pytest.raises(StalenessViolated, match=f"version {version}, but step {step}"):
            assembler.offer(group(step, [1], version=version))


@settings(max_examples=40, deadline=None)
@given(groups_per_step=st.integers(1, 4), max_staleness=st.integers(0, 3), seed=st.integers(0, 10**6))
def test_the_budget_alone_keeps_every_group_fresh_and_in_its_step_under_random_finishing_times(
    groups_per_step, max_staleness, seed
):
    """Groups start when admitted, end at random; steps train at once."""

    async def scenario() -> None:
        draw, ages = random.Random(seed), []
        budget = StalenessBudget(groups_per_step, max_staleness)
        assembler = assembler_of(groups_per_step, max_staleness)
        running: list[tuple[int, int]] = []
        ordinal, total = 0, 6 * groups_per_step
        while assembler.step < 6:
            while budget.free and ordinal < total:
                running.append((ordinal, await budget.admit()))
                ordinal += 1
            assert budget.alive <= (max_staleness + 1) * groups_per_step
            done, version = running.pop(draw.randrange(len(running)))
            for event in assembler.offer(group(done, [1], version)):
                if isinstance(event, StepComplete):
                    numbers = sorted(g.sequence_number for g in event.groups)
                    assert numbers == [event.step * groups_per_step + n for n in range(groups_per_step)]
                    ages += [event.step - g.oldest_version for g in event.groups]
                    await budget.weights_live(event.step + 1, groups_per_step)
        assert max(ages) <= max_staleness
        if max_staleness == 0:
            assert set(ages) == {0}

    asyncio.run(scenario())
