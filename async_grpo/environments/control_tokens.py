"""`ControlTokens`: keeps control tokens that a foreign text spells from becoming control tokens.

A tokenizer finds `<|im_end|>` in any text. A page that a tool reads, or an environment that repeats what the policy said,
could therefore end its own message and write a turn of the policy. The control tokens of the chat template are in the same
text, though. This is how the two are told apart:

1. Before rendering, a random marker is inserted into every control token that a foreign text spells, and at the ends of a
   text that could become one together with the text beside it.
2. After rendering, the markers are removed, and the text is cut where a marker stood inside a control token.
3. The pieces are tokenized one by one, so that no control token spans two of them. A text without control tokens is not cut
   and has its usual token ids.

Some tokenizers look for control tokens behind a normalizer, which turns other characters into `<|im_end|>`, too. With
those, a text that spells a control token only after normalization is cut between all of its characters.
"""

import re
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

WITH_BARS = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)
MAX_COMPOSED_CHARACTERS = 4  # that a normalizer turns into one: a letter with its accents
MARKER_BYTES = (
    10  # of random: a text that was written before contains the marker with no chance worth mentioning
)


@dataclass(frozen=True)
class Rendered:
    """A text, and the places in it (`0 < place < len(text)`, ascending) that no token may span."""

    text: str
    breaks: tuple[int, ...] = ()


class ControlTokens:
    """The control tokens of a tokenizer, and where texts spell them.

    Control tokens are the special tokens, and other added tokens between bars: DeepSeek's `<｜User｜>` is not marked as
    special. `<think>` and `<tool_call>` are not among them: they begin no turn, and prompts name them to describe a format.
    """

    def __init__(self, tokenizer: Any) -> None:
        spellings = set(getattr(tokenizer, "all_special_tokens", ()))
        for token in getattr(tokenizer, "added_tokens_decoder", {}).values():
            if token.special or WITH_BARS.fullmatch(str(token)):
                spellings.add(str(token))
        # A single letter, which is some tokenizer's unknown token, has no inside in which it could be cut
        self.spellings = sorted(spelling for spelling in spellings if len(spelling) > 1)
        self._pattern = re.compile(_trie_pattern(self.spellings)) if self.spellings else None
        self._beginnings: set[str] = set()  # of a control token, which the text after it may complete
        self._endings: set[str] = set()  # of a control token, which the text before it may complete
        self._longest = 0  # number of characters
        self._note_parts(self.spellings)
        self._normalize = _normalizer_of(tokenizer, self.spellings)
        if self._normalize is not None:
            normalized = sorted({self._normalize(spelling) for spelling in self.spellings} - {""})
            self._normalized_pattern = re.compile(_trie_pattern(normalized))
            self._note_parts(normalized)

    def _note_parts(self, spellings: Iterable[str]) -> None:
        """Note the beginnings and endings of control tokens, and the length of the longest."""
        for spelling in spellings:
            self._longest = max(self._longest, len(spelling))
            for place in range(1, len(spelling)):
                self._beginnings.add(spelling[:place])
                self._endings.add(spelling[place:])

    def breaks_of(self, text: str) -> tuple[int, ...]:
        """Return a place inside each control token that the text spells, also in those that overlap.

        If the text spells one only after normalization, return all places, because it is not known which characters
        become the control token.
        """
        if self._normalize is not None:
            normalized = self._normalize(text)
            if normalized != text and self._normalized_pattern.search(normalized) is not None:
                return tuple(range(1, len(text)))
        return tuple(begin + 1 for begin, _ in self._spelled(text))

    def _spelled(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield begin and end of each control token in the text. A control token may overlap the next."""
        if self._pattern is None:
            return
        match = self._pattern.search(text)
        while match is not None:
            yield match.span()
            match = self._pattern.search(text, match.start() + 1)

    def needed(self, rendered: Rendered) -> Rendered:
        """Return the text with only the breaks that stand inside a control token."""
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
        """Return whether the text around the place spells a control token only after normalization."""
        assert self._normalize is not None
        reach = MAX_COMPOSED_CHARACTERS * self._longest
        around = text[max(0, place - reach) : place + reach]
        normalized = self._normalize(around)
        return normalized != around and self._normalized_pattern.search(normalized) is not None

    def marked(self, value: Any, marker: str) -> Any:
        """Return a JSON value with the marker inside each control token that one of its strings spells.

        A string that ends with the beginning of a control token, or begins with the end of one, also has a marker there,
        because the template may put the rest of the token beside it.
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
    """Return the normalizer behind which the tokenizer looks for control tokens; None if it looks at the text itself."""
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    added_tokens = getattr(tokenizer, "added_tokens_decoder", {}).values()
    normalized_tokens = {str(token) for token in added_tokens if token.normalized}
    if normalizer is None or normalized_tokens.isdisjoint(spellings):
        return None

    def normalize(text: str) -> str:
        # The normalizer refuses a lone surrogate
        return normalizer.normalize_str(text.encode(errors="replace").decode())

    return normalize


def new_marker() -> str:
    """Return a random marker of lower-case letters and digits, which templates do not change."""
    return f"x{secrets.token_hex(MARKER_BYTES)}x"


def without_markers(text: str, marker: str) -> Rendered:
    """Return the text without the markers, and where they stood."""
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
    """Return a regular expression for any of the words, which reads no character of a text twice for two words."""
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
            # A word ends here, and its break also cuts the longer words that begin with it
            return ""
        prefix = re.escape(letter)
        # Letters without alternatives need no group of their own, which would be nested too deeply
        while len(child) == 1 and "" not in child:
            ((next_letter, child),) = child.items()
            prefix += re.escape(next_letter)
        branches.append(prefix + _pattern_of(child))
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
