"""The score that a judge writes: the whole number is read, or nothing. References are exact decimals, and float by hand."""

import math
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.rewards.judges.score_line import MAX_NUMBER_CHARACTERS, MAX_TAIL_CHARACTERS, score_in

BEST = 10.0
READ = {
    "Score: 7": 7,
    "score 7": 7,
    "SCORE=7": 7,
    "Score:\n\n7\n": 7,
    "Final score: 7": 7,
    "**Score:** 7.5": 7.5,
    "**Score**: 7.5": 7.5,
    "**Score: 7.5**": 7.5,
    "_Score: 7_": 7,
    "`Score: 7`": 7,
    "(Score: 7)": 7,
    "Score: **7**/10": 7,
    "Score: 7/10.": 7,
    "Score: 7 / 10": 7,
    "Score: 7 out of 10!": 7,
    "Score: 10.0/10.0": 10,
    "Score: 3.": 3,
    "Score: 3.  ": 3,
    "Score: 3.\r\nThat is all.": 3,
    "Score: 8, since 2 of the steps are wrong": 8,
    "Score: 8; fine": 8,
    "Score: 10? No. Score: 2": 2,
    "Score: 2\nThe score is low.": 2,
    '{"score": 4}': 4,
    '{"score": 4, "style": 2}': 4,
    "Score: -2": -2,
    "Score: +2": 2,
    "Score: −2": -2,  # the minus sign of Unicode
    "Score: .5": 0.5,
    "Score: 007.50": 7.5,
    "Score: 7</answer>": 7,
    "Score: 7<|im_end|>": 7,
    "Score: 8 (good)": 8,
    "Score: 8 - good": 8,
    "Score: 8 – mostly right": 8,
    "Score: 8 points": 8,
    "**Score: 8** points": 8,
    "Score: 8 out of 10 points": 8,
    "Score: 8/10 because it is complete": 8,
    "Score: [8]": 8,
    "Score: (8)": 8,
    "Score: $8$": 8,
    "Score: $8/10$.": 8,
    r"Score: \boxed{8}": 8,
    r"Score: $\boxed{8}$": 8,
    "Score: 8 ✓": 8,
    "Score is 8": 8,
    "The score is **8**.": 8,
    "Score：8": 8,
    "Score:          8": 8,
    "Score: 8\u00a0": 8,
    "Score: 8\n(Score 0-10)": 8,
    "Score: 8, and well argued": 8,
    "Score: 8.\n2 steps are missing.": 8,
}
NOT_READ = [
    *("Score: 1e-05", "Score: 1E-2", "Score: 5e+0", "Score: 1e3", "Score: 1e-400", "Score: 2.5e0"),
    *("Score: 0x1F", "Score: 0b1", "Score: 0o7", "Score: 1F", "Score: 7th", "Score: 3a"),
    *("Score: 0½", "Score: ½", "Score: 3 ½", "Score: 3 1/2", "Score: 1/2", "Score: 3/5", "Score: 7/10/2", "Score: 3⁄4"),
    *("Score: 0٫5", "Score: ٣", "Score: ３", "Score: ３．５", "Score: 3３", "Score: 3²", "Score: 3·5", "Score: 3\u200b5"),
    *("Score: 1_0", "Score: 1,5", "Score: 1,000", "Score: 1,000.5", "Score: 1.000.000", "Score: 1.000,5"),
    *("Score: 1'000", "Score: 1 000", "Score: 1\u00a0000", "Score: 1\u202f000", "Score: 1. 5", "Score: 1, 5"),
    *("Score: 3-4", "Score: 3–4", "Score: 3 - 4", "Score: 3 to 4", "Score: 3 or 4", "Score: 3, or 4", "Score: 3~4"),
    *("Score: 3 and 4", "Score: 3..4", "Score: 3..", "Score: 3...", "Score: 3 out of 5", "Score: 3 out of five"),
    *("Score: 50%", "Score: 50 %", "Score: 5‰", "Score: 3*4", "Score: 3^2", "Score: 3×10", "Score: 3:30", "Score: $3"),
    *("Score: NaN", "Score: nan", "Score: inf", "Score: -Infinity", "Score: ∞", "Score: none", "Score: x", "Score: "),
    *("Score: –3", "Score: －3", "Score: ﹣3", "Score: ⁻3", "Score: --3", "Score: - 3", "Score: +-3"),
    *("Score: ≥3", "Score: ~3"),
    *("Score: 3 million", "Score: 3k", "Score: 3 hundred", "Score: 3 and a half", "Score: three", "Score: VII"),
    *("Underscore: 3", "Subscore: 3", "f1_score: 3", "z-score: 3", "scores: 3, 4", "score2: 7", "scored 3", "score3"),
    *("Score: 7. Score: unknown", "Score: 7\nScore: n/a", "", "7", "The verdict is 7"),
    *("Score: 1,\u2009000", "Score: 5,\u00a05", "Score: 8.\u00a05", "Score: 3, or rather 4", "Score: 3. Or 4?"),
    *("Score: 3. AND 4", "Score: 3, to\u00a04", "Score: 5! = 120", "Score: 3, or four", "Score: 3. \u2003 5"),
    *("Score: 3 Or 4", "Score: 3 - four", "Score: 3 (or 4)", "Score: 3 (4)", "Score: 3 times 4", "Score: 3 times four"),
    *("Score: 3 x 4", "Score: 3 e 5", "Score: 3 percent", "Score: 3 per cent", "Score: 3 point five", "Score: 3 thousand"),
    *("Score: 3 - percent", "Score: 3 of 5", "Score: 3 of five", "Score: [3, 4]", "Score: (3-4)", "Score: [0-10]"),
    *("Score: 3$", "Score: ($3)", "Score: $3$4", r"Score: \boxed{3}4", r"Score: \boxed{3, 4}"),
    *("Score: 3 ✓ 4", "Score: 3 ✗"),
    *("The score is 2 points below the best.", "Score is 3 or 4", "Score 3 points", "Score: 3 = 3", "Score: 3 → 4"),
    "Score: 0." + "0" * MAX_NUMBER_CHARACTERS + "1",
    "Score: " + "9" * 400,
    "Score: 7 " + "x" * MAX_TAIL_CHARACTERS,
]  # fmt: skip


@pytest.mark.parametrize("text", READ)
def test_the_number_of_the_last_mention_is_the_score(text):
    assert score_in(text, BEST) == READ[text]


@pytest.mark.parametrize("text", NOT_READ)
def test_what_is_more_or_other_than_a_plain_number_is_no_score(text):
    with pytest.raises(ValueError, match="score|names"):
        score_in(text, BEST)


def grouped(whole: str, separator: str) -> str:
    """Put a separator between each three digits, from the right."""
    first = len(whole) % 3 or 3
    return separator.join(
        [whole[:first], *(whole[begin : begin + 3] for begin in range(first, len(whole), 3))]
    )


@st.composite
def written_numbers(draw):
    """An exact number, and one of the usual ways to write it down."""
    digits = draw(st.integers(0, 10**12))
    value = Decimal(digits).scaleb(-draw(st.integers(0, 12))) * draw(st.sampled_from([1, -1]))
    plain = format(value, "f")
    whole, dot, fraction = plain.lstrip("-").partition(".")
    sign = "-" if plain.startswith("-") else ""
    localized = (
        sign + grouped(whole, draw(st.sampled_from(["'", " ", "\u00a0", "\u202f", ","]))) + dot + fraction
    )
    german = sign + grouped(whole, ".") + ("," + fraction if fraction else "")
    ways = [
        *(
            plain,
            "+" + plain.lstrip("-") if not sign else plain,
            plain.replace("-", "−"),
            plain.replace("-", "–"),
        ),
        *(
            f"{value:e}",
            f"{value:E}",
            f"{value:g}",
            f"{value:n}",
            f"{value:.3e}",
            repr(float(value)),
            localized,
        ),
        *(
            plain.replace(".", ","),
            plain.translate(dict(zip(map(ord, "0123456789"), "٠١٢٣٤٥٦٧٨٩", strict=True))),
        ),
        *(
            plain.translate(dict(zip(map(ord, "0123456789"), "０１２３４５６７８９", strict=True))),
            f"{plain}/1",
            f"{plain}/5",
        ),
        *(
            f"{value * 100:f}%",
            f"{plain}/10",
            f"{plain} out of 10",
            f"**{plain}**",
            f"{plain}.",
            f"({plain})",
        ),
        *(hex(digits), f"{float(value):_}", f"{plain}e0", f"{plain}e-2"),
    ]
    # A dot between thousands alone cannot be told from a decimal point: the rule says that it is one
    if fraction:
        ways.append(german)
    return value, draw(st.sampled_from(ways))


@settings(max_examples=600, deadline=None)
@given(
    written=written_numbers(),
    mention=st.sampled_from(["Score: ", "**Score:** ", "Fine.\nscore = ", '{"score": ']),
    behind=st.sampled_from(["", "\n", "}", " ", "\nThank you."]),
)
def test_a_number_that_is_written_in_a_usual_way_is_read_exactly_or_not_at_all(written, mention, behind):
    value, text = written
    try:
        score = score_in(f"{mention}{text}{behind}", BEST)
    except ValueError:
        return
    allowed = {float(value)}
    if text.startswith(("0x", "0X")) or "_" in text:
        allowed = set()
    # Ways that round what they write are held to what they wrote
    if text in (f"{value:g}", f"{value:n}", repr(float(value)), f"{float(value):_}") and "_" not in text:
        allowed.add(float(text))
    assert score in allowed and math.isfinite(score), (value, text)


@given(st.decimals(-1000, 1000, allow_nan=False, allow_infinity=False, places=6))
def test_a_plain_decimal_number_is_always_read(value):
    assert score_in(f"So.\n\nScore: {value:f}", BEST) == float(value)


@settings(max_examples=500, deadline=None)
@given(st.characters())
def test_whatever_character_stands_between_two_digits_none_of_them_is_lost(character):
    try:
        score = score_in(f"Score: 3{character}5", BEST)
    except ValueError:
        return
    if character.isdecimal():
        assert score == int(f"3{character}5")
    else:
        assert (character, score) in {(".", 3.5), ("\n", 3.0)}
