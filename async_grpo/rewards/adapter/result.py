"""What a reward may answer to a sample (see docs/rewards.md), and what becomes of it.

It answers one of

    1.0, 1, True                        the reward
    {"reward": 1.0, "length": 7}        with further numbers, logged per component; `score` is read as `reward`
    {"abstain": "why"}                  it cannot judge this sample
    (answer, query, explanation)        one of these, and two texts for the log: a judge's question and its reason

with finite numbers only, and a reward from -1e6 to 1e6 (`MAX_REWARD`). Anything else, an exception included, is a failure
and no zero. A process reward answers a dict with exactly one of

    step_rewards    a list of {"reward": r, "token_end": n} or {"reward": r, "char_end": n}, in any order
    token_rewards   a list with one number for each token of the completion

Ends are exclusive, as in a slice. `reward` is the sum of the steps unless it is given.
"""

import math
import sys
import traceback
from bisect import bisect_left
from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.metrics.free_numbers import MAX_EXTRA
from async_grpo.options.redaction import redacted

# A reward beyond is implausible: a sum that overflowed, a number in another unit, an attack. Up to here float32 tells
# rewards apart that differ by 0.1, and their squares and sums stay far from its end.
MAX_REWARD = 1e6
PLAUSIBLE_REWARD = f"a reward lies between -{MAX_REWARD:g} and {MAX_REWARD:g}"
KINDS = ("step_rewards", "token_rewards")
_ENDS = {"token_end": ("completion_token_ids", "tokens"), "char_end": ("completion", "characters")}
MAX_REASON_CHARACTERS = 500
MAX_QUOTED_NUMBER = 40  # characters
MAX_SHOWN_CHARACTERS = 60  # of a value that is none
_MEMBER = {"sample", "status", "extra", "steps", "reason"}  # what a group's member holds besides its reward


def read_answer(returned: Any, sample: Mapping[str, Any], process: bool = False) -> dict[str, Any]:
    """The same dict for what a reward returned.

    >>> read_answer(({"score": 0.5}, "Is it polite?", "Mostly."), {})
    {'status': 'ok', 'reward': 0.5, 'extra': {}, 'steps': [], 'reason': "Mostly. (asked: 'Is it polite?')"}
    """
    if isinstance(returned, tuple) and len(returned) == 3:
        returned, query, explanation = returned
        answer = read_answer(returned, sample, process)
        asked = f"(asked: {excerpt(str(query), MAX_REASON_CHARACTERS // 2)!r})" if query else ""
        parts = (answer["reason"], excerpt(str(explanation or "")), asked)
        return answer | {"reason": " ".join(filter(None, parts))}
    if isinstance(returned, Real) and not process:
        returned = {"reward": returned}
    if not isinstance(returned, dict):
        wanted = f"a dict with {' or '.join(KINDS)}" if process else "a number or a dict with a `reward`"
        return failure(f"the adapter returned a {type(returned).__name__}, not {wanted}")
    if (abstain := returned.get("abstain", False)) is not False:
        return failure(str(abstain), "abstained")
    try:
        steps = _steps_of(returned, sample, process)
        numbers = _numbers_of(returned, sum(reward for _, reward in steps) if process else None)
    except ValueError as error:
        return failure(str(error))
    reward = numbers.pop("reward")
    # A list is what JSON makes of a tuple
    return {"status": "ok", "reward": reward, "extra": numbers, "steps": [*map(list, steps)], "reason": ""}


def read_change(returned: Any, answer: Mapping[str, Any]) -> dict[str, Any]:
    """The answer after `post_process_scores` returned this for it (see `decorators.post_process`)."""
    if isinstance(returned, dict):  # a member of the group as it came, with another reward, is as good
        returned = {name: value for name, value in returned.items() if name not in _MEMBER}
    if returned is None or (isinstance(returned, dict) and returned.get("reward", 0.0) is None):
        return dict(answer)
    changed = read_answer(returned, {})
    if changed["status"] == "ok":
        changed |= {"extra": answer["extra"] | changed["extra"], "steps": answer["steps"]}
    return changed


def failure(reason: str, status: str = "failed") -> dict[str, Any]:
    """The answer of a call that came to nothing."""
    reason = excerpt(reason, 2 * MAX_REASON_CHARACTERS)
    return {"status": status, "reward": None, "extra": {}, "steps": [], "reason": reason}


def describe(error: BaseException) -> str:
    """Type and message, and the last line of the traceback; of a setting that is refused, the message and its cause's."""
    refused = isinstance(error, ConfigurationError)  # the line of ours that refuses tells the user nothing
    raised = error.__cause__ if refused else error
    frames = traceback.extract_tb(raised.__traceback__) if raised is not None else []
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""
    kind = "" if refused else f"{type(error).__name__}: "
    return excerpt(f"{kind}{excerpt(str(error))}{where}", 2 * MAX_REASON_CHARACTERS)


def is_finite_number(value: Any) -> bool:
    """Whether it is a real number other than nan and the infinities; whole numbers beyond a float's range are none."""
    size: Any = abs(value) if isinstance(value, Real) else math.inf
    return bool(size <= sys.float_info.max)


def is_plausible(reward: Any) -> bool:
    """Decide whether a number may be a reward: finite, and no larger than `MAX_REWARD`."""
    return is_finite_number(reward) and abs(reward) <= MAX_REWARD


def finite(text: str) -> float:
    """Return the number that JSON writes so.

    Raises:
        ValueError: it is NaN or Infinity, too large for a float, or so small that a float would make a 0 of it.

    >>> finite("-1.5e2"), finite("0e5")
    (-150.0, 0.0)
    """
    number = float(text)
    if not is_finite_number(number):
        raise ValueError(f"{excerpt(text, MAX_QUOTED_NUMBER)} is no finite number")
    digits = text.lower().partition("e")[0]
    if number == 0.0 and digits.strip("+-0._"):
        raise ValueError(f"{excerpt(text, MAX_QUOTED_NUMBER)} is too small for a float, and is not 0")
    return number


def unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; an `object_pairs_hook`.

    Raises:
        ValueError: a name appears twice. Which of the two values is meant, nobody knows.
    """
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a name appears twice in an object")
    return value


def excerpt(text: str, length: int = MAX_REASON_CHARACTERS) -> str:
    """Return the beginning of a text, without secrets, and fit for a file."""
    text = redacted(text)  # before the cut: nobody would know half of a secret for one
    text = text if len(text) <= length else text[:length] + " ..."
    return text.encode(errors="backslashreplace").decode()  # a lone surrogate, of JSON, cannot be written


def shown(value: Any, length: int = MAX_SHOWN_CHARACTERS) -> str:
    """Return the beginning of a value for a reason: a reward may return anything, a secret too."""
    return excerpt(repr(value), length)


def _numbers_of(answer: Mapping[str, Any], default: float | None) -> dict[str, float]:
    """Return the finite numbers of an answer, of which `reward` is one, under names without secrets.

    Raises:
        ValueError: the answer holds something else, or no reward.
    """
    numbers = {
        redacted(str(name)): value for name, value in answer.items() if name not in (*KINDS, "abstain")
    }
    if "score" in numbers and "reward" not in numbers:
        numbers["reward"] = numbers.pop("score")
    if default is not None:
        numbers.setdefault("reward", default)
    if "reward" not in numbers:
        raise ValueError(f"the adapter's dict has no `reward`, only {sorted(numbers)}")
    wrong = [f"{name}={shown(value)}" for name, value in numbers.items() if not is_finite_number(value)]
    if wrong:
        raise ValueError(f"the adapter returned {', '.join(wrong)}: only finite numbers are allowed")
    _refuse_implausible("the adapter returned reward", numbers["reward"])
    huge = [f"{name}={float(value):g}" for name, value in numbers.items() if abs(value) > MAX_EXTRA]
    if huge:
        raise ValueError(f"the adapter returned {', '.join(huge)}: numbers up to {MAX_EXTRA:g} are allowed")
    return {name: float(value) for name, value in numbers.items()}


def _refuse_implausible(what: str, reward: Any) -> None:
    if not is_plausible(reward):
        raise ValueError(f"{what}={shown(reward)}: {PLAUSIBLE_REWARD}")


def _steps_of(answer: Mapping[str, Any], sample: Mapping[str, Any], process: bool) -> list[tuple[int, float]]:
    """(index of the last token, reward) of each step, by token; steps that end in one token are added up, and one that
    ends in text which no token wrote ends with the last. Raises ValueError for what is not one well-formed list.
    """
    given = [name for name in KINDS if name in answer]
    if given and not process:
        raise ValueError(
            f"the adapter returned {' and '.join(given)}, but it is not declared to: decorate it with "
            "@process_reward (of async_grpo.rewards.adapter.decorators)"
        )
    if not process:
        return []
    if len(given) != 1:
        raise ValueError(
            "a @process_reward must return either step_rewards or token_rewards, "
            f"not {'both' if given else f'only {sorted(map(str, answer))}'}"
        )
    kind, values = given[0], answer[given[0]]
    if not isinstance(values, list):
        raise ValueError(f"{kind} is a {type(values).__name__}, not a list")
    num_tokens = len(sample["completion_token_ids"])
    if kind == "token_rewards" and len(values) != num_tokens:
        raise ValueError(f"{len(values)} token_rewards for {num_tokens} tokens: there must be one for each")
    rewards: dict[int, float] = {}
    for number, value in enumerate(values):
        token, where = number, f"{kind}[{number}]"
        if kind == "step_rewards":
            token, value, where = _last_token(value, sample, where), value["reward"], f"{where}: reward"
        if not is_finite_number(value):
            raise ValueError(f"{where}={shown(value)}: only finite numbers are allowed")
        _refuse_implausible(where, value)
        rewards[token] = rewards.get(token, 0.0) + float(value)
        if not is_plausible(rewards[token]):
            raise ValueError(
                f"the steps that end in token {token} add up to {rewards[token]:g}: {PLAUSIBLE_REWARD}"
            )
    return sorted(rewards.items())


def _last_token(step: Any, sample: Mapping[str, Any], where: str) -> int:
    if not isinstance(step, dict) or len(step) != 2 or "reward" not in step or not step.keys() & _ENDS:
        wanted = '{"reward": r, "token_end": n} or {"reward": r, "char_end": n}'
        raise ValueError(f"{where} is {shown(step, MAX_REASON_CHARACTERS)}, not {wanted}")
    (name,) = step.keys() & _ENDS
    column, unit = _ENDS[name]
    end, length = step[name], len(sample[column])
    if not isinstance(end, Integral) or isinstance(end, bool) or not 1 <= int(end) <= length:
        raise ValueError(
            f"{where}: {name}={shown(end)} is not one of 1..{length}: the completion has {length} {unit}"
        )
    ends = range(1, length + 1) if name == "token_end" else sample.get("completion_char_ends")
    if not ends:
        raise ValueError(
            f"{where}: {name}={end} cannot be placed: the sample has no completion_char_ends; use token_end"
        )
    return min(bisect_left(ends, end), len(ends) - 1)
