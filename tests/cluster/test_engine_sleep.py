"""Engines sleep while the trainer computes: in which order, what waits meanwhile, and what proves that they woke up."""

import asyncio
import itertools
from dataclasses import replace
from types import SimpleNamespace

import fake_chain
import pytest
import torch
from fake_chain import STEPS, Chain, chain_config

from async_grpo.cluster.engine_sleep import EngineSleep
from async_grpo.errors import ConfigurationError, RunFailed, WeightsDidNotLand, WorkerLost
from async_grpo.modeling.policy import named_full_tensors
from async_grpo.testing import FakeEngine
from async_grpo.training.accumulator import GradientAccumulator
from async_grpo.weights.package import SELF_TEST


class Sleeper(FakeEngine):
    """Notes what it does; a sleep of level 2 loses its weights."""

    forgets_to_load = False

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.events = []

    def _draw(self, *arguments):
        assert not self.is_asleep
        self.events.append("draw")
        return super()._draw(*arguments)

    async def canary(self, token_ids):
        assert not self.is_asleep
        return await super().canary(token_ids)

    async def sleep(self, level):
        await super().sleep(level)
        self.events.append(f"sleep {level}")
        if level == 2:
            with torch.no_grad():
                for weight in self._model._policy.parameters():
                    weight.fill_(torch.nan)

    async def update(self, version, chunks):
        self.events.append(f"update {version}")
        if self.forgets_to_load and self.is_asleep:
            self.is_asleep = False
            self._running.set()
            return await self._model.update(version, [])
        return await super().update(version, chunks)


def trained(folder, monkeypatch, level, engines=2, kind=Sleeper):
    """The run's lines, its weights, and its engines."""
    monkeypatch.setattr(fake_chain, "SETTINGS", replace(fake_chain.SETTINGS, sleep_level=level))
    options = {"engine_sleep": str(level)} if level else {"deterministic": True}
    chain = Chain(folder, engines=engines, engine=kind, config=chain_config(max_staleness=0, **options))
    lines = chain.train()
    weights = {name: tensor.clone() for name, tensor in named_full_tensors(chain.trainer.policy)}
    return lines, weights, [worker.engine for worker in chain.workers]


@pytest.mark.parametrize("level", [1, 2])
def test_they_sleep_from_the_last_sample_of_a_step_to_its_weights(tmp_path, monkeypatch, level):
    computing = []
    add = GradientAccumulator.add
    engines = []

    def add_and_look(accumulator, batch):
        computing.append([engine.is_asleep for engine in engines])
        add(accumulator, batch)

    class Listed(Sleeper):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            engines.append(self)

    monkeypatch.setattr(GradientAccumulator, "add", add_and_look)
    lines, weights, _ = trained(tmp_path / "asleep", monkeypatch, level, kind=Listed)
    assert computing and all(all(looks) for looks in computing), (
        "the trainer computed while an engine was awake"
    )
    for engine in engines:
        events = [event for event in engine.events if event != f"update {SELF_TEST}"]
        # Without the completions, whose number depends on which engine got a group
        order = [event for event in events if event != "draw"]
        expected = ["update 0"]
        for step in range(1, STEPS + 1):
            expected += [f"sleep {level}", f"update {step}"]
        assert order == expected
        for event, following in itertools.pairwise(events):
            assert not (event.startswith("sleep") and following == "draw")
    assert [line["staleness_max"] for line in lines] == [0] * STEPS
    assert all(line["canary_error"] < 1e-4 for line in lines), "the proof comes after waking"
    engines.clear()
    _, usual_weights, _ = trained(tmp_path / "awake", monkeypatch, 0)
    assert all(torch.equal(weights[name], weight) for name, weight in usual_weights.items())


def test_an_engine_that_woke_without_its_weights_is_refused(tmp_path, monkeypatch):
    class Forgetful(Sleeper):
        forgets_to_load = True

    with pytest.raises(WeightsDidNotLand):
        trained(tmp_path, monkeypatch, 2, engines=1, kind=Forgetful)


async def test_a_request_that_comes_during_the_sleep_waits_until_the_engine_is_awake(tmp_path, monkeypatch):
    engine = FakeEngine(SimpleNamespace(update=lambda *_: asyncio.sleep(0, {})), fake_chain.SETTINGS)
    await engine.sleep(1)
    answers = engine.complete([5, 6], {0: 1})
    request = asyncio.ensure_future(anext(answers))
    await asyncio.sleep(0.05)
    assert not request.done()
    await engine.update(3, [])
    completion = await asyncio.wait_for(request, 5)
    assert set(completion.versions.tolist()) == {3}


class Link:
    def __init__(self, calls, worker_id, error=None):
        self.calls, self.worker_id, self.error = calls, worker_id, error

    async def call(self, method, level):
        self.calls.append((self.worker_id, method, level))
        if self.error:
            raise self.error


def workers_of(calls, **errors):
    by_id = {
        worker_id: SimpleNamespace(is_late=False, link=Link(calls, worker_id, error))
        for worker_id, error in errors.items()
    }
    return SimpleNamespace(by_id=by_id)


def package(version, for_late=False):
    return SimpleNamespace(version=version, for_late=for_late)


async def test_an_engine_that_joins_while_the_trainer_computes_sleeps_after_its_first_weights():
    calls = []
    workers = workers_of(calls, a=None)
    sleep = EngineSleep(1, workers)
    await sleep.begin()
    workers.by_id["b"] = SimpleNamespace(is_late=True, link=Link(calls, "b"))
    await sleep.begin()  # of nobody new: it has no weights yet
    workers.by_id["b"].is_late = False
    await sleep.after_sync(package(SELF_TEST, for_late=True))
    assert calls == [("a", "sleep", 1)]
    await sleep.after_sync(package(4, for_late=True))
    assert calls == [("a", "sleep", 1), ("b", "sleep", 1)]
    await sleep.after_sync(package(5))
    workers.by_id["c"] = SimpleNamespace(is_late=False, link=Link(calls, "c"))
    await sleep.after_sync(package(5, for_late=True))  # all are awake, and stay so
    assert len(calls) == 2
    await sleep.begin()
    assert sorted(calls[2:]) == [("a", "sleep", 1), ("b", "sleep", 1), ("c", "sleep", 1)]


async def test_an_engine_that_still_ends_its_requests_is_not_told_to_sleep_twice():
    """The second call would take effect after the engine has woken, while the trainer waits for its samples."""
    calls = []
    workers = workers_of(calls, a=None)
    requests_ended = asyncio.Event()

    async def sleep_of_a(method, level):
        calls.append(("a", method, level))
        await requests_ended.wait()

    workers.by_id["a"].link.call = sleep_of_a
    sleep = EngineSleep(1, workers)
    begun = asyncio.create_task(sleep.begin())
    await asyncio.sleep(0.01)
    workers.by_id["b"] = SimpleNamespace(is_late=False, link=Link(calls, "b"))
    joined = asyncio.create_task(sleep.after_sync(package(3, for_late=True)))
    await asyncio.sleep(0.01)
    requests_ended.set()
    await asyncio.wait_for(asyncio.gather(begun, joined), 5)
    assert calls == [("a", "sleep", 1), ("b", "sleep", 1)]


async def test_a_lost_engine_does_not_keep_the_others_awake_and_one_that_cannot_sleep_ends_the_run():
    calls = []
    await EngineSleep(2, workers_of(calls, a=WorkerLost("died"), b=None)).begin()
    assert len(calls) == 2
    with pytest.raises(RunFailed, match="out of memory"):
        await EngineSleep(2, workers_of(calls, a=RunFailed("out of memory"))).begin()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_staleness": 1}, "--engine-sleep 2 --max-staleness 1 do not fit: .*use --max-staleness 0"),
        (
            {"eval_pinned": True},
            "--engine-sleep 2 --eval-pinned True do not fit: training waits for the evaluation, .*--no-eval-pinned",
        ),
        ({"weight_transport": "nccl"}, "--engine-sleep 2 --weight-transport nccl do not fit: .*object_store"),
        (
            {"lora_rank": 4, "lora_sync": "adapter"},
            "--engine-sleep 2 --lora-sync adapter do not fit: level 2 drops the base model.*use level 1, or --lora-sync "
            "merged",
        ),
    ],
)
def test_options_with_which_engines_cannot_sleep_are_refused(options, reason):
    with pytest.raises(ConfigurationError, match=reason):
        chain_config(**{"max_staleness": 0, "engine_sleep": "2"} | options)


def test_level_1_keeps_the_base_of_an_adapter():
    config = chain_config(max_staleness=0, engine_sleep="1", lora_rank=4, lora_sync="adapter")
    assert config.sleep_level == 1
