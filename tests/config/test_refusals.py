"""What is accepted and would do nothing, or something else, is refused or warned about, by flag and value."""

import inspect
import re

import pytest
from checked_run import OUTCOME, STEPS, check, config, steps

from async_grpo.algorithm.advantages import ADVANTAGE_ESTIMATORS
from async_grpo.config import compatibility, loss_rules, rewards
from async_grpo.config.compatibility import check_methods
from async_grpo.config.run import RunConfig, WorkerConfig
from async_grpo.errors import ConfigurationError
from async_grpo.experience.config import RunFacts
from async_grpo.experience.group_advantages import GroupAdvantages
from async_grpo.rewards.adapter.decorators import post_process
from async_grpo.training.objective import Objective


@post_process(lambda group: [1.0 for _ in group])
def vote(sample):
    return 0.0


BOTH = OUTCOME | STEPS
REJECTION = {"rejection_statistic": "token_k3", "rejection_high": 1.0}


VALUES = [  # refused by the configuration itself
    ({"train_minibatch_size": 4000, "samples_per_question": 32, "batch_size": 128}, "whole number of steps"),
    ({"train_minibatch_size": 33}, "not a whole number of groups of 32.*use 32"),
    ({"batch_size": 0}, "--batch-size must be above 0, not 0"),
    ({"overlong_buffer": 0.2, "overlong_penalty": 0.0}, "--overlong-penalty must be above 0"),
    ({"eval_every": 5}, "--eval-every 5 does nothing without --eval-data-path"),
    (
        {"rejection_statistic": "token_k1", "rejection_low": 1.5},
        "--rejection-low 1.5 .*would reject tokens on which trainer and engine agree: the bounds must hold 1",
    ),
    ({"rejection_statistic": "token_k3", "rejection_low": 0.0}, "rejects nothing"),
    ({"rejection_high": 2.0}, "without --rejection-statistic"),
    ({"importance_level": "token", "policy_loss": "gpg", "importance_low": 3.0}, "leave no weight at all"),
    ({"top_k": 1}, "--top-k 1 leaves a single token, so that nothing can be learned"),
    ({"min_p": 1.0}, "--min-p 1.0 leaves a single token"),
    ({"top_p": 0.0}, "--top-p is a share above 0 and at most 1, not 0.0"),
    ({"top_k": -2}, r"--top-k must be 0 \(all tokens\) or a number of tokens, not -2"),
    ({"kl_coef": float("nan")}, "--kl-coef nan: it must be a finite number"),
    ({"zero_variance": "resample", "max_resamples": 0}, "replaces nothing"),
    ({"curriculum": "level", "curriculum_down_at": 0.8}, "the first must be lower than the second"),
    ({"curriculum": "level", "retire_solved_above": 0.9}, "all rows of a level may be retired"),
    ({"groups_alive": 257}, "--groups-alive 257 --max-staleness 1 do not fit: a step takes 128 .* 256 can be alive"),
    ({"groups_alive": 127}, "do not fit: a step takes 128 groups, and 256 can be alive"),
    ({"min_valid_samples": 99, "samples_per_question": 8}, "must lie between 2"),
    ({"clip_low": 1.5}, "a share between 0 and 1"),
    ({"min_valid_samples": 3, "samples_per_question": 1}, "must lie between 2"),
    ({"samples_per_question": 1, "retire_solved_above": 0.5}, "a single completion does not say that a question is solved"),
    ({"samples_per_question": 1, "on_reward_failure": "a=group_mean"}, "no other reward that could stand in"),
    ({"reward_weights": "a=x"}, "no finite number"),
    ({"on_reward_failure": "judge=zero"}, "known are mask, group_mean, refill, constant:VALUE"),
    ({"on_reward_failure": "judge=constant:much"}, "judge=constant:much: known are"),
    ({"reward_limits": "judge=5"}, "write NAME.concurrency"),
    ({"reward_fallback": "mathd=mathd"}, "mathd=mathd: it would be asked again; name another"),
    ({"verifiers": "code=1.5"}, "a whole number"),
    ({"recipe": "dapo"}, "not applied"),
    ({"passes_max_kl": 0.1}, "--passes-max-kl 0.1 does nothing without --passes-per-batch above 1"),
    ({"passes_per_batch": 3}, "--max-staleness 1 --passes-per-batch 3 do not fit: .* Use --max-staleness 2, or 5"),
    (
        {"passes_per_batch": 2, "max_staleness": 7, "train_minibatch_size": 2048, "groups_alive": 64},
        "the 128 groups of a batch are in flight until its last pass",
    ),
    ({"passes_per_batch": 2, "max_staleness": 3, "max_token_staleness": 0}, "would leave out every token"),
    (
        {"passes_per_batch": 2, "eval_every": 5, "eval_data_path": "e.jsonl"},
        "--eval-every 5 --passes-per-batch 2 do not fit: .* such as 4",
    ),
    (
        {"passes_per_batch": 2, "max_staleness": 3, "train_minibatch_size": 2048, "engine_sleep": "1"},
        "engines sleep from the first minibatch of a batch on",
    ),
    ({"ref_update_steps": 5}, "--ref-update-steps 5 --kl-coef 0.0 does nothing without a KL penalty"),
    ({"ref_mix": 0.5}, "--ref-mix 0.5 does nothing without --ref-update-steps above 0"),
    ({"ref_update_steps": 5, "kl_coef": 0.1, "lora_rank": 4}, "is the frozen base model"),
    (
        {"ref_update_steps": 5, "kl_coef": 0.1, "passes_per_batch": 2},
        "--ref-update-steps 5 --passes-per-batch 2 do not fit: .* such as 4",
    ),
    ({"load_in_4bit": True}, "--load-in-4bit True does nothing without --lora-rank above 0"),
    (
        {"load_in_4bit": True, "lora_rank": 4, "kl_coef": 0.1, "kl_in_reward": True},
        "--load-in-4bit True --kl-in-reward True do not go together: the reference workers load the model without quant",
    ),
    ({"optimizer": "muon", "lora_rank": 4}, "Muon trains the matrices of a language model"),
    ({"muon_momentum": 0.9}, "--muon-momentum 0.9 does nothing without --optimizer muon"),
    ({"unbiased_kl": True}, "--unbiased-kl True does nothing without --kl-coef above 0"),
    ({"unbiased_kl": True, "kl_coef": 0.1, "kl_in_reward": True}, "which needs no correction"),
    ({"unbiased_kl": True, "kl_coef": 0.1, "kl_kind": "k3+"}, "--kl-kind k3[+] .*use k1 or k3"),
    ({"unbiased_kl": True, "kl_coef": 0.1, "kl_kind": "k2"}, "use k1 or k3"),
    ({"log_ratio_coef": 0.1, "old_policy": "current"}, "of the policy to itself is 0"),
    ({"observation_coef": 0.1, "environment": "guess", "top_p": 0.9}, "does not write by the rules of sampling"),
    ({"observation_coef": 0.1}, "--observation-coef 0.1 does nothing without --environment"),
    ({"top_entropy_quantile": 20.0}, "a share between 0 and 1"),
    ({"off_policy_mask_threshold": -1.0}, "cannot be negative"),
]  # fmt: skip
METHODS = [  # refused once the estimator, the loss, the schedule or the transport is known
    ({"critic_coef": 0.7}, "--critic-coef 0.7 does nothing without an --advantage-estimator that has a critic"),
    (
        {"samples_per_question": 1},
        "--samples-per-question 1 --advantage-estimator grpo do not fit: a group of one has nothing to compare with; give "
        "at least 2, or .*: remax, flash_reinforce, running_mean, reinforce_plus_plus, gae, decoupled_gae, teacher$",
    ),
    ({"min_valid_samples": 1}, "--min-valid-samples 1 --advantage-estimator grpo do not fit: a group with a single reward"),
    ({"running_mean_column": "agent"}, "--running-mean-column agent does nothing without .* running_mean"),
    ({"critic_model": "same"}, "--critic-model same does nothing without an --advantage-estimator that has a critic"),
    ({"advantage_estimator": "gae", "critic_warmup_steps": 5}, "--critic-warmup-steps 5 does nothing without --critic-m"),
    (
        {"advantage_estimator": "gae", "critic_model": "same", "critic_coef": 0.7},
        "--critic-coef 0.7 does nothing with --critic-model",
    ),
    ({"advantage_estimator": "decoupled_gae", "estimator_options": "alpha=1,lam=1"}, "both lam and alpha"),
    (
        {"advantage_estimator": "gae", "critic_model": "same", "critic_warmup_steps": 7, "num_training_batches": 17,
         "lr_scheduler": "cosine"},
        "which must lie beyond the warm-up",
    ),
    ({"old_policy": "proximal", "policy_loss": "grpo"}, "--old-policy proximal does nothing with --policy-loss grpo"),
    ({"old_policy": "current", "policy_loss": "dro"}, "leave the loss without its pull to the old policy"),
    ({"old_policy": "current", "policy_loss": "decoupled"}, "current leaves none"),
    ({"policy_loss": "decoupled", "importance_level": "token"}, "leave --importance-level out"),
    ({"importance_level": "token"}, "correct twice"),
    ({"policy_loss": "clip_cov", "loss_options": "cov_low=3,cov_high=2"}, "cov_low"),
    ({"loss_options": "clip_low=2"}, "clip_low=2.* share between 0 and 1"),
    ({"loss_options": "clip_low=0.1", "clip_low": 0.2}, "given twice"),
    ({"loss_options": "cap=1,cap=2"}, "cap is given twice"),
    ({"policy_loss": "gpg", "clip_low": 0.2}, "does not clip"),
    ({"policy_loss": "decoupled", "loss_options": "cap_mode=bend"}, "bend"),
    ({"policy_loss": "dro", "loss_options": "beta=0"}, "beta"),
    ({"policy_loss": "kl_cov", "loss_options": "ratio=2"}, r"must lie in \(0, 1"),
    ({"advantage_estimator": "gae", "estimator_options": "gamma=7"}, "between 0 and 1"),
    ({"advantage_estimator": "gae", "estimator_options": "whiten=1"}, "must be true or false"),
    (
        {"advantage_estimator": "running_mean", "estimator_options": "decay=1"},
        "--estimator-options decay=1: it must lie between 0 and 1 .without 1.",
    ),
    (
        {"advantage_estimator": "max_rl", "overlong_buffer": 0.2},
        "--advantage-estimator max_rl --overlong-buffer 0.2 do not go together: the estimator divides by the mean reward",
    ),
    (
        {"advantage_estimator": "max_rl", "kl_coef": 0.1, "kl_in_reward": True},
        "leave --kl-in-reward out",
    ),
    ({"estimator_options": "lam=0.9"}, "has no option lam; it has eps"),
    ({"lr_scheduler": "cosine", "num_training_batches": 10}, "which must lie beyond the warm-up"),
    ({"advantage_estimator": "gae", "zero_variance": "filter"}, "groups of equal rewards teach an estimator"),
    ({"advantage_estimator": "grpo_process", "kl_in_reward": True, "kl_coef": 0.1}, "use the KL in the loss"),
    ({"weight_transport": "nccl", "old_policy": "proximal"}, "a --weight-transport that sends packages"),
    (
        {"weight_transport": "nccl", "ref_update_steps": 5, "kl_coef": 0.1},
        "reference workers need a --weight-transport that sends packages",
    ),
    ({"policy_loss": "gpg", "passes_per_batch": 2}, "later passes would train as if the policy had not changed"),
    (
        {
            "policy_loss": "gpg",
            "importance_level": "token",
            "old_policy": "proximal",
            "passes_per_batch": 2,
        },
        "--old-policy proximal --passes-per-batch 2 do not fit: the importance weights compare the proximal policy",
    ),
]  # fmt: skip
REWARDS = [  # refused once the rewards are known
    ({"advantage_estimator": "gdpo", "kl_in_reward": True, "kl_coef": 0.1}, OUTCOME, "gdpo normalises"),
    ({"advantage_estimator": "gdpo", "reward_weights": "a=2,other=1"}, OUTCOME, "names other"),
    ({"advantage_estimator": "gae", "on_reward_failure": "a=constant:0.5"}, BOTH, "can replace its step rewards"),
    ({"advantage_estimator": "gae", "reward_fallback": "s=a"}, BOTH, "and no fallback"),
    ({"advantage_estimator": "grpo_process", "reward_combine": "sum"}, STEPS, "weigh them by"),
    ({"advantage_estimator": "reinforce_plus_plus", "zero_variance": "filter"}, OUTCOME, "whole batch"),
    ({"advantage_estimator": "prime_rloo", "reward_weights": "a=2"}, BOTH, "names a"),
    (
        {"advantage_estimator": "gae", "samples_per_question": 1},
        {"vote": vote},
        "vote scores by the whole group, and a group of one has nothing to compare with",
    ),
    ({"advantage_estimator": "remax"}, {"vote": vote}, "compares with a single greedy completion, which vote"),
    ({"on_reward_failure": "b=refill"}, OUTCOME, "names b"),
    ({"verifiers": "b=2"}, OUTCOME, "--verifiers b=2 names b; the rewards are"),
    ({"reward_limits": "a.tpm=9"}, OUTCOME, "gives a a tpm, but it is no judge"),
    ({"judge_budget": 1.0}, OUTCOME, "limits nothing: none of a has a price"),
    (
        {"reward_combine": "gate"},
        {"v": vote, **OUTCOME},
        "--reward-fns v,a .*v scores by the whole group: name it last in --reward-fns",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("options", "said"), VALUES, ids=[said for _, said in VALUES])
def test_values_that_can_never_work_are_refused_by_the_configuration(options, said):
    with pytest.raises(ConfigurationError, match=said):
        config(**options)


@pytest.mark.parametrize(("options", "said"), METHODS, ids=[said for _, said in METHODS])
def test_what_the_method_cannot_use_is_refused_at_start(options, said):
    made = config(**options)
    with pytest.raises(ConfigurationError, match=said):
        check_methods(made)


@pytest.mark.parametrize(("options", "adapters", "said"), REWARDS)
def test_what_cannot_be_meant_with_these_rewards_is_refused(options, adapters, said):
    made = config(**options)
    with pytest.raises(ConfigurationError, match=said):
        check(made, adapters)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"critic_clip": 0.1, "advantage_estimator": "gae"}, "--critic-clip 0.1 does nothing with one pass"),
        ({"old_policy": "current", "clip_low": 0.1}, "--clip-low 0.1 does nothing with --old-policy current"),
        ({"max_token_staleness": 2}, "--max-token-staleness 2 does nothing with --max-staleness 1"),
        ({"lr_scheduler": "constant", "num_warmup_steps": 3}, "--num-warmup-steps 3 does nothing with"),
    ],
)
def test_what_merely_has_no_effect_is_warned_about(capsys, options, said):
    check_methods(config(**options))
    assert f"warning: {said}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "adapters"),
    [
        ({}, OUTCOME),
        ({"advantage_estimator": "gae"}, BOTH),
        ({"advantage_estimator": "gdpo", "reward_weights": "overlong=2", "overlong_buffer": 0.2}, OUTCOME),
        ({"old_policy": "proximal", "policy_loss": "grpo", "importance_level": "token"}, OUTCOME),
        ({"old_policy": "proximal", "policy_loss": "gpg", "log_ratio_coef": 0.1}, OUTCOME),
        ({"old_policy": "current", "kl_coef": 0.1, "unbiased_kl": True}, OUTCOME),
        ({"old_policy": "proximal", "policy_loss": "gpg", **REJECTION}, OUTCOME),
        ({"reward_combine": "gate"}, {**OUTCOME, "v": vote}),
    ],
)
def test_what_goes_together_breaks_no_rule_and_warns_of_nothing(options, adapters, capsys):
    check(config(**options), adapters)
    assert capsys.readouterr().err == ""


def test_every_rule_speaks_of_options_that_there_are():
    """A renamed option would turn its rules into other errors."""
    source = "".join(inspect.getsource(module) for module in (compatibility, loss_rules, rewards))
    spoken = re.findall(r'(?:yield|flags =|idle\(c,|yield \()\s*"([a-z_ ]+)"', source)
    assert len(spoken) > 35
    for flags in spoken:
        assert set(flags.split()) <= set(RunConfig.__dataclass_fields__), flags


def test_a_worker_without_its_model_folder_is_refused():
    with pytest.raises(ConfigurationError, match="there is no such folder"):
        WorkerConfig(mode="generation", model_path="/does/not/exist")


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
def test_an_estimator_takes_the_rewards_that_fit_it_and_refuses_others_with_the_way_out(name):
    entry, made = ADVANTAGE_ESTIMATORS[name], config(advantage_estimator=name)
    check(made, OUTCOME if entry.outcome else STEPS)
    assert GroupAdvantages(made).group_local == (entry.group_local or entry.needs_critic)
    assert Objective(made).needs_whole_step == entry.needs_critic
    unfit = [] if entry.process else [(BOTH, "step by step; estimators that fit: .*grpo_process")]
    unfit += (
        [] if entry.outcome else [(OUTCOME, "one score per sample; estimators that fit: .*grpo, dr_grpo")]
    )
    for adapters, said in unfit:
        with pytest.raises(ConfigurationError, match=said):
            check(made, adapters)


def test_what_the_batcher_is_told_of_the_rewards():
    made = config(advantage_estimator="gae", reward_weights="steps=2", on_reward_failure="vote=refill")
    facts = check(made, {"steps": steps, "vote": vote}).facts(made, 17)
    assert facts == RunFacts(17, ("steps",), True, {"steps": 2.0}, {"vote": "refill"}, facts.best_rewards)


def test_a_step_takes_whole_groups_and_by_default_the_whole_batch():
    made = config()
    assert (made.samples_per_step, made.groups_per_step, made.steps_per_batch) == (4096, 128, 1)
    split = config(batch_size=8, samples_per_question=4, train_minibatch_size=16, num_training_batches=10)
    assert (split.groups_per_step, split.steps_per_batch, split.num_steps) == (4, 2, 20)


def test_a_kl_is_paid_in_the_reward_or_in_the_loss_and_never_in_both():
    in_reward, in_loss = config(kl_coef=0.1, kl_in_reward=True), config(kl_coef=0.1)
    assert (in_reward.loss_kl_coef, in_reward.reward_kl_coef) == (0.0, 0.1)
    assert (in_loss.loss_kl_coef, in_loss.reward_kl_coef) == (0.1, 0.0)
