"""`POST /v1/responses`: the official client, the tokens of its conversations, and what is refused."""

import itertools
import json

import numpy as np
import openai
import pytest
from agent_endpoint import CALL, Server
from scripted_play import OneSession, run

from async_grpo.environments.openai_server.responses_request import ResponsesRequest, messages_of_input

TOOL = {
    "type": "function",
    "name": "add",
    "description": "a + b",
    "parameters": {"type": "object"},
    "strict": True,
}
THOUGHT_AND_CALL = f"<think>I add</think>so {CALL}"
ANSWER = "<think>\nfine</think>It is 2"


def saying(*texts: str) -> Server:
    """Return a server whose policy says these texts."""
    left = iter(texts)
    return Server(generation=OneSession(lambda: next(left)))


def client_of(server: Server, index: int = 0) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=server.endpoint.base_url, api_key=server.keys[index], max_retries=0)


def seen(server: Server) -> list[str]:
    """Return what the engine read before each turn."""
    decode = server.policies[0].recorder.chat.decode
    return [decode(ids, np.empty(0, np.int32)) for ids, _, _ in server.generation.requests]


def is_one_sequence(server: Server) -> bool:
    """Return whether each request began with all tokens that were read and sampled before it."""
    requests = server.generation.requests
    for (ids, sampled, _), (next_ids, _, _) in itertools.pairwise(requests):
        known = np.concatenate([ids, sampled])
        if not np.array_equal(next_ids[: len(known)], known):
            return False
    return server.policies[0].recorder.num_rewritten == 0


def output_of(call_id: str) -> dict:
    return {"type": "function_call_output", "call_id": call_id, "output": "2"}


def test_a_tool_loop_of_the_official_client_continues_the_sampled_tokens():
    async def story():
        async with saying(THOUGHT_AND_CALL, ANSWER, "bye") as server:
            create = client_of(server).responses.create
            conversation = [{"role": "user", "content": "1 + 1?"}]
            asked = {"model": "policy", "instructions": "be brief", "tools": [TOOL]}
            first = await create(input=conversation, **asked)
            assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
            thought, message, call = first.output
            assert thought.content[0].text == "I add" and message.content[0].text == "so"
            assert json.loads(call.arguments) == {"a": 1} and first.status == "completed"
            conversation += [*first.output, output_of(call.call_id)]
            second = await create(input=conversation, **asked)
            assert second.output_text == "It is 2" and second.usage.output_tokens > 3
            conversation += [
                *second.output,
                {"role": "user", "content": [{"type": "input_text", "text": "thanks"}]},
            ]
            await create(input=conversation, **asked)
            assert is_one_sequence(server) and seen(server)[-1].count("be brief") == 1
            assert '"description": "a + b"' not in seen(server)[0]  # this template shows no tools

    run(story())


def test_a_stream_is_put_together_by_the_official_client():
    async def story():
        async with saying(THOUGHT_AND_CALL, THOUGHT_AND_CALL) as server:
            client = client_of(server)
            raw = await client.responses.create(model="policy", input="1 + 1?", tools=[TOOL], stream=True)
            events = [event async for event in raw]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            kinds = [event.type.removeprefix("response.") for event in events]
            text_events = ["content_part.added", "{}.delta", "{}.done", "content_part.done"]
            expected = ["created", "in_progress"]
            for events_of_item in (
                [event.format("reasoning_text") for event in text_events],
                [event.format("output_text") for event in text_events],
                ["function_call_arguments.delta", "function_call_arguments.done"],
            ):
                expected += ["output_item.added", *events_of_item, "output_item.done"]
            assert kinds == [*expected, "completed"]
            async with client.responses.stream(model="policy", input="1 + 1?", tools=[TOOL]) as stream:
                final = await stream.get_final_response()
            assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
            assert final.output[2].arguments == '{"a": 1}' and final.output_text == "so"

    run(story())


def test_a_stored_answer_is_continued_by_its_id_alone():
    async def story():
        async with saying(THOUGHT_AND_CALL, ANSWER, "bye") as server:
            create = client_of(server).responses.create
            first = await create(model="policy", instructions="be brief", input="1 + 1?", tools=[TOOL])
            call_id = first.output[-1].call_id
            second = await create(
                model="policy",
                instructions="be brief",
                input=[output_of(call_id)],
                previous_response_id=first.id,
                tools=[TOOL],
            )
            assert second.previous_response_id == first.id
            await create(
                model="policy", instructions="be brief", input="thanks", previous_response_id=second.id
            )
            assert is_one_sequence(server) and seen(server)[-1].count("be brief") == 1

    run(story())


def test_a_stored_answer_can_be_asked_for_and_removed_by_its_own_trajectory():
    async def story():
        async with Server(count=2) as server:
            client, stranger = client_of(server), client_of(server, index=1)
            made = await client.responses.create(model="policy", input="1 + 1?", metadata={"a": "b"})
            assert await client.responses.retrieve(made.id) == made
            with pytest.raises(openai.NotFoundError, match="no stored response with the id"):
                await stranger.responses.retrieve(made.id)

            await client.responses.delete(made.id)
            for attempt in (client.responses.retrieve, client.responses.delete):
                with pytest.raises(openai.NotFoundError):
                    await attempt(made.id)
            with pytest.raises(openai.BadRequestError, match="previous_response_id"):
                await client.responses.create(model="policy", input="a", previous_response_id=made.id)

    run(story())


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_off_is_incomplete_and_says_why(stream):
    async def story():
        async with Server() as server:
            server.generation._dice.random = lambda: 0.0  # each answer is cut off
            create = client_of(server).responses.create
            answer = await create(model="policy", input="a", max_output_tokens=5, stream=stream)
            if stream:
                events = [event async for event in answer]
                assert events[-1].type == "response.incomplete"
                answer = events[-1].response
            assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
            assert answer.output[-1].status == "incomplete"

    run(story())


def test_calls_of_a_turn_are_one_message_even_if_the_answer_of_each_follows_it_at_once():
    async def story():
        async with saying(f"so {CALL} and {CALL}", ANSWER, "bye") as server:
            create = client_of(server).responses.create
            first = await create(model="policy", input="1 + 1?", tools=[TOOL])
            conversation = [{"role": "user", "content": "1 + 1?"}]
            for item in first.output:
                conversation.append(item)
                if item.type == "function_call":
                    conversation.append(output_of(item.call_id))
            await create(model="policy", input=conversation, tools=[TOOL])
            assert is_one_sequence(server) and seen(server)[-1].count("<|im_start|>tool\n2") == 2

    run(story())


THOUGHT = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "hm"}],
}
TEXT = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]}
FOREIGN_CALL = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
CHAT_CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ([THOUGHT, TEXT], [{"content": "so", "reasoning_content": "hm"}]),
        ([THOUGHT], [{"content": "", "reasoning_content": "hm"}]),
        ([THOUGHT, FOREIGN_CALL], [{"content": None, "reasoning_content": "hm", "tool_calls": [CHAT_CALL]}]),
        ([TEXT, FOREIGN_CALL, FOREIGN_CALL], [{"content": "so", "tool_calls": [CHAT_CALL, CHAT_CALL]}]),
        ([{**THOUGHT, "content": None}, TEXT], [{"content": "so"}]),
        ([{"role": "assistant", "content": "so"}], [{"content": "so"}]),
        # A turn ends before the next thought, and before a second text
        ([TEXT, THOUGHT, TEXT], [{"content": "so"}, {"content": "so", "reasoning_content": "hm"}]),
        ([TEXT, TEXT], [{"content": "so"}, {"content": "so"}]),
        ([FOREIGN_CALL, TEXT], [{"content": None, "tool_calls": [CHAT_CALL]}, {"content": "so"}]),
        # Ids of other servers do not say which calls belong together
        (
            [FOREIGN_CALL | {"id": "fc_1"}, TEXT, FOREIGN_CALL | {"id": "fc_2"}],
            [{"content": None, "tool_calls": [CHAT_CALL]}, {"content": "so", "tool_calls": [CHAT_CALL]}],
        ),
    ],
)  # fmt: skip
def test_the_items_of_a_turn_are_one_message_of_a_chat(items, messages):
    request = ResponsesRequest.model_validate({"input": items})
    assert messages_of_input(request.input) == [{"role": "assistant", **message} for message in messages]


def test_a_turn_whose_thought_the_agent_changed_is_not_the_policy_s():
    async def story():
        async with saying(ANSWER, "bye", "bye") as server:
            first = await response(server, {"input": "1 + 1?"})
            conversation = [
                {"role": "user", "content": "1 + 1?"},
                *first["output"],
                {"role": "user", "content": "b"},
            ]
            await response(server, {"input": conversation})
            assert is_one_sequence(server)
            conversation[1]["content"][0]["text"] = "another thought"
            await response(server, {"input": conversation})
            assert "<think>" not in seen(server)[-1]  # the template writes contents alone

    run(story())


async def response(server: Server, body: dict) -> dict:
    """Return the answer to a request that is answered."""
    status, answer = await server.ask(server.keys[0], "responses", body)
    assert status == 200, answer
    return answer


async def refusal(server: Server, body: dict, key: int = 0) -> dict:
    """Send a request that is refused, and return the error."""
    status, answer = await server.ask(server.keys[key], "responses", body)
    assert status == 400, answer
    assert server.policies[key].recorder.num_turns == 0
    return answer["error"]


@pytest.mark.parametrize(
    ("body", "reasons"),
    [
        ({}, ["input: Field required"]),
        ({"input": 3}, ["input: ", "a text, or a list of items"]),
        ({"input": []}, ["input: List should have at least 1 item"]),
        ({"input": [3]}, ["input.0: "]),
        ({"input": [{"role": "robot", "content": "a"}]}, ["input.0.role"]),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, ["content.0.image_url: Field required"]),
        ({"input": [{"type": "web_search_call"}]}, ["input.0: the type 'web_search_call' is not supported"]),
        ({"input": [{"type": "function_call", "name": "a", "arguments": "{}"}]}, ["input.0.call_id"]),
        ({"input": "a", "tools": [{"type": "web_search"}]}, ["tools.0.type: the tool 'web_search' does not exist"]),
        ({"input": "a", "tools": [{"type": "function"}]}, ["tools.0.name: Field required"]),
        ({"input": "a", "max_output_tokens": 0}, ["max_output_tokens"]),
        ({"input": "a", "conversation": "c", "background": True}, ["conversation: ", "background: "]),
        ({"input": "a", "prompt": {"id": "p"}}, ["prompt: "]),
        ({"input": "a", "include": ["message.output_text.logprobs"]}, ["include.0", "log probabilities"]),
        ({"input": "a", "metadata": {"a": "x" * 513}}, ["metadata.a"]),
        ({"tools": 3, "stream": "perhaps", "top_logprobs": 2}, ["input: ", "tools: ", "stream: ", "top_logprobs: "]),
    ],
)  # fmt: skip
def test_each_fault_of_a_request_is_named(body, reasons):
    async def story():
        async with Server() as server:
            message = (await refusal(server, body))["message"]
            assert [reason for reason in reasons if reason not in message] == [], message

    run(story())


SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "instruction"),
    [
        ({"text": {"format": {"type": "json_object"}}}, "Answer with one JSON object"),
        ({"text": {"format": {"type": "json_schema", "name": "sum", "schema": SCHEMA}}}, json.dumps(SCHEMA)),
        ({"tools": [TOOL], "tool_choice": "required"}, "a call of the tool add"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "add"}}, "one call of the tool add"),
        ({"text": {"format": {"type": "text"}, "verbosity": "low"}, "tools": [TOOL], "tool_choice": "auto"}, None),
    ],
)  # fmt: skip
def test_a_form_that_the_request_requires_is_told_to_the_policy(fields, instruction):
    async def story():
        async with Server() as server:
            server.policies[0].recorder.chat.typed_output = "hint"
            status, answer = await server.ask(server.keys[0], "responses", {"input": "1 + 1?", **fields})
            assert status == 200, answer
            (text,) = seen(server)
            assert ("system" in text) is (instruction is not None) and (instruction or "") in text
            required_format = fields.get("text", {}).get("format", {"type": "text"})
            assert answer["text"]["format"].items() >= required_format.items()
            assert answer["tool_choice"] == fields.get("tool_choice", "auto")

    run(story())
