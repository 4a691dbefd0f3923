"""Rollout programs of agents: programs of any kind that talk to the run's endpoint.

`--environment agent:COMMAND` starts the command once for each trajectory. It finds OPENAI_BASE_URL and OPENAI_API_KEY in
its environment variables, and the row of the data set as JSON on its standard input. It may report a reward (`POST
/v1/result`). If it does not, its exit status is the result: 0 is a reward of 1, 100 is a reward of 0, any other fails the
trajectory.

`--environment endpoint` starts no agent. Agents that run elsewhere claim trajectories (`POST /v1/trajectories`) and report
their rewards. `endpoint.json` in the run's output folder has the address and the key of the run.
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

# Exit statuses of an agent
SOLVED = 0
NOT_SOLVED = 100

MAX_PROCESSES = 256  # of one agent
TERMINATION_S = 10.0  # that an agent has to end in before it is killed
CLAIM_SHARE = 0.9  # part of a trajectory's time in which an agent must claim it
MAX_SHOWN_CHARACTERS = 2000  # of an agent's last output, in the reason of a failure
# More bytes of the last output are kept than are shown, so that a key is found whose first characters are not shown
MAX_KEPT_BYTES = 2**16
_MAIN = "import sys; from async_grpo.environments.agents import main; main(int(sys.argv[1]), sys.argv[2])"


class AgentFailed(RuntimeError):
    """An agent ended without a result, reported a failure, or none claimed the trajectory."""


class _Agent:
    """Common part of the programs below: the endpoint, and a command with its environment variables."""

    def __init__(self, endpoint: AgentEndpoint, command: str, variables: Mapping[str, str] | None) -> None:
        self._endpoint = endpoint
        self._command = command
        self._variables = variables
        register_secrets((variables or {}).values())

    @asynccontextmanager
    async def _running(
        self, key: str, row: bytes = b""
    ) -> AsyncIterator[tuple[Process, asyncio.StreamReader]]:
        """Run the command, and yield its process and its output. At the end of the context, all its processes have ended.

        Args:
            key: The key that the command uses at the endpoint.
            row: Content of its standard input.
        """
        endpoint_variables = {"OPENAI_BASE_URL": self._endpoint.base_url, "OPENAI_API_KEY": key}
        # Input and output are no pipes of asyncio's process: such a process counts as running while any other process holds
        # its pipes. The output is a socket rather than a pipe, because uvloop closes the descriptor of a pipe twice, and
        # the second time it may already be another file's.
        parent_socket, child_socket = socket.socketpair()
        with child_socket, tempfile.TemporaryFile() as standard_input:
            standard_input.write(row)
            standard_input.seek(0)
            output, writer = await asyncio.open_unix_connection(sock=parent_socket)
            with closing(writer):
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-c",
                    _MAIN,
                    str(os.getpid()),
                    self._command,
                    stdin=standard_input,
                    stdout=child_socket.fileno(),
                    stderr=STDOUT,
                    env=child_environment({**(self._variables or {}), **endpoint_variables}),
                    start_new_session=True,
                )
                # The output ends once no process has the socket open
                child_socket.close()
                try:
                    yield process, output
                finally:
                    await _terminate(process)


async def _terminate(process: Process) -> None:
    """End an agent's guardian, which ends all processes that the agent started."""
    if process.returncode is not None:
        return
    process.terminate()
    # The agent may have stopped its guardian
    process.send_signal(signal.SIGCONT)
    try:
        await asyncio.wait_for(process.wait(), TERMINATION_S)
    except TimeoutError:
        process.kill()
        await process.wait()


class RunAgent(_Agent):
    """A program that starts an agent for each trajectory, in processes that end with the trajectory."""

    async def __call__(self, prompt: Prompt, policy: TrajectoryClient) -> Completion:
        """Play one trajectory."""
        key, trajectory = self._endpoint.open(policy)

        def trajectory_so_far() -> Completion:
            # The exit status of an agent that met a limit says nothing about its task
            if trajectory.result is None:
                return policy.trajectory(0.0)
            return _reported(policy, trajectory)

        policy.at_limit = trajectory_so_far
        try:
            row = json.dumps(row_of(prompt)).encode()
            async with self._running(key, row) as (process, output):
                last_output = await _read_to_end(output)
                status = await process.wait()
        finally:
            self._endpoint.shut(key)
        if policy.is_over or trajectory.result is not None:
            return trajectory_so_far()
        if status not in (SOLVED, NOT_SOLVED):
            words = last_words(last_output.replace(key, "(its key)"))
            raise AgentFailed(f"the agent ended with exit status {status} and no report; it said: {words}")
        return policy.trajectory(float(status == SOLVED), truncated=False)


class AwaitAgent(_Agent):
    """A program in which an agent that runs elsewhere claims the trajectory, plays it, and reports its result.

    If there is a command, it is started once, receives the run's key, and plays all trajectories.
    """

    _watching: asyncio.Task[None] | None = None

    async def __call__(self, prompt: Prompt, policy: TrajectoryClient) -> Completion:
        """Play one trajectory."""
        key, trajectory = self._endpoint.open(policy)
        try:
            self._endpoint.offer(key)
            # The wait ends before the trajectory's own time, or the trajectory would count as one that took too long
            async with asyncio.timeout(CLAIM_SHARE * policy.limits.seconds):
                await trajectory.claimed.wait()
            await trajectory.reported.wait()
        except TimeoutError as error:
            raise AgentFailed("no agent claimed it (POST /v1/trajectories with the run's key)") from error
        finally:
            self._endpoint.shut(key)
        return _reported(policy, trajectory)

    async def start(self) -> None:
        """Listen, and start the command if there is one."""
        await self._endpoint.start()
        if self._command:
            self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """Run the command, and fail all trajectories when it has ended."""
        run_key = self._endpoint.run_key
        try:
            async with self._running(run_key) as (process, output):
                last_output = await _read_to_end(output)
                words = last_words(last_output.replace(run_key, "(the run's key)"))
                event = f"ended with exit status {await process.wait()}; it said: {words}"
        except OSError as error:
            event = f"could not be started: {error}"
        self._endpoint.fail(f"who plays them {event}")

    async def close(self) -> None:
        """End what `start` began."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self._endpoint.close()


def _reported(policy: TrajectoryClient, trajectory: Trajectory) -> Completion:
    """Return the trajectory with the result that its agent reported."""
    result = trajectory.result
    assert result is not None
    if result.failure:
        raise AgentFailed(redacted(result.failure)[:MAX_SHOWN_CHARACTERS])
    return policy.trajectory(result.reward, truncated=False, numbers=result.numbers)


async def _read_to_end(output: asyncio.StreamReader) -> str:
    """Read an output until it ends, and return its last part."""
    last_bytes = b""
    while True:
        piece = await output.read(MAX_KEPT_BYTES)
        if not piece:
            break
        last_bytes = (last_bytes + piece)[-MAX_KEPT_BYTES:]
    return last_bytes.decode(errors="replace").strip()


def last_words(output: str) -> str:
    """Return the end of an output, as much as a failure shows, without the run's secrets."""
    return redacted(output)[-MAX_SHOWN_CHARACTERS:]


def for_agents(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with this package removed from PYTHONPATH.

    An agent may run in another interpreter, for which the packages beside this one are not made.
    """
    paths = variables.get("PYTHONPATH", "").split(os.pathsep)
    other_paths = [path for path in paths if Path(path).resolve() != PACKAGE_ROOT.resolve()]
    return {**variables, "PYTHONPATH": os.pathsep.join(other_paths)}


def main(owner_pid: int, command: str) -> None:
    """Start a guardian, and become the agent below it.

    Args:
        owner_pid: The process with which the agent ends.
        command: The agent's shell command.
    """
    unused_file = os.open(os.devnull, os.O_RDONLY)
    split_off_guardian(owner_pid, unused_file, MAX_PROCESSES)
    os.close(unused_file)
    os.execve("/bin/sh", ["/bin/sh", "-c", command], for_agents(os.environ))
