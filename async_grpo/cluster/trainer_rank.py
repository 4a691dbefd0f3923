"""One trainer rank, assembled: what rank 0 opens on the cluster, the sharded policy, and the loop that joins them."""

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
    on_this_node,
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
from async_grpo.metrics.trackers import parse_trackers, trackers_of
from async_grpo.metrics.watchdog import Watchdog
from async_grpo.metrics.writer import PARAMS_FILE, MetricsWriter, rewind
from async_grpo.modeling.load import torch_dtype
from async_grpo.modeling.policy import named_weights
from async_grpo.options.source_file import absolute, digests
from async_grpo.processes.end_on_signal import end_in_order
from async_grpo.training.checkpoint_folder import checkpoints_of, set_aside_newer
from async_grpo.training.distributed import Ranks, distributed_run
from async_grpo.weights.config import get_transport

log = logging.getLogger(__name__)
SHUTDOWN_TIMEOUT_S = 10.0


def train_as_rank(config: RunConfig, prepared: Prepared | None) -> None:
    """Run this rank to the end of the run. `prepared`: its inputs, on rank 0, of which the others get the settings.

    AsyncGrpoError: whatever ended the run before its time.
    """
    connect(config.run_name, config.logging_level)
    with distributed_run(timeout_s=config.experience_timeout_s + config.start_timeout_s) as ranks:
        if prepared is not None:
            _train_as_head(prepared, ranks)
        else:
            controller = find_controller(config.run_name, config.start_timeout_s)
            settings = answer(controller.settings.remote())
            experience = RemoteExperience(config, controller, ranks.rank, {})
            trainer = make_trainer(config, settings, ranks, experience, after_step=experience.after_step)
            end_in_order(controller.request_save.remote, config.grace_s, is_failing=_has_lost_a_rank)
            trainer.run()  # a rank that ended with an error, were it only told to, would have torchrun end rank 0
    ray.shutdown()


def _train_as_head(prepared: Prepared, ranks: Ranks) -> None:
    """Rank 0: it also opens the run, feeds the engines and writes the files."""
    controller = open_run(prepared.config, prepared.settings)
    if prepared.rewards is None:
        prepared = prepared.with_rewards(await_workers(controller, prepared.config))
    config = prepared.config
    _write_params(prepared, ranks)
    starting = start_batcher(controller, prepared, ranks.world_size)
    done = prepared.resumed.step if prepared.resumed else -1
    samples_file = config.output_path / config.dump_samples_filename if config.dump_samples_filename else None
    rewind(config.output_path, done, samples_file)
    set_aside_newer(config.output_path, done)
    experience = RemoteExperience(config, controller, ranks.rank, prepared.eval_questions, max(0, done))

    def save_experience(partial: Path, step: int) -> Callable[[], Any]:
        # Begun before any later call of this process, so before newer weights can be live
        saving = controller.save_experience.remote(partial.absolute(), step)
        return lambda: answer(saving, config.checkpoint_timeout_s)

    engines = RayEngines(controller, config.sync_timeout_s)
    made = config, prepared.settings, ranks, experience, engines, experience.after_step
    trainer = make_trainer(*made, save_experience, data_digests(config))
    if get_transport(prepared.settings.transport).fills_object_store:
        itemsize = torch_dtype(prepared.settings.dtype).itemsize
        check_object_store(itemsize * sum(weight.numel() for _, weight in named_weights(trainer.policy)))
    answer(starting, config.start_timeout_s)  # engines and rewards have been loading beside the model
    await_workers(controller, config)
    watchdog = Watchdog(config.output_path, lambda: trainer.version, config.stall_s, experience.situation)
    _end_when_told(controller, config, experience.told_to_end, watchdog.start())
    told = parse_trackers(config.track), config.prometheus_port, config.output_path, config.run_name
    joined = "all have joined: weights go out with a self-test, then comes the first step"
    with (
        closing(trackers_of(*told, as_options(config))) as trackers,
        closing(MetricsWriter(config.output_path, config.num_steps, samples_file, trackers.log)) as metrics,
        show_waiting(joined, until=lambda: trainer.version > max(0, done)),
    ):
        trainer.write = metrics.write
        trainer.run()
    if trainer.end_reason:
        where = f"saved after step {trainer.version} in {checkpoints_of(config.output_path)[0]}"
        close_run(controller, where)
        raise RunInterrupted(f"{trainer.end_reason}: {where}; the same command goes on from there")
    close_run(controller, f"{config.num_steps} steps are done")


def _end_when_told(controller: Any, config: RunConfig, told: threading.Event, look: Any) -> None:
    """By a signal, or by the time: every rank saves, and ends. SIGUSR1 calls `look`."""

    def ask(reason: str) -> None:
        told.set()
        controller.request_save.remote(reason)

    end_in_order(ask, config.grace_s, is_failing=_has_lost_a_rank, look=look)
    if config.max_hours is not None:
        timer = threading.Timer(config.max_hours * 3600, ask, [f"--max-hours {config.max_hours:g}"])
        timer.daemon = True
        timer.start()


def _has_lost_a_rank() -> bool:
    """torchrun also ends ranks for the fault of another one on this node."""
    siblings = psutil.Process(os.getppid()).children() if "RANK" in os.environ else []
    alive = sum(process.status() != psutil.STATUS_ZOMBIE for process in siblings)
    return "RANK" in os.environ and alive < int(os.environ["LOCAL_WORLD_SIZE"])


def open_run(config: RunConfig, settings: SharedRunSettings) -> Any:
    """Make the run's controller on this node, which needs no other one for its bookkeeping; returns its handle.

    ConfigurationError: a run of this name is open already.
    """
    try:
        actor = zero_cpu_actor(RunController, name=CONTROLLER, **on_this_node())
        return actor.remote(settings, config.worker_grace_s, Channel, absolute(config.scheduling))
    except ValueError as error:
        why = f"a run named {config.run_name!r} is open on this cluster: choose another --run-name"
        raise ConfigurationError(why) from error


def await_workers(controller: Any, config: RunConfig) -> str:
    """Wait for a worker of each kind that the run needs, and return the rewards that they name ("" if none).

    Raises:
        ConfigurationError: A worker refused the run, or workers name different rewards.
        DeadlineExceeded: A kind is still missing after `start_timeout_s`.
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
    """End rollouts and rewards, tell the workers that the run is over, and wait until they have signed off."""
    for ending in (controller.stop.remote, partial(controller.close.remote, reason)):
        try:
            answer(ending(), SHUTDOWN_TIMEOUT_S)
        except (DeadlineExceeded, WorkerLost) as error:  # the training is done, whatever becomes of them
            log.warning("the rewards, or the workers, did not end in order: %s", error)


def _write_params(prepared: Prepared, ranks: Ranks) -> None:
    """Every setting of the run, beside its metrics; `async-grpo run THIS_FILE --output-dir NEW` starts it again."""
    config, rewards = prepared.config, prepared.rewards
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
