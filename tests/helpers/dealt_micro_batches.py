"""Random cuts of a minibatch into micro-batches, dealt to ranks in random order."""

import numpy as np
from tiny_policy import pack

from async_grpo.messages import dummy_micro_batch


def deal(sequences, seed, world_size):
    """Return micro-batches [rank][round], cut and dealt at random; dummies fill up the ranks that have fewer."""
    rng = np.random.default_rng(1000 + seed)
    order = rng.permutation(len(sequences))
    cuts = np.sort(rng.integers(0, len(order), rng.integers(0, 6)))
    micro_batches = [pack([sequences[i] for i in part]) for part in np.split(order, cuts) if len(part)]
    hands = [[] for _ in range(world_size)]
    for micro_batch in micro_batches:
        hands[rng.integers(world_size)].append(micro_batch)
    rounds = max(map(len, hands)) + int(rng.integers(2))
    for hand in hands:
        while len(hand) < rounds:
            hand.insert(int(rng.integers(len(hand) + 1)), dummy_micro_batch(token_id=2))
    return hands
