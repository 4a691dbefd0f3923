"""The fields of a run's configuration: a `RunOptions` *is* a `BatchConfig`, a `RewardConfig`, and so on."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from async_grpo.environments.config import EnvironmentConfig
from async_grpo.experience.config import BatchConfig, EvaluationConfig
from async_grpo.options.fields import NOT_NEGATIVE, POSITIVE, Section, option, required
from async_grpo.rewards.config import RewardConfig
from async_grpo.training.config import OptimizerConfig
from async_grpo.weights.config import WeightConfig

_output = partial(option, panel="Output")
_cluster = partial(option, panel="Cluster")


@dataclass(frozen=True, kw_only=True)
class MemberConfig(Section):
    """The options of every program of a run."""

    run_name: str = option(
        "default",
        "Name of the run, by which workers find it and which keeps runs on one cluster apart.",
        everyday=True,
    )
    start_timeout_s: float = _cluster(
        900.0, "Seconds to wait for other programs of the run to load and join.", range=POSITIVE
    )
    logging_level: str = option(
        "INFO", "Lowest level of messages that are logged: DEBUG, INFO, WARNING or ERROR."
    )


@dataclass(frozen=True, kw_only=True)
class RunOptions(
    WeightConfig,
    OptimizerConfig,
    RewardConfig,
    EnvironmentConfig,
    BatchConfig,
    EvaluationConfig,
    MemberConfig,
):
    """The options of a training run. Units: tokens, samples (completions), questions (prompts), seconds."""

    model_name_or_path: str = required("Hugging Face folder of the policy to train.", everyday=True)
    data_path: str = required(
        "JSONL file of questions, with input_token_ids, or a messages, prompt or input text, and answer; or the word "
        "environment, for rows that the environment makes.",
        everyday=True,
    )
    output_dir: str = option(
        "runs/default",
        "Folder for metrics, parameters and checkpoints, which is made if it does not exist.",
        everyday=True,
    )
    resume: str = _output(
        "auto",
        "Continue the run in --output-dir if there is one (auto), continue from a checkpoint's folder, or never "
        "continue.",
        everyday=True,
    )
    track: str = _output(
        "", "Comma list of trackers that metrics are also sent to: tensorboard, wandb, trackio, mlflow."
    )
    prometheus_port: int | None = _output(
        None,
        "Port of the loopback interface on which metrics are served for Prometheus. By default they are not served.",
        range=NOT_NEGATIVE,
    )
    record: bool = _output(False, "Keep everything that each step is trained on, for `async-grpo replay`.")
    keep_checkpoints: int = _output(2, "Number of newest checkpoints to keep.", range=POSITIVE)
    keep_best: str | None = _output(
        None,
        "Also keep the checkpoint with the best evaluation on this NAME of --eval-data-path, and save every "
        "evaluated step.",
    )
    checkpoint_timeout_s: float = _output(
        1800.0, "Seconds that writing a checkpoint may take.", range=POSITIVE
    )
    grace_s: float = _output(
        60.0, "Seconds to save a checkpoint in when the run is told to end (SIGTERM, Ctrl-C).", range=POSITIVE
    )
    max_hours: float | None = _output(
        None,
        "Hours after which the run saves a checkpoint and ends with exit code 75. By default there is no limit.",
        range=POSITIVE,
    )
    stall_s: float | None = _output(
        None,
        "Seconds without a finished step after which the run writes down what it waits for. The default is 3 median "
        "steps, and at least 120.",
        range=POSITIVE,
    )
    min_samples_per_checkpoint: int = _output(
        30_000,
        "Save the model in the Hugging Face format at intervals of this many samples.",
        range=POSITIVE,
        portable=True,
    )
    save_every: int | None = _output(
        None,
        "Save the model in the Hugging Face format at intervals of this many steps. By default "
        "--min-samples-per-checkpoint decides.",
        range=POSITIVE,
        portable=True,
    )
    keep_models: int = _output(
        0,
        "Number of newest models in the Hugging Face format to keep; 0 keeps all.",
        range=NOT_NEGATIVE,
        portable=True,
    )
    worker_grace_s: float = _cluster(
        30.0, "Seconds that a run continues without any worker of a kind that it needs.", range=POSITIVE
    )

    @property
    def logprob_roles(self) -> tuple[str, ...]:
        """Return the kinds of logprob worker that the run needs; usually none."""
        roles = []
        if self.kl_coef > 0:
            roles.append("reference")
        if self.needs_proximal:
            roles.append("proximal")
        return tuple(roles)

    @property
    def samples_between_models(self) -> int:
        """Return the number of samples after which the model is saved again in the Hugging Face format."""
        if self.save_every is None:
            return self.min_samples_per_checkpoint
        return self.save_every * self.samples_per_step

    @property
    def output_path(self) -> Path:
        """Return the output folder as a path."""
        return Path(self.output_dir)
