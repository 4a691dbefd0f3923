"""The three mathematics rewards: gold answers, malformed answers, hostile answers."""

import threading
import time

import pytest

from async_grpo.rewards.builtin.answers import boxed_answer
from async_grpo.rewards.builtin.math_verify import readable
from async_grpo.rewards.builtin.math_verify import score as math_verify
from async_grpo.rewards.builtin.mathd import normalise
from async_grpo.rewards.builtin.mathd import score as mathd
from async_grpo.rewards.builtin.sympy import score as sympy

ADAPTERS = [math_verify, mathd, sympy]
every_adapter = pytest.mark.parametrize("adapter", ADAPTERS, ids=["math_verify", "mathd", "sympy"])

# Endings of answers in the style of GSM8K, with the number as a reader understands it.
GSM8K_STYLE = [
    ("She sells 9 eggs. 9 * 2 = <<9*2=18>>18\n#### 18", "18"),
    ("It fell by four.\n#### -4", "-4"),
    ("#### 0", "0"),
    ("#### 2,125,000", "2125000"),
    ("#### 0.25", "0.25"),
]


def reward(adapter, text: str, answer: object) -> float:
    return adapter({"completion": text, "answer": answer})["reward"]


@every_adapter
def test_gsm8k_answers_are_accepted_in_a_box_and_the_neighbours_rejected(adapter):
    for i, (answer, number) in enumerate(GSM8K_STYLE):
        neighbour = GSM8K_STYLE[i - 1][1]
        assert reward(adapter, rf"So it is $\boxed{{{number}}}$.", answer) == 1.0, (answer, number)
        assert reward(adapter, rf"So it is $\boxed{{{neighbour}}}$.", answer) == 0.0, (answer, neighbour)


@every_adapter
def test_the_gold_answer_may_be_a_number_or_text(adapter):
    for answer in (27, 27.0, r"so \boxed{27}", "#### 5 is wrong\n#### 27"):
        assert reward(adapter, r"\boxed{27}", answer) == 1.0
        assert reward(adapter, r"\boxed{28}", answer) == 0.0
    for text, expected in ((r"\boxed{70,000}", 1.0), (r"\boxed{70000}", 1.0), (r"\boxed{70}", 0.0)):
        assert reward(adapter, text, "#### 70,000") == expected


@every_adapter
@pytest.mark.parametrize("answer", ["  ", "#### ", r"\boxed{}", None, True, [27]])
def test_a_row_without_a_gold_answer_raises_and_is_no_match_for_a_missing_box(adapter, answer):
    with pytest.raises(ValueError, match="answer"):
        reward(adapter, "no box", answer)


@every_adapter
@pytest.mark.parametrize(
    "text", ["", "I do not know.", r"\boxed{}", r"\boxed", r"\boxed{\frac{1}{2}", "}{", "$$"]
)
def test_malformed_model_output_is_worth_zero_and_no_exception(adapter, text):
    assert reward(adapter, text, "27") == 0.0


@every_adapter
def test_the_end_token_is_no_part_of_the_answer(adapter):
    sample = {"completion": r"\boxed 27<|im_end|>", "answer": 27, "end_token": "<|im_end|>"}
    assert adapter(sample)["reward"] == 1.0


def test_math_verify_reads_answers_without_a_box():
    assert reward(math_verify, "The answer is 27.", 27) == 1.0
    assert reward(math_verify, "9 * 3 = 27\n#### 27\nThat took me 1 line.", 27) == 1.0
    assert reward(math_verify, "The answer is 26.", 27) == 0.0


TWO = [
    r"\boxed{1} and \boxed{-2}", r"$\boxed{1}$, $\boxed{-2}$", r"\boxed{1} \quad \text{and} \quad \boxed{-2}",
    r"\boxed{1}\qquad\mbox{ or }\;\boxed{-2}.", r"\boxed{7}, no: \boxed{1, -2}",
    r"\boxed{1} and \boxed{1} and \boxed{-2}",
]  # fmt: skip


@every_adapter
@pytest.mark.parametrize("gold", TWO)
def test_an_answer_in_several_boxes_is_read_by_the_same_rule_in_the_row_and_in_the_completion(adapter, gold):
    for text in TWO:
        assert reward(adapter, text, gold) == 1.0, text
    for half in (r"\boxed{1}", r"\boxed{-2}", r"\boxed{1} so that \boxed{-2}"):
        assert reward(adapter, half, gold) == 0.0, half


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{\frac{1}{\sqrt{2}}} ok", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{1} \boxed{2", None),
        (r"$\boxed 5$", "5"),
        (r"\boxed{1}, then \boxed{2}", "2"),
        (r"\boxed{1} \textbf{and} \boxed{2}", "2"),
        (r"\boxed{1}" + " " * 201 + r"and\boxed{2}", "2"),
        (r"\boxed{\boxed{1}, \boxed{2}}", "1, 2"),
        (r"\boxed{1} and \boxed 2", "1, 2"),
        (r"\boxed{1} and \boxed{}", "1, "),
        (r"\boxed{}", ""),
    ],
)
def test_only_a_comma_or_a_word_joins_boxes(text, content):
    assert boxed_answer(text) == content


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{1}" + " " * 170_000 + r"\boxed{2}",
        r"\boxed{1}" + " and " * 40_000 + r"\boxed{2}",
        r"\boxed{1}, " * 20_000,
        "".join(rf"\boxed{{{n}}}," for n in range(20_000)),
        r"\boxed{" * 20_000 + "}" * 20_000,
        "1 " + "9" * 19_000 + "/",
    ],
    ids=lambda text: text[:14],
)
def test_reading_the_answer_takes_time_in_proportion_to_the_text(text):
    started_s = time.process_time()
    boxed_answer(text)
    readable(text)
    took_s = time.process_time() - started_s
    assert took_s < 1.0  # a pattern that starts anew at each blank takes 2 s and more


SAME_FOR_MATHD = [
    (r"\dfrac12", r"\frac{1}{2}"),
    (".25", "0.25"),
    (r"\sqrt3", r"\sqrt{3}"),
    (r"90^{\circ}", "90"),
    (r"\$5", "5"),
    (r"50\%", "50"),
    (r"\text{Monday}", "Monday"),
    (r"\left( 1, 2 \right)", "(1,2)"),
    ("AB = 5", "5"),
    (r"5 \mbox{ cm}^2", "5"),
    (r"10\!000", "10000"),
]


@pytest.mark.parametrize(("one", "other"), SAME_FOR_MATHD)
def test_mathd_normalises_notation(one, other):
    assert normalise(one) == normalise(other)
    assert reward(mathd, rf"\boxed{{{one}}}", other) == 1.0


@pytest.mark.parametrize(
    ("one", "other"), [("2/4", "1/2"), ("x+1", "1+x"), ("(1,2)", "1,2"), ("12", "1 3"), ("x=y=5", "5")]
)
def test_mathd_compares_text_and_not_values(one, other):
    assert reward(mathd, rf"\boxed{{{one}}}", other) == 0.0


# Second column: the value of the first, worked out by hand.
SAME_FOR_SYMPY = [
    ("x^2-1", "(x-1)(x+1)"),
    (r"\frac{2}{\sqrt{2}}", r"\sqrt{2}"),
    ("sqrt(2)/2", r"\frac{1}{\sqrt{2}}"),
    ("pi/2", r"\frac{\pi}{2}"),
    (r"(\sqrt{4}x, 1]", "(2x,1]"),
    (r"\frac{-1}{2}", r"-\frac{1}{2}"),
    ("0.25", r"\frac{1}{4}"),
    (r"\infty", r"\infty"),
    (r"10^{-15}", r"\frac{1}{10^{15}}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
]
DIFFERENT_FOR_SYMPY = [
    ("4/2", "2"),  # an unfinished answer
    ("2/4", "1/2"),
    ("(1,2)", "[1,2]"),
    ("(1,2)", "(1,2,3)"),
    ("(2,1)", "(1,2)"),
    ("x^2+1", "(x-1)(x+1)"),
    ("0.33", r"\frac{1}{3}"),
    (r"-\infty", r"\infty"),
    (r"2 \cdot 10^{-15}", r"\frac{1}{10^{15}}"),
    (r"\begin{pmatrix}2\\1\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ("x=5", r"\{5,6\}"),
]


@pytest.mark.parametrize(("given", "gold"), SAME_FOR_SYMPY + DIFFERENT_FOR_SYMPY)
def test_sympy_accepts_equal_values_and_rejects_other_and_unfinished_ones(given, gold):
    assert reward(sympy, rf"\boxed{{{given}}}", gold) == float((given, gold) in SAME_FOR_SYMPY)


def test_a_gold_answer_that_sympy_cannot_read_raises_so_that_the_sample_fails():
    with pytest.raises(ValueError, match="cannot read"):
        reward(sympy, r"\boxed{5}", r"\begin{nonsense")


@every_adapter
@pytest.mark.parametrize(
    "bomb",
    ["9^{9^{9}}", "9**9**9", "99999999!", "3!!!!!!!!!", "((10^{999})^{999})^{999}", r"\sum_{k=1}^{10^9} k^k", "9" * 5000],
)  # fmt: skip
def test_an_expression_that_would_take_for_ever_is_wrong_at_once(adapter, bomb):
    started_s = time.process_time()
    assert reward(adapter, rf"\boxed{{{bomb}}}", r"\sqrt{2}") == 0.0
    assert time.process_time() - started_s < 4.0  # computing one of them would use up the limit of 5 s


@every_adapter
def test_text_of_the_model_is_never_executed(adapter, tmp_path):
    trap = tmp_path / "executed"
    for code in (
        f"__import__('os').system('touch {trap}')",
        f"open('{trap}','w')",
        f"(lambda: open('{trap}','w'))()",
    ):
        assert reward(adapter, rf"\boxed{{{code}}}", r"\sqrt{2}") == 0.0
        assert reward(adapter, f"The answer is {code}", r"\sqrt{2}") == 0.0
    assert not trap.exists()


@pytest.mark.parametrize("adapter", [math_verify, sympy])
def test_outside_the_main_thread_the_adapter_raises_instead_of_rejecting_everything(adapter):
    errors = []

    def call() -> None:
        with pytest.raises(ValueError) as caught:
            reward(adapter, r"\boxed{x+x}", "2x")
        errors.append(str(caught.value))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(timeout=20)
    assert errors and "call it in the main thread" in errors[0]
