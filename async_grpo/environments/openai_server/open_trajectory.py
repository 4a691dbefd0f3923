"""`Trajectory`: a trajectory that an agent plays through the endpoint, and its unfinished turns."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from aiohttp import web

from async_grpo.environments.openai_server.openai_api import Result
from async_grpo.environments.openai_server.stored_responses import StoredResponses
from async_grpo.environments.trajectory_client import Reply, TrajectoryClient
from async_grpo.errors import ConfigurationError
from async_grpo.options.fields import refuse
from async_grpo.processes.http_server import MAX_CONNECTIONS

# Maximum number of requests of one trajectory that are answered at the same time
MAX_REQUESTS_AT_ONCE = MAX_CONNECTIONS // 4


class Trajectory:
    """A trajectory whose key the endpoint accepts.

    Attributes:
        policy: The client through which turns are requested.
        result: The result that the agent reported; None before its report.
        claimed: Set once an agent has claimed the trajectory or reported its result.
        reported: Set once there is a result.
        responses: Answers of the Responses API, which later requests may continue.
        num_requests: Number of requests that are being answered.
    """

    def __init__(self, policy: TrajectoryClient) -> None:
        self.policy = policy
        self.responses = StoredResponses(policy.limits.tokens, has_images=policy.reads_images)
        self.result: Result | None = None
        self.claimed = asyncio.Event()
        self.reported = asyncio.Event()
        self.num_requests = 0
        self._turns: set[asyncio.Future[Reply]] = set()  # unfinished turns
        self._has_ended = False

    @contextmanager
    def one_more_request(self) -> Iterator[None]:
        """Count a request as unanswered inside the block.

        Raises:
            HTTPTooManyRequests: There are too many unanswered requests. Without this limit, delayed refusals of one
            agent could occupy all connections.
        """
        if self.num_requests >= MAX_REQUESTS_AT_ONCE:
            raise web.HTTPTooManyRequests(
                text=f"this trajectory has {MAX_REQUESTS_AT_ONCE} unanswered requests: wait for their answers"
            )
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1

    async def take_turns(self, take_turn: Callable[[], Awaitable[Reply]], count: int) -> list[Reply]:
        """Take `count` turns concurrently, and return their replies.

        If one turn is refused, the others are cancelled. If the client disconnects, the turns continue until the
        trajectory ends.
        """
        # The trajectory may have ended after the endpoint checked the key
        refuse(self._has_ended, "the trajectory has ended")
        tasks = [asyncio.ensure_future(take_turn()) for _ in range(count)]
        self._turns.update(tasks)
        for task in tasks:
            task.add_done_callback(self._turns.discard)
        all_replies = asyncio.gather(*tasks)
        try:
            return await asyncio.shield(all_replies)
        except asyncio.CancelledError:
            # If the turns are done, `end` has cancelled them. Otherwise, the client has disconnected, which cancels only
            # this coroutine
            if all_replies.done():
                raise ConfigurationError("the trajectory has ended") from None
            raise
        except Exception:
            for task in tasks:
                task.cancel()
            raise

    def report(self, result: Result) -> None:
        """Store the result. A later report replaces it."""
        self.result = result
        self.claimed.set()
        self.reported.set()

    def end(self) -> None:
        """Cancel unfinished turns, and refuse new ones."""
        self._has_ended = True
        for turn in tuple(self._turns):
            turn.cancel()
