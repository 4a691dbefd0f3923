"""Make the critic of one rank if it is a separate model, and the exporter of its weights."""

from functools import partial

import torch

from async_grpo.config.critic_model import critic_folder
from async_grpo.config.run import RunConfig
from async_grpo.messages import SharedRunSettings
from async_grpo.modeling.critic import CriticModel
from async_grpo.modeling.image_models import ImageReader, freeze_vision
from async_grpo.modeling.load import load_causal_lm
from async_grpo.training.critic import Critic
from async_grpo.training.distributed import Ranks
from async_grpo.training.export import ModelExporter, load_value_head
from async_grpo.training.optimizer import build_critic_optimizer
from async_grpo.training.sharding import empty_model, load_shards, release_gathered, shard_policy


def load_critic(config: RunConfig, settings: SharedRunSettings, ranks: Ranks) -> Critic | None:
    """Load the critic of `--critic-model`, shard it over the ranks, and make its optimizer.

    Return None without that option.

    If the folder contains a value head, the critic uses it. Otherwise the value head starts at zero.
    """
    folder = critic_folder(config)
    if folder is None:
        return None
    model = empty_model(folder)
    is_empty = model is not None
    if model is None:
        model = load_causal_lm(folder, torch.float32).to(ranks.device)
    critic = CriticModel(model)
    load_value_head(critic, folder)
    if critic.reads_images:
        critic.image_reader = ImageReader.load(folder, model.config)
    if config.freeze_vision:
        freeze_vision(critic.model)
    shard_policy(critic, ranks, config, settings.dtype)
    if is_empty:
        load_shards(critic, folder, torch.device("cpu") if config.cpu_offload else ranks.device)
    release_gathered(critic)
    optimizer, scheduler = build_critic_optimizer(critic, config, config.num_steps)
    return Critic(
        model=critic,
        optimizer=optimizer,
        scheduler=scheduler,
        max_grad_norm=config.max_grad_norm,
        warmup_steps=config.critic_warmup_steps,
    )


def export_critic_too(
    exporter: ModelExporter, critic: Critic | None, config: RunConfig, settings: SharedRunSettings
) -> None:
    """Make the exporter of the policy also export the critic, to folders of the same names in `critic/`."""
    folder = critic_folder(config)
    if critic is None or folder is None:
        return
    critic_exporter = ModelExporter(
        config.output_path,
        folder,
        exporter.ranks,
        settings.dtype,
        keep_last=config.keep_models or None,
        resumed_at=exporter.resumed_at,
        folder_name="critic",
    )
    exporter.also_save = partial(critic_exporter.save, critic.model)
