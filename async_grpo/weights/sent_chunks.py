"""The trainer's side of `--weight-sync-deltas` for packages: chunks of weights travel as changes to the last chunks.

The trainer keeps the chunks that it sent last in main memory, and each worker the chunks that it received last. A chunk
travels as changes (see `changes`) if these are smaller. A worker applies the changes (`received_chunks`) before its
engine sees the chunk. So every kind of engine loads whole tensors and reports their digests. The changes of an adapter
are compressed, because in float32 each step changes nearly all of its values. An adapter is small, so this takes little
time. Where an adapter is sent alone, its base is sent only once, so nobody keeps the base's chunks.

Changes name the digest of the chunk to which they apply. A worker without this chunk refuses them and is fenced. When
it joins again, it gets whole chunks. If the bytes of a worker's chunk have been damaged in memory, the digests of the
whole tensors differ from the trainer's, and the proof of the sync fails.
"""

import hashlib

import numpy as np

from async_grpo.modeling import is_lora_tensor
from async_grpo.protocols import ChunkDigest, Manifest, WeightPackage
from async_grpo.weights.changes import encode_changes
from async_grpo.weights.package import SELF_TEST
from async_grpo.weights.traffic import Traffic


def chunk_digest(manifest: Manifest) -> str:
    """Return a digest of a chunk, computed from the records of all of its tensors in order."""
    content = repr([(name, record.dtype, record.shape, record.digest) for name, record in manifest.items()])
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


class SentChunks:
    """The chunks of the last version that the trainer sent, from which it computes changes.

    Args:
        is_enabled: Whether changes are sent. If not, all chunks travel whole and nothing is kept.
        traffic: Counts what is sent.
        only_adapters: Whether only the chunks of adapters are kept, because their base is sent once.
    """

    def __init__(self, is_enabled: bool, traffic: Traffic, *, only_adapters: bool = False) -> None:
        self._is_enabled = is_enabled
        self._only_adapters = only_adapters
        # Names of the tensors in a chunk -> digest and bytes of the chunk. A chunk contains the same tensors in each
        # version
        self._last: dict[tuple[str, ...], tuple[str, np.ndarray]] = {}
        self._bases = self._last  # chunks of the version before, to which the changes apply
        self._package: WeightPackage | None = None  # the package of the last encoded chunk
        self._traffic = traffic

    def encode(
        self, package: WeightPackage, image: np.ndarray, manifest: Manifest
    ) -> tuple[np.ndarray, ChunkDigest | None]:
        """Return the bytes to send for a chunk, and their digest, and keep the chunk.

        Args:
            package: The package of the chunk.
            image: The chunk (n,) uint8, which must not change afterwards.
            manifest: The records of its tensors.
        """
        if package.version == SELF_TEST:
            return image, None
        is_adapter = all(map(is_lora_tensor, manifest))
        if not self._is_enabled or (self._only_adapters and not is_adapter):
            self._traffic.num_bytes += len(image)
            return image, None
        if package is not self._package:
            # Workers keep only the chunks of their last update, so changes must apply to these
            self._package = package
            # Workers that joined late have no chunks yet
            self._bases = {} if package.for_late else self._last
            self._last = {}
        names = tuple(manifest)
        digest = chunk_digest(manifest)
        payload = image
        base_digest = ""
        if names in self._bases:
            last_digest, last_image = self._bases.pop(names)
            changes = encode_changes(last_image, image, compress=is_adapter)
            self._traffic.num_words += len(image) // 2
            self._traffic.num_changed += changes.num_changed
            if changes.is_worthwhile:
                payload = changes.payload
                base_digest = last_digest
        self._last[names] = digest, image
        self._traffic.num_bytes += len(payload)
        return payload, ChunkDigest(digest, base_digest)
