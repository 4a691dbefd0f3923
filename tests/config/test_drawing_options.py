"""Options that a policy that draws cannot use are refused by name, and those that only it uses do nothing elsewhere."""

import pytest
from checked_run import OUTCOME, check, config

from async_grpo.errors import ConfigurationError
from async_grpo.launch.local_config import LocalConfig

DRAWS = {"policy": "flow", "max_generation_tokens": 10, "temperature": 0.7}


def test_a_run_that_draws_needs_no_worker_for_its_reference():
    assert config(**DRAWS, kl_coef=0.1).logprob_roles == ()
    assert config(kl_coef=0.1).logprob_roles == ("reference",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"lora_rank": 4, "load_in_4bit": True},
            "--policy flow --load-in-4bit True do not go together: leave --load-in-4bit out",
        ),
        (
            {"lora_rank": 4, "lora_sync": "adapter"},
            "--policy flow --lora-sync adapter do not go together: leave --lora-sync out",
        ),
        ({"environment": "guess"}, "--policy flow --environment guess do not go together"),
        ({"teacher": "self"}, "--teacher self do not go together"),
        ({"entropy_coef": 0.1}, "--entropy-coef 0.1 do not go together"),
        ({"kl_coef": 0.1, "kl_kind": "k2"}, "--kl-kind k2 do not go together"),
        ({"kl_coef": 0.1, "kl_in_reward": True}, "--kl-in-reward True do not go together"),
        ({"system_prompt": "draw"}, "--system-prompt draw do not go together"),
        ({"cpu_offload": True}, "--cpu-offload True do not go together"),
        ({"top_p": 0.9}, "--policy flow --top-p 0.9 do not go together: leave --top-p out"),
        ({"old_policy": "proximal"}, "logprob workers cannot recompute denoising steps"),
        ({"weight_transport": "nccl"}, "use object_store or shared_files"),
        (
            {"max_generation_tokens": 8192},
            "is the number of denoising steps with --policy flow, at most 1000",
        ),
        ({"eval_max_tokens": 8192, "eval_data_path": "d"}, "--eval-max-tokens 8192 is the number"),
        ({"flow_window": 11}, "the window is longer than the denoising"),
        ({"nft_beta": 0.5}, "--nft-beta 0.5 does nothing without --flow-loss diffusion_nft"),
    ],
)
def test_what_does_not_go_with_drawing_is_refused_by_name(changes, message):
    with pytest.raises(ConfigurationError, match=message):
        config(**{**DRAWS, **changes})


@pytest.mark.parametrize("name", ["gae", "grpo_process"])
def test_estimators_with_a_critic_or_process_rewards_are_refused(name):
    with pytest.raises(ConfigurationError, match="a picture has one score and no critic"):
        check(config(**DRAWS, advantage_estimator=name), OUTCOME)


def test_the_window_does_nothing_for_a_language_model():
    with pytest.raises(ConfigurationError, match="--flow-window 2 does nothing without --policy flow"):
        config(flow_window=2)
    with pytest.raises(ConfigurationError, match="--guidance 2.0 does nothing without --policy flow"):
        config(guidance=2.0)


def local(**changes):
    return LocalConfig(model_name_or_path="m", data_path="d", reward_fns="a", **changes)


@pytest.mark.parametrize("changes", [DRAWS, {"engine": "drawing"}, {**DRAWS, "engine": "fake"}])
def test_policy_and_engine_that_do_not_fit_are_refused(changes):
    with pytest.raises(ConfigurationError, match="--policy flow and --engine drawing need each other"):
        local(**changes)


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("engine_options", "block_size=32", "--engine-options block_size=32"),
        ("engine_stall_s", 5.0, "--engine-stall-s 5.0"),
        ("enable_prefix_caching", False, "--enable-prefix-caching False"),
    ],
)
def test_options_of_vllm_are_refused_for_the_engine_that_draws(name, value, shown):
    with pytest.raises(ConfigurationError, match=f"{shown} do not go together"):
        local(**DRAWS, engine="drawing", **{name: value})


NFT = {"policy": "flow", "max_generation_tokens": 10, "flow_loss": "diffusion_nft"}


def test_a_run_by_diffusion_nft_needs_no_noise_level():
    assert config(**NFT, nft_times=2).trains_by_nft


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.7),
        ("flow_window", 2),
        ("kl_coef", 0.1),
        ("clip_high", 0.3),
        ("importance_level", "token"),
        ("old_policy", "current"),
        ("off_policy_mask_threshold", 0.1),
    ],
)
def test_options_of_log_probs_are_refused_with_diffusion_nft(name, value):
    flag = "--" + name.replace("_", "-")
    with pytest.raises(ConfigurationError, match=f"{flag} {value} do not go together.*Leave {flag} out"):
        config(**NFT, **{name: value})
