"""`Engines` of real engines in this process, some of which join late."""

from typing import Any

import numpy as np
import torch
from engine_thread import CANARY, EngineThread

from async_grpo.messages import LoraSettings
from async_grpo.modeling.load import load_causal_lm
from async_grpo.modeling.lora import add_lora, fill_lora
from async_grpo.modeling.policy import PolicyModel, named_adapters, named_weights, named_weights_and_adapters
from async_grpo.protocols import Manifest, Receipt, WeightPackage, answer_canary
from async_grpo.training.sharding import canary_logprobs
from async_grpo.weights.canary import Canary
from async_grpo.weights.config import WeightConfig
from async_grpo.weights.package import SELF_TEST
from async_grpo.weights.publisher import Publisher


class RealFleet:
    """The engines of a run by name, as `WeightSyncLink` and the controller treat them."""

    def __init__(self, **engines: EngineThread) -> None:
        self.engines = engines
        self.late: set[str] = set()  # engines that wait for the sync of those that joined late
        self.fenced: dict[str, str] = {}  # name -> reason
        self.packages: list[WeightPackage] = []

    def join(self, name: str, engine: EngineThread) -> None:
        """Let an engine join during the run."""
        self.engines[name] = engine
        self.late.add(name)

    def put(self, chunk: np.ndarray) -> np.ndarray:
        return chunk

    def deliver(self, package: WeightPackage) -> dict[str, Receipt]:
        self.packages.append(package)
        receipts = {}
        for name, engine in list(self.engines.items()):
            if (name in self.late) != package.for_late:
                continue
            chunks = [memoryview(chunk) for chunk in package.chunks]
            manifest: Manifest = {}
            try:
                # A package without chunks asks for the log-probs alone, as in `WorkerActor.update_weights`
                if chunks:
                    manifest = engine.run(engine.worker.update(package.version, chunks))
            except Exception as error:
                self.fence(name, error)
                continue
            receipts[name] = manifest, engine.run(answer_canary(engine.worker, package.canary_texts))
        return receipts

    def fence(self, worker_id: str, error: Exception) -> None:
        self.fenced[worker_id] = str(error)
        del self.engines[worker_id]
        self.late.discard(worker_id)

    def commit(self, package: WeightPackage, landed: list[str]) -> None:
        if package.version != SELF_TEST:
            self.late -= set(landed)

    def abort(self, error: BaseException) -> None:
        pass


class LoraTrainer:
    """The trainer's side of a run with an adapter, sent alone or merged: a policy and its publisher."""

    def __init__(self, folder: Any, lora: LoraSettings, fleet: RealFleet) -> None:
        model = load_causal_lm(folder, "float32")
        add_lora(model, lora)
        fill_lora(model, lora, seed=0, device=torch.device("cpu"))
        self.policy = PolicyModel(model)
        self.version = -1
        sends_adapter = lora.sync == "adapter"
        self.publisher = Publisher(
            fleet,
            named_weights_and_adapters if sends_adapter else named_weights,
            Canary([CANARY], canary_logprobs),
            torch.float32,
            rank=0,
            config=WeightConfig(),
            named_updates=named_adapters if sends_adapter else None,
        )

    @torch.no_grad()
    def step(self) -> None:
        """Change the adapter visibly, and send it as the next version. The first version is sent with a self-test."""
        self.version += 1
        generator = torch.Generator().manual_seed(self.version)
        if self.version:
            for _, matrix in named_adapters(self.policy):
                matrix += 0.05 * torch.randn(matrix.shape, generator=generator)
        self.publisher.publish(self.policy, self.version, self_test=self.version == 0)()

    def serve_late(self) -> None:
        """Send the current version to the engines that joined late."""
        self.publisher.publish(self.policy, self.version, self_test=True)()

    def logprobs(self) -> np.ndarray:
        """Return the policy's log-probs of the canary."""
        return canary_logprobs(self.policy, CANARY)


def restart(engine: EngineThread) -> None:
    """Let an engine forget what it received, as one does that has just started: only its process goes on."""
    from async_grpo.inference.received_weights import ReceivedWeights

    async def begin() -> None:
        worker = engine.worker
        worker._received = ReceivedWeights(worker.engine, worker._adapter)
        worker._broken_reason = None
        await worker.finish_start()

    engine.run(begin())
