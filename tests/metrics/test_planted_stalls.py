"""Stalls planted in the true objects, each named in the first sentence; the run goes on once what holds it up lets go."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import hostile_server as hostile
import numpy as np
from fake_chain import GROUPS, STEPS, Chain, PoolVerification
from hostile_server import HostileServer

from async_grpo.experience.batcher import ExperienceBatcher
from async_grpo.experience.config import BatchConfig
from async_grpo.experience.dataset import Question
from async_grpo.metrics.watchdog import Watchdog, stalls_of
from async_grpo.processes.waits import situation
from async_grpo.rewards.adapter_queue import AdapterQueue
from async_grpo.rewards.pool import VerifierPool
from async_grpo.testing import FakeEngine, FakeGeneration, FakeVerification

HELPERS = Path(__file__).parents[1] / "helpers"
DEADLINE_S = 40.0
SAMPLE = {"input": "q", "answer": "x", "completion": "y", "sample_text": "qy", "group_id": 5}
SAMPLE |= {"completion_token_ids": [1], "truncated": False}


def sentence_with(expected: str, folder: Path, ask: Callable = situation) -> str:
    """What a watchdog says, once it says that."""
    watchdog, give_up, said = Watchdog(folder, lambda: 0, None, ask), time.monotonic() + DEADLINE_S, ""
    while expected not in said:
        assert time.monotonic() < give_up, said
        watchdog.report()
        said = next(iter(stalls_of(folder).values())).splitlines()[0]
    return said


class Planted:
    """Looks at a chain that trains in the main thread, until it is named what holds it up; then that lets go."""

    def __init__(self, folder: Path, expected: str) -> None:
        self.folder, self.expected, self.said, self.release = folder, expected, "", threading.Event()

    def train(self, chain: Chain, verification: Callable = FakeVerification) -> None:
        def look() -> None:
            try:
                self.said = sentence_with(
                    self.expected, self.folder, lambda: chain.link.run(chain.controller.situation())
                )
            finally:
                self.release.set()

        looking = threading.Thread(target=look)
        looking.start()
        assert len(chain.train(verification)) == STEPS
        looking.join()
        assert self.expected in self.said

    async def until_released(self) -> None:
        while not self.release.is_set():
            await asyncio.sleep(0.02)


def test_an_engine_that_does_not_go_on(tmp_path):
    planted = Planted(tmp_path, "Generation worker g0 keeps a group waiting (")

    class Stuck(FakeEngine):
        async def complete(self, prompt_token_ids, seeds, sampling=None):
            if self.policy_version == 1:
                await planted.until_released()
            async for completion in super().complete(prompt_token_ids, seeds, sampling):
                yield completion

    planted.train(Chain(tmp_path, engine=Stuck))


def test_a_verifier_in_an_endless_loop(tmp_path):
    planted = Planted(tmp_path, "may be in an endless loop")
    (tmp_path / "flag").touch()
    loop = (
        f"import os\ndef loop(sample):\n    while os.path.exists({str(tmp_path / 'flag')!r}):\n        pass\n"
    )
    (tmp_path / "own.py").write_text(f"{loop}    return float(len(sample['completion']))\n")

    def let_go() -> None:
        planted.release.wait()
        (tmp_path / "flag").unlink()

    threading.Thread(target=let_go).start()
    planted.train(Chain(tmp_path), lambda: PoolVerification(f"{tmp_path / 'own.py'}:loop"))
    assert (
        planted.said.startswith("The verifier loop owes a verdict (") and "the process of a" in planted.said
    )


def test_a_queue_of_finished_groups_that_is_deadlocked(tmp_path, monkeypatch):
    planted = Planted(tmp_path, "The queue of finished groups is deadlocked: ")
    offer = ExperienceBatcher._offer

    async def locked(self, group):
        if group.sequence_number == GROUPS:
            async with self._offer_lock:
                await planted.until_released()
        await offer(self, group)

    monkeypatch.setattr(ExperienceBatcher, "_offer", locked)
    planted.train(Chain(tmp_path))


async def test_a_slot_of_the_staleness_budget_that_was_lost(tmp_path):
    settings = dict(num_training_batches=3, batch_size=2, samples_per_question=4, experience_timeout_s=60.0)
    questions = [Question(np.array([5], np.int32), {"input": "q", "answer": "x"})]
    batcher = ExperienceBatcher(BatchConfig(**settings), questions, FakeGeneration(), FakeVerification())
    batcher.budget.alive = batcher.budget.capacity  # taken, and never given back
    await batcher.start()
    rank = asyncio.create_task(batcher.next_message(0))
    said = await asyncio.to_thread(sentence_with, "The rollout loop waits for a slot", tmp_path)
    assert said.endswith("though nobody has one: a permit was lost")
    rank.cancel()
    await batcher.close()


async def named(expected: str, pool: VerifierPool, folder: Path) -> str:
    verdict = asyncio.create_task(pool.verify(SAMPLE))
    try:
        return await asyncio.to_thread(sentence_with, expected, folder)
    finally:
        verdict.cancel()


def judge_page(folder: Path, url: str) -> str:
    lines = (
        "from async_grpo.rewards.http.endpoint import Limits",
        "from async_grpo.rewards.judges import LLMJudge",
        f"likes = LLMJudge(url={url!r}, model='judge', limits=Limits(concurrency=1))",
    )
    (folder / "page.py").write_text("\n".join(lines))
    return f"{folder / 'page.py'}:likes"


async def test_a_judge_that_never_answers(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")
    async with (
        HostileServer(hostile.silence()) as server,
        VerifierPool.from_registry(judge_page(tmp_path, server.url)) as pool,
    ):
        said = await named("The judge likes at", pool, tmp_path)
        assert f"{server.url} owes an answer (1 wait, the longest for " in said


async def test_a_permit_of_a_judge_that_was_lost(tmp_path):
    async with VerifierPool.from_registry(judge_page(tmp_path, "http://127.0.0.1:9")) as pool:
        (slot,) = pool._queues["train"]["likes"]._slots
        client = slot.worker._client
        await client._rate_limiter.acquire(client.key, client._endpoint.limits)  # and never given back
        said = await named("A call of the judge likes waits for a permit (1 wait", pool, tmp_path)
        assert "a permit was lost" in said


async def test_a_queue_of_samples_that_is_deadlocked(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text("def length(sample):\n    return 1.0\n")
    async with VerifierPool.from_registry(f"{tmp_path / 'own.py'}:length") as pool:
        monkeypatch.setattr(AdapterQueue, "_dispatch", lambda self: None)
        await named("The queue of the verifier length is deadlocked: no worker has a sample", pool, tmp_path)


SLEEPY = """
import sys, threading, time
from pathlib import Path
from async_grpo.metrics.watchdog import Watchdog
from async_grpo.processes.waits import situation
from async_grpo.training.distributed import distributed_run, leave
from async_grpo.training.trainer import StepClock
folder = Path(sys.argv[1])

def nap():
    while not list((folder / "stalls").glob("*/why.txt")):
        time.sleep(0.1)

with distributed_run("cpu", timeout_s=60) as ranks:
    ranks.sum([1.0])
    if ranks.is_main:
        Watchdog(folder, lambda: 0, 2.0, situation).start()
    with StepClock(ranks).measure("computing"):
        if not ranks.is_main:
            nap()
        ranks.sum([1.0])
leave()
"""


def test_a_rank_that_is_asleep(tmp_path):
    from async_grpo.launch.process_variables import free_port

    common = os.environ | {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SLEEPY, str(tmp_path)], env=common | {"RANK": str(n), "LOCAL_RANK": str(n)}
        )
        for n in range(2)
    ]
    try:
        assert [rank.wait(DEADLINE_S) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    (text,) = stalls_of(tmp_path).values()
    said = text.splitlines()[0]
    assert said.startswith(f"Rank 1 (process {ranks[1].pid}, sleeping, "), text
    assert (
        "is in nap (" in said and ", and the other ranks wait for it: rank 0 has been computing for" in said
    )
