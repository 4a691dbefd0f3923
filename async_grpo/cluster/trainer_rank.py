"""The program of one trainer rank. Rank 0 opens the run on the cluster, and every rank trains a shard of the policy."""

import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray

from async_grpo.cluster.channel import Channel
from async_grpo.cluster.controller import MissingParts, RunController
from async_grpo.cluster.make_trainer import make_trainer
from async_grpo.cluster.ray_session import (
    CONTROLLER,
    answer,
    connect,
    find_controller,
    forwarded_environment,
    on_this_node,
    warm_python,
    zero_cpu_actor,
)
from async_grpo.cluster.remote_experience import RemoteExperience, start_batcher
from async_grpo.cluster.weight_sync import RayEngines, check_object_store
from async_grpo.config.preflight import Prepared
from async_grpo.config.resume import as_options, data_digests
from async_grpo.config.run import RunConfig, write_params
from async_grpo.errors import ConfigurationError, DeadlineExceeded, RunInterrupted, WorkerLost
from async_grpo.messages import SharedRunSettings
from async_grpo.metrics.console import show_waiting
from async_grpo.metrics.trackers import Trackers, parse_trackers, trackers_of
from async_grpo.metrics.watchdog import Watchdog
from async_grpo.metrics.writer import PARAMS_FILE, MetricsWriter, rewind
from async_grpo.modeling.load import torch_dtype
from async_grpo.modeling.policy import named_weights
from async_grpo.options.source_file import absolute, digests
from async_grpo.processes.end_on_signal import end_in_order
from async_grpo.processes.process_tree import pid_of_starter
from async_grpo.training.checkpoint_folder import checkpoints_of, set_aside_newer
from async_grpo.training.distributed import Ranks, distributed_run
from async_grpo.training.trainer import Trainer
from async_grpo.weights.config import get_transport

log = logging.getLogger(__name__)
SHUTDOWN_TIMEOUT_S = 10.0


def train_as_rank(config: RunConfig, prepared: Prepared | None) -> None:
    """Run this rank until the run ends.

    Args:
        config: The run's options.
        prepared: The run's checked inputs on rank 0; None on all other ranks, which get the settings from rank 0.

    Raises:
        AsyncGrpoError: The run ended before its last step.
    """
    connect(config.run_name, config.logging_level)
    with distributed_run(timeout_s=config.experience_timeout_s + config.start_timeout_s) as ranks:
        if prepared is not None:
            _train_as_head(prepared, ranks)
        else:
            _train_as_follower(config, ranks)
    ray.shutdown()


def _train_as_follower(config: RunConfig, ranks: Ranks) -> None:
    """Run a rank other than 0."""
    controller = find_controller(config.run_name, config.start_timeout_s)
    settings = answer(controller.settings.remote())
    experience = RemoteExperience(config, controller, ranks.rank, eval_questions={})
    trainer = make_trainer(config, settings, ranks, experience, after_step=experience.after_step)
    end_in_order(controller.request_save.remote, config.grace_s, is_failing=_has_lost_a_rank)
    # If the run ends early, only rank 0 may raise an error. If this rank failed, torchrun would kill rank 0
    trainer.run()


def _train_as_head(prepared: Prepared, ranks: Ranks) -> None:
    """Run rank 0, which also opens the run, sends weights to the engines and writes the run's files."""
    controller = open_run(prepared.config, prepared.settings)
    if prepared.rewards is None:
        prepared = prepared.with_rewards(await_workers(controller, prepared.config))
    config = prepared.config
    _write_params(prepared, ranks)
    batcher_start = start_batcher(controller, prepared, ranks.world_size)
    steps_done = prepared.resumed.step if prepared.resumed else -1
    samples_file = config.output_path / config.samples_filename if config.samples_filename else None
    rewind(config.output_path, steps_done, samples_file)
    set_aside_newer(config.output_path, steps_done)
    first_step = max(0, steps_done)
    experience = RemoteExperience(config, controller, ranks.rank, prepared.eval_questions, first_step)
    trainer = _make_head_trainer(prepared, ranks, controller, experience)
    # Do not wait earlier: engines and rewards load while this rank loads its model
    answer(batcher_start, config.start_timeout_s)
    await_workers(controller, config)
    watchdog = Watchdog(config.output_path, lambda: trainer.version, config.stall_s, experience.situation)
    _end_on_request(controller, config, experience.told_to_end, look=watchdog.start())
    with (
        closing(_make_trackers(config)) as trackers,
        closing(MetricsWriter(config.output_path, config.num_steps, samples_file, trackers.log)) as metrics,
        show_waiting(
            "all have joined: weights go out with a self-test, then comes the first step",
            until=lambda: trainer.version > first_step,
        ),
    ):
        trainer.write = metrics.write
        trainer.run()
    if trainer.end_reason:
        reason = f"saved after step {trainer.version} in {checkpoints_of(config.output_path)[0]}"
        close_run(controller, reason)
        raise RunInterrupted(f"{trainer.end_reason}: {reason}; the same command goes on from there")
    close_run(controller, f"{config.num_steps} steps are done")


def _make_head_trainer(
    prepared: Prepared, ranks: Ranks, controller: Any, experience: RemoteExperience
) -> Trainer:
    """Make the trainer of rank 0.

    Raises:
        ConfigurationError: The weights are sent through Ray's object store, which is too small for them.
    """
    config = prepared.config
    settings = prepared.settings

    def save_experience(partial_folder: Path, step: int) -> Callable[[], Any]:
        # Ray delivers the calls of a process in order. So the controller saves the state of this step before this
        # process sends newer weights to the engines
        saving = controller.save_experience.remote(partial_folder.absolute(), step)
        return lambda: answer(saving, config.checkpoint_timeout_s)

    trainer = make_trainer(
        config,
        settings,
        ranks,
        experience,
        engines=RayEngines(controller, config.sync_timeout_s),
        after_step=experience.after_step,
        save_experience=save_experience,
        digests_read=data_digests(config),
    )
    if get_transport(settings.transport).fills_object_store:
        num_weights = sum(weight.numel() for _, weight in named_weights(trainer.policy))
        check_object_store(num_weights * torch_dtype(settings.dtype).itemsize)
    return trainer


def _make_trackers(config: RunConfig) -> Trackers:
    """Make the trackers to which the run's metrics are sent."""
    return trackers_of(
        parse_trackers(config.track),
        config.prometheus_port,
        config.output_path,
        config.run_name,
        as_options(config),
    )


def _end_on_request(
    controller: Any, config: RunConfig, is_ending: threading.Event, look: Callable[[], None]
) -> None:
    """On a signal or after `--max-hours`, make every rank save a checkpoint, and end the run.

    Args:
        controller: The run's controller.
        config: The run's options.
        is_ending: Event that is set when the run is asked to end.
        look: Function that is called on SIGUSR1.
    """

    def request_end(reason: str) -> None:
        is_ending.set()
        controller.request_save.remote(reason)

    end_in_order(request_end, config.grace_s, is_failing=_has_lost_a_rank, look=look)
    if config.max_hours is not None:
        timer = threading.Timer(config.max_hours * 3600, request_end, [f"--max-hours {config.max_hours:g}"])
        timer.daemon = True
        timer.start()


def _has_lost_a_rank() -> bool:
    """Return whether another rank on this node has ended. In this case torchrun sends this rank a signal, too."""
    if "RANK" not in os.environ:
        return False
    siblings = psutil.Process(pid_of_starter()).children()
    num_alive = sum(process.status() != psutil.STATUS_ZOMBIE for process in siblings)
    return num_alive < int(os.environ["LOCAL_WORLD_SIZE"])


def open_run(config: RunConfig, settings: SharedRunSettings) -> Any:
    """Create the run's controller on this node, and return its handle.

    Raises:
        ConfigurationError: A run with this name is already open.
    """
    try:
        actor = zero_cpu_actor(
            RunController,
            name=CONTROLLER,
            **on_this_node(),
            runtime_env={"env_vars": forwarded_environment(), **warm_python("torch")},
        )
        return actor.remote(settings, config.worker_grace_s, Channel, absolute(config.scheduling))
    except ValueError as error:
        raise ConfigurationError(
            f"a run named {config.run_name!r} is open on this cluster: choose another --run-name"
        ) from error


def await_workers(controller: Any, config: RunConfig) -> str:
    """Wait until a worker of each kind that the run needs has joined.

    Returns:
        `--reward-fns` of the generation workers; "" if they have none.

    Raises:
        ConfigurationError: A worker refused the run, or two workers name different rewards.
        DeadlineExceeded: A kind of worker is still missing after `start_timeout_s`.
    """
    begin = time.monotonic()
    log_every_s = 1.0 if os.isatty(1) else 15.0
    logged_description = ""
    next_log_s = 0.0
    while True:
        missing: MissingParts = answer(controller.missing_parts.remote())
        if not missing.description:
            return missing.rewards
        waited_s = time.monotonic() - begin
        if waited_s > config.start_timeout_s:
            raise DeadlineExceeded(
                f"after {config.start_timeout_s:.0f} s there is still {missing.description}"
            )
        has_changed = missing.description != logged_description
        if has_changed or waited_s > next_log_s:
            log.info(
                "waiting for workers to load and join (%.0f s): there is still %s",
                waited_s,
                missing.description,
            )
            logged_description = missing.description
            next_log_s = waited_s + log_every_s
        time.sleep(0.2)


def close_run(controller: Any, reason: str) -> None:
    """End rollouts and rewards, tell the workers that the run is over, and wait until they are deregistered."""
    for end in (controller.stop.remote, partial(controller.close.remote, reason)):
        try:
            answer(end(), SHUTDOWN_TIMEOUT_S)
        except (DeadlineExceeded, WorkerLost) as error:
            # Only log the error, because the training is complete
            log.warning("the rewards, or the workers, did not end in order: %s", error)


def _write_params(prepared: Prepared, ranks: Ranks) -> None:
    """Write every setting of the run to a file in the output folder.

    `async-grpo run THIS_FILE --output-dir NEW` starts the same run again.
    """
    config = prepared.config
    rewards = prepared.rewards
    assert rewards is not None
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
