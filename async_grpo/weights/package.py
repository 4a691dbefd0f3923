"""The proof that a `WeightPackage` landed: receipts and canary log-probs of every worker, against the trainer's."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from safetensors.torch import load

from async_grpo.errors import WeightsDidNotLand
from async_grpo.protocols import Manifest, Receipt, WeightPackage
from async_grpo.weights.manifest import check_received, record

SELF_TEST = -2  # version of the weights of the start-up self-test; nothing is ever generated with them


def prove_landed(package: WeightPackage, receipts: Mapping[str, Receipt]) -> float:
    """The proof of landing: what every worker received is what was sent, and what it computes is what we compute.

    Returns:
        The largest difference between an engine's and the trainer's canary log-probs.

    Raises:
        WeightsDidNotLand: naming worker, version, and the tensors or the difference.
    """
    worst = 0.0
    for worker_id, (received, logprobs) in receipts.items():
        check_received(package.manifest, received, worker_id)
        differences = np.abs(logprobs - package.canary_logprobs)
        rms = float(np.sqrt(np.square(differences).mean()))
        if not rms <= package.tolerance:  # also catches NaN
            raise WeightsDidNotLand(_canary_message(package, worker_id, rms))
        worst = max(worst, float(differences.max()))
    return worst


def unpack(chunks: Sequence[Any]) -> tuple[dict[str, torch.Tensor], Manifest]:
    """The tensors of safetensors images (anything that `bytes` takes), and their records."""
    tensors = {name: tensor for chunk in chunks for name, tensor in load(bytes(chunk)).items()}
    return tensors, {name: record(tensor) for name, tensor in tensors.items()}


def _canary_message(package: WeightPackage, worker_id: str, rms: float) -> str:
    what = "the start-up self-test" if package.version == SELF_TEST else f"policy version {package.version}"
    return (
        f"worker {worker_id} received {what} bit by bit, yet computes other log-probs: they differ by {rms:.3g} "
        f"(root mean square; allowed: {package.tolerance:.3g}). A tensor does not reach the place where the engine "
        "uses it (a tied head, a packed copy), or engine and trainer disagree on the model or its dtype"
    )
