"""A user's reward in a killable process: deadlines are kept by SIGKILL. What was lost is tried again by the queue."""

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Self

from async_grpo.errors import ConfigurationError, WorkerLost
from async_grpo.options.redaction import register_secrets
from async_grpo.options.source_file import PACKAGE_ROOT, SourceFile
from async_grpo.rewards.adapter.decorators import AdapterTraits
from async_grpo.rewards.adapter.registry_source import RewardRegistrySource
from async_grpo.rewards.adapter.result import failure
from async_grpo.rewards.isolation.child_process import ChildProcess
from async_grpo.rewards.isolation.lines import encode_line
from async_grpo.rewards.verifier_worker import ProcessDied, fields_of
from async_grpo.types import AdapterResult, RewardStatus

CLOSE_S = 2.0  # for the `close` of a reward
FORWARDED_VARIABLES = "PATH PYTHONPATH LD_LIBRARY_PATH HOME TMPDIR LANG LC_ALL LC_CTYPE TZ".split()
FIXED_VARIABLES = dict.fromkeys("OMP_NUM_THREADS OPENBLAS_NUM_THREADS MKL_NUM_THREADS".split(), "1") | {
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONHASHSEED": "0",  # the same text gets the same reward in every process
    "CUDA_VISIBLE_DEVICES": "",  # the accelerators belong to the trainers and the engines
}


class AdapterProcess:
    """A verifier worker (see `VerifierWorker`) that runs one reward in a child process.

    The process is started by `start`, or by the first call, and anew after a time-out, a crash or a cancelled call:
    what an abandoned call may still answer is never read.

    Args:
        options: keyword options; the reward receives those that it names.
        environment: variables for the process beside the allow-list. Their values are secrets: they read *** in logs
            and reasons of this process and of that one, and in what that one prints.
        memory_limit_bytes: address space of each process (RLIMIT_AS).
    """

    host = "async_grpo.rewards.isolation.child:hosted_reward"  # the function that makes what serves it there
    max_processes = 128  # the process and all that it starts; beyond that they are ended
    max_message_bytes = 16 * 2**20  # of one sample or one reply
    start_timeout_s = 60.0  # to start, import the registry file and warm up, on no sample's time
    grace_s = 2.0  # for an async reward to obey a cancellation; else it costs the process

    def __init__(
        self,
        source: RewardRegistrySource | SourceFile,
        adapter: str,
        options: Mapping[str, Any] | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        memory_limit_bytes: int = 8 * 2**30,
    ) -> None:
        self.adapter, self._environment = adapter, child_environment(environment)
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
        self._starting = asyncio.Lock()
        self._closed = False

    async def start(self) -> Self:
        """Start the process now, so that no sample waits for it; returns this worker.

        ConfigurationError: the registry file or the reward in it cannot be used.
        ProcessDied: it died or was not ready in time.
        WorkerLost: the worker is closed.
        """
        async with self._starting:
            if self._closed:
                raise WorkerLost(f"the worker of {self.adapter!r} is closed")
            if self.is_alive:
                return self
            limits = self.max_message_bytes, self.max_processes
            child = self._child = ChildProcess(self.adapter, *limits, self._environment)
            await asyncio.get_running_loop().create_unix_connection(lambda: child, sock=child.channel)
            greeting = encode_line(self._greeting | {"max_message_bytes": self.max_message_bytes})
            try:
                reply = await child.ask("greeting", greeting, self.start_timeout_s, 0.0)
            except TimeoutError:
                late = f"was not ready within {self.start_timeout_s:g} s"
                raise ProcessDied(f"the process of {self.adapter!r} {late}") from None
            if error := reply.get("error"):
                await child.end(WorkerLost(error))
                raise ConfigurationError(f"reward function {self.adapter!r} cannot start: {error}")
            self.traits = traits = child.traits = AdapterTraits(**reply["traits"])
            self.capacity, self.has_post_process = traits.capacity, traits.has_post_process
            self.prefetch = not (traits.is_async or traits.is_batch)  # others wait in the process's pipe
            return self

    @property
    def is_alive(self) -> bool:
        """Whether there is a process that answers."""
        return self._child is not None and not self._child.lost and not self._closed

    async def score(self, sample: dict[str, Any], timeout_s: float) -> AdapterResult:
        """Score one sample. What the reward raises, or that it is late, is a result; see also `VerifierWorker`."""
        asked_at = time.monotonic()
        (answer,) = await self._exchange("sample", sample, 1, timeout_s)
        return AdapterResult(self.adapter, **fields_of(answer), latency_s=time.monotonic() - asked_at)

    async def post_process(
        self, samples: Sequence[dict[str, Any]], results: Sequence[AdapterResult], timeout_s: float
    ) -> list[AdapterResult]:
        """The group's results after the reward's `post_process_scores`, as they are if it has none."""
        group = [
            {"sample": sample, "status": result.status.value, "reward": result.reward, "extra": result.extra}
            | {"steps": result.steps, "reason": result.reason}
            for sample, result in zip(samples, results, strict=True)
        ]
        answers = await self._exchange("group", group, len(group), timeout_s)
        return [replace(result, **fields_of(answer)) for result, answer in zip(results, answers, strict=True)]

    async def close(self) -> None:
        """End the process, for good; calls in flight raise WorkerLost."""
        self._closed = True
        if self._child is not None:
            await self._child.end(WorkerLost(f"the worker of {self.adapter!r} is closed"), CLOSE_S)

    async def _exchange(self, what: str, content: Any, count: int, timeout_s: float) -> list[dict[str, Any]]:
        """The process's answers to what is sent, so many, or why there are none."""
        try:
            body = encode_line(content, self.max_message_bytes * max(1, count))
            await self.start()
            assert self._child is not None, "`start` has made one"
            return (await self._child.ask(what, body, timeout_s, self.grace_s))["answers"]
        except ConfigurationError as error:
            late_or_broken = failure(str(error))
        except (TypeError, ValueError) as error:
            late_or_broken = failure(f"the sample cannot be sent: {error}")
        except TimeoutError:
            late_or_broken = failure(f"no answer within {timeout_s:g} s", RewardStatus.TIMED_OUT.value)
        return [late_or_broken] * count


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The allow-listed variables and the extra ones, one thread per library, and this package on the path."""
    forwarded = {name: os.environ[name] for name in FORWARDED_VARIABLES if name in os.environ}
    package_root = str(PACKAGE_ROOT)
    path = os.pathsep.join(filter(None, [package_root, forwarded.get("PYTHONPATH")]))
    return forwarded | FIXED_VARIABLES | dict(extra or {}) | {"PYTHONPATH": path}


def named_environment(names: Sequence[str]) -> dict[str, str]:
    """These variables of this process, for rewards that ask a service and need its key (`--reward-env`).

    The values are handed to the rewards' processes as arguments and kept nowhere else; from now on they read *** in the
    logs of this process. Raises ConfigurationError if one is not set.
    """
    if missing := ", ".join(name for name in names if name not in os.environ):
        said = f"--reward-env {','.join(names)}"
        raise ConfigurationError(f"{said}: this process has no variable {missing}; set it, or leave it out")
    values = {name: os.environ[name] for name in names}
    register_secrets(values.values())
    return values
