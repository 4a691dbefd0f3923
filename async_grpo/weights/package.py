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

Differences = dict[str, np.ndarray]  # worker id -> (N,) its canary log-probs minus the trainer's


def rms(values: np.ndarray) -> float:
    """The root mean square."""
    return float(np.sqrt(np.square(values).mean()))


def prove_landed(
    package: WeightPackage, receipts: Mapping[str, Receipt], last: Mapping[str, np.ndarray] | None = None
) -> Differences:
    """The proof of landing: what every worker received is what was sent, and what it computes is what we compute.

    Args:
        last: what this returned for the weights before these. A worker in it is judged by the change since then, so
            that the part of the rounding that stays the same from sync to sync cancels.

    Raises:
        WeightsDidNotLand: naming worker, version, and the tensors or the difference.
    """
    differences: Differences = {}
    for worker_id, (received, logprobs) in receipts.items():
        check_received(package.manifest, received, worker_id)
        differences[worker_id] = difference = logprobs - package.canary_logprobs
        change = rms(difference - (last or {}).get(worker_id, 0.0))
        if not change <= package.tolerance:  # also catches NaN
            raise WeightsDidNotLand(_canary_message(package, worker_id, change))
    return differences


def unpack(chunks: Sequence[Any]) -> tuple[dict[str, torch.Tensor], Manifest]:
    """The tensors of safetensors images (anything that `bytes` takes), and their records."""
    tensors = {name: tensor for chunk in chunks for name, tensor in load(bytes(chunk)).items()}
    return tensors, {name: record(tensor) for name, tensor in tensors.items()}


def _canary_message(package: WeightPackage, worker_id: str, change: float) -> str:
    what = "the start-up self-test" if package.version == SELF_TEST else f"policy version {package.version}"
    return (
        f"worker {worker_id} received {what} bit by bit, yet computes other log-probs: they differ by {change:.3g} "
        f"(root mean square; allowed: {package.tolerance:.3g}). A tensor does not reach the place where the engine "
        "uses it (a tied head, a packed copy), or engine and trainer disagree on the model or its dtype; "
        "--canary-tolerance sets what is allowed"
    )
