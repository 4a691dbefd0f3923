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

_output, _cluster = partial(option, panel="Output"), partial(option, panel="Cluster")


@dataclass(frozen=True, kw_only=True)
class MemberConfig(Section):
    """What every program of a run is told."""

    run_name: str = option(
        "default", "Keeps runs on one cluster apart; workers join the run of the same name.", everyday=True
    )
    start_timeout_s: float = _cluster(900.0, "Longest wait for others to load and join.", range=POSITIVE)
    logging_level: str = option("INFO", "DEBUG, INFO, WARNING or ERROR.")


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
        "JSONL of questions: input_token_ids, or messages/prompt/input text, and answer. Or: environment, for rows that "
        "the environment makes.",
        everyday=True,
    )
    output_dir: str = option(
        "runs/default", "Folder for metrics, parameters and checkpoints (made if missing).", everyday=True
    )
    resume: str = _output(
        "auto",
        "Go on with the run in output_dir, if there is one (auto), or from a checkpoint's folder, or never.",
        everyday=True,
    )
    track: str = _output("", "Also send metrics to: tensorboard, wandb, trackio, mlflow (a comma list).")
    prometheus_port: int | None = _output(
        None, "Serve metrics for Prometheus on this port of the loopback interface.", range=NOT_NEGATIVE
    )
    record: bool = _output(False, "Keep what every step is trained on, for `async-grpo replay`.")
    keep_checkpoints: int = _output(2, "Keep so many checkpoints to resume from.", range=POSITIVE)
    keep_best: str | None = _output(
        None,
        "Also keep the checkpoint whose evaluation on this NAME of --eval-data-path is best; evaluated steps are saved.",
    )
    checkpoint_timeout_s: float = _output(1800.0, "Longest writing of a checkpoint.", range=POSITIVE)
    grace_s: float = _output(60.0, "Time to save in when told to end (SIGTERM, Ctrl-C).", range=POSITIVE)
    max_hours: float | None = _output(None, "Save and end after so many hours (code 75).", range=POSITIVE)
    stall_s: float | None = _output(
        None, "Find out why no step ends for so long (default: 3 median steps, at least 120).", range=POSITIVE
    )
    min_samples_per_checkpoint: int = _output(
        30_000,
        "Save the model in the Hugging Face format every so many samples.",
        range=POSITIVE,
        portable=True,
    )
    keep_models: int = _output(
        0, "Keep only the newest so many of these (0: all).", range=NOT_NEGATIVE, portable=True
    )
    worker_grace_s: float = _cluster(
        30.0, "How long a run survives without any worker of a kind it needs.", range=POSITIVE
    )

    @property
    def logprob_roles(self) -> tuple[str, ...]:
        """The kinds of logprob worker that the run needs; usually none."""
        return ("reference",) * (self.kl_coef > 0) + ("proximal",) * self.needs_proximal

    @property
    def output_path(self) -> Path:
        return Path(self.output_dir)
