"""`Curriculum`: draws rows of one difficulty for each task, and changes it with the rewards."""

from collections.abc import Mapping, Sequence
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.experience.config import BatchConfig

WINDOW = 16  # groups of one level whose mean reward decides about the next level


class Curriculum:
    """The current level of each task, which starts at the lowest; rows belong to tasks by their column `task`, if any.

    Args:
        rows: The rows of the data set.
        config: Names the column of the levels, which are whole numbers, and the mean rewards of the last `WINDOW` groups
            at which the next lower or higher level follows.

    Raises:
        ConfigurationError: A row has no level.

    >>> rows = [{"level": 1}, {"level": 2}]
    >>> curriculum = Curriculum(rows, BatchConfig(curriculum="level"))
    >>> [curriculum.admits(row) for row in rows]
    [True, False]
    >>> for _ in range(WINDOW):
    ...     curriculum.observe(rows[0], 0.9)
    >>> [curriculum.admits(row) for row in rows]
    [False, True]
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], config: BatchConfig) -> None:
        self._config = config
        self._column = str(config.curriculum)
        levels: dict[str, set[int]] = {}
        for row in rows:
            level = row.get(self._column)
            if type(level) is not int:
                raise ConfigurationError(
                    f"--curriculum {self._column}: a row has {level!r} there, not a whole number: {dict(row)!r:.200}"
                )
            levels.setdefault(_task(row), set()).add(level)
        self._levels = {task: sorted(task_levels) for task, task_levels in levels.items()}
        self._at = dict.fromkeys(levels, 0)  # task -> index of its current level
        self._recent: dict[str, list[float]] = {
            task: [] for task in levels
        }  # mean rewards of the last groups

    def metrics(self) -> dict[str, int]:
        """Return the current level of each task."""
        return {f"curriculum/{task or self._column}": self._level(task) for task in self._levels}

    def _level(self, task: str) -> int:
        return self._levels[task][self._at[task]]

    def admits(self, row: Mapping[str, Any]) -> bool:
        """Return whether a row has the current level of its task."""
        return self._level(_task(row)) == row[self._column]

    def observe(self, row: Mapping[str, Any], reward: float) -> None:
        """Take note of the mean reward of a group, and change the level if it is time to.

        Groups that were drawn at another level are ignored.
        """
        if not self.admits(row):
            return
        task = _task(row)
        recent = self._recent[task]
        recent.append(reward)
        if len(recent) < WINDOW:
            return
        mean_reward = sum(recent) / len(recent)
        del recent[0]
        index = self._at[task]
        if mean_reward >= self._config.curriculum_up_at:
            index += 1
        if mean_reward <= self._config.curriculum_down_at:
            index -= 1
        if 0 <= index < len(self._levels[task]) and index != self._at[task]:
            self._at[task] = index
            recent.clear()

    def state(self) -> dict[str, Any]:
        """Return the state as JSON, for `restore`."""
        recent = {task: list(rewards) for task, rewards in self._recent.items()}
        return {"at": dict(self._at), "recent": recent}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue at a state of a curriculum with the same rows."""
        self._at = dict(state["at"])
        self._recent = {task: list(rewards) for task, rewards in state["recent"].items()}


def make_curriculum(config: BatchConfig, rows: Sequence[Mapping[str, Any]]) -> Curriculum | None:
    """Return the curriculum that `--curriculum` requests, if any.

    Raises:
        ConfigurationError: The rows have no levels.
    """
    return Curriculum(rows, config) if config.curriculum else None


def _task(row: Mapping[str, Any]) -> str:
    """Return the task of a row; "" if it names none."""
    return str(row.get("task", ""))
