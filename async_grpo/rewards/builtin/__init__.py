"""The shipped rewards, one file each; every `score(sample, ...)` returns `reward`, or steps, and its components.

Malformed model output is worth 0. A row that cannot be scored (no gold answer, no numbers) raises ValueError:
the sample then counts as failed, because a zero would teach the policy something that is not known to be true.
"""
