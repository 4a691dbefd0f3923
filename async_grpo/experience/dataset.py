"""The data set: JSONL rows become tokenised prompts once, and one cursor walks through them for the whole run."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from async_grpo.errors import ConfigurationError
from async_grpo.experience.curriculum import Curriculum
from async_grpo.options.fields import refuse
from async_grpo.processes.deadline import interrupted_after
from async_grpo.processes.untrusted_files import (
    MAX_ROW_BYTES,
    all_is_text,
    bounded_lines,
    open_regular,
    parse_json,
)
from async_grpo.types import Prompt

TEMPLATE_S = 30.0  # of a model's chat template, for one row
PROMPT_COLUMNS = ("input", "prompt", "messages")
# Of a prompt's text, at most: tokenising what can never fit would take minutes, and gigabytes
MAX_CHARACTERS_PER_TOKEN = 256
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Question:
    """A row with its prompt, not yet drawn. `where`: file and line that it comes from."""

    token_ids: np.ndarray  # (L,) int32
    row: dict[str, Any]
    where: str = ""


def read_rows(path: str | Path) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a JSONL file, each with file and line.

    Raises:
        ConfigurationError: there is no such file, it is not JSONL, or a line is too long or no text.
    """
    path, where = Path(path), ""
    refuse(not path.is_file(), f"{path}: there is no such file")
    with open_regular(path, follow_links=True) as file:
        for number, line in enumerate(bounded_lines(file, MAX_ROW_BYTES), start=1):
            if line is not None and not line.strip():
                continue
            where = f"{path}, line {number}"
            if line is None:
                raise ConfigurationError(
                    f"{where}: longer than {MAX_ROW_BYTES >> 20} MB, the most that is read of a row"
                )
            try:
                row = parse_json(line)
            except ValueError as error:  # not UTF-8, not JSON, or brackets without end
                raise ConfigurationError(f"{where}: not JSON ({error})") from error
            yield where, row
    refuse(not where, f"{path} holds no questions")


def questions_of(
    rows: Iterable[tuple[str, Any]], tokenizer: Any, max_prompt_tokens: int, vocab_size: int
) -> list[Question]:
    """Check rows, each given with where it comes from, and tokenise their prompts.

    The prompt is `input_token_ids` if the row has them, else `messages` (or a list in `prompt`) through the chat
    template, else the text of `input` or `prompt`. The row always gets `input`, the prompt as text.
    ConfigurationError: with where it stands, for anything that could not be trained on.
    """
    questions = []
    for where, row in rows:
        try:
            _check_prompt_text(row, max_prompt_tokens)
            token_ids = _prompt_tokens(row, tokenizer)
            refuse(
                not 0 < len(token_ids) <= max_prompt_tokens,
                f"a prompt of {len(token_ids)} tokens; between 1 and {max_prompt_tokens} fit this model and "
                "--max-generation-tokens. Shorten or drop the row",
            )
            wrong = next((i for i in token_ids if not 0 <= i < vocab_size), None)
            refuse(
                wrong is not None,
                f"token id {wrong} is outside the model's vocabulary of {vocab_size}: the file was tokenised for "
                "another model",
            )
        except ConfigurationError as error:
            raise ConfigurationError(f"{where}: {error}") from error
        if not isinstance(row.get("input"), str):
            row["input"] = tokenizer.decode(token_ids)
        questions.append(Question(np.asarray(token_ids, np.int32), row, where))
    return questions


def _check_prompt_text(row: Any, max_prompt_tokens: int) -> None:
    """Raise ConfigurationError for a prompt that no tokenizer takes, or that cannot fit whatever its tokens are."""
    if not isinstance(row, dict):
        return
    for name in PROMPT_COLUMNS:
        halves = not all_is_text(row.get(name))
        refuse(
            halves,
            f"{name} holds half of a surrogate pair (\\ud800 to \\udfff), which is no text: correct the row",
        )
    num_characters = 0
    for name in PROMPT_COLUMNS:
        value = row.get(name)
        parts = value if isinstance(value, list) else [{"content": value}]
        texts = [part.get("content") for part in parts if isinstance(part, dict)]
        num_characters = max(num_characters, sum(len(text) for text in texts if isinstance(text, str)))
    refuse(
        row.get("input_token_ids") is None and num_characters > MAX_CHARACTERS_PER_TOKEN * max_prompt_tokens,
        f"a prompt of {num_characters} characters; at most {max_prompt_tokens} tokens fit this model and "
        "--max-generation-tokens. Shorten or drop the row",
    )


def _prompt_tokens(row: Any, tokenizer: Any) -> list[int]:
    if not isinstance(row, dict):
        raise ConfigurationError(f"a row must be an object, not {type(row).__name__}")
    if (ids := row.get("input_token_ids")) is not None:
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise ConfigurationError("input_token_ids must be a list of integers")
        return ids
    if isinstance(messages := row.get("messages", row.get("prompt")), list):
        has_template = getattr(tokenizer, "chat_template", None)
        refuse(not has_template, "a row of messages, but the model's tokenizer has no chat template")
        are_messages = messages and all(isinstance(said, dict) and "content" in said for said in messages)
        refuse(not are_messages, "messages must be a list of objects with role and content")
        how = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        try:
            with interrupted_after(TEMPLATE_S, "the model's chat template"):
                return tokenizer.apply_chat_template(messages, **how)
        except Exception as error:  # a template is a program of the model's folder: it may raise anything
            raise ConfigurationError(f"the model's chat template cannot be applied: {error}") from error
    if isinstance(text := row.get("input", row.get("prompt")), str):
        return tokenizer.encode(text)
    raise ConfigurationError("a row needs input_token_ids, messages, or prompt/input text")


class PromptCursor:
    """Walks through the questions for ever, each epoch in a new order; the one owner of the position.

    A question may be retired: it is passed over in later epochs, until none is left; then all are back. So is one that
    the curriculum does not admit.
    """

    def __init__(
        self, questions: Sequence[Question], seed: int, curriculum: Curriculum | None = None
    ) -> None:
        self.questions, self.seed, self.curriculum = questions, seed, curriculum
        self.retired: set[int] = set()  # places in the data set
        self._drawn = self._epoch = 0
        self._left: list[int] = []  # of this epoch, the next one last

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def __next__(self) -> Prompt:
        while True:
            if not self._left:
                self._left, self._epoch = self._order(self._epoch), self._epoch + 1
            place = self._left.pop()
            admitted = self.curriculum is None or self.curriculum.admits(self.questions[place].row)
            if admitted and place not in self.retired:
                self._drawn += 1
                return self.prompt(self._drawn - 1, place)

    def _order(self, epoch: int) -> list[int]:
        return np.random.default_rng((self.seed, epoch)).permutation(len(self.questions))[::-1].tolist()

    def prompt(self, ordinal: int, place: int) -> Prompt:
        """The question at that place, as the prompt of that ordinal."""
        question = self.questions[place]
        return Prompt(ordinal, question.token_ids, question.row, place)

    def retire(self, prompt: Prompt) -> None:
        """Draw the prompt's question no more."""
        self.retired.add(prompt.question)
        if len(self.retired) == len(self.questions):
            log.warning("every question has been retired (--retire-solved-above): all of them are back")
            self.retired.clear()

    def state(self) -> dict[str, Any]:
        """The position, for `restore`: JSON."""
        left, retired = len(self._left), sorted(self.retired)
        curriculum = self.curriculum and self.curriculum.state()
        told = {"drawn": self._drawn, "epoch": self._epoch, "left": left, "retired": retired}
        return told | {"curriculum": curriculum}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken, of the same questions and seed."""
        self._drawn, self._epoch, self.retired = state["drawn"], state["epoch"], set(state["retired"])
        self._left = self._order(self._epoch - 1)[: state["left"]] if state["left"] else []
        if self.curriculum is not None and state["curriculum"] is not None:
            self.curriculum.restore(state["curriculum"])
