"""In the first sync, accept an engine that rounds more than expected, if the read-back shows that it uses the weights."""

import logging
from dataclasses import replace

import torch

from async_grpo.protocols import Receipt, WeightPackage
from async_grpo.weights.package import canary_miss

# Maximum difference in nats that is only a warning in the first sync, if all weights of a bfloat16 engine were read
# back
LARGEST_ROUNDING = 1.0
log = logging.getLogger(__name__)


def with_observed_rounding(
    package: WeightPackage, worker_id: str, receipt: Receipt, wire_dtype: torch.dtype
) -> WeightPackage:
    """Return the package of the first sync, with a higher tolerance if the engine rounds more than expected.

    The expected rounding was measured on models with random weights. A trained model may amplify rounding more. If the
    read-back shows that the engine computes with the weights that were sent, a difference up to LARGEST_ROUNDING only
    causes a warning, and becomes the basis for the tolerance of later syncs.
    """
    received, logprobs = receipt
    if wire_dtype is torch.float32:
        return package
    miss = canary_miss(logprobs - package.canary_logprobs)
    are_all_read = all(tensor.in_use and tensor.is_read_back for tensor in received.values())
    if are_all_read and package.tolerance < miss <= LARGEST_ROUNDING:
        log.warning(
            "worker %s computes with the weights that were sent, but its log-probs differ from the trainer's by %.3g "
            "(expected: at most %.3g). The run goes on, and compares later weights with this difference. If "
            "mismatch_kl is large from the first step, engine and trainer disagree on the model (docs/operations.md, "
            "Refused: what now)",
            worker_id,
            miss,
            package.tolerance,
        )
        return replace(package, tolerance=miss)
    return package
