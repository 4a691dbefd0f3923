"""Streamed chat completions: the events are those of real servers, and the official client puts them together again."""

import json

import openai
import pytest
from agent_endpoint import CALL, MESSAGES, TOOL, Server
from scripted_play import OneSession, run

TURN = f"<think>I add</think>so {CALL}{CALL}"


async def events_of(server: Server, body: dict) -> list[dict]:
    """Return the events of a streamed answer without the last one, which says that there are no more."""
    url = f"{server.endpoint.base_url}/chat/completions"
    headers = {"Authorization": f"Bearer {server.keys[0]}"}
    async with server.session.post(url, json=MESSAGES | body, headers=headers) as answer:
        lines = (await answer.text()).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def test_a_turn_is_streamed_as_its_role_thought_text_and_calls_each_in_an_event_of_its_own():
    async def story():
        async with Server(generation=OneSession(lambda: TURN)) as server:
            events = await events_of(server, {"stream": True, "tools": [TOOL]})
            deltas = [event["choices"][0]["delta"] for event in events]
            assert deltas[:3] == [
                {"role": "assistant", "content": ""},
                {"reasoning_content": "I add"},
                {"content": "so"},
            ]
            names = [
                [call["index"], call["function"].get("name"), call["function"]["arguments"]]
                for delta in deltas[3:-1]
                for call in delta["tool_calls"]
            ]
            assert names == [[0, "add", ""], [0, None, '{"a": 1}'], [1, "add", ""], [1, None, '{"a": 1}']]
            assert deltas[-1] == {} and events[-1]["choices"][0]["finish_reason"] == "tool_calls"
            assert all("usage" not in event for event in events)

    run(story())


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("length, num_pieces", [(0, 0), (16, 1), (17, 2), (100, 7), (10_000, 32)])
def test_a_long_text_is_streamed_in_a_few_pieces(api, length, num_pieces):
    text = ("été 🙂 0123456789" * length)[:length]

    async def pieces(client: openai.AsyncOpenAI) -> list[str]:
        if api == "chat":
            asked = {**MESSAGES, "model": "policy", "stream": True}
            chunks = [chunk async for chunk in await client.chat.completions.create(**asked)]
            return [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]
        events = [
            event async for event in await client.responses.create(model="policy", input="a", stream=True)
        ]
        return [event.delta for event in events if event.type == "response.output_text.delta"]

    async def story():
        async with Server(generation=OneSession(lambda: text), turns=2) as server:
            client = openai.AsyncOpenAI(base_url=server.endpoint.base_url, api_key=server.keys[0])
            sent = await pieces(client)
            assert len(sent) == num_pieces and "".join(sent) == text

    run(story())


def test_the_usage_comes_in_a_last_event_without_choices():
    async def story():
        async with Server() as server:
            events = await events_of(server, {"stream": True, "stream_options": {"include_usage": True}})
            assert [event["usage"] is None for event in events] == [True] * (len(events) - 1) + [False]
            assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] > 0

    run(story())


@pytest.mark.parametrize("count", [1, 2])
def test_the_official_client_puts_the_events_together(count):
    async def story():
        async with Server(generation=OneSession(lambda: TURN)) as server:
            client = openai.AsyncOpenAI(base_url=server.endpoint.base_url, api_key=server.keys[0])
            asked = {**MESSAGES, "model": "policy", "n": count, "tools": [TOOL]}
            async with client.chat.completions.stream(
                **asked, stream_options={"include_usage": True}
            ) as stream:
                kinds = [event.type async for event in stream]
                final = await stream.get_final_completion()
            assert "content.delta" in kinds and "tool_calls.function.arguments.done" in kinds
            assert len(final.choices) == count and final.usage.total_tokens > 0
            whole = await client.chat.completions.create(**asked)
            for streamed, choice in zip(final.choices, whole.choices, strict=True):
                assert streamed.finish_reason == choice.finish_reason == "tool_calls"
                assert streamed.message.content == choice.message.content == "so"
                assert streamed.message.reasoning_content == choice.message.reasoning_content == "I add"
                streamed_calls = [call.function.arguments for call in streamed.message.tool_calls]
                assert streamed_calls == [call.function.arguments for call in choice.message.tool_calls]

    run(story())


def test_the_official_client_lists_the_policy_as_the_only_model():
    async def story():
        async with Server() as server:
            client = openai.AsyncOpenAI(base_url=server.endpoint.base_url, api_key=server.keys[0])
            assert [model.id async for model in client.models.list()] == ["policy"]
            assert (await client.models.retrieve("policy")).owned_by == "async-grpo"

    run(story())
