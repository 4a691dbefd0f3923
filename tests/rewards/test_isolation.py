"""A reward in its process: what reaches it and comes back, and that bombs, hangs and crashes cost their sample alone."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from async_grpo.errors import ConfigurationError, WorkerLost
from async_grpo.rewards.adapter.registry_source import RewardRegistrySource
from async_grpo.rewards.isolation import child
from async_grpo.rewards.isolation.adapter_process import AdapterProcess, child_environment
from async_grpo.rewards.verifier_worker import ProcessDied
from async_grpo.types import AdapterResult, RewardStatus
from tests.helpers.one_worker import OneWorker

OK, FAILED, TIMED_OUT, ABSTAINED = RewardStatus
PAGE = textwrap.dedent(
    '''
    import asyncio, ctypes, mmap, os, signal, struct, subprocess, sys, threading, time
    from async_grpo.rewards.adapter.decorators import batch, post_process

    BOMBS = mmap.mmap(-1, 8)  # shared by all forks: the test must not take the machine down if nobody stops the bomb

    def bomb(sessions):
        while True:
            count = struct.unpack("q", BOMBS[:8])[0]
            BOMBS[:8] = struct.pack("q", count + 1)
            if count > 3000:
                time.sleep(60)
            if os.fork() == 0 and sessions:
                os.setsid()

    def channel_fd():
        return int(sys.argv[1])

    def orphan():
        """A grandchild in a session of its own, whose parent is gone."""
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(600)
            os._exit(0)
        os.wait()

    def close_channel():
        os.closerange(3, 2**16)  # its number is that of a test process, which may have opened many

    DEEDS = {
        "nothing": lambda: None,
        "bomb": lambda: bomb(False),
        "bomb in sessions": lambda: bomb(True),
        "shell bomb": lambda: subprocess.run(["bash", "-c", "for i in $(seq 2000); do sleep 30 & done; wait"]),
        "exit": lambda: sys.exit(3),
        "_exit": lambda: os._exit(3),
        "orphan": orphan,
        "orphan and kill group": lambda: (orphan(), os.killpg(0, signal.SIGKILL)),
        "orphan and hang": lambda: (orphan(), time.sleep(600)),
        "fork comes back": lambda: os.fork(),
        "kill parent": lambda: (os.kill(os.getppid(), signal.SIGKILL), time.sleep(600)),
        "stop parent and hang": lambda: (os.kill(os.getppid(), signal.SIGSTOP), time.sleep(600)),
        "SIGSEGV": lambda: ctypes.string_at(0),
        "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "ignore all and hang": lambda: ([signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)], time.sleep(600)),
        "memory": lambda: [bytearray(2**26) for _ in range(1000)],
        "threads": lambda: [threading.Thread(target=time.sleep, args=(600,), daemon=True).start() for _ in range(5000)],
        "close channel": close_channel,
        "close channel and hang": lambda: (close_channel(), time.sleep(600)),
        "close channel and die slowly": lambda: (close_channel(), time.sleep(0.1), os._exit(7)),
        "print": lambda: print("x" * 100_000, flush=True),
        "noise": lambda: os.write(channel_fd(), b"\\xff" * 1000 + b"\\n"),
        "an answer to nothing": lambda: os.write(channel_fd(), b'{"id": 99, "answers":[]}\\n'),
        "hang": lambda: time.sleep(600),
        "nap": lambda: time.sleep(0.3),
        "spin": lambda: [None for _ in iter(int, 1)],
    }

    def plain(sample):
        DEEDS[sample.get("deed", "nothing")]()
        time.sleep(sample.get("seconds", 0))
        value = sample.get("value", 1.0)
        return {"reward": value, "x" * sample.get("length", 1): 2 * value}

    def looks_around(sample):
        import resource
        assert threading.current_thread() is threading.main_thread()
        assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)
        assert "SECRET_KEY" not in os.environ, "the environment leaks"
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "", "rewards see the GPUs of the trainer"
        assert sys.stdin.read() == ""
        return float(os.environ["OMP_NUM_THREADS"]) * looks_around.warmth

    def same(sample):
        return sample["completion"] == "".join(map(chr, sample["points"]))

    looks_around.warm_up = lambda: setattr(looks_around, "warmth", 20.0)

    def starts_by(warm_up):
        reward = lambda sample: 1.0
        reward.warm_up = warm_up
        return reward

    cold = starts_by(lambda: time.sleep(600))
    broken = starts_by(lambda: 1 / 0)
    dead_on_arrival = starts_by(lambda: os._exit(9))

    async def slow(sample):
        """Waits first, so that the others are in flight when it does its deed."""
        await asyncio.sleep(sample.get("seconds", 0.3))
        DEEDS[sample.get("deed", "nothing")]()
        return sample.get("value", 1.0)

    async def deaf(sample):
        while sample.get("deaf"):
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                pass
        await asyncio.sleep(sample.get("seconds", 0.0))
        return 1.0

    @post_process(lambda group: [None for _ in group])
    @batch(max_samples=8, max_wait_s=0.2)
    def batched(samples):
        for sample in samples:
            DEEDS[sample.get("deed", "nothing")]()
        return [{"reward": sample.get("value", 1.0), "size": len(samples)} for sample in samples]

    @post_process(lambda group: [DEEDS[member["sample"].get("deed", "nothing")]() for member in group])
    def grouped(sample):
        return 1.0

    REWARD_ADAPTERS = {name: value for name, value in list(globals().items()) if callable(value)}
    '''
)
SOURCE = RewardRegistrySource("hostile_page", PAGE)


@pytest.fixture
def mark(tmp_path, monkeypatch) -> bytes:
    """Found in the environment of every process that a test's worker has started, whatever became of its parents."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return str(tmp_path).encode()


def marked(mark: bytes) -> list[int]:
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if mark in Path(f"/proc/{name}/environ").read_bytes() and int(name) != os.getpid():
                found.append(int(name))
        except OSError:  # it has ended, or is somebody else's
            pass
    return found


async def nothing_is_left(mark: bytes) -> None:
    """Wait for the end of what has been killed: on a busy machine it takes the kernel a moment."""
    deadline = time.monotonic() + 10
    while marked(mark) and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    assert not marked(mark), "something has survived"


@asynccontextmanager
async def worker(adapter: str, mark: bytes, **options: Any) -> AsyncIterator[OneWorker]:
    """A started worker; when it is closed, nothing of it may be left."""
    process = OneWorker(SOURCE, adapter, **options)
    try:
        await process.start()
        assert marked(mark)
        yield process
    finally:
        await process.close()
        await nothing_is_left(mark)


async def score(process: OneWorker, timeout_s: float = 20.0, **sample: Any) -> AdapterResult:
    return await process.score(sample, timeout_s)


async def both(process: OneWorker, timeout_s: float, **sample: Any) -> AdapterResult:
    """The result of the sample; the one after it must be right."""
    result = await score(process, timeout_s, **sample)
    assert (await score(process, value=0.25)).reward == 0.25
    return result


def may_raise_its_priority() -> bool:
    capabilities = Path("/proc/self/status").read_text().split("CapEff:")[1].split()[0]
    return bool(int(capabilities, 16) >> 23 & 1)  # CAP_SYS_NICE


# What reaches it and comes back -----------------------------------------------------------------------------------


async def score_all(
    adapter: str, mark: bytes, *samples: dict[str, Any], **options: Any
) -> list[AdapterResult]:
    """The results of one worker for the samples, one after the other."""
    async with worker(adapter, mark, **options) as process:
        return [await process.score(sample, 20.0) for sample in samples]


async def test_a_result_carries_reward_components_attempts_and_latency(mark):
    long = {"completion": "x" * 2_000_000, "ids": list(range(100_000))}  # far more than a socket buffer holds
    strange, result = await score_all("plain", mark, {"value": object()}, {"value": 0.1 + 0.2} | long)
    assert strange.status is FAILED and "not JSON serializable" in strange.reason
    assert (result.adapter, result.status, result.reason, result.attempts) == ("plain", OK, "", 1)
    # Exactly: JSON keeps every bit of a float
    assert result.reward == 0.1 + 0.2 and result.extra == {"x": 2 * (0.1 + 0.2)} and 0 < result.latency_s < 50


async def test_text_of_every_kind_arrives_unchanged(mark):
    text = '\x00\n"\\ é 漢 🙂 \ud800 end'  # a lone surrogate is what broken decoding leaves behind
    (result,) = await score_all("same", mark, {"completion": text, "points": [ord(c) for c in text]})
    assert result.reward == 1.0


async def test_a_process_killed_between_two_samples_costs_no_sample(mark):
    async with worker("plain", mark) as process:
        os.kill(process.pid, signal.SIGKILL)
        assert (await score(process, value=3)).reward == 3


async def test_the_process_is_warm_and_sees_few_variables_and_no_input_and_dumps_no_core(mark, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "do not pass on")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    (result,) = await score_all("looks_around", mark, {})
    assert result.reward == 20.0, result.reason


@pytest.mark.parametrize("large", [{"text": "x" * 5000}, {"length": 5000}])
async def test_a_sample_or_an_answer_that_is_too_large_is_a_failure(large, mark):
    refused, scored = await score_all("plain", mark, large, {}, max_message_bytes=4096)
    assert refused.status is FAILED and "exceeds the limit of 4096" in refused.reason
    assert scored.reward == 1


@pytest.mark.parametrize(
    ("adapter", "error", "said"),
    [
        ("cold", ProcessDied, "'cold' was not ready within 0.5 s"),
        ("dead_on_arrival", ProcessDied, "exit status 9"),
        ("broken", ConfigurationError, "'broken' cannot start: ZeroDivisionError"),
    ],
)
async def test_a_process_that_cannot_start_says_why_and_fails_its_samples_one_by_one(adapter, error, said):
    worker = AdapterProcess(SOURCE, adapter)
    worker.start_timeout_s = 0.5 if adapter == "cold" else 60.0
    with pytest.raises(error, match=said):
        await worker.start()
    if error is ProcessDied:  # worth another attempt
        with pytest.raises(ProcessDied, match=said):
            await worker.score({}, 20)
    else:  # it will not get better
        result = await worker.score({}, 20)
        assert (result.status, result.attempts) == (FAILED, 1) and said in result.reason
    await worker.close()


async def test_no_descriptor_and_no_zombie_is_left_behind():
    def open_descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    children, before = set(psutil.Process().children(recursive=True)), open_descriptors()
    process = AdapterProcess(SOURCE, "plain")
    for _ in range(3):
        await process.score({"deed": "hang"}, 0.05)
    await process.close()
    async with asyncio.timeout(10):
        while open_descriptors() != before:  # the event loop closes a pipe when it next comes round to it
            await asyncio.sleep(0.01)
    assert set(psutil.Process().children(recursive=True)) <= children


def test_a_message_is_a_line_of_json_whatever_the_pieces_it_comes_in_and_has_an_end():
    message = child.encode_line({"a": "\n"}) + b"\n" + child.encode_line({"b": 2}) + b"\n"
    for size in range(1, len(message)):
        lines = child.Lines(max_bytes=10)
        pieces = [message[start : start + size] for start in range(0, len(message), size)]
        assert [one for piece in pieces for one in lines.feed(piece)] == [{"a": "\n"}, {"b": 2}]
    with pytest.raises(ValueError, match="more than 10 bytes"):
        list(lines.feed(b"x" * 11))


# One at a time ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deed", ["bomb", "bomb in sessions", "shell bomb"])
async def test_a_fork_bomb_costs_its_sample_and_none_of_its_processes_survives(deed, mark):
    if deed == "bomb in sessions" and not may_raise_its_priority():
        pytest.skip("without CAP_SYS_NICE the keeper may lose this race")
    async with worker("plain", mark, max_processes=24) as process:
        started = time.monotonic()
        bombed = await both(process, 30.0, deed=deed)
        assert (bombed.status, bombed.attempts) == (FAILED, 2) and time.monotonic() - started < 15
        reason = "the process of 'plain' was ended, for it had started more than 24 processes"
        assert bombed.reason == reason


@pytest.mark.parametrize(
    ("deed", "reason"),
    [
        ("exit", "SystemExit: 3 at hostile_page.py"),
        ("memory", "MemoryError"),
        ("threads", "RuntimeError: can't start new thread"),
    ],
)
async def test_what_python_notices_is_a_failure_and_the_process_lives_on(deed, reason, mark):
    async with worker("plain", mark, memory_limit_bytes=2**30) as process:
        pid = process.pid
        result = await both(process, 20.0, deed=deed)
        assert result.status is FAILED and result.attempts == 1 and reason in result.reason
        assert process.pid == pid


@pytest.mark.parametrize(
    ("deed", "reason"),
    [
        ("_exit", "died (exit status 3)"),
        ("orphan and kill group", "died (signal SIGKILL)"),
        ("SIGSEGV", "died (signal SIGSEGV)"),
        ("kill parent", "died (signal SIGKILL)"),
        ("close channel", "died: the reward closed file descriptors that it had not opened"),
        ("close channel and die slowly", "died (exit status 7)"),
        ("close channel and hang", "died (signal SIGKILL)"),
        ("noise", "answered nonsense: UnicodeDecodeError"),
        ("an answer to nothing", "answered nonsense: KeyError: 99"),
    ],
)
async def test_what_ends_the_process_or_spoils_its_channel_fails_on_the_second_attempt(deed, reason, mark):
    async with worker("plain", mark) as process:
        result = await both(process, 20.0, deed=deed)
        assert (result.status, result.reward, result.attempts) == (FAILED, None, 2)
        assert result.reason.startswith(f"the process of 'plain' {reason}")


@pytest.mark.parametrize(
    "deed", ["spin", "SIGSTOP", "ignore all and hang", "orphan and hang", "stop parent and hang"]
)
async def test_what_never_ends_is_timed_out_and_killed(deed, mark):
    async with worker("plain", mark) as process:
        result = await both(process, 0.4, deed=deed)
        assert (result.status, result.reason, result.attempts) == (TIMED_OUT, "no answer within 0.4 s", 1)
        assert len(marked(mark)) == 2  # the new keeper and its process: nothing of the old ones


async def test_prints_and_orphans_and_forks_that_come_back_disturb_nothing(mark, capfd):
    async with worker("plain", mark) as process:
        pid = process.pid
        for deed in ("print", "orphan", "fork comes back"):
            for value in (0.5, 0.75):
                result = await score(process, deed=deed, value=value)
                assert (result.reward, result.attempts) == (value, 1)
                await asyncio.sleep(0.05)  # for whatever else the process might answer
        assert process.pid == pid
    assert capfd.readouterr().out == ""


async def test_nothing_of_a_worker_survives_its_parent(mark):
    program = f"""
import asyncio
from async_grpo.rewards.isolation.adapter_process import AdapterProcess
from async_grpo.rewards.adapter.registry_source import RewardRegistrySource
source = RewardRegistrySource('hostile_page', {PAGE!r})
asyncio.run(AdapterProcess(source, 'plain').score({{'deed': 'orphan and hang'}}, 600))
"""
    parent = subprocess.Popen([sys.executable, "-c", program], env=child_environment())
    try:
        async with asyncio.timeout(20):
            while len(marked(mark)) < 4:  # the parent, the keeper, its process, the orphan
                await asyncio.sleep(0.01)
    finally:
        parent.kill()
        parent.wait(timeout=20)
    await nothing_is_left(mark)


async def test_the_kernel_takes_a_verifier_first_when_memory_runs_out(mark):
    async with worker("plain", mark) as process:
        (child,) = set(marked(mark)) - {process.pid}
        scores = [Path(f"/proc/{pid}/oom_score_adj").read_text().strip() for pid in (child, process.pid)]
        assert scores[0] == "1000" != scores[1]


# Many at a time ---------------------------------------------------------------------------------------------------


async def gathered(process: OneWorker, samples: list[dict[str, Any]], timeout_s: float = 20.0) -> list[Any]:
    return await asyncio.gather(
        *(process.score(sample, timeout_s) for sample in samples), return_exceptions=True
    )


@pytest.mark.parametrize("deed", ["_exit", "close channel", "bomb"])
async def test_a_crash_among_many_in_flight_fails_one_sample_and_the_others_are_scored(deed, mark):
    async with worker("slow", mark, max_processes=24) as process:
        samples = [{"value": float(number), "seconds": 0.2} for number in range(6)]
        samples[3] |= {"deed": deed, "seconds": 0.05}
        results = await gathered(process, samples)
        assert [result.reward for result in results] == [0.0, 1.0, 2.0, None, 4.0, 5.0]
        assert (results[3].status, results[3].attempts) == (FAILED, 2)


async def test_a_timed_out_sample_is_cancelled_and_its_siblings_do_not_notice(mark):
    async with worker("deaf", mark) as process:
        pid = process.pid
        siblings = asyncio.create_task(gathered(process, [{"seconds": 0.6}] * 5))
        late = await score(process, 0.2, seconds=600)
        assert (late.status, late.reason) == (TIMED_OUT, "no answer within 0.2 s")
        assert [(result.reward, result.attempts) for result in await siblings] == [(1.0, 1)] * 5
        assert process.pid == pid


async def test_a_cancelled_call_ends_when_its_place_is_free_and_costs_no_other(mark):
    async with worker("deaf", mark) as process:
        pid = process.pid
        calls = [asyncio.create_task(score(process, seconds=600)) for _ in range(process.process.capacity)]
        await asyncio.sleep(0.2)
        waiting = asyncio.create_task(score(process, seconds=0))
        await asyncio.sleep(0.1)
        assert not waiting.done()  # all places are taken
        calls[7].cancel()
        assert (await waiting).reward == 1.0
        assert calls[7].cancelled() and sum(call.done() for call in calls) == 1
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert process.pid == pid and (await score(process)).reward == 1.0


@pytest.mark.parametrize(
    ("adapter", "sample"),
    [("deaf", {"deaf": True}), ("slow", {"seconds": 0.1, "deed": "spin"}), ("slow", {"deed": "SIGSTOP"})],
)
async def test_a_sample_that_cannot_be_cancelled_costs_the_process_and_no_sibling(adapter, sample, mark):
    async with worker(adapter, mark, grace_s=0.3) as process:
        siblings = asyncio.create_task(gathered(process, [{"seconds": 1.0}] * 3))
        await asyncio.sleep(0)
        assert (await score(process, 0.4, **sample)).status is TIMED_OUT
        assert [(result.status, result.attempts) for result in await siblings] == [(OK, 1)] * 3
        assert (await score(process, seconds=0)).reward == 1.0


@pytest.mark.parametrize(("deed", "attempts"), [("exit", 1), ("_exit", 2)])
async def test_one_bad_sample_does_not_cost_its_batch(deed, attempts, mark):
    async with worker("batched", mark) as process:
        samples = [{"value": float(number)} for number in range(4)]
        samples[2]["deed"] = deed
        results = await gathered(process, samples)
        assert [result.reward for result in results] == [0.0, 1.0, None, 3.0]
        assert results[2].status is FAILED and {result.attempts for result in results} == {attempts}


async def test_a_batch_that_hangs_is_timed_out_as_one_and_what_waits_behind_it_has_its_own_time(mark):
    async with worker("batched", mark) as process:
        hanging = asyncio.create_task(gathered(process, [{}, {"deed": "hang"}, {}], timeout_s=1.2))
        await asyncio.sleep(0.5)  # it is under way
        group = process.post_process([{}] * 2, [AdapterResult("batched", OK, 1.0)] * 2, 0.6)
        following = [*await group, await score(process, 0.6)]
        assert [result.status for result in await hanging] == [TIMED_OUT] * 3
        assert {(result.status, result.attempts) for result in following} == {(OK, 1)}


@pytest.mark.parametrize(("cancelled_after_s", "size"), [(0.05, 1), (0.4, 2)])
async def test_a_batch_goes_on_without_the_one_whose_caller_has_gone(cancelled_after_s, size, mark):
    """Before it is begun the sample is withdrawn, afterwards it is computed for no one."""
    async with worker("batched", mark) as process:
        gone, stays = (asyncio.create_task(score(process, value=v, deed="nap")) for v in (0.25, 0.5))
        await asyncio.sleep(cancelled_after_s)
        gone.cancel()
        assert ((await stays).reward, (await stays).extra["size"]) == (0.5, size) and gone.cancelled()
        assert (await score(process)).attempts == 1


@pytest.mark.parametrize(
    ("deed", "status", "reason"),
    [
        ("_exit", FAILED, "the process of 'grouped' died (exit status 3)"),
        ("exit", FAILED, "post_process_scores: SystemExit: 3"),
        ("hang", TIMED_OUT, "no answer within 0.6 s"),
    ],
)
async def test_what_post_processing_does_costs_its_group(deed, status, reason, mark):
    async with worker("grouped", mark) as process:
        group = [{}, {"deed": deed}]
        results = [await process.score({}, 20.0) for _ in group]
        changed = await process.post_process(group, results, 0.6)
        assert [result.status for result in changed] == [status] * 2
        assert all(result.reason.startswith(reason) for result in changed)
        assert (await score(process)).reward == 1.0


async def test_closing_ends_all_calls_in_flight(mark):
    for adapter in ("slow", "batched"):
        process = AdapterProcess(SOURCE, adapter)
        sample = {"seconds": 600, "deed": "hang"}
        calls = [asyncio.create_task(process.score(sample, 20.0)) for _ in range(4)]
        await asyncio.sleep(0.3)
        await process.close()
        for call in calls:
            with pytest.raises(WorkerLost, match="closed"):
                await call
        with pytest.raises(WorkerLost, match="closed"):
            await process.score(sample, 20.0)
        assert not marked(mark)


def test_a_reward_process_starts_and_scores_in_uvloop_which_ray_runs_actors_in(mark):
    """Its transports are no subclasses of asyncio's: what insists on them hangs in a run and nowhere else."""
    uvloop = pytest.importorskip("uvloop")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        (result,) = runner.run(asyncio.wait_for(score_all("plain", mark, {}), 30))
    assert result.reward == 1.0
