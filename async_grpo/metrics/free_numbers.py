"""`FreeNumbers`: bounds for numbers that agents, environments and rewards name as they like, before they become metrics.

Each name becomes a column of the metrics file and a gauge of the trackers for the rest of the run. Names that change with
each sample would fill the memory, and a huge number would make the mean infinite.
"""

import logging
import re
from collections.abc import Mapping

MAX_EXTRA = 1e38  # absolute value of a number; the squares in its standard deviation still fit a float
# Names that one source may use in a run. Each source has its own, so that agents do not use up those of rewards
MAX_NUMBER_NAMES = 500
NUMBER_NAME = r"[\w./-]{1,100}"
_NAME = re.compile(NUMBER_NAME)
MAX_LOGGED_CHARACTERS = 200  # of a name

log = logging.getLogger(__name__)


class FreeNumbers:
    """Drops numbers whose name or size metrics cannot take, and warns once for each reason."""

    def __init__(self, max_names: int = MAX_NUMBER_NAMES) -> None:
        self._max_names = max_names
        self._names_of_sources: dict[str, set[str]] = {}
        self._reasons = set[str]()

    def bounded(self, source: str, numbers: Mapping[str, float]) -> dict[str, float]:
        """Return the numbers that are logged.

        Args:
            source: The reward that names the numbers, or `environment`, which also stands for agents.
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
        is_in_range = -MAX_EXTRA <= value <= MAX_EXTRA  # NaN is not
        if not is_in_range:
            return f"numbers from -{MAX_EXTRA:g} to {MAX_EXTRA:g} are allowed"
        names = self._names_of_sources.setdefault(source, set())
        if name not in names:
            if len(names) >= self._max_names:
                return f"{source} has used {self._max_names} names in this run already"
            names.add(name)
        return None
