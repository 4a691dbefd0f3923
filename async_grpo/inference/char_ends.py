"""Map the tokens of a completion to its text: process rewards count in characters, training in tokens."""

from collections.abc import Sequence
from os.path import commonprefix
from typing import Any

import numpy as np

REPLACEMENT = "\ufffd"  # character that a decoder writes for bytes that are no character, or not yet one
# UTF-8 needs three bytes of context, so that a window may begin within a character
MAX_WINDOW_TOKENS = 8


def char_ends(tokenizer: Any, token_ids: Sequence[int], text: str) -> np.ndarray:
    """Return for each token how many characters of the text have been written when it ends.

    The value of token t is the length of the common beginning of `text` and `decode(token_ids[: t + 1])`. So a character of
    several tokens counts from its last token on, and tokens beyond the text (the end token) add nothing.

    Each token is decoded together with the few tokens before it, which takes O(T); decoding every prefix would take O(T^2).
    The values are exact for byte-level tokenizers, and for other tokenizers while the bytes are valid characters.

    Args:
        tokenizer: Has `decode` of Hugging Face's tokenizers.
        token_ids: The tokens (T,).
        text: The decoded tokens, or a beginning of them.

    Returns:
        (T,) int32, never falling, and `len(text)` at the end.

    >>> class Bytes:
    ...     def decode(self, ids, skip_special_tokens):
    ...         return bytes(ids).decode(errors="replace")
    >>> char_ends(Bytes(), "a🙂b".encode(), "a🙂b").tolist()
    [1, 1, 1, 1, 2, 3]
    """
    ids = [int(token) for token in token_ids]
    ends = np.zeros(len(ids), np.int32)
    # A token is settled when its text cannot change any more. tokens[window_begin:num_settled] are decoded once more as
    # context of the following tokens
    window_begin = 0
    num_settled = 0
    chars_in_window = 0  # characters of the decoded window that belong to settled tokens
    chars_in_text = 0  # characters of `text` that belong to settled tokens

    def decode(begin: int, end: int) -> str:
        return tokenizer.decode(ids[begin:end], skip_special_tokens=False)

    for t in range(len(ids)):
        new_text = decode(window_begin, t + 1)[chars_in_window:]
        expected_text = text[chars_in_text : chars_in_text + len(new_text)]
        # `commonprefix` compares any two strings, not only paths
        num_common = len(commonprefix([new_text, expected_text]))  # noqa: RUF071
        previous_end = ends[t - 1] if t else 0
        ends[t] = max(chars_in_text + num_common, previous_end)
        is_final = num_common == len(new_text) > 0 and not new_text.endswith(REPLACEMENT)
        if is_final or t + 1 - num_settled == MAX_WINDOW_TOKENS:
            window_begin = num_settled
            num_settled = t + 1
            chars_in_text += num_common
            num_unmatched = len(new_text) - num_common
            chars_in_window = max(0, len(decode(window_begin, num_settled)) - num_unmatched)
    ends[-1:] = len(text)
    return ends
