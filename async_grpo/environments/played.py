"""`Played`: a `Generation` whose completions are trajectories. A rollout program plays each of them with the policy."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import nullcontext
from typing import Any, Protocol

from async_grpo.environments.chat import Chat, TrajectoryOver
from async_grpo.environments.config import TrajectoryLimits
from async_grpo.environments.failure_text import failure_text
from async_grpo.environments.trajectory import TrajectoryRecorder, TurnObserver
from async_grpo.environments.trajectory_client import TrajectoryClient, trusted_messages
from async_grpo.protocols import Generation
from async_grpo.types import Completion, Prompt, Sampling, Session

# A rollout program: plays one trajectory that begins with the prompt, and returns the completion that
# `TrajectoryClient.trajectory` makes of it
Program = Callable[[Prompt, TrajectoryClient], Awaitable[Completion]]


MAX_LOGGED_FAILURES = 20
CHARACTERS_OF_KIND = 60  # failures that begin with the same characters are of one kind

log = logging.getLogger(__name__)


class Needs(Protocol):
    """A resource that a rollout program needs, such as processes or a server."""

    async def start(self) -> None: ...
    async def close(self) -> None: ...


class Played:
    """A `Generation` of trajectories.

    Args:
        generation: The engines, which sample the turns.
        program: The rollout program, which plays one trajectory per call.
        chat: The tokenizer with its chat template.
        limits: Limits of each trajectory.
        at_once: Maximum number of trajectories that run at the same time; None for no limit. The time limit of a
            waiting trajectory begins only when it runs.
        needs: A resource that the program needs. It is started and closed together with this object.

    Attributes:
        observer: Function that is called with each turn and its message, to show them while a trajectory is played.
    """

    def __init__(
        self,
        generation: Generation,
        program: Program,
        chat: Chat,
        limits: TrajectoryLimits,
        *,
        at_once: int | None = None,
        needs: Needs | None = None,
    ) -> None:
        self._generation = generation
        self._program = program
        self._chat = chat
        self._limits = limits
        self._places = asyncio.Semaphore(at_once) if at_once else nullcontext()
        self._needs = needs
        self._logged_failures: set[str] = set()
        self.observer: TurnObserver | None = None

    async def generate(
        self, prompt: Prompt, count: int, sampling: Sampling | None = None, session: Session | None = None
    ) -> AsyncGenerator[Completion]:
        """Yield `count` trajectories in the order in which they end. Closing the generator cancels unfinished ones."""
        tasks = [asyncio.ensure_future(self._play(prompt, member, sampling)) for member in range(count)]
        try:
            for next_trajectory in asyncio.as_completed(tasks):
                completion = await next_trajectory
                if completion.failure:
                    self._log_failure(completion.failure)
                yield completion
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _log_failure(self, failure: str) -> None:
        """Log the reason of a failed trajectory, each kind of reason once, and only a limited number of them."""
        kind = failure[:CHARACTERS_OF_KIND]
        if kind in self._logged_failures or len(self._logged_failures) >= MAX_LOGGED_FAILURES:
            return
        self._logged_failures.add(kind)
        log.warning("a trajectory failed: %s", failure)
        if len(self._logged_failures) == MAX_LOGGED_FAILURES:
            log.warning("reasons of further kinds are not logged; each sample in samples.jsonl has its own")

    async def _play(self, prompt: Prompt, member: int, sampling: Sampling | None) -> Completion:
        """Play one trajectory. A program's error fails only its trajectory, and an engine's error is raised."""
        async with self._places:
            recorder = TrajectoryRecorder(self._chat, trusted_messages(prompt), self.observer, prompt.images)
            policy = TrajectoryClient(self._generation, recorder, prompt, member, self._limits, sampling)
            try:
                returned = await self._run_program(prompt, policy)
                return self._checked(policy, returned)
            except Exception as error:
                if policy.failure is not None:
                    raise policy.failure from error
                return policy.trajectory(failure=failure_text(error))

    async def _run_program(self, prompt: Prompt, policy: TrajectoryClient) -> Any:
        """Return what the program returns. If a limit ends it first, return the result of `policy.at_limit`."""
        try:
            async with asyncio.timeout(self._limits.seconds) as time_limit:
                return await self._program(prompt, policy)
        except TrajectoryOver:
            return policy.at_limit()
        except TimeoutError:
            # If the time limit has not expired, the program itself raised the error
            if not time_limit.expired():
                raise
            policy.is_over = f"{self._limits.seconds:g} s (--max-trajectory-s)"
            return policy.at_limit()

    def _checked(self, policy: TrajectoryClient, returned: Any) -> Completion:
        """Check that the program returned a trajectory with at least one turn or a failure, and return it."""
        # The program may have caught an engine's error, which must fail the run
        if policy.failure is not None:
            raise policy.failure
        if not isinstance(returned, Completion) or returned.outcome is None:
            raise TypeError(f"the program returned a {type(returned).__name__}, not policy.trajectory(...)")
        if not returned.outcome.failure and not len(returned):
            reason = f"; the trajectory was ended after {policy.is_over}" if policy.is_over else ""
            raise ValueError(f"the program never asked the policy for anything{reason}")
        return returned

    async def take_stats(self) -> dict[str, Any]:
        """Return the statistics of the underlying generation."""
        return await self._generation.take_stats()

    async def start(self) -> None:
        """Start the resource that the rollout program needs, and check the parsers of answers that the user named.

        Raises:
            ConfigurationError: The resource cannot be started, or there is no such parser.
        """
        await self._chat.reader.start()
        if self._needs is not None:
            await self._needs.start()

    async def close(self) -> None:
        """Close the resource that the rollout program needs, and end the processes of `chat`.

        These parse the policy's answers, and make the grammars that restrict them.
        """
        await self._chat.reader.close()
        await self._chat.grammars.close()
        if self._needs is not None:
            await self._needs.close()
