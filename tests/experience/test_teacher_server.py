"""A teacher on a server: log-probs of token ids, the checks of its replies, and what happens if it fails."""

import asyncio
import json

import numpy as np
import pytest
from hostile_server import HostileServer, behaviour, message, reply, status

from async_grpo.algorithm.teacher_config import TeacherAddress, TeacherConfig
from async_grpo.errors import ConfigurationError
from async_grpo.experience.teachers.server import TeacherServer
from async_grpo.rewards.cache.verdicts import VerdictCache
from async_grpo.rewards.http.rate_limiter import Limiter

TEXTS = {token_id: f"<{token_id}>" for token_id in range(10)}
SEQUENCES = [np.array([1, 2, 3, 4], np.int32), np.array([1, 2, 5], np.int32)]


def entries(token_ids, texts=TEXTS, **changed):
    """vLLM's `prompt_logprobs`: token n has the log-prob -n/2."""
    positions = [None]
    for token_id in token_ids[1:]:
        entry = {"logprob": -token_id / 2, "rank": 1, "decoded_token": texts.get(token_id)}
        positions.append({str(token_id): entry | changed})
    return positions


@behaviour
async def honest(request, connection, delay_s=0.0, **changed):
    """Answer as vLLM does."""
    await asyncio.sleep(delay_s)
    found = entries(request.json["prompt"], **changed)
    body = {"choices": [{"text": "x", "prompt_logprobs": found}], "usage": {"total_tokens": 5}}
    await connection.write(message(200, json.dumps(body).encode()))
    return True


def teacher(server, cache=None, model="big", **options) -> TeacherServer:
    config = TeacherConfig(teacher="x", **{"teacher_attempts": 2, "teacher_timeout_s": 5.0} | options)
    return TeacherServer("", TeacherAddress(server.url, model), config, Limiter(), 100, cache)


async def asked(source):
    return await source.logprobs(SEQUENCES, [2, 2])


async def test_the_log_probs_of_the_tokens_after_the_prompt_come_from_token_ids():
    async with HostileServer(honest()) as server:
        source = teacher(server)
        first, second = await asked(source)
        await source.close()
    assert first.tolist() == [-1.5, -2.0] and second.tolist() == [-2.5] and first.dtype == np.float32
    body = server.requests[0].json
    assert server.requests[0].path == "/v1/completions" and body["model"] == "big"
    assert body["prompt"] == [1, 2, 3, 4] and body["prompt_logprobs"] == 0 and body["max_tokens"] == 1


async def test_a_request_that_failed_is_repeated_and_one_that_keeps_failing_is_no_zero():
    async with HostileServer(status(500), honest()) as server:
        source = teacher(server)
        assert (await source.logprobs(SEQUENCES[:1], [2]))[0].tolist() == [-1.5, -2.0]
        await source.close()
    async with HostileServer(status(500)) as server:
        source = teacher(server)
        first, second = await asked(source)
        await source.close()
    assert np.isnan(first).all() and np.isnan(second).all() and len(first) == 2
    assert "teacher" in source.first_failure and "500" in source.first_failure


@pytest.mark.parametrize(
    "choices",
    [
        [],
        [{"text": "x"}],
        [{"prompt_logprobs": entries([1, 2, 3])}],  # of fewer tokens
        [{"prompt_logprobs": entries([1, 2, 4, 3])}],  # of other tokens
        [{"prompt_logprobs": [None, {"2": 1}, {"3": 1}, {"4": 1}]}],
        [{"prompt_logprobs": 7}],
    ],
)
async def test_a_reply_of_another_form_or_about_other_tokens_is_a_failure(choices):
    async with HostileServer(reply({"choices": choices})) as server:
        source = teacher(server)
        (found,) = await source.logprobs(SEQUENCES[:1], [2])
        await source.close()
    assert np.isnan(found).all() and source.first_failure


@pytest.mark.parametrize("value", [None, "0", -9999.0, 0.5, True])
async def test_a_token_without_a_usable_log_prob_is_missing(value):
    """vLLM writes -9999 for a probability of 0, and no log-prob is positive."""
    async with HostileServer(honest(logprob=value)) as server:
        source = teacher(server)
        (found,) = await source.logprobs(SEQUENCES[:1], [2])
        await source.close()
    assert np.isnan(found).all() and not source.first_failure


async def test_the_most_probable_tokens_come_with_their_ids_the_most_probable_first():
    """vLLM adds the sampled token if it is not among them, and may return fewer than asked for."""

    @behaviour
    async def with_top(request, connection):
        found = entries(request.json["prompt"])
        for position in found[1:]:
            position |= {"8": {"logprob": -3.0}, "9": {"logprob": -0.1}, "7": {"logprob": None}, "x": {}}
            # Numbers that are too large for a token id, the second even for `int`
            position |= {"9" * 400: {"logprob": -0.1}, "9" * 5000: {"logprob": -0.1}}
        await connection.write(message(200, json.dumps({"choices": [{"prompt_logprobs": found}]}).encode()))
        return True

    async with HostileServer(with_top()) as server:
        source = teacher(server, teacher_top_k=4)
        (rows,) = await source.logprobs_with_top(SEQUENCES[:1], [2], 4)
        assert server.requests[0].json["prompt_logprobs"] == 4
        await source.close()
    assert rows.shape == (2, 2, 5)
    np.testing.assert_allclose(rows[0], [[3, 9, 3, 8, 0], [-1.5, -0.1, -1.5, -3.0, np.nan]], rtol=1e-6)
    np.testing.assert_allclose(rows[1], [[4, 9, 4, 8, 0], [-2.0, -0.1, -2.0, -3.0, np.nan]], rtol=1e-6)


async def test_another_tokenizer_is_refused_by_the_name_of_its_token_and_the_same_one_is_not():
    async with HostileServer(honest()) as server:
        source = teacher(server)
        await source.start(TEXTS)
        with pytest.raises(ConfigurationError, match="token 3 is '<3>' there and 'three' here"):
            await source.start(TEXTS | {3: "three"})
        await source.close()


async def test_a_server_that_returns_no_log_probs_is_refused_at_the_start():
    async with HostileServer(reply({"choices": [{"text": "x"}]})) as server:
        source = teacher(server)
        with pytest.raises(ConfigurationError, match=f"--teacher {server.url}.*must return prompt_logprobs"):
            await source.start(TEXTS)
        await source.close()


async def test_a_server_that_allows_fewer_most_probable_tokens_is_refused_at_the_start():
    @behaviour
    async def with_at_most_20(request, connection):
        if request.json["prompt_logprobs"] <= 20:
            return await honest()(request, connection)
        await connection.write(message(400, b'{"error": "greater than max allowed: 20"}'))
        return True

    async with HostileServer(with_at_most_20()) as server:
        allowed = teacher(server, teacher_top_k=20)
        await allowed.start(TEXTS)
        await allowed.close()
        source = teacher(server, teacher_top_k=21)
        with pytest.raises(ConfigurationError, match="max allowed: 20.*prompt_logprobs=21 .--teacher-top-k"):
            await source.start(TEXTS)
        await source.close()


async def test_requests_keep_to_the_limit_and_the_cache_answers_what_was_asked_before(tmp_path):
    cache = VerdictCache(tmp_path / "cache.sqlite")
    async with HostileServer(honest(delay_s=0.02)) as server:
        source = teacher(server, cache, teacher_concurrency=2)
        sequences = [np.array([1, 2, n], np.int32) for n in range(8)]
        before = await source.logprobs(sequences, [2] * 8)
        assert server.most_running == 2 and len(server.requests) == 8
        again = await source.logprobs(sequences, [2] * 8)
        assert len(server.requests) == 8
        # A prompt of another length has other log-probs
        await source.logprobs(sequences[:1], [1])
        assert len(server.requests) == 9
        await source.close()
    await cache.close()
    assert [row.tolist() for row in before] == [row.tolist() for row in again]


async def test_the_api_key_is_sent_and_not_shown(monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", "sk-very-secret")
    async with HostileServer(status(401, b'{"error": "sk-very-secret"}')) as server:
        source = teacher(server, teacher_api_key_env="TEACHER_KEY")
        await asked(source)
        await source.close()
    assert server.requests[0].headers["authorization"] == "Bearer sk-very-secret"
    assert "sk-very-secret" not in source.first_failure
