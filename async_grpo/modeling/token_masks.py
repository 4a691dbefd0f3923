"""`TokenMasks`: restrict the softmax of each token to the tokens that a grammar allowed."""

from dataclasses import dataclass
from typing import Self

import torch
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor

from async_grpo.allowed_tokens import ALL_TOKENS, AllowedTokens, unpacked_masks

# Logit of a token that is not allowed. Its probability is exactly 0. The number is finite, so that 0 times this logit
# is 0. With minus infinity, the entropy and its gradient would be NaN
FORBIDDEN_LOGIT = -1e30


@dataclass(frozen=True)
class TokenMasks:
    """The masks of several tokens.

    Attributes:
        indices: For each token, the row of `bits` with its mask; ALL_TOKENS if all tokens are allowed.
        bits: Distinct masks, one bit per token id, with the lowest bit of a byte first.
    """

    indices: Int64[Tensor, " tokens"]
    bits: UInt8[Tensor, "masks bytes"]

    @classmethod
    def of(cls, allowed: AllowedTokens, vocab_size: int, device: torch.device) -> Self:
        """Return the masks as tensors.

        Raises:
            ValueError: The masks are for a vocabulary of another size.
        """
        bits = unpacked_masks(allowed.masks, vocab_size)
        return cls(
            torch.tensor(allowed.indices, dtype=torch.int64, device=device),
            torch.tensor(bits, device=device),
        )

    def __getitem__(self, tokens: slice | Int64[Tensor, " selected"]) -> Self:
        """Return the masks of some of the tokens."""
        return type(self)(self.indices[tokens], self.bits)


def forbid(
    logits: Float[Tensor, "tokens vocab"],
    indices: Int64[Tensor, " tokens"],
    bits: UInt8[Tensor, "masks bytes"],
) -> Float[Tensor, "tokens vocab"]:
    """Set the logits of all tokens that are not allowed to FORBIDDEN_LOGIT, in place, and return the logits.

    Args:
        logits: The logits of each token.
        indices: For each token, the row of `bits` with its mask; ALL_TOKENS if all tokens are allowed.
        bits: Distinct masks.
    """
    used, rows = indices.unique(return_inverse=True)
    if len(used) == 1 and used[0] == ALL_TOKENS:
        return logits
    is_allowed = _unpacked(bits[used.clamp(min=0)], logits.shape[1])
    is_allowed[used == ALL_TOKENS] = True
    return logits.masked_fill_(~is_allowed[rows], FORBIDDEN_LOGIT)


def _unpacked(bits: UInt8[Tensor, "masks bytes"], vocab_size: int) -> Bool[Tensor, "masks vocab"]:
    """Return for each mask and token id whether the mask allows the token."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits[:, :, None] >> shifts & 1).flatten(1)[:, :vocab_size].bool()
