"""What `fuzz_rewards` throws at the rewards: right answers, nearly right ones, and hostile text."""

import random
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

from fuzz_checkers import Arithmetic, judged, solves

MARK = "zqmark"  # in each text that would be a program; see `fuzz_rewards.watch`
PAYLOADS = [
    f"__import__('os').system('echo {MARK}')",
    f"open('{MARK}','w')",
    f"exec('{MARK}=1')",
    f"(lambda: {MARK})()",
    f"eval(\"print('{MARK}')\")",
    f"[].__class__.__base__.__subclasses__() # {MARK}",
    f"\\input{{{MARK}}}",
    f"{MARK}.__globals__",
]
BOMBS = r"""
9**9**9 9^{9^{9}} 9^9^9^9 99999999! 3!!!!!!! ((10^{999})^{999})^{999} 1/0 \sum_{k=1}^{10^9}k^k \frac{1}{0} \sqrt{-1} 0^0
\infty-\infty \prod_{k=1}^{10^9}k \int_0^{1}x^{x^{x}}dx \log_{0}{0} 1e999999999
""".split()
BOMBS += ["(" * 200, "{" * 300, "9" * 5000, "-" * 200 + "7", "\\frac" * 100, "\\sqrt{" * 100]
SOUP = r"""
<think> </think> <answer> </answer> \boxed{ \boxed } { ( ) [ ] + - * / // ** ^ _ = \frac \sqrt \cdot \times \text{ \left(
\right) \pi \% $ $$ #### \\ 0 1 7 12 3.5 .5 1,000 e i x and \begin{pmatrix} \end{pmatrix} \{ \} \infty \ln \log ! | & < >
\le , ;
""".split()
SOUP += ["\u0663", "\u00bd", "\u00d7", "\u2212", "\x00", "\n", " ", "\ud800", " answer is "]

Case = tuple[dict[str, Any], Callable[[], bool | None]]  # a row, and what the checker says of it


def mutated(text: str, rng: random.Random) -> str:
    characters = list(text)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(characters) + 1)
        characters[at : at + rng.randint(0, 2)] = rng.choice(["", "", *SOUP, *"0123456789+-*/()."])
    return "".join(characters)


def garbage(rng: random.Random) -> str:
    kind = rng.choices(("soup", "characters", "payload", "bomb"), weights=(10, 10, 5, 1))[0]
    if kind == "soup":
        return "".join(rng.choices(SOUP, k=rng.randint(0, 30)))
    if kind == "characters":
        limits = rng.choices((128, 0x3000, 0x110000), k=rng.randint(0, 40))
        return "".join(chr(rng.randrange(limit)) for limit in limits)
    return rng.choice(PAYLOADS if kind == "payload" else BOMBS)


def expression(nums: list[int], rng: random.Random) -> str:
    """Some expression with each of the numbers once."""
    parts = [str(number) for number in nums]
    while len(parts) > 1:
        left, right = parts.pop(rng.randrange(len(parts))), parts.pop(rng.randrange(len(parts)))
        blank = rng.choice(["", " "])
        text = left + blank + rng.choice("+-*/") + blank + right
        parts.append(rng.choice(["", "", "", "-"]) + (f"({text})" if rng.random() < 0.7 else text))
    return parts[0]


def countdown_cases(rng: random.Random) -> Iterator[Case]:
    while True:
        nums = [rng.randint(0, 25) for _ in range(rng.randint(1, 5))]
        answer, target = expression(nums, rng), rng.randint(0, 50)
        try:
            value = Arithmetic(answer).value
            target = int(value) if value.denominator == 1 and rng.random() < 0.9 else target
        except ZeroDivisionError:
            pass
        kind = rng.randrange(4)
        answer = (
            garbage(rng) if kind == 0 else mutated(answer, rng) if kind == 1 else mutated(mutated(answer, rng), rng)
            if kind == 2 else answer
        )  # fmt: skip
        text = f"{rng.choice(['', 'so', garbage(rng)])}</think>\n<answer>{answer}</answer>"
        text = mutated(text, rng) if rng.random() < 0.2 else text
        row = {"completion": text, "nums": nums, "target": target}
        yield row, lambda text=text, nums=nums, target=target: solves(text, nums, target)


def written(value: Fraction, rng: random.Random) -> str:
    """The value, in one of the ways in which people write it."""
    forms = [f"\\frac{{{value.numerator}}}{{{value.denominator}}}", f"{value.numerator}/{value.denominator}"]
    endings = [""]
    if value.denominator == 1:
        number = int(value)
        forms = [str(number), f"{number:,}", f"{number}.0", f"\\frac{{{2 * number}}}{{2}}", f"({number})"]
        forms += [f"{number + 3} - 3", f"x = {number}"]
        endings = ["", "", "\\%", "\\text{ cm}", "^\\circ"]
    if (value * 10**6).denominator == 1:
        forms.append(f"{float(value):.6f}".rstrip("0").rstrip("."))
    return rng.choice(["", "", "$", " "]) + rng.choice(forms) + rng.choice(endings)


def some_value(rng: random.Random) -> Fraction:
    number = rng.randint(-(size := rng.choice([10, 100, 10**4, 10**7])), size)
    return Fraction(number, rng.choice([1, rng.randint(1, 12), 10 ** rng.randint(1, 4)]))


def neighbour(value: Fraction, rng: random.Random) -> Fraction:
    """Another value that is easily mistaken for this one."""
    near = [
        value + 1,
        value - 1,
        -value,
        value * 10,
        value / 10,
        value * 100,
        value / 100,
        value + Fraction(1, 100),
    ]
    near += [Fraction(int(value)), Fraction(round(value, 2)), value + Fraction(1, 10**5), some_value(rng)]
    return rng.choice(near)


def math_cases(rng: random.Random, tolerance: Fraction) -> Iterator[Case]:
    """`tolerance`: by how much an accepted number may differ."""
    while True:
        gold = some_value(rng)
        answer = written(gold if rng.random() < 0.5 else neighbour(gold, rng), rng)
        chance = rng.random()
        answer = answer if chance < 0.5 else mutated(answer, rng) if chance < 0.75 else garbage(rng)
        text = rng.choice(["", "so ", "\\boxed{1} no, ", "The answer is 5. "]) + f"$\\boxed{{{answer}}}$"
        text = mutated(text, rng) if rng.random() < 0.1 else text
        text = garbage(rng) if rng.random() < 0.05 else text
        whole = gold.denominator == 1
        gold_text = str(gold) if whole else f"\\frac{{{gold.numerator}}}{{{gold.denominator}}}"
        row = {"completion": text, "answer": gold_text}
        yield row, lambda text=text, gold=gold: judged(text, gold, tolerance)
