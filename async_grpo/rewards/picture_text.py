"""The reward of a text that was read from a picture (OCR): how much of the wanted text it has."""


def text_reward(read: str, target: str) -> dict[str, float]:
    """Return the reward of a text that was read from a picture.

    It is max(0, 1 - edits / length), as in Flow-GRPO (Liu et al. 2025). `edits` is the number of letters to insert, remove
    or replace until the text that was read is the wanted text, and `length` is the number of letters of the wanted text. A
    picture that has the wanted text among other texts gets 1. Spaces and capitals do not count.

    Args:
        read: The text that OCR has read in the picture.
        target: The text that the picture should have.

    Returns:
        `reward`, and `is_exact`: whether the picture has exactly the wanted text.

    Raises:
        ValueError: The wanted text has no letters.

    >>> text_reward("Open  24h", "open 24h"), text_reward("opan", "open")["reward"], text_reward("", "open")["reward"]
    ({'reward': 1.0, 'is_exact': 1.0}, 0.75, 0.0)
    """
    read_letters = _letters(read)
    target_letters = _letters(target)
    if not target_letters:
        raise ValueError("the wanted text is empty")
    if target_letters in read_letters:
        return {"reward": 1.0, "is_exact": float(read_letters == target_letters)}
    length = len(target_letters)
    num_surplus = len(read_letters) - length
    # Each surplus letter must be removed, so `length` surplus letters already make the reward 0. The distance is not
    # computed then: a picture may be full of letters, which would take long to compare
    num_edits = length if num_surplus >= length else edit_distance(read_letters, target_letters)
    return {"reward": max(0.0, 1.0 - num_edits / length), "is_exact": 0.0}


def edit_distance(first: str, second: str) -> int:
    """Return the least number of letters to insert, remove or replace until one text is the other (Levenshtein 1966).

    The time grows with the product of the lengths. rapidfuzz and Levenshtein are faster, but nothing else here needs
    them, and captions are short.

    >>> edit_distance("kitten", "sitting"), edit_distance("", "abc")
    (3, 3)
    """
    # Number of edits between the letters of `first` so far and each beginning of `second`
    distances = list(range(len(second) + 1))
    for row, letter in enumerate(first, start=1):
        previous_distances = distances
        distances = [row]
        for column, other_letter in enumerate(second, start=1):
            replaced = previous_distances[column - 1] + (letter != other_letter)
            removed = previous_distances[column] + 1
            inserted = distances[-1] + 1
            distances.append(min(replaced, removed, inserted))
    return distances[-1]


def _letters(text: str) -> str:
    """Return a text in lower case and without spaces, because OCR often reads spaces and capitals wrongly."""
    return "".join(text.casefold().split())
