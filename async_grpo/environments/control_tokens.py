"""`ControlTokens`: ensures that control tokens spelled in foreign text stay plain text.

Foreign text comes neither from the policy nor from the user's data. A tokenizer turns `<|im_end|>` in any text into a
control token. A web page that a tool reads, or an environment that repeats the policy's words, could therefore end its
own message and forge a turn of the policy. The rendered text also contains the control tokens of the chat template,
which must stay control tokens. The two are told apart as follows:

1. Before rendering, a random marker is inserted into every control token that foreign text spells. A marker is also put
   at the end (or beginning) of a foreign text that might form a control token together with the text next to it.
2. After rendering, the markers are removed, and the text is cut where a marker was inside a control token.
3. The pieces are tokenized one by one, so that no control token spans two of them. A text without control tokens is not cut
   and has its usual token ids.

Some tokenizers search for control tokens after a normalizer, which may turn other characters into `<|im_end|>`. With
such a tokenizer, a text that spells a control token only after normalization is cut between all of its characters.
"""

import re
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from async_grpo.experience.control_spellings import control_token_spellings
from async_grpo.types import ImageReference

MAX_COMPOSED_CHARACTERS = 4  # characters that a normalizer may turn into one, such as a letter with accents
# Random bytes of a marker. These are so many that an existing text practically never contains the marker
MARKER_BYTES = 10


@dataclass(frozen=True)
class Rendered:
    """A text, its breaks, and its images.

    Attributes:
        text: The text, with one placeholder for each image.
        breaks: Positions (`0 < position < len(text)`, ascending) that no token may span.
        images: The images, in the order of their placeholders.
    """

    text: str
    breaks: tuple[int, ...] = ()
    images: tuple[ImageReference, ...] = ()


class ControlTokens:
    """Knows the control tokens of a tokenizer, and finds their spellings in texts.

    Args:
        tokenizer: A tokenizer of the transformers library; see `control_token_spellings`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.spellings = control_token_spellings(tokenizer)
        self._pattern = re.compile(_trie_pattern(self.spellings)) if self.spellings else None
        self._beginnings: set[str] = set()  # beginnings of control tokens, which the next text may complete
        self._endings: set[str] = set()  # endings of control tokens, which the text before may complete
        self._longest = 0  # number of characters of the longest control token
        self._note_parts(self.spellings)
        self._normalize = _normalizer_of(tokenizer, self.spellings)
        if self._normalize is not None:
            normalized = sorted({self._normalize(spelling) for spelling in self.spellings} - {""})
            self._normalized_pattern = re.compile(_trie_pattern(normalized))
            self._note_parts(normalized)

    def _note_parts(self, spellings: Iterable[str]) -> None:
        """Record the beginnings and endings of control tokens, and the length of the longest one."""
        for spelling in spellings:
            self._longest = max(self._longest, len(spelling))
            for place in range(1, len(spelling)):
                self._beginnings.add(spelling[:place])
                self._endings.add(spelling[place:])

    def breaks_of(self, text: str) -> tuple[int, ...]:
        """Return a position inside each control token that the text spells, even if they overlap.

        If the text spells a control token only after normalization, return all positions, because it is not known which
        characters become the control token.
        """
        if self._normalize is not None:
            normalized = self._normalize(text)
            if normalized != text and self._normalized_pattern.search(normalized) is not None:
                return tuple(range(1, len(text)))
        return tuple(begin + 1 for begin, _ in self._spelled(text))

    def _spelled(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield the begin and the end of each control token in the text. Control tokens may overlap."""
        if self._pattern is None:
            return
        match = self._pattern.search(text)
        while match is not None:
            yield match.span()
            match = self._pattern.search(text, match.start() + 1)

    def needed(self, rendered: Rendered) -> Rendered:
        """Return the text with only those breaks that are inside a control token."""
        if not rendered.breaks:
            return rendered
        needed_breaks: set[int] = set()
        for begin, end in self._spelled(rendered.text):
            first = bisect_right(rendered.breaks, begin)
            beyond = bisect_left(rendered.breaks, end)
            needed_breaks.update(rendered.breaks[first:beyond])
        if self._normalize is not None:
            for place in rendered.breaks:
                if self._is_near_normalized(rendered.text, place):
                    needed_breaks.add(place)
        return Rendered(rendered.text, tuple(sorted(needed_breaks)))

    def _is_near_normalized(self, text: str, place: int) -> bool:
        """Return whether the text around a position spells a control token only after normalization."""
        assert self._normalize is not None
        reach = MAX_COMPOSED_CHARACTERS * self._longest
        around = text[max(0, place - reach) : place + reach]
        normalized = self._normalize(around)
        return normalized != around and self._normalized_pattern.search(normalized) is not None

    def marked(self, value: Any, marker: str) -> Any:
        """Return a JSON value in which the marker is inserted into each control token that a string spells.

        If a string ends with the beginning of a control token, or begins with the end of one, it also gets a marker
        there, because the chat template may put the rest of the token next to it.
        """
        if isinstance(value, str):
            return self._marked_text(value, marker)
        if isinstance(value, Mapping):
            return {self.marked(key, marker): self.marked(element, marker) for key, element in value.items()}
        if isinstance(value, list | tuple):
            return [self.marked(element, marker) for element in value]
        return value

    def _marked_text(self, text: str, marker: str) -> str:
        marked = marker.join(cut(text, self.breaks_of(text)))
        forms = [text] if self._normalize is None else [text, self._normalize(text)]
        lengths = range(1, min(self._longest, len(text) + 1))
        for form in forms:
            if any(form[-length:] in self._beginnings for length in lengths):
                marked += marker
                break
        for form in forms:
            if any(form[:length] in self._endings for length in lengths):
                marked = marker + marked
                break
        return marked


def _normalizer_of(tokenizer: Any, spellings: Iterable[str]) -> Callable[[str], str] | None:
    """Return the normalizer that the tokenizer applies before it searches for control tokens; None if there is none."""
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    added_tokens = getattr(tokenizer, "added_tokens_decoder", {}).values()
    normalized_tokens = {str(token) for token in added_tokens if token.normalized}
    if normalizer is None or normalized_tokens.isdisjoint(spellings):
        return None

    def normalize(text: str) -> str:
        # Replace lone surrogates, which the normalizer refuses
        return normalizer.normalize_str(text.encode(errors="replace").decode())

    return normalize


def new_marker() -> str:
    """Return a random marker of lower-case letters and digits, which chat templates do not change."""
    return f"x{secrets.token_hex(MARKER_BYTES)}x"


def without_markers(text: str, marker: str) -> Rendered:
    """Return the text without the markers, with breaks at the positions of the markers."""
    pieces = text.split(marker)
    breaks = []
    place = 0
    for piece in pieces[:-1]:
        place += len(piece)
        breaks.append(place)
    return Rendered("".join(pieces), tuple(breaks))


def cut(text: str, breaks: Iterable[int]) -> list[str]:
    """Return the pieces of the text between the breaks.

    >>> cut("abcd", [1, 3])
    ['a', 'bc', 'd']
    """
    places = [0, *breaks, len(text)]
    return [text[begin:end] for begin, end in pairwise(places)]


def _trie_pattern(words: Iterable[str]) -> str:
    """Return a regular expression that matches any of the words, with common beginnings written only once.

    If a word begins with a shorter word of the list, only the shorter word is matched.
    """
    trie: dict[str, Any] = {}
    for word in words:
        node = trie
        for letter in word:
            node = node.setdefault(letter, {})
        node[""] = {}
    return _pattern_of(trie)


def _pattern_of(node: dict[str, Any]) -> str:
    branches: list[str] = []
    for letter, child in node.items():
        if letter == "":
            # A word ends here. Longer words with this beginning need no pattern, because a break in the short word cuts
            # them as well
            return ""
        prefix = re.escape(letter)
        # Letters without alternatives are joined, because one nested group per letter would be too deep
        while len(child) == 1 and "" not in child:
            ((next_letter, child),) = child.items()
            prefix += re.escape(next_letter)
        branches.append(prefix + _pattern_of(child))
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
