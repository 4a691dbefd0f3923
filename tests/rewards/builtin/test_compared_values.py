r"""How `math_verify` and `sympy` compare values: exactly, and decimals by a relative tolerance.

Each table has answers that are equal to the gold answer, and answers that are close to it and differ.
"""

import time

import pytest

from async_grpo.rewards.answer_reading.sequences import read_sequence
from async_grpo.rewards.builtin.math_verify import score as math_verify
from async_grpo.rewards.builtin.sympy import score as sympy


def reward(adapter, gold: object, answer: str) -> float:
    return adapter({"completion": rf"So it is $\boxed{{{answer}}}$.", "answer": gold})["reward"]


# (gold answer, answer, whether they are equal)
INTEGERS = [
    ("2^{100}", "1267650600228229401496703205376", True),
    ("2^{100}", "1267650600228229401496703205377", False),
    ("2^{100}", "2^{100}+1", False),
    ("2^{100}", "4^{50}", True),
    ("10^{50}+1", "10^{50}", False),
    ("10^{50}+1", "1+10^{50}", True),
    ("100000000", "100000001", False),
    ("1000000", "1000000.5", False),
    ("1234567", "1234567.4", False),
    ("5", "5.000001", False),
    ("7" * 3000, "7" * 3000, True),
    ("7" * 3000, "7" * 2999 + "8", False),
    ("7" * 5000, "7" * 5000, True),
    ("7" * 5000, "7" * 4999 + "8", False),
]
FRACTIONS = [
    ("2.5", r"\frac52", True),
    ("-1.5", "-3/2", True),
    (r"\frac{10^{30}+1}{10^{30}}", "1", False),
    (r"\frac{1}{2^{60}}", r"\frac{1}{2^{61}}", False),
    (r"\frac{1}{2^{60}}", "2^{-60}", True),
    (r"\frac{1}{2^{60}}", r"0.5^{60}", True),
    ("1/3", "0.333333", True),
    ("1/3", "0.3333333333", True),
    ("1/3", "0.333", False),
    ("1/3", "0.33333", False),
    ("1/17", "0.058824", True),
    ("1/17", "0.05882", False),
    (r"\sqrt{2}", "1.414214", True),
    (r"\sqrt{2}", "1.4142", False),
    (r"\pi", "3.141593", True),
    (r"\pi", "3.14", False),
    (r"\sqrt{8}", r"2\sqrt{2}", True),
    (r"\sqrt{8}", r"2\sqrt{2}+10^{-20}", False),
    ("3+4i", "3.0+4.0i", True),
    ("3+4i", "3-4i", False),
]
TINY_NUMBERS = [
    (r"1.6 \times 10^{-19}", r"9.1 \times 10^{-31}", False),
    (r"1.6 \times 10^{-19}", r"1.6 \cdot 10^{-19}", True),
    (r"1.6 \times 10^{-19}", r"0.16 \times 10^{-18}", True),
    (r"6.6\times10^{-34}", r"6.6\times10^{-31}", False),
    (r"6.63\times10^{-34}", r"6.62\times10^{-34}", False),
    (r"6.626\times10^{-34}", r"6.63\times10^{-34}", True),
    (r"6.626\times10^{-34}", r"6.6\times10^{-34}", False),
    (r"6.626070\times10^{-34}", r"6.62607\times10^{-34}", True),
    ("0.000123456", "0.000123", True),
    ("0.000123456", "0.000124", False),
    ("0.000123456", "0.00012", False),
    ("1/810", "0.001235", True),
    ("1/810", "0.001236", False),
    ("0.000123", r"1.23\times10^{-4}", True),
    ("0", r"10^{-30}", False),
    ("0", "0.0000001", False),
    ("0", "0.0", True),
    (r"-10^{-8}", r"10^{-8}", False),
    (r"\pi\cdot10^{-20}", r"e\cdot10^{-20}", False),
    (r"\pi\cdot10^{-20}", r"\frac{\pi}{10^{20}}", True),
    (r"10^{-9}x", r"2\cdot10^{-9}x", False),
    ("x=0.0000001", "x=0.0000002", False),
    ("x=0.0000001", "x=10^{-7}", True),
]
PERCENTAGES = [
    (r"12.5\%", "0.125", True),
    (r"12.5\%", "12.5", True),
    (r"12.5\%", "1.25", False),
    (r"5\%", "0.05", True),
    (r"5\%", "5", True),
    (r"5\%", "500", False),
    ("28", r"2800\%", True),
    ("28", r"28\%", True),
    ("28", r"0.28\%", False),
    ("0.0005", r"0.05\%", True),
    ("0.0005", r"0.06\%", False),
]
STRUCTURES = [
    ("(1/3,0.5)", "(0.333333,1/2)", True),
    ("(0.000001,1)", "(0.000002,1)", False),
    (r"[0,10^{-9}]", r"[0,10^{-8}]", False),
    (r"[0,10^{-9}]", r"[0,\frac{1}{10^9}]", True),
    (r"\{1.5,2\}", r"\{2,3/2\}", True),
    (r"\{1.5,2\}", r"\{2,3\}", False),
    (r"\begin{pmatrix}0.5\\1\end{pmatrix}", r"\begin{pmatrix}1/2\\1\end{pmatrix}", True),
    (r"\begin{pmatrix}10^{-9}\\0\end{pmatrix}", r"\begin{pmatrix}2\cdot10^{-9}\\0\end{pmatrix}", False),
    ("x=0.5", r"x=\frac12", True),
    ("x=0.5", "y=0.5", False),
    ("y=0.5x+1", r"y=\frac{x}{2}+1", True),
    ("y=0.5x+1", "y=x+1", False),
    (r"\infty", r"\infty", True),
    (r"\infty", r"-\infty", False),
    (r"\infty", "10^{100}", False),
    (r"A \cup B", r"B\cup A", True),
    (r"A \cup B", r"B \cap A", False),
    (r"A \cap B \cap C", r"C\cap A\cap B", True),
    (r"A \cap B \cap C", r"A\cap B", False),
]
UNDEFINED = [
    ("12:00", "12:00", True),
    ("12:00", "1:00", False),
    ("3:00", "3", False),
    ("3:00", "3:00", True),
    (r"\frac10", r"\frac20", False),
    (r"\frac{1}{1-1}", r"\frac{2}{1-1}", False),
    ("1", r"\frac{1}{0}", False),
    (r"x=\frac{1}{0}", r"x=\frac{2}{0}", False),
    (r"\frac{1}{0}=\frac{1}{0}", r"\frac{2}{0}=\frac{3}{0}", False),
    (r"(1,\frac{1}{0})", r"(1,\frac{2}{0})", False),
    (r"\frac{0}{5}", "0", True),
    (r"\frac{0}{5}", r"\frac{0}{7}", True),
    (r"x=\frac{0}{5}", "x=0", True),
]
ROUNDED_EQUATIONS = [
    ("2/3", r"\frac{2}{3}=0.667", True),
    ("2/3", r"\frac{2}{3}=0.6667", True),
    ("2/3", r"x=\frac{2}{3}=0.667", True),
    ("2/3", r"\frac{2}{3}=0.5", False),
    ("2/3", r"\frac{1}{3}=0.667", False),
    ("0.667", r"\frac23=0.667", True),
    ("3/4", r"\frac34=0.75", True),
    ("4", "2+3=4", False),
    ("5", "2+3=4", False),
    ("5", "x=6", False),
    ("5", "x=5", True),
]
SETS = [
    (r"(-\infty,-1)\cup(3,\infty)", r"x<-1\text{ or }x>3", True),
    (r"x<-1\text{ or }x>3", r"(-\infty,-1)\cup(3,\infty)", True),
    (r"(-\infty,-1)\cup(3,\infty)", r"x<-1\text{ or }x>4", False),
    (r"(-\infty,-1)\cup(3,\infty)", r"x\leq-1\text{ or }x>3", False),
    ("(1,3)", "x>1, x<3", True),
    ("(1,3)", "x>1, x<4", False),
    ("(1,3)", "x>1, y<3", False),
    (r"\emptyset", r"\text{no solution}", True),
    (r"\text{No solution}", r"\emptyset", True),
    (r"\emptyset", r"\text{one solution}", False),
    (r"\emptyset", "0", False),
    (r"\{0\}", r"\emptyset", False),
]
SEQUENCES = [
    (r"1,2,\ldots,n", r"1,2,\dots,n", True),
    (r"1,2,\ldots,n", "1,2,...,n", True),
    (r"1,2,\ldots,n", r"1, 2, \cdots , n", True),
    (r"1,2,\ldots,n", r"1,3,\ldots,n", False),
    (r"1,2,\ldots,n", r"1,3,5,\ldots,2n-1", False),
    (r"1,2,\ldots,n", r"1,2,\ldots,m", False),
    (r"1,2,\ldots,n", "1,2,n", False),
    ("1,2,3", r"1,2,3,\ldots", False),
    ("3", r"1,2,3,\ldots", False),
    (r"1,2,3,\ldots", "1, 2, 3, ...", True),
    (r"1,2,3,\ldots", r"1,2,4,\ldots", False),
    (r"\{1,2,\ldots,n\}", r"1,2,\ldots,n", True),
    (r"(1,2,\ldots,n)", r"[1,2,\ldots,n]", False),
    (r"(1,2,\ldots,n)", r"\left(1,2,\ldots,n\right)", True),
    (r"1,\frac12,\frac14,\ldots", r"1, 0.5, 0.25, \dots", True),
    (r"1,3,\ldots,2n-1", r"1,3,\ldots,-1+2n", True),
    (r"\ldots,-1,0,1,\ldots", r"\ldots, -1, 0, 1, \ldots", True),
    (r"\ldots,-1,0,1,\ldots", r"-1,0,1,\ldots", False),
    (r"n=1,2,\ldots", r"1,2,\ldots", True),
]
MATH_VERIFY_CASES = [
    *INTEGERS, *FRACTIONS, *TINY_NUMBERS, *PERCENTAGES, *STRUCTURES, *UNDEFINED, *ROUNDED_EQUATIONS, *SETS, *SEQUENCES
]  # fmt: skip


@pytest.mark.parametrize(("gold", "answer", "is_equal"), MATH_VERIFY_CASES, ids=lambda value: str(value)[:40])
def test_math_verify_compares_exactly(gold, answer, is_equal):
    assert reward(math_verify, gold, answer) == float(is_equal)


SYMPY_CASES = [
    ("2^{100}", "1267650600228229401496703205377", False),
    ("2^{100}", "1267650600228229401496703205376", True),
    ("2^{100}", "2^{100}+1", False),
    ("2^{100}", "4^{50}", True),
    ("10^{30}+1", "10^{30}", False),
    ("10^{30}+1", "1+10^{30}", True),
    ("10^{30}x", "10^{30}x+x", False),
    (r"\frac{1}{2^{60}}", r"\frac{1}{2^{61}}", False),
    (r"\frac{1}{2^{60}}", "2^{-60}", True),
    (r"1.6\times10^{-19}", r"9.1\times10^{-31}", False),
    (r"1.6\times10^{-19}", r"0.16\cdot10^{-18}", True),
    (r"\frac{1}{3}", "0.333333333333", True),
    (r"\frac{1}{3}", "0.333333", False),
    (r"\pi", "3.14159265358979", True),
    (r"\pi", "3.14159", False),
    (r"\pi\cdot10^{-20}", r"e\cdot10^{-20}", False),
    (r"\sqrt{8}", r"2\sqrt2", True),
    (r"(0,10^{-20}]", r"(0,2\cdot 10^{-20}]", False),
    (r"\begin{pmatrix}10^{-20}\end{pmatrix}", r"\begin{pmatrix}10^{-21}\end{pmatrix}", False),
    (r"\begin{pmatrix}0.5\\1\end{pmatrix}", r"\begin{pmatrix}\frac12\\1\end{pmatrix}", True),
    ("12:00", "1:00", False),
    ("12:00", "12:00", True),
    (r"x=\frac{1}{0}", r"x=\frac{2}{0}", False),
    (r"\frac10=\frac20", r"\frac30=\frac40", False),
    (r"1, 2, \ldots, n", r"1,2,\dots,n", True),
    (r"1, 2, \ldots, n", r"1,2,\dots,m", False),
    (r"1, 2, \ldots, 2n", r"1,2,\ldots,n+n", True),
    (r"1,\frac{1}{2},\ldots", r"1,0.5,\ldots", True),
    ("1,2,3", r"1,2,\ldots", False),
    (r"(1,2,\ldots,n)", r"(1,2,\ldots,n)", True),
    (r"(1,2,\ldots,n)", r"[1,2,\ldots,n]", False),
]


@pytest.mark.parametrize(("gold", "answer", "is_equal"), SYMPY_CASES)
def test_sympy_compares_exactly(gold, answer, is_equal):
    assert reward(sympy, gold, answer) == float(is_equal)


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        (r"a_1, a_2, \ldots, a_n", ["a_1", "a_2", "…", "a_n"]),
        ("1, 2, 3, ...", ["1", "2", "3", "…"]),
        (r"f(1, 2), \dots, f(3, \ldots)", ["f(1, 2)", "…", "f(3, …)"]),
        ("1, 2, 3", None),
        ("0.333...", None),
        (r"0.333\ldots, 0.5", None),
        (r"1 + 2 + \cdots + n", None),
        (r"f(1, \ldots, n)", None),
        ("...", None),
        ("Let me think... the answer is 5", None),
    ],
)
def test_only_dots_between_commas_make_a_sequence(text, terms):
    sequence = read_sequence(text)
    assert (sequence.terms if sequence else None) == terms


@pytest.mark.parametrize("adapter", [math_verify, sympy], ids=["math_verify", "sympy"])
@pytest.mark.parametrize(
    "answer",
    ["0." + "0" * 15_000 + "1", "0." + "7" * 6000, "1.5^{10^8}", "1.5^{9^{9^9}}", "1," * 9000 + r"\ldots"],
    ids=lambda text: text[:12],
)
def test_numbers_that_are_too_long_to_compute_are_wrong_at_once(adapter, answer):
    began_s = time.process_time()
    for gold in (r"\sqrt{2}", "0.25", r"1,2,\ldots"):
        assert reward(adapter, gold, answer) == 0.0
    assert time.process_time() - began_s < 9.0


# (gold answer, answer, whether they are equal)
FORMULAS = [
    (r"\frac{667487}{125}", r"6x67e87\log25", False),  # to simplify the difference took more than 5 s
    ("x^2+2x+1", "(x+1)^2", True),
    ("x^2+2x+2", "(x+1)^2", False),
    (r"\frac{x}{2}", "0.5x", True),
    ("x+1", "y+1", False),
]


@pytest.mark.parametrize(("gold", "answer", "is_equal"), FORMULAS)
def test_sympy_simplifies_only_formulas_that_do_not_clearly_differ(gold, answer, is_equal):
    assert reward(sympy, gold, answer) == float(is_equal)
