"""Judge the receipts of a sync: fence the workers that fail the proof, or end the run if all of them fail."""

from collections.abc import Mapping

import numpy as np
import torch

from async_grpo.errors import WeightsDidNotLand
from async_grpo.protocols import Engines, Receipt, WeightPackage
from async_grpo.weights.observed_rounding import with_observed_rounding
from async_grpo.weights.package import SELF_TEST, prove_landed
from async_grpo.weights.unread_tensors import UnreadTensors

Differences = dict[str, np.ndarray]  # worker id -> canary log-probs (N,) of the worker minus the trainer's


def judge_receipts(
    engines: Engines,
    package: WeightPackage,
    receipts: Mapping[str, Receipt],
    last_differences: Differences,
    unread: UnreadTensors,
    wire_dtype: torch.dtype | None,
) -> Differences:
    """Fence the workers that fail the proof, and return the differences of all others.

    Args:
        engines: Fences workers.
        package: The weights that were sent.
        receipts: The workers' receipts, by worker id.
        last_differences: Differences of each worker at its last proof, which are subtracted.
        unread: Gets the names of the tensors of a self-test that a worker cannot read back.
        wire_dtype: Accept an engine that rounds more than this dtype of the engines, if the read-back shows that it
            uses all weights. None accepts no such engine.

    Raises:
        WeightsDidNotLand: All workers failed, so the fault is not that of a single worker. A sync for workers that joined
            late does not raise it.
    """
    is_self_test = package.version == SELF_TEST
    differences = Differences()
    failures: dict[str, WeightsDidNotLand] = {}
    for worker_id, receipt in receipts.items():
        if is_self_test:
            received, _ = receipt
            unread.add(worker_id, received)
        # The changed weights of a self-test cause other rounding errors, which the last difference would not cancel
        last = 0.0 if is_self_test else last_differences.get(worker_id, 0.0)
        package_to_prove = package
        try:
            if wire_dtype is not None:
                package_to_prove = with_observed_rounding(package, worker_id, receipt, wire_dtype)
            differences[worker_id] = prove_landed(package_to_prove, worker_id, receipt, last)
        except WeightsDidNotLand as error:
            failures[worker_id] = error
    if failures and not differences and not package.for_late:
        raise next(iter(failures.values()))
    for worker_id, failure in failures.items():
        engines.fence(worker_id, failure)
    return differences
