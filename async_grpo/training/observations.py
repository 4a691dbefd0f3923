"""Which tokens of a micro-batch are observations: the texts of an environment after the policy's first turn."""

import numpy as np
from jaxtyping import Bool

from async_grpo.messages import MicroBatch
from async_grpo.types import PROMPT_TOKEN


def observation_mask(
    batch: MicroBatch, is_trained: Bool[np.ndarray, " packed"]
) -> Bool[np.ndarray, " packed"]:
    """Return True at the observations: tokens that the environment wrote after the first sampled token of their sequence.

    Three kinds of tokens are no observations: the prompt; if the history was rewritten and a new sequence began, the
    text before its first turn; and all tokens of a sequence without any trained token.

    Args:
        batch: The micro-batch.
        is_trained: True at the tokens that are trained on.
    """
    sequence_ids = batch.sequence_ids()
    is_sampled = batch.versions != PROMPT_TOKEN
    num_sampled = np.cumsum(is_sampled)  # number of sampled tokens up to and including each token
    first_tokens = batch.cu_seqlens[:-1]
    num_before_sequence = num_sampled[first_tokens] - is_sampled[first_tokens]
    follows_a_turn = num_sampled > num_before_sequence[sequence_ids]
    num_trained = np.bincount(sequence_ids, weights=is_trained, minlength=batch.num_sequences)
    return ~is_sampled & follows_a_turn & (num_trained > 0)[sequence_ids]
