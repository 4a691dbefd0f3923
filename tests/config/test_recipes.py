"""Recipes: what they set, what the user keeps, and a short real run of two of them."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from checked_run import OUTCOME, STEPS, check, config
from long_tests import long_test

from async_grpo.algorithm.losses import POLICY_LOSSES
from async_grpo.config.compatibility import check_methods
from async_grpo.config.recipes import RECIPES
from async_grpo.config.run import RunConfig

LONG = long_test("two minutes")
ROOT = Path(__file__).resolve().parents[2]
BASE = dataclasses.asdict(config())


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_sets_every_option_that_it_names_and_makes_a_run_that_can_start(name, capsys):
    made = RunConfig.from_options(BASE | {"recipe": name}, explicit_names={"recipe"})
    assert {key: getattr(made, key) for key in RECIPES[name]} == RECIPES[name]
    said = capsys.readouterr().out
    assert all(f"{key}={value}" in said for key, value in RECIPES[name].items())
    check(made, STEPS if name == "process" else OUTCOME)


def test_the_clip_of_a_recipe_belongs_to_its_loss():
    options = BASE | {"recipe": "grpo", "policy_loss": "sapo"}
    made = RunConfig.from_options(options, explicit_names={"recipe", "policy_loss"})
    check_methods(made)
    assert made.policy_loss == "sapo" and made.clip_low is None and made.kl_coef == 0.04


def test_the_options_of_a_recipe_belong_to_its_loss_and_its_estimator():
    changed = {"policy_loss": "gspo", "advantage_estimator": "opo"}
    for name in ("trl", "prime_rl"):
        made = RunConfig.from_options(BASE | {"recipe": name} | changed, explicit_names={"recipe", *changed})
        check_methods(made)
        assert (made.loss_options, made.estimator_options, made.clip_high) == ("", "", None)


def test_a_recipe_does_not_warn_of_its_own_clip_where_every_ratio_is_1(capsys):
    made = RunConfig.from_options(BASE | {"recipe": "trl"}, explicit_names={"recipe"})
    check_methods(made)
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_loss_is_reachable_and_brings_its_workers(name):
    made = config(policy_loss=name)
    check_methods(made)
    assert ("proximal" in made.logprob_roles) == POLICY_LOSSES[name].needs_proximal


@pytest.mark.real
@LONG
@pytest.mark.parametrize("name", ["dapo", "process"])
def test_a_short_real_run_of_a_recipe_does_what_it_says(name, tmp_path):
    """Real Ray, vLLM, verifiers and FSDP: three steps, and the marks that the recipe leaves in the metrics.

    grpo, with its reference, runs in tests/real/test_whole_chain.py, rewards of steps in
    tests/real/test_environment_real.py, and all recipes in `benchmarks.recipes`.
    """
    data, reward = ROOT / "sample-data", "countdown_steps" if name == "process" else "countdown"
    command = [
        *[sys.executable, "-m", "async_grpo", "run", f"--recipe={name}", f"--output-dir={tmp_path / 'run'}"],
        *[f"--model-name-or-path={data / 'tiny-model'}", f"--data-path={data / 'countdown_train.jsonl'}"],
        *[f"--run-name=recipe-{name}", f"--reward-fns={reward}", "--batch-size=8"],
        *[
            "--samples-per-question=4",
            "--num-training-batches=3",
            "--max-generation-tokens=24",
            "--max-tokens-per-gpu=1024",
        ],
        # eight in a row without a signal do happen to a model that is wrong so often
        *(["--max-resamples=50"] if name == "dapo" else []),
        *["--max-tokens-per-gpu=1024", "--learning-rate=2e-3", "--num-warmup-steps=1", "--enforce-eager"],
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    params = json.loads((tmp_path / "run" / "training_params.json").read_text())
    assert {key: params[key] for key in RECIPES[name]} == RECIPES[name]
    metrics = (tmp_path / "run" / "training_metrics.jsonl").read_text()
    lines = [json.loads(line) for line in metrics.splitlines()]
    assert len(lines) == 3 and all(line["grad_norm"] > 0 and line["ess"] > 0 for line in lines)
    assert all(line["num_reward_ok"] == line["samples_in_batch"] == 32 for line in lines)
    assert lines[-1]["mismatch_kl"] > 1e-7  # the weights have moved under the samples
    if name == "dapo":
        assert sum(line["groups_without_signal"] for line in lines) == 0
    else:
        assert lines[0]["countdown_steps/reward"] is not None
