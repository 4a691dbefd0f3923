"""`Rollouts`: generates the completions of a prompt. Each one is scored at its end, while others are still generated."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any

import numpy as np

from async_grpo.errors import ImagesDiffer
from async_grpo.experience.config import BatchConfig, EvaluationConfig, RunFacts
from async_grpo.experience.dataset import Question
from async_grpo.experience.evaluation import evaluation_stats
from async_grpo.experience.first_trajectories import FirstTrajectories
from async_grpo.experience.logprob_requests import logprobs_of_samples
from async_grpo.experience.step_metrics import readable_samples
from async_grpo.experience.teachers.distillation import Teachers
from async_grpo.metrics.free_numbers import FreeNumbers
from async_grpo.metrics.spans import Spans
from async_grpo.protocols import Generation, Logprobs, Verification
from async_grpo.rewards.adapter.pictures import picture_columns
from async_grpo.types import (
    ENVIRONMENT,
    GREEDY,
    AdapterResult,
    Completion,
    Group,
    Prompt,
    RewardStatus,
    Sample,
    Sampling,
    Verdict,
)


def reward_sample(prompt: Prompt, completion: Completion) -> dict[str, Any]:
    """Return the dict that a reward function receives as its sample.

    It has the columns of the data row (without `input_token_ids`), the completion, and facts about the completion, such
    as `truncated`.
    """
    sample = {key: value for key, value in prompt.row.items() if key != "input_token_ids"}
    sample["completion"] = completion.text
    sample["sample_text"] = prompt.row["input"] + completion.text
    sample["completion_token_ids"] = completion.token_ids.tolist()
    sample["truncated"] = completion.truncated
    sample["group_id"] = prompt.ordinal
    sample |= picture_columns(completion.picture_png)
    if completion.char_ends is not None:
        sample["completion_char_ends"] = completion.char_ends.tolist()
    if completion.outcome is not None:
        # Reward functions get the turns in time order, but `completion_token_ids` has the tokens sequence by sequence.
        # `turn_ends` are positions in these tokens, so they do not ascend if the turns of two sequences alternated
        order = completion.turn_order
        turns = [completion.turns[place] for place in order]
        turn_ends = list(accumulate(turn.num_tokens for turn in completion.turns))
        turn_rewards = completion.outcome.turn_rewards
        sample["sample_text"] = "".join(turn.before_text + turn.text for turn in turns)
        sample["environment_reward"] = completion.outcome.reward
        sample["turn_rewards"] = [turn_rewards[place] for place in order] if turn_rewards else []
        sample["turn_ends"] = [turn_ends[place] for place in order]
        sample["turns"] = [[turn.before_text, turn.text] for turn in turns]
    return sample


def refuse_sampled_images(completion: Completion, unsampled_token_ids: Sequence[int]) -> None:
    """Refuse a completion in which the policy sampled a token that stands for an image.

    Raises:
        ImagesDiffer: The completion has such a token. Engine and trainer would look for an image that does not exist.
    """
    if not unsampled_token_ids:
        return
    is_image = np.isin(completion.token_ids, unsampled_token_ids)
    if is_image.any():
        place = int(is_image.argmax())
        raise ImagesDiffer(
            f"the policy sampled the image token {completion.token_ids[place]} as token {place} of a completion: the "
            f"engine must exclude the tokens {list(unsampled_token_ids)} from sampling"
        )


@dataclass(frozen=True)
class RecomputedLogprobs:
    """Log-probs of another policy, such as the reference policy, that the loss needs for every sample."""

    role: str  # kind of worker that computes the log-probs; timing spans also have this name
    source: Logprobs
    field_name: str  # the field of `Sample` that stores the log-probs


class Rollouts:
    """Generates groups with the engines, and has verifiers and logprob workers complete them.

    Args:
        config: The run's options for batches, steps and rewards.
        facts: Facts about the run's rewards and model.
        generation: Source of completions.
        verification: Source of verdicts.
        reference: Source of the reference policy's log-probs; None if the loss needs none.
        proximal: Source of the proximal policy's log-probs; None if the loss needs none.
        on_change: Called with the change in the number of unfinished sequences: n when n are requested, -1 when one ends.
        teachers: Source of each teacher's log-probs, by name; None without a teacher.
    """

    def __init__(
        self,
        config: BatchConfig,
        facts: RunFacts,
        generation: Generation,
        verification: Verification,
        reference: Logprobs | None,
        proximal: Logprobs | None,
        *,
        on_change: Callable[[int], None],
        teachers: Mapping[str, Logprobs] | None = None,
    ) -> None:
        self.config = config
        self.facts = facts
        self.generation = generation
        self.verification = verification
        self.spans = Spans()
        self._on_change = on_change
        self._free_numbers = FreeNumbers()
        self._first_trajectories = FirstTrajectories(config.groups_per_step, config.samples_per_question)
        self._teachers = Teachers(config, teachers) if teachers else None
        self._recomputed: list[RecomputedLogprobs] = []
        if reference is not None:
            self._recomputed.append(RecomputedLogprobs("reference", reference, "ref_logprobs"))
        if proximal is not None:
            self._recomputed.append(RecomputedLogprobs("proximal", proximal, "proximal_logprobs"))

    async def group(self, prompt: Prompt, number: int, start_version: int) -> Group:
        """Generate the completions of a prompt, score them, and return them as a group.

        Args:
            prompt: The question.
            number: Sequence number of the group's admission.
            start_version: Policy version of the engines at the beginning of the generation.

        Returns:
            The group. If the estimator compares with a greedy completion, `Group.baseline` is the verdict on the greedy
            completion.

        Raises:
            EnvironmentNeverWorked: All trajectories of the run's first groups have failed.
        """
        group = await self._group(prompt, number, start_version)
        self._first_trajectories.check(group)
        return group

    async def _group(self, prompt: Prompt, number: int, start_version: int) -> Group:
        if not self.config.estimator.compares_with_greedy:
            samples = await self._scored(prompt, self.config.samples_per_question)
            return Group(prompt, samples, start_version, number)
        samples, greedy_samples = await asyncio.gather(
            self._scored(prompt, self.config.samples_per_question),
            self._scored(prompt, 1, GREEDY),
        )
        return Group(prompt, samples, start_version, number, baseline=greedy_samples[0].verdict)

    async def _scored(
        self,
        prompt: Prompt,
        count: int,
        sampling: Sampling | None = None,
        *,
        evaluation: bool = False,
    ) -> tuple[Sample, ...]:
        """Generate `count` completions, score each as soon as it is finished, and return them ordered by member."""
        samples = await self._generate_and_score(prompt, count, sampling, evaluation)
        # The greedy completion is not a member of the group, so no reward compares it with the members
        is_greedy_baseline = sampling == GREEDY and not evaluation
        if self.facts.whole_groups and not is_greedy_baseline:
            samples = await self._judged_together(prompt, samples, evaluation)
        return self._with_bounded_numbers(samples)

    async def _generate_and_score(
        self, prompt: Prompt, count: int, sampling: Sampling | None, evaluation: bool
    ) -> list[Sample]:
        scoring_tasks: list[asyncio.Task[Sample]] = []
        self._on_change(+count)
        try:
            async with (
                asyncio.TaskGroup() as task_group,
                aclosing(self.generation.generate(prompt, count, sampling)) as completions,
            ):
                async for completion in completions:
                    refuse_sampled_images(completion, self.facts.unsampled_token_ids)
                    self._first_trajectories.ended(completion)
                    scoring = self._score(prompt, completion, evaluation)
                    scoring_tasks.append(task_group.create_task(scoring))
                    self._on_change(-1)
        except BaseExceptionGroup as error_group:
            # The first error is enough to end a run, and is easier to read than an exception group
            raise error_group.exceptions[0] from error_group
        finally:
            # After an error, the completions that are missing will not come
            num_not_generated = count - len(scoring_tasks)
            self._on_change(-num_not_generated)
        samples = [task.result() for task in scoring_tasks]
        return sorted(samples, key=lambda sample: sample.completion.member)

    async def _judged_together(
        self, prompt: Prompt, samples: Sequence[Sample], evaluation: bool
    ) -> list[Sample]:
        """Have the rewards with `post_process_scores` change the verdicts of a whole group, and return the new samples."""
        # A failed trajectory has no completion that a reward could score
        places = [place for place, sample in enumerate(samples) if not sample.completion.failure]
        verdicts = await self.verification.post_process(
            [reward_sample(prompt, samples[place].completion) for place in places],
            [samples[place].verdict for place in places],
            evaluation=evaluation,
        )
        judged_samples = list(samples)
        for place, verdict in zip(places, verdicts, strict=True):
            judged_samples[place] = replace(samples[place], verdict=verdict)
        return judged_samples

    def _with_bounded_numbers(self, samples: Sequence[Sample]) -> tuple[Sample, ...]:
        """Return the samples without the numbers of environments and rewards that must not become metrics.

        `FreeNumbers` drops huge numbers, numbers with invalid names, and numbers of a source that uses too many names.
        """
        bounded_samples = []
        for sample in samples:
            completion = self._with_bounded_outcome(sample.completion)
            results = tuple(self._with_bounded_extra(result) for result in sample.verdict.results)
            result_pairs = zip(results, sample.verdict.results, strict=True)
            is_result_changed = any(bounded is not result for bounded, result in result_pairs)
            # Unchanged samples are not copied: a copy would take a tenth of the time that the controller spends on a sample
            if is_result_changed or completion is not sample.completion:
                verdict = replace(sample.verdict, results=results)
                sample = replace(sample, completion=completion, verdict=verdict)
            bounded_samples.append(sample)
        return tuple(bounded_samples)

    def _with_bounded_outcome(self, completion: Completion) -> Completion:
        """Return the completion without the numbers of its environment that must not become metrics."""
        outcome = completion.outcome
        if outcome is None:
            return completion
        numbers = self._free_numbers.bounded(ENVIRONMENT, outcome.numbers)
        if len(numbers) == len(outcome.numbers):
            return completion
        return replace(completion, outcome=replace(outcome, numbers=numbers))

    def _with_bounded_extra(self, result: AdapterResult) -> AdapterResult:
        """Return the result without the numbers that must not become metrics."""
        extra = self._free_numbers.bounded(result.adapter, result.extra)
        return result if len(extra) == len(result.extra) else replace(result, extra=extra)

    async def _score(self, prompt: Prompt, completion: Completion, evaluation: bool) -> Sample:
        if completion.failure:
            result = AdapterResult(ENVIRONMENT, RewardStatus.FAILED, reason=completion.failure)
            verdict = Verdict(result.status, None, (result,))
            return Sample(prompt, completion, verdict)
        sample = reward_sample(prompt, completion)
        with self.spans.measure("rewards", "score"):
            verdict = await self.verification.verify(sample, evaluation=evaluation)
        return Sample(prompt, completion, verdict)

    async def add_logprobs(self, group: Group) -> Group:
        """Return the group with the log-probs of the other policies that training needs: reference, proximal, teacher."""
        if not group.samples:
            return group
        for recomputed in self._recomputed:
            with self.spans.measure(recomputed.role, "logprobs"):
                logprobs_by_sample = await logprobs_of_samples(recomputed.source, group.samples)
            samples = []
            for sample, logprobs in zip(group.samples, logprobs_by_sample, strict=True):
                changed_field: dict[str, Any] = {recomputed.field_name: logprobs}
                samples.append(replace(sample, **changed_field))
            group = replace(group, samples=tuple(samples))
        if self._teachers is not None:
            with self.spans.measure("teacher", "logprobs"):
                group = await self._teachers.add_logprobs(group)
        return group

    def refuse_untaught(self, step: int, groups: Sequence[Group]) -> None:
        """Raise RunFailed if the run's teachers gave no log-prob for any token of a step."""
        if self._teachers is not None:
            self._teachers.refuse_untaught(step, groups)

    def teacher_stats(self, groups: Sequence[Group]) -> dict[str, Any]:
        """Return the metrics of the teachers of a step, or {} without a teacher."""
        return {} if self._teachers is None else self._teachers.stats(groups)

    async def evaluate(self, questions: Sequence[Question], config: EvaluationConfig) -> dict[str, Any]:
        """Answer held-out questions, without using slots of the staleness budget.

        Unless training pauses for it, an evaluation generates few samples at once (`eval_share`), so that training
        keeps most of the engines. The samples of a question are requested in parts that are no larger than a training
        group, because every engine can accept a whole group.

        Returns:
            The numbers of `evaluation_stats`, the `seconds` that it took, and the `samples` as text.
        """
        part_size = min(self.config.samples_per_question, config.eval_samples)
        first_members = range(0, config.eval_samples, part_size)
        num_slots = len(questions) * len(first_members)
        # With `eval_pinned`, training waits for the evaluation, which may then use all engines
        if not config.eval_pinned:
            samples_at_once = int(config.eval_share * self.config.samples_in_flight)
            num_slots = max(1, samples_at_once // part_size)
        slots = asyncio.Semaphore(num_slots)

        async def answer_part(prompt: Prompt, first_member: int) -> tuple[Sample, ...]:
            # The seeds of completions are computed from the ordinal, so each part gets an ordinal of its own. Ordinals of
            # evaluations are negative, because training uses the numbers from 0
            prompt = replace(prompt, ordinal=prompt.ordinal - first_member * len(questions))
            count = min(part_size, config.eval_samples - first_member)
            async with slots:
                return await self._scored(prompt, count, config.sampling, evaluation=True)

        async def answer(number: int, question: Question) -> Group:
            prompt = Prompt(-1 - number, question.token_ids, question.row, -1 - number, question.images)
            parts = await asyncio.gather(*(answer_part(prompt, first) for first in first_members))
            samples = []
            for member, sample in enumerate(chain.from_iterable(parts)):
                completion = replace(sample.completion, member=member)
                samples.append(replace(sample, completion=completion))
            return Group(prompt, tuple(samples), start_version=0, sequence_number=-1)

        begin = time.monotonic()
        with self.spans.measure("evaluation", "evaluate"):
            groups = await asyncio.gather(
                *(answer(number, question) for number, question in enumerate(questions))
            )
        stats = evaluation_stats(groups, config.eval_pass_reward)
        return {"seconds": time.monotonic() - begin, **stats, "samples": readable_samples(groups)}
