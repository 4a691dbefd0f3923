"""The rules between two settings: what is refused, what is warned about, and the way out."""

import math
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from async_grpo.config.recipes import RECIPES
from async_grpo.config.run_options import RunOptions
from async_grpo.errors import ConfigurationError
from async_grpo.options.fields import dashed
from async_grpo.training.config import DECAYS_TO_ZERO
from async_grpo.weights.config import get_transport

# The options that a rule speaks of, and what its message says after their values
Broken = Iterator[tuple[str, str]]


def refuse_broken(config: Any, broken: Broken) -> None:
    """Raise ConfigurationError for the first rule that is broken."""
    for flags, why in broken:
        raise ConfigurationError(_told(config, flags, why))


def idle(config: Any, flags: str, why: str) -> Broken:
    """Those of the flags that were set, if any, would be accepted, and then do nothing."""
    if changed := _changed(config, flags.split()):
        yield " ".join(changed), f"does nothing {why}"


def _changed(config: Any, names: Iterable[str]) -> list[str]:
    defaults = type(config).__dataclass_fields__
    return [name for name in names if getattr(config, name) != defaults[name].default]


def _warn(config: Any, broken: Broken) -> None:
    for flags, why in broken:
        if os.environ.get("RANK", "0") == "0":
            print(f"warning: {_told(config, flags, why)}", file=sys.stderr, flush=True)


def _told(config: Any, flags: str, why: str) -> str:
    return " ".join([*(f"--{dashed(name)} {getattr(config, name)}" for name in flags.split()), why])


def broken_values(c: RunOptions) -> Broken:
    """What can be seen to be wrong without looking anything up."""
    preset, defaults = RECIPES.get(c.recipe or "", {}), type(c).__dataclass_fields__
    if preset and not _changed(c, (key for key in preset if preset[key] != defaults[key].default)):
        why = "was named but not applied: use RunConfig.from_options({...}, given={...})"
        yield "recipe", why
    if c.top_p != 1.0 or c.top_k not in (0, -1):
        why = "would make the engine report log-probs of the truncated policy, the trainer those of the whole one"
        yield "top_p top_k", f"{why}: use --top-p 1 --top-k 0, and shape the policy by --temperature"
    if not 2 <= c.min_valid_samples <= c.samples_per_question:
        fit = "--min-valid-samples must lie between 2 and the size of a group"
        yield "min_valid_samples samples_per_question", f"do not fit: {fit}"
    size, per_step = c.samples_per_question, c.samples_per_step
    if per_step % size:
        fit = f"a step is not a whole number of groups of {size}: use {max(1, per_step // size) * size}"
        yield "train_minibatch_size samples_per_question", f"do not fit: {fit}"
    if c.batch_size % c.groups_per_step:
        fit = f"the batch is not a whole number of steps of {c.groups_per_step} groups"
        yield "batch_size train_minibatch_size samples_per_question", f"do not fit: {fit}: use a multiple"
    most = (c.max_staleness + 1) * c.groups_per_step
    if c.groups_alive is not None and not c.groups_per_step <= c.groups_alive <= most:
        fit = f"a step takes {c.groups_per_step} groups, and {most} can be alive: give a number between them"
        yield "groups_alive max_staleness", f"do not fit: {fit}"
    if c.importance_low is not None and c.importance_low > c.importance_high:
        yield "importance_low importance_high", "leave no weight at all: give low <= high"
    if c.dump_samples_filename and "/" in c.dump_samples_filename:
        yield "dump_samples_filename", "must be a plain name; it goes to --output-dir"
    if c.keep_best is not None and not (c.keep_best in c.eval_files and c.eval_every):
        why = "do not fit: name a file (--eval-data-path NAME=FILE), and evaluate every so many steps"
        yield "keep_best eval_data_path eval_every", why
    if c.zero_variance == "resample" and not c.max_resamples:
        yield "zero_variance max_resamples", "replaces nothing: allow at least one, or use keep"
    if c.curriculum is not None and c.retire_solved_above is not None:
        yield (
            "curriculum retire_solved_above",
            "do not fit: all rows of a level may be retired",
        )
    if not c.curriculum_down_at < c.curriculum_up_at:
        yield "curriculum_down_at curriculum_up_at", "leave nothing between them: give down below up"
    yield from _broken_rejection(c)
    yield from _idle_values(c)


def _broken_rejection(c: RunOptions) -> Broken:
    flags = "rejection_statistic rejection_low rejection_high"
    if c.rejection_statistic is None:
        why = "without --rejection-statistic: give one, or leave the bounds out"
        yield from idle(c, "rejection_low rejection_high", why)
        return
    low = -math.inf if c.rejection_low is None else c.rejection_low
    high = math.inf if c.rejection_high is None else c.rejection_high
    same = 1 if c.rejection_statistic.endswith("k1") else 0  # the statistic of tokens on which both agree
    if not low <= same <= high:
        yield flags, f"would reject tokens on which trainer and engine agree: the bounds must hold {same}"
    if high == math.inf and low <= 0:
        why = "rejects nothing: give an upper bound that some token may exceed, or leave the statistic out"
        yield flags, why


def _idle_values(c: RunOptions) -> Broken:
    resamples = c.zero_variance == "resample" or "refill" in c.failure_policies.values()
    weighs, importance = c.importance_level != "none", "importance_mode importance_low importance_high"
    for used, flags, why in (
        (c.kl_coef, "kl_kind kl_clamp kl_in_reward", "--kl-coef above 0: give --kl-coef"),
        (weighs, f"{importance} importance_normalize", "--importance-level token or sequence"),
        (resamples, "max_resamples", "--zero-variance resample (or --on-reward-failure with refill)"),
        (c.overlong_buffer, "overlong_penalty", "--overlong-buffer above 0"),
        (c.curriculum, "curriculum_up_at curriculum_down_at", "--curriculum"),
        (c.reward_combine == "gate", "gate_threshold", "--reward-combine gate"),
        (c.verdict_cache, "verdict_cache_mb", "--verdict-cache"),
        (c.judge_budget is not None, "judge_budget_policy", "--judge-budget"),
        (c.eval_data_path, "eval_every evaluation_verifiers", "--eval-data-path"),
    ):
        if not used:
            yield from idle(c, flags, f"without {why}")
    if c.max_token_staleness is not None and c.max_token_staleness >= c.max_staleness:
        why = f"with --max-staleness {c.max_staleness}: no token is older than that"
        _warn(c, idle(c, "max_token_staleness", why))
    if c.lr_scheduler == "constant":
        _warn(c, idle(c, "num_warmup_steps", "with --lr-scheduler constant: use constant_with_warmup"))


def check_methods(config: RunOptions) -> None:
    """Raise ConfigurationError for settings that the run's estimator, loss, schedule or transport cannot use."""
    _ = config.estimator_settings, config.loss_settings  # raise for what is no option of theirs
    refuse_broken(config, _broken_methods(config))


def _broken_methods(c: RunOptions) -> Broken:
    estimator = c.estimator
    if not estimator.needs_critic:
        flags = "critic_coef critic_clip critic_learning_rate critic_trunk_gradient"
        yield from idle(c, flags, "without an --advantage-estimator that has a critic, such as gae")
    why = "as yet: a step trains its minibatch once, so no value has moved from the old one"
    _warn(c, idle(c, "critic_clip", why))
    if c.kl_in_reward and not estimator.outcome:
        why = "the KL would pay every token, and the estimator compares steps; use the KL in the loss"
        yield "advantage_estimator kl_in_reward", f"do not go together: {why}"
    if c.zero_variance != "keep" and estimator.compares_with_batch:
        why = "groups of equal rewards teach an estimator that compares with the whole batch; keep them"
        yield "advantage_estimator zero_variance", f"do not go together: {why}"
    yield from _broken_loss(c)
    if c.lr_scheduler in DECAYS_TO_ZERO and c.num_steps <= c.num_warmup_steps:
        why = f"the schedule decays until the run's end at step {c.num_steps}, which must lie beyond the warm-up"
        yield "lr_scheduler num_warmup_steps num_training_batches", f"do not fit: {why}"
    if (c.weight_transport == "shared_files") != bool(c.weight_folder):
        why = "belong together: shared_files writes the weights into that folder, which all nodes must share"
        yield "weight_transport weight_folder", why
    if c.needs_proximal and not get_transport(c.weight_transport).sends_packages:
        why = "proximal logprob workers need a --weight-transport that sends packages (object_store)"
        yield "weight_transport old_policy policy_loss", f"do not go together: {why}"


def _broken_loss(c: RunOptions) -> Broken:
    loss, current, weighs = c.loss, c.old_policy == "current", c.importance_level != "none"
    if not loss.uses_ratio and not (c.old_policy == "proximal" and (weighs or c.rejection_statistic)):
        why = f"with --policy-loss {c.policy_loss}, which has no ratio: leave it out"
        yield from idle(c, "old_policy", why)
    if current:
        _warn(c, idle(c, "clip_low clip_high", "with --old-policy current, where every ratio is 1"))
    if current and loss.idle_at_ratio_one:
        why = "leave the loss without its pull to the old policy, since every ratio is 1"
        yield "policy_loss old_policy", f"{why}: use --policy-loss gpg, or another --old-policy"
    if current and loss.needs_proximal:
        why = "the loss compares with a proximal policy, and current leaves none"
        yield "policy_loss old_policy", f"contradict each other: {why}"
    if weighs and loss.needs_proximal:
        why = "the loss weighs by the engine's policy itself; leave --importance-level out"
        yield "policy_loss importance_level", f"weigh twice: {why}"
    if weighs and loss.uses_ratio and c.old_policy == "behaviour":
        why = "would count it twice: the loss holds the ratio to the engine's policy. Use --old-policy"
        why += " current or proximal, or a loss without a ratio (grpo, gpg)"
        yield "policy_loss importance_level", why
