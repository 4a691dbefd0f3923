"""An answer in tags or behind "####" that is a formula without delimiters is read as one in a box is."""

import time

import pytest

from async_grpo.rewards.answer_reading.spellings import as_latex
from async_grpo.rewards.answer_reading.units import number_before_unit
from async_grpo.rewards.builtin import sympy
from async_grpo.rewards.builtin.math_verify import _stated, score

FORMS = ["<answer>%s</answer>", "It is so.\n#### %s"]


def reward_of(form: str, answer: str, gold: str) -> float:
    return score({"completion": form % answer, "answer": gold})["reward"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ("1, 2", "1, 2", "2"),
        ("1, -2", "1, -2", "-2"),
        (r"2\sqrt{3}", r"2\sqrt{3}", "3"),
        ("x^2 + 1", "x^2+1", "1"),
        ("(1, 2)", "(1, 2)", "2"),
        (r"\{1, 2\}", r"\{1, 2\}", "2"),
        ("3:4", "3:4", "4"),
        ("7 or 8", "7, 8", "8"),
        ("1, 2 and 3", "1, 2, 3", "3"),
        (r"7 \text{ or } 8", "7, 8", "8"),
        ("x < 1 or x > 2", "x < 1 or x > 2", "2"),
        ("2*sqrt(3)", r"2\sqrt{3}", "2"),
        ("2xy", "2xy", "2"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", "2"),
        (r"\$1,200", "1200", "200"),
        ("2\u03c0", r"2\pi", "2"),
        ("3 \u00d7 4", "12", "4"),
        ("4\u221a2", r"4\sqrt{2}", "4"),
        ("2\u00b2", "4", "2"),
        ("x \u2264 3", r"x \le 3", "3"),
        ("(\u22121, 2)", "(-1, 2)", "2"),
        ("3\u20444", "3/4", "3"),
    ],
)
def test_a_formula_without_delimiters_counts_as_a_whole(form, answer, right, wrong):
    assert [reward_of(form, answer, gold) for gold in (right, wrong)] == [1.0, 0.0]


def test_a_letter_is_a_choice():
    assert [reward_of(FORMS[0], "C", gold) for gold in ("C", "B")] == [1.0, 0.0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "answer",
    [
        "7", "$7$", "7 apples", "3 + 4 = 7", "x = 7", "The answer is 7", "$x = 7$ dollars", "7 cm", "7 km/h", "7 (m)",
        "7.", "7 .", "7,", "**7**", "7%", "it is 7", "It is 7.", r"7\text{ cm}", r"\frac{14}{2}", "\u20ac7",
        "7\u00b0", "7.0", "7 V", "7 m/s", "7 m^2", "7 cm\u00b2", "7 L", "7 \u00b0C", "$7.$", "$7$", r"7\,",
    ],
)  # fmt: skip
def test_a_number_among_words_and_signs_is_still_found(form, answer):
    assert [reward_of(form, answer, gold) for gold in ("7", "8")] == [1.0, 0.0]


def test_braces_without_partners_make_no_box():
    assert [reward_of(FORMS[0], "}7{", "7"), reward_of(FORMS[0], r"7} \boxed", "8")] == [0.0, 0.0]


@pytest.mark.parametrize("form", [*FORMS, r"So \boxed{%s}.", "<answer>$%s$</answer>"])
@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ("4\u221a2", r"4\sqrt{2}", "4"),
        ("2\u00b2", "4", "2"),
        ("1\u00bd", "3/2", "1"),
        ("\u22127", "-7", "7"),
        ("\u20137", "-7", "7"),
        ("\uff083\uff0c4\uff09", "(3, 4)", "4"),
        ("2e3", "2000", "2"),
        ("4.5e-4", "0.00045", "4.5"),
        (r"\frac 3 4", "3/4", "4"),
        (r"2\mathrm{i}", "2i", "2"),
        ("45\u00b0", "45", "4"),
        ("7.", "7", "8"),
        ("12 m/s", "12", "1"),
        ("5 V", "5", "6"),
        ("2e-1", "2e-1", "0.2"),
    ],
)
def test_signs_of_unicode_exponents_and_units_are_read_in_every_form(form, answer, right, wrong):
    assert [reward_of(form, answer, gold) for gold in (right, wrong)] == [1.0, 0.0]


def test_a_dash_between_numbers_is_no_minus_sign():
    assert reward_of(FORMS[0], "3\u20135", "-2") == 0.0


def test_a_letter_behind_a_number_may_be_a_variable_of_the_row():
    assert [reward_of(FORMS[0], "5 N", gold) for gold in ("5N", "5", "6N", "6")] == [1.0, 1.0, 0.0, 0.0]
    assert [reward_of(FORMS[0], "5 x", gold) for gold in ("5x", "5")] == [1.0, 0.0]


@pytest.mark.parametrize("row", [1e-07, "1e-07", r"10^{-7}", "0.0000001"])
def test_tiny_numbers_are_told_apart(row):
    answers = (r"10^{-7}", "0.0000001", r"\frac{1}{10^7}", "1.0e-7", r"2 \times 10^{-7}", r"10^{-8}", "0")
    assert [reward_of(r"\boxed{%s}", answer, row) for answer in answers] == [1.0] * 4 + [0.0] * 3


def test_a_rounded_small_number_is_still_right():
    assert reward_of(r"\boxed{%s}", "0.000123", "0.000123456") == 1.0
    assert reward_of(r"\boxed{%s}", r"0.05\%", "0.0005") == 1.0


def test_division_by_zero_has_no_value_for_sympy():
    assert [
        sympy.score({"completion": r"\boxed{1:00}", "answer": row})["reward"] for row in ("12:00", "1:00")
    ] == [0.0, 1.0]


@pytest.mark.parametrize(
    "piece",
    ["1e", "1,", "\u221a(", "\u00b2", r"\frac1", r"\mathrm{", "and ", "5 m/", r"\begin{a}", ". ", "7 "],
)
def test_any_answer_is_rewritten_in_time_in_proportion_to_its_length(piece):
    text = piece * (20_000 // len(piece))
    began_s = time.process_time()
    as_latex(text)
    number_before_unit(text)
    _stated(f"<answer>{text}</answer>")
    assert time.process_time() - began_s < 1.0
