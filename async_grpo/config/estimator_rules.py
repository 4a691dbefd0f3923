"""Rules for the advantage estimator: groups of one sample, the critic, and options that an estimator cannot use."""

from async_grpo.config.rules import BrokenRules, changed_options, idle, warn
from async_grpo.config.run_options import RunOptions
from async_grpo.options.fields import dashed


def broken_estimator(c: RunOptions) -> BrokenRules:
    """Find options that the advantage estimator cannot use, and options that are missing for it."""
    estimator = c.estimator
    if estimator.needs_group and c.samples_per_question == 1:
        yield (
            "samples_per_question advantage_estimator",
            "do not fit: a group of one has nothing to compare with; give at least 2, or an estimator that does not "
            f"compare within groups: {', '.join(c.estimators_without_groups())}",
        )
    if estimator.needs_group and c.min_valid_samples < 2:
        yield (
            "min_valid_samples advantage_estimator",
            "do not fit: a group with a single reward has nothing to compare with; --min-valid-samples must lie between 2 "
            "and the size of a group",
        )
    if not estimator.has_running_mean:
        yield from idle(
            c,
            "running_mean_column",
            "without --advantage-estimator running_mean",
        )
    yield from _broken_critic(c)
    if c.passes_per_batch == 1:
        warn(
            c,
            idle(
                c,
                "critic_clip",
                "with one pass over each batch (--passes-per-batch), because no value has moved from the old one",
            ),
        )
    if c.kl_in_reward and not estimator.outcome:
        yield (
            "advantage_estimator kl_in_reward",
            "do not go together: the KL would be a reward of every token, but the estimator compares steps; use the KL "
            "in the loss",
        )
    if estimator.divides_by_mean:
        for name in changed_options(c, ("overlong_buffer", "kl_in_reward")):
            yield (
                f"advantage_estimator {name}",
                "do not go together: the estimator divides by the mean reward of a group, which a penalty can bring near "
                f"to 0: leave --{dashed(name)} out",
            )
    if c.zero_variance != "keep" and estimator.compares_with_batch:
        yield (
            "advantage_estimator zero_variance",
            "do not go together: groups of equal rewards teach an estimator that compares with the whole batch; keep them",
        )


def _broken_critic(c: RunOptions) -> BrokenRules:
    """Find options of a critic that have no effect, or that contradict each other."""
    if not c.estimator.needs_critic:
        yield from idle(
            c,
            "critic_model critic_warmup_steps critic_coef critic_clip critic_learning_rate critic_trunk_gradient",
            "without an --advantage-estimator that has a critic, such as gae",
        )
    elif c.critic_model is None:
        yield from idle(
            c,
            "critic_warmup_steps",
            "without --critic-model: steps that train a value head on the policy alone would also change the policy",
        )
    else:
        yield from idle(
            c,
            "critic_coef critic_trunk_gradient",
            "with --critic-model, whose weights, gradient and learning rate are its own",
        )
    if c.critic_warmup_steps >= c.num_steps:
        message = "train only the critic: no step is left for the policy"
        warn(c, iter([("critic_warmup_steps num_training_batches", message)]))
    settings = c.estimator_settings
    if settings.get("alpha") and "lam" in settings:
        yield (
            "estimator_options advantage_estimator",
            "gives both lam and alpha, and alpha replaces lam by a number that depends on the length: leave one out",
        )
