"""`Trajectory`: a trajectory that an agent plays through the endpoint, with its turns that are under way."""

import asyncio
from collections.abc import Awaitable, Callable

from async_grpo.environments.openai_api import Result
from async_grpo.environments.trajectory_client import Reply, TrajectoryClient
from async_grpo.errors import ConfigurationError
from async_grpo.options.fields import refuse


class Trajectory:
    """A trajectory whose key is open.

    Attributes:
        policy: Takes the turns.
        result: What the agent has reported; None before that.
        claimed: Set when an agent plays the trajectory.
        reported: Set when there is a result.
    """

    def __init__(self, policy: TrajectoryClient) -> None:
        self.policy = policy
        self.result: Result | None = None
        self.claimed = asyncio.Event()
        self.reported = asyncio.Event()
        self._turns: set[asyncio.Future[Reply]] = set()  # under way
        self._has_ended = False

    async def take_turns(self, take_turn: Callable[[], Awaitable[Reply]], count: int) -> list[Reply]:
        """Take `count` turns at once, and return their replies.

        If one turn is refused, the others are cancelled. If the client goes away, they continue until the trajectory ends.
        """
        # It may have ended after its key was checked
        refuse(self._has_ended, "the trajectory has ended")
        tasks = [asyncio.ensure_future(take_turn()) for _ in range(count)]
        self._turns.update(tasks)
        for task in tasks:
            task.add_done_callback(self._turns.discard)
        all_replies = asyncio.gather(*tasks)
        try:
            return await asyncio.shield(all_replies)
        except asyncio.CancelledError:
            # `end` cancels the turns; a client that goes away cancels this coroutine alone
            if all_replies.done():
                raise ConfigurationError("the trajectory has ended") from None
            raise
        except Exception:
            for task in tasks:
                task.cancel()
            raise

    def report(self, result: Result) -> None:
        """Keep the result. The last report counts."""
        self.result = result
        self.claimed.set()
        self.reported.set()

    def end(self) -> None:
        """Cancel the turns under way, and begin no others."""
        self._has_ended = True
        for turn in tuple(self._turns):
            turn.cancel()
