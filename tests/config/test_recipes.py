"""Recipes: what they set, what the user keeps, and a short real run of each."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from async_grpo.algorithm.advantages import ADVANTAGE_ESTIMATORS
from async_grpo.algorithm.losses import POLICY_LOSSES
from async_grpo.config.compatibility import check_methods
from async_grpo.config.recipes import RECIPES
from async_grpo.config.rewards import ResolvedRewards, check_rewards
from async_grpo.config.run import RunConfig
from async_grpo.errors import ConfigurationError
from async_grpo.experience.config import RunFacts
from async_grpo.experience.group_advantages import GroupAdvantages
from async_grpo.options.fields import parse_assignments
from async_grpo.rewards.adapter.decorators import post_process, process_reward
from async_grpo.rewards.adapter.registry_source import RewardRegistrySource
from async_grpo.training.objective import Objective

ROOT = Path(__file__).resolve().parents[2]
BASE = {field.name: field.default for field in dataclasses.fields(RunConfig)} | {
    "model_name_or_path": "m",
    "data_path": "d",
}


def outcome(sample):
    return {"reward": 1.0}


@process_reward
def steps(sample):
    return {"step_rewards": []}


@post_process(lambda group: [1.0 for _ in group])
def vote(sample):
    return 0.0


def config(**changes) -> RunConfig:
    return RunConfig(**{"model_name_or_path": "m", "data_path": "d", **changes})


def check(made: RunConfig, adapters: dict) -> ResolvedRewards:
    """What the start of a run asks of a configuration and these rewards."""
    check_methods(made)
    made = dataclasses.replace(made, reward_fns=",".join(adapters))
    source = RewardRegistrySource.from_text("page_of_recipes", "")
    rewards = ResolvedRewards(source, adapters, adapters)
    check_rewards(made, rewards)
    return rewards


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_sets_every_option_that_it_names_and_makes_a_run_that_can_start(name, capsys):
    made = RunConfig.from_options(BASE | {"recipe": name}, given={"recipe"})
    assert {key: getattr(made, key) for key in RECIPES[name]} == RECIPES[name]
    said = capsys.readouterr().out
    assert all(f"{key}={value}" in said for key, value in RECIPES[name].items())
    check(made, {"steps": steps} if name == "process" else {"outcome": outcome})


def test_what_the_user_sets_goes_before_the_recipe_and_is_said(capsys):
    options = BASE | {"recipe": "dapo", "clip_high": 0.5, "zero_variance": "keep"}
    made = RunConfig.from_options(options, given={"recipe", "clip_high", "zero_variance"})
    assert (made.clip_high, made.zero_variance, made.clip_low) == (0.5, "keep", 0.2)
    assert "yours: clip_high=0.5 zero_variance=keep" in capsys.readouterr().out


def test_a_recipe_that_was_named_but_not_applied_is_refused():
    with pytest.raises(ConfigurationError, match="not applied"):
        config(recipe="dapo")


def test_an_unknown_recipe_is_answered_with_the_known_ones():
    with pytest.raises(ConfigurationError, match="dr_grpo"):
        RunConfig.from_options(BASE | {"recipe": "ppo"}, given={"recipe"})


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
def test_every_estimator_is_reachable_with_the_rewards_that_fit_it(name):
    estimator = ADVANTAGE_ESTIMATORS[name]
    adapters = {"outcome": outcome} if estimator.outcome else {"steps": steps}
    made = config(advantage_estimator=name)
    check(made, adapters)
    assert GroupAdvantages(made).group_local == (estimator.group_local or name == "gae")
    assert Objective(made).needs_whole_step == (name == "gae")


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
def test_rewards_that_do_not_fit_the_estimator_are_refused_with_those_that_would(name):
    estimator = ADVANTAGE_ESTIMATORS[name]
    if not estimator.process:
        with pytest.raises(ConfigurationError, match=r"step by step; estimators that fit: .*grpo_process"):
            check(config(advantage_estimator=name), {"outcome": outcome, "steps": steps})
    if not estimator.outcome:
        with pytest.raises(
            ConfigurationError, match=r"one score per sample; estimators that fit: .*grpo, dr_grpo"
        ):
            check(config(advantage_estimator=name), {"outcome": outcome})


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_loss_is_reachable_and_brings_its_workers(name):
    made = config(policy_loss=name)
    check_methods(made)
    assert ("proximal" in made.logprob_roles) == POLICY_LOSSES[name].needs_proximal


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"policy_loss": "gpg", "clip_low": 0.2}, "does not clip"),
        ({"loss_options": "cap=5"}, "no option cap"),
        ({"loss_options": "cap"}, "not name=value"),
        ({"policy_loss": "decoupled", "loss_options": "cap_mode=bend"}, "bend"),
        ({"policy_loss": "dro", "loss_options": "beta=0"}, "beta"),
        ({"importance_level": "token"}, "count it twice"),
        ({"importance_level": "token", "policy_loss": "gpg", "importance_high": -1}, "-1"),
        ({"rejection_statistic": "sequence_k9", "rejection_high": 2}, "sequence_k9"),
        ({"rejection_statistic": "token_k1"}, "reject"),
        ({"kl_kind": "k1*"}, "k1*"),
        ({"loss_options": "clip_low=none"}, "clip_low=None is no finite number"),
        ({"loss_options": "clip_low=0.1", "clip_low": 0.2}, "given twice"),
        ({"policy_loss": "decoupled", "loss_options": "cap=abc"}, "cap=abc is no finite number"),
        ({"policy_loss": "kl_cov", "loss_options": "ratio=2"}, r"must lie in \(0, 1"),
        ({"advantage_estimator": "gae", "estimator_options": "gamma=7"}, "between 0 and 1"),
        ({"advantage_estimator": "gae", "estimator_options": "whiten=1"}, "must be true or false"),
        ({"loss_aggregation": "mean"}, "mean"),
        ({"critic_clip": 0.1}, "does nothing without an --advantage-estimator that has a critic"),
    ],
)
def test_contradictory_or_unknown_options_fail_at_start(options, said):
    with pytest.raises(ConfigurationError, match=said.replace("*", r"\*")):
        check_methods(config(**options))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"top_p": 0.9}, "log-probs of the truncated policy"),
        ({"top_k": 50}, "log-probs of the truncated policy"),
        ({"kl_in_reward": True}, "give --kl-coef"),
        ({"rejection_high": 2.0}, "without --rejection-statistic"),
        ({"old_policy": "reference"}, "known: behaviour, proximal, current"),
        ({"zero_variance": "drop"}, "known: keep, filter, resample"),
        ({"overlong_buffer": 2.0}, "between 0 and 1"),
        ({"entropy_coef": -1.0}, "cannot be negative"),
        ({"kl_coef": float("nan")}, "--kl-coef nan: it must be a finite number"),
        ({"temperature": float("inf")}, "--temperature inf: it must be a finite number"),
        ({"learning_rate": float("inf")}, "--learning-rate inf: it must be a finite number"),
        ({"importance_normalize": True}, "does nothing without --importance-level"),
        ({"importance_mode": "mask"}, "does nothing without --importance-level"),
        ({"kl_clamp": 1.0}, "does nothing without --kl-coef"),
        ({"zero_variance": "resample", "max_resamples": 0}, "replaces nothing"),
        ({"min_valid_samples": 99, "samples_per_question": 8}, "must lie between 2"),
        ({"clip_low": 1.5}, "a share between 0 and 1"),
        ({"reward_weights": "a=x"}, "no finite number"),
        ({"on_reward_failure": "judge=zero"}, "known are mask, group_mean, refill, constant:VALUE"),
        ({"on_reward_failure": "judge=constant:much"}, "constant:much: it must be a finite number"),
        ({"on_reward_failure": "judge=constant:nan"}, "constant:nan: it must be a finite number"),
        ({"on_reward_failure": "judge=constant:-inf"}, "constant:-inf: it must be a finite number"),
        ({"reward_limits": "judge=5"}, "write NAME.concurrency"),
        ({"reward_fallback": "mathd=mathd"}, "mathd=mathd: it would be asked again; name another"),
        ({"judge_budget": -1.0}, "--judge-budget cannot be negative, not -1"),
        ({"judge_budget": float("inf")}, "--judge-budget inf: it must be a finite number"),
        ({"verdict_cache_mb": 5.0}, "--verdict-cache-mb 5.0 does nothing without --verdict-cache"),
        (
            {"verdict_cache": "c", "verdict_cache_mb": 0.0},
            "--verdict-cache-mb must be above 0, not 0",
        ),
        ({"judge_budget_policy": "fallback"}, "does nothing without --judge-budget"),
        ({"verifiers": "code=1.5"}, "a whole number"),
    ],
)
def test_values_that_can_never_work_are_refused_by_the_configuration(options, said):
    with pytest.raises(ConfigurationError, match=said):
        config(**options)


@pytest.mark.parametrize(
    ("options", "adapters", "said"),
    [
        (
            {"advantage_estimator": "gdpo", "kl_in_reward": True, "kl_coef": 0.1},
            {"a": outcome},
            "gdpo normalises",
        ),
        ({"advantage_estimator": "gdpo", "reward_combine": "gate"}, {"a": outcome}, "gdpo normalises"),
        (
            {"advantage_estimator": "gae", "on_reward_failure": "a=constant:0.5"},
            {"a": outcome, "s": steps},
            "cannot stand in for steps",
        ),
        (
            {"advantage_estimator": "gae", "reward_fallback": "s=a"},
            {"a": outcome, "s": steps},
            "gives other steps",
        ),
        ({"advantage_estimator": "grpo_process", "reward_combine": "sum"}, {"s": steps}, "weigh them by"),
        (
            {"advantage_estimator": "grpo_process", "on_reward_failure": "s=constant:0"},
            {"s": steps},
            "use mask or refill",
        ),
        (
            {"advantage_estimator": "reinforce_plus_plus", "zero_variance": "filter"},
            {"a": outcome},
            "whole batch",
        ),
        (
            {"advantage_estimator": "prime_rloo", "reward_weights": "a=2"},
            {"a": outcome, "s": steps},
            "names a",
        ),
        ({"on_reward_failure": "b=refill"}, {"a": outcome}, "names b"),
        (
            {"reward_combine": "gate"},
            {"v": vote, "a": outcome},
            "--reward-fns v,a .*v scores by the whole group: name it last in --reward-fns",
        ),
    ],
)
def test_combinations_that_would_do_nothing_or_something_else_are_refused(options, adapters, said):
    with pytest.raises(ConfigurationError, match=said):
        check(config(**options), adapters)


def test_a_vote_of_the_whole_group_may_stand_behind_a_gate():
    check(config(reward_combine="gate"), {"a": outcome, "v": vote})


def test_the_clip_of_a_recipe_belongs_to_its_loss():
    options = BASE | {"recipe": "grpo", "policy_loss": "sapo"}
    made = RunConfig.from_options(options, given={"recipe", "policy_loss"})
    check_methods(made)
    assert made.policy_loss == "sapo" and made.clip_low is None and made.kl_coef == 0.04


def test_estimator_options_must_be_the_estimators_own():
    assert config(advantage_estimator="gae", estimator_options="lam=0.9").estimator_settings == {"lam": 0.9}
    with pytest.raises(ConfigurationError, match="has no option lam; it has eps"):
        check_methods(config(estimator_options="lam=0.9"))


def test_weights_must_name_what_there_is():
    weighty = config(advantage_estimator="gdpo", reward_weights="outcome=2,other=1")
    with pytest.raises(ConfigurationError, match="names other"):
        check(weighty, {"outcome": outcome})


def test_an_assignment_given_twice_is_refused():
    with pytest.raises(ConfigurationError, match="cap is given twice"):
        parse_assignments("cap=1,cap=2", "loss-options")


@pytest.mark.real
@pytest.mark.parametrize("name", ["dapo", "process"])
def test_a_short_real_run_of_a_recipe_does_what_it_says(name, tmp_path):
    """Real Ray, vLLM, verifiers and FSDP: three steps, and the marks that the recipe leaves in the metrics.

    grpo, with its reference, runs in tests/real/test_whole_chain.py, and all seven in `benchmarks.recipes`.
    """
    data = ROOT / "sample-data"
    command = [
        *[sys.executable, "-m", "async_grpo", "run", f"--recipe={name}", f"--output-dir={tmp_path / 'run'}"],
        *[f"--model-name-or-path={data / 'tiny-model'}", f"--data-path={data / 'countdown_train.jsonl'}"],
        *[
            f"--run-name=recipe-{name}",
            f"--reward-fns={'countdown_steps' if name == 'process' else 'countdown'}",
        ],
        *[
            "--batch-size=8",
            "--samples-per-question=4",
            "--num-training-batches=3",
            "--max-generation-tokens=24",
        ],
        # eight in a row without a signal do happen to a model that is wrong so often
        *(["--max-resamples=50"] if name == "dapo" else []),
        *["--max-tokens-per-gpu=1024", "--learning-rate=2e-3", "--num-warmup-steps=1", "--enforce-eager"],
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    params = json.loads((tmp_path / "run" / "training_params.json").read_text())
    assert {key: params[key] for key in RECIPES[name]} == RECIPES[name]
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "training_metrics.jsonl").read_text().splitlines()
    ]
    assert len(lines) == 3 and all(line["grad_norm"] > 0 and line["ess"] > 0 for line in lines)
    assert all(line["num_reward_ok"] == line["samples_in_batch"] == 32 for line in lines)
    assert lines[-1]["mismatch_kl"] > 1e-7  # the weights have moved under the samples
    match name:
        case "dapo":
            assert sum(line["groups_without_signal"] for line in lines) == 0
        case "process":
            assert lines[0]["countdown_steps/reward"] is not None


def test_a_kl_is_paid_in_the_reward_or_in_the_loss_and_never_in_both():
    in_reward, in_loss = config(kl_coef=0.1, kl_in_reward=True), config(kl_coef=0.1)
    assert (in_reward.loss_kl_coef, in_reward.reward_kl_coef) == (0.0, 0.1)
    assert (in_loss.loss_kl_coef, in_loss.reward_kl_coef) == (0.1, 0.0)


def test_what_the_batcher_is_told_of_the_rewards():
    made = config(advantage_estimator="gae", reward_weights="steps=2", on_reward_failure="vote=refill")
    facts = check(made, {"steps": steps, "vote": vote}).facts(made, 17)
    assert facts == RunFacts(17, ("steps",), True, {"steps": 2.0}, {"vote": "refill"}, facts.best_rewards)
