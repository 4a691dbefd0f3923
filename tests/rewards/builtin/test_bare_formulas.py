"""An answer in tags or behind "####" that is a formula without delimiters is read as one in a box is."""

import pytest

from async_grpo.rewards.builtin.math_verify import score

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
        "7\u00b0", "7.0",
    ],
)  # fmt: skip
def test_a_number_among_words_and_signs_is_still_found(form, answer):
    assert [reward_of(form, answer, gold) for gold in ("7", "8")] == [1.0, 0.0]


def test_braces_without_partners_make_no_box():
    assert [reward_of(FORMS[0], "}7{", "7"), reward_of(FORMS[0], r"7} \boxed", "8")] == [0.0, 0.0]
