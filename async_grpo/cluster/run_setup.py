"""What trainer rank 0 opens on the cluster, and how every rank reaches it.

open_run        registries, with the settings of the run: workers can find it from now on
await_workers   until each kind that the run needs is there (or one of them refused)
start_batcher   verifier pool and experience batcher
end_rewards     the batcher, and then the rewards, in order
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

from async_grpo.cluster.actors import zero_cpu_actor
from async_grpo.cluster.batcher_actor import BatcherActor
from async_grpo.cluster.ray_session import (
    EXPERIENCE_BATCHER,
    GENERATION,
    VERIFIER_POOL,
    find_actor,
    registry_name,
)
from async_grpo.cluster.registry_actor import RegistryActor
from async_grpo.cluster.reward_actors import VerifierPoolActor
from async_grpo.config.run import RunConfig
from async_grpo.errors import ConfigurationError, DeadlineExceeded, WorkerLost
from async_grpo.experience.batcher import BatcherConfig
from async_grpo.experience.dataset import Question
from async_grpo.rewards.adapter.registry_source import RewardRegistrySource
from async_grpo.rewards.pool_plan import PoolConfig
from async_grpo.types import MicroBatch, SharedRunSettings, StepEnd

log = logging.getLogger(__name__)
SHUTDOWN_TIMEOUT_S = 10.0
CONTROL_TIMEOUT_S = 60.0  # of calls that only move a few numbers


@dataclass(frozen=True)
class OpenRun:
    """Handles of the run's registries, by kind of worker."""

    registries: dict[str, Any]

    @property
    def generation(self) -> Any:
        return self.registries[GENERATION]


def open_run(config: RunConfig, settings: SharedRunSettings) -> OpenRun:
    """Make a registry for each kind of worker that the run needs, on this node.

    Raises:
        ConfigurationError: a run of this name is open already.
    """
    registries = {}
    for kind in (GENERATION, *settings.logprob_roles):
        try:
            actor = _here(RegistryActor, registry_name(kind))
            registries[kind] = actor.remote(kind, settings, config.worker_grace_s)
        except ValueError as error:
            raise ConfigurationError(
                f"a run named {config.run_name!r} is open on this cluster: choose another --run-name"
            ) from error
    return OpenRun(registries)


def await_workers(run: OpenRun, config: RunConfig) -> str:
    """Wait for a worker of each kind that the run needs.

    Returns:
        The reward names that the generation workers were started with ("" if they named none).

    Raises:
        ConfigurationError: a worker refused (another model, say), or cannot hold one group.
        DeadlineExceeded: a kind is still missing after `start_timeout_s`.
    """
    give_up, next_word = time.monotonic() + config.start_timeout_s, time.monotonic() + 2.0
    while True:
        roll_calls = {kind: _get(registry.roll_call.remote()) for kind, registry in run.registries.items()}
        if refusals := [reason for _, _, reasons in roll_calls.values() for reason in reasons]:
            raise ConfigurationError("; ".join(refusals))
        missing = [_missing(kind) for kind, (members, _, _) in roll_calls.items() if not members]
        if not missing:
            members, rewards, _ = roll_calls[GENERATION]
            _check_capacity(max(info.max_sequences for info in members), config.samples_per_question)
            return _one_reward_list(rewards)
        if time.monotonic() > give_up:
            raise DeadlineExceeded(
                f"after {config.start_timeout_s:.0f} s there is still {'; and '.join(missing)}"
            )
        if time.monotonic() > next_word:
            log.info("waiting: there is %s", "; and ".join(missing))
            next_word = time.monotonic() + 15.0
        time.sleep(0.2)


def _missing(kind: str) -> str:
    mode = "generation" if kind == GENERATION else f"logprob --role {kind}"
    what = "generation worker" if kind == GENERATION else f"{kind} logprob worker"
    return f"no {what} (python worker_dispatcher.py --mode {mode} ...)"


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
    plan: BatcherConfig,
    questions: list[Question],
    rewards: tuple[RewardRegistrySource, PoolConfig],
) -> tuple[Any, Any]:
    """Start the verifiers and the batcher; returns the handles of the batcher and of the verifier pool."""
    # Ray starts the pool anew when it dies, and the batcher asks again for what it owed
    pool = _here(VerifierPoolActor, VERIFIER_POOL, max_restarts=-1).remote(*rewards)
    _get(pool.start.remote(), config.start_timeout_s)
    batcher = _here(BatcherActor, EXPERIENCE_BATCHER).remote(plan, ray.put(questions), run.registries, pool)
    return batcher, pool


def end_rewards(batcher: Any, pool: Any) -> None:
    """End what works for a step that nobody will train on; rewards are closed, and what they have cost is on disk."""
    ray.kill(batcher)
    try:
        _get(pool.close.remote(), SHUTDOWN_TIMEOUT_S)
    except (DeadlineExceeded, WorkerLost) as error:  # the training is done, whatever becomes of them
        log.warning("the rewards did not end in order: %s", error)


def close_run(run: OpenRun, reason: str) -> None:
    """Tell the workers that the run is over, and wait until they have signed off (their registries end with us)."""
    _get([registry.close.remote(reason) for registry in run.registries.values()])
    give_up = time.monotonic() + SHUTDOWN_TIMEOUT_S
    while any(_get(registry.roll_call.remote())[0] for registry in run.registries.values()):
        if time.monotonic() > give_up:
            log.warning("not all workers have signed off after %.0f s", SHUTDOWN_TIMEOUT_S)
            return
        time.sleep(0.1)


class RemoteExperience:
    """`ExperienceSource` of one rank: fetches the next message while the rank computes on the last one."""

    def __init__(self, batcher: Any, rank: int, timeout_s: float) -> None:
        self._batcher, self._rank = batcher, rank
        self._timeout_s = timeout_s + CONTROL_TIMEOUT_S  # the batcher's own deadline has the better message
        self._next: Any = None

    def start(self) -> None:
        if self._rank == 0:
            _get(self._batcher.start.remote())

    def next_message(self, rank: int) -> MicroBatch | StepEnd:
        """The next micro-batch or step end; raises what the batcher raises."""
        self._next = self._next or self._batcher.next_message.remote(rank)
        message = _get(self._next, self._timeout_s)
        # Not beyond the step: the batcher's deadline would run while the trainer steps, syncs and evaluates.
        self._next = None if isinstance(message, StepEnd) else self._batcher.next_message.remote(rank)
        return message

    def weights_live(self, version: int) -> None:
        _get(self._batcher.weights_live.remote(version))

    def evaluate(self, questions: list[Question], timeout_s: float) -> dict[str, Any]:
        return _get(self._batcher.evaluate.remote(questions, 1), timeout_s)


def find_batcher(deadline_s: float) -> Any:
    """The batcher's handle, on ranks other than 0."""
    return find_actor(EXPERIENCE_BATCHER, deadline_s, "waiting for rank 0 to start the experience batcher")


def _here(actor_class: type, name: str, **options: Any) -> Any:
    """A control actor on this node: the run then does not depend on any other node for its bookkeeping."""
    affinity = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    return zero_cpu_actor(actor_class, scheduling_strategy=affinity, name=name, **options)


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
