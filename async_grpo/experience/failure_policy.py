"""What becomes of samples whose reward could not be had. Whatever it is, it is never a silent zero."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from async_grpo.experience.groups import mean_reward, num_scored
from async_grpo.types import Group, RewardStatus, Sample, Verdict

LOST = (RewardStatus.FAILED, RewardStatus.TIMED_OUT)


@dataclass(frozen=True)
class FailurePolicy:
    """By the adapter that failed; one that is named nowhere masks its sample (a constant is the combination's matter).

    Args:
        policies: by adapter. `group_mean`: a failure of it gives the sample the mean reward of its group; it stays in the
            loss, and moves the baseline nowhere. `refill`: a failure drops the whole group, and another prompt takes its
            place.
        min_valid: samples with a reward that a group must have, or it is left out of the loss (and refilled, if one of
            its failures asks for it).
    """

    policies: Mapping[str, str] = field(default_factory=dict)
    min_valid: int = 2

    def wants_refill(self, group: Group) -> bool:
        """Whether the group should be dropped for another one."""
        verdicts = [sample.verdict for sample in group.samples]
        if group.baseline is not None:
            verdicts.append(group.baseline)
        return any(
            self.policies.get(culprit) == "refill" for verdict in verdicts for culprit in culprits(verdict)
        )

    def apply(self, group: Group) -> Group:
        """The group with the mean reward where the policy gives it."""
        mean = mean_reward(group)
        if mean is None or num_scored(group) < self.min_valid:
            return group
        return replace(group, samples=tuple(self._filled(sample, mean) for sample in group.samples))

    def _filled(self, sample: Sample, mean: float) -> Sample:
        blamed = {self.policies.get(culprit) for culprit in culprits(sample.verdict)}
        if blamed != {"group_mean"} or sample.verdict.status not in LOST:
            return sample
        return replace(sample, verdict=Verdict(RewardStatus.OK, mean, sample.verdict.results, filled=True))


def culprits(verdict: Verdict) -> Iterator[str]:
    """The adapters that failed."""
    return (result.adapter for result in verdict.results if result.status in LOST)
