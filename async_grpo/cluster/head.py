"""What trainer rank 0 opens on the cluster, and how every rank reaches it.

open_run        registries, with the settings of the run: workers can find it from now on
await_workers   until each kind that the run needs is there (or one of them refused)
start_batcher   verifier pool and experience batcher
close_run       tells the workers that the run is over
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from async_grpo.cluster.actors import BatcherActor, RegistryActor, VerifierPoolActor, light
from async_grpo.cluster.connect import (
    EXPERIENCE_BATCHER,
    GENERATION_REGISTRY,
    LOGPROB_REGISTRY,
    VERIFIER_POOL,
    find_actor,
)
from async_grpo.config import RunConfig
from async_grpo.errors import ConfigurationError, DeadlineExceeded, WorkerLost
from async_grpo.experience.batcher import BatcherPlan
from async_grpo.experience.prompts import Question
from async_grpo.rewards.source import RewardSource
from async_grpo.types import MicroBatch, Settings, StepEnd

log = logging.getLogger(__name__)
CONTROL_TIMEOUT_S = 60.0  # of calls that only move a few numbers


@dataclass(frozen=True)
class OpenRun:
    """Handles of the run's registries."""

    generation: Any
    logprob: Any

    @property
    def registries(self) -> dict[str, Any]:
        return {"generation": self.generation, "logprob": self.logprob}


def open_run(config: RunConfig, settings: Settings) -> OpenRun:
    """Make the registries, on this node.

    Raises:
        ConfigurationError: a run of this name is open already.
    """
    registries = []
    for name, kind in ((GENERATION_REGISTRY, "generation"), (LOGPROB_REGISTRY, "logprob")):
        try:
            registries.append(_here(RegistryActor, name).remote(kind, settings, config.worker_grace_s))
        except ValueError as error:
            raise ConfigurationError(
                f"a run named {config.run_name!r} is open on this cluster: choose another --run-name"
            ) from error
    return OpenRun(*registries)


def await_workers(run: OpenRun, config: RunConfig, roles: Sequence[str]) -> str:
    """Wait for a generation worker and for a logprob worker of each role.

    Returns:
        The reward names that the generation workers were started with ("" if they named none).

    Raises:
        ConfigurationError: a worker refused (another model, say), or cannot hold one group.
        DeadlineExceeded: a kind is still missing after `start_timeout_s`.
    """
    give_up, next_word = time.monotonic() + config.start_timeout_s, time.monotonic() + 2.0
    while True:
        generation, rewards, refusals = _get(run.generation.roll_call.remote())
        logprob, _, more_refusals = _get(run.logprob.roll_call.remote())
        if refusals or more_refusals:
            raise ConfigurationError("; ".join(refusals + more_refusals))
        missing = _missing(bool(generation), {info.role for info in logprob}, roles)
        if not missing:
            _check_capacity(max(info.max_sequences for info in generation), config.samples_per_question)
            return _one_reward_list(rewards)
        if time.monotonic() > give_up:
            raise DeadlineExceeded(
                f"after {config.start_timeout_s:.0f} s there is still {'; and '.join(missing)}"
            )
        if time.monotonic() > next_word:
            log.info("waiting: there is %s", "; and ".join(missing))
            next_word = time.monotonic() + 15.0
        time.sleep(0.2)


def _missing(has_generation: bool, present_roles: set[str], needed_roles: Sequence[str]) -> list[str]:
    command = "python worker_dispatcher.py --mode"
    missing = [] if has_generation else [f"no generation worker ({command} generation ...)"]
    return missing + [
        f"no {role} logprob worker ({command} logprob --role {role} ...)"
        for role in needed_roles
        if role not in present_roles
    ]


def _check_capacity(capacity: int, samples_per_question: int) -> None:
    if capacity < samples_per_question:
        raise ConfigurationError(
            f"a group of {samples_per_question} (--samples-per-question) fits no generation worker: the largest takes "
            f"{capacity} sequences (--max_num_seqs + --overhead_seqs). Raise these, or make the groups smaller"
        )


def _one_reward_list(rewards: Sequence[str]) -> str:
    named = sorted({names for names in rewards if names})
    if len(named) > 1:
        raise ConfigurationError(f"generation workers name different rewards: {' / '.join(named)}")
    return named[0] if named else ""


def start_batcher(
    run: OpenRun,
    config: RunConfig,
    plan: BatcherPlan,
    questions: list[Question],
    rewards: tuple[RewardSource, Sequence[str]],
    roles: Sequence[str],
) -> Any:
    """Start the verifiers and the batcher; returns the batcher's handle."""
    source, adapters = rewards
    pool = _here(VerifierPoolActor, VERIFIER_POOL).remote(
        source, adapters, config.verifiers_per_reward, config.reward_timeout_s
    )
    _get(pool.start.remote(), config.start_timeout_s)
    batcher = _here(BatcherActor, EXPERIENCE_BATCHER).remote(
        plan, ray.put(questions), run.registries, pool, roles
    )
    return batcher


def close_run(run: OpenRun, reason: str) -> None:
    """Tell the workers that the run is over; they end by themselves."""
    _get([registry.close.remote(reason) for registry in run.registries.values()])
    time.sleep(0.5)  # their long polls carry the word before the registries end with this process


class RemoteExperience:
    """`ExperienceSource` of one rank: fetches the next message while the rank computes on the last one."""

    def __init__(self, batcher: Any, rank: int, num_steps: int, timeout_s: float) -> None:
        self._batcher, self._rank, self._num_steps = batcher, rank, num_steps
        self._timeout_s = timeout_s + CONTROL_TIMEOUT_S  # the batcher's own deadline has the better message
        self._next: Any = None

    def start(self) -> None:
        if self._rank == 0:
            _get(self._batcher.start.remote())

    def next_message(self, rank: int) -> MicroBatch | StepEnd:
        """The next micro-batch or step end; raises what the batcher raises."""
        self._next = self._next or self._batcher.next_message.remote(rank)
        message = _get(self._next, self._timeout_s)
        last = isinstance(message, StepEnd) and message.step + 1 == self._num_steps
        self._next = None if last else self._batcher.next_message.remote(rank)
        return message

    def weights_live(self, version: int) -> None:
        _get(self._batcher.weights_live.remote(version))

    def evaluate(self, questions: list[Question], timeout_s: float) -> dict[str, Any]:
        return _get(self._batcher.evaluate.remote(questions, 1), timeout_s)


def find_batcher(deadline_s: float) -> Any:
    """The batcher's handle, on ranks other than 0."""
    return find_actor(EXPERIENCE_BATCHER, deadline_s, "waiting for rank 0 to start the experience batcher")


def _here(actor_class: type, name: str) -> Any:
    """A control actor on this node: the run then does not depend on any other node for its bookkeeping."""
    affinity = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    return light(actor_class, scheduling_strategy=affinity, name=name)


def _get(reference: Any, timeout_s: float = CONTROL_TIMEOUT_S) -> Any:
    """`ray.get` with a deadline, raising the actor's own error instead of Ray's wrapping of it."""
    try:
        return ray.get(reference, timeout=timeout_s)
    except RayTaskError as error:
        raise getattr(error, "cause", None) or error from None
    except GetTimeoutError as error:
        raise DeadlineExceeded(f"an actor of the run did not answer within {timeout_s:.0f} s") from error
    except RayActorError as error:
        raise WorkerLost(f"an actor of the run died: {' '.join(str(error).split())[:300]}") from error
