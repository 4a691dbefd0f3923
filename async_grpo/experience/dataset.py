"""The data set: rows are tokenized once, and one cursor draws prompts from them for the whole run."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from async_grpo.errors import ConfigurationError
from async_grpo.experience.curriculum import Curriculum
from async_grpo.experience.image_prompts import ImagePrompt, ImagePrompts
from async_grpo.experience.prompts import PromptRenderer
from async_grpo.experience.row_images import first_image_kind
from async_grpo.experience.row_schemas import names_like_prompts
from async_grpo.experience.run_images import ImageSource
from async_grpo.options.fields import refuse
from async_grpo.processes.image_files import IMAGE_MODEL_TYPES
from async_grpo.types import ImageReference, Prompt

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Question:
    """A row of the data set with its tokenized prompt."""

    token_ids: np.ndarray  # (L,) int32
    row: dict[str, Any]
    where: str = ""  # file and line of the row
    images: tuple[ImageReference, ...] = ()  # images of the prompt, in the order of their tokens
    teacher_token_ids: np.ndarray | None = None  # (L',) int32, see `Prompt`
    image_sources: tuple[ImageSource, ...] = ()  # where the content of each image comes from


def questions_of(
    rows: Iterable[tuple[str, Any]],
    tokenizer: Any,
    max_prompt_tokens: int,
    vocab_size: int,
    renderer: PromptRenderer | None = None,
    image_prompts: ImagePrompts | None = None,
    data_folder: Path = Path(),
) -> list[Question]:
    """Check rows and tokenize their prompts (`PromptRenderer.prompt_tokens`).

    A row without a text in its column `input` gets the prompt's text in that column.

    Args:
        rows: (file and line number as text, row) for each row.
        tokenizer: The model's tokenizer.
        max_prompt_tokens: Maximum length of a prompt, which leaves room for a completion.
        vocab_size: Size of the model's vocabulary.
        renderer: Renders the prompts. The default uses the model's own chat template.
        image_prompts: Renders prompts with images. None if the model does not read images; rows with images are then
            refused.
        data_folder: Folder of the data file, in which relative paths of images begin.

    Raises:
        ConfigurationError: A row cannot be trained on. The message names its file and line.
    """
    renderer = renderer or PromptRenderer(tokenizer)
    questions = []
    for place, row in rows:
        try:
            image_prompt = None
            if image_prompts is not None:
                image_prompt = image_prompts.prompt(row, max_prompt_tokens, place, data_folder)
            if image_prompt is not None:
                token_ids = image_prompt.token_ids
                text_token_ids = image_prompt.text_token_ids
            else:
                _refuse_images(row, image_prompts)
                token_ids = renderer.prompt_tokens(row, max_prompt_tokens, place)
                text_token_ids = token_ids
                if image_prompts is not None:
                    image_prompts.refuse_placeholders(token_ids)
            refuse(not len(token_ids), _without_tokens(row))
            refuse(
                len(token_ids) > max_prompt_tokens,
                f"a prompt of {len(token_ids)} tokens; between 1 and {max_prompt_tokens} fit this model and "
                "--max-generation-tokens. Shorten or drop the row",
            )
            unknown_id = next((token_id for token_id in token_ids if not 0 <= token_id < vocab_size), None)
            refuse(
                unknown_id is not None,
                f"token id {unknown_id} is outside the model's vocabulary of {vocab_size}: the file was tokenised for "
                "another model",
            )
        except ConfigurationError as error:
            raise ConfigurationError(f"{place}: {error}") from error
        if not isinstance(row.get("input"), str):
            row["input"] = tokenizer.decode(text_token_ids)
        questions.append(_question(token_ids, row, place, image_prompt))
    return questions


def _question(
    token_ids: Sequence[int], row: dict[str, Any], place: str, image_prompt: ImagePrompt | None
) -> Question:
    """Return a question; `image_prompt` is None if the row has no images."""
    array = np.asarray(token_ids, np.int32)
    if image_prompt is None:
        return Question(array, row, place)
    return Question(array, row, place, images=image_prompt.images, image_sources=image_prompt.sources)


def _refuse_images(row: Any, image_prompts: ImagePrompts | None) -> None:
    """Raise ConfigurationError if a message of the row has an image, and the model reads none."""
    if image_prompts is not None or not isinstance(row, dict):
        return
    kind = first_image_kind(row)
    refuse(
        bool(kind),
        f"a message has a part of the type {kind!r}, and the model reads no images: drop the row, or give a model of one "
        f"of the types {', '.join(IMAGE_MODEL_TYPES)} (docs/images.md)",
    )


def _without_tokens(row: Mapping[str, Any]) -> str:
    """Return the message for a row whose prompt is empty. It names the columns that may contain the question."""
    names = [name for name in names_like_prompts(row) if row[name]]
    hint = f"; if {names[0]} is the question: --prompt-column {names[0]}" if names else ""
    return f"a prompt of 0 tokens, because it is empty: write the question, or drop the row{hint}"


class PromptCursor:
    """Draws an endless sequence of prompts from the questions, in a new order in each epoch.

    Retired questions (see `--retire-solved-above`) are skipped. Once all questions are retired, all of them return.
    Questions that the curriculum does not admit are also skipped.
    """

    def __init__(
        self, questions: Sequence[Question], seed: int, curriculum: Curriculum | None = None
    ) -> None:
        self.questions = questions
        self.seed = seed
        self.curriculum = curriculum
        self.retired: set[int] = set()  # indices of the retired questions in the data set
        self._num_drawn = 0
        self._epoch = 0  # number of epochs begun
        # indices of this epoch's questions that are still to come; the last entry is drawn next
        self._remaining: list[int] = []

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def __next__(self) -> Prompt:
        while True:
            if not self._remaining:
                self._remaining = self._order(self._epoch)
                self._epoch += 1
            question = self._remaining.pop()
            if question not in self.retired and self._is_admitted(question):
                self._num_drawn += 1
                return self.prompt(self._num_drawn - 1, question)

    def _is_admitted(self, question: int) -> bool:
        """Return whether the curriculum admits the question at this index; True without a curriculum."""
        return self.curriculum is None or self.curriculum.admits(self.questions[question].row)

    def _order(self, epoch: int) -> list[int]:
        """Return the indices of an epoch's questions in a random order. The last entry is drawn first."""
        return np.random.default_rng((self.seed, epoch)).permutation(len(self.questions))[::-1].tolist()

    def prompt(self, ordinal: int, place: int) -> Prompt:
        """Make a prompt from a question.

        Args:
            ordinal: Number of the prompt since the start of the run.
            place: Index of the question in the data set.
        """
        question = self.questions[place]
        return Prompt(
            ordinal,
            question.token_ids,
            question.row,
            place,
            question.images,
            teacher_token_ids=question.teacher_token_ids,
        )

    def retire(self, prompt: Prompt) -> None:
        """Skip the prompt's question from now on."""
        self.retired.add(prompt.question)
        if len(self.retired) == len(self.questions):
            log.warning("every question has been retired (--retire-solved-above): all of them are back")
            self.retired.clear()

    def state(self) -> dict[str, Any]:
        """Return the position in the data set as JSON, for `restore`."""
        return {
            "drawn": self._num_drawn,
            "epoch": self._epoch,
            "left": len(self._remaining),
            "retired": sorted(self.retired),
            "curriculum": self.curriculum and self.curriculum.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the position of a cursor that had the same questions and the same seed."""
        self._num_drawn = state["drawn"]
        self._epoch = state["epoch"]
        self.retired = set(state["retired"])
        self._remaining = []
        if state["left"]:
            self._remaining = self._order(self._epoch - 1)[: state["left"]]
        if self.curriculum is not None and state["curriculum"] is not None:
            self.curriculum.restore(state["curriculum"])
