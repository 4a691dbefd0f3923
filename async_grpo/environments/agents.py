"""Rollout programs for agents. An agent is a program of any kind that sends requests to the run's endpoint.

`--environment agent:COMMAND` starts the command once for each trajectory. The command finds OPENAI_BASE_URL and
OPENAI_API_KEY in its environment variables, and the row of the data set as JSON on its standard input. It may report a
reward (`POST /v1/result`). If it does not, its exit status is the result: 0 is a reward of 1, 100 is a reward of 0, and
any other status fails the trajectory. An agent that a limit ended without a report has a reward of 0.

`--environment endpoint` starts no agent. Agents that run elsewhere claim trajectories (`POST /v1/trajectories`) and report
their rewards. `endpoint.json` in the run's output folder contains the address of the endpoint and the run's key.
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

from async_grpo.environments.openai_server.endpoint import AgentEndpoint
from async_grpo.environments.openai_server.open_trajectory import Trajectory
from async_grpo.environments.trajectory_client import TrajectoryClient, row_of
from async_grpo.options.redaction import redacted, register_secrets
from async_grpo.options.source_file import PACKAGE_ROOT
from async_grpo.processes.output_log import OutputLog, SourceOutput
from async_grpo.processes.process_tree import split_off_guardian
from async_grpo.rewards.isolation.adapter_process import child_environment
from async_grpo.types import Completion, Prompt

# Exit statuses that an agent may use as its result
SOLVED = 0
NOT_SOLVED = 100

MAX_PROCESSES = 256  # maximum number of processes of one agent
TERMINATION_S = 10.0  # seconds that an agent has to end before it is killed
CLAIM_SHARE = 0.9  # share of a trajectory's time limit within which an agent must claim it
MAX_SHOWN_CHARACTERS = 2000  # characters of an agent's last output that the reason of a failure shows
# Bytes of the last output that are kept. More bytes are kept than are shown, because a secret is only recognized and
# redacted as a whole, and its beginning may lie before the shown part
MAX_KEPT_BYTES = 2**16
_MAIN = "import sys; from async_grpo.environments.agents import main; main(int(sys.argv[1]), sys.argv[2])"


class AgentFailed(RuntimeError):
    """An agent ended without a result or reported a failure, or no agent claimed the trajectory."""


class _Agent:
    """Common base of the programs below. It contains the endpoint, and a command with its environment variables."""

    def __init__(
        self,
        endpoint: AgentEndpoint,
        command: str,
        variables: Mapping[str, str] | None,
        output_log: OutputLog | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._command = command
        self._variables = variables
        self._output_log = output_log
        register_secrets((variables or {}).values())

    def _log_of(self, source: str) -> SourceOutput | None:
        """Return the part of the log file for one process, or None if there is no log file."""
        return None if self._output_log is None else self._output_log.output_of(source)

    @asynccontextmanager
    async def _running(
        self, key: str, row: bytes = b""
    ) -> AsyncIterator[tuple[Process, asyncio.StreamReader]]:
        """Run the command, and yield its process and its output. When the context exits, all its processes are ended.

        Args:
            key: The key with which the command accesses the endpoint.
            row: Content of the command's standard input.
        """
        endpoint_variables = {"OPENAI_BASE_URL": self._endpoint.base_url, "OPENAI_API_KEY": key}
        # Input and output are not asyncio's own pipes, because asyncio would consider the process as running while any
        # other process has its pipes open. The output is a socket instead of a pipe, because uvloop closes the descriptor
        # of a pipe twice, and the second time the descriptor may already belong to another file.
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
                # Close our copy of the agent's end. The output only ends when no process has this end open
                child_socket.close()
                try:
                    yield process, output
                finally:
                    await _terminate(process)


async def _terminate(process: Process) -> None:
    """End an agent's guardian process, which ends all processes that the agent has started."""
    if process.returncode is not None:
        return
    process.terminate()
    # The agent may have suspended its guardian (SIGSTOP), so wake the guardian up
    process.send_signal(signal.SIGCONT)
    try:
        await asyncio.wait_for(process.wait(), TERMINATION_S)
    except TimeoutError:
        process.kill()
        await process.wait()


class RunAgent(_Agent):
    """A rollout program that starts an agent for each trajectory. The agent's processes end with the trajectory."""

    async def __call__(self, prompt: Prompt, policy: TrajectoryClient) -> Completion:
        """Play one trajectory."""
        key, trajectory = self._endpoint.open(policy)

        def trajectory_so_far() -> Completion:
            # If a limit ended the agent, its exit status says nothing about its task, so the reward is 0
            if trajectory.result is None:
                return policy.trajectory(0.0)
            return _reported(policy, trajectory)

        policy.at_limit = trajectory_so_far
        try:
            row = json.dumps(row_of(prompt)).encode()
            async with self._running(key, row) as (process, output):
                last_output = await _read_to_end(output, self._log_of(f"agent {process.pid}"))
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
    """A rollout program that waits for an agent to claim the trajectory, play it and report its result.

    If there is a command, it is started once. It receives the run's key, and plays all trajectories.
    """

    _watching: asyncio.Task[None] | None = None

    async def __call__(self, prompt: Prompt, policy: TrajectoryClient) -> Completion:
        """Play one trajectory."""
        key, trajectory = self._endpoint.open(policy)
        try:
            self._endpoint.offer(key)
            # The wait must end before the trajectory's time limit. At that limit, the trajectory would count as
            # truncated instead of failed
            async with asyncio.timeout(CLAIM_SHARE * policy.limits.seconds):
                await trajectory.claimed.wait()
            await trajectory.reported.wait()
        except TimeoutError as error:
            raise AgentFailed("no agent claimed it (POST /v1/trajectories with the run's key)") from error
        finally:
            self._endpoint.shut(key)
        return _reported(policy, trajectory)

    async def start(self) -> None:
        """Start the endpoint, and the command if there is one."""
        await self._endpoint.start()
        if self._command:
            self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """Run the command. When it ends, fail all trajectories."""
        run_key = self._endpoint.run_key
        try:
            async with self._running(run_key) as (process, output):
                last_output = await _read_to_end(output, self._log_of("the agents' program"))
                words = last_words(last_output.replace(run_key, "(the run's key)"))
                event = f"ended with exit status {await process.wait()}; it said: {words}"
        except OSError as error:
            event = f"could not be started: {error}"
        self._endpoint.fail(f"the program that plays the trajectories {event}")

    async def close(self) -> None:
        """End the command, and close the endpoint."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self._endpoint.close()


def _reported(policy: TrajectoryClient, trajectory: Trajectory) -> Completion:
    """Return the trajectory with the result that its agent reported.

    Raises:
        AgentFailed: The agent reported a failure.
    """
    result = trajectory.result
    assert result is not None
    if result.failure:
        raise AgentFailed(redacted(result.failure)[:MAX_SHOWN_CHARACTERS])
    return policy.trajectory(result.reward, truncated=False, numbers=result.numbers)


async def _read_to_end(output: asyncio.StreamReader, log: SourceOutput | None) -> str:
    """Read an output until it ends, and return its last MAX_KEPT_BYTES as text. Write its beginning to the log."""
    last_bytes = b""
    while True:
        piece = await output.read(MAX_KEPT_BYTES)
        if not piece:
            break
        if log is not None:
            log.add(piece)
        last_bytes = (last_bytes + piece)[-MAX_KEPT_BYTES:]
    if log is not None:
        log.end()
    return last_bytes.decode(errors="replace").strip()


def last_words(output: str) -> str:
    """Return the last MAX_SHOWN_CHARACTERS of an output, without the run's secrets."""
    return redacted(output)[-MAX_SHOWN_CHARACTERS:]


def for_agents(variables: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables whose PYTHONPATH does not contain this library's folder.

    An agent may run in another Python interpreter, which must not import packages from that folder.
    """
    paths = variables.get("PYTHONPATH", "").split(os.pathsep)
    other_paths = [path for path in paths if Path(path).resolve() != PACKAGE_ROOT.resolve()]
    return {**variables, "PYTHONPATH": os.pathsep.join(other_paths)}


def main(owner_pid: int, command: str) -> None:
    """Fork this process. The parent becomes the guardian of the child, and the child runs the agent's command.

    Args:
        owner_pid: The process whose end also ends the agent.
        command: The agent's shell command.
    """
    unused_file = os.open(os.devnull, os.O_RDONLY)
    split_off_guardian(owner_pid, unused_file, MAX_PROCESSES)
    os.close(unused_file)
    os.execve("/bin/sh", ["/bin/sh", "-c", command], for_agents(os.environ))
