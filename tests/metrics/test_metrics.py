"""The metrics file: strict JSON, and tokens counted against the right stretch of training."""

import json

from async_grpo.cluster.remote_experience import write_evaluation
from async_grpo.metrics.writer import EVAL_FILE, METRICS_FILE, MetricsWriter, console_line


def line(step: int, timeline: list, intervals: list, **more) -> dict:
    spans = [("trainer 0", "train", *interval) for interval in intervals]
    raw = {"token_timeline": timeline, "spans": spans}
    return {"step": step, "time_per_batch": 1.0, **raw, **more}


def test_tokens_of_a_step_may_have_been_made_while_the_step_before_it_trained(tmp_path):
    """Step 2's tokens (moments 11 to 13) were generated during step 1's micro-batches, of which there were three."""
    writer = MetricsWriter(tmp_path, num_steps=2)
    writer.write(line(1, [(1.0, 5)], [(10.0, 11.5), (11.5, 12.5), (12.5, 13.5)]))
    writer.write(line(2, [(11.0, 10), (12.0, 10), (13.0, 10), (15.0, 7)], [(20.0, 21.0)]))
    writer.close()
    first, second = map(json.loads, (tmp_path / METRICS_FILE).read_text().splitlines())
    assert (first["tokens_generated"], first["tokens_generated_while_training"]) == (5, 0)
    assert (second["tokens_generated"], second["tokens_generated_while_training"]) == (37, 30)
    assert "token_timeline" not in second and "spans" not in second


def test_samples_go_to_their_own_file_with_the_step_that_trained_them(tmp_path):
    writer = MetricsWriter(tmp_path, num_steps=1, samples_file=tmp_path / "samples.jsonl")
    writer.write(line(1, [], [], samples=[{"completion": "a"}, {"completion": "b"}]))
    writer.close()
    samples = [json.loads(row) for row in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert samples == [{"step": 1, "completion": "a"}, {"step": 1, "completion": "b"}]
    assert "samples" not in json.loads((tmp_path / METRICS_FILE).read_text())


def test_the_console_says_how_many_samples_were_not_scored_and_no_number_that_is_none():
    counts = {"num_reward_failed": 2, "num_reward_timed_out": 1, "samples_in_batch": 64, "mismatch_kl": None}
    assert console_line(line(1, [], [], **counts), 9) == "step 1/9 | NOT SCORED 3 of 64 | 1.0 s"


def test_an_alarm_is_printed_in_full_when_it_begins_and_not_on_every_line(tmp_path, capsys):
    writer = MetricsWriter(tmp_path, num_steps=5)
    for step, alarms in enumerate(
        [
            ["a: 3 of 4 calls failed"],
            ["a: 5 of 7 calls failed"],
            ["a: 1 of 2 calls failed", "b"],
            [],
            ["b 1", "b 2"],
        ],
        start=1,
    ):
        writer.write(line(step, [], [], alarms=alarms))
    writer.close()
    shown = [text.partition("1.0 s")[2] for text in capsys.readouterr().out.splitlines()]
    assert shown == [
        " | ALARM a: 3 of 4 calls failed", " | ALARM (1 as before)", " | ALARM b | ALARM (1 as before)", "",
        " | ALARM b 1 | ALARM b 2",
    ]  # fmt: skip
    lines = [json.loads(row) for row in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert lines[1]["alarms"] == ["a: 5 of 7 calls failed"]


def test_a_text_that_is_no_unicode_ends_neither_a_step_nor_an_evaluation(tmp_path, capsys):
    """A lone surrogate, as a program's report or a tool's output may hold."""
    writer = MetricsWriter(tmp_path, num_steps=1, samples_file=tmp_path / "samples.jsonl")
    writer.write(line(1, [], [], samples=[{"completion": "é \ud800"}], alarms=["failed: \ud800"]))
    writer.close()
    counts = {"num_reward_ok": 1, "num_samples": 1, "version_min": 1, "version_max": 1, "seconds": 1.0}
    result = counts | {"samples": [{"completion": "é \ud800"}], "program": "\ud800"}
    write_evaluation(tmp_path / EVAL_FILE, 1, "", result)
    assert "ALARM failed: ?" in capsys.readouterr().out
    for name in ("samples.jsonl", "eval_samples_1.jsonl"):
        assert json.loads((tmp_path / name).read_text())["completion"] == "é \ud800"
    assert json.loads((tmp_path / METRICS_FILE).read_text())["alarms"] == ["failed: \ud800"]
    assert json.loads((tmp_path / EVAL_FILE).read_text())["eval_program"] == "\ud800"
