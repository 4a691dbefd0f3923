"""Who plays with the policy, and what becomes of it: cancelled, lost, stuck or hidden. No process, no waits."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from chat_templates import MODEL
from transformers import AutoTokenizer

from async_grpo.environments.agents import RunAgent
from async_grpo.environments.call_reader import CallReader
from async_grpo.environments.config import TrajectoryLimits
from async_grpo.environments.openai_server.endpoint import AgentEndpoint
from async_grpo.environments.openai_server.openai_api import ChatRequest, body_of
from async_grpo.environments.played import Played
from async_grpo.environments.processes import EnvironmentProcesses
from async_grpo.environments.trajectory import TrajectoryRecorder
from async_grpo.environments.trajectory_client import Reply, TrajectoryClient
from async_grpo.errors import WorkerLost
from async_grpo.experience.prompts import PromptRenderer
from async_grpo.testing import completion
from async_grpo.types import Prompt, Sampling

PROMPT = Prompt(0, np.array([5], np.int32), {"input": "x"})
LIMITS = TrajectoryLimits(9, 999, None, 60)
DEADLINE_S = 20


class Silent:
    """A `Chat` whose tokens have no text."""

    images = None
    reader = CallReader(PromptRenderer(AutoTokenizer.from_pretrained(MODEL)))

    def encode(self, text, *, begins=False, breaks=()):
        return np.array([7], np.int32)

    def with_features(self, token_ids, images):
        return token_ids

    def decode(self, token_ids, after):
        return ""


class Engine:
    """A `Generation` that notes how it was asked to draw; from the turn `lost_at` on it is lost."""

    def __init__(self, lost_at=99):
        self.asked, self.lost_at = [], lost_at

    async def generate(self, prompt, count, sampling=None, session=None):
        if len(self.asked) == self.lost_at:
            raise WorkerLost("no generation worker")
        self.asked.append(sampling)
        yield completion(2)


async def two_turns(prompt, policy):
    for _ in range(2):
        await policy.complete("go")
    return policy.trajectory(1.0)


async def all_of(program, engine, sampling=None, count=1):
    playing = Played(engine, program, Silent(), LIMITS)
    return [one async for one in playing.generate(PROMPT, count, sampling)]


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, DEADLINE_S))


def test_trajectories_are_cancelled_when_their_group_is_closed():
    ended = []

    async def goes_on(prompt, policy):
        try:
            await policy.complete("go")
            await asyncio.Event().wait()
        finally:
            ended.append(policy)

    async def story():
        group = Played(Engine(), goes_on, Silent(), LIMITS).generate(PROMPT, 3)
        asking = asyncio.ensure_future(anext(group))
        await asyncio.sleep(0.05)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await group.aclose()
        assert len(ended) == 3

    run(story())


def test_an_engine_that_is_lost_after_a_good_turn_is_the_run_s_matter_though_the_program_hides_it():
    async def hides(prompt, policy):
        try:
            await two_turns(prompt, policy)
        except WorkerLost:
            return policy.trajectory(1.0)

    with pytest.raises(WorkerLost, match="no generation worker"):
        run(all_of(hides, Engine(lost_at=1)))


@pytest.mark.parametrize("temperature", [0.0, 0.5, None])
def test_every_turn_is_drawn_as_the_evaluation_says_or_as_the_run_does(temperature):
    engine = Engine()
    run(all_of(two_turns, engine, Sampling(temperature=temperature)))
    assert [sampling.temperature for sampling in engine.asked] == [temperature] * 2


def test_when_who_plays_them_is_gone_later_trajectories_have_failed_too():
    async def story():
        endpoint = AgentEndpoint()
        policies = [
            TrajectoryClient(Engine(), TrajectoryRecorder(Silent()), PROMPT, member, LIMITS)
            for member in range(2)
        ]
        _, before = endpoint.open(policies[0])
        endpoint.fail("who plays them ended with exit status 1")
        _, after = endpoint.open(policies[1])
        for trajectory in (before, after):
            assert trajectory.reported.is_set() and trajectory.claimed.is_set()
            assert trajectory.result.failure == "who plays them ended with exit status 1"

    run(story())


def test_an_agent_talks_to_the_run_with_its_own_key_whatever_variables_are_handed_on(monkeypatch):
    told = {}

    async def start(*command, env, **options):
        told.update(env)
        raise OSError("no process is needed here")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    theirs = {"OPENAI_API_KEY": "theirs", "OPENAI_BASE_URL": "https://elsewhere", "MORE": "1"}

    async def story():
        agent = RunAgent(AgentEndpoint(), "true", theirs)
        with pytest.raises(OSError, match="no process"):
            async with agent._running("sk-own"):
                pass

    run(story())
    assert told["OPENAI_API_KEY"] == "sk-own" and told["OPENAI_BASE_URL"].startswith("http://127.0.0.1")
    assert told["MORE"] == "1"


class FakeProcess:
    """An `EnvironmentProcess` whose steps go on until they are released."""

    is_alive = True

    def __init__(self):
        self.trajectories = self.stuck = 0
        self.released = asyncio.Event()

    async def ask(self, call, trajectory, *arguments, timeout_s):
        await self.released.wait()
        return {}


def test_a_process_whose_step_has_ended_after_all_is_used_again():
    async def story():
        processes = EnvironmentProcesses(FakeProcess, 2, 60.0)
        first, second = processes._processes

        async def cut_off():
            async with processes.place() as place:
                await place.call("step")

        playing = asyncio.ensure_future(cut_off())
        await asyncio.sleep(0.01)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        assert (first.stuck, first.trajectories) == (1, 0)
        async with processes.place():
            assert second.trajectories == 1  # who is stuck gets nothing
        first.released.set()
        second.released.set()
        await asyncio.gather(*processes._leaving)
        assert first.stuck == second.stuck == 0
        async with processes.place():
            assert first.trajectories == 1

    run(story())


def test_a_call_of_a_tool_in_an_answer_that_was_cut_off_does_not_end_as_a_call():
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1_0"}]}
    asked = ChatRequest(messages=[{"role": "user", "content": "x"}])
    whole = Reply(message, "", completion(2), 1)
    cut = replace(whole, completion=completion(2, truncated=True))
    reasons = [choice["finish_reason"] for choice in body_of(asked, [whole, cut])["choices"]]
    assert reasons == ["tool_calls", "length"]


def test_a_key_in_the_name_of_an_environment_s_number_reaches_no_metric(monkeypatch):
    monkeypatch.setenv("A_SECRET_KEY", "sk-0123456789")

    async def names_its_key(prompt, policy):
        await policy.complete("go")
        return policy.trajectory(1.0, numbers={"calls with sk-0123456789": 2.0, "tries": 1.0})

    (one,) = run(all_of(names_its_key, Engine()))
    numbers = one.outcome.numbers
    assert (numbers["calls with ***"], numbers["tries"]) == (2.0, 1.0) and "sk-0" not in str(one.outcome)
