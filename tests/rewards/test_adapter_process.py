"""Adapters in killable processes: every way to misbehave, and nothing that outlives its parent."""

import asyncio
import os
import signal
import textwrap
import time
from collections.abc import Coroutine
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

    def raises(sample):
        return {"reward": 1 / sample["divisor"]}

    def sleeps(sample):
        time.sleep(sample["seconds"])
        return {"reward": sample["value"]}

    def dies_slowly(sample):
        os.closerange(3, 100)  # the channel is among them
        time.sleep(0.1)
        os._exit(7)

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

    def warm(sample):
        return {"reward": warm.degrees}

    def warm_up():
        warm.degrees = 20.0

    warm.warm_up = warm_up

    def cold(sample):
        return {"reward": 1.0}

    def never_ready():
        time.sleep(600)

    cold.warm_up = never_ready

    def broken(sample):
        return {"reward": 1.0}

    broken.warm_up = lambda: 1 / 0

    def dead_on_arrival(sample):
        return {"reward": 1.0}

    dead_on_arrival.warm_up = lambda: os._exit(9)

    REWARD_ADAPTERS = {name: value for name, value in list(globals().items()) if callable(value)}
    """
)
SOURCE = RewardRegistrySource.from_text("page_of_tests", PAGE)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(50):
            return await coroutine

    return asyncio.run(bounded())


def score_all(
    adapter: str, samples: list[dict[str, Any]], timeout_s: float = 20.0, **options: Any
) -> list[AdapterResult]:
    """The results of one worker for the samples, one after the other."""

    async def main() -> list[AdapterResult]:
        worker = OneWorker(SOURCE, adapter, **options)
        try:
            await worker.start()
            return [await worker.score(sample, timeout_s) for sample in samples]
        finally:
            await worker.close()

    return run(main())


def test_a_result_carries_reward_components_attempts_and_latency():
    (result,) = score_all("echo", [{"value": 0.1 + 0.2}])
    assert result.status is RewardStatus.OK
    assert result.reward == 0.1 + 0.2  # exactly: JSON keeps every bit of a float
    assert result.extra == {"twice": 2 * (0.1 + 0.2)}
    assert (result.adapter, result.attempts, result.reason) == ("echo", 1, "")
    assert 0 < result.latency_s < 50


def test_text_of_every_kind_arrives_unchanged():
    text = '\x00\n"\\ é 漢 🙂 \ud800 end'  # a lone surrogate is what broken decoding leaves behind
    (result,) = score_all("same", [{"completion": text, "points": [ord(c) for c in text]}])
    assert result.reward == 1.0


def test_a_crash_is_tried_once_more_on_a_fresh_process(tmp_path):
    (result,) = score_all("ends_itself_once", [{"mark": str(tmp_path / "mark")}])
    assert (result.status, result.reward, result.attempts) == (RewardStatus.OK, 1.0, 2)


def test_a_process_that_takes_its_time_to_die_still_names_its_own_cause():
    (result,) = score_all("dies_slowly", [{}])
    assert result.reason == "the process of 'dies_slowly' died (exit status 7)"


async def test_a_process_killed_between_two_samples_costs_no_sample():
    async with OneWorker(SOURCE, "echo") as worker:
        os.kill(worker.pid, signal.SIGKILL)
        assert (await worker.score({"value": 3}, 20)).reward == 3


def test_the_process_sees_a_main_thread_few_variables_no_input_and_dumps_no_core(monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "do not pass on")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    (result,) = score_all("looks_around", [{}])
    assert result.reward == 1.0, result.reason
    assert "SECRET_KEY" not in child_environment() and "PATH" in child_environment()


def test_a_sample_or_an_answer_that_is_too_large_is_a_failure():
    large, small = score_all("echo", [{"value": 1, "text": "x" * 5000}, {"value": 1}], max_message_bytes=4096)
    assert large.status is RewardStatus.FAILED and "exceeds the limit of 4096" in large.reason
    assert small.reward == 1
    large, small = score_all("verbose", [{"length": 5000}, {"length": 5}], max_message_bytes=4096)
    assert large.status is RewardStatus.FAILED and "exceeds the limit of 4096" in large.reason
    assert small.reward == 1


def test_a_sample_that_is_no_json_is_a_failure_and_no_crash():
    strange, good = score_all("echo", [{"value": object()}, {"value": 1}])
    assert strange.status is RewardStatus.FAILED and "not JSON serializable" in strange.reason
    assert good.reward == 1


def test_long_samples_do_not_block_the_channel():
    text = "x" * 2_000_000  # far more than a socket buffer holds
    (result,) = score_all(
        "echo", [{"value": 1, "completion": text, "completion_token_ids": list(range(100_000))}]
    )
    assert result.reward == 1


def test_warming_up_happens_at_the_start_and_not_on_a_samples_time():
    assert score_all("warm", [{}])[0].reward == 20.0


@pytest.mark.parametrize(
    ("adapter", "error", "said"),
    [
        ("cold", ProcessDied, "'cold' was not ready within 0.5 s"),
        ("dead_on_arrival", ProcessDied, "exit status 9"),
        ("broken", ConfigurationError, "'broken' cannot start: ZeroDivisionError"),
        ("mathx", ConfigurationError, "unknown reward function mathx.*knows.*echo"),
    ],
)
async def test_a_process_that_cannot_start_says_why(adapter, error, said):
    worker = AdapterProcess(SOURCE, adapter, start_timeout_s=0.5 if adapter == "cold" else 60.0)
    try:
        with pytest.raises(error, match=said):
            await worker.start()
    finally:
        await worker.close()


async def test_a_process_that_cannot_be_started_again_fails_its_samples_one_by_one():
    with pytest.raises(ProcessDied, match="exit status 9"):  # worth another attempt
        await AdapterProcess(SOURCE, "dead_on_arrival").score({}, 20)
    broken = await AdapterProcess(SOURCE, "broken").score({}, 20)  # it will not get better
    assert (broken.status, broken.attempts) == (RewardStatus.FAILED, 1)
    assert "'broken' cannot start: ZeroDivisionError" in broken.reason


async def test_the_answer_to_a_cancelled_call_never_reaches_the_next_sample():
    worker = AdapterProcess(SOURCE, "sleeps")
    await worker.start()
    for value in range(5):
        call = asyncio.create_task(worker.score({"seconds": 0.02 * value, "value": -1}, 20))
        await asyncio.sleep(0.03)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert (await worker.score({"seconds": 0, "value": value}, 20)).reward == value
    await worker.close()


def test_no_process_and_no_descriptor_is_left_behind():
    def open_descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def main() -> None:
        worker = AdapterProcess(SOURCE, "sleeps")
        before = open_descriptors()
        for _ in range(4):
            await worker.score({"seconds": 600, "value": 1}, 0.05)
        await worker.close()
        until = time.monotonic() + 10  # the event loop closes a pipe when it next comes round to it
        while open_descriptors() != before and time.monotonic() < until:
            await asyncio.sleep(0.01)
        assert open_descriptors() == before

    children = set(psutil.Process().children(recursive=True))
    run(main())
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
