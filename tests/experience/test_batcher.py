"""The rollout loop on scripted engines and verifiers: order, overlap, failures, ends."""

import asyncio
import time
from dataclasses import replace

import numpy as np
import pytest

from async_grpo.errors import DeadlineExceeded, PromptSetAside, RunFailed
from async_grpo.experience.batcher import ExperienceBatcher
from async_grpo.experience.config import BatchConfig, EvaluationConfig
from async_grpo.experience.dataset import Question
from async_grpo.messages import MicroBatch, StepEnd, WorkersJoined
from async_grpo.testing import FakeGeneration, FakeLogprobs, FakeVerification, completion
from async_grpo.types import GREEDY, Outcome, RewardStatus


def questions(count: int = 8) -> list[Question]:
    return [
        Question(np.array([50 + i], np.int32), {"input": f"q{i}", "answer": str(i)}) for i in range(count)
    ]


def engine(**script) -> FakeGeneration:
    """Members of a group have 1, 2, 3, ... tokens, so that rewards (lengths) differ."""
    return FakeGeneration(**{"length": lambda ordinal, member: 1 + member, **script})


def batcher_of(generation, reward=None, reference=None, num_ranks=1, **changes) -> ExperienceBatcher:
    """Three steps of two groups of four."""
    settings = dict(num_training_batches=3, batch_size=2, samples_per_question=4, max_tokens_per_gpu=1000)
    settings |= dict(experience_timeout_s=5.0, infinite_sampler_seed=0)
    verification = FakeVerification(reward) if reward else FakeVerification()
    config = BatchConfig(**settings | changes)
    return ExperienceBatcher(config, questions(), generation, verification, reference, num_ranks=num_ranks)


async def train(
    batcher: ExperienceBatcher, steps: int = 1, step_s: float = 0.0
) -> list[tuple[list, StepEnd]]:
    """Be the trainer: take each step's messages, then make the new version live."""
    await batcher.start()
    taken = []
    for _ in range(steps):
        batches = []
        while isinstance(message := await batcher.next_message(0), MicroBatch):
            batches.append(message)
        taken.append((batches, message))
        await asyncio.sleep(step_s)
        batcher.generation.live = message.step + 1
        await batcher.weights_live(message.step + 1)
    return taken


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_three_steps_conserve_samples_and_stay_within_the_staleness_bound(max_staleness):
    generation = engine()
    steps = await train(batcher_of(generation, max_staleness=max_staleness), 3)
    assert [end.step for _, end in steps] == [0, 1, 2]
    for batches, end in steps:
        assert end.num_samples == 8 == sum(batch.num_sequences for batch in batches)
        assert end.stats["staleness_max"] == end.stats["staleness_mean"] == min(max_staleness, end.step)
        age, num_tokens = (
            str(min(max_staleness, end.step)),
            sum((batch.versions >= 0).sum() for batch in batches),
        )
        assert end.stats["staleness_tokens"] == {age: num_tokens}
    assert steps[-1][1].stats["total_samples_accumulated"] == 24
    assert generation.asked == list(range(6))  # not a prompt more than the run needs


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [0, 1]),
        ({"keep_sample_groups": 1}, [0]),
        ({"keep_sample_groups": 0}, None),
        ({"dump_samples_filename": "all.jsonl"}, [0, 1, 2]),
        ({"dump_samples_filename": "all.jsonl", "keep_sample_groups": 0}, [0, 1, 2]),
    ],
)
async def test_whole_groups_of_each_step_are_kept_to_be_looked_at(options, kept):
    ((_, end),) = await train(batcher_of(engine(), batch_size=3, num_training_batches=1, **options))
    if kept is None:
        assert "samples" not in end.stats
    else:
        members = sorted((row["group"], row["member"]) for row in end.stats["samples"])
        assert members == [(group, member) for group in kept for member in range(4)]


async def test_ranks_start_on_the_first_full_round_and_what_they_do_not_need_yet_waits_for_a_better_fit():
    """Groups of 2, 3, 4 and 5 tokens with their prompts, four to the step, at most 10 tokens in a micro-batch."""
    slow_last = engine(delay=lambda ordinal, member: 0.3 * (ordinal == 1 and member == 0))
    batcher = batcher_of(slow_last, num_training_batches=1, batch_size=4, max_tokens_per_gpu=10)
    await batcher.start()
    await asyncio.sleep(0.15)  # three groups are there
    assert [queue.qsize() for queue in batcher._queues] == [1]
    early = [await batcher.next_message(0) for _ in range(4)]
    assert [np.diff(batch.cu_seqlens).tolist() for batch in early] == [[5, 4], [5, 5], [4, 4, 2], [3, 3, 3]]
    assert batcher.steps.step == 0
    *rest, end = [await batcher.next_message(0) for _ in range(3)]
    assert [np.diff(batch.cu_seqlens).tolist() for batch in rest] == [[5, 4], [3, 2, 2, 2]]
    assert isinstance(end, StepEnd)


async def test_word_of_workers_that_joined_stands_at_the_same_place_for_every_rank():
    batcher = batcher_of(
        engine(delay=lambda ordinal, member: 0.1 * ordinal), num_ranks=2, max_tokens_per_gpu=6
    )
    await batcher.start()
    kinds = [[type(await batcher.next_message(0))], []]
    batcher.workers_joined()
    for rank in (1, 0):
        while StepEnd not in kinds[rank]:
            kinds[rank].append(type(await batcher.next_message(rank)))
    assert kinds[0] == kinds[1] and kinds[0].count(WorkersJoined) == 1


async def test_a_slow_group_holds_up_no_step_while_it_is_not_too_old():
    """Six groups in steps of two, four alive at once: two steps go live without the first group, the third takes it."""
    released = asyncio.Event()

    class OneSlow(FakeGeneration):
        async def _complete(self, ordinal: int, member: int):
            if ordinal == 0:
                await released.wait()
            return await super()._complete(ordinal, member)

    batcher = batcher_of(OneSlow(), max_staleness=3, groups_alive=4)
    training = asyncio.create_task(train(batcher, 3))
    while batcher.budget.live_version < 2:
        await asyncio.sleep(0.01)
    released.set()
    trained = [{int(i) for batch in batches for i in batch.group_ids} for batches, _ in await training]
    assert [0 in of_step for of_step in trained] == [False, False, True] and set.union(*trained) == set(
        range(6)
    )


async def test_an_end_of_a_step_that_waits_for_statistics_holds_up_no_group_and_is_overtaken_by_none():
    """Two steps finish while an engine is silent about the first."""

    class Silent(FakeGeneration):
        async def take_stats(self):
            await asyncio.sleep(0.3)
            return await super().take_stats()

    batcher = batcher_of(Silent(), num_training_batches=2)
    training = asyncio.create_task(train(batcher, 2))
    await asyncio.sleep(0.15)  # both steps are generated and scored meanwhile
    assert batcher.steps.step == 2
    assert [(len(batches), end.step) for batches, end in await training] == [(1, 0), (1, 1)]


async def test_while_a_whole_minibatch_is_computed_no_group_of_the_next_step_comes_in_between():
    """A batch-coupled estimator works in a thread; the groups that finish meanwhile wait for it."""
    batcher = batcher_of(engine(), num_training_batches=2, advantage_estimator="reinforce_plus_plus")
    offer, at_once = batcher.steps.offer, []

    def slowly(group):
        at_once.append(1)
        assert len(at_once) == 1, "two groups were offered at once"
        time.sleep(0.05)
        events = offer(group)
        at_once.pop()
        return events

    batcher.steps.offer = slowly
    assert [end.step for _, end in await train(batcher, 2)] == [0, 1]


async def test_a_completion_is_scored_while_its_siblings_still_generate():
    scored_at: list[float] = []
    started = asyncio.get_running_loop().time()

    def note(sample: dict) -> float:
        scored_at.append(asyncio.get_running_loop().time() - started)
        return 1.0

    slow = engine(delay=lambda ordinal, member: 0.5 * (member == 3))
    await train(batcher_of(slow, note, num_training_batches=1))
    assert sorted(scored_at)[5] < 0.4 < sorted(scored_at)[6]  # 2 groups: 6 quick ones, 2 slow ones


@pytest.mark.parametrize("status", [RewardStatus.FAILED, RewardStatus.TIMED_OUT, RewardStatus.ABSTAINED])
async def test_a_failed_reward_is_no_zero_it_leaves_baseline_and_loss(status):
    def reward(sample: dict) -> float | RewardStatus:
        return status if len(sample["completion"]) == 4 else float(len(sample["completion"]))

    (((batch,), end),) = await train(batcher_of(engine(), reward, num_training_batches=1))
    # prompt + 1, 2, 3 tokens; the 4s are gone
    assert sorted(np.diff(batch.cu_seqlens)) == [2, 2, 3, 3, 4, 4]
    assert end.stats[f"num_reward_{status.value}"] == 2 and end.stats["avg_reward"] == 2.0  # of 1, 2, 3
    assert sorted({round(float(a), 3) for a in batch.advantages}) == [-1.0, 0.0, 1.0]


class Truncating(FakeGeneration):
    """The members from a certain one on are truncated."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first

    async def _complete(self, ordinal: int, member: int):
        return completion(1 + member, self.live, truncated=member >= self.first)


async def test_truncated_samples_count_in_the_baseline_but_not_in_the_loss():
    (((batch,), end),) = await train(batcher_of(Truncating(3), num_training_batches=1))
    assert 5 not in np.diff(batch.cu_seqlens) and end.stats["perc_truncated_samples"] == 0.25
    assert set(batch.group_tokens) == {1 + 2 + 3}
    assert round(float(batch.advantages.min()), 4) == -1.1619  # 1, 2, 3, 4: (1 - 2.5) / sqrt(5 / 3)


async def test_a_step_in_which_everything_is_truncated_still_ends_with_an_alarm():
    ((batches, end),) = await train(batcher_of(Truncating(0), num_training_batches=1, truncation_alarm=0.5))
    assert batches == [] and end.stats["samples_trained"] == 0
    assert end.stats["perc_with_0_advantage"] is None
    assert "100% of the completions were truncated" in end.stats["alarms"][0]


async def test_a_whole_step_without_a_single_reward_ends_the_run_and_says_why():
    said = "not one of the 8 samples of step 0 could be scored; the first reason: as scripted"
    with pytest.raises(RunFailed, match=said):
        await train(batcher_of(engine(), lambda sample: RewardStatus.FAILED))


async def test_the_reference_log_probs_reach_the_micro_batch():
    (((batch,), _),) = await train(batcher_of(engine(), reference=FakeLogprobs(-2.0), num_training_batches=1))
    assert set(batch.ref_logprobs[batch.loss_mask]) == {-2.0} and batch.proximal_logprobs is None


async def test_an_error_in_a_rollout_reaches_every_rank_by_name():
    def broken(sample: dict) -> float:
        raise ZeroDivisionError("in the verifier")

    batcher = batcher_of(engine(), broken, num_ranks=2)
    await batcher.start()
    for rank in (0, 1):
        with pytest.raises(RunFailed, match="ZeroDivisionError: in the verifier"):
            await batcher.next_message(rank)


async def test_an_environment_that_fails_in_all_first_trajectories_ends_the_run_with_its_own_reason():
    class Mistyped(FakeGeneration):
        async def generate(self, prompt, count, sampling=None, session=None):
            async for one in super().generate(prompt, count, sampling, session):
                yield replace(one, outcome=Outcome(failure="AgentFailed: sh: pyhton: not found"))

    batcher = batcher_of(Mistyped(), num_ranks=1)
    await batcher.start()
    with pytest.raises(RunFailed, match=r"EnvironmentNeverWorked: all 8 .*sh: pyhton: not found"):
        await batcher.next_message(0)


async def test_a_wait_for_experience_ends_and_says_what_is_under_way():
    stuck = engine(delay=lambda ordinal, member: 3600)
    batcher = batcher_of(stuck, experience_timeout_s=0.2)
    said = r"rank 0 waited 0 s .* for step 0: 8 sequences are generating"
    with pytest.raises(DeadlineExceeded, match=said):
        await train(batcher)
    await batcher.close()
    assert stuck.cancelled == 8  # requests are aborted, not left to decode


async def test_until_a_step_is_trained_no_more_than_its_samples_are_generated_at_once():
    seconds = {0: 0.1, 1: 0.4}  # by group; all later ones never end
    generation = engine(delay=lambda ordinal, member: seconds.get(ordinal, 3600.0))
    batcher = batcher_of(generation, max_staleness=1)
    training = asyncio.create_task(train(batcher))
    await asyncio.sleep(0.05)
    assert generation.asked == [0, 1]
    await asyncio.sleep(0.2)
    assert generation.asked == [0, 1, 2]  # in the place of group 0
    await training
    await asyncio.sleep(0.05)
    assert generation.asked == [0, 1, 2, 3, 4, 5]  # whatever staleness allows, beside groups 2 and 3
    await batcher.close()


async def test_evaluation_runs_beside_training_and_touches_no_budget():
    batcher = batcher_of(engine())
    result = await batcher.evaluate(questions(3), EvaluationConfig(eval_samples=4))
    assert result["num_samples"] == 12 and result["avg_reward"] == 2.5 and batcher.budget.alive == 0
    assert result["samples"][0]["input"] == "q0"


async def test_engine_time_is_accounted_as_busy_allowed_or_barred():
    slow = engine(delay=lambda ordinal, member: 0.1)
    begun = time.monotonic()
    steps = await train(batcher_of(slow, num_training_batches=2, max_staleness=0), 2, 0.3)
    passed_s = time.monotonic() - begun
    (_, first), (_, second) = steps
    busy_s = sum(end.stats["engine_busy_s"] for _, end in steps)
    barred_s = sum(end.stats["wait_generation_budget_s"] for _, end in steps)
    assert first.stats["engine_busy_s"] >= 0.09 and second.stats["engine_busy_s"] >= 0.09
    assert second.stats["wait_generation_budget_s"] >= 0.29
    # No second counts as both; the wait after the second step is in no line
    assert busy_s + barred_s <= passed_s - 0.29


async def test_a_prompt_without_signal_gives_its_place_to_the_next_one_and_no_step_gets_smaller():
    # Prompts 1 and 2 give equal rewards in the group, the others do not
    generation = FakeGeneration(length=lambda ordinal, member: 3 if ordinal in (1, 2) else 1 + member)
    steps = await train(batcher_of(generation, zero_variance="resample", max_resamples=3), 3)
    equal = FakeGeneration()  # every completion has 3 tokens: every reward is the same, and resampling ends
    ((_, end),) = await train(
        batcher_of(equal, num_training_batches=1, zero_variance="resample", max_resamples=2)
    )
    assert (end.stats["groups_without_signal"], end.stats["prompts_resampled"]) == (2, 4)
    assert [(end.num_groups, end.num_samples) for _, end in steps] == [(2, 8)] * 3
    assert sum(end.stats["prompts_resampled"] for _, end in steps) == 2
    assert sum(end.stats["groups_without_signal"] for _, end in steps) == 0
    assert len(generation.asked) == 8 and max(end.stats["staleness_max"] for _, end in steps) <= 1


@pytest.mark.parametrize(("bound", "retired"), [(0.75, 1), (0.76, 0)])
async def test_a_question_whose_group_reaches_the_mean_reward_is_drawn_no_more(bound, retired):
    """Groups of 0.25, 0.5, 0.75 and 1.0 (mean 0.625) and, for one question, of 0.5 and 1.0 (0.75)."""
    answers = {}

    def reward(sample: dict) -> float:
        answers[sample["group_id"]] = sample["answer"]
        length = len(sample["completion"])
        return (0.5 if length % 2 else 1.0) if sample["answer"] == "3" else length / 4

    settings = dict(num_training_batches=16, retire_solved_above=bound, max_staleness=0)
    steps = await train(batcher_of(engine(), reward, **settings), 16)
    assert steps[-1][1].stats["questions_retired"] == retired
    assert len(answers) == 32 and list(answers.values()).count("3") == (1 if retired else 4)


@pytest.mark.parametrize("bad, fails", [((1, 2, 6), False), ((1, 2, 3), True)])
async def test_a_prompt_that_costs_engines_gives_its_place_to_the_next_unless_all_are_such(bad, fails):
    class Killing(FakeGeneration):
        async def generate(self, prompt, count, sampling=None):
            if prompt.ordinal in bad:
                raise PromptSetAside(f"4 workers were lost over prompt {prompt.ordinal}: killed")
            async for one in super().generate(prompt, count):
                yield one

    generation = Killing(length=lambda ordinal, member: 1 + member)
    training = train(batcher_of(generation, num_training_batches=4, max_staleness=0), 4)
    if fails:
        with pytest.raises(RunFailed, match="4 workers were lost over prompt 3"):
            await training
        return
    steps = await training
    aside = [entry for _, end in steps for entry in end.stats["prompts_set_aside"]]
    assert [(entry["prompt"], entry["row"]["answer"] != "") for entry in aside] == [(n, True) for n in bad]
    trained = {int(i) for batches, _ in steps for batch in batches for i in batch.group_ids}
    assert not trained & set(bad) and len(trained) == sum(end.num_groups for _, end in steps)


async def test_remax_also_generates_and_scores_one_greedy_completion_per_prompt():
    asked = []

    class Greedy(FakeGeneration):
        async def generate(self, prompt, count, sampling=None):
            asked.append((count, sampling == GREEDY))
            async for one in super().generate(prompt, count):
                yield one

    generation = Greedy(length=lambda ordinal, member: 1 + member)
    settings = dict(num_training_batches=1, advantage_estimator="remax")
    (((batch,), _),) = await train(batcher_of(generation, **settings))
    assert sorted(asked) == [(1, True), (1, True), (4, False), (4, False)]
    # rewards 1, 2, 3, 4 less the greedy completion's 1
    assert sorted({float(a) for a in batch.advantages}) == [0.0, 1.0, 2.0, 3.0]


async def test_a_resumed_run_goes_on_counting_its_samples():
    settings = dict(num_training_batches=3, max_staleness=0)
    first = batcher_of(engine(), **settings)
    await train(first, 1)
    state = first.state(1)
    await first.close()
    second = batcher_of(engine(), **settings)
    second.restore(state)
    second.generation.live = 1
    ((_, end),) = await train(second, 1)
    await second.close()
    assert end.step == 1 and end.stats["total_samples_accumulated"] == 16
