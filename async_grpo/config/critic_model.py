"""`--critic-model`: the folder from which a separate critic model starts, and the check that it fits the policy."""

from pathlib import Path

from async_grpo.config.run import RunConfig
from async_grpo.errors import ConfigurationError
from async_grpo.options.fields import refuse

SAME = "same"  # value of `--critic-model` for the folder of the policy


def critic_folder(config: RunConfig) -> str | None:
    """Return the folder of the model from which the critic starts; None if the critic is not a separate model."""
    if config.critic_model == SAME:
        return config.model_name_or_path
    return config.critic_model


def check_critic_model(config: RunConfig) -> None:
    """Check that the critic reads the same tokens and images as the policy.

    Raises:
        ConfigurationError: The folder is not that of a model, or its model does not fit the policy.
    """
    if config.critic_model in (None, SAME):
        return
    refuse(
        # An empty name would be the current folder
        not config.critic_model or not Path(config.critic_model).expanduser().is_dir(),
        f"--critic-model {config.critic_model}: there is no such folder; give the folder of a model, or `same`",
    )
    from async_grpo.modeling.auto_classes import reads_images
    from async_grpo.modeling.load import load_config

    critic = load_config(str(config.critic_model))
    policy = load_config(config.model_name_or_path)
    critic_size = critic.get_text_config().vocab_size
    policy_size = policy.get_text_config().vocab_size
    if critic_size != policy_size:
        raise ConfigurationError(
            f"--critic-model {config.critic_model} has a vocabulary of {critic_size} tokens, but --model-name-or-path "
            f"{config.model_name_or_path} has {policy_size}: give a model with the policy's tokenizer, or `same`"
        )
    if reads_images(critic) != reads_images(policy):
        raise ConfigurationError(
            f"--critic-model {config.critic_model} and --model-name-or-path {config.model_name_or_path}: one reads images "
            "and the other does not; give two models that do, or `same`"
        )
