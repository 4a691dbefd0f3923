"""One answer in its many notations: what all rewards take for the same, and what they must not."""

import pytest
from reading_time import check_reading_time

from async_grpo.rewards.answer_reading.characters import compatible, plain_characters
from async_grpo.rewards.answer_reading.notation import plain_notation, readings
from async_grpo.rewards.answer_reading.spellings import as_latex
from async_grpo.rewards.builtin import math_verify, mathd, sympy, text

MATHEMATICS = {"math_verify": math_verify.score, "mathd": mathd.score, "sympy": sympy.score}
# kind -> (content of the box, row's answer, whether they are the same)
KINDS = {
    "E-notation": [
        ("3.2e5", "320000", True), ("3.2E5", "320000", True), ("1e-5", 1e-5, True), ("10^{-5}", 1e-5, True),
        (r"3.2 \times 10^5", "320000", True), (r"3.2\cdot10^{5}", "320000", True), ("2000", "2e3", True),
        ("2E+3", "2000", True), ("3.2*10^5", "320000", True), ("3.2e+05", "320000", True), ("3.2×10⁵",
        "320000", True),
        ("5e", "5", False), ("2e", "2", False), ("3e2", "32", False), ("3.2e4", "320000", False), ("1e-5",
        "1e-6", False),
        (r"3.2 \times 10^5", "32", False), ("2e3", "2", False), ("e^3", "1000", False),
    ],
    "mixed numbers": [
        ("3 1/2", r"\frac72", True), ("7/2", "3 1/2", True), (r"3\frac12", "7/2", True), ("2 2/3", "8/3", True),
        (r"2\frac23", "8/3", True), ("-2 1/3", "-7/3", True), ("1½", "3/2", True), (r"3\,\frac{1}{2}", "7/2", True),
        ("4 10/3", "22/3", True), ("3 1/2", "3", False), ("3 1/2", "31/2", False), ("3 1/2", "1/2", False),
        (r"-2\frac{1}{3}", r"-\frac{5}{3}", False), (r"\frac{31}{2}", "3 1/2", False), ("3-1/2", "3 1/2", False),
        ("3, 1/2", "3 1/2", False), ("3/2", "1 1/3", False), ("21/2", "2 1/2", False),
    ],
    "thousands separators": [
        ("1{,}234", "1234", True), (r"1\,234", "1234", True), ("1~234", "1234", True), ("1\u2009234", "1234", True),
        ("1\u202f234", "1234", True), ("1\u00a0234", "1234", True), ("1 234", "1234", True), (r"1,\!234",
        "1234", True),
        ("1,234.50", "1234.5", True), (r"1\;234", "1234", True), ("1'234", "1234", True), ("x = 1,234", "1234", True),
        ("1, 234", "1234", False), ("(1,234)", "1234", False), ("1,23", "123", False), ("1,234", "1,234,000", False),
        ("(1,234)", "(1,234)", True), ("1,2,3", "123", False), ("(1,234)", "(1, 235)", False), (r"1\,23",
        "1023", False),
    ],
    "characters": [
        ("\u22127", "-7", True), ("\u20137", "-7", True), ("\u20147", "-7", True), ("½", "1/2", True),
        ("√2", r"\sqrt{2}", True), ("3√(2)", r"3\sqrt{2}", True), ("∞", r"\infty", True), ("-∞", r"-\infty", True),
        ("１２", "12", True), ("（3，4）", "(3, 4)", True), ("5\u200b", "5", True), ("\u200e5\ufeff", "5", True),
        ("5。", "5", True), ("5．", "5", True), ("5।", "5", True), ("2π", r"2\pi", True), ("x²", "x^2", True),
        ("10⁻³", "0.001", True), ("3⁄4", "3/4", True), ("𝟓", "5", True), ("x₁", "x_1", True), ("٣", "3", True),
        ("θ", r"\theta", True), ("±3", r"\pm 3", True), ("⟨1, 2⟩", "(1,2)", True),
        ("7", "-7", False), ("3\u20135", "-2", False), ("½", "12", False), ("2²", "22", False), ("√2", "2", False),
        ("2³", "6", False), ("x₁", "x", False), ("∞", "8", False), ("（3，4）", "(4, 3)", False), ("10⁻³",
        "103", False),
    ],
    "upright constants": [
        (r"\mathrm{e}", "e", True), (r"\mathrm{e}^2", "e^2", True), (r"{\rm e}^2", "e^2", True), (r"\text{e}",
        "e", True),
        (r"\operatorname{e}^2", "e^2", True), (r"\mathrm{\pi}", r"\pi", True), (r"\mathbf{5}", "5", True),
        (r"\mathrm{e}", "1", False), (r"\mathrm{e}^2", "2", False), (r"\mathrm{\pi}", "3.14", False),
        (r"\mathbf{5}", "6", False), (r"2\mathrm{e}", "2", False),
    ],
    "degrees": [
        (r"45^\circ", "45", True), (r"45^{\circ}", "45", True), ("45°", "45", True), (r"45\degree", "45", True),
        ("45 degrees", "45", True), ("45", "45°", True), ("45°", "54", False), (r"45^{\circ}", "4", False),
        (r"45^\circ", "450", False), ("45", "46°", False), (r"4\degree", "45", False),
    ],
    "repeating decimals": [
        (r"0.\overline{3}", "1/3", True), (r"0.1\overline{6}", "1/6", True), (r"0.\bar{3}", "1/3", True),
        (r"0.\dot{3}", "1/3", True), ("0.(3)", "1/3", True), (r"1.\overline{09}", "12/11", True),
        (r"0.\overline{3}", "0.3", False), (r"0.\overline{6}", "1/6", False), (r"\overline{AB}",
        r"\overline{AB}", True),
        (r"\overline{AB}", r"\overline{AC}", False), ("0.5(3)", "8/15", False), (r"0.\overline{3}", "3", False),
    ],
    "fractions": [
        (r"\nicefrac{3}{4}", "3/4", True), (r"\sfrac{3}{4}", "3/4", True), (r"\frac 3 4", "3/4", True),
        (r"\frac34", "3/4", True), (r"\frac{3}4", "3/4", True), (r"\frac 34", "3/4", True), (r"\cfrac{3}{4}",
        "3/4", True),
        (r"{3 \over 4}", "3/4", True), (r"\dfrac 1 {12}", "1/12", True), (r"\frac{-3}{4}", "-3/4", True),
        (r"\frac{2}{3} = 0.667", "2/3", True), (r"\frac 3 4", "4", False), (r"\nicefrac{3}{4}", "4/3", False),
        (r"\frac34", "34", False), (r"{3 \over 4}", "3", False), (r"\frac{2}{3} = 0.7", "3/4", False),
        (r"\frac{2}{3} = 0.5", "2/3", False),
    ],
    "full stops": [
        ("5.", "5", True), (r"\frac{1}{2}.", "1/2", True), ("5 .", "5", True), ("x=5.", "5", True), ("0.5.",
        "0.5", True),
        (r"\sqrt{2}.", r"\sqrt{2}", True), ("(1, 2).", "(1,2)", True), ("5,", "5", True), ("3.5", "35", False),
        ("0.5.", "5", False), ("5.", "0.5", False), ("(1, 2).", "(2,1)", False), (".5", "5", False),
    ],
    "currencies and units": [
        ("18.9", r"\$18.90", True), ("34", "€34", True), ("34", "34 m^2", True), ("34", r"\[34\]", True),
        ("34", "£34", True), ("34", "34 cm", True), ("34", r"34\,\mathrm{m}^2", True), ("34", "34 m²", True),
        ("34", "34 km/h", True), ("34", "34 dollars", True), ("34", "USD 34", True), ("12 m/s", "12", True),
        (r"12\text{cm}", "12", True), ("12cm", "12", True), ("¥34", "34", True), (r"\$-5", "-5", True),
        ("1,234", r"\$1,234", True), (r"12 \text{ square units}", "12", True),
        ("35", "€34", False), ("2", "34 m^2", False), ("34", "34x", False), ("34", "34 x", False), ("18",
        r"\$18.90", False),
        ("34^2", "34", False), (r"5 \text{ or } 6", "5", False), ("5 million", "6", False), ("12 xy", "12", False),
    ],
}  # fmt: skip
CHOICES = [
    (r"\text{C}", "C", True), (r"\textbf{C}", "C", True), (r"\mathrm{C}", "C", True), ("(C)", "C", True),
    (r"\textbf{(C)}", "C", True), (r"(\text{C})", "C", True), ("C", "(C)", True), ("C.", "C", True),
    (r"\text{C.}", "C", True),
    (r"\boldsymbol{C}", "C", True), ("{C}", "C", True), (r"\text{yes}", "yes", True), (r"\textbf{Yes}", "Yes", True),
    (r"\text{D}", "C", False), ("(D)", "C", False), (r"\textbf{(C)}", "D", False), (r"\text{AC}", "C", False),
    ("(A, C)", "C", False), (r"\text{no}", "yes", False), ("(CD)", "C", False), (r"\textbf{B}", r"\text{A}", False),
]  # fmt: skip


def reward_of(reward, content: str, gold: object) -> float:
    return reward({"completion": f"The result is $\\boxed{{{content}}}$.", "answer": gold})["reward"]


@pytest.mark.parametrize("reward", MATHEMATICS.values(), ids=MATHEMATICS)
@pytest.mark.parametrize(("content", "gold", "is_same"), [case for cases in KINDS.values() for case in cases])
def test_all_rewards_read_a_number_in_every_notation(reward, content, gold, is_same):
    assert reward_of(reward, content, gold) == float(is_same)


@pytest.mark.parametrize("reward", [*MATHEMATICS.values(), text.exact], ids=[*MATHEMATICS, "exact"])
@pytest.mark.parametrize(("content", "gold", "is_same"), CHOICES)
def test_all_rewards_read_the_letter_of_a_choice(reward, content, gold, is_same):
    assert reward_of(reward, content, gold) == float(is_same)


@pytest.mark.parametrize(
    ("content", "gold", "is_same"),
    [
        (r"2\mathrm{i}", "2i", True), (r"3+2\mathrm{i}", "3+2i", True), (r"\mathrm{e}^{\mathrm{i}}", "e^i", True),
        ("2i", "2", False), (r"\emptyset", r"\text{no solution}", True), ("No solution", r"\emptyset", True),
        (r"\{0\}", r"\text{no solution}", False), (r"\langle 1,2\rangle", "(1,2)", True), ("5 N", "5", True),
        ("5 N", "6", False), (r"2/3 = 0.667", "0.667", True), ("2+3=6", "5", False), (r"1\,234, 5", "1234, 5", True),
        (r"\log_2 8", "3", True),
    ],
)  # fmt: skip
def test_math_verify_reads_values_that_are_no_plain_numbers(content, gold, is_same):
    assert reward_of(math_verify.score, content, gold) == float(is_same)


@pytest.mark.parametrize(
    "answer",
    ["x + 1", r"\{1, 2\}", "(1, 2)", r"2\sqrt{3}", "x = 5, y = 6", r"\frac{1}{2}x", "AB", "-7"],
)
def test_a_plain_notation_stays_as_it_is(answer):
    assert plain_notation(answer) == answer


def test_exact_keeps_numbers_literal():
    assert [reward_of(text.exact, answer, "1.10") for answer in ("1.10", "1.1", "1.100")] == [1.0, 0.0, 0.0]
    assert [reward_of(text.exact, answer, "x²") for answer in ("x^2", "x2")] == [1.0, 0.0]


LONG_TEXTS = [
    (plain_characters, 200_000),
    (compatible, 200_000),
    (as_latex, 60_000),
    (plain_notation, 200_000),
    (readings, 20_000),
]


@pytest.mark.parametrize(
    "piece",
    [
        "\u0300\u0316", "√(", "½", "²", "1\u2009", "1{,}", "1,", "1 ", "1/", "(", "[", "{", r"\frac{",
        r"\frac", r"\text{",
        "0.(",
        "1e", r"\$", "€1", "5 m", "5 m/", r"\over", "^{", "x = ", "1 1/", r"\approx ", "\u2013", ",\\!",
    ],
)  # fmt: skip
def test_any_text_is_rewritten_in_time_in_proportion_to_its_length(piece):
    for rewrite, num_characters in LONG_TEXTS:
        check_reading_time(rewrite, lambda count: piece * count, num_characters // len(piece), limit_s=1.0)
