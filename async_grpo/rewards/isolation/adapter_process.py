"""`AdapterProcess` runs a user's reward in a child process, which is killed when a call takes too long."""

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Self

from async_grpo.errors import ConfigurationError, WorkerLost
from async_grpo.options.redaction import register_secrets
from async_grpo.options.source_file import PACKAGE_ROOT, SourceFile
from async_grpo.processes.output_log import OutputLog
from async_grpo.rewards.adapter.decorators import AdapterTraits
from async_grpo.rewards.adapter.registry_source import RewardRegistrySource
from async_grpo.rewards.adapter.result import failure
from async_grpo.rewards.isolation.child_process import STDERR, ChildProcess
from async_grpo.rewards.isolation.lines import encode_line
from async_grpo.rewards.verifier_worker import ProcessDied, fields_of
from async_grpo.types import AdapterResult, RewardStatus

CLOSE_S = 2.0  # time limit for the `close` of a reward, in seconds
FORWARDED_VARIABLES = "PATH PYTHONPATH LD_LIBRARY_PATH HOME TMPDIR LANG LC_ALL LC_CTYPE TZ".split()
FIXED_VARIABLES = dict.fromkeys("OMP_NUM_THREADS OPENBLAS_NUM_THREADS MKL_NUM_THREADS".split(), "1") | {
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONHASHSEED": "0",  # text hashes, and rewards based on them, are the same in every process
    "CUDA_VISIBLE_DEVICES": "",  # hides the GPUs, which the trainers and engines use
}


class AdapterProcess:
    """A verifier worker (see `VerifierWorker`) that runs one reward in a child process.

    `start` or the first call starts the process. If the process has ended, for example after a time-out or a crash, the
    next call starts a new one. Therefore a late answer to an abandoned call is never read.

    Args:
        source: The registry file, and further files with rewards.
        adapter: Name of the reward.
        options: Options by name. The reward receives each option for which it has a parameter.
        environment: Environment variables for the process, in addition to the allow-listed ones. Their values are
            treated as secrets: logs, error messages and the output of the reward's process show *** instead.
        memory_limit_bytes: Limit of the process's address space (RLIMIT_AS).
        output: Log file of what the process prints. By default this goes to the program's stderr.
    """

    kind = "reward function"  # what runs in the process, for messages
    # Function that prepares the `Host`, the object that answers the requests in the process
    host = "async_grpo.rewards.isolation.child:hosted_reward"
    # Maximum number of processes, with those that the reward starts. If there are more, all are ended
    max_processes = 128
    max_message_bytes = 16 * 2**20  # size limit of one sample or one reply
    # Time limit to start, import the registry file and warm up, in seconds. It is not part of a sample's time-out
    start_timeout_s = 60.0
    grace_s = 2.0  # time for an async reward to obey a cancellation before its process is killed

    def __init__(
        self,
        source: RewardRegistrySource | SourceFile,
        adapter: str,
        options: Mapping[str, Any] | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        memory_limit_bytes: int = 8 * 2**30,
        output: OutputLog | None = None,
    ) -> None:
        self.adapter = adapter
        self._output = output
        self._environment = child_environment(environment)
        register_secrets((environment or {}).values())
        self._greeting = {
            "host": self.host,
            "source": asdict(source),
            "adapter": adapter,
            "options": dict(options or {}),
            "memory_limit_bytes": memory_limit_bytes,
            "secret_variables": sorted(environment or {}),
        }
        self._child: ChildProcess | None = None
        self._start_lock = asyncio.Lock()
        self._is_closed = False

    async def start(self) -> Self:
        """Start the process unless it is running, and return this worker.

        Raises:
            ConfigurationError: The registry file or the reward in it cannot be used.
            ProcessDied: The process died, or was not ready in time.
            WorkerLost: The worker is closed.
        """
        async with self._start_lock:
            if self._is_closed:
                raise WorkerLost(f"the worker of {self.adapter!r} is closed")
            if self.is_alive:
                return self
            child = self._new_child()
            self._child = child
            await asyncio.get_running_loop().create_unix_connection(lambda: child, sock=child.channel)
            greeting = encode_line(self._greeting | {"max_message_bytes": self.max_message_bytes})
            try:
                reply = await child.ask("greeting", greeting, self.start_timeout_s, 0.0)
            except TimeoutError:
                raise ProcessDied(
                    f"the process of {self.adapter!r} was not ready within {self.start_timeout_s:g} s"
                ) from None
            error = reply.get("error")
            if error:
                await child.end(WorkerLost(error))
                raise ConfigurationError(f"{self.kind} {self.adapter!r} cannot start: {error}")
            traits = AdapterTraits(**reply["traits"])
            child.traits = traits
            self.traits = traits
            self.capacity = traits.capacity
            self.has_post_process = traits.has_post_process
            # While a plain reward scores one sample, the next samples can already wait in the pipe to its process
            self.prefetch = not traits.is_async and not traits.is_batch
            return self

    def _new_child(self) -> ChildProcess:
        """Return a new process, whose output goes to the log if there is one."""
        output_fd = STDERR if self._output is None else self._output.pipe(f"{self.kind} {self.adapter}")
        try:
            return ChildProcess(
                self.adapter,
                max_message_bytes=self.max_message_bytes,
                max_processes=self.max_processes,
                environment=self._environment,
                output_fd=output_fd,
            )
        finally:
            if output_fd != STDERR:
                os.close(output_fd)

    @property
    def is_alive(self) -> bool:
        """Return whether the process is running and can answer."""
        return self._child is not None and not self._child.is_lost and not self._is_closed

    async def score(self, sample: dict[str, Any], timeout_s: float) -> AdapterResult:
        """Return the result of one sample. A time-out or an error of the reward is returned as a result, not raised."""
        started_at = time.monotonic()
        (answer,) = await self._exchange("sample", sample, 1, timeout_s)
        return AdapterResult(self.adapter, **fields_of(answer), latency_s=time.monotonic() - started_at)

    async def post_process(
        self, samples: Sequence[dict[str, Any]], results: Sequence[AdapterResult], timeout_s: float
    ) -> list[AdapterResult]:
        """Return a group's results after the reward's `post_process_scores`, or unchanged if it has none."""
        group = []
        for sample, result in zip(samples, results, strict=True):
            member = {
                "sample": sample,
                "status": result.status.value,
                "reward": result.reward,
                "extra": result.extra,
                "steps": result.steps,
                "reason": result.reason,
            }
            group.append(member)
        answers = await self._exchange("group", group, len(group), timeout_s)
        return [replace(result, **fields_of(answer)) for result, answer in zip(results, answers, strict=True)]

    async def close(self) -> None:
        """End the process permanently. Calls in flight raise WorkerLost."""
        self._is_closed = True
        if self._child is not None:
            await self._child.end(WorkerLost(f"the worker of {self.adapter!r} is closed"), CLOSE_S)

    async def _exchange(
        self, kind: str, content: Any, num_answers: int, timeout_s: float
    ) -> list[dict[str, Any]]:
        """Return the process's answers to a `sample` or a `group`, or `num_answers` failures if there are none."""
        try:
            body = encode_line(content, self.max_message_bytes * max(1, num_answers))
            await self.start()
            assert self._child is not None, "`start` has made one"
            reply = await self._child.ask(kind, body, timeout_s, self.grace_s)
            return reply["answers"]
        except ConfigurationError as error:
            answer = failure(str(error))
        except (TypeError, ValueError) as error:
            answer = failure(f"the sample cannot be sent: {error}")
        except TimeoutError:
            answer = failure(f"no answer within {timeout_s:g} s", RewardStatus.TIMED_OUT.value)
        return [answer] * num_answers


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment variables of a child process.

    They are the allow-listed variables, the `extra` ones, and variables that limit numerical libraries to one thread.
    `PYTHONPATH` begins with the folder of this package.
    """
    forwarded = {name: os.environ[name] for name in FORWARDED_VARIABLES if name in os.environ}
    path = str(PACKAGE_ROOT)
    if forwarded.get("PYTHONPATH"):
        path += os.pathsep + forwarded["PYTHONPATH"]
    return forwarded | FIXED_VARIABLES | dict(extra or {}) | {"PYTHONPATH": path}


def named_environment(names: Sequence[str]) -> dict[str, str]:
    """Return environment variables by name, for rewards that need the API key of a service (`--reward-env`).

    The values are passed to the rewards' processes and stored nowhere else. Logs of this process show *** instead.

    Raises:
        ConfigurationError: A variable is not set.
    """
    missing = ", ".join(name for name in names if name not in os.environ)
    if missing:
        raise ConfigurationError(
            f"--reward-env {','.join(names)}: this process has no variable {missing}; set it, or leave it out"
        )
    values = {name: os.environ[name] for name in names}
    register_secrets(values.values())
    return values
