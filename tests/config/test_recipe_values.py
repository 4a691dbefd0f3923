"""Each recipe against what its paper says, written out here once more: a value changed in the table is noticed."""

import pytest

from async_grpo.config.recipes import RECIPES

PPO_CLIP = {"policy_loss": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2}
NO_KL = {"kl_coef": 0.0}
# Shao et al. 2024, eq. 3: mean over samples of their token mean; the advantage by the group's mean and std; 4.2: "the KL
# coefficient as 0.04", estimator eq. 4
DEEPSEEK = {
    "loss_aggregation": "sequence_mean_token_mean",
    "kl_coef": 0.04,
    "kl_kind": "k3",
    "mask_truncated": False,
}
PAPERS = {
    "grpo": {"advantage_estimator": "grpo", **PPO_CLIP, **DEEPSEEK},
    # Shao et al. 2024, 4.1.3, in the objective of `grpo`
    "process": {"advantage_estimator": "grpo_process", **PPO_CLIP, **DEEPSEEK},
    # Liu et al. 2025: neither std nor length in a denominator
    "dr_grpo": {"advantage_estimator": "dr_grpo", **PPO_CLIP, "loss_aggregation": "constant_length", **NO_KL,
                "mask_truncated": False},
    # Yu et al. 2025: clip 0.2 and 0.28; cache 4,096 of 20,480 tokens; dynamic sampling; token-level loss; no KL
    "dapo": {"advantage_estimator": "grpo", **PPO_CLIP, "clip_high": 0.28, "loss_aggregation": "token_mean", **NO_KL,
             "zero_variance": "resample", "mask_truncated": False, "overlong_buffer": 4096 / 20480,
             "overlong_penalty": 1.0},
    # Zheng et al. 2025, 5.1: "the left and right clipping ranges ... 3e-4 and 4e-4"
    "gspo": {"advantage_estimator": "grpo", "policy_loss": "gspo", "clip_low": 0.0003, "clip_high": 0.0004,
             "loss_aggregation": "sequence_mean_token_mean", **NO_KL, "mask_truncated": False},
    # MiniMax 2025, eq. 4: bounded from above alone (here at 5), token mean, no KL, DAPO's sampling and length penalty
    "cispo": {"advantage_estimator": "grpo", "policy_loss": "cispo", "clip_high": 4.0, "loss_aggregation": "token_mean",
              **NO_KL, "zero_variance": "resample", "mask_truncated": False, "overlong_buffer": 0.2},
    # Khatri et al. 2025, section 4: PipelineRL with 8 steps, CISPO, prompt average, advantages by the batch's std, float32
    # at the head, zero-variance filter, no resampling of prompts above a pass rate of 0.9
    "scalerl": {"advantage_estimator": "grpo_batch_std", "policy_loss": "cispo", "clip_high": 4.0, **NO_KL,
                "loss_aggregation": "prompt_mean", "zero_variance": "filter", "retire_solved_above": 0.9,
                "float32_head": True, "max_staleness": 8},
    # Lu and Thinking Machines Lab 2025: the teacher alone, importance sampling; here the weight is bounded at 5
    "opd": {"advantage_estimator": "teacher", "policy_loss": "cispo", "clip_high": 4.0, **NO_KL,
            "loss_aggregation": "token_mean", "mask_truncated": False},
    # Yue et al. 2025, 3 and 4.1: value pre-training of 50 steps, lambda 1 for the critic and 1 - 1/(0.05 l) for the policy,
    # clip 0.2 and 0.28, token-level loss, the critic's learning rate 2e-6. Not here: the loss of imitation on right answers
    "vapo": {"advantage_estimator": "decoupled_gae", "estimator_options": "alpha=0.05,critic_lam=1", **PPO_CLIP,
             "clip_high": 0.28, "loss_aggregation": "token_mean", "critic_model": "same", "critic_warmup_steps": 50,
             "critic_learning_rate": 2e-6, "mask_truncated": False, **NO_KL},
    # FlashREINFORCE in OpenRLHF and TRL: one sample per prompt, minus the batch's mean; mean over samples of their token
    # mean; no KL; truncated samples train. The bound on the binary KL is per token here (dppo_kl)
    "flash_reinforce": {"advantage_estimator": "flash_reinforce", "policy_loss": "dppo_kl", "samples_per_question": 1,
                        "loss_aggregation": "sequence_mean_token_mean", "mask_truncated": False, **NO_KL},
    # LUSPO, 5.1: clip 2e-3 and 2.5e-3; GSPO's loss times the length of the sequence
    "luspo": {"advantage_estimator": "grpo", "policy_loss": "gspo", "clip_low": 0.002, "clip_high": 0.0025,
              "loss_aggregation": "sequence_mean_token_sum", **NO_KL, "mask_truncated": False},
    # DeepSeek-V3.2, eq. 5: GRPO with the advantage R - mean(R); eq. 7: the unbiased KL; eq. 9: the off-policy mask. The
    # report gives no numbers: clip 0.2 as GRPO, KL 0.001 as DeepSeek-R1, threshold 0.5 as TRL proposes
    "deepseek_v32": {"advantage_estimator": "dr_grpo", **PPO_CLIP, "loss_aggregation": "sequence_mean_token_mean",
                     "mask_truncated": False, "kl_coef": 0.001, "kl_kind": "k3", "unbiased_kl": True,
                     "off_policy_mask_threshold": 0.5},
    # GRPOConfig of TRL 1.16: loss_type dapo, epsilon 0.2, beta 0, scale_rewards group (std + 1e-4), rewards added up,
    # vllm_importance_sampling_mode sequence_mask with clip_max 3, truncated completions are trained on
    "trl": {"advantage_estimator": "grpo", "estimator_options": "eps=1e-4", **PPO_CLIP, "loss_aggregation": "token_mean",
            "old_policy": "current", "importance_level": "sequence", "importance_mode": "mask", "importance_high": 3.0,
            "reward_combine": "sum", "mask_truncated": False, **NO_KL},
    # prime-rl's default loss: dppo_mask_low and dppo_mask_high 0.2, kl_tau 1e-3, reward minus the group's mean, a mean over
    # tokens; its filter drops groups without advantage
    "prime_rl": {"advantage_estimator": "dr_grpo", "policy_loss": "dppo_tv",
                 "loss_options": "eps_low=0.2,eps_high=0.2,clip_c=1e9", "log_ratio_coef": 0.001,
                 "loss_aggregation": "token_mean", "zero_variance": "filter", "mask_truncated": False, **NO_KL},
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_sets_what_its_paper_says(name):
    assert RECIPES[name] == PAPERS[name]
