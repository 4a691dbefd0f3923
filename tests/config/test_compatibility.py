"""The table of rules: what is accepted and would do nothing, or something else, is refused or warned about."""

import inspect
import re

import pytest
from test_recipes import check, outcome, steps, vote

from async_grpo.config import compatibility, rewards
from async_grpo.config.compatibility import check_methods
from async_grpo.config.run import RunConfig
from async_grpo.errors import ConfigurationError


def config(**changes) -> RunConfig:
    return RunConfig(**{"model_name_or_path": "m", "data_path": "d", **changes})


IDLE = [  # options that have no effect together, and what the refusal says
    ({"advantage_estimator": "grpo", "critic_coef": 0.7}, "--critic-coef 0.7 does nothing without an --advantage-est"),
    ({"critic_learning_rate": 1e-4}, "--critic-learning-rate 0.0001 does nothing"),
    ({"kl_kind": "k1"}, "--kl-kind k1 does nothing without --kl-coef above 0"),
    ({"kl_clamp": 1.0, "kl_in_reward": True}, "--kl-clamp 1.0 --kl-in-reward True does nothing without --kl-coef"),
    ({"overlong_penalty": 2.0}, "--overlong-penalty 2.0 does nothing without --overlong-buffer"),
    ({"overlong_buffer": 0.2, "overlong_penalty": 0.0}, "penalises nothing"),
    ({"old_policy": "proximal", "policy_loss": "grpo"}, "--old-policy proximal does nothing with --policy-loss grpo"),
    ({"old_policy": "current", "policy_loss": "gpg"}, "--old-policy current does nothing with --policy-loss gpg"),
    ({"old_policy": "current", "policy_loss": "dro"}, "leave the loss without its pull to the old policy"),
    ({"old_policy": "current", "policy_loss": "kl_cov"}, "leave the loss without its pull to the old policy"),
    ({"old_policy": "current", "policy_loss": "decoupled"}, "current leaves none"),
    ({"policy_loss": "decoupled", "importance_level": "token"}, "leave --importance-level out"),
    ({"gate_threshold": 0.9}, "--gate-threshold 0.9 does nothing without --reward-combine gate"),
    ({"eval_every": 5}, "--eval-every 5 does nothing without --eval-data-path"),
    ({"max_resamples": 3}, "--max-resamples 3 does nothing without --zero-variance resample"),
    ({"policy_loss": "clip_cov", "loss_options": "cov_low=3,cov_high=2"}, "cov_low"),
    ({"loss_options": "clip_low=2"}, "clip_low=2.0: it is a share between 0 and 1"),
    (
        {"rejection_statistic": "token_k1", "rejection_low": 1.5},
        "--rejection-low 1.5 .*would reject tokens on which trainer and engine agree: the bounds must hold 1",
    ),
    ({"rejection_statistic": "token_k3", "rejection_low": 0.1, "rejection_high": 1.0}, "the bounds must hold 0"),
    ({"rejection_statistic": "token_k3", "rejection_low": 0.0}, "rejects nothing"),
    ({"importance_level": "token", "policy_loss": "gpg", "importance_low": 3.0}, "leave no weight at all"),
    ({"lr_scheduler": "cosine", "num_training_batches": 10}, "which must lie beyond the warm-up"),
    ({"advantage_estimator": "gae", "zero_variance": "filter"}, "groups of equal rewards teach an estimator"),
    ({"advantage_estimator": "grpo_process", "kl_in_reward": True, "kl_coef": 0.1}, "use the KL in the loss"),
    ({"weight_transport": "nccl", "old_policy": "proximal"}, "a --weight-transport that sends packages"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "said"), IDLE, ids=[said for _, said in IDLE])
def test_what_would_do_nothing_or_something_else_is_refused_by_flag_and_value(options, said):
    with pytest.raises(ConfigurationError, match=said):
        check_methods(config(**options))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"critic_clip": 0.1, "advantage_estimator": "gae"}, "--critic-clip 0.1 does nothing as yet"),
        ({"old_policy": "current", "clip_low": 0.1}, "--clip-low 0.1 does nothing with --old-policy current"),
        ({"max_token_staleness": 2}, "--max-token-staleness 2 does nothing with --max-staleness 1"),
        (
            {"lr_scheduler": "constant", "num_warmup_steps": 3},
            "--num-warmup-steps 3 does nothing with --lr-scheduler",
        ),
    ],
)
def test_what_merely_has_no_effect_is_warned_about(capsys, options, said):
    check_methods(config(**options))
    assert f"warning: {said}" in capsys.readouterr().err


def test_a_weight_of_a_penalty_that_there_is_not_is_refused():
    made = {"advantage_estimator": "gdpo", "reward_weights": "overlong=2"}
    with pytest.raises(ConfigurationError, match="names overlong"):
        check(config(**made), {"outcome": outcome})
    check(config(**made, overlong_buffer=0.2), {"outcome": outcome})


def test_weights_and_rejection_give_a_proximal_policy_work_beside_a_loss_without_a_ratio():
    check_methods(config(old_policy="proximal", policy_loss="grpo", importance_level="token"))
    check_methods(
        config(old_policy="proximal", policy_loss="gpg", rejection_statistic="token_k3", rejection_high=1.0)
    )


def test_a_vote_of_the_whole_group_cannot_be_compared_with_one_greedy_completion():
    with pytest.raises(ConfigurationError, match="compares with a single greedy completion, which vote"):
        check(config(advantage_estimator="remax"), {"vote": vote})


def test_every_rule_speaks_of_options_that_there_are():
    """A renamed option would turn its rules into other errors."""
    source = inspect.getsource(compatibility) + inspect.getsource(rewards)
    spoken = re.findall(r'(?:yield|flags =|idle\(c,|yield \()\s*"([a-z_ ]+)"', source)
    assert len(spoken) > 40
    for flags in spoken:
        assert set(flags.split()) <= set(RunConfig.__dataclass_fields__), flags


def test_the_defaults_break_no_rule_and_warn_of_nothing(capsys):
    check(config(), {"outcome": outcome})
    check(config(advantage_estimator="gae"), {"outcome": outcome, "steps": steps})
    assert capsys.readouterr().err == ""
