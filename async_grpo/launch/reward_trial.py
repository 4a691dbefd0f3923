"""Try rewards on answers that are known to be right or wrong, for `async-grpo doctor`."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from async_grpo.experience.dataset import Question
from async_grpo.launch.local_config import LocalConfig
from async_grpo.launch.plan import ERROR, OK, WARNING
from async_grpo.rewards.bench.completions import sample_of
from async_grpo.rewards.bench.report import Scorecard
from async_grpo.rewards.builtin.answers import gold_answer
from async_grpo.rewards.pool import VerifierPool

# Completions that state an answer in different forms. A reward may reject some of them
ANSWERS = ("{}", r"\boxed{{{}}}", "</think>\n<answer>{}</answer>")


@dataclass
class TriedReward:
    """Scores of one reward for answers that are known to be right, and for answers that are known to be wrong."""

    right: Scorecard = field(default_factory=Scorecard)
    wrong: Scorecard = field(default_factory=Scorecard)

    def result(self, *, may_be_for_other_rows: bool, looks_at_groups: bool) -> tuple[str, str]:
        """Return the level and the text of the finding about this reward.

        Args:
            may_be_for_other_rows: Whether a column of the data names the rewards of each row. The reward then may not
                fit the tried rows.
            looks_at_groups: Whether the reward needs a whole group. It then may give all single samples the same score.
        """
        if not self.right.rewards and not self.wrong.rewards:
            _, reason = next(iter(self.wrong.failures))
            return WARNING if may_be_for_other_rows else ERROR, f"scored nothing: {reason}"
        highest_right = f"{max(self.right.rewards, default=0):g}"
        highest_wrong = f"{max(self.wrong.rewards, default=0):g}"
        if len({*self.right.rewards, *self.wrong.rewards}) == 1 and not looks_at_groups:
            return WARNING, f"{highest_wrong} for every answer, right or wrong"
        text = f"up to {highest_right} for right answers, {highest_wrong} for wrong ones"
        if highest_wrong == highest_right:
            text += ", told apart by their form alone"
        return OK, text


async def try_rewards(
    config: LocalConfig,
    names: Sequence[str],
    cards: Mapping[str, TriedReward],
    questions: Sequence[Question],
    time_limit_s: float,
) -> None:
    """Score right and wrong answers to questions, and add the scores to `cards`.

    Samples are scored one after the other, because parallel calls would make each other slower.

    Args:
        config: The run's options.
        names: The rewards to try, as in `--reward-fns`.
        cards: The scores of each reward, by the reward's display name.
        questions: The questions that the answers belong to.
        time_limit_s: Seconds after which no further sample is scored.
    """
    begin = time.monotonic()
    async with VerifierPool.from_registry(
        names,
        config.reward_registry,
        timeout_s=config.reward_timeout_s,
        reward_options=config.options_by_name,
        reward_env=config.reward_env,
    ) as pool:
        for is_right, sample in _answers_of(questions):
            if time.monotonic() - begin >= time_limit_s:
                return
            verdict = await pool.verify(sample)
            for result in verdict.results:
                card = cards[result.adapter]
                scorecard = card.right if is_right else card.wrong
                scorecard.add(0, [result])


def _answers_of(questions: Sequence[Question]) -> Iterator[tuple[bool, dict[str, Any]]]:
    """Yield (whether the answer is right, sample) for right and wrong answers to the questions."""
    for question in questions:
        yield False, sample_of(question.row, "")
        try:
            gold = gold_answer(question.row)
        except ValueError:  # the row has no answer, which is no fault if the rewards need none
            continue
        for answer, is_right in ((f"{gold}1", False), (gold, True)):
            for form in ANSWERS:
                yield is_right, sample_of(question.row, form.format(answer))
