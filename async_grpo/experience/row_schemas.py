"""Schemas of public data sets, from which errors and warnings propose options for a file."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from async_grpo.experience.column_paths import MISSING, is_missing, value_at
from async_grpo.options.fields import refuse

TOKENS = "input_token_ids"
# Columns that contain a prompt if no option names another. docs/your-data.md says which one is used if a row has several
PROMPT_COLUMNS = (TOKENS, "messages", "prompt", "input")
# Columns of other libraries and of public data sets that contain a question
PROMPT_LIKE = (
    "question",
    "problem",
    "instruction",
    "query",
    "context_messages",
    "conversations",
    "conversation",
    "problem_statement",
    "question_content",
)
# Columns whose text may belong to the question. No option joins them with the column of the question
PARTS_OF_PROMPTS = (
    "system",
    "system_prompt",
    "context",
    "passage",
    "choices",
    "options",
    "documents",
    "functions",
    "image",
    "images",
    "video",
    "videos",
    "audio",
    "audios",
)
IMAGE_PLACEHOLDER = "<image>"
# Placeholders in a prompt -> columns with the content for which they stand. A text model does not see this content
PLACEHOLDERS = {
    IMAGE_PLACEHOLDER: ("image", "images"),
    "<video>": ("video", "videos"),
    "<audio>": ("audio", "audios"),
}
NEEDS_PROMPT = "a row needs input_token_ids, messages, or prompt/input text"
SHOWN_NAMES = 12  # number of columns that a message lists


@dataclass(frozen=True)
class Schema:
    """The columns of a public data set or format, by which its rows are recognized.

    Attributes:
        name: Name of the data set or format, in the genitive, for messages ("these look like ... rows").
        columns: Dotted paths that all of these rows have.
        prompt: Dotted path of the prompt.
        answer: Dotted path of the answer; "" if the rows have none.
    """

    name: str
    columns: tuple[str, ...]
    prompt: str
    answer: str


# The first schema that fits a row is proposed
SCHEMAS = (
    Schema("verl's", ("prompt", "reward_model.ground_truth"), "prompt", "reward_model.ground_truth"),
    Schema(
        "NeMo Gym's",
        ("responses_create_params.input", "expected_answer"),
        "responses_create_params.input",
        "expected_answer",
    ),
    Schema("NeMo Gym's", ("responses_create_params.input",), "responses_create_params.input", ""),
    Schema("NeMo's", ("problem", "expected_answer"), "problem", "expected_answer"),
    Schema("NeMo's", ("question", "expected_answer"), "question", "expected_answer"),
    Schema("DeepScaleR's or open-r1's", ("problem", "answer"), "problem", "answer"),
    Schema("GSM8K's", ("question", "answer"), "question", "answer"),
    Schema("open-r1's", ("problem", "solution"), "problem", "solution"),
    Schema("OpenRLHF's", ("context_messages", "label"), "context_messages", "label"),
    Schema("OpenRLHF's", ("context_messages",), "context_messages", ""),
    Schema("OpenRLHF's", ("question", "label"), "question", "label"),
    Schema("OpenRLHF's", ("problem", "label"), "problem", "label"),
    Schema("OpenRLHF's", ("input", "label"), "input", "label"),
    Schema("OpenRLHF's or slime's", ("prompt", "label"), "prompt", "label"),
    Schema("TRL's", ("prompt", "ground_truth"), "prompt", "ground_truth"),
    Schema("TRL's", ("prompt", "solution"), "prompt", "solution"),
    Schema("Tulu's", ("messages", "ground_truth"), "messages", "ground_truth"),
    Schema("TRL's", ("prompt", "answer"), "prompt", "answer"),
    Schema("Alpaca's", ("instruction", "output"), "instruction", "output"),
    Schema("ShareGPT's", ("conversations.1.value",), "conversations", "conversations.-1.value"),
)


def proposal(row: Mapping[str, Any]) -> str:
    """Return options that read the row, as text for a message, or "" if no schema fits it.

    >>> proposal({"question": "3 + 4?", "answer": "7"})
    "these look like GSM8K's rows: --prompt-column question"
    """
    names = {str(name).lower(): str(name) for name in row}
    lower_row = {name.lower(): row[name] for name in names.values() if name in row}

    def path_here(path: str) -> str:
        """Return a path of a schema with the name that the row has for its first part."""
        name, dot, rest = path.partition(".")
        return f"{names.get(name, name)}{dot}{rest}"

    for schema in SCHEMAS:
        if any(is_missing(value_at(lower_row, path)) for path in schema.columns):
            continue
        options = []
        prompt = path_here(schema.prompt)
        answer = path_here(schema.answer)
        if prompt not in PROMPT_COLUMNS:
            options.append(f"--prompt-column {prompt}")
        if answer not in ("", "answer") and is_missing(row.get("answer", MISSING)):
            options.append(f"--answer-column {answer}")
        if options:
            return f"these look like {schema.name} rows: {' '.join(options)}"
    return ""


def unread_columns(row: Mapping[str, Any]) -> list[str]:
    """Return the columns that look like a prompt, but whose text is not part of the row's prompt.

    The row must already have its prompt in the columns that this library reads (`ColumnMap.apply`).
    """
    if TOKENS in row:
        return []
    prompt = _prompt_text(row)
    unread = []
    for name in names_like_prompts(row):
        texts = [joined_texts(text) for text in _texts(row.get(name)) if text.strip()]
        if texts and not any(text in prompt for text in texts):
            unread.append(name)
    return unread


def names_like_prompts(row: Mapping[str, Any]) -> list[str]:
    """Return the names of the row's columns that look like a prompt's, in the order of PROMPT_LIKE, whatever their case."""
    likely = (*PROMPT_LIKE, *PROMPT_COLUMNS)
    names = [name for name in row if isinstance(name, str) and name.lower() in likely]
    unread_names = [name for name in names if name not in PROMPT_COLUMNS]
    return sorted(unread_names, key=lambda name: likely.index(name.lower()))


def unread_parts(row: Mapping[str, Any]) -> list[str]:
    """Return the columns of PARTS_OF_PROMPTS with a text that is not part of the row's prompt; see `unread_columns`."""
    if TOKENS in row:
        return []
    prompt = _prompt_text(row)
    unread = []
    for name in PARTS_OF_PROMPTS:
        texts = [joined_texts(text) for text in _texts(row.get(name)) if text.strip()]
        if any(text not in prompt for text in texts):
            unread.append(name)
    return unread


def refuse_placeholders(row: Mapping[str, Any], *, reads_images: bool = False) -> None:
    """Raise ConfigurationError if a prompt says where an image, a video or a sound belongs, and a column contains it.

    Args:
        row: The row.
        reads_images: Whether the model reads images, so that their places are allowed.
    """
    for placeholder, columns in PLACEHOLDERS.items():
        if reads_images and placeholder == IMAGE_PLACEHOLDER:
            continue
        name = next((column for column in columns if row.get(column)), None)
        refuse(
            name is not None and placeholder in _prompt_text(row),
            f"the prompt has {placeholder} for what the column {name} holds, and only texts are given to the model: drop "
            "the row, or remove the column and the placeholder",
        )


def without_images(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row without the columns that contain its images."""
    return {name: value for name, value in row.items() if name not in PLACEHOLDERS[IMAGE_PLACEHOLDER]}


def _prompt_text(row: Mapping[str, Any]) -> str:
    return joined_texts([row[name] for name in PROMPT_COLUMNS if name in row])


def joined_texts(value: Any) -> str:
    """Return all texts in a value as one text with single blanks, so that other texts can be searched for in it."""
    return " ".join(" ".join(_texts(value)).split())


def without_prompt(row: Mapping[str, Any]) -> str:
    """Return the message for a row without a prompt. It names the row's columns, and the options that read them."""
    message = f"{NEEDS_PROMPT}; its columns are {names_of(row)}"
    candidates = [name for name in names_like_prompts(row) if not is_missing(row.get(name))]
    proposed = proposal(row)
    if not proposed and candidates:
        proposed = f"if {candidates[0]} is the question: --prompt-column {candidates[0]}"
    if not proposed:
        proposed = "if another column is the question: --prompt-column with its name"
    return f"{message}. {proposed[0].upper()}{proposed[1:]}"


def names_of(row: Mapping[str, Any]) -> str:
    names = [str(name) for name in row]
    rest = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return (", ".join(names[:SHOWN_NAMES]) or "no columns") + rest


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a value, except the keys of objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts(list(value.values()))
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
