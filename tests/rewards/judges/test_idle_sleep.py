"""Judge servers that sleep between calls, against a server that says in which order it was told and asked."""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hostile_server import Connection, HostileServer, Request, message, until

from async_grpo.config.run import RunConfig
from async_grpo.errors import ConfigurationError
from async_grpo.launch.judge_servers import folder_id
from async_grpo.launch.local_config import LocalConfig
from async_grpo.rewards.cache.verdicts import version_of_judge
from async_grpo.rewards.http.endpoint import Deadline
from async_grpo.rewards.http.rate_limiter import Limiter
from async_grpo.rewards.judge_worker import JudgeWorker
from async_grpo.rewards.judges import JudgeAddresses, LLMJudge
from async_grpo.rewards.judges.idle_sleep import IdleSleep
from async_grpo.types import RewardStatus

SAMPLE = {"input": "y", "answer": "x", "completion": "x", "sample_text": "y x"}
MODEL = Path(__file__).parents[3] / "sample-data" / "tiny-model"


class Server:
    """Speaks vLLM's sleeping and chatting; an error when it is asked in its sleep. A behaviour of HostileServer."""

    def __init__(self) -> None:
        self.asleep, self.told, self.obeys, self.wake_s, self.url = True, [], True, 0.0, ""

    async def __call__(self, request: Request, connection: Connection) -> bool:
        answer = {"choices": [{"message": {"content": "Score: 10"}, "finish_reason": "stop"}], "usage": {}}
        code = 200
        if request.path == "/is_sleeping":
            answer = {"is_sleeping": self.asleep}
        else:
            self.told.append(request.path)
            if request.path.startswith(("/sleep", "/wake_up")):
                await asyncio.sleep(self.wake_s if request.path == "/wake_up" else 0.0)
                self.asleep = request.path.startswith("/sleep") if self.obeys else self.asleep
                code = 200 if self.obeys else 500
            elif self.asleep:
                code = 400
        await connection.write(message(code, json.dumps(answer).encode()))
        return True


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[Server]:
    server = Server()
    async with HostileServer(server) as listening:
        server.url = listening.url
        yield server


def worker_of(server: Server, idle_sleep: IdleSleep, **settings) -> JudgeWorker:
    judge = LLMJudge(url=server.url, model="judge", **settings)
    return JudgeWorker("judge", judge, judge.endpoint(), Limiter(), "train", idle_sleep)


async def test_the_first_call_wakes_and_a_lull_after_the_last_one_lets_sleep():
    async with serving() as server:
        idle_sleep = IdleSleep([server.url], after_s=0.3)
        async with idle_sleep.keep_awake(Deadline(10)):
            async with idle_sleep.keep_awake(Deadline(10)):
                assert not server.asleep
            await asyncio.sleep(0.6)
            assert not server.asleep  # one still asks
        await until(lambda: server.asleep)
        async with idle_sleep.keep_awake(Deadline(10)):
            assert not server.asleep
        for _ in range(10):  # calls that follow each other closely never let it sleep
            await asyncio.sleep(0.05)
            async with idle_sleep.keep_awake(Deadline(10)):
                pass
        assert server.told == ["/wake_up", "/sleep?level=1", "/wake_up"]
        await idle_sleep.close()


async def test_calls_from_all_sides_are_never_asked_of_a_sleeper():
    """Two judges of the same servers, with lulls about as long as the patience: every score arrives."""
    async with serving() as server:
        idle_sleep = IdleSleep([server.url], after_s=0.02)
        workers = [worker_of(server, idle_sleep), worker_of(server, idle_sleep, rubric="Short.")]
        moments = [random.Random(number).uniform(0, 1) for number in range(40)]

        async def ask(number: int) -> RewardStatus:
            await asyncio.sleep(moments[number])
            result = await workers[number % 2].score(SAMPLE, 10)
            return result.status

        assert set(await asyncio.gather(*map(ask, range(40)))) == {RewardStatus.OK}
        assert server.told.count("/sleep?level=1") >= 2
        for worker in workers:
            await worker.close()
        await idle_sleep.close()


async def test_a_server_that_cannot_be_woken_fails_the_call_and_the_next_one_tries_again():
    async with serving() as server:
        idle_sleep = IdleSleep([server.url], after_s=60)
        server.obeys = False
        worker = worker_of(server, idle_sleep)
        result = await worker.score(SAMPLE, 10)
        assert result.status is RewardStatus.FAILED and "cannot be woken" in result.reason
        server.obeys = True
        assert (await worker.score(SAMPLE, 10)).status is RewardStatus.OK
        await worker.close()
        await idle_sleep.close()


async def test_waking_longer_than_a_sample_may_take_costs_no_sample():
    """Nobody gives up on a wake-up that is under way, and nobody is told to sleep or to wake meanwhile."""
    async with serving() as server:
        idle_sleep = IdleSleep([server.url], after_s=0.05)
        server.wake_s = 0.8
        worker = worker_of(server, idle_sleep)
        results = await asyncio.gather(*(worker.score(SAMPLE, 0.5) for _ in range(8)))
        assert {result.status for result in results} == {RewardStatus.OK}
        assert all(0.5 < result.queue_s < 8 for result in results)
        await until(lambda: server.asleep)
        assert server.told.count("/wake_up") == server.told.count("/sleep?level=1") == 1
        impatient = asyncio.create_task(worker.score(SAMPLE, 0.2))
        await until(lambda: server.told[-1] == "/wake_up")
        impatient.cancel()
        await until(lambda: server.told[-2:] == ["/wake_up", "/sleep?level=1"])  # woken, and then for nobody
        await worker.close()
        await idle_sleep.close()


def test_the_cache_knows_our_servers_by_their_model_and_not_by_their_ports(tmp_path):
    def version(port: int, model: str) -> str:
        addresses = JudgeAddresses(judge_urls=f"http://127.0.0.1:{port}", judge_model_id=model)
        return version_of_judge(addresses.with_address(LLMJudge(model="judge")), "", addresses)

    assert version(1, "a") == version(2, "a") != version(1, "b")
    (tmp_path / "config.json").write_text("{}")
    before = folder_id(tmp_path)
    assert before == folder_id(tmp_path)
    (tmp_path / "config.json").write_text("{ }")
    assert folder_id(tmp_path) != before


OURS = {"judge_model": str(MODEL)}
WRONG = [
    ({"judge_idle_sleep_s": 5.0}, "--judge-idle-sleep-s 5.0 does nothing without --judge-model or --judge-urls"),
    ({"judge_model": "/no/such"}, "--judge-model /no/such is no folder here"),
    (OURS | {"judge_replicas": 0}, "--judge-replicas must be above 0"),
    (OURS | {"judge_urls": "http://a"}, "leave one of the two out"),
    (OURS | {"judge_gpus": "4,5"}, "one GPU for each of the 1 servers"),
    (OURS | {"judge_gpus": "0"}, r"--judge-gpus 0 names '0', none of the visible GPUs, which are 4, 5 \(CUDA_VIS"),
    (OURS | {"judge_gpus": "4,", "judge_replicas": 2}, "names '', none of the visible GPUs"),
    (OURS | {"judge_idle_sleep_s": 0.0}, "--judge-idle-sleep-s must be above 0"),
    (OURS | {"judge_gpu_memory_utilization": 1.5}, "a share above 0 and at most 1, not 1.5"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "said"), WRONG)
def test_settings_of_the_judge_that_cannot_work_are_refused(options, said, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(ConfigurationError, match=said):
        LocalConfig(model_name_or_path=str(MODEL), data_path="x", reward_fns="countdown", **options)


def test_without_gpus_a_judge_cannot_name_any(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigurationError, match="--judge-gpus 0 names '0', .*there is none: leave it out"):
        LocalConfig(model_name_or_path="m", data_path="x", judge_model=str(MODEL), judge_gpus="0")


def test_a_judge_that_shares_its_gpus_needs_none_of_its_own(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    shared = {"model_name_or_path": str(MODEL), "data_path": "x", "reward_fns": "countdown"}
    assert LocalConfig(**shared, judge_model=str(MODEL), judge_replicas=2).judge_gpus_alone == 2
    sharing = LocalConfig(**shared, judge_model=str(MODEL), judge_gpus="5, 4", judge_replicas=2)
    assert sharing.judge_gpus_alone == 0 and sharing.shared_gpus == ["5", "4"]
    assert LocalConfig(**shared).judge_gpus_alone == 0 and issubclass(LocalConfig, RunConfig)
