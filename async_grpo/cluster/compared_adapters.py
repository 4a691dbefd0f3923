"""Evaluate several LoRA adapters on the same engines, one after the other (`async-grpo eval --lora-adapters`)."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ray

from async_grpo.cluster.ray_session import answer
from async_grpo.cluster.weight_sync import RayEngines
from async_grpo.config.compared_adapters import BASE, ComparedAdapters
from async_grpo.config.run import RunConfig
from async_grpo.errors import DeadlineExceeded, WeightsDidNotLand
from async_grpo.experience.dataset import Question
from async_grpo.messages import SharedRunSettings
from async_grpo.modeling.load import torch_dtype
from async_grpo.protocols import Engines, WeightPackage
from async_grpo.weights.canary import Canary
from async_grpo.weights.package import pack_weights, prove_landed, record

log = logging.getLogger(__name__)
TEXT_TOKENS = 64  # length of the text whose log-probs show whether an adapter changes anything


class AdapterSender:
    """Sends adapters to engines, and proves that the engines use them. The weights of the base model are not sent.

    Each engine reads back the adapter's matrices from the layers that compute with them. This and the digests are the
    proof, because without a trainer there are no other log-probs to compare the engine's with.

    Args:
        engines: The connection to the engines.
        adapters: The adapters.
        settings: Settings that all workers of the evaluation share.
    """

    def __init__(self, engines: Engines, adapters: ComparedAdapters, settings: SharedRunSettings) -> None:
        self._engines = engines
        self._adapters = adapters
        self._dtype = torch_dtype(settings.dtype)
        length = min(TEXT_TOKENS, settings.max_total_tokens - 1)
        self._text = Canary.text(settings.vocab_size, length, settings.seed)
        self._version = 0
        self._name = BASE
        # For each worker id, the log-probs of the text that the worker computes without an adapter
        self._base_logprobs: dict[str, np.ndarray] = {}

    def send(self, version: int, name: str) -> None:
        """Make all engines compute with an adapter.

        Args:
            version: Number of the adapter. It must grow from call to call.
            name: Name of the adapter, or BASE.

        Raises:
            WeightsDidNotLand: No engine has proven that it uses the adapter.
        """
        self._version = version
        self._name = name
        # Engines that joined since the last call must get the adapter in their own sync first
        landed = [*self.serve_late(), *self._deliver(for_late=False)]
        if not landed:
            raise WeightsDidNotLand(f"no engine computes with the adapter {name}: see the log")

    def serve_late(self) -> list[str]:
        """Send the current adapter to engines that joined after the first sync.

        Return the ids of the engines that have proven that they use it.
        """
        return self._deliver(for_late=True)

    def _deliver(self, *, for_late: bool) -> list[str]:
        image, tensors = pack_weights(self._adapters.tensors(self._name), self._dtype)
        package = WeightPackage(
            version=self._version,
            manifest={name: record(tensor) for name, tensor in tensors.items()},
            chunks=[self._engines.put(image)],
            canary_texts=[self._text],
            canary_logprobs=np.zeros(len(self._text), np.float32),
            tolerance=math.inf,  # accept any log-probs here: `_compare_with_base` checks them
            for_late=for_late,
        )
        landed = []
        for worker_id, receipt in self._engines.deliver(package).items():
            try:
                logprobs = prove_landed(package, worker_id, receipt)
            except WeightsDidNotLand as error:
                self._engines.fence(worker_id, error)
                continue
            landed.append(worker_id)
            self._compare_with_base(worker_id, logprobs)
        self._engines.commit(package, landed)
        return landed

    def _compare_with_base(self, worker_id: str, logprobs: np.ndarray) -> None:
        """Warn if an engine computes exactly the same log-probs with a LoRA adapter as without it."""
        if self._name == BASE:
            self._base_logprobs[worker_id] = logprobs
        elif np.array_equal(logprobs, self._base_logprobs.get(worker_id, np.zeros(0))):
            log.warning(
                "worker %s computes the same log-probs with the adapter %s as with the base alone: the adapter changes "
                "nothing (a new adapter does not, because its B is zero)",
                worker_id,
                self._name,
            )


class AdapterEvaluation:
    """Evaluates LoRA adapters with the engines of a run that was opened without a trainer.

    Args:
        controller: The run's controller, whose batcher is started.
        config: The options of the evaluation.
        settings: The settings with which the run was opened. Their `lora` describes the adapters.
        adapters: The adapters to compare.
    """

    def __init__(
        self, controller: Any, config: RunConfig, settings: SharedRunSettings, adapters: ComparedAdapters
    ) -> None:
        engines = RayEngines(controller, config.sync_timeout_s)
        self._sender = AdapterSender(engines, adapters, settings)
        self._controller = controller
        self._config = config
        self._message: Any = None  # Ray reference to the next message of the controller

    def evaluate(
        self, version: int, name: str, questions: Mapping[str, Sequence[Question]]
    ) -> dict[str, dict[str, Any]]:
        """Send an adapter to the engines, evaluate it on all files, and return the results by file name.

        If an engine is lost during the evaluation, a new engine gets the adapter when it joins.
        """
        self._sender.send(version, name)
        evaluation = self._controller.evaluate.remote(questions, self._config)
        while True:
            self._message = self._message or self._controller.next_message.remote(0)
            ready, _ = ray.wait(
                [evaluation, self._message], num_returns=1, timeout=self._config.experience_timeout_s
            )
            if not ready:
                raise DeadlineExceeded(
                    f"the evaluation of {name} took more than {self._config.experience_timeout_s:.0f} s"
                )
            if evaluation in ready:
                results: dict[str, dict[str, Any]] = answer(evaluation)
                return results
            # Raise the error of the message, if any. Without training, every other message says that workers have
            # joined
            answer(self._message)
            self._message = None
            self._sender.serve_late()
