"""Procedurally generated tasks of reasoning_gym, which are scored by the package's own verifiers.

For example, `--environment reasoning_gym:chain_sum,leg_counting=2` mixes two kinds of tasks in the ratio 1 : 2.
"""

from functools import cache
from typing import Any

import reasoning_gym
from reasoning_gym.factory import CURRICULA, DATASETS, create_curriculum
from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer

from async_grpo.environments.environment import Environment
from async_grpo.options.fields import nearest, refuse

SEEDS = {"train": 0, "eval": 1 << 30}  # split -> first seed; each task's index is added to it
MAX_WEIGHT = 1e6  # upper limit for the weight of a kind of tasks in the mixture


@cache
def tasks_of(name: str, level: int | None, seed: int, size: int) -> Any:
    """Return `size` tasks of a kind.

    Args:
        name: The kind of tasks.
        level: Level in the curriculum of this kind of tasks, from 0. None for the package's default settings.
        seed: Seed of the first task.
        size: Number of tasks.
    """
    if level is None:
        return reasoning_gym.create_dataset(name, seed=seed, size=size)
    curriculum = create_curriculum(name)
    curriculum.set_global_level(level)
    configuration = curriculum.generate_configuration({"seed": seed, "size": size})
    dataset_class = DATASETS[name][0]
    return dataset_class(configuration)


class ReasoningGym(Environment):
    """One task, which the policy answers in one turn.

    Args:
        environment: Kinds of tasks, each with its weight in the mixture (default: 1).
        tasks: Number of rows per level.
        levels: Number of levels of the tasks' curricula. 0 means the package's default settings. Levels are mixed,
            unless `--curriculum level` orders them.
        prompt: Name of the system prompt: direct, simple, default, DeepSeekZero or chain_of_draft. None for no prompt.
    """

    def __init__(
        self, environment: str = "", tasks: int = 1000, levels: int = 0, prompt: str | None = "default"
    ) -> None:
        self.numbers = {}

    @classmethod
    def rows(
        cls, split: str, environment: str, tasks: int = 1000, levels: int = 0, prompt: str | None = "default"
    ) -> list[dict[str, Any]]:
        """Return the rows of a split. The seeds of the splits do not overlap.

        Raises:
            ConfigurationError: The package has no such prompt or kind of tasks, or a weight is not valid.
        """
        is_unknown = prompt not in (None, *SYSTEM_PROMPTS)
        refuse(is_unknown, f"prompt={prompt} is unknown: there are {', '.join(SYSTEM_PROMPTS)}")
        system_messages = [{"role": "system", "content": SYSTEM_PROMPTS[prompt]}] if prompt else []
        weights = _weights(environment, levels)
        total_weight = sum(weights.values())
        seed = SEEDS[split]
        rows = []
        for name, weight in weights.items():
            size = max(1, round(tasks * weight / total_weight))
            for level in range(levels) if levels else [None]:
                for index, entry in enumerate(tasks_of(name, level, seed, size)):
                    question = {"role": "user", "content": entry["question"]}
                    rows.append(
                        {
                            "messages": [*system_messages, question],
                            "answer": entry["answer"],
                            "task": name,
                            "level": level,
                            "task_seed": seed,
                            "tasks": size,
                            "index": index,
                        }
                    )
        return rows

    def reset(self, row: dict[str, Any], seed: int) -> None:
        """Find the task of the row. Return None, because the row's own messages are the prompt."""
        self._name = row["task"]
        self._tasks = tasks_of(self._name, row["level"], row["task_seed"], row["tasks"])
        self._entry = self._tasks[row["index"]]

    def step(self, text: str) -> tuple[None, float, bool]:
        """Score the answer: the text between <answer> and </answer>, or the whole text if it has no such tags."""
        answer = extract_answer(text)
        try:
            reward = self._tasks.score_answer(text.strip() if answer is None else answer, self._entry)
        except Exception:
            # Some scorers raise an error if the answer is not a number, a move or JSON. Such an answer gets the reward 0.
            # If the scorer also raises an error for the correct answer, it is broken, and the error is raised here
            self._tasks.score_answer(self._entry["answer"], self._entry)
            reward = 0.0
        self.numbers = {self._name: float(reward)}
        return None, float(reward), True


def _weights(environment: str, levels: int) -> dict[str, float]:
    """Return the weight of each kind of tasks.

    Args:
        environment: The kinds of tasks with their weights, as in "NAME=2,NAME"; the weight is 1 by default.
        levels: Number of levels of difficulty; 0 for tasks without levels. With levels, each kind needs a curriculum.

    Raises:
        ConfigurationError: A kind is unknown or has no curriculum, or a weight is no positive number.
    """
    weights = {}
    for part in environment.split(","):
        name, _, weight = part.strip().partition("=")
        known_names = CURRICULA if levels else DATASETS
        problem = "has no curriculum, leave out levels" if name in DATASETS else "is unknown"
        refuse(
            name not in known_names,
            f"--environment reasoning_gym: task {name!r} {problem}{nearest(name, known_names)}",
        )
        try:
            weights[name] = float(weight or 1)
        except ValueError:
            weights[name] = -1.0
        is_in_range = 0 < weights[name] < MAX_WEIGHT
        refuse(
            not is_in_range,
            f"--environment reasoning_gym: the weight {weight!r} of {name} is not a number above 0, or is too large",
        )
    return weights
