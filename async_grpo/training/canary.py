"""The trainer's side of the landing check: what the policy says of a fixed prompt."""

import numpy as np
import torch

from async_grpo.modeling.policy import PolicyModel
from async_grpo.training.sharding import release_gathered


def canary_logprobs(policy: PolicyModel, canary_ids: np.ndarray, *, temperature: float = 1.0) -> np.ndarray:
    """(N,) float32: the log-prob of each canary token given those before it; the first one is 0.

    canary_ids (N,) integers. A collective of a sharded policy, and the same on every rank.
    """
    ids = torch.tensor(canary_ids, dtype=torch.int64, device=policy.device)
    with torch.no_grad():
        logprobs, _ = policy(
            ids, torch.tensor([0, len(ids)]), torch.ones_like(ids, dtype=torch.bool), temperature
        )
    release_gathered(policy)
    return logprobs.float().cpu().numpy()
