"""How an adapter is called, and what its answer must look like.

An adapter is `adapter(sample, **options) -> dict`. The sample holds every column of the data row and

    completion              the generated text; a trailing end token may be there or not
    sample_text             input + completion
    completion_token_ids    list of ints
    completion_char_ends    for each token the characters of `completion` up to its end; in runs with process rewards
    truncated               whether generation ended at the length limit
    group_id                the same for all completions of one prompt

The answer holds `reward` and any further numbers, logged per component; all of them finite. An adapter that
cannot judge a sample answers {"abstain": "why"}. Anything else, an exception included, is a failure and no
zero.

A process reward, declared by `@process_reward`, also answers the steps (see `steps`); `reward` is then their sum
unless it is given.
"""

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.rewards.steps import KINDS, is_finite_number, refuse_steps, steps_of

MAX_REASON_CHARACTERS = 500

Adapter = Callable[..., Any]


def is_process(adapter: Adapter) -> bool:
    """Whether the adapter is declared (`@process_reward`) to reward single steps."""
    return getattr(adapter, "process", False) is True


def accepted_options(adapter: Adapter, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that the adapter names as keywords; all of them if it takes `**options`.

    >>> accepted_options(lambda sample, weight=0.1: {}, {"weight": 1.0, "url": "x"})
    {'weight': 1.0}
    """
    parameters = list(inspect.signature(adapter).parameters.values())[1:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(options)
    named = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_POSITIONAL}
    return {name: value for name, value in options.items() if name in named}


def check_options(adapters: Mapping[str, Adapter], options: Mapping[str, Any]) -> None:
    """Raise ConfigurationError for an option that none of the adapters names: nobody would miss it."""
    known = set().union(*(accepted_options(adapter, options) for adapter in adapters.values()))
    if unknown := sorted(set(options) - known):
        raise ConfigurationError(
            f"no reward function of {', '.join(adapters)} takes the option {', '.join(unknown)}: "
            f"name it as a keyword of the function, or leave it out"
        )


def answer_of(adapter: Adapter, sample: dict[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Call the adapter; whatever happens becomes a dict of `status`, `reward`, `extra`, `steps` and `reason`.

    >>> answer_of(lambda sample: {"reward": True, "length": 3}, {}, {})
    {'status': 'ok', 'reward': 1.0, 'extra': {'length': 3.0}, 'steps': [], 'reason': ''}
    >>> answer_of(lambda sample: 1.0, {}, {})["reason"]
    'the adapter returned a float, not a dict with a `reward`'
    """
    try:
        # A copy: the steps are measured on the sample as it was, whatever the adapter writes into its own.
        return _checked(adapter(dict(sample), **options), sample, is_process(adapter))
    except BaseException as error:  # sys.exit() and time-outs of libraries would take the process down
        return failure(describe(error))


def failure(reason: str, status: str = "failed") -> dict[str, Any]:
    """The answer of a call that came to nothing."""
    return _answer(status, reason=reason)


def describe(error: BaseException) -> str:
    """Type and message, and the last line of the traceback.

    >>> try:
    ...     {}["gold"]
    ... except KeyError as error:
    ...     describe(error).split(" at ")[0]
    "KeyError: 'gold'"
    """
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""
    return _cut(f"{type(error).__name__}: {_cut(str(error))}{where}", 2 * MAX_REASON_CHARACTERS)


def _cut(text: str, length: int = MAX_REASON_CHARACTERS) -> str:
    return text if len(text) <= length else text[:length] + " ..."


def _checked(answer: Any, sample: dict[str, Any], process: bool) -> dict[str, Any]:
    if not isinstance(answer, dict):
        return failure(f"the adapter returned a {type(answer).__name__}, not a dict with a `reward`")
    if "abstain" in answer:
        return _answer("abstained", reason=str(answer["abstain"]))
    try:
        steps = steps_of(answer, sample) if process else refuse_steps(answer)
    except ValueError as error:
        return failure(str(error))
    numbers = {name: value for name, value in answer.items() if name not in KINDS}
    if process:
        numbers.setdefault("reward", sum(reward for _, reward in steps))
    if "reward" not in numbers:
        return failure(f"the adapter's dict has no `reward`, only {sorted(map(str, answer))}")
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
