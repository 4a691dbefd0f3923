"""Encode the changes between two arrays of the same size, and apply them. Both are exact for all bit patterns.

The arrays are read as 16-bit words, the size of a bfloat16 value. They are divided into blocks of BLOCK_WORDS words, so
that a position inside a block fits into 16 bits. Layout of the encoded changes, little-endian:

    counts      uint32 for each block: number of changed words, or COMPRESSED + number of words of the compressed block
    blocks      for each block: positions uint16 (count,), then the new words uint16 (count,); or the compressed block
    padding     zeros up to a multiple of 4 bytes, because float32 tensors may follow in the same buffer

A changed word costs 4 bytes. A block in which half of the words or more have changed is stored whole: its count is the
size of the block, and it has no positions.

On request, a block of which more than an eighth has changed is compressed instead, where that is smaller. In float32, a
training step changes nearly every value, but only by a small part of it: the difference of the old and the new word has
few bits. The differences (new - old, modulo 2**16) are sorted by their position in 4 bytes, so that bytes of equal
significance are neighbors, and compressed by zlib. This takes a second for about 80 MB.

vLLM's `sparse_nccl` weight transfer sends positions and values as well. It is not used here, because it writes them
directly into the layers of the engine: the engine never has a whole received tensor, whose digest the proof of a sync
compares, and layers that compute with packed copies of their weights would not see the change.
"""

import zlib
from dataclasses import dataclass

import numpy as np

from async_grpo.errors import WeightsDidNotLand

BLOCK_WORDS = 1 << 16
WORD = np.dtype("<u2")
COUNT = np.dtype("<u4")
ALIGNMENT_BYTES = 4
# Changes are sent only if they are smaller than this fraction of the whole tensor. Above it, they save little
LARGEST_SHARE = 0.6
# The same limit for compressed changes. It is higher, because only the tensors of LoRA adapters are compressed. These are
# small, so encoding them takes little time, even if it saves only a tenth
LARGEST_COMPRESSED_SHARE = 0.9
COMPRESSED = 1 << 31  # a count with this bit means that the block is compressed
# A block of n words is compressed if more than n / MIN_CHANGES_TO_COMPRESS words have changed. With fewer changes, it is
# small without compression
MIN_CHANGES_TO_COMPRESS = 8
LANES = 4  # bytes at equal positions in words of this many bytes are compressed together
# Value of zlib's `wbits` for a stream without header and checksum. The digests of whole tensors are compared anyway
RAW_DEFLATE = -zlib.MAX_WBITS


@dataclass(frozen=True)
class Changes:
    """The encoded changes between two arrays."""

    payload: np.ndarray  # (n,) uint8, see the layout above
    num_changed: int  # number of words that differ
    # Whether the changes are so much smaller than the whole array that they should be sent in its place
    is_worthwhile: bool


def encode_changes(base: np.ndarray, new: np.ndarray, *, compress: bool = False) -> Changes:
    """Return the changes that turn `base` into `new`.

    Args:
        base: Bytes (n,) uint8 that the receiver already has. n is even.
        new: Bytes (n,) uint8 that the receiver is to have afterwards.
        compress: Whether to compress blocks with many changes.

    >>> base = np.zeros(8, np.uint8)
    >>> new = np.array([0, 0, 7, 0, 0, 0, 0, 9], np.uint8)
    >>> changes = encode_changes(base, new)
    >>> apply_changes(base, changes.payload)
    >>> changes.num_changed, len(changes.payload), base.tolist()
    (2, 12, [0, 0, 7, 0, 0, 0, 0, 9])
    """
    base_words = base.view(WORD)
    new_words = new.view(WORD)
    counts = np.zeros(_num_blocks(len(new_words)), COUNT)
    parts = [counts.view(np.uint8)]
    num_changed = 0
    for block in range(len(counts)):
        bounds = slice(block * BLOCK_WORDS, (block + 1) * BLOCK_WORDS)
        new_block = new_words[bounds]
        is_changed = base_words[bounds] != new_block
        count = int(np.count_nonzero(is_changed))
        num_changed += count
        if compress and MIN_CHANGES_TO_COMPRESS * count > len(new_block):
            compressed = _compressed(base_words[bounds], new_block)
            if len(compressed) < min(4 * count, new_block.nbytes):
                counts[block] = COMPRESSED + len(compressed) // WORD.itemsize
                parts.append(compressed)
                continue
        if 2 * count >= len(new_block):
            counts[block] = len(new_block)
            parts.append(new_block.view(np.uint8))
        elif count:
            positions = np.flatnonzero(is_changed)
            counts[block] = count
            parts.append(positions.astype(WORD).view(np.uint8))
            parts.append(new_block[positions].view(np.uint8))
    num_bytes = sum(len(part) for part in parts)
    parts.append(np.zeros(-num_bytes % ALIGNMENT_BYTES, np.uint8))
    payload = np.concatenate(parts)
    largest_share = LARGEST_COMPRESSED_SHARE if compress else LARGEST_SHARE
    return Changes(payload, num_changed, is_worthwhile=len(payload) < largest_share * len(new))


def apply_changes(base: np.ndarray, payload: np.ndarray) -> None:
    """Apply encoded changes to `base` (n,) uint8 in place.

    Raises:
        WeightsDidNotLand: The payload does not fit to an array of this size. `base` is then unchanged, unless a position
            is outside of its block, or a compressed block is damaged.
    """
    words = base.view(WORD)
    num_blocks = _num_blocks(len(words))
    counts_bytes = num_blocks * COUNT.itemsize
    if len(payload) < counts_bytes:
        raise WeightsDidNotLand(f"the changes of {len(base)} bytes of weights are cut off at {len(payload)}")
    counts = payload[:counts_bytes].view(COUNT).astype(np.int64)
    sizes = np.full(num_blocks, BLOCK_WORDS)
    sizes[-1:] = len(words) - BLOCK_WORDS * (num_blocks - 1)
    is_compressed = counts >= COMPRESSED
    counts[is_compressed] -= COMPRESSED
    is_whole = (counts == sizes) & ~is_compressed
    stored_words = np.where(is_whole | is_compressed, counts, 2 * counts)
    expected_bytes = counts_bytes + WORD.itemsize * int(stored_words.sum())
    expected_bytes += -expected_bytes % ALIGNMENT_BYTES
    if (counts > sizes).any() or len(payload) != expected_bytes:
        raise WeightsDidNotLand(
            f"the changes of {len(base)} bytes of weights are damaged: {len(payload)} bytes instead of {expected_bytes}"
        )
    contents = payload[counts_bytes:].view(WORD)
    begin = 0
    for block in np.flatnonzero(counts):
        count = counts[block]
        block_words = words[block * BLOCK_WORDS : (block + 1) * BLOCK_WORDS]
        end = begin + stored_words[block]
        if is_compressed[block]:
            # Adding unsigned words wraps around, as subtracting them did when the differences were computed
            block_words += _decompressed(contents[begin:end], len(block_words))
        elif is_whole[block]:
            block_words[:] = contents[begin:end]
        else:
            positions = contents[begin : begin + count]
            if positions.max() >= len(block_words):
                raise WeightsDidNotLand(
                    f"the changes of {len(base)} bytes of weights name a position outside"
                )
            block_words[positions] = contents[begin + count : end]
        begin = end


def _compressed(base_words: np.ndarray, new_words: np.ndarray) -> np.ndarray:
    """Return the compressed differences of two arrays of words (n,), as bytes (m,) uint8 with even m."""
    differences = (new_words - base_words).view(np.uint8)
    planes = b"".join(differences[lane::LANES].tobytes() for lane in range(LANES))
    # Z_RLE looks only for runs of one byte. Differences hardly contain other repetitions, and a search for them takes time
    compressor = zlib.compressobj(level=1, wbits=RAW_DEFLATE, strategy=zlib.Z_RLE)
    compressed = compressor.compress(planes) + compressor.flush()
    return np.frombuffer(compressed + bytes(len(compressed) % WORD.itemsize), np.uint8)


def _decompressed(contents: np.ndarray, num_words: int) -> np.ndarray:
    """Return the differences (num_words,) of a compressed block.

    Raises:
        WeightsDidNotLand: The block is damaged.
    """
    num_bytes = num_words * WORD.itemsize
    decompressor = zlib.decompressobj(wbits=RAW_DEFLATE)
    try:
        # Ask for one byte more than expected, so that a block that is too long is noticed
        planes = decompressor.decompress(contents.tobytes(), num_bytes + 1)
    except zlib.error as error:
        raise WeightsDidNotLand(f"compressed changes of weights are damaged: {error}") from error
    if len(planes) != num_bytes or not decompressor.eof:
        raise WeightsDidNotLand(
            f"compressed changes of weights are damaged: {len(planes)} bytes instead of {num_bytes}"
        )
    values = np.frombuffer(planes, np.uint8)
    differences = np.empty(num_bytes, np.uint8)
    begin = 0
    for lane in range(LANES):
        plane = differences[lane::LANES]
        plane[:] = values[begin : begin + len(plane)]
        begin += len(plane)
    return differences.view(WORD)


def _num_blocks(num_words: int) -> int:
    return -(-num_words // BLOCK_WORDS)
