"""`SharedFilesPublisher`: sends weights as safetensors files in a folder that all nodes share."""

import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from async_grpo.errors import WeightsDidNotLand
from async_grpo.protocols import Engines, WeightPackage
from async_grpo.weights.packed_round import Delivery
from async_grpo.weights.publisher import Publisher


class SharedFilesPublisher(Publisher):
    """A `Publisher` that stores its chunks as files, not as objects in Ray's object store.

    The files of a package are removed when its delivery ends.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._written: list[Path] = []
        self._folder = Path(self.config.weight_folder).expanduser().absolute()
        if self.rank == 0:
            self._folder.mkdir(parents=True, exist_ok=True)

    def _store(self, engines: Engines, image: np.ndarray) -> Path:
        # Give each file a new name, because a node's cache could still contain an old file of the same name
        path = self._folder / f"weights-{uuid.uuid4().hex}.safetensors"
        self._written.append(path)
        partial_path = path.with_suffix(".partial")
        try:
            partial_path.write_bytes(image.data)  # numpy's `tofile` would not report a full disk
            partial_path.rename(path)
        except OSError as error:
            partial_path.unlink(missing_ok=True)
            free_GB = shutil.disk_usage(self._folder).free / 1e9
            raise WeightsDidNotLand(
                f"{path} cannot be written ({error}; {image.nbytes / 1e9:.2f} GB, {free_GB:.2f} GB are free): give "
                "--weight-folder a disk with room for the weights"
            ) from error
        return path

    def _send(self, draft: WeightPackage, weights: Mapping[str, torch.Tensor]) -> Delivery | None:
        deliver = super()._send(draft, weights)
        if deliver is None:
            return None

        def deliver_files(draft: WeightPackage) -> tuple[WeightPackage, Mapping]:
            try:
                return deliver(draft)
            finally:
                while self._written:
                    self._written.pop().unlink(missing_ok=True)

        return deliver_files
