"""`async-grpo replay RUN`: train again from what `--record` kept, without engines or rewards.

The same options make the same weights, bit for bit in float32, on as many ranks as there were (`torchrun
--nproc-per-node N -m async_grpo replay RUN`). Other options, a loss to try, are as good as off-policy: the metrics say
so. Of the folder, which may be somebody else's, only portable options are taken over (`options/portable.py`); a loss of
your own must be given again.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

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

log = logging.getLogger(__name__)
# What a replay does not use, as it has no engines, rewards or questions: it is neither taken over nor compared
IDLE = {
    *(
        one.name
        for room in (RewardConfig, EnvironmentConfig, EvaluationConfig, WeightConfig)
        for one in fields(room)
    ),
    *(
        "data_path",
        "dump_samples_filename",
        "keep_sample_groups",
        "max_resamples",
        "keep_best",
        "logging_level",
        "prometheus_port",
        "scheduling",
        "track",
    ),
}
OWN = ("recorded", "from_step", "output_dir", "record", "resume", "max_hours", "run_name")


@dataclass(frozen=True, kw_only=True)
class ReplayConfig(RunConfig):
    """Where the record is, and the options of its run, which hold unless others are given."""

    recorded: str = required("Folder of the recorded run.", "Replay", argument=True)
    from_step: int = option(
        0,
        "Step to begin after: the step of a checkpoint, or 0 for the beginning.",
        "Replay",
        range=NOT_NEGATIVE,
    )
    model_name_or_path: str = option("", "Hugging Face folder of the policy to train.", everyday=True)
    data_path: str = option("", "JSONL file of questions.", everyday=True)

    @classmethod
    def from_options(cls, options: Mapping[str, Any], given: Collection[str]) -> Self:
        """Return the configuration of a command line, on which these options were `given`.

        Raises:
            ConfigurationError: there is no run, or it was given something that only the user may name.
        """
        run = Path(options["recorded"])
        stored = options_of(run)
        wanted = {one.name for one in fields(RunConfig)} - {*IDLE, *OWN, *given}
        of_run = portable_options(RunConfig, stored, wanted - {"model_name_or_path"}, run)
        if "model_name_or_path" not in given:
            model = stored.get("model_name_or_path")
            refuse(not is_text(model), f"the run of {run} does not say its model: give --model-name-or-path")
            of_run["model_name_or_path"] = model
        if "output_dir" not in given:
            of_run["output_dir"] = str(run / "replay")
        return super().from_options({**options, **of_run}, {*given, *of_run})


def replay(config: ReplayConfig) -> None:
    """Train from the record to its end, and write metrics and the model.

    ConfigurationError: no such record, or no checkpoint to begin from.
    """
    config = replace(config, record=False)
    run = Path(config.recorded)
    stored = options_of(run)
    refuse("settings" not in stored, f"{run / PARAMS_FILE} is of a run that never began")
    folder = _checkpoint(run, config.from_step) if config.from_step else None
    # Heavy imports only once the options are known to be good
    from pydantic import TypeAdapter, ValidationError

    from async_grpo.cluster.make_trainer import make_trainer
    from async_grpo.messages import SharedRunSettings
    from async_grpo.training.distributed import distributed_run
    from async_grpo.training.record import Recording

    try:
        settings = TypeAdapter(SharedRunSettings).validate_python(stored["settings"])
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigurationError(f"{run / PARAMS_FILE}: settings.{where}: {first['msg']}") from error
    # The transport is not used, and the folder could name a file of code
    settings = replace(settings, checkpoint=str(folder or ""), transport=config.weight_transport)
    with distributed_run() as ranks:
        recording = Recording(run, ranks.world_size, config.from_step)
        changed = _changed(config, recording.options)
        if ranks.is_main:
            claim(config.output_path)
            log.info("from the record of %s, steps %d to %d", run, config.from_step + 1, recording.num_steps)
        trainer = make_trainer(config, settings, ranks, recording, publisher=Unpublished())
        trainer.num_steps, trainer.checkpointer = recording.num_steps, None
        label = {"replayed": str(run), "replayed_with": changed, "off_policy": bool(changed)}
        if ranks.is_main:
            metrics = MetricsWriter(config.output_path, recording.num_steps)
            trainer.write = lambda line: metrics.write(line | label)
        trainer.run()


def _checkpoint(run: Path, step: int) -> Path:
    known = {read(folder).step: folder for folder in checkpoints_of(run)}
    if step not in known:
        steps = ", ".join(map(str, sorted(known))) or "none"
        raise ConfigurationError(f"--from-step {step}: there are checkpoints after the steps {steps}")
    return named(known[step])[0]


def _changed(config: ReplayConfig, recorded: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what differs from the run, or within it, because it may have continued with other options."""
    now = as_options(config)
    of_machine = {one.name for one in fields(RunConfig) if not one.metadata["portable"]} - {
        "model_name_or_path"
    }
    names = [one.name for one in fields(RunConfig) if one.name not in {*IDLE, *OWN, *of_machine}]
    return [
        f"--{dashed(name)} {now[name]}"
        for name in names
        if any(then.get(name, now[name]) != now[name] for then in recorded)
    ]


class Unpublished:
    """`WeightPublisher` without engines."""

    def publish(self, model: Any, version: int, *, self_test: bool) -> Any:
        return dict
