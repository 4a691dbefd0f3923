"""The data set: JSONL rows become tokenised prompts once, and one cursor walks through them for the whole run."""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from async_grpo.errors import ConfigurationError
from async_grpo.types import Prompt

KEPT_ORDERS = (
    4  # epochs whose order is remembered: prompts of the last one are retired while the next is drawn
)
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Question:
    """A row with its prompt, not yet drawn. `where`: file and line that it comes from."""

    token_ids: np.ndarray  # (L,) int32
    row: dict[str, Any]
    where: str = ""


def load_questions(
    path: str | Path, tokenizer: Any, max_prompt_tokens: int, vocab_size: int
) -> list[Question]:
    """Read and check a whole data file.

    The prompt is `input_token_ids` if the row has them, else `messages` (or a list in `prompt`) through the chat
    template, else the text of `input` or `prompt`. The row always gets `input`, the prompt as text.

    Raises:
        ConfigurationError: with file and line number, for anything that could not be trained on.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigurationError(f"{path}: there is no such file")
    questions = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{path}, line {number}"
                questions.append(
                    _question(_row(line, where), tokenizer, max_prompt_tokens, vocab_size, where)
                )
    if not questions:
        raise ConfigurationError(f"{path} holds no questions")
    return questions


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except ValueError as error:  # not UTF-8, or not JSON
        raise ConfigurationError(f"{where}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise ConfigurationError(f"{where}: a row must be an object, not {type(row).__name__}")
    return row


def _question(row: dict, tokenizer: Any, max_prompt_tokens: int, vocab_size: int, where: str) -> Question:
    token_ids = _prompt_tokens(row, tokenizer, where)
    if not 0 < len(token_ids) <= max_prompt_tokens:
        raise ConfigurationError(
            f"{where}: a prompt of {len(token_ids)} tokens; between 1 and {max_prompt_tokens} fit this model and "
            "--max-generation-tokens. Shorten or drop the row"
        )
    if token_ids.min() < 0 or token_ids.max() >= vocab_size:
        raise ConfigurationError(
            f"{where}: token id {token_ids.max()} is outside the model's vocabulary of {vocab_size}: the file was "
            "tokenised for another model"
        )
    if not isinstance(row.get("input"), str):
        row["input"] = tokenizer.decode(token_ids)
    return Question(token_ids, row, where)


def _prompt_tokens(row: dict, tokenizer: Any, where: str) -> np.ndarray:
    ids = row.get("input_token_ids")
    if ids is not None:
        if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise ConfigurationError(f"{where}: input_token_ids must be a list of integers")
    elif isinstance(messages := row.get("messages", row.get("prompt")), list):
        ids = _chat_tokens(messages, tokenizer, where)
    elif isinstance(text := row.get("input", row.get("prompt")), str):
        ids = tokenizer.encode(text)
    else:
        raise ConfigurationError(f"{where}: a row needs input_token_ids, messages, or prompt/input text")
    try:
        return np.asarray(ids, np.int32)
    except OverflowError as error:
        raise ConfigurationError(f"{where}: a token id does not fit 32 bits") from error


def _chat_tokens(messages: list, tokenizer: Any, where: str) -> list[int]:
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigurationError(
            f"{where}: a row of messages, but the model's tokenizer has no chat template"
        )
    if not messages or not all(isinstance(message, dict) and "content" in message for message in messages):
        raise ConfigurationError(
            f"{where}: messages must be a list of objects with role and content, and not empty"
        )
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )


class PromptCursor:
    """Walks through the questions for ever, each epoch in a new order; the one owner of the position.

    A question may be retired: it is passed over in later epochs, until none is left; then all are back.

    >>> questions = [Question(np.array([i], np.int32), {}) for i in range(3)]
    >>> drawn = [prompt.token_ids[0] for prompt, _ in zip(PromptCursor(questions, seed=0), range(6))]
    >>> sorted(drawn[:3]) == sorted(drawn[3:]) == [0, 1, 2]
    True
    """

    def __init__(self, questions: Sequence[Question], seed: int) -> None:
        self.questions, self.seed = questions, seed
        self.position = 0  # places of the walk passed so far: with `retired`, all that a resume needs
        self.retired: set[int] = set()  # indices of questions
        self._order = lru_cache(KEPT_ORDERS)(self._draw_order)

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def __next__(self) -> Prompt:
        while (index := self._question_at(self.position)) in self.retired:
            self.position += 1
        question = self.questions[index]
        prompt = Prompt(self.position, question.token_ids, question.row)
        self.position += 1
        return prompt

    def retire(self, prompt: Prompt) -> None:
        """Draw the prompt's question no more."""
        self.retired.add(self._question_at(prompt.ordinal))
        if len(self.retired) == len(self.questions):
            log.warning("every question has been retired (--no-positive-resampling): all of them are back")
            self.retired.clear()

    def _question_at(self, position: int) -> int:
        epoch, index = divmod(position, len(self.questions))
        return int(self._order(epoch)[index])

    def _draw_order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self.seed, epoch)).permutation(len(self.questions))


def check_longest(
    questions: Sequence[Question], longest_total: Callable[[int], int], max_tokens: int
) -> None:
    """Refuse a run in which the longest possible sample would not fit one micro-batch.

    Args:
        longest_total: prompt tokens -> tokens of its longest possible sample.
        max_tokens: `--max-tokens-per-gpu`.
    """
    longest_prompt = max(len(question.token_ids) for question in questions)
    total = longest_total(longest_prompt)
    if total > max_tokens:
        raise ConfigurationError(
            f"a prompt of {longest_prompt} tokens and its longest completion make a sample of {total} tokens, which "
            f"cannot fit --max-tokens-per-gpu {max_tokens}: raise it, or lower --max-generation-tokens"
        )
