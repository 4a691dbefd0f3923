"""The run's controller as a plain class: whom it lets in, which weights they must hold, what it makes of a loss."""

import asyncio
import time
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest
from controller_links import ASKED, MODEL, SETTINGS, Link, link_to, worker
from registry_load import outstanding

from async_grpo.cluster import worker_actors, worker_program
from async_grpo.cluster.controller import RunController
from async_grpo.config.run import WorkerConfig
from async_grpo.errors import ConfigurationError, PromptSetAside, WorkerLost
from async_grpo.protocols import WeightPackage
from async_grpo.testing import completion
from async_grpo.types import GREEDY, Completion, Prompt, Tokens
from async_grpo.weights.package import SELF_TEST
from tests.long.lost_engines import NEVER, Fleet
from tests.long.lost_engines import generate as generate_with


@pytest.fixture
def controller() -> RunController:
    return RunController(SETTINGS, 5.0, Link, "least_loaded")


def package(version: int) -> WeightPackage:
    return WeightPackage(version, {}, ["a chunk"], None, None, 1e-4)


async def lacking(controller: RunController) -> str:
    return (await controller.missing_parts()).description


async def is_waiting(task: asyncio.Task) -> bool:
    await asyncio.sleep(0.02)
    return not task.done()


async def synced_to(controller: RunController, for_late: bool = False) -> set[str]:
    """The workers that a sync would reach now; nothing is sent."""
    return {info.worker_id for info, _ in await controller.begin_sync(for_late)}


async def at_work(controller: RunController, *names: str) -> None:
    for name in names:
        await controller.register(worker(name), "handle")
    await controller.end_sync(package(0), names)


async def test_a_run_starts_when_every_kind_of_worker_is_there_and_says_what_is_missing(controller):
    assert "no generation worker (python worker_dispatcher.py --mode generation" in await lacking(controller)
    await controller.register(worker("g0", rewards="countdown"), "handle")
    assert (await lacking(controller)).startswith("no reference worker (python worker_dispatcher.py")
    await controller.register(worker("r0", kind="reference"), "handle")
    assert await lacking(controller) == ""


async def test_workers_that_name_different_rewards_are_refused(controller):
    for number, rewards in enumerate(("countdown", "", "format")):
        await controller.register(worker(f"g{number}", rewards=rewards), "handle")
    with pytest.raises(ConfigurationError, match="different rewards: countdown / format"):
        await lacking(controller)


async def test_another_model_or_one_whose_context_is_too_short_is_refused_on_both_sides(controller, tmp_path):
    for path in MODEL.iterdir():
        text = path.read_bytes()
        (tmp_path / path.name).write_bytes(text.replace(b'"hidden_size": 128', b'"hidden_size": 64'))
    with pytest.raises(ConfigurationError, match="another architecture or vocabulary") as refusal:
        worker_actors.check_model(str(tmp_path), SETTINGS)
    await controller.record_refusal(str(refusal.value))
    with pytest.raises(ConfigurationError, match="another architecture or vocabulary"):
        await lacking(controller)
    with pytest.raises(ConfigurationError, match="the run needs 100000"):
        worker_actors.check_model(str(MODEL), replace(SETTINGS, max_total_tokens=100_000))


def test_a_worker_of_another_version_of_the_library_is_refused_and_told_both():
    worker_actors.check_library(SETTINGS)
    with pytest.raises(
        ConfigurationError, match=r"has version .* of async-grpo, the trainer of run .* 0\.0\.9 \(abc\)"
    ):
        worker_actors.check_library(replace(SETTINGS, library="0.0.9 (abc)"))


@pytest.mark.parametrize(
    ("node", "gpus", "needed"),
    [("here", [0, 8], 0), ("here", [8, 0], 2), ("any", [0, 8], 2), ("any", [0, 0], 0), ("gpu", [0, 0], 2)],
)
def test_a_worker_runs_on_its_dispatcher_s_node_unless_told_otherwise(monkeypatch, node, gpus, needed):
    """With the GPUs of that node (the first one), whatever others have; `gpu` waits for a node that has some."""
    asked: dict[str, Any] = {}
    nodes = [{"NodeID": str(n), "Alive": True, "Resources": {"GPU": count}} for n, count in enumerate(gpus)]
    pin = {"resources": {"node:first": 0.0001}}
    for name, stand_in in {
        "ray": Mock(nodes=lambda: nodes, get_runtime_context=lambda: Mock(get_node_id=lambda: "0")),
        "on_this_node": lambda: pin,
        "zero_cpu_actor": lambda _, **options: asked.update(options) or Mock(),
    }.items():
        monkeypatch.setattr(worker_program, name, stand_in)
    told = {"mode": "generation", "engine": "fake", "model_path": str(MODEL), "tensor_parallel_size": 2}
    worker_program._make_actor(WorkerConfig(**told, node=node))
    assert asked["num_gpus"] == needed
    assert (pin.items() <= asked.items()) == (node == "here")


async def test_a_late_worker_asks_for_a_sync_of_its_own_and_works_once_that_has_landed(controller):
    """It joins while weights are on their way: it waits. No other sync reaches it before its own."""
    controller._batcher = AsyncMock(workers_joined=Mock())
    await controller.register(worker("early"), "handle")
    await controller.end_sync(package(SELF_TEST), ["early"])
    assert await synced_to(controller) == {"early"}
    joining = asyncio.create_task(controller.register(worker("late"), "handle"))
    assert await is_waiting(joining)  # not between begin and end
    await controller.end_sync(package(5), ["early"])
    await joining
    assert await synced_to(controller) == {"early"}
    await controller.end_sync(package(6), ["early"])
    await controller.register(worker("another"), "handle")
    controller._batcher.workers_joined.assert_called_once()  # one sync serves all who came before it
    assert await synced_to(controller, for_late=True) == {"late", "another"}
    await controller.end_sync(replace(package(SELF_TEST), for_late=True), ["late", "another"])
    await controller.end_sync(replace(package(6), for_late=True), ["late"])
    assert await synced_to(controller) == {"early", "late"}
    lives = [call.args for call in controller._batcher.weights_live.call_args_list]
    assert lives == [(5,), (6,)]  # the slots of a step are given back once


async def test_a_worker_whose_weights_are_not_proven_gets_no_work(controller):
    await controller.register(worker("g0"), "handle")
    await at_work(controller, "g1")
    registry = controller._generation.registry
    assert [(await registry.acquire(4, 1)).worker_id for _ in range(2)] == ["g1", "g1"]


async def test_the_reference_is_never_sent_weights_and_works_at_once(controller):
    await controller.register(worker("r0", kind="reference"), "handle")
    assert await synced_to(controller) == set()
    lease = await controller._workers_by_kind["reference"].registry.acquire(1, 1)
    assert lease.worker_id == "r0"


async def test_a_worker_that_dies_while_it_joins_is_no_member_any_more(controller):
    """Nothing is asked of it yet: its link alone notices. Otherwise --worker-grace-s would never begin."""
    controller._batcher = AsyncMock(workers_joined=Mock())
    await at_work(controller, "early")
    await controller.register(worker("late"), "handle")
    link = link_to(controller, "late")
    link.lose(WorkerLost("late died: killed"))
    members = controller._generation.registry.members()
    assert [info.worker_id for info in members] == ["early"] and link.is_closed
    await controller.register(worker("late"), "handle")  # and it may come again
    assert await synced_to(controller, for_late=True) == {"late"}


async def test_a_dispatcher_hears_of_the_end_of_its_worker_whoever_finds_it(controller):
    await at_work(controller, "g0")
    gone = asyncio.ensure_future(controller.until_gone("generation", "g0"))
    assert await is_waiting(gone)
    link_to(controller, "g0").lose(WorkerLost("g0 did not answer for 40 s"))
    assert await gone == "g0 did not answer for 40 s"
    assert await controller.until_gone("generation", "g0") == "it is no member"
    assert controller._generation.take_lost() == ["generation worker g0 was lost: g0 did not answer for 40 s"]


async def generate(controller: RunController, count: int = 8, **options: Any) -> list[Completion]:
    prompt = Prompt(0, np.array([1, 2]), {})
    return [c async for c in controller._generation.generate(prompt, count, **options)]


async def test_what_a_lost_worker_still_owed_is_generated_by_another_and_the_lost_one_is_fenced(controller):
    workers = controller._generation
    await at_work(controller, "g0", "g1")
    dying, other = link_to(controller, "g0"), link_to(controller, "g1")
    dying.is_dying = True
    dying.completing.set()
    other.completing.set()
    assert len(await generate(controller)) == 8 and dying.is_closed
    (first, seeds, _), (second, owed, _) = ASKED[-2:]
    assert (first, second, len(seeds)) == (dying.name, other.name, 8)
    assert owed == {member: seeds[member] for member in range(2, 8)}, "with the draws that they had"
    assert [info.worker_id for info in workers.registry.members()] == ["g1"]
    assert outstanding(workers.registry) == (0, 0) and await synced_to(controller) == {"g1"}
    await generate(controller, 1, sampling=GREEDY)
    assert ASKED[-1] == (other.name, {0: seeds[0]}, GREEDY)


async def test_another_worker_goes_on_from_the_tokens_that_a_lost_one_told_of(controller):
    await at_work(controller, "g0", "g1")
    dying, other = link_to(controller, "g0"), link_to(controller, "g1")
    told = ((4, (0, 6)), (5, (3, 6)))
    parts = [{m: Tokens(*completion(m + 1, version).arrays) for m in members} for version, members in told]
    dying.is_dying, dying.tells = True, parts
    dying.completing.set()
    other.completing.set()
    assert len(await generate(controller)) == 8
    (*_, begun), asked = ASKED[-1], ASKED[-2]
    assert len(asked) == 3 and begun.keys() == {3, 6}, "member 0 was done"
    assert begun[6].versions.tolist() == [4] * 7 + [5] * 7 and begun[3].versions.tolist() == [5] * 4


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
@pytest.mark.parametrize("is_finished", [True, False])
async def test_a_worker_whose_log_probs_are_no_numbers_is_fenced_and_another_one_does_its_work(
    controller, value, is_finished
):
    """They would make the loss of the whole step NaN, and nothing would say which engine is broken."""
    await at_work(controller, "g0", "g1")
    broken, other = link_to(controller, "g0"), link_to(controller, "g1")
    damaged = completion(3)
    damaged.logprobs[1] = value
    broken.tells = [replace(damaged, member=0) if is_finished else {0: Tokens(*damaged.arrays)}]
    broken.completing.set()
    other.completing.set()
    completions = await generate(controller)
    assert sorted(each.member for each in completions) == list(range(8)) and broken.is_closed
    assert all(np.isfinite(each.logprobs).all() for each in completions)
    (lost,) = controller._generation.take_lost()
    assert (
        "worker g0 was lost: the engine returned log-probs that are not finite: 1 of 3, the first one" in lost
    )
    assert "at token 1" in lost


async def test_a_prompt_that_costs_worker_after_worker_is_set_aside(controller, monkeypatch):
    monkeypatch.setattr("async_grpo.cluster.registered_workers.MAX_ATTEMPTS", 2)
    names = "g0", "g1", "g2"
    await at_work(controller, *names)
    for name in names:
        link_to(controller, name).is_dying = True
        link_to(controller, name).completing.set()
    with pytest.raises(PromptSetAside, match="several workers were lost over prompt 0: killed in a test"):
        await generate(controller)


async def test_a_completion_is_what_it_would_have_been_however_many_engines_are_lost_over_it():
    """Redrawn, it would be shorter by a quarter: long ones meet more losses."""
    whole, fleet = await generate_with(Fleet(NEVER), 40), Fleet(mean_life=800)
    found = await generate_with(fleet, 40)
    assert fleet.losses > 30 and found.keys() == whole.keys()
    assert all(np.array_equal(ids, whole[key]) for key, ids in found.items())


async def test_a_silent_engine_s_statistics_come_a_step_later_and_hold_up_nobody(controller, monkeypatch):
    monkeypatch.setattr("async_grpo.cluster.registered_workers.PROGRESS_TIMEOUT_S", 0.05)
    await at_work(controller, "g0", "g1")
    link_to(controller, "g1").silent_s = 1.0
    started, paused_s = time.monotonic(), "wait_generation_weights_s"
    assert (await controller._generation.take_stats())[paused_s] == 1.0
    assert time.monotonic() - started < 0.9
    await asyncio.sleep(1.0)
    assert (await controller._generation.take_stats())[paused_s] == 2.0  # g0's new one, and g1's of before


async def test_a_rollout_that_is_cancelled_gives_its_lease_back(controller):
    workers = controller._generation
    await at_work(controller, "g0")
    running = asyncio.create_task(generate(controller))
    assert await is_waiting(running) and outstanding(workers.registry)[0] == 8
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert outstanding(workers.registry) == (0, 0)
