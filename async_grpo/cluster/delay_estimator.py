"""`DelayEstimator`: how late a message is, between machines whose clocks need not agree."""

import math

DRIFT = 1e-4  # seconds per second by which two clocks may part


class DelayEstimator:
    """How much longer messages of one sender take than the quickest of them did. Moments are seconds.

    >>> travels = DelayEstimator()
    >>> [round(travels.extra_delay_s(sent, arrived), 3) for sent, arrived in ((1000.0, 5.2), (1001.0, 6.1), (1002.0, 7.9))]
    [0.0, 0.0, 0.8]
    """

    def __init__(self) -> None:
        self._quickest = math.inf  # our clock at the arrival less the sender's clock at the departure
        self._measured_at = 0.0

    def extra_delay_s(self, sent_at: float, arrived_at: float) -> float:
        """Seconds by which this message, sent then by the sender's clock, took longer than the quickest before it."""
        quickest = self._quickest + DRIFT * (arrived_at - self._measured_at)
        self._quickest, self._measured_at = min(arrived_at - sent_at, quickest), arrived_at
        return arrived_at - sent_at - self._quickest
