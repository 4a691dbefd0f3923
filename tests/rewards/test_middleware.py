"""What stands around a call: cache, budget and limits, in that order, over real ones of each."""

import asyncio
import contextlib
import itertools
import time

import pytest

from async_grpo.cluster.reward_actors import RunVerification
from async_grpo.config.rewards import ResolvedRewards, check_rewards
from async_grpo.config.run import RunConfig
from async_grpo.errors import ConfigurationError
from async_grpo.rewards.adapter.registry_source import RewardRegistrySource, resolve
from async_grpo.rewards.cache.file import CacheFile
from async_grpo.rewards.cache.verdicts import VerdictCache
from async_grpo.rewards.http.endpoint import Limits
from async_grpo.rewards.http.rate_limiter import Limiter
from async_grpo.rewards.judge_worker import LimitedWorker
from async_grpo.rewards.middleware import COST, Budget, CallMiddleware, most_it_costs
from async_grpo.rewards.pool import VerifierPool
from async_grpo.types import AdapterResult, RewardStatus

OK, FAILED = RewardStatus.OK, RewardStatus.FAILED
SAMPLE = {"completion": "4", "answer": "4", "group_id": 1}


class Judge:
    """Answers after a moment; counts its calls."""

    def __init__(self, cost=None, delay_s=0.01):
        self.extra, self.delay_s, self.calls = {} if cost is None else {COST: cost}, delay_s, 0

    async def __call__(self, sample):
        self.calls += 1
        await asyncio.sleep(self.delay_s)
        return AdapterResult("judge", OK, 1.0, self.extra, latency_s=9.0, attempts=2)


async def test_the_same_question_is_paid_for_once_and_a_hit_reports_its_own_time(tmp_path):
    judge, cache = Judge(cost=0.5), VerdictCache(tmp_path / "c.sqlite")
    around = CallMiddleware(versions={"judge": "v"}, cache=cache)
    first = await around("judge", SAMPLE, "train", judge)
    again = await around("judge", {**SAMPLE, "group_id": 2}, "train", judge)
    assert judge.calls == 1 and (first.reward, again.reward) == (1.0, 1.0)
    assert (first.latency_s, first.attempts, first.extra[COST]) == (9.0, 2, 0.5)
    assert again.latency_s < 1.0 and again.attempts == 0 and again.extra[COST] == 0.0
    await cache.close()


class Timed:
    """A worker that serves one sample after the other; knows when it began each."""

    capacity, has_post_process = 1, True

    def __init__(self):
        self.starts, self.closed = [], False

    async def post_process(self, samples, results, timeout_s):
        return results

    async def score(self, sample, timeout_s):
        self.starts.append(time.monotonic())
        await asyncio.sleep(sample["seconds"])
        return AdapterResult("rule", OK, 1.0)

    async def close(self):
        self.closed = True


async def test_limits_of_a_reward_in_a_process_hold_where_its_calls_start():
    """A first call that takes long must not let those that wait behind it start all at once."""
    limits, workers = Limits(requests_per_minute=600, burst_s=0.0, slack_s=0.0), [Timed(), Timed()]
    made, limiter = iter(workers), Limiter()

    async def make(_):
        return LimitedWorker(next(made), limiter, "rule", limits, "train")

    async with VerifierPool(["rule"], make, workers=2, timeout_s=0.6) as pool:
        rows = [{"completion": "", "seconds": 0.5 if n < 2 else 0.0} for n in range(12)]
        verdicts = await asyncio.gather(*map(pool.verify, rows))
        assert await pool.post_process(rows, verdicts) == verdicts  # no limit holds up what asks nobody
    starts = sorted(workers[0].starts + workers[1].starts)
    assert len(starts) == 12 and min(b - a for a, b in itertools.pairwise(starts)) > 0.08  # 0.1 s each
    assert all(verdict.status is OK for verdict in verdicts)  # 1.2 s in all, of which none has more than 0.6
    assert max(verdict.results[0].queue_s for verdict in verdicts) > 0.8
    assert all(worker.closed for worker in workers) and limiter.stats()["rule"]["in_flight"] == 0


def with_budget(budget, estimate):
    return CallMiddleware(versions={"judge": "v"}, budget=budget, estimates={"judge": estimate})


async def test_an_estimate_that_fails_is_the_samples_failure_and_nobody_is_paid():
    judge = Judge()
    around = with_budget(Budget(1.0), lambda sample: sample["rubric"])
    result = await around("judge", SAMPLE, "train", judge)
    assert result.status is FAILED and "KeyError: 'rubric'" in result.reason and not judge.calls


async def test_a_budget_that_is_used_up_stops_the_calls_and_never_overspends():
    """A call whose cost nobody counted is taken for its estimate."""
    for judge in (Judge(cost=0.3), Judge(cost=None)):
        around = with_budget(Budget(1.0, policy="fallback"), lambda sample: 0.3)
        results = await asyncio.gather(*(around("judge", SAMPLE, "train", judge) for _ in range(10)))
        assert [result.reward for result in results if result.status is FAILED] == [None] * 7
        assert judge.calls == 3 and around.stats()["judge_budget_spent"] == pytest.approx(0.9)


def test_what_a_call_costs_at_most_is_its_longest_reply():
    class Priced:
        price_per_million_tokens = (1.0, 2.0)

        def token_estimate(self, sample):
            return 1000.0, 500.0

    assert most_it_costs(Priced(), SAMPLE) == pytest.approx(1000 * 1e-6 + 500 * 2e-6)


PAGE = """
from async_grpo.rewards.adapter.decorators import cacheable, post_process
from async_grpo.rewards.judges import LLMJudge

@cacheable
def rule(sample, weight=1.0):
    return weight

@post_process(lambda group: [1.0 for _ in group])
def vote(sample):
    return 0.0

class Voting(LLMJudge):
    def post_process_scores(self, group):
        return group

REWARD_ADAPTERS = {
    "rule": rule,
    "voting": Voting(url="http://127.0.0.1:1", model="m"),
    "vote": vote,
    "judge": LLMJudge(url="http://127.0.0.1:1", model="m", api_key_env="A_KEY_OF_THE_TESTS"),
    "paid": LLMJudge(url="http://127.0.0.1:1", model="m", price_per_million_tokens=(1.0, 2.0)),
}
"""


SOURCE = RewardRegistrySource("page_of_plans", PAGE)


def config(**changes):
    return RunConfig(**{"model_name_or_path": "m", "data_path": "d", **changes})


def checked(made: RunConfig) -> ResolvedRewards:
    """The run's rewards from PAGE, if the configuration fits them."""
    everyone = resolve(SOURCE, made.all_names)
    rewards = ResolvedRewards(SOURCE, {name: everyone[name] for name in made.adapters}, everyone)
    check_rewards(made, rewards)
    return rewards


def test_the_configuration_of_a_pool_holds_what_the_command_line_says():
    made = config(
        reward_fns="rule,judge",
        verifiers="rule=7",
        reward_limits="judge.rpm=60,judge.concurrency=2,judge.tpm=9,rule.rpm=8",
        reward_options="weight=2",
        reward_fallback="judge=rule",
        on_reward_failure="judge=constant:0.5",
        reward_combine="sum",
        reward_weights="rule=0.5",
    )
    checked(made)
    assert made.num_verifiers("rule") == 7 and made.fallbacks == {"judge": "rule"}
    assert made.limits["judge"] == Limits(concurrency=2, requests_per_minute=60.0, tokens_per_minute=9.0)
    assert made.combination.constants == {"judge": 0.5} and made.combination.weights == {"rule": 0.5}
    assert made.limits["rule"].requests_per_minute == 8


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"reward_fns": "voting"}, "the judge voting, whose post_process_scores"),
        ({"reward_limits": "other.rpm=2"}, "--reward-limits other.rpm=2 names other"),
        ({"reward_options": "loudness=2"}, "takes the option loudness"),
        ({"reward_fallback": "rule=nobody"}, "nobody"),
        ({"reward_fallback": "rule=vote"}, "rule=vote names vote, which scores by the whole group"),
    ],
)
def test_a_name_that_is_no_reward_of_the_run_or_cannot_do_what_it_is_to_is_refused(options, said):
    with pytest.raises(ConfigurationError, match=said):
        checked(config(**{"reward_fns": "rule"} | options))


@pytest.mark.parametrize(
    ("options", "names", "said"),
    [
        ({}, ["rule", "judge"], "none of rule, judge has a price; give the judge its price_per_million_tokens"),
        ({"judge_budget_policy": "fallback"}, ["paid"], "nothing to fall back on for paid: name a stand-in by --reward-f"),
        ({"judge_budget_policy": "fallback", "reward_fallback": "judge=rule"}, ["judge", "paid"], "fall back on for paid"),
        ({}, ["paid"], None),
        ({"reward_fallback": "judge=paid"}, ["judge"], None),
        ({"judge_budget_policy": "fallback", "reward_fallback": "paid=rule"}, ["paid"], None),
    ],
)  # fmt: skip
def test_a_budget_that_would_stop_nobody_or_leave_samples_without_a_reward_is_refused(options, names, said):
    made = config(judge_budget=5.0, reward_fns=",".join(names), **options)
    with pytest.raises(ConfigurationError, match=said) if said else contextlib.nullcontext():
        checked(made)


def around_of(folder, **options):
    made = config(reward_fns="rule,vote,paid", verdict_cache=str(folder / "c.sqlite"), **options)
    return RunVerification(SOURCE, made, None, {}, {})._middleware


async def test_the_cache_keeps_judges_and_what_is_declared_cacheable_and_nothing_else(tmp_path):
    """A reward may count its calls or look at the group: without a word of its author none of its answers is kept."""
    around = around_of(tmp_path)
    asked = {name: Judge(cost=0.0) for name in ("rule", "vote", "paid")}
    for name, judge in asked.items():
        for _ in range(2):
            await around(name, {**SAMPLE, "prompt": "2+2?"}, "train", judge)
    await around._cache.close()
    assert {name: judge.calls for name, judge in asked.items()} == {"rule": 1, "vote": 2, "paid": 1}


async def test_the_size_of_the_cache_reaches_it(tmp_path):
    around = around_of(tmp_path, verdict_cache_mb=0.01)
    for number in range(1, 1002):  # it prunes after every thousand
        await around("rule", {"completion": "x" * 100, "n": number}, "train", Judge(delay_s=0))
    await around._cache.close()
    (entries,) = CacheFile(tmp_path / "c.sqlite").entries()
    assert entries.num_bytes <= 0.01 * 2**20 + 1000


def test_a_key_comes_from_the_environment_and_shows_nowhere(monkeypatch):
    rewards = checked(config(reward_fns="judge"))
    with pytest.raises(ConfigurationError, match="A_KEY_OF_THE_TESTS"):
        rewards.secrets()
    monkeypatch.setenv("A_KEY_OF_THE_TESTS", "sesame")
    assert rewards.secrets() == {"A_KEY_OF_THE_TESTS": "sesame"} and "sesame" not in repr(rewards)
