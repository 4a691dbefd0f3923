"""What a reward does to its process costs that sample alone: bombs, hangs, crashes, and nothing that is left behind."""

import asyncio
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from async_grpo.errors import WorkerLost
from async_grpo.rewards.adapter.registry_source import RewardRegistrySource
from async_grpo.rewards.isolation.adapter_process import AdapterProcess, child_environment
from async_grpo.types import AdapterResult, RewardStatus
from tests.helpers.one_worker import OneWorker

OK, FAILED, TIMED_OUT, ABSTAINED = RewardStatus
PAGE = textwrap.dedent(
    '''
    import asyncio, ctypes, mmap, os, signal, socket, struct, subprocess, sys, threading, time
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
        os.closerange(3, 100)

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
        "SIGINT": lambda: os.kill(os.getpid(), signal.SIGINT),
        "SIGSEGV": lambda: ctypes.string_at(0),
        "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "ignore all and hang": lambda: ([signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)], time.sleep(600)),
        "memory": lambda: [bytearray(2**26) for _ in range(1000)],
        "recursion": lambda: eval("(" * 50 + "f(f)" + ")" * 50, {"f": lambda f: f(f)}),
        "threads": lambda: [threading.Thread(target=time.sleep, args=(600,), daemon=True).start() for _ in range(5000)],
        "close channel": close_channel,
        "close channel and hang": lambda: (close_channel(), time.sleep(600)),
        "close channel and die slowly": lambda: (close_channel(), time.sleep(0.1), os._exit(7)),
        "shut channel": lambda: socket.socket(fileno=channel_fd()).shutdown(socket.SHUT_RDWR),
        "print": lambda: print("x" * 100_000, flush=True),
        "noise": lambda: os.write(channel_fd(), b"\\xff" * 1000 + b"\\n"),
        "a line of brackets": lambda: os.write(channel_fd(), b"[" * 65536 + b"\\n"),
        "an answer to nothing": lambda: os.write(channel_fd(), b'{"id": 99, "answers":[]}\\n'),
        "hang": lambda: time.sleep(600),
        "nap": lambda: time.sleep(0.3),
        "spin": lambda: [None for _ in iter(int, 1)],
    }

    def plain(sample):
        DEEDS[sample.get("deed", "nothing")]()
        return sample.get("value", 1.0)

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

    REWARD_ADAPTERS = {"plain": plain, "slow": slow, "deaf": deaf, "batched": batched, "grouped": grouped}
    '''
)
SOURCE = RewardRegistrySource.from_text("hostile_page", PAGE)


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
        assert not marked(mark), "something has survived"


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
        ("SIGINT", "KeyboardInterrupt"),
        ("memory", "MemoryError"),
        ("recursion", "RecursionError"),
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
        ("close channel", "died (exit status 1)"),
        ("close channel and die slowly", "died (exit status 7)"),
        ("close channel and hang", "died (signal SIGKILL)"),
        ("shut channel", "died (exit status 1)"),
        ("noise", "answered nonsense: UnicodeDecodeError"),
        ("a line of brackets", "answered nonsense: ValueError: a message is nested too deeply"),
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


async def test_nothing_of_a_worker_survives_its_parent(mark, tmp_path):
    program = (
        "import asyncio\n"
        "from async_grpo.rewards.isolation.adapter_process import AdapterProcess\n"
        "from async_grpo.rewards.adapter.registry_source import RewardRegistrySource\n"
        f"source = RewardRegistrySource.from_text('hostile_page', {PAGE!r})\n"
        "asyncio.run(AdapterProcess(source, 'plain').score({'deed': 'orphan and hang'}, 600))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], env=child_environment())
    try:
        while len(marked(mark)) < 4:  # the parent, the keeper, its process, the orphan
            await asyncio.sleep(0.01)
    finally:
        parent.kill()
        parent.wait(timeout=20)
    while marked(mark):
        await asyncio.sleep(0.01)


async def test_the_kernel_takes_a_verifier_first_when_memory_runs_out(mark):
    async with worker("plain", mark) as process:
        (child,) = [pid for pid in marked(mark) if pid != process.pid]
        assert Path(f"/proc/{child}/oom_score_adj").read_text().strip() == "1000"
        assert Path(f"/proc/{process.pid}/oom_score_adj").read_text().strip() != "1000"


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


def test_a_reward_process_starts_and_scores_in_uvloop_which_ray_runs_actors_in():
    """Its transports are no subclasses of asyncio's: what insists on them hangs in a run and nowhere else."""
    uvloop = pytest.importorskip("uvloop")
    source = RewardRegistrySource.from_text("in_uvloop", "REWARD_ADAPTERS = {'one': lambda sample: 1.0}")

    async def score() -> AdapterResult:
        process = AdapterProcess(source, "one")
        await process.start()
        try:
            return await process.score({"completion": ""}, 10.0)
        finally:
            await process.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(asyncio.wait_for(score(), 30)).reward == 1.0
