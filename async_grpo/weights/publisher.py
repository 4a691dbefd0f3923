"""`Publisher`: the trainer's side of a weight sync, as a transaction with a proof.

    gather and pack (all ranks)  ->  deliver: every engine pauses, loads, answers, resumes  ->  prove  ->  commit

The engines pause for the loading alone: gathering comes before. vLLM's pause(keep) freezes its scheduler, so the
canary can only be answered right after the resume; no optimizer step is taken before the proof has held.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import nn

from async_grpo.modeling import full_tensor
from async_grpo.protocols import EngineLink, Receipt, TensorRecord, WeightPackage
from async_grpo.weights.manifest import record
from async_grpo.weights.package import SELF_TEST, Differences, prove_landed, rms
from async_grpo.weights.self_test import perturbed, self_test_groups, self_test_tolerance

NamedTensors = Callable[[Any], Iterator[tuple[str, torch.Tensor]]]
# The smallest tolerance, and the largest difference (root mean square over the canary) that engine and trainer may
# show before anything was changed: beyond it they compute different models. Between the two, what they do show.
MIN_TOLERANCE = 5e-5
MAX_ROUNDING = {"float32": 5e-5, "bfloat16": 0.3}


@dataclass(frozen=True)
class Canary:
    """A fixed text whose log-probs tell two policies apart."""

    token_ids: np.ndarray  # (N,) int32
    logprobs: Callable[[Any, np.ndarray], np.ndarray]  # the trainer's, of a model; called on every rank

    @staticmethod
    def text(vocab_size: int, length: int, seed: int = 0) -> np.ndarray:
        """(N,) int32 random tokens: they touch many rows of the embedding, and every weight of the body."""
        return np.random.default_rng(seed).integers(0, vocab_size, length).astype(np.int32)


class TransactionalPublisher(ABC):
    """What every transport has in common: a self-test first if asked for, then the weights, each with its proof.

    The self-test begins with the unchanged weights: what engine and trainer then differ by is their rounding, and the
    measure of every tolerance after it. At each later sync the *change* of that difference is judged.

    Args:
        named_weights: model -> (name, tensor) in a fixed order; of a sharded model its shards (DTensors).
        wire_dtype: the engines' dtype: what is sent, and what the digests speak of.
        tolerance: of every canary (root mean square), in place of the measured one.
    """

    def __init__(
        self,
        named_weights: NamedTensors,
        canary: Canary,
        wire_dtype: torch.dtype,
        tolerance: float | None = None,
    ) -> None:
        self._named_weights, self._canary, self._wire_dtype = named_weights, canary, wire_dtype
        self._tolerance = tolerance
        self._rounding: float | None = None  # the largest root mean square difference of proven weights
        self._last: Differences = {}  # engine minus trainer at the last sync, by worker

    def publish(self, model: nn.Module, version: int, *, self_test: bool = False) -> dict[str, float]:
        """Make `version` the policy that every engine generates with. Collective: call it on every rank.

        With `self_test`, weights that differ visibly in every tensor are sent and proven first.

        Raises:
            WeightsDidNotLand: on rank 0.
        """
        started = time.monotonic()
        if self_test:
            self._run_self_test(model)
        differences = self._send(model, self._draft(model, version))
        self._remember(differences)
        error = max((float(np.abs(d).max()) for d in differences.values()), default=0.0)
        return {"weight_sync_s": time.monotonic() - started, "canary_error": error}

    def _run_self_test(self, model: nn.Module) -> None:
        """The weights as they are, then one round per group of tensors in which only these are changed."""
        unchanged = self._draft(model, SELF_TEST)
        self._remember(self._send(model, unchanged))
        weights, restored = dict(self._named_weights(model)), frozenset[str]()
        for group in self_test_groups(weights):
            with perturbed({name: weights[name] for name in group}):
                changed = self._draft(model, SELF_TEST)
                moved = rms(changed.canary_logprobs - unchanged.canary_logprobs)
                allowed = self_test_tolerance(moved, self._wire_dtype, self._rounding or 0.0)
                allowed = self._tolerance or max(allowed, MIN_TOLERANCE)
                self._send(model, replace(changed, tolerance=allowed), restored | group)
            restored = group

    def _draft(self, model: nn.Module, version: int) -> WeightPackage:
        """A package without its tensors: the canary under the model's weights, and how exactly it must be met."""
        expected = self._canary.logprobs(model, self._canary.token_ids)
        if self._rounding is None:
            measured = MAX_ROUNDING[str(self._wire_dtype).removeprefix("torch.")]
        else:
            measured = max(3 * self._rounding, MIN_TOLERANCE)
        return WeightPackage(version, {}, [], self._canary.token_ids, expected, self._tolerance or measured)

    def _remember(self, differences: Differences) -> None:
        self._last = differences
        self._rounding = max([self._rounding or 0.0, *map(rms, differences.values())])

    def _prove(self, package: WeightPackage, receipts: Mapping[str, Receipt]) -> Differences:
        return prove_landed(package, receipts, {} if package.version == SELF_TEST else self._last)

    @abstractmethod
    def _send(
        self, model: nn.Module, draft: WeightPackage, names: Collection[str] | None = None
    ) -> Differences:
        """One transaction: all tensors of `model`, or those called `names`, with what `draft` says of them.

        Returns:
            Engine minus trainer by worker; {} on ranks that send nothing.
        """


class Publisher(TransactionalPublisher):
    """Sends the policy's weights to all engines in packages. Built on every rank; only rank 0 has a link."""

    def __init__(
        self,
        link: EngineLink | None,
        named_weights: NamedTensors,
        canary: Canary,
        wire_dtype: torch.dtype,
        *,
        tolerance: float | None = None,
        chunk_bytes: int = 256 << 20,
    ) -> None:
        super().__init__(named_weights, canary, wire_dtype, tolerance)
        self._link, self._chunk_bytes = link, chunk_bytes

    def _send(
        self, model: nn.Module, draft: WeightPackage, names: Collection[str] | None = None
    ) -> Differences:
        manifest, chunks = self._pack(model, names)
        if self._link is None:
            return {}
        package = replace(draft, manifest=manifest, chunks=chunks)
        receipts = self._link.deliver(package)
        differences = self._prove(package, receipts)
        self._link.commit(package, list(receipts))
        return differences

    def _pack(
        self, model: nn.Module, names: Collection[str] | None
    ) -> tuple[dict[str, TensorRecord], list[Any]]:
        """Gather every tensor in turn; rank 0 keeps them, in chunks of safetensors images."""
        manifest: dict[str, TensorRecord] = {}
        chunks: list[Any] = []
        pending: dict[str, torch.Tensor] = {}
        for name, tensor in self._named_weights(model):
            if names is not None and name not in names:
                continue
            whole = full_tensor(tensor)
            if self._link is None:
                continue  # taking part in the gathering was all
            pending[name] = whole.to("cpu", self._wire_dtype).contiguous()
            manifest[name] = record(pending[name])
            if sum(t.nbytes for t in pending.values()) >= self._chunk_bytes:
                chunks.append(self._store(pending))
                pending = {}
        if pending:
            chunks.append(self._store(pending))
        return manifest, chunks

    def _store(self, tensors: dict[str, torch.Tensor]) -> Any:
        assert self._link is not None
        return self._link.put(np.frombuffer(save(tensors), np.uint8))
