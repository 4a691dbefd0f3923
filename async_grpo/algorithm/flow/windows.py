"""Windows: which denoising steps of a picture are stochastic, and therefore trained.

All other steps follow the ODE. Training fewer steps costs less (Flow-GRPO-Fast; MixGRPO, Li et al. 2025, arXiv 2507.21802).
"""

import numpy as np

from async_grpo.options.fields import refuse

RANDOM = "random"
SLIDING = "sliding"
MAX_DENOISING_STEPS = 1000  # more than any sampler of pictures takes
WINDOW_ORDERS = (RANDOM, SLIDING)


def stochastic_steps(
    num_steps: int, width: int, order: str, *, seed: int, policy_version: int, versions_per_place: int
) -> range:
    """Return the indices of a picture's stochastic steps.

    Args:
        num_steps: Number of denoising steps of the picture.
        width: Number of stochastic steps; 0 means all.
        order: `random` draws the place of the window for each picture. `sliding` begins with the noisiest steps and moves
            by one step each `versions_per_place` policy versions, and then begins again.
        seed: Seed of the picture.
        policy_version: Version of the policy that begins to draw the picture.
        versions_per_place: Number of policy versions that a sliding window stays at one place.

    >>> stochastic_steps(10, 0, "random", seed=1, policy_version=0, versions_per_place=5)
    range(0, 10)
    >>> stochastic_steps(10, 4, "sliding", seed=1, policy_version=11, versions_per_place=5)
    range(2, 6)
    """
    refuse(width > num_steps, f"a window of {width} steps is longer than the {num_steps} denoising steps")
    if width in (0, num_steps):
        return range(num_steps)
    num_places = num_steps - width + 1
    if order == SLIDING:
        begin = policy_version // versions_per_place % num_places
    else:
        begin = int(np.random.default_rng((seed, num_places)).integers(num_places))
    return range(begin, begin + width)
