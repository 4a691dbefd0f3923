"""The actors: a few lines around each class with logic. All of them are asynchronous and cost no logical CPU.

rank 0 makes        RegistryActor (one per kind), VerifierPoolActor -> VerifierActor (one per adapter and more),
                    BatcherActor; they end with rank 0's job
a dispatcher makes  GenerationActor or LogprobActor; it ends with the dispatcher
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray

from async_grpo.cluster.channel import Channel, ChannelServer
from async_grpo.cluster.remote import RegisteredWorkers, RemoteGeneration, RemoteLogprobs, RemoteVerification
from async_grpo.experience.batcher import BatcherPlan, ExperienceBatcher
from async_grpo.experience.prompts import Question
from async_grpo.experience.registry import Lease, WorkerRegistry
from async_grpo.rewards.pool import VerifierPool
from async_grpo.rewards.process import AdapterProcess
from async_grpo.rewards.source import RewardSource
from async_grpo.types import AdapterResult, Settings, Verdict, WorkerInfo
from async_grpo.weights.manifest import record
from async_grpo.weights.package import WeightPackage


class RegistryActor(ChannelServer):
    """A `WorkerRegistry`, the settings of the run, and the weights that a late worker must load first."""

    def __init__(self, kind: str, settings: Settings, grace_s: float) -> None:
        self._registry, self._settings = WorkerRegistry(kind, grace_s), settings
        self._handles: dict[str, Any] = {}
        self._rewards: dict[str, str] = {}
        self._refusals: list[str] = []
        self._package: WeightPackage | None = None
        self._settled = asyncio.Event()  # cleared while weights are being sent
        self._settled.set()
        self._closed: asyncio.Future[str] = asyncio.get_event_loop().create_future()
        self.serve({"acquire": self._acquire, "release": self._release, "deregister": self.deregister})

    async def settings(self) -> Settings:
        return self._settings

    async def register(self, info: WorkerInfo, handle: Any, rewards: str) -> WeightPackage | None:
        """Let a worker in; returns the weights it must load before `activate`, if there are any yet."""
        await self._settled.wait()
        self._registry.register(info)
        self._handles[info.worker_id], self._rewards[info.worker_id] = handle, rewards
        if info.role == "reference":  # frozen: it never waits for weights
            self._registry.activate(info.worker_id)
        return self._package

    async def activate(self, worker_id: str, version: int) -> bool:
        """A late worker has loaded `version`; False if that is no longer the current one (it must load again)."""
        await self._settled.wait()
        current = self._package is not None and self._package.version == version
        if current:
            self._registry.activate(worker_id)
        return current

    async def package(self) -> WeightPackage | None:
        await self._settled.wait()
        return self._package

    async def refuse(self, reason: str) -> None:
        """A worker found that it cannot work for this run."""
        self._refusals.append(reason)

    async def deregister(self, worker_id: str, reason: str) -> None:
        self._handles.pop(worker_id, None)
        self._registry.deregister(worker_id, reason)

    async def roll_call(self) -> tuple[list[WorkerInfo], list[str], list[str]]:
        """(members, the rewards each names, refusals)."""
        members = self._registry.members()
        return members, [self._rewards[member.worker_id] for member in members], self._refusals

    async def begin_sync(self) -> dict[str, Any]:
        """Weights are about to be sent: nobody joins meanwhile. Returns worker id -> handle of those who get them."""
        self._settled.clear()
        frozen = {info.worker_id for info in self._registry.members() if info.role == "reference"}
        return {worker_id: handle for worker_id, handle in self._handles.items() if worker_id not in frozen}

    async def end_sync(self, package: WeightPackage, landed: Sequence[str]) -> None:
        """`landed` hold the weights of `package`: they may work."""
        self._package = package
        for worker_id in set(landed) & set(self._handles):
            self._registry.activate(worker_id)
        self._settled.set()

    async def closed(self) -> str:
        """Waits for the end of the run (the dispatchers' way of noticing it)."""
        return await asyncio.shield(self._closed)

    async def close(self, reason: str) -> None:
        if not self._closed.done():
            self._closed.set_result(reason)

    async def _acquire(self, sequences: int, tokens_each: int) -> tuple[Lease, Any]:
        lease = await self._registry.acquire(sequences, tokens_each)
        return lease, self._handles[lease.worker_id]

    async def _release(self, lease_id: int, sequences: int) -> None:
        self._registry.release(lease_id, sequences)


SLOTS_PER_ACTOR = 8  # adapter processes of one verifier actor: they share its messages, and a node


class VerifierActor(ChannelServer):
    """Some killable processes of one adapter, on any node; each scores one sample at a time."""

    def __init__(self, source: RewardSource, adapter: str) -> None:
        self._source, self._adapter = source, adapter
        self._slots: dict[int, AdapterProcess] = {}
        self.serve({"open": self._open, "score": self._score, "close": self._close})

    async def _open(self, slot: int) -> None:
        self._slots[slot] = AdapterProcess(self._source, self._adapter)
        await self._slots[slot].start()

    async def _score(self, slot: int, sample: dict[str, Any], timeout_s: float) -> AdapterResult:
        return await self._slots[slot].score(sample, timeout_s)

    async def _close(self, slot: int) -> None:
        await self._slots.pop(slot).close()


class VerifierPoolActor(ChannelServer):
    """A `VerifierPool` whose workers are the slots of `VerifierActor`s."""

    def __init__(self, source: RewardSource, adapters: Sequence[str], workers: int, timeout_s: float) -> None:
        self._source = source
        self._pool = VerifierPool(adapters, self._make_worker, workers=workers, timeout_s=timeout_s)
        self._hosts: dict[str, list[_VerifierHost]] = {adapter: [] for adapter in adapters}
        self.serve({"verify": self._verify, "take_stats": self._take_stats})

    async def start(self) -> None:
        await self._pool.start()

    async def _make_worker(self, adapter: str) -> "_VerifierSlot":
        hosts = self._hosts[adapter] = [host for host in self._hosts[adapter] if not host.channel.lost]
        host = next((host for host in hosts if len(host.slots) < SLOTS_PER_ACTOR), None)
        if host is None:
            host = _VerifierHost(self._source, adapter)
            hosts.append(host)
        slot = _VerifierSlot(host, min(set(range(SLOTS_PER_ACTOR)) - host.slots))
        await slot.open()
        return slot

    async def _verify(self, sample: dict[str, Any]) -> Verdict:
        return await self._pool.verify(sample)

    async def _take_stats(self) -> dict[str, Any]:
        return self._pool.take_stats()


class _VerifierHost:
    """A `VerifierActor` as the pool sees it."""

    def __init__(self, source: RewardSource, adapter: str) -> None:
        self.actor = light(VerifierActor, scheduling_strategy="SPREAD").remote(source, adapter)
        self.channel = Channel(self.actor, f"verifier of {adapter}")
        self.slots: set[int] = set()


class _VerifierSlot:
    """`VerifierWorker`: one process of a `VerifierActor`."""

    def __init__(self, host: _VerifierHost, slot: int) -> None:
        self._host, self._slot = host, slot
        host.slots.add(slot)

    async def open(self) -> None:
        try:
            await self._host.channel.call("open", self._slot)
        except BaseException:
            self._host.slots.discard(self._slot)
            raise

    async def score(self, sample: dict[str, Any], timeout_s: float) -> AdapterResult:
        return await self._host.channel.call("score", self._slot, sample, timeout_s)

    async def close(self) -> None:
        """End the process; with the last one its actor goes, too."""
        self._host.slots.discard(self._slot)
        if self._host.slots and not self._host.channel.lost:
            await self._host.channel.call("close", self._slot)
        else:
            self._host.channel.close()
            ray.kill(self._host.actor)


class BatcherActor:
    """An `ExperienceBatcher` over remote workers."""

    def __init__(
        self,
        plan: BatcherPlan,
        questions: list[Question],
        registries: dict[str, Any],
        pool: Any,
        roles: Sequence[str],
    ) -> None:
        generation = RemoteGeneration(RegisteredWorkers(registries["generation"], "generation"))
        logprob_workers = {
            role: RemoteLogprobs(RegisteredWorkers(registries["logprob"], f"{role} logprob"))
            for role in roles
        }
        self._batcher = ExperienceBatcher(
            plan,
            questions,
            generation,
            RemoteVerification(pool),
            reference=logprob_workers.get("reference"),
            proximal=logprob_workers.get("proximal"),
        )

    async def start(self) -> None:
        await self._batcher.start()

    async def next_message(self, rank: int) -> Any:
        return await self._batcher.next_message(rank)

    async def weights_live(self, version: int) -> None:
        await self._batcher.weights_live(version)

    async def evaluate(self, questions: list[Question], count: int) -> dict[str, Any]:
        return await self._batcher.evaluate(questions, count)

    async def close(self) -> None:
        await self._batcher.close()


class WorkerActor(ChannelServer):
    """What generation and logprob workers have in common: registering, and loading weights when late."""

    async def enlist(self, registry: Any, info: WorkerInfo, rewards: str) -> None:
        """Register; bring the weights up to date first if the run is under way."""
        own_handle = ray.get_runtime_context().current_actor
        package = await registry.register.remote(info, own_handle, rewards)
        while package is not None and info.role != "reference":
            await self.update_weights(package)
            if await registry.activate.remote(info.worker_id, package.version):
                break
            package = await registry.package.remote()

    async def update_weights(self, package: WeightPackage) -> Any:
        raise NotImplementedError  # pragma: no cover - each kind of worker has its own


class GenerationActor(WorkerActor):
    """A `GenerationWorker`. vLLM is imported here and nowhere else in the cluster room."""

    async def start(self, options: Any, settings: Settings) -> int:
        """Load the model; returns the tokens that its KV cache holds."""
        from async_grpo.generation.worker import GenerationWorker

        self._worker = GenerationWorker.start(options, settings)
        self.serve({"complete": self._worker.complete, "take_stats": self._take_stats})
        return self._worker.kv_cache_tokens

    async def update_weights(self, package: WeightPackage) -> Any:
        """Load a package and answer the canary under the new weights."""
        chunks = await asyncio.gather(*package.chunks)
        manifest = await self._worker.update_weights(package.version, [memoryview(chunk) for chunk in chunks])
        return manifest, await self._worker.prompt_logprobs(package.canary_ids)

    async def transfer(self, method: str, *args: Any) -> Any:
        """One call of vLLM's weight-transfer interface, driven by the trainer's own engine (NCCL)."""
        return await getattr(self._worker, method)(*args)

    async def until_failure(self) -> str:
        """Waits for the engine to die; returns why."""
        return await self._worker.until_failure()

    async def close(self) -> None:
        self._worker.close()

    async def _take_stats(self) -> dict[str, Any]:
        return self._worker.take_stats()


class LogprobActor(WorkerActor):
    """A `LogprobServer`."""

    async def start(self, model_path: str, settings: Settings, max_tokens: int, max_wait_s: float) -> int:
        from async_grpo.logprob.worker import LogprobServer
        from async_grpo.modeling.load import load_causal_lm
        from async_grpo.modeling.policy import PolicyModel

        policy = PolicyModel(load_causal_lm(model_path, settings.dtype)).to(_device())
        self._server = LogprobServer(
            policy, max_tokens=max_tokens, max_wait_s=max_wait_s, temperature=settings.temperature
        )
        self.serve({"logprobs": self._logprobs})
        return max_tokens

    async def update_weights(self, package: WeightPackage) -> Any:
        """Load a package (proximal workers only) and answer the canary under the new weights."""
        from safetensors.torch import load

        chunks = await asyncio.gather(*package.chunks)
        tensors = {name: tensor for chunk in chunks for name, tensor in load(chunk.tobytes()).items()}
        await self._server.load_weights(tensors.items())
        manifest = {name: record(tensor) for name, tensor in tensors.items()}
        return manifest, await self._server.prompt_logprobs(package.canary_ids)

    async def until_failure(self) -> str:
        return await asyncio.get_running_loop().create_future()  # its failures are answers to requests

    async def close(self) -> None:
        await self._server.close()

    async def _logprobs(self, sequences: list[np.ndarray], prompt_lengths: list[int]) -> list[np.ndarray]:
        return await self._server.logprobs(sequences, prompt_lengths)


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def light(actor_class: type, **options: Any) -> Any:
    """`actor_class` ready for `.remote(...)`, claiming no CPU: a small machine must not starve its own control plane."""
    return ray.remote(actor_class).options(
        **{"num_cpus": 0, "max_restarts": 0, "max_concurrency": 10_000, **options}
    )
