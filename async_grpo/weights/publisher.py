"""`Publisher`: the trainer's side of a weight sync, as a transaction with a proof.

    gather and pack (all ranks)  ->  deliver: every engine pauses, loads, resumes, answers  ->  prove  ->  commit

What follows the packing happens in a thread, while the ranks accumulate gradients of the next step. The engines pause
for the loading alone, and no optimizer step is taken before the proof has held.
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
# Of each text, at most. A long one shows what goes wrong with the position; an engine that answers for one holds the
# logits of all its tokens at once
CANARY_TOKENS = (16, 128, 512)
# By so much (`canary_miss` over the canary) engine and trainer may differ before anything was changed, whatever the
# trainer's own sensitivity: an engine with quantised weights computes almost the same model
UNCHANGED_ALLOWED = {torch.float32: MIN_TOLERANCE, torch.bfloat16: 0.3}


@dataclass(frozen=True)
class Canary:
    """Fixed texts whose log-probs tell two policies apart."""

    texts: Sequence[np.ndarray]  # each (L,) int32; N tokens in all
    logprobs: Callable[..., np.ndarray]  # of a model and the texts: (N,), the trainer's; called on every rank
    # Element-wise maximum over all ranks, a collective: only rank 0 hears of the engines
    max_over_ranks: Callable[[list[float]], list[float]] = list

    @staticmethod
    def text(vocab_size: int, length: int, seed: int = 0) -> np.ndarray:
        """(L,) int32 random tokens: they touch many rows of the embedding, and every weight of the body."""
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
        """Make texts of CANARY_TOKENS, `longest` at most."""
        lengths = sorted({min(length, longest) for length in CANARY_TOKENS})
        texts = [cls.text(vocab_size, length, seed) for length in lengths]
        return cls(texts, logprobs, max_over_ranks)


@dataclass
class Publisher:
    """`WeightPublisher` that sends packages: a self-test first if asked for, then the weights, each with its proof.

    Other transports change `_store`, or `_send`.
    """

    engines: Engines | None  # on rank 0 alone
    # Model -> (name, tensor) in a fixed order; of a sharded model its shards (DTensors)
    named_weights: Callable[[Any], Iterator[tuple[str, torch.Tensor]]]
    canary: Canary
    wire_dtype: torch.dtype  # the engines': what is sent, and what the digests speak of
    rank: int
    config: WeightConfig

    chunk_bytes = 256 << 20
    originals_bytes = ORIGINALS_BYTES

    def __post_init__(self) -> None:
        self._rounding: float | None = None  # the largest difference (`canary_miss`) of proven weights
        self._unchanged_sensitivity = 0.0  # the trainer's own, at the first sync; 0: not measured
        self._unread: set[str] = set()  # tensors that some worker cannot read back; known on rank 0 alone
        self._last: Differences = {}  # engine minus trainer at the last sync, by worker
        self._for_late = False  # the sync under way is for workers that joined late
        self._proof: Proof = dict  # of the last sync: one at a time

    def publish(self, model: nn.Module, version: int, *, self_test: bool = False) -> Proof:
        """Make `version` the policy that every engine generates with. Collective: call it on every rank.

        With `self_test`, weights that differ visibly in every tensor are sent and proven first; once weights have been
        proven, this is for workers that joined late. A worker that fails is fenced. The weights themselves are packed
        when this returns; the rest of their sync goes on in a thread.

        Returns what waits for the proof; its metrics are `weight_sync_s`, from the call of this on, and `canary_error`.
        Both raise WeightsDidNotLand, on rank 0, if all workers failed that were sent weights to work on.
        """
        self._proof()
        started = time.monotonic()
        self._for_late = self_test and self._rounding is not None
        if self_test:
            self._run_self_test(model)
        prove = self._transact(self._draft(model, version), dict(self.named_weights(model)))

        def finish() -> dict[str, float]:
            differences = prove()
            self._remember(differences)
            error = max((float(np.abs(d).max()) for d in differences.values()), default=0.0)
            return {"weight_sync_s": time.monotonic() - started, "canary_error": error}

        # It waits to begin, for the engines, and to commit
        limit = 3 * self.config.sync_timeout_s
        silent = (
            f"policy version {version} did not reach the engines within {limit:.0f} s (3 x --sync-timeout-s): the "
            "weight transport does not answer"
        )
        self._proof = in_thread(finish, f"sync-{version}", limit, silent)
        return self._proof

    def _run_self_test(self, model: nn.Module) -> None:
        """Send the weights as they are, then with all tensors changed, and prove both.

        What engine and trainer differ by in the first round is a measure of every tolerance after it. When all tensors
        are changed (in several rounds, if the originals of all do not fit into `originals_bytes`), engines name each tensor
        that they hold a place for and do not use; in float32 the canary shows a lost tensor as well, by more than a
        thousand times its rounding. In bfloat16 it does not: 30 changed layers amplify rounding to more than a lost tensor
        makes. There, tensors that some engine cannot read back have rounds of their own before, one layer at a time.
        """
        weights = dict(self.named_weights(model))
        unchanged = self._draft(model, SELF_TEST)
        self._remember(self._transact(unchanged, weights)())
        restored = frozenset[str]()
        for group in self._rounds(weights):
            with perturbed({name: w for name, w in weights.items() if name in group}):  # in one order
                changed = self._draft_of_round(model, weights)
                self._transact(changed, {n: w for n, w in weights.items() if n in restored | group})()
            restored = group

    def _rounds(self, weights: Mapping[str, torch.Tensor]) -> list[frozenset[str]]:
        """Return the tensors to change in each round of the self-test, the same on every rank."""
        everything = groups_within(weights, self.originals_bytes)
        if self.wire_dtype is torch.float32:
            return everything
        groups = self_test_groups(weights)
        are_unread = self.canary.max_over_ranks([float(bool(group & self._unread)) for group in groups])
        unread = [group for group, is_unread in zip(groups, are_unread, strict=True) if is_unread]
        return [*unread, *everything]

    def _draft_of_round(self, model: nn.Module, weights: Mapping[str, torch.Tensor]) -> WeightPackage:
        """Return a package without its tensors, of a round in which some of `weights` are changed. A collective."""
        expected = self._canary_logprobs(model)
        tolerance = self.config.canary_tolerance
        if tolerance is None:
            sensitivity = self._sensitivity(model, expected, weights)
            difference = self._rounding or 0.0
            tolerance = round_tolerance(sensitivity, self._unchanged_sensitivity, difference, self.wire_dtype)
        return self._package(SELF_TEST, expected, tolerance)

    def _draft(self, model: nn.Module, version: int) -> WeightPackage:
        """Return a package without its tensors: the canary under the model's weights, and how exactly to meet it."""
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
        return WeightPackage(version, {}, [], self.canary.texts, expected, tolerance, self._for_late)

    def _canary_logprobs(self, model: nn.Module) -> np.ndarray:
        return self.canary.logprobs(model, *self.canary.texts)

    def _sensitivity(
        self, model: nn.Module, expected: np.ndarray, weights: Mapping[str, torch.Tensor]
    ) -> float:
        """Return how far rounding moves the canary under the model's present weights. A collective."""
        return measure_sensitivity(lambda: self._canary_logprobs(model), expected, weights, self.wire_dtype)

    def _remember(self, differences: Differences) -> None:
        self._last = {**self._last, **differences}
        self._rounding = max([self._rounding or 0.0, *map(canary_miss, differences.values())])

    def _transact(
        self, draft: WeightPackage, weights: Mapping[str, torch.Tensor]
    ) -> Callable[[], Differences]:
        """Take `weights`, with what `draft` says of them (a collective); returns what delivers them, proves, and commits:
        engine minus trainer by worker; {} on ranks that send nothing."""
        deliver, engines = self._send(draft, weights), self.engines

        def prove() -> Differences:
            if deliver is None or engines is None:
                return {}
            try:
                package, receipts = deliver()
                differences = self._judge(engines, package, receipts)
                engines.commit(package, list(differences))
            except BaseException as error:
                with suppress(Exception):  # who asks for the proof hears of it in any case
                    engines.abort(error)
                raise
            return differences

        return prove

    def _judge(
        self, engines: Engines, package: WeightPackage, receipts: Mapping[str, Receipt]
    ) -> Differences:
        """Of the workers whose proof holds. The others are fenced; if it holds of none, the fault is not a worker's."""
        last, differences = {} if package.version == SELF_TEST else self._last, Differences()
        failed: dict[str, WeightsDidNotLand] = {}
        for worker_id, receipt in receipts.items():
            if package.version == SELF_TEST:
                self._unread |= {name for name, record in receipt[0].items() if not record.is_read_back}
            try:
                before = last.get(worker_id, 0.0)
                differences[worker_id] = prove_landed(package, worker_id, receipt, before)
            except WeightsDidNotLand as error:
                failed[worker_id] = error
        if failed and not differences and not package.for_late:
            raise next(iter(failed.values()))
        for worker_id, reason in failed.items():
            engines.fence(worker_id, reason)
        return differences

    def _send(self, draft: WeightPackage, weights: Mapping[str, torch.Tensor]) -> Delivery | None:
        """Pack the tensors into chunks; returns what brings them to every engine. None on ranks that only gather."""
        if (engines := self.engines) is None:
            for weight in weights.values():
                full_tensor(weight, self.wire_dtype)
            return None
        chunks: list[dict[str, torch.Tensor]] = []
        room = 0
        for name, weight in weights.items():
            if room <= 0:
                chunks.append({})
                room = self.chunk_bytes
            chunks[-1][name] = weight
            room -= weight.numel() * self.wire_dtype.itemsize
        packed = [pack_weights(chunk, self.wire_dtype) for chunk in chunks]

        def deliver() -> tuple[WeightPackage, Mapping[str, Receipt]]:
            manifest: dict[str, TensorRecord] = {}
            stored = []
            while packed:  # each is let go of once it is stored
                manifest |= {name: record(tensor) for name, tensor in packed[0][1].items()}
                stored.append(self._store(engines, packed.pop(0)[0]))
            package = replace(draft, manifest=manifest, chunks=stored)
            return package, engines.deliver(package)

        return deliver

    def _store(self, engines: Engines, image: np.ndarray) -> Any:
        """Put one chunk where every engine can read it; returns its reference, for the package."""
        return engines.put(image)


def in_thread(call: Callable[[], Any], name: str, limit_s: float, silent: str) -> Callable[[], Any]:
    """Run `call` in a daemon thread: one that never returns cannot be cancelled, and must not be joined at exit.

    Returns what waits for its outcome, `limit_s` at most, beyond which it raises DeadlineExceeded of the text `silent`.
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
            raise DeadlineExceeded(silent)
        return outcome.result()

    threading.Thread(target=run, name=name, daemon=True).start()
    return wait
