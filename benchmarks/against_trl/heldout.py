"""Sample completions of held-out tasks by transformers, in the same way for both sides.

A prompt is computed once for all of its completions, which saves most of the work if there are many.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

BATCH_COMPLETIONS = 256  # number of completions that are sampled at once, if one prompt does not have more

Row = dict[str, Any]


def sample_tasks(
    model: Any, tokenizer: Any, rows: list[Row], max_tokens: int, num_completions: int
) -> Iterator[tuple[Row, list[str]]]:
    """Yield each row with the texts of `num_completions` completions at temperature 1, without their end tokens.

    The rows come in the order of the lengths of their prompts.
    """
    rows_by_length: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        rows_by_length[len(row["input_token_ids"])].append(row)
    rows_at_once = max(1, BATCH_COMPLETIONS // num_completions)
    end_tokens = model.generation_config.eos_token_id
    end_tokens = set(end_tokens if isinstance(end_tokens, list) else [end_tokens])
    for _, rows_of_length in sorted(rows_by_length.items()):
        for begin in range(0, len(rows_of_length), rows_at_once):
            batch = rows_of_length[begin : begin + rows_at_once]
            prompts = torch.tensor([row["input_token_ids"] for row in batch])
            completions = sample_tokens(model, prompts, max_tokens, num_completions, end_tokens)
            texts = [
                tokenizer.decode(before_end(tokens, end_tokens), skip_special_tokens=False)
                for tokens in completions.tolist()
            ]
            for number, row in enumerate(batch):
                yield row, texts[number * num_completions : (number + 1) * num_completions]


@torch.no_grad()
def sample_tokens(
    model: Any, prompts: Tensor, max_tokens: int, num_completions: int, end_tokens: set[int]
) -> Tensor:
    """Return tokens (prompts x completions, tokens) sampled at temperature 1, the completions of a prompt together.

    Tokens after the first end token of a row have no meaning.

    Args:
        model: A causal language model of the transformers library.
        prompts: Token ids (prompts, length), without padding.
        max_tokens: Maximum number of tokens of a completion.
        num_completions: Number of completions of each prompt.
        end_tokens: Tokens with which a completion ends.
    """
    cache = DynamicCache(config=model.config)
    logits = model(prompts, past_key_values=cache, logits_to_keep=1).logits
    cache.batch_repeat_interleave(num_completions)
    logits = logits.repeat_interleave(num_completions, 0)
    ends = torch.tensor(sorted(end_tokens))
    is_ended = torch.zeros(len(logits), dtype=torch.bool)
    tokens = []
    while True:
        tokens.append(torch.multinomial(logits[:, -1].float().softmax(-1), 1))
        is_ended |= torch.isin(tokens[-1], ends).squeeze(1)
        if is_ended.all() or len(tokens) == max_tokens:
            return torch.cat(tokens, 1)
        logits = model(tokens[-1], past_key_values=cache, logits_to_keep=1).logits


def before_end(tokens: list[int], end_tokens: set[int]) -> list[int]:
    """Return the tokens before the first end token.

    >>> before_end([5, 7, 2, 9], {2})
    [5, 7]
    """
    for place, token in enumerate(tokens):
        if token in end_tokens:
            return tokens[:place]
    return tokens
