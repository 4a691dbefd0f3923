r"""Equality of the stated answer and the gold answer after the normalization of the MATH data set; and a vote by it.

The rules are those of Hendrycks et al., "Measuring Mathematical Problem Solving With the MATH Dataset" (2021), with four
exceptions: the thousands separators of a plain number are removed; spacing commands are spaces; a unit ends the answer, so
that `5 \text{ or }6` is not 5; and the left side of `=` begins with a letter, so that `7x = 80` is not 80. The answer is
the content of a box or of the only <answer> (`stated_answer`).

The vote is test-time reinforcement learning, Zuo et al., "TTRL" (2025): the answer that most completions of a prompt state
counts as right. It is known once the group is complete, so `post_process_scores` sets the reward.
"""

import re
from collections import Counter
from typing import Any

from async_grpo.rewards.builtin import answers

MAX_CHARACTERS = 1000  # of an answer

_RULES = {
    r"\n|\\!|\\left(?![a-z])|\\right(?![a-z])": "",
    r"\\\\(?=[a-zA-Z])": r"\\",  # a command that was escaped twice
    r"\\[td]frac": r"\\frac",
    r"\^\s*(\{\s*\\circ\s*\}|\\circ)": "",  # degrees
    r"\\\$|\$|\\%|%": "",
    r"(?<=\S)\s*\\(text|mbox)\{ [^{}\d]*\}(\^\d|\^\{\d\})?\s*$": "",  # a unit: 5 \text{ cm}^2
    r"^\s*\\(text|mbox)\{([^{}]*)\}\s*$": r"\2",  # nothing but text
    r"(^|[\s{])\.(?=\d)": r"\g<1>0.",
    r"^\s*[a-zA-Z]\w?\s*=(?=[^=]+$)": "",  # k = 5
    r"\\sqrt\s*(\w)": r"\\sqrt{\1}",
    r"\\frac\s*(\w)\s*": r"\\frac{\1}",
    r"(\\frac\{[^{}]*\})\s*(\w)": r"\1{\2}",
}
_SPACES = re.compile(r"\s|(?<!\\)\\(?:[,;:! ]|q?quad(?![a-zA-Z]))|~")
_SIMPLE_FRACTION = re.compile(r"(-?\d+)/(-?\d+)")


def clean(text: str) -> str:
    r"""Apply all rules that leave the text readable for a LaTeX parser.

    >>> clean(r"x = \dfrac12 \text{ cm}")
    '\\frac{1}{2}'
    """
    for pattern, replacement in _RULES.items():
        text = re.sub(pattern, replacement, text)
    text = answers.ungrouped(text.strip())
    return r"\frac{1}{2}" if text == "0.5" else text


def normalise(text: str) -> str:
    r"""Return the text by which two answers are compared.

    >>> normalise("0.5") == normalise("1/2") == normalise(r"\tfrac 1 2"), normalise(r"90^\circ")
    (True, '90')
    """
    text = _SPACES.sub("", clean(text))
    fraction = _SIMPLE_FRACTION.fullmatch(text)
    return rf"\frac{{{fraction[1]}}}{{{fraction[2]}}}" if fraction else text


def score(sample: dict[str, Any]) -> dict[str, float]:
    r"""Return 1 if the stated answer equals the row's `answer`; 0 otherwise, also if none is stated.

    Raises:
        ValueError: The row's answer is missing or empty.

    >>> score({"completion": r"so \boxed{\frac{1}{2}}", "answer": 0.5})
    {'reward': 1.0}
    """
    gold = normalise(answers.gold_answer(sample))
    if not gold:
        raise ValueError(f"nothing is left of the row's answer {sample['answer']!r} after normalisation")
    return {"reward": float(vote_of(sample) == gold)}


def vote_of(sample: dict[str, Any]) -> str | None:
    """Return the stated answer, normalised; None without one, or if nothing is left of it: an abstention."""
    answer = answers.stated_answer(answers.completion_text(sample))
    if answer is None or len(answer) > MAX_CHARACTERS:
        return None
    return normalise(answer) or None


def score_vote(sample: dict[str, Any]) -> dict[str, float]:
    """Score a completion before its group is known.

    Returns:
        `voted`, whether the completion states an answer; and `true_reward`, its true worth, if the row has an answer.
    """
    vote = vote_of(sample)
    scores = {"reward": 0.0, "voted": float(vote is not None)}
    if sample.get("answer") is not None:
        scores["true_reward"] = float(vote == normalise(answers.gold_answer(sample)))
    return scores


def post_process_scores(group: list[dict[str, Any]]) -> list[dict[str, float] | None]:
    """Return 1 for each completion that states the majority's answer, else 0, with the majority's `share` of all votes.

    If several answers have most votes, the shortest one wins, and of the shortest ones the first in the alphabet. A failed
    completion has no vote and stays failed (None).
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
