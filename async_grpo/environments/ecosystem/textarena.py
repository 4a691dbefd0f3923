"""`--environment textarena:GuessTheNumber-v0`: games of TextArena for one player."""

import random
from typing import Any

import textarena
from textarena.core import ActionWrapper, ObservationType
from textarena.envs.registration import ENV_REGISTRY

from async_grpo.environments.environment import Environment
from async_grpo.errors import ConfigurationError
from async_grpo.options.fields import nearest, refuse

FIRST_SEEDS = {"train": 0, "eval": 1_000_000}


class TextArena(Environment):
    """One game. The policy is told what is new, as messages; the reward is the game's, at its end.

    Args:
        environment: its name, as in `textarena.make`. tasks: rows, each with a seed of its own.
    """

    def __init__(self, environment: str, tasks: int = 1000) -> None:
        plain = _plain(environment)
        self._game = textarena.make(f"{plain}-raw")
        for wrapper in ENV_REGISTRY[plain].default_wrappers or ():
            if issubclass(wrapper, ActionWrapper):  # the others tell the whole history again with every turn
                self._game = wrapper(self._game)

    @classmethod
    def rows(cls, split: str, environment: str, tasks: int = 1000) -> list[dict[str, Any]]:
        """ConfigurationError: there is no such game, or it is not for one player, or lacks its data."""
        plain, known = _plain(environment), {_plain(name) for name in ENV_REGISTRY if name.endswith("-raw")}
        refuse(plain not in known, f"--environment textarena: no game {plain!r}{nearest(plain, known)}")
        try:
            cls(environment).reset({}, 0)
        except Exception as error:  # of the game's own code
            why = f"{type(error).__name__}: {error}"
            raise ConfigurationError(f"--environment textarena:{environment}: {why}") from error
        return [{"input": environment, "seed": FIRST_SEEDS[split] + task} for task in range(tasks)]

    def reset(self, row: dict[str, Any], seed: int) -> str:
        self._game.reset(num_players=1, seed=seed)
        self._random = random.getstate()
        return self._told()

    def step(self, said: str) -> tuple[str, float, bool]:
        random.setstate(self._random)  # games draw from it, and others are played in this process
        done, _ = self._game.step(said)
        self._random = random.getstate()
        if not done:
            return self._told(), 0.0, False
        (reward,), (about,) = (list(of.values()) for of in self._game.close())
        self.numbers = {"invalid_move": float(about["invalid_move"])}
        return "", float(reward), True

    def _told(self) -> str:
        _, seen = self._game.get_observation()
        return "\n".join(text for _, text, kind in seen if kind is not ObservationType.PLAYER_ACTION)


def _plain(environment: str) -> str:
    return environment.removesuffix("-raw").removesuffix("-train")
