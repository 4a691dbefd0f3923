"""Limits of remote judges, in virtual time: every sliding window, order, lanes, cancellation, reconciliation."""

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.errors import ConfigurationError
from async_grpo.rewards.http.endpoint import Limits
from async_grpo.rewards.http.rate_limiter import CATCH_UP_FACTOR, CATCH_UP_S, Limiter, Meter


class VirtualLoop(asyncio.SelectorEventLoop):
    """Waits take no time: where a real loop would sleep in its selector, the clock jumps."""

    def __init__(self) -> None:
        super().__init__(_JumpingSelector(self))
        self.now = 0.0

    def time(self) -> float:
        return self.now


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list:
        if timeout is None:
            raise AssertionError("everything waits, and for nothing that is going to happen")
        self._loop.now += max(timeout, 0.0)
        return super().select(0)


def virtually(scenario: Callable[[], Awaitable[Any]]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(scenario())


def now() -> float:
    return asyncio.get_running_loop().time()


class Callers:
    """Calls of one key, and what became of them: `starts` of (moment, tokens, name)."""

    def __init__(self, limits: Limits, limiter: Limiter | None = None) -> None:
        self.limits, self.limiter = limits, limiter or Limiter()
        self.starts: list[tuple[float, float, Any]] = []
        self.running = self.most_running = 0

    async def call(self, name=None, *, at=0.0, tokens=0.0, used=None, lasts=0.0, phase="train") -> None:
        await asyncio.sleep(at)
        permit = await self.limiter.acquire("judge", self.limits, tokens=tokens, phase=phase)
        self.starts.append((now(), tokens if used is None else used, name))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(lasts)
        finally:
            self.running -= 1
            await self.limiter.release("judge", permit, used_tokens=used)

    async def calls(self, *calls: dict) -> "Callers":
        await asyncio.gather(*(self.call(**call) for call in calls))
        return self

    @property
    def moments(self) -> list[float]:
        return [at for at, _, _ in self.starts]


def worst_window(starts: list[tuple[float, float]], width_s: float) -> float:
    """The largest sum of costs in [t, t + width_s), by brute force over every t that can matter."""
    return max(sum(cost for at, cost in starts if t <= at < t + width_s) for t, _ in starts)


# Rates


@settings(max_examples=40, deadline=None)
@given(
    per_minute=st.sampled_from([3, 7, 30, 61.5, 240]),
    burst_s=st.sampled_from([0.0, 0.1, 5.0]),
    slack_s=st.sampled_from([0.0, 0.4]),
    gaps=st.lists(st.sampled_from([0.0, 0.0, 0.0, 0.01, 0.7, 20.0, 65.0]), min_size=1, max_size=80),
    lasts=st.sampled_from([0.0, 0.3, 30.0]),
    concurrency=st.sampled_from([1, 5]),
)
def test_no_window_of_a_minute_holds_more_calls_than_the_limit(
    per_minute, burst_s, slack_s, gaps, lasts, concurrency
):
    slots = concurrency if lasts else None
    limits = Limits(slots, requests_per_minute=per_minute, burst_s=burst_s, slack_s=slack_s)
    arrivals = [sum(gaps[: i + 1]) for i in range(len(gaps))]
    callers = virtually(lambda: Callers(limits).calls(*(dict(at=at, lasts=lasts) for at in arrivals)))
    starts = [(at, 1.0) for at in callers.moments]
    assert len(starts) == len(gaps)
    assert worst_window(starts, 60.0 + slack_s - 1e-6) <= max(per_minute, 1)
    for width_s in (1e-3, 0.5, 3.0, 17.0):
        haste = CATCH_UP_FACTOR if lasts else 1.0  # no slots: no time is lost
        rate = per_minute / (60.0 + slack_s) * haste
        assert worst_window(starts, width_s) <= rate * (width_s + burst_s) + 1 + 1e-6


@settings(max_examples=40, deadline=None)
@given(
    per_minute=st.sampled_from([100, 1000, 1234.5]),
    calls=st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.0, 0.2, 9.0]),
            st.sampled_from([0.0, 1.0, 20.0, 99.0, 400.0]),
            st.floats(0, 1),
        ),
        min_size=1,
        max_size=50,
    ),
)
def test_no_window_of_a_minute_holds_more_tokens_than_the_limit(per_minute, calls):
    """Estimates are at least what is used, as `max_tokens` is; a call above the limit is alone in its minute."""
    limits = Limits(tokens_per_minute=per_minute, burst_s=0.5)
    arrivals = [sum(gap for gap, _, _ in calls[: i + 1]) for i in range(len(calls))]
    plan = [
        dict(at=at, tokens=tokens, used=tokens * share, lasts=share)
        for at, (_, tokens, share) in zip(arrivals, calls, strict=True)
    ]
    callers = virtually(lambda: Callers(limits).calls(*plan))
    starts = [(at, used) for at, used, _ in callers.starts]
    assert worst_window(starts, 60.0) <= max(per_minute, max(tokens for _, tokens, _ in calls)) + 1e-6


def test_a_saturated_key_gets_its_limit_but_for_the_slack():
    """1200 per minute is 20 per second; 200 s of it, less 0.5 s in 60.5: 3966.9, and the first one or two at once."""
    callers = virtually(lambda: Callers(Limits(requests_per_minute=1200)).calls(*[{}] * 5_000))
    assert 3_966 <= sum(at < 200 for at in callers.moments) <= 3_969


def test_what_a_late_timer_loses_is_caught_up_at_little_more_than_the_rate():
    """600 per minute, always someone waiting, and a limiter that stalls for 2 s after 10 s: 20 calls to catch up.

    At 1.1 times 10 per second that takes 20 s. No minute holds more than 600, and no second more than 11 (and 2).
    """
    meter, now, starts = Meter(), 0.0, []
    meter.set(600, burst_s=0.05, slack_s=0)
    while now < 200:
        now = max(now, meter.may_start(1.0, now))
        if 10 <= now < 12:
            now = 12.0
        meter.start(1.0, now, since=0.0)
        starts.append(now)
    costs = [(at, 1.0) for at in starts]
    assert worst_window(costs[:400], 1.0) <= 1.1 * 10 * 1.05 + 1
    assert worst_window(costs, 60.0) <= 600
    counts = [sum(at < moment for at in starts) for moment in (11.9, 22, 34)]
    assert counts == [pytest.approx(expected, abs=2) for expected in (100, 100 + 110, 340)]
    assert sum(at < 180 for at in starts) >= 1799


EXACT = {  # limits, calls, and when they start
    # 60 calls per minute but 600 tokens: of calls of 60 tokens 10 start per minute, 6.05 s apart with the slack
    "the scarcer one of requests and tokens rules": (
        dict(requests_per_minute=60, tokens_per_minute=600, slack_s=0.5), [dict(tokens=60)] * 4, [0, 6.05, 12.1, 18.15]
    ),
    # 10 per second: 300 tokens start at once on an idle key; the next 30 s later, less the burst
    "a call larger than a burst waits its turn and no longer, and what follows waits for it": (
        dict(tokens_per_minute=600, burst_s=0.1), [dict(tokens=n) for n in (300, 10, 10)], [0.0, 29.9, 30.9]
    ),
    # 250 tokens take 150 s at 100 per minute; the minute that they waited for is caught up as far as any lost time is
    "a call larger than the limit starts alone": (
        dict(tokens_per_minute=100), [dict(tokens=n) for n in (10, 250, 10)], [0.0, 60.0, 210.0 - CATCH_UP_S]
    ),
    # after an idle minute 4 of 10 start at once: one now, three from the burst
    "a lull saves up no more than the burst": (
        dict(requests_per_minute=60, burst_s=3), [{}, *[dict(at=120)] * 10], [0, *[120] * 4, 121, 122, 123, 124, 125, 126]
    ),
    "tokens that were not used may be used at once": (
        dict(concurrency=1, tokens_per_minute=600), [dict(tokens=100, used=10, lasts=0.25)] * 6, [0, 1, 2, 3, 4, 5]
    ),
    # 300 are used by the end of the first second: 30 s of debt from there
    "tokens that were not foreseen are waited for": (
        dict(concurrency=1, tokens_per_minute=600), [dict(used=300, lasts=1.0), dict(tokens=5)], [0.0, 31.0]
    ),
    "without a word on its use a call cost its estimate": (
        dict(concurrency=1, tokens_per_minute=600), [dict(tokens=100)] * 3, [0, 10, 20]
    ),
    "small calls do not overtake a large one": (
        dict(tokens_per_minute=600), [dict(tokens=n) for n in (500, 1, 1)], [0, 50, 50.1]
    ),
    "without limits nothing waits": ({}, [dict(tokens=1e9, lasts=1.0)] * 100, [0] * 100),
}  # fmt: skip


@pytest.mark.parametrize("kind", EXACT)
def test_calls_start_when_the_arithmetic_says(kind):
    limits, plan, moments = EXACT[kind]
    callers = virtually(lambda: Callers(Limits(**{"burst_s": 0, "slack_s": 0, **limits})).calls(*plan))
    assert callers.moments == pytest.approx(moments)


# Slots and order


@settings(max_examples=40, deadline=None)
@given(
    concurrency=st.integers(1, 5),
    calls=st.lists(
        st.tuples(st.integers(0, 300).map(lambda n: n / 100), st.floats(0, 2)),
        min_size=1,
        max_size=40,
        unique_by=lambda call: call[0],  # of calls that come in the same moment, any may be the first
    ),
)
def test_never_more_calls_at_once_than_slots_and_never_an_idle_slot_with_a_queue(concurrency, calls):
    callers = virtually(
        lambda: Callers(Limits(concurrency=concurrency)).calls(*(dict(at=at, lasts=s) for at, s in calls))
    )
    assert callers.most_running <= concurrency
    expected = []  # a queue in plain Python: each call starts when it has come and the earliest slot is free
    free = [0.0] * concurrency
    for at, lasts in sorted(calls, key=lambda call: call[0]):
        slot = min(range(concurrency), key=free.__getitem__)
        expected.append(max(at, free[slot]))
        free[slot] = expected[-1] + lasts
    assert sorted(callers.moments) == pytest.approx(sorted(expected), abs=1e-6)


def test_lanes_take_turns_whatever_their_backlogs():
    async def scenario() -> Callers:
        callers = Callers(Limits(requests_per_minute=60, burst_s=0, slack_s=0))
        train = [dict(name="t", phase="train")] * 100
        return await callers.calls(*train, *[dict(name="e", at=10.5, phase="eval")] * 5)

    names = [name for _, _, name in virtually(scenario).starts]
    assert names[:11] == ["t"] * 11
    assert names[11:21] == ["t", "e"] * 5  # 100 calls wait before the first "e", and it is the next but one
    assert names[21:] == ["t"] * 84


# Cancellation and misuse


@pytest.mark.parametrize("release_first", [True, False])
def test_a_permit_given_and_cancelled_in_the_same_moment_is_not_lost(release_first):
    async def scenario() -> None:
        callers = Callers(Limits(concurrency=1, requests_per_minute=1200, tokens_per_minute=600, burst_s=0))
        limiter, limits = callers.limiter, callers.limits
        first = await limiter.acquire("judge", limits)
        await asyncio.sleep(1)
        wait = asyncio.ensure_future(limiter.acquire("judge", limits, tokens=500))
        await asyncio.sleep(0)
        if release_first:  # the permit is the waiting task's, which is cancelled before it runs
            await limiter.release("judge", first)
            wait.cancel()
        else:  # its future is cancelled already, but the task has not yet said so
            wait.cancel()
            await limiter.release("judge", first)
        with pytest.raises(asyncio.CancelledError):
            await wait
        stats = limiter.stats()["judge"]
        assert stats["in_flight"] == 0 and stats["waiting"] == {}
        await limiter.acquire("judge", limits, tokens=500)  # the 500 tokens of the other were given back
        assert now() < 1.1  # but its request counts: at 20 per second it takes 0.05 s

    virtually(scenario)


@settings(max_examples=40, deadline=None)
@given(
    calls=st.lists(
        st.tuples(
            st.floats(0, 5), st.floats(0.01, 5), st.sampled_from(["train", "eval"]), st.integers(0, 30)
        ),
        min_size=1,
        max_size=40,
    )
)
def test_whatever_is_cancelled_whenever_every_slot_comes_back(calls):
    async def scenario() -> None:
        limits = Limits(concurrency=2, requests_per_minute=120, tokens_per_minute=1200)
        callers = Callers(limits)

        async def impatient(at: float, patience_s: float, phase: str, tokens: int) -> None:
            await asyncio.sleep(at)
            try:
                async with asyncio.timeout(patience_s):
                    await callers.call(tokens=tokens, lasts=0.5, phase=phase)
            except TimeoutError:
                pass

        await asyncio.gather(*(impatient(*call) for call in calls))
        assert callers.limiter.stats()["judge"]["in_flight"] == 0
        assert callers.limiter.stats()["judge"]["waiting"] == {}
        assert callers.limiter.stats()["judge"]["granted"] >= len(callers.starts)
        assert callers.most_running <= 2
        for _ in range(2):
            await callers.limiter.acquire("judge", limits)

    virtually(scenario)


def test_keys_have_limits_of_their_own_and_permits_are_released_once():
    async def scenario() -> None:
        limiter, limits = Limiter(), Limits(concurrency=1)
        permit = await limiter.acquire("judge", limits)
        await limiter.acquire("other", limits)
        with pytest.raises(ConfigurationError, match=r"concurrency=1.*concurrency=2"):
            await limiter.acquire("judge", Limits(concurrency=2))
        await limiter.release("judge", permit)
        for key, number in (("judge", permit), ("nobody", 7)):
            with pytest.raises(ValueError, match=f"permit {number} of '{key}' is not out"):
                await limiter.release(key, number)
        for _ in range(2):
            await limiter.acquire("judge", Limits(concurrency=2))
        assert now() == 0.0
        # What another limiter let through is not known: 6 per minute are 10 s apart, also across the change
        callers = Callers(Limits(requests_per_minute=6, slack_s=0), Limiter(resumed=True))
        assert (await callers.calls({}, {})).moments == pytest.approx([10.0, 20.0])

    virtually(scenario)


NAN = float("nan")
WRONG = [dict(concurrency=0), dict(concurrency=1.5), dict(requests_per_minute=0), dict(requests_per_minute=NAN),
         dict(tokens_per_minute=float("inf")), dict(burst_s=-1), dict(slack_s=NAN)]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_limits_that_cannot_work_are_refused(wrong):
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        Limits(**wrong)


@pytest.mark.parametrize("tokens", [-1.0, NAN, float("inf")])
async def test_a_senseless_number_of_tokens_is_refused(tokens):
    limiter = Limiter()
    with pytest.raises(ValueError, match="judge"):
        await limiter.acquire("judge", Limits(), tokens=tokens)
    permit = await limiter.acquire("judge", Limits())
    with pytest.raises(ValueError, match=f"permit {permit}"):
        await limiter.release("judge", permit, used_tokens=tokens)
