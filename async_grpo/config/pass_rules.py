"""Rules for options that do not fit several passes over each batch (`--passes-per-batch`); see `compatibility`."""

from async_grpo.config.rules import BrokenRules
from async_grpo.config.run_options import RunOptions


def broken_passes(c: RunOptions) -> BrokenRules:
    """Find options that do not fit several passes, whatever the loss and the estimator are. Check the sizes before."""
    if c.passes_per_batch == 1:
        if c.passes_max_kl is not None:
            yield "passes_max_kl", "does nothing without --passes-per-batch above 1"
        return
    last_age = c.cycle_steps - 1
    if c.max_staleness < last_age:
        yield (
            "max_staleness passes_per_batch",
            f"do not fit: the last of the {c.cycle_steps} steps of a batch trains tokens that are {last_age} steps old. "
            f"Use --max-staleness {last_age}, or {last_age + c.cycle_steps}, with which the engines generate the next "
            "batch meanwhile",
        )
    if c.max_token_staleness is not None and c.max_token_staleness < last_age:
        yield (
            "max_token_staleness passes_per_batch",
            f"would leave out every token, because all of them are {last_age} steps old or older in the last pass: use "
            f"{last_age} or more",
        )
    min_alive = c.pass_plan.cycle_minibatches * c.groups_per_step
    if c.groups_alive is not None and c.groups_alive < min_alive:
        yield (
            "groups_alive passes_per_batch",
            f"do not fit: the {min_alive} groups of a batch are in flight until its last pass: use {min_alive} or more",
        )
    if c.eval_every % c.cycle_steps:
        nearest = max(1, round(c.eval_every / c.cycle_steps)) * c.cycle_steps
        yield (
            "eval_every passes_per_batch",
            f"do not fit: the engines get new weights only after the {c.cycle_steps} steps of a batch. Use a multiple, "
            f"such as {nearest}",
        )
    if c.sleep_level and c.pass_plan.cycle_minibatches > 1:
        yield (
            "engine_sleep passes_per_batch train_minibatch_size",
            "do not go together: engines sleep from the first minibatch of a batch on, before they have generated the "
            "others. Leave --train-minibatch-size out, or use one pass",
        )


def waits_for_passes(c: RunOptions) -> BrokenRules:
    """Find a bound on staleness with which engines wait while the trainer computes. This only causes a warning."""
    if c.passes_per_batch > 1 and c.max_staleness and not c.generates_ahead and not c.sleep_level:
        yield (
            "max_staleness passes_per_batch",
            "let the engines wait while a batch is trained; with --max-staleness "
            f"{2 * c.cycle_steps - 1} they generate the next batch meanwhile",
        )


def broken_loss_of_passes(c: RunOptions) -> BrokenRules:
    """Find a loss that would ignore how far earlier passes over the batch have moved the policy."""
    if c.passes_per_batch == 1 or c.loss.uses_ratio:
        return
    if c.importance_level == "none":
        yield (
            "policy_loss passes_per_batch",
            "do not fit: the loss has no ratio, so later passes would train as if the policy had not changed. Use "
            "--importance-level token, or a loss with a ratio, such as ppo_clip",
        )
    if c.old_policy == "proximal":
        yield (
            "policy_loss old_policy passes_per_batch",
            "do not fit: the importance weights compare the proximal policy with the engine's, and the loss has no ratio, "
            "so later passes would train as if the policy had not changed. Leave --old-policy out, or use a loss with a "
            "ratio, such as ppo_clip",
        )
