"""Adapters in killable processes: every way to misbehave, and nothing that outlives its parent."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from async_grpo.errors import ConfigurationError, WorkerLost
from async_grpo.rewards.adapter.registry_source import RewardRegistrySource
from async_grpo.rewards.isolation import framing
from async_grpo.rewards.isolation.adapter_process import AdapterProcess, process_maker
from async_grpo.rewards.isolation.spawn import child_environment
from async_grpo.rewards.verifier_worker import ProcessDied
from async_grpo.types import AdapterResult, RewardStatus
from tests.helpers.one_worker import OneWorker

PAGE = textwrap.dedent(
    """
    import os, signal, subprocess, sys, threading, time

    def echo(sample):
        return {"reward": sample["value"], "twice": 2 * sample["value"]}

    def pid(sample):
        return {"reward": os.getpid()}

    def raises(sample):
        return {"reward": 1 / sample["divisor"]}

    def leaves(sample):
        sys.exit("enough")

    def sleeps(sample):
        time.sleep(sample["seconds"])
        return {"reward": sample["value"]}

    def ends_itself(sample):
        os._exit(3)

    def dies_slowly(sample):
        os.closerange(3, 100)  # the channel is among them
        time.sleep(0.1)
        os._exit(7)

    def ends_itself_once(sample):
        if not os.path.exists(sample["mark"]):
            open(sample["mark"], "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"reward": 1.0}

    def answers(sample):
        return eval(sample["answer"], {"nan": float("nan"), "inf": float("inf")})

    def chatters(sample):
        print("x" * 100_000)
        os.write(1, b"binary\\x00\\xff")
        sys.stdout.flush()
        return {"reward": 1.0}

    def eats_memory(sample):
        return {"reward": len(bytearray(sample["num_bytes"]))}

    def starts_a_program(sample):
        program = subprocess.Popen(["sleep", "600"])
        with open(sample["pid_file"], "w") as file:
            file.write(str(program.pid))
        time.sleep(600)

    def looks_around(sample):
        import resource
        assert threading.current_thread() is threading.main_thread()
        assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)
        assert "SECRET_KEY" not in os.environ, "the environment leaks"
        assert sys.stdin.read() == ""
        return {"reward": float(os.environ["OMP_NUM_THREADS"])}

    def weighs(sample, weight=0.5):
        return {"reward": weight}

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


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Any, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(condition())


def test_a_result_carries_reward_components_attempts_and_latency():
    (result,) = score_all("echo", [{"value": 0.1 + 0.2}])
    assert result.status is RewardStatus.OK
    assert result.reward == 0.1 + 0.2  # exactly: JSON keeps every bit of a float
    assert result.extra == {"twice": 2 * (0.1 + 0.2)}
    assert (result.adapter, result.attempts, result.reason) == ("echo", 1, "")
    assert 0 < result.latency_s < 50


def test_one_process_serves_many_samples():
    pids = {result.reward for result in score_all("pid", [{}] * 20)}
    assert len(pids) == 1 and os.getpid() not in pids


def test_text_of_every_kind_arrives_unchanged():
    page = (
        'def same(sample): return {"reward": sample["completion"] == "".join(map(chr, sample["points"]))}\n'
        'REWARD_ADAPTERS = {"same": same}'
    )
    text = '\x00\n"\\ é 漢 🙂 \ud800 end'  # a lone surrogate is what broken decoding leaves behind

    async def main() -> AdapterResult:
        worker = AdapterProcess(RewardRegistrySource.from_text("same_page", page), "same")
        try:
            return await worker.score({"completion": text, "points": [ord(c) for c in text]}, 20)
        finally:
            await worker.close()

    assert run(main()).reward == 1.0


def test_an_exception_is_a_failure_with_its_reason_and_the_process_lives_on():
    first, second = score_all("raises", [{"divisor": 0}, {"divisor": 2}])
    assert first.status is RewardStatus.FAILED and first.reward is None and first.attempts == 1
    assert first.reason.startswith("ZeroDivisionError: division by zero at page_of_tests.py:")
    assert first.reason.endswith('return {"reward": 1 / sample["divisor"]}')
    assert second.reward == 0.5


def test_a_missing_column_names_itself():
    (result,) = score_all("echo", [{}])
    assert result.status is RewardStatus.FAILED and "KeyError: 'value'" in result.reason


def test_an_adapter_that_exits_has_failed_and_the_process_lives_on():
    results = score_all("leaves", [{}, {}])
    assert [result.status for result in results] == [RewardStatus.FAILED] * 2
    assert "SystemExit: enough" in results[0].reason and results[0].attempts == 1


def test_a_timed_out_sample_is_marked_and_not_scored_zero_and_the_next_gets_a_fresh_process():
    async def main() -> None:
        worker = AdapterProcess(SOURCE, "sleeps")
        await worker.start()
        first_pid = worker.pid
        slow = await worker.score({"seconds": 600, "value": 1}, 0.1)
        assert (
            slow.status is RewardStatus.TIMED_OUT
            and slow.reward is None
            and slow.reason == "no answer within 0.1 s"
        )
        assert worker.pid is None and not is_alive(first_pid)
        quick = await worker.score({"seconds": 0, "value": 2}, 20)
        assert quick.reward == 2 and worker.pid not in (None, first_pid)
        await worker.close()

    run(main())


def test_a_time_out_also_kills_what_the_adapter_started(tmp_path):
    pid_file = tmp_path / "pid"

    async def main() -> None:
        worker = AdapterProcess(SOURCE, "starts_a_program")
        call = asyncio.create_task(worker.score({"pid_file": str(pid_file)}, 2.0))
        assert await asyncio.to_thread(wait_until, lambda: pid_file.exists() and pid_file.read_text())
        assert is_alive(int(pid_file.read_text()))
        assert (await call).status is RewardStatus.TIMED_OUT
        await worker.close()

    run(main())
    assert wait_until(lambda: not is_alive(int(pid_file.read_text())))


def test_a_crash_is_tried_once_more_on_a_fresh_process(tmp_path):
    (result,) = score_all("ends_itself_once", [{"mark": str(tmp_path / "mark")}])
    assert (result.status, result.reward, result.attempts) == (RewardStatus.OK, 1.0, 2)


def test_two_crashes_are_a_failure_that_names_the_cause():
    (result,) = score_all("ends_itself", [{}])
    assert (result.status, result.reward, result.attempts) == (RewardStatus.FAILED, None, 2)
    assert result.reason == "the process of 'ends_itself' died (exit status 3)"


def test_a_process_that_takes_its_time_to_die_still_names_its_own_cause():
    (result,) = score_all("dies_slowly", [{}])
    assert result.reason == "the process of 'dies_slowly' died (exit status 7)"


def test_a_process_killed_between_two_samples_costs_no_sample():
    async def main() -> None:
        async with OneWorker(SOURCE, "echo") as worker:
            os.kill(worker.pid, signal.SIGKILL)
            assert (await worker.score({"value": 3}, 20)).reward == 3

    run(main())


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("None", "returned a NoneType, not a number or a dict"),
        ("'1.0'", "returned a str, not a number or a dict"),
        ("[1.0]", "returned a list, not a number or a dict"),
        ("nan", "reward=nan: only finite numbers are allowed"),
        ("{}", "no `reward`"),
        ("{'points': 1.0}", "no `reward`, only ['points']"),
        ("{'score': None}", "reward=None"),
        ("{'reward': None}", "reward=None: only finite numbers are allowed"),
        ("{'reward': '1.0'}", "reward='1.0'"),
        ("{'reward': nan}", "reward=nan"),
        ("{'reward': inf}", "reward=inf"),
        ("{'reward': 1.0, 'part': -inf}", "part=-inf"),
        ("{'reward': 1.0, 'answer': 'text'}", "answer='text'"),
        ("{'reward': [1.0]}", "reward=[1.0]"),
        ("{'reward': 10**400}", "OverflowError"),
    ],
)
def test_an_answer_without_a_finite_reward_is_a_failure(answer, reason):
    right = {"answer": "{'reward': True, 'part': 2}"}
    result, after = score_all("answers", [{"answer": answer}, right])
    assert result.status is RewardStatus.FAILED and result.reward is None
    assert reason in result.reason
    assert (after.status, after.reward, after.extra) == (RewardStatus.OK, 1.0, {"part": 2.0})


def test_an_adapter_may_abstain():
    (result,) = score_all("answers", [{"answer": "{'abstain': 'no code in it'}"}])
    assert (result.status, result.reward, result.reason) == (RewardStatus.ABSTAINED, None, "no code in it")


def test_prints_go_to_stderr_and_cannot_disturb_the_protocol(capfd):
    results = score_all("chatters", [{}, {}])
    assert [result.reward for result in results] == [1.0, 1.0]
    captured = capfd.readouterr()
    assert captured.out == "" and len(captured.err) > 200_000


def test_memory_is_limited_and_running_out_of_it_is_a_failure():
    over, under = score_all(
        "eats_memory", [{"num_bytes": 2**30}, {"num_bytes": 2**20}], memory_limit_bytes=2**29
    )
    assert over.status is RewardStatus.FAILED and "MemoryError" in over.reason
    assert under.reward == 2**20


def test_the_process_sees_a_main_thread_few_variables_no_input_and_dumps_no_core(monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "do not pass on")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    (result,) = score_all("looks_around", [{}])
    assert result.reward == 1.0, result.reason
    assert "SECRET_KEY" not in child_environment() and "PATH" in child_environment()


def test_the_adapter_receives_only_the_options_that_it_names():
    assert score_all("weighs", [{}], options={"weight": 2.0, "url": "x"})[0].reward == 2.0
    assert score_all("echo", [{"value": 1}], options={"weight": 2.0})[0].reward == 1


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


def start_of(adapter: str, **options: Any) -> None:
    async def main() -> None:
        worker = AdapterProcess(SOURCE, adapter, **options)
        try:
            await worker.start()
        finally:
            await worker.close()

    run(main())


def test_a_process_that_is_not_ready_in_time_is_lost():
    with pytest.raises(WorkerLost, match="'cold' was not ready within 0.5 s"):
        start_of("cold", start_timeout_s=0.5)


def test_a_process_that_dies_while_it_starts_is_lost():
    with pytest.raises(WorkerLost, match="exit status 9"):
        start_of("dead_on_arrival")


def test_an_adapter_that_cannot_warm_up_is_the_users_mistake():
    with pytest.raises(ConfigurationError, match="'broken' cannot start: ZeroDivisionError"):
        start_of("broken")


def test_an_unknown_adapter_is_the_users_mistake_and_lists_the_known_ones():
    with pytest.raises(ConfigurationError, match="unknown reward function mathx.*knows.*echo"):
        start_of("mathx")


def test_a_process_that_cannot_be_started_again_fails_its_samples_one_by_one():
    async def main() -> None:
        with pytest.raises(ProcessDied, match="exit status 9"):  # worth another attempt
            await AdapterProcess(SOURCE, "dead_on_arrival").score({}, 20)
        broken = await AdapterProcess(SOURCE, "broken").score({}, 20)  # it will not get better
        assert (broken.status, broken.attempts) == (RewardStatus.FAILED, 1)
        assert "'broken' cannot start: ZeroDivisionError" in broken.reason

    run(main())


def test_the_answer_to_a_cancelled_call_never_reaches_the_next_sample():
    async def main() -> None:
        worker = AdapterProcess(SOURCE, "sleeps")
        await worker.start()
        for value in range(5):
            call = asyncio.create_task(worker.score({"seconds": 0.02 * value, "value": -1}, 20))
            await asyncio.sleep(0.03)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            assert (await worker.score({"seconds": 0, "value": value}, 20)).reward == value
        await worker.close()

    run(main())


def test_calls_at_the_same_time_take_turns():
    async def main() -> None:
        worker = AdapterProcess(SOURCE, "echo")
        results = await asyncio.gather(*(worker.score({"value": value}, 20) for value in range(50)))
        assert [result.reward for result in results] == list(range(50))
        await worker.close()

    run(main())


def test_closing_ends_the_process_and_a_call_in_flight():
    async def main() -> None:
        worker = AdapterProcess(SOURCE, "sleeps")
        await worker.start()
        pid = worker.pid
        call = asyncio.create_task(worker.score({"seconds": 600, "value": 1}, 30))
        await asyncio.sleep(0.05)
        await worker.close()
        with pytest.raises(WorkerLost):
            await call
        with pytest.raises(WorkerLost, match="closed"):
            await worker.score({"seconds": 0, "value": 1}, 30)
        assert not is_alive(pid)

    run(main())


def test_it_works_in_an_event_loop_outside_the_main_thread():
    results = []
    thread = threading.Thread(target=lambda: results.extend(score_all("pid", [{}, {}])))
    thread.start()
    thread.join(timeout=50)
    assert len({result.reward for result in results}) == 1


def test_the_process_does_not_outlive_a_killed_parent(tmp_path):
    pid_file = tmp_path / "pid"
    page = (
        "import os, time\n"
        "def stuck(sample):\n"
        f"    open({str(pid_file)!r}, 'w').write(str(os.getpid()))\n"
        "    while True: pass\n"  # never looks at its channel: only the kernel can end it
        "REWARD_ADAPTERS = {'stuck': stuck}\n"
    )
    program = (
        "import asyncio\n"
        "from async_grpo.rewards.isolation.adapter_process import AdapterProcess\n"
        "from async_grpo.rewards.adapter.registry_source import RewardRegistrySource\n"
        f"source = RewardRegistrySource.from_text('stuck_page', {page!r})\n"
        "asyncio.run(AdapterProcess(source, 'stuck').score({}, 600))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], env=child_environment())
    try:
        assert wait_until(lambda: pid_file.exists() and pid_file.read_text())
        child_pid = int(pid_file.read_text())
        assert is_alive(child_pid)
    finally:
        parent.kill()
        parent.wait(timeout=20)
    assert wait_until(lambda: not is_alive(child_pid))


def test_process_maker_makes_started_workers():
    async def main() -> None:
        worker = await process_maker(SOURCE, {"weight": 3.0}, memory_limit_bytes=None)("weighs")
        assert worker.pid is not None
        assert (await worker.score({}, 20)).reward == 3.0
        await worker.close()

    run(main())


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


def test_a_frame_is_a_length_and_json():
    frame = framing.encode({"a": [1, None]}, max_bytes=100)
    assert frame == b"\x00\x00\x00\x0e" + b'{"a":[1,null]}'
    with pytest.raises(framing.MessageTooLarge, match="14 bytes exceeds the limit of 13"):
        framing.encode({"a": [1, None]}, max_bytes=13)
