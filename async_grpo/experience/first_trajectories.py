"""`FirstTrajectories`: ends a run at its first groups if the environment cannot work at all."""

import math
from collections import Counter

from async_grpo.errors import EnvironmentNeverWorked
from async_grpo.types import Completion, Group

# The run ends if all trajectories of its first groups fail: at least FIRST_GROUPS groups, with at least
# FIRST_TRAJECTORIES trajectories together. If a step has fewer groups, the groups of one step are enough
FIRST_GROUPS = 2
FIRST_TRAJECTORIES = 8


class FirstTrajectories:
    """Raises an error if all trajectories of the first admitted groups fail, and no other trajectory has succeeded.

    For example, if an agent's command is mistyped, every trajectory fails. Without this check, the run would go on until
    the end of its first step. "First" refers to the order of admission, not to the order in which groups end: failures
    are often fast, so the first groups to end may be the few with bad rows.

    Args:
        groups_per_step: Number of groups of one step.
        samples_per_question: Number of trajectories of one group.
    """

    def __init__(self, groups_per_step: int, samples_per_question: int) -> None:
        num_groups = max(FIRST_GROUPS, math.ceil(FIRST_TRAJECTORIES / samples_per_question))
        self._num_needed = min(num_groups, groups_per_step)
        self._has_succeeded = False
        self._failures_by_group: dict[int, list[str]] = {}

    def ended(self, completion: Completion) -> None:
        """Record that a trajectory has ended. If it has no failure, the environment works."""
        if not completion.failure:
            self._has_succeeded = True
            self._failures_by_group.clear()

    def check(self, group: Group) -> None:
        """Record that a group is complete.

        Raises:
            EnvironmentNeverWorked: All trajectories of the first groups have failed, and no other has succeeded.
        """
        if self._has_succeeded or group.sequence_number >= self._num_needed:
            return
        failures = [sample.completion.failure for sample in group.samples]
        self._failures_by_group.setdefault(group.sequence_number, failures)
        if len(self._failures_by_group) < self._num_needed:
            return
        all_failures = [failure for failures in self._failures_by_group.values() for failure in failures]
        counts = Counter(failure.partition(":")[0] for failure in all_failures)
        kinds = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
        raise EnvironmentNeverWorked(
            f"all {len(all_failures)} trajectories of the first {self._num_needed} groups failed ({kinds}), and no other "
            "has succeeded. `async-grpo try-environment`, with the run's --environment and its options, plays one "
            f"trajectory and shows each turn. The first reason: {_with_last_line_first(all_failures[0])}"
        )


def _with_last_line_first(reason: str) -> str:
    r"""Return a reason whose first line also contains its last line.

    The console shows only the first line of an error, but the last line of a traceback says what happened.

    >>> print(_with_last_line_first("AgentFailed: it said: Traceback:\n  line 3\nKeyError: 'a'"))
    AgentFailed: it said: Traceback: ... KeyError: 'a'
    AgentFailed: it said: Traceback:
      line 3
    KeyError: 'a'
    """
    lines = reason.strip().splitlines()
    if len(lines) < 2:
        return reason
    return f"{lines[0]} ... {lines[-1].strip()}\n{reason}"
