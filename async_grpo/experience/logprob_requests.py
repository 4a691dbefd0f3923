"""Ask another policy, such as the reference or a teacher, for the log-probs of sampled tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from async_grpo.experience.packing import allowed_tokens_of
from async_grpo.experience.run_images import images_of
from async_grpo.types import Sample


async def logprobs_of_samples(
    source: Any, samples: Sequence[Sample], prompt_token_ids: np.ndarray | None = None, top_k: int = 0
) -> list[np.ndarray]:
    """Return the log-probs (T,) of each sample's sampled tokens, with its sequences concatenated.

    Args:
        source: Computes the log-probs; a `Logprobs`, or with `top_k` a source with `logprobs_with_top`.
        samples: Samples of one group; a sample may consist of several sequences.
        prompt_token_ids: Token ids (L',) int32 that the other policy reads in place of the prompt. None keeps the
            prompt. Samples with another prompt must be answers without turns.
        top_k: Number of most probable tokens whose ids and log-probs are added. The result of each sample is then
            (T, 2, 1 + top_k): ids and log-probs, of the sampled token and of these tokens.
    """
    sequences = [sequence for sample in samples for sequence in sample.sequences]
    # The prompt of a sequence: the tokens before its first turn
    prompt_lengths = [len(sequence.pieces[0][0]) for sequence in sequences]
    token_ids = [sequence.token_ids for sequence in sequences]
    if prompt_token_ids is not None:
        completions = [ids[length:] for ids, length in zip(token_ids, prompt_lengths, strict=True)]
        token_ids = [np.concatenate([prompt_token_ids, completion]) for completion in completions]
        prompt_lengths = [len(prompt_token_ids)] * len(sequences)
    if top_k:
        rows_by_sequence = await source.logprobs_with_top(token_ids, prompt_lengths, top_k)
        return _joined_by_sample(samples, rows_by_sequence, prompt_lengths)
    arguments: list[Any] = [token_ids, prompt_lengths]
    allowed = [allowed_tokens_of(sequence) for sequence in sequences]
    has_masks = any(masks is not None for masks in allowed)
    images = [images_of(sequence) for sequence in sequences]
    if has_masks or any(images):
        arguments.append(allowed if has_masks else None)
    if any(images):
        arguments.append(images)
    logprobs_by_sequence = await source.logprobs(*arguments)
    return _joined_by_sample(samples, logprobs_by_sequence, prompt_lengths)


def _joined_by_sample(
    samples: Sequence[Sample],
    logprobs_by_sequence: Sequence[np.ndarray],
    prompt_lengths: Sequence[int],
) -> list[np.ndarray]:
    """Return the log-probs (T,) of each sample's sampled tokens, with its sequences concatenated.

    Args:
        samples: The samples of a group; a sample may consist of several sequences.
        logprobs_by_sequence: For each sequence, the log-probs of all tokens after its prompt.
        prompt_lengths: Number of tokens in each sequence's prompt.
    """
    rows = zip(logprobs_by_sequence, prompt_lengths, strict=True)
    logprobs_by_sample = []
    for sample in samples:
        parts = []
        for sequence in sample.sequences:
            logprobs, prompt_length = next(rows)
            parts.append(sequence.sampled(logprobs, prompt_length))
        logprobs_by_sample.append(np.concatenate(parts))
    if next(rows, None) is not None:
        raise ValueError(
            f"{len(logprobs_by_sequence)} rows of log-probs are more than the samples' sequences"
        )
    return logprobs_by_sample
