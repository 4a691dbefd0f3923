"""What reads foreign text (judges' replies, completions, pages, logs, metrics of other runs) takes time in its proportion.

That a text is read in time is shown by an eighth of it where this suffices; see `reading_time`.
Every regular expression of the package stands in `PATTERNS`, with the feed of `FEEDS` that shows it hostile text, or with
the reason why it sees none. A new one must be added there: see first that no two of its parts match the same character.
"""

import ast
import contextlib
import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from reading_time import SHARE, TooSlow, check_growth, within

from async_grpo.environments import call_formats, call_reader
from async_grpo.environments.control_tokens import ControlTokens
from async_grpo.errors import RequestRefused
from async_grpo.experience import template_variables
from async_grpo.experience.prompts import PromptRenderer
from async_grpo.inference.enforceable_schemas import refuse_ignored_keywords
from async_grpo.launch import local_run
from async_grpo.observe import why
from async_grpo.processes import look, supervisor
from async_grpo.rewards.adapter.result import excerpt
from async_grpo.rewards.answer_reading import (
    arithmetic,
    choices,
    formulas,
    free_text,
    measures,
    notation,
    prose,
    qualifiers,
    spellings,
    units,
)
from async_grpo.rewards.answer_reading.program_output import Tolerance, same_output
from async_grpo.rewards.answer_reading.sequences import read_sequence, values_of_tuple
from async_grpo.rewards.answer_reading.stated import Form, stated_answer
from async_grpo.rewards.builtin import (
    answers,
    code,
    countdown,
    json_schema,
    math_verify,
    mathd,
    sympy,
    text,
)
from async_grpo.rewards.builtin.equal_answers import equal_answers
from async_grpo.rewards.http.exchange import json_object, retry_after_s
from async_grpo.rewards.judges import judge_prompts, judge_replies

PACKAGE = Path(__file__).resolve().parents[2] / "async_grpo"
CALLS = {"compile", "search", "match", "fullmatch", "sub", "subn", "split", "findall", "finditer"}
OURS = "own text, or that of the user's command line"
PLAIN = "its parts match different characters, each at most once"
LIMITED = "a pattern of the user, under a time limit"
CHECKED = "a pattern of the user, which is only compiled"

PATTERNS: dict[str, dict[str, str]] = {
    "rewards/answer_reading/prose.py": {
        "(?<![a-zA-Z])(?:or|and|more|less|fewer|least|most|greater|smaller|over|under|above|below|except|million|billion|thousand|hundred|dozen|percent|times|than|out)(?![a-zA-Z])": "prose",  # noqa: E501
        "\n    (?:(?:so|thus|hence|therefore|then),?\\s{1,4})?\n    (?: (?:the|our|my)?\\s{0,4}(?:final\\s{1,4}|correct\\s{1,4})?(?:answer|result|solution|value|total|sum)s?\n        \\s{0,4}(?:is|are|:|=|equals)\\s{0,4}:?\n      | (?:there|it|that|this)\\s{1,4}(?:is|are)\n      | a\\ total\\ of | about | approximately | exactly | roughly | only\n    )?\n    \\s{0,8}\n    ": "prose",  # noqa: E501
        "(?![bcdfghjklmnpqrstvwxz]{1,20}(?![a-zA-Z]))[a-zA-Z]{3,}": "prose",
        "(?i:\\banswers?\\s{0,4}(?:is|are|:|=)\\s{0,4}:?)": "prose",
        "SPACE": "prose",
        "[-+]?\\\\?[$€£]?(?:\\d|\\\\)|\\$": "prose",
        "[.!?]\\s+\\S": "prose",
        "[=<>]|\\\\(?:[gl]e|ne|in|equiv|approx)(?![a-zA-Z])": "prose",
        "[a-zA-Z][a-zA-Z\\s,'-]*": "prose",
        "[a-zA-Z]{2,}": "prose",
        "\\$|\\\\[()\\[\\]]": "prose",
        "\\s?,\\s?(?:and\\s|or\\s)?|\\sand\\s|\\sor\\s": "prose",
        "f'\\\\\\\\(?:begin|end)\\\\{{[a-z]+\\\\*?\\\\}}|\\\\\\\\[a-zA-Z]+|(?<![a-zA-Z]){WORD_IN_FORMULA}(?![a-zA-Z])'": "prose",  # noqa: E501
        "f'{FONT}\\\\s?\\\\{{([^{{}}]{{0,400}})\\\\}}'": "prose",
    },
    "rewards/answer_reading/measures.py": {
        "(?<!\\\\)\\$": "notation",
        "(\\\\?\\$|[€£¥₹])\\s?[-+]?\\s?\\.?\\d|\\d\\s?(\\\\\\$|[€£¥₹])": "notation",
        "/|\\\\cdot|\\*|[a-zA-Z]{1,12}|\\^\\s?\\{?\\s?([-+]?\\d)": "notation",
        "SPACE": "notation",
        "\\\\frac\\s?\\{([a-zA-Z ^\\d]{1,40})\\}\\s?\\{([a-zA-Z ^\\d]{1,40})\\}": "notation",
        "\\s{0,8}(?:[a-zA-Z]\\s?=)?\\s{0,8}[-+]?[\\d.,/]{1,40}\\s{0,8}[^\\d=+*<>-]{0,60}(?:\\^\\s?\\{?-?\\d\\}?[^\\d=+*<>]{0,40})?": "notation",  # noqa: E501
        "\\s{0,8}\\^\\s?\\{?\\s?\\\\circ\\s?\\}?\\s{0,8}([CF](?![a-zA-Z]))?": "notation",
        "f'(?:(?<=[\\\\d}})])|(?<=\\\\\\\\pi)|(?<=\\\\\\\\pi\\\\s))\\\\s{{0,8}}({_PART}(?:\\\\s{{0,8}}{_PART}){{0,3}})'": "notation",  # noqa: E501
        "f'{FONT}\\\\s?\\\\{{([^{{}}]{{0,60}})\\\\}}'": "notation",
    },
    "rewards/answer_reading/arithmetic.py": {
        "-?\\d{0,100}\\.(\\d{1,100})": "notation",
        "\\s{0,200}(?:(\\d{1,100}(?:\\.\\d{0,100})?|\\.\\d{1,100})|\\\\(frac|sqrt|pi|cdot|times|div|left|right|binom)(?![a-zA-Z])|(\\\\?%|[-+*/^(){}!\\[\\]]))": "notation",  # noqa: E501
        "\\\\approx(?![a-zA-Z])|\\\\simeq(?![a-zA-Z])|={1,3}": "notation",
    },
    "rewards/answer_reading/boxes.py": {
        "\\s{0,8},?\\s{0,8}(?!(?:is|was|are|were|so|then|but|no|not|it|we|fails|works|holds|wrong|right|false|true)(?![a-zA-Z]))(?:(?:for|in|of)\\s{1,8}(?:[a-zA-Z]{2,15}\\s{1,8}){0,3}(?:\\(?[a-zA-Z0-9]\\)?\\s{1,8})?|[a-z]{3,15}\\s{1,8}){1,2}(?:and|or)(?:\\s{1,8}[a-zA-Z]\\s?=)?\\s{0,8}": "stated_answer",  # noqa: E501
        r"[.!?]\s+[A-Z]": "stated_answer",
        r"[^\s$~\\{}]+|\\(?!boxed|fbox|text|[mh]box|q?quad|[hv]space|displaystyle)[a-zA-Z]+|\\[{}%$#&_|]": "stated_answer",
        r"[a-zA-Z\s,.:;=]*": "stated_answer",
        r"[a-zA-Z]": "stated_answer",
        r"[a-zA-Z]{2}|=": "stated_answer",
        r"\\{1,2}(?:boxed|fbox)(?![a-zA-Z])|\\(?:begin|end)(?![a-zA-Z])|\\.|[{}]": "stated_answer",
        r"_ROW_BREAK": "stated_answer",
        r"_SEPARATOR": "stated_answer",
        r"f'(?:{_SPACE})+'": "stated_answer",
        r"f'(?:{_SPACE})+\\Z'": "stated_answer",
        r"f'-?\\d{{1,3}}({_SEPARATOR}\\d{{3}})+(\\.\\d+)?'": "stated_answer",
        r"f'{_ROW_BREAK}|{_SPACE}|[${{}}&*]|\\\\[()\\[\\]]|\\\\(?:begin|end)\\s*\\{{[a-zA-Z]+\\*?\\}}(?:\\{{[lcr| ]*\\}})?|\\\\(?:left|right)(?![a-zA-Z])\\s*[.()\\[\\]|]?|\\\\(?:[bB]ig{{1,2}}[lmr]?|text|textrm|textnormal|[mh]box|mathrm|fbox|boxed)(?![a-zA-Z])'": "stated_answer",  # noqa: E501
        "(?<![a-zA-Z])[a-zA-Z](?:_\\w{1,3})?(?:=| is)\\Z": "stated_answer",
        "[,;]?(?:and|or|and/or)?(?:maybe|perhaps|possibly)?": "stated_answer",
    },
    "rewards/answer_reading/characters.py": {
        r"([√∛∜])\s*(?:\(([^()]{0,200})\)|\{([^{}]{0,200})\}|(\d+(?:\.\d+)?|[a-zA-Zπ])|())": "notation",
        r"(^|[(\[{,=:$])(\s{0,8})[\u2013\u2014](?=\s{0,8}[\d.\\√∞π¼-¾⅐-⅞])": "notation",
        r"[\x00-\x7f]?[^\x00-\x7f]{1,200}": "notation",
        r"[^\x00-\x7f]": "notation",
        "[¼-¾⅐-⅞]": "notation",
        "f'[{_SUBSCRIPTS}]+'": "notation",
        "f'[{_SUPERSCRIPTS}]+'": "notation",
    },
    "rewards/answer_reading/notation.py": {
        "(=[^=]{1,400}?)\\s{0,8},?\\s{0,8}(?:\\\\text\\s?\\{\\s?)?for (?:all|every|any)(?![a-zA-Z])[^=]{0,100}\\Z": "notation",  # noqa: E501
        "\\(\\s?([a-zA-Z](?:\\s?,\\s?[a-zA-Z]){1,5})\\s?\\)\\s?=\\s?(?=\\()": "notation",
        "\n    (-?\\d{1,15}) \\s{1,4} (?:and|\\\\text\\s?\\{\\s?and\\s?\\}) \\s{1,4}\n    (?:(\\d{1,15})\\s?/\\s?(\\d{1,15})|\\\\frac\\{(\\d{1,15})\\}\\{(\\d{1,15})\\})\n    ": "notation",  # noqa: E501
        "\n    ([-+]?\\d{1,30}(?:\\.\\d{1,30})?)\n    \\s{0,8} (?:\\\\times|\\\\cdot|\\*|x) \\s{0,8} 10 \\s{0,8}\\^\\s{0,8}\n    (?:\\{\\s?([-+]?\\d{1,2})\\s?\\}|(\\d))\n    ": "notation",  # noqa: E501
        "\n    \\s{0,8}\n    (?: \\\\pmod(?![a-zA-Z]) \\s? (?:\\{\\s?\\w{1,40}\\s?\\}|\\w)\n      | \\(\\s? \\\\?b?mod(?![a-zA-Z]) \\s{0,4} \\w{1,40} \\s?\\)\n    )\n    \\s{0,8}\\Z\n    ": "notation",  # noqa: E501
        r"((?:[-+\d.,/(){}^*\s]|\\[a-z]{2,8}){1,200}?)\s?=\s{0,8}([a-zA-Z])": "notation",
        r"(-?)(?:\\frac\{(\d{1,40})\}\{(\d{1,40})\}|(\d{1,40})\s?/\s?(\d{1,40}))": "notation",
        r"(.{1,100}?)\s?\\?%": "notation",
        r"(?<=[\w)\]}%$])(?<!\\right)(?<!\\left)(?<!ldots)[\s.,;:]{1,20}\Z": "notation",
        r"([-+]?)10\^(?:\{([-+]?\d{1,2})\}|(\d))": "notation",
        r"[-+]?\d{1,3}(?:[ ']\d{3}){1,20}(?:\.\d{1,40})?": "notation",
        r"\+?(-?)(\d{0,400})(?:\.(\d{0,400}))?": "notation",
        r"\\(?:pm|mp)(?![a-zA-Z])\s?": "notation",
        r"\s*[a-zA-Z]\w?\s*=\s*(?=[^=]+\Z)": "notation",
        r"\s{0,8}(\\approx(?![a-zA-Z])|=)\s{0,8}(-?\d{0,40}\.?\d{1,40})\s{0,8}\Z": "notation",
        r"\s{0,8}\\equiv(?![a-zA-Z])\s{0,8}": "notation",
        r"f'{FONT}\\s?(\\{{[^{{}}]{{0,400}}\\}})'": "notation",
    },
    "rewards/answer_reading/spellings.py": {
        "\n    (?<![\\w.\\\\])\n    (?: (\\d{1,400}\\.\\d{1,400}|1) [eE] ([+-]?\\d{1,5})\n      | (\\d{1,400}) [eE] (\\d{1,5}|[+-]0\\d{0,4}|[+-]\\d{2,5}|\\+\\d)\n    )\n    (?!\\w|\\.\\d)\n    ": "notation",  # noqa: E501
        "\n    (?<![\\w.]) (\\d{1,15}) \\. (\\d{0,15})\n    (?: \\\\(?:overline|bar|dot)\\s{0,8} (?:\\{(\\d{1,15})\\}|(\\d))\n      | \\((\\d{1,15})\\)\n    )\n    ": "notation",  # noqa: E501
        r"(?<![\w.])(\d{1,15})\.(\d{0,6}?)(\d{1,6}?)\3{2,20}\s{0,2}(?:\.{3}|\\[lc]?dots(?![a-zA-Z])\s?)": "notation",
        "_SURE_SEPARATOR": "notation",
        r"f'(?<![\\d.])\\d{{1,3}}(?:{_SURE_SEPARATOR}\\d{{3}}){{1,20}}(?!\\d)'": "notation",
        r"f'(?<=\\d)\\s?_\\s?\\{{\\s?(?:{FONT}\\s?\\{{\\s?)?([a-z]{{3,7}})\\s?\\}}{{1,2}}'": "notation",
        r"f'\n    (?<![\\w.}}^/]) (?<!\\d[ ]) (?<!\\\\[ ])\n    (\\d{{1,15}})\n    (?: {SPACE}{{0,8}} \\\\frac\\{{(\\d{{1,15}})\\}}\\{{(\\d{{1,15}})\\}}\n      | {SPACE}{{1,8}} (\\d{{1,15}})\\s?/\\s?(\\d{{1,15}}) (?![\\w.])\n    )\n    (?!\\s?[\\^!/])\n    '": "notation",  # noqa: E501
        "pattern": "notation",
    },
    "rewards/answer_reading/units.py": {
        r"f'(?<=\\d){SPACE}{{0,8}}(?:{FONT}\\s?\\{{\\s{{0,8}})?([aApP])\\.?\\s?[mM](?![a-zA-Z])\\.?\\s{{0,8}}\\}}?\\s{{0,8}}\\Z'": "notation",  # noqa: E501
        r"f'({_QUANTITY})(?:{SPACE}{{0,8}}{_UNIT}|{SPACE}{{1,8}}{_WORDS})\\s?\\.?'": "notation",
        r"f'\\s*({_NUMBER}){SPACE}{{0,8}}{_SYMBOL}\\s*\\.?\\s*'": "notation",
        'f\'\\n    (?:(?<=[\\\\d}}])|(?<=\\\\\\\\pi)) {SPACE}{{0,8}}\\n    (?: \\\\(?\\\\\\\\(?:text(?:rm|normal)?|mathrm|mbox|rm) \\\\s{{0,8}} \\\\{{\\\\s{{0,8}}\\n        (?!{_NO_UNITS}(?![a-zA-Z])|[aApP]\\\\.?[mM])          # not "5 or", "5 million", "5 pm"\\n        [a-zA-Z][a-zA-Z /.-]{{0,60}} \\\\}} {_POWER}? \\\\)?\\n        (?: \\\\s?/\\\\s? \\\\\\\\(?:text|mathrm)\\\\s?\\\\{{[a-zA-Z]{{1,9}}\\\\}} {_POWER}? )?\\n      | \\\\\\\\frac\\\\{{\\\\s?{_UNIT_IN_FONT}{_POWER}?\\\\s?\\\\}}\\\\{{\\\\s?{_UNIT_IN_FONT}{_POWER}?\\\\s?\\\\}}\\n    )\\n    \\\\s{{0,8}}\\\\Z\\n    \'': "notation",  # noqa: E501
        r"f'\n    (?<![\\w.,]) ({_AMOUNT}) {SPACE}{{1,4}}\n    (?: ({_SCALE})(?![a-zA-Z])\n      | \\\\text\\s?\\{{\\s?({_SCALE})(?![a-zA-Z]) ([^{{}}]{{0,40}}) \\}}  # perhaps with a unit\n    )\n    '": "notation",  # noqa: E501
        r"f'\n    ([-+]?) {_CURRENCY} {SPACE}{{0,8}} ([-+]?{_AMOUNT})\n    | ([-+]?{_AMOUNT}) {SPACE}{{0,8}} {_CURRENCY}\n    '": "notation",  # noqa: E501
    },
    "rewards/answer_reading/choices.py": {
        "f'((?={_NUMBER_OR_COMMAND})[^\\\\n]{{0,200}}[\\\\d}}%)])(?:{SPACE}|,){{1,8}}(?:{FONT}\\\\s?\\\\{{)?\\\\(\\\\s?([A-J])\\\\s?\\\\)\\\\s?\\\\}}?\\\\.?'": "notation",  # noqa: E501
        "f'\\\\s?([a-zA-Z])\\\\s?(?={_SIGN})'": "notation",
        "f'\\\\s?{_SIGN}'": "notation",
        r"f'{FONT}\\s?\\{{([^{{}}]{{1,200}})\\}}'": "notation",
        "\n    (?<![a-zA-Z\\\\}])\n    (?: \\(\\s?[A-J]\\s?\\)\n      | (?<!\\()[A-J][.:)]\\s{1,4}[-\\d$\\\\]  # not the end of `P(A) = 3`, and not that of a sentence\n      | (?<=[,;]\\s)[A-J][.:)]\\s\n      | (?<=\\d)\\s{1,4}[A-E](?=\\s{1,4}[-\\d$\\\\]|\\s{0,4}\\Z)  # as in `12 C 13`\n      | (?:or|maybe|perhaps|possibly|wrong;?|it\\ is)\\s{1,4}\\}?\\s{0,4}[A-J](?![a-zA-Z])\n    )\n    ": "notation",  # noqa: E501
        "f'\\n    (?:{FONT}\\\\s?\\\\{{|\\\\{{)? \\\\s{{0,8}} (?:(?:[Oo]ption|[Cc]hoice)\\\\s{{1,4}})?\\n    \\\\(? \\\\s{{0,8}} (?:{FONT}\\\\s?\\\\{{)? \\\\s{{0,8}}\\n    ([a-zA-Z])\\n    \\\\s{{0,8}} \\\\}}? \\\\s{{0,8}} \\\\)? \\\\.? \\\\s{{0,8}} \\\\}}? \\\\.?\\n    (?:[,;:]?\\\\s{{1,4}}{REASON}[^\\\\n]{{0,200}})?\\n    '": "notation",  # noqa: E501
        "f'\\n    \\\\s{{0,8}}\\n    (?: (?:\\\\(\\\\s?([A-J])\\\\s?\\\\)|([A-J])\\\\))\\n        (?: {SPACE}{{0,8}} (?={_NUMBER_OR_COMMAND})\\n          | {SPACE}{{1,8}} (?=\\\\w{{2}}|[(\\\\[]|[a-zA-Z]\\\\s?[-^+=(])  # a word, a bracket or a formula\\n        )\\n      | ([A-J])[.:] {SPACE}{{1,8}} (?={_NUMBER_OR_COMMAND}|(?!{_DOUBT})\\\\w{{2}})\\n    )\\n    '": "notation",  # noqa: E501
    },
    "rewards/answer_reading/qualifiers.py": {
        "(?:[a-zA-Z]|\\([a-zA-Z](?:\\s?,\\s?[a-zA-Z]){0,5}\\))\\s?(?:=|\\\\in(?![a-zA-Z]))\\s?": "notation",
        "(?<![\\d.:])(\\d{1,2})\\s?:\\s?(\\d{2})(?![\\d:])": "notation",
        "\\\\(?:left|right|[bB]ig{1,2}[lr]?)(?![a-zA-Z])\\s?": "notation",
        "\\\\?[(){}\\[\\]]|,": "notation",
        r"\A\s?([a-zA-Z](?:_\{?\w{1,8}\}?)?)\s?=(?=[^=]+\Z)": "notation",
        r"\A\s?[0-9A-F]{1,60}\s?_\s?\{?\s?(\d{1,3})\s?\}?\Z": "notation",
        r"\\?p?mod(?![a-zA-Z])\s?\{?\s?(\w{1,40})": "notation",
        r"\d{1,9}(?:\s?:\s?\d{1,9}){2,9}": "notation",
        r"f'\\d{_IN_FONT}([aApP])\\.?\\s?[mM](?![a-zA-Z])'": "notation",
        "(?<![a-zA-Z])(?:maybe|perhaps|possibly|not sure)(?![a-zA-Z])": "notation",
        "(?<![a-zA-Z])or\\s{1,4}([a-z]{3,9})(?![a-zA-Z])": "notation",
        "[-+]?\\d[\\d.,]{0,60}(?:/\\d{1,60})?": "notation",
        "\\d{1,60}": "notation",
        "\\d{4}-\\d{2}-\\d{2}": "notation",
        "\\s?(?:[<>]|\\\\(?:[gl]e|ne|[gl]t)(?![a-zA-Z]))": "notation",
        "f'{FONT}\\\\s?\\\\{{([^{{}}]{{1,200}})\\\\}}'": "notation",
        "(?<![a-zA-Z\\\\])(?:(?:or|and)\\s{1,4}(?:(?:possibly|maybe)\\s{1,4})?(?:more|less|fewer|greater|higher|lower|larger|smaller|above|below|over|under|up)|at\\s{1,4}(?:most|least)|to\\s{1,4}\\d{1,20})(?![a-zA-Z])": "notation",  # noqa: E501
    },
    "rewards/answer_reading/formulas.py": {
        '\n    (?P<newline>\\n)\n    |(?P<blank>(?:[ \\t\\r]|~|\\\\[,;:!\\ ]|\\\\q?quad(?![a-zA-Z]))+)\n    # <<3*4=12>> as in GSM8K, <b>, </b>, and marks of code\n    |(?P<tag><<[^<>\\n]{0,200}>>|</?[a-zA-Z][a-zA-Z0-9]{0,20}/?>|`{1,3})\n    |(?P<environment>\\\\begin\\s?\\{)\n    |(?P<delimiter>\\$\\$|\\$|\\\\[(\\[])\n    |(?P<font>\\\\(?:text[a-z]{0,6}|mathrm|mathbf|mbox|boldsymbol|operatorname)(?![a-zA-Z])\\s?\\{)\n    |(?P<command>\\\\[a-zA-Z]+)\n    |(?P<escaped>\\\\[{}|%])\n    # 1,234.5 or 12.5 or .5, each perhaps with an exponent, as in 6.02e23\n    |(?P<number>(?:\\d{1,3}(?:,\\d{3})+(?!\\d)(?:\\.\\d+)?|\\d+(?:\\.\\d+)?|\\.\\d+)(?:[eE][-+]?\\d{1,5}(?![\\w.]*\\w))?)\n    |(?P<function>(?:sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp|pi|gcd|lcm|max|min|arc(?:sin|cos|tan))(?![a-zA-Z]))\n    # A word of two letters or more, perhaps with an apostrophe and digits, as in l\'aire and GPT-4o; a letter with digits,\n    # as in x2; a character of another script; or the words "I", "A" and "a" before another word\n    |(?P<word>(?:[^\\W\\d_][\'\\u2019])?[^\\W\\d_]{2,}(?:(?<=[a-zA-Z])-?\\d[a-zA-Z0-9]*)?|[a-zA-Z]\\d[a-zA-Z0-9]*|[^\\W\\d_a-zA-Z]\n        |[IaA](?=[ ][a-z]{2}))\n    |(?P<letter>[a-zA-Z])\n    |(?P<open>[(\\[{])\n    |(?P<close>[)\\]}])\n    |(?P<operator>[-+*/^_=<>|:,%])\n    |(?P<other>.)\n    ': "free text",  # noqa: E501
        "f'\\n    \\\\\\\\(?:begin|end)\\\\{{[a-z]+\\\\*?\\\\}}\\n    | \\\\\\\\(?:text|mbox|mathrm)[a-z]{{0,6}}\\\\s?\\\\{{[^{{}}]{{0,200}}\\\\}}\\n    | \\\\\\\\[a-zA-Z]+\\n    | (?<![a-zA-Z]) {WORD_IN_FORMULA} (?![a-zA-Z])\\n    '": "free text",  # noqa: E501
        "(?:[abcxyz]{2,3}|[a-zA-Z])(?![a-zA-Z0-9])": "free text",
        r"(?:\A|[\s(:=*])-\\?[$€£¥₹]\Z": "free text",
        "[a-zA-Z]{2,20}": "free text",
        r"[a-zA-Z]{2}|[^\W\d_a-zA-Z\u0391-\u03c9]": "free text",
        r"\\[a-z]+\s?\{\s{0,8}(?!or\b|and\b)[^{}\d]{1,60}\}(?:\^\d|\^\{\d\})?": "free text",
        r"\s?(?:\\?%|(?:percent|pct)\b)": "free text",
        r"\s?/\s?\d": "free text",
        r"\s{0,2}10\s?\^": "free text",
        "\\A\\{([^{}]+)\\}\\Z": "free text",
    },
    "rewards/answer_reading/sequences.py": {
        r"[a-zA-Z](?:_\w)?": "sequence",
        r"\\[lcd]?dots[bcimo]?(?![a-zA-Z])|\.{3}": "sequence",
        r"\\left(?![a-z])|\\right(?![a-z])|\\[,;:! ]|\\q?quad(?![a-zA-Z])|[~$]": "sequence",
        r"\s*[a-zA-Z](?:_\{?\w{1,8}\}?)?\s*(?:=|\\in(?![a-zA-Z]))": "sequence",
    },
    "rewards/answer_reading/fences.py": {
        r"(?P<place>(?:[ \t]*(?:>|[-*+](?=[ \t])|\d{1,9}[.)](?=[ \t])))*[ \t]*)(?P<fence>`{3,}(?=[^`]*\Z)|~{3,})[\s{.]*(?P<language>\w*)": "code_of",  # noqa: E501
        r"[ \t]*>": "code_of",
        r"""\\.|\"{3}|'{3}|["'#]""": "code_of",
    },
    "rewards/answer_reading/python_code.py": {
        r"^[ \t]*(?:(?:async[ \t]+def|def|class)[ \t]+(\w+)|print\b)": "code_of",
    },
    "rewards/answer_reading/program_output.py": {
        r"((?<![\w.])[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?(?!\w|\.\w))": "same_output",
    },
    "rewards/answer_reading/free_text.py": {
        "(?:\\A|[.:!?\\n]|\\b(?:is|are|so|that|thus|hence|therefore|then|get|have|gives?|since|because))[\\s*_(\\[,]{0,8}\\Z": "free text",  # noqa: E501
        "[ \\t]*(?:[,;][ \\t]*)?\\(?[ \\t]*(?P<word>and|or(?: maybe| possibly)?|possibly|maybe|perhaps|和|或|及|\\\\text\\s?\\{\\s?(?:and|or)\\s?\\})?[ \\t]*": "free text",  # noqa: E501
        "[$*_\\s]{1,4}\\(?[A-E](?![a-zA-Z'])": "free text",
        "\\s?((?:(?:square|cubic|sq\\.?|cu\\.?)\\s)?(?!in\\b)[a-zA-Z]{2,12}(?:\\s?(?:/|\\bper)\\s?[a-zA-Z]{1,12})?)(\\^\\d)?(?![a-zA-Z])": "free text",  # noqa: E501
        r"(?:[a-zA-Z](?:_\w)?|\\[a-z]{2,8}|[a-zA-Z]{2,20}|[a-zA-Z]\(\w\))": "free text",
        r"(?i:[:=]|\b(?:is|are|be|equals?|es|est|ist|é|è)\b)|[是为為は]": "free text",
        r"[$*_)\]\\]{0,4}\s(?:is|are)\s(?:the|our|my)\s(?:[a-z]{1,12}\s)?\Z": "free text",
        "[.!?](?=[*_\\\"')\\]]{0,4}(?:\\s|\\Z))": "free text",
        "[\\s*_`\\\"')\\]}]*(?:[.!?;:,](?:\\s|\\Z)|\\Z|\\n|[.!?]?\\*)|[ \\t]*\\n": "free text",
        r"\s{1,4}(?:is|are|equals?|must be|should be|will be)\b": "free text",
        "(?:\\bnot|n['\\u2019]t)\\s{1,3}[$*(\\\\]{0,4}\\Z": "free text",
        "\n    (?i: \\b(?:answers?|(?:correct|right|best)[ ](?:option|choice))\\b\n      | respuesta|réponse|antwort|risposta|resposta|ответ\n    )\n    | 答案|答え|答|정답\n    ": "free text",  # noqa: E501
        "[ \\t*_`\\\"'()\\]}$.,;!?-]{1,8}(?i:or|alternatively|otherwise|maybe|perhaps|possibly|but\\s(?:it\\s|this\\s)?(?:might|may|could))\\b[^.!?\\n\\d\\\\$]{0,40}[$(*]{0,3}": "free text",  # noqa: E501
        "[\\s*_:]{0,4}(at (?:least|most)|(?:more|less|fewer|greater|larger|smaller|higher|lower) than|up to|over|under|above|below)[\\s*_$]{1,4}": "free text",  # noqa: E501
        "[\\s*_`\\\"':=]*(?:[Oo]ption\\s|[Cc]hoice\\s)?": "free text",
        "[\\s*_`\\\"':=]*(?:[Oo]ption\\s|[Cc]hoice\\s)?[\\s*_`\\\"'(\\[{:=]*": "free text",
        'f"""[*_`\\\\"\')\\\\]}}]*(?:[.!]|[,;](?!\\\\s+\\\\(?[A-J](?![a-zA-Z])))?[*_]*(?:\\\\s*\\\\n|\\\\s*\\\\Z|\\\\s+(?=[A-Z])(?!(?:Or|Maybe|Perhaps|Possibly)\\\\b)|\\\\s{{1,4}}{REASON})"""': "free text",  # noqa: E501
        "f'[$*_]{{0,3}}\\\\s({BOUND_WORDS.pattern})'": "free text",
    },
    "rewards/answer_reading/stated.py": {
        r"(</?answer>)": "stated_answer",
    },
    "training/checkpoint_folder.py": {
        r"[0-9a-f]{64}": PLAIN,
        r"step_([0-9]{1,15})(?:\.([0-9]{1,6}))?": PLAIN,
    },
    "config/compared_adapters.py": {
        r"[0-9]+": PLAIN,
    },
    "cluster/ray_session.py": {
        r"\x1b\[[0-9;]*m": PLAIN,
    },
    "experience/row_images.py": {
        "data:([^;,]{0,100})(;base64)?,": PLAIN,
        "([A-Za-z][A-Za-z0-9+.-]{1,20})://": PLAIN,
    },
    "experience/row_columns.py": {
        r"""(array\()?\[\s*\{\s*['"](role|content|from|value)['"]\s*:""": PLAIN,
    },
    "inference/enforceable_schemas.py": {
        r"\[\^(?:\\.|[^\]\\]){0,200}\]": "pattern of a schema",
        r'["\x00-\x1f]|\\(?:[\\nrtfv0]|x[01]|u00[01])': "pattern of a schema",
    },
    "experience/template_turns.py": {
        r"<[|｜][^<>]{1,60}>": PLAIN,
    },
    "processes/hub.py": {
        r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*": PLAIN,
    },
    "environments/call_reader.py": {
        r"\[CALL_ID\]\w{1,64}": "without_unread",
        '(?:\\[CALL_ID\\]|"id": ?")([a-zA-Z0-9]{9})(?=["\\[])': "with_sampled_ids",
    },
    "environments/control_tokens.py": {
        r"_trie_pattern(normalized)": "control tokens",
        r"_trie_pattern(self.spellings)": "control tokens",
    },
    "environments/ecosystem/verifiers_program/verifiers_agent.py": {
        r"[^\w./-]": PLAIN,
    },
    "environments/games/guess.py": {
        r"\d+": PLAIN,
    },
    "experience/control_spellings.py": {
        r"<[|｜].*[|｜]>": "control tokens",
    },
    "experience/prompts.py": {
        r"""['"]([^'"]+)['"]""": "chat template",
        r"""\brole['"]?\]?\s{0,9}(?:[!=]=|(?:not\s{1,9})?in)\s{0,9}(['"][^'"]{1,80}['"]|[\[(][^\])]{0,400}[\])])""": "chat template",  # noqa: E501
        r"""content['\"]?\]?\s{0,9}(?:is\s{1,9}(?:not\s{1,9})?|[!=]=\s{0,9})none""": "chat template",
    },
    "experience/template_variables.py": {
        r"\{%-?\s{0,9}(?:end)?generation\s{0,9}-?%\}": "chat template",
    },
    "launch/local_run.py": {
        r"was the first to end, with exit code 2\b": "log lines",
    },
    "metrics/alarms.py": {
        r"(?!eval_).*/reward_std": "metric names",
        r"\d[\d.,]*": PLAIN,
        r"eval_(.+_)?avg_reward": "metric names",
    },
    "metrics/free_numbers.py": {
        r"NUMBER_NAME": PLAIN,
    },
    "observe/reader.py": {
        r"[\w ./~@%+=:,-]+": OURS,
        r"f'({_WORD}@)?({_WORD}|\\[[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?\\])'": OURS,
    },
    "metrics/trackers.py": {
        r"[^a-zA-Z0-9_]": PLAIN,
    },
    "modeling/packable.py": {
        r"classif|summary|seq_pair": PLAIN,
        r"drop|jitter|stochastic|noise": PLAIN,
    },
    "options/file_text.py": {
        r"\(at line (?P<number>\d+),": PLAIN,
        r"\s*(?P<key>[A-Za-z_][\w-]*)\s*:(?:\s+(?P<value>[^#]*)|$)": PLAIN,
        r"\s*(?P<key>[\w-]+)\s*=\s*(?P<value>[^#]*)": PLAIN,
        r"\s*--(?P<key>[A-Za-z][\w-]*)(?:[ =]\s*(?P<value>.*))?": PLAIN,
        r"\s*-\s+\S|---\s*$": PLAIN,
    },
    "modeling/incomplete_folders.py": {
        r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.safetensors": PLAIN,
    },
    "options/redaction.py": {
        r"%[0-9A-F]{2}": OURS,
        r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL": OURS,
        r"\\u[0-9a-f]{4}": PLAIN,
    },
    "processes/http_host.py": {
        r"f':{client[1]:04X} \\w+:{server[1]:04X} '": OURS,
    },
    "processes/look.py": {
        r"SigCgt:\s*(\w+)": OURS,
        r"RANK=(\d+) ": OURS,
        r"^(Thread [^\n]*)\n((?:    .*\n?)*)": "log lines",
    },
    "processes/supervisor.py": {
        r"(\[rank\d+\]: )?([a-z_]+\.)*[A-Z]\w+(Error|Exception): ": "log lines",
        r"exitcode\s*: (-?\d+)\s+\(pid: (\d+)\)": "torchrun_root",
        r"rank\s*: (\d+)": "torchrun_root",
    },
    "observe/plot.py": {
        r"(\d*):(\d*)": OURS,
    },
    "observe/run_view.py": {
        r"eval_samples_(\d{1,15})(_.*)?": PLAIN,
    },
    "observe/samples.py": {
        r"<script>(.*?)</script>": OURS,
    },
    "observe/why.py": {
        r"error: | ERROR |^([a-z_]+\.)*[A-Z]\w+(Error|Exception): ": "log lines",
    },
    "rewards/builtin/countdown.py": {
        r"(?:(?:0|[1-9][0-9]*)(?![0-9])|[+\-*/() ])+": "countdown",
        r"<answer>(.*?)(</answer>|\Z)": "countdown",
        r"[0-9]+": "countdown",
    },
    "rewards/builtin/equal_answers.py": {
        r"[a-zA-Z](?:_\{?\w{1,8}\}?)?'{0,3}": "names of sets",
    },
    "rewards/builtin/math_verify.py": {
        "(?<=[\\w}) +*/=^-])(?<![a-zA-Z\\\\])([a-z])(?=\\s{0,8}(?:,|\\Z))": "math_verify's answer",
        r"-?[1-9]\d*": "long integer",
        r"(?<!\\)\$|\\[(\[]": "math_verify's answer",
        r"(?<=\d)[ \t]+(?=\d)": "readable",
        r"[\d\s]++/?": "readable",
        r"[^\t\n\r\x20-\x7e]": "readable",
        r"[a-zA-Z]{2}|\*\*|\d\s+\([a-zA-Z]\)|[^\x00-\x7f\u0391-\u03c9\u2200-\u22ff]": "math_verify's answer",
        "f'\\\\\\\\(?:begin|end)\\\\{{[a-z]+\\\\*?\\\\}}|\\\\\\\\text\\\\{{\\\\s{{0,8}}(?:and|or)\\\\s{{0,8}}\\\\}}|\\\\\\\\[a-zA-Z]+|(?<![a-zA-Z]){WORD_IN_FORMULA}(?![a-zA-Z])'": "math_verify's answer",  # noqa: E501
        r"\([^()]*\)": "math_verify's answer",
        r"\\.|[{}]": "math_verify's answer",
        "[=<>]|\\\\(?:to|implies|iff|approx|equiv|sim|[a-zA-Z]{0,20}arrow)(?![a-zA-Z])": "math_verify's answer",
        "\\d+(?:\\.\\d+)?": "math_verify's answer",
        "f'{FONT}\\\\s?\\\\{{(?:[^{{}}]|\\\\{{[^{{}}]{{0,20}}\\\\}}){{0,200}}\\\\}}'": "math_verify's answer",
    },
    "rewards/builtin/mathd.py": {
        r"(-?)(\d+)/(-?\d+)": "mathd",
        r"\s|(?<!\\)\\(?:[,;:! ]|q?quad(?![a-zA-Z]))|~": "mathd",
        r"pattern": "mathd",
    },
    "rewards/builtin/row_checks.py": {
        r"-?\d{1,300}(?:\.\d{1,300})?": PLAIN,
    },
    "rewards/builtin/sympy.py": {
        r"(?<![\\a-zA-Z])(pi|sin|cos|tan|log|ln)(?![a-zA-Z])": "parts of sympy",
        r"-?\d+": "parts of sympy",
        r"-{0,2}\\frac\{\d+\}\{\d+\}": "parts of sympy",
        r"[()\[\]]": "parts of sympy",
    },
    "rewards/builtin/text.py": {
        r".*?</think>\n<answer>.*?</answer>": "format",
        r"<[a-zA-Z/!][^<>]*>|\\boxed\s?\{\s*\}|[`$]": "format of an answer",
        "pattern": LIMITED,
    },
    "rewards/judges/judge_prompts.py": {
        r"f'(?:<[|｜]{_NAMED}>|</s>|<eos>|<end_of_turn>)\\Z'": "completion_of",
        r"f'<(?=[|｜]{_NAMED}>|{_NAMED}[|｜]>|/?s>|(?:start|end)_of_turn>|(?:bos|eos|pad|unk)>|</?SYS>>|<<(?i:BEGIN|END))|\\[(?=/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\\])'": "completion_of",  # noqa: E501
    },
    "rewards/judges/judge_replies.py": {
        r"pattern": LIMITED,
    },
    "rewards/judges/judge_schemas.py": {
        r"pattern": f"{LIMITED}; {CHECKED}",
    },
    "rewards/judges/score_line.py": {
        '(?:\\\\boxed\\{|[\\[($*_\\"`]){0,8}': "score line",
        r"(?:or|to|and)\b": "score line",
        '([\\s*_\\"`]{1,8}is\\b)?[\\s*_:：=\\"`]{1,40}': "score line",
        r"[ \t]{0,3}(?:/|out of)[ \t]{0,3}([0-9]+(?:\.[0-9]+)?)": "score line",
        r"[ \t]{1,3}(?:\(|[-–—]{1,3}[ \t]{1,3}|[✓✔✅]|([^\W\d_]{2,30}))": "score line",
        "[*_\\\"'`)\\]}>$]{0,8}": "score line",
        r"[+\-−]?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)": "score line",
        r"[+\-−–]?\.?\d": "score line",
        r"[+\-−–~.=*/×÷^<>≈]{0,3}[^\S\n]*\d": "score line",
        "[.,;:!?][*_\\\"'`)\\]}>$]{0,8}(?=\\s|\\Z)[^\\S\\n]*": "score line",
        r"[^\S\n]*(?:\n|\Z)|<[/|]": "score line",
        r"[^\W\d_]+": "score line",
        r"score": "score line",
    },
    "weights/self_test.py": {
        r"\.\d+\.": PLAIN,
    },
}


def patterns_in(path: Path) -> Iterator[str]:
    """Yield the expressions that a module gives to `re` or `regex`: constants as they are, all else as source."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        owner = node.func.value
        if isinstance(owner, ast.Name) and owner.id in ("re", "regex") and node.func.attr in CALLS:
            pattern = node.args[0]
            yield pattern.value if isinstance(pattern, ast.Constant) else ast.unparse(pattern)


def test_every_regular_expression_of_the_package_has_been_looked_at():
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if patterns := set(patterns_in(path)):
            found[path.relative_to(PACKAGE).as_posix()] = patterns
    assert found == {module: set(patterns) for module, patterns in PATTERNS.items()}


def test_whoever_imports_names_of_re_would_escape_this_review():
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert node.module not in ("re", "regex"), path
            if isinstance(node, ast.Import):
                assert not any(name.name in ("re", "regex") and name.asname for name in node.names), path


# Feeds


def scored(score: Callable[..., Any], **row: Any) -> Callable[[str], Any]:
    """Return a function that gives a text to a reward as its completion."""
    return lambda completion: score(
        {"answer": "7", "completion_token_ids": [], **row, "completion": completion}
    )


def in_box(score: Callable[..., Any], longest: int) -> Callable[[str], Any]:
    """The same, with as much of the text in a box as the reward reads."""
    return lambda content: score({"answer": "7", "completion": rf"\boxed{{{content[:longest]}}}"})


def judge_by_schema(reply: str) -> None:
    schema = {
        "type": "object",
        "properties": {"score": {"type": "number"}, "why": {"pattern": r"^(\w+\s?)*$"}},
    }
    judge_replies.by_schema(reply, schema | {"required": ["score"]}, "score")


def look_at_log(log: str) -> None:
    look.THREAD.sub("", log)
    local_run.REFUSED.search(log)
    for line in [*log.splitlines()[:100], log]:
        supervisor.TRACEBACK_END.match(line)
        why.ERROR.search(line)


SPECIAL_TOKENS = ["<|im_start|>", "<|im_end|>", "</s>"]
CONTROL_TOKENS = ControlTokens(SimpleNamespace(all_special_tokens=SPECIAL_TOKENS))


def look_at_template(template: str) -> None:
    """Search a chat template for its roles, its tests and its tags, as for a run with options of the template."""
    renderer = PromptRenderer(SimpleNamespace(chat_template=template))
    template_variables.EXTRA_TAG.sub("", template)
    assert renderer._tests_for_none in (True, False)


def look_at_schema(pattern: str) -> None:
    with contextlib.suppress(RequestRefused):
        refuse_ignored_keywords({"type": "string", "pattern": pattern})


FEEDS: dict[str, Callable[[str], Any]] = {
    "read_hermes": call_formats.read_hermes,
    "read_harmony": call_formats.read_harmony,
    "read_command": call_formats.read_command,
    "split_thought": lambda text: call_formats.split_thought(text, call_formats.THOUGHT_TAGS),
    "without_unread": call_reader._without_unread,
    "with_sampled_ids": lambda text: call_reader._with_sampled_ids(call_formats.ReadTurn(None, ""), text),
    "log lines": look_at_log,
    "metric names": lambda name: [
        re.fullmatch("(?!eval_).*/reward_std", name),
        re.fullmatch("eval_(.+_)?avg_reward", name),
    ],
    "torchrun_root": supervisor.torchrun_root,
    "stated_answer": lambda completion: [stated_answer(completion, [form]) for form in get_args(Form)],
    "math_verify's answer": lambda completion: [
        math_verify._stated(completion[:20_000]),
        math_verify._stated(f"<answer>{completion[:19_000]}</answer>"),
    ],
    "free text": lambda completion: [
        free_text.stated_formula(completion[:20_000]),
        free_text.stated_words(completion[:20_000]),
    ],
    "notation of any length": lambda answer: [
        formulas.is_formula(answer),
        spellings.as_latex(answer),
        units.without_scales(answer),
        units.number_before_unit(answer),
    ],
    "notation": lambda answer: [
        notation.plain_notation(answer[:20_000]),
        notation.readings(answer[:20_000]),
    ],
    "short notation": lambda answer: [
        choices.compared_parts(answer[:2_000], answer[:2_000]),
        qualifiers.contradict(answer[:2_000], answer[:2_000]),
        arithmetic.states_false_equation(answer[:200]),
        measures.units_of(answer[:2_000]),
    ],
    "prose": lambda gold: [
        prose.without_introduction(gold[:2_000]),
        prose.is_prose(gold[:2_000]),
        prose.plain_words(gold),
        prose.words_only(gold[:2_000]),
    ],
    "sequence": lambda answer: [
        read_sequence(answer),
        read_sequence(f"1,...,{answer}"),
        values_of_tuple(answer),
    ],
    "names of sets": lambda answer: equal_answers([r"A \cup B"], [answer, rf"A \cup {answer}"]),
    "long integer": math_verify._long_integer,
    "control tokens": CONTROL_TOKENS.breaks_of,
    "chat template": look_at_template,
    "pattern of a schema": look_at_schema,
    "ungrouped": answers.ungrouped,
    "countdown": scored(countdown.score_steps, nums=[3, 4], target=7),
    "readable": lambda answer: math_verify.readable(answer[: 3 * math_verify.MAX_CHARACTERS]),
    "mathd": scored(mathd.score),
    "mathd in a box": in_box(mathd.score, mathd.MAX_CHARACTERS),
    "parts of sympy": lambda element: [sympy.split_elements(element), sympy.exact_form(element)],
    "format": scored(text.format),
    "format of an answer": lambda answer: text.well_formedness(f"</think>\n<answer>{answer}</answer>"),
    "exact": scored(text.exact),
    "json_schema": scored(json_schema.score, schema=True),
    "code_of": code.code_of,
    "same_output": lambda output: same_output(output, output + "0", Tolerance(1e-6)),
    "completion_of": lambda completion: judge_prompts.completion_of({"completion": completion}),
    "score line": lambda reply: judge_replies.by_score_line(reply, 10.0),
    "judge's JSON": judge_by_schema,
    "judge's body": lambda body: json_object(body.encode("utf-8", "surrogatepass")),
    "Retry-After": lambda header: retry_after_s(header[:8190]),  # aiohttp takes no longer one
    "excerpt": excerpt,
}
UNITS = [
    *(
        " ",
        "\n",
        "\t",
        "\u00a0",
        "\r\n",
        "    \n",
        "1",
        "9,",
        "1 ",
        "1.",
        "1/",
        "a",
        "A",
        "_",
        "a_.",
        "é",
        "\u0663",
    ),
    *("\U0001f600", "\ud800", "\0", *"()[]{}<>\\\"'`$,.:=*/-|", "<think>", "</think>", "<think></think>"),
    *(
        r"\boxed{",
        r"\boxed{}",
        r"\boxed ",
        r"\boxed{1},",
        r"\frac",
        r"\frac{",
        r"\text{ ",
        r"\sqrt ",
        "^ {",
        "####",
    ),
    *(
        "<answer>",
        "</answer>",
        "<answer></answer>",
        "```",
        "```json\n",
        "```python\n'\n",
        "> ~~~\n",
        "- ",
        "<tool_call>",
        "<tool_call>{",
        "<tool_call>{}",
    ),
    *(
        "</tool_call>",
        '{"a":',
        '{"a":1},',
        "[{",
        "Score",
        "score ",
        "Score: ",
        "Score: 1 ",
        "Score: 1/",
        "1e",
        "<|a|> ",
    ),
    *(
        "Root Cause",
        "Root Cause rank: 1",
        "rank: 1 exitcode: 1 ",
        "[rank1]: ",
        "a.b.CError",
        "Thread \n",
        "eval_",
    ),
    *("role in [", "role == '", "role not in (", "role    ", "content is not ", "content is "),
    *("eval_avg_reward/", "\x1b[1;", "error:"),
]
IN_THE_LOOP = {
    "score line",
    "judge's JSON",
    "judge's body",
    "completion_of",
    "read_hermes",
    "read_harmony",
    "read_command",
    "excerpt",
    "Retry-After",
}
NUM_CHARACTERS = 1_000_000  # for what runs in the controller's event loop
NUM_OTHER_CHARACTERS = 100_000  # for what runs in processes that can be killed
NUM_PAIR_CHARACTERS = 60_000
PAIRED = ["{", "}", "<", "\\", "$", '"', " ", "1", "a", "\n", "<think>", r"\boxed{"]
# Whatever is longer, these cut to that length
READ_CHARACTERS = {
    "math_verify's answer": 20_000,
    "notation": 20_000,
    "free text": 20_000,
    "short notation": 2_000,
}
MANY_SECONDS = {"math_verify's answer", "notation", "free text", "exact"}  # in all, for all of UNITS
SECONDS = 2.0  # of processor time; what is linear takes some milliseconds, what is quadratic minutes


def texts_of(unit: str, num_characters: int) -> tuple[str, str]:
    """The unit again and again, alone and with something else at begin and end."""
    babble = unit * max(num_characters // len(unit), 1)
    return babble, "{" + babble + "x"


def read(name: str, text: str) -> None:
    # A text that is no answer is refused with one of these errors; BadReply is a ValueError
    with suppress(ValueError, RecursionError):
        FEEDS[name](text)


def feed(name: str, unit: str, num_characters: int) -> None:
    """Show it an eighth of so many characters, and all of them if it is not sure that it reads them in time."""
    what = f"{name} on {unit!r}"
    num_characters = min(num_characters, READ_CHARACTERS.get(name, num_characters))
    shorts, wholes = texts_of(unit, num_characters // SHARE), texts_of(unit, num_characters)
    for short, whole in zip(shorts, wholes, strict=True):
        check_growth(partial(read, name, short), partial(read, name, whole), SECONDS, what)


def feed_whole(name: str, unit: str, num_characters: int) -> None:
    for whole in texts_of(unit, num_characters):
        with within(SECONDS, f"{name} on {unit!r}"):
            read(name, whole)


def test_every_pattern_that_sees_foreign_text_has_a_feed():
    feeds = {feed for patterns in PATTERNS.values() for feed in patterns.values()}
    assert feeds - {OURS, PLAIN, LIMITED, f"{LIMITED}; {CHECKED}"} <= set(FEEDS)


def num_characters_for(name: str) -> int:
    return NUM_CHARACTERS if name in IN_THE_LOOP else NUM_OTHER_CHARACTERS


MARKED = [
    pytest.param(name, marks=pytest.mark.exhaustive) if name in MANY_SECONDS else name for name in FEEDS
]


@pytest.mark.parametrize("name", MARKED)
def test_a_megabyte_of_whatever_it_is_is_read_in_time(name):
    for unit in UNITS:
        feed(name, unit, num_characters_for(name))


@pytest.mark.parametrize("name", MARKED)
def test_so_are_two_kinds_that_take_turns(name):
    for pair in itertools.combinations(PAIRED, 2):
        feed(name, "".join(pair), NUM_PAIR_CHARACTERS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FEEDS)
def test_the_whole_texts_are_read_in_time_too(name):
    """Without the conclusion from an eighth, which a limit of the length in the code itself could make wrong."""
    for unit in UNITS:
        feed_whole(name, unit, num_characters_for(name))
    for pair in itertools.combinations(PAIRED, 2):
        feed_whole(name, "".join(pair), NUM_PAIR_CHARACTERS)


def test_a_pattern_that_reads_in_quadratic_time_is_noticed(monkeypatch):
    monkeypatch.setitem(FEEDS, "quadratic", lambda text: re.search(r"a+b", text))
    monkeypatch.setitem(globals(), "SECONDS", 0.2)
    with pytest.raises(TooSlow, match="quadratic on 'a'"):
        feed("quadratic", "a", NUM_OTHER_CHARACTERS)
    feed("quadratic", "b", NUM_OTHER_CHARACTERS)
