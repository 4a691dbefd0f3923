"""Training without answers: what most completions of a prompt say counts as right.

Test-time reinforcement learning: Zuo et al., "TTRL" (2025). Each completion's answer (the last \\boxed{}, else the one
<answer>) has one vote; those that gave the most frequent one earn 1. It exists once the whole group is there, so the
reward is set by `post_process_scores`. Where the row has an `answer`, the true reward is logged beside it.
"""

from collections import Counter
from typing import Any

from async_grpo.rewards.builtin.answers import boxed_answer, completion_text, gold_answer
from async_grpo.rewards.builtin.format import answer_block
from async_grpo.rewards.builtin.mathd import MAX_CHARACTERS, normalise


def vote_of(sample: dict[str, Any]) -> str | None:
    r"""The answer of a completion, normalised as `mathd` does; None without one: an abstention.

    >>> vote_of({"completion": r"\boxed{\dfrac12}"}), vote_of({"completion": "I do not know."})
    ('\\frac{1}{2}', None)
    """
    text = completion_text(sample)
    boxed = boxed_answer(text)
    answer = answer_block(text) if boxed is None else boxed
    return normalise(answer) or None if answer is not None and len(answer) <= MAX_CHARACTERS else None


def majority(votes: list[str | None]) -> str | None:
    """The most frequent vote; of several the shortest, of these the first in the alphabet: not the one that came first,
    for completions arrive in any order. None if nobody voted.

    >>> majority(["7", None, "12", "7", "12"]), majority([None])
    ('7', None)
    """
    counts = Counter(vote for vote in votes if vote is not None)
    return min(counts, key=lambda vote: (-counts[vote], len(vote), vote), default=None)


def score(sample: dict[str, Any]) -> dict[str, float]:
    """Before the group is known: whether there is an answer at all, and what it is truly worth.

    >>> score({"completion": "\\\\boxed{7}", "answer": "7"})
    {'reward': 0.0, 'voted': 1.0, 'true_reward': 1.0}
    """
    vote = vote_of(sample)
    known = {"reward": 0.0, "voted": float(vote is not None)}
    if sample.get("answer") is None:
        return known
    return known | {"true_reward": float(vote == normalise(gold_answer(sample)))}


def post_process_scores(group: list[dict[str, Any]]) -> list[dict[str, float] | None]:
    """1 for each completion that says what the majority says, else 0, and the majority's `share` of all votes.

    An answer that failed stays so, and has no vote.

    >>> says = lambda text: {"sample": {"completion": f"\\\\boxed{{{text}}}"}, "status": "ok"}
    >>> [member["reward"] for member in post_process_scores([says("7"), says("12"), says("7.0"), says("7")])]
    [1.0, 0.0, 0.0, 1.0]
    """
    votes = [vote_of(member["sample"]) if member["status"] == "ok" else None for member in group]
    winner = majority(votes)
    cast = [vote for vote in votes if vote is not None]
    share = cast.count(winner) / len(cast) if winner is not None else 0.0
    return [
        {"reward": float(vote is not None and vote == winner), "share": share}
        if member["status"] == "ok"
        else None
        for member, vote in zip(group, votes, strict=True)
    ]
