"""`encode_up_to`: tokenizes texts, and stops early if they have more tokens than a sequence may have.

Tokenizing 2 MB may take 17 s, and most such texts are refused afterwards because they are too long. So for a long text,
only its beginning is tokenized first: 64 Ki characters, then 4 times as many, and so on.
"""

from collections.abc import Callable, Iterator, Sequence

FIRST_BEGINNING_CHARACTERS = 65_536
# Factor by which each beginning is longer than the one before. All beginnings of a text together have at most 4/3 of the
# text's characters
GROWTH = 4
# A text that is cut may have other tokens near the cut than the whole text. So this number of tokens at the end of a
# beginning is not counted
UNCERTAIN_TOKENS = 1024
PIECES_PER_CALL = 8192  # maximum number of pieces of a text that one call of the tokenizer encodes

EncodeBatch = Callable[[list[str]], Sequence[list[int]]]


def encode_up_to(encode_batch: EncodeBatch, texts: Sequence[str], max_tokens: int) -> list[int] | None:
    """Return the token ids of all texts, concatenated, or None if there are more than `max_tokens`.

    The texts are encoded in batches. The tokenizers of the package `tokenizers` release Python's lock while they encode,
    but not while they convert the results, so a single large call would block all other threads.

    Args:
        encode_batch: Returns the token ids of each text of a list.
        texts: The texts.
        max_tokens: Maximum number of tokens of all texts together.
    """
    token_ids: list[int] = []
    for batch in _batches(texts):
        room_tokens = max_tokens - len(token_ids)
        if len(batch) == 1 and _begins_with_too_many(encode_batch, batch[0], room_tokens):
            return None
        encodings = encode_batch(batch)
        if sum(len(encoding) for encoding in encodings) > room_tokens:
            return None
        for encoding in encodings:
            token_ids += encoding
    return token_ids


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yield the texts in batches with limited numbers of texts and characters. A text above the limit is a single batch."""
    batch: list[str] = []
    num_characters = 0
    for text in texts:
        is_full = len(batch) == PIECES_PER_CALL
        if batch and (is_full or num_characters + len(text) > FIRST_BEGINNING_CHARACTERS):
            yield batch
            batch = []
            num_characters = 0
        batch.append(text)
        num_characters += len(text)
    if batch:
        yield batch


def _begins_with_too_many(encode_batch: EncodeBatch, text: str, max_tokens: int) -> bool:
    """Return whether a beginning of a long text alone has more tokens than allowed."""
    num_characters = FIRST_BEGINNING_CHARACTERS
    while num_characters < len(text):
        (token_ids,) = encode_batch([text[:num_characters]])
        if len(token_ids) - UNCERTAIN_TOKENS > max_tokens:
            return True
        num_characters *= GROWTH
    return False
