"""Agents behind the OpenAI-compatible endpoint: the endpoint with open trajectories, agents as programs, and requests."""

import json
import sys
from pathlib import Path

import aiohttp
import numpy as np
from chat_templates import MODEL, chat_of
from scripted_play import SETTINGS, OneSession, run

from async_grpo.environments.config import EnvironmentConfig, TrajectoryLimits
from async_grpo.environments.make import make_played, source_of
from async_grpo.environments.openai_server.endpoint import AgentEndpoint
from async_grpo.environments.trajectory import TrajectoryRecorder
from async_grpo.environments.trajectory_client import TrajectoryClient
from async_grpo.types import Prompt

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def agent(path: Path, text: str, **options) -> tuple:
    """Write a Python program and return (what plays it as an agent, the policy that answers it)."""
    (path / "agent.py").write_text(text)
    config = EnvironmentConfig(
        environment=f"agent:exec {sys.executable} {path / 'agent.py'}", **{"tool_parser": "hermes", **options}
    )
    generation = OneSession(lambda: f"so {CALL}")
    assert config.environment is not None
    return make_played(config, str(MODEL), SETTINGS, source_of(config.environment), generation), generation


class Server:
    """An endpoint with `count` open trajectories of at most `turns` turns, and a client of it."""

    def __init__(self, count: int = 1, generation=None, turns: int = 1000) -> None:
        self.generation = generation or OneSession(lambda: "hm")
        self.endpoint, self.count, self.turns = AgentEndpoint(), count, turns

    async def __aenter__(self):
        await self.endpoint.start()
        chat = chat_of("appends")
        limits = TrajectoryLimits(self.turns, 4000, None, 60, 300)
        prompts = [Prompt(0, np.empty(0, np.int32), {"input": f"row {n}"}) for n in range(self.count)]
        self.policies = [
            TrajectoryClient(self.generation, TrajectoryRecorder(chat), prompt, 0, limits)
            for prompt in prompts
        ]
        self.keys, self.trajectories = zip(*map(self.endpoint.open, self.policies), strict=True)
        self.session = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *_):
        await self.session.close()
        await self.endpoint.close()

    async def ask(self, key: str | None, path: str, body=None, method: str = "POST", **more):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        url = f"{self.endpoint.base_url}/{path}"
        async with self.session.request(method, url, json=body, headers=headers, **more) as answer:
            return answer.status, json.loads(await answer.text())


MESSAGES = {"messages": [{"role": "user", "content": "a"}]}
TOOL = {"type": "function", "function": {"name": "add"}}


async def post(
    server: Server, body: bytes, path: str = "chat/completions", **headers: str
) -> tuple[int, dict]:
    """Send a body to the first trajectory and return (status, answer)."""
    headers = {"Authorization": f"Bearer {server.keys[0]}", **headers}
    url = f"{server.endpoint.base_url}/{path}"
    async with server.session.post(url, data=body, headers=headers) as answer:
        return answer.status, await answer.json()


def answers_of(*requests: tuple[bytes, str, dict]) -> list[tuple[int, dict]]:
    """Send requests (body, path, headers) one after the other and return each one's (status, answer)."""

    async def story():
        async with Server() as server:
            return [await post(server, body, path, **headers) for body, path, headers in requests]

    return run(story())
