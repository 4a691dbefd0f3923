"""`async-grpo replay RUN`: train again on the samples that `--record` stored, without engines or rewards.

With the same options and the same number of ranks (`torchrun --nproc-per-node N -m async_grpo replay RUN`), a replay
produces bit-identical weights in float32. With other options, such as another loss, training is off-policy, because the
samples come from the recorded run; the metrics then contain `off_policy`. The recorded folder is untrusted, so a replay
reads only the portable options in it (`options/portable.py`). If the run used a loss from a file of code, pass that
option again.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from async_grpo.algorithm.teacher_config import TeacherConfig
from async_grpo.config.base_weights import refuse_other_base
from async_grpo.config.resume import as_options
from async_grpo.config.run import RunConfig
from async_grpo.environments.config import EnvironmentConfig
from async_grpo.errors import ConfigurationError
from async_grpo.experience.config import EvaluationConfig
from async_grpo.metrics.writer import PARAMS_FILE, MetricsWriter, claim, options_of
from async_grpo.options.fields import NOT_NEGATIVE, dashed, option, refuse, required
from async_grpo.options.portable import portable_options
from async_grpo.processes.untrusted_files import is_text
from async_grpo.rewards.config import RewardConfig
from async_grpo.training.checkpoint_folder import checkpoints_of, named, read
from async_grpo.weights.config import WeightConfig

if TYPE_CHECKING:
    from async_grpo.messages import LoraSettings

log = logging.getLogger(__name__)


def _option_names(*config_classes: type) -> set[str]:
    return {field.name for config_class in config_classes for field in fields(config_class)}


# Teacher options that have no effect in a replay. Two options are excluded, because the trainer computes the forward KL
# from the teacher's log-probs in the record
UNUSED_TEACHER_OPTIONS = _option_names(TeacherConfig) - {"teacher_coef", "teacher_top_k"}
# Options without effect, because a replay has no engines, rewards or questions. They are neither taken from the
# recorded run nor compared with it
UNUSED_OPTIONS = {
    *_option_names(RewardConfig, EnvironmentConfig, EvaluationConfig, WeightConfig),
    *UNUSED_TEACHER_OPTIONS,
    "data_path",
    "dump_samples_filename",
    "keep_sample_groups",
    "max_resamples",
    "keep_best",
    "logging_level",
    "prometheus_port",
    "scheduling",
    "track",
}

# Options of the replay itself, which do not take the values of the recorded run
REPLAY_OPTIONS = ("recorded", "from_step", "output_dir", "record", "resume", "max_hours", "run_name")


@dataclass(frozen=True, kw_only=True)
class ReplayConfig(RunConfig):
    """Options of `async-grpo replay`. Options that are not set take the values of the recorded run."""

    recorded: str = required("Folder of the recorded run.", "Replay", argument=True)
    from_step: int = option(
        0,
        "Step after which the replay begins: the step of a checkpoint, or 0 for the start of the run.",
        "Replay",
        range=NOT_NEGATIVE,
    )
    model_name_or_path: str = option("", "Hugging Face folder of the policy to train.", everyday=True)
    data_path: str = option("", "File of questions, in any format that `run` takes.", everyday=True)

    @classmethod
    def from_options(cls, options: Mapping[str, Any], explicit_names: Collection[str]) -> Self:
        """Return the configuration of a command line, completed by the options of the recorded run.

        Args:
            options: A value for every option, set by the user or by default.
            explicit_names: Names of the options that the user set. The recorded run does not override them.

        Raises:
            ConfigurationError: There is no such run, or the run has an option that only the user may set.
        """
        run = Path(options["recorded"])
        run_options = options_of(run)
        names = {field.name for field in fields(RunConfig)} - {*UNUSED_OPTIONS, *REPLAY_OPTIONS}
        inherited_names = names - {*explicit_names, "model_name_or_path"}
        inherited = portable_options(RunConfig, run_options, inherited_names, run)
        if "model_name_or_path" not in explicit_names:
            model = run_options.get("model_name_or_path")
            refuse(not is_text(model), f"the run of {run} does not say its model: give --model-name-or-path")
            inherited["model_name_or_path"] = model
        if "output_dir" not in explicit_names:
            inherited["output_dir"] = str(run / "replay")
        return super().from_options({**options, **inherited}, {*explicit_names, *inherited})


def replay(config: ReplayConfig) -> None:
    """Train on all steps of the record from `--from-step` on, and write metrics and the model.

    Raises:
        ConfigurationError: There is no such record, no checkpoint after step `--from-step`, or the adapter or its base are
            not those of the run.
    """
    config = replace(config, record=False)
    run = Path(config.recorded)
    run_options = options_of(run)
    refuse("settings" not in run_options, f"{run / PARAMS_FILE} belongs to a run that never began")
    recorded_passes = run_options.get("passes_per_batch", 1)
    is_other_batch = recorded_passes != config.passes_per_batch or not config.pass_plan.ends_cycle(
        config.from_step
    )
    refuse(
        bool(config.from_step) and is_other_batch,
        f"--from-step {config.from_step}: in the run, {recorded_passes!r:.50} passes were made over each batch; here, "
        f"{config.passes_per_batch} passes make {config.steps_per_batch} steps of a batch (--passes-per-batch, "
        "--batch-size). Leave --from-step out, or give the values of the run",
    )
    checkpoint = _checkpoint(run, config.from_step, config.model_name_or_path) if config.from_step else None
    # Import these here, because they take seconds: wrong options should be refused before
    from pydantic import TypeAdapter, ValidationError

    from async_grpo.cluster.make_trainer import make_trainer
    from async_grpo.messages import SharedRunSettings
    from async_grpo.training.distributed import distributed_run
    from async_grpo.training.record import Recording

    try:
        settings = TypeAdapter(SharedRunSettings).validate_python(run_options["settings"])
    except ValidationError as error:
        problem = error.errors()[0]
        field_path = ".".join(map(str, problem["loc"]))
        raise ConfigurationError(f"{run / PARAMS_FILE}: settings.{field_path}: {problem['msg']}") from error
    # A replay uses no transport. Replace the recorded one, because it could name a file of code
    settings = replace(
        settings,
        checkpoint=str(checkpoint or ""),
        transport=config.weight_transport,
        lora=_adapter(config, settings.lora),
    )
    with distributed_run() as ranks:
        plan = config.pass_plan
        recording = Recording(run, ranks.world_size, plan.next_minibatch(config.from_step))
        # Replay the last batch only if all of its minibatches were recorded
        num_steps = recording.num_steps // plan.cycle_minibatches * plan.cycle_steps
        changes = _changed_options(config, recording.options)
        if ranks.is_main:
            claim(config.output_path)
            log.info("from the record of %s, steps %d to %d", run, config.from_step + 1, num_steps)
        trainer = make_trainer(config, settings, ranks, recording, publisher=Unpublished())
        trainer.num_steps = num_steps
        trainer.checkpointer = None
        if ranks.is_main:
            label = {"replayed": str(run), "replayed_with": changes, "off_policy": bool(changes)}
            metrics = MetricsWriter(config.output_path, num_steps)
            trainer.write = lambda line: metrics.write(line | label)
        trainer.run()


def _checkpoint(run: Path, step: int, model_path: str) -> Path:
    folders = {read(folder).step: folder for folder in checkpoints_of(run)}
    if step not in folders:
        steps = ", ".join(map(str, sorted(folders))) or "none"
        raise ConfigurationError(f"--from-step {step}: there are checkpoints after the steps {steps}")
    folder, manifest = named(folders[step])
    refuse_other_base(manifest, folder, model_path)
    return folder


def _adapter(config: ReplayConfig, recorded: "LoraSettings | None") -> "LoraSettings | None":
    """Return the settings of the adapter to train: those of the options, which may differ from the recorded ones.

    Raises:
        ConfigurationError: The run began with an adapter, whose folder the replay must name.
    """
    from async_grpo.config.lora import lora_settings

    folder = recorded.initial_folder if recorded else ""
    # Do not take the folder from the record, because the record may come from a stranger
    refuse(
        bool(folder) and config.init_adapter is None,
        f"the run began with the adapter in {folder!r:.200}: give --init-adapter with this folder",
    )
    return lora_settings(config, config.model_name_or_path)


def _changed_options(config: ReplayConfig, recorded_options: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the options that differ from the recorded run, as flags with the values of the replay.

    Args:
        config: The options of the replay.
        recorded_options: The run's options, once for each time that it was started or continued. They may differ.
    """
    options = as_options(config)
    changes = []
    for field in fields(RunConfig):
        name = field.name
        is_compared = field.metadata["portable"] or name == "model_name_or_path"
        if not is_compared or name in UNUSED_OPTIONS or name in REPLAY_OPTIONS:
            continue
        if any(earlier.get(name, options[name]) != options[name] for earlier in recorded_options):
            changes.append(f"--{dashed(name)} {options[name]}")
    return changes


class Unpublished:
    """A `WeightPublisher` for training without engines. It sends nothing."""

    def publish(self, model: Any, version: int, *, self_test: bool) -> Any:
        return dict
