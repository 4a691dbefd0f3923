"""Finds the formulas in a text of words, numbers and LaTeX, with and without delimiters.

A number counts wherever it stands: in quotation marks, brackets, Markdown or between characters of other scripts. All
functions take linear time.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from async_grpo.rewards.answer_reading.choices import plain_choice
from async_grpo.rewards.answer_reading.spellings import WORD_IN_FORMULA

MAX_FORMULA_CHARACTERS = 2_000  # maximum length of a formula between delimiters

# One token of a text. The first alternative that matches gives its kind
_TOKEN = re.compile(
    r"""
    (?P<newline>\n)
    |(?P<blank>(?:[ \t\r]|~|\\[,;:!\ ]|\\q?quad(?![a-zA-Z]))+)
    # <<3*4=12>> as in GSM8K, <b>, </b>, and marks of code
    |(?P<tag><<[^<>\n]{0,200}>>|</?[a-zA-Z][a-zA-Z0-9]{0,20}/?>|`{1,3})
    |(?P<environment>\\begin\s?\{)
    |(?P<delimiter>\$\$|\$|\\[(\[])
    |(?P<font>\\(?:text[a-z]{0,6}|mathrm|mathbf|mbox|boldsymbol|operatorname)(?![a-zA-Z])\s?\{)
    |(?P<command>\\[a-zA-Z]+)
    |(?P<escaped>\\[{}|%])
    # 1,234.5 or 12.5 or .5, each perhaps with an exponent, as in 6.02e23
    |(?P<number>(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,5}(?![\w.]*\w))?)
    |(?P<function>(?:sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp|pi|gcd|lcm|max|min|arc(?:sin|cos|tan))(?![a-zA-Z]))
    # A word of two letters or more, perhaps with an apostrophe and digits, as in l'aire and GPT-4o; a letter with digits,
    # as in x2; a character of another script; or the words "I", "A" and "a" before another word
    |(?P<word>(?:[^\W\d_]['\u2019])?[^\W\d_]{2,}(?:(?<=[a-zA-Z])-?\d[a-zA-Z0-9]*)?|[a-zA-Z]\d[a-zA-Z0-9]*|[^\W\d_a-zA-Z]
        |[IaA](?=[ ][a-z]{2}))
    |(?P<letter>[a-zA-Z])
    |(?P<open>[(\[{])
    |(?P<close>[)\]}])
    |(?P<operator>[-+*/^_=<>|:,%])
    |(?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_CLOSINGS = {"$$": "$$", "$": "$", r"\(": r"\)", r"\[": r"\]"}
_OPENERS = {"(": ")", "[": ")", "{": "}", r"\{": r"\}"}
_CLOSERS = {")": ")", "]": ")", "}": "}", r"\}": r"\}"}
_DEPTHS = dict.fromkeys(_OPENERS, 1) | dict.fromkeys(_CLOSERS, -1)
# Words that may be part of a formula: environments, text in a font, commands, functions, and products such as `xy`
_FORMULA_WORD = re.compile(
    rf"""
    \\(?:begin|end)\{{[a-z]+\*?\}}
    | \\(?:text|mbox|mathrm)[a-z]{{0,6}}\s?\{{[^{{}}]{{0,200}}\}}
    | \\[a-zA-Z]+
    | (?<![a-zA-Z]) {WORD_IN_FORMULA} (?![a-zA-Z])
    """,
    re.VERBOSE,
)
_PROSE = re.compile(r"[a-zA-Z]{2}|[^\W\d_a-zA-Z\u0391-\u03c9]")
_WORD = re.compile(r"[a-zA-Z]{2,20}")
# A unit in a font, perhaps with a power, as in `\text{cm}^2`. "or" and "and" are excluded, because they connect lists
_UNIT_IN_FONT = re.compile(r"\\[a-z]+\s?\{\s{0,8}(?!or\b|and\b)[^{}\d]{1,60}\}(?:\^\d|\^\{\d\})?")
# Letters directly after a number, which are variables, as in `3x` and `2ab`
_NUMBER_SUFFIX = re.compile(r"(?:[abcxyz]{2,3}|[a-zA-Z])(?![a-zA-Z0-9])")
_NEGATIVE_PRICE = re.compile(r"(?:\A|[\s(:=*])-\\?[$€£¥₹]\Z")
_GROUP = re.compile(r"\A\{([^{}]+)\}\Z")  # braces around a whole formula, which LaTeX does not show
_REST_OF_FRACTION = re.compile(r"\s?/\s?\d")  # the text after the numerator
_REST_OF_POWER = re.compile(r"\s{0,2}10\s?\^")  # the text after "x", as in "6.02 x 10^23"
_PERCENT = re.compile(r"\s?(?:\\?%|(?:percent|pct)\b)")


@dataclass
class Formula:
    """A formula in a text: its begin and end, including delimiters, and its text without them."""

    begin: int
    end: int
    text: str
    follows_equals: bool = False
    is_choice: bool = False  # whether the formula is a single letter, which may be the choice of an option


@dataclass
class _Token:
    kind: str
    text: str
    begin: int
    end: int


@dataclass
class _Run:
    """The tokens read so far of a formula that has no delimiters, such as `x = 5` in a sentence."""

    tokens: list[_Token] = field(default_factory=list)
    depth: int = 0  # number of open brackets


def formulas_in(text: str) -> list[Formula]:
    """Return all formulas and numbers of a text, with and without delimiters, in their order."""
    formulas: list[Formula] = []
    run = _Run()
    position = 0
    blank: _Token | None = None
    while position < len(text):
        match = _TOKEN.match(text, position)
        assert match is not None, "the last alternative matches every character"
        token = _Token(match.lastgroup or "other", match[0], match.start(), match.end())
        position = token.end
        if token.kind == "blank":
            blank = token
            continue
        if token.kind in ("delimiter", "environment"):
            formula = _delimited(text, token)
            if formula is not None:
                _end_run(text, run, formulas)
                run = _Run()
                formulas.append(formula)
                position = formula.end
                blank = None
                continue
        token = _classified(text, token, run)
        position = token.end
        if not _continues(text, run, token, blank):
            _end_run(text, run, formulas)
            run = _Run()
        if token.kind not in ("break", "blank"):
            run.tokens.append(token)
            run.depth += _DEPTHS.get(token.text, 0)
        blank = None
    _end_run(text, run, formulas)
    return formulas


def is_formula(text: str) -> bool:
    r"""Return whether a text is only a formula. It may contain words in \text{}, "and", "or" and names of functions."""
    return _PROSE.search(_FORMULA_WORD.sub(" ", text)) is None


def _delimited(text: str, token: _Token) -> Formula | None:
    """Return the formula that begins with a delimiter, or None if the delimiter is a currency sign or is not closed."""
    if token.kind == "environment":
        end = text.find(r"\end", token.end, token.end + MAX_FORMULA_CHARACTERS)
        brace = text.find("}", end) + 1 if end >= 0 else 0
        return Formula(token.begin, brace, text[token.begin : brace]) if brace else None
    closing = _CLOSINGS[token.text]
    if token.text == "$" and text[token.begin - 1 : token.begin] == "\\":
        return None
    end = text.find(closing, token.end, token.end + MAX_FORMULA_CHARACTERS)
    content = text[token.end : end]
    is_price = token.text == "$" and content[:1].isdigit() and text[end + 1 : end + 2].isdigit()
    if end < 0 or not content.strip() or is_price:
        return None
    is_text = (
        "\n" in content or content.endswith("\\") or not (is_formula(content) or _WORD.fullmatch(content))
    )
    if token.text == "$" and is_text:
        return None
    end += len(closing)
    percent = _PERCENT.match(text, end)
    content = _GROUP.sub(r"\1", content.strip())
    formula = content + (r"\%" if percent is not None else "")
    equals = text[max(0, token.begin - 2) : token.begin].rstrip().endswith("=")
    return Formula(token.begin, end if percent is None else percent.end(), formula, follows_equals=equals)


def _classified(text: str, token: _Token, run: _Run) -> _Token:
    """Return the token with its kind among `break`, `number`, `letter`, `command`, `function`, brackets and operators."""
    before = text[token.begin - 1 : token.begin]
    after = text[token.end : token.end + 1]
    if token.kind == "font":
        return _font(text, token, run)
    if token.kind in ("newline", "tag", "word", "other", "delimiter", "environment"):
        return _Token("break", token.text, token.begin, token.end)
    if token.kind == "letter" and before in ("'", "\u2019"):
        return _Token("break", token.text, token.begin, token.end)
    if token.kind == "number":
        suffix = _NUMBER_SUFFIX.match(text, token.end)
        if suffix is not None:
            return _Token("number", text[token.begin : suffix.end()], token.begin, suffix.end())
    if token.text == "|":
        # A bar with white space on both sides separates the cells of a table
        has_space_before = before.isspace() or not before
        has_space_after = after.isspace() or not after
        is_table = has_space_before and has_space_after
        return _Token("break", token.text, token.begin, token.end) if is_table else token
    if token.text in ("*", "_"):
        is_between = (
            before.isspace() == after.isspace()
            and before not in ("", token.text)
            and after not in ("", ".", ",")
        )
        # A sign with white space on only one side marks bold or italic text in Markdown
        if not is_between or (token.text == "_" and before.isspace()):
            return _Token("break", token.text, token.begin, token.end)
    if token.text == ":" and not (before.isdigit() and after.isdigit()):
        return _Token("break", token.text, token.begin, token.end)
    return token


def _font(text: str, token: _Token, run: _Run) -> _Token:
    r"""Return a font command such as \text{} as one token if it contains a unit or a letter, else as a `break`."""
    end = text.find("}", token.end, token.end + 100) + 1
    content = text[token.begin : end]
    choice = plain_choice(content) if end else None
    if choice is not None and not run.tokens:
        return _Token("letter", choice, token.begin, end)
    unit = _UNIT_IN_FONT.match(text, token.begin)
    if run.tokens and unit is not None:
        return _Token("font", unit[0], token.begin, unit.end())
    return _Token("break", token.text, token.begin, token.end)


def _continues(text: str, run: _Run, token: _Token, blank: _Token | None) -> bool:
    """Return whether a token continues the formula of the previous tokens."""
    if token.kind == "break" or not run.tokens:
        return False
    previous = run.tokens[-1]
    is_list_comma = token.text == "," and run.depth == 0
    # True for a letter after `2ab`, because this number already has its variables
    is_after_suffix = token.kind == "letter" and previous.kind == "number" and previous.text[-1].isalpha()
    if is_list_comma or is_after_suffix:
        return False
    if blank is None or run.depth > 0:
        return True
    return _continues_after_blank(text, run.tokens, token)


def _continues_after_blank(text: str, tokens: Sequence[_Token], token: _Token) -> bool:
    """Return whether a token that follows a blank, outside of brackets, continues the formula of the previous tokens."""
    previous = tokens[-1]
    if token.kind in ("operator", "close", "command", "font"):
        return True
    if previous.kind in ("operator", "command", "function"):
        return previous.text != "%"  # after a percentage, only an operator continues the formula
    if token.kind == "function":
        return previous.kind in ("number", "close")
    if token.kind in ("open", "escaped"):
        return previous.text in (")", "]")
    if token.kind == "number" and previous.kind == "number":
        return _are_one_number(text, tokens, token)
    # The two blanks in "6.02 x 10^23"
    if token.text == "x" and previous.kind == "number":
        return _REST_OF_POWER.match(text, token.end) is not None
    return previous.text == "x" and token.text == "10" and len(tokens) > 1


def _are_one_number(text: str, tokens: Sequence[_Token], token: _Token) -> bool:
    r"""Return whether a number and the one before it, separated by a blank, belong to one formula.

    They do in `\log_2 8`, in the mixed number "3 1/2" and in the grouped number "12 345".
    """
    previous = tokens[-1]
    if len(tokens) > 1 and tokens[-2].text == "_":
        return True
    if not previous.text.isdecimal():
        return False
    is_mixed = _REST_OF_FRACTION.match(text, token.end) is not None
    is_grouped = len(previous.text) <= 3 and len(token.text) == 3 and token.text.isdecimal()
    return is_mixed or is_grouped


def _end_run(text: str, run: _Run, formulas: list[Formula]) -> None:
    """Append the formula that the tokens of a run form, if they form one."""
    tokens, follows_equals = _trimmed(text, run.tokens)
    if not tokens:
        return
    begin = tokens[0].begin
    end = tokens[-1].end
    is_choice = len(tokens) == 1 and tokens[0].kind == "letter"
    content = tokens[0].text if is_choice else text[begin:end]
    if _NEGATIVE_PRICE.search(text[max(0, begin - 4) : begin]):
        content = f"-{content}"
    has_value = any(token.kind in ("number", "command", "function") or token.text in "=^" for token in tokens)
    if has_value or is_choice:
        formulas.append(Formula(begin, end, content, follows_equals, is_choice))


def _trimmed(text: str, tokens: Sequence[_Token]) -> tuple[list[_Token], bool]:
    """Return the tokens without operators and unmatched brackets at both ends, and whether "=" was removed at the front."""
    tokens = _balanced(tokens)
    first = 0
    while first < len(tokens) and _is_no_begin(text, tokens[first]):
        first += 1
    end = len(tokens)
    while end > first and _is_no_end(tokens[end - 1]):
        end -= 1
    follows_equals = any(token.text == "=" for token in tokens[:first])
    trimmed = tokens[first:end]
    if _is_value_in_brackets(trimmed):
        trimmed = trimmed[1:-1]
    return trimmed, follows_equals


def _is_value_in_brackets(tokens: Sequence[_Token]) -> bool:
    """Return whether the tokens are a single number or letter in brackets, as in "(5)", "(-5%)" or "(C)"."""
    if len(tokens) < 3 or tokens[0].kind != "open" or tokens[-1].kind != "close":
        return False
    inner = tokens[1:-1]
    is_letter = len(inner) == 1 and inner[0].kind == "letter"
    is_number = all(token.kind == "number" or token.text in ("-", "%") for token in inner)
    return is_letter or is_number


def _is_no_begin(text: str, token: _Token) -> bool:
    """Return whether a formula cannot begin with this token. It can begin with a minus sign, but not with a dash."""
    if token.text == r"\approx":
        return True
    if token.kind != "operator" or token.text == "<":
        return False
    before = text[token.begin - 1 : token.begin]
    after = text[token.end : token.end + 1]
    if token.text == ">":
        return before in ("", "\n")
    if token.text not in "+-":
        return True
    return after.isspace() or (before.isascii() and before.isalpha())


def _is_no_end(token: _Token) -> bool:
    """Return whether a formula cannot end with this token: an operator other than the percent sign."""
    return token.kind == "operator" and token.text != "%"


def _balanced(tokens: Sequence[_Token]) -> list[_Token]:
    """Return the tokens between the last unmatched opening bracket and the first unmatched closing bracket."""
    open_tokens: list[int] = []
    end = len(tokens)
    for position, token in enumerate(tokens):
        if token.text in _OPENERS and token.kind in ("open", "escaped"):
            open_tokens.append(position)
        elif token.text in _CLOSERS and token.kind in ("close", "escaped"):
            if not open_tokens or _OPENERS[tokens[open_tokens[-1]].text] != _CLOSERS[token.text]:
                end = position
                break
            open_tokens.pop()
    # An opening bracket at the very end belongs to the words that follow the formula, as in "12 (so ...)"
    while open_tokens and open_tokens[-1] == end - 1:
        end = open_tokens.pop()
    begin = open_tokens[-1] + 1 if open_tokens else 0
    return list(tokens[begin:end])
