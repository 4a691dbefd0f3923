"""`OldPolicy`: the policy that draws in DiffusionNFT, a moving average of the trained policy.

There are two policies. Gradients change the trained one, whose weights are those of the module. The old one draws: its
weights are sent to the engines, so that evaluations measure it, and it is exported. After each iteration (the steps of
one batch), old <- eta * old + (1 - eta) * trained.

The trainer keeps the old weights as a `WeightCopy`, which changes places with the module's weights while the module
computes as the old policy.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from async_grpo.algorithm.flow.nft import old_decay
from async_grpo.modeling.flow.policy import FlowPolicy
from async_grpo.protocols import Proof, WeightPublisher
from async_grpo.training.moving_reference import KeptWeights
from async_grpo.training.sharding import release_gathered
from async_grpo.training.weight_copy import WeightCopy


class OldPolicy(KeptWeights):
    """The weights of the old policy. All methods are collectives if the policy is sharded.

    It takes the place of a moving reference in the trainer: it moves at the end of a batch, and checkpoints contain it.
    Create it while the policy has the weights with which the run begins.

    Args:
        policy: The trained policy.
        growth: See `old_decay`.
        maximum: See `old_decay`.
        cycle_steps: Number of optimizer steps of an iteration.
    """

    def __init__(self, policy: FlowPolicy, growth: float, maximum: float, cycle_steps: int) -> None:
        self._policy = policy
        self._growth = growth
        self._maximum = maximum
        self._cycle_steps = cycle_steps
        self._weights = WeightCopy(policy.model)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of the weights, for checkpoints; see `WeightCopy.named_weights`."""
        return self._weights.named_weights()

    def follow(self, version: int) -> dict[str, float]:
        """Move the old policy towards the trained one, and return the metric `nft_old_decay`.

        Args:
            version: Number of finished optimizer steps, at the end of an iteration.
        """
        decay = old_decay(version // self._cycle_steps, self._growth, self._maximum)
        self._weights.move(1 - decay)
        return {"nft_old_decay": decay}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the policy compute with the old weights within the `with` block."""
        # FSDP may still hold gathered weights, which an exchange of the shards does not change
        release_gathered(self._policy)
        with self._weights.exchanged():
            yield
            release_gathered(self._policy)

    def wrapped(self, publisher: WeightPublisher) -> WeightPublisher:
        """Return a publisher of the old policy's weights."""
        return OldPolicyPublisher(publisher, self)


class OldPolicyPublisher:
    """A `WeightPublisher` that sends the weights of the old policy.

    `publish` returns when copies of the weights are packed, so that the trained weights may return to their place.

    Args:
        publisher: Sends weights in packages.
        old: The old policy.
    """

    def __init__(self, publisher: WeightPublisher, old: OldPolicy) -> None:
        self._publisher = publisher
        self._old = old

    def publish(self, model: Any, version: int, *, self_test: bool) -> Proof:
        """See `WeightPublisher`."""
        with self._old.in_place():
            return self._publisher.publish(model, version, self_test=self_test)
