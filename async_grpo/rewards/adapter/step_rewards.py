"""Process rewards: what an adapter says of single steps -> rewards of tokens.

    step_rewards    a list of {"reward": r, "token_end": n} or {"reward": r, "char_end": n}, in any order
    token_rewards   a list with one number for each token of the completion

Ends are exclusive, as in a slice: the step is over with `completion_token_ids[:n]`, or `completion[:n]`.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from numbers import Integral, Real
from typing import Any

STEP_REWARDS, TOKEN_REWARDS = KINDS = ("step_rewards", "token_rewards")
_ENDS = {"token_end": ("completion_token_ids", "tokens"), "char_end": ("completion", "characters")}


def steps_of(answer: Mapping[str, Any], sample: Mapping[str, Any]) -> list[tuple[int, float]]:
    """(index of the last token, reward) of each step, by token; steps that end in one token are added up.

    A step that ends in text which no token wrote ends with the last token.

    Raises:
        ValueError: anything else than one well-formed list of the two, with finite numbers.

    >>> sample = {"completion": "3+4 is 7", "completion_token_ids": [9, 8, 7], "completion_char_ends": [2, 3, 8]}
    >>> answer = {"step_rewards": [{"reward": 1.0, "char_end": 8}, {"reward": -0.5, "token_end": 1}]}
    >>> steps_of(answer, sample)
    [(0, -0.5), (2, 1.0)]
    """
    given = [name for name in KINDS if name in answer]
    if len(given) != 1:
        raise ValueError(
            "a @process_reward must return either step_rewards or token_rewards, "
            f"not {'both' if given else f'only {sorted(map(str, answer))}'}"
        )
    (kind,) = given
    if not isinstance(answer[kind], list):
        raise ValueError(f"{kind} is a {type(answer[kind]).__name__}, not a list")
    read = _token_rewards if kind == TOKEN_REWARDS else _step_rewards
    rewards: dict[int, float] = {}
    for token, reward in read(answer[kind], sample):
        rewards[token] = rewards.get(token, 0.0) + reward
        if not math.isfinite(rewards[token]):
            raise ValueError(f"the steps that end in token {token} add up to {rewards[token]}")
    return sorted(rewards.items())


def refuse_steps(answer: Mapping[str, Any]) -> list[tuple[int, float]]:
    """No steps, those of an adapter that is not declared to give any. Raises ValueError if it gave some."""
    if given := [name for name in KINDS if name in answer]:
        raise ValueError(
            f"the adapter returned {' and '.join(given)}, but it is not declared to: decorate it with "
            "@process_reward (of async_grpo.rewards.builtin)"
        )
    return []


def is_finite_number(value: Any) -> bool:
    """Whether it is a real number other than nan and the infinities."""
    return isinstance(value, Real) and math.isfinite(value)


def _token_rewards(values: list[Any], sample: Mapping[str, Any]) -> Iterator[tuple[int, float]]:
    num_tokens = len(sample["completion_token_ids"])
    if len(values) != num_tokens:
        raise ValueError(f"{len(values)} token_rewards for {num_tokens} tokens: there must be one for each")
    for token, value in enumerate(values):
        yield token, _number(value, f"token_rewards[{token}]")


def _step_rewards(steps: list[Any], sample: Mapping[str, Any]) -> Iterator[tuple[int, float]]:
    for number, step in enumerate(steps):
        where = f"step_rewards[{number}]"
        if not isinstance(step, dict) or len(step) != 2 or "reward" not in step or not step.keys() & _ENDS:
            wanted = '{"reward": r, "token_end": n} or {"reward": r, "char_end": n}'
            raise ValueError(f"{where} is {step!r}, not {wanted}")
        reward = _number(step["reward"], f"{where}: reward")
        (name,) = step.keys() & _ENDS
        yield _last_token(name, step[name], sample, where), reward


def _last_token(name: str, end: Any, sample: Mapping[str, Any], where: str) -> int:
    column, unit = _ENDS[name]
    length = len(sample[column])
    if not isinstance(end, Integral) or isinstance(end, bool) or not 1 <= end <= length:
        raise ValueError(
            f"{where}: {name}={end!r} is not one of 1..{length}: the completion has {length} {unit}"
        )
    if name == "token_end":
        return int(end) - 1
    char_ends = sample.get("completion_char_ends")
    if not char_ends:
        raise ValueError(
            f"{where}: {name}={end} cannot be placed: the sample has no completion_char_ends; use token_end"
        )
    return min(bisect_left(char_ends, end), len(char_ends) - 1)


def _number(value: Any, name: str) -> float:
    if not is_finite_number(value):
        raise ValueError(f"{name}={value!r}: only finite numbers are allowed")
    return float(value)
