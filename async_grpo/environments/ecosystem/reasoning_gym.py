"""`--environment reasoning_gym:chain_sum,leg_counting=2`: procedural tasks, scored by their own verifiers."""

from functools import cache
from typing import Any

import reasoning_gym
from reasoning_gym.factory import CURRICULA, DATASETS, create_curriculum
from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer

from async_grpo.environments.environment import Environment
from async_grpo.options.fields import nearest, refuse

SEEDS = {"train": 0, "eval": 1 << 30}  # a task has the seed of its set plus its index


@cache
def tasks_of(name: str, level: int | None, seed: int, size: int) -> Any:
    """So many tasks of a kind. level: of its own curriculum, from 0; None: as the package makes them by default."""
    if level is None:
        return reasoning_gym.create_dataset(name, seed=seed, size=size)
    curriculum = create_curriculum(name)
    curriculum.set_global_level(level)
    chosen = curriculum.generate_configuration({"seed": seed, "size": size})
    return DATASETS[name][0](chosen)


class ReasoningGym(Environment):
    """One task, answered in one turn.

    Args:
        environment: kinds of tasks, each with its weight in the mixture (1).
        tasks: rows, of each level.
        levels: how many of their curricula's there are (0: tasks as the package makes them by default). Mixed, unless
            `--curriculum level` has them follow each other.
        prompt: the system prompt: direct, simple, default, DeepSeekZero, chain_of_draft; or none.
    """

    def __init__(
        self, environment: str = "", tasks: int = 1000, levels: int = 0, prompt: str | None = "default"
    ) -> None:
        self.numbers = {}

    @classmethod
    def rows(
        cls, split: str, environment: str, tasks: int = 1000, levels: int = 0, prompt: str | None = "default"
    ) -> list[dict[str, Any]]:
        """The mixture; what is held out has other seeds. ConfigurationError: it names what is not there."""
        unknown = prompt not in (None, *SYSTEM_PROMPTS)
        refuse(unknown, f"prompt={prompt}: there are {', '.join(SYSTEM_PROMPTS)}")
        system = [{"role": "system", "content": SYSTEM_PROMPTS[prompt]}] if prompt else []
        weights = _weights(environment, levels)
        rows = []
        for name, weight in weights.items():
            count = max(1, round(tasks * weight / sum(weights.values())))
            for level in range(levels) if levels else [None]:
                made = {"task": name, "level": level, "task_seed": SEEDS[split], "tasks": count}
                for index, entry in enumerate(tasks_of(name, level, SEEDS[split], count)):
                    said = [*system, {"role": "user", "content": entry["question"]}]
                    rows.append({"messages": said, "answer": entry["answer"], **made, "index": index})
        return rows

    def reset(self, row: dict[str, Any], seed: int) -> None:
        """The row is the task."""
        self._name = row["task"]
        self._tasks = tasks_of(self._name, row["level"], row["task_seed"], row["tasks"])
        self._entry = self._tasks[row["index"]]

    def step(self, said: str) -> tuple[None, float, bool]:
        """Its answer is what stands between <answer> and </answer>, or else all that was said."""
        answer = extract_answer(said)
        try:
            reward = self._tasks.score_answer(said.strip() if answer is None else answer, self._entry)
        except Exception:  # some scorers read numbers, moves or JSON out of whatever was said
            self._tasks.score_answer(self._entry["answer"], self._entry)  # raises, too, if that is not why
            reward = 0.0
        self.numbers = {self._name: float(reward)}
        return None, float(reward), True


def _weights(environment: str, levels: int) -> dict[str, float]:
    weights = {}
    for part in environment.split(","):
        name, _, weight = part.strip().partition("=")
        known = CURRICULA if levels else DATASETS
        what = "has no curriculum, leave out levels" if name in DATASETS else "is unknown"
        refuse(name not in known, f"--environment reasoning_gym: task {name!r} {what}{nearest(name, known)}")
        try:
            weights[name] = float(weight or 1)
        except ValueError:
            weights[name] = -1.0
        refuse(not 0 < weights[name] < 1e6, f"--environment reasoning_gym: the weight {weight!r} of {name}")
    return weights
