"""What a reward declares, by decorators on a function or a class alike, and the traits that are read of it.

function        def shout(sample, weight=1.0)
class           built once per process with the options that its `__init__` names; called through `__call__` or
                `compute_score`; its `close`, if there is one, at the end
async           `async def`, or a class with an `async def __call__`: many samples in flight in one process
batch           decorated with `@batch`: a list of samples in, a list of answers out
judge           an object with `endpoint` and `score`: no process of its own, see `async_grpo.rewards.judges`
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from async_grpo.errors import ConfigurationError

ASYNC_CAPACITY = 64  # samples in flight in the process of one async reward
JUDGE_CAPACITY = 256  # of one judge: what it may really do at a time is in its limits

Reward = TypeVar("Reward", bound=Callable[..., Any])
PostProcess = Callable[[list[dict[str, Any]]], list[Any]]


class Batching(NamedTuple):
    """How many samples one call takes at most, and how long the first of them waits for the others."""

    max_samples: int = 32
    max_wait_s: float = 0.01


def _declare(reward: Reward, name: str, value: Any) -> Reward:
    setattr(reward, name, value)
    return reward


def batch(max_samples: int = 32, max_wait_s: float = 0.01) -> Callable[[Reward], Reward]:
    """Decorator: the reward is called with a list of samples, and returns a list with one answer for each.

    Where the call raises or its process dies, each sample is tried alone, so that one bad row costs only itself. A
    list of another length is a failure of all; and a call that takes too long is a time-out of all.

    Raises:
        ConfigurationError: fewer than one sample, or a negative wait.
    """
    if max_samples < 1 or not max_wait_s >= 0:
        raise ConfigurationError(
            f"@batch needs max_samples >= 1 and max_wait_s >= 0, not {max_samples}, {max_wait_s}"
        )
    return lambda reward: _declare(reward, "batching", Batching(max_samples, max_wait_s))


def cacheable(reward: Reward) -> Reward:
    """Decorator: the verdict cache may keep the reward's answers. To be given to one that is costly, and pure: it says
    the same about the same sample each time, whatever it has seen before. (Judges need no such mark.)
    """
    return _declare(reward, "cacheable", True)


def post_process(function: PostProcess) -> Callable[[Reward], Reward]:
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
    """Decorator: the highest reward there is, if that is not 1: a number, or a function of the reward's options.

    A reward that gives every sample less than that, and all the same, raises an alarm.
    """
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


def traits_of(adapter: Any) -> AdapterTraits:
    """The traits of a registered object. Raises ConfigurationError if it cannot be called."""
    judges = is_judge(adapter)
    function = None if judges else function_of(adapter)
    is_async = judges or any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
    capacity, max_wait_s = JUDGE_CAPACITY if judges else ASYNC_CAPACITY if is_async else 1, 0.0
    batching = getattr(adapter, "batching", None)
    if is_batch := isinstance(batching, Batching):
        capacity, max_wait_s = batching
    return AdapterTraits(
        capacity,
        is_async=is_async,
        is_batch=is_batch,
        is_process_reward=is_process_reward(adapter),
        is_judge=judges,
        has_post_process=callable(getattr(adapter, "post_process_scores", None)),
        max_wait_s=max_wait_s,
    )


def is_process_reward(adapter: Any) -> bool:
    """Whether it is declared (`@process_reward`) to reward single steps."""
    return getattr(adapter, "process", False) is True


def best_reward_of(adapter: Any, options: Mapping[str, Any]) -> float:
    """The highest reward that it gives with these options: what it declares (`@best_reward`), else 1."""
    best = getattr(adapter, "best_reward", 1.0)
    return float(best(**accepted_options(best, options, num_given=0)) if callable(best) else best)


def is_judge(adapter: Any) -> bool:
    """Whether it is a judge, which needs no process. Raises ConfigurationError for the class of one."""
    if not all(callable(getattr(adapter, name, None)) for name in ("endpoint", "score")):
        return False
    if isinstance(adapter, type):
        raise ConfigurationError(f"register a judge itself, {adapter.__name__}(...), not its class")
    return True


def function_of(adapter: Any) -> Callable[..., Any]:
    """What is called with a sample: the adapter itself, or the `__call__` or `compute_score` of its class.
    Raises ConfigurationError if there is neither."""
    if callable(adapter) and not isinstance(adapter, type):
        return adapter
    owner = adapter if isinstance(adapter, type) else type(adapter)
    for name in ("__call__", "compute_score"):
        if any(name in vars(base) for base in owner.__mro__):  # getattr would find how classes are called
            return getattr(adapter, name)
    name = getattr(adapter, "__name__", repr(adapter))
    raise ConfigurationError(
        f"{name} is no reward: register a function, or a class with __call__ or compute_score"
    )


def accepted_options(
    function: Callable[..., Any], options: Mapping[str, Any], num_given: int = 1
) -> dict[str, Any]:
    """The options that the function names as keywords; all of them if it takes `**options`. Its first `num_given`
    parameters are no options: the sample."""
    parameters = list(inspect.signature(function).parameters.values())[num_given:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(options)
    named = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_POSITIONAL}
    return {name: value for name, value in options.items() if name in named}


def check_options(adapters: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raise ConfigurationError for an option that none of the adapters names: nobody would miss it."""
    known: set[str] = set()
    for adapter in [adapter for adapter in adapters.values() if not is_judge(adapter)]:
        is_class = isinstance(adapter, type)
        known |= accepted_options(function_of(adapter), options, num_given=2 if is_class else 1).keys()
        if is_class:
            known |= accepted_options(adapter, options, num_given=0).keys()
    if unknown := sorted(set(options) - known):
        raise ConfigurationError(
            f"no reward function of {', '.join(adapters)} takes the option {', '.join(unknown)}: "
            f"name it as a keyword of the function, or leave it out"
        )
