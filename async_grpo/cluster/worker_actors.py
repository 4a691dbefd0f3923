"""The inference workers as actors: what they share is how they join a run and how weights reach them."""

import asyncio
from typing import Any

import numpy as np
import ray

from async_grpo.cluster.channel import ChannelServer
from async_grpo.errors import ConfigurationError, WeightsDidNotLand
from async_grpo.generation.config import EngineConfig
from async_grpo.generation.engines import engine_class
from async_grpo.protocols import Manifest, Receipt, WeightPackage
from async_grpo.types import SharedRunSettings, WorkerInfo
from async_grpo.weights.package import prove_landed, unpack


class WorkerActor(ChannelServer):
    """A worker that joins a run and follows its weights. One package is loaded at a time, never an older one."""

    def __init__(self) -> None:
        self._loading = asyncio.Lock()
        self._version: int | None = None

    async def enlist(self, controller: Any, info: WorkerInfo, rewards: str) -> None:
        """Register. When the run is under way, load and prove first what the others did: self-test and weights."""
        packages = await controller.register.remote(info, ray.get_runtime_context().current_actor, rewards)
        while packages:
            for package in packages:
                prove_landed(package, {info.worker_id: await self.update_weights(package)})
            packages = await controller.activate.remote(info, packages[-1].version)

    async def update_weights(self, package: WeightPackage) -> Receipt:
        """Load a package and answer its canary under the new weights.

        Raises:
            WeightsDidNotLand: newer weights are loaded already.
        """
        async with self._loading:
            if self._version is not None and 0 <= package.version < self._version:
                raise WeightsDidNotLand(f"version {package.version} came after {self._version}")
            manifest = await self.load([await chunk for chunk in package.chunks], package.version)
            self._version = package.version
            return manifest, await self.canary(package.canary_ids)

    async def load(self, chunks: list[np.ndarray], version: int) -> Manifest:
        raise NotImplementedError

    async def canary(self, token_ids: np.ndarray) -> np.ndarray:
        raise NotImplementedError


class GenerationActor(WorkerActor):
    """An `Engine` of whichever class the run names."""

    async def start(self, config: EngineConfig, settings: SharedRunSettings) -> int:
        """Load the model; returns the tokens that its KV cache holds."""
        self._engine = engine_class(config.engine).start(config, settings)
        self.serve({"complete": self._engine.complete, "progress": self._progress})
        return self._engine.kv_cache_tokens

    async def load(self, chunks: list[np.ndarray], version: int) -> Manifest:
        return await self._engine.update(version, [chunk.data for chunk in chunks])

    async def canary(self, token_ids: np.ndarray) -> np.ndarray:
        return await self._engine.canary(token_ids)

    async def transfer(self, method: str, *args: Any) -> Any:
        """One step of an update that the trainer's own engine drives (NCCL).

        Raises:
            ConfigurationError: the engine has no such steps.
        """
        steps = getattr(self._engine, "transfer", None)
        if steps is None:
            raise ConfigurationError(
                f"{type(self._engine).__name__} can only be given weights in packages: choose another "
                "--weight-transport, or an --engine with `transfer` steps as GenerationWorker has them"
            )
        return await getattr(steps, method)(*args)

    async def until_failure(self) -> str:
        """Waits for the engine to die; returns why."""
        return await self._engine.until_failure()

    async def close(self) -> None:
        self._engine.close()

    async def _progress(self) -> dict[str, Any]:
        return self._engine.progress()


class LogprobActor(WorkerActor):
    """A `LogprobWorker`."""

    async def start(
        self, model_path: str, settings: SharedRunSettings, max_tokens: int, max_wait_s: float
    ) -> int:
        """Load the model; returns the token budget of a forward."""
        from async_grpo.logprob.logprob_worker import LogprobWorker

        options = {"max_tokens": max_tokens, "max_wait_s": max_wait_s, "temperature": settings.temperature}
        self._server = LogprobWorker.from_folder(model_path, dtype=settings.dtype, **options)
        self.serve({"logprobs": self._server.logprobs})
        return max_tokens

    async def load(self, chunks: list[np.ndarray], version: int) -> Manifest:
        """Proximal workers only. Unpacking and digests run in a thread: the actor must go on answering."""
        tensors, manifest = await asyncio.to_thread(unpack, chunks)
        await self._server.load_weights(tensors.items())
        return manifest

    async def canary(self, token_ids: np.ndarray) -> np.ndarray:
        return await self._server.prompt_logprobs(token_ids)

    async def until_failure(self) -> str:
        return await asyncio.get_running_loop().create_future()  # its failures are answers to requests

    async def close(self) -> None:
        await self._server.close()
