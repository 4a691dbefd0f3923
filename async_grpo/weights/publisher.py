"""`Publisher`: the trainer's side of a weight sync. Engines generate with new weights only after a proof.

    gather and pack (all ranks)  ->  deliver: every engine pauses, loads, resumes, answers  ->  prove  ->  commit

`publish` returns once the weights are packed. If a self-test was requested, it is completed before. A thread then does
the other steps, while the ranks may accumulate gradients for the next step. The engines pause only while they load. No
optimizer step is taken before the weights are proven.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from async_grpo.modeling import MergedWeight, full_tensor
from async_grpo.protocols import Engines, Proof, Receipt, TensorRecord, WeightPackage
from async_grpo.weights.canary import Canary
from async_grpo.weights.config import WeightConfig
from async_grpo.weights.in_thread import sync_in_thread
from async_grpo.weights.judge_receipts import Differences, judge_receipts
from async_grpo.weights.package import (
    SELF_TEST,
    canary_differences,
    canary_miss,
    pack_weights,
    record,
    refuse_no_tensors,
    split_into_chunks,
)
from async_grpo.weights.packed_round import Delivery, PackedRound, selected
from async_grpo.weights.self_test import (
    MIN_TOLERANCE,
    ORIGINALS_BYTES,
    SENSITIVITIES,
    UNCHANGED_ALLOWED,
    groups_within,
    measure_sensitivity,
    perturbed,
    round_tolerance,
    rounds,
)
from async_grpo.weights.sent_chunks import SentChunks
from async_grpo.weights.traffic import Traffic
from async_grpo.weights.unread_tensors import UnreadTensors


@dataclass
class Publisher:
    """A `WeightPublisher` that sends the weights in packages, and proves that engines use them.

    On request, it sends a self-test before the weights. Other transports override `_store` or `_send`.
    """

    engines: Engines | None  # None except on rank 0
    # Yields a model's (name, tensor) pairs in a fixed order. The tensors of a sharded model are DTensors
    named_weights: Callable[[Any], Iterator[tuple[str, torch.Tensor]]]
    canary: Canary
    wire_dtype: torch.dtype  # dtype of the engines, to which tensors are cast before they are sent and hashed
    rank: int
    config: WeightConfig

    # Yields the (name, tensor) pairs that change from step to step, such as those of an adapter. Without a self-test,
    # only these are sent. None if all weights change
    named_updates: Callable[[Any], Iterator[tuple[str, torch.Tensor]]] | None = None
    # Whether `_send` only packs the weights, and its result sends them. If so, a package without tensors can be delivered,
    # to ask for log-probs
    packs_before_sending = True
    chunk_bytes = 256 << 20
    originals_bytes = ORIGINALS_BYTES

    def __post_init__(self) -> None:
        self._has_proof = False  # whether a sync was proven; on other ranks than 0, whether one has ended
        self._rounding = 0.0  # largest `canary_miss` of all weights that passed the proof
        # Sensitivity of the trainer to rounding (`measure_sensitivity`) at the first sync; 0 if it was not measured
        self._unchanged_sensitivity = 0.0
        # Log-probs (N,) and sensitivity of the first weights, from `prepare`; None before `prepare` and after their use
        self._prepared: tuple[np.ndarray, float] | None = None
        # The round of the self-test that `prepare` has packed; None if it packed none, and after its use
        self._prepared_round: PackedRound | None = None
        self._unread = UnreadTensors()  # complete only on rank 0
        self._last_differences: Differences = {}  # canary differences at each worker's last proof
        self._traffic = Traffic()
        deltas = self.config.weight_sync_deltas
        self._sent_chunks = SentChunks(deltas, self._traffic, only_adapters=self.named_updates is not None)
        self._for_late = False  # whether the current sync serves only workers that joined late
        # Waits for the end of the last sync. `publish` calls it first, so that two syncs never overlap. Before the
        # first sync it is `dict`, which returns {}
        self._proof: Proof = dict

    def prepare(self, model: nn.Module) -> None:
        """Compute what the first self-test needs, while engines load. A collective.

        This is: the canary log-probs of the first weights, their sensitivity, and, if the self-test will have a single
        round of changed weights, this round. The weights must not change between this call and the first sync.
        """
        weights = dict(self.named_weights(model))
        expected = self.canary.expected(model)
        self._prepared = (expected, self._sensitivity(model, expected, weights))
        # In bfloat16, the rounds depend on what the engines can read back
        is_float32 = self.wire_dtype is torch.float32
        has_single_round = is_float32 and len(groups_within(weights, self.originals_bytes)) == 1
        if has_single_round and self.packs_before_sending:
            self._prepared_round = self._pack_round(model, weights, weights, weights, dict)

    def publish(self, model: nn.Module, version: int, *, self_test: bool = False) -> Proof:
        """Make `version` the policy with which all engines generate. A collective: every rank must call it.

        When this method returns, the weights are packed, and the rest of the sync runs in a thread. Workers that fail
        are fenced: the run continues without them.

        Args:
            model: The policy.
            version: The policy version.
            self_test: Before the weights, send and prove weights in which every tensor is visibly changed. After the
                first proof, a sync with a self-test serves only workers that joined late.

        Returns:
            A function that waits for the proof. It returns the metrics `canary_error`, `weight_sync_s` (the time since
            the call of `publish`), and those of `Traffic`.

        Raises:
            WeightsDidNotLand: All workers that received weights to generate with failed the proof. Raised on rank 0,
                either here or by the returned function.
        """
        self._proof()
        started = time.monotonic()
        self._for_late = self_test and self._has_proof
        wait_for_self_test: Proof = self._run_self_test(model) if self_test else dict
        # The draft is the package without its tensors. Its tolerance needs the result of the first round of the self-test,
        # which `_run_self_test` has awaited. This rank computes the draft while the engines load the last round's weights
        draft = self._draft(model, version)
        self._prepared = None
        wait_for_self_test()
        named_weights = self.named_weights
        if self.named_updates is not None and not self_test:
            named_weights = self.named_updates
        prove = self._transact(draft, dict(named_weights(model)))

        def finish() -> dict[str, float]:
            differences = prove()
            self._remember(differences)
            canary_errors = [float(np.abs(difference).max()) for difference in differences.values()]
            return {
                "weight_sync_s": time.monotonic() - started,
                "canary_error": max(canary_errors, default=0.0),
                **self._traffic.take_metrics(),
            }

        self._proof = sync_in_thread(finish, version, self.config.sync_timeout_s)
        return self._proof

    def _run_self_test(self, model: nn.Module) -> Callable[[], Any]:
        """Send the weights in rounds, first unchanged and then changed, and prove that the engines use every tensor.

        1. The first round sends the weights unchanged. The difference between engine and trainer in this round is the
           basis of all later tolerances. In float32, nothing is sent if the engines already compute with the trainer's
           weights, because they loaded the same folder.
        2. In bfloat16, each further round changes one layer with a tensor that some engine cannot read back. Only the
           canary can show whether the engine uses this tensor. If many layers changed at once, their rounding would have
           a larger effect on the canary than a lost tensor. In float32 these rounds are not needed, because the effect
           of a lost tensor is more than a thousand times that of rounding.
        3. The last round changes all tensors. The original values are kept in memory during the round. If they do not
           fit into `originals_bytes`, there are several such rounds, each of which changes some of the layers.

        In every round, the receipts of the engines name the tensors that were received but are not in use. While the
        engines load the weights of a round, this rank computes what the next round needs.

        Returns:
            A function that waits for the proof of the last round.
        """
        weights = dict(self.named_weights(model))
        unchanged = self._draft(model, SELF_TEST)
        wait_for_proof: Callable[[], Any] = dict
        if not self._engines_have_weights(unchanged):
            prove_unchanged = self._transact(unchanged, weights)
            wait_for_proof = self._finish_in_thread(lambda: self._remember(prove_unchanged()))
        if self.wire_dtype is not torch.float32:
            # Wait for the receipts. They say which tensors the engines can read back, and the rounds depend on this
            wait_for_proof()
        changed_before = frozenset[str]()  # names of the tensors that the round before has changed
        unread = self._unread.names
        for names in rounds(
            weights, self.originals_bytes, self.wire_dtype, unread, self.canary.max_over_ranks
        ):
            # Each round also sends the original values of the tensors that the round before has changed
            names_to_send = changed_before | names
            packed = self._prepared_round or self._pack_round(
                model, weights, names, names_to_send, wait_for_proof
            )
            self._prepared_round = None
            wait_for_proof()
            draft = replace(packed.draft, tolerance=self._tolerance_of(packed))
            wait_for_proof = self._finish_in_thread(partial(self._complete, draft, packed.deliver))
            changed_before = names
        return wait_for_proof

    def _pack_round(
        self,
        model: nn.Module,
        weights: Mapping[str, torch.Tensor],
        names_to_change: Collection[str],
        names_to_send: Collection[str],
        wait_for_last_round: Callable[[], Any],
    ) -> PackedRound:
        """Change some weights, pack what a round of the self-test sends, and restore the weights. A collective.

        It waits for the last round before it packs, because some transports send what they pack at once.
        """
        # Keep the order of `weights`, not of the names: the noise depends on it, and must be equal on every rank
        with perturbed(selected(weights, names_to_change)):
            expected = self.canary.expected(model)
            sensitivity = self._sensitivity(model, expected, weights)
            wait_for_last_round()
            draft = self._package(SELF_TEST, expected, tolerance=0.0)  # the tolerance is not known yet
            weights_to_send = selected(weights, names_to_send)
            refuse_no_tensors(weights_to_send)
            # Once this returns, the weights are copied or sent, so the end of the block may restore the originals
            return PackedRound(draft, sensitivity, self._send(draft, weights_to_send))

    def _tolerance_of(self, packed: PackedRound) -> float:
        """Return the tolerance of a round of the self-test. It depends on the result of the first round."""
        if self.config.canary_tolerance is not None:
            return self.config.canary_tolerance
        return round_tolerance(
            sensitivity=packed.sensitivity,
            unchanged_sensitivity=self._unchanged_sensitivity,
            unchanged_difference=self._rounding,
            wire_dtype=self.wire_dtype,
        )

    def _finish_in_thread(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """Do the rest of a round of the self-test in a thread, and return a function that waits for its result."""
        return sync_in_thread(call, SELF_TEST, self.config.sync_timeout_s)

    def _engines_have_weights(self, unchanged: WeightPackage) -> bool:
        """Return whether all engines already compute with the trainer's weights. A collective.

        A package without tensors asks for the engines' log-probs of the canary texts. Late workers have older weights, so
        they are not asked. In bfloat16 or with `--canary-tolerance`, the answer is always False, so that the unchanged
        weights are sent first: the read-back must find what the canary may miss there. The read-back ignores, as
        unreadable, a module that differs after its first weights (`ReadBack`). If these were changed weights, a module that
        loses them would be ignored. Unchanged ones are already in the engine, so it does not differ, and is checked later.
        """
        # Engines of a run with an adapter compute nothing before the first sync has brought it
        cannot_ask = self.named_updates is not None or self._for_late or not self.packs_before_sending
        if cannot_ask or self.config.canary_tolerance is not None or self.wire_dtype is not torch.float32:
            return False
        ask = self._transact(unchanged, {}, with_proof=False)
        differences = self._finish_in_thread(ask)()
        is_equal = [canary_miss(difference) <= unchanged.tolerance for difference in differences.values()]
        # Only rank 0 knows the differences, and tells the others its answer
        (have_weights,) = self.canary.max_over_ranks([float(bool(is_equal) and all(is_equal))])
        if have_weights:
            self._remember(differences)
        return bool(have_weights)

    def _draft(self, model: nn.Module, version: int) -> WeightPackage:
        """Return a package, still without tensors, with the trainer's canary log-probs and their tolerance."""
        if self._prepared is None and not self._has_proof:
            self.prepare(model)
        expected, sensitivity = self._prepared or (self.canary.expected(model), 0.0)
        if self.config.canary_tolerance is not None:
            tolerance = self.config.canary_tolerance
        elif not self._has_proof:
            self._unchanged_sensitivity = sensitivity
            # SENSITIVITIES is the allowed multiple of the trainer's sensitivity
            tolerance = max(SENSITIVITIES[self.wire_dtype] * sensitivity, UNCHANGED_ALLOWED[self.wire_dtype])
        else:
            # Proven weights have differed by `_rounding`. It varies from sync to sync, hence the factor of 3
            tolerance = max(3 * self._rounding, MIN_TOLERANCE)
            if any(isinstance(weight, MergedWeight) for _, weight in self.named_weights(model)):
                # A new adapter is zero, so the first sync has sent exactly the base model. Later syncs send the sum of
                # weights and adapter, rounded to the engine's dtype. The trainer adds the adapter's output instead,
                # without this rounding
                tolerance = max(tolerance, SENSITIVITIES[self.wire_dtype] * self._unchanged_sensitivity)
        return self._package(version, expected, tolerance)

    def _package(self, version: int, expected: np.ndarray, tolerance: float) -> WeightPackage:
        """Return a package whose tensors are added later."""
        return WeightPackage(
            version=version,
            manifest={},
            chunks=[],
            canary_texts=self.canary.texts,
            canary_logprobs=expected,
            tolerance=tolerance,
            for_late=self._for_late,
        )

    def _sensitivity(
        self, model: nn.Module, expected: np.ndarray, weights: Mapping[str, torch.Tensor]
    ) -> float:
        """Return how much rounding changes the canary's log-probs under the model's current weights. A collective.

        With `--canary-tolerance` it is not needed, so this returns 0.
        """
        if self.config.canary_tolerance is not None:
            return 0.0
        return measure_sensitivity(lambda: self.canary.expected(model), expected, weights, self.wire_dtype)

    def _remember(self, differences: Differences) -> None:
        """Keep the differences of weights that passed the proof, for the comparison with later syncs."""
        self._last_differences = {**self._last_differences, **differences}
        self._rounding = max([self._rounding, *map(canary_miss, differences.values())])
        self._has_proof = True

    def _transact(
        self, draft: WeightPackage, weights: Mapping[str, torch.Tensor], *, with_proof: bool = True
    ) -> Callable[[], Differences]:
        """Begin a sync: gather the weights on all ranks, and return the function that completes it.

        Args:
            draft: The package of the weights, without its tensors.
            weights: Tensors by name.
            with_proof: Whether to prove that the weights landed, and to fence the workers that fail the proof.

        Returns:
            A function that delivers the weights, proves that they landed, and commits. It returns each worker's canary
            log-probs minus the trainer's, or {} on ranks that do not talk to the engines.
        """
        if with_proof:
            refuse_no_tensors(weights)
        return partial(self._complete, draft, self._send(draft, weights), with_proof=with_proof)

    def _complete(
        self, draft: WeightPackage, deliver: Delivery | None, *, with_proof: bool = True
    ) -> Differences:
        """Deliver packed weights, prove that they landed, and commit; see `_transact` and `judge_receipts`."""
        engines = self.engines
        if deliver is None or engines is None:
            return {}
        try:
            package, receipts = deliver(draft)
            if with_proof:
                # At first, an engine may round more than expected
                may_round_more = not self._has_proof and self.config.canary_tolerance is None
                wire_dtype = self.wire_dtype if may_round_more else None
                differences = judge_receipts(
                    engines, package, receipts, self._last_differences, self._unread, wire_dtype
                )
            else:
                differences = canary_differences(package, receipts)
            engines.commit(package, list(differences))
        except BaseException as error:
            # If `abort` fails as well, its error must not replace `error`, which is raised below
            with suppress(Exception):
                engines.abort(error)
            raise
        return differences

    def _send(self, draft: WeightPackage, weights: Mapping[str, torch.Tensor]) -> Delivery | None:
        """Pack the tensors into chunks.

        Returns:
            A function that delivers the chunks to all engines, or None on ranks that only take part in gathering.
        """
        engines = self.engines
        if engines is None:
            for weight in weights.values():
                full_tensor(weight, self.wire_dtype)
            return None
        chunks = split_into_chunks(weights, self.chunk_bytes, self.wire_dtype)
        packed = [pack_weights(chunk, self.wire_dtype) for chunk in chunks]

        def deliver(draft: WeightPackage) -> tuple[WeightPackage, Mapping[str, Receipt]]:
            manifest: dict[str, TensorRecord] = {}
            references = []
            digests = []
            while packed:
                # Remove the chunk from the list, so that its memory is released once it is stored
                image, tensors = packed.pop(0)
                records = {name: record(tensor) for name, tensor in tensors.items()}
                manifest |= records
                del tensors
                image, digest = self._sent_chunks.encode(draft, image, records)
                digests.append(digest)
                references.append(self._store(engines, image))
                del image
            package = replace(draft, manifest=manifest, chunks=references, chunk_digests=digests)
            return package, engines.deliver(package)

        return deliver

    def _store(self, engines: Engines, image: np.ndarray) -> Any:
        """Store one chunk where all engines can read it, and return a reference to it for the package."""
        return engines.put(image)
