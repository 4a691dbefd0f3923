"""`Publisher`: the trainer's side of a weight sync, as a transaction with a proof.

    gather and pack (all ranks)  ->  deliver: every engine pauses, loads, answers, resumes  ->  prove  ->  commit

The engines pause for the loading alone: gathering comes before. vLLM's pause(keep) freezes its scheduler, so the
canary can only be answered right after the resume; no optimizer step is taken before the proof has held.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import nn

from async_grpo.protocols import EngineLink, TensorRecord, WeightPackage
from async_grpo.weights.manifest import record
from async_grpo.weights.package import SELF_TEST, prove_landed
from async_grpo.weights.perturbation import perturbed

NamedFullTensors = Callable[[nn.Module], Iterator[tuple[str, torch.Tensor]]]
# Root mean square over the canary's log-probs, engine against trainer. float32: rounding is below 1e-5, the weakest
# tensor of the self-test at 1e-3. bfloat16 rounds so coarsely that only the larger tensors stand out (docs/log.md).
TOLERANCES = {"float32": 5e-5, "bfloat16": 0.3}


@dataclass(frozen=True)
class Canary:
    """A fixed text whose log-probs tell two policies apart."""

    token_ids: np.ndarray  # (N,) int32
    logprobs: Callable[[nn.Module, np.ndarray], np.ndarray]  # the trainer's; called on every rank

    @staticmethod
    def text(vocab_size: int, length: int, seed: int = 0) -> np.ndarray:
        """(N,) int32 random tokens: they touch many rows of the embedding, and every weight of the body."""
        return np.random.default_rng(seed).integers(0, vocab_size, length).astype(np.int32)


class TransactionalPublisher(ABC):
    """What every transport has in common: a self-test first if asked for, then the weights, each with its proof."""

    def __init__(
        self,
        named_full_tensors: NamedFullTensors,
        canary: Canary,
        wire_dtype: torch.dtype,
        tolerance: float | None = None,
    ) -> None:
        self._named_full_tensors, self._canary, self._wire_dtype = named_full_tensors, canary, wire_dtype
        self._tolerance = tolerance or TOLERANCES[str(wire_dtype).removeprefix("torch.")]

    def publish(self, model: nn.Module, version: int, *, self_test: bool = False) -> dict[str, float]:
        """Make `version` the policy that every engine generates with. Collective: call it on every rank.

        With `self_test`, weights that differ visibly in every tensor are sent and proven first.

        Raises:
            WeightsDidNotLand: on rank 0.
        """
        started = time.monotonic()
        if self_test:
            with perturbed(model):
                self._send(model, SELF_TEST)
        error = self._send(model, version)
        return {"weight_sync_s": time.monotonic() - started, "canary_error": error}

    @abstractmethod
    def _send(self, model: nn.Module, version: int) -> float:
        """One transaction; returns the canary's error (0 on ranks that send nothing)."""


class Publisher(TransactionalPublisher):
    """Sends the policy's weights to all engines in packages. Built on every rank; only rank 0 has a link.

    Args:
        named_full_tensors: model -> (name, full tensor) in a fixed order; a collective over the ranks.
        wire_dtype: the engines' dtype: what is sent, and what the digests speak of.
        tolerance: of the canary; default by dtype.
    """

    def __init__(
        self,
        link: EngineLink | None,
        named_full_tensors: NamedFullTensors,
        canary: Canary,
        wire_dtype: torch.dtype,
        *,
        tolerance: float | None = None,
        chunk_bytes: int = 256 << 20,
    ) -> None:
        super().__init__(named_full_tensors, canary, wire_dtype, tolerance)
        self._link, self._chunk_bytes = link, chunk_bytes

    def _send(self, model: nn.Module, version: int) -> float:
        expected = self._canary.logprobs(model, self._canary.token_ids)
        manifest, chunks = self._pack(model)
        if self._link is None:
            return 0.0
        package = WeightPackage(version, manifest, chunks, self._canary.token_ids, expected, self._tolerance)
        receipts = self._link.deliver(package)
        error = prove_landed(package, receipts)
        self._link.commit(package, list(receipts))
        return error

    def _pack(self, model: nn.Module) -> tuple[dict[str, TensorRecord], list[Any]]:
        """Gather every tensor in turn; rank 0 keeps them, in chunks of safetensors images."""
        manifest: dict[str, TensorRecord] = {}
        chunks: list[Any] = []
        pending: dict[str, torch.Tensor] = {}
        for name, tensor in self._named_full_tensors(model):
            if self._link is None:
                continue  # taking part in the gathering was all
            pending[name] = tensor.detach().to("cpu", self._wire_dtype).contiguous()
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
