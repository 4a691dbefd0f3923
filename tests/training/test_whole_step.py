"""Every loss and correction, over two FSDP ranks and any packing, has the gradient of one padded pass.

The trainer computes in float32, and the padded pass in float64 (`padded_step`).
"""

import numpy as np
import pytest
import torch
from dealt_micro_batches import deal
from padded_step import add_teacher, own_critic, padded_step_gradients, plain_in_float64, policy_of
from tiny_policy import pack, random_sequence
from two_ranks import RecordingOptimizer, on_two_ranks, recording_accumulator, relative_error

from async_grpo.algorithm.aggregation import AGGREGATIONS
from async_grpo.algorithm.config import AlgorithmConfig
from async_grpo.algorithm.losses import POLICY_LOSSES
from async_grpo.config.recipes import RECIPES
from async_grpo.training.critic import Critic
from async_grpo.training.objective import Objective
from async_grpo.training.sharding import shard_policy
from async_grpo.types import PROMPT_TOKEN

SCALE = 40
TOLERANCE = 1e-5
OPTIONS_OF_LOSSES = set(AlgorithmConfig.__dataclass_fields__) - {"recipe"}

NORMALIZED = dict(policy_loss="gpg", importance_level="token", importance_normalize=True)
REJECTED = dict(rejection_statistic="token_k1", rejection_low=0.8, rejection_high=1.25)
OF_GROUPS = dict(loss_aggregation="prompt_mean")
WIDE = dict(importance_low=1e-4, importance_high=1e4)
GAE = dict(advantage_estimator="gae")
OWN_CRITIC = dict(advantage_estimator="decoupled_gae", critic_model="same", critic_clip=0.1)
TEACHER = dict(teacher="x", teacher_top_k=3, teacher_coef=0.7)
TERMS = dict(
    kl_coef=0.2,
    unbiased_kl=True,
    log_ratio_coef=0.1,
    off_policy_mask_threshold=0.2,
    top_entropy_quantile=0.5,
    entropy_coef=0.1,
)


def of_recipe(name: str) -> dict:
    """The options of a recipe that are the trainer's."""
    return {option: value for option, value in RECIPES[name].items() if option in OPTIONS_OF_LOSSES}


CASES = {
    **{name: dict(policy_loss=name) for name in POLICY_LOSSES},
    **{f"aggregation {name}": dict(loss_aggregation=name) for name in AGGREGATIONS},
    "kl_cov takes more": dict(policy_loss="kl_cov", loss_options="ratio=0.2"),
    "clip_cov takes more": dict(policy_loss="clip_cov", loss_options="ratio=0.1,cov_low=0.01,cov_high=50"),
    "entropy bonus": dict(entropy_coef=0.3),
    "straight-through kl": dict(kl_coef=0.2, kl_kind="k3+", kl_clamp=2.0),
    "truncated weights": dict(NORMALIZED, importance_high=1.5),
    "masked weights of sequences": dict(
        NORMALIZED | OF_GROUPS | WIDE, policy_loss="grpo", importance_level="sequence", importance_mode="mask"
    ),
    "weights beside a ratio of one": dict(old_policy="current", importance_level="token"),
    "weights without a proximal policy": dict(NORMALIZED, importance_high=3.0),
    "rejected tokens without a proximal policy": dict(
        policy_loss="grpo", rejection_statistic="token_k2", rejection_high=2.0
    ),
    "rejected tokens": dict(REJECTED, loss_aggregation="sequence_mean_token_mean"),
    "rejected tokens of groups": REJECTED | OF_GROUPS,
    "rejected sequences": dict(
        OF_GROUPS, policy_loss="gspo", rejection_statistic="sequence_mean_k3", rejection_high=0.045
    ),
    "proximal ratio": dict(policy_loss="dual_clip", old_policy="proximal"),
    "critic": dict(GAE, estimator_options="gamma=0.9,lam=0.8", critic_coef=0.7, critic_clip=0.1),
    "critic without whitening": dict(
        GAE, estimator_options="whiten=false", loss_aggregation="sequence_mean_token_sum"
    ),
    "critic of several sequences": dict(GAE, estimator_options="gamma=0.9,lam=0.8"),
    "critic stopped at its head": dict(GAE, critic_trunk_gradient=False),
    "critic and covariance": dict(
        GAE, estimator_options="lam=0.5", policy_loss="kl_cov", loss_options="ratio=0.1"
    ),
    "critic and probable tokens": dict(GAE, critic_coef=0.7, top_p=0.9),
    "probable tokens": dict(top_k=30, min_p=0.001, entropy_coef=0.3, policy_loss="cispo"),
    "critic of its own": dict(OWN_CRITIC, estimator_options="gamma=0.9,lam=0.6,critic_lam=0.95"),
    "critic of its own with a lambda by length": dict(
        OWN_CRITIC, estimator_options="alpha=0.3", loss_aggregation="sequence_mean_token_mean"
    ),
    "critic of its own of several sequences": dict(OWN_CRITIC, estimator_options="gamma=0.9,alpha=0.2"),
    "critic of its own and rejected tokens": dict(OWN_CRITIC, **REJECTED),
    "off-policy mask": dict(off_policy_mask_threshold=0.2),
    "off-policy mask of rejected tokens": REJECTED | OF_GROUPS | dict(off_policy_mask_threshold=0.01),
    "unbiased kl": dict(kl_coef=0.2, unbiased_kl=True),
    "unbiased kl beside a loss without ratio": dict(
        policy_loss="gpg", old_policy="proximal", kl_coef=0.2, kl_kind="k1", unbiased_kl=True
    ),
    "squared log-ratio": dict(policy_loss="dppo_tv", log_ratio_coef=0.1),
    "high entropy": dict(top_entropy_quantile=0.3),
    "high entropy of rejected tokens": REJECTED | OF_GROUPS | dict(top_entropy_quantile=0.5),
    "high entropy and a critic": dict(GAE, top_entropy_quantile=0.4, entropy_coef=0.1),
    **{
        f"observations, {name}": dict(observation_coef=0.3, loss_aggregation=name)
        for name in ("token_mean", "token_sum", "constant_length", "prompt_mean")
    },
    "observations and rejected tokens": REJECTED | OF_GROUPS | dict(observation_coef=0.3),
    "all terms": TERMS | dict(observation_coef=0.1),
    "all terms and probable tokens": TERMS
    | dict(top_p=0.95, policy_loss="gspo", clip_low=0.5, clip_high=0.5),
    "all terms with passes to come": TERMS | dict(old_policy="current", policy_loss="vespo"),
    "all terms with a critic of its own": TERMS | OWN_CRITIC | dict(observation_coef=0.1),
    "critic of its own and probable tokens": dict(OWN_CRITIC, top_k=20),
    "critic of its own, one sample per question": dict(OWN_CRITIC, loss_aggregation="prompt_mean"),
    "tokens of a teacher": TEACHER,
    "tokens of a teacher of rejected tokens of groups": TEACHER | REJECTED | OF_GROUPS,
    "tokens of a teacher and all terms": TEACHER | TERMS | dict(observation_coef=0.1, policy_loss="cispo"),
    "one sample per question": dict(policy_loss="dppo_kl", loss_aggregation="prompt_mean"),
    "rejected tokens, one sample per question": REJECTED | OF_GROUPS | dict(policy_loss="dppo_tv"),
    **{f"recipe {name}": of_recipe(name) for name in RECIPES},
}


def objective_of(case: str) -> Objective:
    return Objective(AlgorithmConfig(**CASES[case], max_generation_tokens=SCALE))


def minibatch(seed: int, case: str) -> list[dict]:
    """Random sequences in groups of about three; some have nothing to train on."""
    rng = np.random.default_rng(seed)
    sequences = [random_sequence(rng, 30, with_ref=True) for _ in range(11)]
    for number, sequence in enumerate(sequences):
        sequence["group"] = number if "one sample per question" in case else number // 3
        if "without a proximal" not in case:
            sequence["proximal"] = sequence["behaviour"] + rng.normal(0, 0.3, len(sequence["ids"]))
    if "several sequences" in case:
        add_times(sequences, rng)
    if "of a teacher" in case:
        add_teacher(sequences, rng, TEACHER["teacher_top_k"])
    for sequence in sequences:
        # Half of the tokens that are not trained on were sampled, the others come from the environment
        is_sampled = sequence["mask"] | (rng.random(len(sequence["ids"])) < 0.5)
        sequence["versions"] = np.where(is_sampled, 0, PROMPT_TOKEN)
    for sequence in sequences:
        members = [s for s in sequences if s["group"] == sequence["group"]]
        sequence["group_tokens"] = sum(int(s["mask"][1:].sum()) for s in members)
    return sequences


def add_times(sequences: list[dict], rng: np.random.Generator) -> None:
    """Have every group be the sequences of one trajectory, whose sampled tokens came in a random order."""
    for group in {sequence["group"] for sequence in sequences}:
        parts = [sequence for sequence in sequences if sequence["group"] == group]
        owners = rng.permutation([n for n, part in enumerate(parts) for _ in range(int(part["mask"].sum()))])
        for number, part in enumerate(parts):
            part["member"], part["times"] = 0, np.full(len(part["ids"]), -1)
            part["times"][part["mask"]] = np.flatnonzero(owners == number)


def recording_critic(ranks, warmup_steps=0) -> Critic:
    model = shard_policy(own_critic(), ranks)
    optimizer = RecordingOptimizer(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return Critic(model, optimizer, scheduler, max_grad_norm=1e9, warmup_steps=warmup_steps)


def step_gradients(ranks, case, micro_batches):
    objective = objective_of(case)
    policy = shard_policy(policy_of(objective), ranks)
    accumulator, optimizer = recording_accumulator(policy, objective, ranks)
    if objective.config.critic_model:
        accumulator.critic = recording_critic(ranks)
    for micro_batch in micro_batches:
        accumulator.add(micro_batch)
    metrics, gradients = accumulator.finish(), optimizer.gradients
    if accumulator.critic is not None:
        critic_gradients = accumulator.critic.optimizer.gradients
        gradients |= {f"critic.{name}": gradient for name, gradient in critic_gradients.items()}
    return metrics, gradients


def work(ranks, folder):
    return {
        case: step_gradients(ranks, case, deal(minibatch(seed, case), seed, ranks.world_size)[ranks.rank])
        for seed, case in enumerate(CASES)
    }


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return on_two_ranks(work, tmp_path_factory.mktemp("ranks"), deadline_s=240)


@pytest.mark.parametrize(
    "case", [case for case in CASES if not case.startswith("clip_cov")]
)  # whose random choice goes by the token's own number, which a padded batch does not know
def test_two_ranks_with_any_packing_give_the_gradient_of_one_padded_pass(two_ranks, case):
    objective = objective_of(case)
    critic = plain_in_float64(own_critic()) if objective.config.critic_model else None
    sequences = minibatch(list(CASES).index(case), case)
    policy = plain_in_float64(policy_of(objective))
    expected = padded_step_gradients(objective, policy, sequences, critic)
    overall, worst = relative_error(two_ranks[case][1], expected)
    assert overall < TOLERANCE and worst < TOLERANCE


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("clip_cov")])
def test_a_random_choice_of_tokens_does_not_depend_on_ranks_and_packing(two_ranks, ranks, case):
    metrics, gradients = step_gradients(ranks, case, [pack(minibatch(list(CASES).index(case), case))])
    overall, worst = relative_error(two_ranks[case][1], gradients)
    assert overall < TOLERANCE and worst < TOLERANCE
    if case == "clip_cov takes more":
        assert metrics["selected_frac"] > 0.03


def test_diagnostics_are_reported_whatever_the_loss(two_ranks):
    names = "mismatch_kl ess ratio_p01 ratio_p50 ratio_p99 clip_frac_low clip_frac_high".split()
    for case, (metrics, _) in two_ranks.items():
        assert all(np.isfinite(metrics[name]) for name in names), case
        assert metrics["ratio_p01"] <= metrics["ratio_p50"] <= metrics["ratio_p99"]
        assert 0 < metrics["ess"] <= 1
    share = {case: metrics["rejected_share"] for case, (metrics, _) in two_ranks.items()}
    assert share["rejected tokens"] > 0.1 and share["rejected sequences"] > 0.1 and share["ppo_clip"] == 0
    assert two_ranks["critic"][0]["explained_variance"] < 1


def test_the_masks_and_terms_of_the_step_report_what_they_did(two_ranks):
    metrics = {case: values for case, (values, _) in two_ranks.items()}
    assert 0.05 < metrics["off-policy mask"]["off_policy_masked_frac"] < 0.95
    assert metrics["high entropy"]["high_entropy_frac"] == pytest.approx(0.3, abs=0.02)
    assert metrics["high entropy of rejected tokens"]["high_entropy_frac"] == pytest.approx(0.5, abs=0.02)
    assert metrics["squared log-ratio"]["log_ratio_square"] > 0.1
    # The mean over observations, and not over trained tokens: near the entropy of a uniform choice of 100 tokens
    for case in ("observations, token_sum", "observations, prompt_mean", "all terms"):
        assert 2 < metrics[case]["observation_nll"] < 12
    assert "observation_nll" not in metrics["ppo_clip"]
