"""The prompts of a policy that draws: each row has the name of a label, or a text to draw."""

from collections.abc import Sequence
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.modeling.flow.folder import NUM_BYTES, FlowFolder
from async_grpo.options.fields import refuse
from async_grpo.rewards.adapter.pictures import PICTURE_KEY, PICTURES_KEY

SHOWN_LABELS = 20
MAX_TEXT_BYTES = 4096  # maximum length of a text prompt in bytes; text encoders read far less


class LabelPrompts:
    """Turns rows into prompts of one token: the number of a label. It has the methods of a tokenizer that a run calls.

    Args:
        folder: The folder of the model, which names the labels.
    """

    def __init__(self, folder: FlowFolder) -> None:
        self._num_labels = folder.num_labels
        self._number_by_name = folder.labels or {str(number): number for number in range(folder.num_labels)}
        self._name_by_number = {number: name for name, number in self._number_by_name.items()}

    def __len__(self) -> int:
        return self._num_labels

    def prompt_tokens(self, row: Any, max_prompt_tokens: int, place: str = "") -> list[int]:
        """Return the number of a row's label, as a list. The row has it in `input_token_ids`, or its name in `input`.

        Args:
            row: The row.
            max_prompt_tokens: Not used: every prompt is one token.
            place: Not used: file and line of the row.

        Raises:
            ConfigurationError: The row names no label of the model, or has a column in which rewards get the picture.
        """
        refuse_picture_columns(row)
        numbers = row.get("input_token_ids")
        if numbers is not None:
            is_number = isinstance(numbers, list) and len(numbers) == 1 and type(numbers[0]) is int
            refuse(not is_number, "input_token_ids must be a list of one number, the label to draw")
            refuse(
                not 0 <= numbers[0] < self._num_labels,
                f"label {numbers[0]} is outside the model's {self._num_labels} labels",
            )
            return list(numbers)
        name = row.get("input", row.get("prompt"))
        if not isinstance(name, str) or name.strip() not in self._number_by_name:
            label_names = ", ".join(list(self._number_by_name)[:SHOWN_LABELS])
            raise ConfigurationError(
                f"the prompt of --policy flow must be the name of a label, not {str(name)[:80]!r}; labels: "
                f"{label_names}{_hint(name)}"
            )
        return [self._number_by_name[name.strip()]]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the names of the labels with these numbers."""
        return " ".join(self._name_by_number.get(number, str(number)) for number in token_ids)

    def warn_about_use(self, has_environment: bool) -> None:
        """Do nothing, because there is no chat template to warn about. See `PromptRenderer`."""


class TextPrompts:
    """Turns rows into prompts of bytes: the text to draw, in UTF-8. It has the methods of a tokenizer that a run calls.

    The tokenizers of the engine's text encoders lose letters and spaces, so a prompt in their tokens could not be shown
    again. Bytes lose nothing.
    """

    def __len__(self) -> int:
        return NUM_BYTES

    def prompt_tokens(self, row: Any, max_prompt_tokens: int, place: str = "") -> list[int]:
        """Return the bytes of a row's text, in the column `input` or `prompt`.

        Args:
            row: The row.
            max_prompt_tokens: Maximum number of bytes.
            place: Not used: file and line of the row.

        Raises:
            ConfigurationError: The row has no text, one that is too long, or a column in which rewards get the picture.
        """
        refuse_picture_columns(row)
        text = row.get("input", row.get("prompt"))
        if not isinstance(text, str) or not text.strip():
            raise ConfigurationError(
                f"the prompt of --policy flow must be a text that says what to draw, not {str(text)[:80]!r}"
                f"{_hint(text)}"
            )
        try:
            token_ids = list(text.strip().encode())
        except UnicodeEncodeError as error:
            raise ConfigurationError(f"the prompt cannot be written in UTF-8: {error}") from error
        refuse(
            len(token_ids) > max_prompt_tokens,
            f"the prompt has {len(token_ids)} bytes, more than {max_prompt_tokens}: {text[:80]!r}",
        )
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of these bytes."""
        return bytes(list(token_ids)).decode(errors="replace")

    def warn_about_use(self, has_environment: bool) -> None:
        """Do nothing, because there is no chat template to warn about. See `PromptRenderer`."""


def _hint(prompt: Any) -> str:
    """Return the end of a message about a wrong prompt: which option is missing if it is a conversation, or ""."""
    return "; with --prompt-column, set --prompt-as text" if isinstance(prompt, list) else ""


def flow_prompts(folder: FlowFolder) -> LabelPrompts | TextPrompts:
    """Return the reader of a model's prompts: for labels, or for texts."""
    return TextPrompts() if folder.family.reads_text else LabelPrompts(folder)


def refuse_picture_columns(row: Any) -> None:
    """Raise ConfigurationError if a row is no object, or has a column in which rewards get the picture."""
    refuse(not isinstance(row, dict), f"a row must be an object, not {type(row).__name__}")
    # Rewards find the drawn picture in this column. If the row had one, they would score the row's value instead
    for column in (PICTURE_KEY, PICTURES_KEY):
        refuse(
            column in row,
            f"the column {column!r} is where rewards get the picture that --policy flow drew: rename the column",
        )
