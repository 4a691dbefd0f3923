"""The workers' side of `--weight-sync-deltas` for packages: turns changes back into whole chunks. See `sent_chunks`.

This module must not import torch, because worker actors set variables before torch is imported.
"""

import json
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
            digests: Their digests, or (). A chunk without a digest is whole, and is not kept.

        Raises:
            WeightsDidNotLand: This worker does not have the chunk to which changes apply, or the changes are damaged, or a
                chunk is not complete.
        """
        if not any(digests):
            for number, chunk in enumerate(chunks, start=1):
                refuse_incomplete_image(chunk, f"chunk {number} of {len(chunks)} of the weights")
            return list(chunks)
        # Forget all chunks until this update is complete. After an error, later changes are then refused
        bases = self._images
        self._images = {}
        images: dict[str, np.ndarray] = {}
        whole_chunks: list[memoryview] = []
        for chunk, digest in zip(chunks, digests, strict=True):
            if digest is None:
                whole_chunks.append(chunk)
                continue
            payload = np.frombuffer(chunk, np.uint8)
            if not digest.base_digest:
                images[digest.digest] = payload.copy()
                whole_chunks.append(images[digest.digest].data)
                continue
            image = bases.pop(digest.base_digest, None)
            if image is None:
                raise WeightsDidNotLand(
                    f"changes apply to the weights with digest {digest.base_digest}, which this worker does not have: it "
                    "missed a version, or a version did not load"
                )
            apply_changes(image, payload)
            images[digest.digest] = image
            whole_chunks.append(image.data)
        for number, chunk in enumerate(whole_chunks, start=1):
            refuse_incomplete_image(chunk, f"chunk {number} of {len(chunks)} of the weights")
        self._images = images
        return whole_chunks


def refuse_incomplete_image(image: memoryview, name: str) -> None:
    """Refuse a safetensors image that has fewer or more bytes than its header says, such as a file that was cut off.

    Args:
        image: The image (n,), bytes.
        name: Name of the image, for the error message.

    Raises:
        WeightsDidNotLand: The image has another size.
    """
    num_bytes = image.nbytes
    header_end = 8 + int.from_bytes(image[:8], "little")
    expected_bytes = header_end
    if 8 < header_end <= num_bytes:
        try:
            entries = json.loads(bytes(image[8:header_end]))
            expected_bytes += max(
                entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"
            )
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise WeightsDidNotLand(f"{name} has a header that describes no tensors: {error}") from error
    if num_bytes != expected_bytes or num_bytes <= 8:
        raise WeightsDidNotLand(
            f"{name} has {num_bytes} bytes, but its header says {expected_bytes}: it was cut off or changed on its way"
        )
