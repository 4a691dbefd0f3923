r"""Rewrites Unicode characters of mathematics as the LaTeX or ASCII text that means the same.

Every function takes linear time. A whole text is never given to `unicodedata.normalize`, which takes quadratic time for
a long run of combining marks.
"""

import re
import unicodedata

_GREEK = {
    "αβγδεζηθικλμνξπρστυφχψω": "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau "
    "upsilon phi chi psi omega",
    "ΓΔΘΛΞΠΣΦΨΩ": "Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega",
}
_COMMANDS = {  # the name of a LaTeX command -> the characters that it stands for
    "times": "×",
    "cdot": "·⋅∙",
    "infty": "∞",
    "emptyset": "∅",
    "pm": "±",
    "mp": "∓",
    "le": "≤⩽≦",
    "ge": "≥⩾≧",
    "ne": "≠",
    "approx": "≈",
    "equiv": "≡",
    "cup": "∪",
    "cap": "∩",
    "in": "∈",
    "notin": "∉",
    "subset": "⊂",
    "subseteq": "⊆",
    "setminus": "∖",
    "angle": "∠",
    "to": "→",
    "lfloor": "⌊",
    "rfloor": "⌋",
    "lceil": "⌈",
    "rceil": "⌉",
    "langle": "⟨〈",
    "rangle": "⟩〉",
    "ldots": "…⋯",
}
_ASCII = {  # ASCII text -> the characters that it stands for
    "-": "\u2212\ufe63\uff0d\u2010\u2011",  # minus signs, and hyphens that are typed in their place
    "/": "÷∕⁄",
    "*": "∗",
    ":": "∶",
    "|": "∣",
    ",": "、،٫",
    ".": "。।۔።",  # full stops
    "'": "′",
    r"^\circ ": "°º",
    r"\mathbb{R}": "ℝ",
    r"\mathbb{Z}": "ℤ",
    r"\mathbb{N}": "ℕ",
    r"\mathbb{Q}": "ℚ",
    r"\mathbb{C}": "ℂ",
}


def _sign_table() -> dict[str, str]:
    table: dict[str, str] = {}
    for letters, names in _GREEK.items():
        for letter, name in zip(letters, names.split(), strict=True):
            table[letter] = rf"\{name} "
    for name, signs in _COMMANDS.items():
        for sign in signs:
            table[sign] = rf"\{name} "
    for text, signs in _ASCII.items():
        for sign in signs:
            table[sign] = text
    return table


SIGNS = _sign_table()  # a character -> the LaTeX or ASCII text that means the same

_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_NOT_ASCII_RUN = re.compile(r"[\x00-\x7f]?[^\x00-\x7f]{1,200}")
# A dash is a minus sign only if no number precedes it. Between two numbers it may denote a range.
_DASH_AS_SIGN = re.compile(r"(^|[(\[{,=:$])(\s{0,8})[\u2013\u2014](?=\s{0,8}[\d.\\√∞π¼-¾⅐-⅞])")
_SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺⁽⁾ⁿⁱ"
_SUBSCRIPTS = "₀₁₂₃₄₅₆₇₈₉₋₊₍₎ₙ"
_SUPERSCRIPT = re.compile(f"[{_SUPERSCRIPTS}]+")
_SUBSCRIPT = re.compile(f"[{_SUBSCRIPTS}]+")
_ON_THE_LINE = str.maketrans(_SUPERSCRIPTS + _SUBSCRIPTS, "0123456789-+()ni" + "0123456789-+()n")
_VULGAR_FRACTION = re.compile("[¼-¾⅐-⅞]")
# A root sign and its content: in parentheses, in braces, a number or letter without either, or nothing
_ROOT = re.compile("([√∛∜])\\s*(?:\\(([^()]{0,200})\\)|\\{([^{}]{0,200})\\}|(\\d+(?:\\.\\d+)?|[a-zA-Zπ])|())")
_ROOT_COMMANDS = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}


def plain_characters(text: str) -> str:
    r"""Return the text with all characters of mathematics rewritten as LaTeX or ASCII, and without invisible ones.

    Digits of all scripts become ASCII digits. All other characters get their compatible form (NFKC), so that full-width
    letters become ASCII letters.

    >>> plain_characters("4√2 \u2212 3²"), plain_characters("\uff083\uff0c½\uff09"), plain_characters("\u200b5。")
    ('4\\sqrt{2} - 3^2', '(3,\\frac{1}{2})', '5.')
    """
    if text.isascii():
        return text
    text = _DASH_AS_SIGN.sub(r"\1\2-", text)
    text = _ROOT.sub(_latex_root, text)
    text = _SUPERSCRIPT.sub(lambda match: _beside_the_line(match, "^"), text)
    text = _SUBSCRIPT.sub(lambda match: _beside_the_line(match, "_"), text)
    text = _VULGAR_FRACTION.sub(_latex_fraction, text)
    return _NOT_ASCII.sub(_plain_character, text)


def compatible(text: str) -> str:
    """Return the NFKC form of a text, in linear time.

    >>> compatible("cafe\u0301 \uff11")
    'café 1'
    """
    return _NOT_ASCII_RUN.sub(lambda match: unicodedata.normalize("NFKC", match[0]), text)


def _plain_character(match: re.Match[str]) -> str:
    character = match[0]
    if character in SIGNS:
        return SIGNS[character]
    if unicodedata.category(character) == "Cf" or "\ufe00" <= character <= "\ufe0f":
        return ""
    digit = unicodedata.decimal(character, None)
    if digit is not None:
        return str(digit)
    plain = unicodedata.normalize("NFKC", character)
    return "".join(SIGNS.get(piece, piece) for piece in plain)


def _beside_the_line(match: re.Match[str], operator: str) -> str:
    content = match[0].translate(_ON_THE_LINE)
    next_character = match.string[match.end() : match.end() + 1]
    # LaTeX reads only one character after `^`, so that the exponent of `2^34` would be 3
    needs_braces = len(content) > 1 or next_character.isalnum()
    return f"{operator}{{{content}}}" if needs_braces else f"{operator}{content}"


def _latex_fraction(match: re.Match[str]) -> str:
    numerator, _, denominator = unicodedata.normalize("NFKC", match[0]).partition("\u2044")
    return rf"\frac{{{numerator}}}{{{denominator}}}"


def _latex_root(match: re.Match[str]) -> str:
    command = _ROOT_COMMANDS[match[1]]
    content = match[2] or match[3] or match[4]
    return f"{command}{{{content}}}" if content else f"{command} "
