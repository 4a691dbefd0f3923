"""`Played`: rollouts as programs. Where others see completions of a prompt, it has a program play with the policy."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import nullcontext
from typing import Any, Protocol

from async_grpo.environments.chat import Chat, TrajectoryOver
from async_grpo.environments.config import TrajectoryLimits
from async_grpo.environments.trajectory import TrajectoryRecorder
from async_grpo.environments.trajectory_client import TrajectoryClient, trusted_messages
from async_grpo.protocols import Generation
from async_grpo.types import Completion, Prompt, Sampling, Session

# A rollout: plays one trajectory about the prompt, and returns `policy.trajectory(...)`
Program = Callable[[Prompt, TrajectoryClient], Awaitable[Completion]]


class Needs(Protocol):
    """What a program cannot do without: processes, a server."""

    async def start(self) -> None: ...
    async def close(self) -> None: ...


class Played:
    """`Generation` of trajectories; its turns are completed by another one.

    Args:
        at_once: trajectories; the others wait, and their time does not run (None: all).
        needs: of the program, started and closed with this.
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
        self._generation, self._program, self._chat, self._limits = generation, program, chat, limits
        self._places = asyncio.Semaphore(at_once) if at_once else nullcontext()
        self._needs = needs

    async def generate(
        self, prompt: Prompt, count: int, sampling: Sampling | None = None, session: Session | None = None
    ) -> AsyncGenerator[Completion]:
        """Yield `count` trajectories, each when it has ended; closing ends the others."""
        playing = [asyncio.ensure_future(self._play(prompt, member, sampling)) for member in range(count)]
        try:
            for one in asyncio.as_completed(playing):
                yield await one
        finally:
            for task in playing:
                task.cancel()
            await asyncio.gather(*playing, return_exceptions=True)

    async def _play(self, prompt: Prompt, member: int, sampling: Sampling | None) -> Completion:
        """One trajectory. What its program raises fails it alone; what the engines raise is the run's."""
        async with self._places:
            recorder = TrajectoryRecorder(self._chat, trusted_messages(prompt.row))
            policy = TrajectoryClient(self._generation, recorder, prompt, member, self._limits, sampling)
            try:
                try:
                    async with asyncio.timeout(self._limits.seconds) as limit:
                        returned = await self._program(prompt, policy)
                except TrajectoryOver:  # and the program has not caught it
                    returned = policy.at_limit()
                except TimeoutError:
                    if not limit.expired():
                        raise
                    policy.is_over = f"{self._limits.seconds:g} s (--max-trajectory-s)"
                    returned = policy.at_limit()
                return self._checked(policy, returned)
            except Exception as error:
                if policy.failure is not None:
                    raise policy.failure from error
                return policy.trajectory(failure=f"{type(error).__name__}: {error}")

    def _checked(self, policy: TrajectoryClient, returned: Any) -> Completion:
        if policy.failure is not None:  # the program has made something else of it
            raise policy.failure
        if not isinstance(returned, Completion) or returned.outcome is None:
            raise TypeError(f"the program returned a {type(returned).__name__}, not policy.trajectory(...)")
        if not returned.outcome.failure and not len(returned):
            why = f": it was over, after {policy.is_over}" if policy.is_over else ""
            raise ValueError(f"the program never asked the policy for anything{why}")
        return returned

    async def take_stats(self) -> dict[str, Any]:
        """Of the generation."""
        return await self._generation.take_stats()

    async def start(self) -> None:
        """Make what the program needs. ConfigurationError: it cannot be made."""
        if self._needs is not None:
            await self._needs.start()

    async def close(self) -> None:
        """End what the program needed."""
        if self._needs is not None:
            await self._needs.close()
