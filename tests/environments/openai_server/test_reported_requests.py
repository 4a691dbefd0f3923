"""Requests of reports/agent.py to the endpoint: each is answered as OpenAI's API would, or refused with the reason."""

import asyncio
import os
import sys
from pathlib import Path

import pytest
from agent_endpoint import Server
from reported_inputs import REPORTS, needs_reports
from scripted_play import run

from async_grpo.environments.openai_server.unsupported_fields import UNSUPPORTED, unsupported_fields

NUM_GROUPS = 4  # of requests in the program
FREELY = "turns are sampled freely"
# Requests that are not answered with status 200, by name: the status and the reason
REFUSED = {
    "n0": (400, "n: Input should be greater than or equal to 1"),
    "n65": (400, "n: Input should be less than or equal to 64"),
    "stop_empty": (400, "stop: String should have at least 1 character"),
    "stop_many": (400, "stop: List should have at most 16 items"),
    "logprobs": (400, "logprobs: answers have no log probabilities"),
    "mct0": (400, "max_completion_tokens: Input should be greater than or equal to 1"),
    "mt_neg": (400, "max_tokens: Input should be greater than or equal to 1"),
    "image": (400, "a message has an image, and the model reads texts only"),
    "input_text": (
        400,
        "messages.0.content.0: the type 'input_text' is not supported (a text, or a list of parts",
    ),
    "functions": (400, "functions: use `tools`"),
    "ctk": (400, "chat_template_kwargs: the chat template is used in the same way"),
    "guided": (400, "only JSON schemas can be required of answers: use `response_format`"),
    "bad_words": (400, FREELY),
    "comp_batch": (400, "one text, or one list of token ids, per request"),
    "comp_batch_ids": (400, "one text, or one list of token ids, per request"),
    "comp_echo": (400, "echo: Input should be False"),
    "comp_best": (400, "best_of: use `n`"),
    "comp_logprobs": (400, "logprobs: answers have no log probabilities"),
    "comp_mt0": (400, "max_tokens: Input should be greater than or equal to 1"),
    "comp_suffix": (400, "suffix: answers continue the prompt alone"),
    "comp_empty": (400, "the prompt is empty"),
    "comp_badids": (400, "token ids from 0 to 299, not [99999]"),
    "embeddings": (404, "no POST /v1/embeddings here"),
    "messages": (404, "no POST /v1/messages here"),
    "nokey": (401, "no trajectory has this key"),
    "notjson": (400, "the body cannot be read as JSON"),
    "emptybody": (400, "the body cannot be read as JSON"),
    "list": (400, "the request: Input should be a valid dictionary"),
    "no_messages": (400, "messages: Field required"),
    "empty_messages": (400, "messages: List should have at least 1 item"),
    "no_role": (400, "messages.0.role: Field required"),
    "result_nan": (400, "reward: Input should be a finite number"),
    "result_none": (400, "give either a reward or a failure"),
    "result_both": (400, "give either a reward or a failure"),
    "result_list": (400, "reward: Input should be a valid number"),
}
# Parts of answers with status 200. All others have one choice, with a text and a usage
ANSWERED = {
    "n2": '"index": 1, "message"',
    "stream": "data: [DONE]",
    "stream_usage": '"finish_reason": null}], "usage": null',
    "stream_n2": '"index": 0, "delta": {"role": "assistant"',
    "models": '"data": [{"id": "policy", "object": "model", "created"',
    "model": '{"id": "policy", "object": "model", "created"',
    "result_text": '"reward": 1.0',
    "result_bool": '"reward": 1.0',
    "responses": '"object": "response"',
    "result": '"reward": 0.5',
}
NUM_REQUESTS = 66


async def answers_of(folder: Path) -> dict[str, tuple[int, str]]:
    """Run the program for each group of requests, and return status and text of each answer by name."""
    answers: dict[str, tuple[int, str]] = {}
    async with Server(NUM_GROUPS) as server:
        # All policies share one chat
        server.policies[0].recorder.chat.typed_output = "hint"
        for group in range(NUM_GROUPS):
            environment = os.environ | {
                "OPENAI_BASE_URL": server.endpoint.base_url,
                "OPENAI_API_KEY": server.keys[group],
                "ANSWERS": str(folder / str(group)),
            }
            program = await asyncio.create_subprocess_exec(
                sys.executable,
                str(REPORTS / "agent.py"),
                str(group),
                stdin=asyncio.subprocess.PIPE,
                env=environment,
            )
            await program.communicate(b"{}")
            assert program.returncode == 0
    for path in folder.glob("*/*.txt"):
        name = ""
        for line in path.read_text().splitlines():
            fields = line.split(" | ", 2)
            if len(fields) == 3:
                name = fields[0]
                answers[name] = (int(fields[1]), fields[2])
            else:  # a further event of a stream
                status, text = answers[name]
                answers[name] = (status, f"{text}\n{line}")
    return answers


@needs_reports
def test_reported_requests_are_answered_as_openai_would_or_refused_with_the_reason(tmp_path):
    async def story():
        return await answers_of(tmp_path)

    answers = run(story())
    assert len(answers) >= NUM_REQUESTS - 1 and REFUSED.keys() | ANSWERED.keys() <= answers.keys()
    for name, (status, text) in answers.items():
        if name in REFUSED:
            expected_status, reason = REFUSED[name]
            assert (status, reason in text) == (expected_status, True), (name, text)
            assert '"code": "invalid' in text
            continue
        expected = ANSWERED.get(name, '"finish_reason": "stop"')
        assert (status, expected in text) == (200, True), (name, text)


@pytest.mark.parametrize(
    ("fields", "is_refused"),
    [
        *(({name: "x"}, True) for name in UNSUPPORTED),
        ({"best_of": 2}, True),
        ({"logprobs": 1}, True),
        ({"min_tokens": 1}, True),
        *(({name: None}, False) for name in UNSUPPORTED),
        *(({name: False}, False) for name in ("logprobs", "ignore_eos")),
        *(({name: []}, False) for name in ("functions", "bad_words")),
        ({"best_of": 1}, False),
        ({"min_tokens": 0}, False),
        ({"chat_template_kwargs": {}}, False),
        (
            {"temperature": 0, "seed": 1, "logit_bias": {"5": 100}, "user": "me", "reasoning_effort": "low"},
            False,
        ),
    ],
)
def test_fields_that_would_change_the_answer_are_refused(fields, is_refused):
    assert bool(unsupported_fields(fields)) is is_refused
