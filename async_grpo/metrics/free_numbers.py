"""`FreeNumbers`: limits the numbers that agents, environments and rewards report under names that they choose.

Each name becomes a key of the metrics file and a metric of the trackers for the rest of the run. Names that change with
each sample would fill the memory, and a huge number would make the mean infinite.
"""

import logging
import re
from collections.abc import Mapping

# Maximum absolute value of a number. Its square is still finite when a standard deviation is computed
MAX_EXTRA = 1e38
# Maximum number of names that one source may use in a run. Each source has a limit of its own, so that agents cannot
# use up the names that rewards need
MAX_NUMBER_NAMES = 500
# Numbers of trajectories whose names begin with this are counts of requests. Their sum becomes a metric, not their mean
IGNORED_PREFIX = "ignored/"
NUMBER_NAME = r"[\w./-]{1,100}"
_NAME = re.compile(NUMBER_NAME)
MAX_LOGGED_CHARACTERS = 200  # maximum length of a name in a warning

log = logging.getLogger(__name__)


class FreeNumbers:
    """Drops numbers whose name is invalid or whose value is too large, and warns once for each reason."""

    def __init__(self, max_names: int = MAX_NUMBER_NAMES) -> None:
        self._max_names = max_names
        self._names_of_sources: dict[str, set[str]] = {}
        self._reasons = set[str]()

    def bounded(self, source: str, numbers: Mapping[str, float]) -> dict[str, float]:
        """Return the numbers that may become metrics.

        Args:
            source: The reward that reports the numbers, or `environment` for environments and agents.
            numbers: The numbers, by name.
        """
        accepted = {}
        for name, value in numbers.items():
            reason = self._refusal(source, name, value)
            if reason is None:
                accepted[name] = value
            elif reason not in self._reasons:
                self._reasons.add(reason)
                printed_name = ascii(name)[:MAX_LOGGED_CHARACTERS]
                log.warning(
                    "%s: the number %s is not logged: %s; no more warnings of this",
                    source,
                    printed_name,
                    reason,
                )
        return accepted

    def _refusal(self, source: str, name: str, value: float) -> str | None:
        if _NAME.fullmatch(name) is None:
            return "a name has 1 to 100 letters, digits, or any of _ . / -"
        is_in_range = -MAX_EXTRA <= value <= MAX_EXTRA  # False for NaN
        if not is_in_range:
            return f"numbers from -{MAX_EXTRA:g} to {MAX_EXTRA:g} are allowed"
        names = self._names_of_sources.setdefault(source, set())
        if name not in names:
            if len(names) >= self._max_names:
                return f"{source} has used {self._max_names} names in this run already"
            names.add(name)
        return None
