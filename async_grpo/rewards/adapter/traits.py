"""What sorts of rewards there are, and which options each takes.

    function        def shout(sample, weight=1.0)
    class           built once per process with the options that its `__init__` names; called through `__call__` or
                    `compute_score`; its `close`, if there is one, at the end
    async           `async def`, or a class with an `async def __call__`: many samples in flight in one process
    batch           decorated with `@batch`: a list of samples in, a list of answers out
    judge           an object with `endpoint` and `score`: no process of its own, see `async_grpo.rewards.judges`

Each may be a process reward (`@process_reward`), and look at whole groups (`post_process_scores`). Only the options
that it names are passed.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.rewards.adapter.decorators import Batching

ASYNC_CAPACITY = 64  # samples in flight in the process of one async reward
JUDGE_CAPACITY = 256  # of one judge: what it may really do at a time is in its limits

Adapter = Callable[..., Any]


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
    """The traits of a registered object.

    Raises:
        ConfigurationError: it cannot be called.

    >>> async def polite(sample): ...
    >>> traits_of(polite).capacity, traits_of(len).capacity
    (64, 1)
    """
    common = {
        "is_process_reward": is_process_reward(adapter),
        "has_post_process": callable(getattr(adapter, "post_process_scores", None)),
    }
    if is_judge(adapter):
        return AdapterTraits(JUDGE_CAPACITY, is_async=True, is_judge=True, **common)
    is_async = _is_async(function_of(adapter))
    batching = getattr(adapter, "batching", None)
    if isinstance(batching, Batching):
        return AdapterTraits(batching.max_samples, is_async, True, max_wait_s=batching.max_wait_s, **common)
    return AdapterTraits(ASYNC_CAPACITY if is_async else 1, is_async, **common)


def is_process_reward(adapter: Any) -> bool:
    """Whether it is declared (`@process_reward`) to reward single steps."""
    return getattr(adapter, "process", False) is True


def best_reward_of(adapter: Any, options: Mapping[str, Any]) -> float:
    """The highest reward that it gives with these options: what it declares (`@best_reward`), else 1."""
    best = getattr(adapter, "best_reward", 1.0)
    return float(best(**accepted_options(best, options, num_given=0)) if callable(best) else best)


def is_cacheable(adapter: Any) -> bool:
    """Whether the verdict cache may keep its answers: judges', and of rewards that are declared so (`@cacheable`)."""
    return is_judge(adapter) or getattr(adapter, "cacheable", False) is True


def is_judge(adapter: Any) -> bool:
    """Whether it is a judge, which needs no process. Raises ConfigurationError for the class of one."""
    if not all(callable(getattr(adapter, name, None)) for name in ("endpoint", "score")):
        return False
    if isinstance(adapter, type):
        raise ConfigurationError(f"register a judge itself, {adapter.__name__}(...), not its class")
    return True


def function_of(adapter: Any) -> Callable[..., Any]:
    """What is called with a sample: the adapter itself, or the `__call__` or `compute_score` of its class.

    Raises:
        ConfigurationError: there is neither.
    """
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


def accepted_options(function: Adapter, options: Mapping[str, Any], num_given: int = 1) -> dict[str, Any]:
    """The options that the function names as keywords; all of them if it takes `**options`.

    Its first `num_given` parameters are no options: the sample.

    >>> accepted_options(lambda sample, weight=0.1: {}, {"weight": 1.0, "url": "x"})
    {'weight': 1.0}
    """
    parameters = list(inspect.signature(function).parameters.values())[num_given:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(options)
    named = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_POSITIONAL}
    return {name: value for name, value in options.items() if name in named}


def check_options(adapters: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raise ConfigurationError for an option that none of the adapters names: nobody would miss it."""
    known: set[str] = set()
    for adapter in adapters.values():
        if isinstance(adapter, type):
            known |= accepted_options(adapter, options, num_given=0).keys()
            known |= accepted_options(function_of(adapter), options, num_given=2).keys()
        elif not is_judge(adapter):
            known |= accepted_options(function_of(adapter), options).keys()
    if unknown := sorted(set(options) - known):
        raise ConfigurationError(
            f"no reward function of {', '.join(adapters)} takes the option {', '.join(unknown)}: "
            f"name it as a keyword of the function, or leave it out"
        )


def _is_async(function: Any) -> bool:
    return any(map(inspect.iscoroutinefunction, (function, getattr(type(function), "__call__", None))))  # noqa: B004
