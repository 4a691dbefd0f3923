"""Answers in words, with units, alternatives and letters that other libraries misread, and neighbors that differ.

In each table, some answers are right and others wrong. No reward accepts a wrong one.
"""

import pytest

from async_grpo.rewards.answer_reading.arithmetic import arithmetic_value
from async_grpo.rewards.answer_reading.measures import units_of
from async_grpo.rewards.builtin import math_verify, mathd, row_checks, sympy, text

REWARDS = {"math_verify": math_verify.score, "mathd": mathd.score, "sympy": sympy.score, "exact": text.exact}
# kind -> (row's answer, completion, whether it is right)
KINDS: dict[str, list[tuple[str, str, bool]]] = {
    "alternatives": [
        ("5", "5 (or 7)", False), ("7", "5 (or 7)", False), ("5", "The answer is 5 (or 7).", False),
        ("5", "It could be 5. Or it is 7.", False), ("7", "It could be 5. Or it is 7.", False),
        ("5", "The answer is 5. Or is it 7?", False), ("5", "The answer is **5**. Or maybe **7**.", False),
        ("5", "The answer is $5$. Alternatively, $7$.", False),
        ("5", "The answer is 5, or perhaps it is 7.", False), ("5", "Either 5 or 7.", False),
        ("5", "The answer is 5 - maybe 7", False), ("5", "The answer is 5 (five).", True),
        ("5", "The answer is 5 (or five).", True), ("0.5", "The answer is 0.5 (or 1/2).", True),
        ("0.5", "The answer is 0.5. Or as a fraction, 1/2.", True),
        (r"\sqrt{2}", r"The answer is $\sqrt{2}$, or about 1.414.", True),
        (r"\sqrt{2}", r"The answer is $\sqrt{2}$ (or 1.414).", True), ("5", "The answer is 5 (3 + 2).", True),
        ("5", "The answer is 5. Let me know if you have 2 more questions.", True),
        ("5", "The answer is 5. If it were 7, it would be odd.", True),
        ("12", "There are 5 apples (or fruits) and 7 pears, 12 in total.", True),
        (r"25\%", "The answer is 25% (or 0.25).", True), ("5, 7", "The answer is 5 (or 7).", True),
        ("5", "**Answer:** 5 (alternatively 7)", False), ("5", "The answer is 5; otherwise 7.", False),
        ("5", "Answer: 5, but it might be 7", False), ("5", "The answer is 5 - but this could be 7.", False),
        ("5", "Answer: 5, but this may seem large", True),
        ("5", "Answer: 5. But it might be hard to see why 2+3=5.", True),
        ("5", "Answer: 5\n\nAlternatively, we count the 7 sides.", True),
    ],
    "false equations": [
        ("5", r"\boxed{5 \approx 7}", False), ("7", r"\boxed{5 \approx 7}", False), ("5", r"\boxed{7 = 5}", False),
        ("5", r"\boxed{2+4 = 5}", False), ("5", r"\boxed{\frac{1}{2} = 5}", False),
        ("2", r"\boxed{\sqrt{2} = 2}", False), (r"3\pi", r"\boxed{3\pi \approx 7.42}", False),
        ("3.14", r"\boxed{\pi = 3}", False), ("25", r"\boxed{\frac{1}{2} = 25\%}", False),
        ("5", r"\boxed{x = 7 = 5}", True), ("5", "The answer is 7 = 5.", False),
        ("5", "The answer is $7 = 5$.", False), ("5", r"\boxed{3! = 5}", False), ("120", r"\boxed{5! = 120}", True),
        ("10", r"\boxed{\binom{5}{2} = 10}", True), ("5", r"\boxed{2+3 = 5}", True),
        ("5", r"\boxed{x = 2+3 = 5}", True), ("3.14", r"\boxed{\pi \approx 3.14}", True),
        (r"\pi", r"\boxed{\pi \approx 3.14}", True), (r"25\%", r"\boxed{\frac{1}{4} = 25\%}", True),
        ("25", r"\boxed{\frac{1}{4} \times 100 = 25\%}", True), ("17", "The total is 5 * 3 = 15 + 2 = 17", True),
        ("6", "We have 2 hours * 3 = 6 miles.", True), ("6", "That is 2 times 3 = 6.", True),
        ("9", "12 minus 3 = 9", True), ("12", "The answer is 3 apples + 4 apples + 5 = 12 apples.", True),
        ("154", r"\boxed{\frac{22}{7} \cdot 49 = 154}", True),
        ("500", r"\boxed{5 \text{ m} = 500 \text{ cm}}", True),
        (r"e = \frac{1}{2}", r"\boxed{e = \frac{1}{2}}", True), (r"\frac{1}{2}", r"\boxed{e = \frac{1}{2}}", True),
        ("0.33", r"\boxed{\frac{1}{3} = 0.33}", True), ("0.3333", r"\boxed{\frac13 \approx 0.3333}", True),
        (r"\frac{1}{3}", r"\boxed{\frac13 \approx 0.3333}", True), ("1200", r"\boxed{1234 \approx 1200}", True),
        ("3", r"\boxed{10 = 3 \pmod 7}", True),
        ("2.5", r"\boxed{2\frac{1}{2} = 2.5}", True), ("45", r"\boxed{\frac{\pi}{4} = 45^\circ}", True),
        ("5", r"\boxed{5 = 5.0}", True), ("5", r"\boxed{7 == 5}", False), ("5", r"\boxed{2 + 3 == 5}", True),
    ],
    "units": [
        (r"5 \text{ cm}", r"\boxed{5 \text{ kg}}", False), ("5 cm", r"\boxed{5 kg}", False),
        ("5 cm^2", r"\boxed{5 \text{ cm}^3}", False), (r"5 \text{ cm}^2", r"\boxed{5 \text{ cm}}", False),
        ("60 km/h", r"\boxed{60 \text{ m/s}}", False), ("60 km/h", r"\boxed{60 \text{ miles per hour}}", False),
        ("60 mph", r"\boxed{60 \text{ miles per hour}}", True), ("60 mph", r"\boxed{60 \text{ km}}", False),
        ("9.8 m/s^2", r"\boxed{9.8 \,\mathrm{m/s^2}}", True),
        ("9.8 m/s^2", r"\boxed{9.8 \,\mathrm{m\,s^{-2}}}", True), ("9.8 m/s^2", r"\boxed{9.8 \text{ m/s}}", False),
        (r"5 \text{ square feet}", r"\boxed{5 \text{ ft}^2}", True),
        (r"5 \text{ square feet}", r"\boxed{5 \text{ cubic feet}}", False),
        (r"5 \text{ sq. ft}", r"\boxed{5 \text{ square feet}}", True), ("5 m", r"\boxed{5 \text{ minutes}}", True),
        (r"\$5", r"\boxed{€5}", False), (r"\$5", r"\boxed{5 \text{ dollars}}", True),
        (r"\$5", r"\boxed{5 \text{ cm}}", False), (r"\$5", r"\boxed{5}", True), ("5 dollars", r"\boxed{\$5}", True),
        ("5 dollars", r"\boxed{\$5.00}", True), (r"45^\circ", r"\boxed{45 \text{ cm}}", False),
        (r"45^\circ", r"\boxed{45 \text{ radians}}", False), (r"45^\circ", r"\boxed{45^\circ\text{C}}", True),
        (r"20^\circ C", r"\boxed{20^\circ F}", False), (r"20^\circ C", r"\boxed{20 \text{ degrees}}", True),
        ("100 cm", r"\boxed{1 \text{ m}}", False), ("5 apples", r"\boxed{5 \text{ pears}}", True),
        ("5 apples", r"\boxed{5 \text{ kg}}", True), ("5", r"\boxed{5 \text{ kg}}", True),
        ("5 kg", r"\boxed{5}", True), ("5m^2+3m", r"\boxed{m(5m+3)}", True), ("m(5m+3)", r"\boxed{5m^2+3m}", True),
        ("2m+3s", r"\boxed{3s+2m}", True), ("5h", r"\boxed{5 \text{ hours}}", True),
        ("3 hours", r"\boxed{3 \text{ hr}}", True), ("5 March", r"\boxed{5 \text{ Mar}}", True),
        ("5 March", r"\boxed{5 \text{ May}}", False),
        (r"\frac{5}{2} \text{ cm}", r"\boxed{\frac52 \text{ inches}}", False),
        (r"\frac{5}{2} \text{ cm}", r"\boxed{\frac52 \text{ centimeters}}", True),
        (r"2\pi \text{ cm}", r"\boxed{2\pi \text{ m}}", False),
        (r"2\pi \text{ cm}^2", r"\boxed{2\pi \text{ square centimeters}}", True),
        (r"\sqrt{3} \text{ cm}", r"\boxed{\sqrt{3} \text{ kg}}", False),
        (r"5 \text{ hours per week}", r"\boxed{5 \text{ hours}}", False),
        (r"30 \text{ minutes}", r"\boxed{30 \text{ min}}", True),
        (r"30 \text{ minutes}", r"\boxed{\frac{1}{2} \text{ hour}}", False),
        (r"5 \text{ in}", r"\boxed{5 \text{ inches}}", True), ("5 cm", "The answer is 5 kg.", False),
        ("5 cm", "The answer is 5 in total.", True), ("5 cm", "The length is 5 centimeters.", True),
        ("5 cm", "The answer is 5 inches.", False),
    ],
    "last letters": [
        ("5m^2+3m", r"\boxed{5m^2+3}", False), ("5m^2+3m", r"\boxed{m(5m+3)}", True),
        ("2m+3s", r"\boxed{3s+2m}", True), ("2m+3s", r"\boxed{2m+3}", False),
        (r"\pi r^2 h", r"\boxed{\pi r^2}", False), (r"\pi r^2 h", r"\boxed{\pi h r^2}", True),
        ("x + h", r"\boxed{x + d}", False), ("x + h", r"\boxed{h + x}", True), ("3t", r"\boxed{3}", False),
        ("3t", r"\boxed{3t}", True), ("3t", r"\boxed{3 \cdot t}", True),
        (r"\frac{1}{2}g", r"\boxed{\frac{g}{2}}", True), (r"\frac{1}{2}g", r"\boxed{\frac{1}{2}}", False),
        ("2m, 3s", r"\boxed{2m, 3s}", True), ("x+m, x+s", r"\boxed{x+s, x+m}", True),
        ("x+m, x+s", r"\boxed{x, x}", False), ("y = 2x + m", r"\boxed{y = 2x}", False),
        ("y = 2x + m", r"\boxed{m + 2x}", True), ("5", r"\boxed{5 m}", True), ("5", r"\boxed{5m}", True),
        ("5m", r"\boxed{5}", True), ("5", r"\boxed{5t}", False), (r"\sqrt{2}s", r"\boxed{s\sqrt2}", True),
        (r"\sqrt{2}s", r"\boxed{\sqrt2}", False), (r"A \cup B", r"\boxed{B \cup A}", True),
        (r"\frac{1}{2}n h", r"\boxed{\frac{nh}{2}}", True), ("a < b < c", r"\boxed{a<b<c}", True),
        ("x = t", r"\boxed{t}", True), (r"v = \frac{d}{t}", r"\boxed{\frac{d}{t}}", True),
    ],
    "golds in words": [
        ("$125$ miles", r"\boxed{125\textnormal{ miles}}", True), ("$125$ miles", r"\boxed{125\text{ km}}", False),
        (r"\text{The value is } 5", r"\boxed{5}", True), (r"3\sqrt{2} units", r"\boxed{3\sqrt{2}}", True),
        ("2 boys and 3 girls", r"\boxed{2 \text{ boys and } 3 \text{ girls}}", True),
        ("2 boys and 3 girls", r"\boxed{3 \text{ boys and } 2 \text{ girls}}", False),
        ("all real numbers except 3", r"\boxed{3}", False), ("3 quarters and 2 dimes", r"\boxed{3}", False),
        ("5 or more", r"\boxed{5}", False), ("5 or more", r"\boxed{5 \text{ or more}}", True),
        ("at least 5", r"\boxed{5}", False), ("18 dollars", r"\boxed{18}", True), ("5 km", r"\boxed{5}", True),
        ("x = 5", r"\boxed{5}", True), ("The answer is 5", r"\boxed{5}", True),
        ("So there are 4 + 5 = 9 eggs. #### 18", r"\boxed{18}", True), ("So, x = 34 apples.", r"\boxed{34}", True),
        (r"5 \text{ ft } 6 \text{ in}", r"\boxed{5 \text{ ft } 6 \text{ in}}", True),
        (r"5 \text{ ft } 6 \text{ in}", r"\boxed{5 \text{ ft}}", False),
        ("5 ft 6 in", r"\boxed{5\text{ ft }6\text{ in}}", True),
        ("5 m^2 + 3 m", r"\boxed{3m + 5m^2}", True), ("5 or more", "The answer is 5 or more.", True),
        ("at least 5", r"\boxed{\text{at most } 5}", False),
        ("more than 3 cases", r"\boxed{3}", False), ("There are 34 apples", r"\boxed{34}", True),
        ("The answer is $5$.", r"\boxed{5}", True), ("The answer is $5$.", r"\boxed{6}", False),
        ("9 * 2 = 18. The answer is 18.", r"\boxed{18}", True),
        ("9 * 2 = 18. The answer is 18.", r"\boxed{9}", False),
        ("f(x) = 2x for all real x", r"\boxed{f(x) = 2x}", True),
        ("f(x) = 2x for all real x", r"\boxed{f(x) = 3x}", False),
    ],
    "answers with an introduction": [
        ("5", r"\boxed{\text{The answer is } 5}", True), ("5", r"\boxed{\text{about } 5}", True),
        ("5", r"\boxed{\text{exactly } 5 \text{ cm}}", True), ("5", r"\boxed{\text{Total: } 5}", True),
        ("5", r"\boxed{\text{There are } 5 \text{ ways}}", True), ("5", "<answer>about 5</answer>", True),
        ("6", r"\boxed{\text{The answer is } 5}", False), ("5", r"\boxed{\text{The answer is not } 5}", False),
        ("5", r"\boxed{\text{It is not } 5}", False), ("5", r"\boxed{\text{about } 6}", False),
    ],
    "words": [
        ("Evelyn", r"\boxed{nylevE}", False), ("Evelyn", r"\boxed{Evelyn}", True),
        (r"\text{Evelyn}", r"\boxed{Evelyn}", True), (r"\text{Evelyn}", r"\boxed{\text{nylevE}}", False),
        ("Evelyn", r"\boxed{\text{Evelyn}}", True), ("Evelyn", "The answer is Evelyn.", True),
        ("abc", r"\boxed{cba}", True), ("xyz", r"\boxed{zyx}", True), ("even", r"\boxed{\text{neve}}", False),
        ("blue", r"\boxed{\text{blue}}", True), ("Evelyn", "The answer is Debra, not Evelyn.", False),
        ("Yes", "The answer is yes.", True), ("Yes", "The answer is no.", False),
        ("east", r"\boxed{\text{seat}}", False), ("ellipse", r"\boxed{\text{ellipse}}", True),
        ("red, blue", r"\boxed{\text{blue and red}}", True), ("red, blue", r"\boxed{\text{blue}}", False),
        ("mnk", r"\boxed{kmn}", True), ("no solution", r"\boxed{\text{There is no solution}}", True),
        ("no solution", r"\boxed{\text{infinitely many}}", False),
        ("Evelyn", r"\boxed{n y l e v E}", False), ("Evelyn", r"\boxed{n\cdot y l e v E}", False),
        ("Evelyn", r"\boxed{E^1 nylev}", False), ("even", r"\boxed{n e v e}", False),
        ("Evelyn", r"\boxed{\text{Evelyn} = 5}", False), ("Yes", r"\boxed{s e Y}", False),
        ("xyz", r"\boxed{z \cdot y x}", True), ("abc", r"\boxed{c b a}", True), ("lwh", r"\boxed{h w l}", True),
        ("x-axis", r"\boxed{x\text{-axis}}", True), ("x-axis", r"\boxed{y\text{-axis}}", False),
        ("infinity", r"\boxed{\infty}", True), (r"\infty", r"\boxed{\text{infinity}}", True),
        ("infinity", r"\boxed{-\infty}", False), ("undefined", r"\boxed{\text{Undefined}}", True),
        ("undefined", r"\boxed{\frac{1}{0}}", False), ("Tuesday", r"\boxed{\textbf{tuesday}.}", True),
    ],
    "brackets and times": [
        ("(1,2)", r"\boxed{\{1,2\}}", False), (r"\{1,2\}", r"\boxed{(1,2)}", False),
        (r"\{1,2\}", r"\boxed{\{2,1\}}", True), ("1,2", r"\boxed{\{2,1\}}", True), ("(1,2)", r"\boxed{1,2}", True),
        ("10:30", r"\boxed{10/30}", False), ("10:30", r"\boxed{\frac{1}{3}}", False),
        ("10:30", r"\boxed{10:30}", True), ("2:3", r"\boxed{2/3}", True), ("9:05", r"\boxed{\frac{9}{5}}", False),
        ("9:05", r"\boxed{9:05}", True), ("10:30", r"\boxed{10:30 \text{ am}}", True),
        ("7:15", r"\boxed{\frac{7}{15}}", True), (r"\{(1,2),(3,4)\}", r"\boxed{(1,2),(3,4)}", True),
        (r"\{(1,2)\}", r"\boxed{\{(1,2)\}}", True), ("(1,2)", r"\boxed{x \in (1,2)}", True),
        ("(1,2)", r"\boxed{x \in \{1,2\}}", False), ("(a, b, c) = (1, 2, 3)", r"\boxed{(1,2,3)}", True),
        ("(a, b, c) = (1, 2, 3)", r"\boxed{(3,2,1)}", False), ("(1,2)", r"\boxed{{1,2}}", False),
        ("(1,2)", "<answer>{1, 2}</answer>", False), (r"\{1,2\}", r"\boxed{{1,2}}", True),
        ("1,2", r"\boxed{{1,2}}", True), ("12", r"\boxed{{12}}", True), ("(1,2)", r"\boxed{({1},{2})}", True),
    ],
    "choices": [
        ("B", "The answer is (B) 12 C", False), ("B", "The answer is (B) 12.", True),
        ("B", "The answer is B, because A is false.", True), ("B", "B, because A is false", True),
        ("B", r"\boxed{B, because A is false}", True), ("12", r"\boxed{12 (B)}", True),
        ("B", r"\boxed{12 (B)}", True), ("B", r"\boxed{12 (C)}", False), ("13", r"\boxed{12 (B)}", False),
        ("B", r"\boxed{(B) P(A) = 3}", True), ("C", r"\boxed{(B) P(A) = 3}", False), ("B", "B", True),
        ("B", "The answer is B, not A.", True), ("A", "The answer is B, not A.", False),
        ("B", "The answer is B since A fails.", True), ("B", "The answer is B, A", False),
        ("12", r"\boxed{12 \textbf{ (B)}}", True), ("12", r"\boxed{\sin (A)}", False),
        ("B", r"\boxed{(B) 12 C 13}", False), ("B", "**B**", True), ("B", "<answer>**B**</answer>", True),
        ("B", r"\boxed{B. Paris}", True), ("Paris", r"\boxed{\text{B: Paris}}", True), ("B", "(B) Paris", True),
        ("C", r"\boxed{B. Paris}", False), ("B", r"\boxed{B. Paris or C. Rome}", False),
        ("B", r"\boxed{B. Paris, C. Rome}", False), ("B", r"\boxed{B. Or C}", False),
        ("A. Smith", r"\boxed{A. Smith}", True), ("A. Smith", r"\boxed{B. Smith}", False),
        ("B", "The answer is option B, since A and C fail.", True), ("B", "The best choice is **B**.", True),
        ("12", "The answer is option B: 12.", True), ("B", "The answer is option B or C.", False),
        ("B", "The answer is B. Maybe C.", False), ("B", "The answer is B. We see that C fails.", True),
        ("C", "The answer is B. We see that C fails.", False), ("A", "A good answer", False),
        ("B", "B: because A is false", True), ("5", "The best option is to take 5.", True),
    ],
    "bounds": [
        (r"\ge 5", r"\boxed{x \ge 5}", True), (r"\ge 5", r"\boxed{x \le 5}", False),
        (r"\ge 5", r"\boxed{x > 5}", False), (r"x \ge 5", r"\boxed{\ge 5}", True), ("5", r"\boxed{x \ge 5}", False),
        ("x > 3", r"\boxed{> 3}", True), ("x > 3", r"\boxed{< 3}", False),
        ("5", r"\boxed{5 \text{ or more}}", False), ("5", r"\boxed{5 \text{ at most}}", False),
        ("5", "The answer is at least 5.", False), ("5", "The answer is **more than** 5.", False),
        ("5", "The answer is 5 or more.", False), ("5", "The answer is $5$ or possibly more.", False),
        ("5", "The answer is 5 to 7.", False), ("5", r"\boxed{5 \text{ to } 7}", False),
        ("at most 5", "The answer is at most 5.", True), ("5", "So she needs at least 5 boxes.", True),
        ("5", "The minimum is at least 5, so the answer is 5.", True), ("5", "The answer is 5, more than 3.", True),
        ("5", "It fell from 7 to 5.", True), ("5", "The answer is 5 more than expected", True),
        ("x > 5", r"\boxed{x > 5}", True), ("5 or more", r"\boxed{5 \text{ or more}}", True),
    ],
    "boxes with words": [
        ("3, 4", r"There are \boxed{3} papers and \boxed{4} pens.", True),
        ("3, 4", r"\boxed{3} for part (a) and \boxed{4} for part (b).", True),
        ("3, 4", r"$\boxed{3}$ papers and $\boxed{4}$", True),
        ("4", r"$\boxed{3}$ for part (a) and $\boxed{4}$ for part (b)", False),
        ("4", r"$\boxed{3}$ is wrong and $\boxed{4}$ is right", True),
        ("4", r"$x = \boxed{3}$, so that $y = \boxed{4}$", True),
        ("3, 4", r"\boxed{3} in the first case and \boxed{4} in the second", True),
        ("4", r"First \boxed{3}. Then we add one and get \boxed{4}.", True),
        ("3, 4", r"x is \boxed{3} and y is \boxed{4}.", True), ("4", r"x is \boxed{3} and y is \boxed{4}.", False),
        ("4", r"x is \boxed{3}, so y is \boxed{4}.", True), ("4", r"x is \boxed{3}. y is \boxed{4}.", True),
        ("4", r"\boxed{3} or possibly \boxed{4}", False), ("3", r"\boxed{3}, perhaps \boxed{4}", False),
        ("4", r"It is \boxed{3}; perhaps not. \boxed{4}", True),
    ],
}  # fmt: skip
REDUCED = [
    "5..7",
    "5\u20137",
    "7\n8",
    "1 + 2 + \\cdots + n",
    "1) 5 2) 6",
    "7&8",
]  # of which one number was read
WHOLE = [
    ("4/2", "2"), ("1011_2", "1011_2"), (r"\frac{0}{5}", "0"), (r"x \equiv 5 \pmod{7}", "5"), ("x_1 = 5", "5"),
    ("5 m^2", "5"), (r"34\,\mathrm{m\,s^{-1}}", "34"), (r"\frac{1}{3} \approx 0.33", r"\frac{1}{3}"), ("3 1/2", "3.5"),
    (r"5 \text{ (since 2 + 3 = 5)}", "5"), ("<answer>7</answer>", "7"), (r"<answer>\boxed{7}</answer>", "7"),
    ("1, 2", "2, 1"), ("12:30", "12:30"),
]  # fmt: skip
PROSE = [
    "Proof. By induction on 3 cases.",
    "We prove this by induction on the number n of the 12 cases of the lemma that was shown above.",
    "It has 3 sides. They are equal.",
]


@pytest.mark.parametrize(
    ("gold", "completion", "is_right"), [case for cases in KINDS.values() for case in cases]
)
def test_an_answer_is_right_or_wrong(gold, completion, is_right):
    assert math_verify.score({"completion": completion, "answer": gold})["reward"] == float(is_right)


@pytest.mark.parametrize("reward", REWARDS.values(), ids=REWARDS)
@pytest.mark.parametrize("kind", KINDS)
def test_no_reward_takes_a_wrong_answer_for_right(reward, kind):
    for gold, completion, is_right in KINDS[kind]:
        if is_right:
            continue
        try:
            is_accepted = reward({"completion": completion, "answer": gold})["reward"] == 1.0
        except ValueError:
            continue  # a row that this reward cannot compare is refused when a run starts
        assert not is_accepted, (gold, completion)


@pytest.mark.parametrize("gold", PROSE)
@pytest.mark.parametrize(
    "check", [row_checks.check_math_verify_row, row_checks.check_mathd_row, row_checks.check_sympy_row]
)
def test_a_row_whose_answer_is_prose_is_refused_at_the_start(check, gold):
    with pytest.raises(ValueError, match="is prose, in which no value can be found: write only the value"):
        check({"answer": gold})
    check({"answer": f"{gold} #### 3"})
    row_checks.check_exact_row({"answer": gold})


@pytest.mark.parametrize("gold", REDUCED)
def test_no_number_is_taken_from_several(gold):
    with pytest.raises(ValueError, match="only the number [0-9]+ can be read: write only the value"):
        row_checks.check_math_verify_row({"answer": gold})
    for number in "125678":
        completion = rf"\boxed{{{gold}}}"
        assert math_verify.score({"completion": completion, "answer": number}) == {"reward": 0.0}


@pytest.mark.parametrize(("gold", "answer"), WHOLE)
def test_a_value_with_several_numbers_is_read_as_a_whole(gold, answer):
    row_checks.check_math_verify_row({"answer": gold})
    assert math_verify.score({"completion": rf"\boxed{{{answer}}}", "answer": gold}) == {"reward": 1.0}
    if "answer" not in gold:
        assert math_verify.score({"completion": rf"\boxed{{{gold}}}", "answer": answer}) == {"reward": 1.0}


@pytest.mark.parametrize(
    "check", [row_checks.check_math_verify_row, row_checks.check_mathd_row, row_checks.check_sympy_row]
)
def test_a_json_object_is_no_value(check):
    with pytest.raises(
        ValueError, match="is a JSON object: name the field .*--answer-column answer.ground_truth"
    ):
        check({"answer": '{"ground_truth": "7"}'})
    row_checks.check_exact_row({"answer": '{"ground_truth": "7"}'})


@pytest.mark.parametrize(
    ("latex", "value"),
    [
        (r"\frac{1}{2} + 3 \cdot 2^2", 12.5), (r"-\sqrt{9} - 1", -4.0), (r"\sqrt[3]{8}", 2.0), ("5! / 4!", 5.0),
        (r"2\sqrt{4}", 4.0), (r"\binom{5}{2}", 10.0), (r"\left(1 + 2\right)^2", 9.0), (r"50\%", 0.5), ("3 - -2", 5.0),
        ("x", None), ("3e", None), ("1/0", None), ("9^9^9^9", None), ("1/2(3)", None), ("2^34", None), ("(1", None),
        ("10^{999}", None), ("5 6", None), ("", None), (r"\sin 3", None), ("(-8)^{0.5}", None), ("200!", None),
    ],
)  # fmt: skip
def test_only_plain_arithmetic_has_a_value(latex, value):
    assert arithmetic_value(latex) == (None if value is None else pytest.approx(value))


@pytest.mark.parametrize(
    ("answer", "same_unit"),
    [
        ("60 mph", "60 miles per hour"),
        ("5 sq. ft", r"5 \text{ ft}^2"),
        (r"\$5", "5 dollars"),
        ("9 m/s^2", "9 m s^{-2}"),
    ],
)
def test_a_unit_has_many_spellings(answer, same_unit):
    assert units_of(answer) == units_of(same_unit) != []
