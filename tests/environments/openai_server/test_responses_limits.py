"""Stored answers and items of the Responses API: limits, other trajectories, disconnects, and garbage."""

import asyncio
import json
import random

import pytest
from agent_endpoint import CALL, Server, post
from scripted_play import OneSession, run

from async_grpo.environments.openai_server import stored_responses
from async_grpo.environments.openai_server.openai_api import MAX_CALLS
from async_grpo.environments.openai_server.responses_request import (
    MAX_ITEMS,
    ResponsesRequest,
    messages_of_input,
)
from async_grpo.errors import ConfigurationError

TOOL = {"type": "function", "name": "add"}
USER = {"role": "user", "content": "a"}
UNKNOWN = ["resp_0", "resp_", "", "x", "resp_" + "0" * 200, "../etc"]


async def response(server: Server, body: dict, key: int = 0) -> dict:
    """Return the answer to a request that is answered."""
    status, answer = await server.ask(server.keys[key], "responses", body)
    assert status == 200, answer
    return answer


async def refusal(server: Server, body: dict, key: int = 0) -> dict:
    """Return the error of a request that is refused."""
    status, answer = await server.ask(server.keys[key], "responses", body)
    assert status == 400, answer
    return answer["error"]


def test_an_id_that_is_unknown_dropped_not_stored_or_of_another_trajectory_is_refused(monkeypatch):
    monkeypatch.setattr(stored_responses, "MAX_STORED", 2)

    async def story():
        async with Server(2) as server:
            first = await response(server, {"input": "a"})
            unstored = await response(server, {"input": "a", "store": False})
            elsewhere = await response(server, {"input": "a"}, key=1)
            ids = [*UNKNOWN, unstored["id"], elsewhere["id"]]
            for _ in range(2):
                await response(server, {"input": "a"})
            for response_id in [*ids, first["id"]]:
                error = await refusal(server, {"input": "b", "previous_response_id": response_id})
                assert error["code"] == "previous_response_not_found", response_id
                item_id = response_id.replace("resp_", "msg_")
                error = await refusal(server, {"input": [{"type": "item_reference", "id": item_id}, USER]})
                assert error["code"] == "previous_response_not_found", item_id
            # Refused requests are no turns
            assert [policy.recorder.num_turns for policy in server.policies] == [4, 1]

    run(story())


def test_answers_are_stored_up_to_a_number_of_bytes_and_the_newest_always_is(monkeypatch):
    monkeypatch.setattr(stored_responses, "MAX_STORED_BYTES", 800)

    async def story():
        async with Server() as server:
            first = await response(server, {"input": "a" * 300})
            second = await response(server, {"input": "b", "previous_response_id": first["id"]})
            await refusal(server, {"input": "c", "previous_response_id": first["id"]})
            large = await response(server, {"input": "c" * 2000})
            await refusal(server, {"input": "d", "previous_response_id": second["id"]})
            await response(server, {"input": "d", "previous_response_id": large["id"]})

    run(story())


def test_a_conversation_is_as_long_with_its_stored_part_as_a_single_request_may_be():
    async def story():
        async with Server() as server:
            stored = server.trajectories[0].responses
            stored._max_bytes = 1000
            first = await response(server, {"input": "a" * 500})
            error = await refusal(server, {"input": "b" * 500, "previous_response_id": first["id"]})
            assert "the conversation with its stored part has" in error["message"]
            item = first["output"][0]
            references = [{"type": "item_reference", "id": item["id"]}] * 50
            assert "references refer" in (await refusal(server, {"input": [*references, USER]}))["message"]
            # Instructions and tools are not part of it, because each request sends its own
            tool = TOOL | {"description": "x" * 2000}
            asked = {
                "input": "b",
                "previous_response_id": first["id"],
                "tools": [tool],
                "instructions": "y" * 999,
            }
            await response(server, asked)

    run(story())


@pytest.mark.parametrize(
    "request_input",
    [[USER] * (MAX_ITEMS + 1), [{"role": "user", "content": [{"type": "input_text", "text": "a"}] * 5000}]],
)
def test_too_many_items_and_parts_are_refused(request_input):
    async def story():
        async with Server() as server:
            assert "at most 4096 items" in (await refusal(server, {"input": request_input}))["message"]

    run(story())


def test_too_many_calls_in_one_turn_are_refused():
    calls = [{"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}] * (MAX_CALLS + 1)
    request = ResponsesRequest.model_validate({"input": [USER, *calls]})
    with pytest.raises(ConfigurationError, match=f"more than {MAX_CALLS} calls"):
        messages_of_input(request.input)


def test_requests_that_continue_one_answer_at_the_same_time_are_all_answered():
    async def story():
        async with Server() as server:
            first = await response(server, {"input": "a"})
            asked = {"input": "b", "previous_response_id": first["id"]}
            answers = await asyncio.gather(*(response(server, asked) for _ in range(20)))
            assert len({answer["id"] for answer in answers}) == 20
            for answer in answers:
                await response(server, {"input": "c", "previous_response_id": answer["id"]})

    run(story())


def test_a_client_that_leaves_in_the_middle_of_a_stream_leaves_a_turn_that_can_be_continued():
    async def story():
        async with Server(generation=OneSession(lambda: "hm " * 30_000)) as server:
            server.policies[0].limits = server.policies[0].limits.__class__(1000, 10**6, None, 60, 300)
            url = f"{server.endpoint.base_url}/responses"
            headers = {"Authorization": f"Bearer {server.keys[0]}"}
            for length in (1, 200, 5000):
                body = {"input": "a", "stream": True, "max_output_tokens": 10**6}
                async with server.session.post(url, json=body, headers=headers) as answer:
                    piece = await answer.content.read(length)
                    assert piece.startswith(b"e")
                    answer.close()
            await asyncio.sleep(0.2)
            assert server.policies[0].recorder.num_turns == 3
            await response(server, {"input": "b"})

    run(story())


def test_garbage_is_refused_and_never_an_error_of_the_server(caplog):
    dice = random.Random(5)
    atoms = [
        None,
        True,
        0,
        -1,
        1.5,
        "",
        "a",
        "auto",
        "function",
        "message",
        "reasoning",
        "resp_0",
        "\ud800",
        [],
        {},
        [[]],
    ]
    names = (
        "type role content id call_id name arguments output text input_text summary encrypted_content".split()
    )
    fields = (
        "input instructions tools tool_choice text reasoning previous_response_id store stream include metadata "
        "truncation max_output_tokens parallel_tool_calls temperature model"
    ).split()
    items = [
        USER,
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{"},
        {"type": "function_call_output", "call_id": "c", "output": "2"},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
    ]  # fmt: skip

    def value(depth: int = 0):
        kind = dice.random()
        if kind < 0.3 or depth > 2:
            return dice.choice(atoms)
        if kind < 0.5:
            return [value(depth + 1) for _ in range(dice.randrange(3))]
        if kind < 0.7:
            return dice.sample(items, dice.randrange(1, 5))
        return {dice.choice(names): value(depth + 1) for _ in range(dice.randrange(4))}

    async def story():
        statuses = set()
        async with Server(generation=OneSession(lambda: f"so {CALL}"), turns=10_000) as server:
            for _ in range(1500):
                body = {dice.choice(fields): value() for _ in range(dice.randrange(4))}
                if dice.random() < 0.7:
                    body["input"] = dice.choice([value(), dice.choices(items, k=3)])
                headers = {"Authorization": f"Bearer {server.keys[0]}"}
                url = f"{server.endpoint.base_url}/responses"
                async with server.session.post(url, data=json.dumps(body), headers=headers) as answer:
                    statuses.add(answer.status)
                    assert answer.status in (200, 400), (body, await answer.text())
                    await answer.read()
            status, answer = await post(server, b'{"input": "a"}', "responses")
            assert status == 200, answer
        assert statuses == {200, 400}

    run(story())
    assert [record for record in caplog.records if record.exc_info] == []
