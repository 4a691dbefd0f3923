"""The canary of a policy that draws: fixed denoising steps of fixed pictures.

Trainer and engine compare their log-probs.
"""

import numpy as np
import torch
from jaxtyping import Float32, Int
from torch import Tensor

from async_grpo.modeling.flow.policy import AFTER, BEFORE, FlowPolicy

MAX_CANARY_LABELS = 4
# Maximum number of steps. All steps use the same weights, so more steps would reveal nothing more, but take memory and
# time at each sync
MAX_CANARY_STEPS = 8


def canary_texts(num_labels: int, num_steps: int) -> list[np.ndarray]:
    """Return the "texts" of the canary, int32, one for each of a few labels: the label, then numbers of denoising steps."""
    labels = np.linspace(0, num_labels - 1, min(MAX_CANARY_LABELS, num_labels)).astype(int)
    steps = np.unique(np.linspace(0, num_steps - 1, min(MAX_CANARY_STEPS, num_steps)).astype(int))
    return [np.concatenate([[label], steps]).astype(np.int32) for label in np.unique(labels)]


@torch.no_grad()
def flow_canary_logprobs(
    policy: FlowPolicy, *texts: Int[np.ndarray, " _tokens"]
) -> Float32[np.ndarray, " packed"]:
    """Return the log-probs of the steps of the canary texts, one text after the other.

    The first entry of each text, its label, is 0.

    The trainer and an engine compute these log-probs with the same weights, so a difference shows weights that were not
    transferred correctly. A collective if the policy is sharded.

    Args:
        policy: The policy.
        texts: The sequences of `canary_texts`.
    """
    input_ids = torch.tensor(np.concatenate(texts), dtype=torch.int64, device=policy.device)
    boundaries = torch.tensor([0, *map(len, texts)]).cumsum(0)
    mask = torch.ones_like(input_ids, dtype=torch.bool)
    latents = torch.cat([_fixed_latents(policy, text) for text in texts])
    conditions = [policy.random_condition(_random_of(text)) for text in texts]
    logprobs = policy(input_ids, boundaries, mask, latents.to(policy.device), conditions)[0]
    return logprobs.float().cpu().numpy()


def _fixed_latents(
    policy: FlowPolicy, text: Int[np.ndarray, " _tokens"]
) -> Float32[Tensor, "_tokens 2 channels height width"]:
    """Return fixed states of a picture before and after each denoising step of a canary text, the same in every process.

    The states after the steps are drawn with a fixed random velocity in place of the policy's. With its own velocity,
    the policy then gives them log-probs of moderate size, for short and for long steps.
    """
    random = _random_of(text)
    shape = (len(text), *policy.latent_shape)
    before, velocity, noise = (
        torch.from_numpy(random.standard_normal(shape).astype(np.float32)) for _ in range(3)
    )
    latents = torch.zeros(len(text), 2, *policy.latent_shape)
    steps = torch.tensor(text[1:], dtype=torch.int64)
    mean, std = policy.moments(before[1:], velocity[1:], steps)
    latents[1:, BEFORE] = before[1:]
    latents[1:, AFTER] = mean + std[:, None, None, None] * noise[1:]
    return latents


def _random_of(text: Int[np.ndarray, " _tokens"]) -> np.random.Generator:
    """Return a generator that gives the same numbers for a text in every process."""
    return np.random.default_rng([int(token) for token in text])
