"""`control_token_spellings`: the texts that a tokenizer turns into control tokens."""

import re
from typing import Any

WITH_BARS = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)


def control_token_spellings(tokenizer: Any) -> list[str]:
    """Return the spellings of a tokenizer's control tokens, in order.

    Control tokens are the tokenizer's special tokens, and all other added tokens of the form `<|...|>`. The latter are
    included because DeepSeek's `<｜User｜>` is not marked as special. `<think>` and `<tool_call>` are not control tokens:
    they do not begin a turn, and prompts may name them to describe a format.
    """
    spellings = set(getattr(tokenizer, "all_special_tokens", ()))
    for token in getattr(tokenizer, "added_tokens_decoder", {}).values():
        if token.special or WITH_BARS.fullmatch(str(token)):
            spellings.add(str(token))
    # Single letters are left out, because `ControlTokens` cuts spellings into pieces, and a letter has no pieces. Some
    # tokenizers use a single letter as the unknown token
    return sorted(spelling for spelling in spellings if len(spelling) > 1)
