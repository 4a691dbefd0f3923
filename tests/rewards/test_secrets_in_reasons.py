"""A key that a reward, a judge or an environment puts into an exception reaches no reason, statistic or log."""

import base64
import html
import json
import os
import urllib.parse
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.options import redaction
from async_grpo.options.redaction import redacted, register_secrets, spellings
from async_grpo.rewards.adapter.result import MAX_REASON_CHARACTERS, failure, read_answer
from async_grpo.rewards.http.endpoint import Endpoint
from async_grpo.rewards.http.rate_limiter import Limiter
from async_grpo.rewards.judge_worker import JudgeWorker
from async_grpo.rewards.judges.judge_replies import quote, quote_end
from async_grpo.rewards.pool import VerifierPool
from async_grpo.rewards.verifier_worker import fields_of
from async_grpo.types import Prompt, RewardStatus

KEY = "sk-(a+b)*/Qw'12.34\\z"  # with characters that mean something to expressions, addresses and quotations
REWARD = """
import base64, logging, os, sys, threading, traceback, urllib.parse
from async_grpo.rewards.adapter.decorators import batch, post_process

KEY = os.environ["MY_SERVICE"]
WAYS = {
    "plain": KEY,
    "address": "https://judge/?key=" + urllib.parse.quote(KEY, safe=""),
    "basic": "Authorization: Basic " + base64.b64encode(f"someone:{KEY}".encode()).decode(),
    "repr": repr({"key": KEY}),
    "at the cut": "x" * 490 + KEY,
}

def raises(sample):
    raise ConnectionError(WAYS[sample["way"]])

def exits(sample):
    sys.exit(WAYS[sample["way"]])

def returns(sample):
    return {"reward": WAYS[sample["way"]]}

def abstains(sample):
    return {"abstain": WAYS[sample["way"]]}

def explains(sample):
    return 1.0, WAYS[sample["way"]], WAYS[sample["way"]]

@batch(max_samples=2)
def in_batches(samples):
    raise ConnectionError(WAYS[samples[0]["way"]])

def after(group):
    raise ConnectionError(WAYS[group[0]["sample"]["way"]])

@post_process(after)
def post_processed(sample):
    return 1.0

def talks(sample):
    print("printed", KEY)
    print("to stderr", KEY, file=sys.stderr)
    logging.getLogger("of.a.library").warning("logged %s", KEY)
    def fail():
        raise ConnectionError("thread " + KEY)
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    try:
        raise ConnectionError("caught " + KEY)
    except ConnectionError:
        traceback.print_exc()
    return 1.0
"""
WAYS = ("plain", "address", "basic", "repr", "at the cut")


@pytest.fixture(autouse=True)
def no_secret_is_registered(monkeypatch):
    monkeypatch.setattr(redaction, "_registered", set())


@pytest.fixture
def rewards(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("MY_SERVICE", KEY)
    path = tmp_path / "rewards.py"
    path.write_text(REWARD)
    return path


def leaks(text: str) -> list[str]:
    """Return what of the key stands in the text: any 6 characters of it in a row, in any spelling."""
    found = []
    for spelling in spellings(KEY):
        found += [piece for n in range(len(spelling) - 5) if (piece := spelling[n : n + 6]) in text]
    return found


@pytest.mark.parametrize(
    "name", ["raises", "exits", "returns", "abstains", "explains", "in_batches", "post_processed"]
)
async def test_no_reason_of_a_reward_holds_a_key_of_reward_env(name, rewards):
    pool = VerifierPool.from_registry(f"{rewards}:{name}", reward_env="MY_SERVICE")
    samples = [{"completion": "7", "way": way} for way in WAYS]
    async with pool:
        verdicts = [await pool.verify(sample) for sample in samples]
        if name == "post_processed":
            verdicts = [
                (await pool.post_process([s], [v]))[0] for s, v in zip(samples, verdicts, strict=True)
            ]
        reasons = [verdict.results[0].reason for verdict in verdicts]
        first_reason = pool.take_stats()[name]["first_reason"]
    assert all(reasons) and not leaks(first_reason + json.dumps(reasons)), reasons
    if name not in ("explains",):
        assert all(verdict.status is not RewardStatus.OK for verdict in verdicts)
    assert "***" in reasons[0]


async def test_what_a_rewards_process_prints_and_logs_holds_no_key_either(rewards, capfd):
    async with VerifierPool.from_registry(f"{rewards}:talks", reward_env="MY_SERVICE") as pool:
        assert (await pool.verify({"completion": "7"})).reward == 1.0
    shown = "".join(capfd.readouterr())
    for line in ("printed ***", "to stderr ***", "logged ***", "thread ***", "caught ***"):
        assert line in shown, shown
    assert not leaks(shown), shown


@pytest.mark.parametrize("before", range(170, 205, 5))
async def test_a_judges_server_that_repeats_its_key_is_quoted_without_it(before, monkeypatch):
    """The quotation of a reply is cut: half of the key must not be left."""
    register_secrets([KEY])
    for value in ("x" * before + KEY, {"x" * before: KEY}, [KEY + "y" * before]):
        assert not leaks(quote(value)), quote(value)
    assert not leaks(quote_end(KEY + "y" * before))


class TalkativeJudge:
    """A judge of the user's own, which says too much."""

    def __init__(self, url: str) -> None:
        self.url = url

    def endpoint(self) -> Endpoint:
        return Endpoint((self.url,), api_key_env="MY_SERVICE")

    async def score(self, sample, client, *, phase, deadline):
        raise ConnectionError(f"no access with {KEY}")


async def test_the_key_of_a_judge_is_hidden_whatever_its_variable_is_called(monkeypatch):
    monkeypatch.setenv("MY_SERVICE", KEY)
    judge = TalkativeJudge("http://127.0.0.1:9")
    worker = JudgeWorker("judge", judge, judge.endpoint(), Limiter(), "train")
    result = await worker.score({"completion": "7"}, 5.0)
    await worker.close()
    assert result.status is RewardStatus.FAILED and not leaks(result.reason)
    assert "no access with ***" in result.reason


def test_a_trajectory_fails_without_the_key_of_its_program(monkeypatch):
    from async_grpo.environments.config import TrajectoryLimits
    from async_grpo.environments.trajectory_client import TrajectoryClient

    monkeypatch.setenv("MY_SERVICE", KEY)
    register_secrets([KEY])
    recorder = SimpleNamespace(
        num_turns=0,
        num_rewritten=0,
        abandoned_numbers=frozenset(),
        chat=SimpleNamespace(images=None),
        finish=lambda member, outcome, truncated, drops_abandoned: outcome,
    )
    prompt = Prompt(0, np.empty(0, np.int32), {})
    policy = TrajectoryClient(None, recorder, prompt, 0, TrajectoryLimits(9, 99, None, 60))
    outcome = policy.trajectory(failure=f"ConnectionError: {KEY}" + "x" * 10**6)
    assert outcome.failure.startswith("ConnectionError: ***") and len(outcome.failure) < 5000


async def test_a_tool_that_raises_tells_the_policy_no_key():
    from async_grpo.environments.host import EnvironmentHost

    def lookup(word: str) -> str:
        """Look a word up."""
        raise ConnectionError(f"401 for {KEY}")

    register_secrets([KEY])
    host = EnvironmentHost([lookup], {}, False)
    ((answer,),) = await host.replies([{"sample": {"call": "use", "arguments": ["lookup", '{"word": "a"}']}}])
    assert answer["failed"] and answer["answer"] == "error: ConnectionError: 401 for ***"


def test_what_an_agent_said_last_is_shown_without_half_a_key():
    from async_grpo.environments.agents import MAX_SHOWN_CHARACTERS, last_words

    register_secrets([KEY])
    for shift in range(len(KEY) + 2):
        said = last_words("a" * 100 + KEY + "b" * (MAX_SHOWN_CHARACTERS - shift))
        assert not leaks(said) and len(said) <= MAX_SHOWN_CHARACTERS


def test_an_answer_from_the_cache_of_a_run_that_hid_nothing_is_hidden_now():
    register_secrets([KEY])
    answer = {"status": "failed", "reward": None, "extra": {}, "steps": [], "reason": f"401 for {KEY}"}
    assert fields_of(answer)["reason"] == "401 for ***"


def test_a_key_in_the_name_of_a_number_becomes_no_column_of_the_metrics():
    register_secrets([KEY])
    answer = read_answer({"reward": 1.0, f"k_{KEY}": 2.0, "style": 3.0}, {})
    assert answer["status"] == "ok" and answer["extra"] == {"k_***": 2.0, "style": 3.0}
    cached = {"status": "ok", "reward": 1.0, "extra": {f"k_{KEY}": 2.0}, "steps": [], "reason": ""}
    assert fields_of(cached)["extra"] == {"k_***": 2.0}


SPELLINGS_OF_SERVERS = {
    "HTML": "abc&amp;def&lt;ghi/jkl&#x27;m",
    "HTML of Go": "abc&amp;def&lt;ghi/jkl&#39;m",
    "JSON of PHP": r"abc&def<ghi\/jkl'm",
    "JSON of Go": r"abc\u0026def\u003cghi/jkl'm",
    "JSON in a page": r"abc\u0026def\u003Cghi/jkl\u0027m",
    "hexadecimal": "616263266465663c6768692f6a6b6c276d",
    "hexadecimal in capitals": "616263266465663C6768692F6A6B6C276D",
}


@pytest.mark.parametrize("writer", SPELLINGS_OF_SERVERS)
def test_a_key_is_hidden_as_servers_and_dumps_write_it(writer):
    register_secrets(["abc&def<ghi/jkl'm"])
    assert redacted(f"401 for {SPELLINGS_OF_SERVERS[writer]}!") == "401 for ***!"


def test_a_key_is_hidden_before_a_text_is_cut_so_that_no_half_of_it_is_left():
    register_secrets([KEY])
    for before in range(MAX_REASON_CHARACTERS - len(KEY) - 5, MAX_REASON_CHARACTERS + 5):
        answer = read_answer((1.0, "", "x" * before + KEY + "y" * 100), {})
        assert not leaks(answer["reason"])


@pytest.mark.parametrize("value", ["1", "on", "true", "cuda:0", "abc-123", "  1    ", "/tmp", ""])
def test_a_value_of_up_to_seven_characters_or_a_path_blanks_nothing(value):
    register_secrets([value])
    text = "1 of 10 calls failed on cuda:0: true, abc-123 is on /tmp"
    assert redacted(text) == text and failure(text)["reason"] == text


# Hypothesis also draws strings of the source, such as /proc/net/tcp; a path that exists is no secret
SECRET_TEXTS = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cs", "Cc", "Z")), min_size=8, max_size=60
).filter(lambda text: not os.path.exists(text))


@settings(max_examples=200, deadline=None)
@given(value=SECRET_TEXTS, user=st.text(st.characters(codec="ascii"), max_size=7), tail=st.text(max_size=3))
def test_a_secret_of_any_characters_is_hidden_in_each_usual_spelling(value, user, tail):
    redaction._registered.clear()
    register_secrets([value])
    tail = tail.encode(errors="replace").decode()
    basic = base64.b64encode(f"{user}:{value}{tail}".encode()).decode()
    for text in (
        *(value, json.dumps(value), json.dumps(value, ensure_ascii=False), repr(value), f"{value!r}"),
        *(urllib.parse.quote(value), urllib.parse.quote(value, safe=""), urllib.parse.quote_plus(value)),
        *(html.escape(value), html.escape(value, quote=False), json.dumps(value).replace("/", r"\/")),
        json.dumps(value).translate({ord(mark): f"\\u{ord(mark):04x}" for mark in "<>&"}),  # as Go writes it
        *(
            value.encode().hex(),
            value.encode().hex().upper(),
            value.encode().hex(" "),
            value.encode().hex(":"),
        ),
        *(basic, base64.urlsafe_b64encode(f"{user}:{value}{tail}".encode()).decode(), basic.rstrip("=")),
    ):
        assert "***" in redacted(f"before {text} behind"), text
    # Of base64, no more than the characters next to the secret may be left
    assert len(redacted(basic)) <= len(basic) - (len(value.encode()) * 8 // 6 - 2) + 3


def test_each_line_of_a_secret_of_several_lines_is_hidden():
    lines = [
        "-----BEGIN PRIVATE KEY-----",
        "MIIEvQIBADANBgkqhkiG9w0BAQEF",
        "AAOCAQ8AMIIBCgKCAQEA7v",
        "-----END-----",
    ]
    register_secrets(["\n".join(lines) + "\n"])
    assert redacted(f"in line 2: {lines[1]}") == "in line 2: ***"
    assert redacted(repr("\n".join(lines))) == "'***'"


def test_hiding_takes_no_time_that_would_be_felt():
    import time

    register_secrets([f"secret-number-{number}" for number in range(20)])
    text = "".join(np.random.default_rng(0).choice([*"abc= %"], 1_000_000))
    began_s = time.process_time()
    redacted(text)
    assert time.process_time() - began_s < 2.0
