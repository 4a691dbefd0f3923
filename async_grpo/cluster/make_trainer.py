"""Make the trainer of one rank: the sharded policy, its optimizer, its restored state, and its weight publisher."""

import logging
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import torch

from async_grpo.cluster.make_critic import export_critic_too, load_critic
from async_grpo.cluster.make_flow_objective import make_kept_weights
from async_grpo.cluster.make_publisher import make_publisher, make_reference_publisher
from async_grpo.cluster.policy_kinds import POLICY_KINDS, make_accumulator
from async_grpo.cluster.record_and_passes import with_record_and_passes
from async_grpo.config.memory_plan import critic_rank_bytes
from async_grpo.config.resume import as_options
from async_grpo.config.run import RunConfig
from async_grpo.messages import SharedRunSettings
from async_grpo.modeling.policy import PolicyModel
from async_grpo.options.source_file import digests
from async_grpo.processes.memory_use import resident_bytes
from async_grpo.processes.out_of_memory import naming_out_of_memory
from async_grpo.protocols import Engines, ExperienceSource, WeightPublisher
from async_grpo.training.accumulator import GradientAccumulator
from async_grpo.training.best_checkpoint import keep_best
from async_grpo.training.checkpoint import Checkpointer, SaveExperience
from async_grpo.training.checkpoint_folder import read
from async_grpo.training.critic import Critic
from async_grpo.training.distributed import Ranks
from async_grpo.training.export import ModelExporter
from async_grpo.training.largest_trial import try_largest
from async_grpo.training.memory_cures import start_cure
from async_grpo.training.moving_reference import KeptWeights
from async_grpo.training.rank_memory import RankMemory
from async_grpo.training.trainer import AfterStep, Trainer

log = logging.getLogger(__name__)


def make_trainer(
    config: RunConfig,
    settings: SharedRunSettings,
    ranks: Ranks,
    source: ExperienceSource,
    engines: Engines | None = None,
    after_step: AfterStep = lambda step: {},
    save_experience: SaveExperience | None = None,
    digests_read: dict[str, str] | None = None,
    publisher: WeightPublisher | None = None,
) -> Trainer:
    """Make the trainer of one rank.

    Args:
        config: The run's options.
        settings: Settings that all workers of the run must agree on.
        ranks: All ranks, and the number of this rank among them.
        source: Provides the experience of this rank.
        engines: Sends weights to the engines; only on rank 0.
        after_step: Called after each step with the number of steps done; returns metrics.
        save_experience: Starts saving the rollout state together with a checkpoint; only on rank 0.
        digests_read: Digests of the run's input files (from `data_digests`), which are recorded in each checkpoint.
        publisher: Used instead of the publisher of the transport that `settings` name.
    """
    # The ranks may read these files from different disks, so check that they read the same contents
    code_digests = digests([config.advantage_estimator, config.policy_loss])
    ranks.must_agree("the code of --advantage-estimator and --policy-loss", str(code_digests))
    kind = POLICY_KINDS[config.policy]
    accumulator = _load(config, settings, ranks)
    policy = accumulator.policy
    reference = make_kept_weights(config, accumulator, publisher)
    checkpointer = _checkpointer(config, settings, ranks, policy, accumulator, save_experience, digests_read)
    checkpointer.reference = reference.named_weights
    step, samples = _restore(checkpointer, settings, accumulator)
    if is_trial_cheap(config, ranks.device):
        try_largest(accumulator, settings.vocab_size, config, settings.max_total_tokens)
    if publisher is None:
        canary = kind.make_canary(settings, ranks)
        publisher = make_publisher(config, settings, ranks.rank, engines, canary)
        with reference.in_place():
            publisher.prepare(policy)  # runs while the workers load their models
        reference.publisher = make_reference_publisher(config, settings, ranks.rank, engines, canary)
    return Trainer(
        policy=policy,
        accumulator=accumulator,
        source=with_record_and_passes(config, ranks, source, accumulator),
        publisher=reference.wrapped(publisher),
        checkpointer=checkpointer,
        version=step,
        samples=samples,
        exporter=_exporter(config, settings, ranks, samples, accumulator.critic, reference),
        ranks=ranks,
        num_steps=config.num_steps,
        after_step=after_step,
        overlaps=partial(_may_overlap, config),
        saves_after=partial(_may_become_best, config),
        plan=config.pass_plan,
        reference=reference,
        release_memory=partial(_release_memory, config, ranks.device),
    )


def _release_memory(config: RunConfig, device: torch.device) -> None:
    """Give unused GPU memory back if an engine on this GPU is about to wake.

    By default, torch keeps the memory of freed tensors for later ones.
    """
    if config.sleep_level and device.type == "cuda":
        torch.cuda.empty_cache()


def _load(config: RunConfig, settings: SharedRunSettings, ranks: Ranks) -> GradientAccumulator:
    """Load the policy, and return its accumulator, which measures the memory of this rank.

    Raises:
        OutOfMemory: The model does not fit into the memory.
    """
    on_gpu = ranks.device.type == "cuda"
    baseline_bytes = 0 if on_gpu else resident_bytes()
    with naming_out_of_memory(
        f"while trainer rank {ranks.rank} loaded the model", start_cure(config, on_gpu=on_gpu)
    ):
        policy = POLICY_KINDS[config.policy].load(config, settings, ranks)
        critic = load_critic(config, settings, ranks)
    accumulator = make_accumulator(config, settings, policy, ranks)
    accumulator.critic = critic
    planned_bytes = POLICY_KINDS[config.policy].plan_bytes(config, settings, policy, ranks)
    if critic is not None:
        num_parameters = sum(parameter.numel() for parameter in critic.model.parameters())
        planned_bytes += int(critic_rank_bytes(config, ranks.world_size, num_parameters))
    accumulator.memory = RankMemory(
        device=ranks.device,
        planned_bytes=planned_bytes,
        baseline_bytes=baseline_bytes,
    )
    return accumulator


def is_trial_cheap(config: RunConfig, device: torch.device) -> bool:
    """Return whether to try the largest possible micro-batch before the first step.

    On a GPU the trial takes seconds, in which the engines are still loading. On the CPU it may take minutes, and if the
    memory does not suffice, the machine swaps, which slows down all its processes. With `--engine-sleep`, the engine is
    still awake at this time, and the micro-batch may need its memory.
    """
    is_trial_possible = not config.draws  # the trial computes a text, which a policy that draws cannot
    return is_trial_possible and config.longest_first and device.type == "cuda" and not config.sleep_level


def _restore(
    checkpointer: Checkpointer, settings: SharedRunSettings, accumulator: GradientAccumulator
) -> tuple[int, int]:
    """Load the checkpoint of a resumed run, and return its numbers of finished steps and samples."""
    if not settings.checkpoint:
        return 0, 0
    folder = Path(settings.checkpoint)
    manifest = read(folder)
    checkpointer.load(folder)
    accumulator.steps = manifest.step
    log.info("resumed after step %d, from %s", manifest.step, settings.checkpoint)
    return manifest.step, manifest.samples


def _may_overlap(config: RunConfig, steps_done: int) -> bool:
    """Return whether the next step may start accumulating gradients while the weights of this step are sent."""
    waits_for_evaluation = config.eval_pinned and _is_evaluated(config, steps_done)
    return config.generates_ahead and steps_done < config.num_steps and not waits_for_evaluation


def _may_become_best(config: RunConfig, steps_done: int) -> bool:
    """Return whether this step's checkpoint may become the best: `--keep-best` is set, and the step is evaluated."""
    return config.keep_best is not None and _is_evaluated(config, steps_done)


def _is_evaluated(config: RunConfig, step: int) -> bool:
    """Return whether an evaluation follows the step."""
    return config.evaluation_is_due(step, num_steps=config.num_steps)


def _checkpointer(
    config: RunConfig,
    settings: SharedRunSettings,
    ranks: Ranks,
    policy: PolicyModel,
    accumulator: GradientAccumulator,
    save_experience: SaveExperience | None,
    digests_read: dict[str, str] | None,
) -> Checkpointer:
    kept_names: Callable[[], Collection[str]] = tuple
    if config.keep_best is not None:
        kept_names = partial(keep_best, config.output_path, config.keep_best, partial(_is_evaluated, config))
    return Checkpointer(
        config.output_path,
        ranks,
        policy,
        accumulator.scheduler,
        keep=config.keep_checkpoints,
        timeout_s=config.checkpoint_timeout_s,
        options=as_options(config),
        inputs=digests_read or {},
        save_experience=save_experience,
        stay=kept_names,
        critic=accumulator.critic,
        lora=settings.lora,
    )


def _exporter(
    config: RunConfig,
    settings: SharedRunSettings,
    ranks: Ranks,
    samples: int,
    critic: Critic | None,
    reference: KeptWeights,
) -> ModelExporter:
    exporter = POLICY_KINDS[config.policy].exporter(
        config.output_path,
        config.model_name_or_path,
        ranks,
        settings.dtype,
        min_samples_between=config.samples_between_models,
        keep_last=config.keep_models or None,
        resumed_at=samples,
        lora=settings.lora,
    )
    exporter.in_place = reference.in_place
    export_critic_too(exporter, critic, config, settings)
    return exporter
