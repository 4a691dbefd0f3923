"""Reward functions with the signature of TRL, as rewards of this library.

TRL's signature is `f(completions, prompts=..., completion_ids=..., **columns) -> [1.0, None, ...]`. All arguments are
passed by keyword, as lists with one entry for each completion. This library's signature is `f(sample) -> 1.0`.
"""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from async_grpo.rewards.adapter.decorators import function_of

Sample = dict[str, Any]
# TRL's arguments that are not columns of the data set
GENERATED = ("prompts", "completions", "completion_ids")
# Columns of data sets that TRL does not pass to reward functions
NO_ARGUMENTS = ("prompt", "completion", "completion_ids")
# Keys that every sample has in addition to the columns of its data set row
OF_EVERY_SAMPLE = ("input", "sample_text", "completion_token_ids", "truncated", "group_id")
# Attributes set by `decorators` that have the same meaning for both signatures
KEPT_MARKS = ("batching", "cacheable", "best_reward", "post_process_scores", "check_row")


def has_trl_signature(reward: Any) -> bool:
    """Return whether a reward has TRL's signature: it has the parameter `completions`, or only `**keywords`.

    >>> has_trl_signature(lambda completions, **columns: [0.0]), has_trl_signature(lambda sample: 0.0)
    (True, False)
    """
    parameters = _parameters(reward)
    kinds = {parameter.kind for parameter in parameters.values()}
    return "completions" in parameters or kinds == {inspect.Parameter.VAR_KEYWORD}


def unknown_arguments(reward: Any, columns: Collection[str]) -> list[str]:
    """Return those required arguments of a reward with TRL's signature for which there is no column."""
    sample_keys = {*GENERATED, *OF_EVERY_SAMPLE, *columns} - {"prompt", "completion"}
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [
        name
        for name, parameter in _parameters(reward).items()
        if parameter.default is parameter.empty and parameter.kind not in variable and name not in sample_keys
    ]


def trl_reward(function: Callable[..., Any]) -> Callable[..., Any]:
    """Convert a function with TRL's signature to a reward of this library.

    The function is called with lists of length one, because each sample is scored as soon as it is generated. To
    compare completions with each other, decorate the function (see `async_grpo.rewards.adapter.decorators`): `@batch`
    passes several waiting samples in one call, and `@post_process` shows all completions of one prompt together. If the
    function returns `None` for a sample, the sample gets no value from this reward, as in TRL.

    Completions are strings. If the column `prompt` is a list of messages, each completion is a list of one message.
    TRL's `trainer_state`, `log_extra` and `log_metric` are not available.

    >>> def brevity(completions, **columns):
    ...     return [-len(text) / 10 for text in completions]
    >>> trl_reward(brevity)({"prompt": "3+4?", "completion": "It is 7.", "input": "3+4?"})
    -0.8
    """
    takes_batches = hasattr(function, "batching")

    def answer(returned: Any, num_samples: int) -> Any:
        answers = _answers(returned, num_samples)
        return answers if takes_batches else answers[0]

    def as_list(samples: Any) -> list[Sample]:
        return samples if takes_batches else [samples]

    def reward(samples: Any) -> Any:
        listed = as_list(samples)
        return answer(function(**trl_arguments(function, listed)), len(listed))

    async def async_reward(samples: Any) -> Any:
        listed = as_list(samples)
        return answer(await function(**trl_arguments(function, listed)), len(listed))

    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    wrapper: Callable[..., Any] = async_reward if is_async else reward
    for mark in KEPT_MARKS:
        if hasattr(function, mark):
            setattr(wrapper, mark, getattr(function, mark))
    return wrapper


def trl_arguments(function: Callable[..., Any], samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """Return those of TRL's keyword arguments for these samples that the function accepts."""
    arguments: dict[str, list[Any]] = {
        name: [sample.get(name) for sample in samples]
        for name in samples[0]
        if name not in NO_ARGUMENTS and name not in GENERATED
    }
    arguments["prompts"] = [_prompt(sample) for sample in samples]
    arguments["completions"] = [_completion(sample) for sample in samples]
    arguments["completion_ids"] = [sample.get("completion_token_ids", []) for sample in samples]
    parameters = _parameters(function)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    return {name: values for name, values in arguments.items() if name in parameters}


def _parameters(reward: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a reward's function. For a method of a class, `self` is left out."""
    function = function_of(reward)
    parameters = dict(inspect.signature(function).parameters)
    if isinstance(reward, type):
        parameters.pop(next(iter(parameters)), None)
    return parameters


def _prompt(sample: Sample) -> Any:
    """Return the column `prompt` if it is a text or a list of messages, or else the prompt's text from `input`.

    The column `messages` is ignored, because a row may contain it in addition to the text or tokens that are its
    prompt. A function that expects text would find nothing in messages and return 0.
    """
    prompt = sample.get("prompt")
    return prompt if isinstance(prompt, str | list) else sample.get("input", "")


def _completion(sample: Sample) -> Any:
    text = sample["completion"]
    if isinstance(_prompt(sample), list):
        return [{"role": "assistant", "content": text}]
    return text


def _answers(returned: Any, num_samples: int) -> list[Any]:
    """Convert the function's return value to a list with this library's answer for each sample."""
    if hasattr(returned, "tolist"):  # an array, or a tensor
        returned = returned.tolist()
    if not isinstance(returned, list | tuple) or len(returned) != num_samples:
        count = f"{len(returned)} entries" if isinstance(returned, list | tuple) else "none"
        raise ValueError(
            f"a reward with TRL's signature must return a list with a number for each of the {num_samples} completions, "
            f"not a {type(returned).__name__} ({count})"
        )
    return [{"abstain": "the reward is None"} if value is None else value for value in returned]
