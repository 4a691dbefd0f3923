"""Published recipes as presets of options: `--recipe dapo` sets what the paper sets, and says so."""

from collections.abc import Collection, Mapping
from typing import Any

from async_grpo.errors import ConfigurationError

RECIPES: dict[str, dict[str, Any]] = {
    # Shao et al. 2024, "DeepSeekMath": a KL in the loss, every sequence weighs the same
    "grpo": {
        "advantage_estimator": "grpo",
        "policy_loss": "ppo_clip",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "loss_aggregation": "sequence_mean_token_mean",
        "kl_coef": 0.04,
        "kl_kind": "k3",
        "mask_truncated": False,
    },
    # Liu et al. 2025, "Understanding R1-Zero-Like Training": neither std nor length in a denominator
    "dr_grpo": {
        "advantage_estimator": "dr_grpo",
        "policy_loss": "ppo_clip",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "loss_aggregation": "constant_length",
        "kl_coef": 0.0,
        "mask_truncated": False,
    },
    # Yu et al. 2025, "DAPO": clip-higher, dynamic sampling, token mean, soft overlong punishment, no KL
    "dapo": {
        "advantage_estimator": "grpo",
        "policy_loss": "ppo_clip",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "loss_aggregation": "token_mean",
        "kl_coef": 0.0,
        "zero_variance": "resample",
        "mask_truncated": False,
        "overlong_buffer": 0.2,
        "overlong_penalty": 1.0,
    },
    # Zheng et al. 2025, "Group Sequence Policy Optimization"
    "gspo": {
        "advantage_estimator": "grpo",
        "policy_loss": "gspo",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "loss_aggregation": "sequence_mean_token_mean",
        "kl_coef": 0.0,
        "mask_truncated": False,
    },
    # MiniMax 2025, "MiniMax-M1": bounded importance weights instead of a clip, with DAPO's sampling and length penalty
    "cispo": {
        "advantage_estimator": "grpo",
        "policy_loss": "cispo",
        "clip_high": 4.0,
        "loss_aggregation": "token_mean",
        "kl_coef": 0.0,
        "zero_variance": "resample",
        "mask_truncated": False,
        "overlong_buffer": 0.2,
    },
    # Khatri et al. 2025, "The Art of Scaling Reinforcement Learning Compute for LLMs"
    "scalerl": {
        "advantage_estimator": "grpo_batch_std",
        "policy_loss": "cispo",
        "clip_high": 4.0,
        "loss_aggregation": "prompt_mean",
        "kl_coef": 0.0,
        "zero_variance": "filter",
        "retire_solved_above": 0.9,
        "float32_head": True,
        "max_staleness": 8,
    },
    # Shao et al. 2024, "DeepSeekMath", 4.1.3: process supervision, in the objective of `grpo`
    "process": {
        "advantage_estimator": "grpo_process",
        "policy_loss": "ppo_clip",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "loss_aggregation": "sequence_mean_token_mean",
        "kl_coef": 0.04,
        "kl_kind": "k3",
        "mask_truncated": False,
    },
}


def apply_recipe(options: Mapping[str, Any], given: Collection[str]) -> tuple[dict[str, Any], str]:
    """The options with those of their recipe, where the user `given` none, and a line that says what was set.

    Raises:
        ConfigurationError: there is no such recipe.

    >>> options, said = apply_recipe({"recipe": "gspo", "clip_low": 0.1, "policy_loss": "x"}, given={"clip_low"})
    >>> options["policy_loss"], options["clip_low"], "yours: clip_low=0.1" in said
    ('gspo', 0.1, True)
    """
    name = options.get("recipe")
    if name is None:
        return dict(options), ""
    if name not in RECIPES:
        raise ConfigurationError(f"--recipe {name!r} is unknown; known: {', '.join(RECIPES)}")
    preset = dict(RECIPES[name])
    if "policy_loss" in given and options["policy_loss"] != preset["policy_loss"]:
        preset = {
            key: value for key, value in preset.items() if key not in ("clip_low", "clip_high")
        }  # of another loss
    kept = {key: options[key] for key in preset if key in given and options[key] != preset[key]}
    said = f"recipe {name} sets {_listed({**preset, **kept})}"
    return {**options, **preset, **kept}, said + (f"; yours: {_listed(kept)}" if kept else "")


def check_applied(config: Any, defaults: Mapping[str, Any]) -> None:
    """Refuse a configuration that names a recipe of which nothing was applied: it would train something else.

    Raises:
        ConfigurationError: with the way to apply it.
    """
    preset = RECIPES.get(config.recipe, {}) if config.recipe else {}
    changed = {name for name, value in preset.items() if value != defaults[name]}
    if changed and all(getattr(config, name) == defaults[name] for name in changed):
        raise ConfigurationError(
            f"recipe {config.recipe!r} was named but not applied: use RunConfig.from_options({{...}}, given={{...}})"
        )


def _listed(options: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in options.items())
