"""`async-grpo try-environment`: one trajectory of an environment, printed turn by turn; wrong options are refused."""

import asyncio
import json
import sys

import numpy as np
import pytest
import torch

from async_grpo.environments.config import EnvironmentConfig
from async_grpo.environments.constructor import check_constructor_options
from async_grpo.environments.make import refuse_wrong_options
from async_grpo.errors import ConfigurationError, RunFailed
from async_grpo.launch.commands import typer_command
from async_grpo.launch.tried_policies import ModelPolicy, texts_in_order
from async_grpo.launch.try_environment import TryEnvironmentConfig, try_environment
from async_grpo.messages import SharedRunSettings
from async_grpo.modeling.load import load_causal_lm, load_tokenizer
from async_grpo.types import Prompt, Sampling

PAGE = '''
class Game:
    def __init__(self, size, word="please"):
        self.left, self.word = size, word
    def reset(self, row, seed):
        self.state, self.numbers = "start", {"polite": 0.0}
        return f"begin, {row['input']}"
    def step(self, said):
        if said == "break":
            raise KeyError("no board")
        self.left -= 1
        self.state = f"{self.left} left"
        self.numbers["polite"] += self.word in said
        return "go on", float(self.word in said), self.left == 0

def add(a: int, b: int) -> int:
    """The sum."""
    return a + b

TOOLS = [add]

async def asks_twice(prompt, policy):
    first = await policy.complete(prompt.token_ids)
    await policy.complete("\\nAre you sure?")
    return policy.trajectory(reward=0.5)
'''
AGENT = """
import json, os, sys, urllib.request
row = json.load(sys.stdin)
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": row["input"]}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
text = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
sys.exit(0 if text == row["answer"] else 100)
"""
GUESS_MODEL = "sample-data/guess-model"


@pytest.fixture
def page(tmp_path):
    (tmp_path / "page.py").write_text(PAGE)
    return tmp_path / "page.py"


def tried(capsys, environment: str, **options) -> str:
    """Play one trajectory, and return what the command prints."""
    try_environment(TryEnvironmentConfig(environment=environment, **options))
    return capsys.readouterr().out


def test_a_game_is_printed_turn_by_turn_with_rewards_states_numbers_and_trained_tokens(capsys, page):
    text = tried(
        capsys,
        f"{page}:Game",
        environment_options="size=2",
        say='["yes, please", "no"]',
        row='{"input": "you"}',
    )
    assert 'row (--row): {"input": "you"}' in text
    assert "| begin, you<|im_end|><|im_start|>assistant" in text and "| yes, please<|im_end|>" in text
    assert "turn 2\n" in text  # it continues the sequence of turn 1
    assert "turn 1: reward 1, state 'start'" in text and "turn 2: reward 0, state '1 left'" in text
    assert "\nreward: 1\n" in text and "polite 1" in text
    # "yes, please" and "no" have 11 and 2 tokens of one character, and each turn its end token
    assert "tokens: 15 sampled, trained on;" in text and "2 turns in 1 sequence" in text


def test_tools_are_called_and_their_answers_are_read_by_the_policy(capsys, page):
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    text = tried(capsys, f"{page}:TOOLS", say=json.dumps([call, "3"]))
    assert (
        'calls the tool add with {"a": 1, "b": 2}' in text and "<|im_start|>tool\n    | 3<|im_end|>" in text
    )
    assert "reward: none of the environment's own" in text and "tool_calls 1" in text


def test_programs_agents_and_shipped_games_are_played_too(capsys, page, tmp_path):
    assert "\nreward: 0.5\n" in tried(capsys, f"{page}:asks_twice", say="well")
    (tmp_path / "agent.py").write_text(AGENT)
    agent = f"agent:{sys.executable} {tmp_path / 'agent.py'}"
    row = '{"input": "2 + 2", "answer": "4"}'
    assert "\nreward: 1\n" in tried(capsys, agent, say="4", row=row)
    assert "\nreward: 0\n" in tried(capsys, agent, say="5", row=row)
    text = tried(capsys, "guess", say="1,3", environment_options="low=3,high=3")
    assert "| ?<|im_end|>" in text and "turn 2: reward 1" in text


def test_a_model_plays_as_a_run_s_first_policy_would(capsys):
    text = tried(capsys, "guess", model_name_or_path=GUESS_MODEL, data_path="sample-data/guess_heldout.jsonl")
    assert (
        "policy: sample-data/guess-model, on the CPU" in text
        and "sample-data/guess_heldout.jsonl, line 1" in text
    )
    assert "| 1-16<|im_end|>" in text and "in 1 sequence" in text


def test_log_probs_of_the_model_are_those_of_the_trainer_s_forward_pass():
    settings = SharedRunSettings("r", "", 300, "float32", 0.7, (2,), 400, 40, "", (), 3)
    policy = ModelPolicy(GUESS_MODEL, load_tokenizer(GUESS_MODEL), settings)
    prompt = Prompt(0, np.array([5, 6, 7, 8], np.int32), {})

    async def completions():
        return [one async for one in policy.generate(prompt, 2, Sampling(max_tokens=30))]

    model = load_causal_lm(GUESS_MODEL, "float32").eval()
    for completion in asyncio.run(completions()):
        whole = torch.from_numpy(np.concatenate([prompt.token_ids, completion.token_ids]).astype(np.int64))
        logprobs = torch.log_softmax(model(whole[None]).logits[0, 3:-1].float() / 0.7, dim=-1)
        expected = logprobs.gather(1, whole[4:, None])[:, 0].detach().numpy()
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)


def test_a_failed_trajectory_shows_its_reason_and_ends_the_command_with_an_error(capsys, page):
    with pytest.raises(RunFailed):
        tried(capsys, f"{page}:Game", environment_options="size=2", say="break")
    text = capsys.readouterr().out
    assert "FAILED" in text and "KeyError: 'no board'" in text and "page.py" in text


def test_the_output_of_an_earlier_trajectory_is_not_shown_with_that_of_the_next(capsys, tmp_path):
    path = tmp_path / "page.py"
    path.write_text("""class Game:
    def reset(self, row, seed):
        print("printed by", row["input"])
        return "begin"
    def step(self, text):
        return "", 1.0, True
""")
    for word in ("one", "two"):
        row = json.dumps({"input": word})
        text = tried(capsys, f"{path}:Game", row=row, say="hm", output_dir=str(tmp_path / "out"))
    log = tmp_path / "out" / "environment_output.log"
    assert str(log) in text
    assert "printed by two" in log.read_text() and "printed by one" not in log.read_text()


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        (
            "Game",
            "",
            "Game needs size, which its constructor has no default for: give --environment-options size=VALUE",
        ),
        ("Game", "size=2,wrd=x", "Game takes no option wrd; it takes size, word; did you mean word?"),
        ("TOOLS", "size=2", "tools and programs take no options"),
        ("asks_twice", "size=2", "tools and programs take no options"),
    ],
)
def test_options_that_do_not_fit_the_constructor_are_refused_before_the_start(page, name, options, reason):
    config = EnvironmentConfig(environment=f"{page}:{name}", environment_options=options)
    with pytest.raises(ConfigurationError) as refusal:
        refuse_wrong_options(config)
    assert reason in str(refusal.value) and "reward" not in str(refusal.value)


def test_an_agent_takes_no_options_and_says_what_to_do():
    with pytest.raises(ConfigurationError, match="an agent takes no options; write them into its command"):
        refuse_wrong_options(EnvironmentConfig(environment="agent:true", environment_options="a=1"))


def test_a_constructor_that_takes_any_option_gets_all_of_them():
    class Open:
        def __init__(self, size, **others):
            pass

    check_constructor_options(Open, {"size": 1, "anything": 2})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"row": "{"}, "is not JSON"),
        ({"row": "[1]"}, "a row must be an object"),
        ({"row": "{}", "data_path": "x.jsonl"}, "leave one of them out"),
        ({"data_path": "environment"}, "makes no rows"),
    ],
)
def test_a_wrong_row_is_refused_with_a_way_out(page, options, reason):
    with pytest.raises(ConfigurationError, match=reason):
        try_environment(TryEnvironmentConfig(environment=f"{page}:TOOLS", **options))


def test_say_may_be_repeated_on_the_command_line_and_may_contain_commas():
    command = typer_command("try-environment")
    arguments = ["guess", "--say", "yes, please", "--say=-1", "--seed", "3"]
    parsed = command.main(arguments, standalone_mode=False)
    next_text = texts_in_order(["a", "b"])
    assert parsed.config.environment == "guess" and parsed.config.say == '["yes, please", "-1"]'
    assert [next_text() for _ in range(4)] == ["a", "b", "b", "b"]
