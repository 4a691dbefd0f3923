"""What trainer rank 0 opens on the cluster, and how every rank reaches it.

open_run        the run's controller, with the settings of the run: workers can find it from now on
await_workers   until each kind that the run needs is there (or one of them refused)
start_batcher   verifiers and experience batcher
end_rewards     the batcher, and then the rewards, in order
close_run       tells the workers that the run is over
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from async_grpo.cluster.actors import zero_cpu_actor
from async_grpo.cluster.channel import Channel
from async_grpo.cluster.controller import GENERATION, RollCall, RunController
from async_grpo.cluster.ray_session import CONTROLLER
from async_grpo.config.preflight import Prepared
from async_grpo.config.run import RunConfig
from async_grpo.errors import ConfigurationError, DeadlineExceeded, WorkerLost
from async_grpo.experience.dataset import Question
from async_grpo.protocols import Verification
from async_grpo.types import MicroBatch, SharedRunSettings, StepEnd

log = logging.getLogger(__name__)
SHUTDOWN_TIMEOUT_S = 10.0
CONTROL_TIMEOUT_S = 60.0  # of calls that only move a few numbers


def open_run(config: RunConfig, settings: SharedRunSettings) -> Any:
    """Make the run's controller on this node, which needs no other one for its bookkeeping; returns its handle.

    Raises:
        ConfigurationError: a run of this name is open already.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    try:
        actor = zero_cpu_actor(RunController, scheduling_strategy=here, name=CONTROLLER)
        return actor.remote(settings, config.worker_grace_s, Channel, config.scheduling)
    except ValueError as error:
        raise ConfigurationError(
            f"a run named {config.run_name!r} is open on this cluster: choose another --run-name"
        ) from error


def await_workers(controller: Any, config: RunConfig) -> str:
    """Wait for a worker of each kind that the run needs.

    Returns:
        The reward names that the generation workers were started with ("" if they named none).

    Raises:
        ConfigurationError: a worker refused (another model, say), or cannot hold one group.
        DeadlineExceeded: a kind is still missing after `start_timeout_s`.
    """
    give_up, next_word = time.monotonic() + config.start_timeout_s, time.monotonic() + 2.0
    while True:
        roll_call, refusals = answer(controller.roll_call.remote())
        missing = missing_workers(roll_call, refusals, config.samples_per_question)
        if not missing:
            return one_reward_list(roll_call[GENERATION][1])
        if time.monotonic() > give_up:
            raise DeadlineExceeded(f"after {config.start_timeout_s:.0f} s there is still {missing}")
        if time.monotonic() > next_word:
            log.info("waiting for workers to load and join: there is still %s", missing)
            next_word = time.monotonic() + 15.0
        time.sleep(0.2)


def missing_workers(roll_call: RollCall, refusals: Sequence[str], samples_per_question: int) -> str:
    """What the run still lacks, in words; "" when it can start.

    Raises:
        ConfigurationError: a worker refused, or none can hold one group.
    """
    if refusals:
        raise ConfigurationError("; ".join(refusals))
    if missing := [_missing(kind) for kind, (members, _) in roll_call.items() if not members]:
        return "; and ".join(missing)
    _check_capacity(max(info.max_sequences for info in roll_call[GENERATION][0]), samples_per_question)
    return ""


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


def one_reward_list(rewards: Sequence[str]) -> str:
    """The one list of rewards that all workers name, if they name any.

    Raises:
        ConfigurationError: they name different ones.
    """
    named = sorted({names for names in rewards if names})
    if len(named) > 1:
        raise ConfigurationError(f"generation workers name different rewards: {' / '.join(named)}")
    return named[0] if named else ""


def start_batcher(
    controller: Any,
    prepared: Prepared,
    num_ranks: int,
    make_verification: Callable[[], Verification],
) -> None:
    """Start the verifiers and the batcher in the controller."""
    config, questions = prepared.config, ray.put(prepared.questions)
    started = controller.start_batcher.remote(config, prepared.facts, num_ranks, questions, make_verification)
    answer(started, config.start_timeout_s)


def end_rewards(controller: Any) -> None:
    """End the rollouts for steps that will not be trained; rewards are closed, and what they cost is on disk."""
    try:
        answer(controller.stop.remote(), SHUTDOWN_TIMEOUT_S)
    except (DeadlineExceeded, WorkerLost) as error:  # the training is done, whatever becomes of them
        log.warning("the rewards did not end in order: %s", error)


def close_run(controller: Any, reason: str) -> None:
    """Tell the workers that the run is over, and wait until they have signed off (the controller ends with us)."""
    answer(controller.close.remote(reason))
    give_up = time.monotonic() + SHUTDOWN_TIMEOUT_S
    while any(members for members, _ in answer(controller.roll_call.remote())[0].values()):
        if time.monotonic() > give_up:
            log.warning("not all workers have signed off after %.0f s", SHUTDOWN_TIMEOUT_S)
            return
        time.sleep(0.1)


class RemoteExperience:
    """`ExperienceSource` of one rank: fetches the next message while the rank computes on the last one."""

    def __init__(self, controller: Any, rank: int, timeout_s: float) -> None:
        self._controller, self._rank = controller, rank
        self._timeout_s = timeout_s + CONTROL_TIMEOUT_S  # the batcher's own deadline has the better message
        self._next: Any = None

    def start(self) -> None:
        if self._rank == 0:
            answer(self._controller.start.remote())

    def next_message(self, rank: int) -> MicroBatch | StepEnd:
        """The next micro-batch or step end; raises what the batcher raises."""
        self._next = self._next or self._controller.next_message.remote(rank)
        message = answer(self._next, self._timeout_s)
        # Not beyond the step: the batcher's deadline would run while the trainer steps, syncs and evaluates.
        self._next = None if isinstance(message, StepEnd) else self._controller.next_message.remote(rank)
        return message

    def evaluate(self, questions: list[Question], timeout_s: float) -> dict[str, Any]:
        return answer(self._controller.evaluate.remote(questions, 1), timeout_s)


def answer(reference: Any, timeout_s: float = CONTROL_TIMEOUT_S) -> Any:
    """What the run's controller answers, within a deadline; raises its own error instead of Ray's wrapping of it.

    Raises:
        DeadlineExceeded: no answer came in time.
        WorkerLost: the controller died, and the run with it.
    """
    try:
        return ray.get(reference, timeout=timeout_s)
    except RayTaskError as error:
        raise getattr(error, "cause", None) or error from None
    except GetTimeoutError as error:
        raise DeadlineExceeded(f"the run's controller did not answer within {timeout_s:.0f} s") from error
    except RayActorError as error:
        raise WorkerLost(f"the run's controller died: {' '.join(str(error).split())[:300]}") from error
