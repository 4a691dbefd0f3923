"""The answer of a text without a box: a formula counts as a whole or not at all, and a number wherever it stands."""

import pytest
from reading_time import check_reading_time

from async_grpo.rewards.answer_reading.formulas import is_formula
from async_grpo.rewards.answer_reading.free_text import stated_formula
from async_grpo.rewards.builtin.math_verify import score

# kind -> (text, row's answer, whether it is right)
KINDS = {
    "glued": [
        ("So the answer is (5)", "5", True), ("So the answer is `5`", "5", True), ('So the answer is "5"', "5", True),
        ("So the answer is '5'", "5", True), ("So the answer is [5]", "5", True),
        ("So the answer is \u201c5\u201d", "5", True),
        ("So the answer is <b>5</b>", "5", True), ("So the answer is **5**", "5", True),
        ("So the answer is *5*.", "5", True),
        ("So the answer is _5_", "5", True), ("<result>5</result>", "5", True), ("So the answer is (-5)", "-5", True),
        ("So the answer is 是5。", "5", True), ("答案是5。", "5", True), ("所以答案是5个苹果", "5", True),
        ("答案：-5", "-5", True),
        ("答案为-5。", "-5", True), ("So the answer is 「5」", "5", True), ("<answer>(5)</answer>", "5", True),
        ("La réponse est 42.", "42", True), ("Die Antwort ist 42.", "42", True), ("所以最终答案为：**42**。",
        "42", True),
        ("So the answer is (6)", "5", False), ("The answer is H2O", "2", False), ("The answer is x5", "5", False),
        ("See room A5", "5", False), ("The answer is 答案5和6", "5", False), ("This is covid-19", "19", False),
        ("So the answer is [5, 6]", "5", False), ("答案是5和7。", "7", False),
        ('So the answer is "5" or "6"', "55", False),
    ],
    "whole formulas": [
        (r"The answer is 1 - \sqrt{2}", r"1 - \sqrt{2}", True), (r"The answer is 2\pi.", r"2\pi", True),
        ("It is (3, 5).", "(3,5)", True), (r"So the answer is 2\sqrt{3}.", r"2\sqrt{3}", True), ("It is 2x.",
        "2x", True),
        ("It is x^2 + 1.", "x^2+1", True), ("So the answer is 5e10.", "5e10", True), ("It is x = 3.", "3", True),
        ("The answer is sqrt(2)", r"\sqrt{2}", True), ("The answer is 3 + 4i", "3+4i", True), ("It is 2/3.",
        "2/3", True),
        ("The answer is [1, 2).", "[1,2)", True), (r"The answer is \{1, 2\}.", r"\{1,2\}", True),
        (r"The answer is 3 \times 10^5.", "300000", True), ("The answer is 2π", r"2\pi", True),
        ("The answer is n(n+1)/2", r"\frac{n(n+1)}{2}", True), ("The answer is x > 3", "x>3", True),
        (r"The answer is \log_2 8", "3", True), ("The answer is 3:4", "3:4", True),
        (r"The answer is 1 - \sqrt{2}", "1", False), (r"The answer is 2\pi", "2", False), ("It is (3, 5).",
        "5", False),
        ("It is (3, 5).", "3", False), ("It is 2x.", "2", False), ("It is x^2 + 1.", "1", False),
        ("So the answer is 5e10.", "5", False), (r"The answer is 2 \pi", "2", False), ("The answer is √2",
        "2", False),
        ("The answer is 2*pi", "2", False), ("The answer is 1/sqrt(2)", "1", False), ("The answer is log_2 8",
        "8", False),
        ("The answer is x > 3.", "3", False), ("The answer is f(3)", "3", False), ("The answer is [1, 2).",
        "2", False),
        ("It is 1 234.", "234", False), ("It is 1 234.", "1", False), ("The answer is 3 x 10^5", "5", False),
    ],
    "mixed numbers": [
        ("The answer is 7 3/4", "31/4", True), ("So it is 5 1/4.", "21/4", True), ("The answer is 2½", "5/2", True),
        ("The answer is -7 3/4", "-31/4", True), ("The answer is 3 1/2 cups", "7/2", True), ("#### 5 1/2",
        "11/2", True),
        ("The answer is 2 2/3", "2", False), ("So it is 5 1/4.", "5", False), ("So it is 5 1/4.", "1/4", False),
        ("The answer is 4 10/3", "10", False), ("The answer is 2 and 2/3", "2", False), ("The answer is 2½",
        "2", False),
    ],
    "lists": [
        ("The answer is 3 or 4", "3, 4", True), ("The answer is $3$, $4$ or $5$", "3, 4, 5", True),
        ("In 2005, 17 people came.", "17", True), ("There are 5 apples and 6 pears, 11 in total.", "11", True),
        ("The probability is 0.25, or 25%.", "0.25", True), ("x = 2 or x = 3", "2, 3", True),
        ("The answer is 3, 4, 5", "3", False), ("The answer is 3, 4, 5", "5", False), ("The answer is 3 or 4",
        "3", False),
        ("The answer is $3$, $4$ or $5$", "3", False), ("The answer is x = 5 and y = 6", "5", False),
    ],
    "sentences": [
        ("The total is $1,080$ miles.", "1080", True), ("The answer is $1,234.00", "1234", True),
        ("He pays $5 for apples and $6 for pears. The answer is $11.", "11", True), ("The answer is -$5", "-5", True),
        ("He pays $5 for apples and $6 for pears, that is $11 in total", "11", True), ("The answer is 12m",
        "12", True),
        ("So 9 * 3 = 27 eggs", "27", True), ("Total: 12 (3 * 4).", "12", True), ("The answer is 12 m/s", "12", True),
        ("The answer is 42 because 6*7=42.", "42", True), ("The answer is 5th", "5", True),
        ("The answer is 5!", "5", True),
        ("- 5 apples\n- 6 pears\n\nTotal - 11", "11", True), ("1. First\n2. Second, giving 9.", "9", True),
        ("I answered 3 questions. So there are 12 left.", "12", True), ("<answer>It is 12 - I think</answer>",
        "12", True),
        ("She makes 9 * 2 = $<<9*2=18>>18 every day", "18", True), ("the answer is\n$$x = 5$$\n", "5", True),
        ("The answer to question 3 is 12.", "12", True), ("The answer is $5.", "5", True),
        (r"The answer is 5\$", "5", True),
        ("The answer is C", "C", True), ("The answer is (C)", "C", True), ("Answer: **B**", "B", True),
        ("The answer is C", "B", False), ("The answer is A and B", "A", False), ("The answer is 5-6", "5", False),
        ("The answer to question 3 is 12.", "3", False), ("It is -5.", "5", False), ("It is 1,234.", "234", False),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("text", "gold", "is_right"), [case for cases in KINDS.values() for case in cases])
def test_a_text_without_a_box_states_a_whole_formula(text, gold, is_right):
    assert score({"completion": text, "answer": gold})["reward"] == float(is_right)


def test_a_row_may_be_a_sentence():
    assert score({"completion": r"\boxed{34}", "answer": "So, x = 34 apples."})["reward"] == 1.0


def test_words_are_no_formula():
    assert [is_formula(text) for text in ("x + 1", r"5 \text{ or } 6", "5 and", "7 apples")] == [
        True,
        True,
        True,
        False,
    ]
    assert stated_formula("I do not know.") is None


@pytest.mark.parametrize(
    "piece",
    [
        "(", "[", "{", "}", ")", "(1", "1, ", "1 ", "1", "1,111", "1e", "$", "$$", r"\(", r"\[", r"\begin{a}",
        r"\text{",
        r"\text{a} ", r"\frac", "answer is ", "answer is 1 ", "answer 1. ", "答案", "a ", "x ", "- ", "-", "*",
        "_1", "<<", "<a",
        "1 and ", "x = ", "= 1 ", "1/", "\n", ".", "|", "%", "5 m", "\u0300\u0316", "√(",
    ],
)  # fmt: skip
def test_any_text_is_searched_in_time_in_proportion_to_its_length(piece):
    # The first reads the last 20,000 characters, of which an eighth is an eighth of this
    check_reading_time(stated_formula, lambda count: piece * count, 20_000 // len(piece), limit_s=1.0)
    check_reading_time(is_formula, lambda count: piece * count, 200_000 // len(piece), limit_s=1.0)
