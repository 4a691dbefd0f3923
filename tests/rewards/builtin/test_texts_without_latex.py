"""Answers that are no LaTeX keep what would be layout in LaTeX, and boxes in boxes keep their factors."""

import pytest

from async_grpo.rewards.answer_reading.boxes import boxed_answer, without_layout
from async_grpo.rewards.answer_reading.stated import stated_answer
from async_grpo.rewards.builtin.answers import gold_answer
from async_grpo.rewards.builtin.text import exact

TEXTS = ["~/bin", "C:\\", "~", "\\", r"\par", r"\quad", r"\,", "*.txt", "a ~ b", r"\n"]
FORMS = ["%s", "<answer>%s</answer>", "<think>no</think> %s"]


def reward_of(text: str, gold: str) -> float:
    return exact({"completion": text, "answer": gold})["reward"]


@pytest.mark.parametrize("form", FORMS)
def test_a_text_equals_itself_and_no_other(form):
    for text in TEXTS:
        for gold in [*TEXTS, "/bin", "C:"]:
            assert reward_of(form % text, gold) == float(text == gold), (text, gold)
    assert reward_of(form % "/bin", "~/bin") == reward_of(form % "C:", "C:\\") == 0.0


def test_a_box_may_hold_a_text_that_is_no_latex():
    assert reward_of(r"\boxed{~/bin}", "~/bin") == reward_of(r"\boxed{\,C\,}", "C") == 1.0
    assert reward_of(r"\boxed{/bin}", "~/bin") == 0.0


@pytest.mark.parametrize("text", ["~", "\\", r"\par", r"\quad", r"\, ~"])
def test_nothing_but_layout_stays_as_it_is(text):
    assert gold_answer({"answer": text}) == without_layout(text) == text


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{\boxed{5}x}", "5x"),
        (r"\boxed{x\boxed{5}}", "x5"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{x = \boxed{5}}", "5"),
        (r"\boxed{so \boxed{5}}", "5"),
        (r"\boxed{{1/2} . Then x=2 so \boxed{7}}.", "7"),
        (r"\boxed{{1/2}! No. It is 3, \boxed{7}}.", "7"),
    ],
)
def test_what_stands_around_an_inner_box_counts_unless_it_is_words_or_another_sentence(text, content):
    assert boxed_answer(text) == content


def test_a_block_in_the_thought_is_read_if_nothing_follows_it():
    assert stated_answer("<think><answer>9</answer></think>\n") == "9"
    assert stated_answer("<think><answer>9</answer></think> so 4") is None
