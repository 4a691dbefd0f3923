"""Random masks of allowed tokens, and plain tables of them."""

import zlib
from collections.abc import Sequence

import numpy as np

from async_grpo.allowed_tokens import ALL_TOKENS, AllowedTokens, packed_mask


def masks_of(table: np.ndarray) -> AllowedTokens:
    """Return the masks of a table (T, V) of booleans. A row that allows everything has no mask."""
    rows: dict[bytes, int] = {}
    masks = []
    indices = []
    for row in table:
        if row.all():
            indices.append(ALL_TOKENS)
            continue
        padded = np.zeros(32 * -(-len(row) // 32), bool)
        padded[: len(row)] = row
        bits = np.packbits(padded, bitorder="little").view(np.int32)
        if bits.tobytes() not in rows:
            rows[bits.tobytes()] = len(masks)
            masks.append(packed_mask(bits))
        indices.append(rows[bits.tobytes()])
    return AllowedTokens(np.array(indices, np.int32), tuple(masks))


def random_table(random: np.random.Generator, targets: Sequence[int], vocab_size: int) -> np.ndarray:
    """Return a table (T, V) of allowed tokens. Targets are allowed, some rows allow everything, and rows repeat."""
    distinct = random.random((3, vocab_size)) < random.choice([0.05, 0.5, 0.95])
    distinct[0] = True
    table = distinct[random.integers(0, 3, len(targets))]
    table[np.arange(len(targets)), targets] = True
    return table


def table_of(allowed: AllowedTokens | None, num_tokens: int, vocab_size: int) -> np.ndarray:
    """Return the table (T, V) of masks, bit by bit."""
    table = np.ones((num_tokens, vocab_size), bool)
    if allowed is None:
        return table
    for token, index in enumerate(allowed.indices):
        if index != ALL_TOKENS:
            bits = zlib.decompress(allowed.masks[index])
            for token_id in range(vocab_size):
                table[token, token_id] = bits[token_id // 8] >> (token_id % 8) & 1
    return table
