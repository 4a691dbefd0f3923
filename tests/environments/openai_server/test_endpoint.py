"""The OpenAI-compatible endpoint: agents with the official client, keys, nonsense over HTTP, and agents that end badly."""

import asyncio
import contextlib
import gc
import json
import random
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import numpy as np
import psutil
import pytest
from agent_endpoint import CALL, MESSAGES, TOOL, Server, agent
from chat_templates import MODEL
from scripted_play import SETTINGS, OneSession, prompt_of, run, trajectories
from token_exactness import check

from async_grpo.environments import played
from async_grpo.environments.config import EnvironmentConfig
from async_grpo.environments.make import make_played, source_of
from async_grpo.environments.openai_server.endpoint import AgentEndpoint
from async_grpo.environments.openai_server.open_trajectory import Trajectory
from async_grpo.errors import ConfigurationError, WorkerLost
from async_grpo.types import Prompt

AGENT = """
import json, sys
from openai import OpenAI

client = OpenAI()  # the address and the key are in its environment
row = json.load(sys.stdin)
parts = [{"type": "text", "text": row["input"]}]
messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": parts}]
tool = {"type": "function", "function": {"name": "add", "description": "a + b", "parameters": {"type": "object"}}}
said = client.chat.completions.create(model="any", messages=messages, tools=[tool], temperature=0).choices[0]
assert said.finish_reason == "tool_calls", said
call = said.message.tool_calls[0]
assert call.function.name == "add" and json.loads(call.function.arguments) == {"a": 1}
messages += [said.message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "2"}]
text, calls, usage = "", [], None
options = {"stream": True, "stream_options": {"include_usage": True}}
for chunk in client.chat.completions.create(model="any", messages=messages, tools=[tool], **options):
    usage = chunk.usage or usage
    for choice in chunk.choices:
        text += choice.delta.content or ""
        calls += choice.delta.tool_calls or []
assert usage.completion_tokens > 3 and calls[0].function.name == "add", (usage, calls)
both = client.chat.completions.create(model="any", messages=messages, n=2, max_tokens=40, stop="</tool_call>").choices
assert [choice.index for choice in both] == [0, 1]
plain = client.completions.create(model="any", prompt="3+4=", max_tokens=4)
ids = client.completions.create(model="any", prompt=[1, 2, 3])
assert plain.usage.prompt_tokens == 4 and ids.usage.prompt_tokens == 3 and client.models.list().data[0].id == "policy"
"""
HELPERS = """
import json, os, urllib.error, urllib.request
def POST(path, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/" + path
    try:
        return urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
    except urllib.error.HTTPError as error:
        return error.read()
def REPORT(body): return POST("result", body)
"""


def test_an_unmodified_script_with_the_official_client_is_recorded_token_by_token(tmp_path):
    playing, generation = agent(tmp_path, AGENT)
    (one,) = run(trajectories(playing, prompt_of(input="1 + 1?")))
    assert not one.outcome.failure and one.outcome.reward == 1.0 and not one.truncated
    assert len(generation.requests) == len(one.turns) == 6
    assert check(generation, one, prompt_of()) == 5  # the talk, two other answers in it, and two plain ones
    assert sum(turn.num_tokens for turn in one.turns) == sum(
        len(sampled) for _, sampled, _ in generation.requests
    )
    assert "be brief" in one.turns[0].before_text and '"description": "a + b"' not in one.turns[1].before_text


@pytest.mark.parametrize(
    ("name", "says", "options", "turns", "reward"),
    [
        ("class Game", "yes, please", {"environment_options": "size=2"}, 2, 2.0),
        ("def add", "so it is 2", {}, 1, None),
        ("async def twice", "no", {}, 2, 1.0),
        ("import json, sys", "right", {}, 1, 1.0),
        ("import json, sys", "wrong", {}, 1, 0.0),
    ],
)
def test_the_programs_of_the_page_play(tmp_path, name, says, options, turns, reward):
    page = (Path(__file__).parents[3] / "docs" / "environments.md").read_text()
    (text,) = re.findall(rf"```python\n({name}.*?)```", page, re.DOTALL)
    (tmp_path / "mine.py").write_text(text)
    inside = {"class Game": "Game", "def add": "TOOLS", "async def twice": "twice"}.get(name)
    command = f"agent:exec {sys.executable} {tmp_path / 'mine.py'}"
    environment = f"{tmp_path / 'mine.py'}:{inside}" if inside else command
    config = EnvironmentConfig(environment=environment, tool_parser="hermes", **options)
    playing = make_played(config, str(MODEL), SETTINGS, source_of(environment), OneSession(lambda: says))
    (one,) = run(trajectories(playing, prompt_of(answer="right")))
    assert (one.outcome.failure, len(one.turns), one.outcome.reward) == ("", turns, reward)


@pytest.mark.parametrize(
    ("text", "reward", "failure"),
    [
        ("import sys; sys.exit(100)", 0.0, ""),
        (
            "import sys; print('no idea'); sys.exit(1)",
            None,
            "exit status 1 and no report; it said: no idea",
        ),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", None, "exit status -9"),
        ("REPORT({'reward': 0.5, 'numbers': {'tries': 2}}); import sys; sys.exit(3)", 0.5, ""),
        ("REPORT({'reward': 1e400})", 1.0, ""),  # refused; then it ends well
        ("pass", None, "the program never asked the policy for anything"),
    ],
)
def test_an_agent_s_result_is_what_it_reported_or_its_exit_status(tmp_path, text, reward, failure):
    asks = "" if text == "pass" else "POST('completions', {'prompt': 'x'})\n"
    (one,) = run(trajectories(agent(tmp_path, HELPERS + asks + text)[0], prompt_of()))
    assert (
        one.outcome.reward == reward
        and failure in one.outcome.failure
        and bool(failure) == bool(one.outcome.failure)
    )
    if "tries" in text:
        assert one.outcome.numbers["tries"] == 2


def with_limits(monkeypatch, limit_of) -> None:
    """Have `limit_of(seconds)` make the time limits of trajectories."""
    other = {**vars(asyncio), "timeout": limit_of}
    monkeypatch.setattr(played, "asyncio", SimpleNamespace(**other))


def test_so_many_agents_run_at_once_and_the_time_of_those_that_wait_does_not_run(tmp_path, monkeypatch):
    log = tmp_path / "log"
    log.touch()
    note = f"open({str(log)!r}, 'a').write"
    text = f"{note}('begin ')\n{HELPERS}POST('completions', {{'prompt': 'x'}})\n{note}('end ')"
    playing, _ = agent(tmp_path, text, max_trajectory_s=600, environment_processes=1)
    before_limits = []  # what agents had done when the time of the next one began

    def limit_of(seconds):
        before_limits.append(log.read_text().split())
        return asyncio.timeout(seconds)

    with_limits(monkeypatch, limit_of)
    completions = run(trajectories(playing, prompt_of(), count=4))
    assert [completion.outcome.reward for completion in completions] == [1.0] * 4
    assert before_limits == [["begin", "end"] * number for number in range(4)]


@pytest.mark.parametrize("name", ["agent:exec {python} {page}", "{page}:Reads"])
def test_processes_get_the_variables_that_are_named_and_no_others(tmp_path, monkeypatch, name):
    monkeypatch.setenv("A_SECRET", "1")
    (tmp_path / "page.py").write_text(
        HELPERS
        + "def told(): return 0.25 if os.environ['MY_API_KEY'] == 'k' and 'A_SECRET' not in os.environ else 0.0\n"
        "class Reads:\n"
        "    def reset(self, row, seed): return 'a'\n"
        "    def step(self, said): return '', told(), True\n"
        "if 'OPENAI_API_KEY' in os.environ:\n"
        "    POST('completions', {'prompt': 'x'})\n"
        "    REPORT({'reward': told()})\n"
    )
    name = name.format(python=sys.executable, page=tmp_path / "page.py")
    about = EnvironmentConfig(environment=name), str(MODEL), SETTINGS, source_of(name)
    playing = make_played(*about, OneSession(lambda: "hm"), variables={"MY_API_KEY": "k"})
    (one,) = run(trajectories(playing, prompt_of()))
    assert one.outcome.reward == 0.25, one.outcome


def test_a_key_that_an_agent_shows_is_not_written_down(tmp_path):
    text = (
        HELPERS
        + "POST('completions', {'prompt': 'x'}); raise SystemExit('I have ' + os.environ['OPENAI_API_KEY'])"
    )
    (one,) = run(trajectories(agent(tmp_path, text)[0], prompt_of()))
    assert "it said: I have (its key)" in one.outcome.failure


def test_an_agent_that_never_ends_is_ended_with_all_that_it_started(tmp_path):
    text = (
        "import subprocess, time\nsubprocess.Popen(['sleep', '987'], start_new_session=True)\ntime.sleep(987)"
    )
    playing, _ = agent(tmp_path, text, max_trajectory_s=1.5)
    (one,) = run(trajectories(playing, prompt_of()))
    assert one.truncated and not len(one)
    left = [p.info["cmdline"] for p in psutil.process_iter(["cmdline"]) if "987" in (p.info["cmdline"] or [])]
    assert left == []


def test_a_text_that_begins_with_all_text_so_far_goes_on_from_its_tokens():
    async def story():
        async with Server() as server:
            key, text = server.keys[0], "3+4="
            for _ in range(3):
                answer = (await server.ask(key, "completions", {"prompt": text}))[1]
                text += answer["choices"][0]["text"] + "<|im_end|> and"
            (one,) = server.policies[0].recorder._sequences
            assert len(one.turns) == 3 and one.text + " and" == text
            await server.ask(key, "completions", {"prompt": text[1:]})
            assert len(server.policies[0].recorder._sequences) == 2

    run(story())


def test_a_key_opens_its_own_trajectory_alone_and_nothing_once_it_has_ended():
    async def story():
        async with Server(2) as server:
            one, two = server.keys
            assert one != two and len(one) > 40
            strange = await server.session.post(
                f"{server.endpoint.base_url}/trajectories", headers={"Authorization": "Bearer \udcff"}
            )
            assert strange.status == 401
            assert (await server.ask(one, "chat/completions", MESSAGES))[0] == 200
            assert server.policies[0].recorder.num_turns == 1 and server.policies[1].recorder.num_turns == 0
            assert (await server.ask(two, "result", {"reward": 1}))[0] == 200
            assert server.trajectories[0].result is None and server.trajectories[1].result.reward == 1
            for key in (None, "", "sk-nobody", one[:-1], one + "x", f"{one} {two}"):
                for path in ("chat/completions", "completions", "result"):
                    status, body = await server.ask(key, path, MESSAGES)
                    assert status == 401 and body["error"]["code"] == "invalid_api_key"
            server.endpoint.shut(one)
            assert (await server.ask(one, "chat/completions", MESSAGES))[0] == 401
            assert server.policies[0].recorder.num_turns == 1

    run(story())


def test_a_call_is_one_where_tools_were_given_and_each_has_an_id_of_its_own():
    async def story():
        async with Server(generation=OneSession(lambda: f"so {CALL}")) as server:

            async def choice(**more):
                return (await server.ask(server.keys[0], "chat/completions", MESSAGES | more))[1]["choices"][
                    0
                ]

            for plain in (await choice(), await choice(tools=[TOOL], tool_choice="none")):
                assert plain["message"] == {"role": "assistant", "content": f"so {CALL}"}
                assert plain["finish_reason"] == "stop"
            called = [
                await choice(tools=[TOOL], n=None, stream=None, response_format={"type": "text"})
                for _ in "ab"
            ]
            assert [one["finish_reason"] for one in called] == ["tool_calls"] * 2
            assert [one["message"]["tool_calls"][0]["id"] for one in called] == ["c00002000", "c00003000"]

    run(story())


def test_an_answer_ends_before_the_text_that_stops_it_and_is_known_again():
    async def story():
        async with Server(generation=OneSession(lambda: "I look.\nObservation: no")) as server:
            asked = MESSAGES | {"stop": ["Observation:"]}
            message = (await server.ask(server.keys[0], "chat/completions", asked))[1]["choices"][0][
                "message"
            ]
            assert message["content"] == "I look.\n"
            more = [*MESSAGES["messages"], message, {"role": "user", "content": "it is there"}]
            await server.ask(server.keys[0], "chat/completions", {"messages": more})
            (one,) = server.policies[0].recorder._sequences
            assert "Observation: no<|im_end|>" in one.text  # as it was sampled
            plain = (await server.ask(server.keys[0], "completions", asked | {"prompt": "x"}))[1]
            assert plain["choices"][0]["text"] == "I look.\n"

    run(story())


def test_of_several_answers_none_goes_on_once_one_is_refused_and_what_waits_hears_of_the_end():
    class Waits(OneSession):
        cancelled = 0

        async def generate(self, *args):
            try:
                await asyncio.sleep(30)
                yield
            except asyncio.CancelledError:
                self.cancelled += 1
                raise

    async def story():
        async with Server(generation=Waits(), turns=2) as server:
            status, answer = await server.ask(server.keys[0], "completions", {"prompt": "x", "n": 4})
            assert status == 400 and answer["error"]["code"] == "trajectory_over"
            await asyncio.sleep(0.05)
            assert server.generation.cancelled == 2 and not server.trajectories[0]._turns
        async with Server(generation=Waits()) as server:
            asking = asyncio.ensure_future(server.ask(server.keys[0], "completions", {"prompt": "x"}))
            await asyncio.sleep(0.2)
            server.endpoint.shut(server.keys[0])
            status, answer = await asyncio.wait_for(asking, 5)
            assert status == 400 and answer["error"]["message"] == "the trajectory has ended"

    run(story())


def test_an_agent_that_reported_and_then_never_ends_has_its_reward(tmp_path, monkeypatch):
    """Its time is up as soon as it has reported."""
    text = (
        HELPERS
        + "POST('completions', {'prompt': 'x'})\nREPORT({'reward': 0.5})\nimport time; time.sleep(987)"
    )
    limits = []

    def limit_of(seconds):
        limits.append(asyncio.timeout(seconds))
        return limits[-1]

    report = Trajectory.report

    def reported(trajectory, result):
        report(trajectory, result)
        limits[-1].reschedule(asyncio.get_running_loop().time())

    with_limits(monkeypatch, limit_of)
    monkeypatch.setattr(Trajectory, "report", reported)
    (one,) = run(trajectories(agent(tmp_path, text, max_trajectory_s=600.0)[0], prompt_of()))
    assert one.outcome.reward == 0.5 and one.truncated and len(one.turns) == 1


def test_an_agent_that_stops_its_guardian_ends_all_the_same(tmp_path):
    text = "import os, signal, time\nos.kill(os.getppid(), signal.SIGSTOP)\ntime.sleep(986)"
    (one,) = run(trajectories(agent(tmp_path, text, max_trajectory_s=1.5)[0], prompt_of()))
    assert one.truncated and one.outcome.failure


@pytest.mark.parametrize("text", ["import os\nos.execvp('yes', ['yes'])", f"print('x' * {10**6})"])
def test_an_agent_that_writes_much_and_reads_nothing_ends_in_its_time_and_leaves_nothing_open(tmp_path, text):
    playing, _ = agent(tmp_path, text, max_trajectory_s=3.5)

    async def story():
        await playing.start()
        before, begun = psutil.Process().num_fds(), time.monotonic()
        (one,) = [one async for one in playing.generate(prompt_of(more="y" * 10**6), 1)]
        assert time.monotonic() - begun < 8 and psutil.Process().num_fds() == before
        await playing.close()
        return one

    one = run(story())
    assert "never asked the policy" in one.outcome.failure and one.truncated == ("yes" in text)


def test_agents_that_are_cancelled_as_they_start_leave_nothing_under_ray_s_event_loop_either(tmp_path):
    """uvloop closes a pipe's descriptor a second time: of somebody else's, which can end the process."""
    (tmp_path / "agent.py").write_text("import time; time.sleep(985)")
    program = f"""
import asyncio, sys
sys.path[:0] = {sys.path!r}
import uvloop
from pathlib import Path
from agent_endpoint import agent
from scripted_play import prompt_of

async def main():
    playing, _ = agent(Path({str(tmp_path)!r}), "import time; time.sleep(985)")
    await playing.start()
    for number in range(12):
        group = playing.generate(prompt_of(), 4)
        task = asyncio.ensure_future(anext(group))
        for _ in range(number % 6):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await group.aclose()
    await playing.close()
    print("alive")

uvloop.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "alive\n", (done.returncode, done.stderr[-2000:])
    left = [
        p.info["cmdline"] for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(p.info["cmdline"])
    ]
    assert left == []


def test_a_request_that_comes_whole_only_after_its_trajectory_has_ended_is_refused():
    async def story():
        async with Server() as server:
            body = json.dumps({"prompt": "x"}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.keys[0]}\r\n"
            port = int(server.endpoint.base_url.rpartition(":")[2].removesuffix("/v1"))
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:4])
            await asyncio.sleep(0.2)
            server.endpoint.shut(server.keys[0])
            writer.write(body[4:])
            assert b" 400 " in await reader.readline() and server.generation.requests == []
            writer.close()

    run(story())


def test_a_call_that_is_nested_without_end_is_none_and_no_error_of_the_server():
    async def story():
        said = '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 5000 + "</tool_call>"
        async with Server(generation=OneSession(lambda: f"{said} {CALL}")) as server:
            asked = {**MESSAGES, "tools": [{"type": "function", "function": {"name": "add"}}]}
            status, _ = await server.ask(server.keys[0], "chat/completions", asked)
            assert status == 200
            deep = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "[" * 100_000}}
            asked["messages"] = [*MESSAGES["messages"], {"role": "assistant", "tool_calls": [deep]}]
            status, _ = await server.ask(server.keys[0], "chat/completions", asked)
            assert status in (200, 400) and server.policies[0].recorder.num_turns == 1 + (status == 200)

    run(story())


@pytest.mark.parametrize("turns", [2, 3])
def test_an_agent_that_asked_for_too_much_and_then_for_less_has_not_failed(tmp_path, turns):
    text = HELPERS + "POST('completions', {'prompt': 'x ' * 5000})\nPOST('completions', {'prompt': 'x'})"
    (one,) = run(trajectories(agent(tmp_path, text, max_turns=turns)[0], prompt_of()))
    assert one.outcome.reward == 1.0 and not one.truncated


def test_an_agent_that_asks_for_many_turns_at_once_gets_as_many_as_it_may():
    async def story():
        async with Server(turns=16) as server:
            asked = (server.ask(server.keys[0], "completions", {"prompt": "x"}) for _ in range(100))
            answers = await asyncio.gather(*asked)
            ended = [body["error"]["code"] for status, body in answers if status == 400]
            assert ended == ["trajectory_over"] * 84 and len(server.generation.requests) == 16

    run(story())


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("chat/completions", {}, "messages: Field required"),
        ("chat/completions", {"messages": []}, "at least 1 item"),
        ("chat/completions", {"messages": [{"content": "x"}]}, "messages.0.role: Field required"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content",
        ),
        ("chat/completions", {"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        *(
            (
                "chat/completions",
                {"messages": [{"role": "assistant", "tool_calls": calls}]},
                "messages.0.tool_calls",
            )
            for calls in (1, [1], [{}], [{"function": 1}], [{"function": {}}], {"a": 1})
        ),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [1]}, "tools"),
        ("chat/completions", {"messages": [{"role": ["x"], "content": "x"}]}, "messages.0.role"),
        ("chat/completions", MESSAGES | {"stop": [1]}, "stop"),
        ("chat/completions", MESSAGES | {"stop": [""]}, "stop"),
        ("chat/completions", MESSAGES | {"n": 0}, "n: Input should be greater"),
        ("chat/completions", MESSAGES | {"max_tokens": -1}, "max_tokens"),
        ("chat/completions", MESSAGES | {"response_format": {"type": "xml"}}, "response_format"),
        ("chat/completions", MESSAGES | {"tool_choice": "required"}, "tool_choice"),
        ("completions", {"prompt": "x", "echo": True}, "echo"),
        ("completions", {"prompt": ""}, "the prompt is empty"),
        ("completions", {"prompt": [1, 300]}, "token ids from 0 to 299"),
        ("completions", {"prompt": []}, "the prompt is empty"),
        ("completions", {"prompt": [1, 10**30]}, "token ids from 0 to 299"),
        ("completions", {"prompt": [1, -2]}, "prompt"),
        ("completions", {"prompt": [1] * 4000}, "the trajectory is over: it has had its 4000 tokens"),
        ("completions", {"prompt": "x" * 300_000}, "the trajectory is over: it has had its 4000 tokens"),
        ("result", {"reward": "much"}, "reward"),
        ("result", {"reward": float("nan")}, "finite number"),
        ("result", {"reward": 1, "numbers": {"a": 1e308}}, "less than or equal to"),
        ("result", {"reward": 1, "numbers": {"a": -1e308}}, "greater than or equal to"),
        ("result", {"reward": 1, "numbers": {"a\x1b[2J": 1}}, "pattern"),
        ("result", {"reward": 1, "numbers": {"a\n": 1}}, "pattern"),
        ("result", {"reward": 1, "numbers": {"": 1}}, "pattern"),
        ("nothing", {}, "404"),
    ],
)
def test_what_cannot_be_answered_is_said_as_openai_s_errors_are(path, body, said):
    async def story():
        async with Server() as server:
            status, answer = await server.ask(server.keys[0], path, body)
            assert 400 <= status < 500 and said in answer["error"]["message"] and answer["error"]["code"]
            assert server.policies[0].recorder.num_turns == 0

    run(story())


def test_a_lost_engine_is_an_error_of_the_server_and_of_the_run():
    class Dead(OneSession):
        async def generate(self, *args, **options):
            raise WorkerLost("no generation worker for 30 s")
            yield

    async def story():
        async with Server(generation=Dead()) as server:
            assert (await server.ask(server.keys[0], "chat/completions", MESSAGES))[0] == 503
            assert isinstance(server.policies[0].failure, WorkerLost)

    run(story())


def test_a_thousand_malformed_requests_neither_end_it_nor_leave_anything(caplog):
    dice = random.Random(3)

    def nonsense(key: str) -> bytes:
        body = dice.choice(
            [b"{", b"", b"[]", b"null", b'{"messages": 1}', b'{"messages": [null]}', b"\xff\xfe", b"[" * 5000,
             b'{"messages": [{"role": "user", "content": "x"}], "tools": [1]}', json.dumps({"prompt": "x" * 9000}).encode(),
             b'{"messages": [{"role": "assistant", "tool_calls": [{"function": 1}]}]}', b'{"prompt": [[1]]}',
             bytes(dice.randrange(256) for _ in range(40)), b'{"prompt": "x", "stop": ["", 1]}', b'{"reward": []}',
             b'{"messages": [{"role": "user", "content": "x"}], "stop": [""]}',
             b'{"messages": [{"role": "tool", "content": "\\ud800"}]}']
        )  # fmt: skip
        length = dice.choice([len(body)] * 6 + [len(body) + 7, -1, 10**9])
        path = dice.choice(
            ["chat/completions"] * 6 + ["completions", "result", "models", "trajectories", "../etc", "%00"]
        )
        method = dice.choice(["POST"] * 5 + ["GET", "PUT", "BREW"])
        auth = dice.choice([f"Bearer {key}"] * 4 + ["Basic eDp5", "Bearer", "\x01", "Bearer \xff\xfe"])
        head = f"{method} /v1/{path} HTTP/1.1\r\nHost: x\r\nAuthorization: {auth}\r\nContent-Length: {length}\r\n\r\n"
        whole = head.encode() + body
        return dice.choice([whole] * 8 + [whole[: dice.randrange(len(whole))], b"\x16\x03\x01" + whole])

    async def story():
        async with Server() as server:
            statuses = set()
            tasks_before, files_before = len(asyncio.all_tasks()), psutil.Process().num_fds()

            async def ask():
                reader, writer = await asyncio.open_connection("127.0.0.1", server.endpoint._port)
                writer.write(nonsense(server.keys[0]))
                if dice.random() < 0.3:
                    writer.write_eof()
                with contextlib.suppress(TimeoutError, ConnectionError):
                    statuses.add((await asyncio.wait_for(reader.read(200), 0.1))[9:12])
                writer.close()

            for _ in range(20):
                await asyncio.gather(*(ask() for _ in range(50)))
            raised = {record.exc_info[0] for record in caplog.records if record.exc_info}
            # What is no HTTP, and who has gone, is not ours
            errors = [
                e
                for e in raised
                if not (e.__module__.startswith("aiohttp") or issubclass(e, ConnectionError))
            ]
            assert b"500" not in statuses and errors == []
            assert {b"400", b"401"} <= statuses
            for _ in range(300):  # connections that linger are closed within 10 s
                left = len(asyncio.all_tasks()) - tasks_before, psutil.Process().num_fds() - files_before
                if max(left) <= 5:
                    break
                await asyncio.sleep(0.05)
            assert max(left) <= 5
            assert (await server.ask(server.keys[0], "chat/completions", MESSAGES))[0] == 200

    # Clients that earlier tests left open are collected now. During the story they would log errors in its loop
    gc.collect()
    run(story())


def test_a_port_that_is_taken_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"--endpoint-port {port} cannot be listened on"):
            run(AgentEndpoint(port=port).start())


def test_agents_that_are_started_elsewhere_take_trajectories_and_report_them(tmp_path):
    config = EnvironmentConfig(environment="endpoint", max_trajectory_s=20.0)
    generation = OneSession(lambda: "yes")
    played = make_played(config, str(MODEL), SETTINGS, None, generation, folder=tmp_path)

    async def scenario():
        await played.start()
        file = tmp_path / "endpoint.json"
        assert file.stat().st_mode & 0o777 == 0o600
        told = json.loads(file.read_text())
        prompts = [Prompt(n, np.array([5], np.int32), {"input": f"row {n}"}) for n in range(3)]

        async def all_of(prompt):
            return [one async for one in played.generate(prompt, 2)]

        running = asyncio.gather(*map(all_of, prompts))
        async with aiohttp.ClientSession() as session:

            async def post(path, key, body=None):
                headers = {"Authorization": f"Bearer {key}"}
                async with session.post(f"{told['base_url']}/{path}", json=body, headers=headers) as answer:
                    return answer.status, await answer.json() if answer.status != 204 else None

            async def agent():
                status, taken = await post("trajectories", told["key"])
                assert status == 200
                said = [{"role": "user", "content": taken["row"]["input"]}]
                assert (await post("chat/completions", taken["key"], {"messages": said}))[0] == 200
                assert (await post("trajectories", taken["key"]))[0] == 401  # it is not the run's
                number = float(taken["row"]["input"].split()[1])
                assert (await post("result", taken["key"], {"reward": number}))[0] == 200
                return taken["key"]

            for wrong in ("", "x", told["key"][:-1]):
                assert (await post("trajectories", wrong))[0] == 401
            # the run's key opens no trajectory
            assert (await post("chat/completions", told["key"], {"messages": said_hi}))[0] == 401
            keys = await asyncio.gather(*(agent() for _ in range(6)))
            groups = await running
        assert len(set(keys)) == 6
        assert [[one.outcome.reward for one in group] for group in groups] == [
            [n, n] for n in (0.0, 1.0, 2.0)
        ]
        assert all(len(one.turns) == 1 and not one.outcome.failure for group in groups for one in group)
        await played.close()
        assert not file.exists()

    said_hi = [{"role": "user", "content": "hi"}]
    run(scenario())


def test_a_trajectory_that_no_agent_takes_has_failed_and_says_so(tmp_path):
    config = EnvironmentConfig(environment="endpoint", max_trajectory_s=0.5)
    played = make_played(config, str(MODEL), SETTINGS, None, OneSession(lambda: "yes"), folder=tmp_path)
    (one,) = run(trajectories(played, prompt_of()))
    assert "no agent claimed it" in one.outcome.failure and one.outcome.reward is None


def test_who_asks_for_a_trajectory_and_goes_away_takes_none(tmp_path):
    config = EnvironmentConfig(environment="endpoint", max_trajectory_s=30.0)
    played = make_played(config, str(MODEL), SETTINGS, None, OneSession(lambda: "yes"), folder=tmp_path)

    async def scenario():
        await played.start()
        told = json.loads((tmp_path / "endpoint.json").read_text())
        url, headers = f"{told['base_url']}/trajectories", {"Authorization": f"Bearer {told['key']}"}
        async with aiohttp.ClientSession() as gone:
            with pytest.raises(asyncio.TimeoutError):
                async with asyncio.timeout(0.3), gone.post(url, headers=headers):
                    pass
        await asyncio.sleep(0.1)

        async def play():
            return [one async for one in played.generate(prompt_of(), 1)]

        running = asyncio.ensure_future(play())
        async with aiohttp.ClientSession() as session:
            async with session.post(url, headers=headers) as answer:
                taken = await answer.json()
            own = {"Authorization": f"Bearer {taken['key']}"}
            body = {"failure": "the tool is broken"}
            async with session.post(f"{told['base_url']}/result", json=body, headers=own) as answer:
                assert answer.status == 200
            (one,) = await running
        assert "the tool is broken" in one.outcome.failure and one.outcome.reward is None
        await played.close()

    run(scenario())
