"""What a call has cost: the tokens that the server counted, and their price."""

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from async_grpo.rewards.adapter.step_rewards import is_finite_number
from async_grpo.rewards.http.endpoint import JudgeError


@dataclass
class Usage:
    """The tokens of one call, over all its requests, as the server counts them."""

    prompt_tokens: float = 0.0
    completion_tokens: float = 0.0
    total_tokens: float = 0.0
    known: bool = True

    def add(self, reply: Mapping[str, Any]) -> None:
        total = total_tokens(reply)
        if total is None:
            self.known = False
            return
        usage = reply["usage"]
        self.total_tokens += total
        self.prompt_tokens += _count(usage.get("prompt_tokens")) or 0.0
        self.completion_tokens += _count(usage.get("completion_tokens")) or 0.0

    def missed(self, prompt_tokens: float, completion_tokens: float) -> None:
        """A request was sent and not answered: it may have taken as much as this."""
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens
        self.total_tokens += prompt_tokens + completion_tokens

    def extras(self, price_per_million_tokens: tuple[float, float] | None) -> dict[str, float]:
        """`judge_tokens` and, with a price for (prompt, completion), `judge_cost`; nothing if a reply left it out."""
        if not self.known:
            return {}
        extras = {"judge_tokens": self.total_tokens}
        if price_per_million_tokens is not None:
            price_in, price_out = price_per_million_tokens
            cost = self.prompt_tokens * price_in + self.completion_tokens * price_out
            extras["judge_cost"] = cost / 1e6
        return extras


def total_tokens(reply: Mapping[str, Any]) -> float | None:
    """`usage.total_tokens` of a reply, None if it is not said.

    >>> total_tokens({"usage": {"total_tokens": 12}}), total_tokens({"usage": None})
    (12.0, None)
    """
    usage = reply.get("usage")
    return _count(usage.get("total_tokens")) if isinstance(usage, dict) else None


def _count(value: Any) -> float | None:
    return float(value) if fits(value) and value >= 0 else None


def with_spending(error: JudgeError, extras: Mapping[str, float]) -> JudgeError:
    """The error with what the call has cost by then as `spent`: a budget must count failed calls, too."""
    error.spent = dict(extras)  # type: ignore[attr-defined]
    return error


def fits(value: Any) -> bool:
    """Whether it is a number of JSON that a float can hold.

    >>> fits(3), fits(True), fits(10**400), fits("3")
    (True, False, False, False)
    """
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and is_finite_number(value)
    except OverflowError:  # JSON's integers have no end
        return False
