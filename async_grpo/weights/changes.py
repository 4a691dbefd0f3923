"""Encode the changes between two arrays of the same size, and apply them. Both are exact for all bit patterns.

The arrays are read as 16-bit words, the size of a bfloat16 value. They are divided into blocks of BLOCK_WORDS words, so
that a position inside a block fits into 16 bits. Layout of the encoded changes, little-endian:

    counts      uint32 for each block: number of words that are stored for the block
    blocks      for each block: positions uint16 (count,), then the new words uint16 (count,)
    padding     zeros up to a multiple of 4 bytes, because float32 tensors may follow in the same buffer

A changed word costs 4 bytes. A block in which half of the words or more have changed is stored whole: its count is the
size of the block, and it has no positions.

vLLM's `sparse_nccl` weight transfer sends positions and values as well. It is not used here, because it writes them
directly into the layers of the engine: the engine never holds a whole received tensor, whose digest the proof of a sync
compares, and layers that compute with packed copies of their weights would not see the change.
"""

from dataclasses import dataclass

import numpy as np

from async_grpo.errors import WeightsDidNotLand

BLOCK_WORDS = 1 << 16
WORD = np.dtype("<u2")
COUNT = np.dtype("<u4")
ALIGNMENT_BYTES = 4
# Senders send changes only if they are smaller than this share of the whole. Above it, they save little
LARGEST_SHARE = 0.6


@dataclass(frozen=True)
class Changes:
    """The encoded changes between two arrays."""

    payload: np.ndarray  # (n,) uint8, see the layout above
    num_changed: int  # number of words that differ


def encode_changes(base: np.ndarray, new: np.ndarray) -> Changes:
    """Return the changes that turn `base` into `new`.

    Args:
        base: Bytes (n,) uint8 that the receiver already has. n is even.
        new: Bytes (n,) uint8 that the receiver shall have.

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
    return Changes(np.concatenate(parts), num_changed)


def apply_changes(base: np.ndarray, payload: np.ndarray) -> None:
    """Apply encoded changes to `base` (n,) uint8 in place.

    Raises:
        WeightsDidNotLand: The payload does not fit to an array of this size. `base` is then unchanged, unless a position
            is outside of its block.
    """
    words = base.view(WORD)
    num_blocks = _num_blocks(len(words))
    counts_bytes = num_blocks * COUNT.itemsize
    if len(payload) < counts_bytes:
        raise WeightsDidNotLand(f"the changes of {len(base)} bytes of weights are cut off at {len(payload)}")
    counts = payload[:counts_bytes].view(COUNT).astype(np.int64)
    sizes = np.full(num_blocks, BLOCK_WORDS)
    sizes[-1:] = len(words) - BLOCK_WORDS * (num_blocks - 1)
    is_whole = counts == sizes
    stored_words = np.where(is_whole, counts, 2 * counts)
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
        if is_whole[block]:
            block_words[:] = contents[begin:end]
        else:
            positions = contents[begin : begin + count]
            if positions.max() >= len(block_words):
                raise WeightsDidNotLand(
                    f"the changes of {len(base)} bytes of weights name a position outside"
                )
            block_words[positions] = contents[begin + count : end]
        begin = end


def _num_blocks(num_words: int) -> int:
    return -(-num_words // BLOCK_WORDS)
