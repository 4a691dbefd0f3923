"""A real vLLM engine in a thread of its own, and the log-probs that transformers computes with the same weights."""

import asyncio
import itertools
import threading
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from async_grpo.messages import SharedRunSettings
from async_grpo.modeling.load import context_length, model_fingerprint, stop_token_ids
from async_grpo.protocols import Manifest
from async_grpo.types import Completion, Sampling
from async_grpo.weights.canary import Canary

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "sample-data" / "tiny-model"
CANARY = Canary.text(256, 48)
SETTINGS = SharedRunSettings(
    run_name="test",
    model_fingerprint=model_fingerprint(MODEL),
    vocab_size=300,
    dtype="float32",
    temperature=0.7,
    stop_token_ids=stop_token_ids(MODEL),
    max_total_tokens=min(256, context_length(MODEL)),
    max_completion_tokens=200,
    transport="object_store",
    logprob_roles=(),
    seed=0,
    char_ends=True,
)

_seeds = itertools.count()


class EngineThread:
    """An engine in an event loop of its own, so that one engine serves a whole module of tests.

    Args:
        folder: The model.
        extension: The class that runs in vLLM's workers; None for the one that the library uses.
        processes: Number of processes over which the weights are split.
        changes: Changes to `SETTINGS`.
    """

    def __init__(
        self, folder: Path = MODEL, extension: str | None = None, processes: int = 1, **changes: Any
    ) -> None:
        from async_grpo.inference.config import EngineConfig
        from async_grpo.inference.generation_worker import GenerationWorker

        class Worker(GenerationWorker):
            worker_extension = extension or GenerationWorker.worker_extension

        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        options = EngineConfig(
            model_path=str(folder), max_num_seqs=64, enforce_eager=True, tensor_parallel_size=processes
        )

        async def start() -> GenerationWorker:
            worker = Worker.start(options, replace(SETTINGS, **changes))
            await worker.finish_start()
            return worker

        self.worker = self.run(start(), 180)

    def run(self, coroutine: Coroutine, timeout_s: float = 60):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)

    def close(self) -> None:
        """End the engine's process, and then the thread."""

        async def end() -> None:
            self.worker.close()

        self.run(end())
        self.loop.call_soon_threadsafe(self.loop.stop)


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of a model's weights by name."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def hf_logprobs(model: torch.nn.Module, ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Return the log-probs of a sequence by transformers' own forward pass; that of the first token is 0."""
    with torch.no_grad():
        logits = model(torch.tensor(ids, dtype=torch.int64)[None]).logits[0].float() / temperature
    chosen = logits.log_softmax(-1)[:-1].gather(-1, torch.tensor(ids[1:], dtype=torch.int64)[:, None])[:, 0]
    return np.concatenate([[0.0], chosen.numpy()]).astype(np.float32)


def send(engine: EngineThread, tensors: dict[str, torch.Tensor], version: int) -> tuple[Manifest, np.ndarray]:
    """Send weights to an engine and return (its receipt, its log-probs of the canary)."""
    received = engine.run(engine.worker.update(version, [memoryview(save(tensors))]))
    return received, engine.run(engine.worker.canary(CANARY))


async def completions(engine: EngineThread, prompt: np.ndarray, count: int, tokens: int) -> list[Completion]:
    """Sample several completions of a prompt, each with a seed of its own."""
    seeds = {member: next(_seeds) for member in range(count)}
    answers = engine.worker.complete(prompt, seeds, Sampling(max_tokens=tokens))
    return [answer async for answer in answers if isinstance(answer, Completion)]
