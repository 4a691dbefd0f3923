"""`RefusalBrake`: slows down a program that only repeats requests that are refused."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

FREE_REFUSALS = 3  # refusals in a row that are answered at once
FIRST_DELAY_S = 0.1  # delay of the next refusal. It doubles with each further one
LONGEST_DELAY_S = 5.0


class RefusalBrake:
    """Counts how many requests of a trajectory were refused in a row, and delays the answers to further refused requests.

    Without the delay, a program that repeats a refused request without a pause would slow down all other trajectories.
    The time limit of the trajectory also ends a delay.
    """

    def __init__(self) -> None:
        self._num_refusals = 0
        self._counted_error: Exception | None = None

    def succeeded(self) -> None:
        """Record that a request was answered."""
        self._num_refusals = 0

    @asynccontextmanager
    async def watching(self, *errors: type[Exception]) -> AsyncIterator[None]:
        """If one of these errors is raised inside, count a refusal and raise the error again, perhaps after a delay.

        An error that passes through several of these contexts is counted once.
        """
        try:
            yield
        except errors as error:
            if error is not self._counted_error:
                self._counted_error = error
                self._num_refusals += 1
                await asyncio.sleep(self._delay_s())
            raise

    def _delay_s(self) -> float:
        num_delayed = self._num_refusals - FREE_REFUSALS
        if num_delayed < 1:
            return 0.0
        # The exponent is limited, because a program may be refused for hours
        return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(num_delayed - 1, 30))
