"""Recipes: what they set, what the user keeps, and a short real run of each."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from async_grpo.algorithm.advantages import ADVANTAGE_ESTIMATORS
from async_grpo.algorithm.losses import POLICY_LOSSES
from async_grpo.config.plans import (
    advantage_plan,
    batcher_plan,
    estimator_options,
    objective,
    optimizer_settings,
)
from async_grpo.config.recipes import RECIPES
from async_grpo.config.run import RunConfig
from async_grpo.errors import ConfigurationError
from async_grpo.launch.local_run import as_arguments
from async_grpo.options.fields import parse_assignments
from async_grpo.rewards.adapter.decorators import post_process
from async_grpo.rewards.builtin import process_reward

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


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_sets_every_option_that_it_names_and_makes_a_run_that_can_start(name, capsys):
    made = RunConfig.from_options(BASE | {"recipe": name}, given={"recipe"})
    assert {key: getattr(made, key) for key in RECIPES[name]} == RECIPES[name]
    said = capsys.readouterr().out
    assert all(f"{key}={value}" in said for key, value in RECIPES[name].items())
    adapters = {"steps": steps} if name == "process" else {"outcome": outcome}
    objective(made), batcher_plan(made, 2, adapters)


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


def test_a_choice_that_happens_to_be_the_default_survives_the_way_to_the_trainer():
    """The launcher hands its settings on as options: the recipe must not come back over what the user kept."""
    options = BASE | {"recipe": "dapo", "mask_truncated": True, "zero_variance": "keep"}
    made = RunConfig.from_options(options, given={"recipe", "mask_truncated", "zero_variance"})
    handed_on = as_arguments(made, RunConfig)
    assert "--mask-truncated" in handed_on and "--zero-variance=keep" in handed_on


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
def test_every_estimator_is_reachable_with_the_rewards_that_fit_it(name):
    estimator = ADVANTAGE_ESTIMATORS[name]
    adapters = {"outcome": outcome} if estimator.outcome else {"steps": steps}
    made = config(advantage_estimator=name)
    assert advantage_plan(made, adapters).group_local == (estimator.group_local or name == "gae")
    assert objective(made).needs_whole_step == (name == "gae")


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
def test_rewards_that_do_not_fit_the_estimator_are_refused_with_those_that_would(name):
    estimator = ADVANTAGE_ESTIMATORS[name]
    if not estimator.process:
        with pytest.raises(ConfigurationError, match=r"step by step; estimators that fit: .*grpo_process"):
            advantage_plan(config(advantage_estimator=name), {"outcome": outcome, "steps": steps})
    if not estimator.outcome:
        with pytest.raises(
            ConfigurationError, match=r"one score per sample; estimators that fit: .*grpo, dr_grpo"
        ):
            advantage_plan(config(advantage_estimator=name), {"outcome": outcome})


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_loss_is_reachable_and_brings_its_workers(name):
    made = config(policy_loss=name)
    assert objective(made).policy_loss == name
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
    ],
)
def test_contradictory_or_unknown_options_fail_at_start(options, said):
    with pytest.raises(ConfigurationError, match=said.replace("*", r"\*")):
        objective(config(**options))


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
        ({"kl_coef": float("nan")}, "is not a number"),
        ({"importance_normalize": True}, "does nothing without --importance-level"),
        ({"importance_mode": "mask"}, "does nothing without --importance-level"),
        ({"critic_clip": 0.1}, "does nothing without --advantage-estimator gae"),
        ({"kl_clamp": 1.0}, "does nothing without --kl-coef"),
        ({"zero_variance": "resample", "max_resamples": 0}, "replaces nothing"),
        ({"min_valid_samples": 99, "samples_per_question": 8}, "must lie between 2"),
        ({"clip_low": 1.5}, "at most 1"),
        ({"reward_weights": "a=x"}, "no finite number"),
        ({"on_reward_failure": "judge=zero"}, "known are mask, group_mean, refill, constant:VALUE"),
        ({"on_reward_failure": "judge=constant:much"}, "constant:much: it must be a finite number"),
        ({"on_reward_failure": "judge=constant:nan"}, "constant:nan: it must be a finite number"),
        ({"on_reward_failure": "judge=constant:-inf"}, "constant:-inf: it must be a finite number"),
        ({"reward_limits": "judge=5"}, "write NAME.concurrency"),
        ({"reward_fallback": "mathd=mathd"}, "mathd=mathd: it would be asked again; name another"),
        ({"judge_budget": -1.0}, "--judge-budget must be a finite number of 0 or more, not -1"),
        ({"judge_budget": float("inf")}, "--judge-budget must be a finite number of 0 or more, not inf"),
        ({"verdict_cache_mb": 5.0}, "--verdict-cache-mb 5.0 does nothing without --verdict-cache"),
        (
            {"verdict_cache": "c", "verdict_cache_mb": 0.0},
            "--verdict-cache-mb must be a finite number above 0, not 0",
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
            "v scores by the whole group: name it last in --reward-fns, which is v,a",
        ),
    ],
)
def test_combinations_that_would_do_nothing_or_something_else_are_refused(options, adapters, said):
    with pytest.raises(ConfigurationError, match=said):
        batcher_plan(config(**options), 1, adapters)


def test_a_vote_of_the_whole_group_may_stand_behind_a_gate():
    batcher_plan(config(reward_combine="gate"), 1, {"a": outcome, "v": vote})


def test_the_clip_of_a_recipe_belongs_to_its_loss():
    options = BASE | {"recipe": "grpo", "policy_loss": "sapo"}
    made = RunConfig.from_options(options, given={"recipe", "policy_loss"})
    assert objective(made).policy_loss == "sapo" and made.clip_low is None and made.kl_coef == 0.04


def test_estimator_options_must_be_the_estimators_own():
    assert estimator_options(config(advantage_estimator="gae", estimator_options="lam=0.9")) == {"lam": 0.9}
    with pytest.raises(ConfigurationError, match="has no option lam; it has eps"):
        estimator_options(config(estimator_options="lam=0.9"))


def test_weights_must_name_what_there_is():
    weighty = config(advantage_estimator="gdpo", reward_weights="outcome=2,other=1")
    with pytest.raises(ConfigurationError, match="names other"):
        advantage_plan(weighty, {"outcome": outcome})


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
            "--max-resamples=50",  # eight in a row without a signal do happen to a model that is wrong so often
        ],
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


WIRING = [
    # option, value, where it must arrive
    ("kl_coef", 0.3, lambda o, b: o.kl_coef),
    ("kl_kind", "k2", lambda o, b: o.kl_kind),
    ("entropy_coef", 0.2, lambda o, b: o.entropy_coef),
    ("old_policy", "current", lambda o, b: o.old_policy),
    ("clip_low", 0.05, lambda o, b: o.policy_loss_options["clip_low"]),
    ("clip_high", 0.07, lambda o, b: o.policy_loss_options["clip_high"]),
    ("temperature", 0.7, lambda o, b: o.temperature),
    ("mask_truncated", False, lambda o, b: b.advantages.mask_truncated),
    ("max_token_staleness", 3, lambda o, b: b.advantages.max_token_staleness),
    ("min_valid_samples", 5, lambda o, b: b.advantages.min_valid),
    ("min_valid_samples", 5, lambda o, b: b.failures.min_valid),
    ("max_resamples", 3, lambda o, b: b.max_resamples),
    ("no_positive_resampling", 0.8, lambda o, b: b.retire_above),
    ("overlong_penalty", 0.4, lambda o, b: b.advantages.payment.overlong_penalty),
    ("truncation_alarm", 0.1, lambda o, b: b.alarms.truncated),
    ("failure_alarm", 0.2, lambda o, b: b.alarms.failed),
    ("max_staleness", 4, lambda o, b: b.max_staleness),
]


@pytest.mark.parametrize(("option", "value", "place"), WIRING)
def test_every_flag_reaches_the_plan_that_reads_it(option, value, place):
    made = config(**{option: value})
    assert place(objective(made), batcher_plan(made, 1, {"outcome": outcome})) == value


def test_flags_that_turn_into_something_else_arrive_as_that():
    made = config(
        rejection_statistic="token_k1", rejection_low=0.5, rejection_high=2.0, policy_loss="gpg", kl_clamp=3.0,
        importance_level="sequence", importance_mode="mask", importance_low=0.1, importance_high=4.0,
        importance_normalize=True, kl_coef=0.1, overlong_buffer=0.25, max_generation_tokens=100,
        estimator_options="eps=0.5", zero_variance="resample",
    )  # fmt: skip
    correction, plan = objective(made).correction, batcher_plan(made, 1, {"outcome": outcome})
    assert (correction.rejection_low, correction.rejection_high, correction.statistic) == (
        0.5,
        2.0,
        "token_k1",
    )
    assert (correction.level, correction.mode, correction.low, correction.high) == (
        "sequence",
        "mask",
        0.1,
        4.0,
    )
    assert correction.averages and objective(made).kl_clamp == 3.0
    assert plan.advantages.payment.overlong_buffer == 25 and plan.advantages.options == {"eps": 0.5}
    assert plan.resample and not plan.advantages.filter_groups and not plan.with_baseline
    assert batcher_plan(config(zero_variance="filter"), 1, {"a": outcome}).advantages.filter_groups
    assert batcher_plan(config(advantage_estimator="remax"), 1, {"a": outcome}).with_baseline


def test_a_kl_is_paid_in_the_reward_or_in_the_loss_and_never_in_both():
    made = config(kl_coef=0.1, kl_kind="k1", kl_in_reward=True, kl_clamp=2.0)
    payment = batcher_plan(made, 1, {"outcome": outcome}).advantages.payment
    assert objective(made).kl_coef == 0 and (payment.kl_coef, payment.kl_kind, payment.kl_clamp) == (
        0.1,
        "k1",
        2.0,
    )
    in_loss = config(kl_coef=0.1)
    assert objective(in_loss).kl_coef == 0.1
    assert batcher_plan(in_loss, 1, {"outcome": outcome}).advantages.payment.kl_coef == 0


def test_critic_flags_reach_the_critic():
    made = config(
        advantage_estimator="gae",
        critic_coef=0.3,
        critic_clip=0.2,
        critic_learning_rate=1e-3,
        estimator_options="lam=0.9",
    )
    critic = objective(made).critic
    assert (critic.coef, critic.clip, critic.options) == (0.3, 0.2, {"lam": 0.9})
    assert optimizer_settings(made).critic_learning_rate == 1e-3
