"""`Environment`: the interface of a class that plays with the policy. See docs/environments.md."""

from typing import Any

Observation = str | list[dict[str, Any]] | None  # a message of the user, several messages, or nothing


class Environment:
    """The world of one trajectory. It runs in a process of its own, never in the trainer's.

    A class with these methods need not derive from this one. `__init__` takes the options of `--environment-options`. All
    methods may be `async def`.

    Attributes:
        state: Name of the situation that the policy now meets. Turns that met equal states are compared (GiGPO).
        numbers: Values for the metrics, where they appear as `environment/NAME`.
    """

    state: str = ""
    numbers: dict[str, float]

    def reset(self, row: dict[str, Any], seed: int) -> Observation:
        """Begin the trajectory.

        Args:
            row: The row of the data set.
            seed: The same number for all trajectories of a group, which must meet the same task.

        Returns:
            What the policy reads first; None stands for the row's own prompt.
        """
        raise NotImplementedError

    def step(self, text: str) -> tuple[Observation, float, bool]:
        """Answer a turn of the policy. An exception fails the trajectory.

        Args:
            text: What the policy said.

        Returns:
            What the policy reads next, the reward of this turn, and whether the trajectory is over.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Release what would stay open. Called when the trajectory has ended, for whatever reason."""
