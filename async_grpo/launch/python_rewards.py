"""Write the reward functions that are passed to `async_grpo.train` to a file, which the run reads as `FILE.py:NAME`."""

import keyword
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.launch.python_files import write_private_file
from async_grpo.options.fields import refuse
from async_grpo.rewards.adapter.decorators import traits_of
from async_grpo.rewards.adapter.pickled import pickle_digest, pickled
from async_grpo.rewards.adapter.registry_source import parse_names
from async_grpo.rewards.adapter.trl_signature import has_trl_signature, unknown_arguments

REWARDS_FILE = "train_rewards.py"
HEAD = '''"""The rewards of a call of async_grpo.train, which wrote this file; the next call for this folder replaces it."""

from async_grpo.rewards.adapter.pickled import unpickled
from async_grpo.rewards.adapter.trl_signature import trl_reward
'''


def reward_names(reward_fns: Any, folder: Path, columns: Collection[str] | None) -> str:
    """Write the functions among the rewards to a file, and return the value of the option `--reward-fns`.

    Args:
        reward_fns: A name of the registry, `FILE.py:NAME`, a function, or a list of these; None for no rewards.
        folder: Private folder for the file of functions, which the run executes.
        columns: Columns of the data set. A function's arguments must be among them. None if the columns are unknown.

    Raises:
        ConfigurationError: A reward is neither a name nor a function, cannot be pickled, or has an argument that is not
            a column.
    """
    names: list[str] = []
    functions: dict[str, Any] = {}
    for position, reward in enumerate(_listed(reward_fns), start=1):
        if isinstance(reward, str):
            names += parse_names(reward)
            continue
        name = _free_name(_name_of(reward, position), functions)
        _check(reward, name, columns)
        functions[name] = reward
        names.append(f"{folder / REWARDS_FILE}:{name}")
    if functions:
        parts = [HEAD, *(_definition(name, reward) for name, reward in functions.items())]
        write_private_file(folder, REWARDS_FILE, ["\n".join(parts).encode()])
    return ",".join(names)


def _listed(reward_fns: Any) -> list[Any]:
    if reward_fns is None:
        return []
    is_single = isinstance(reward_fns, str) or _is_reward(reward_fns) or not isinstance(reward_fns, Iterable)
    return [reward_fns] if is_single else list(reward_fns)


def _is_reward(value: Any) -> bool:
    # Judges are objects with a method `score`
    return callable(value) or callable(getattr(value, "score", None))


def _name_of(reward: Any, position: int) -> str:
    """Return a reward's name for the metrics: its own name or, for example for a lambda, `reward_N` with its position."""
    # A functools.partial has no name, so use that of its function
    while hasattr(reward, "func") and not hasattr(reward, "__name__"):
        reward = reward.func
    name = getattr(reward, "__name__", type(reward).__name__)
    is_plain = (
        isinstance(name, str) and name.isascii() and name.isidentifier() and not keyword.iskeyword(name)
    )
    # The written file imports functions with these two names. A reward of the same name would hide them
    return name if is_plain and name not in ("unpickled", "trl_reward") else f"reward_{position}"


def _free_name(name: str, used_names: Collection[str]) -> str:
    """Return the name, with a number appended if it is in use, for example by another closure of the same function."""
    free_name = name
    number = 1
    while free_name in used_names:
        number += 1
        free_name = f"{name}_{number}"
    return free_name


def _check(reward: Any, name: str, columns: Collection[str] | None) -> None:
    way_out = "a name of the registry, FILE.py:NAME, or a function such as `lambda sample: len(sample['completion'])`"
    refuse(not _is_reward(reward), f"the reward {reward!r:.80} is a {type(reward).__name__}: give {way_out}")
    traits_of(reward)  # this raises an error if the function cannot be called with a sample
    if not _is_trl_reward(reward):
        return
    refuse(
        isinstance(reward, type),
        f"the reward {name} is a class with TRL's signature: give an object of it, {name}()",
    )
    if columns is None:
        return
    missing_columns = unknown_arguments(reward, columns)
    if missing_columns:
        raise ConfigurationError(
            f"the reward {name} needs {', '.join(missing_columns)}, which is no column of every row: the columns are "
            f"{', '.join(sorted(columns))}; give the argument a default, or add the column"
        )


def _is_trl_reward(reward: Any) -> bool:
    try:
        return _is_function(reward) and has_trl_signature(reward)
    except ValueError:  # Python cannot inspect the signature of some builtins
        return False


def _is_function(reward: Any) -> bool:
    is_judge = callable(getattr(reward, "endpoint", None))
    return callable(reward) and not is_judge


def _definition(name: str, reward: Any) -> str:
    """Return the Python code that defines a reward in the rewards file."""
    text = pickled(reward, name)
    expression = f'unpickled(\n    "{text}",\n    sha256="{pickle_digest(text)}",\n)'
    if _is_trl_reward(reward):
        expression = f"trl_reward({expression})"
    return f"\n{name} = {expression}\n"
