"""`Occupancy`: for how long the engines held work, and for how long the staleness budget would have let them."""

import time
from collections.abc import Callable


class Occupancy:
    """Integrates over time; call `set` at every change.

    - busy: at least one admitted sequence is unfinished
    - allowed: busy, or the budget has a free slot (so that the engines could hold work)

    >>> clock = iter([0.0, 1.0, 4.0, 6.0])
    >>> occupancy = Occupancy(lambda: next(clock))
    >>> occupancy.set(sequences=8, free_slots=0)    # at 1: idle until here, with a free slot
    >>> occupancy.set(sequences=0, free_slots=0)    # at 4: busy for 3 s
    >>> occupancy.take()                            # at 6: idle for 2 s, no slot free
    {'engine_busy_s': 3.0, 'engine_allowed_s': 4.0, 'wait_generation_budget_s': 2.0}
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._since = clock, clock()
        self._sequences, self._free_slots = 0, 1
        self._busy = self._allowed = self._barred = 0.0

    def set(self, *, sequences: int, free_slots: int) -> None:
        """The state from now on."""
        self._integrate()
        self._sequences, self._free_slots = sequences, free_slots

    def take(self) -> dict[str, float]:
        """Seconds since the last call."""
        self._integrate()
        taken = {
            "engine_busy_s": self._busy,
            "engine_allowed_s": self._allowed,
            "wait_generation_budget_s": self._barred,
        }
        self._busy = self._allowed = self._barred = 0.0
        return taken

    def _integrate(self) -> None:
        now = self._clock()
        elapsed, self._since = now - self._since, now
        if self._sequences:
            self._busy += elapsed
        if self._sequences or self._free_slots:
            self._allowed += elapsed
        else:
            self._barred += elapsed
