"""Several verdicts of one judge on one sample -> one score."""

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Vote:
    """One verdict: the score on the judge's own scale, and further numbers of the reply."""

    score: float
    extra: Mapping[str, float] = field(default_factory=dict)


def majority(scores: Sequence[float]) -> float:
    """The score of most votes; of several such, their mean.

    >>> majority([1.0, 5.0, 5.0]), majority([1.0, 5.0])
    (5.0, 3.0)
    """
    counts = Counter(scores)
    most = max(counts.values())
    return statistics.fmean(score for score, count in counts.items() if count == most)


AGGREGATES: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "majority": majority,
}


def verdict(
    votes: Sequence[Vote], aggregate: str, scale: tuple[float, float], asked: int
) -> dict[str, float]:
    """The answer of at least one vote: `reward` in [0, 1], and the judge's numbers.

    >>> verdict([Vote(4.0), Vote(5.0, {"style": 2.0})], "mean", (1.0, 5.0), asked=3)
    {'reward': 0.875, 'judge_score': 4.5, 'judge_votes': 2, 'judge_spread': 1.0, 'judge_style': 2.0}
    """
    scores = [vote.score for vote in votes]
    score = AGGREGATES[aggregate](scores)
    low, high = scale
    answer = {"reward": (score - low) / (high - low), "judge_score": score}
    if asked > 1:
        answer |= {"judge_votes": len(votes), "judge_spread": max(scores) - min(scores)}
    for name in sorted(set().union(*(vote.extra for vote in votes))):
        values = [vote.extra[name] for vote in votes if name in vote.extra]
        answer.setdefault(f"judge_{name}", statistics.fmean(values))
    return answer


def too_few(num_votes: int, asked: int, needed: int, reasons: Sequence[str]) -> str:
    """Why there is no verdict.

    >>> too_few(1, 5, 3, ["no number", "no number", "cut off"])
    '1 of 5 votes could be read, 3 are needed: no number; cut off'
    """
    counted = f"{num_votes} of {asked} votes could be read, {needed} are needed: " if asked > 1 else ""
    return counted + "; ".join(list(dict.fromkeys(reasons))[:2])
