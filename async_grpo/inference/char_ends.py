"""Where each token of a completion ends in its text: process rewards speak of characters, training of tokens."""

from collections.abc import Sequence
from os.path import commonprefix
from typing import Any

import numpy as np

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet one
MAX_WINDOW = 8  # tokens; UTF-8 needs three bytes of context, so that a window may begin within a character


def char_ends(tokenizer: Any, token_ids: Sequence[int], text: str) -> np.ndarray:
    """(T,) int32: how many characters of `text` the first t + 1 tokens have written; never falls, ends at len(text).

    For each t it is the length of what `text` and `decode(token_ids[: t + 1])` have in common at their beginning. So
    a character of several tokens counts from its last token on, and tokens beyond the text (the end token) add nothing.
    Each token is decoded together with the few before it: O(T), while decoding every prefix would be O(T^2). Exact for
    byte-level tokenizers, whatever the tokens; for others as long as their bytes are valid characters. `text`: the decoded
    tokens, or a beginning of them.

    >>> class Bytes:
    ...     def decode(self, ids, skip_special_tokens):
    ...         return bytes(ids).decode(errors="replace")
    >>> char_ends(Bytes(), "a🙂b".encode(), "a🙂b").tolist()
    [1, 1, 1, 1, 2, 3]
    """

    def decoded(begin: int, end: int) -> str:
        return tokenizer.decode(ids[begin:end], skip_special_tokens=False)

    ids = [int(token) for token in token_ids]
    ends = np.zeros(len(ids), np.int32)
    context = settled = 0  # tokens[context:settled] are decoded along; their text is settled
    offset = written = 0  # characters of the decoded window, and of `text`, that belong to settled tokens
    for t in range(len(ids)):
        fresh = decoded(context, t + 1)[offset:]
        agreed = len(commonprefix([fresh, text[written : written + len(fresh)]]))  # noqa: RUF071  as is meant
        ends[t] = max(written + agreed, ends[t - 1] if t else 0)
        is_final = agreed == len(fresh) > 0 and not fresh.endswith(REPLACEMENT)
        if is_final or t + 1 - settled == MAX_WINDOW:
            context, settled, written = settled, t + 1, written + agreed
            offset = max(0, len(decoded(context, settled)) - (len(fresh) - agreed))
    ends[-1:] = len(text)
    return ends
