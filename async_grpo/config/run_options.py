"""The options of a run. `RunOptions` inherits from `BatchConfig`, `RewardConfig` and the other groups of options."""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from async_grpo.algorithm.flow.config import FlowConfig
from async_grpo.environments.config import EnvironmentConfig
from async_grpo.experience.config import BatchConfig, EvaluationConfig
from async_grpo.options.fields import (
    LIST,
    NOT_NEGATIVE,
    POSITIVE,
    Section,
    option,
    required,
)
from async_grpo.rewards.config import RewardConfig
from async_grpo.training.config import OptimizerConfig
from async_grpo.training.lora_config import LoraConfig
from async_grpo.weights.config import WeightConfig

_output = partial(option, panel="Output")
_cluster = partial(option, panel="Cluster")


@dataclass(frozen=True, kw_only=True)
class MemberConfig(Section):
    """The options that all programs of a run have."""

    run_name: str = option(
        "default",
        "Name of the run. Workers find the run by its name, and runs on one cluster need different names.",
        everyday=True,
    )
    start_timeout_s: float = _cluster(
        900.0, "Seconds to wait for the other programs of the run to load and join.", range=POSITIVE
    )
    logging_level: str = option(
        "INFO", "Lowest level of the messages that are logged: DEBUG, INFO, WARNING or ERROR."
    )


@dataclass(frozen=True, kw_only=True)
class RunOptions(
    WeightConfig,
    OptimizerConfig,
    LoraConfig,
    RewardConfig,
    EnvironmentConfig,
    BatchConfig,
    EvaluationConfig,
    FlowConfig,
    MemberConfig,
):
    """The options of a training run. Sizes are in tokens, samples (completions) or questions (prompts)."""

    model_name_or_path: str = required(
        "Hugging Face folder of the policy to train, or its name on the hub.", everyday=True
    )
    data_path: str = required(
        "JSONL file of questions. Each row has one of input_token_ids, messages, prompt or input, and usually answer. It "
        "may also be a .json, .csv, .tsv or .parquet file, a folder, or a data set of the hub as NAME:SPLIT. With the "
        "value environment, the environment makes the rows.",
        everyday=True,
    )
    output_dir: str = option(
        "runs/default",
        "Folder for metrics, parameters and checkpoints. It is created if it does not exist.",
        everyday=True,
    )
    resume: str = _output(
        "auto",
        "Where to continue from: auto continues the run in --output-dir if there is one, the path of a checkpoint "
        "continues from it, and never begins a new run.",
        everyday=True,
    )
    track: str = _output(
        "",
        "Comma-separated trackers to which metrics are also sent: tensorboard, wandb, trackio, mlflow.",
        form=LIST,
    )
    prometheus_port: int | None = _output(
        None,
        "Port on 127.0.0.1 at which metrics are served for Prometheus. By default they are not served.",
        range=NOT_NEGATIVE,
    )
    record: bool = _output(False, "Save all training inputs of each step, for `async-grpo replay`.")
    keep_checkpoints: int = _output(2, "Number of newest checkpoints to keep.", range=POSITIVE)
    keep_best: str | None = _output(
        None,
        "NAME of a file in --eval-data-path. The checkpoint with the best evaluation on that file is also kept, and "
        "every evaluated step is saved.",
    )
    checkpoint_timeout_s: float = _output(
        1800.0, "Maximum number of seconds that writing a checkpoint may take.", range=POSITIVE
    )
    grace_s: float = _output(
        60.0, "Seconds that the run has to save a checkpoint after SIGTERM or Ctrl-C.", range=POSITIVE
    )
    max_hours: float | None = _output(
        None,
        "Hours after which the run saves a checkpoint and ends with exit code 75. By default there is no limit.",
        range=POSITIVE,
    )
    stall_s: float | None = _output(
        None,
        "Seconds without a finished step after which the run writes a report of what it waits for. The default is "
        "three times the median duration of a step, but at least 120.",
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
        30.0,
        "Seconds that a run waits for a worker of a kind that it needs after the last one was lost.",
        range=POSITIVE,
    )

    @property
    def logprob_roles(self) -> tuple[str, ...]:
        """Return the kinds of logprob workers that the run needs, such as "reference" and "proximal"; often none."""
        roles = []
        # With LoRA, the trainer computes the reference itself, as the model without the adapter. For a policy that
        # draws, the trainer has a copy of the initial model. A reference worker is then needed only for a KL penalty in
        # the rewards, which is computed before the trainer gets the sample
        has_reference_in_trainer = self.has_lora or self.draws
        if self.kl_coef > 0 and (self.kl_in_reward or not has_reference_in_trainer):
            roles.append("reference")
        if self.needs_proximal:
            roles.append("proximal")
        return (*roles, *dict.fromkeys(self.teacher_kinds.values()))

    @property
    def samples_between_models(self) -> int:
        """Return the number of samples between two saves of the model in the Hugging Face format."""
        if self.save_every is None:
            return self.min_samples_per_checkpoint
        return math.ceil(self.save_every / self.passes_per_batch) * self.samples_per_step

    @property
    def output_path(self) -> Path:
        """Return the output folder as a path."""
        return Path(self.output_dir)
