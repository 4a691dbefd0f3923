"""The client of remote judges against servers that go wrong in every way: no hang, bounded memory, exact counts."""

import asyncio
import contextlib
import gc
import gzip
import json
import logging
import pickle
import random
import time
import traceback
import tracemalloc

import hostile_server as hostile
import pytest
from aiohttp.client_proto import ResponseHandler
from hostile_server import HostileServer, reply, status, until

from async_grpo.errors import AsyncGrpoError, ConfigurationError
from async_grpo.rewards.http.endpoint import (
    BadReply,
    Deadline,
    Endpoint,
    JudgeError,
    JudgeRefused,
    JudgeTimeout,
    JudgeUnavailable,
    Limits,
)
from async_grpo.rewards.http.exchange import retry_after_s
from async_grpo.rewards.http.http_client import ENOUGH, EndpointClient
from async_grpo.rewards.http.rate_limiter import Limiter
from async_grpo.rewards.http.replicas import Replicas

GRACE_S = 1.0  # how much later than its deadline a call may end, on a busy machine
GOOD = reply({"score": 0.5})
GZIPPED_CHUNKS = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")


class Book:
    """`RateLimiter` that lets everything through and writes down what it was asked."""

    def __init__(self) -> None:
        self.acquired: list[tuple] = []
        self.released: list[tuple] = []

    async def acquire(self, key, limits, *, tokens=0.0, phase="train") -> int:
        self.acquired.append((key, tokens, phase))
        return len(self.acquired)

    async def release(self, key, permit, *, used_tokens=None) -> None:
        self.released.append((permit, used_tokens))

    @property
    def out(self) -> int:
        return len(self.acquired) - len(self.released)


@contextlib.asynccontextmanager
async def client_of(*urls: str, rate_limiter=None, **settings):
    settings = {"backoff_s": 0.01, "timeout_s": 2.0, **settings}
    client = EndpointClient("judge", Endpoint(urls=urls, **settings), rate_limiter or Book())
    try:
        yield client
    finally:
        await client.close()


@contextlib.asynccontextmanager
async def asking(*behaviours, **settings):
    async with HostileServer(*behaviours) as server, client_of(server.url, **settings) as client:
        yield server, client


@contextlib.asynccontextmanager
async def asking_two(one: list, other: list, **settings):
    async with (
        asking(*one) as (first, _),
        asking(*other) as (second, _),
        client_of(first.url, second.url, **settings) as client,
    ):
        yield first, second, client


@contextlib.contextmanager
def lasting(at_most_s: float, at_least_s: float = 0.0):
    started = time.monotonic()
    yield
    assert at_least_s <= time.monotonic() - started < at_most_s


async def ask(client: EndpointClient, patience_s: float = 5.0, payload=None, **options):
    return await client.post("/judge", payload or {"n": 1}, deadline=time.monotonic() + patience_s, **options)


def counted(client: EndpointClient) -> dict[str, int]:
    return {kind: count for kind, count in client.stats()["outcomes"].items() if count}


# A good judge


async def test_a_good_reply_is_returned_and_the_request_is_what_a_judge_expects(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    async with asking(GOOD) as (server, _), client_of(server.url + "/v1/", api_key_env="JUDGE_KEY") as client:
        assert await ask(client, payload={"text": "héllo"}) == {"score": 0.5}
        request = server.requests[0]
        assert (request.path, request.json) == ("/v1/judge", {"text": "héllo"})
        assert request.headers["authorization"] == "Bearer sk-secret"
        assert request.headers["content-type"] == "application/json"
        stats = client.stats()
        assert counted(client) == {"ok": 1} and stats["requests"] == 1 and stats["in_flight"] == 0


async def test_compressed_replies_are_read_connections_are_used_again_and_cookies_are_not_kept():
    compressed = hostile.gzipped({"score": 2}, set_cookie="track=1; Path=/")
    async with asking(compressed) as (server, client):
        for _ in range(5):
            assert await ask(client) == {"score": 2}
        assert server.connections == 1 and "cookie" not in server.requests[-1].headers


def sized(length: str) -> hostile.Behaviour:
    """12 bytes under a wrong `Content-Length`."""
    return hostile.raw(hostile.message(200, b'{"score": 1}', content_length=length), then_close=True)


# Every way to go wrong. After one request of these a good reply follows, so that a retry would succeed.

RETRIED = {
    "429": (status(429), "429"),
    "425": (status(425), "429"),
    "408": (status(408), "timeout"),
    "500": (status(500), "5xx"),
    "503 with a date": (status(503, retry_after="Thu, 01 Jan 1970 00:00:00 GMT"), "5xx"),
    "a silent end": (hostile.close(), "connection"),
    "a reset": (hostile.reset(), "connection"),
    "another protocol": (hostile.garbage(), "connection"),
    "silence": (hostile.silence(), "timeout"),
    "slow bytes": (hostile.slow_loris(), "timeout"),
    "slow headers": (hostile.slow_headers(), "timeout"),
    "headers without end": (hostile.endless_headers(), "connection"),
    "a body that ends with a FIN": (hostile.truncated(), "connection"),
    "a body that ends with an RST": (hostile.truncated(then_reset=True), "connection"),
    "a truncated gzip": (hostile.cut_gzip({"score": 1}), "bad_reply"),
    "a body without end": (hostile.endless(), "bad_reply"),
    "a gzip bomb": (hostile.gzip_bomb(64), "bad_reply"),
    "data after the gzip": (
        hostile.endless(first=gzip.compress(b"{}"), head=GZIPPED_CHUNKS),
        "connection",
    ),
    "an unknown encoding": (reply({}, content_encoding="br"), "connection"),
    "a gzip in a gzip": (reply({}, content_encoding="gzip, gzip"), "bad_reply"),
    "NaN": (status(200, b'{"score": NaN}'), "bad_reply"),
    "1e999": (status(200, b'{"score": 1e999}'), "bad_reply"),
    "a number of 5000 digits": (status(200, b'{"n": ' + b"9" * 5000 + b"}"), "bad_reply"),
    "100000 brackets": (status(200, b"[" * 100_000), "bad_reply"),
    "no UTF-8": (status(200, b'{"s": "\xff\xfe"}'), "bad_reply"),
    "HTML": (hostile.html(), "bad_reply"),
    "a list": (reply([1, 2]), "bad_reply"),
    "another status of success": (reply({"score": 1}, code=202), "bad_reply"),
    "a length too short": (sized("5"), "connection"),
    "a length too long": (sized("99"), "connection"),
    "a senseless length": (sized("many"), "connection"),
}  # fmt: skip


@pytest.mark.parametrize("kind", RETRIED)
async def test_a_lasting_fault_is_an_error_of_ours_and_a_passing_one_is_counted_and_retried(kind):
    behaviour, outcome = RETRIED[kind]
    attempts, book = 2 if outcome == "bad_reply" else 3, Book()
    settings = {"attempts": 3, "timeout_s": 0.2 if outcome == "timeout" else 5.0, "max_body_bytes": 2**16}
    settings |= {"rate_limiter": book, "breaker_reset_s": 0.01}
    async with asking(*[behaviour] * (attempts + 1), GOOD, **settings) as (server, client):
        with lasting(5.0 + GRACE_S), pytest.raises(JudgeError) as caught:
            await ask(client)
        assert type(caught.value) is (BadReply if outcome == "bad_reply" else JudgeUnavailable)
        assert "judge: " in str(caught.value) and f"attempt {attempts} of 3" in str(caught.value)
        assert counted(client) == {outcome: attempts} and len(server.requests) == attempts
        assert await ask(client, 20) == {"score": 0.5}
        stats = client.stats()
        assert counted(client) == {outcome: attempts + 1, "ok": 1} and stats["retries"] == attempts
        assert stats["requests"] == len(server.requests) == len(book.acquired) == attempts + 2
        assert book.out == 0 and stats["in_flight"] == 0


@pytest.mark.parametrize("code", [400, 401, 403, 404, 422, 301])
async def test_what_is_refused_is_not_asked_again(code):
    async with asking(status(code), GOOD) as (server, client):
        with pytest.raises(JudgeRefused, match=str(code)):
            await ask(client)
        assert counted(client) == {"refused": 1} and len(server.requests) == 1


async def test_a_redirect_is_not_followed_and_its_address_not_repeated():
    async with HostileServer(GOOD) as other:
        async with asking(hostile.redirect(f"{other.url}/login?token=private")) as (_, client):
            with pytest.raises(JudgeRefused, match="status 307: a redirect, which is not followed") as caught:
                await ask(client)
        assert not other.requests and "private" not in str(caught.value)


@pytest.mark.parametrize("kind", ["stalled", "dead"])
async def test_a_judge_that_nobody_answers_for_does_not_hang_the_call(kind):
    address = hostile.stalled_listener if kind == "stalled" else hostile.dead_address
    with address() as url:
        async with client_of(url, timeout_s=0.2, attempts=2) as client:
            with pytest.raises(JudgeUnavailable, match="attempt 2 of 2"):
                await ask(client)
            assert counted(client) == {"timeout" if kind == "stalled" else "connection": 2}


async def test_the_deadline_ends_a_request_that_its_own_timeout_would_not_and_sends_none_when_it_has_passed():
    async with asking(hostile.silence(), timeout_s=60) as (server, client):
        with pytest.raises(JudgeTimeout):
            await ask(client, -1.0)
        assert not server.requests and client.stats()["requests"] == 0
        with lasting(0.3 + GRACE_S, 0.3), pytest.raises(JudgeTimeout, match="the deadline"):
            await ask(client, 0.3)


async def test_a_slow_complaint_does_not_hide_what_was_complained_about():
    """The status is there; the body trickles for ever: it is still a 429."""
    head = b"HTTP/1.1 429 Slow Down\r\ncontent-length: 100000\r\n\r\n"

    async def behave(request, connection):
        await connection.write(head)
        await asyncio.sleep(3600)

    async with asking(behave, GOOD, timeout_s=5) as (_server, client):
        assert await ask(client) == {"score": 0.5}
        assert counted(client) == {"429": 1, "ok": 1}


@pytest.mark.parametrize("comes_later", [False, True], ids=["with the reply", "a moment later"])
async def test_a_reply_too_many_never_becomes_the_answer_to_the_next_call(comes_later, monkeypatch):
    """The connection that holds it is dropped, whether it came with the reply or while the connection was idle."""
    later, has_arrived = asyncio.Event(), asyncio.Event()
    receive = ResponseHandler.data_received

    def noted(protocol: ResponseHandler, data: bytes) -> None:
        receive(protocol, data)
        has_arrived.set()

    monkeypatch.setattr(ResponseHandler, "data_received", noted)
    behaviour = hostile.one_too_many({"n": "somebody else's"}, later=later if comes_later else None)
    async with asking(behaviour) as (server, client):
        for n in range(5):
            assert await ask(client, 60, payload={"n": n}) == {"n": n}
            if comes_later:
                has_arrived.clear()
                later.set()
                await asyncio.wait_for(has_arrived.wait(), 60)
        assert server.connections == 5 and counted(client) == {"ok": 5}


# Memory

HUNGRY = {
    kind: RETRIED[kind][0]
    for kind in ("a body without end", "a gzip bomb", "data after the gzip", "headers without end")
} | {
    "a complaint without end": hostile.endless(head=b"HTTP/1.1 500 Oh\r\ntransfer-encoding: chunked\r\n\r\n")
}


@pytest.mark.parametrize("kind", HUNGRY)
async def test_memory_stays_bounded_whatever_is_sent(kind):
    """1 MiB is allowed for a body; the peak may hold it twice, and some buffers of 64 KiB."""
    async with asking(HUNGRY[kind], attempts=2, max_body_bytes=2**20, timeout_s=5) as (server, client):
        gc.collect()
        tracemalloc.start()
        try:
            with pytest.raises(JudgeError):
                await ask(client, 20)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert len(server.requests) == 2 and peak < 8 * 2**20, f"{peak / 2**20:.1f} MiB"


# Waiting


async def test_everybody_leaves_a_judge_alone_that_asked_for_time():
    async with asking(status(429, retry_after="0.6"), GOOD) as (server, client):
        first = asyncio.ensure_future(ask(client))
        await until(lambda: client.stats()["outcomes"]["429"])
        await asyncio.gather(first, *(ask(client) for _ in range(5)))
        assert min(request.at for request in server.requests[1:]) - server.requests[0].at >= 0.6


@pytest.mark.parametrize(("asked", "queue_s"), [("100", 20), ("86400", 10**6)])
async def test_a_pause_beyond_the_deadline_or_five_minutes_fails_the_call_at_once(asked, queue_s):
    async with asking(status(429, retry_after=asked)) as (server, client):
        with lasting(GRACE_S):
            for _ in range(3):
                with pytest.raises(JudgeUnavailable, match=f"asked to be left alone for {asked} s"):
                    await client.post("/judge", {}, deadline=Deadline(5, queue_s))
        assert len(server.requests) == 1


async def test_another_replica_takes_over_while_one_is_left_alone():
    async with asking_two([status(429, retry_after="60")], [GOOD]) as (busy, free, client):
        for _ in range(6):
            assert await ask(client) == {"score": 0.5}
        assert len(busy.requests) == 1 and len(free.requests) == 6


async def test_without_a_word_on_when_attempts_back_off_exponentially():
    """At most 0.05 + 0.1 + 0.2 + 0.4 s for four pauses, each drawn evenly: their mean over 20 calls is 0.375 s."""
    async with asking(status(429), backoff_s=0.05, attempts=5) as (server, client):
        with lasting(10, 0.375):
            outcomes = await asyncio.gather(*(ask(client, 10) for _ in range(20)), return_exceptions=True)
        assert all(isinstance(outcome, JudgeUnavailable) for outcome in outcomes)
        assert len(server.requests) == 100 and client.stats()["retries"] == 80


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(None, 0), ("", 0), ("-5", 0), ("nan", 0), ("1e300", 1e300), ("Mon, 99 Foo 20", 0), ("\x00", 0), ("1.5", 1.5),
     ("Thu, 01 Jan 1970 00:01:40", 30), ("Thu, 01 Jan 1970 00:01:40 +0001", 0), ("Fri, 31 Dec 99999 23:59:59 GMT", 0)],
)  # fmt: skip
def test_any_retry_after_is_some_number_of_seconds(value, seconds):
    assert retry_after_s(value, now=70.0) == seconds


# Replicas


async def test_the_least_busy_replica_is_asked():
    """One takes 50 times as long: with 4 calls at a time it holds at most 2 of them, and the other does the work."""
    slowly, quickly = [hostile.after(0.5, GOOD)], [hostile.after(0.01, GOOD)]
    limits = {"rate_limiter": Limiter(), "limits": Limits(concurrency=4)}
    async with asking_two(slowly, quickly, **limits) as (slow, quick, client):
        await asyncio.gather(*(ask(client) for _ in range(40)))
        assert slow.most_running <= 2 and len(slow.requests) <= 6
        assert len(slow.requests) + len(quick.requests) == client.stats()["requests"] == 40


async def test_a_retry_goes_to_another_replica_even_if_that_is_busier():
    """Of four calls two fail at once, and find one replica idle and the other with two calls: they go to the other."""
    slowly = [hostile.after(0.4, GOOD)]
    async with asking_two([status(500)], slowly, timeout_s=30) as (broken, slow, client):
        assert await asyncio.gather(*(ask(client, 30) for _ in range(4))) == [{"score": 0.5}] * 4
        assert (len(broken.requests), len(slow.requests)) == (2, 4)


def test_a_replica_is_asked_by_its_state_alone(caplog):
    """Pauses end after five minutes, rivals go elsewhere, late failures do not keep a breaker open for longer."""
    replicas = Replicas(["http://one", "http://other"], 2, 1600.0)
    assert replicas.take((), never="http://one").url == "http://other"
    other = replicas.take(("http://other",), never="http://one")
    replicas.pause(other, 1e300)
    assert 299 < other.paused_until - time.monotonic() <= 300
    assert "http://other asks to be left alone for 1e+300 s" in caplog.text
    assert replicas.take((), never="http://one") is None
    one = [replicas.take(()) for _ in range(3)][-1]
    assert one.url == "http://one"
    for _ in range(2):
        replicas.settle(one, False, False)
    opened_until = one.open_until
    replicas.settle(one, False, False)
    assert one.open_until == opened_until and 99 < opened_until - time.monotonic() <= 100
    assert replicas.num_opened == 1 and not replicas.usable()


async def test_a_breaker_opens_and_lets_one_probe_at_a_time_through_until_one_succeeds():
    """Three failures open it for 0.3 s. Ten callers wait; the first probe fails, the second, 0.45 s later, succeeds."""
    behaviours = [status(500)] * 3 + [hostile.after(0.2, status(500)), hostile.after(0.2, GOOD), GOOD]
    async with asking(*behaviours, breaker_failures=3, breaker_reset_s=4.8, attempts=3) as (server, client):
        with pytest.raises(JudgeUnavailable):
            await ask(client)
        assert client.stats()["breakers_open"] == 1
        assert await asyncio.gather(*(ask(client) for _ in range(10))) == [{"score": 0.5}] * 10
        times = [request.at for request in server.requests]
        assert len(times) == 3 + 1 + 10
        assert times[3] - times[2] >= 0.3  # the first probe waits for a sixteenth of the reset,
        assert times[4] - times[3] >= 0.2 + 0.45  # the second for the first one and half as long again,
        assert times[5] - times[4] >= 0.2  # and everybody else for the second
        assert client.stats()["breakers_open"] == 0


PROBED = {"breaker_failures": 1, "breaker_reset_s": 0.1, "timeout_s": 30}


async def test_a_probe_that_is_cancelled_leaves_the_next_one_its_place():
    async with asking(status(500), hostile.silence(), GOOD, **PROBED, attempts=1) as (server, client):
        with pytest.raises(JudgeUnavailable):
            await ask(client)
        probe = asyncio.ensure_future(ask(client, 30))
        await until(lambda: len(server.requests) == 2)
        other = asyncio.ensure_future(ask(client, 30))
        await asyncio.sleep(0.1)
        assert client.stats()["breakers_open"] == 1 and len(server.requests) == 2
        probe.cancel()
        assert await other == {"score": 0.5}


async def test_a_probe_of_a_silent_replica_leaves_its_call_the_time_for_another_request():
    async with asking(status(500), hostile.silence(), GOOD, **PROBED) as (_, client):
        assert await ask(client, 1.5) == {"score": 0.5}
        assert counted(client) == {"5xx": 1, "timeout": 1, "ok": 1}


async def test_a_failure_tells_the_last_true_cause():
    with hostile.dead_address() as dead:
        async with client_of(dead, breaker_failures=1, breaker_reset_s=300) as client:
            for _ in range(2):  # also of a call that sent nothing, for the breaker was open before it
                with pytest.raises(JudgeUnavailable, match="connection refused"):
                    await ask(client, 0.3)
            assert client.stats()["requests"] == 1 and client.stats()["breakers_opened"] == 1
        limiter, limits = Limiter(), Limits(concurrency=1)
        async with client_of(dead, rate_limiter=limiter, limits=limits, backoff_s=0.3) as client:
            call = asyncio.ensure_future(ask(client, 1.0))
            await until(lambda: client.stats()["requests"])
            await limiter.acquire(client.key, limits)  # the second attempt finds no permit
            with pytest.raises(JudgeTimeout, match="no permit .* before that: .*connection refused"):
                await call


async def test_ten_bad_replies_in_a_row_cost_no_sample_its_time_and_calls_behind_a_permit_do_not_hit_an_open_breaker():
    """The probes come a moment after the breaker opened, and then at growing distances: 2.6 s for six of them."""
    bad, breaker = [status(500)] * 10, {"breaker_failures": 5, "breaker_reset_s": 2.0}
    limits = {"rate_limiter": Limiter(), "limits": Limits(concurrency=1)}
    async with asking(*bad, GOOD, **limits, **breaker) as (server, client):
        calls = (client.post("/judge", {}, deadline=Deadline(5.0, queue_s=60)) for _ in range(12))
        assert await asyncio.gather(*calls) == [{"score": 0.5}] * 12 and len(server.requests) == 22


async def test_a_breaker_counts_failures_in_a_row_which_refusals_and_429_are_not_and_a_probe_clears_the_count():
    harmless = [status(404), status(429)] * 2 + [status(500), GOOD] * 3
    behaviours = [*harmless, status(500), status(500), GOOD, status(500), GOOD]
    async with asking(*behaviours, breaker_failures=2, breaker_reset_s=0.1, attempts=1) as (_server, client):
        for expected in [0] * 11 + [1, 0, 0, 0]:
            with contextlib.suppress(JudgeUnavailable, JudgeRefused):
                await ask(client)
            assert client.stats()["breakers_open"] == expected


async def test_no_pause_goes_beyond_the_deadline():
    """Half of 30 s would be waited on average: the call gives up at once instead, or draws a short one."""
    async with asking(status(500), backoff_s=30, attempts=9) as (_, client):
        with lasting(1 + GRACE_S), pytest.raises(JudgeUnavailable, match="the deadline leaves no time"):
            await ask(client, 1.0)


# Hedging


async def warmed_up(client: EndpointClient) -> EndpointClient:
    """Just enough latencies: none of these calls could have had a rival yet."""
    for _ in range(ENOUGH):
        await ask(client)
    return client


async def test_a_slow_request_gets_a_rival_elsewhere_and_the_first_answer_wins():
    """Ten quick replies of each, then the first goes silent: a rival answers in its place, long before the timeout."""
    limits = {"rate_limiter": (limiter := Limiter()), "limits": Limits(concurrency=2)}
    silent = [*[reply({"from": "one"})] * 10, hostile.silence()]
    answers = [reply({"from": "other"})]
    async with asking_two(silent, answers, **limits, hedge_quantile=0.95) as (one, other, client):
        await warmed_up(client)
        assert len(one.requests) == len(other.requests) == 10
        with lasting(10):
            assert [await ask(client, 60) for _ in range(4)] == [{"from": "other"}] * 4
        stats = client.stats()
        assert stats["hedges"] >= 1 and stats["outcomes"]["cancelled"] == stats["hedges"]
        assert stats["requests"] == len(one.requests) + len(other.requests)
        assert limiter.stats()[client.key]["in_flight"] == stats["in_flight"] == 0
        assert limiter.stats()[client.key]["granted"] == stats["requests"]


async def test_no_rival_without_another_replica():
    async with asking(*[GOOD] * 20, hostile.after(0.4, GOOD), hedge_quantile=0.5) as (_server, client):
        await warmed_up(client)
        assert await ask(client) == {"score": 0.5}
        assert client.stats()["hedges"] == 0 and client.stats()["requests"] == 21


@pytest.mark.parametrize(
    ("first", "rival", "expected"),
    [
        (hostile.after(0.2, reply({"from": "first"})), status(500), {"from": "first"}),
        (hostile.after(0.2, status(500)), hostile.after(0.4, reply({"from": "rival"})), {"from": "rival"}),
        (hostile.after(0.2, status(500)), status(503), "status 500"),
    ],
)
async def test_a_failure_leaves_the_answer_to_the_other_and_the_last_error_is_that_of_the_first(
    first, rival, expected
):
    scripts = [[*[GOOD] * 10, first], [*[GOOD] * 10, rival]]
    async with asking_two(*scripts, hedge_quantile=0.9, attempts=1) as (_one, _other, client):
        await warmed_up(client)
        try:
            assert await ask(client) == expected
        except JudgeUnavailable as error:
            assert expected in str(error)
        assert client.stats()["hedges"] == 1 and client.stats()["in_flight"] == 0


async def test_cancelling_a_hedged_call_cancels_both_and_gives_both_permits_back():
    silent, options = [*[GOOD] * 10, hostile.silence()], {"hedge_quantile": 0.9, "timeout_s": 30}
    async with asking_two(silent, silent, rate_limiter=(book := Book()), **options) as (one, other, client):
        await warmed_up(client)
        call = asyncio.ensure_future(ask(client, 30))
        await until(lambda: len(one.requests) + len(other.requests) == 22)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert book.out == 0 and counted(client) == {"ok": 20, "cancelled": 2}


# Permits and tokens


@pytest.mark.parametrize(
    ("behaviour", "used", "told"),
    [
        (reply({"usage": {"total_tokens": 42}}), 42.0, 0),
        (reply({"score": 1}), None, 0),  # nothing is said: the estimate stands
        (reply({"usage": {"total_tokens": "many"}}), None, 0),
        (reply({"usage": {"total_tokens": -5}}), None, 0),
        (reply({"usage": [42]}), None, 0),
        (status(429), 0.0, 0),  # the judge did not begin
        (status(404), 0.0, 0),
        (hostile.dead_address, 0.0, 0),
        (status(500), None, 1),  # it may have
        (hostile.silence(), None, 1),
        (hostile.html(), None, 1),
    ],
)
async def test_a_permit_says_what_was_used_and_what_may_have_cost_something_for_nothing_is_told(
    behaviour, used, told
):
    book, unanswered = Book(), []
    options = {"tokens": 100, "phase": "eval", "unanswered": lambda: unanswered.append(1)}
    with hostile.dead_address() as dead:
        async with HostileServer(behaviour) as server:
            url = dead if behaviour is hostile.dead_address else server.url
            async with client_of(url, rate_limiter=book, attempts=1, timeout_s=0.3) as client:
                with contextlib.suppress(JudgeError):
                    await ask(client, **options)
    assert book.acquired == [(client.key, 100, "eval")] and book.released == [(1, used)]
    assert len(unanswered) == told


async def test_a_cancelled_call_gives_its_permit_back_wherever_it_was():
    limiter = Limiter()
    limits = {"rate_limiter": limiter, "limits": Limits(concurrency=2), "timeout_s": 30}
    async with asking(hostile.silence(), **limits) as (server, client):
        calls = [asyncio.ensure_future(ask(client, 30)) for _ in range(6)]
        await until(lambda: len(server.requests) == 2)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert limiter.stats()[client.key]["in_flight"] == 0 and limiter.stats()[client.key]["waiting"] == {}
        assert counted(client) == {"cancelled": 2} and client.stats()["in_flight"] == 0


async def test_a_wait_for_a_permit_or_as_the_server_asked_is_not_on_the_callers_time():
    limits = Limits(concurrency=1)
    asks_to_wait = status(429, **{"Retry-After": "1"})
    async with asking(asks_to_wait, GOOD, rate_limiter=Limiter(), limits=limits) as (server, client):
        deadlines = [Deadline(0.5, queue_s=20) for _ in range(8)]
        calls = [client.post("/score", {}, deadline=deadline) for deadline in deadlines]
        assert len(await asyncio.gather(*calls)) == 8
        assert all(deadline.queue_s > 0.8 for deadline in deadlines) and len(server.requests) == 9
    async with asking(asks_to_wait, GOOD) as (server, client):
        with pytest.raises(JudgeError):  # it would wait for longer than there is patience for
            await client.post("/score", {}, deadline=Deadline(0.3, queue_s=0.3))


async def test_a_replica_that_is_out_of_order_is_waited_for_on_the_callers_time():
    """Or nobody would hear for half an hour of a judge that is gone."""
    settings = {"breaker_failures": 1, "breaker_reset_s": 30.0, "attempts": 2, "backoff_s": 0.01}
    async with asking(status(500), **settings) as (_server, client):
        with lasting(0.5 + GRACE_S), pytest.raises(JudgeUnavailable):
            await client.post("/score", {}, deadline=Deadline(0.5, queue_s=600))


async def test_two_judges_of_one_name_share_limits_only_at_one_address():
    a, b, c = "http://a", "http://b", "http://c"
    async with client_of(a, b) as one, client_of(b, a) as same, client_of(c) as other:
        assert one.key == same.key != other.key


async def test_counts_are_exact_and_limits_hold_under_a_storm_of_faults():
    """200 calls, half of the replies faulty: what the servers saw is what the client says, to the last request."""
    draw = random.Random(7)
    # After a body longer than its length the connection is broken, which a client may notice only in its next request.
    faults = [GOOD] * 40 + [fault for kind, (fault, _) in RETRIED.items() if kind != "a length too short"]
    settings = {"rate_limiter": (limiter := Limiter()), "limits": Limits(concurrency=16), "timeout_s": 1.0}
    settings |= {
        "breaker_failures": 4,
        "breaker_reset_s": 0.1,
        "hedge_quantile": 0.9,
        "max_body_bytes": 2**16,
    }
    scripts = ([*draw.choices(faults, k=400), GOOD] for _ in range(2))
    async with asking_two(*scripts, **settings) as (one, other, client):
        with lasting(15 + GRACE_S):
            outcomes = await asyncio.gather(*(ask(client, 15) for _ in range(200)), return_exceptions=True)
        wrong = [o for o in outcomes if isinstance(o, BaseException) and not isinstance(o, JudgeError)]
        assert not wrong
        stats = client.stats()
        good = sum(not isinstance(outcome, BaseException) for outcome in outcomes)
        assert good >= 100 and stats["outcomes"]["ok"] >= good
        seen = len(one.requests) + len(other.requests)
        assert stats["requests"] == sum(stats["outcomes"].values())
        # A rival may lose before it is read
        assert 0 <= stats["requests"] - seen <= stats["outcomes"]["cancelled"]
        assert limiter.stats()[client.key]["granted"] >= stats["requests"]
        assert limiter.stats()[client.key]["in_flight"] == 0 and stats["in_flight"] == 0


async def test_after_close_calls_fail_with_an_error_of_ours():
    async with asking(hostile.silence(), timeout_s=30) as (server, client):
        call = asyncio.ensure_future(ask(client, 3))
        await until(lambda: server.requests)
        await client.close()
        with pytest.raises(JudgeError):
            await call
        with pytest.raises(JudgeUnavailable, match="closed"):
            await ask(client)


# Settings and secrets


@pytest.mark.parametrize(
    "url",
    ["ftp://judge/v1", "judge:8000", "http://", "http://user:secret@judge", "http://judge:99999", "http://ju dge",
     "http://judge/v1?key=secret", "http://judge\n", "file:///etc/passwd", "http://[::1", ""],
)  # fmt: skip
def test_what_is_no_plain_address_is_refused_and_no_password_repeated(url):
    with pytest.raises(ConfigurationError) as caught:
        Endpoint(urls=(url,))
    assert "user:secret" not in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [dict(urls=()), dict(urls="http://judge"), dict(urls=("http://judge", "http://judge")), dict(attempts=0),
     dict(timeout_s=0), dict(timeout_s=float("inf")), dict(max_body_bytes=0), dict(hedge_quantile=1.0),
     dict(breaker_failures=0), dict(breaker_reset_s=-1), dict(backoff_s=float("nan")), dict(backoff_max_s=0)],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(wrong):
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        Endpoint(**{"urls": ("http://judge",), **wrong})


@pytest.mark.parametrize("key", ["", "  ", "sk-secret\r\nx: y", "schlüssel"])
def test_a_missing_or_impossible_key_is_refused_when_the_client_is_made(key, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", key)
    with pytest.raises(ConfigurationError, match="JUDGE_KEY") as caught:
        EndpointClient("judge", Endpoint(urls=("http://judge",), api_key_env="JUDGE_KEY"), Book())
    assert not key.strip() or key not in str(caught.value)


async def test_a_payload_that_is_no_json_is_refused_before_anything_is_sent():
    async with asking(GOOD) as (server, client):
        with pytest.raises(ValueError, match="JSON"):
            await ask(client, payload={"score": float("nan")})
        with pytest.raises(ValueError, match="slash"):
            await client.post("judge", {}, deadline=time.monotonic() + 1)
        assert not server.requests


ECHOES = {
    "refused": lambda key: status(401, b"x" * 180 + b" bad key " + key),  # an excerpt would cut it in two
    "overloaded": lambda key: status(500, key),
    "no json": lambda key: status(200, b"not json " + key),
    "a list": lambda key: reply([key.decode()]),
    "no json, cut": lambda key: status(200, b"x" * 190 + key),
    "no http": lambda key: hostile.raw(key + b"\r\n\r\n", then_close=True),
    "redirected": lambda key: hostile.redirect("http://other/?" + key.decode()),
}


@pytest.mark.parametrize("echo", ECHOES)
async def test_the_key_is_in_no_error_no_log_and_no_representation(echo, monkeypatch, caplog):
    key = "sk-very-secret-0123456789"
    monkeypatch.setenv("JUDGE_KEY", key)
    caplog.set_level(logging.DEBUG)
    settings = {"api_key_env": "JUDGE_KEY", "attempts": 2, "breaker_failures": 1, "breaker_reset_s": 0.01}
    async with asking(ECHOES[echo](key.encode()), **settings) as (server, client):
        with pytest.raises(JudgeError) as caught:
            await ask(client)
        seen = "".join(traceback.format_exception(caught.value)) + repr(client) + json.dumps(client.stats())
        seen += caplog.text + repr(pickle.loads(pickle.dumps(caught.value))) + repr(caught.value.__context__)
        assert server.requests[0].headers["authorization"].endswith(key)
        assert "sk-ver" not in seen


def test_every_error_is_one_of_the_library_and_survives_pickling():
    for kind in (JudgeTimeout, JudgeUnavailable, BadReply, JudgeRefused):
        error = pickle.loads(pickle.dumps(kind("judge: as asked")))
        assert type(error) is kind and isinstance(error, AsyncGrpoError) and str(error) == "judge: as asked"
    assert issubclass(JudgeTimeout, TimeoutError) and issubclass(BadReply, ValueError)
