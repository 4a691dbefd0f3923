"""A reward that cannot be meant (1e39, a number that underflows, one of two values of a name) is a failure with a reason.

As a number, 1e39 gives infinite advantages in float32, and 1e160 a group of silent zeros.
"""

import asyncio
import json
import math
from fractions import Fraction

import hostile_server as hostile
import pytest
from hostile_server import HostileServer
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.environments.host import EnvironmentHost
from async_grpo.errors import ConfigurationError
from async_grpo.rewards.adapter.decorators import process_reward
from async_grpo.rewards.adapter.result import (
    MAX_REWARD,
    finite,
    is_plausible,
    read_answer,
    read_change,
    unique_names,
)
from async_grpo.rewards.builtin import environment
from async_grpo.rewards.cache.verdicts import VerdictCache, key_of
from async_grpo.rewards.combine import Combination
from async_grpo.rewards.http.endpoint import Endpoint
from async_grpo.rewards.http.exchange import json_object, retry_after_s
from async_grpo.rewards.http.rate_limiter import Limiter
from async_grpo.rewards.inline import InlineReward
from async_grpo.rewards.judge_worker import JudgeWorker
from async_grpo.rewards.judges import HTTPScorer, LLMJudge, RewardModelJudge
from async_grpo.rewards.middleware import CallMiddleware
from async_grpo.rewards.pool import VerifierPool
from async_grpo.rewards.verifier_worker import fields_of
from async_grpo.types import AdapterResult, RewardStatus

HUGE = [1e39, -1e39, 1e160, -1e308, 1_000_001, 10**400, Fraction(10**9)]
OUTSIDE = "a reward lies between -1e+06 and 1e+06"


@pytest.mark.parametrize("reward", HUGE)
def test_no_answer_of_a_function_holds_one(reward):
    for returned in (
        reward,
        {"reward": reward},
        {"score": reward},
        (reward, "", ""),
        {"reward": reward, "n": 1},
    ):
        answer = read_answer(returned, {})
        assert (answer["status"], answer["reward"]) == ("failed", None)
        assert OUTSIDE in answer["reason"] or "only finite numbers" in answer["reason"]
    changed = read_change(reward, {"status": "ok", "reward": 1.0, "extra": {}, "steps": [], "reason": ""})
    assert (changed["status"], changed["reward"]) == ("failed", None)


@pytest.mark.parametrize("reward", [1e6, -1e6, 999_999.5, 0, -0.0, 1e-300])
def test_a_reward_within_the_bound_is_kept_to_the_bit(reward):
    assert read_answer(reward, {})["reward"] == reward


@given(st.floats() | st.integers() | st.fractions())
def test_what_is_plausible_is_finite_and_within_the_bound(number):
    expected = math.isfinite(number) if isinstance(number, float) else True
    assert is_plausible(number) == (expected and -1_000_000 <= number <= 1_000_000)


def test_other_numbers_may_be_larger_but_not_so_that_their_squares_overflow():
    assert read_answer({"reward": 1.0, "nanoseconds": 1e18}, {})["extra"] == {"nanoseconds": 1e18}
    answer = read_answer({"reward": 1.0, "n": 1e200}, {})
    assert answer["status"] == "failed" and "n=1e+200: numbers up to 1e+38" in answer["reason"]


@pytest.mark.parametrize("reward", [1e39, -1e160, 2e6])
async def test_an_environment_fails_with_one_whatever_way_it_goes(reward):
    class Game:
        def reset(self, row, seed):
            return "go"

        def step(self, said):
            return "on", reward, False

    host = EnvironmentHost(Game, {}, False)
    await host.replies([{"sample": {"call": "reset", "trajectory": 1, "arguments": [{}, 0]}}])
    ((answer,),) = await host.replies([{"sample": {"call": "step", "trajectory": 1, "arguments": ["7"]}}])
    assert answer["status"] == "failed" and OUTSIDE in answer["reason"]
    # A program or an agent gives its reward at once: it is the adapter's answer
    inline = InlineReward("environment", environment.environment, {})
    result = await inline.score({"completion": "7", "environment_reward": reward}, 1.0)
    assert result.status is RewardStatus.FAILED and OUTSIDE in result.reason
    turns = {
        "completion": "7",
        "completion_token_ids": [1, 2],
        "turn_ends": [1, 2],
        "turn_rewards": [reward, 1.0],
    }
    assert OUTSIDE in read_answer(environment.environment_turns(turns), turns, True)["reason"]


def test_nor_do_steps_that_add_up_to_one():
    @process_reward
    def steps(sample):
        return {"token_rewards": [9e5, 9e5]}

    sample = {"completion": "ab", "completion_token_ids": [1, 2]}
    answer = read_answer(steps(sample), sample, True)
    assert answer["status"] == "failed" and f"reward=1800000.0: {OUTSIDE}" in answer["reason"]


@pytest.mark.parametrize(("mode", "weights"), [("sum", {"a": 10.0}), ("product", {}), ("best", {})])
def test_a_combination_of_rewards_is_none_of_them_if_it_cannot_be_meant(mode, weights):
    rewards = {"a": 5e5, "b": 4e5} if mode != "best" else {"a": 2e6, "b": 1.0}
    results = [AdapterResult(name, RewardStatus.OK, reward) for name, reward in rewards.items()]
    verdict = Combination(("a", "b"), mode, weights=weights).verdict(results)
    assert (verdict.status, verdict.reward) == (RewardStatus.FAILED, None)
    assert OUTSIDE in verdict.results[0].reason


async def test_a_kept_verdict_with_one_is_a_failure_by_name(tmp_path):
    cache = VerdictCache(tmp_path / "verdicts.sqlite")
    sample = {"completion": "7"}

    async def answer():
        return {"status": "ok", "reward": 1e39, "extra": {}, "steps": [], "reason": ""}

    await cache.get_or_call(key_of("judge", "v1", sample), answer)
    middleware = CallMiddleware(versions={"judge": "v1"}, cache=cache)
    result = await middleware("judge", sample, "train", score=lambda sample: pytest.fail("it is kept"))
    await cache.close()
    assert result.status is RewardStatus.FAILED and result.reward is None and OUTSIDE in result.reason


def test_an_answer_from_wherever_is_looked_at_where_it_enters():
    answer = {"status": "ok", "reward": -1e160, "extra": {}, "steps": [[0, -1e160]], "reason": ""}
    fields = fields_of(answer)
    assert fields["status"] is RewardStatus.FAILED and fields["reward"] is None and fields["steps"] == ()


async def test_a_reward_in_a_process_fails_with_one_and_the_next_is_scored(tmp_path):
    path = tmp_path / "rewards.py"
    path.write_text("def given(sample):\n    return sample['given']\n")
    async with VerifierPool.from_registry(f"{path}:given") as pool:
        verdicts = await asyncio.gather(*(pool.verify({"completion": "", "given": r}) for r in (1e39, 0.5)))
    assert [verdict.reward for verdict in verdicts] == [None, 0.5] and OUTSIDE in verdicts[0].results[
        0
    ].reason


# Over the network

REFUSED = {
    "1e39": '{"protocol": 1, "scores": [{"reward": 1e39}]}',
    "-1e160": '{"protocol": 1, "scores": [{"reward": -1e160}]}',
    "a number that underflows": '{"protocol": 1, "scores": [{"reward": 1e-400}]}',
    "a decimal that underflows": '{"protocol": 1, "scores": [{"reward": -0.' + "0" * 400 + "1}]}",
    "two rewards": '{"protocol": 1, "scores": [{"reward": 0.1, "reward": 0.9}]}',
    "two lists": '{"protocol": 1, "scores": [{"reward": 0.1}], "scores": [{"reward": 0.9}]}',
    "the same name by an escape": r'{"protocol": 1, "scores": [{"reward": 0.1, "\u0072eward": 0.9}]}',
}


async def judged(judge, body: bytes) -> AdapterResult:
    async with HostileServer(hostile.status(200, body)) as server:
        endpoint = Endpoint((server.url,), attempts=2, backoff_s=0.01, backoff_max_s=0.02)
        worker = JudgeWorker("judge", judge, endpoint, Limiter(), "train")
        try:
            return await worker.score({"completion": "7", "input": "3+4?", "answer": "7"}, 20.0)
        finally:
            await worker.close()


@pytest.mark.parametrize("body", REFUSED.values(), ids=REFUSED)
async def test_a_scorers_reply_with_one_is_a_failure_and_no_zero(body):
    result = await judged(HTTPScorer(url="http://127.0.0.1:9"), body.encode())
    assert result.status is RewardStatus.FAILED and result.reward is None
    assert any(word in result.reason for word in (OUTSIDE, "too small for a float", "appears twice")), (
        result.reason
    )


@pytest.mark.parametrize("value", ["1e39", "-2e6", "[0.5, 1e160]", "1e-400"])
async def test_a_reward_models_reply_with_one_is_a_failure_and_no_zero(value):
    body = f'{{"data": [{{"index": 0, "probs": {value}}}]}}'
    result = await judged(RewardModelJudge(url="http://127.0.0.1:9", model="m"), body.encode())
    assert result.status is RewardStatus.FAILED and result.reward is None


@pytest.mark.parametrize(
    "text", ['{"score": 1, "score": 9}', '{"score": 1e-400}', '{"score": 9, "n": {"a": 1, "a": 2}}']
)
async def test_a_judges_verdict_in_json_with_one_is_a_failure_and_no_zero(text):
    schema = {"type": "object", "properties": {"score": {"type": "number"}}, "required": ["score"]}
    judge = LLMJudge(url="http://127.0.0.1:9", model="m", json_schema=schema)
    reply = {"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}
    result = await judged(judge, json.dumps(reply).encode())
    assert result.status is RewardStatus.FAILED and "is no JSON" in result.reason


async def test_numbers_of_two_verdicts_that_no_float_can_add_up_are_a_failure():
    schema = {"type": "object", "properties": {"score": {"type": "number"}}, "required": ["score"]}
    judge = LLMJudge(
        url="http://127.0.0.1:9", model="m", json_schema=schema, votes=2, one_request=True, temperature=0.7
    )
    choice = {"message": {"content": '{"score": 1, "x": 1.7e308}'}, "finish_reason": "stop"}
    result = await judged(judge, json.dumps({"choices": [choice, choice]}).encode())
    assert result.status is RewardStatus.FAILED and "a number beyond 1e+38" in result.reason


def test_a_scale_whose_width_no_float_can_hold_is_refused():
    with pytest.raises(ConfigurationError, match="is not"):
        LLMJudge(url="http://127.0.0.1:9", model="m", scale=(-1.7e308, 1.7e308))


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_is_read_from_json_as_it_was_written(number):
    assert json_object(json.dumps({"n": number}).encode()) == {"n": number}


@given(st.integers(-400, 400), st.integers(0, 10**20))
def test_a_number_is_zero_in_json_only_if_it_is_zero(exponent, digits):
    """Held against exact fractions: what rounds to 0 or to infinity is refused."""
    exact = Fraction(digits) * Fraction(10) ** exponent
    try:
        number = finite(f"{digits}e{exponent}")
    except ValueError:
        assert exact != 0 and (exact < Fraction(5e-324) or exact > Fraction(1.7e308))
    else:
        assert (number == 0) == (exact == 0) and number == float(exact)


@pytest.mark.parametrize(
    "body", [b'{"a": 1, "a": 1}', b'{"b": [{"a": {}, "a": {}}]}', b'{"a\\u0000": 1, "a\\u0000": 2}']
)
def test_a_name_that_appears_twice_is_refused_however_deep(body):
    with pytest.raises(ValueError, match="a name appears twice"):
        json_object(body)
    assert unique_names([("a", 1), ("b", 1)]) == {"a": 1, "b": 1}


@pytest.mark.parametrize("value", ["1e400", "inf", "nan", "-inf", "-1", "soon", ""])
def test_a_pause_that_is_no_number_closes_a_judge_to_nobody(value):
    assert retry_after_s(value) == 0.0


def test_the_bound_is_what_the_documents_say():
    assert MAX_REWARD == 1_000_000.0
