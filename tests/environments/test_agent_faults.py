"""A few of the faults of `tests.long.agent_faults`, and the rules that it checks: each is seen to be broken."""

import asyncio
from dataclasses import replace

import pytest
from chat_templates import chat_of
from scripted_play import OneSession, prompt_of, run

from async_grpo.environments.config import TrajectoryLimits
from async_grpo.environments.played import Played
from tests.long.agent_faults import broken_rules, faults, problems_of

QUESTION = [{"role": "user", "content": "a"}]
SOME_FAULTS = (
    "agent that retries a turn",
    "agent that takes the third of four choices",
    "agent that kills itself",
    "agent that leaves children running",
    "tool that ends its process",
    "tool that returns 10 MB",
)


def test_there_are_42_faults_of_agents_and_21_of_tools(tmp_path):
    listed = faults(tmp_path)
    assert sum(fault.is_tool for fault in listed) == 21 and len({fault.name for fault in listed}) == 63


@pytest.mark.parametrize("name", SOME_FAULTS)
def test_a_fault_breaks_no_rule(tmp_path, name):
    (fault,) = (fault for fault in faults(tmp_path) if fault.name == name)
    assert asyncio.run(problems_of(fault, tmp_path)) == []


def a_retry():
    """Return a trajectory with an abandoned turn, and the engine that sampled it."""

    async def program(prompt, policy):
        await policy.complete(QUESTION)
        second = await policy.complete(QUESTION)
        await policy.complete([*QUESTION, second.message, *QUESTION])
        return policy.trajectory(1.0)

    generation = OneSession(lambda: f"text {len(generation.requests)}")
    limits = TrajectoryLimits(9, 2000, None, 60, drops_abandoned=True)

    async def play():
        playing = Played(generation, program, chat_of("appends"), limits)
        return [one async for one in playing.generate(prompt_of(), 1)]

    (trajectory,) = run(play())
    return trajectory, generation


def test_the_rules_see_a_changed_token_a_missing_turn_and_one_that_is_trained_on_twice():
    trajectory, generation = a_retry()
    assert broken_rules(trajectory, generation) == []
    token_ids = trajectory.token_ids.copy()
    token_ids[0] += 1
    changed = replace(trajectory, token_ids=token_ids)
    assert "other tokens than the engine sampled" in broken_rules(changed, generation)[0]
    assert "a hole in the turns" in broken_rules(replace(trajectory, abandoned=()), generation)[0]
    first, second = trajectory.turns
    changed = replace(trajectory, turns=(replace(first, before=first.before[1:]), second))
    assert "another history than the engine saw" in broken_rules(changed, generation)[0]
    versions = trajectory.versions.copy()
    versions[:] = versions[0]
    changed = replace(trajectory, versions=versions)
    assert "a turn is trained on twice" in broken_rules(changed, generation)
