"""What a reward declares, by decorators on a function or a class alike, and the traits that are read of it.

The kinds of rewards stand in docs/rewards.md, "Your first reward". A judge is an object with `endpoint` and `score`.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from async_grpo.errors import ConfigurationError

ASYNC_CAPACITY = 64  # samples in flight in the process of one async reward
JUDGE_CAPACITY = 256  # of one judge: what it may really do at a time is in its limits

Reward = TypeVar("Reward", bound=Callable[..., Any])


def _declare(reward: Reward, name: str, value: Any) -> Reward:
    setattr(reward, name, value)
    return reward


def batch(max_samples: int = 32, max_wait_s: float = 0.01) -> Callable[[Reward], Reward]:
    """Decorator: the reward is called with a list of samples, and returns a list with one answer for each. A call takes at
    most `max_samples`; the first of them waits `max_wait_s` for the others.

    Where the call raises or its process dies, each sample is tried alone. A list of another length is a failure of all,
    a call that takes too long a time-out of all.
    Raises ConfigurationError: fewer than one sample, or a negative wait.
    """
    if max_samples < 1 or not max_wait_s >= 0:
        raise ConfigurationError(
            f"@batch needs max_samples >= 1 and max_wait_s >= 0, not {max_samples}, {max_wait_s}"
        )
    return lambda reward: _declare(reward, "batching", (max_samples, max_wait_s))


def cacheable(reward: Reward) -> Reward:
    """Decorator: the verdict cache may keep the answers of this costly reward, which says the same about the same sample
    each time. (Judges need no such mark.)"""
    return _declare(reward, "cacheable", True)


def post_process(function: Callable[[list[dict[str, Any]]], list[Any]]) -> Callable[[Reward], Reward]:
    """Decorator: `function` sees all answers to one prompt together, and may change them. A class has a method
    `post_process_scores` instead.

    It is called with a list of dicts, one for each completion of the prompt: its `sample`, `status` (ok, failed, timed_out
    or abstained), `reward` (None unless the status is ok), further numbers as `extra`, `steps` and `reason`. It returns a
    list of the same length. Each entry is a reward, a dict of a `reward` and further numbers, {"abstain": "why"}, or
    None, which leaves the answer as it is. It may run on any worker; if it fails, all the answers have failed.
    """

    def mark(reward: Reward) -> Reward:
        hook = staticmethod(function) if isinstance(reward, type) else function  # no method: it has no `self`
        return _declare(reward, "post_process_scores", hook)

    return mark


def warmed_by(example: dict[str, Any]) -> Callable[[Reward], Reward]:
    """Decorator: score `example` when the reward's process starts, so that no real sample pays for imports."""
    return lambda reward: _declare(reward, "warm_up", lambda: reward(dict(example)))


def process_reward(reward: Reward) -> Reward:
    """Decorator: the reward pays for single steps; it returns `step_rewards` or `token_rewards` (see `result`)."""
    return _declare(reward, "process", True)


def best_reward(best: float | Callable[..., float]) -> Callable[[Reward], Reward]:
    """Decorator: the highest reward there is, if that is not 1: a number, or a function of the reward's options. To give
    every sample the same, and less than that, raises an alarm."""
    return lambda reward: _declare(reward, "best_reward", best)


@dataclass(frozen=True)
class AdapterTraits:
    """What a worker of the reward can do. `capacity`: samples that it takes at a time."""

    capacity: int = 1
    is_async: bool = False
    is_batch: bool = False
    is_process_reward: bool = False
    is_judge: bool = False
    has_post_process: bool = False
    max_wait_s: float = 0.0  # of a batch: how long its first sample waits for the others
    finishes: bool = False  # what is served has its time if its caller goes; else that costs the process


def traits_of(adapter: Any) -> AdapterTraits:
    """Raises ConfigurationError if it cannot be called."""
    judges = is_judge(adapter)
    function = None if judges else function_of(adapter)
    is_async = judges or any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
    capacity, max_wait_s = JUDGE_CAPACITY if judges else ASYNC_CAPACITY if is_async else 1, 0.0
    batching = getattr(adapter, "batching", None)
    if is_batch := isinstance(batching, tuple):
        capacity, max_wait_s = batching
    return AdapterTraits(
        capacity,
        is_async=is_async,
        is_batch=is_batch,
        is_process_reward=getattr(adapter, "process", False) is True,
        is_judge=judges,
        has_post_process=callable(getattr(adapter, "post_process_scores", None)),
        max_wait_s=max_wait_s,
    )


def best_reward_of(adapter: Any, options: Mapping[str, Any]) -> float:
    """The highest reward that it gives with these options: what it declares (`@best_reward`), else 1."""
    best = getattr(adapter, "best_reward", 1.0)
    return float(best(**accepted_options(best, options, num_given=0)) if callable(best) else best)


def is_judge(adapter: Any) -> bool:
    """Raises ConfigurationError for the class of one."""
    if not all(callable(getattr(adapter, name, None)) for name in ("endpoint", "score")):
        return False
    if isinstance(adapter, type):
        raise ConfigurationError(f"register a judge itself, {adapter.__name__}(...), not its class")
    return True


def function_of(adapter: Any) -> Callable[..., Any]:
    """The adapter itself, or the `__call__` or `compute_score` of its class. Raises ConfigurationError without one."""
    if callable(adapter) and not isinstance(adapter, type):
        return adapter
    owner = adapter if isinstance(adapter, type) else type(adapter)
    for name in ("__call__", "compute_score"):
        if any(name in vars(base) for base in owner.__mro__):  # getattr would find how classes are called
            return getattr(adapter, name)
    title = getattr(adapter, "__name__", repr(adapter))
    raise ConfigurationError(f"{title} is no reward: give a function, a class with __call__ or compute_score")


def accepted_options(
    function: Callable[..., Any], options: Mapping[str, Any], num_given: int = 1
) -> dict[str, Any]:
    """The options that the function names as keywords, after `num_given` parameters; all if it takes `**options`."""
    parameters = list(inspect.signature(function).parameters.values())[num_given:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(options)
    named = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_POSITIONAL}
    return {name: value for name, value in options.items() if name in named}


def check_options(adapters: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raise ConfigurationError for an option that none of the adapters names: nobody would miss it."""
    known: set[str] = set()
    for adapter in [adapter for adapter in adapters.values() if not is_judge(adapter)]:
        is_class = isinstance(adapter, type)  # then `self` comes before the sample
        known |= accepted_options(function_of(adapter), options, 1 + is_class).keys()
        known |= accepted_options(adapter, options, num_given=0).keys() if is_class else set()
    if unknown := sorted(set(options) - known):
        raise ConfigurationError(
            f"no reward function of {', '.join(adapters)} takes the option {', '.join(unknown)}: "
            f"name it as a keyword of the function, or leave it out"
        )
