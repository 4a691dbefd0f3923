"""The rules between two settings, in one table: what is refused, what is warned about, and the way out.

The rows stand in three parts, by what must be known to judge them: VALUES alone, METHODS (the registry's entries of
estimator, loss, schedule and transport), and in `config.rewards` REWARDS (what the run's rewards are). The range of a
single value is said where its option is.
"""

import dataclasses
import math
import os
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from async_grpo.errors import ConfigurationError
from async_grpo.options.fields import dashed
from async_grpo.training.config import DECAYS_TO_ZERO
from async_grpo.weights.transports import get_transport

if TYPE_CHECKING:
    from async_grpo.config.run import RunConfig


@dataclasses.dataclass(frozen=True)
class Rule:
    """One row: refuse (or warn) if `wrong(config, ...)` is true.

    Args:
        flags: the options it speaks of.
        why: what follows them in the message; `{c}` is the configuration, `{found}` what `wrong` returned. Or a function
            of what `wrong` is given.
        idle: it speaks of those flags alone that differ from their defaults, and of nothing if none does.
        warns: the run may go on.
    """

    flags: str
    wrong: Callable[..., Any]
    why: str | Callable[..., str]
    idle: bool = False
    warns: bool = False

    def message(self, config: Any, *facts: Any) -> str | None:
        """The refusal, or None where the rule is kept."""
        defaults = type(config).__dataclass_fields__
        flags = self.flags.split()
        if self.idle:
            flags = [name for name in flags if getattr(config, name) != defaults[name].default]
        found = self.wrong(config, *facts) if flags else None
        if not found:
            return None
        listed = ", ".join(map(str, found)) if isinstance(found, list | set | tuple) else found
        why = self.why(config, *facts) if callable(self.why) else self.why.format(c=config, found=listed)
        return " ".join([*(f"--{dashed(name)} {getattr(config, name)}" for name in flags), why])


def idle(flags: str, wrong: Callable[..., Any], why: str, *, warns: bool = False) -> Rule:
    """A row about flags that would be accepted, and then do nothing."""
    return Rule(flags, wrong, f"does nothing {why}", idle=True, warns=warns)


def refuse_broken(rules: Iterable[Rule], *facts: Any) -> None:
    """Raise ConfigurationError for the first rule that is broken; those that merely warn are printed, on rank 0."""
    for rule in rules:
        if (message := rule.message(*facts)) is None:
            continue
        if not rule.warns:
            raise ConfigurationError(message)
        if os.environ.get("RANK", "0") == "0":
            print(f"warning: {message}", file=sys.stderr, flush=True)


def _useless_bounds(c: "RunConfig") -> str:
    """What is wrong with the bounds of the rejection, if anything."""
    low = -math.inf if c.rejection_low is None else c.rejection_low
    high = math.inf if c.rejection_high is None else c.rejection_high
    same = 1 if c.rejection_statistic and c.rejection_statistic.endswith("k1") else 0
    if not low <= same <= high:
        return f"would reject tokens on which trainer and engine agree: the bounds must hold {same}"
    if high == math.inf and low <= 0:
        return "rejects nothing: give an upper bound that some token may exceed, or leave the statistic out"
    return ""


VALUES = (
    Rule(
        "top_p top_k",
        lambda c: c.top_p != 1.0 or c.top_k not in (0, -1),
        "would make the engine report log-probs of the truncated policy, and the trainer those of the whole one: their "
        "ratio would mean nothing. Sample with --top-p 1 --top-k 0, and shape the policy by --temperature, or by an "
        "entropy or length term",
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
        lambda c: c.batch_size % c.groups_per_step,
        "do not fit: the batch is not a whole number of steps of {c.groups_per_step} groups; make --batch-size a "
        "multiple of that",
    ),
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
        "rejection_statistic rejection_low rejection_high",
        lambda c: c.rejection_statistic and _useless_bounds(c),
        "{found}",
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
        lambda c: c.importance_level != "none" and c.loss.uses_ratio and c.old_policy == "behaviour",
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


def check_methods(config: "RunConfig") -> None:
    """Raise ConfigurationError for settings that the run's estimator, loss, schedule or transport cannot use."""
    _ = config.estimator_settings, config.loss_settings  # raise for what is no option of theirs
    refuse_broken(METHODS, config)
