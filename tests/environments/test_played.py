"""Trajectories of programs: who plays, what ends it, what fails it; a failure is no zero and costs no other one."""

import asyncio
import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
from chat_templates import MODEL, Talkative, chat_of
from scripted_play import SETTINGS, OneSession, prompt_of, run, trajectories

from async_grpo.algorithm.config import AlgorithmConfig  # noqa: F401 - the estimators
from async_grpo.environments.call_formats import read_hermes
from async_grpo.environments.call_reader import CallReader
from async_grpo.environments.chat import Chat, TrajectoryOver
from async_grpo.environments.config import EnvironmentConfig, TrajectoryLimits
from async_grpo.environments.make import make_played, source_of
from async_grpo.environments.played import MAX_LOGGED_FAILURES, Played
from async_grpo.environments.programs import task_seed
from async_grpo.environments.trajectory_client import Whole
from async_grpo.errors import ConfigurationError, WorkerLost
from async_grpo.experience.config import NO_FACTS, BatchConfig, EvaluationConfig
from async_grpo.experience.dataset import Question
from async_grpo.experience.group_advantages import GroupAdvantages
from async_grpo.experience.rollouts import Rollouts
from async_grpo.experience.step_metrics import readable_samples, step_stats
from async_grpo.rewards.builtin.environment import environment, environment_turns
from async_grpo.testing import FakeLogprobs, FakeVerification
from async_grpo.types import Completion, FinishReason, Group, RewardStatus, Sampling

PAGE = '''
import asyncio, os, time

class Echo:
    """Tells back what was said; `steps` turns."""
    def __init__(self, steps=3):
        self.left, self.numbers = int(steps), {"said": 0.0}
    def reset(self, row, seed):
        self.row, self.state = row, f"seed {seed}"
        if row.get("trouble") == "at once": raise RuntimeError("no board")
        return row.get("tell")
    def step(self, said):
        what = self.row.get("trouble") if self.left == 2 else None
        if what == "raise": raise RuntimeError("the board fell over")
        if what == "hang": time.sleep(600)
        if what == "exit": os._exit(3)
        if what == "nan": return "", float("nan"), False
        if what == "shape": return "only a text"
        if what == "silence": return None, 0.5, False
        if what == "board": return [7, 8, 9], 0.5, False
        if what == "messages": return [{"role": "user", "content": "x"}], 0.5, False
        self.left -= 1
        self.numbers["said"] += len(said)
        self.state = f"{self.left} left"
        return f"you said {said}", 0.5, self.left == 0

class Closes(Echo):
    async def close(self):
        open(self.row["closed"], "w").close()

class Sleeps(Echo):
    def step(self, said):
        time.sleep(self.row["sleeps"])
        return super().step(said)

class Slow(Echo):
    async def reset(self, row, seed):
        return super().reset(row, seed)
    async def step(self, said):
        await asyncio.sleep(0.3)
        return super().step(said)

def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b

def fails(text: str) -> str:
    raise ValueError("not today")

def sleeps(seconds: float) -> str:
    time.sleep(seconds)
    return "rested"

TOOLS = [add, fails, sleeps]

async def two_turns(prompt, policy):
    first = await policy.complete(prompt.token_ids)
    await policy.complete(np.concatenate([prompt.token_ids, first.completion.token_ids, [7, 8]]))
    return policy.trajectory(1.0, turn_rewards=[0.25, 0.75])

async def never_ends(prompt, policy):
    await policy.complete("go")
    while True:
        await asyncio.sleep(0.05)

async def catches_everything(prompt, policy):
    while True:
        try:
            await policy.complete("go")
        except Exception:
            return policy.trajectory(0.0)

async def asks_again_and_again(prompt, policy):
    while True:
        try:
            await policy.complete("go")
        except Exception:
            continue

async def gives_a_turn(prompt, policy):
    await policy.complete("another context")
    return (await policy.complete("go")).completion

async def counts_badly(prompt, policy):
    await policy.complete("go")
    return policy.trajectory(1.0, numbers={"tries": None})

async def begins_with_nothing(prompt, policy):
    await policy.complete("")

async def asks_nothing(prompt, policy):
    return policy.trajectory(1.0)

import numpy as np
'''


NO_INTS = np.zeros(0, np.int32)
FINISHED = Completion(NO_INTS, np.zeros(0, np.float32), NO_INTS, FinishReason.STOP, "")


class Asked(OneSession):
    """Keeps the tokens that each turn went on with, and how many it might have."""

    def __init__(self, says) -> None:
        super().__init__(says)
        self.asked = []

    async def generate(self, prompt, count, sampling=None, session=None):
        self.asked.append((len(prompt.token_ids), sampling.max_tokens))
        async for one in super().generate(prompt, count, sampling, session):
            yield one


def played(path: Path, name: str, generation=None, row=None, **options) -> tuple[Played, Talkative]:
    file = path / "page.py"
    file.write_text(PAGE)
    # The tiny model's template does not show tools
    config = EnvironmentConfig(environment=f"{file}:{name}", **{"tool_parser": "hermes", **options})
    generation = generation or OneSession(lambda: "hm")
    return make_played(config, str(MODEL), SETTINGS, source_of(config.environment), generation), generation


def test_an_environment_tells_and_the_policy_says_until_it_is_over(tmp_path):
    playing, generation = played(tmp_path, "Echo", environment_options="steps=3")
    (one,) = run(trajectories(playing, prompt_of(tell="begin")))
    assert [turn.text for turn in one.turns] == ["hm<|im_end|>"] * 3
    assert one.turns[0].before_text == "<|im_start|>user\nbegin<|im_end|><|im_start|>assistant\n"
    assert one.turns[1].before_text == "<|im_start|>user\nyou said hm<|im_end|><|im_start|>assistant\n"
    assert [turn.fresh for turn in one.turns] == [True, False, False] and not one.truncated
    outcome = one.outcome
    assert outcome.reward == 1.5 and outcome.turn_rewards == (0.5, 0.5, 0.5) and not outcome.failure
    assert outcome.states == (f"seed {task_seed(0, prompt_of())}", "2 left", "1 left")
    assert outcome.numbers["said"] == 6 and 0 < outcome.numbers["environment_s"] <= outcome.numbers["seconds"]
    whole = np.concatenate([generation.requests[-1][0], generation.requests[-1][1]])
    assert len(whole) == sum(len(turn.before) + turn.num_tokens for turn in one.turns)


def test_an_environment_that_says_nothing_at_first_leaves_the_row_s_own_prompt(tmp_path):
    playing, _ = played(tmp_path, "Echo", environment_options="steps=2")
    (one,) = run(trajectories(playing, prompt_of()))
    assert one.turns[0].before.tolist() == [5, 6]  # the row is text: what is told comes after as text
    assert one.turns[1].before_text == "you said hm" and len(one.turns) == 2
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    (two,) = run(trajectories(played(tmp_path, "Echo")[0], prompt_of(messages=messages)))
    assert (
        two.turns[0].before_text.startswith("<|im_start|>system\ns<|im_end|>")
        and "<|im_start|>user" in two.turns[1].before_text
    )


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ("raise", "RuntimeError: the board fell over"),
        ("hang", "no answer within 0.5 s"),
        ("exit", "exit status 3"),
        ("nan", "the reward nan is no finite number"),
        ("shape", "not (observation, reward, whether it is over)"),
        ("board", "an observation is a text, a list of messages or None, not [7, 8, 9]"),
    ],
)
def test_what_goes_wrong_in_an_environment_fails_its_trajectory_and_no_process_is_left(
    tmp_path, trouble, said
):
    playing, _ = played(tmp_path, "Echo", environment_processes=2, environment_timeout_s=0.5)
    before = set(psutil.Process().children(recursive=True))
    found = run(trajectories(playing, prompt_of(tell="x", trouble=trouble), prompt_of(tell="x")))
    assert said in found[0].outcome.failure and found[0].outcome.reward is None
    assert not found[1].outcome.failure and found[1].outcome.reward == 1.5  # of another process
    assert set(psutil.Process().children(recursive=True)) <= before


def test_those_that_shared_a_process_with_one_that_hangs_fail_by_name(tmp_path):
    playing, _ = played(tmp_path, "Echo", environment_processes=1, environment_timeout_s=0.5)
    found = run(trajectories(playing, prompt_of(tell="x", trouble="hang"), *[prompt_of(tell="x")] * 3))
    assert "no answer within" in found[0].outcome.failure
    failed = [one.outcome.failure for one in found[1:] if one.outcome.failure]
    assert failed and all("was ended for another" in failure for failure in failed)


def test_steps_of_async_environments_run_side_by_side_in_one_process(tmp_path):
    playing, _ = played(tmp_path, "Slow", environment_processes=1)
    found = run(trajectories(playing, prompt_of(tell="x"), count=8))
    assert [one.member for one in sorted(found, key=lambda one: one.member)] == list(range(8))
    assert max(one.outcome.numbers["seconds"] for one in found) < 3 * 0.3 * 3


def test_a_tool_s_answer_or_error_is_a_message_and_the_answer_without_calls_ends_it(tmp_path):
    calls = [
        '<tool_call>{"name": "add", "arguments": {"a": 2, "b": "3"}}</tool_call>'
        '<tool_call>{"name": "fails", "arguments": {"text": "x"}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": "two"}}</tool_call>'
        '<tool_call>{"name": "nothing", "arguments": {}}</tool_call>'
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "sleeps", "arguments": {"seconds": 60}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call>',
        "so it is 5",
    ]
    answers = iter(calls)
    playing, _ = played(
        tmp_path,
        "TOOLS",
        OneSession(lambda: next(answers)),
        environment_timeout_s=1.0,
        environment_processes=1,
    )
    (one,) = run(trajectories(playing, prompt_of()))
    told = "".join(turn.before_text for turn in one.turns)
    for part in (
        "tool\n5<",
        "tool\nerror: ValueError: not today<",
        "error: ValidationError",
        "error: there is no tool 'nothing', only add, fails, sleeps",
        "error: TypeError: the arguments must be an object",
        "error: no answer within 1 s",
        "tool\n2<",
    ):
        assert part in told, part
    assert one.text == "so it is 5" and len(one.turns) == 5
    assert one.outcome.numbers["tool_calls"] == 7 and one.outcome.numbers["tool_errors"] == 5
    assert one.outcome.reward is None


def test_the_python_tool_runs_what_the_model_writes_in_a_sandbox(tmp_path):
    said = iter(
        f'<tool_call>{{"name": "python", "arguments": {{"code": {json.dumps(code)}}}}}</tool_call>'
        if code
        else "done"
        for code in (
            "print(sum(range(10)))",
            "1 / 0",
            "def f(:",
            "import socket; socket.create_connection(('127.0.0.1', 1))",
            f"open({str(tmp_path / 'written')!r}, 'w').write('x')",
            "x = 1",
            None,
        )
    )
    (tmp_path / "mine.py").write_text("from async_grpo.environments.tools import TOOLS")
    source = source_of(f"{tmp_path / 'mine.py'}:TOOLS")
    generation = OneSession(lambda: next(said))
    config = EnvironmentConfig(tool_parser="hermes")
    (one,) = run(trajectories(make_played(config, str(MODEL), SETTINGS, source, generation), prompt_of()))
    told = "".join(turn.before_text for turn in one.turns)
    for part in ("tool\n45", "ZeroDivisionError", "SyntaxError", "Error: [Errno", "(it printed nothing)"):
        assert part in told, (part, told)
    assert 'File "program.py", line 1' in told and not (tmp_path / "written").exists()
    assert one.text == "done"


def test_a_program_of_its_own_goes_on_by_tokens(tmp_path):
    playing, generation = played(tmp_path, "two_turns")
    (one,) = run(trajectories(playing, prompt_of()))
    assert one.turns[1].before.tolist() == [7, 8] and one.outcome.turn_rewards == (0.25, 0.75)
    assert one.token_ids.tolist() == np.concatenate([r[1] for r in generation.requests]).tolist()


def test_what_never_ends_is_ended_and_counts_as_truncated(tmp_path):
    for name, options in (
        ("never_ends", {"max_trajectory_s": 1.0}),
        ("catches_everything", {"max_turns": 3}),
        ("asks_again_and_again", {"max_turns": 3, "max_trajectory_s": 1.0}),
        ("Echo", {"environment_options": "steps=100", "max_turns": 3}),
    ):
        playing, _ = played(tmp_path, name, **options)
        (one,) = run(trajectories(playing, prompt_of(tell="x")))
        assert not one.outcome.failure and len(one.turns) == (1 if name == "never_ends" else 3), name
    assert one.outcome.reward == 1.5  # what was earned until then


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gives_a_turn", "the program returned a Completion, not policy.trajectory(...)"),
        ("counts_badly", "TypeError: float() argument"),
        ("begins_with_nothing", "the prompt is empty"),
    ],
)
def test_a_program_s_mistake_fails_its_trajectory_alone(tmp_path, name, said):
    (one,) = run(trajectories(played(tmp_path, name)[0], prompt_of()))
    assert said in one.outcome.failure


def test_what_a_program_does_to_its_arrays_changes_nothing_that_is_trained_on():
    async def program(prompt, policy):
        tokens = np.array([5, 6, 7], np.int32)
        reply = await policy.complete(tokens)
        tokens[:] = 99
        with pytest.raises(ValueError, match="read-only"):
            reply.completion.token_ids[:] = 1
        return policy.trajectory(1.0)

    generation = OneSession(lambda: "hm")
    playing = Played(generation, program, chat_of("appends"), TrajectoryLimits(9, 999, None, 60))
    (one,) = run(trajectories(playing, prompt_of()))
    assert not one.outcome.failure and one.turns[0].before.tolist() == [5, 6, 7]


@pytest.mark.parametrize("ids", [[1.5], [300], [-1], [[1], [2]], ["a"], [2**40]])
def test_what_are_no_token_ids_of_the_model_never_reach_an_engine(ids):
    async def program(prompt, policy):
        await policy.complete(ids)

    generation, limits = OneSession(lambda: "hm"), TrajectoryLimits(9, 999, None, 60, 300)
    (one,) = run(trajectories(Played(generation, program, chat_of("appends"), limits), prompt_of()))
    assert "token ids from 0 to 299" in one.outcome.failure and generation.requests == []


def test_a_trajectory_that_ends_in_the_middle_of_a_step_costs_those_beside_it_nothing(tmp_path):
    playing, _ = played(tmp_path, "Sleeps", environment_processes=1, max_trajectory_s=3.0)

    async def late(prompt):
        await asyncio.sleep(2.5)
        return [one async for one in playing.generate(prompt, 1)]

    async def story():
        await playing.start()
        slow = playing.generate(prompt_of(tell="x", sleeps=2.0), 1)
        others, ended = await asyncio.gather(late(prompt_of(tell="x", sleeps=0.0)), anext(slow))
        await playing.close()
        return others[0], ended

    beside, ended = run(story())
    assert ended.truncated and ended.outcome.reward == 0.5 and len(ended.turns) == 2
    assert not beside.outcome.failure and beside.outcome.reward == 1.5


def test_a_process_that_is_at_a_step_of_an_ended_trajectory_gets_no_other_one_and_nothing_waits_in_it(
    tmp_path,
):
    playing, _ = played(tmp_path, "Sleeps", environment_processes=2, max_trajectory_s=3.5)

    async def story():
        await playing.start()
        endless = [playing.generate(prompt_of(tell="x", sleeps=s), 1) for s in (60.0, 0.0)]
        begun = time.monotonic()
        ended = await asyncio.gather(*map(anext, endless))
        assert time.monotonic() - begun < 10  # and not the step's 60 s
        # However they end: the free process is just being left when the next one comes
        rows = [prompt_of(tell="x", sleeps=0.0, trouble=trouble) for trouble in ("", "raise") * 10]
        later = [one for row in rows async for one in playing.generate(row, 1)]
        await playing.close()
        return ended[0], later

    ended, later = run(story())
    assert ended.truncated and [one.outcome.reward for one in later] == [1.5, None] * 10


def test_an_environment_whose_close_alone_is_async_is_closed(tmp_path):
    playing, _ = played(tmp_path, "Closes")
    (one,) = run(trajectories(playing, prompt_of(tell="x", closed=str(tmp_path / "closed"))))
    assert not one.outcome.failure and (tmp_path / "closed").exists()


def test_tokens_end_a_trajectory_too_and_a_turn_gets_what_is_left(tmp_path):
    limits, generation = TrajectoryLimits(99, 60, 8, 60), Asked(lambda: "abcde")

    async def program(prompt, policy):
        while True:
            await policy.complete("0123456789")

    playing = Played(generation, program, chat_of("appends"), limits)
    (one,) = run(trajectories(playing, prompt_of()))
    assert one.truncated and generation.asked == [(10, 8), (26, 8), (42, 8), (58, 2)]


def test_what_follows_a_prompt_is_bounded_whatever_the_longest_prompt_leaves(tmp_path):
    generation = Asked(lambda: "abcde")

    async def program(prompt, policy):
        await policy.complete([5] * 30)
        while True:
            await policy.complete("0123456789")

    limits = TrajectoryLimits(99, 4000, None, 60, new_tokens=50)
    playing = Played(generation, program, chat_of("appends"), limits)
    (one,) = run(trajectories(playing, prompt_of()))
    assert one.truncated and generation.asked == [(30, 50), (46, 34), (62, 18), (78, 2)]

    async def evaluated():
        return [one async for one in playing.generate(prompt_of(), 1, Sampling(max_tokens=20))]

    run(evaluated())
    assert generation.asked[4:] == [(30, 20), (46, 4)]


def test_at_the_time_limit_a_trajectory_has_what_it_earned_until_then(tmp_path):
    row = {"tell": "x", "trouble": "hang"}
    (one,) = run(trajectories(played(tmp_path, "Echo", max_trajectory_s=3.0)[0], prompt_of(**row)))
    assert one.truncated and not one.outcome.failure and len(one.turns) == 2
    assert one.outcome.reward == 0.5 and one.outcome.turn_rewards == (0.5, 0.0)
    assert one.outcome.numbers["said"] == 2 and one.outcome.states[1] == "2 left"


def test_the_parts_of_a_question_s_evaluation_have_one_task(tmp_path):
    playing, _ = played(tmp_path, "Echo")
    config = BatchConfig(samples_per_question=2)
    nothing = Rollouts(
        config, NO_FACTS, playing, FakeVerification(lambda _: 1.0), None, None, on_change=lambda _: None
    )
    questions = [Question(np.array([5], np.int32), {"input": "a", "tell": "x"}) for _ in range(3)]
    seen = []

    async def generate(prompt, count, sampling=None, session=None):
        seen.append((prompt.question, prompt.ordinal, task_seed(0, prompt)))
        for member in range(count):
            yield replace(FINISHED, member=member)

    nothing.generation.generate = generate
    run(nothing.evaluate(questions, EvaluationConfig(eval_samples=6)))
    assert len({ordinal for _, ordinal, _ in seen}) == 9  # each part has draws of its own
    assert len({(question, seed) for question, _, seed in seen}) == 3


def test_a_text_goes_on_with_a_text_or_with_nothing_and_never_without_its_row(tmp_path):
    (one,) = run(trajectories(played(tmp_path, "Echo")[0], prompt_of(trouble="silence")))
    assert [len(turn.before) for turn in one.turns[1:]][1] == 0 and not any(t.fresh for t in one.turns[1:])
    (one,) = run(trajectories(played(tmp_path, "Echo")[0], prompt_of(trouble="messages")))
    assert "messages cannot follow it" in one.outcome.failure


def test_a_row_s_conversation_in_the_column_prompt_is_one(tmp_path):
    said = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    for name in ("TOOLS", "Echo"):
        (one,) = run(trajectories(played(tmp_path, name)[0], prompt_of(prompt=said)))
        assert "system\ns<|im_end|><|im_start|>user\nu<|im_end|>" in one.turns[0].before_text
    assert one.turns[1].before_text.startswith("<|im_start|>user\nyou said")


def test_the_last_turn_s_characters_stay_in_order_when_another_conversation_came_between():
    async def program(prompt, policy):
        await policy.complete("main")
        await policy.complete(Whole("aside"))
        return await policy.complete(Whole("mainhm<|im_end|> on")) and policy.trajectory(1.0)

    class WithEnds(OneSession):
        async def generate(self, *args):
            async for one in super().generate(*args):
                yield replace(one, char_ends=np.arange(1, len(one) + 1, dtype=np.int32))

    limits = TrajectoryLimits(9, 999, None, 60)
    (one,) = run(
        trajectories(Played(WithEnds(lambda: "hm"), program, chat_of("appends"), limits), prompt_of())
    )
    assert [turn.fresh for turn in one.turns] == [True, True, False]
    assert one.char_ends.tolist() == [0, 0, 0, 0, 0, 0, 1, 2, 3]


def test_a_text_begins_as_the_model_was_trained_to_see_one_and_what_follows_does_not():
    class Begins:  # Llama's tokenizer, say
        chat_template, bos_token = "<s>{{ messages }}", "<s>"

        def apply_chat_template(self, messages, **_):
            return "<s>" + messages[0]["content"]

        def encode(self, text, add_special_tokens=True):
            ids = [1] * text.startswith("<s>") + [ord(one) for one in text.removeprefix("<s>")]
            return [1, *ids] if add_special_tokens else ids

        def decode(self, ids, **_):
            return "".join("<s>" if one == 1 else chr(one) for one in ids)

    class Says(OneSession):
        async def generate(self, prompt, *_):
            asked.append(prompt.token_ids.tolist())
            ids = np.array([104], np.int32)
            yield Completion(ids, np.zeros(1, np.float32), ids * 0, FinishReason.STOP, "h")

    async def program(prompt, policy):
        await policy.complete("ab")
        await policy.complete("c")
        await policy.complete(Whole("abhchd"))
        await policy.complete([{"role": "user", "content": "x"}])
        await policy.complete(Whole("<s>y"))  # as a client that has the template itself writes it
        return policy.trajectory(1.0)

    asked = []
    limits = TrajectoryLimits(9, 999, None, 60)
    run(trajectories(Played(Says(), program, Chat(Begins()), limits), prompt_of()))
    begun = [1, 97, 98]
    assert asked == [begun, [*begun, 104, 99], [*begun, 104, 99, 104, 100], [1, 120], [1, 121]]


def test_what_is_too_long_by_far_is_neither_tokenised_nor_decoded():
    touched = []

    class Watched:
        chat_template = "{{ tools }}"

        def apply_chat_template(self, messages, tools=None, **_):
            return str(tools)

        def encode(self, text, **_):
            touched.append(len(text))
            return [1] * 10

        def decode(self, ids, **_):
            touched.append(len(ids))
            return "x" * len(ids)

    async def program(prompt, policy):
        for asked, more in (
            (np.ones(1_000_000, np.int32), {}),
            ([{"role": "user", "content": "a"}], {"tools": [{"description": "x" * 200_000}]}),
            (Whole("x" * 200_000), {}),
        ):
            with pytest.raises(TrajectoryOver):
                await policy.complete(asked, **more)
        assert touched == [] and policy.is_over
        await policy.complete("x")
        return policy.trajectory(1.0)

    limits = TrajectoryLimits(5, 2000, None, 60)
    reads_hermes = partial(CallReader, tool_parser="hermes")
    playing = Played(
        OneSession(lambda: "hm"), program, Chat(Watched(), 2000, make_reader=reads_hermes), limits
    )
    (one,) = run(trajectories(playing, prompt_of()))
    assert not one.truncated and not one.outcome.failure  # it went on within its limits


def test_a_lost_engine_is_the_run_s_matter_whatever_the_program_makes_of_it(tmp_path):
    class Dead(OneSession):
        async def generate(self, *args, **options):
            raise WorkerLost("no generation worker for 30 s")
            yield

    for name in ("catches_everything", "two_turns", "Echo"):
        with pytest.raises(WorkerLost, match="no generation worker"):
            run(trajectories(played(tmp_path, name, Dead())[0], prompt_of(tell="x")))


def test_a_babble_of_tags_is_read_in_no_time_and_the_last_call_in_it_is_one():
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    turn = read_hermes("<tool_call>{" * 50_000 + call)  # the square of that would take minutes
    assert [one.name for one in turn.calls] == ["add"]


def test_what_is_longer_than_any_trajectory_is_not_tokenised(tmp_path):
    (tmp_path / "page.py").write_text(
        "class Long:\n"
        "    def reset(self, row, seed): return 'x ' * 5_000_000\n"
        "    def step(self, said): return '', 1.0, True\n"
    )
    config = EnvironmentConfig(environment=f"{tmp_path / 'page.py'}:Long")
    playing = make_played(config, str(MODEL), SETTINGS, source_of(config.environment), OneSession())
    (one,) = run(trajectories(playing, prompt_of()))
    assert "the trajectory was ended after 4000 tokens (--max-generation-tokens" in one.outcome.failure


def test_a_program_that_asked_for_nothing_has_failed(tmp_path):
    (one,) = run(trajectories(played(tmp_path, "asks_nothing")[0], prompt_of()))
    assert "never asked the policy" in one.outcome.failure and len(one) == 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "gues",
            "agent:COMMAND, verifiers:NAME, reasoning_gym:NAME, textarena:NAME, openenv:NAME, FILE.py:NAME, ",
        ),
        ("gues", "FILE.py:NAME, endpoint; did you mean guess?"),
        ("agent: ", "say which one, agent:COMMAND"),
        ("{page}:add", "cannot play: name a class with reset and step, a list of functions"),
        ("{page}:Ech", "page.py defines no 'Ech', only "),
        ("{page}:Ech", "; did you mean 'Echo'?"),
        ("{page}:NoStep", "the class NoStep cannot play: name a class with reset and step"),
        ("nowhere.py:Game", "cannot read 'nowhere.py'"),
    ],
)
def test_what_cannot_play_is_refused_by_name(tmp_path, name, said):
    (tmp_path / "page.py").write_text(f"{PAGE}\n\nclass NoStep:\n    pass\n")
    with pytest.raises(ConfigurationError) as refused:
        source_of(name.format(page=tmp_path / "page.py"))
    assert said in str(refused.value)


def test_options_that_an_environment_does_not_take_are_refused_at_start(tmp_path):
    playing, _ = played(tmp_path, "Echo", environment_options="stepps=3")
    with pytest.raises(ConfigurationError, match="Echo takes no option stepps"):
        run(trajectories(playing, prompt_of()))


async def one_completion(prompt, policy):
    await policy.complete(prompt.token_ids)
    return policy.trajectory()


def test_one_completion_is_the_shortest_program():
    generation = OneSession(lambda: "four")
    playing = Played(generation, one_completion, chat_of("appends"), TrajectoryLimits(1, 999, None, 60))
    found = run(trajectories(playing, prompt_of(), count=3))
    assert all(one.text == "four" and one.turns[0].before.tolist() == [5, 6] for one in found)


def group_of(tmp_path, name: str, count: int = 4, **row) -> tuple[Rollouts, Group]:
    playing, _ = played(tmp_path, name)
    config = BatchConfig(samples_per_question=count, mask_truncated=True)
    scores = FakeVerification(lambda sample: float(len(sample["turns"]) + sample["environment_reward"]))
    rollouts = Rollouts(
        config, NO_FACTS, playing, scores, FakeLogprobs(-2.0), None, on_change=lambda change: None
    )

    async def whole() -> Group:
        await playing.start()
        try:
            return await rollouts.add_logprobs(await rollouts.group(prompt_of(**row), 0, 0))
        finally:
            await playing.close()

    return rollouts, run(whole())


def test_a_group_of_trajectories_is_scored_and_a_failed_one_is_masked(tmp_path):
    _, group = group_of(tmp_path, "Echo", tell="x")
    assert [sample.verdict.reward for sample in group.samples] == [4.5] * 4  # 3 turns, and 1.5
    assert all(sample.ref_logprobs.tolist() == [-2.0] * len(sample.completion) for sample in group.samples)
    _, failed = group_of(tmp_path, "Echo", tell="x", trouble="raise")
    assert {sample.verdict.status for sample in failed.samples} == {RewardStatus.FAILED}
    assert "the board fell over" in failed.samples[0].verdict.results[0].reason
    config = BatchConfig(samples_per_question=4, advantage_estimator="grpo")
    mixed = Group(group.prompt, (*group.samples[:3], failed.samples[3]), 0, 0)
    (trained,) = GroupAdvantages(config)([mixed], 0)
    _, never_begun = group_of(tmp_path, "Echo", tell="x", trouble="at once")
    young = Group(group.prompt, (*group.samples[:3], never_begun.samples[0]), 7, 7)
    assert young.oldest_version == group.oldest_version  # no token is of no version
    assert Group(group.prompt, never_begun.samples, 7, 7).oldest_version == 7
    assert [sample.advantages is None for sample in trained.samples] == [False, False, False, True]
    filling = replace(NO_FACTS, failure_policies={"environment": "group_mean"})
    fills = GroupAdvantages(config, filling)
    (filled,) = fills([fills.with_group_mean(young)], 0)
    assert filled.samples[3].verdict.filled and filled.samples[3].advantages is None
    assert readable_samples([filled])[3]["advantage"] is None
    stats = step_stats(5, [trained], 4, 1)
    assert stats["environment_failures"] == 1 and stats["turns"] == (3 * 3 + 2) / 4
    assert (
        stats["environment/said"] == 6
        and stats["turn_tokens"] == 3
        and stats["sequences"] == pytest.approx(1)
    )
    rows = readable_samples([trained])
    assert rows[0]["turns"][1] == [
        "<|im_start|>user\nyou said hm<|im_end|><|im_start|>assistant\n",
        "hm<|im_end|>",
    ]


def test_a_reward_that_looks_at_the_group_sees_its_trajectories(tmp_path):
    playing, _ = played(tmp_path, "Echo")
    config = BatchConfig(samples_per_question=3)
    seen = []

    class Ranks(FakeVerification):
        async def post_process(self, samples, verdicts, *, evaluation=False):
            seen.append(samples)
            return [replace(one, reward=float(n)) for n, one in enumerate(verdicts)]

    facts = replace(NO_FACTS, whole_groups=True)
    scores = Ranks(lambda _: 1.0)
    rollouts = Rollouts(config, facts, playing, scores, None, None, on_change=lambda _: None)

    async def group(**row):
        return await rollouts.group(prompt_of(tell="x", **row), 0, 0)

    async def groups():
        try:
            return await group(), await group(trouble="raise")
        finally:
            await playing.close()

    whole, failed = run(groups())
    assert [sample.verdict.reward for sample in whole.samples] == [0.0, 1.0, 2.0]
    assert [len(one["turns"]) for one in seen[0]] == [3, 3, 3] and seen[0][0]["environment_reward"] == 1.5
    # There is nothing to be scored, and no reward can come of it
    assert seen[1] == [] and {sample.verdict.status for sample in failed.samples} == {RewardStatus.FAILED}


def test_an_environment_s_rewards_are_rewards_of_the_registry(tmp_path):
    from async_grpo.experience.rollouts import reward_sample

    (one,) = run(trajectories(played(tmp_path, "two_turns")[0], prompt_of()))
    sample = reward_sample(prompt_of(), one)
    assert environment(sample) == 1.0
    ends = np.cumsum([turn.num_tokens for turn in one.turns]).tolist()
    assert environment_turns(sample) == {
        "step_rewards": [{"reward": 0.25, "token_end": ends[0]}, {"reward": 0.75, "token_end": ends[1]}]
    }
    with pytest.raises(ValueError, match="gives no reward"):
        environment({"completion": "x"})


@pytest.mark.parametrize("limit, is_cut", [(40, True), (5000, False), (None, False)])
def test_the_answer_of_a_tool_is_cut_to_its_tokens_and_says_so(tmp_path, limit, is_cut):
    said = iter(['<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>', "done"])
    (tmp_path / "long.py").write_text(
        "def add(a: int, b: int) -> str:\n    return 'xy ' * 600\n\nTOOLS = [add]\n"
    )
    config = EnvironmentConfig(
        environment=f"{tmp_path / 'long.py'}:TOOLS", tool_parser="hermes", max_tool_tokens=limit
    )
    generation = OneSession(lambda: next(said))
    playing = make_played(config, str(MODEL), SETTINGS, source_of(config.environment), generation)
    (one,) = run(trajectories(playing, prompt_of()))
    told = one.turns[1].before_text
    assert ("[cut: 1800 characters, of which the first" in told) == is_cut
    assert is_cut or "xy " * 600 in told
    assert not is_cut or len(one.turns[1].before) < 140


def test_a_tool_s_answer_beyond_what_a_process_passes_on_says_that_it_was_cut():
    from async_grpo.environments.host import MAX_ANSWER_CHARACTERS, _shortened

    whole = "x" * MAX_ANSWER_CHARACTERS
    assert _shortened(whole) == whole
    assert _shortened(whole + "y").endswith(
        f"xx\n[cut: {len(whole) + 1} characters, of which the first {len(whole)} are here]"
    )


def test_reasons_of_failed_trajectories_are_logged_once_for_each_kind(caplog):
    reasons = iter(["no my_agent.py", "no my_agent.py", *(f"{number} is wrong" for number in range(40))])

    async def program(prompt, policy):
        raise FileNotFoundError(next(reasons))

    async def all_of(playing):
        return [one async for one in playing.generate(prompt_of(), 42)]

    limits = TrajectoryLimits(5, 2000, None, 60)
    assert len(run(all_of(Played(OneSession(lambda: "hm"), program, chat_of("appends"), limits)))) == 42
    logged = [record.getMessage() for record in caplog.records]
    assert [text.partition("\n")[0] for text in logged[:2]] == [
        "a trajectory failed: FileNotFoundError: no my_agent.py",
        "a trajectory failed: FileNotFoundError: 0 is wrong",
    ]
    assert "in program\n    raise FileNotFoundError(next(reasons))" in logged[0]  # its own traceback
    assert len(logged) == MAX_LOGGED_FAILURES + 1 and "further kinds are not logged" in logged[-1]
