"""The options of the algorithm: `RunConfig` inherits them. Names are checked where the functions are (`preparation`)."""

import math
from dataclasses import dataclass

from async_grpo.options.fields import dashed, option, refuse
from async_grpo.options.source_file import absolute

OLD_POLICIES = ("behaviour", "proximal", "current")
ZERO_VARIANCE = ("keep", "filter", "resample")
LEVELS = ("none", "token", "sequence")


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """From rewards to a loss. `None` leaves the choice to the function that has the option."""

    recipe: str | None = option(
        None, "Preset of the options below; what you set yourself goes before.", "Algorithm"
    )
    advantage_estimator: str = option(
        "grpo", "How rewards become advantages: a name, or FILE.py:NAME.", "Algorithm"
    )
    estimator_options: str = option("", "Its further options: gamma=0.99,lam=0.95.", "Algorithm")
    policy_loss: str = option(
        "ppo_clip", "How advantages become a loss: a name, or FILE.py:NAME.", "Algorithm"
    )
    loss_options: str = option("", "Its further options: cap=5,cap_mode=clamp.", "Algorithm")
    loss_aggregation: str = option("token_mean", "How token losses become one number.", "Algorithm")
    clip_low: float | None = option(
        None, "The ratio is clipped below 1 - this (default: the loss's own).", "Algorithm"
    )
    clip_high: float | None = option(
        None, "The ratio is clipped above 1 + this (default: the loss's own).", "Algorithm"
    )
    entropy_coef: float = option(0.0, "Weight of an entropy bonus.", "Algorithm")
    kl_coef: float = option(
        0.0, "Weight of the KL to the reference (0: no reference worker is needed).", "Algorithm"
    )
    kl_kind: str = option(
        "k3", "Estimator of that KL: k1, k2, k3 or abs; a + at the end: gradient of k2.", "Algorithm"
    )
    kl_clamp: float | None = option(None, "Hold each token's KL within plus and minus this.", "Algorithm")
    kl_in_reward: bool = option(
        False, "Take the KL off the reward instead of adding it to the loss.", "Algorithm"
    )

    old_policy: str = option(
        "behaviour",
        "What the ratio is taken against: behaviour (the engine), proximal (a logprob worker) or current (ratio 1).",
        "Off-policy correction",
    )
    importance_level: str = option(
        "none",
        "Importance weights current (or proximal) / engine: none, token or sequence.",
        "Off-policy correction",
    )
    importance_mode: str = option("truncate", "truncate (TIS) or mask (IcePop).", "Off-policy correction")
    importance_low: float | None = option(None, "Lowest weight.", "Off-policy correction")
    importance_high: float = option(2.0, "Highest weight.", "Off-policy correction")
    importance_normalize: bool = option(
        False, "Divide the weights by their mean over the step.", "Off-policy correction"
    )
    rejection_statistic: str | None = option(
        None,
        "Leave tokens or sequences out of the loss by this mismatch (sequence_mean_k1, ...).",
        "Off-policy correction",
    )
    rejection_low: float | None = option(None, "Lowest accepted value.", "Off-policy correction")
    rejection_high: float | None = option(None, "Highest accepted value.", "Off-policy correction")
    max_token_staleness: int | None = option(
        None, "Leave tokens of policies older than this out of the loss.", "Off-policy correction"
    )
    float32_head: bool = option(
        False, "Engines compute logits in float32, as the trainer always does.", "Off-policy correction"
    )
    top_p: float = option(
        1.0, "Refused unless 1: engine log-probs would be those of another policy.", "Off-policy correction"
    )
    top_k: int = option(0, "Refused unless 0, for the same reason.", "Off-policy correction")

    mask_truncated: bool = option(True, "Leave truncated completions out of the loss.", "Groups")
    zero_variance: str = option(
        "keep",
        "Groups of equal rewards: keep, filter (out of the loss) or resample (another prompt).",
        "Groups",
    )
    max_resamples: int = option(
        8, "Prompts that may replace one without signal; then its group is taken.", "Groups"
    )
    no_positive_resampling: float | None = option(
        None, "Draw a question no more once a group's mean reward reached this.", "Groups"
    )
    overlong_buffer: float = option(
        0.0, "Share of --max-generation-tokens, at its end, in which length costs reward.", "Groups"
    )
    overlong_penalty: float = option(1.0, "What the longest completion loses.", "Groups")
    truncation_alarm: float = option(0.5, "Warn when more than this share of a step is truncated.", "Groups")

    critic_coef: float = option(0.5, "Weight of the value loss (estimator gae).", "Critic")
    critic_clip: float = option(0.5, "Values are clipped to this distance from the old ones.", "Critic")
    critic_learning_rate: float | None = option(None, "Of the value head (default: the policy's).", "Critic")
    critic_trunk_gradient: bool = option(
        True, "Let the value loss train the policy's trunk as well.", "Critic"
    )

    def __post_init__(self) -> None:
        for name in ("advantage_estimator", "policy_loss"):
            object.__setattr__(self, name, absolute(getattr(self, name)))
        for name, value in vars(self).items():
            refuse(isinstance(value, float) and math.isnan(value), f"--{dashed(name)} is not a number")
        for name, known in (
            ("old_policy", OLD_POLICIES),
            ("zero_variance", ZERO_VARIANCE),
            ("importance_level", LEVELS),
        ):
            refuse(
                getattr(self, name) not in known,
                f"--{dashed(name)} {getattr(self, name)!r} is unknown; known: {', '.join(known)}",
            )
        for name in ("clip_low", "clip_high", "entropy_coef", "kl_coef", "max_token_staleness", "overlong_penalty",
                     "max_resamples", "critic_coef"):  # fmt: skip
            value = getattr(self, name)
            refuse(value is not None and value < 0, f"--{dashed(name)} cannot be negative, and is {value}")
        for name in ("kl_clamp", "critic_clip", "critic_learning_rate"):
            value = getattr(self, name)
            refuse(value is not None and value <= 0, f"--{dashed(name)} must be above 0, not {value}")
        for name in ("overlong_buffer", "truncation_alarm"):
            value = getattr(self, name)
            refuse(not 0 <= value <= 1, f"--{dashed(name)} is a share between 0 and 1, not {value}")
        refuse(
            self.top_p != 1.0 or self.top_k not in (0, -1),
            f"--top-p {self.top_p} --top-k {self.top_k}: the engine would report log-probs of the truncated policy and "
            "the trainer those of the whole one, and their ratio would mean nothing. Sample with --top-p 1 --top-k 0, "
            "and shape the policy by --temperature, or by an entropy or length term",
        )
        refuse(
            self.kl_in_reward and not self.kl_coef,
            "--kl-in-reward without --kl-coef takes nothing off the reward: give --kl-coef, or leave it out",
        )
        idle = {"mode": "truncate", "low": None, "high": 2.0, "normalize": False}
        said = [name for name, default in idle.items() if getattr(self, f"importance_{name}") != default]
        refuse(
            self.importance_level == "none" and bool(said),
            f"--importance-{' --importance-'.join(said)} does nothing without --importance-level token or sequence",
        )
        idle = {"clip": 0.5, "learning_rate": None, "trunk_gradient": True}
        said = [name for name, default in idle.items() if getattr(self, f"critic_{name}") != default]
        refuse(
            self.advantage_estimator != "gae" and bool(said),
            f"--critic-{' --critic-'.join(map(dashed, said))} does nothing without --advantage-estimator gae",
        )
        refuse(
            self.kl_clamp is not None and not self.kl_coef,
            f"--kl-clamp {self.kl_clamp} does nothing without --kl-coef",
        )
        refuse(
            self.zero_variance == "resample" and not self.max_resamples,
            "--zero-variance resample with --max-resamples 0 replaces nothing",
        )
        refuse(
            self.clip_low is not None and self.clip_low > 1, f"--clip-low {self.clip_low} must be at most 1"
        )
        bounds = (self.rejection_low, self.rejection_high)
        refuse(
            self.rejection_statistic is None and bounds != (None, None),
            f"--rejection-low {bounds[0]} --rejection-high {bounds[1]} reject nothing without --rejection-statistic",
        )

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0
