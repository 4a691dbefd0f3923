"""`docs/architecture.md`, "Where to change things", followed row by row from outside the package, and a step trained.

A reward and a transport of one's own are in `test_fake_chain.py`.
"""

import asyncio
import re
from pathlib import Path

import numpy as np
import pytest
from fake_chain import GROUPS, MEMBERS, STEPS, Chain, chain_config

from async_grpo.algorithm.advantages import get_estimator
from async_grpo.config.compatibility import check_methods
from async_grpo.config.run import RunConfig
from async_grpo.errors import ConfigurationError
from async_grpo.experience.batcher import ExperienceBatcher
from async_grpo.experience.dataset import Question
from async_grpo.inference.config import engine_class
from async_grpo.messages import StepEnd
from async_grpo.options.source_file import digests
from async_grpo.testing import FakeGeneration, FakeVerification

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "algorithms.md").read_text()
ESTIMATOR, LOSS = re.findall(
    r"```python\n(.*?)```", PAGE.split("## Your own\n")[1].split("\n## ")[0], re.DOTALL
)
ESTIMATOR += """
def centred(rewards, used, groups):
    return groups.centred(rewards.sum(dim=1, keepdim=True), groups.participates)

def in_need(rewards, used, groups, *, difficulty):
    return rewards
"""


@pytest.fixture
def own(tmp_path):
    """A file of the user's, and a way to name an object in it."""

    def write(text: str, name: str) -> str:
        path = tmp_path / "own.py"
        path.write_text(text)
        return f"{path}:{name}"

    return write


async def messages_of_one_step(config: RunConfig) -> list:
    """Two prompts of difficulty 1 and 3, three completions each of 2, 3 and 4 tokens; longer is better."""
    questions = [
        Question(np.array([3, 4], np.int32), {"input": "q", "answer": "", "difficulty": d}, "line")
        for d in (1.0, 3.0)
    ]
    generation = FakeGeneration(length=lambda ordinal, member: 2 + member)
    batcher = ExperienceBatcher(config, questions, generation, FakeVerification())
    await batcher.start()
    messages = [await batcher.next_message(0)]
    while not isinstance(messages[-1], StepEnd):
        messages.append(await batcher.next_message(0))
    await batcher.close()
    return messages


def test_an_estimator_with_an_input_of_its_own_is_one_file(own, tmp_path):
    name = own(ESTIMATOR, "by_difficulty")
    settings = {"advantage_estimator": name, "estimator_options": "power=2"}
    config = chain_config(samples_per_question=3, num_training_batches=1, **settings)
    *batches, _ = asyncio.run(messages_of_one_step(config))
    advantages = sorted({float(a) for b in batches for a in b.advantages[b.loss_mask]})
    assert advantages == [-9.0, -1.0, 0.0, 1.0, 9.0]  # -1 0 1 times the difficulty squared
    (line,) = trained(tmp_path, **settings)
    assert line["grad_norm"] > 0


def test_a_bare_function_is_an_estimator_that_waits_for_its_whole_minibatch(own, tmp_path):
    name = own(ESTIMATOR, "centred")
    assert not get_estimator(name).group_local
    (line,) = trained(tmp_path, advantage_estimator=name)
    assert line["grad_norm"] > 0


def trained(folder: Path, **changes) -> list[dict]:
    """The metrics line of one step on fake engines."""
    return Chain(folder, config=chain_config(num_training_batches=1, **changes)).train()


def test_an_input_that_nothing_provides_is_refused_with_the_way_to_provide_it(own):
    with pytest.raises(ConfigurationError, match=r"takes difficulty.*inputs=\{'difficulty'"):
        get_estimator(own(ESTIMATOR, "in_need"))


RUNNING = """
from async_grpo.algorithm.advantages import Estimator

def _decayed(rewards, used, groups, *, keys, means, decay=0.9):
    return (rewards.sum(dim=1) - means)[:, None]

def _scaled(rewards, used, groups, *, keys, means, scale=0.9):
    return scale * _decayed(rewards, used, groups, keys=keys, means=means)

decayed = Estimator(_decayed, sums=True, needs_group=False)
scaled = Estimator(_scaled, sums=True, needs_group=False)
"""


def test_an_estimator_with_running_means_says_how_they_decay(own):
    name = own(RUNNING, "decayed")
    assert get_estimator(name).has_running_mean
    with pytest.raises(
        ConfigurationError, match="takes means: give its function also the keyword keys, and decay"
    ):
        get_estimator(name.replace(":decayed", ":scaled"))


def test_a_loss_is_one_file(own, tmp_path):
    name = own(LOSS, "reinforce")
    (once,), (twice,) = (
        trained(tmp_path / f"{scale}_", policy_loss=name, loss_options=scale) for scale in ("", "scale=2")
    )
    assert once["grad_norm"] > 0 and twice["grad_norm"] == pytest.approx(2 * once["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("text", ["return batch.logprobs", "return batch.advantage, {}"])
def test_a_loss_that_cannot_compute_is_refused_before_the_start(own, text):
    config = chain_config(policy_loss=own(f"def broken(batch):\n    {text}\n", "broken"))
    with pytest.raises(ConfigurationError, match=r"the loss broken fails.* must return \(loss"):
        check_methods(config)


ENGINE = """
from async_grpo.testing import FakeEngine

class Counting(FakeEngine):
    asked = 0

    async def complete(self, prompt_token_ids, seeds, sampling=None):
        self.asked += len(seeds)
        async for completion in super().complete(prompt_token_ids, seeds, sampling):
            yield completion

def last(members, sequences, tokens):
    return members[-1]
"""


def test_an_engine_and_a_scheduling_policy_are_one_file(own, tmp_path):
    scheduling = own(ENGINE, "last")
    engine = scheduling.replace(":last", ":Counting")
    chain = Chain(tmp_path, engines=2, engine=engine, config=chain_config(scheduling=scheduling))
    lines = chain.train()
    assert len(lines) == STEPS and all(line["grad_norm"] > 0 for line in lines)
    first, last = (worker.engine.asked for worker in chain.workers)
    assert last >= MEMBERS * GROUPS and first + last == STEPS * GROUPS * MEMBERS
    with pytest.raises(ConfigurationError, match="lacks start, complete, update, canary, progress"):
        engine_class(scheduling)


def test_a_file_that_lacks_the_name_is_answered_with_what_it_has(own):
    with pytest.raises(ConfigurationError, match="defines no 'dificulty', only .*by_difficulty"):
        get_estimator(own(ESTIMATOR, "dificulty"))


def test_a_run_knows_its_own_code_by_an_absolute_path_and_a_digest(own, monkeypatch, tmp_path):
    """Other processes of a run have other working folders."""
    name = own(LOSS, "reinforce")
    monkeypatch.chdir(tmp_path)
    config = chain_config(policy_loss="own.py:reinforce")
    assert config.policy_loss == name
    assert list(digests([config.policy_loss, config.advantage_estimator])) == [name]
