"""Adapters in killable processes: every way to misbehave, and nothing that outlives its parent."""

import asyncio
import os
import signal
import textwrap
from typing import Any

import psutil
import pytest

from async_grpo.errors import ConfigurationError
from async_grpo.rewards.adapter.registry_source import RewardRegistrySource
from async_grpo.rewards.isolation import framing
from async_grpo.rewards.isolation.adapter_process import AdapterProcess, child_environment
from async_grpo.rewards.verifier_worker import ProcessDied
from async_grpo.types import AdapterResult, RewardStatus
from tests.helpers.one_worker import OneWorker

PAGE = textwrap.dedent(
    """
    import os, signal, subprocess, sys, threading, time

    def echo(sample):
        return {"reward": sample["value"], "twice": 2 * sample["value"]}

    def sleeps(sample):
        time.sleep(sample["seconds"])
        return {"reward": sample["value"]}

    def ends_itself_once(sample):
        if not os.path.exists(sample["mark"]):
            open(sample["mark"], "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"reward": 1.0}

    def looks_around(sample):
        import resource
        assert threading.current_thread() is threading.main_thread()
        assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)
        assert "SECRET_KEY" not in os.environ, "the environment leaks"
        assert sys.stdin.read() == ""
        return {"reward": float(os.environ["OMP_NUM_THREADS"])}

    def same(sample):
        return sample["completion"] == "".join(map(chr, sample["points"]))

    def verbose(sample):
        return {"reward": 1.0, "x" * sample["length"]: 1.0}

    def starts_by(warm_up):
        def reward(sample):
            return reward.degrees
        reward.warm_up = lambda: warm_up(reward)
        return reward

    warm = starts_by(lambda reward: setattr(reward, "degrees", 20.0))
    cold = starts_by(lambda reward: time.sleep(600))
    broken = starts_by(lambda reward: 1 / 0)
    dead_on_arrival = starts_by(lambda reward: os._exit(9))

    REWARD_ADAPTERS = {name: value for name, value in list(globals().items()) if callable(value)}
    """
)
SOURCE = RewardRegistrySource.from_text("page_of_tests", PAGE)


async def score_all(adapter: str, *samples: dict[str, Any], **options: Any) -> list[AdapterResult]:
    """The results of one worker for the samples, one after the other."""
    async with OneWorker(SOURCE, adapter, **options) as worker:
        return [await worker.score(sample, 20.0) for sample in samples]


async def test_a_result_carries_reward_components_attempts_and_latency():
    long = {"completion": "x" * 2_000_000, "ids": list(range(100_000))}  # far more than a socket buffer holds
    strange, result = await score_all("echo", {"value": object()}, {"value": 0.1 + 0.2} | long)
    assert strange.status is RewardStatus.FAILED and "not JSON serializable" in strange.reason
    assert (result.adapter, result.status, result.reason) == ("echo", RewardStatus.OK, "")
    assert result.reward == 0.1 + 0.2  # exactly: JSON keeps every bit of a float
    assert result.extra == {"twice": 2 * (0.1 + 0.2)}
    assert result.attempts == 1 and 0 < result.latency_s < 50


async def test_text_of_every_kind_arrives_unchanged():
    text = '\x00\n"\\ é 漢 🙂 \ud800 end'  # a lone surrogate is what broken decoding leaves behind
    (result,) = await score_all("same", {"completion": text, "points": [ord(c) for c in text]})
    assert result.reward == 1.0


async def test_a_crash_is_tried_once_more_on_a_fresh_process(tmp_path):
    (result,) = await score_all("ends_itself_once", {"mark": str(tmp_path / "mark")})
    assert (result.status, result.reward, result.attempts) == (RewardStatus.OK, 1.0, 2)


async def test_a_process_killed_between_two_samples_costs_no_sample():
    async with OneWorker(SOURCE, "echo") as worker:
        os.kill(worker.pid, signal.SIGKILL)
        assert (await worker.score({"value": 3}, 20)).reward == 3


async def test_the_process_sees_a_main_thread_few_variables_no_input_and_dumps_no_core(monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "do not pass on")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    (result,) = await score_all("looks_around", {})
    assert result.reward == 1.0, result.reason
    assert "SECRET_KEY" not in child_environment() and "PATH" in child_environment()


@pytest.mark.parametrize(
    ("adapter", "large", "small"),
    [("echo", {"text": "x" * 5000}, {}), ("verbose", {"length": 5000}, {"length": 5})],
)
async def test_a_sample_or_an_answer_that_is_too_large_is_a_failure(adapter, large, small):
    samples = [{"value": 1} | large, {"value": 1} | small]
    refused, scored = await score_all(adapter, *samples, max_message_bytes=4096)
    assert refused.status is RewardStatus.FAILED and "exceeds the limit of 4096" in refused.reason
    assert scored.reward == 1


async def test_warming_up_happens_at_the_start_and_not_on_a_samples_time():
    (result,) = await score_all("warm", {})
    assert result.reward == 20.0


@pytest.mark.parametrize(
    ("adapter", "error", "said"),
    [
        ("cold", ProcessDied, "'cold' was not ready within 0.5 s"),
        ("dead_on_arrival", ProcessDied, "exit status 9"),
        ("broken", ConfigurationError, "'broken' cannot start: ZeroDivisionError"),
    ],
)
async def test_a_process_that_cannot_start_says_why_and_fails_its_samples_one_by_one(adapter, error, said):
    worker = AdapterProcess(SOURCE, adapter, start_timeout_s=0.5 if adapter == "cold" else 60.0)
    with pytest.raises(error, match=said):
        await worker.start()
    if error is ProcessDied:  # worth another attempt
        with pytest.raises(ProcessDied, match=said):
            await worker.score({}, 20)
    else:  # it will not get better
        result = await worker.score({}, 20)
        assert (result.status, result.attempts) == (RewardStatus.FAILED, 1) and said in result.reason
    await worker.close()


async def test_the_answer_to_a_cancelled_call_never_reaches_the_next_sample():
    worker = AdapterProcess(SOURCE, "sleeps")
    await worker.start()
    for value in range(4):
        call = asyncio.create_task(worker.score({"seconds": 0.02 * value, "value": -1}, 20))
        await asyncio.sleep(0.03)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert (await worker.score({"seconds": 0, "value": value}, 20)).reward == value
    await worker.close()


async def test_no_process_and_no_descriptor_is_left_behind():
    def open_descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    children = set(psutil.Process().children(recursive=True))
    worker = AdapterProcess(SOURCE, "sleeps")
    before = open_descriptors()
    for _ in range(3):
        await worker.score({"seconds": 600, "value": 1}, 0.05)
    await worker.close()
    async with asyncio.timeout(10):
        while open_descriptors() != before:  # the event loop closes a pipe when it next comes round to it
            await asyncio.sleep(0.01)
    assert set(psutil.Process().children(recursive=True)) <= children  # not even a zombie is left


def test_a_message_is_a_line_of_json():
    assert framing.encode({"a": [1, None, "\n"]}, max_bytes=100) == b'{"a":[1,null,"\\n"]}'
    with pytest.raises(ValueError, match="19 bytes exceeds the limit of 18"):
        framing.encode({"a": [1, None, "\n"]}, max_bytes=18)
    message = b'{"a":"\\n"}\n{"b":2}\n'
    for size in range(1, len(message)):  # in pieces of any size
        lines = framing.Lines(100)
        pieces = [message[start : start + size] for start in range(0, len(message), size)]
        assert [one for piece in pieces for one in lines.feed(piece)] == [{"a": "\n"}, {"b": 2}]
