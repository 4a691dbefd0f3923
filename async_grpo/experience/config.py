"""The options of the rollout side: batches, steps, groups, and evaluations."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from async_grpo.algorithm.config import AlgorithmConfig, off_policy, on_groups
from async_grpo.algorithm.pass_plan import PassPlan
from async_grpo.algorithm.teacher_config import TEACHER_ALONE
from async_grpo.experience.data_config import DataConfig
from async_grpo.options.fields import (
    COMMAS,
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_SHARE,
    SHARE,
    TABLE,
    option,
    refuse,
)
from async_grpo.options.listed_values import split_table
from async_grpo.types import Sampling

SAMPLES_FILE = "samples.jsonl"

OVERLONG = "overlong"  # key of the length penalty, for estimators that get each reward separately
OUTCOME = "outcome"  # key of the outcome reward, for estimators that get each process reward separately

_batches = partial(option, panel="Batches", everyday=True, portable=True)


@dataclass(frozen=True, kw_only=True)
class BatchConfig(AlgorithmConfig):
    """Options of the batcher. They include the algorithm's options because the batcher computes the advantages."""

    batch_size: int = _batches(128, "Questions per iteration.", range=POSITIVE)
    samples_per_question: int = _batches(
        32,
        "Number of completions per question. They form a group. It may be 1 with an estimator that does not compare "
        "within groups, such as flash_reinforce or gae.",
        range=POSITIVE,
        aliases=("num_generations",),
    )
    train_minibatch_size: int | None = _batches(
        None, "Samples per optimizer step. By default one step trains the whole batch.", range=POSITIVE
    )
    passes_per_batch: int = option(
        1,
        "Number of times that each batch is trained. Every pass takes one optimizer step per minibatch. The engines get "
        "new weights after the last pass.",
        "Batches",
        range=POSITIVE,
        portable=True,
        aliases=("num_iterations",),
    )
    num_training_batches: int = _batches(
        1_000_000,
        "Number of iterations in the whole run, over which learning rate schedules extend.",
        range=POSITIVE,
        aliases=("max_steps",),
    )
    max_tokens_per_gpu: int = _batches(
        36_000, "Maximum number of tokens in one micro-batch on one rank.", range=POSITIVE
    )
    longest_first: bool = option(
        True,
        "Compute the larger micro-batches first, as far as their samples have arrived. On GPUs, also try the largest "
        "possible micro-batch before the first step, so that a lack of memory shows at once.",
        "Batches",
        portable=True,
    )
    max_staleness: int = _batches(
        1,
        "Maximum number of optimizer steps between the policy that sampled a token and the policy that is trained on "
        "it; 0 trains on-policy.",
        range=NOT_NEGATIVE,
    )
    groups_alive: int | None = option(
        None,
        "Maximum number of groups in flight. A group is in flight from its admission until the engines use the "
        "weights that were trained on it. The default is the largest number that --max-staleness allows: with one pass "
        "per batch, (--max-staleness + 1) times the groups of a step. With a lower number, finished groups may be trained "
        "before older, unfinished ones, which helps if a few completions are very long.",
        "Batches",
        range=POSITIVE,
        portable=True,
    )
    max_token_staleness: int | None = off_policy(
        None,
        "Leave tokens out of the loss if the policy that sampled them is more than this number of steps old when they are "
        "trained (in the last pass over their batch). By default none are left out.",
        range=NOT_NEGATIVE,
    )
    engine_sleep: str = option(
        "off",
        "Whether engines free their GPU memory for the trainer while it computes (--colocate): off keeps it, 1 moves the "
        "engines' weights to main memory, and 2 drops them. 1 and 2 also drop the KV cache. Training and generation then "
        "alternate, which needs --max-staleness 0.",
        "Engine",
        choices=("off", "1", "2"),
    )
    scheduling: str = option(
        "least_loaded",
        "Policy that chooses the worker for each group: a built-in name, or FILE.py:NAME of your own function.",
        "Cluster",
        choices="async_grpo.experience.worker_registry:SCHEDULING_POLICIES",
        takes_file=True,
    )
    infinite_sampler_seed: int = option(
        37,
        "Seed for the order of questions and everything else that is random.",
        "Batches",
        portable=True,
        aliases=("seed",),
    )
    dump_samples_filename: str | None = option(
        None,
        "JSONL file in --output-dir to which all samples are written. By default only the samples that "
        "--keep-sample-groups selects are written.",
        "Output",
    )
    keep_sample_groups: int = option(
        2,
        "Number of groups in each step whose samples are written to samples.jsonl in --output-dir; 0 writes none.",
        "Output",
        range=NOT_NEGATIVE,
    )
    experience_timeout_s: float = option(
        1800.0,
        "Maximum number of seconds that a rank waits for its next micro-batch. After that, the run ends with an error.",
        "Cluster",
        range=POSITIVE,
    )

    deterministic: bool = on_groups(
        False,
        "Wait until all groups of a step are finished, and train them in the order of admission. The same samples then "
        "give bitwise equal weights. With --max-staleness 0, a resumed run is bitwise equal to an uninterrupted one.",
    )
    checkpoint_every_s: float = option(
        600.0, "Seconds between checkpoints from which the run can resume.", "Output", range=POSITIVE
    )
    mask_truncated: bool = on_groups(
        True, "Leave completions that reached the maximum length out of the loss."
    )
    zero_variance: str = on_groups(
        "keep",
        "What happens to groups whose rewards are all equal: keep trains them, filter leaves them out of the loss, and "
        "resample replaces them by groups of other prompts.",
        choices=("keep", "filter", "resample"),
    )
    max_resamples: int = on_groups(
        8,
        "Maximum number of times that one group is replaced by a group of another prompt. The last replacement is "
        "always trained.",
        range=NOT_NEGATIVE,
    )
    retire_solved_above: float | None = on_groups(
        None,
        "Stop drawing a question once the mean reward of its group reaches this value. By default questions never "
        "retire.",
    )
    curriculum: str | None = on_groups(
        None,
        "Column of the data with an integer difficulty. For each value of the column `task`, training draws rows of "
        "one difficulty at a time, starting with the lowest.",
    )
    curriculum_up_at: float = on_groups(
        0.75, "Mean reward of 16 groups at which the curriculum moves on to the next higher difficulty."
    )
    curriculum_down_at: float = on_groups(
        0.25, "Mean reward of 16 groups at which the curriculum moves back to the next lower difficulty."
    )
    min_valid_samples: int = on_groups(
        2,
        "Minimum number of rewards that a group needs to be trained on, but at most its size.",
        range=POSITIVE,
    )
    truncation_alarm: float = on_groups(
        0.5, "Warn if more than this share of the completions is truncated.", range=SHARE
    )
    failure_alarm: float = option(
        0.1, "Warn if more than this share of a reward's calls fails.", "Rewards", range=SHARE
    )

    @property
    def is_taught_alone(self) -> bool:
        """Return whether only a teacher trains the policy, so that the run needs no reward."""
        return self.advantage_estimator == TEACHER_ALONE

    def refuse_missing_teacher(self) -> None:
        """Raise ConfigurationError if rewards are ignored and there is no teacher, so that nothing would be learned."""
        refuse(
            self.is_taught_alone and not self.teachers,
            f"--advantage-estimator {TEACHER_ALONE} learns from a teacher alone: name it with --teacher, or choose another "
            "estimator",
        )

    @property
    def samples_filename(self) -> str | None:
        """Return the name of the file to which training samples are written, or None if none are written."""
        if self.dump_samples_filename:
            return self.dump_samples_filename
        return SAMPLES_FILE if self.keep_sample_groups else None

    @property
    def trains_whole_steps(self) -> bool:
        """Return whether training waits for all groups of a step. Engines sleep only after they generated all of them."""
        return self.deterministic or self.sleep_level > 0

    @property
    def sleep_level(self) -> int:
        """Return the level at which engines sleep while the trainer computes, or 0 if they stay awake."""
        return 0 if self.engine_sleep == "off" else int(self.engine_sleep)

    @property
    def samples_per_step(self) -> int:
        """Return the number of samples per optimizer step."""
        return self.train_minibatch_size or self.batch_size * self.samples_per_question

    @property
    def groups_per_step(self) -> int:
        """Return P, the number of groups per optimizer step."""
        return self.samples_per_step // self.samples_per_question

    @property
    def samples_in_flight(self) -> int:
        """Return the maximum number of samples in flight (see the option `groups_alive`)."""
        return (self.groups_alive or self.max_groups_alive) * self.samples_per_question

    @property
    def max_groups_alive(self) -> int:
        """Return the number of groups that `max_staleness` allows in flight."""
        return self.pass_plan.minibatches_alive(self.max_staleness) * self.groups_per_step

    @property
    def generates_ahead(self) -> bool:
        """Return whether the engines generate samples of later steps while the trainer computes."""
        plan = self.pass_plan
        return plan.minibatches_alive(self.max_staleness) > plan.cycle_minibatches

    @property
    def minibatches_per_batch(self) -> int:
        """Return M, the number of optimizer steps of one pass over a batch."""
        return self.batch_size // self.groups_per_step

    @property
    def pass_plan(self) -> PassPlan:
        """Return the plan of how optimizer steps follow from minibatches and passes."""
        return PassPlan(self.minibatches_per_batch, self.passes_per_batch)

    @property
    def cycle_steps(self) -> int:
        """Return the number of optimizer steps between two weight syncs."""
        return self.pass_plan.cycle_steps

    @property
    def min_rewards(self) -> int:
        """Return the minimum number of rewards in a group that is trained on (see the option `min_valid_samples`)."""
        return min(self.min_valid_samples, self.samples_per_question)

    @property
    def steps_per_batch(self) -> int:
        """Return the number of optimizer steps per iteration."""
        return self.minibatches_per_batch * self.passes_per_batch

    @property
    def num_groups(self) -> int:
        """Return the number of groups of the whole run."""
        return self.num_training_batches * self.batch_size

    @property
    def num_steps(self) -> int:
        """Return the number of optimizer steps of the whole run."""
        return self.num_training_batches * self.steps_per_batch

    def overlong_cost(self, num_tokens: int, longest: int) -> float:
        """Return the length penalty of a completion, as a positive number (Yu et al. 2025, "DAPO", eq. 13).

        The buffer is the last part of the longest possible completion. The penalty is 0 for completions that end before
        the buffer, and grows linearly within it.

        Args:
            num_tokens: Length of the completion.
            longest: Length of the longest possible completion.

        >>> config = BatchConfig(overlong_buffer=0.2, overlong_penalty=1.0)
        >>> config.overlong_cost(80, 100), config.overlong_cost(90, 100), config.overlong_cost(100, 100)
        (0.0, 0.5, 1.0)
        """
        buffer_tokens = round(self.overlong_buffer * longest)
        if buffer_tokens == 0:
            return 0.0
        tokens_in_buffer = max(num_tokens - (longest - buffer_tokens), 0)
        return self.overlong_penalty * min(tokens_in_buffer / buffer_tokens, 1.0)


_evaluation = partial(option, panel="Evaluation", portable=True)


@dataclass(frozen=True, kw_only=True)
class EvaluationTask(DataConfig):
    """Options of an evaluation: its questions, its sampling, and the reward with which a completion passes."""

    eval_data_path: str | None = _evaluation(
        None,
        "JSONL file of held-out questions, or another format that --data-path takes, or several files as "
        "NAME=FILE,NAME=FILE. By default nothing is evaluated.",
        everyday=True,
        form=TABLE,
    )
    eval_samples: int = _evaluation(
        1,
        "Number n of completions per question in evaluations, for avg@n and for pass@k up to k = n.",
        range=POSITIVE,
    )
    eval_temperature: float | None = _evaluation(
        None,
        "Sampling temperature in evaluations; 0 is greedy. The default is --temperature.",
        range=NOT_NEGATIVE,
    )
    eval_max_tokens: int | None = _evaluation(
        None,
        "Maximum length of a completion in evaluations, in tokens. The default is --max-generation-tokens.",
        range=POSITIVE,
    )
    eval_pass_reward: float = _evaluation(
        1.0, "Lowest reward with which a completion passes. Pictures can pass only if this option is set."
    )

    @property
    def eval_files(self) -> dict[str, str]:
        """Return the files of `--eval-data-path`, by name. A single file without a name has the name ""."""
        if self.eval_data_path is None:
            return {}
        if "=" not in self.eval_data_path and not self.eval_data_path.startswith("{"):
            return {"": self.eval_data_path}
        pairs = split_table(self.eval_data_path, "eval-data-path")
        files = {name: str(path) for name, path in pairs}
        refuse(
            len(files) < len(pairs) or not all(files) or not all(files.values()),
            f"--eval-data-path {self.eval_data_path}: give a file, or NAME=FILE,NAME=FILE with different names; {COMMAS}",
        )
        return files

    @property
    def sampling(self) -> Sampling:
        """Return the sampling settings of evaluations. A setting that is None keeps the run's value."""
        return Sampling(self.eval_temperature, self.eval_max_tokens)


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(EvaluationTask):
    """Options of the evaluations during training."""

    eval_every: int = _evaluation(
        0,
        "Number of steps between evaluations. The policy is always evaluated at the start and at the end of the run; with "
        "0, only then.",
        range=NOT_NEGATIVE,
    )
    eval_share: float = _evaluation(
        0.25,
        "Maximum number of evaluation completions generated at once, as a share of the maximum number of training "
        "completions in flight.",
        range=POSITIVE_SHARE,
    )
    eval_pinned: bool = _evaluation(
        False,
        "Pause training during every evaluation, so that one policy version generates all of its completions. "
        "Evaluations at the start and at the end of the run always use one version.",
    )

    def evaluation_is_due(self, step: int, num_steps: int) -> bool:
        """Return whether an evaluation follows `step` in a run of `num_steps` steps."""
        return step == num_steps or bool(self.eval_every and step % self.eval_every == 0)


@dataclass(frozen=True)
class RunFacts:
    """Facts about the run's rewards and model that the rollout side needs. They are collected once, at the start."""

    # Number of completion tokens that fit into the context even after the longest prompt
    max_completion_tokens: int = 0
    process_rewards: tuple[str, ...] = ()  # names of the process rewards
    whole_groups: bool = False  # whether a reward processes whole groups (`post_process_scores`)
    weights: Mapping[str, float] = field(default_factory=dict)  # values of `--reward-weights`, by reward
    failure_policies: Mapping[str, str] = field(default_factory=dict)  # `--on-reward-failure`, by reward
    best_rewards: Mapping[str, float] = field(default_factory=dict)  # highest value of each reward, by name
    hidden_size: int = 1536  # hidden size of the model, from which the packer estimates the cost of attention
    unsampled_token_ids: tuple[int, ...] = ()  # tokens that stand for images, and that no completion may have
    kept_images: frozenset[str] = frozenset()  # digests of the data's images that stay for the whole run
    keeps_images: bool = False  # whether images that environments send stay for the whole run

    def weight(self, name: str) -> float:
        """Return the weight of a reward, or 1 if `--reward-weights` does not name it."""
        return self.weights.get(name, 1.0)


NO_FACTS = RunFacts()
