"""The rewards that ship with the package.

Each function `score(sample, ...)` returns a dict with the `reward`, or with the rewards of steps, and their components.

A malformed completion gets the reward 0. A row that cannot be scored, for example because it has no gold answer, raises
ValueError. Its samples count as failed and get no reward, because a reward of 0 would teach the policy that they are
wrong.
"""
