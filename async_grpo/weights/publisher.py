"""`Publisher`: the trainer's side of a weight sync, as a transaction with a proof.

    gather and pack (all ranks)  ->  deliver: every engine pauses, loads, resumes, answers  ->  prove  ->  commit

The engines pause for the loading alone, and no optimizer step is taken before the proof has held.
"""

import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import nn

from async_grpo.modeling import full_tensor, local_shard
from async_grpo.protocols import Engines, Receipt, TensorRecord, WeightPackage
from async_grpo.weights.config import WeightConfig
from async_grpo.weights.package import SELF_TEST, Differences, prove_landed, record, rms

NamedTensors = Callable[[Any], Iterator[tuple[str, torch.Tensor]]]
# The smallest tolerance, and the largest difference (root mean square over the canary) that engine and trainer may
# show before anything was changed: beyond it they compute different models. Between the two, what they do show.
MIN_TOLERANCE = 5e-5
MAX_ROUNDING = {torch.float32: 5e-5, torch.bfloat16: 0.3}
# Units in the last place of the wire dtype by which a healthy engine may miss the canary's movement in the self-test
ROUNDINGS = 4.5


@dataclass(frozen=True)
class Canary:
    """A fixed text whose log-probs tell two policies apart."""

    token_ids: np.ndarray  # (N,) int32
    logprobs: Callable[[Any, np.ndarray], np.ndarray]  # the trainer's, of a model; called on every rank

    @staticmethod
    def text(vocab_size: int, length: int, seed: int = 0) -> np.ndarray:
        """(N,) int32 random tokens: they touch many rows of the embedding, and every weight of the body."""
        return np.random.default_rng(seed).integers(0, vocab_size, length).astype(np.int32)


@dataclass
class RecordingSource:
    """What is sent, as full tensors in the wire dtype, each noted on its way out; also vLLM's `WeightSource`."""

    named_weights: NamedTensors
    wire_dtype: torch.dtype
    model: Any = None
    names: Collection[str] | None = None  # what to send; None: every tensor
    sent: dict[str, TensorRecord] = field(default_factory=dict)

    def metadata(self) -> list[Any]:
        """Names, dtypes and full shapes of what will be sent; gathers nothing."""
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, self.wire_dtype, tuple(tensor.shape)) for name, tensor in self._chosen()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.sent = {}
        for name, tensor in self._chosen():
            wired = full_tensor(tensor).to(self.wire_dtype).contiguous()
            self.sent[name] = record(wired)
            yield name, wired

    def _chosen(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((n, t) for n, t in self.named_weights(self.model) if self.names is None or n in self.names)


class Publisher:
    """`WeightPublisher` that sends packages: a self-test first if asked for, then the weights, each with its proof.

    Other transports change `_send`.

    Args:
        engines: on rank 0 alone.
        named_weights: model -> (name, tensor) in a fixed order; of a sharded model its shards (DTensors).
        wire_dtype: the engines' dtype: what is sent, and what the digests speak of.
    """

    chunk_bytes = 256 << 20

    def __init__(
        self,
        engines: Engines | None,
        named_weights: NamedTensors,
        canary: Canary,
        wire_dtype: torch.dtype,
        rank: int,
        config: WeightConfig,
    ) -> None:
        self._engines, self._canary, self._rank, self._config = engines, canary, rank, config
        self._source = RecordingSource(named_weights, wire_dtype)
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
        differences = self._transact(model, self._draft(model, version))
        self._remember(differences)
        error = max((float(np.abs(d).max()) for d in differences.values()), default=0.0)
        return {"weight_sync_s": time.monotonic() - started, "canary_error": error}

    def _run_self_test(self, model: nn.Module) -> None:
        """The weights as they are: what engine and trainer then differ by is their rounding, and the measure of every
        tolerance after it. Then one round per group of tensors in which only these are changed."""
        unchanged = self._draft(model, SELF_TEST)
        self._remember(self._transact(model, unchanged))
        weights, restored = dict(self._source.named_weights(model)), frozenset[str]()
        for group in self_test_groups(weights):
            with perturbed({name: w for name, w in weights.items() if name in group}):  # in one order
                changed = self._draft(model, SELF_TEST)
                moved = rms(changed.canary_logprobs - unchanged.canary_logprobs)
                # What an engine that lost nothing may differ by
                rounding = ROUNDINGS * torch.finfo(self._source.wire_dtype).eps * moved
                allowed = max(rounding, 1.5 * (self._rounding or 0.0), MIN_TOLERANCE)
                changed = replace(changed, tolerance=self._config.canary_tolerance or allowed)
                self._transact(model, changed, restored | group)
            restored = group

    def _draft(self, model: nn.Module, version: int) -> WeightPackage:
        """A package without its tensors: the canary under the model's weights, and how exactly it must be met."""
        expected = self._canary.logprobs(model, self._canary.token_ids)
        known, untested = self._rounding, MAX_ROUNDING[self._source.wire_dtype]
        measured = untested if known is None else max(3 * known, MIN_TOLERANCE)
        tolerance = self._config.canary_tolerance or measured
        return WeightPackage(version, {}, [], self._canary.token_ids, expected, tolerance)

    def _remember(self, differences: Differences) -> None:
        self._last = differences
        self._rounding = max([self._rounding or 0.0, *map(rms, differences.values())])

    def _transact(
        self, model: nn.Module, draft: WeightPackage, names: Collection[str] | None = None
    ) -> Differences:
        """Send all tensors of `model`, or those called `names`, with what `draft` says of them; prove, and commit.

        Returns:
            Engine minus trainer by worker; {} on ranks that send nothing.
        """
        self._source.model, self._source.names = model, names
        sent = self._send(draft)
        if sent is None or self._engines is None:
            return {}
        package, receipts = sent
        differences = prove_landed(package, receipts, {} if draft.version == SELF_TEST else self._last)
        self._engines.commit(package, list(receipts))
        return differences

    def _send(self, draft: WeightPackage) -> tuple[WeightPackage, Mapping[str, Receipt]] | None:
        """Bring the tensors to every engine, in chunks of safetensors images; None on ranks that only gather."""
        chunks: list[Any] = []
        pending: dict[str, torch.Tensor] = {}
        for name, tensor in self._source:
            if self._engines is None:
                continue
            pending[name] = tensor.cpu()
            if sum(t.nbytes for t in pending.values()) >= self.chunk_bytes:
                chunks.append(self._engines.put(np.frombuffer(save(pending), np.uint8)))
                pending = {}
        if self._engines is None:
            return None
        if pending:
            chunks.append(self._engines.put(np.frombuffer(save(pending), np.uint8)))
        package = replace(draft, manifest=self._source.sent, chunks=chunks)
        return package, self._engines.deliver(package)


def self_test_groups(names: Collection[str]) -> list[frozenset[str]]:
    """`names` by the first number in them (the layer), those without one together; every name in one group.

    Were every tensor changed at once, a key bias of one layer in 48 would move the canary less than bfloat16 rounds it;
    it makes 4 % and more of what all tensors of its own layer do, and rounding 1.6 % at most (docs/log.md, 2026-11-22).

    >>> [sorted(group) for group in self_test_groups(["embed", "layers.0.q", "layers.0.k", "layers.1.q", "head"])]
    [['embed', 'head'], ['layers.0.k', 'layers.0.q'], ['layers.1.q']]
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        layer = re.search(r"\.\d+\.", name)
        groups.setdefault(layer[0] if layer else "", []).append(name)
    return [frozenset(group) for group in groups.values()]


@contextmanager
@torch.no_grad()
def perturbed(weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Add noise to each of `weights` (shards included) while the block runs.

    An engine that loses one of the tensors then computes visibly other log-probs, whatever the learning rate would
    have hidden. The originals are kept aside: at start, before the optimizer's state exists, there is room for them.
    """
    shards = [local_shard(weight) for weight in weights.values()]
    originals = [shard.clone() for shard in shards]
    generator = torch.Generator().manual_seed(0)
    try:
        for shard in shards:
            noise = torch.randn(shard.shape, generator=generator) * noise_scale(shard)
            shard.add_(noise.to(shard.device, shard.dtype))
        yield
    finally:
        for shard, original in zip(shards, originals, strict=True):
            shard.copy_(original)


def noise_scale(shard: torch.Tensor) -> float:
    """Standard deviation of a tensor's noise: half its own root mean square, and enough for the sum to be seen.

    With the noise a vector is of size 1.5 (biases are zero in a fresh model), and a matrix so large that it makes
    1.25 of a state of size 1: in a narrow fresh model queries and keys are so small that every token is attended to
    alike, and nothing about them could be seen. A rank goes by the size of its shard.
    """
    size = float(shard.float().square().mean().sqrt()) if shard.numel() else 0.0
    wanted = 1.25 * shard.shape[-1] ** -0.5 if shard.ndim > 1 else 1.5
    return max(0.5 * size, max(0.0, wanted**2 - size**2) ** 0.5)
