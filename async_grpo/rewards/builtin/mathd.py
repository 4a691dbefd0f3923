r"""Equality of the stated answer and the gold answer after the normalisation of the MATH data set; and a vote by it.

The rules are those of Hendrycks et al., "Measuring Mathematical Problem Solving With the MATH Dataset"
(2021), but for four: thousands separators of a plain number go away; spacing commands are spaces; a unit ends the answer,
so that `5 \text{ or }6` is not 5; and what is left of `=` begins with a letter, so that `7x = 80` is not 80.
The answer stands in a box or in the one <answer> (`stated_answer`).

The vote is test-time reinforcement learning, Zuo et al., "TTRL" (2025): what most completions of a prompt say counts as
right. It exists once the whole group is there, so the reward is set by `post_process_scores`.
"""

import re
from collections import Counter
from typing import Any

from async_grpo.rewards.builtin import answers

MAX_CHARACTERS = 1000

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
    r"""By all rules that leave the text readable for a LaTeX parser.

    >>> clean(r"x = \dfrac12 \text{ cm}")
    '\\frac{1}{2}'
    """
    for pattern, replacement in _RULES.items():
        text = re.sub(pattern, replacement, text)
    text = answers.ungrouped(text.strip())
    return r"\frac{1}{2}" if text == "0.5" else text


def normalise(text: str) -> str:
    r"""The text by which two answers are compared.

    >>> normalise("0.5") == normalise("1/2") == normalise(r"\tfrac 1 2"), normalise(r"90^\circ")
    (True, '90')
    """
    text = _SPACES.sub("", clean(text))
    fraction = _SIMPLE_FRACTION.fullmatch(text)
    return rf"\frac{{{fraction[1]}}}{{{fraction[2]}}}" if fraction else text


def score(sample: dict[str, Any]) -> dict[str, float]:
    r"""Return 1 if the stated answer equals the row's `answer`; 0 otherwise, also if none is stated.

    Raises:
        ValueError: the row's answer is missing or empty.

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
    """Before the group is known: whether there is an answer, and, where the row has one, what it is truly worth."""
    vote = vote_of(sample)
    found = {"reward": 0.0, "voted": float(vote is not None)}
    if sample.get("answer") is not None:
        found["true_reward"] = float(vote == normalise(answers.gold_answer(sample)))
    return found


def post_process_scores(group: list[dict[str, Any]]) -> list[dict[str, float] | None]:
    """1 for each completion that says what the majority says, else 0, and the majority's `share` of all votes. Of several
    most frequent votes the shortest wins, of these the first in the alphabet. What failed stays so, and has no vote.
    """
    votes = [vote_of(member["sample"]) if member["status"] == "ok" else None for member in group]
    counts = Counter(filter(None, votes))
    winner = min(counts, key=lambda vote: (-counts[vote], len(vote), vote), default="")
    share = counts[winner] / max(1, counts.total())
    return [
        {"reward": float(vote == winner), "share": share} if member["status"] == "ok" else None
        for member, vote in zip(group, votes, strict=True)
    ]
