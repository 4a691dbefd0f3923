"""One trainer rank, assembled: what rank 0 opens on the cluster, the sharded policy, and the loop that joins them."""

import dataclasses
import logging
import os
import time
from contextlib import closing
from functools import partial
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from async_grpo.cluster.channel import Channel
from async_grpo.cluster.controller import RunController
from async_grpo.cluster.ray_session import (
    CONTROL_TIMEOUT_S,
    CONTROLLER,
    answer,
    connect,
    find_controller,
    zero_cpu_actor,
)
from async_grpo.cluster.reward_actors import RunVerification
from async_grpo.cluster.weight_sync import RayEngines
from async_grpo.config.preflight import Prepared
from async_grpo.config.rewards import ResolvedRewards
from async_grpo.config.run import RunConfig, write_params
from async_grpo.errors import ConfigurationError, DeadlineExceeded, WorkerLost
from async_grpo.experience.dataset import Question
from async_grpo.metrics.writer import EVAL_FILE, PARAMS_FILE, MetricsWriter, as_json
from async_grpo.modeling.load import load_causal_lm, torch_dtype
from async_grpo.modeling.policy import PolicyModel, named_weights
from async_grpo.options.source_file import absolute, digests
from async_grpo.protocols import Engines, ExperienceSource
from async_grpo.training.accumulator import GradientAccumulator
from async_grpo.training.checkpoint import CheckpointWriter, load_value_head
from async_grpo.training.distributed import Ranks, distributed_run
from async_grpo.training.objective import Objective
from async_grpo.training.optimizer import build_policy_optimizer
from async_grpo.training.sharding import canary_logprobs, shard_policy
from async_grpo.training.trainer import AfterStep, Trainer
from async_grpo.types import Message, MicroBatch, SharedRunSettings
from async_grpo.weights.config import get_transport
from async_grpo.weights.publisher import CANARY_TOKENS, Canary

log = logging.getLogger(__name__)
BUDGET_FILE = "judge_budget.jsonl"
SHUTDOWN_TIMEOUT_S = 10.0


def train(config: RunConfig, prepared: Prepared | None) -> None:
    """Run this rank to the end of the run. `prepared`: its inputs, on rank 0, of which the others get the settings.

    Raises:
        AsyncGrpoError: whatever ended the run before its time.
    """
    connect(config.run_name, config.logging_level)
    with distributed_run(timeout_s=config.experience_timeout_s + config.start_timeout_s) as ranks:
        if prepared is not None:
            _train_as_head(prepared, ranks)
        else:
            controller = find_controller(config.run_name, config.start_timeout_s)
            settings = answer(controller.settings.remote())
            experience = RemoteExperience(config, controller, ranks.rank, [])
            make_trainer(config, settings, ranks, experience, after_step=experience.after_step).run()
    ray.shutdown()


def _train_as_head(prepared: Prepared, ranks: Ranks) -> None:
    """Rank 0: it also opens the run, feeds the engines and writes the files."""
    controller = open_run(prepared.config, prepared.settings)
    if prepared.rewards is None:
        prepared = prepared.with_rewards(await_workers(controller, prepared.config))
    config, rewards = prepared.config, prepared.rewards
    assert rewards is not None
    if config.verdict_cache:  # the controller opens it, in another folder
        config = dataclasses.replace(config, verdict_cache=os.path.abspath(config.verdict_cache))
    _write_params(prepared, rewards, ranks)
    budget_path = None if config.judge_budget is None else str(config.output_path.absolute() / BUDGET_FILE)
    secrets, environment = rewards.secrets(), config.reward_environment()
    verification = partial(RunVerification, rewards.source, config, budget_path, secrets, environment)
    inputs = config, prepared.facts, ranks.world_size, ray.put(prepared.questions), verification
    starting = controller.start_batcher.remote(*inputs)
    experience = RemoteExperience(config, controller, ranks.rank, prepared.eval_questions)
    samples_file = config.output_path / config.dump_samples_filename if config.dump_samples_filename else None
    rank_0 = RayEngines(controller, config.sync_timeout_s), experience.after_step
    trainer = make_trainer(config, prepared.settings, ranks, experience, *rank_0)
    answer(starting, config.start_timeout_s)  # engines and rewards have been loading beside the model
    await_workers(controller, config)
    with closing(MetricsWriter(config.output_path, config.num_steps, samples_file)) as metrics:
        trainer.write = metrics.write
        trainer.run()
    close_run(controller, f"{config.num_steps} steps are done")


def open_run(config: RunConfig, settings: SharedRunSettings) -> Any:
    """Make the run's controller on this node, which needs no other one for its bookkeeping; returns its handle.

    Raises:
        ConfigurationError: a run of this name is open already.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    try:
        actor = zero_cpu_actor(RunController, scheduling_strategy=here, name=CONTROLLER)
        return actor.remote(settings, config.worker_grace_s, Channel, absolute(config.scheduling))
    except ValueError as error:
        raise ConfigurationError(
            f"a run named {config.run_name!r} is open on this cluster: choose another --run-name"
        ) from error


def await_workers(controller: Any, config: RunConfig) -> str:
    """Wait for a worker of each kind that the run needs; returns the rewards that they name ("" if they name none).

    Raises:
        ConfigurationError: see `RunController.lacks`.
        DeadlineExceeded: a kind is still missing after `start_timeout_s`.
    """
    begun, next_word, said = time.monotonic(), 0.0, ""
    while True:
        missing, rewards = answer(controller.lacks.remote())
        if not missing:
            return str(rewards)
        if (waited := time.monotonic() - begun) > config.start_timeout_s:
            raise DeadlineExceeded(f"after {config.start_timeout_s:.0f} s there is still {missing}")
        if missing != said or waited > next_word:  # a line per change
            log.info("waiting for workers to load and join (%.0f s): there is still %s", waited, missing)
            said, next_word = missing, waited + (1.0 if os.isatty(1) else 15.0)
        time.sleep(0.2)


def close_run(controller: Any, reason: str) -> None:
    """End rollouts and rewards, tell the workers that the run is over, and wait until they have signed off."""
    for ending in (controller.stop.remote, partial(controller.close.remote, reason)):
        try:
            answer(ending(), SHUTDOWN_TIMEOUT_S)
        except (DeadlineExceeded, WorkerLost) as error:  # the training is done, whatever becomes of them
            log.warning("the rewards, or the workers, did not end in order: %s", error)


def make_trainer(
    config: RunConfig,
    settings: SharedRunSettings,
    ranks: Ranks,
    source: ExperienceSource,
    engines: Engines | None = None,
    after_step: AfterStep | None = None,
) -> Trainer:
    """The trainer of one rank. Rank 0 alone reaches engines: the others take part in the gathering."""
    own_code = digests([config.advantage_estimator, config.policy_loss])  # of this rank's own disk
    ranks.must_agree("the code of --advantage-estimator and --policy-loss", str(own_code))
    policy = _policy(config, settings, ranks)
    length = min(CANARY_TOKENS, settings.max_total_tokens - 1)
    canary = Canary(Canary.text(settings.vocab_size, length, settings.seed), canary_logprobs)
    make_publisher, dtype = get_transport(settings.transport).make_publisher, torch_dtype(settings.dtype)
    return Trainer(
        policy=policy,
        accumulator=_accumulator(config, settings, policy, ranks),
        source=source,
        publisher=make_publisher(engines, named_weights, canary, dtype, ranks.rank, config),
        checkpoints=CheckpointWriter(
            config.output_path,
            config.model_name_or_path,
            ranks,
            dtype=settings.dtype,
            min_samples_between=config.min_samples_per_checkpoint,
            keep_last=config.keep_checkpoints or None,
        ),
        ranks=ranks,
        num_steps=config.num_steps,
        after_step=after_step,
        overlaps=lambda step: config.max_staleness > 0 and not _evaluation_is_due(config, step),
    )


def _evaluation_is_due(config: RunConfig, step: int) -> bool:
    return step == config.num_steps or bool(config.eval_every and step % config.eval_every == 0)


def _policy(config: RunConfig, settings: SharedRunSettings, ranks: Ranks) -> PolicyModel:
    policy = PolicyModel(
        load_causal_lm(config.model_name_or_path, "float32"),
        chunk_tokens=config.logprob_chunk_size,
        value_head=config.estimator.needs_critic,
        value_trunk_gradient=config.critic_trunk_gradient,
    )
    if policy.value_head is not None:
        load_value_head(policy, config.model_name_or_path)  # of an earlier run; a new one starts at zero
    return shard_policy(
        policy.to(ranks.device),
        ranks,
        dtype=settings.dtype,
        gradient_checkpointing=config.gradient_checkpointing,
        torch_compile=config.torch_compile,
    )


def _accumulator(
    config: RunConfig, settings: SharedRunSettings, policy: PolicyModel, ranks: Ranks
) -> GradientAccumulator:
    optimizer, scheduler = build_policy_optimizer(policy, config, config.num_steps)
    return GradientAccumulator(
        policy,
        optimizer,
        scheduler,
        Objective(config, settings.guaranteed_completion_tokens),
        ranks,
        max_grad_norm=config.max_grad_norm,
        update_stats=config.update_stats,
    )


def _write_params(prepared: Prepared, rewards: ResolvedRewards, ranks: Ranks) -> None:
    """Every setting of the run, beside its metrics; `async-grpo run THIS_FILE --output-dir NEW` starts it again."""
    config = prepared.config
    facts = {
        "WORLD_SIZE": ranks.world_size,
        "reward_registry_sha256": rewards.source.sha256,
        "reward_sources_sha256": rewards.source.digests,
        "algorithm_sources_sha256": digests([config.advantage_estimator, config.policy_loss]),
        "settings": dataclasses.asdict(prepared.settings),
        "num_questions": len(prepared.questions),
        "ray_version": ray.__version__,
    }
    write_params(config.output_path / PARAMS_FILE, config, facts)


class RemoteExperience:
    """`ExperienceSource` of one rank: fetches the next message while the rank computes on the last one.

    Where there are questions for it, on rank 0, it evaluates before the first step, every `eval_every`, and at the end.
    """

    def __init__(self, config: RunConfig, controller: Any, rank: int, eval_questions: list[Question]) -> None:
        self._config, self._controller, self._rank, self._questions = config, controller, rank, eval_questions
        self._next: Any = None

    def start(self) -> None:
        self._evaluate(0)
        if self._rank == 0:
            answer(self._controller.start.remote())

    def next_message(self, rank: int) -> Message:
        """The next message; raises what the batcher raises."""
        self._next = self._next or self._controller.next_message.remote(rank)
        # The batcher's own deadline has the better message
        message = answer(self._next, self._config.experience_timeout_s + CONTROL_TIMEOUT_S)
        # Not beyond the step: the batcher's deadline would run while the trainer steps, syncs and evaluates
        ahead = isinstance(message, MicroBatch)
        self._next = self._controller.next_message.remote(rank) if ahead else None
        return message

    def after_step(self, step: int) -> dict[str, float]:
        """The metrics of an evaluation, after the steps that have one."""
        return self._evaluate(step) if _evaluation_is_due(self._config, step) else {}

    def _evaluate(self, step: int) -> dict[str, float]:
        if not self._questions:
            return {}
        started = time.monotonic()
        log.info("evaluating %d held-out questions at step %d", len(self._questions), step)
        evaluation = self._controller.evaluate.remote(self._questions, 1)
        result = answer(evaluation, self._config.experience_timeout_s)
        samples, folder = result.pop("samples"), self._config.output_path
        numbers = {f"eval_{key}": value for key, value in result.items()}
        with (folder / EVAL_FILE).open("a", encoding="utf-8") as lines:
            lines.write(as_json({"step": step, "seconds": time.monotonic() - started, **numbers}))
        (folder / f"eval_samples_{step}.jsonl").write_text("".join(map(as_json, samples)), encoding="utf-8")
        reward = "-" if result["avg_reward"] is None else f"{result['avg_reward']:.3f}"
        scored, asked = result["num_reward_ok"], result["num_samples"]
        log.info("held-out at step %d: mean reward %s over %d of %d samples", step, reward, scored, asked)
        return numbers
