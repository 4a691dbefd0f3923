"""What is worth another attempt, and when."""

import math
import random
import time
from datetime import UTC
from email.utils import parsedate_to_datetime

COME_LATER = (425, 429)  # 425 Too Early (RFC 8470), 429 Too Many Requests (RFC 6585)


def outcome_of(status: int) -> str:
    """The kind of reply: `ok`, `429`, `5xx`, `timeout` (all three worth a retry), `bad_reply` or `refused`.

    >>> [outcome_of(status) for status in (200, 429, 425, 503, 408, 204, 302, 404)]
    ['ok', '429', '429', '5xx', 'timeout', 'bad_reply', 'refused', 'refused']
    """
    if status == 200:
        return "ok"
    if status in COME_LATER:
        return "429"
    if status >= 500:
        return "5xx"
    if status == 408:
        return "timeout"
    return "bad_reply" if status < 300 else "refused"


def retry_after_s(value: str | None, now: float | None = None) -> float:
    """Seconds that a `Retry-After` header asks for (RFC 9110, 10.2.3): a number or a date; 0 if it says nothing.

    Args:
        value: the header, None if there was none.
        now: Unix time; of this moment if None.

    >>> retry_after_s("120"), retry_after_s("Thu, 01 Jan 1970 00:01:40 GMT", now=70.0), retry_after_s("soon")
    (120.0, 30.0, 0.0)
    """
    if not value:
        return 0.0
    try:
        seconds = float(value)
    except ValueError:
        seconds = _seconds_until(value, time.time() if now is None else now)
    return max(seconds, 0.0) if not math.isnan(seconds) else 0.0


def _seconds_until(date: str, now: float) -> float:
    try:
        moment = parsedate_to_datetime(date)
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return moment.timestamp() - now
    except (ValueError, TypeError, OverflowError, IndexError):  # a server may send anything
        return 0.0


def backoff_delay(failures: int, backoff_s: float, backoff_max_s: float, draw: random.Random) -> float:
    """Seconds to wait after so many failures: exponential, with full jitter.

    Callers that failed together must not come back together (Brooker, "Exponential Backoff and Jitter", 2015).
    """
    exponent = min(failures - 1, 60)  # 2.0 ** 1100 would overflow
    return draw.uniform(0.0, min(backoff_max_s, backoff_s * 2.0**exponent))
