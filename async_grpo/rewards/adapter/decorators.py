"""Decorators for reward functions and classes, and the traits of a reward that result from them.

The section "Your first reward" in docs/rewards.md describes the kinds of rewards. A judge is an object
with `endpoint` and `score`.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from async_grpo.errors import ConfigurationError

ASYNC_CAPACITY = 64  # maximum number of samples that the process of an async reward serves at a time
JUDGE_CAPACITY = 256  # maximum number of samples in flight for a judge; its limits may allow fewer requests

Reward = TypeVar("Reward", bound=Callable[..., Any])


def _declare(reward: Reward, name: str, value: Any) -> Reward:
    setattr(reward, name, value)
    return reward


def batch(max_samples: int = 32, max_wait_s: float = 0.01) -> Callable[[Reward], Reward]:
    """Decorate a reward that takes a list of samples and returns a list with one answer for each.

    If the call raises an error or its process dies, each sample is scored again alone. If the list has another length,
    all samples fail. If the call takes too long, all samples time out.

    Args:
        max_samples: Maximum number of samples in one call.
        max_wait_s: Seconds that the first sample of a call waits for more samples.

    Raises:
        ConfigurationError: There is less than one sample per call, or the wait is negative.
    """
    if max_samples < 1 or not max_wait_s >= 0:
        raise ConfigurationError(
            f"@batch needs max_samples >= 1 and max_wait_s >= 0, not {max_samples}, {max_wait_s}"
        )
    return lambda reward: _declare(reward, "batching", (max_samples, max_wait_s))


def cacheable(reward: Reward) -> Reward:
    """Decorate a costly, deterministic reward, so that the verdict cache may keep its answers.

    Judges do not need this decorator.
    """
    return _declare(reward, "cacheable", True)


def post_process(function: Callable[[list[dict[str, Any]]], list[Any]]) -> Callable[[Reward], Reward]:
    """Decorate a reward with a function that sees all answers to one prompt together, and may change them.

    A class can define a method `post_process_scores` instead. The function may run in any worker of the reward. If the
    function fails, all answers to the prompt count as failed.

    Args:
        function: Receives a list of dicts, one for each completion of the prompt, with the keys `sample`, `status` (ok,
            failed, timed_out or abstained), `reward` (None unless the status is ok), `extra` (further numbers), `steps`
            and `reason`. It returns a list of the same length. Each entry is a reward, a dict of a `reward` and further
            numbers, {"abstain": "why"}, or None to leave the answer unchanged.
    """

    def mark(reward: Reward) -> Reward:
        # In a class, a plain function would become a method and get `self` as its first argument
        hook = staticmethod(function) if isinstance(reward, type) else function
        return _declare(reward, "post_process_scores", hook)

    return mark


def warmed_by(example: dict[str, Any]) -> Callable[[Reward], Reward]:
    """Decorate a reward, so that its process scores `example` at the start and no real sample waits for imports."""
    return lambda reward: _declare(reward, "warm_up", lambda: reward(dict(example)))


def rows_checked_by(check: Callable[..., None]) -> Callable[[Reward], Reward]:
    """Decorate a reward with a function that raises an exception for a row that the reward cannot score.

    The rows are checked before a run starts, and the run is refused with the file and line of a wrong row. A class can
    define a static method `check_row` instead. The function must be fast: once all checks together have taken 2 s, the
    remaining rows are not checked.

    Args:
        check: Receives a row, and each option of the reward for which it has a parameter.
    """

    def mark(reward: Reward) -> Reward:
        # In a class, a plain function would become a method and get `self` as its first argument
        return _declare(reward, "check_row", staticmethod(check) if isinstance(reward, type) else check)

    return mark


def process_reward(reward: Reward) -> Reward:
    """Decorate a reward that scores single steps and returns `step_rewards` or `token_rewards` (see `result`)."""
    return _declare(reward, "process", True)


def best_reward(best: float | Callable[..., float]) -> Callable[[Reward], Reward]:
    """Decorate a reward whose highest value is not 1.

    If a reward gives every sample the same value and that value is lower than the highest, an alarm is raised.

    Args:
        best: The highest value, or a function that takes the reward's options and returns the highest value.
    """
    return lambda reward: _declare(reward, "best_reward", best)


@dataclass(frozen=True)
class AdapterTraits:
    """Properties of a reward that its workers depend on."""

    capacity: int = 1  # maximum number of samples that a worker serves at a time
    is_async: bool = False
    is_batch: bool = False
    is_process_reward: bool = False
    is_judge: bool = False
    has_post_process: bool = False
    max_wait_s: float = 0.0  # time that the first sample of a batch waits for more samples
    # Whether a cancelled call may continue until its time limit. Otherwise, it is stopped at once
    finishes: bool = False


def traits_of(adapter: Any) -> AdapterTraits:
    """Return the traits of a registered object.

    Raises:
        ConfigurationError: The object is not a judge and cannot be called.
    """
    has_judge_methods = is_judge(adapter)
    if has_judge_methods:
        is_async = True
        capacity = JUDGE_CAPACITY
    else:
        function = function_of(adapter)
        is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            type(function).__call__
        )
        capacity = ASYNC_CAPACITY if is_async else 1
    max_wait_s = 0.0
    batching: Any = getattr(adapter, "batching", None)
    is_batch = isinstance(batching, tuple)
    if is_batch:
        capacity, max_wait_s = batching
    return AdapterTraits(
        capacity,
        is_async=is_async,
        is_batch=is_batch,
        is_process_reward=getattr(adapter, "process", False) is True,
        is_judge=has_judge_methods,
        has_post_process=callable(getattr(adapter, "post_process_scores", None)),
        max_wait_s=max_wait_s,
    )


def best_reward_of(adapter: Any, options: Mapping[str, Any]) -> float:
    """Return the highest reward of the adapter with these options: the one declared by `@best_reward`, or else 1."""
    best = getattr(adapter, "best_reward", 1.0)
    if callable(best):
        best = best(**accepted_options(best, options, num_given=0))
    return float(best)


def is_judge(adapter: Any) -> bool:
    """Return whether a registered object is a judge.

    Raises:
        ConfigurationError: The object is the class of a judge instead of a judge.
    """
    if not all(callable(getattr(adapter, name, None)) for name in ("endpoint", "score")):
        return False
    if isinstance(adapter, type):
        raise ConfigurationError(f"register a judge itself, {adapter.__name__}(...), not its class")
    return True


def function_of(adapter: Any) -> Callable[..., Any]:
    """Return the function that scores samples: the adapter itself, or the `__call__` or `compute_score` of its class.

    Raises:
        ConfigurationError: The adapter has no such function.
    """
    if callable(adapter) and not isinstance(adapter, type):
        return adapter
    owner = adapter if isinstance(adapter, type) else type(adapter)
    for name in ("__call__", "compute_score"):
        # Search the base classes, because `getattr` on a class would find the `__call__` that creates its objects
        if any(name in vars(base) for base in owner.__mro__):
            return getattr(adapter, name)
    title = getattr(adapter, "__name__", repr(adapter))
    raise ConfigurationError(f"{title} is no reward: give a function, a class with __call__ or compute_score")


def accepted_options(
    function: Callable[..., Any], options: Mapping[str, Any], num_given: int = 1
) -> dict[str, Any]:
    """Return the options that are parameters of the function. If it takes `**options`, return all of them.

    Args:
        function: The function that is called with options.
        options: Options by name.
        num_given: Number of parameters at the beginning that are not options, such as the sample.
    """
    parameters = list(inspect.signature(function).parameters.values())[num_given:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(options)
    names = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_POSITIONAL}
    return {name: value for name, value in options.items() if name in names}


def accepted_by_any(adapters: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that at least one of the adapters has as a parameter."""
    accepted: dict[str, Any] = {}
    for adapter in adapters.values():
        if is_judge(adapter):
            continue
        if isinstance(adapter, type):
            # The method's first parameters are `self` and the sample
            accepted |= accepted_options(function_of(adapter), options, num_given=2)
            accepted |= accepted_options(adapter, options, num_given=0)
        else:
            accepted |= accepted_options(function_of(adapter), options, num_given=1)
    return accepted


def check_options(adapters: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raise ConfigurationError for an option that no adapter has as a parameter, because it would have no effect."""
    unknown = sorted(set(options) - accepted_by_any(adapters, options).keys())
    if unknown:
        raise ConfigurationError(
            f"no reward function of {', '.join(adapters)} takes the option {', '.join(unknown)}: "
            f"add a parameter of this name to the function, or leave the option out"
        )
