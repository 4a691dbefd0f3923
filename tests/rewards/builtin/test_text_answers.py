"""Answers that are text: what is no answer at all, and which marks around an answer do not count."""

import pytest

from async_grpo.rewards.builtin.countdown import score as countdown
from async_grpo.rewards.builtin.text import exact
from async_grpo.rewards.builtin.text import format as format_score

NOTHING = [
    *("", " ", "\n\t\r\n", "\u00a0\u2003", "\u200b\ufeff\u2060", "\x00\x1b"),
    *("<b></b>", "<br/>", " <p> </p>\n", "<!-- -->", "<think></b>", "<a href='x'></a>"),
    *(r"\boxed{}", r"\boxed{ }", r"\boxed {}", "$$", "$ $", "``", "```\n```", r"$\boxed{}$"),
]
ANSWERS = [
    *(
        "0",
        "7",
        "-",
        "*",
        "?",
        "{}",
        "[]",
        "()",
        '""',
        "\\",
        "é",
        "π",
        "七",
        "🙂",
        "…",
        "x<3",
        "x < y > z",
        "<3>",
    ),
    *("<b>7</b>", "<br/>0", "<7>", r"\boxed{0}", r"\boxed{\,}", "$7$", "```\n7\n```", "&nbsp;"),
]


@pytest.mark.parametrize("answer", NOTHING)
def test_an_answer_without_content_is_no_answer(answer):
    formed = format_score({"completion": f"so</think>\n<answer>{answer}</answer>"})
    assert formed["format_reward"] == pytest.approx(0.1)
    assert format_score({"completion": f"<answer>{answer}</answer>"})["format_reward"] == 0.0
    row = {"completion": f"so</think>\n<answer>{answer}</answer>", "nums": [3, 4], "target": 7}
    assert countdown(row)["reward"] == pytest.approx(0.01)


@pytest.mark.parametrize("answer", ANSWERS)
def test_any_content_is_an_answer(answer):
    assert format_score({"completion": f"so</think>\n<answer>{answer}</answer>"})["format_reward"] == 1.0
    assert format_score({"completion": f"<answer>\n{answer}\n</answer>"})["format_reward"] == 0.5


EXACT = [
    # completion, accepted answer, reward
    ("Paris.", "Paris", 1.0),
    ("**Paris**", "Paris", 1.0),
    ("**Paris.**", "Paris", 1.0),
    ("**Paris**.", "Paris", 1.0),
    ("<answer> **C** </answer>", "C", 1.0),
    ("**(C)**", "C", 1.0),
    ("`x = 1`", "x = 1", 1.0),
    ("**`x = 1`**", "x = 1", 1.0),
    ("so</think>\n\nYes.", "yes", 1.0),
    ("it’s", "it's", 1.0),
    ("O'Brien", "O’Brien", 1.0),
    ("“a”", '"a"', 1.0),
    ("U.S.", "U.S.", 1.0),
    ("U.S.", "U.S", 1.0),
    ("**kwargs", "**kwargs", 1.0),
    ("`x`", "`x`", 1.0),
    ("...", "...", 1.0),
    # Neighbours
    ("Paris..", "Paris", 0.0),
    ("Paris...", "Paris", 0.0),
    ("Paris!", "Paris", 0.0),
    ("Paris", "Paris.", 0.0),
    ("Paris", "**Paris**", 0.0),
    ("**Paris** or **Rome**", "Paris", 0.0),
    ("**Paris** or **Rome**", "Paris** or **Rome", 0.0),
    ("**kwargs", "kwargs", 0.0),
    ("*args", "args", 0.0),
    ("__init__", "init", 0.0),
    ("'Paris'", "Paris", 0.0),
    ('"Paris"', "Paris", 0.0),
    ("**", "*", 0.0),
    ("****", "*", 0.0),
    ("**Rome.**", "Paris", 0.0),
    ("The answer is Paris.", "Paris", 0.0),
    ("1.5", "1", 0.0),
    (".", "Paris", 0.0),
]


@pytest.mark.parametrize(("completion", "answer", "reward"), EXACT)
def test_exact_ignores_a_full_stop_and_marks_of_markdown_around_the_answer(completion, answer, reward):
    assert exact({"completion": completion, "answer": answer})["reward"] == reward


def test_full_stops_and_marks_count_if_nothing_is_to_be_stripped():
    for completion in ("Paris.", "**Paris**", "`Paris`"):
        assert exact({"completion": completion, "answer": "Paris"}, strip=False)["reward"] == 0.0
