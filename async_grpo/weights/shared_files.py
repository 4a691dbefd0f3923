"""`SharedFilesPublisher`: packages whose chunks are safetensors files in a folder that all nodes share."""

import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from async_grpo.errors import WeightsDidNotLand
from async_grpo.protocols import Engines, WeightPackage
from async_grpo.weights.publisher import Delivery, Publisher


class SharedFilesPublisher(Publisher):
    """The same packages; no weights go through Ray's object store. Files live until their package is loaded everywhere."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._written: list[Path] = []
        self._folder = Path(self.config.weight_folder).expanduser().absolute()
        if self.rank == 0:
            self._folder.mkdir(parents=True, exist_ok=True)

    def _store(self, engines: Engines, image: np.ndarray) -> Path:
        # Another name each time: what a node remembers of an old file must not be taken for the new one
        path = self._folder / f"weights-{uuid.uuid4().hex}.safetensors"
        self._written.append(path)
        hidden = path.with_suffix(".partial")
        try:
            hidden.write_bytes(image.data)  # numpy's `tofile` says nothing of a disk that is full
            hidden.rename(path)
        except OSError as error:
            hidden.unlink(missing_ok=True)
            free = shutil.disk_usage(self._folder).free / 1e9
            raise WeightsDidNotLand(
                f"{path} cannot be written ({error}; {image.nbytes / 1e9:.2f} GB, {free:.2f} GB are free): give "
                "--weight-folder a disk with room for the weights"
            ) from error
        return path

    def _send(self, draft: WeightPackage, weights: Mapping[str, torch.Tensor]) -> Delivery | None:
        if (deliver := super()._send(draft, weights)) is None:
            return None

        def deliver_files() -> tuple[WeightPackage, Mapping]:
            try:
                return deliver()
            finally:
                while self._written:
                    self._written.pop().unlink(missing_ok=True)

        return deliver_files
