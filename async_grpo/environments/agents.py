"""Agents: programs of any kind that talk to the run's endpoint. `agent:COMMAND` is started once for each trajectory.

It gets OPENAI_BASE_URL and OPENAI_API_KEY in its environment, and the row of the data set as JSON on its standard input.
It may report a reward (`POST /v1/result`); if it does not, its exit status tells: 0 is a reward of 1, 100 of 0, any other
fails the trajectory. `--environment endpoint` starts none: agents that run elsewhere take trajectories (`POST
/v1/trajectories`, address and key of the run are in `endpoint.json` in its output folder) and report their rewards.
"""

import asyncio
import json
import os
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import STDOUT, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing
from pathlib import Path

from async_grpo.environments.endpoint import AgentEndpoint
from async_grpo.environments.open_trajectory import Trajectory
from async_grpo.environments.trajectory_client import TrajectoryClient, row_of
from async_grpo.options.redaction import redacted, register_secrets
from async_grpo.options.source_file import PACKAGE_ROOT
from async_grpo.processes.process_tree import split_off_guardian
from async_grpo.rewards.isolation.adapter_process import child_environment
from async_grpo.types import Completion, Prompt

SOLVED, NOT_SOLVED = 0, 100  # exit statuses
MAX_PROCESSES = 256  # of one agent
ENDS_WITHIN_S = 10.0
KEPT_OUTPUT = 2000  # characters of what it wrote last, for the reason of its failure
READ_OUTPUT = 2**16  # bytes of it in which secrets are looked for
_MAIN = "import sys; from async_grpo.environments.agents import main; main(int(sys.argv[1]), sys.argv[2])"


class AgentFailed(RuntimeError):
    """An agent ended with an exit status that says nothing about its task."""


class _Agent:
    """What both kinds of programs below have: the endpoint, and a command with variables for its environment."""

    def __init__(self, endpoint: AgentEndpoint, command: str, variables: Mapping[str, str] | None) -> None:
        self._endpoint, self._command, self._variables = endpoint, command, variables
        register_secrets((variables or {}).values())

    @asynccontextmanager
    async def _running(
        self, key: str, row: bytes = b""
    ) -> AsyncIterator[tuple[Process, asyncio.StreamReader]]:
        """The command, given the row, and what it writes. When the context ends, it has ended, and all that it started."""
        own = {"OPENAI_BASE_URL": self._endpoint.base_url, "OPENAI_API_KEY": key}
        ours, theirs = socket.socketpair()
        # No pipes of asyncio's process: it would not have ended before whoever else may hold them. A pipe's descriptor,
        # uvloop would close a second time, when it is somebody else's
        with theirs, tempfile.TemporaryFile() as given:
            given.write(row)
            given.seek(0)
            said, reading = await asyncio.open_unix_connection(sock=ours)
            with closing(reading):
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-c", _MAIN, str(os.getpid()), self._command),
                    stdin=given,
                    stdout=theirs.fileno(),
                    stderr=STDOUT,
                    env=child_environment({**(self._variables or {}), **own}),
                    start_new_session=True,
                )
                theirs.close()  # or it would have no end
                try:
                    yield process, said
                finally:
                    if process.returncode is None:
                        process.terminate()  # its guardian ends all that it started
                        process.send_signal(signal.SIGCONT)  # the agent may have stopped it
                        try:
                            await asyncio.wait_for(process.wait(), ENDS_WITHIN_S)
                        except TimeoutError:
                            process.kill()
                            await process.wait()


class RunAgent(_Agent):
    """A program: an agent plays, in processes of its own that end with the trajectory, whatever they are."""

    async def __call__(self, prompt: Prompt, policy: TrajectoryClient) -> Completion:
        key, trajectory = self._endpoint.open(policy)

        def so_far() -> Completion:  # what it makes of a limit is no answer to its task
            return policy.trajectory(0.0) if trajectory.result is None else _reported(policy, trajectory)

        policy.at_limit = so_far
        try:
            async with self._running(key, json.dumps(row_of(prompt)).encode()) as (process, output):
                said = await _end_of(output)
                status = await process.wait()
        finally:
            self._endpoint.shut(key)
        if policy.is_over or trajectory.result is not None:
            return so_far()
        if status not in (SOLVED, NOT_SOLVED):
            said = last_words(said.replace(key, "(its key)"))
            raise AgentFailed(f"the agent ended with exit status {status} and no report; it said: {said}")
        return policy.trajectory(float(status == SOLVED), truncated=False)


class AwaitAgent(_Agent):
    """A program: an agent that is started elsewhere claims the trajectory, plays it, and reports its result.

    A command is started here, to play all of them; it is given the run's key.
    """

    _watching: asyncio.Task[None] | None = None

    async def __call__(self, prompt: Prompt, policy: TrajectoryClient) -> Completion:
        key, trajectory = self._endpoint.open(policy)
        try:
            self._endpoint.offer(key)
            # Before the trajectory's own time is up: it would count as one that went on too long
            async with asyncio.timeout(0.9 * policy.limits.seconds):
                await trajectory.claimed.wait()
            await trajectory.reported.wait()
        except TimeoutError as error:
            raise AgentFailed("no agent claimed it (POST /v1/trajectories with the run's key)") from error
        finally:
            self._endpoint.shut(key)
        return _reported(policy, trajectory)

    async def start(self) -> None:
        """Listen, and start the command, if there is one."""
        await self._endpoint.start()
        if self._command:
            self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        try:
            async with self._running(self._endpoint.run_key) as (process, output):
                said = last_words((await _end_of(output)).replace(self._endpoint.run_key, "(the run's key)"))
                ended = f"ended with exit status {await process.wait()}; it said: {said}"
        except OSError as error:
            ended = f"could not be started: {error}"
        self._endpoint.fail(f"who plays them {ended}")

    async def close(self) -> None:
        """End what `start` began."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self._endpoint.close()


def _reported(policy: TrajectoryClient, trajectory: Trajectory) -> Completion:
    result = trajectory.result
    assert result is not None
    if result.failure:
        raise AgentFailed(redacted(result.failure)[:KEPT_OUTPUT])
    return policy.trajectory(result.reward, truncated=False, numbers=result.numbers)


async def _end_of(output: asyncio.StreamReader) -> str:
    """The end of what is written, once all is: more than is shown, or the first part of a key could be missing."""
    said = b""
    while piece := await output.read(2**16):
        said = (said + piece)[-READ_OUTPUT:]
    return said.decode(errors="replace").strip()


def last_words(output: str) -> str:
    """The end of an output without the run's secrets, as far as it is shown."""
    return redacted(output)[-KEPT_OUTPUT:]


def for_agents(variables: Mapping[str, str]) -> dict[str, str]:
    """Without this package on the path: an agent may be of another interpreter, that our packages do not fit."""
    paths = variables.get("PYTHONPATH", "").split(os.pathsep)
    kept = [path for path in paths if Path(path).resolve() != PACKAGE_ROOT.resolve()]
    return {**variables, "PYTHONPATH": os.pathsep.join(kept)}


def main(owner_pid: int, command: str) -> None:
    """Below a guardian, become the agent."""
    spare = os.open(os.devnull, os.O_RDONLY)
    split_off_guardian(owner_pid, spare, MAX_PROCESSES)
    os.close(spare)
    os.execve("/bin/sh", ["/bin/sh", "-c", command], for_agents(os.environ))
