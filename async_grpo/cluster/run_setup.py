"""What trainer rank 0 opens on the cluster and closes again, and how every rank gets its experience from it."""

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from async_grpo.cluster.channel import Channel
from async_grpo.cluster.controller import GENERATION, RollCall, RunController
from async_grpo.cluster.ray_session import CONTROL_TIMEOUT_S, CONTROLLER, answer, zero_cpu_actor
from async_grpo.config.run import RunConfig
from async_grpo.errors import ConfigurationError, DeadlineExceeded, WorkerLost
from async_grpo.experience.dataset import Question
from async_grpo.metrics.writer import EVAL_FILE, as_json
from async_grpo.types import MicroBatch, SharedRunSettings, StepEnd

log = logging.getLogger(__name__)
SHUTDOWN_TIMEOUT_S = 10.0


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
    """Wait for a worker of each kind that the run needs; returns the rewards that they name ("" if they name none).

    Raises:
        ConfigurationError: see `missing_workers`.
        DeadlineExceeded: a kind is still missing after `start_timeout_s`.
    """
    give_up, next_word = time.monotonic() + config.start_timeout_s, time.monotonic() + 2.0
    while True:
        roll_call, refusals = answer(controller.roll_call.remote())
        missing = missing_workers(roll_call, refusals, config.samples_per_question)
        if not missing:
            return max(info.rewards for info in roll_call[GENERATION])
        if time.monotonic() > give_up:
            raise DeadlineExceeded(f"after {config.start_timeout_s:.0f} s there is still {missing}")
        if time.monotonic() > next_word:
            log.info("waiting for workers to load and join: there is still %s", missing)
            next_word = time.monotonic() + 15.0
        time.sleep(0.2)


def missing_workers(roll_call: RollCall, refusals: Sequence[str], samples_per_question: int) -> str:
    """What the run still lacks, in words; "" when it can start.

    Raises:
        ConfigurationError: a worker refused, none can hold one group, or they name different rewards.
    """
    if refusals:
        raise ConfigurationError("; ".join(refusals))
    missing = []
    for kind, members in roll_call.items():
        mode, what = f"logprob --role {kind}", f"{kind} logprob worker"
        if kind == GENERATION:
            mode, what = GENERATION, "generation worker"
        if not members:
            missing.append(f"no {what} (python worker_dispatcher.py --mode {mode} ...)")
    if missing:
        return "; and ".join(missing)
    members = roll_call[GENERATION]
    if len(named := sorted({info.rewards for info in members} - {""})) > 1:
        raise ConfigurationError(f"generation workers name different rewards: {' / '.join(named)}")
    capacity = max(info.max_sequences for info in members)
    if capacity < samples_per_question:
        raise ConfigurationError(
            f"a group of {samples_per_question} (--samples-per-question) fits no generation worker: the largest takes "
            f"{capacity} sequences (--max_num_seqs + --overhead_seqs). Raise these, or make the groups smaller"
        )
    return ""


def close_run(controller: Any, reason: str) -> None:
    """End rollouts and rewards, tell the workers that the run is over, and wait until they have signed off."""
    for ending in (controller.stop.remote, partial(controller.close.remote, reason)):
        try:
            answer(ending(), SHUTDOWN_TIMEOUT_S)
        except (DeadlineExceeded, WorkerLost) as error:  # the training is done, whatever becomes of them
            log.warning("the rewards, or the workers, did not end in order: %s", error)


class RemoteExperience:
    """`ExperienceSource` and `StepHook` of one rank: fetches the next message while the rank computes on the last one.

    Where there are questions for it, on rank 0, it evaluates before the first step, every `eval_every`, and at the end.
    """

    def __init__(self, config: RunConfig, controller: Any, rank: int, eval_questions: list[Question]) -> None:
        self._config, self._controller, self._rank = config, controller, rank
        self._questions = eval_questions
        self._next: Any = None

    def start(self) -> None:
        self._evaluate(0)
        if self._rank == 0:
            answer(self._controller.start.remote())

    def next_message(self, rank: int) -> MicroBatch | StepEnd:
        """The next micro-batch or step end; raises what the batcher raises."""
        self._next = self._next or self._controller.next_message.remote(rank)
        # The batcher's own deadline has the better message
        message = answer(self._next, self._config.experience_timeout_s + CONTROL_TIMEOUT_S)
        # Not beyond the step: the batcher's deadline would run while the trainer steps, syncs and evaluates
        self._next = None if isinstance(message, StepEnd) else self._controller.next_message.remote(rank)
        return message

    def on_step(self, step: int) -> dict[str, float]:
        every, last = self._config.eval_every, self._config.num_steps
        return self._evaluate(step) if step == last or (every and step % every == 0) else {}

    def _evaluate(self, step: int) -> dict[str, float]:
        if not self._questions:
            return {}
        started = time.monotonic()
        log.info("evaluating %d held-out questions at step %d", len(self._questions), step)
        evaluation = self._controller.evaluate.remote(self._questions, 1)
        result = answer(evaluation, self._config.experience_timeout_s)
        samples = result.pop("samples")
        numbers = {f"eval_{key}": value for key, value in result.items()}
        folder = self._config.output_path
        with (folder / EVAL_FILE).open("a", encoding="utf-8") as lines:
            lines.write(as_json({"step": step, "seconds": time.monotonic() - started, **numbers}))
        (folder / f"eval_samples_{step}.jsonl").write_text("".join(map(as_json, samples)), encoding="utf-8")
        reward = "-" if result["avg_reward"] is None else f"{result['avg_reward']:.3f}"
        scored, asked = result["num_reward_ok"], result["num_samples"]
        log.info("held-out at step %d: mean reward %s over %d of %d samples", step, reward, scored, asked)
        return numbers
