"""One request of an agent holds nothing up: bodies are bounded before they are parsed, connections in number and time."""

import asyncio
import json
import logging

import aiohttp
import pydantic
import pytest
from agent_endpoint import CALL, MESSAGES, TOOL, Server, answers_of, post
from aiohttp.http_exceptions import BadStatusLine
from scripted_play import OneSession, run

from async_grpo.environments import refusals, typed_output
from async_grpo.environments.call_formats import read_hermes, take_out_calls
from async_grpo.environments.openai_server import open_trajectory, openai_api, request_body
from async_grpo.environments.openai_server.request_body import count_values, max_body_bytes, parsed_body
from async_grpo.processes import http_server
from async_grpo.processes.http_server import ConnectionGate, OneLinePerFault

TOKENS = 4000  # of the server's context
USER = {"role": "user", "content": ""}


@pytest.mark.parametrize("charset", ["punycode", "utf-16", "idna", "raw_unicode_escape", "no-such-codec"])
def test_a_body_in_another_charset_than_utf_8_is_refused_by_name(charset):
    """Python's punycode takes quadratic time: 160 kB took 8 s."""
    body = json.dumps(MESSAGES).encode()
    headers = {"Content-Type": f"application/json; charset={charset}"}
    ((status, answer),) = answers_of((body, "chat/completions", headers))
    assert status == 415 and repr(charset) in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("charset", ["utf-8", "UTF-8", "us-ascii"])
def test_utf_8_by_its_names_is_taken(charset):
    headers = {"Content-Type": f"application/json; charset={charset}"}
    ((status, _),) = answers_of((json.dumps(MESSAGES).encode(), "chat/completions", headers))
    assert status == 200


def test_a_body_longer_than_the_context_can_need_is_refused_with_both_lengths():
    limit = 256 * 1024 + 64 * TOKENS
    body = json.dumps({"prompt": "x" * limit}).encode()
    ((status, answer),) = answers_of((body, "completions", {}))
    assert max_body_bytes(TOKENS) == limit and status == 413
    assert str(limit) in answer["error"]["message"] and str(len(body)) in answer["error"]["message"]
    assert max_body_bytes(10**9) == 16 * 2**20


def test_a_body_without_a_length_is_refused_once_it_is_too_long():
    async def story():
        async with Server() as server:

            async def pieces():
                for _ in range(100):
                    yield b" " * 65_536

            assert (await post(server, pieces()))[0] == 413  # type: ignore[arg-type]

    run(story())


def with_strings_cut_out(text: str) -> int:
    """Values of JSON as Python reads it: every object, list, and entry of one."""

    def count(value) -> int:
        if isinstance(value, dict):
            return 1 + sum(map(count, value.values()))
        return 1 + sum(map(count, value)) if isinstance(value, list) else 1

    return count(json.loads(text))


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        [1],
        "a,b[{",
        {"a": ',"[', 'b"\\': ["\\", '\\",[', {}]},
        [[], [[]], {"": [1, 2, 3]}],
        {"messages": [{"role": "user", "content": '{"x": [1, 2]}\\'}] * 9},
    ],
)
def test_values_are_counted_without_parsing_and_never_too_few(value):
    text = json.dumps(value)
    assert with_strings_cut_out(text) <= count_values(text.encode()) <= 2 * with_strings_cut_out(text)


def test_what_would_take_long_to_parse_is_refused_before(monkeypatch):
    monkeypatch.setattr(json, "loads", lambda text: pytest.fail("it was parsed"))
    for body in (
        b"[" + b"[]," * 1_000_000 + b"1]",
        b"[" + b'{"":1},' * 500_000 + b"1]",
        b'["' + b'","' * 1_000_000 + b'"]',
        b"[" * 200_000,
    ):
        with pytest.raises(aiohttp.web.HTTPBadRequest) as refused:
            parsed_body(body)
        assert str(request_body.MAX_VALUES) in str(refused.value.text)


def test_a_prompt_may_have_as_many_token_ids_as_the_context_beside_all_else():
    body = json.dumps({"prompt": [1] * (request_body.MAX_VALUES + 500)}).encode()
    assert len(parsed_body(body, max_token_ids=1000)["prompt"]) == request_body.MAX_VALUES + 500
    with pytest.raises(aiohttp.web.HTTPBadRequest):
        parsed_body(body, max_token_ids=100)


@pytest.mark.parametrize(
    ("path", "body", "limit"),
    [
        ("chat/completions", {"messages": [USER] * 5000}, openai_api.MAX_MESSAGES),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 5000}]},
            openai_api.MAX_PARTS,
        ),
        ("chat/completions", MESSAGES | {"tools": [TOOL] * 1025}, openai_api.MAX_TOOLS),
        (
            "chat/completions",
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a"}}] * 257}]},
            openai_api.MAX_CALLS,
        ),
        ("chat/completions", MESSAGES | {"stop": ["a"] * 17}, openai_api.MAX_STOPS),
        ("chat/completions", MESSAGES | {"stop": "a" * 1025}, openai_api.MAX_STOP_CHARACTERS),
        ("chat/completions", MESSAGES | {"model": "m" * 257}, typed_output.MAX_NAME_CHARACTERS),
        (
            "chat/completions",
            {"messages": [{"role": "r" * 257, "content": ""}]},
            typed_output.MAX_NAME_CHARACTERS,
        ),
        ("chat/completions", MESSAGES | {"n": 65}, openai_api.MAX_ANSWERS),
        ("completions", {"prompt": [1] * 5000}, TOKENS),
        ("result", {"reward": 1, "numbers": {str(n): 1 for n in range(101)}}, 100),
    ],
)
def test_what_is_too_much_is_refused_with_its_limit(path, body, limit):
    ((status, answer),) = answers_of((json.dumps(body).encode(), path, {}))
    assert status == 400 and str(limit) in answer["error"]["message"] and answer["error"]["code"]


def test_a_list_that_is_wrong_throughout_is_refused_at_its_first_fault():
    for body in ({"messages": [{}] * 4000}, {"messages": [{"role": "user", "content": [1] * 4000}]}):
        with pytest.raises(pydantic.ValidationError) as refused:
            openai_api.ChatRequest.model_validate(body)
        assert refused.value.error_count() < 5


def test_a_name_that_a_request_has_made_up_is_cut_in_the_answer():
    body = json.dumps({"reward": 1, "numbers": {"k" * 100_000: 1}}).encode()
    ((status, answer),) = answers_of((body, "result", {}))
    assert status == 400 and 100 < len(answer["error"]["message"]) < 800


def test_several_answers_to_one_conversation_render_and_tokenise_it_once(monkeypatch):
    async def story():
        async with Server() as server:
            chat, calls = server.policies[0].recorder.chat, []
            render, encode = chat.render_foreign, chat.encode
            monkeypatch.setattr(chat, "render_foreign", lambda *a: (calls.append("render"), render(*a))[1])
            monkeypatch.setattr(chat, "encode", lambda *a, **k: (calls.append("encode"), encode(*a, **k))[1])
            status, answer = await server.ask(server.keys[0], "chat/completions", MESSAGES | {"n": 8})
            assert status == 200 and len(answer["choices"]) == 8
            in_engine = [asked.tolist() for asked, _, _ in server.generation.requests]
            assert in_engine == in_engine[:1] * 8
            return calls

    calls = run(story())
    assert calls.count("render") == 1 and calls[0] == "render" and calls[1] == "encode"


def test_a_large_conversation_is_rendered_outside_the_loop_and_means_the_same():
    long = "word " * 8000

    async def story():
        async with Server() as server:
            turns = asyncio.get_running_loop().time
            for policy in server.policies:
                policy.limits = policy.limits.__class__(9, 10**6, None, 60, 300)
            messages = [{"role": "user", "content": long}]
            beats, beating = [turns()], True

            async def beat():
                while beating:
                    await asyncio.sleep(0)
                    beats.append(turns())

            pulse = asyncio.ensure_future(beat())
            status, answer = await server.ask(server.keys[0], "chat/completions", {"messages": messages})
            assert status == 200
            messages += [answer["choices"][0]["message"], {"role": "user", "content": long}]
            assert (await server.ask(server.keys[0], "chat/completions", {"messages": messages}))[0] == 200
            beating = False
            await pulse
            (one,) = server.policies[0].recorder._sequences
            assert one.text.count(long) == 2 and len(one.turns) == 2
            assert one.token_ids[: len(server.generation.requests[1][0])].tolist() == (
                server.generation.requests[1][0].tolist()
            )

    run(story())


def test_calls_are_taken_out_of_long_texts_as_the_expression_did_it():
    import random
    import re

    expression = re.compile(r"<tool_call>\s*(\{(?:(?!</?tool_call>).)*\})\s*</tool_call>", re.DOTALL)
    dice = random.Random(0)
    pieces = ["<tool_call>", "</tool_call>", "{", "}", " ", "\n", "a", "\x1c", '{"name": "f"}', "<tool_call"]
    for _ in range(5000):
        text = "".join(dice.choices(pieces, k=dice.randrange(14)))
        assert take_out_calls(text) == (expression.sub("", text), expression.findall(text)), text


@pytest.mark.parametrize(
    "piece", ["<tool_call>", "<tool_call>{", "<tool_call> ", "}", "{}</tool_call>", CALL]
)
def test_a_megabyte_of_tags_is_read_in_linear_time(piece):
    """Quadratic time would be hours, a lookahead at each character half a second."""
    read_hermes("<tool_call>{" + piece * (2**20 // len(piece)))


# Connections


def test_a_connection_that_says_nothing_or_little_is_closed(monkeypatch):
    monkeypatch.setattr("async_grpo.environments.openai_server.endpoint.IDLE_S", 0.3)

    async def story():
        async with Server() as server:
            for said in (b"", b"POST /v1/completions HT", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"):
                reader, writer = await asyncio.open_connection("127.0.0.1", server.endpoint._port)
                writer.write(said)
                await asyncio.wait_for(reader.read(), 20)
                writer.close()

    run(story())


def test_a_body_that_does_not_come_ends_with_a_status(monkeypatch):
    monkeypatch.setattr(request_body, "BODY_WITHIN_S", 0.3)

    async def story():
        async with Server() as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.endpoint._port)
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.keys[0]}\r\n"
            writer.write(f"{head}Content-Length: 100\r\n\r\n{{".encode())
            assert b" 408 " in await asyncio.wait_for(reader.readline(), 20)
            said = await asyncio.wait_for(reader.read(4000), 20)
            assert b"0.3 s: 1 bytes were" in said
            writer.close()

    run(story())


def test_an_answer_that_nobody_reads_is_given_up(monkeypatch):
    monkeypatch.setattr(http_server, "ANSWER_WITHIN_S", 0.3)
    long = "y" * 100_000

    async def story(stream: bool):
        async with Server(generation=OneSession(lambda: long)) as server:
            _, writer = await asyncio.open_connection("127.0.0.1", server.endpoint._port, limit=2)
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.keys[0]}\r\n"
            body = json.dumps({"prompt": "x", "n": 64, "stream": stream}).encode()
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            for _ in range(1000):
                await asyncio.sleep(0.02)
                if server.policies[0].recorder.num_turns == 64 and not server.endpoint._gate._busy:
                    break
            assert not server.endpoint._gate._busy
            writer.transport.abort()

    run(story(stream=True))
    run(story(stream=False))


def test_one_connection_too_many_closes_the_idle_one_or_is_told_so():
    async def story():
        async with Server() as server:
            gate: ConnectionGate = server.endpoint._gate
            gate.max_connections = 2
            port = server.endpoint._port
            first, first_writer = await asyncio.open_connection("127.0.0.1", port)
            _, second_writer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.sleep(0.05)
            third, third_writer = await asyncio.open_connection("127.0.0.1", port)
            assert await asyncio.wait_for(first.read(), 20) == b""  # the oldest that is idle
            third_writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 401 " in await asyncio.wait_for(third.readline(), 20)
            gate._busy.update(gate._server.connections)
            fourth, fourth_writer = await asyncio.open_connection("127.0.0.1", port)
            said = await asyncio.wait_for(fourth.read(), 20)
            assert b" 503 " in said and b"2 connections are open" in said
            json.loads(said.partition(b"\r\n\r\n")[2])
            gate._busy.clear()
            for writer in (first_writer, second_writer, third_writer, fourth_writer):
                writer.close()

    run(story())


def test_parallel_refusals_of_one_agent_leave_connections_for_the_others(monkeypatch):
    monkeypatch.setattr(open_trajectory, "MAX_REQUESTS_AT_ONCE", 4)
    monkeypatch.setattr(refusals, "FIRST_DELAY_S", 0.5)

    async def story():
        async with Server(count=2) as server:
            wrong = {**MESSAGES, "n": 0}
            tasks = [
                asyncio.create_task(server.ask(server.keys[0], "chat/completions", wrong)) for _ in range(20)
            ]
            statuses: list[int] = []
            # The first three refusals are answered at once, and some of the further ones after seconds
            while statuses.count(429) < 8:
                await asyncio.sleep(0.01)
                statuses = [task.result()[0] for task in tasks if task.done()]
                assert server.trajectories[0].num_requests <= 4
            status, _ = await server.ask(server.keys[1], "chat/completions", MESSAGES)
            assert status == 200
            answers = [task.result()[1] for task in tasks if task.done() and task.result()[0] == 429]
            assert "has 4 unanswered requests: wait" in answers[0]["error"]["message"]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    run(story())


def test_of_idle_connections_the_one_whose_last_answer_is_longest_ago_makes_room():
    """The one that was opened first has just been served: it is an honest client that keeps its connection."""
    request = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"

    async def asked(reader, writer) -> None:
        writer.write(request)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        await asyncio.wait_for(reader.readexactly(length), 20)

    async def story():
        async with Server() as server:
            gate: ConnectionGate = server.endpoint._gate
            gate.max_connections = 3
            connections = []
            for _ in range(3):
                connections.append(await asyncio.open_connection("127.0.0.1", server.endpoint._port))
                await asked(*connections[-1])
            served, longest_unused, unused = connections
            await asked(*served)
            new = await asyncio.open_connection("127.0.0.1", server.endpoint._port)
            await asked(*new)
            assert await asyncio.wait_for(longest_unused[0].read(), 20) == b""
            for connection in (served, unused, new):
                await asked(*connection)
            for _, writer in (*connections, new):
                writer.close()

    run(story())


def test_a_connection_whose_request_has_arrived_and_waits_for_its_answer_is_not_closed():
    class Listed:
        def __init__(self):
            self.connections = []

        def __call__(self):
            return "accepted"

    class Connection:
        def __init__(self, *, messages=(), current_request=None):
            self.transport, self._messages, self._current_request = object(), messages, current_request
            server.connections.append(self)

        def force_close(self):
            self.transport = None

    server = Listed()
    arrived = Connection(messages=["a request"])
    answering = Connection(current_request="a request")
    idle = Connection()
    gate = ConnectionGate(server, max_connections=3)
    assert gate() == "accepted"
    assert idle.transport is None and arrived.transport is not None and answering.transport is not None
    gate.max_connections = 2
    assert gate() != "accepted"
    assert arrived.transport is not None and answering.transport is not None


def record_of(name: str, message: str, error: BaseException) -> logging.LogRecord:
    about = (type(error), error, error.__traceback__)
    return logging.LogRecord(name, logging.ERROR, "x.py", 1, message, (), about)


def test_faults_of_clients_cost_a_line_each_and_few_of_them():
    log_filter = OneLinePerFault()
    records = [
        record_of("aiohttp.server", "Error handling request", BadStatusLine("\n\x1b[31m" * 999))
        for _ in range(1000)
    ]
    passed = [record for record in records if log_filter.filter(record)]
    assert 1 <= len(passed) <= 12
    for record in passed:
        text = logging.Formatter().format(record)
        assert "\n" not in text and "\x1b" not in text and len(text) < 400 and "BadStatusLine" in text


def test_too_many_open_files_are_logged_with_growing_pauses(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(http_server.time, "monotonic", lambda: clock[0])
    log_filter, lines = OneLinePerFault(), []
    for second in range(3600):  # asyncio logs some hundred each second
        clock[0] = float(second)
        for _ in range(3):
            record = record_of(
                "asyncio", "socket.accept() out of system resource\nsocket: <1>", OSError(24, "x")
            )
            if log_filter.filter(record):
                lines.append(record.getMessage())
    assert 5 <= len(lines) <= 20 and "more like it" in lines[-1]


def test_our_own_faults_are_logged_whole_and_those_of_one_place_with_growing_pauses(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(http_server.time, "monotonic", lambda: clock[0])
    log_filter = OneLinePerFault()
    places = (
        ("aiohttp.server", lambda: parsed_body(None)),
        ("aiohttp.server", lambda: read_hermes(None)),
        ("asyncio", lambda: ConnectionGate(None)()),
    )
    seconds_of_lines = {place: [] for place in places}
    for second in range(3600):
        clock[0] = float(second)
        for name, fails in places:
            with pytest.raises((AttributeError, TypeError)) as raised:
                fails()
            record = record_of(name, f"Error handling request {second}", raised.value)
            if log_filter.filter(record):
                assert record.exc_info is not None and f"request {second}" in record.getMessage()
                seconds_of_lines[name, fails].append(second)
    # Pauses of 1, 2, 4 ... 512 s, then of 600 s: the lines come at 0, 1, 3, 7 ... 1023, 1623, 2223, ...
    expected = [2**line - 1 for line in range(11)] + [1623, 2223, 2823, 3423]
    assert list(seconds_of_lines.values()) == [expected] * 3


def test_endless_recursion_that_requests_reach_does_not_fill_the_log():
    log_filter, passed_characters = OneLinePerFault(), 0

    def recurse(depth: int) -> None:
        recurse(depth + 1)

    for _ in range(200):
        with pytest.raises(RecursionError) as raised:
            recurse(0)
        record = record_of("aiohttp.server", "Error handling request", raised.value)
        if log_filter.filter(record):
            passed_characters += len(logging.Formatter().format(record))
    assert 0 < passed_characters < 20_000


def test_a_malformed_request_logs_one_line_and_no_traceback(caplog):
    async def story():
        async with Server() as server:
            for _ in range(20):
                reader, writer = await asyncio.open_connection("127.0.0.1", server.endpoint._port)
                writer.write(b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n")
                assert b" 400 " in await asyncio.wait_for(reader.readline(), 20)
                writer.close()

    http_server.bound_logs()
    for entry in logging.getLogger("aiohttp.server").filters:
        if isinstance(entry, OneLinePerFault):
            entry._next_at.clear()
    run(story())
    assert 1 <= len(caplog.records) <= 8 and all(record.exc_info is None for record in caplog.records)
