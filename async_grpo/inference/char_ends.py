"""Map the tokens of a completion to positions in its text.

A process reward names the parts of a text that it scores by their positions in characters. Training needs positions in
tokens.
"""

from collections.abc import Sequence
from os.path import commonprefix
from typing import Any

import numpy as np

REPLACEMENT = "\ufffd"  # character that a decoder writes for bytes that are not a complete character
# Maximum number of tokens whose text later tokens can still change (see `char_ends`). A character has at most four
# bytes in UTF-8
MAX_WINDOW_TOKENS = 8


def char_ends(tokenizer: Any, token_ids: Sequence[int], text: str) -> np.ndarray:
    """Return for each token how many characters of the text are complete after it.

    The value of token t is the length of the common beginning of `text` and `decode(token_ids[: t + 1])`. A character
    that takes several tokens is complete after the last of them. Tokens after the text, such as the end token, add
    nothing.

    Each token is decoded together with the few tokens before it, which takes O(T). Decoding every prefix would take
    O(T^2). The values are exact for byte-level tokenizers. For other tokenizers they are exact if the tokens' bytes are
    valid characters.

    Args:
        tokenizer: An object with the `decode` method of Hugging Face's tokenizers.
        token_ids: The tokens (T,).
        text: The decoded tokens, possibly without their end.

    Returns:
        (T,) int32. The values never decrease, and the last one is `len(text)`.

    >>> class Bytes:
    ...     def decode(self, ids, skip_special_tokens):
    ...         return bytes(ids).decode(errors="replace")
    >>> char_ends(Bytes(), "a🙂b".encode(), "a🙂b").tolist()
    [1, 1, 1, 1, 2, 3]
    """
    ids = [int(token) for token in token_ids]
    ends = np.zeros(len(ids), np.int32)
    # A token is "settled" once later tokens cannot change its text. The settled tokens ids[window_begin:num_settled]
    # are decoded again, as the context of the tokens after them
    window_begin = 0
    num_settled = 0
    chars_in_window = 0  # number of characters of the decoded window that belong to settled tokens
    chars_in_text = 0  # number of characters of `text` that belong to settled tokens

    def decode(begin: int, end: int) -> str:
        return tokenizer.decode(ids[begin:end], skip_special_tokens=False)

    for t in range(len(ids)):
        new_text = decode(window_begin, t + 1)[chars_in_window:]
        expected_text = text[chars_in_text : chars_in_text + len(new_text)]
        # `commonprefix` works on all strings, although it belongs to `os.path`
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
