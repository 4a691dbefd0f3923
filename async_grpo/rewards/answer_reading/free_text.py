r"""Finds the formula that a text without a box or a tag states as its answer.

The formula is taken as a whole: in "The answer is 1 - \sqrt{2}", the answer is neither 1 nor 2. A number counts wherever
it stands: in quotation marks, brackets, Markdown or between characters of other scripts. All functions take linear time.
"""

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from async_grpo.rewards.answer_reading.arithmetic import arithmetic_value, states_false_equation
from async_grpo.rewards.answer_reading.choices import (
    CHOICE_WITH_VALUE,
    REASON,
    choice_with_value,
    letter_of,
    plain_choice,
)
from async_grpo.rewards.answer_reading.formulas import Formula, formulas_in
from async_grpo.rewards.answer_reading.measures import units_of
from async_grpo.rewards.answer_reading.notation import plain_value
from async_grpo.rewards.answer_reading.qualifiers import BOUND_WORDS
from async_grpo.rewards.answer_reading.spellings import plain_text
from async_grpo.rewards.answer_reading.units import without_scales

MAX_CHARACTERS = 20_000  # maximum length of the end of a text in which the answer is searched for
MAX_DISTANCE = 50  # maximum number of characters between "answer is" and the answer
MAX_COPULA_DISTANCE = 100  # maximum number of characters between "answer" and "is"

# "answer" in several languages, "correct option" and the like
_ANSWER_WORD = re.compile(
    r"""
    (?i: \b(?:answers?|(?:correct|right|best)[ ](?:option|choice))\b
      | respuesta|réponse|antwort|risposta|resposta|ответ
    )
    | 答案|答え|答|정답
    """,
    re.VERBOSE,
)
# The words between a formula and "answer", as in "So 34 is our final answer, as 12 is too small."
_BEFORE_ANSWER_WORD = re.compile(r"[$*_)\]\\]{0,4}\s(?:is|are)\s(?:the|our|my)\s(?:[a-z]{1,12}\s)?\Z")
# A name before its value, as in "the largest $n$ is 34", and the words between both
_NAME = re.compile(r"(?:[a-zA-Z](?:_\w)?|\\[a-z]{2,8}|[a-zA-Z]{2,20}|[a-zA-Z]\(\w\))")
_BEHIND_NAME = re.compile(r"\s{1,4}(?:is|are|equals?|must be|should be|will be)\b")
# The word or sign between "answer" and the answer itself
_COPULA = re.compile(r"(?i:[:=]|\b(?:is|are|be|equals?|es|est|ist|é|è)\b)|[是为為は]")
# The end of a sentence. The point of a decimal number does not match, because white space must follow
_SENTENCE_END = re.compile(r"[.!?](?=[*_\"')\]]{0,4}(?:\s|\Z))")
_LINK = re.compile(
    r"[ \t]*(?:[,;][ \t]*)?\(?[ \t]*"
    r"(?P<word>and|or(?: maybe| possibly)?|possibly|maybe|perhaps|和|或|及|\\text\s?\{\s?(?:and|or)\s?\})?[ \t]*"
)
# A second answer after the first one, as in "It could be 5. Or it is 7."
_ALTERNATIVE = re.compile(
    r"[ \t*_`\"'()\]}$.,;!?-]{1,8}"
    r"(?i:or|alternatively|otherwise|maybe|perhaps|possibly|but\s(?:it\s|this\s)?(?:might|may|could))\b"
    r"[^.!?\n\d\\$]{0,40}[$(*]{0,3}"
)
_LIST_END = re.compile(r"[\s*_`\"')\]}]*(?:[.!?;:,](?:\s|\Z)|\Z|\n|[.!?]?\*)|[ \t]*\n")
# Marks between "answer is" and the letter of a choice. The second pattern is for a letter with its value, as in
# "(B) 12", where "(" is part of the choice
_BEFORE_CHOICE = re.compile(r"[\s*_`\"':=]*(?:[Oo]ption\s|[Cc]hoice\s)?[\s*_`\"'(\[{:=]*")
_BEFORE_CHOICE_WITH_VALUE = re.compile(r"[\s*_`\"':=]*(?:[Oo]ption\s|[Cc]hoice\s)?")
_MARKS = " \t\n*_`\"':"  # marks around words or a choice
_MAX_CHOICE_CHARACTERS = 200  # maximum length of a text that is read as a choice with its value, as "(B) 12"
# The text after the letter of a choice. "B, C" and "B. Or C" do not choose B, but "B. A is wrong" does
_AFTER_CHOICE = re.compile(
    r"[*_`\"')\]}]*(?:[.!]|[,;](?!\s+\(?[A-J](?![a-zA-Z])))?[*_]*"
    rf"(?:\s*\n|\s*\Z|\s+(?=[A-Z])(?!(?:Or|Maybe|Perhaps|Possibly)\b)|\s{{1,4}}{REASON})"
)
_CHOICE_AFTER_VALUE = re.compile(r"[$*_\s]{1,4}\(?[A-E](?![a-zA-Z'])")  # a second choice, as in "(B) 12 C"
# A unit after a number. The word "in" does not count as inches, because of texts such as "5 in total"
_UNIT_AFTER = re.compile(
    r"\s?((?:(?:square|cubic|sq\.?|cu\.?)\s)?(?!in\b)[a-zA-Z]{2,12}(?:\s?(?:/|\bper)\s?[a-zA-Z]{1,12})?)(\^\d)?(?![a-zA-Z])"
)
# Words before a number that make it a bound, as in "The answer is at least 5", and words after it
_BOUND_BEFORE = re.compile(
    r"[\s*_:]{0,4}(at (?:least|most)|(?:more|less|fewer|greater|larger|smaller|higher|lower) than"
    r"|up to|over|under|above|below)[\s*_$]{1,4}"
)
_BOUND_BEHIND = re.compile(rf"[$*_]{{0,3}}\s({BOUND_WORDS.pattern})")
# Matches the text in front of a formula if it ends with a negation, as in "it is not 5" or "it isn't $5$"
_NEGATION = re.compile(r"(?:\bnot|n['\u2019]t)\s{1,3}[$*(\\]{0,4}\Z")
_NEGATION_CHARACTERS = 12  # number of characters in front of a formula that are searched for a negation
# Matches the text in front of an equation if the equation's left side surely begins there. It does not match for the
# formula `3 = 6` in "2 times 3 = 6" or "2 hours * 3 = 6", because a part of the left side is in the words before it
_BEFORE_EQUATION = re.compile(
    r"(?:\A|[.:!?\n]|\b(?:is|are|so|that|thus|hence|therefore|then|get|have|gives?|since|because))[\s*_(\[,]{0,8}\Z"
)
_BEFORE_EQUATION_CHARACTERS = 20  # number of characters in front of an equation that `_BEFORE_EQUATION` reads


def stated_formula(text: str) -> str | None:
    r"""Return the formula that a text states as its answer, or None if the text contains no formula.

    It is the first formula after the last "answer is" (or "Answer:", in several languages), or else the last formula of
    the text. Formulas that are connected by commas, "and" or "or" are one list.

    >>> stated_formula(r"First 7, then 3. So the answer is 2\sqrt{3}, as 17 said."), stated_formula("So it is (3, 5).")
    ('2\\sqrt{3}', '(3, 5)')
    >>> stated_formula('The answer is "5".'), stated_formula("The answer is $3$, $4$ or $5$"), stated_formula("None.")
    ('5', '3, 4 or 5', None)
    """
    text = without_scales(plain_text(text[-MAX_CHARACTERS:]))
    whole = text.strip(_MARKS)
    choice = plain_choice(whole)
    if choice is not None:
        return choice
    if len(whole) <= _MAX_CHOICE_CHARACTERS and "\n" not in whole and choice_with_value(whole) is not None:
        return whole
    formulas = []
    for formula in formulas_in(text):
        if not _is_name_of_value(text, formula) and not _is_denied(text, formula):
            formulas.append(_with_whole_sides(text, formula))
    return _answer_among(text, formulas)


def stated_words(text: str) -> str | None:
    """Return the words after the last "answer is" up to the end of their sentence, or else the whole text.

    >>> stated_words("So the answer is **Evelyn**. She won."), stated_words("Evelyn"), stated_words(" ")
    ('Evelyn', 'Evelyn', None)
    """
    text = plain_text(text[-MAX_CHARACTERS:])
    words = text
    for word in _ANSWER_WORD.finditer(text):
        sentence_end = _sentence_end(text, word.end())
        copula = _COPULA.search(text, word.end(), min(sentence_end, word.end() + MAX_COPULA_DISTANCE))
        if copula is not None:
            words = text[copula.end() : sentence_end]
    return words.strip(_MARKS) or None


def _with_whole_sides(text: str, formula: Formula) -> Formula:
    """Return the formula, or only its right side if its left side may begin before it.

    In "2 times 3 = 6", the formula is `3 = 6`, but "2 times" is a part of its left side.
    """
    left_side, equals, right_side = formula.text.rpartition("=")
    is_delimited = formula.end - formula.begin > len(formula.text)
    if not equals or is_delimited or arithmetic_value(left_side.rpartition("=")[2]) is None:
        return formula
    before = text[max(0, formula.begin - _BEFORE_EQUATION_CHARACTERS) : formula.begin]
    if _BEFORE_EQUATION.search(before):
        return formula
    return replace(formula, text=right_side.strip(), follows_equals=True)


def _is_denied(text: str, formula: Formula) -> bool:
    """Return whether the text says that a formula is not the answer, as in "not 5"."""
    before = text[max(0, formula.begin - _NEGATION_CHARACTERS) : formula.begin]
    return _NEGATION.search(before) is not None


def _is_name_of_value(text: str, formula: Formula) -> bool:
    """Return whether a formula is only the name of the value that follows it."""
    if formula.is_choice or _NAME.fullmatch(formula.text) is None:
        return False
    return _BEHIND_NAME.match(text, formula.end) is not None


def _answer_among(text: str, formulas: Sequence[Formula]) -> str | None:
    """Return the answer that the text states after its last word "answer", or else the last list of formulas.

    Words "answer" without a formula near them are skipped.
    """
    groups = _lists_of(text, [formula for formula in formulas if not formula.is_choice])
    weak_answer: str | None = None  # the last answer that may not be meant as the final one
    for word in reversed(list(_ANSWER_WORD.finditer(text))):
        answer, is_sure = _answer_at(text, word, formulas, groups)
        if is_sure:
            return answer
        if weak_answer is None:
            weak_answer = answer
    if weak_answer is not None:
        return weak_answer
    return _joined(text, groups[-1]) if groups else None


def _answer_at(
    text: str, word: re.Match[str], formulas: Sequence[Formula], groups: Sequence[Sequence[Formula]]
) -> tuple[str | None, bool]:
    """Return the answer that the text states at one word "answer", and whether it surely is the answer.

    Args:
        text: The text.
        word: The word "answer" in the text.
        formulas: All formulas of the text, including the letters of choices, such as the "B" of "The answer is B".
        groups: The formulas without letters of choices, grouped into lists by `_lists_of`.

    Returns:
        The answer, and whether it is sure. It is not sure without "is" or "=" after the word, as in "My answer 5 follows".
        (None, False) if no formula is near the word.
    """
    group_before = _group_before(text, word.start(), groups)
    if group_before is not None:
        return _joined(text, group_before), True

    sentence_end = _sentence_end(text, word.end())
    copula = _COPULA.search(text, word.end(), min(sentence_end, word.end() + MAX_COPULA_DISTANCE))
    begin = word.end() if copula is None else copula.end()
    choice = None if copula is None else _choice_after(text, begin, formulas)
    if choice is not None:
        return choice, True

    candidates = [group for group in groups if begin <= group[0].begin <= sentence_end]
    # In "The answer is 3 apples + 4 apples = 7 apples", the formula after the last "=" is the result
    results = [group for group in candidates if group[0].follows_equals]
    if results:
        return _joined(text, results[-1]), True
    if candidates and candidates[0][0].begin <= begin + MAX_DISTANCE:
        return _with_bound(text, begin, candidates[0]), copula is not None
    return None, False


def _sentence_end(text: str, begin: int) -> int:
    """Return the end of the sentence at `begin`, or the end of the searched text if the sentence goes on beyond it."""
    search_end = begin + 2 * MAX_COPULA_DISTANCE
    match = _SENTENCE_END.search(text, begin, search_end)
    return search_end if match is None else match.start()


def _group_before(
    text: str, word_begin: int, groups: Sequence[Sequence[Formula]]
) -> Sequence[Formula] | None:
    """Return the formulas before the words "is the answer", as in "34 is the answer", or None if there are none."""
    window_begin = max(0, word_begin - MAX_DISTANCE)
    verb = _BEFORE_ANSWER_WORD.search(text[window_begin:word_begin])
    if verb is None:
        return None
    end = window_begin + verb.start()
    last = bisect_right(groups, end, key=lambda group: group[-1].end - len("**"))
    group = groups[last - 1] if last > 0 else None
    return group if group is not None and abs(group[-1].end - end) <= len("**") else None


def _choice_after(text: str, begin: int, formulas: Sequence[Formula]) -> str | None:
    """Return the letter after "answer is", together with its value if it has one.

    Return None if no letter follows, or if the text after the letter shows that the letter is not the answer.
    """
    start_with_value = _BEFORE_CHOICE_WITH_VALUE.match(text, begin)
    value_begin = begin if start_with_value is None else start_with_value.end()
    choice = CHOICE_WITH_VALUE.match(text, value_begin)
    if choice is not None:
        letter = letter_of(choice)
        value = next((formula for formula in formulas if formula.end > choice.end()), None)
        has_value = value is not None and not value.is_choice and value.begin <= choice.end() + len("**")
        if value is not None and has_value and _CHOICE_AFTER_VALUE.match(text, value.end):
            return None
        return f"({letter}) {value.text}" if value is not None and has_value else letter
    start = _BEFORE_CHOICE.match(text, begin)
    for formula in formulas:
        if start is not None and formula.is_choice and begin <= formula.begin <= start.end():
            return formula.text if _AFTER_CHOICE.match(text, formula.end) else None
        if formula.begin > begin + MAX_DISTANCE:
            break
    return None


def _lists_of(text: str, formulas: Sequence[Formula]) -> list[list[Formula]]:
    """Group the formulas into lists. Commas, "and" or "or" connect the formulas of one list."""
    groups: list[list[Formula]] = []
    has_word = False  # whether the current list contains "and" or "or"
    for formula in formulas:
        link = _link(text, groups[-1][-1], formula) if groups else None
        if link is None:
            _split_unfinished(text, groups, has_word)
            groups.append([formula])
            has_word = False
        else:
            groups[-1].append(formula)
            has_word = has_word or link
    _split_unfinished(text, groups, has_word)
    return groups


def _link(text: str, formula: Formula, next_formula: Formula) -> bool | None:
    """Return whether "and" or "or" connects two formulas, or None if they do not belong to one list."""
    if next_formula.begin - formula.end > MAX_DISTANCE or next_formula.follows_equals:
        return None
    between = text[formula.end : next_formula.begin]
    match = _LINK.fullmatch(between)
    has_word = match["word"] is not None if match is not None else _ALTERNATIVE.fullmatch(between) is not None
    if (match is None and not has_word) or not between.strip() or ("(" in between and not has_word):
        return None
    return None if _are_one_value(formula.text, next_formula.text) else has_word


def _are_one_value(text: str, other_text: str) -> bool:
    r"""Return whether two formulas are one number in two spellings, as in "0.25, or 25%" and "\sqrt{2}, or 1.41"."""
    value = plain_value(text)
    if value is not None and value == plain_value(other_text):
        return True
    return arithmetic_value(text) is not None and not states_false_equation(rf"{text} = {other_text}")


def _split_unfinished(text: str, groups: list[list[Formula]], has_word: bool) -> None:
    """Split the last list into single formulas if its sentence continues after it, as in "In 2005, 17 people".

    A list with "and" or "or" is not split.
    """
    if not groups or len(groups[-1]) == 1 or has_word or _LIST_END.match(text, groups[-1][-1].end):
        return
    formulas = groups.pop()
    groups.extend([formula] for formula in formulas)


def _joined(text: str, group: Sequence[Formula]) -> str:
    """Return the formulas of a list as one text, with the words "and" and "or" between them, and commas elsewhere."""
    if len(group) == 1:
        return group[0].text + _unit_after(text, group[0])
    pieces = [group[0].text]
    for formula, next_formula in pairwise(group):
        link = _LINK.fullmatch(text[formula.end : next_formula.begin])
        word = link["word"] if link is not None else None
        if word is None:
            separator = ", "
        elif "and" in word or word in ("和", "及"):
            separator = " and "
        else:
            separator = " or "
        pieces.extend((separator, next_formula.text))
    return "".join(pieces)


def _with_bound(text: str, begin: int, group: Sequence[Formula]) -> str:
    """Return the formulas of a list, with words such as "at least" before them, or "or more" after them.

    Args:
        text: The text.
        begin: Position after "answer is", at which the words before the list begin.
        group: The formulas.
    """
    before = _BOUND_BEFORE.fullmatch(text, begin, group[0].begin)
    behind = _BOUND_BEHIND.match(text, group[-1].end)
    answer = _joined(text, group)
    if before is not None:
        answer = rf"\text{{{before[1]} }}{answer}"
    return answer if behind is None else rf"{answer}\text{{ {behind[1]}}}"


def _unit_after(text: str, formula: Formula) -> str:
    """Return the unit that follows a number, as a LaTeX text; "" if the word after the number is not a known unit."""
    unit = _UNIT_AFTER.match(text, formula.end)
    if unit is None or not formula.text[-1:].isdecimal() or not units_of(f"1 {unit[1]}"):
        return ""
    return rf"\text{{ {unit[1]}}}{unit[2] or ''}"
