"""What stands in for a reward that failed."""

import numpy as np
import pytest

from async_grpo.experience.groups import with_group_mean
from async_grpo.testing import completion
from async_grpo.types import AdapterResult, Group, Prompt, RewardStatus, Sample, Verdict

OK, FAILED = RewardStatus.OK, RewardStatus.FAILED


def group_of(*verdicts: Verdict) -> Group:
    prompt = Prompt(0, np.array([1], np.int32), {})
    return Group(prompt, tuple(Sample(prompt, completion(3), verdict) for verdict in verdicts), 0, 0)


@pytest.mark.parametrize(
    ("culprits", "policies", "filled"),
    [
        ("a", {"a": "group_mean"}, 2.0),
        ("a", {}, None),
        ("ab", {"a": "group_mean", "b": "group_mean"}, 2.0),
        ("ab", {"a": "group_mean"}, None),  # b's failure is to be masked
    ],
)
def test_the_mean_of_the_group_stands_in_only_if_every_failure_asks_for_it(culprits, policies, filled):
    lost = Verdict(FAILED, None, tuple(AdapterResult(name, FAILED) for name in culprits))
    group = group_of(Verdict(OK, 1.0), Verdict(OK, 3.0), lost)
    changed = with_group_mean(group, policies, 2).samples[2].verdict
    assert changed.reward == filled and changed.filled == (filled is not None)
