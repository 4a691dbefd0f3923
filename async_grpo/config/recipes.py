"""Published recipes as presets of options: `--recipe dapo` sets the values of the paper and prints them."""

from collections.abc import Collection, Mapping
from typing import Any

_GRPO = {"advantage_estimator": "grpo", "policy_loss": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2}
_MEAN_OF_SEQUENCES = {"loss_aggregation": "sequence_mean_token_mean", "mask_truncated": False}
_CONSTANT_LENGTH = {"loss_aggregation": "constant_length", "mask_truncated": False}
_KL = {"kl_coef": 0.04, "kl_kind": "k3"}
_NO_KL = {"kl_coef": 0.0}
_CISPO = {"policy_loss": "cispo", "clip_high": 4.0}
_DYNAMIC_SAMPLING = {
    "loss_aggregation": "token_mean",
    "zero_variance": "resample",
    "mask_truncated": False,
    "overlong_buffer": 0.2,
}

RECIPES: dict[str, dict[str, Any]] = {
    # Shao et al. 2024, "DeepSeekMath": a KL penalty in the loss, and equal weight for each sequence
    "grpo": {**_GRPO, **_MEAN_OF_SEQUENCES, **_KL},
    # Liu et al. 2025, "Understanding R1-Zero-Like Training": no division by the standard deviation or the length
    "dr_grpo": {**_GRPO, "advantage_estimator": "dr_grpo", **_CONSTANT_LENGTH, **_NO_KL},
    # Yu et al. 2025, "DAPO": clip-higher, dynamic sampling, token mean, soft overlong punishment, no KL
    "dapo": {**_GRPO, "clip_high": 0.28, **_DYNAMIC_SAMPLING, "overlong_penalty": 1.0, **_NO_KL},
    # Zheng et al. 2025, "Group Sequence Policy Optimization"
    "gspo": {
        **_GRPO,
        "policy_loss": "gspo",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        **_MEAN_OF_SEQUENCES,
        **_NO_KL,
    },
    # MiniMax 2025, "MiniMax-M1": bounded importance weights instead of a clip, with DAPO's sampling and length penalty
    "cispo": {"advantage_estimator": "grpo", **_CISPO, **_DYNAMIC_SAMPLING, **_NO_KL},
    # Khatri et al. 2025, "The Art of Scaling Reinforcement Learning Compute for LLMs"
    "scalerl": {
        "advantage_estimator": "grpo_batch_std",
        **_CISPO,
        "loss_aggregation": "prompt_mean",
        "zero_variance": "filter",
        "retire_solved_above": 0.9,
        "float32_head": True,
        "max_staleness": 8,
        **_NO_KL,
    },
    # Yue et al. 2025, "VAPO": a separate critic model that is trained alone first, decoupled and length-adaptive GAE
    "vapo": {
        "advantage_estimator": "decoupled_gae",
        "estimator_options": "alpha=0.05,critic_lam=1",
        "policy_loss": "ppo_clip",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "loss_aggregation": "token_mean",
        "critic_model": "same",
        "critic_warmup_steps": 50,
        "critic_learning_rate": 2e-6,
        "mask_truncated": False,
        **_NO_KL,
    },
    # OpenRLHF's FlashREINFORCE: one sample per question, its reward minus the batch's mean, a bound on the binary KL
    "flash_reinforce": {
        "advantage_estimator": "flash_reinforce",
        "policy_loss": "dppo_kl",
        "samples_per_question": 1,
        **_MEAN_OF_SEQUENCES,
        **_NO_KL,
    },
    # Shao et al. 2024, "DeepSeekMath", 4.1.3: process supervision, with the objective of the recipe `grpo`
    "process": {**_GRPO, "advantage_estimator": "grpo_process", **_MEAN_OF_SEQUENCES, **_KL},
    # Lu and Thinking Machines Lab 2025, "On-Policy Distillation": the advantage of a token is log pi_teacher - log pi, and
    # the loss has importance weights instead of a clip
    "opd": {
        "advantage_estimator": "teacher",
        **_CISPO,
        "loss_aggregation": "token_mean",
        "mask_truncated": False,
        **_NO_KL,
    },
    # Liu et al. 2026, "LUSPO": GSPO with the sum over each sequence in place of its mean
    "luspo": {
        **_GRPO,
        "policy_loss": "gspo",
        "clip_low": 2e-3,
        "clip_high": 2.5e-3,
        "loss_aggregation": "sequence_mean_token_sum",
        "mask_truncated": False,
        **_NO_KL,
    },
    # DeepSeek-AI 2025, "DeepSeek-V3.2", eq. 5 to 9. The report does not give the values of clip, KL coefficient and
    # threshold
    "deepseek_v32": {
        **_GRPO,
        "advantage_estimator": "dr_grpo",
        **_MEAN_OF_SEQUENCES,
        "kl_coef": 1e-3,
        "kl_kind": "k3",
        "unbiased_kl": True,
        "off_policy_mask_threshold": 0.5,
    },
    # Defaults of TRL 1.16's GRPOTrainer with vLLM: one optimizer step for each generation, so that the ratio's
    # denominator is the current policy
    "trl": {
        **_GRPO,
        "estimator_options": "eps=1e-4",
        "loss_aggregation": "token_mean",
        "old_policy": "current",
        "importance_level": "sequence",
        "importance_mode": "mask",
        "importance_high": 3.0,
        "reward_combine": "sum",
        "mask_truncated": False,
        **_NO_KL,
    },
    # Defaults of prime-rl of August 2026: DPPO with the total variation, and a squared log-ratio. It has no upper bound
    # on the ratio. The bound 1e9 has no effect, because the log-ratio is clamped to 20
    "prime_rl": {
        "advantage_estimator": "dr_grpo",
        "policy_loss": "dppo_tv",
        "loss_options": "eps_low=0.2,eps_high=0.2,clip_c=1e9",
        "log_ratio_coef": 1e-3,
        "loss_aggregation": "token_mean",
        "zero_variance": "filter",
        "mask_truncated": False,
        **_NO_KL,
    },
}

# Options of a recipe that fit only the recipe's own loss or estimator, not one that the user has chosen
_OF_THE_LOSS = ("clip_low", "clip_high", "loss_options")
_OF_THE_ESTIMATOR = ("estimator_options",)


def apply_recipe(options: Mapping[str, Any], explicit_names: Collection[str]) -> tuple[dict[str, Any], str]:
    """Set the recipe's values for the options that the user has not set.

    Args:
        options: The values of all options, including `recipe`.
        explicit_names: Names of the options that the user has set.

    Returns:
        The options with the recipe's values, and a message that lists these values ("" without a recipe).

    >>> user_options = {"recipe": "gspo", "clip_low": 0.1, "policy_loss": "x"}
    >>> options, message = apply_recipe(user_options, explicit_names={"clip_low"})
    >>> options["policy_loss"], options["clip_low"], "yours: clip_low=0.1" in message
    ('gspo', 0.1, True)
    """
    name = options.get("recipe")
    # If the name is unknown, do nothing: it is refused later, because the option has a list of choices
    preset = dict(RECIPES.get(name or "", {}))
    if not preset:
        return dict(options), ""
    for owner, names in (("policy_loss", _OF_THE_LOSS), ("advantage_estimator", _OF_THE_ESTIMATOR)):
        if owner in explicit_names and options[owner] != preset[owner]:
            for option_name in names:
                preset.pop(option_name, None)
    user_values = {
        key: options[key] for key in preset if key in explicit_names and options[key] != preset[key]
    }
    message = f"recipe {name} sets {_listed({**preset, **user_values})}"
    if user_values:
        message += f"; yours: {_listed(user_values)}"
    return {**options, **preset, **user_values}, message


def _listed(options: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in options.items())
