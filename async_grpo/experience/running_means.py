"""Running means of the rewards of each question or agent, for estimators that compare with them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.types import Prompt

# A mean, or None if the key has no mean yet
Means = dict[str, float | None]


class RunningMeans:
    """The running mean of each key, and how each step changed the means.

    A step changes the means when its advantages are computed, which is before the step is trained. So at a checkpoint
    before step k, the means may already include step k. But a resumed run computes the advantages of step k again, and
    needs the means before that step. So the values that a step replaces are kept until the engines use the weights of
    the step. With several passes over each batch, all minibatches of a batch count as its last step.

    Args:
        column: Column of the rows with the key, such as the name of an agent. None gives each question its own mean.

    >>> means = RunningMeans(None)
    >>> means.update(step=0, means={"3": 0.5})
    >>> means.update(step=1, means={"3": 0.75, "4": 1.0})
    >>> means.mean("3"), means.state(step=1)
    (0.75, {'3': 0.5})
    """

    def __init__(self, column: str | None) -> None:
        self._column = column
        self._means: dict[str, float] = {}
        # The means that a step replaced, by step and key
        self._replaced: dict[int, Means] = {}

    def key(self, prompt: Prompt) -> str:
        """Return the key of a prompt: the value of the column in its row, or the index of its question."""
        if self._column is None:
            return str(prompt.question)
        return str(prompt.row[self._column])

    def mean(self, key: str) -> float:
        """Return the mean of a key, or 0 if it has no reward yet."""
        return self._means.get(key, 0.0)

    def update(self, step: int, means: Mapping[str, float]) -> None:
        """Replace the means of some keys by those after a step.

        The samples of all groups of the step, or of one of its minibatches, have already changed the new means.
        """
        replaced: Means = {key: self._means.get(key) for key in means}
        # If an earlier minibatch of the step already replaced this mean, keep the value from before that minibatch
        self._replaced[step] = replaced | self._replaced.get(step, {})
        self._means.update(means)

    def forget_before(self, step: int) -> None:
        """Forget the means that steps before this one replaced, because no checkpoint will begin with these steps."""
        # Iterate over a copy of the keys, because another thread may add a step meanwhile
        for earlier_step in list(self._replaced):
            if earlier_step < step:
                del self._replaced[earlier_step]

    def state(self, step: int) -> dict[str, float]:
        """Return the means before a step."""
        means: Means = dict(self._means)
        for later_step in sorted(self._replaced, reverse=True):
            if later_step >= step:
                means.update(self._replaced[later_step])
        return {key: mean for key, mean in means.items() if mean is not None}

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue with the means of a checkpoint."""
        self._means = dict(state)
        self._replaced = {}


def check_column(column: str | None, rows: Iterable[Mapping[str, Any]]) -> None:
    """Raise ConfigurationError if a row has no text or whole number in the column of the keys."""
    if column is None:
        return
    for row in rows:
        value = row.get(column)
        if type(value) not in (str, int):
            raise ConfigurationError(
                f"--running-mean-column {column}: a row has {value!r:.80} there, not a text or a whole number: "
                f"{dict(row)!r:.200}"
            )


def checked_means(content: Any) -> dict[str, float]:
    """Return the means that a checkpoint contains.

    Raises:
        ValueError: They are not finite numbers by key.
    """
    if not isinstance(content, dict):
        raise ValueError(f"the running means are {type(content).__name__}, not a table")
    for key, mean in content.items():
        if type(mean) not in (int, float) or not math.isfinite(mean):
            raise ValueError(f"the running mean of {key!r:.50} is {mean!r:.50}, not a finite number")
    return content


def numbered(keys: Sequence[str]) -> list[int]:
    """Return a number for each key, equal for equal keys.

    >>> numbered(["b", "a", "b"])
    [0, 1, 0]
    """
    numbers: dict[str, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]
