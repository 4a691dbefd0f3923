"""Several adapters' results on one sample -> one verdict: the best result wins."""

from collections.abc import Sequence

from async_grpo.types import AdapterResult, RewardStatus, Verdict


def combine(results: Sequence[AdapterResult]) -> Verdict:
    """The best reward, unless it is unknown.

    If any adapter failed or timed out, the maximum is unknown: the verdict is that status and the sample is
    masked, not scored (a failure goes before a time-out). Adapters that abstained are left out; if all did,
    so does the verdict.

    Raises:
        ValueError: there is no result at all.

    >>> ok = AdapterResult("mathd", RewardStatus.OK, 0.0)
    >>> combine([ok, AdapterResult("sympy", RewardStatus.OK, 1.0)]).reward
    1.0
    >>> combine([ok, AdapterResult("sympy", RewardStatus.TIMED_OUT)]).status.value
    'timed_out'
    """
    if not results:
        raise ValueError("there is no result to combine: a sample must be scored by at least one adapter")
    statuses = {result.status for result in results}
    for unknown in (RewardStatus.FAILED, RewardStatus.TIMED_OUT):
        if unknown in statuses:
            return Verdict(unknown, None, tuple(results))
    rewards = [
        result.reward for result in results if result.status is RewardStatus.OK and result.reward is not None
    ]
    if not rewards:
        return Verdict(RewardStatus.ABSTAINED, None, tuple(results))
    return Verdict(RewardStatus.OK, max(rewards), tuple(results))
