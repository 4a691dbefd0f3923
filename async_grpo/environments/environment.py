"""`Environment`: what a user writes to have the policy play. See docs/environments.md."""

from typing import Any

Observation = str | list[dict[str, Any]] | None  # a user's message; several messages; or nothing is said


class Environment:
    """One trajectory's world, in a process of its own kind (never the trainer's). Deriving from it is not needed.

    `__init__` takes the options that `--environment-options` gives. All methods may be `async def`.

    state: names what the policy now finds; where it is set, turns that found equal states are compared (GiGPO).
    numbers: what the metrics should show, as `environment/NAME`.
    """

    state: str = ""
    numbers: dict[str, float]

    def reset(self, row: dict[str, Any], seed: int) -> Observation:
        """Begin. `row`: of the data set; `seed`: the same for all trajectories of one group, which must find the same task.
        Returns what the policy is told; None: the row's own prompt."""
        raise NotImplementedError

    def step(self, said: str) -> tuple[Observation, float, bool]:
        """(what the policy is told next, reward of this turn, whether it is over). What is raised fails the trajectory."""
        raise NotImplementedError

    def close(self) -> None:
        """The trajectory has ended, however it did: let go of what would stay open."""
