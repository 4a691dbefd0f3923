"""What somebody should look at, in words: numbers that go wrong without an error."""

from collections.abc import Sequence

from async_grpo.types import Group


def step_alarms(groups: Sequence[Group], truncation_limit: float) -> list[str]:
    """The alarms of one step; usually none.

    Args:
        truncation_limit: the share of truncated completions above which there is one.
    """
    samples = [sample for group in groups for sample in group.samples]
    truncated = sum(sample.completion.truncated for sample in samples) / len(samples)
    if truncated > truncation_limit:
        return [f"{truncated:.0%} of the completions were truncated (--max-generation-tokens is too short?)"]
    return []
