"""The canary: fixed texts. To prove a sync, the engine's log-probs of these texts are compared with the trainer's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from async_grpo.errors import WeightsDidNotLand

# Lengths in tokens of the canary's texts, limited by the model's context. Long texts reveal errors at late positions.
# Longer texts would need too much memory, because an engine has the logits of all tokens of a text in memory at once
CANARY_TOKENS = (16, 128, 512)


@dataclass(frozen=True)
class Canary:
    """Fixed texts whose log-probs show which policy computed them."""

    texts: Sequence[np.ndarray]  # token ids of each text, (L,) int32; N is the number of tokens of all texts
    # (model, *texts) -> the trainer's log-probs (N,); a collective, called on every rank
    logprobs: Callable[..., np.ndarray]
    # Takes numbers of this rank, and returns the maximum of each over all ranks (a collective). It tells all ranks what
    # only rank 0 knows, because only rank 0 talks to the engines: all other ranks pass zeros. The default, `list`, is
    # for a single rank and returns the numbers unchanged
    max_over_ranks: Callable[[list[float]], list[float]] = list

    def expected(self, model: Any) -> np.ndarray:
        """Return the log-probs (N,) that the trainer's model computes for all texts. A collective.

        Raises:
            WeightsDidNotLand: A log-prob is not a finite number, so the weights of the trainer are damaged.
        """
        logprobs = self.logprobs(model, *self.texts)
        num_damaged = int((~np.isfinite(logprobs)).sum())
        if num_damaged:
            raise WeightsDidNotLand(
                f"{num_damaged} of the {len(logprobs)} log-probs that the trainer itself computes for the canary are not "
                "finite: its own weights are damaged, and no engine can be compared with it (grad_norm in the metrics says "
                "since which step)"
            )
        return logprobs

    @staticmethod
    def text(
        vocab_size: int, length: int, seed: int = 0, excluded_token_ids: Sequence[int] = ()
    ) -> np.ndarray:
        """Return random tokens (L,) int32. They use many rows of the embedding, and every weight of the layers.

        Args:
            vocab_size: Size of the vocabulary.
            length: Number of tokens.
            seed: Seed of the tokens.
            excluded_token_ids: Tokens that must not occur, such as placeholders of images. A neighbor takes their place.
        """
        token_ids = np.random.default_rng(seed).integers(0, vocab_size, length).astype(np.int32)
        while np.isin(token_ids, excluded_token_ids).any():
            token_ids[np.isin(token_ids, excluded_token_ids)] -= 1
            token_ids %= vocab_size
        return token_ids

    @classmethod
    def random(
        cls,
        logprobs: Callable[..., np.ndarray],
        vocab_size: int,
        longest: int,
        seed: int,
        max_over_ranks: Callable[[list[float]], list[float]] = list,
        excluded_token_ids: Sequence[int] = (),
        more_texts: Sequence[np.ndarray] = (),
    ) -> Self:
        """Return a canary with one random text for each length in CANARY_TOKENS.

        Args:
            logprobs: See the attribute.
            vocab_size: Size of the vocabulary.
            longest: Maximum length of a text.
            seed: Seed of the texts.
            max_over_ranks: See the attribute.
            excluded_token_ids: Tokens that must not occur in the random texts.
            more_texts: Further texts.
        """
        lengths = sorted({min(length, longest) for length in CANARY_TOKENS})
        texts = [cls.text(vocab_size, length, seed, excluded_token_ids) for length in lengths]
        return cls([*texts, *more_texts], logprobs, max_over_ranks)
