"""The curriculum: levels follow rewards, one step at a time; a resumed run goes on at the same ones."""

import json
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.errors import ConfigurationError
from async_grpo.experience.config import BatchConfig
from async_grpo.experience.curriculum import WINDOW, Curriculum, make_curriculum
from async_grpo.experience.dataset import PromptCursor, Question

ROWS = [{"task": task, "level": level, "n": n} for task in "ab" for level in (1, 3, 4) for n in range(5)]


def curriculum() -> Curriculum:
    return Curriculum(ROWS, BatchConfig(curriculum="level", curriculum_down_at=0.25, curriculum_up_at=0.75))


def row(task: str, level: int) -> dict:
    return {"task": task, "level": level}


def test_a_level_changes_after_a_window_of_its_own_groups_and_only_for_its_task():
    found = curriculum()
    for _ in range(WINDOW - 1):
        found.observe(row("a", 1), 1.0)
    found.observe(row("a", 3), 1.0)  # of another level: it says nothing about this one
    assert found.metrics() == {"curriculum/a": 1, "curriculum/b": 1}
    found.observe(row("a", 1), 1.0)
    assert found.metrics() == {"curriculum/a": 3, "curriculum/b": 1}
    for _ in range(WINDOW):
        found.observe(row("a", 3), 0.2)
    assert found.metrics() == {"curriculum/a": 1, "curriculum/b": 1}


def test_a_saved_state_stays_as_it_was_taken():
    found = curriculum()
    found.observe(row("b", 1), 0.5)
    state, before = found.state(), json.dumps(found.state())
    for _ in range(WINDOW):
        found.observe(row("a", 1), 1.0)
        found.observe(row("b", 1), 0.5)
    assert found.metrics()["curriculum/a"] == 3 and json.dumps(state) == before


def test_between_the_bounds_and_at_both_ends_nothing_changes():
    found = curriculum()
    for reward in [0.0] * 50 + [0.5] * 50:
        found.observe(row("a", 1), reward)
    assert found.metrics()["curriculum/a"] == 1
    for level in (1, 3, 4):
        for _ in range(3 * WINDOW):
            found.observe(row("b", level), 1.0)
    assert found.metrics()["curriculum/b"] == 4


@given(st.integers(0), st.integers(0, 200))
def test_the_cursor_draws_only_rows_of_the_current_levels_and_goes_on_after_a_resume(seed, count):
    random = Random(seed)
    questions = [Question([0], one) for one in ROWS]
    cursors = [PromptCursor(questions, 3, curriculum())]
    for _ in range(count):
        task, reward = random.choice("ab"), random.choice([0.0, 0.5, 1.0])
        prompt = next(cursors[0])
        levels = cursors[0].curriculum.metrics()
        assert prompt.row["level"] == levels[f"curriculum/{prompt.row['task']}"]
        cursors[0].curriculum.observe(row(task, levels[f"curriculum/{task}"]), reward)
    again = PromptCursor(questions, 3, curriculum())
    again.restore(json.loads(json.dumps(cursors[0].state())))
    assert [next(again).question for _ in range(40)] == [next(cursors[0]).question for _ in range(40)]


def test_rows_without_levels_are_refused():
    config = BatchConfig(curriculum="level")
    for bad in ({}, {"level": "Level 3"}, {"level": True}, {"level": 1.5}):
        with pytest.raises(ConfigurationError, match="--curriculum level: a row has"):
            make_curriculum(config, [row("a", 1), bad])
    assert make_curriculum(BatchConfig(), [{}]) is None
