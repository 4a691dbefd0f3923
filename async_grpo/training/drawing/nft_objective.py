"""`NFTObjective`: the objective of DiffusionNFT, which trains on finished pictures; see `algorithm.flow.nft`."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from async_grpo.algorithm.aggregation import count_units
from async_grpo.algorithm.config import AlgorithmConfig
from async_grpo.algorithm.flow.config import ADAPTIVE
from async_grpo.algorithm.flow.nft import branch_losses, good_probabilities, noised
from async_grpo.algorithm.off_policy import mismatch_sums, ratio_histogram
from async_grpo.modeling.flow.policy import FlowPolicy
from async_grpo.modeling.flow.schedule import FlowSchedule
from async_grpo.training.batch_tensors import BatchTensors
from async_grpo.training.drawing.objective import FlowObjective
from async_grpo.training.drawing.old_policy import OldPolicy
from async_grpo.training.metric_totals import metric_totals

FINISHED = 0  # index, on the second axis of latents, of the finished picture


@dataclass(frozen=True)
class NFTSettings:
    """Settings of the loss; see the options `--nft-...`."""

    beta: float = 1.0
    num_times: int = 4
    clip: float = 1.0
    weighting: str = ADAPTIVE


@dataclass(frozen=True)
class NoisedPictures:
    """Pictures that are mixed with noise, several times each."""

    states: Float[Tensor, "pairs channels height width"]
    targets: Float[Tensor, "pairs channels height width"]  # the velocities: noise minus picture
    t: Float[Tensor, " pairs"]
    timesteps: Float[Tensor, " pairs"]  # the times in the units of the model


class NFTObjective(FlowObjective):
    """The loss of DiffusionNFT, aggregated over pictures as over tokens: a finished picture is one token.

    A finished picture has no log-prob, so all log-probs are 0. The metrics of the mismatch between trainer and engine are
    then those of equal policies. `ratio_mean`, `ratio_max` and `entropy` are reported as 0.

    Args:
        config: The algorithm's options.
        settings: Settings of the loss.
        old: The old policy, with which the engines draw. The loss compares its velocities with those of the policy.
    """

    def __init__(self, config: AlgorithmConfig, settings: NFTSettings, old: OldPolicy) -> None:
        super().__init__(config)
        self.old = old
        self._settings = settings

    def __call__(self, policy: Any, batch: BatchTensors) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """Compute the loss of a micro-batch by two forward passes, one of them with the old policy.

        Returns:
            The loss, and totals for the metrics by name; see `Objective`.
        """
        batch.logprobs = torch.zeros_like(batch.advantages)
        losses, metrics = self._losses(policy, batch)
        loss = self.aggregate(losses, batch, batch.mask)
        totals = metric_totals(metrics)
        totals["avg_loss"] = loss.detach()
        totals["backward_loss"] = loss.detach()
        totals |= count_units(batch.mask, batch.sequence_ids, group_tokens=batch.group_tokens)
        totals |= mismatch_sums(
            batch.logprobs,
            batch.behaviour_logprobs,
            batch.mask,
            sequence_ids=batch.sequence_ids,
        )
        totals["histogram"] = ratio_histogram(batch.logprobs, batch.behaviour_logprobs, batch.mask)
        return loss, totals

    def _losses(
        self, policy: FlowPolicy, batch: BatchTensors
    ) -> tuple[Float[Tensor, "1 packed"], dict[str, Float[Tensor, "1 packed"]]]:
        """Return the loss of each trained picture, and metrics; 0 at all other tokens."""
        num_times = self._settings.num_times
        positions = batch.mask[0].nonzero().flatten()
        is_empty = len(positions) == 0
        if is_empty:
            # A rank that has nothing to train on must run the same forward and backward passes as the other ranks. It
            # runs them for the second token of its first sequence
            positions = batch.cu_seqlens[:1].to(batch.input_ids.device, torch.int64) + 1
        latents = batch.latents
        if latents is None:
            latents = torch.zeros(len(batch.input_ids), 1, *policy.latent_shape, device=policy.device)
        pairs = noised_pictures(
            batch.input_ids[positions], latents[positions, FINISHED], policy.schedule, num_times
        )
        prompts = policy.prompts_of_steps(
            batch.input_ids,
            batch.cu_seqlens,
            positions.repeat_interleave(num_times),
            batch.conditions,
        )
        with torch.no_grad(), self.old.in_place():
            old_velocity = policy.velocity_at(pairs.states, pairs.timesteps, prompts)
        velocity = policy.velocity_at(pairs.states, pairs.timesteps, prompts)
        branches = branch_losses(
            velocity,
            old_velocity,
            pairs.targets,
            pairs.t,
            self._settings.beta,
            self._settings.weighting,
        )
        positive, negative = (branch.reshape(-1, num_times).mean(dim=1) for branch in branches)
        advantages = batch.advantages[0, positions]
        is_good = good_probabilities(advantages, self._settings.clip)
        distance = (velocity - old_velocity).detach().square().flatten(1).mean(dim=1)
        values = {
            "loss": is_good * positive + (1 - is_good) * negative,
            "nft_positive_loss": positive.detach(),
            "nft_negative_loss": negative.detach(),
            "nft_probability": is_good,
            "nft_clip_share": (advantages.abs() > self._settings.clip).float(),
            "nft_old_distance": distance.reshape(-1, num_times).mean(dim=1),
            "nft_old_distance_max": distance.reshape(-1, num_times).amax(dim=1),
        }
        zeros = torch.zeros_like(batch.advantages[0])
        packed = {}
        for name, picture_values in values.items():
            # Of a rank that has nothing to train on, only the graph matters
            kept_values = 0.0 * picture_values if is_empty else picture_values
            packed[name] = zeros.index_copy(0, positions, kept_values)[None]
        return packed.pop("loss"), packed


def noised_pictures(
    seeds: Int64[Tensor, " pictures"],
    pictures: Float[Tensor, "pictures channels height width"],
    schedule: FlowSchedule,
    num_times: int,
) -> NoisedPictures:
    """Mix each picture with noise at random times. The pairs of a picture are neighbors.

    Args:
        seeds: The seed of each picture's times and noises. The engine has drawn it.
        pictures: The finished pictures.
        schedule: The schedule of the denoising steps; times have its density.
        num_times: Number of times and noises of each picture.
    """
    shares = []
    noises = []
    for seed in seeds.tolist():
        # On the CPU, so that the numbers do not depend on the device
        generator = torch.Generator().manual_seed(seed)
        shares.append(torch.rand(num_times, generator=generator))
        noises.append(torch.randn(num_times, *pictures.shape[1:], generator=generator))
    t, timesteps = schedule.times_at(torch.cat(shares).to(pictures.device))
    noise = torch.cat(noises).to(pictures.device)
    repeated = pictures.repeat_interleave(num_times, dim=0)
    return NoisedPictures(noised(repeated, noise, t), noise - repeated, t, timesteps)
