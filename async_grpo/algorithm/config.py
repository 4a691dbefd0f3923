"""The options of the algorithm, which turns rewards into a loss.

Rules that involve two options are in `config/compatibility.py`. This module does not import torch, because `--help` must
be fast.
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from async_grpo.algorithm.settings import parse_settings
from async_grpo.algorithm.teacher_config import TeacherConfig
from async_grpo.messages import Truncation
from async_grpo.options.fields import (
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_SHARE,
    SHARE,
    TABLE,
    Range,
    dashed,
    option,
    refuse,
)
from async_grpo.options.source_file import absolute, find_entry, is_file

if TYPE_CHECKING:
    from async_grpo.algorithm.advantages import Estimator
    from async_grpo.algorithm.losses import PolicyLoss

TOP_K = Range("must be 0 (all tokens) or a number of tokens", lambda value: value >= -1)

# The library's losses with `PolicyLoss.needs_proximal`. Their names are repeated here, because the launcher must know
# them without importing torch, which takes seconds
PROXIMAL_LOSSES = frozenset({"decoupled"})

_algorithm = partial(option, panel="Algorithm", portable=True)
_registered = partial(_algorithm, takes_file=True, everyday=True)
off_policy = partial(option, panel="Off-policy correction", portable=True)
on_groups = partial(option, panel="Groups", portable=True)
_critic = partial(option, panel="Critic", portable=True)
_truncation = partial(option, panel="Generation", portable=True)
_generation = partial(option, panel="Generation", range=POSITIVE, everyday=True, portable=True)


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig(TeacherConfig):
    """Options that turn rewards into a loss. None keeps the default of the estimator or loss that has the option."""

    recipe: str | None = _algorithm(
        None,
        "Preset of the algorithm's options. Options that you set explicitly override it.",
        choices="async_grpo.config.recipes:RECIPES",
        everyday=True,
    )
    advantage_estimator: str = _registered(
        "grpo",
        "Function that turns rewards into advantages: a name, or FILE.py:NAME of your own.",
        choices="async_grpo.algorithm.advantages:ADVANTAGE_ESTIMATORS",
    )
    estimator_options: str = _algorithm(
        "",
        "Further options of the estimator in --advantage-estimator, such as gamma=0.99,lam=0.95.",
        form=TABLE,
    )
    policy_loss: str = _registered(
        "ppo_clip",
        "Function that turns advantages into a loss: a name, or FILE.py:NAME of your own.",
        choices="async_grpo.algorithm.losses:POLICY_LOSSES",
    )
    loss_options: str = _algorithm(
        "",
        "Further options of the loss in --policy-loss, such as cap=5,cap_mode=clamp.",
        form=TABLE,
    )
    loss_aggregation: str = _algorithm(
        "token_mean",
        "How the losses of all tokens are combined into one number.",
        choices="async_grpo.algorithm.aggregation:AGGREGATIONS",
    )
    clip_low: float | None = _algorithm(
        None, "Clip policy ratios below 1 minus this number. By default the loss sets it.", range=SHARE
    )
    clip_high: float | None = _algorithm(
        None, "Clip policy ratios above 1 plus this number. By default the loss sets it.", range=NOT_NEGATIVE
    )
    entropy_coef: float = _algorithm(
        0.0, "Weight of the entropy bonus in the loss; 0 leaves it out.", range=NOT_NEGATIVE
    )
    kl_coef: float = _algorithm(
        0.0,
        "Weight of the KL divergence from the reference policy; 0 leaves it out and needs no reference worker.",
        range=NOT_NEGATIVE,
        everyday=True,
    )
    kl_kind: str = _algorithm(
        "k3",
        "Estimator of the KL divergence. An estimator whose name ends in + has the gradient of k2.",
        choices="async_grpo.algorithm.kl:KL_KINDS",
    )
    kl_clamp: float | None = _algorithm(
        None,
        "Clamp the KL estimate of each token to plus or minus this number, in nats. By default it is not clamped.",
        range=POSITIVE,
    )
    ref_update_steps: int = _algorithm(
        0,
        "Number of optimizer steps between two updates of the reference policy, which mix the trained policy into it. 0 "
        "keeps the initial model. The trainer keeps one more copy of the weights.",
        range=NOT_NEGATIVE,
    )
    ref_mix: float = _algorithm(
        0.6,
        "Share of the trained policy in the reference at each of its updates; 1 resets the reference to the policy.",
        range=POSITIVE_SHARE,
    )
    ref_reset_optimizer: bool = _algorithm(
        False, "Set the optimizer's moments to zero at each update of the reference."
    )
    kl_in_reward: bool = _algorithm(
        False, "Subtract the KL divergence from the reward instead of adding it to the loss."
    )
    unbiased_kl: bool = _algorithm(
        False,
        "Multiply the KL estimate of each token by the policy ratio, which also gets a gradient (DeepSeek-V3.2). This "
        "makes the estimate unbiased for tokens that the policy of --old-policy has sampled.",
    )
    log_ratio_coef: float = _algorithm(
        0.0,
        "Weight of the squared log-ratio to the policy that --old-policy names, which pulls the policy back to it; 0 "
        "leaves it out.",
        range=NOT_NEGATIVE,
    )
    top_entropy_quantile: float = _algorithm(
        1.0,
        "Compute the policy loss only for this share of each step's tokens, those with the highest entropy. The default is "
        "all tokens.",
        range=SHARE,
    )

    observation_coef: float = _algorithm(
        0.0,
        "Weight of the mean cross-entropy of the tokens that an environment wrote after the first turn, such as the "
        "answers of tools (ECHO); 0 leaves it out.",
        range=NOT_NEGATIVE,
    )

    old_policy: str = off_policy(
        "behaviour",
        "Denominator of the policy ratio: behaviour (log-probs of the engine), proximal (log-probs of a logprob "
        "worker) or current (the trained policy before the first pass over the minibatch, so that the ratio is 1 in this "
        "pass).",
        choices=("behaviour", "proximal", "current"),
    )
    passes_max_kl: float | None = off_policy(
        None,
        "With --passes-per-batch, skip the remaining updates of a batch as soon as the KL divergence of the policy from "
        "the policy of the batch's first pass exceeds this number of nats per token. By default there is no limit.",
        range=POSITIVE,
    )
    importance_level: str = off_policy(
        "none",
        "Correct the mismatch between trainer and engine by importance weights, one per token or one per sequence.",
        choices=("none", "token", "sequence"),
    )
    importance_mode: str = off_policy(
        "truncate",
        "What happens to an importance weight outside its bounds: truncate sets it to the bound (TIS), mask sets it to "
        "0 (IcePop).",
        choices=("truncate", "mask"),
    )
    importance_low: float | None = off_policy(
        None, "Lowest importance weight. By default there is none.", range=NOT_NEGATIVE
    )
    importance_high: float = off_policy(
        2.0, "Highest importance weight; inf sets no limit.", range=POSITIVE, unbounded=True
    )
    importance_normalize: bool = off_policy(
        False, "Divide the importance weights by their mean over the step."
    )
    rejection_statistic: str | None = off_policy(
        None,
        "Measure of the mismatch between trainer and engine. Tokens or sequences whose measure is outside of "
        "--rejection-low and --rejection-high are left out of the loss. By default nothing is left out.",
        choices="async_grpo.algorithm.off_policy:REJECTION_STATISTICS",
    )
    rejection_low: float | None = off_policy(
        None, "Lowest accepted value of --rejection-statistic. By default there is none.", unbounded=True
    )
    rejection_high: float | None = off_policy(
        None, "Highest accepted value of --rejection-statistic. By default there is none.", unbounded=True
    )
    off_policy_mask_threshold: float | None = off_policy(
        None,
        "Leave tokens with a negative advantage out of the policy loss if the engine's log-probs of their sequence exceed "
        "the trainer's by more than this number of nats per token, on average (DeepSeek-V3.2). By default, no token is "
        "left out.",
        range=NOT_NEGATIVE,
    )
    float32_head: bool = off_policy(
        False, "Have the engines compute logits in float32, as the trainer always does."
    )

    overlong_buffer: float = on_groups(
        0.0,
        "Length of the range before the maximum completion length in which the reward falls linearly by "
        "--overlong-penalty, as a share of the maximum. 0 turns the penalty off.",
        range=SHARE,
    )
    overlong_penalty: float = on_groups(
        1.0, "Reward that a completion of the maximum length loses. See --overlong-buffer.", range=POSITIVE
    )
    running_mean_column: str | None = on_groups(
        None,
        "Column of the data whose values share a running mean of rewards, such as the name of an agent or a task, for "
        "the estimator running_mean. By default each question has a mean of its own.",
    )

    critic_model: str | None = option(
        None,
        "Folder of the model with which a separate critic starts, or `same` for the folder of the policy. By default the "
        "critic is a value head on the policy. Only the estimators gae and decoupled_gae have a critic.",
        "Critic",
        # Options taken over from another run must not name a folder of this machine
        portable=("same",),
    )
    critic_warmup_steps: int = _critic(
        0,
        "Number of steps at the start of the run that train only the critic, and leave the policy unchanged. It needs "
        "--critic-model.",
        range=NOT_NEGATIVE,
    )
    critic_coef: float = _critic(
        0.5,
        "Weight of the value loss if the critic is a value head on the policy. It has no effect with --critic-model.",
        range=NOT_NEGATIVE,
    )
    critic_clip: float = _critic(
        0.5, "Clip the critic's values to this distance from its values before the step.", range=POSITIVE
    )
    critic_trunk_gradient: bool = _critic(
        True, "Let the value loss train the policy's body in addition to the value head."
    )

    temperature: float = _generation(
        1.0, "Sampling temperature. The trainer also divides the policy's logits by it."
    )
    top_p: float = _truncation(
        1.0,
        "Sample among the smallest number of most probable tokens whose probabilities reach this sum. The trainer computes "
        "log-probs over the same tokens. 1 samples among all tokens.",
        range=POSITIVE_SHARE,
    )
    top_k: int = _truncation(
        0,
        "Sample among this number of most probable tokens. The trainer computes log-probs over the same tokens. 0 (or -1) "
        "samples among all tokens.",
        range=TOP_K,
    )
    min_p: float = _truncation(
        0.0,
        "Sample among the tokens whose probability is at least this share of the most probable token's. The trainer "
        "computes log-probs over the same tokens. 0 samples among all tokens.",
        range=SHARE,
    )
    max_generation_tokens: int = _generation(8192, "Maximum length of a completion, in tokens.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("advantage_estimator", "policy_loss"):
            object.__setattr__(self, name, absolute(getattr(self, name)))

    @property
    def estimator(self) -> "Estimator":
        """Return the estimator that `--advantage-estimator` names: the library's or the user's own."""
        from async_grpo.algorithm.advantages import get_estimator  # imports torch, which --help does not need

        return get_estimator(self.advantage_estimator)

    @property
    def loss(self) -> "PolicyLoss":
        """Return the loss that `--policy-loss` names: the library's or the user's own."""
        from async_grpo.algorithm.losses import POLICY_LOSSES, PolicyLoss

        return find_entry(self.policy_loss, POLICY_LOSSES, PolicyLoss, "policy-loss")

    @staticmethod
    def estimators_for(*, process: bool) -> list[str]:
        """Return the names of the estimators for process rewards, or for one score per sample."""
        from async_grpo.algorithm.advantages import ADVANTAGE_ESTIMATORS

        if process:
            return [name for name, estimator in ADVANTAGE_ESTIMATORS.items() if estimator.process]
        return [name for name, estimator in ADVANTAGE_ESTIMATORS.items() if estimator.outcome]

    @staticmethod
    def estimators_without_groups() -> list[str]:
        """Return the names of the estimators that do not compare within groups, so that a group may be one sample."""
        from async_grpo.algorithm.advantages import ADVANTAGE_ESTIMATORS

        return [name for name, estimator in ADVANTAGE_ESTIMATORS.items() if not estimator.needs_group]

    @property
    def estimator_settings(self) -> dict[str, Any]:
        """Return `--estimator-options` by name.

        Raises:
            ConfigurationError: The estimator has no such option, or a value does not fit it.
        """
        owner = f"--advantage-estimator {self.advantage_estimator}"
        return parse_settings("estimator-options", self.estimator_options, self.estimator.options, owner)

    @property
    def loss_settings(self) -> dict[str, Any]:
        """Return `--loss-options` by name, with `--clip-low` and `--clip-high`.

        Raises:
            ConfigurationError: The loss has no such option, or a value does not fit it.
        """
        name = self.policy_loss
        defaults = self.loss.options
        options = parse_settings(
            "loss-options", self.loss_options, defaults, f"the loss {name} (--loss-options)"
        )
        for clip in ("clip_low", "clip_high"):
            value = getattr(self, clip)
            if value is None:
                continue
            refuse(clip not in defaults, f"the loss {name} does not clip: leave --{dashed(clip)} out")
            refuse(clip in options, f"{clip} is given twice: as a flag, and in --loss-options")
            options[clip] = value
        self.loss.check_options(**options)
        return options

    @property
    def needs_proximal(self) -> bool:
        """Return whether the loss needs log-probs of the proximal policy."""
        if self.old_policy == "proximal":
            return True
        if is_file(self.policy_loss):
            return self.loss.needs_proximal
        return self.policy_loss in PROXIMAL_LOSSES

    @property
    def truncation(self) -> Truncation | None:
        """Return the rule that restricts sampling to probable tokens; None if tokens are sampled among all tokens."""
        rule = Truncation(top_p=self.top_p, top_k=max(0, self.top_k), min_p=self.min_p)
        return None if rule == Truncation() else rule

    @property
    def uses_ratio_beside_loss(self) -> bool:
        """Return whether a term of the loss other than the policy loss contains the policy ratio."""
        return self.unbiased_kl or self.log_ratio_coef > 0

    @property
    def loss_kl_coef(self) -> float:
        """Return the weight of the KL penalty in the loss."""
        return 0.0 if self.kl_in_reward else self.kl_coef

    @property
    def moves_reference(self) -> bool:
        """Return whether the reference policy changes during the run."""
        return self.ref_update_steps > 0

    @property
    def reward_kl_coef(self) -> float:
        """Return the weight of the KL penalty that is subtracted from the reward."""
        return self.kl_coef if self.kl_in_reward else 0.0
