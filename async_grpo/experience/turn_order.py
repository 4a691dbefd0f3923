"""The order in which the turns of a trajectory happened. In a completion they stand by sequence."""

import numpy as np

from async_grpo.types import Completion


def turn_order(completion: Completion) -> list[int]:
    """Return where the turns stand in `completion.turns`, in the order of time."""
    if not completion.turns:
        return []
    return np.argsort(completion.turn_ranks).tolist()
