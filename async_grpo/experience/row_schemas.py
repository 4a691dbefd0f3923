"""Schemas of public data sets, from which errors and warnings propose options for a file."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from async_grpo.experience.column_paths import MISSING, is_missing, value_at

TOKENS = "input_token_ids"
# Columns that hold a prompt if no option names another. docs/your-data.md says which one is used if a row has several
PROMPT_COLUMNS = (TOKENS, "messages", "prompt", "input")
# Columns of other libraries and of public data sets that hold a question
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
NEEDS_PROMPT = "a row needs input_token_ids, messages, or prompt/input text"
SHOWN_NAMES = 12  # number of columns that a message lists


@dataclass(frozen=True)
class Schema:
    """The schema of a kind of public rows.

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
    Schema("Alpaca's", ("instruction", "output"), "instruction", "output"),
    Schema("ShareGPT's", ("conversations.1.value",), "conversations", "conversations.-1.value"),
)


def proposal(row: Mapping[str, Any]) -> str:
    """Return options that read the row, as text for a message, or "" if no schema fits it.

    >>> proposal({"question": "3 + 4?", "answer": "7"})
    "these look like GSM8K's rows: --prompt-column question"
    """
    for schema in SCHEMAS:
        if any(is_missing(value_at(row, path)) for path in schema.columns):
            continue
        options = []
        if schema.prompt not in PROMPT_COLUMNS:
            options.append(f"--prompt-column {schema.prompt}")
        if schema.answer not in ("", "answer") and is_missing(row.get("answer", MISSING)):
            options.append(f"--answer-column {schema.answer}")
        if options:
            return f"these look like {schema.name} rows: {' '.join(options)}"
    return ""


def unread_columns(row: Mapping[str, Any]) -> list[str]:
    """Return the columns that look like a prompt, but whose text is not part of the row's prompt.

    The row must already have its prompt in the columns that this library reads (`ColumnMap.apply`).
    """
    if TOKENS in row:
        return []
    prompt = joined_texts([row[name] for name in PROMPT_COLUMNS if name in row])
    unread = []
    for name in PROMPT_LIKE:
        texts = [joined_texts(text) for text in _texts(row.get(name)) if text.strip()]
        if texts and not any(text in prompt for text in texts):
            unread.append(name)
    return unread


def joined_texts(value: Any) -> str:
    """Return all texts in a value as one text with single blanks, in which other texts can be looked for."""
    return " ".join(" ".join(_texts(value)).split())


def without_prompt(row: Mapping[str, Any]) -> str:
    """Return the message for a row without a prompt. It names the row's columns, and the options that read them."""
    message = f"{NEEDS_PROMPT}; its columns are {names_of(row)}"
    candidates = [name for name in PROMPT_LIKE if not is_missing(row.get(name))]
    proposed = proposal(row)
    if not proposed and candidates:
        proposed = f"if {candidates[0]} is the question: --prompt-column {candidates[0]}"
    return f"{message}. {proposed[0].upper()}{proposed[1:]}" if proposed else message


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
