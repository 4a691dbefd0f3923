r"""`fenced_blocks`: finds the blocks between fences (``` or ~~~) in a text that a model wrote.

The rules are those of CommonMark (https://spec.commonmark.org/0.31.2/#fenced-code-blocks): a block ends with a fence of
the same character that is at least as long, it may stand in a list or in a block quote, and its lines lose the
indentation of its opening fence. Models often break these rules, so some things are read differently:

- A fence may be indented by any width, also outside of a list. The code may be indented less.
- A fence inside a triple-quoted string of Python code does not end the block.
- If no fence ends the block by these rules, a fence ends it by looser rules: one inside such a string, or a shorter one,
  or one that is indented much further than the opening fence. A fence at the end of a line of code, or before a tag, a
  mark or a sentence, also ends it then, as in ```</answer> or ``` Done now. A block without any end is ignored, because
  its text was cut off.
- An opening fence is ignored if the next line is another opening fence that names Python and is not shorter.
- In a text without any block, a fence that names Python may follow other words in its line.

A Markdown library such as markdown-it-py reads by the strict rules only, so it would lose such blocks. All functions
take linear time, even for texts that are written to slow them down.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

TAB_COLUMNS = 4  # width of a tab stop in CommonMark
# If a fence is indented by at least this many columns more than the opening fence, it only ends the block by looser rules
DEEPER_COLUMNS = 4
MIN_FENCE = 3  # minimum number of characters of a fence
# If one of these marks follows a fence in its line, it is not an opening fence, so it may end a block
TAIL_MARKS = ("<", "*", "(", "[", "#", "!", ",", ";", ". ")
PYTHON = ("python", "python3", "python2", "py", "py3", "pypy", "pypy3")

# The marks of block quotes and list items around the block, then the fence, then the language and its attributes.
# A fence of backticks must not have another backtick after it on its line, so that a line such as ```x``` is no fence.
_OPENING = re.compile(
    r"(?P<place>(?:[ \t]*(?:>|[-*+](?=[ \t])|\d{1,9}[.)](?=[ \t])))*[ \t]*)"
    r"(?P<fence>`{3,}(?=[^`]*\Z)|~{3,})[\s{.]*(?P<language>\w*)"
)
_QUOTE_MARK = re.compile(r"[ \t]*>")
_STRING_MARKS = re.compile(r"""\\.|\"{3}|'{3}|["'#]""")


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    r"""Return (language, content) for each closed block between fences. The language is in lower case or "".

    >>> fenced_blocks("1. Run it:\n\n   ~~~Python title='x'\n   print(7)\n   ~~~\n")
    [('python', 'print(7)\n')]
    """
    lines = text.split("\n")
    return _blocks(lines, _opening_of) or _blocks(lines, _late_opening_of)


def _blocks(lines: Sequence[str], opening_of: Callable[[str], "_Opening | None"]) -> list[tuple[str, str]]:
    blocks: list[tuple[str, str]] = []
    # Once a block had no proper end, each later block ends at the first fence that may end it. Once a block had no end at
    # all, later fences of the same character are ignored. Otherwise, each later block might search the rest of the text
    # in vain, which would take quadratic time
    takes_loose_ends = False
    endless_characters = ""
    index = 0
    while index < len(lines):
        opening = opening_of(lines[index])
        index += 1
        if opening is None or opening.character in endless_characters:
            continue
        if index < len(lines) and opening.is_repeated_by(opening_of(lines[index])):
            continue
        end = _end_of(opening, lines, index, takes_loose_ends)
        if end is None:
            endless_characters += opening.character
            continue
        takes_loose_ends = takes_loose_ends or end.is_loose
        content_lines = list(lines[index : end.first_line])
        if end.is_glued:
            content_lines[-1] = content_lines[-1].rstrip().rstrip(opening.character)
        blocks.append((opening.language, opening.content(content_lines)))
        index = end.next_line
    return blocks


@dataclass(frozen=True)
class _Opening:
    """The opening fence of a block."""

    character: str
    length: int  # number of characters of the fence
    columns: int  # indentation, without the block quotes
    num_quotes: int  # number of block quotes around the block
    language: str

    def inside(self, line: str) -> str | None:
        """Return a line without the marks of the block quotes around the block, or None if it is not in these quotes."""
        position = 0
        for _ in range(self.num_quotes):
            mark = _QUOTE_MARK.match(line, position)
            if mark is None:
                return None
            position = mark.end()
        return line[position:]

    def content(self, lines: Sequence[str]) -> str:
        """Return the text of the block without quote marks and indentation.

        Each line loses at most the indentation of the fence, or that of the first line with text if this is smaller.
        """
        inner_lines = [self.inside(line) or "" for line in lines]
        first_line = next((line for line in inner_lines if line.strip()), "")
        columns = min(self.columns, _columns_of(first_line))
        return "".join(_dedented(line, columns) + "\n" for line in inner_lines)

    def is_repeated_by(self, next_opening: "_Opening | None") -> bool:
        """Return whether this fence is ignored, because the next line is another opening fence, which names Python."""
        if next_opening is None or next_opening.language not in PYTHON:
            return False
        return next_opening.character == self.character and next_opening.length >= self.length

    def is_end(self, line: str) -> bool:
        """Return whether a line, as `inside` returns it, is a fence that may end the block."""
        fence = line.strip(" \t\r")
        return len(fence) >= MIN_FENCE and not fence.strip(self.character)

    def is_glued_end(self, line: str) -> bool:
        """Return whether a line, as `inside` returns it, has code in front of a fence that may end the block."""
        return line.rstrip(" \t\r").endswith(self.character * self.length) and not self.is_end(line)

    def is_tailed_end(self, line: str) -> bool:
        """Return whether a line, as `inside` returns it, is a fence with a tag, a mark or a sentence after it."""
        fence = line.lstrip(" \t")
        tail = fence.lstrip(self.character).strip()
        first_word, blank, _ = tail.partition(" ")
        is_sentence = bool(blank) and first_word[0].isupper() and first_word.lower() not in PYTHON
        is_tail = is_sentence or f"{tail} ".startswith(TAIL_MARKS)
        return is_tail and fence.startswith(self.character * self.length)

    def is_proper_end(self, line: str) -> bool:
        """Return whether a fence for which `is_end` is true is long enough to end the block, and not indented too far."""
        has_length = len(line.strip(" \t\r")) >= self.length
        return has_length and _columns_of(line) < self.columns + DEEPER_COLUMNS


@dataclass(frozen=True)
class _End:
    """The end of a block."""

    first_line: int  # index of the first line after the content: the closing fence, if there is one
    next_line: int  # index of the line that follows the block
    # whether the fence ends the block only by the looser rules (see the module's docstring)
    is_loose: bool = False
    is_glued: bool = False  # whether the last line of the content ends with the fence
    # whether another opening fence follows, which confirms that the block ends here
    stops_at_opening: bool = False


def _late_opening_of(line: str) -> _Opening | None:
    """Return the opening fence of a Python block that follows other words in its line, as in "My code: ```python"."""
    words, fence, language = line.rstrip().rpartition("`" * MIN_FENCE)
    if not fence or "`" in words or language.lower() not in PYTHON:
        return None
    return _Opening(character="`", length=MIN_FENCE, columns=0, num_quotes=0, language=language.lower())


def _opening_of(line: str) -> _Opening | None:
    match = _OPENING.match(line)
    if match is None:
        return None
    place = match["place"]
    behind_quotes = place.rpartition(">")[2]
    return _Opening(
        character=match["fence"][0],
        length=len(match["fence"]),
        columns=len(behind_quotes.expandtabs(TAB_COLUMNS)),
        num_quotes=place.count(">"),
        language=match["language"].lower(),
    )


def _end_of(opening: _Opening, lines: Sequence[str], start: int, takes_loose_ends: bool) -> _End | None:
    """Return the end of a block, or None if it has no end.

    Args:
        opening: The opening fence of the block.
        lines: All lines of the text.
        start: Index of the first line of the content.
        takes_loose_ends: Whether the block ends at the first fence that fits the strict or the looser rules. If False, a
            fence that fits only the looser rules ends the block only if no later fence fits the strict rules.
    """
    may_be_python = opening.language in PYTHON or not opening.language
    loose_end: _End | None = None
    open_string = ""
    for index in range(start, len(lines)):
        line = opening.inside(lines[index])
        if line is None:
            return _End(first_line=index, next_line=index)
        if opening.is_end(line):
            is_proper = opening.is_proper_end(line) and not open_string
            if is_proper or takes_loose_ends:
                return _End(first_line=index, next_line=index + 1)
            loose_end = loose_end or _End(first_line=index, next_line=index + 1, is_loose=True)
        elif opening.is_glued_end(line) and not open_string:
            glued_end = _End(
                first_line=index + 1,
                next_line=index + 1,
                is_loose=True,
                is_glued=True,
                stops_at_opening=True,
            )
            if takes_loose_ends:
                return glued_end
            loose_end = loose_end or glued_end
        elif opening.is_tailed_end(line) and not open_string:
            tailed_end = _End(first_line=index, next_line=index + 1, is_loose=True, stops_at_opening=True)
            if takes_loose_ends:
                return tailed_end
            loose_end = loose_end or tailed_end
        elif loose_end is not None and loose_end.stops_at_opening and _opening_of(line) is not None:
            # The next proper end is that of another block
            return loose_end
        if may_be_python:
            open_string = open_string_after(line, open_string)
    return loose_end


def open_string_after(line: str, open_string: str = "") -> str:
    r"""Return the quotation marks of the triple-quoted Python string that is still open at the end of a line, or "".

    Args:
        line: A line of code.
        open_string: The quotation marks of the string that is open at the beginning of the line, or "".

    >>> open_string_after("x = '''a # b"), open_string_after("c'''  # '''", "'''")
    ("'''", '')
    """
    for mark in _STRING_MARKS.findall(line):
        if open_string:
            if mark.startswith(open_string):
                open_string = ""
        elif mark == "#":
            break
        elif mark[0] in "\"'":
            open_string = mark
    # A string that is not triple-quoted ends at the end of its line at the latest
    return open_string if len(open_string) == 3 else ""


def _columns_of(line: str) -> int:
    """Return the width of the white space at the beginning of a line."""
    indentation = line[: len(line) - len(line.lstrip(" \t"))]
    return len(indentation.expandtabs(TAB_COLUMNS))


def _dedented(line: str, columns: int) -> str:
    """Return a line without the white space in its first `columns` columns.

    A tab that reaches beyond these columns is replaced by spaces for the rest of its width.
    """
    column = 0
    for position, character in enumerate(line):
        if column >= columns or character not in " \t":
            return " " * max(0, column - columns) + line[position:]
        column += TAB_COLUMNS - column % TAB_COLUMNS if character == "\t" else 1
    return " " * max(0, column - columns)
