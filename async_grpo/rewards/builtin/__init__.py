"""The shipped rewards, one file each; every `score(sample, ...)` returns `reward`, or steps, and its components.

Malformed model output is worth 0. A row that cannot be scored (no gold answer, no numbers) raises ValueError:
the sample then counts as failed, because a zero would teach the policy something that is not known to be true.
"""

from async_grpo.rewards.adapter.decorators import process_reward, warmed_by

__all__ = ["process_reward", "warmed_by"]  # registry files may import them from here, their earlier home
