"""`Curriculum`: of each task, rows of one difficulty are drawn, which follows how well they go."""

from collections.abc import Mapping, Sequence
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.experience.config import BatchConfig

WINDOW = 16  # groups of one level that are looked at before it changes


class Curriculum:
    """The level of each task (the rows' column `task`, where they have one), from its lowest.

    rows: of the data set. config: the column of their levels, whole numbers, and the mean rewards of a level's last
    `WINDOW` groups at which the next lower or higher one takes its place.

    ConfigurationError: a row has no level.

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
        self._config, self._column = config, str(config.curriculum)
        levels: dict[str, set[int]] = {}
        for row in rows:
            if type(level := row.get(self._column)) is not int:
                found = f"a row has {level!r} there, not a whole number: {dict(row)!r:.200}"
                raise ConfigurationError(f"--curriculum {self._column}: {found}")
            levels.setdefault(_task(row), set()).add(level)
        self._levels = {task: sorted(of_task) for task, of_task in levels.items()}
        self._at = dict.fromkeys(levels, 0)  # places among its levels
        self._recent: dict[str, list[float]] = {task: [] for task in levels}

    def metrics(self) -> dict[str, int]:
        """The level that each task is at."""
        return {f"curriculum/{task or self._column}": self._levels[task][at] for task, at in self._at.items()}

    def admits(self, row: Mapping[str, Any]) -> bool:
        """Whether a row's level is the one that its task is at."""
        task = _task(row)
        return self._levels[task][self._at[task]] == row[self._column]

    def observe(self, row: Mapping[str, Any], reward: float) -> None:
        """The mean reward of a group. Those drawn before the level changed say nothing about the new one."""
        if not self.admits(row):
            return
        task, recent = _task(row), self._recent[_task(row)]
        recent.append(reward)
        if len(recent) < WINDOW:
            return
        mean, at = sum(recent) / len(recent), self._at[task]
        del recent[0]
        moved = at + (mean >= self._config.curriculum_up_at) - (mean <= self._config.curriculum_down_at)
        if 0 <= moved < len(self._levels[task]) and moved != at:
            self._at[task] = moved
            recent.clear()

    def state(self) -> dict[str, Any]:
        """JSON, for `restore`."""
        return {"at": dict(self._at), "recent": {task: list(recent) for task, recent in self._recent.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken, of the same rows."""
        self._at, self._recent = dict(state["at"]), {task: list(of) for task, of in state["recent"].items()}


def make_curriculum(config: BatchConfig, rows: Sequence[Mapping[str, Any]]) -> Curriculum | None:
    """What `--curriculum` asks for. ConfigurationError: the rows have no levels."""
    return Curriculum(rows, config) if config.curriculum else None


def _task(row: Mapping[str, Any]) -> str:
    return str(row.get("task", ""))
