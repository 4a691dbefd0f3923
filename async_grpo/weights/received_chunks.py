"""The workers' side of `--weight-sync-deltas` for packages: turns changes back into whole chunks. See `sent_chunks`.

This module must not import torch, because worker actors set variables before torch is imported.
"""

from collections.abc import Sequence

import numpy as np

from async_grpo.errors import WeightsDidNotLand
from async_grpo.protocols import ChunkDigest
from async_grpo.weights.changes import apply_changes


class ReceivedChunks:
    """The chunks of the last version that a worker received, to which it applies changes."""

    def __init__(self) -> None:
        self._images: dict[str, np.ndarray] = {}  # digest -> whole chunk

    def restore(
        self, chunks: Sequence[memoryview], digests: Sequence[ChunkDigest | None]
    ) -> list[memoryview]:
        """Return the whole chunks of an update, and keep them for the next update.

        The returned chunks are valid until the next call, which changes them in place.

        Args:
            chunks: The chunks as they were sent: whole, or as changes to a chunk of the last update.
            digests: Their digests. If there are none, all chunks are whole, and are not kept.

        Raises:
            WeightsDidNotLand: This worker does not have the chunk to which changes apply, or the changes are damaged.
        """
        expected_digests = [digest for digest in digests if digest is not None]
        if not expected_digests:
            return list(chunks)
        # Forget all chunks until this update is complete. After an error, later changes are then refused
        bases = self._images
        self._images = {}
        images: dict[str, np.ndarray] = {}
        for chunk, digest in zip(chunks, expected_digests, strict=True):
            payload = np.frombuffer(chunk, np.uint8)
            if not digest.base_digest:
                images[digest.digest] = payload.copy()
                continue
            image = bases.pop(digest.base_digest, None)
            if image is None:
                raise WeightsDidNotLand(
                    f"changes apply to the weights with digest {digest.base_digest}, which this worker does not have: it "
                    "missed a version, or a version did not load"
                )
            apply_changes(image, payload)
            images[digest.digest] = image
        self._images = images
        return [image.data for image in images.values()]
