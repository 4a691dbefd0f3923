"""The rewards that the package contains, one file each.

Every `score(sample, ...)` returns `reward`, or the rewards of steps, with its components.

Malformed output of the model is worth 0. A row that cannot be scored (no gold answer, no numbers) raises ValueError: its
samples then count as failed, because a zero would teach the policy something that is not known to be true.
"""
