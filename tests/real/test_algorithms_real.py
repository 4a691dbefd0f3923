"""Runs on real parts (Ray, vLLM, FSDP) with teachers, several passes over a batch, and the newer terms of the loss."""

import json
import math
import signal
from pathlib import Path

import pytest
from real_runs import DATA, OPTIONS, left_behind, lines, start_run, wait_for_step

from async_grpo.training.checkpoint_folder import newest

pytestmark = [pytest.mark.real, pytest.mark.exhaustive, pytest.mark.timeout(500)]
ALONE = OPTIONS | {"kl-coef": 0, "nproc-per-node": 1, "num-training-batches": 3}


def finished(folder: Path, options: dict) -> list[dict]:
    """Train, and return the lines of the steps."""
    run = start_run(folder, options)
    said, _ = run.communicate(timeout=400)
    assert run.returncode == 0, said
    assert left_behind(folder) == []
    return lines(folder)


def taught_rows(folder: Path) -> Path:
    """Rows of which every other one has the teacher `hint`, and a solution that this teacher alone reads."""
    rows = []
    for number, line in enumerate((DATA / "countdown_train.jsonl").read_text().splitlines()[:64]):
        row = json.loads(line)
        del row["input"], row["input_token_ids"]
        is_hinted = number % 2 == 0
        first, second, _ = row["nums"]
        row["topic"] = "hint" if is_hinted else "plain"
        row["solution"] = f"{first} {second}" if is_hinted else ""
        rows.append(json.dumps(row))
    path = folder / "rows.jsonl"
    path.write_text("\n".join(rows) + "\n")
    return path


def test_the_policy_that_reads_a_solution_and_a_frozen_model_teach_the_rows_that_name_them(tmp_path):
    """The frozen model is the policy at the start, so the two agree on the rows without a solution."""
    trained = finished(
        tmp_path,
        ALONE
        | {
            "recipe": "opd",
            "reward-fns": "countdown",
            "verifiers": "countdown=1",
            "data-path": taught_rows(tmp_path),
            "teacher": f"hint=self,plain={DATA / 'tiny-model'}",
            "teacher-column": "topic",
            "teacher-demonstration": "solution",
            "teacher-template": "{question} {demonstration}",
        },
    )
    assert [line["step"] for line in trained] == [1, 2, 3]
    for line in trained:
        assert line["teacher_covered"] == 1.0 and line["teacher_failures"] == 0
        assert line["grad_norm"] > 0 and line["update_skipped"] == 0
    assert abs(trained[0]["teacher_kl/plain"]) < 1e-5 < 1e-2 < trained[0]["teacher_kl/hint"]


def test_a_run_that_is_told_to_end_within_the_passes_over_a_batch_goes_on_after_the_batch(tmp_path):
    """Two minibatches, each trained twice, and a reference that is updated after every batch."""
    num_batches, groups_per_batch = 6, 8
    options = OPTIONS | {
        "num-training-batches": num_batches,
        "passes-per-batch": 2,
        "train-minibatch-size": 32,
        "max-staleness": 7,
        "old-policy": "current",
        "ref-update-steps": 4,
        "checkpoint-every-s": 600,
    }
    told = start_run(tmp_path, options | {"engine": "fake"})  # which starts sooner; the second part has vLLM
    wait_for_step(tmp_path, 6, told)
    told.send_signal(signal.SIGTERM)
    said, _ = told.communicate(timeout=90)
    assert told.returncode == 75, said
    _, manifest = newest(tmp_path)
    assert manifest.ended == "SIGTERM" and manifest.step % 4 == 0 and manifest.step >= 4, said

    again = start_run(tmp_path, options)
    said, _ = again.communicate(timeout=300)
    assert again.returncode == 0 and f"resumed after step {manifest.step}" in said, said
    written = lines(tmp_path)
    assert [line["step"] for line in written] == list(range(1, 4 * num_batches + 1))
    assert [line["pass"] for line in written] == [1, 1, 2, 2] * num_batches
    assert all(("reference_sync_s" in line) == (line["step"] % 4 == 0) for line in written)
    assert all(("pass_kl" in line) == (line["pass"] == 2) for line in written)
    groups = {sample["group"] for sample in lines(tmp_path, "samples.jsonl")}
    assert groups == set(range(num_batches * groups_per_batch))
    assert len(lines(tmp_path, "samples.jsonl")) == 8 * len(groups)


CASES = {
    "terms": {
        "policy-loss": "vespo",
        "loss-aggregation": "sequence_mean_token_sum",
        "kl-coef": 0.1,
        "unbiased-kl": True,
        "log-ratio-coef": 0.01,
        "off-policy-mask-threshold": 0.01,
        "top-entropy-quantile": 0.5,
        "optimizer": "muon",
        "advantage-estimator": "max_rl",
        "top-p": 0.9,
    },
    "observations": {
        "environment": "guess",
        "model-name-or-path": DATA / "guess-model",
        "data-path": DATA / "guess_train.jsonl",
        "advantage-estimator": "running_mean",
        "running-mean-column": "input",
        "samples-per-question": 1,
        "batch-size": 64,
        "observation-coef": 0.1,
    },
    "vapo": {
        "recipe": "vapo",
        "critic-warmup-steps": 1,
        "samples-per-question": 1,
        "batch-size": 64,
        "nproc-per-node": 2,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_three_steps_are_trained_on_policy_at_first_and_report_their_terms(tmp_path, case):
    options = ALONE | CASES[case]
    if case == "observations":
        for name in ("reward-fns", "verifiers"):
            del options[name]
    trained = finished(tmp_path, options)
    assert [line["step"] for line in trained] == [1, 2, 3]
    assert trained[0]["mismatch_kl"] < 1e-7
    for line in trained[1:]:
        assert math.isfinite(line["backward_loss"]) and line["grad_norm"] > 0 and line["update_skipped"] == 0
    names = {
        "terms": ["avg_kl_div", "log_ratio_square", "high_entropy_frac", "sequence_weight_max"],
        "observations": ["observation_nll"],
        "vapo": ["value_loss", "critic_grad_norm"],
    }
    assert all(trained[-1][name] > 0 for name in names[case])
