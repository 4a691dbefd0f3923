"""`Curriculum`: of each task, rows of one difficulty are drawn, which follows how well they go."""

from collections.abc import Mapping, Sequence
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.experience.config import BatchConfig
from async_grpo.options.fields import refuse

WINDOW = 16  # groups of one level that are looked at before it changes


class Curriculum:
    """The level of each task (the rows' column `task`, where they have one), from its lowest.

    rows: of the data set. column: of their levels, whole numbers. down_at, up_at: mean rewards of a level's last `WINDOW`
    groups at which the next lower or higher one takes its place.

    ConfigurationError: a row has no level, or the bounds leave nothing between them.

    >>> rows = [{"level": 1}, {"level": 2}]
    >>> curriculum = Curriculum(rows, "level", down_at=0.25, up_at=0.75)
    >>> [curriculum.admits(row) for row in rows]
    [True, False]
    >>> for _ in range(WINDOW):
    ...     curriculum.observe(rows[0], 0.9)
    >>> [curriculum.admits(row) for row in rows]
    [False, True]
    """

    def __init__(
        self, rows: Sequence[Mapping[str, Any]], column: str, *, down_at: float, up_at: float
    ) -> None:
        refuse(
            not down_at < up_at, f"--curriculum-down-at {down_at} must be below --curriculum-up-at {up_at}"
        )
        self._column, self._down_at, self._up_at = column, down_at, up_at
        levels: dict[str, set[int]] = {}
        for row in rows:
            if type(level := row.get(column)) is not int:
                raise ConfigurationError(
                    f"--curriculum {column}: a row has {level!r} there, not a whole number: {dict(row)!r:.200}"
                )
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
        moved = at + (mean >= self._up_at) - (mean <= self._down_at)
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
    if config.curriculum is None:
        return None
    bounds = {"down_at": config.curriculum_down_at, "up_at": config.curriculum_up_at}
    return Curriculum(rows, config.curriculum, **bounds)


def _task(row: Mapping[str, Any]) -> str:
    return str(row.get("task", ""))
