"""Make the objective of a policy that draws, and the weights that a trainer keeps beside the trained ones."""

from typing import Any

from async_grpo.config.run import RunConfig
from async_grpo.messages import SharedRunSettings
from async_grpo.protocols import WeightPublisher
from async_grpo.training.accumulator import GradientAccumulator
from async_grpo.training.drawing.nft_objective import NFTObjective, NFTSettings
from async_grpo.training.drawing.objective import FlowObjective
from async_grpo.training.drawing.old_policy import OldPolicy
from async_grpo.training.moving_reference import KeptWeights, make_reference
from async_grpo.training.objective import Objective


def make_flow_objective(config: RunConfig, settings: SharedRunSettings, policy: Any) -> Objective:
    """Return the objective of Flow-GRPO or of DiffusionNFT. Call it while the policy has its first weights."""
    if not config.trains_by_nft:
        return FlowObjective(config, settings.max_completion_tokens)
    old = OldPolicy(policy, config.nft_old_decay_growth, config.nft_old_decay, config.cycle_steps)
    nft_settings = NFTSettings(config.nft_beta, config.nft_times, config.nft_clip, config.nft_weighting)
    return NFTObjective(config, nft_settings, old)


def make_kept_weights(
    config: RunConfig, accumulator: GradientAccumulator, publisher: WeightPublisher | None
) -> KeptWeights:
    """Return the old policy of DiffusionNFT, or the reference. Call it before a checkpoint is loaded."""
    objective = accumulator.objective
    if isinstance(objective, NFTObjective):
        return objective.old
    return make_reference(accumulator.policy, accumulator.optimizer, config, publisher)
