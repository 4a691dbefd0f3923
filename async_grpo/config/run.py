"""The two configurations: `RunConfig` of a training run (trainer_core.py) and `WorkerConfig` of one worker.

Frozen dataclasses; the command lines are built from their fields (`cli.py`), so a field's `help` is its documentation.
Everything that can be known to be impossible from the values alone is refused in `__post_init__`.
"""

import dataclasses
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from async_grpo.algorithm.config import AlgorithmConfig
from async_grpo.config.recipes import apply_recipe, check_applied
from async_grpo.options.fields import dashed, option, refuse, required
from async_grpo.rewards.config import RewardConfig

LR_SCHEDULERS = ("constant", "constant_with_warmup", "linear", "cosine", "inverse_sqrt")
DTYPES = ("auto", "float32", "bfloat16")
TRANSPORTS = ("object_store", "nccl")


@dataclass(frozen=True, kw_only=True)
class RunConfig(RewardConfig, AlgorithmConfig):
    """Everything a training run is told. Units: tokens, samples (completions), questions (prompts), seconds."""

    announces_recipe: ClassVar[bool] = True

    model_name_or_path: str = required("Hugging Face folder of the policy to train.")
    data_path: str = required(
        "JSONL of questions: input_token_ids, or messages/prompt/input text, and answer."
    )
    output_dir: str = option(
        "runs/default", "Folder for metrics, parameters and checkpoints (made if missing)."
    )
    run_name: str = option(
        "default", "Keeps runs on one cluster apart; workers join the run of the same name."
    )
    logging_level: str = option("INFO", "DEBUG, INFO, WARNING or ERROR.")

    batch_size: int = option(128, "Questions per iteration.", "Batches")
    samples_per_question: int = option(32, "Completions per question: the group size.", "Batches")
    train_minibatch_size: int | None = option(
        None, "Samples per optimizer step (default: the whole batch).", "Batches"
    )
    num_training_batches: int = option(1_000_000, "Iterations; also the horizon of the schedules.", "Batches")
    max_tokens_per_gpu: int = option(36_000, "Token budget of one micro-batch on one rank.", "Batches")
    max_staleness: int = option(
        1, "Oldest policy a trained token may come from, in steps (0: on-policy).", "Batches"
    )
    infinite_sampler_seed: int = option(
        37, "Seed of the order of questions and of everything random.", "Batches"
    )

    temperature: float = option(
        1.0, "Sampling temperature, and the divisor of the policy's logits.", "Generation"
    )
    max_generation_tokens: int = option(8192, "Longest completion, in tokens.", "Generation")

    learning_rate: float = option(2e-6, "Peak learning rate of AdamW.", "Optimizer")
    lr_scheduler: str = option("constant_with_warmup", f"One of: {', '.join(LR_SCHEDULERS)}.", "Optimizer")
    num_warmup_steps: int = option(10, "Optimizer steps of linear warm-up.", "Optimizer")
    max_grad_norm: float = option(1.0, "Gradient norm is clipped to this.", "Optimizer")
    weight_decay: float = option(0.0, "AdamW weight decay.", "Optimizer")
    dtype: str = option("auto", "Compute type: float32, bfloat16, or auto (bfloat16 on GPUs).", "Optimizer")
    gradient_checkpointing: bool = option(
        False, "Recompute activations: less memory, a third more time.", "Optimizer"
    )
    logprob_chunk_size: int = option(1024, "Tokens per slice of the vocabulary head.", "Optimizer")
    update_stats: bool = option(
        True, "Log norms and ratios of the weight update (one more copy of the shards).", "Output"
    )

    min_samples_per_checkpoint: int = option(30_000, "A checkpoint at least every so many samples.", "Output")
    keep_checkpoints: int = option(0, "Keep only the newest so many checkpoints (0: all).", "Output")
    dump_samples_filename: str | None = option(
        None, "Also write every sample, as JSONL, into output_dir.", "Output"
    )
    eval_data_path: str | None = option(None, "JSONL of held-out questions.", "Output")
    eval_every: int = option(
        0, "Evaluate every so many steps, besides start and end (0: only these).", "Output"
    )

    weight_transport: str = option(
        "object_store", "How weights travel: object_store, or nccl on GPUs.", "Cluster"
    )
    start_timeout_s: float = option(900.0, "Longest wait for workers to load their models.", "Cluster")
    experience_timeout_s: float = option(
        1800.0, "Longest wait of a rank for its next micro-batch.", "Cluster"
    )
    sync_timeout_s: float = option(600.0, "Longest weight update of an engine.", "Cluster")
    canary_tolerance: float | None = option(
        None,
        "Allowed difference of engine and trainer log-probs, root mean square (default by dtype).",
        "Cluster",
    )
    worker_grace_s: float = option(
        30.0, "How long a run survives without any worker of a kind it needs.", "Cluster"
    )

    @classmethod
    def from_options(cls, options: Mapping[str, Any], given: Collection[str]) -> "RunConfig":
        """The configuration of a command line: the recipe's presets apply to whatever was not `given`."""
        options, said = apply_recipe(options, given)
        if said and cls.announces_recipe and os.environ.get("RANK", "0") == "0":
            print(said, flush=True)
        return cls(**options)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_rewards()
        check_applied(self, {field.name: field.default for field in dataclasses.fields(self)})
        positive = ("batch_size", "samples_per_question", "num_training_batches", "max_tokens_per_gpu", "temperature",
                    "max_generation_tokens", "learning_rate", "max_grad_norm",
                    "logprob_chunk_size", "min_samples_per_checkpoint", "start_timeout_s", "experience_timeout_s",
                    "sync_timeout_s", "worker_grace_s")  # fmt: skip
        for name in positive:
            refuse(
                not getattr(self, name) > 0, f"--{dashed(name)} must be above 0, not {getattr(self, name)}"
            )
        for name in ("max_staleness", "num_warmup_steps", "weight_decay", "eval_every", "keep_checkpoints"):  # fmt: skip
            refuse(
                getattr(self, name) < 0, f"--{dashed(name)} cannot be negative, and is {getattr(self, name)}"
            )
        for name, known in (
            ("lr_scheduler", LR_SCHEDULERS),
            ("dtype", DTYPES),
            ("weight_transport", TRANSPORTS),
        ):
            refuse(
                getattr(self, name) not in known,
                f"--{dashed(name)} {getattr(self, name)!r} is unknown; known: {', '.join(known)}",
            )
        minibatch = self.train_minibatch_size
        refuse(
            minibatch is not None and minibatch <= 0,
            f"--train-minibatch-size must be above 0, not {minibatch}",
        )
        refuse(
            self.samples_per_question < 2,
            "--samples-per-question 1: a group of one has nothing to compare with; use 2 or more",
        )
        refuse(
            not 2 <= self.min_valid_samples <= self.samples_per_question,
            f"--min-valid-samples {self.min_valid_samples} must lie between 2 (one has nothing to compare with) and "
            f"--samples-per-question {self.samples_per_question}",
        )
        name = self.dump_samples_filename
        refuse(
            bool(name) and "/" in name,
            f"--dump-samples-filename {name} must be a plain name; it goes to --output-dir",
        )
        self._refuse_uneven_steps()

    def _refuse_uneven_steps(self) -> None:
        samples, group = self.samples_per_step, self.samples_per_question
        refuse(
            samples % group != 0,
            f"--train-minibatch-size {samples} is not a whole number of groups of {group} (--samples-per-question): "
            f"use {max(1, samples // group) * group}",
        )
        refuse(
            self.batch_size % self.groups_per_step != 0,
            f"--batch-size {self.batch_size} questions is not a whole number of steps of {self.groups_per_step} groups "
            f"(--train-minibatch-size {samples} / --samples-per-question {group})",
        )

    @property
    def samples_per_step(self) -> int:
        """Samples per optimizer step."""
        return self.train_minibatch_size or self.batch_size * self.samples_per_question

    @property
    def groups_per_step(self) -> int:
        """P: groups per optimizer step."""
        return self.samples_per_step // self.samples_per_question

    @property
    def steps_per_batch(self) -> int:
        return self.batch_size // self.groups_per_step

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.num_training_batches * self.steps_per_batch

    @property
    def logprob_roles(self) -> tuple[str, ...]:
        """The kinds of logprob worker that the run needs; usually none."""
        from async_grpo.algorithm.losses import get_policy_loss  # imports torch, which --help can do without

        proximal = self.old_policy == "proximal" or get_policy_loss(self.policy_loss).needs_proximal
        return ("reference",) * self.needs_reference + ("proximal",) * proximal

    @property
    def output_path(self) -> Path:
        return Path(self.output_dir)


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """What one inference worker is told; temperature, lengths, stop ids and dtype come from the trainer."""

    mode: str = required("generation or logprob.")
    model_path: str = required("Hugging Face folder of the model; must be the trainer's.")
    run_name: str = option("default", "The run to join (the trainer's --run-name).")
    reward_fns: str = option("", "Comma list of rewards of the run (generation mode).")
    max_num_seqs: int = option(64, "Sequences the engine decodes at once.")
    overhead_seqs: int = option(16, "Further sequences admitted, so that the engine never runs dry.")
    tensor_parallel_size: int = option(1, "GPUs of this worker.")
    gpu_memory_utilization: float = option(0.9, "Share of each GPU's memory that the engine may take.")
    enable_prefix_caching: bool = option(True, "Share the prompt's KV cache within a group.")
    enforce_eager: bool = option(False, "Do not compile the engine's model: starts faster, runs slower.")
    max_tokens_per_gpu: int = option(46_000, "Logprob mode: tokens of one packed forward.")
    max_wait_s: float = option(0.02, "Logprob mode: longest wait for a forward to fill up.")
    role: str = option("reference", "Logprob mode: reference (frozen) or proximal (follows the policy).")
    start_timeout_s: float = option(900.0, "Longest wait for the trainer to open the run.")
    logging_level: str = option("INFO", "DEBUG, INFO, WARNING or ERROR.")

    def __post_init__(self) -> None:
        refuse(
            self.mode not in ("generation", "logprob"),
            f"--mode {self.mode!r}: known are generation and logprob",
        )
        refuse(
            self.role not in ("reference", "proximal"),
            f"--role {self.role!r}: known are reference and proximal",
        )
        for name in ("max_num_seqs", "tensor_parallel_size", "max_tokens_per_gpu", "start_timeout_s"):
            refuse(
                not getattr(self, name) > 0, f"--{dashed(name)} must be above 0, not {getattr(self, name)}"
            )
        refuse(self.overhead_seqs < 0, f"--overhead-seqs cannot be negative, and is {self.overhead_seqs}")
        refuse(not Path(self.model_path).is_dir(), f"--model_path {self.model_path}: there is no such folder")
