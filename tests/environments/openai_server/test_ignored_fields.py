"""Fields of requests that are ignored are counted by name, and the page lists them."""

from pathlib import Path

import pytest
from agent_endpoint import MESSAGES, Server
from scripted_play import run

from async_grpo.environments.openai_server.unsupported_fields import (
    IGNORED,
    RESPONSES_UNSUPPORTED,
    ignored_fields,
)
from async_grpo.experience.step_metrics import trajectory_stats
from async_grpo.types import Sample

PAGE = Path(__file__).parents[3] / "docs" / "environments.md"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", MESSAGES),
        ("completions", {"prompt": "a"}),
        ("responses", {"input": "a"}),
    ],
)
def test_each_request_with_an_ignored_field_is_counted_in_the_metrics_of_its_step(path, body):
    async def story():
        async with Server(2) as server:
            for key, count in zip(server.keys, (1, 2), strict=True):
                for _ in range(count):
                    asked = body | {"temperature": 0, "seed": 1, "an_invented_name": 1, "user": "me"}
                    status, answer = await server.ask(key, path, asked)
                    assert status == 200, answer
            await server.ask(server.keys[0], path, body | {"temperature": 1.5, "top_p": None})
            return [policy.trajectory(1.0) for policy in server.policies]

    samples = [Sample(None, completion, None) for completion in run(story())]
    stats = trajectory_stats(samples)
    ignored = {name: value for name, value in stats.items() if name.startswith("environment/ignored/")}
    assert ignored == {"environment/ignored/temperature": 4, "environment/ignored/seed": 3}


def test_a_refused_request_is_not_counted():
    async def story():
        async with Server() as server:
            body = MESSAGES | {"temperature": 0, "logprobs": True}
            assert (await server.ask(server.keys[0], "chat/completions", body))[0] == 400
            assert not server.policies[0].ignored_fields

    run(story())


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"parallel_tool_calls": True, "truncation": "disabled", "reasoning": None}, []),
        ({"parallel_tool_calls": False, "truncation": "auto"}, ["parallel_tool_calls", "truncation"]),
        ({"parallel_tool_calls": False, "tool_choice": "required"}, []),
        ({"text": {"verbosity": "low", "format": {"type": "text"}}}, ["verbosity"]),
        ({"text": 3, "temperature": []}, ["temperature"]),
    ],
)
def test_fields_with_the_values_that_hold_anyway_are_not_ignored(fields, names):
    assert ignored_fields(fields) == names


def test_the_page_lists_what_is_ignored_and_what_is_refused():
    section = PAGE.read_text().partition("### What is ignored")[2].partition("### ")[0]
    names = [name for name in (*IGNORED, *RESPONSES_UNSUPPORTED) if not name.startswith("guided_")]
    assert [name for name in names if f"`{name}`" not in section] == []


@pytest.mark.parametrize(
    ("path", "body", "faults"),
    [
        (
            "chat/completions",
            {"messages": [], "logprobs": True, "best_of": 2, "n": 0, "stream": "perhaps"},
            ["messages: ", "logprobs: ", "best_of: ", "n: ", "stream: "],
        ),
        (
            "chat/completions",
            MESSAGES | {"tools": [{"type": "web_search"}]},
            ["tools.0.type: the tool 'web_search' does not exist here", "only functions of the agent"],
        ),
        (
            "completions",
            {"prompt": [], "suffix": "a", "audio": {"a": 1}, "stop": [""]},
            ["suffix: ", "audio: ", "stop.0: "],
        ),
        ("completions", {"echo": True, "stop_token_ids": [1]}, ["prompt: ", "echo: ", "stop_token_ids: "]),
        ("result", {"reward": "much", "numbers": 3}, ["reward: ", "numbers: "]),
    ],
)
def test_a_refused_request_names_all_its_faults(path, body, faults):
    async def story():
        async with Server() as server:
            status, answer = await server.ask(server.keys[0], path, body)
            message = answer["error"]["message"]
            assert status == 400 and [fault for fault in faults if fault not in message] == [], message

    run(story())


def test_a_request_with_a_thousand_faults_is_refused_in_a_few_lines():
    async def story():
        async with Server() as server:
            body = {"numbers": {f"{number} {'x' * 100}": 1 for number in range(1000)}, "reward": "a" * 5000}
            status, answer = await server.ask(server.keys[0], "result", body)
            assert status == 400 and len(answer["error"]["message"]) < 2000

    run(story())
