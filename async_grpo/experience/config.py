"""The options of the rollout side: batches, steps, and what becomes of groups on the way to them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from async_grpo.algorithm.config import AlgorithmConfig, off_policy, on_groups
from async_grpo.options.fields import (
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_SHARE,
    SHARE,
    Range,
    Section,
    option,
    refuse,
)
from async_grpo.types import Sampling

OF_A_GROUP = Range("must be 2 or more: a group of one has nothing to compare with", lambda size: size >= 2)
OVERLONG = "overlong"  # the name of the length penalty among the rewards that an estimator takes apart
OUTCOME = "outcome"  # the name of the best outcome reward beside process rewards that are taken apart

_batches = partial(option, panel="Batches", everyday=True, portable=True)


@dataclass(frozen=True, kw_only=True)
class BatchConfig(AlgorithmConfig):
    """What the batcher is given. The algorithm's options are among them: advantages are computed here."""

    batch_size: int = _batches(128, "Questions per iteration.", range=POSITIVE)
    samples_per_question: int = _batches(32, "Completions per question: the group size.", range=OF_A_GROUP)
    train_minibatch_size: int | None = _batches(
        None, "Samples per optimizer step (default: the whole batch).", range=POSITIVE
    )
    num_training_batches: int = _batches(1_000_000, "Iterations, the schedules' horizon.", range=POSITIVE)
    max_tokens_per_gpu: int = _batches(36_000, "Token budget of one micro-batch on one rank.", range=POSITIVE)
    max_staleness: int = _batches(
        1, "Oldest policy a trained token may come from, in steps (0: on-policy).", range=NOT_NEGATIVE
    )
    groups_alive: int | None = option(
        None,
        "Groups between admission and the live weights trained on them. Fewer than (max_staleness + 1) steps' worth (the "
        "default): any finished group may join a step as long as none becomes too old, for long-tailed lengths.",
        "Batches",
        range=POSITIVE,
        portable=True,
    )
    max_token_staleness: int | None = off_policy(
        None, "Leave tokens of policies older than this out of the loss.", range=NOT_NEGATIVE
    )
    scheduling: str = option(
        "least_loaded",
        "Which worker a group goes to, or FILE.py:NAME of a policy of your own.",
        "Cluster",
        choices="async_grpo.experience.worker_registry:SCHEDULING_POLICIES",
        own=True,
    )
    infinite_sampler_seed: int = option(
        37, "Seed of the questions' order and everything random.", "Batches", portable=True
    )
    dump_samples_filename: str | None = option(None, "Also write samples (JSONL) into output_dir.", "Output")
    experience_timeout_s: float = option(
        1800.0, "Longest wait of a rank for its next micro-batch.", "Cluster", range=POSITIVE
    )

    deterministic: bool = on_groups(
        False,
        "Train a step once it is whole, in order of admission: the same samples then make the same bits, and a resumed run "
        "those of one that was never stopped, if --max-staleness is 0.",
    )
    checkpoint_every_s: float = option(
        600.0, "Save what a resumed run needs every so many seconds.", "Output", range=POSITIVE
    )
    mask_truncated: bool = on_groups(True, "Leave truncated completions out of the loss.")
    zero_variance: str = on_groups(
        "keep",
        "Groups of equal rewards: keep, filter (out of the loss) or resample (another prompt).",
        choices=("keep", "filter", "resample"),
    )
    max_resamples: int = on_groups(
        8, "Prompts that may replace one without signal; then its group is taken.", range=NOT_NEGATIVE
    )
    retire_solved_above: float | None = on_groups(
        None, "Draw a question no more once a group's mean reward reached this."
    )
    curriculum: str | None = on_groups(
        None,
        "Column of the rows with their difficulty, whole numbers: of each task (their column task), only rows of one level "
        "are drawn, from the lowest.",
    )
    curriculum_up_at: float = on_groups(
        0.75, "The next higher level takes its place once 16 groups have this mean reward."
    )
    curriculum_down_at: float = on_groups(0.25, "And the next lower one once they have this.")
    min_valid_samples: int = on_groups(2, "Rewards that a group needs, or it is left out.", range=POSITIVE)
    truncation_alarm: float = on_groups(0.5, "Warn above this share of truncated completions.", range=SHARE)
    failure_alarm: float = option(
        0.1, "Warn when more than this share of a reward's calls fails.", "Rewards", range=SHARE
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
    def samples_in_flight(self) -> int:
        """Samples between admission and the live weights trained on them, at most."""
        alive = self.groups_alive or (self.max_staleness + 1) * self.groups_per_step
        return alive * self.samples_per_question

    @property
    def steps_per_batch(self) -> int:
        return self.batch_size // self.groups_per_step

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.num_training_batches * self.steps_per_batch

    def overlong_cost(self, num_tokens: int, longest: int) -> float:
        """What a completion loses by its length: nothing up to the buffer at the end of the `longest` possible one, then
        linearly more (Yu et al. 2025, "DAPO", eq. 13).

        >>> config = BatchConfig(overlong_buffer=0.2, overlong_penalty=1.0)
        >>> config.overlong_cost(80, 100), config.overlong_cost(90, 100), config.overlong_cost(100, 100)
        (0.0, 0.5, 1.0)
        """
        if not (buffer := round(self.overlong_buffer * longest)):
            return 0.0
        over = num_tokens - (longest - buffer)
        return self.overlong_penalty * min(max(over, 0) / buffer, 1.0)


_evaluation = partial(option, panel="Evaluation", portable=True)


@dataclass(frozen=True, kw_only=True)
class EvaluationTask(Section):
    """What an evaluation asks, and what passes."""

    eval_data_path: str | None = _evaluation(
        None, "JSONL of held-out questions; several: NAME=FILE,NAME=FILE.", everyday=True
    )
    eval_samples: int = _evaluation(1, "Completions of each question: n of avg@n and pass@k.", range=POSITIVE)
    eval_temperature: float | None = _evaluation(
        None, "Their temperature (default: --temperature; 0: greedy).", range=NOT_NEGATIVE
    )
    eval_max_tokens: int | None = _evaluation(
        None, "Their longest length (default: --max-generation-tokens).", range=POSITIVE
    )
    eval_pass_reward: float = _evaluation(1.0, "The reward from which on a completion passes.")

    @property
    def eval_files(self) -> dict[str, str]:
        """Files by name; a single one has the name ""."""
        if self.eval_data_path is None or "=" not in self.eval_data_path:
            return {} if self.eval_data_path is None else {"": self.eval_data_path}
        parts = [part.partition("=") for part in self.eval_data_path.split(",")]
        files = {name.strip(): path.strip() for name, _, path in parts}
        refuse(
            len(files) < len(parts) or not all(files) or not all(files.values()),
            f"--eval-data-path {self.eval_data_path}: give a file, or NAME=FILE,NAME=FILE with different names",
        )
        return files

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.eval_temperature, self.eval_max_tokens)


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(EvaluationTask):
    """How the policy is evaluated, beside its training."""

    eval_every: int = _evaluation(
        0, "Evaluate every so many steps, besides start and end (0: only these).", range=NOT_NEGATIVE
    )
    eval_share: float = _evaluation(
        0.25,
        "Completions evaluated at once, as a share of those in flight for training.",
        range=POSITIVE_SHARE,
    )
    eval_pinned: bool = _evaluation(
        False,
        "Pause training during every evaluation, so that a single policy version generates all of it. The evaluations at "
        "the start and at the end are always of one version.",
    )

    def evaluation_is_due(self, step: int, num_steps: int) -> bool:
        """After so many steps of a run of `num_steps`."""
        return step == num_steps or bool(self.eval_every and step % self.eval_every == 0)


@dataclass(frozen=True)
class RunFacts:
    """What the rollout side must know of the run's inputs, which other rooms read; made once, at start."""

    max_completion_tokens: int = 0  # for which even the longest prompt leaves room
    process: tuple[str, ...] = ()  # the rewards that come step by step
    whole_groups: bool = False  # some of them look at a whole group (`post_process_scores`)
    weights: Mapping[str, float] = field(default_factory=dict)  # `--reward-weights` by name
    failure_policies: Mapping[str, str] = field(default_factory=dict)  # `--on-reward-failure` by name
    best_rewards: Mapping[str, float] = field(default_factory=dict)  # the highest reward of each, by name
    hidden_size: int = 1536  # of the model: says from which length on attention is what costs

    def weight(self, name: str) -> float:
        return self.weights.get(name, 1.0)


NO_FACTS = RunFacts()
