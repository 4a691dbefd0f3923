"""`ReceivedWeights`: the record of what an engine received in its last update, and whether it computes with it."""

from vllm.v1.engine.async_llm import AsyncLLM

from async_grpo.errors import ConfigurationError, WorkerLost
from async_grpo.inference.read_back_places import ReadBack
from async_grpo.inference.served_lora import MERGE_INSTEAD
from async_grpo.messages import LoraSettings
from async_grpo.protocols import Manifest, TensorRecord

NUM_NAMES = 5  # maximum number of names in an error message


class ReceivedWeights:
    """The weights that an engine has received: all weights of the model, or only an adapter.

    Args:
        engine: The engine.
        adapter: The adapter that the engine applies; None if it receives whole weights.
    """

    def __init__(self, engine: AsyncLLM, adapter: LoraSettings | None) -> None:
        self.read_back = ReadBack()
        self._engine = engine
        self._adapter = adapter
        # Whether the engine can serve requests. An engine that applies an adapter cannot until it has received one
        self.is_ready = adapter is None

    async def begin(self) -> None:
        """Prepare the engine's processes for the adapter, and record the base weights, which must not change from now on.

        Raises:
            ConfigurationError: The engine has no layer for a module that the adapter changes.
        """
        if self._adapter is None:
            return
        missing_by_process = await self._engine.collective_rpc(
            "begin_adapter", args=(self._adapter.rank, self._adapter.scaling, list(self._adapter.layers))
        )
        missing = missing_by_process[0]
        if missing:
            raise ConfigurationError(
                f"--lora-targets: this engine has no linear layer {', '.join(missing[:NUM_NAMES])}, to which the policy's "
                f"adapter is applied ({len(missing)} of {len(self._adapter.layers)} layers){MERGE_INSTEAD}"
            )
        self.read_back.begin(await self._engine.collective_rpc("fingerprints"))

    def begin_anew(self) -> None:
        """Forget the adapter of an earlier trainer.

        The engine serves no requests until the first update brings the adapter of the new trainer.
        """
        self.is_ready = self._adapter is None

    async def put_adapter_in_place(self) -> None:
        """Let the engine compute with the adapter that it has received. Called at the end of each update."""
        if self._adapter is not None:
            await self._engine.collective_rpc("put_adapter_in_place")
            self.is_ready = True

    async def manifest(self) -> Manifest:
        """Return a record of every tensor of the last update, including whether the engine computes with this tensor.

        Raises:
            WorkerLost: The engine's processes received different tensors; or the base of an adapter has changed; or the
                engine computes with parts of another adapter.
        """
        receipts = await self._engine.collective_rpc("weight_receipt")
        if any(receipt != receipts[0] for receipt in receipts):
            raise WorkerLost("the processes of one engine received different weights")
        # Compare the received weights with those that the layers compute with, as far as these can be read. The
        # manifest contains the result for each tensor
        self.read_back.compare(await self._engine.collective_rpc("fingerprints"))
        if self._adapter is not None:
            self.read_back.compare_adapter(await self._engine.collective_rpc("adapter_fingerprints"))
            self._refuse_other_changes(receipts[0].keys())
        manifest = {}
        for name, (dtype, shape, digest, *_) in receipts[0].items():
            manifest[name] = TensorRecord(
                dtype,
                tuple(shape),
                digest,
                in_use=self.read_back.is_in_use(name),
                is_read_back=self.read_back.is_readable(name),
            )
        return manifest

    def _refuse_other_changes(self, names: set[str]) -> None:
        """Raise WorkerLost if weights have changed in a place of which no tensor was received (`names`)."""
        places = sorted(self.read_back.not_in_use(apart_from=names))
        if places:
            raise WorkerLost(
                "an update of the adapter changed other weights of the engine, which are not those of the base model or "
                f"of the adapter any more: {', '.join(places[:NUM_NAMES])} ({len(places)} in all)"
            )
