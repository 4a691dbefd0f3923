"""What the endpoint refuses of a request's messages, and that it reads them as it reads those of rows."""

import pytest
from agent_endpoint import Server
from scripted_play import run

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
ASKED = "<|im_start|>user\n3+4?<|im_end|>\n"
OPENED = "<|im_start|>assistant\n"


def ask(messages: list[dict]) -> tuple[int, dict, str]:
    """Return status and body of the answer to these messages, and the text that the engine read."""

    async def exchange() -> tuple[int, dict, str]:
        async with Server() as server:
            status, body = await server.ask(server.keys[0], "chat/completions", {"messages": messages})
            trajectory = server.policies[0].trajectory(0.0)
            return status, body, trajectory.turns[0].before_text if trajectory.turns else ""

    return run(exchange())


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([{"role": "user", "content": "3+4?"}], ASKED + OPENED),
        ([{"role": "user", "content": [{"type": "text", "text": "3+4?"}]}], ASKED + OPENED),
        (
            [{"role": "user", "content": "3+4?"}, {"role": "assistant", "content": "It is"}],
            f"{ASKED}{OPENED}It is",
        ),
        (
            [
                {"role": "user", "content": "3+4?"},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": "7", "tool_call_id": "c1"},
            ],
            f"{ASKED}{OPENED}<|im_end|>\n<|im_start|>tool\n7<|im_end|>\n{OPENED}",
        ),
        # a role that no table knows is the agent's business
        ([{"role": "referee", "content": "3+4?"}], ASKED.replace("user", "referee") + OPENED),
    ],
)
def test_messages_are_read_as_those_of_rows(messages, expected):
    status, _, text = ask(messages)
    assert (status, text) == (200, expected)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "user", "content": None}], "its content is null"),
        ([{"role": "user"}], "its content is null"),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}],
            "add a message of the role tool",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "the model reads texts only",
        ),
    ],
)
def test_messages_without_a_text_are_refused_in_words(messages, words):
    status, body, text = ask(messages)
    assert status == 400 and words in body["error"]["message"] and text == ""
