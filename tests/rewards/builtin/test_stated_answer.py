"""How an answer is read in a completion: boxes amid layout, cut-off boxes, thoughts, tags, and all readers alike."""

import itertools
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from async_grpo.experience.evaluation import answer_of
from async_grpo.rewards.answer_reading.boxes import boxed_answer, without_layout
from async_grpo.rewards.answer_reading.stated import stated_answer
from async_grpo.rewards.builtin.answers import gold_answer
from async_grpo.rewards.builtin.math_verify import score as math_verify
from async_grpo.rewards.builtin.mathd import post_process_scores, score_vote, vote_of
from async_grpo.rewards.builtin.mathd import score as mathd
from async_grpo.rewards.builtin.sympy import score as sympy
from async_grpo.rewards.builtin.text import exact

MATHEMATICS = {"math_verify": math_verify, "mathd": mathd, "sympy": sympy}
every_reward = pytest.mark.parametrize("reward", MATHEMATICS.values(), ids=MATHEMATICS)

DELIMITERS = [("", ""), ("$", "$"), ("$$", "$$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**$", "$**")]
DIVIDERS = [
    " and ", " or ", ", ", ", and ", "; ", "\nand\n", r"\quad\text{and}\quad ", r"\;\text{ or }\;", r",\ ", r",\;",
    r", \\ ", r" \textrm{ and } ", r"~\mbox{or}~", r",\hspace{1em}", " AND ", r"\displaystyle,\,",
]  # fmt: skip
NO_DIVIDERS = ["\n", " ", " so that ", ". No: ", " = ", r" \\ ", "+", " (or ", " and also "]
BOXES = [
    r"\boxed{%s}", r"\boxed {%s}", "\\boxed{\n%s }", r"\boxed{\,%s\;}", r"\boxed{\displaystyle %s}", r"\boxed{$%s$}",
    r"\boxed{\(%s\)}", r"\boxed{\boxed{%s}}", r"\fbox{$\boxed{%s}$}", r"\boxed{\fbox{%s}}", r"\boxed %s",
    r"\boxed{%s\quad}", r"\\boxed{%s}",
]  # fmt: skip


def reward_of(reward, text: str, answer: object) -> float:
    return reward({"completion": text, "answer": answer})["reward"]


@pytest.mark.parametrize("delimiters", DELIMITERS, ids=str)
@pytest.mark.parametrize("box", BOXES)
def test_layout_around_boxes_and_in_them_changes_no_answer(box, delimiters):
    one, two = (f"{delimiters[0]}{box % value}{delimiters[1]}" for value in ("1", "-2"))
    assert boxed_answer(f"So {two}.") == "-2"
    for divider in DIVIDERS:
        assert boxed_answer(f"So {one}{divider}{two}.") == "1, -2", divider
    for words in NO_DIVIDERS:
        assert boxed_answer(f"So {one}{words}{two}.") == "-2", words


@every_reward
def test_boxes_in_formulas_of_their_own_are_one_answer(reward):
    row = r"\(\boxed{1}\) and \(\boxed{-2}\)."
    assert [reward_of(reward, row, gold) for gold in ("-2", "1, -2", row)] == [0.0, 1.0, 1.0]
    assert [reward_of(reward, gold, row) for gold in (r"\boxed{-2}", r"\boxed{1, -2}", row)] == [
        0.0,
        1.0,
        1.0,
    ]


@pytest.mark.parametrize("name", ["align", "align*", "aligned", "cases", "gathered", "array"])
def test_rows_of_an_environment_that_hold_nothing_but_boxes_are_one_answer(name):
    begin = rf"\begin{{{name}}}" + ("{c}" if name == "array" else "")
    end = rf"\end{{{name}}}"
    assert boxed_answer(rf"\[{begin} x &= \boxed{{7}} {end}\]") == "7"
    assert boxed_answer(rf"{begin}\boxed{{1}} \\ \boxed{{2}}{end}") == "1, 2"
    assert boxed_answer(rf"{begin}& \boxed{{1}}, \\[2pt] & \text{{and }} \boxed{{2}}{end}") == "1, 2"
    assert boxed_answer(rf"{begin}\boxed{{1}}{end} and {begin}\boxed{{2}}{end}") == "1, 2"
    # steps of a derivation, and environments one after the other
    assert boxed_answer(rf"{begin} x &= \boxed{{3 + 4}} \\ &= \boxed{{7}}{end}") == "7"
    assert boxed_answer(rf"{begin}\boxed{{1}}{end} \\ {begin}\boxed{{2}}{end}") == "2"


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{12}, as $\frac{24}{2}$", "12"),
        (r"\boxed{\frac{1}{\sqrt{2}}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),  # an escaped brace is none
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\(\boxed 5\)", "5"),
        (r"{\boxed 5}, 6", "5"),
        (r"\boxed\frac{1}{2}.", r"\frac{1}{2}"),
        (r"\boxed x^{\frac{1}{2}} y", r"x^{\frac{1}{2}}"),
        (r"\boxed{3 \boxed{5}", "5"),
        (r"\boxed{x = \boxed{5}}", "5"),
        (r"\boxed\,{5}", "5"),
        (r"\boxed{\text{It is } \boxed{5}}", "5"),
        (r"\boxed{(\boxed{1}, \boxed{2})}", "(1, 2)"),
        (r"\boxed{\frac{\boxed{1}}{\boxed{2}}}", r"\frac{1}{2}"),
        (r"\boxed{1} and \boxed{\boxed{2} + 3}", "1, 2 + 3"),
        (r"Answer: \fbox{5}", "5"),
        (r"\boxed{5} \fbox{6}", "5"),
        (r"\boxedtext{6}", None),
        (r"\boxed{1}, \boxed{2", None),
        (r"\boxed{12\text{ cm", None),
        (r"I put it into \boxed", None),
    ],
)
def test_the_last_complete_box_is_read_with_balanced_braces(text, content):
    assert boxed_answer(text) == content


@example(["{{}", "", "}"])  # the first box holds the others, and adds words to them
@given(st.lists(st.text(alphabet="ab {}", max_size=6), min_size=1, max_size=4))
@settings(max_examples=100, deadline=None)
def test_a_box_ends_where_a_count_of_its_braces_is_even(contents):
    text = "".join(rf"\boxed{{{content}}} so " for content in contents)
    begin = text.rindex("\\boxed") + len("\\boxed{")
    depth = 1
    expected = None
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            expected = text[begin:position].strip()
            break
    assert boxed_answer(text) == expected


def test_a_thought_is_no_answer_unless_nothing_follows_it():
    assert stated_answer(r"<think>\boxed{9}</think> The answer is 4.") is None
    assert stated_answer(r"<think>\boxed{9}</think> So \boxed{4}.") == "4"
    assert stated_answer(r"\boxed{9}</think><answer>4</answer>") == "4"
    assert stated_answer(r"\boxed{9}</think>" + "\n") == "9"
    for reward, gold in itertools.product((math_verify, mathd, sympy, exact), ("9", "4")):
        text = "<think>perhaps \\boxed{9}</think>\n\n<answer>4</answer>"
        assert reward_of(reward, text, gold) == float(gold == "4")
    assert reward_of(math_verify, r"<think>maybe \boxed{7}</think> The answer is 5.", "7") == 0.0
    assert reward_of(exact, r"<think>\boxed{C}</think> B", "C") == 0.0
    assert answer_of(r"<think>\boxed{C}</think> B") == "B"


@pytest.mark.parametrize("text", [r"It is 3. So \boxed{\frac{3}{", r"\boxed{3}. No, \boxed{", r"3 \boxed"])
def test_a_box_that_is_cut_off_is_no_answer_for_any_reader(text):
    for reward in (math_verify, mathd, sympy, exact):
        assert reward_of(reward, text, "3") == 0.0
    assert vote_of({"completion": text}) is None
    assert answer_of(text) is None


def test_a_row_whose_box_is_cut_off_is_refused():
    with pytest.raises(ValueError, match="no end: close its brace"):
        gold_answer({"answer": r"\boxed{\frac{1}{2}"})


def test_all_readers_read_the_same_answer():
    texts = [
        r"\boxed{12}, as $\frac{24}{2}$",
        r"so \(\boxed{12}\).",
        r"\boxed{11}</think> <answer>12</answer>",
        "<answer> 12 </answer>",
    ]
    for text in texts:
        for reward in (math_verify, mathd, sympy, exact):
            assert reward_of(reward, text, "12") == 1.0, (reward, text)
        assert vote_of({"completion": text}) == answer_of(text) == "12"


def test_a_vote_counts_no_abstention():
    texts = [r"\boxed{12}", r"\boxed{12}, as $\frac{24}{2}$", r"\boxed{1", r"\boxed{2", r"\boxed{"]
    group = [{"status": "ok", "sample": {"completion": text}} for text in texts]
    shares = [answer["share"] for answer in post_process_scores(group)]
    assert [answer["reward"] for answer in post_process_scores(group)] == [1, 1, 0, 0, 0]
    assert shares == [1.0] * 5
    assert [score_vote(member["sample"])["voted"] for member in group] == [1, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("2 + 40 = 42\n#### 42\nThat was easy.", "42"),
        ("#### Conclusion\n\nIt is 42", "It is 42"),
        ("Here:\n```python\nprint(1)\n```", "print(1)"),
        ("<answer>1</answer> no, <answer>2</answer>", "2"),
        ("\n ", None),
    ],
)
def test_without_a_box_an_evaluation_reads_tags_a_marked_line_code_or_the_last_line(text, answer):
    assert answer_of(text) == answer


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        (r"\[34\]", "34"), ("$$34$$", "34"), (r"\(34\)", "34"), (r"\displaystyle 34\,", "34"), (r"\fbox{34}", "34"),
        ("$3$, $4$", "$3$, $4$"), ("$34", "$34"), (r"12\,345", "12345"), (r"1{,}234", "1234"), ("1~234~567", "1234567"),
        (r"1\,\,2", r"1\,\,2"), ("5\\ ", "5"), (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ],
)  # fmt: skip
def test_the_rows_answer_loses_the_same_layout(row, answer):
    assert gold_answer({"answer": row}) == answer


@every_reward
def test_thousands_and_currency_are_layout_in_rows_and_boxes(reward):
    for text in (r"\boxed{1\,234\,567}", r"\boxed{1~234~567}", r"\boxed{1{,}234{,}567}"):
        assert reward_of(reward, text, "1234567") == 1.0, text
    assert reward_of(reward, r"\boxed{12345}", r"12\,345") == 1.0
    assert [reward_of(reward, rf"\boxed{{{number}}}", r"\$36") for number in (36, 35)] == [1.0, 0.0]


def test_a_choice_may_stand_in_a_font():
    for text in (r"\boxed{\text{C}}", r"\boxed{\textbf{C}}", r"$\mathrm{C}$", r"\(C\)"):
        assert [reward_of(exact, text, gold) for gold in ("C", "B")] == [1.0, 0.0], text
    assert reward_of(exact, r"\boxed{$5}", "$5") == 1.0


@pytest.mark.parametrize(
    "piece",
    [
        r"\boxed{", r"\boxed5", r"\boxed{+", r"\boxed{1}\\", r"\begin{cases}\boxed{1}\\", r"\fbox", r"\boxed a{", "\\",
        r"\,", "$", "####", "</think>", "<answer>", "{", "}", " ", "```\n", r"\boxed{\boxed{1}}, ",
    ],
)  # fmt: skip
def test_any_text_is_read_in_time_in_proportion_to_its_length(piece):
    text = piece * (60_000 // len(piece))
    for whole in (text, text + "}" * 6_000, rf"\boxed{{1}}{text}\boxed{{2}}"):
        began_s = time.process_time()
        stated_answer(whole, ("box", "block", "last block", "marker", "last line"))
        without_layout(whole)
        assert time.process_time() - began_s < 1.0
