"""Agents of frameworks behind the real endpoint, played by a policy whose turns are scripted."""

import asyncio
import shutil
import time
import unittest.mock
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from chat_templates import MODEL, TEMPLATES
from grammars_here import GrammarsHere, accepts
from scripted_play import SETTINGS, prompt_of, trajectories
from token_exactness import check
from transformers import AutoTokenizer

from async_grpo.environments import grammars
from async_grpo.environments.chat import Chat
from async_grpo.environments.config import EnvironmentConfig
from async_grpo.environments.make import make_played
from async_grpo.types import Completion, FinishReason

UNEXPECTED = "The script has no further turn."


def model_folder(folder: Path) -> Path:
    """Write the folder of a model whose chat template shows tools, and writes calls as JSON between tags."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = TEMPLATES["writes_calls_as_json"]
    tokenizer.save_pretrained(folder)
    shutil.copy(MODEL / "config.json", folder)
    return folder


# The prompts of some frameworks are long, and the tiny tokenizer has few tokens of several characters
LONG = replace(SETTINGS, max_total_tokens=40_000, max_completion_tokens=40_000)


class ScriptedPolicy:
    """A `Generation` whose turns are given. It records what it was asked after, and what it said.

    Attributes:
        num_enforced: Number of turns whose form an engine would enforce.
        against_form: Turns that do not keep to the form, so that no engine would say them.
    """

    def __init__(self, tokenizer: Any, turns: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._chat = Chat(tokenizer)
        self._turns = list(turns)
        self.num_enforced = 0
        self.against_form: list[str] = []
        self.requests: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # prompt, sampled, versions

    async def take_stats(self) -> dict[str, Any]:
        return {}

    @property
    def prompts(self) -> list[str]:
        """The text of each prompt."""
        return [self._chat.decode(token_ids, token_ids[:0]) for token_ids, _, _ in self.requests]

    async def generate(self, prompt, count, sampling=None, session=None) -> AsyncGenerator[Completion]:
        assert count == 1 and session is not None
        number = len(self.requests)
        text = self._turns[number] if number < len(self._turns) else UNEXPECTED
        if sampling is not None and sampling.grammar:
            self.num_enforced += 1
            if not accepts(self._tokenizer, sampling.grammar, text):
                self.against_form.append(text)
        token_ids = np.append(self._chat.encode(text), self._chat.encode("<|im_end|>")).astype(np.int32)
        versions = np.full(len(token_ids), session.turn, np.int32)
        session.turn += 1
        self.requests.append((prompt.token_ids.copy(), token_ids, versions))
        logprobs = np.linspace(-1, 0, len(token_ids), dtype=np.float32)
        yield Completion(token_ids, logprobs, versions, FinishReason.STOP, text)


@dataclass(frozen=True)
class PlayedAgent:
    """What became of one trajectory of an agent.

    Attributes:
        reward: The trajectory's reward; None if it failed.
        failure: Why the trajectory failed; "" if it did not.
        num_turns: Number of turns that the policy took.
        num_sequences: Number of sequences that are trained on; 1 if each request continued the tokens of the last one.
        num_tokens: Number of sampled tokens, each of which is trained on exactly once.
        prompts: Text of each request, as the engine reads it.
        seconds: Duration of the trajectory.
        num_enforced: See `ScriptedPolicy`.
        against_form: See `ScriptedPolicy`.
    """

    reward: float | None
    failure: str
    num_turns: int
    num_sequences: int
    num_tokens: int
    prompts: list[str]
    seconds: float
    num_enforced: int
    against_form: list[str]


@contextmanager
def grammars_made_here(folder: Path) -> Iterator[None]:
    """Make the grammars of all trajectories in this process. A process for each would import vLLM each time.

    Args:
        folder: Folder of the model; see `model_folder`.
    """
    maker = GrammarsHere(None, "", {"model_path": str(folder)})
    # Importing vLLM takes seconds, for which no agent shall wait
    asyncio.run(maker.start())
    with unittest.mock.patch.object(grammars, "GrammarProcess", lambda *_, **__: maker):
        yield


async def play(
    folder: Path,
    command: str,
    turns: Sequence[str],
    row: dict[str, Any],
    typed_output: str,
) -> PlayedAgent:
    """Play one trajectory of an agent, and check that each sampled token is trained on exactly once.

    Args:
        folder: Folder of the model; see `model_folder`.
        command: Shell command of the agent.
        turns: What the policy says, turn by turn.
        row: The row of the data set, which the agent reads.
        typed_output: Value of `--typed-output`.

    Raises:
        AssertionError: A sampled token is missing in what is trained on, or a token in it was never sampled.
    """
    config = EnvironmentConfig(environment=f"agent:{command}", typed_output=typed_output)
    policy = ScriptedPolicy(AutoTokenizer.from_pretrained(folder), turns)
    played = make_played(config, str(folder), LONG, None, policy)
    prompt = prompt_of(**row)
    begin = time.monotonic()
    (completion,) = await trajectories(played, prompt)
    seconds = time.monotonic() - begin
    num_sequences = check(policy, completion, prompt) if policy.requests else 0
    return PlayedAgent(
        reward=completion.outcome.reward,
        failure=completion.outcome.failure,
        num_turns=len(completion.turns),
        num_sequences=num_sequences,
        num_tokens=len(completion),
        prompts=policy.prompts,
        seconds=seconds,
        num_enforced=policy.num_enforced,
        against_form=policy.against_form,
    )
