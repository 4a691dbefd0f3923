"""Single-player games of TextArena, for example `--environment textarena:GuessTheNumber-v0`."""

import random
from typing import Any

import textarena
from textarena.core import ActionWrapper, ObservationType
from textarena.envs.registration import ENV_REGISTRY

from async_grpo.environments.environment import Environment
from async_grpo.errors import ConfigurationError
from async_grpo.options.fields import nearest, refuse

FIRST_SEEDS = {"train": 0, "eval": 1_000_000}  # split -> seed of its first row


class TextArena(Environment):
    """One game. In each turn, the policy reads only the new text. The game gives its reward at the end.

    Args:
        environment: Name of the game, as in `textarena.make`.
        tasks: Number of rows, each with a different seed.
    """

    def __init__(self, environment: str, tasks: int = 1000) -> None:
        name = _base_name(environment)
        self._game = textarena.make(f"{name}-raw")
        for wrapper in ENV_REGISTRY[name].default_wrappers or ():
            # Apply only wrappers of actions. Wrappers of observations would repeat the whole history in every turn
            if issubclass(wrapper, ActionWrapper):
                self._game = wrapper(self._game)

    @classmethod
    def rows(cls, split: str, environment: str, tasks: int = 1000) -> list[dict[str, Any]]:
        """Return the rows of a split, one for each seed.

        Raises:
            ConfigurationError: There is no such game, it is not for one player, or its data is missing.
        """
        name = _base_name(environment)
        known_names = {_base_name(known_name) for known_name in ENV_REGISTRY if known_name.endswith("-raw")}
        refuse(
            name not in known_names,
            f"--environment textarena: no game {name!r}{nearest(name, known_names)}",
        )
        try:
            cls(environment).reset({}, 0)
        except Exception as error:  # the game's code may raise any exception
            reason = f"{type(error).__name__}: {error}"
            raise ConfigurationError(f"--environment textarena:{environment}: {reason}") from error
        return [{"input": environment, "seed": FIRST_SEEDS[split] + task} for task in range(tasks)]

    def reset(self, row: dict[str, Any], seed: int) -> str:
        """Begin a game, and return its first text."""
        self._game.reset(num_players=1, seed=seed)
        self._random_state = random.getstate()
        return self._new_text()

    def step(self, text: str) -> tuple[str, float, bool]:
        """Make the move that the policy's text describes."""
        # Each game keeps its own state of the global random generator, because other games in this process also use it
        random.setstate(self._random_state)
        is_over, _ = self._game.step(text)
        self._random_state = random.getstate()
        if not is_over:
            return self._new_text(), 0.0, False
        rewards, infos = self._game.close()
        (reward,) = rewards.values()
        (info,) = infos.values()
        self.numbers = {"invalid_move": float(info["invalid_move"])}
        return "", float(reward), True

    def _new_text(self) -> str:
        """Return the text that the game has written since the last turn."""
        _, observations = self._game.get_observation()
        return "\n".join(text for _, text, kind in observations if kind is not ObservationType.PLAYER_ACTION)


def _base_name(environment: str) -> str:
    """Return the name of a game without the suffix that names its variant."""
    return environment.removesuffix("-raw").removesuffix("-train")
