"""Rules for combinations of options. A broken rule is an error or a warning, whose message names a way out.

A broken rule yields the names of its options, separated by spaces, and a message. The error prints each option with its
value, then the message.
"""

import math

from async_grpo.algorithm.flow.windows import MAX_DENOISING_STEPS
from async_grpo.config.estimator_rules import broken_estimator
from async_grpo.config.loss_rules import broken_loss_terms
from async_grpo.config.nft_rules import NFT_OPTIONS, broken_nft
from async_grpo.config.pass_rules import broken_loss_of_passes, broken_passes, waits_for_passes
from async_grpo.config.recipes import RECIPES
from async_grpo.config.reference_rules import broken_reference, broken_reference_transport
from async_grpo.config.rules import BrokenRules, changed_options, idle, refuse_broken, warn
from async_grpo.config.run_options import RunOptions
from async_grpo.options.fields import dashed
from async_grpo.training.config import DECAYS_TO_ZERO
from async_grpo.weights.config import get_transport


def broken_values(c: RunOptions) -> BrokenRules:
    """Find combinations of options that are wrong for every model, data set and reward registry."""
    yield from _broken_recipe(c)
    yield from _broken_drawing(c)
    yield from _broken_truncation(c)
    yield from _broken_sizes(c)
    if c.importance_low is not None and c.importance_low > c.importance_high:
        yield "importance_low importance_high", "leave no weight at all: give low <= high"
    if c.dump_samples_filename and "/" in c.dump_samples_filename:
        yield "dump_samples_filename", "must be a plain name; it goes to --output-dir"
    if c.keep_best is not None and not (c.keep_best in c.eval_files and c.eval_every):
        yield (
            "keep_best eval_data_path eval_every",
            "do not fit: name a file (--eval-data-path NAME=FILE), and set --eval-every to a number of steps",
        )
    if c.zero_variance == "resample" and not c.max_resamples:
        yield "zero_variance max_resamples", "replaces nothing: allow at least one, or use keep"
    if c.curriculum is not None and c.retire_solved_above is not None:
        yield "curriculum retire_solved_above", "do not fit: all rows of a level may be retired"
    if not c.curriculum_down_at < c.curriculum_up_at:
        yield "curriculum_down_at curriculum_up_at", "do not fit: the first must be lower than the second"
    if c.moves_reference:
        yield from broken_reference(c)
    if c.optimizer == "muon" and (c.has_lora or c.draws):
        yield (
            "optimizer lora_rank policy",
            "do not go together: Muon trains the matrices of a language model's layers, not adapters or policies that "
            "draw. Use --optimizer adamw",
        )
    if c.load_in_4bit and c.kl_in_reward:
        yield (
            "load_in_4bit kl_in_reward",
            "do not go together: the reference workers load the model without quantisation, which is another reference "
            "than the trainer's base. Leave --kl-in-reward out: the trainer then computes the KL itself",
        )
    yield from _broken_sleep(c)
    yield from _broken_rejection(c)
    yield from broken_loss_terms(c)
    yield from _idle_values(c)


# Options that a policy that draws cannot use, because they are about texts or are not supported yet
NOT_WITH_DRAWING = """
    environment lora_sync init_adapter load_in_4bit kl_in_reward kl_kind kl_clamp entropy_coef float32_head overlong_buffer
    chat_template chat_template_kwargs system_prompt cpu_offload torch_compile freeze_vision
    logprob_chunk_size top_p top_k min_p teacher unbiased_kl top_entropy_quantile
""".split()


def _broken_drawing(c: RunOptions) -> BrokenRules:
    """Find options that a policy that draws cannot use, or that only such a policy uses."""
    if not c.draws:
        yield from idle(
            c,
            f"flow_loss flow_window flow_window_order flow_window_every picture_size guidance {NFT_OPTIONS}",
            "without --policy flow: leave it out",
        )
        return
    yield from broken_nft(c)
    for name in changed_options(c, NOT_WITH_DRAWING):
        yield f"policy {name}", f"do not go together: leave --{dashed(name)} out"
    if c.needs_proximal:
        yield (
            "policy old_policy policy_loss",
            "do not go together: logprob workers cannot recompute denoising steps; use --old-policy behaviour or current",
        )
    if not get_transport(c.weight_transport).sends_packages:
        yield "policy weight_transport", "do not go together: use object_store or shared_files"
    for name in ("max_generation_tokens", "eval_max_tokens"):
        num_steps = getattr(c, name)
        if num_steps is not None and num_steps > MAX_DENOISING_STEPS:
            yield (
                name,
                f"is the number of denoising steps with --policy flow, at most {MAX_DENOISING_STEPS}; give one, such as 10",
            )
    if c.flow_window > c.max_generation_tokens:
        yield (
            "flow_window max_generation_tokens",
            "do not fit: the window is longer than the denoising of a picture",
        )


def _broken_truncation(c: RunOptions) -> BrokenRules:
    """Find sampling rules that leave a single token. Its probability would always be 1, so nothing could be learned."""
    if c.top_k == 1:
        yield "top_k", "leaves a single token, so that nothing can be learned: give at least 2, or 0"
    if c.min_p == 1:
        yield "min_p", "leaves a single token, so that nothing can be learned: give less, such as 0.05, or 0"


def _broken_recipe(c: RunOptions) -> BrokenRules:
    """Find a recipe that is named but whose values were not applied: the configuration was made without `from_options`."""
    preset = RECIPES.get(c.recipe or "", {})
    fields = type(c).__dataclass_fields__
    names_not_default = [name for name in preset if preset[name] != fields[name].default]
    if preset and not changed_options(c, names_not_default):
        yield "recipe", "was named but not applied: use RunConfig.from_options({...}, explicit_names={...})"


def _broken_sizes(c: RunOptions) -> BrokenRules:
    """Find sizes of groups, steps and batches that do not fit together."""
    group_size = c.samples_per_question
    # With the default of --min-valid-samples, 2, groups of a single sample are allowed
    if c.min_valid_samples > max(2, group_size):
        yield (
            "min_valid_samples samples_per_question",
            "do not fit: --min-valid-samples must lie between 2 and the size of a group",
        )
    if group_size == 1 and c.retire_solved_above is not None:
        yield (
            "samples_per_question retire_solved_above",
            "do not fit: a single completion does not say that a question is solved; leave --retire-solved-above out",
        )
    if group_size == 1 and "group_mean" in c.failure_policies.values():
        yield (
            "samples_per_question on_reward_failure",
            "do not fit: a group of one has no other reward that could stand in; use mask, refill or constant:VALUE",
        )
    if c.samples_per_step % group_size:
        nearest_size = max(1, c.samples_per_step // group_size) * group_size
        yield (
            "train_minibatch_size samples_per_question",
            f"do not fit: a step is not a whole number of groups of {group_size}: use {nearest_size}",
        )
    if c.batch_size % c.groups_per_step:
        yield (
            "batch_size train_minibatch_size samples_per_question",
            f"do not fit: the batch is not a whole number of steps of {c.groups_per_step} groups: use a multiple",
        )
    yield from broken_passes(c)
    warn(c, waits_for_passes(c))
    max_alive = c.max_groups_alive
    if c.groups_alive is not None and not c.groups_per_step <= c.groups_alive <= max_alive:
        yield (
            "groups_alive max_staleness",
            f"do not fit: a step takes {c.groups_per_step} groups, and {max_alive} can be alive: give a number between "
            "them",
        )


def _broken_sleep(c: RunOptions) -> BrokenRules:
    """Find options with which engines cannot sleep while the trainer computes."""
    if not c.sleep_level:
        return
    if c.generates_ahead:
        yield (
            "engine_sleep max_staleness",
            "do not fit: with a staleness above 0, engines generate for later steps while the trainer computes, and "
            f"engines that sleep do not: use --max-staleness {c.cycle_steps - 1}",
        )
    if c.eval_pinned:
        yield (
            "engine_sleep eval_pinned",
            "do not fit: training waits for the evaluation, whose requests wait for engines that sleep as soon as the "
            "samples of the next step are complete: use --no-eval-pinned",
        )
    if c.weight_transport == "nccl":
        yield (
            "engine_sleep weight_transport",
            "do not fit: engines that sleep share the trainer's GPU, and NCCL needs a GPU for each process: use "
            "object_store",
        )
    if c.sleep_level == 2 and c.sends_adapter:
        yield (
            "engine_sleep lora_sync",
            "do not fit: level 2 drops the base model, which the sync of an adapter does not send again: use level 1, or "
            "--lora-sync merged",
        )


def _broken_rejection(c: RunOptions) -> BrokenRules:
    """Find bounds of token rejection that would reject tokens without any mismatch, or reject nothing."""
    flags = "rejection_statistic rejection_low rejection_high"
    if c.rejection_statistic is None:
        yield from idle(
            c,
            "rejection_low rejection_high",
            "without --rejection-statistic: give one, or leave the bounds out",
        )
        return
    low = -math.inf if c.rejection_low is None else c.rejection_low
    high = math.inf if c.rejection_high is None else c.rejection_high
    # The value that the statistic has if trainer and engine assign a token the same probability
    agreement = 1 if c.rejection_statistic.endswith("k1") else 0
    if not low <= agreement <= high:
        yield (
            flags,
            f"would reject tokens on which trainer and engine agree: the bounds must hold {agreement}",
        )
    if high == math.inf and low <= 0:
        yield (
            flags,
            "rejects nothing: give an upper bound that some token may exceed, or leave the statistic out",
        )


def _idle_values(c: RunOptions) -> BrokenRules:
    """Find options that have no effect because of another option. If this is harmless, it only causes a warning."""
    weighs = c.importance_level != "none"
    resamples = c.zero_variance == "resample" or "refill" in c.failure_policies.values()
    for is_used, flags, condition in (
        (c.kl_coef, "kl_kind kl_clamp kl_in_reward unbiased_kl", "--kl-coef above 0: give --kl-coef"),
        (
            weighs,
            "importance_mode importance_low importance_high importance_normalize",
            "--importance-level token or sequence",
        ),
        (resamples, "max_resamples", "--zero-variance resample (or --on-reward-failure with refill)"),
        (c.optimizer == "muon", "muon_momentum", "--optimizer muon"),
        (c.moves_reference, "ref_mix ref_reset_optimizer", "--ref-update-steps above 0"),
        (c.overlong_buffer, "overlong_penalty", "--overlong-buffer above 0"),
        (c.environment, "observation_coef", "--environment"),
        (c.has_lora, "lora_alpha lora_targets lora_rslora lora_sync load_in_4bit", "--lora-rank above 0"),
        (c.curriculum, "curriculum_up_at curriculum_down_at", "--curriculum"),
        (c.reward_combine == "gate", "gate_threshold", "--reward-combine gate"),
        (c.verdict_cache, "verdict_cache_mb", "--verdict-cache"),
        (c.judge_budget is not None, "judge_budget_policy", "--judge-budget"),
        (c.eval_data_path, "eval_every evaluation_verifiers", "--eval-data-path"),
    ):
        if not is_used:
            yield from idle(c, flags, f"without {condition}")
    if c.init_adapter is not None:
        scale_and_layers = "lora_alpha lora_targets lora_rslora"
        yield from idle(
            c,
            scale_and_layers,
            "with --init-adapter, whose adapter has its own scale and layers: leave it out",
        )
    if c.max_token_staleness is not None and c.max_token_staleness >= c.max_staleness:
        warn(
            c,
            idle(
                c,
                "max_token_staleness",
                f"with --max-staleness {c.max_staleness}: no token is older than that",
            ),
        )
    if c.lr_scheduler == "constant":
        warn(c, idle(c, "num_warmup_steps", "with --lr-scheduler constant: use constant_with_warmup"))


def check_methods(config: RunOptions) -> None:
    """Raise ConfigurationError for settings that the run's estimator, loss, schedule or transport cannot use."""
    # Reading these properties raises an error if an option of the estimator or the loss does not exist
    _ = config.estimator_settings
    _ = config.loss_settings
    refuse_broken(config, _broken_methods(config))


def _broken_methods(c: RunOptions) -> BrokenRules:
    if c.draws and (c.estimator.needs_critic or c.estimator.process):
        yield (
            "policy advantage_estimator",
            "do not go together: a picture has one score and no critic; use an estimator such as grpo",
        )
    yield from broken_estimator(c)
    yield from _broken_loss(c)
    policy_steps = c.num_steps - c.critic_warmup_steps
    if c.lr_scheduler in DECAYS_TO_ZERO and policy_steps <= c.num_warmup_steps:
        yield (
            "lr_scheduler num_warmup_steps num_training_batches",
            f"do not fit: the schedule decays until the run's end at step {c.num_steps}, which must lie beyond the warm-up",
        )
    if (c.weight_transport == "shared_files") != bool(c.weight_folder):
        yield (
            "weight_transport weight_folder",
            "belong together: shared_files writes the weights into that folder, which all nodes must share",
        )
    yield from broken_reference_transport(c)
    if c.needs_proximal and not get_transport(c.weight_transport).sends_packages:
        yield (
            "weight_transport old_policy policy_loss",
            "do not go together: proximal logprob workers need a --weight-transport that sends packages (object_store)",
        )


def _broken_loss(c: RunOptions) -> BrokenRules:
    loss = c.loss
    # With one pass, the old policy is the trained policy itself, so every ratio is 1
    is_ratio_one = c.old_policy == "current" and c.passes_per_batch == 1
    weighs = c.importance_level != "none"
    yield from broken_loss_of_passes(c)
    uses_proximal = c.old_policy == "proximal" and (weighs or c.rejection_statistic)
    if not loss.uses_ratio and not uses_proximal and not c.uses_ratio_beside_loss:
        yield from idle(
            c, "old_policy", f"with --policy-loss {c.policy_loss}, which has no ratio: leave it out"
        )
    clip_is_of_recipe = c.clip_high is not None and c.clip_high == RECIPES.get(c.recipe or "", {}).get(
        "clip_high"
    )
    if is_ratio_one and not clip_is_of_recipe:
        warn(c, idle(c, "clip_low clip_high", "with --old-policy current, where every ratio is 1"))
    if is_ratio_one and loss.idle_at_ratio_one:
        yield (
            "policy_loss old_policy",
            "leave the loss without its pull to the old policy, since every ratio is 1: use --policy-loss gpg, or another "
            "--old-policy",
        )
    if c.old_policy == "current" and loss.needs_proximal:
        yield (
            "policy_loss old_policy",
            "contradict each other: the loss compares with a proximal policy, and current leaves none",
        )
    if weighs and loss.needs_proximal:
        yield (
            "policy_loss importance_level",
            "correct twice for the engine's policy, because the loss itself also does; leave --importance-level out",
        )
    if weighs and loss.uses_ratio and c.old_policy == "behaviour":
        yield (
            "policy_loss importance_level",
            "correct twice for the engine's policy, because the loss has the ratio to it. Use --old-policy current or "
            "proximal, or a loss without a ratio (grpo, gpg)",
        )
