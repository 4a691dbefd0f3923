"""`Curriculum`: admits rows of one difficulty level per task, and changes the level according to the rewards."""

from collections.abc import Mapping, Sequence
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.experience.config import BatchConfig

WINDOW = 16  # number of latest groups of a level whose mean reward decides whether the level changes


class Curriculum:
    """The current difficulty level of each task. A task starts at its lowest level.

    The column `task` of a row names its task. All rows without that column form one task.

    Args:
        rows: The rows of the data set.
        config: The options. `curriculum` names the column of the levels, which are whole numbers. `curriculum_up_at`
            and `curriculum_down_at` are mean rewards of the last `WINDOW` groups at which the level changes.

    Raises:
        ConfigurationError: A row has no level, or it is not a whole number.

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
        # mean rewards of the last groups at the current level, by task
        self._recent: dict[str, list[float]] = {task: [] for task in levels}

    def metrics(self) -> dict[str, int]:
        """Return the current level of each task."""
        return {f"curriculum/{task or self._column}": self._level(task) for task in self._levels}

    def _level(self, task: str) -> int:
        return self._levels[task][self._at[task]]

    def admits(self, row: Mapping[str, Any]) -> bool:
        """Return whether a row has the current level of its task."""
        return self._level(_task(row)) == row[self._column]

    def observe(self, row: Mapping[str, Any], reward: float) -> None:
        """Record the mean reward of a group, and change the level of its task if the recent rewards require it.

        Groups whose level is not the current level of their task are ignored.
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
        """Restore the state of a curriculum that had the same rows."""
        self._at = dict(state["at"])
        self._recent = {task: list(rewards) for task, rewards in state["recent"].items()}


def make_curriculum(config: BatchConfig, rows: Sequence[Mapping[str, Any]]) -> Curriculum | None:
    """Return the curriculum that `--curriculum` requests, or None without that option.

    Raises:
        ConfigurationError: A row has no level, or it is not a whole number.
    """
    return Curriculum(rows, config) if config.curriculum else None


def _task(row: Mapping[str, Any]) -> str:
    """Return the task of a row, or "" if it has none."""
    return str(row.get("task", ""))
