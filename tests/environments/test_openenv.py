"""OpenEnv's environments by the real package: of a server, which a test starts, and without one."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import urllib.request
from functools import partial
from pathlib import Path

import psutil
import pytest
from chat_templates import chat_of
from environment_packages import PACKAGES, there
from scripted_play import OneSession, prompt_of, run, trajectories

from async_grpo.environments import ecosystem
from async_grpo.environments.config import TrajectoryLimits
from async_grpo.environments.played import Played
from async_grpo.environments.processes import EnvironmentProcess, EnvironmentProcesses
from async_grpo.environments.programs import Play
from async_grpo.errors import ConfigurationError
from async_grpo.options.source_file import SourceFile

FILE = Path(ecosystem.__file__).parent / "openenv.py"
pytestmark = [
    pytest.mark.skipif(not there("openenv"), reason="openenv-core is not there: scripts/setup_extras"),
]

COUNTING = '''
import asyncio, os, socket, sys, time
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Say(Action):
    message: str
    times: int = 1

class Heard(Observation):
    text: str
    left: int

class Counting(Environment):
    """Three turns; tells all that was said in this session. Each turn but the first is rewarded."""
    SUPPORTS_CONCURRENT_SESSIONS = True
    open = 0
    def __init__(self):
        super().__init__()
        self.seed, self.said, self.left = 0, "", 3
        Counting.open += 1
    def _heard(self, **others):
        return Heard(text=f"{self.seed}: {self.said}", left=self.left, metadata={"not": "told"}, **others)
    def reset(self, seed=None, episode_id=None, **others):
        self.seed, self.said, self.left = seed, "", 3
        return self._heard()
    def step(self, action: Say, timeout_s=None, **others):
        if action.message == "raise": raise RuntimeError("the board fell over")
        if action.message == "invalid": return Heard(text=[])
        if action.message == "nothing": return self._heard(done=True)
        if action.message == "hang": time.sleep(600)
        self.said += action.message * action.times
        self.left -= 1
        return self._heard(reward=None if self.left == 2 else 0.5, done=self.left == 0)
    @property
    def state(self):
        return State()
    def close(self):
        Counting.open -= 1

class Waiting(Counting):
    def reset(self):
        return super().reset(7)
    async def step_async(self, action: Say, timeout_s=None, **others):
        await asyncio.sleep(0.3)
        return super().step(action)

class Alone(Counting):
    SUPPORTS_CONCURRENT_SESSIONS = False

if __name__ == "__main__":
    app = create_fastapi_app(Counting, Say, Heard, max_concurrent_envs=40)
    app.get("/open")(lambda: Counting.open)
    config = uvicorn.Config(app, log_level="critical")
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=int(sys.argv[1]))])
'''


class Server:
    """COUNTING's; its socket listens before the process does, and outlives it."""

    def __init__(self, folder: Path) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=100)
        self.url, self._folder = f"http://127.0.0.1:{self._listening.getsockname()[1]}", folder
        self.start()

    def start(self) -> None:
        fd = self._listening.fileno()
        self.process = subprocess.Popen(
            [sys.executable, "counting.py", str(fd)], cwd=self._folder, pass_fds=[fd]
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def sessions(self) -> tuple[int, int]:
        """How many environments are open there, and how many connections."""
        connections = [one for one in psutil.Process(self.process.pid).net_connections() if one.raddr]
        with urllib.request.urlopen(f"{self.url}/open", timeout=10) as answer:
            return json.load(answer), len(connections)

    def close(self) -> None:
        self.kill()
        self._listening.close()


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """Of COUNTING; on the path, as a user would have it, which reaches the environments' processes."""
    folder = tmp_path_factory.mktemp("counting")
    (folder / "counting.py").write_text(COUNTING)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{PACKAGES}:{folder}:{os.environ.get('PYTHONPATH', '')}")
        yield folder


@pytest.fixture(scope="module")
def server(folder):
    found = Server(folder)
    yield found
    found.close()


@pytest.fixture
def mortal(folder):
    found = Server(folder)
    yield found
    found.close()


def played(environment: str, generation=None, timeout_s=20.0, turns=16, **options) -> Played:
    options = {"environment": environment, **options}
    source = SourceFile.read(f"{FILE}:OpenEnv")
    processes = EnvironmentProcesses(partial(EnvironmentProcess, source, source.name, options), 1, timeout_s)
    limits, program = TrajectoryLimits(turns, 4000, None, 60), Play(processes, 0)
    generation = generation or OneSession(lambda: "hm")
    return Played(generation, program, chat_of("appends"), limits, needs=processes)


def told(one) -> list[str]:
    return [turn.before_text.partition("user\n")[2].partition("<|im_end|>")[0] for turn in one.turns]


def failure(playing: Played) -> str:
    (one,) = run(trajectories(playing, prompt_of(seed=5)))
    assert one.outcome.reward is None, "a failure is no reward"
    return one.outcome.failure


@pytest.mark.parametrize("place", ["of a server", "without one"])
def test_what_was_told_said_and_rewarded_is_recorded_and_the_row_s_seed_is_the_environment_s(place, request):
    name = request.getfixturevalue("server").url if place == "of a server" else "counting:Counting"
    (one,) = run(trajectories(played(name), prompt_of(seed=5)))
    assert [json.loads(text) for text in told(one)] == [
        {"text": "5: ", "left": 3},
        {"text": "5: hm", "left": 2},
        {"text": "5: hmhm", "left": 1},
    ]
    assert (
        one.outcome.turn_rewards == (0.0, 0.5, 0.5) and one.outcome.reward == 1.0 and not one.outcome.failure
    )
    (one,) = run(trajectories(played(name, observation_field="text"), prompt_of(seed=6)))
    assert told(one) == ["6: ", "6: hm", "6: hmhm"] and one.outcome.numbers["wrong_actions"] == 0


@pytest.mark.parametrize("place", ["of a server", pytest.param("without one", marks=pytest.mark.exhaustive)])
def test_an_action_that_is_none_is_told_to_the_policy_and_the_session_goes_on(place, request):
    name = request.getfixturevalue("server").url if place == "of a server" else "counting:Counting"
    wrong = ["hm", "[1]", "{" * 300, '{"mesage": "a"}', '{"message": "a", "times": "often"}']
    answers = iter([*wrong, '{"message": "a", "times": 2}', ' {"message": "b"}\n', '{"message": "c"}'])
    playing = played(name, OneSession(lambda: next(answers)), action_field=None, observation_field="text")
    (one,) = run(trajectories(playing, prompt_of(seed=5)))
    found = told(one)
    assert all(text.startswith("error: ") for text in found[1:6]) and found[6:] == ["5: aa", "5: aab"]
    assert "Invalid JSON" in found[1] and "should be an object" in found[2]
    assert ("VALIDATION_ERROR" if "://" in name else "mesage Extra inputs") in found[4]
    assert one.outcome.turn_rewards == (0.0,) * 6 + (0.5, 0.5) and one.outcome.numbers["wrong_actions"] == 5


@pytest.mark.parametrize(
    ("place", "said", "options", "reason"),
    [
        ("of a server", "raise", {}, "the board fell over"),
        ("without one", "nothing", {}, "it is over, and has never given a reward"),
        pytest.param(
            *("of a server", "hm", {"action_field": "text"}, "a text as 'text' makes no action"),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            *("without one", '{"message": "invalid"}', {"action_field": None}, "ValidationError"),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            *("without one", "hm", {"observation_field": "texts"}, "no 'texts', only text, left"),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_what_goes_wrong_in_the_environment_is_a_failure(place, said, options, reason, request):
    name = request.getfixturevalue("server").url if place == "of a server" else "counting:Counting"
    assert reason in failure(played(name, OneSession(lambda: said), **options))


def test_a_server_that_dies_fails_the_trajectory_even_if_another_one_takes_its_place(mortal):
    turns = iter(range(3))

    def says():
        if next(turns) == 1:
            mortal.kill()
            mortal.start()
        return "hm"

    assert "connection" in failure(played(mortal.url, OneSession(says))).lower()
    mortal.close()
    assert "Failed to connect" in failure(played(mortal.url))


def test_a_server_that_takes_no_more_sessions_is_a_failure_and_no_reward(server):
    found = run(trajectories(played(server.url, turns=2), *[prompt_of(seed=5)] * 48))
    failed = [one.outcome.failure for one in found if one.outcome.failure]
    assert len(found) == 48 and len(failed) < 48
    assert all("CAPACITY_REACHED" in reason or "Connection" in reason for reason in failed), failed


class EachItsOwn(OneSession):
    """Says which prompt and which member it speaks for, some sooner than others."""

    async def generate(self, prompt, count, sampling=None, session=None):
        await asyncio.sleep(self._dice.random() / 10)
        self._says = lambda: f"<{prompt.row['seed']}.{session.member}>"
        async for one in super().generate(prompt, count, sampling, session):
            yield one


def test_many_trajectories_at_once_have_sessions_of_their_own(server):
    playing = played(server.url, EachItsOwn(), observation_field="text")
    found = run(trajectories(playing, *(prompt_of(seed=seed) for seed in range(9)), count=4))
    words = [one.text.removesuffix("<|im_end|>") for one in found]
    assert sorted(words) == [f"<{seed}.{member}>" for seed in range(9) for member in range(4)]
    for one, word in zip(found, words, strict=True):
        assert told(one) == [f"{word[1]}: {word * turn}" for turn in range(3)] and one.outcome.reward == 1.0


def test_nothing_is_left_open_however_a_trajectory_ends(server):
    async def play():
        said = iter(["hm"] * 12 + ["raise"] * 100)
        playing = played(server.url, OneSession(lambda: next(said)))
        cut = played(server.url, turns=1)
        try:
            found = [one async for one in playing.generate(prompt_of(seed=5), 8)]
            found += [one async for one in cut.generate(prompt_of(seed=5), 8)]
            for _ in range(100):  # the server notices by itself, a little later
                if (left := await asyncio.to_thread(server.sessions)) == (0, 0):
                    break
                await asyncio.sleep(0.05)
            return found, left  # while the processes of the environments are alive
        finally:
            await asyncio.gather(playing.close(), cut.close())

    found, left = run(play())
    assert left == (0, 0) and {one.outcome.reward for one in found} >= {0.0, None} and len(found) == 16


def test_async_steps_without_a_server_run_side_by_side():
    found = run(trajectories(played("counting:Waiting", observation_field="text"), prompt_of(), count=8))
    assert told(found[0]) == ["7: ", "7: hm", "7: hmhm"]  # it takes no seed
    assert max(one.outcome.numbers["environment_s"] for one in found) < 8 * 3 * 0.3 / 2


def test_a_step_without_a_server_that_hangs_costs_the_process():
    assert "no answer within 2 s" in failure(
        played("counting:Counting", OneSession(lambda: "hang"), timeout_s=2.0)
    )


def test_a_class_that_cannot_share_a_process_and_a_name_alone_are_refused():
    assert "lacks SUPPORTS_CONCURRENT_SESSIONS" in failure(played("counting:Alone"))
    assert "name a server's URL or PACKAGE.MODULE:CLASS" in failure(played("echo"))


def test_rows_of_the_two_splits_share_no_seed(monkeypatch):
    monkeypatch.syspath_prepend(str(PACKAGES))
    kind = SourceFile.read(f"{FILE}:OpenEnv").object()
    options = {"environment": "http://127.0.0.1:8000", "action_field": None, "tasks": 50}
    train, held_out = (kind.rows(split, **options) for split in ("train", "eval"))
    seeds = [{row["seed"] for row in rows} for rows in (train, held_out)]
    assert len(seeds[0]) == len(seeds[1]) == 50 and not seeds[0] & seeds[1]
    assert len({row["input"] for row in train + held_out}) == 100
    with pytest.raises(ConfigurationError, match="name a server's URL"):
        kind.rows("train", "echo")
