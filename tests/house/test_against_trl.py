"""`scripts/bench`: what is measured, paired and continued, without running either side."""

import json
import math
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.against_trl import __main__ as bench
from benchmarks.against_trl import models, report, rewards, sides
from benchmarks.against_trl.cases import CASES, Case
from benchmarks.against_trl.heldout import sample_tasks


def row(arm: str, repetition: int, rate: float, case: str = "short", **more) -> dict:
    return {
        "label": "",
        "case": case,
        "arm": arm,
        "repetition": repetition,
        "samples_per_s": rate,
        "tokens_per_s": 10 * rate,
        "step_s": [1.0, 3.0, 2.0],
        "first_step_s": 9.0,
        "load_before": 0.1,
        "cpu_ms_per_sample": {"trainer": 2.0, "controller": 1.0},
        "commit": "abc",
        "machine": "2 cores",
        "samples_per_step": 256,
        **more,
    }


def test_a_ratio_pairs_the_two_sides_of_one_repetition_and_leaves_out_what_has_no_pair():
    rows = [row("ours S=1", 0, 30), row("TRL", 0, 10), row("TRL", 1, 40), row("ours S=1", 1, 20)]
    rows += [row("ours S=1", 2, 99), row("TRL", 0, 1, case="slow")]
    assert report.ratios(rows, "short", "ours S=1") == [3.0, 0.5]
    assert "| short | ours S=1 | 30.0 (20.0 to 99.0) | 1.75 (0.50 to 3.00) |" in report.table(rows)


def test_both_sides_get_the_same_questions_in_the_same_order(tmp_path, monkeypatch):
    questions = tmp_path / "capitals_train.jsonl"
    questions.write_text("".join(json.dumps({"number": number}) + "\n" for number in range(5)))
    monkeypatch.setattr(Case, "train", questions)
    case = Case("", steps=2, warm_up=1, minutes=1, prompts=4)
    order = sides.question_order(case, seed=3)
    # The order that numpy gives for each epoch, without this library
    epochs = [np.random.default_rng((3, epoch)).permutation(5).tolist() for epoch in range(3)]
    assert order == [number for epoch in epochs for number in epoch][:12]
    assert order != sides.question_order(case, seed=4)


def test_the_window_begins_when_the_warm_up_ends_and_what_comes_after_it_does_not_count(
    tmp_path, monkeypatch
):
    ends = [100.0, 101.0, 103.0, 107.0, 108.0]  # warm-up 2, measured 2, one more
    done = sides.Steps(90.0, ends, [1e6, 1e6, 50.0, 70.0, 1e6], [9, 9, 1.0, 0.5, 9], {"trainer": 0.8}, {})
    monkeypatch.setattr(sides, "ours", lambda *_: done)
    case = Case("", steps=2, warm_up=2, minutes=1, prompts=2, group=2)
    place = sides.Place(tmp_path / "run", tmp_path, tmp_path, tmp_path, 2)
    found = sides.measure("ours S=1", case, 0, place, [])
    assert found["window_s"] == 6.0 and found["samples_per_s"] == 8 / 6 and found["tokens_per_s"] == 20.0
    assert found["step_s"] == [2.0, 4.0] and found["first_step_s"] == 10.0 and found["reward"] == 0.75
    assert (
        found["command"].startswith("python -m async_grpo run ") and str(sides.ROOT) not in found["command"]
    )
    assert found["cpu_ms_per_sample"] == {"trainer": pytest.approx(100.0)}


def test_an_interrupted_bench_goes_on_where_it_was_and_the_sides_take_turns_at_going_first():
    options = SimpleNamespace(case=["short"], arm=None, repetitions=2, quick=False, steps=None, label="")
    order = [(arm, repetition) for _, _, arm, repetition in bench.plan(options, [])]
    assert order == [("ours S=1", 0), ("TRL", 0), ("TRL", 1), ("ours S=1", 1)]
    done = [row("ours S=1", 0, 1), row("TRL", 1, 1), row("TRL", 0, 1, label="other")]
    rest = [(arm, repetition) for _, _, arm, repetition in bench.plan(options, done)]
    assert rest == [("TRL", 0), ("ours S=1", 1)]


def test_the_report_replaces_what_stood_between_its_marks_and_leaves_measurements_under_a_label_out(
    tmp_path, monkeypatch
):
    (tmp_path / "docs" / "data").mkdir(parents=True)
    page = tmp_path / "docs" / "page.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "PAGE", page)
    monkeypatch.setattr(report, "DATA", tmp_path / "docs" / "data" / "lines.jsonl")
    monkeypatch.setattr(report, "PICTURE", tmp_path / "docs" / "data" / "picture.svg")
    rows = [row("ours S=1", 0, 30), row("TRL", 0, 10), row("TRL", 0, 7.77, label="other")]
    report.write(rows)
    report.write(rows)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert text.count("3.00") == 1 and "7.8" not in text and text.count(report.BEGIN) == 1
    assert len(report.DATA.read_text().splitlines()) == 2 and "<svg" in report.PICTURE.read_text()


def test_seconds_to_an_accuracy_lie_between_the_checkpoints_before_and_after_it():
    ends = [10.0 + step for step in range(1, 21)]
    learned = row("TRL", 0, 1, case="learning", accuracy={"5": 0.2, "10": 0.45, "15": 0.39}, ends_s=ends)
    learned = json.loads(json.dumps(learned))
    assert report.seconds_to(learned, 0.4) == pytest.approx(
        19.0
    )  # four fifths from 0.2 to 0.45, so from 15 to 20 s
    assert report.seconds_to(learned, 0.9) is None
    ours = learned | {"arm": "ours S=1", "ends_s": [end / 2 for end in ends]}
    table = report.table([ours, learned])
    assert "| accuracy after 2560 samples | 0.450 | 0.450 |" in table
    assert "| **seconds from the command to 0.40, by seed** | 10 | 19 |" in table
    assert "| times TRL's, median | 0.50 | 1.00 |" in table


def test_a_gain_is_counted_from_what_the_model_solves_before_it_learns():
    measured = {"case": "smollm2", "accuracy": {"0": 0.3, "1": 0.35, "2": 0.6}, "ends_s": [9.0, 10.0]}
    assert report.goal(measured) == pytest.approx(0.5)
    assert report.seconds_to(measured, report.goal(measured)) == pytest.approx(9.6)


def test_completions_of_a_heldout_task_continue_its_own_prompt(monkeypatch):
    """With the most probable token in place of a random one, they are those of transformers' own `generate`."""
    monkeypatch.setattr(
        torch, "multinomial", lambda probabilities, count: probabilities.argmax(-1, keepdim=True)
    )
    folder = models.model_folder("tiny", None)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = [json.loads(line) for line in CASES["short"].heldout.read_text().splitlines()[:5]]
    for row in rows:
        row["input_token_ids"] = row["input_token_ids"][: 9 + row["target"] % 2]
    ends = model.generation_config.eos_token_id
    texts_by_target = {}
    for row, texts in sample_tasks(model, tokenizer, rows, 12, num_completions=3):
        assert len(texts) == 3
        texts_by_target[row["target"]] = texts
    for row in rows:
        prompt = torch.tensor([row["input_token_ids"]])
        tokens = model.generate(prompt, do_sample=False, max_new_tokens=12)[0, prompt.shape[1] :].tolist()
        expected = tokenizer.decode([token for token in tokens if token not in ends])
        assert texts_by_target[row["target"]] == [expected] * 3


def test_the_model_made_for_its_lengths_has_log_normal_ones():
    """The chain's lengths, exactly: the distribution over its states is carried on token by token."""
    chain = models.transitions().double().exp()
    chain /= chain.sum(1, keepdim=True)
    at = torch.zeros(len(chain), dtype=torch.double)
    at[0] = 1.0
    ended = []  # probability of a length, from 1 on; the end token counts
    for _ in range(4000):
        at = at @ chain
        ended.append(at[0].item())
        at[0] = 0.0
    assert sum(ended) == pytest.approx(1, abs=1e-3)
    logs = [math.log(length) for length in range(1, 4001)]
    mean = sum(p * log for p, log in zip(ended, logs, strict=True))
    sigma = math.sqrt(sum(p * (log - mean) ** 2 for p, log in zip(ended, logs, strict=True)))
    assert math.exp(mean) == pytest.approx(64, rel=0.05) and sigma == pytest.approx(1.0, rel=0.05)
    assert 0.002 < sum(ended[512:]) < 0.03


def test_a_model_made_for_its_lengths_draws_from_that_chain(tmp_path):
    torch.manual_seed(0)
    model, chain = models.log_normal(), models.transitions()
    state = 20
    with torch.no_grad():  # the token of a state is its number less one, whatever stands before it
        logits = model(torch.tensor([[259, 77, 3, state - 1]])).logits[0, -1]
    said = logits.log_softmax(-1)
    assert torch.allclose(said[: len(chain) - 1].exp(), chain[state, 1:].exp(), atol=1e-4)
    assert said[258].exp() == pytest.approx(chain[state, 0].exp().item(), abs=1e-4)


def test_the_larger_model_never_ends_a_completion_before_the_limit():
    torch.manual_seed(0)
    model = models.thirty_million()
    with torch.no_grad():
        said = model(torch.randint(0, 256, (2, 64))).logits.log_softmax(-1)
    assert said[..., [256, 258]].max() < -20 and sum(map(torch.numel, model.parameters())) > 30e6
    assert not CASES["30m"].mask_truncated  # or nothing would be trained


def test_what_a_reward_takes_is_the_samples_own_and_has_the_stated_distribution():
    samples = [{"input": "a", "completion_token_ids": [number]} for number in range(4000)]
    waits = [rewards.judge_seconds(sample) for sample in samples]
    assert waits[:3] == [rewards.judge_seconds(dict(sample)) for sample in samples[:3]]
    assert statistics.median(waits) == pytest.approx(0.5, rel=0.1) and max(waits) <= 20
    assert statistics.stdev(map(math.log, waits)) == pytest.approx(1.2, rel=0.05)
    uniform = [rewards.seconds(sample) for sample in samples]
    assert (
        statistics.fmean(uniform) == pytest.approx(2.05, rel=0.05) and 0.1 <= min(uniform) < max(uniform) <= 4
    )


@pytest.mark.parametrize("name", CASES)
def test_every_case_trains_whole_batches_on_both_sides(name):
    case = CASES[name]
    assert case.samples % min(case.samples_per_call, case.samples) == 0 and case.warm_up >= 1
    assert case.reward == "shipped" or hasattr(rewards, case.reward)
