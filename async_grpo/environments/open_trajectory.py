"""`Trajectory`: one that an agent plays through the endpoint, with the turns that are under way."""

import asyncio
from collections.abc import Awaitable, Iterable

from async_grpo.environments.openai_api import Result
from async_grpo.environments.trajectory_client import Reply, TrajectoryClient
from async_grpo.errors import ConfigurationError
from async_grpo.options.fields import refuse


class Trajectory:
    """An open trajectory: its policy, and what was reported of it."""

    def __init__(self, policy: TrajectoryClient) -> None:
        self.policy = policy
        self.result: Result | None = None
        self.claimed, self.reported = asyncio.Event(), asyncio.Event()
        self._turns: set[asyncio.Future[Reply]] = set()  # under way
        self._ended = False

    async def all_of(self, turns: Iterable[Awaitable[Reply]]) -> list[Reply]:
        """Return what the turns return. If one is refused, none goes on.

        If the client has gone, the turns go on until the trajectory ends.
        """
        refuse(self._ended, "the trajectory has ended")  # since its key was looked at
        tasks = list(map(asyncio.ensure_future, turns))
        self._turns.update(tasks)
        for task in tasks:
            task.add_done_callback(self._turns.discard)
        together = asyncio.gather(*tasks)
        try:
            return await asyncio.shield(together)
        except asyncio.CancelledError:
            if together.done():
                raise ConfigurationError("the trajectory has ended") from None
            raise
        except Exception:
            for task in tasks:
                task.cancel()
            raise

    def report(self, result: Result) -> None:
        """Keep the result; the last one counts."""
        self.result = result
        self.claimed.set()
        self.reported.set()

    def end(self) -> None:
        """Cancel its turns; no other is begun."""
        self._ended = True
        for turn in tuple(self._turns):
            turn.cancel()
