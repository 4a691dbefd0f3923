"""`AllowedTokens`: the tokens among which a grammar let the engine sample (`Sampling.grammar`)."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

ALL_TOKENS = -1  # entry of `AllowedTokens.indices` for a token that was sampled among all tokens


@dataclass(frozen=True)
class AllowedTokens:
    """The tokens among which a grammar let the engine sample each token of a completion.

    The engine computes log-probs by a softmax over these tokens alone, so the trainer must use the same tokens.
    """

    # (T,) int32, place in `masks` of each token's mask; ALL_TOKENS if all tokens were allowed
    indices: np.ndarray
    masks: tuple[bytes, ...]  # distinct masks, as `packed_mask` makes them

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, tokens: slice) -> "AllowedTokens":
        """Return the masks of some of the tokens."""
        return AllowedTokens(self.indices[tokens], self.masks)

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes of the masks."""
        return sum(map(len, self.masks))

    @staticmethod
    def joined(parts: Sequence["AllowedTokens | None"], lengths: Sequence[int]) -> "AllowedTokens | None":
        """Return the masks of several sequences of tokens, end to end. Equal masks are stored once.

        The result is None if all tokens were allowed everywhere.

        Args:
            parts: The masks of each sequence of tokens; None if all tokens were allowed in it.
            lengths: The number of tokens of each sequence.
        """
        places: dict[bytes, int] = {}
        indices = []
        for part, length in zip(parts, lengths, strict=True):
            part_indices = np.full(length, ALL_TOKENS, np.int32)
            if part is not None:
                is_restricted = part.indices != ALL_TOKENS
                used_places, order = np.unique(part.indices[is_restricted], return_inverse=True)
                new_places = [places.setdefault(part.masks[place], len(places)) for place in used_places]
                part_indices[is_restricted] = np.array(new_places, np.int32)[order]
            indices.append(part_indices)
        return AllowedTokens(np.concatenate(indices), tuple(places)) if places else None

    def as_arrays(self) -> dict[str, np.ndarray]:
        """Return the masks as arrays, which `from_arrays` reads."""
        mask_lengths = [len(mask) for mask in self.masks]
        return {
            "indices": self.indices,
            "mask_ends": np.cumsum(mask_lengths, dtype=np.int64),
            "mask_bytes": np.frombuffer(b"".join(self.masks), np.uint8),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Self:
        """Make the masks from arrays, for example of a file.

        Raises:
            KeyError: An array is missing.
            ValueError: An index or a mask does not exist.
        """
        indices = arrays["indices"].astype(np.int32)
        ends = arrays["mask_ends"].tolist()
        all_bytes = arrays["mask_bytes"].astype(np.uint8).tobytes()
        begins = [0, *ends][: len(ends)]
        if sorted(begins) != begins or (ends[-1] if ends else 0) != len(all_bytes):
            raise ValueError("the masks of allowed tokens have wrong lengths")
        if len(indices) and not ALL_TOKENS <= indices.min() <= indices.max() < len(ends):
            raise ValueError("a token refers to a mask of allowed tokens that does not exist")
        masks = [all_bytes[begin:end] for begin, end in zip(begins, ends, strict=True)]
        return cls(indices, tuple(masks))


def packed_mask(bits: np.ndarray) -> bytes:
    """Return a mask in compressed form, which takes little memory because a mask has long runs of equal bits.

    Args:
        bits: One bit per token id, with the lowest bit first, in an array of integers such as (ceil(V / 32),) int32.
    """
    return zlib.compress(bits.tobytes(), level=1)


def unpacked_mask(mask: bytes, vocab_size: int) -> np.ndarray:
    """Return the bits of a mask, (ceil(V / 8),) uint8, with the lowest bit of a byte first.

    Raises:
        ValueError: The mask does not have one bit for each token of this vocabulary.
    """
    num_bytes = 4 * -(-vocab_size // 32)
    # One byte more than expected is enough to see that the mask is too long
    try:
        plain_mask = zlib.decompressobj().decompress(mask, num_bytes + 1)
    except zlib.error as error:
        raise ValueError(f"a mask of allowed tokens cannot be read: {error}") from error
    bits = np.frombuffer(plain_mask, np.uint8)
    if len(bits) != num_bytes:
        raise ValueError(
            f"a mask of allowed tokens has not {num_bytes} bytes, as a vocabulary of {vocab_size} needs"
        )
    return bits[: -(-vocab_size // 8)]


def unpacked_masks(masks: Sequence[bytes], vocab_size: int) -> np.ndarray:
    """Return the bits of several masks, (masks, ceil(V / 8)) uint8. See `unpacked_mask`."""
    return np.stack([unpacked_mask(mask, vocab_size) for mask in masks])
