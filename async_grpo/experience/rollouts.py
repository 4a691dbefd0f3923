"""`Rollouts`: from a prompt to its completions, each scored while its siblings still generate."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import accumulate, chain, islice
from typing import Any

import numpy as np

from async_grpo.experience.config import BatchConfig, EvaluationConfig, RunFacts
from async_grpo.experience.dataset import Question
from async_grpo.experience.evaluation import evaluation_stats
from async_grpo.experience.step_metrics import readable_samples
from async_grpo.experience.turn_order import turn_order
from async_grpo.metrics.free_numbers import FreeNumbers
from async_grpo.metrics.spans import Spans
from async_grpo.protocols import Generation, Logprobs, Verification
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
    """What a reward adapter receives: every column of the row, and the completion."""
    sample = {
        **{key: value for key, value in prompt.row.items() if key != "input_token_ids"},
        "completion": completion.text,
        "sample_text": prompt.row["input"] + completion.text,
        "completion_token_ids": completion.token_ids.tolist(),
        "truncated": completion.truncated,
        "group_id": prompt.ordinal,
    }
    if completion.char_ends is not None:
        sample["completion_char_ends"] = completion.char_ends.tolist()
    if (outcome := completion.outcome) is not None:
        # Turns are told in time. Their tokens stand by sequence, so that where sequences took turns the ends do not ascend
        order = turn_order(completion)
        turns = [completion.turns[place] for place in order]
        ends = [*accumulate(turn.tokens for turn in completion.turns)]
        rewards = outcome.turn_rewards
        sample["sample_text"] = "".join(turn.said + turn.text for turn in turns)
        sample["environment_reward"] = outcome.reward
        sample["turn_rewards"] = [rewards[place] for place in order] if rewards else []
        sample["turn_ends"] = [ends[place] for place in order]
        sample["turns"] = [[turn.said, turn.text] for turn in turns]
    return sample


class Rollouts:
    """Asks engines, verifiers and logprob workers; see `ExperienceBatcher` for them.

    `on_change`: is told how many more sequences are under way.
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
    ) -> None:
        self.config, self.facts, self._on_change = config, facts, on_change
        self.spans = Spans()
        self._free_numbers = FreeNumbers()
        self.generation, self.verification = generation, verification
        roles = ("reference", reference, "ref_logprobs"), ("proximal", proximal, "proximal_logprobs")
        self._recomputed = [(role, source, name) for role, source, name in roles if source is not None]

    async def group(self, prompt: Prompt, number: int, version: int) -> Group:
        """The group of a prompt, let in under policy `version`, with the greedy completion that some estimators want."""
        parts = [self._scored(prompt, self.config.samples_per_question)]
        if self.config.estimator.compares_with_greedy:
            parts.append(self._scored(prompt, 1, GREEDY))
        samples, *greedy = await asyncio.gather(*parts)
        baseline = greedy[0][0].verdict if greedy else None
        return Group(prompt, samples, version, number, baseline)

    async def _scored(
        self, prompt: Prompt, count: int, sampling: Sampling | None = None, *, evaluation: bool = False
    ) -> tuple[Sample, ...]:
        scoring: list[asyncio.Task[Sample]] = []
        self._on_change(+count)
        try:
            async with (
                asyncio.TaskGroup() as tasks,
                aclosing(self.generation.generate(prompt, count, sampling)) as completions,
            ):
                async for completion in completions:
                    self._on_change(-1)
                    scoring.append(tasks.create_task(self._score(prompt, completion, evaluation)))
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from several  # one cause is enough to end a run, and reads better
        finally:
            self._on_change(len(scoring) - count)
        samples = tuple(sorted((task.result() for task in scoring), key=lambda one: one.completion.member))
        is_baseline = sampling == GREEDY and not evaluation
        if not self.facts.whole_groups or is_baseline:
            return self._with_bounded_numbers(samples)
        # A reward looks at all of the group that there is to be scored
        scored = [sample for sample in samples if not sample.completion.failure]
        seen, verdicts = [reward_sample(prompt, s.completion) for s in scored], [s.verdict for s in scored]
        found = iter(await self.verification.post_process(seen, verdicts, evaluation=evaluation))
        judged = tuple(s if s.completion.failure else replace(s, verdict=next(found)) for s in samples)
        return self._with_bounded_numbers(judged)

    def _with_bounded_numbers(self, samples: Sequence[Sample]) -> tuple[Sample, ...]:
        """Return the samples without the numbers of agents, environments and rewards that metrics cannot take."""
        bounded_samples = []
        for sample in samples:
            completion, verdict = sample.completion, sample.verdict
            if completion.outcome is not None:
                numbers = self._free_numbers.bounded(ENVIRONMENT, completion.outcome.numbers)
                completion = replace(completion, outcome=replace(completion.outcome, numbers=numbers))
            results = []
            for result in verdict.results:
                extra = self._free_numbers.bounded(result.adapter, result.extra)
                results.append(replace(result, extra=extra))
            verdict = replace(verdict, results=tuple(results))
            bounded_samples.append(replace(sample, completion=completion, verdict=verdict))
        return tuple(bounded_samples)

    async def _score(self, prompt: Prompt, completion: Completion, evaluation: bool) -> Sample:
        if completion.failure:
            failed = AdapterResult(ENVIRONMENT, RewardStatus.FAILED, reason=completion.failure)
            return Sample(prompt, completion, Verdict(failed.status, None, (failed,)))
        sample = reward_sample(prompt, completion)
        with self.spans.measure("rewards", "score"):
            return Sample(prompt, completion, await self.verification.verify(sample, evaluation=evaluation))

    async def add_logprobs(self, group: Group) -> Group:
        """The group with the log-probs of other policies that the loss needs."""
        samples, sequences = group.samples, [one for sample in group.samples for one in sample.sequences]
        token_ids, begins = [one.token_ids for one in sequences], [len(one.pieces[0][0]) for one in sequences]
        for role, source, name in self._recomputed if sequences else ():
            with self.spans.measure(role, "logprobs"):
                answers = await source.logprobs(token_ids, begins)
            rows = zip(sequences, answers, begins, strict=True)
            found = iter(one.sampled(of, begin) for one, of, begin in rows)
            own = [np.concatenate([*islice(found, len(sample.sequences))]) for sample in samples]
            samples = tuple(replace(s, **{name: p}) for s, p in zip(samples, own, strict=True))
        return replace(group, samples=samples)

    async def evaluate(self, questions: Sequence[Question], config: EvaluationConfig) -> dict[str, Any]:
        """`evaluation_stats` of the questions, outside the staleness budget, its `seconds`, and the `samples` as text.

        Unless the training waits for it, only so much is under way at once as leaves the engines to the training; and
        never more of one question than a group has, for which there is an engine.
        """
        size = min(self.config.samples_per_question, config.eval_samples)
        share = int(config.eval_share * self.config.samples_in_flight) // size
        parts = range(0, config.eval_samples, size)
        places = asyncio.Semaphore(len(questions) * len(parts) if config.eval_pinned else max(1, share))

        async def answered(prompt: Prompt, first: int) -> tuple[Sample, ...]:
            # Below 0 are the ordinals of no prompt of the training: each part has draws of its own
            prompt = replace(prompt, ordinal=prompt.ordinal - first * len(questions))
            async with places:
                count = min(size, config.eval_samples - first)
                return await self._scored(prompt, count, config.sampling, evaluation=True)

        async def group(number: int, question: Question) -> Group:
            prompt = Prompt(-1 - number, question.token_ids, question.row, -1 - number)
            found = await asyncio.gather(*(answered(prompt, first) for first in parts))
            samples = tuple(
                replace(sample, completion=replace(sample.completion, member=member))
                for member, sample in enumerate(chain.from_iterable(found))
            )
            return Group(prompt, samples, 0, -1)

        begun = time.monotonic()
        with self.spans.measure("evaluation", "evaluate"):
            groups = await asyncio.gather(*(group(number, one) for number, one in enumerate(questions)))
        stats = evaluation_stats(groups, config.eval_pass_reward)
        return {"seconds": time.monotonic() - begun, **stats, "samples": readable_samples(groups)}
