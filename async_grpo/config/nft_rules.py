"""Rules for the options of DiffusionNFT (`--flow-loss diffusion_nft`); see `compatibility`."""

from async_grpo.config.rules import BrokenRules, changed_options, idle
from async_grpo.config.run_options import RunOptions
from async_grpo.options.fields import dashed

NFT_OPTIONS = "nft_beta nft_times nft_clip nft_weighting nft_old_decay nft_old_decay_growth"
# Options of stochastic steps, of their log-probs and ratios, and of a KL penalty on them
NOT_WITH_NFT = """
    temperature flow_window flow_window_order flow_window_every kl_coef policy_loss old_policy clip_low clip_high
    importance_level rejection_statistic off_policy_mask_threshold log_ratio_coef passes_max_kl
""".split()


def broken_nft(c: RunOptions) -> BrokenRules:
    """Find options of DiffusionNFT in a run that does not use it, and options without meaning in a run that does."""
    if not c.trains_by_nft:
        yield from idle(c, NFT_OPTIONS, "without --flow-loss diffusion_nft: leave it out")
        return
    for name in changed_options(c, NOT_WITH_NFT):
        yield (
            f"flow_loss {name}",
            f"do not go together: DiffusionNFT draws without noise and has no log-probs. Leave --{dashed(name)} out",
        )
