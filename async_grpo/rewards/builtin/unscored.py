"""The reward of runs without a reward, in which only a teacher trains the policy."""

from typing import Any


def unscored(sample: dict[str, Any]) -> dict[str, Any]:
    """Give no reward to any sample. Only `--advantage-estimator teacher` trains on samples without a reward."""
    return {"abstain": "the run has no reward"}
