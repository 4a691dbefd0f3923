"""What one endpoint allows its callers: calls at once, calls per minute, tokens per minute (see `rate_limiter`)."""

import math
from dataclasses import dataclass, fields, replace

from async_grpo.errors import ConfigurationError
from async_grpo.rewards.http.meter import WINDOW_S


@dataclass(frozen=True)
class Limits:
    """What one key allows; None is no limit.

    Args:
        concurrency: permits out at the same time.
        requests_per_minute, tokens_per_minute: spread evenly over the minute.
        burst_s: after a lull (or a late timer) so many seconds' worth may start at once, and at least one call.
        slack_s: the longest time that may pass between a permit and the start of its call.

    Raises:
        ConfigurationError: a limit that would let nothing through, or is no number.
    """

    concurrency: int | None = None
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    burst_s: float = 0.05
    slack_s: float = 0.5

    def __post_init__(self) -> None:
        if self.concurrency is not None and (
            self.concurrency != int(self.concurrency) or self.concurrency < 1
        ):
            raise ConfigurationError(
                f"concurrency must be 1 or more, or None for no limit: {self.concurrency}"
            )
        for name in ("requests_per_minute", "tokens_per_minute"):
            rate = getattr(self, name)
            if rate is not None and not 0 < rate < math.inf:
                raise ConfigurationError(f"{name} must be above 0 and finite, or None for no limit: {rate}")
        if not (0 <= self.burst_s < WINDOW_S and 0 <= self.slack_s < WINDOW_S):
            raise ConfigurationError(
                f"burst_s and slack_s must lie in [0, {WINDOW_S:g}) seconds: {self.burst_s}, {self.slack_s}"
            )

    def over(self, others: "Limits") -> "Limits":
        """These, and the others where these say nothing.

        >>> Limits(concurrency=8).over(Limits(concurrency=2, requests_per_minute=60)).requests_per_minute
        60
        """
        said = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(
            others, **{name: value for name, value in said.items() if value != getattr(Limits, name)}
        )
