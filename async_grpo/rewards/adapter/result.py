"""What a reward may answer, and what becomes of it.

A reward is called with a sample (or, with `@batch`, a list of samples; see `kinds`), which holds every column of
the data row and

    completion              the generated text; a trailing end token may be there or not
    sample_text             input + completion
    completion_token_ids    list of ints
    completion_char_ends    for each token the characters of `completion` up to its end; in runs with process rewards
    truncated               whether generation ended at the length limit
    group_id                the same for all completions of one prompt

It answers one of

    1.0, 1, True                        the reward
    {"reward": 1.0, "length": 7}        with further numbers, logged per component; `score` is read as `reward`
    {"abstain": "why"}                  it cannot judge this sample
    (answer, query, explanation)        one of these, and two texts for the log: a judge's question and its reason

with finite numbers only. Anything else, an exception included, is a failure and no zero.

A process reward, declared by `@process_reward`, answers a dict with the steps (see `steps`); `reward` is then their
sum unless it is given.
"""

import traceback
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.rewards.adapter.step_rewards import KINDS, is_finite_number, refuse_steps, steps_of
from async_grpo.rewards.adapter.traits import is_process_reward

MAX_REASON_CHARACTERS = 500
_MEMBER = {"sample", "status", "extra", "steps", "reason"}  # what a group's member holds besides its reward


def answer_of(
    adapter: Callable[..., Any], sample: dict[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Call a plain function; whatever happens becomes a dict of `status`, `reward`, `extra`, `steps`, `reason`.

    >>> answer_of(lambda sample: {"reward": True, "length": 3}, {}, {})
    {'status': 'ok', 'reward': 1.0, 'extra': {'length': 3.0}, 'steps': [], 'reason': ''}
    >>> answer_of(lambda sample: None, {}, {})["reason"]
    'the adapter returned a NoneType, not a number or a dict with a `reward`'
    """
    try:
        # A copy: the steps are measured on the sample as it was, whatever the adapter writes into its own.
        return read_answer(adapter(dict(sample), **options), sample, is_process_reward(adapter))
    except BaseException as error:  # sys.exit() and time-outs of libraries would take the process down
        return failure(describe(error))


def read_answer(returned: Any, sample: Mapping[str, Any], process: bool = False) -> dict[str, Any]:
    """The same dict for what a reward returned.

    >>> read_answer(({"score": 0.5}, "Is it polite?", "Mostly."), {})
    {'status': 'ok', 'reward': 0.5, 'extra': {}, 'steps': [], 'reason': "Mostly. (asked: 'Is it polite?')"}
    """
    if isinstance(returned, tuple) and len(returned) == 3:
        returned, query, explanation = returned
        answer = read_answer(returned, sample, process)
        return answer | {"reason": _joined(answer["reason"], query, explanation)}
    if isinstance(returned, Real) and not process:
        returned = {"reward": returned}
    if not isinstance(returned, dict):
        wanted = (
            "a dict with step_rewards or token_rewards" if process else "a number or a dict with a `reward`"
        )
        return failure(f"the adapter returned a {type(returned).__name__}, not {wanted}")
    if (abstain := returned.get("abstain", False)) is not False:
        return _answer("abstained", reason=str(abstain))
    try:
        steps = steps_of(returned, sample) if process else refuse_steps(returned)
    except ValueError as error:
        return failure(str(error))
    numbers = {name: value for name, value in returned.items() if name not in (*KINDS, "abstain")}
    if "score" in numbers and "reward" not in numbers:
        numbers["reward"] = numbers.pop("score")
    if process:
        numbers.setdefault("reward", sum(reward for _, reward in steps))
    return _read_numbers(numbers, steps)


def read_change(returned: Any, answer: Mapping[str, Any]) -> dict[str, Any]:
    """The answer after `post_process_scores` returned this for it (see `decorators.post_process`).

    >>> failed = failure("no route to host")
    >>> read_change(None, failed)["reason"], read_change(0.5, failed)["reward"]
    ('no route to host', 0.5)
    """
    if isinstance(returned, dict):  # a member of the group as it came, with another reward, is as good
        returned = {name: value for name, value in returned.items() if name not in _MEMBER}
        if returned.get("reward", 0.0) is None:
            returned = None
    if returned is None:
        return dict(answer)
    changed = read_answer(returned, {})
    if changed["status"] != "ok":
        return changed
    return changed | {"extra": {**answer["extra"], **changed["extra"]}, "steps": answer["steps"]}


def failure(reason: str, status: str = "failed") -> dict[str, Any]:
    """The answer of a call that came to nothing."""
    return _answer(status, reason=reason)


def describe(error: BaseException) -> str:
    """Type and message, and the last line of the traceback; of a setting that is refused, the message and its cause's.

    >>> try:
    ...     {}["gold"]
    ... except KeyError as error:
    ...     describe(error).split(" at ")[0]
    "KeyError: 'gold'"
    """
    refused = isinstance(
        error, ConfigurationError
    )  # the line of ours that refuses would tell the user nothing
    raised = error.__cause__ if refused else error
    frames = traceback.extract_tb(raised.__traceback__) if raised is not None else []
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""
    kind = "" if refused else f"{type(error).__name__}: "
    return _cut(f"{kind}{_cut(str(error))}{where}", 2 * MAX_REASON_CHARACTERS)


def _cut(text: str, length: int = MAX_REASON_CHARACTERS) -> str:
    return text if len(text) <= length else text[:length] + " ..."


def _joined(reason: str, query: Any, explanation: Any) -> str:
    asked = f"(asked: {_cut(str(query), MAX_REASON_CHARACTERS // 2)!r})" if query else ""
    return " ".join(filter(None, [reason, _cut(str(explanation or "")), asked]))


def _read_numbers(numbers: dict[str, Any], steps: Sequence[tuple[int, float]]) -> dict[str, Any]:
    if "reward" not in numbers:
        return failure(f"the adapter's dict has no `reward`, only {sorted(map(str, numbers))}")
    wrong = [f"{name}={value!r}" for name, value in numbers.items() if not is_finite_number(value)]
    if wrong:
        return failure(f"the adapter returned {', '.join(wrong)}: only finite numbers are allowed")
    extra = {str(name): float(value) for name, value in numbers.items() if name != "reward"}
    return _answer("ok", float(numbers["reward"]), extra, steps)


def _answer(
    status: str,
    reward: float | None = None,
    extra: Mapping[str, float] | None = None,
    steps: Sequence[tuple[int, float]] = (),
    reason: str = "",
) -> dict[str, Any]:
    reason = _cut(reason, 2 * MAX_REASON_CHARACTERS)
    extra, steps = dict(extra or {}), [list(step) for step in steps]  # as JSON gives them back
    return {"status": status, "reward": reward, "extra": extra, "steps": steps, "reason": reason}
