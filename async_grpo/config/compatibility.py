"""The rules between two settings, in one table: what is refused, what is warned about, and the way out.

The rows stand in three parts, by what must be known to judge them: VALUES alone, METHODS (the registry's entries of
estimator, loss, schedule and transport), and in `reward_rules` REWARDS (what the run's rewards are). The range of a single
value is said where its option is.
"""

import math
from typing import TYPE_CHECKING, Any

from async_grpo.config.rules import Rule, idle, refuse_broken
from async_grpo.training.config import DECAYS_TO_ZERO
from async_grpo.weights.transports import get_transport

if TYPE_CHECKING:
    from async_grpo.config.run import RunConfig

VALUES = (
    Rule(
        "top_p top_k",
        lambda c: c.top_p != 1.0 or c.top_k not in (0, -1),
        "would make the engine report log-probs of the truncated policy, and the trainer those of the whole one: their "
        "ratio would mean nothing. Sample with --top-p 1 --top-k 0, and shape the policy by --temperature, or by an "
        "entropy or length term",
    ),
    Rule(
        "samples_per_question",
        lambda c: c.samples_per_question < 2,
        "is a group of one, which has nothing to compare with: a group of one has nothing to compare with; use 2 or more",
    ),
    Rule(
        "min_valid_samples samples_per_question",
        lambda c: not 2 <= c.min_valid_samples <= c.samples_per_question,
        "do not fit: --min-valid-samples must lie between 2 (one has nothing to compare with) and the size of a group",
    ),
    Rule(
        "train_minibatch_size samples_per_question",
        lambda c: (
            c.samples_per_step % c.samples_per_question
            and max(1, c.samples_per_step // c.samples_per_question) * c.samples_per_question
        ),
        "do not fit: a step is not a whole number of groups of {c.samples_per_question}: use {found}",
    ),
    Rule(
        "batch_size train_minibatch_size samples_per_question",
        lambda c: (
            c.samples_per_step % c.samples_per_question == 0 and c.batch_size % c.groups_per_step != 0
        ),
        "do not fit: the batch is not a whole number of steps of {c.groups_per_step} groups; make --batch-size a "
        "multiple of that",
    ),
    Rule("clip_low", lambda c: (c.clip_low or 0) > 1, "must be at most 1: a ratio is never below 0"),
    Rule(
        "importance_low importance_high",
        lambda c: c.importance_low is not None and c.importance_low > c.importance_high,
        "leave no weight at all: give low <= high",
    ),
    Rule(
        "dump_samples_filename",
        lambda c: c.dump_samples_filename and "/" in c.dump_samples_filename,
        "must be a plain name; it goes to --output-dir",
    ),
    Rule(
        "rejection_statistic",
        lambda c: c.rejection_statistic and c.rejection_low is None and c.rejection_high is None,
        "rejects nothing without a bound: give --rejection-low or --rejection-high",
    ),
    Rule(
        "rejection_statistic rejection_low rejection_high",
        lambda c: c.rejection_statistic and _rejects_the_policy_itself(c),
        "would reject tokens on which trainer and engine agree: the bounds must hold {found}",
    ),
    Rule(
        "rejection_statistic rejection_low rejection_high",
        lambda c: c.rejection_statistic and _rejects_nothing(c),
        "rejects nothing: give an upper bound that some token may exceed, or leave the statistic out",
    ),
    idle("kl_kind kl_clamp kl_in_reward", lambda c: not c.kl_coef, "without --kl-coef above 0: give --kl-coef"),
    idle(
        "importance_mode importance_low importance_high importance_normalize",
        lambda c: c.importance_level == "none",
        "without --importance-level token or sequence",
    ),
    idle(
        "rejection_low rejection_high",
        lambda c: c.rejection_statistic is None,
        "without --rejection-statistic: give one, or leave the bounds out",
    ),
    idle(
        "max_resamples",
        lambda c: c.zero_variance != "resample" and "refill" not in c.failure_policies.values(),
        "without --zero-variance resample (or a reward that is refilled by --on-reward-failure)",
    ),
    Rule(
        "zero_variance max_resamples",
        lambda c: c.zero_variance == "resample" and not c.max_resamples,
        "replaces nothing: allow at least one, or use keep",
    ),
    idle("overlong_penalty", lambda c: not c.overlong_buffer, "without --overlong-buffer above 0"),
    Rule(
        "overlong_buffer overlong_penalty",
        lambda c: c.overlong_buffer and not c.overlong_penalty,
        "penalises nothing: give a penalty above 0, or leave both out",
    ),
    idle(
        "max_token_staleness",
        lambda c: c.max_token_staleness is not None and c.max_token_staleness >= c.max_staleness,
        "with --max-staleness {c.max_staleness}: no token is older than that",
        warns=True,
    ),
    idle("gate_threshold", lambda c: c.reward_combine != "gate", "without --reward-combine gate"),
    idle("verdict_cache_mb", lambda c: not c.verdict_cache, "without --verdict-cache"),
    idle("judge_budget_policy", lambda c: c.judge_budget is None, "without --judge-budget"),
    idle("eval_every evaluation_verifiers", lambda c: not c.eval_data_path, "without --eval-data-path"),
    idle("num_warmup_steps", lambda c: c.lr_scheduler == "constant",
         "with --lr-scheduler constant: use constant_with_warmup", warns=True),
)  # fmt: skip


def _rejects_the_policy_itself(config: "RunConfig") -> str:
    """The value of the statistic where trainer and engine agree, if the bounds exclude it; else ''."""
    same = 1.0 if config.rejection_statistic and config.rejection_statistic.endswith("k1") else 0.0
    low = -math.inf if config.rejection_low is None else config.rejection_low
    high = math.inf if config.rejection_high is None else config.rejection_high
    return "" if low <= same <= high else f"{same:g}"


def _rejects_nothing(config: "RunConfig") -> bool:
    return config.rejection_high in (None, math.inf) and (config.rejection_low or 0) <= 0


METHODS = (
    idle(
        "critic_coef critic_clip critic_learning_rate critic_trunk_gradient",
        lambda c: not c.estimator.needs_critic,
        "without an --advantage-estimator that has a critic, such as gae",
    ),
    idle(
        "critic_clip",
        lambda c: c.estimator.needs_critic,
        "as yet: a step trains its minibatch once, so no value has moved from the old one",
        warns=True,
    ),
    Rule(
        "advantage_estimator kl_in_reward",
        lambda c: c.kl_in_reward and not c.estimator.outcome,
        "do not go together: the KL would pay every token, and the estimator compares steps; use the KL in the loss",
    ),
    Rule(
        "advantage_estimator zero_variance",
        lambda c: c.zero_variance != "keep" and c.estimator.compares_with_batch,
        "do not go together: groups of equal rewards teach an estimator that compares with the whole batch; keep them",
    ),
    idle(
        "old_policy",
        lambda c: not c.loss.uses_ratio and not (c.old_policy == "proximal" and _corrects(c)),
        "with --policy-loss {c.policy_loss}, which has no ratio: leave it out",
    ),
    idle(
        "clip_low clip_high",
        lambda c: c.old_policy == "current",
        "with --old-policy current, where every ratio is 1",
        warns=True,
    ),
    Rule(
        "policy_loss old_policy",
        lambda c: c.old_policy == "current" and c.loss.idle_at_ratio_one,
        "leave the loss without its pull to the old policy, since every ratio is 1: use --policy-loss gpg, or another "
        "--old-policy",
    ),
    Rule(
        "policy_loss old_policy",
        lambda c: c.loss.needs_proximal and c.old_policy == "current",
        "contradict each other: the loss compares with a proximal policy, and current leaves none",
    ),
    Rule(
        "policy_loss importance_level",
        lambda c: c.importance_level != "none" and c.loss.needs_proximal,
        "weigh twice: the loss weighs by the engine's policy itself; leave --importance-level out",
    ),
    Rule(
        "policy_loss importance_level",
        lambda c: (
            c.importance_level != "none"
            and c.loss.uses_ratio
            and not c.loss.needs_proximal
            and c.old_policy == "behaviour"
        ),
        "would count it twice: the loss already holds the ratio to the engine's policy. Use --old-policy current or "
        "proximal with weights, or a loss without a ratio (grpo, gpg)",
    ),
    Rule(
        "lr_scheduler num_warmup_steps num_training_batches",
        lambda c: c.lr_scheduler in DECAYS_TO_ZERO and c.num_steps <= c.num_warmup_steps,
        "do not fit: the schedule decays until the run's end at step {c.num_steps}, which must lie beyond the warm-up",
    ),
    Rule(
        "weight_transport old_policy policy_loss",
        lambda c: c.needs_proximal and not get_transport(c.weight_transport).sends_packages,
        "do not go together: proximal logprob workers need a --weight-transport that sends packages (object_store)",
    ),
)


def _corrects(config: "RunConfig") -> bool:
    return config.importance_level != "none" or config.rejection_statistic is not None


def check_values(config: Any) -> None:
    """Raise ConfigurationError for settings that can be seen to be wrong without looking anything up."""
    refuse_broken(VALUES, config)


def check_methods(config: "RunConfig") -> None:
    """Raise ConfigurationError for settings that the run's estimator, loss, schedule or transport cannot use."""
    _ = config.estimator_settings, config.loss_settings  # raise for what is no option of theirs
    refuse_broken(METHODS, config)
