"""The console says what is awaited and for how long, and at the end of a run where its seconds went."""

import json
import logging
import threading

import pytest

from async_grpo.metrics.console import means_of, show_times, show_waiting


@pytest.fixture
def said(monkeypatch):
    """What is logged; and an event, set at every line with how long so far."""
    lines, again = [], threading.Event()

    class Keep(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())
            if "so far" in lines[-1]:
                again.set()

    logger, keep = logging.getLogger("async_grpo.metrics.console"), Keep()
    monkeypatch.setattr(logger, "level", logging.INFO)
    logger.addHandler(keep)
    yield lines, again
    logger.removeHandler(keep)


def test_what_is_awaited_is_said_at_once_then_with_the_seconds_so_far_and_no_more_once_it_is_there(said):
    lines, again = said
    with show_waiting("engines load", every_s=0.01) as there:
        assert lines == ["engines load"]
        assert again.wait(10) and "engines load (0 s so far)" in lines
        there()
        threads = [thread for thread in threading.enumerate() if thread.name == "waiting"]
        for thread in threads:
            thread.join(10)
        count = len(lines)
    assert not any(thread.is_alive() for thread in threads) and len(lines) == count


def test_what_says_itself_that_it_is_there_is_spoken_of_no_more(said):
    lines, again = said
    with show_waiting("the first word", every_s=0.01, until=again.is_set):
        for thread in [thread for thread in threading.enumerate() if thread.name == "waiting"]:
            thread.join(10)
            assert not thread.is_alive()
    assert lines == ["the first word", "the first word (0 s so far)"]


def test_nothing_is_said_after_what_was_waited_for_failed(said):
    _, again = said
    with pytest.raises(OSError, match="gone"), show_waiting("engines load", every_s=0.01):
        assert again.wait(10)
        raise OSError("gone")
    for thread in threading.enumerate():
        if thread.name == "waiting":
            thread.join(10)
    assert not [thread for thread in threading.enumerate() if thread.name == "waiting"]


def step(number, **seconds):
    return {"step": number, "verifiers": {"math": {"busy_s": 0.5}, "judge": {"busy_s": 2.0}}} | seconds


def test_the_seconds_of_a_run_are_summed_by_cause_and_shown_with_their_shares(tmp_path, capsys):
    lines = [
        step(1, seconds_waiting_for_experience=6.0, seconds_computing=1.0, engine_busy_s=3.0),
        step(2, seconds_waiting_for_experience=0.0, seconds_computing=2.0, engine_busy_s=None),
        step(3, seconds_checkpointing=1.0, engine_allowed_s=4.0, eval_seconds=12.5, verifiers=None),
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "seconds_comp'
    (tmp_path / "training_metrics.jsonl").write_text(text)
    show_times(tmp_path)
    cells = {
        row[0].strip(): [cell.strip() for cell in row[1:]]
        for line in capsys.readouterr().out.splitlines()
        if len(row := line.strip()[1:-1].split("│")) == 4
    }
    assert cells["trainer waits"] == ["6.0", "2.00", "60%"]
    assert cells["computes"] == ["3.0", "1.00", "30%"] and cells["saves"] == ["1.0", "0.33", "10%"]
    assert cells["engines busy, of what staleness allows"] == ["3.0", "1.00", "75%"]
    assert cells["evaluations, beside the steps"] == ["12.5", "4.17", ""]
    assert cells["reward math, all its calls"] == ["1.0", "0.33", ""]
    assert cells["reward judge, all its calls"] == ["4.0", "1.33", ""]


@pytest.mark.parametrize("content", [None, "", '{"step": 1, "seco'])
def test_a_run_without_a_step_has_no_table(tmp_path, capsys, content):
    if content is not None:
        (tmp_path / "training_metrics.jsonl").write_text(content)
    show_times(tmp_path)
    assert capsys.readouterr().out == ""


def test_the_means_of_an_evaluation_come_with_what_is_known_of_their_interval():
    line = {"avg_reward": 0.5, "avg_reward_ci": None, "pass@2": 0.75, "pass@2_ci": 0.0625}
    line |= {"majority@4": None, "majority@4_ci": None, "num_samples": 8}
    assert means_of(line) == {"mean reward": "0.500", "pass@2": "0.750 +- 0.062"}
