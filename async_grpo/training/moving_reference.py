"""`MovingReference`: the reference policy of the KL penalty follows the trained policy (`--ref-update-steps`).

Every `ref_update_steps` optimizer steps, ref <- a * pi + (1 - a) * ref, with a = `ref_mix` (Gorbatovski et al. 2024,
"Learn Your Reference Model for Real Good Alignment", equation 10). With a = 1, the reference is reset to the policy, as
in ProRL (Liu et al. 2025), where the optimizer is reset as well.

The trainer keeps the reference's weights in float32, sharded as the policy's. The reference workers receive them in the
same way as the engines receive the policy's weights: a worker uses them only after digests and the log-probs of the
canary have shown that they arrived.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor
from torch.optim import Optimizer

from async_grpo.algorithm.config import AlgorithmConfig
from async_grpo.modeling.policy import PolicyModel
from async_grpo.protocols import Proof, WeightPublisher
from async_grpo.training.weight_copy import WeightCopy


class KeptWeights:
    """The weights that a trainer keeps beside those that it trains. This class keeps none.

    Its subclasses keep those of a moving reference, or of the policy that draws (`OldPolicy`).

    Attributes:
        publisher: Sends the weights of a moving reference to the reference workers.
    """

    publisher: WeightPublisher | None = None

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of the weights, for checkpoints: here none."""
        yield from ()

    def send_after_self_test(self, version: int) -> None:
        """Do nothing: the reference workers, if any, have loaded their weights from the model's folder."""

    def follow(self, version: int) -> dict[str, float]:
        """Let the weights follow the trained ones after a step, and return metrics: here nothing and none."""
        return {}

    def in_place(self) -> AbstractContextManager[None]:
        """Return a context in which the policy has the weights that engines and exports get: here the trained ones."""
        return nullcontext()

    def wrapped(self, publisher: WeightPublisher) -> WeightPublisher:
        """Return a publisher of the weights that the engines get: here those of the policy."""
        return publisher


class MovingReference(KeptWeights):
    """The weights of a reference that moves. All methods are collectives.

    Create it while the policy has the weights with which the run begins. They are the first reference.

    Args:
        policy: The trained policy, sharded or not.
        optimizer: The optimizer of the policy, which is reset with the reference if `ref_reset_optimizer` is set.
        config: The options.
    """

    def __init__(
        self,
        policy: PolicyModel,
        optimizer: Optimizer,
        config: AlgorithmConfig,
    ) -> None:
        self._policy = policy
        self._optimizer = optimizer
        self._config = config
        self._weights = WeightCopy(policy.model)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of the weights, for checkpoints; see `WeightCopy.named_weights`."""
        return self._weights.named_weights()

    def send_after_self_test(self, version: int) -> None:
        """Send the reference's weights with a self-test, and wait for the proof that they arrived.

        The first call sends to all reference workers. Later calls send to those that have joined since the previous
        call.

        Args:
            version: Number of completed optimizer steps.
        """
        self._send(version, self_test=True)

    def follow(self, version: int) -> dict[str, float]:
        """If the reference moves after this step, move it, send its weights, and wait until they are proven.

        Returns:
            The metric `reference_sync_s`, the seconds that this took; {} if the reference does not move after this
            step.
        """
        if version % self._config.ref_update_steps:
            return {}
        start_time = time.monotonic()
        self._weights.move(self._config.ref_mix)
        if self._config.ref_reset_optimizer:
            # The optimizer makes new moments of zero at its next step. The learning-rate schedule is not reset
            self._optimizer.state.clear()
        self._send(version, self_test=False)
        return {"reference_sync_s": time.monotonic() - start_time}

    def _send(self, version: int, *, self_test: bool) -> None:
        assert self.publisher is not None
        # The policy computes with the reference's weights only until they are packed and the canary is computed
        with self._weights.exchanged():
            wait_for_proof: Proof = self.publisher.publish(self._policy, version, self_test=self_test)
        wait_for_proof()


def make_reference(
    policy: PolicyModel, optimizer: Optimizer, config: AlgorithmConfig, publisher: WeightPublisher | None
) -> KeptWeights:
    """Return the reference that the options ask for. Call it before a checkpoint is loaded.

    Args:
        policy: The trained policy, which still has the weights of the first reference.
        optimizer: The optimizer of the policy.
        config: The options.
        publisher: Sends the weights; None if it is made later.
    """
    reference = MovingReference(policy, optimizer, config) if config.moves_reference else KeptWeights()
    reference.publisher = publisher
    return reference
