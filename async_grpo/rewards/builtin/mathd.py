r"""Compares the stated answer with the gold answer after the normalization of the MATH data set.

The module also has the reward of a majority vote.

The answer is the content of a box or of the only <answer> (`stated_answer`). The rules of the normalization are those
of Hendrycks et al., "Measuring Mathematical Problem Solving With the MATH Dataset" (2021), with four exceptions:

- The thousands separators of a plain number are removed.
- Spacing commands count as spaces.
- A unit is removed only at the end of the answer, so that `5 \text{ or }6` does not become 5.
- The left side of `=` is removed only if it is a name, so that `7x = 80` does not become 80.

The majority vote is that of test-time reinforcement learning: Zuo et al., "TTRL" (2025). The answer that most
completions of a prompt state counts as right. It is known only once the group is complete, so `post_process_scores`
sets the rewards.
"""

import re
from collections import Counter
from typing import Any

from async_grpo.rewards.answer_reading.choices import compared_parts
from async_grpo.rewards.answer_reading.notation import plain_notation, words_of
from async_grpo.rewards.answer_reading.prose import equal_prose, without_introduction
from async_grpo.rewards.answer_reading.qualifiers import contradict
from async_grpo.rewards.builtin import answers

MAX_CHARACTERS = 1000  # maximum length of an answer

_RULES = {
    r"\n|\\!|\\left(?![a-z])|\\right(?![a-z])": "",
    r"\\\\(?=[a-zA-Z])": r"\\",  # a command with two backslashes, because it was escaped twice
    r"\\[td]frac": r"\\frac",
    r"\^\s*(\{\s*\\circ\s*\}|\\circ)": "",  # the degree sign
    r"\\\$|\$|\\%|%": "",
    r"(?<=\S)\s*\\(text|mbox)\{ [^{}\d]*\}(\^\d|\^\{\d\})?\s*$": "",  # a unit at the end, as in 5 \text{ cm}^2
    r"^\s*\\(text|mbox)\{([^{}]*)\}\s*$": r"\2",  # an answer that is nothing but \text{...}
    r"(^|[\s{])\.(?=\d)": r"\g<1>0.",
    r"^\s*[a-zA-Z]\w?\s*=(?=[^=]+$)": "",  # the name in k = 5
    r"\\sqrt\s*(\w)": r"\\sqrt{\1}",
    r"\\frac\s*(\w)\s*": r"\\frac{\1}",
    r"(\\frac\{[^{}]*\})\s*(\w)": r"\1{\2}",
}
_SPACES = re.compile(r"\s|(?<!\\)\\(?:[,;:! ]|q?quad(?![a-zA-Z]))|~")
_SIMPLE_FRACTION = re.compile(r"(-?)(\d+)/(-?\d+)")


def clean(text: str) -> str:
    r"""Apply only the rules that keep the text readable for a LaTeX parser. `normalise` applies all rules.

    >>> clean(r"x = \dfrac12 \text{ cm}")
    '\\frac{1}{2}'
    """
    text = words_of(plain_notation(text))
    for pattern, replacement in _RULES.items():
        text = re.sub(pattern, replacement, text)
    text = answers.ungrouped(text.strip())
    return r"\frac{1}{2}" if text == "0.5" else text


def normalise(text: str) -> str:
    r"""Return the normal form of an answer. Two answers are equal if their normal forms are.

    >>> normalise("0.5") == normalise("1/2") == normalise(r"\tfrac 1 2"), normalise(r"90^\circ")
    (True, '90')
    """
    text = _SPACES.sub("", clean(text))
    fraction = _SIMPLE_FRACTION.fullmatch(text)
    return rf"{fraction[1]}\frac{{{fraction[2]}}}{{{fraction[3]}}}" if fraction else text


def score(sample: dict[str, Any]) -> dict[str, float]:
    r"""Return 1 if the stated answer equals the row's `answer`, and 0 if it differs or no answer is stated.

    Raises:
        ValueError: The row's answer is missing or empty.

    >>> score({"completion": r"so \boxed{\frac{1}{2}}", "answer": 0.5})
    {'reward': 1.0}
    """
    gold = answers.mathematical_gold(sample)
    if not normalise(gold):
        raise ValueError(f"nothing is left of the row's answer {sample['answer']!r} after normalisation")
    return {"reward": float(equal_texts(gold, answers.stated_answer(answers.completion_text(sample))))}


def equal_texts(gold: str, answer: str | None) -> bool:
    """Return whether a stated answer equals the gold answer, in all parts that both of them have (`compared_parts`)."""
    answer = without_introduction(answer or "")
    if not answer or len(answer) > MAX_CHARACTERS or contradict(gold, answer):
        return False
    has_equal_words = equal_prose(gold, answer)
    if has_equal_words is not None:
        return has_equal_words
    pairs = [(normalise(gold_part), normalise(part)) for gold_part, part in compared_parts(gold, answer)]
    return all(gold_part == part != "" for gold_part, part in pairs)


def vote_of(sample: dict[str, Any]) -> str | None:
    """Return the normal form of the stated answer, or None if no answer is stated or it is too long or empty."""
    answer = answers.stated_answer(answers.completion_text(sample))
    if answer is None or len(answer) > MAX_CHARACTERS:
        return None
    return normalise(answer) or None


def score_vote(sample: dict[str, Any]) -> dict[str, float]:
    """Score a completion before the result of the vote is known.

    Returns:
        A preliminary `reward` of 0, whether the completion states an answer (`voted`), and, if the row has an `answer`,
        whether the stated answer equals it (`true_reward`).
    """
    vote = vote_of(sample)
    scores = {"reward": 0.0, "voted": float(vote is not None)}
    if sample.get("answer") is not None:
        scores["true_reward"] = score(sample)["reward"]
    return scores


def post_process_scores(group: list[dict[str, Any]]) -> list[dict[str, float] | None]:
    """Return 1 for each completion that states the majority's answer and 0 for the others.

    `share` is the majority's share of all votes. If several answers have the most votes, the shortest one wins, and of
    several shortest ones the first in alphabetical order. Members of the group whose status is not ok do not vote, and
    get None, which leaves their results as they are.
    """
    votes: list[str | None] = []
    for member in group:
        has_vote = member["status"] == "ok"
        votes.append(vote_of(member["sample"]) if has_vote else None)
    counts = Counter(vote for vote in votes if vote)
    winner = min(counts, key=lambda vote: (-counts[vote], len(vote), vote), default="")
    share = counts[winner] / max(1, counts.total())
    rewards: list[dict[str, float] | None] = []
    for member, vote in zip(group, votes, strict=True):
        is_scored = member["status"] == "ok"
        rewards.append({"reward": float(vote == winner), "share": share} if is_scored else None)
    return rewards
