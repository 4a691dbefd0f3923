"""Declarations on a reward: what its process must know before it calls it. For functions and classes alike.

from async_grpo.rewards.adapter.decorators import batch, post_process, process_reward, warmed_by
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from async_grpo.errors import ConfigurationError

Reward = TypeVar("Reward", bound=Callable[..., Any])
PostProcess = Callable[[list[dict[str, Any]]], list[Any]]


@dataclass(frozen=True)
class Batching:
    """How many samples one call takes at most, and how long the first of them waits for the others."""

    max_samples: int = 32
    max_wait_s: float = 0.01


def batch(max_samples: int = 32, max_wait_s: float = 0.01) -> Callable[[Reward], Reward]:
    """Decorator: the reward is called with a list of samples, and returns a list with one answer for each.

    Where the call raises or its process dies, each sample is tried alone, so that one bad row costs only itself. A
    list of another length is a failure of all; and a call that takes too long is a time-out of all.

    >>> @batch(max_samples=8)
    ... def lengths(samples, scale=0.01):
    ...     return [scale * len(sample["completion"]) for sample in samples]
    >>> lengths.batching
    Batching(max_samples=8, max_wait_s=0.01)

    Raises:
        ConfigurationError: fewer than one sample, or a negative wait.
    """
    if max_samples < 1 or not max_wait_s >= 0:
        raise ConfigurationError(
            f"@batch needs max_samples >= 1 and max_wait_s >= 0, not {max_samples}, {max_wait_s}"
        )

    def mark(reward: Reward) -> Reward:
        reward.batching = Batching(max_samples, max_wait_s)  # type: ignore[attr-defined]
        return reward

    return mark


def cacheable(reward: Reward) -> Reward:
    """Decorator: the verdict cache may keep the reward's answers. To be given to one that is costly, and pure: it says
    the same about the same sample each time, whatever it has seen before. (Judges need no such mark.)

    >>> @cacheable
    ... def proof_checker(sample): ...
    >>> proof_checker.cacheable
    True
    """
    reward.cacheable = True  # type: ignore[attr-defined]
    return reward


def post_process(function: PostProcess) -> Callable[[Reward], Reward]:
    """Decorator: `function` sees all answers to one prompt together, and may change them. A class has a method
    `post_process_scores` instead.

    It is called with a list of dicts, one for each completion of the prompt:

        sample     the sample
        status     ok, failed, timed_out or abstained
        reward     a float; None unless the status is ok
        extra      the further numbers
        steps      of a process reward: [index of the step's last token, reward]
        reason     why it failed, timed out or abstained

    and returns a list of the same length. Each entry is a reward, a dict of a `reward` and further numbers,
    {"abstain": "why"}, or None, which leaves the answer as it is. It may run on any worker, in training and in
    evaluation alike; if it fails, all the answers have failed.

    >>> def fill(group):
    ...     known = [member["reward"] for member in group if member["status"] == "ok"]
    ...     mean = sum(known) / len(known) if known else None
    ...     return [mean if member["reward"] is None else None for member in group]
    >>> @post_process(fill)
    ... def shout(sample):
    ...     return sample["completion"].isupper()
    >>> shout.post_process_scores([{"status": "ok", "reward": 1.0}, {"status": "failed", "reward": None}])
    [None, 1.0]
    """

    def mark(reward: Reward) -> Reward:
        hook = staticmethod(function) if isinstance(reward, type) else function  # no method: it has no `self`
        reward.post_process_scores = hook  # type: ignore[attr-defined]
        return reward

    return mark


def warmed_by(example: dict[str, Any]) -> Callable[[Reward], Reward]:
    """Decorator: score `example` when the reward's process starts, so that no real sample pays for imports.

    >>> @warmed_by({"answer": "1"})
    ... def shout(sample):
    ...     print("scored", sample["answer"])
    ...     return {"reward": 1.0}
    >>> shout.warm_up()
    scored 1
    """

    def mark(adapter: Reward) -> Reward:
        def warm_up() -> None:
            adapter(dict(example))

        adapter.warm_up = warm_up  # type: ignore[attr-defined]  # a declaration on the user's function
        return adapter

    return mark


def process_reward(adapter: Reward) -> Reward:
    """Decorator: the adapter rewards single steps; it returns `step_rewards` or `token_rewards`.

    Ends are exclusive; `reward` is the sum unless the adapter returns one, too.

    >>> @process_reward
    ... def sentences(sample):
    ...     text = sample["completion"]
    ...     ends = [n + 1 for n, character in enumerate(text) if character == "."]
    ...     return {"step_rewards": [{"reward": 1.0, "char_end": end} for end in ends]}
    >>> sentences({"completion": "One. Two."})
    {'step_rewards': [{'reward': 1.0, 'char_end': 4}, {'reward': 1.0, 'char_end': 9}]}
    """
    adapter.process = True  # type: ignore[attr-defined]  # a declaration on the user's function
    return adapter


def best_reward(best: float | Callable[..., float]) -> Callable[[Reward], Reward]:
    """Decorator: the highest reward there is, if that is not 1: a number, or a function of the reward's options.

    A reward that gives every sample less than that, and all the same, raises an alarm.

    >>> @best_reward(lambda weight=0.1: weight)
    ... def polite(sample, weight=0.1):
    ...     return weight * ("please" in sample["completion"])
    >>> polite.best_reward(weight=0.5)
    0.5
    """

    def mark(reward: Reward) -> Reward:
        reward.best_reward = best  # type: ignore[attr-defined]  # a declaration on the user's function
        return reward

    return mark
