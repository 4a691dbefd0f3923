"""`Publisher`: the trainer's side of a weight sync, as a transaction with a proof.

    gather and pack (all ranks)  ->  deliver: every engine pauses, loads, resumes, answers  ->  prove  ->  commit

Everything after the packing happens in a thread, while the ranks accumulate gradients of the next step. The engines pause
only while they load, and no optimizer step is taken before the weights are proven.
"""

import concurrent.futures
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from async_grpo.errors import DeadlineExceeded, WeightsDidNotLand
from async_grpo.modeling import full_tensor
from async_grpo.protocols import Engines, Proof, Receipt, TensorRecord, WeightPackage
from async_grpo.weights.config import WeightConfig
from async_grpo.weights.package import SELF_TEST, canary_miss, pack_weights, prove_landed, record
from async_grpo.weights.self_test import (
    MIN_TOLERANCE,
    ORIGINALS_BYTES,
    SENSITIVITIES,
    groups_within,
    measure_sensitivity,
    perturbed,
    round_tolerance,
    self_test_groups,
)

Differences = dict[str, np.ndarray]  # worker id -> (N,) its canary log-probs minus the trainer's
Delivery = Callable[[], tuple[WeightPackage, Mapping[str, Receipt]]]
# Lengths of the canary's texts, if the model's context allows them. A long text shows errors of the position; an engine
# holds the logits of all its tokens at once
CANARY_TOKENS = (16, 128, 512)
# Difference of engine and trainer (`canary_miss`) that the first sync always accepts, whatever the trainer's own
# sensitivity is: an engine with quantised weights computes almost the same model
UNCHANGED_ALLOWED = {torch.float32: MIN_TOLERANCE, torch.bfloat16: 0.3}


@dataclass(frozen=True)
class Canary:
    """Fixed texts whose log-probs distinguish one policy from another."""

    texts: Sequence[np.ndarray]  # each (L,) int32; N tokens in all
    logprobs: Callable[
        ..., np.ndarray
    ]  # (model, *texts) -> (N,), the trainer's log-probs; called on every rank
    # Element-wise maximum over all ranks, a collective: only rank 0 communicates with the engines
    max_over_ranks: Callable[[list[float]], list[float]] = list

    @staticmethod
    def text(vocab_size: int, length: int, seed: int = 0) -> np.ndarray:
        """Return (L,) int32 random tokens, which use many rows of the embedding, and every weight of the body."""
        return np.random.default_rng(seed).integers(0, vocab_size, length).astype(np.int32)

    @classmethod
    def random(
        cls,
        logprobs: Callable[..., np.ndarray],
        vocab_size: int,
        longest: int,
        seed: int,
        max_over_ranks: Callable[[list[float]], list[float]] = list,
    ) -> Self:
        """Return a canary with texts of CANARY_TOKENS, each at most `longest` tokens long."""
        lengths = sorted({min(length, longest) for length in CANARY_TOKENS})
        texts = [cls.text(vocab_size, length, seed) for length in lengths]
        return cls(texts, logprobs, max_over_ranks)


@dataclass
class Publisher:
    """`WeightPublisher` that sends packages: a self-test if requested, then the weights, each with its proof.

    Other transports override `_store` or `_send`.
    """

    engines: Engines | None  # None except on rank 0
    # Model -> (name, tensor) in a fixed order; the tensors of a sharded model are its shards (DTensors)
    named_weights: Callable[[Any], Iterator[tuple[str, torch.Tensor]]]
    canary: Canary
    wire_dtype: torch.dtype  # dtype of the engines: tensors are sent in it, and digests are computed from it
    rank: int
    config: WeightConfig

    chunk_bytes = 256 << 20
    originals_bytes = ORIGINALS_BYTES

    def __post_init__(self) -> None:
        self._rounding: float | None = None  # largest difference (`canary_miss`) of proven weights
        self._unchanged_sensitivity = 0.0  # of the trainer itself, at the first sync; 0 if not measured
        self._unread: set[str] = set()  # tensors that some worker cannot read back; filled on rank 0 alone
        self._last_differences: Differences = {}  # of the last sync
        self._for_late = False  # the current sync is for workers that joined late
        self._proof: Proof = dict  # of the last sync; only one sync runs at a time

    def publish(self, model: nn.Module, version: int, *, self_test: bool = False) -> Proof:
        """Make `version` the policy that every engine generates with. A collective: every rank must call it.

        The weights are packed when this returns; the rest of the sync runs in a thread. A worker that fails is fenced.

        Args:
            model: The policy.
            version: Its policy version.
            self_test: Send and prove weights first that differ visibly in every tensor. Once weights have been proven, such
                a sync is for the workers that joined late.

        Returns:
            A function that waits for the proof. It returns the metrics `weight_sync_s`, counted from the call of
            `publish`, and `canary_error`.

        Raises:
            WeightsDidNotLand: Every worker failed that received weights to generate with; raised on rank 0, here or by the
                returned function.
        """
        self._proof()
        started = time.monotonic()
        self._for_late = self_test and self._rounding is not None
        if self_test:
            self._run_self_test(model)
        draft = self._draft(model, version)
        prove = self._transact(draft, dict(self.named_weights(model)))

        def finish() -> dict[str, float]:
            differences = prove()
            self._remember(differences)
            canary_errors = [float(np.abs(difference).max()) for difference in differences.values()]
            return {
                "weight_sync_s": time.monotonic() - started,
                "canary_error": max(canary_errors, default=0.0),
            }

        # The sync waits three times: to begin, for the engines, and to commit
        limit_s = 3 * self.config.sync_timeout_s
        self._proof = in_thread(
            finish,
            name=f"sync-{version}",
            limit_s=limit_s,
            timeout_message=(
                f"policy version {version} did not reach the engines within {limit_s:.0f} s (3 x --sync-timeout-s): the "
                "weight transport does not answer"
            ),
        )
        return self._proof

    def _run_self_test(self, model: nn.Module) -> None:
        """Send the weights unchanged, then with all tensors changed, and prove both.

        The difference of engine and trainer in the first round determines every tolerance after it. While all tensors are
        changed (in several rounds, if their originals do not fit into `originals_bytes`), engines report each tensor that
        they received but do not use. In float32 the canary shows a lost tensor too, by more than a thousand times its
        rounding. In bfloat16 it does not, because 30 changed layers amplify rounding to more than the effect of a lost
        tensor. There, tensors that some engine cannot read back have rounds of their own first, one layer at a time.
        """
        weights = dict(self.named_weights(model))
        unchanged = self._draft(model, SELF_TEST)
        self._remember(self._transact(unchanged, weights)())
        restored = frozenset[str]()
        for group in self._rounds(weights):
            # The noise depends on the order of the tensors, which must be the same on every rank
            changed_weights = {name: weight for name, weight in weights.items() if name in group}
            with perturbed(changed_weights):
                changed = self._draft_of_round(model, weights)
                self._transact(changed, {n: w for n, w in weights.items() if n in restored | group})()
            restored = group

    def _rounds(self, weights: Mapping[str, torch.Tensor]) -> list[frozenset[str]]:
        """Return the tensors to change in each round of the self-test, the same on every rank."""
        all_groups = groups_within(weights, self.originals_bytes)
        if self.wire_dtype is torch.float32:
            return all_groups
        groups = self_test_groups(weights)
        flags_of_rank = [float(bool(group & self._unread)) for group in groups]
        flags = self.canary.max_over_ranks(flags_of_rank)
        unread = [group for group, is_unread in zip(groups, flags, strict=True) if is_unread]
        return [*unread, *all_groups]

    def _draft_of_round(self, model: nn.Module, weights: Mapping[str, torch.Tensor]) -> WeightPackage:
        """Return the package, without tensors, of a round in which some of `weights` are changed. A collective."""
        expected = self._canary_logprobs(model)
        tolerance = self.config.canary_tolerance
        if tolerance is None:
            tolerance = round_tolerance(
                sensitivity=self._sensitivity(model, expected, weights),
                unchanged_sensitivity=self._unchanged_sensitivity,
                unchanged_difference=self._rounding or 0.0,
                wire_dtype=self.wire_dtype,
            )
        return self._package(SELF_TEST, expected, tolerance)

    def _draft(self, model: nn.Module, version: int) -> WeightPackage:
        """Return a package without tensors: the canary's log-probs under the model's weights, and their tolerance."""
        expected = self._canary_logprobs(model)
        if self.config.canary_tolerance is not None:
            tolerance = self.config.canary_tolerance
        elif self._rounding is None:
            sensitivity = self._sensitivity(model, expected, dict(self.named_weights(model)))
            self._unchanged_sensitivity = sensitivity
            tolerance = max(SENSITIVITIES[self.wire_dtype] * sensitivity, UNCHANGED_ALLOWED[self.wire_dtype])
        else:
            tolerance = max(3 * self._rounding, MIN_TOLERANCE)
        return self._package(version, expected, tolerance)

    def _package(self, version: int, expected: np.ndarray, tolerance: float) -> WeightPackage:
        """Return a package without tensors."""
        return WeightPackage(
            version=version,
            manifest={},
            chunks=[],
            canary_texts=self.canary.texts,
            canary_logprobs=expected,
            tolerance=tolerance,
            for_late=self._for_late,
        )

    def _canary_logprobs(self, model: nn.Module) -> np.ndarray:
        """Return (N,), the trainer's log-probs of the canary. A collective."""
        return self.canary.logprobs(model, *self.canary.texts)

    def _sensitivity(
        self, model: nn.Module, expected: np.ndarray, weights: Mapping[str, torch.Tensor]
    ) -> float:
        """Return how far rounding moves the canary under the model's current weights. A collective."""
        return measure_sensitivity(lambda: self._canary_logprobs(model), expected, weights, self.wire_dtype)

    def _remember(self, differences: Differences) -> None:
        """Keep the differences of proven weights, by which later syncs are judged."""
        self._last_differences = {**self._last_differences, **differences}
        self._rounding = max([self._rounding or 0.0, *map(canary_miss, differences.values())])

    def _transact(
        self, draft: WeightPackage, weights: Mapping[str, torch.Tensor]
    ) -> Callable[[], Differences]:
        """Gather and send the weights (a collective).

        Args:
            draft: Their package, without tensors.
            weights: Tensors by name.

        Returns:
            A function that delivers the weights, proves that they landed, and commits. It returns the canary log-probs of
            each worker minus the trainer's; {} on ranks that send nothing.
        """
        deliver = self._send(draft, weights)
        engines = self.engines

        def prove() -> Differences:
            if deliver is None or engines is None:
                return {}
            try:
                package, receipts = deliver()
                differences = self._judge(engines, package, receipts)
                engines.commit(package, list(differences))
            except BaseException as error:
                with suppress(Exception):  # `error` itself is raised in any case, by the proof
                    engines.abort(error)
                raise
            return differences

        return prove

    def _judge(
        self, engines: Engines, package: WeightPackage, receipts: Mapping[str, Receipt]
    ) -> Differences:
        """Return the differences of the workers whose weights are proven, and fence all others.

        Raises:
            WeightsDidNotLand: No worker's weights are proven, so the fault is not a worker's. A sync for workers that
                joined late does not raise it.
        """
        is_self_test = package.version == SELF_TEST
        last_differences = {} if is_self_test else self._last_differences
        differences = Differences()
        failures: dict[str, WeightsDidNotLand] = {}
        for worker_id, receipt in receipts.items():
            if is_self_test:
                received, _ = receipt
                self._unread |= {name for name, record in received.items() if not record.is_read_back}
            try:
                last = last_differences.get(worker_id, 0.0)
                differences[worker_id] = prove_landed(package, worker_id, receipt, last)
            except WeightsDidNotLand as error:
                failures[worker_id] = error
        if failures and not differences and not package.for_late:
            raise next(iter(failures.values()))
        for worker_id, failure in failures.items():
            engines.fence(worker_id, failure)
        return differences

    def _send(self, draft: WeightPackage, weights: Mapping[str, torch.Tensor]) -> Delivery | None:
        """Pack the tensors into chunks.

        Returns:
            A function that brings the chunks to every engine; None on ranks that only gather.
        """
        engines = self.engines
        if engines is None:
            for weight in weights.values():
                full_tensor(weight, self.wire_dtype)
            return None
        packed = [pack_weights(chunk, self.wire_dtype) for chunk in self._chunks(weights)]

        def deliver() -> tuple[WeightPackage, Mapping[str, Receipt]]:
            manifest: dict[str, TensorRecord] = {}
            references = []
            while packed:
                # Popped, so that the memory of a chunk is released once it is stored
                image, tensors = packed.pop(0)
                manifest |= {name: record(tensor) for name, tensor in tensors.items()}
                references.append(self._store(engines, image))
                del image, tensors
            package = replace(draft, manifest=manifest, chunks=references)
            return package, engines.deliver(package)

        return deliver

    def _chunks(self, weights: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """Split the weights, in order, into chunks of about `chunk_bytes` of the wire dtype."""
        chunks: list[dict[str, torch.Tensor]] = []
        room_bytes = 0
        for name, weight in weights.items():
            if room_bytes <= 0:
                chunks.append({})
                room_bytes = self.chunk_bytes
            chunks[-1][name] = weight
            room_bytes -= weight.numel() * self.wire_dtype.itemsize
        return chunks

    def _store(self, engines: Engines, image: np.ndarray) -> Any:
        """Put one chunk where every engine can read it, and return the reference for the package."""
        return engines.put(image)


def in_thread(call: Callable[[], Any], name: str, limit_s: float, timeout_message: str) -> Callable[[], Any]:
    """Run `call` in a daemon thread: a call that never returns cannot be cancelled, and must not be joined at exit.

    Returns:
        A function that waits for the result of the call, or its error. It raises DeadlineExceeded with `timeout_message`
        after `limit_s` seconds.
    """
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    outcome: concurrent.futures.Future = concurrent.futures.Future()

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    def wait() -> Any:
        if not concurrent.futures.wait([outcome], limit_s).done:
            raise DeadlineExceeded(timeout_message)
        return outcome.result()

    threading.Thread(target=run, name=name, daemon=True).start()
    return wait
