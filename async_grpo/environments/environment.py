"""`Environment`: the interface of a class that plays with the policy. See docs/environments.md."""

from typing import Any

Observation = str | list[dict[str, Any]] | None  # text of a user message, a list of messages, or nothing


class Environment:
    """The environment of one trajectory. It runs in a separate process, never in the trainer's.

    A class with these methods need not inherit from this one. `__init__` takes the options of `--environment-options`.
    All methods may be `async def`.

    Attributes:
        state: Name of the policy's current situation. GiGPO compares turns whose states are equal.
        numbers: Values for the metrics, in which they are named `environment/NAME`.
    """

    state: str = ""
    numbers: dict[str, float]

    def reset(self, row: dict[str, Any], seed: int) -> Observation:
        """Begin the trajectory.

        Args:
            row: The row of the data set.
            seed: A number that is the same for all trajectories of a group, so that they get the same task.

        Returns:
            What the policy reads first. None means the row's own prompt.
        """
        raise NotImplementedError

    def step(self, text: str) -> tuple[Observation, float, bool]:
        """Respond to a turn of the policy. An exception fails the trajectory.

        Args:
            text: The text that the policy sampled.

        Returns:
            What the policy reads next, the reward of this turn, and whether the trajectory is over.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Release resources. Called when the trajectory has ended, even if it failed."""
