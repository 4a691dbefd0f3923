"""Which group is trained when, and how samples are laid out: conservation and exact contents, over random arrivals."""

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.algorithm.pass_plan import PassPlan
from async_grpo.errors import ConfigurationError, StalenessViolated
from async_grpo.experience.packing import Packer, pack
from async_grpo.experience.staleness import StalenessBudget, StepAssembler, StepComplete
from async_grpo.testing import completion
from async_grpo.types import PROMPT_TOKEN, Group, Prompt, RewardStatus, Sample, Turn, Verdict

OK = Verdict(RewardStatus.OK, 1.0)


def sample(ordinal: int, prompt_length: int, length: int, version: int = 0) -> Sample:
    prompt = Prompt(ordinal, np.full(prompt_length, 100 + ordinal, np.int32), {})
    advantages = np.full(length, float(ordinal), np.float32)
    return Sample(prompt, completion(length, version), OK, advantages, np.ones(length, bool))


def group(ordinal: int, lengths: list[int], version: int = 0) -> Group:
    samples = tuple(sample(ordinal, 2, length, version) for length in lengths)
    return Group(samples[0].prompt, samples, version, sequence_number=ordinal)


def test_a_trajectory_is_laid_out_turn_by_turn_and_a_rewritten_history_is_a_sequence_of_its_own():
    ids = np.array([[1, 2], [7], [8, 9, 10], [3, 3, 3]], dtype=object)
    said = [
        Turn(np.array(i, np.int32), n, f) for i, n, f in zip(ids, (2, 1, 3, 1), (1, 0, 1, 0), strict=True)
    ]
    one = sample(0, 5, 7)  # its prompt is not what the engine saw
    one = replace(
        one, completion=replace(one.completion, turns=tuple(said)), advantages=np.arange(7, dtype=np.float32)
    )
    first, second = one.sequences
    assert first.token_ids.tolist() == [1, 2, 1, 2, 7, 3]  # sampled are 1 to 7
    assert second.token_ids.tolist() == [8, 9, 10, 4, 5, 6, 3, 3, 3, 7]
    assert (first.num_tokens, second.num_tokens, one.num_tokens) == (6, 10, 16)
    assert first.sampled(np.arange(6)).tolist() == [2, 3, 5] and first.sampled(
        np.arange(2, 6), 2
    ).tolist() == [2, 3, 5]
    batch = pack([first, second, sample(1, 1, 2)])
    assert batch.cu_seqlens.tolist() == [0, 6, 16, 19]
    assert batch.loss_mask.astype(int).tolist() == [0, 0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 0, 1, 1]
    assert batch.advantages[batch.loss_mask].tolist() == [0, 1, 2, 3, 4, 5, 6, 1, 1]
    assert (batch.versions[~batch.loss_mask] == PROMPT_TOKEN).all()
    assert not batch.behaviour_logprobs[~batch.loss_mask].any()


class AsTheyCome:
    """Samples that have their advantages already."""

    group_local = True

    def __init__(self):
        self.taken = []

    def __call__(self, groups, step):
        self.taken += [group.sequence_number for group in groups]
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


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=60),
    num_ranks=st.integers(1, 4),
    max_tokens=st.integers(22, 60),
    seed=st.integers(0, 10**6),
)
def test_every_sample_is_packed_once_and_every_rank_gets_as_many_micro_batches(
    lengths, num_ranks, max_tokens, seed
):
    """Ranks ask at random moments while samples come."""
    packer, draw, rounds = Packer(num_ranks, max_tokens), random.Random(seed), []
    for i, length in enumerate(lengths):
        packer.add(sample(i, 2, length))
        if draw.random() < 0.5 and (full := packer.full_round()):
            rounds.append(full)
            packed = [int(i) for micro_batches in rounds for b in micro_batches for i in b.group_ids]
            waiting = [lengths[i] + 2 for i in range(i + 1) if i not in packed]
            least = min(len(batch.input_ids) for batch in full)
            assert all(least + length > max_tokens for length in waiting), "one that waits would have fitted"
    rounds += packer.flush()
    assert all(len(micro_batches) == num_ranks for micro_batches in rounds)
    batches = [batch for micro_batches in rounds for batch in micro_batches]
    assert all(len(batch.input_ids) <= max_tokens for batch in batches)
    real = [batch for batch in batches if not batch.is_dummy]
    assert sorted(i for batch in real for i in batch.group_ids) == list(range(len(lengths)))
    assert sum(int(batch.loss_mask.sum()) for batch in batches) == sum(lengths)
    assert all(any(not batch.is_dummy for batch in micro_batches) for micro_batches in rounds)
    assert packer.flush() == []


@settings(max_examples=40, deadline=None)
@given(order=st.permutations(range(20)), num_ranks=st.integers(1, 3))
def test_a_whole_step_is_packed_alike_in_whatever_order_its_samples_came(order, num_ranks):
    def rounds(numbers):
        packer = Packer(num_ranks, 30)
        for number in numbers:
            packer.add(sample(number, 2, 1 + number % 7))
        return [[batch.group_ids.tolist() for batch in of_ranks] for of_ranks in packer.flush()]

    assert rounds(order) == rounds(range(20))


@pytest.mark.parametrize(("longest_first", "sizes"), [(True, [100, 60]), (False, [60, 100])])
def test_the_largest_micro_batch_of_what_waits_comes_first(longest_first, sizes):
    """The longest sample may leave a gap that no other sample fills."""
    packer = Packer(1, 100, longest_first=longest_first)
    for number, length in enumerate((43, 58, 53)):  # with the prompt 45, 60, 55
        packer.add(sample(number, 2, length))
    rounds = packer.flush()
    assert [len(batch.input_ids) for (batch,) in rounds] == sizes
    assert sorted(number for (batch,) in rounds for number in batch.group_ids) == [0, 1, 2]


def test_the_ranks_of_a_round_are_evened_by_what_a_sequence_costs_not_by_its_tokens():
    packer = Packer(2, 18, hidden_size=1)  # from 12 tokens on attention costs more than the matrices
    for number, length in enumerate((10, 4, 4, 4)):  # with the prompt 12, 6, 6, 6: costs of 24, 9, 9, 9
        packer.add(sample(number, 2, length))
    (first, second), *more = packer.flush()
    assert (first.group_ids.tolist(), second.group_ids.tolist(), more) == ([0], [1, 2, 3], [])


def test_members_of_a_group_share_a_rank_and_with_it_their_prompt_and_the_ranks_stay_even():
    packer = Packer(2, 1024)
    for number in range(64):
        packer.add(sample(number // 8, 2, 6))
    ((first, second),) = packer.flush()
    assert len(set(first.group_ids)) + len(set(second.group_ids)) == 8, "a group is on one rank alone"
    assert len(first.input_ids) == len(second.input_ids) == 32 * 8


def assembler_of(
    groups_per_step: int, max_staleness: int, num_ranks=1, max_tokens=40, slack=0
) -> StepAssembler:
    packer = Packer(num_ranks, max_tokens)
    capacity = (max_staleness + 1) * groups_per_step - slack
    budget = StalenessBudget(groups_per_step, max_staleness, capacity)
    return StepAssembler(budget, packer, AsTheyCome())


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


@settings(max_examples=80, deadline=None)
@given(
    groups=st.integers(1, 3),
    minibatches=st.integers(1, 3),
    passes=st.integers(2, 3),
    more_steps=st.integers(0, 20),
    fewer=st.integers(0, 9),
    seed=st.integers(0, 10**6),
)
def test_no_pass_over_a_batch_trains_a_token_that_is_too_old(
    groups, minibatches, passes, more_steps, fewer, seed
):
    """Weights go live after whole batches alone, and the bound counts optimizer steps."""
    plan = PassPlan(minibatches, passes)
    steps_of_batch = minibatches * passes
    max_staleness = steps_of_batch - 1 + more_steps
    batches_alive = (max_staleness + 1) // steps_of_batch
    most = batches_alive * minibatches * groups
    capacity = max(minibatches * groups, most - fewer)

    async def scenario() -> None:
        draw, trained = random.Random(seed), []
        budget = StalenessBudget(groups, max_staleness, capacity, plan)
        assert budget.slack == most - capacity
        assembler = StepAssembler(budget, Packer(1, 40), AsTheyCome())
        running: dict[int, int] = {}
        number, total, closed = 0, 5 * minibatches * groups, 0
        while len(trained) < total:
            while budget.free and number < total:
                running[number] = await budget.admit()
                number += 1
            live_batches = budget.live_version // steps_of_batch
            if closed // minibatches > live_batches and (not running or draw.random() < 0.3):
                await budget.weights_live((live_batches + 1) * steps_of_batch, minibatches * groups)
                continue
            assert running, "nothing is left that could go on"
            done = draw.choice(list(running))
            for event in assembler.offer(group(done, [1], running.pop(done))):
                if not isinstance(event, StepComplete):
                    continue
                batch, place = divmod(closed, minibatches)
                first_step = batch * steps_of_batch + place
                last_step = (batch + 1) * steps_of_batch - 1  # whatever the order of the last pass
                closed += 1
                for one in event.groups:
                    assert one.oldest_version <= first_step
                    assert last_step - one.oldest_version <= max_staleness
                    trained.append(one.sequence_number)
        assert sorted(trained) == list(range(total))

    asyncio.run(scenario())


def fits(waiting: list[int], step: int, free: int, groups_per_step: int) -> bool:
    """Brute force: whether groups that are due in the steps `waiting` all find a place, `free` of them in this step."""
    places = [step] * free + [step + 1 + n // groups_per_step for n in range(len(waiting))]
    return all(place <= due for place, due in zip(places, sorted(waiting), strict=False))


@settings(max_examples=60, deadline=None)
@given(
    groups_per_step=st.integers(1, 4),
    max_staleness=st.integers(0, 3),
    fewer=st.integers(0, 12),
    coupled=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_every_group_is_trained_once_and_none_too_old_whatever_finishes_first(
    groups_per_step, max_staleness, fewer, coupled, seed
):
    """Groups start when admitted and end at random; some begin anew, with younger tokens. Steps go live at random."""
    most = (max_staleness + 1) * groups_per_step
    capacity = max(groups_per_step, most - fewer)

    async def scenario() -> None:
        draw, ages, trained = random.Random(seed), [], []
        budget = StalenessBudget(groups_per_step, max_staleness, capacity)
        assembler = assembler_of(groups_per_step, max_staleness, slack=budget.slack)
        assembler.advantages.group_local = not coupled
        running: dict[int, int] = {}  # number -> version of its oldest token
        number, total, closed = 0, 8 * groups_per_step, 0
        while len(trained) < total:
            while budget.free and number < total:
                running[number] = await budget.admit()
                number += 1
            assert budget.alive <= capacity
            if closed > budget.live_version and (not running or draw.random() < 0.3):
                await budget.weights_live(budget.live_version + 1, groups_per_step)
                continue
            assert running, "nothing is left that could go on"
            done = draw.choice(list(running))
            if draw.random() < 0.2:
                running[done] = budget.live_version
                continue
            for event in assembler.offer(group(done, [1], running.pop(done))):
                if isinstance(event, StepComplete):
                    closed += 1
                    trained += [g.sequence_number for g in event.groups]
                    ages += [event.step - g.oldest_version for g in event.groups]
                    if capacity == most:  # in the order of admission
                        of_step = range(event.step * groups_per_step, (event.step + 1) * groups_per_step)
                        assert set(of_step) == {g.sequence_number for g in event.groups}
        assert sorted(trained) == list(range(total)) and min(ages) >= 0 and max(ages) <= max_staleness

    asyncio.run(scenario())


@settings(max_examples=60, deadline=None)
@given(
    groups_per_step=st.integers(1, 4),
    max_staleness=st.integers(0, 3),
    fewer=st.integers(0, 12),
    seed=st.integers(0, 10**6),
)
def test_a_finished_group_waits_only_if_its_place_would_make_another_too_old(
    groups_per_step, max_staleness, fewer, seed
):
    slack = min(fewer, max_staleness * groups_per_step)
    assembler = assembler_of(groups_per_step, max_staleness, slack=slack)
    draw, total, finished = random.Random(seed), 6 * groups_per_step, []
    untrained = {number: (number + slack) // groups_per_step for number in range(total)}
    capacity = (max_staleness + 1) * groups_per_step - slack
    while untrained:
        trained = total - len(untrained)
        step, free = trained // groups_per_step, groups_per_step - trained % groups_per_step
        assert assembler.step == step
        may_start = step * groups_per_step + capacity
        allowed = [
            number
            for number in finished
            if fits([due for n, due in untrained.items() if n != number], step, free - 1, groups_per_step)
        ]
        assert not allowed, f"{allowed} could have taken a place in step {step}"
        number = draw.choice([n for n in untrained if n < may_start and n not in finished])
        assembler.advantages.taken = []
        assembler.offer(group(number, [1], version=step))
        finished.append(number)
        for taken in assembler.advantages.taken:
            del untrained[taken], finished[finished.index(taken)]
            trained = total - len(untrained)
            step, free = divmod(trained, groups_per_step)
            assert fits(list(untrained.values()), step, groups_per_step - free, groups_per_step)
