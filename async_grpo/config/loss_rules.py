"""Rules for the options of single terms of the loss: the unbiased KL, the squared log-ratio, and observations."""

from async_grpo.config.rules import BrokenRules
from async_grpo.config.run_options import RunOptions


def broken_loss_terms(c: RunOptions) -> BrokenRules:
    """Find terms of the loss that would be wrong or always 0."""
    if c.observation_coef and c.truncation is not None:
        yield (
            "observation_coef top_p top_k min_p",
            "do not go together: an environment does not write by the rules of sampling, so the cross-entropy would be of "
            "another distribution",
        )
    if c.unbiased_kl and c.kl_in_reward:
        yield (
            "unbiased_kl kl_in_reward",
            "do not go together: the reward takes the KL of the engine's own log-probs, which needs no correction",
        )
    if c.unbiased_kl and c.kl_kind not in ("k1", "k3"):
        yield (
            "unbiased_kl kl_kind",
            "do not go together: the ratio corrects an estimate whose value is exact on policy: use k1 or k3",
        )
    if c.log_ratio_coef and c.old_policy == "current" and c.passes_per_batch == 1:
        yield (
            "log_ratio_coef old_policy",
            "do not go together: the log-ratio of the policy to itself is 0: use --old-policy behaviour or proximal",
        )
