"""Convert the value that a reward returned for a sample to an answer (see docs/rewards.md).

A reward returns one of

    1.0, 1, True                        the reward
    {"reward": 1.0, "length": 7}        the reward and further numbers to log. Without `reward`, `score` is the reward;
                                        with it, `score` is a further number
    {"abstain": "why"}                  no reward for this sample, and the reason
    (answer, query, explanation)        one of the answers above, with a judge's question and explanation for the log

A number may also come from numpy, torch or `decimal`: for example, numpy's bool_ or a tensor without dimensions.

All numbers must be finite, and a reward must lie between -1e6 and 1e6 (`MAX_REWARD`). Anything else, including an
exception, is a failure and not a reward of 0. A process reward returns a dict with exactly one of

    step_rewards    a list of {"reward": r, "token_end": n} or {"reward": r, "char_end": n}, in any order
    token_rewards   a list with one number for each token of the completion

Ends are exclusive, as in a slice. If the dict has no `reward`, the reward is the sum of the steps.
"""

import math
import sys
import traceback
from bisect import bisect_left
from collections.abc import Mapping
from decimal import Decimal
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.metrics.free_numbers import MAX_EXTRA
from async_grpo.options.redaction import redacted

# A larger reward is implausible: a sum that overflowed, a number in another unit, or an attack. Up to this size,
# float32 can distinguish rewards that differ by 0.1, and the squares and sums of rewards cannot overflow
MAX_REWARD = 1e6
PLAUSIBLE_REWARD = f"a reward lies between -{MAX_REWARD:g} and {MAX_REWARD:g}"
KINDS = ("step_rewards", "token_rewards")
# What to do about a wrong value, by the name of its type
_ADVICE = {
    "NoneType": ': return a number on every path, or {"abstain": "why"} for no reward',
    "str": ": convert it with float()",
    "list": ": return one number for the one sample (wrap a function with TRL's signature with `trl_reward` of "
    "async_grpo.rewards.adapter.trl_signature)",
    "ndarray": ": return one element of it",
    "Tensor": ": return one element of it",
    "tuple": ": the only tuple allowed is (answer, query, explanation)",
    "generator": ": use `return` instead of `yield`",
}
_ENDS = {"token_end": ("completion_token_ids", "tokens"), "char_end": ("completion", "characters")}
MAX_REASON_CHARACTERS = 500
MAX_QUOTED_NUMBER = 40  # a number is quoted in a reason with at most this many characters
MAX_SHOWN_CHARACTERS = 60  # a wrong value is quoted in a reason with at most this many characters
# Fields of a group's member in `post_process_scores`, besides `reward`
_MEMBER_FIELDS = {
    "sample",
    "status",
    "extra",
    "steps",
    "reason",
}


def read_answer(returned: Any, sample: Mapping[str, Any], process: bool = False) -> dict[str, Any]:
    """Convert the value that a reward returned to an answer.

    Args:
        returned: The value that the reward returned.
        sample: The scored sample, in which the steps of a process reward are located.
        process: Whether the reward is a process reward.

    Returns:
        A JSON-compatible dict of `status`, `reward`, `extra` (further numbers by name), `steps` (for each step, the
        index of its last token and its reward) and `reason`.

    >>> read_answer(({"score": 0.5}, "Is it polite?", "Mostly."), {})
    {'status': 'ok', 'reward': 0.5, 'extra': {}, 'steps': [], 'reason': "Mostly. (asked: 'Is it polite?')"}
    """
    if isinstance(returned, tuple) and len(returned) == 3:
        returned, query, explanation = returned
        answer = read_answer(returned, sample, process)
        reason_parts = [answer["reason"], excerpt(str(explanation or ""))]
        if query:
            reason_parts.append(f"(asked: {excerpt(str(query), MAX_REASON_CHARACTERS // 2)!r})")
        return answer | {"reason": " ".join(part for part in reason_parts if part)}
    returned = python_number(returned)
    if isinstance(returned, Real) and not process:
        returned = {"reward": returned}
    if not isinstance(returned, dict):
        expected = f"a dict with {' or '.join(KINDS)}" if process else "a number or a dict with a `reward`"
        kind = type(returned).__name__
        advice = "" if process else _ADVICE.get(kind, "")
        return failure(f"the adapter returned a {kind}, not {expected}{advice}")
    abstain_reason = returned.get("abstain", False)
    if abstain_reason is not False:
        return failure(str(abstain_reason), "abstained")
    try:
        steps = _steps_of(returned, sample, process)
        sum_of_steps = sum(reward for _, reward in steps) if process else None
        numbers = _numbers_of(returned, sum_of_steps)
    except ValueError as error:
        return failure(str(error))
    return {
        "status": "ok",
        "reward": numbers.pop("reward"),
        "extra": numbers,
        "steps": [list(step) for step in steps],  # lists, because JSON has no tuples
        "reason": "",
    }


def python_number(value: Any) -> Any:
    """Convert a number of `decimal`, numpy or a similar library to a number of Python. Return other values unchanged."""
    if isinstance(value, Decimal):
        return float(value)
    # Recognize these numbers by their attributes, because importing numpy or torch would slow down every reward's start
    is_scalar = getattr(value, "shape", None) == () and callable(getattr(value, "item", None))
    return value.item() if is_scalar else value


def read_change(returned: Any, answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer after the change that `post_process_scores` returned for it (see `decorators.post_process`)."""
    if isinstance(returned, dict):
        # The function may return the dict that it received, with a changed reward
        returned = {name: value for name, value in returned.items() if name not in _MEMBER_FIELDS}
    has_no_reward = isinstance(returned, dict) and returned.get("reward", 0.0) is None
    if returned is None or has_no_reward:
        return dict(answer)
    changed = read_answer(returned, {})
    if changed["status"] == "ok":
        changed |= {"extra": answer["extra"] | changed["extra"], "steps": answer["steps"]}
    return changed


def failure(reason: str, status: str = "failed") -> dict[str, Any]:
    """Return the answer for a call that gave no reward."""
    reason = excerpt(reason, 2 * MAX_REASON_CHARACTERS)
    return {"status": status, "reward": None, "extra": {}, "steps": [], "reason": reason}


def describe(error: BaseException) -> str:
    """Return the error's type, its message and the line that raised it.

    For a ConfigurationError, return only its message and the line that raised its cause. The type, and the line of this
    package that refuses a setting, would not help the user.
    """
    is_refusal = isinstance(error, ConfigurationError)
    kind = "" if is_refusal else type(error).__name__
    text = ": ".join(part for part in (kind, excerpt(_message_of(error))) if part)
    place = ""
    origin = error.__cause__ if is_refusal else error
    frames = traceback.extract_tb(origin.__traceback__) if origin is not None else []
    if frames:
        frame = frames[-1]
        place = f" at {Path(frame.filename).name}:{frame.lineno}: {frame.line}"
    return excerpt(f"{text}{place}", 2 * MAX_REASON_CHARACTERS)


def _message_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failure_of_message:  # a class of the user may define any `__str__`
        return f"its message cannot be read ({type(failure_of_message).__name__})"


def is_finite_number(value: Any) -> bool:
    """Return whether the value is a real number that a float can represent, neither NaN nor infinite."""
    size: Any = abs(value) if isinstance(value, Real) else math.inf
    return bool(size <= sys.float_info.max)


def is_plausible(reward: Any) -> bool:
    """Return whether a number may be a reward: finite, and with an absolute value of at most `MAX_REWARD`."""
    return is_finite_number(reward) and abs(reward) <= MAX_REWARD


def finite(text: str) -> float:
    """Convert the text of a number in JSON to a float.

    Raises:
        ValueError: The number is NaN or infinite, too large for a float, or so small that a float would be 0.

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
    """Return the pairs of a JSON object as a dict. Pass this function as `object_pairs_hook` to `json.loads`.

    Raises:
        ValueError: A name appears twice, so that the value is ambiguous.
    """
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a name appears twice in an object")
    return value


def excerpt(text: str, length: int = MAX_REASON_CHARACTERS) -> str:
    """Return the beginning of a text, without secrets and without characters that a file cannot contain."""
    # Remove secrets before truncating the text, because half of a secret would not be recognized
    text = redacted(text)
    if len(text) > length:
        text = text[:length] + " ..."
    # JSON may contain a lone surrogate, which cannot be encoded in UTF-8
    return text.encode(errors="backslashreplace").decode()


def shown(value: Any, length: int = MAX_SHOWN_CHARACTERS) -> str:
    """Return the beginning of a value's `repr` for an error message, without secrets."""
    return excerpt(repr(value), length)


def _numbers_of(answer: Mapping[str, Any], default: float | None) -> dict[str, float]:
    """Return the numbers of an answer, including `reward`, by name. Secrets in names are replaced.

    Args:
        answer: The dict that a reward returned.
        default: The reward to use if the answer contains none. None makes a missing reward an error.

    Raises:
        ValueError: The answer contains something other than numbers of a reasonable size, or no reward.
    """
    numbers = {}
    for name, value in answer.items():
        if name not in KINDS and name != "abstain":
            numbers[redacted(str(name))] = python_number(value)
    if "score" in numbers and "reward" not in numbers:
        numbers["reward"] = numbers.pop("score")
    if default is not None:
        numbers.setdefault("reward", default)
    if "reward" not in numbers:
        raise ValueError(f"the adapter's dict has no `reward`, only {sorted(numbers)}")
    wrong = {name: value for name, value in numbers.items() if not is_finite_number(value)}
    if wrong:
        values = ", ".join(f"{name}={shown(value)}" for name, value in wrong.items())
        has_text = any(isinstance(value, str) for name, value in wrong.items() if name != "reward")
        advice = "; return (answer, query, explanation) to log a text" if has_text else ""
        raise ValueError(f"the adapter returned {values}: only finite numbers are allowed{advice}")
    _refuse_implausible("the adapter returned reward", numbers["reward"])
    huge = [f"{name}={float(value):g}" for name, value in numbers.items() if abs(value) > MAX_EXTRA]
    if huge:
        raise ValueError(f"the adapter returned {', '.join(huge)}: numbers up to {MAX_EXTRA:g} are allowed")
    return {name: float(value) for name, value in numbers.items()}


def _refuse_implausible(place: str, reward: Any) -> None:
    if not is_plausible(reward):
        raise ValueError(f"{place}={shown(reward)}: {PLAUSIBLE_REWARD}")


def _steps_of(answer: Mapping[str, Any], sample: Mapping[str, Any], process: bool) -> list[tuple[int, float]]:
    """Return for each step the index of its last token and its reward, in the order of tokens.

    The rewards of steps that end in the same token are added up. A step that ends in text after the last token is
    assigned to the last token.

    Raises:
        ValueError: A process reward did not return exactly one well-formed list of rewards, or a reward that is not a
            process reward returned such a list.
    """
    kinds = [name for name in KINDS if name in answer]
    if kinds and not process:
        raise ValueError(
            f"the adapter returned {' and '.join(kinds)}, but it is not declared to: decorate it with "
            "@process_reward (of async_grpo.rewards.adapter.decorators)"
        )
    if not process:
        return []
    if len(kinds) != 1:
        returned = "both" if kinds else f"only {sorted(map(str, answer))}"
        raise ValueError(
            f"a @process_reward must return either step_rewards or token_rewards, not {returned}"
        )
    (kind,) = kinds
    values = answer[kind]
    if not isinstance(values, list):
        raise ValueError(f"{kind} is a {type(values).__name__}, not a list")
    num_tokens = len(sample["completion_token_ids"])
    if kind == "token_rewards" and len(values) != num_tokens:
        raise ValueError(f"{len(values)} token_rewards for {num_tokens} tokens: there must be one for each")

    rewards: dict[int, float] = {}
    for index, value in enumerate(values):
        place = f"{kind}[{index}]"
        if kind == "step_rewards":
            token = _last_token(value, sample, place)
            reward = value["reward"]
            place = f"{place}: reward"
        else:
            token = index
            reward = value
        reward = python_number(reward)
        if not is_finite_number(reward):
            raise ValueError(f"{place}={shown(reward)}: only finite numbers are allowed")
        _refuse_implausible(place, reward)
        rewards[token] = rewards.get(token, 0.0) + float(reward)
        if not is_plausible(rewards[token]):
            raise ValueError(
                f"the steps that end in token {token} add up to {rewards[token]:g}: {PLAUSIBLE_REWARD}"
            )
    return sorted(rewards.items())


def _last_token(step: Any, sample: Mapping[str, Any], place: str) -> int:
    """Return the index of the last token of a step. The step gives its end in tokens or in characters.

    Raises:
        ValueError: The step is malformed, or its end lies outside the completion.
    """
    if not isinstance(step, dict) or len(step) != 2 or "reward" not in step or not step.keys() & _ENDS:
        expected = '{"reward": r, "token_end": n} or {"reward": r, "char_end": n}'
        raise ValueError(f"{place} is {shown(step, MAX_REASON_CHARACTERS)}, not {expected}")
    (name,) = step.keys() & _ENDS
    column, unit = _ENDS[name]
    end = step[name]
    length = len(sample[column])
    is_whole = isinstance(end, Integral) and not isinstance(end, bool)
    if not is_whole or not 1 <= int(end) <= length:
        raise ValueError(
            f"{place}: {name}={shown(end)} is not one of 1..{length}: the completion has {length} {unit}"
        )
    ends: Any = range(1, length + 1)
    if name == "char_end":
        ends = sample.get("completion_char_ends")
    if not ends:
        raise ValueError(
            f"{place}: {name}={end} cannot be placed: the sample has no completion_char_ends; use token_end"
        )
    return min(bisect_left(ends, end), len(ends) - 1)
