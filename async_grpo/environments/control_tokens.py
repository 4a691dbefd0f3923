"""Control tokens that a foreign text spells, and how they are kept from becoming control tokens.

A tokenizer finds `<|im_end|>` in any text. A page that a tool reads, or an environment that repeats what it was told, could
so end its own message and write a turn of the policy. The chat template's own control tokens are in the same text, though.
Before rendering, we insert a random marker into every control token that a foreign text contains, and at the end of a text
that could become one together with the text after it.
After the template the markers are taken out, and the text is cut where one stood inside a control token. The pieces are
tokenised one by one: no control token spans two. Text that spells none takes the usual way, and has the usual ids.

Some tokenizers look for control tokens behind a normalizer, which makes other characters `<|im_end|>`, too. There a text
that spells one once it is normalized is cut between all of its characters.
"""

import re
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

WITH_BARS = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)
CHARACTERS_OF_ONE = 4  # that a normalizer composes to one, at most: a letter with its accents
MARKER_BYTES = 10  # random ones: a text that was written before cannot hold the marker


@dataclass(frozen=True)
class Rendered:
    """A text, and the places in it (`0 < place < len(text)`, ascending) that no token may span."""

    text: str
    breaks: tuple[int, ...] = ()


class ControlTokens:
    """The control tokens of a tokenizer, found in texts.

    These are the special ones, and other added ones between bars: DeepSeek's `<｜User｜>` is not marked as special.
    `<think>` and `<tool_call>` are none of them: they begin no turn, and prompts name them to describe a format.
    """

    def __init__(self, tokenizer: Any) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        spellings = {str(token) for token in added if token.special or WITH_BARS.fullmatch(str(token))}
        spellings |= set(getattr(tokenizer, "all_special_tokens", ()))
        # One letter has no inside; it would be some tokenizer's unknown token
        self.spellings = sorted(spelling for spelling in spellings if len(spelling) > 1)
        self._pattern = re.compile(_trie_pattern(self.spellings)) if self.spellings else None
        self._beginnings = {spelling[:end] for spelling in self.spellings for end in range(1, len(spelling))}
        self._endings = {spelling[begin:] for spelling in self.spellings for begin in range(1, len(spelling))}
        self._longest = max(map(len, self.spellings), default=0)
        self._normalize = _normalizer_of(tokenizer, self.spellings)
        if self._normalize is not None:
            normalized = sorted({self._normalize(spelling) for spelling in self.spellings} - {""})
            self._normalized_pattern = re.compile(_trie_pattern(normalized))
            self._beginnings |= {text[:end] for text in normalized for end in range(1, len(text))}
            self._endings |= {text[begin:] for text in normalized for begin in range(1, len(text))}
            self._longest = max(self._longest, *map(len, normalized))

    def breaks_of(self, text: str) -> tuple[int, ...]:
        """Return a place inside each control token that the text spells, also in those that overlap.

        If it spells one only once it is normalized, return all places: which characters become which is not known.
        """
        if self._normalize is not None:
            normalized = self._normalize(text)
            if normalized != text and self._normalized_pattern.search(normalized) is not None:
                return tuple(range(1, len(text)))
        return tuple(begin + 1 for begin, _ in self._spelled(text))

    def _spelled(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield begin and end of each control token in the text; one may overlap the next."""
        at = 0
        while self._pattern is not None and (spelled := self._pattern.search(text, at)) is not None:
            yield spelled.span()
            at = spelled.start() + 1

    def needed(self, rendered: Rendered) -> Rendered:
        """Return the text with those of its breaks that stand inside a control token."""
        if not rendered.breaks:
            return rendered
        kept = set[int]()
        for begin, end in self._spelled(rendered.text):
            first = bisect_right(rendered.breaks, begin)
            kept.update(rendered.breaks[first : bisect_left(rendered.breaks, end)])
        if self._normalize is not None:
            kept.update(place for place in rendered.breaks if self._is_near_normalized(rendered.text, place))
        return Rendered(rendered.text, tuple(sorted(kept)))

    def _is_near_normalized(self, text: str, place: int) -> bool:
        """Return whether what stands around the place spells a control token only once it is normalized."""
        assert self._normalize is not None
        reach = CHARACTERS_OF_ONE * self._longest
        around = text[max(0, place - reach) : place + reach]
        normalized = self._normalize(around)
        return normalized != around and self._normalized_pattern.search(normalized) is not None

    def marked(self, value: Any, marker: str) -> Any:
        """Return the JSON value with the marker inside each control token that one of its strings spells.

        A string that ends in the beginning of one, or begins with the end of one, has a marker there: the template may put
        the rest beside it.
        """
        if isinstance(value, str):
            return self._marked_text(value, marker)
        if isinstance(value, Mapping):
            return {self.marked(key, marker): self.marked(entry, marker) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self.marked(entry, marker) for entry in value]
        return value

    def _marked_text(self, text: str, marker: str) -> str:
        lengths = range(1, min(self._longest, len(text) + 1))
        marked = marker.join(cut(text, self.breaks_of(text)))
        forms = [text] if self._normalize is None else [text, self._normalize(text)]
        if any(form[-length:] in self._beginnings for form in forms for length in lengths):
            marked += marker
        if any(form[:length] in self._endings for form in forms for length in lengths):
            marked = marker + marked
        return marked


def _normalizer_of(tokenizer: Any, spellings: Iterable[str]) -> Callable[[str], str] | None:
    """Return the normalizer behind which the tokenizer looks for control tokens; None if it looks for them as spelled."""
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    normalized_tokens = {str(token) for token in added if token.normalized}
    if normalizer is None or normalized_tokens.isdisjoint(spellings):
        return None

    def normalize(text: str) -> str:
        return normalizer.normalize_str(text.encode(errors="replace").decode())  # it takes no lone surrogate

    return normalize


def new_marker() -> str:
    """Return a marker: lower-case letters and digits, which templates leave as they are."""
    return f"x{secrets.token_hex(MARKER_BYTES)}x"


def without_markers(text: str, marker: str) -> Rendered:
    """Return the text without the markers, and where they stood."""
    pieces = text.split(marker)
    breaks, at = [], 0
    for piece in pieces[:-1]:
        at += len(piece)
        breaks.append(at)
    return Rendered("".join(pieces), tuple(breaks))


def cut(text: str, breaks: Iterable[int]) -> list[str]:
    """Return the pieces of the text between the breaks.

    >>> cut("abcd", [1, 3])
    ['a', 'bc', 'd']
    """
    places = tuple(breaks)
    begins, ends = (0, *places), (*places, len(text))
    return [text[begin:end] for begin, end in zip(begins, ends, strict=True)]


def _trie_pattern(words: Iterable[str]) -> str:
    """Return an expression for any of the words, which looks at no character of a text twice for two words."""
    trie: dict[str, Any] = {}
    for word in words:
        node = trie
        for letter in word:
            node = node.setdefault(letter, {})
        node[""] = {}
    return _pattern_of(trie)


def _pattern_of(node: dict[str, Any]) -> str:
    branches = list[str]()
    for letter, child in node.items():
        if letter == "":
            return ""  # the shorter word suffices: its break is one of the longer word, too
        prefix = re.escape(letter)
        while len(child) == 1 and "" not in child:  # a run of letters is no nesting
            ((following, child),) = child.items()
            prefix += re.escape(following)
        branches.append(prefix + _pattern_of(child))
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
