"""`ColumnMap`: finds the columns of a row's prompt and answer, and gives them the names that the library reads."""

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.experience.column_paths import MISSING, is_missing, parsed_text, value_at
from async_grpo.experience.row_messages import share_gpt_question
from async_grpo.experience.row_schemas import PROMPT_COLUMNS, TOKENS, names_of, without_prompt
from async_grpo.options.fields import refuse

# Beginning and end of a list of messages that was written as one text: as JSON, or as Python or numpy prints it
SERIALIZED_BEGIN = re.compile(r"""(array\()?\[\s*\{\s*['"](role|content|from|value)['"]\s*:""")
SERIALIZED_ENDS = ("]", "])", "dtype=object)")
# A ShareGPT message has a speaker in its field `from`. Messages of these speakers cannot be a question (or an answer)
NO_QUESTIONS = ("system", "gpt", "assistant", "chatgpt", "bard", "bing")
NO_ANSWERS = ("system", "human", "user")
SHOWN_CHARACTERS = 80  # number of characters of a value that a message shows


@dataclass(frozen=True)
class ColumnMap:
    """The columns of prompt and answer, from the options of a run.

    Attributes:
        prompt: Dotted paths for the prompt; the first that a row has is used. () stands for `PROMPT_COLUMNS`.
        answer: Dotted paths for the answer; the first that a row has is used. () stands for the column `answer`.
        text_is_message: Whether a text in the prompt's column is the user's message. If not, it is the whole prompt.
    """

    prompt: tuple[str, ...] = ()
    answer: tuple[str, ...] = ()
    text_is_message: bool = True

    def __post_init__(self) -> None:
        """Raise ConfigurationError if the same column is the prompt and the answer."""
        for path in self.prompt:
            refuse(
                path in self.answer,
                f"--prompt-column and --answer-column both name {path}: the prompt would be the answer; name another",
            )

    def apply(self, row: Any, *, needs_prompt: bool = True) -> dict[str, Any]:
        """Return the row with its prompt and its answer in the columns that this library reads.

        A null in a column of the prompt counts as a missing column.

        Args:
            row: A row of a file.
            needs_prompt: Whether a row without a prompt is an error.

        Raises:
            ConfigurationError: The row is not an object, lacks the prompt or the answer, or has another kind of value
                there.
        """
        if not isinstance(row, dict):
            raise ConfigurationError(f"a row must be an object, not {type(row).__name__}")
        mapped_row = {name: value for name, value in row.items() if not _is_null_prompt(name, value)}
        if self.answer:
            mapped_row["answer"] = _value(row, self.answer, "--answer-column")
            _refuse_speakers(
                NO_ANSWERS, row, self.answer, "--answer-column", "answer: name the message of gpt"
            )
        _refuse_infinite_answers(mapped_row)
        if self.prompt:
            prompt = _value(row, self.prompt, "--prompt-column")
            _refuse_speakers(
                NO_QUESTIONS,
                row,
                self.prompt,
                "--prompt-column",
                "question: name the column of the whole conversation (an answer at its end is left out), or the message of "
                "the user",
            )
            return self._with_prompt(mapped_row, prompt)
        refuse(needs_prompt and not _has_prompt(mapped_row), without_prompt(row))
        for name in ("messages", "prompt", "input"):
            _read_serialized(mapped_row, name)
        return mapped_row

    def _with_prompt(self, row: dict[str, Any], prompt: Any) -> dict[str, Any]:
        """Return the row with this prompt and no other."""
        other_columns = {name: value for name, value in row.items() if name not in PROMPT_COLUMNS}
        flag = f"--prompt-column {','.join(self.prompt)}"
        if isinstance(prompt, str):
            prompt = _messages_in_text(prompt, flag)
        if isinstance(prompt, str):
            refuse(not prompt.strip(), f"{flag}: the text there is empty")
            if not self.text_is_message:
                return other_columns | {"input": prompt}
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, list) and prompt and all(type(item) is int for item in prompt):
            return other_columns | {TOKENS: prompt}
        are_objects = isinstance(prompt, list) and all(isinstance(item, dict) for item in prompt)
        is_bare_number = isinstance(prompt, int | float) and not isinstance(prompt, bool)
        hint = "; if a number is the question, write it as a text, in double quotes" if is_bare_number else ""
        refuse(
            not prompt or not are_objects,
            f"{flag}: a prompt must be a text, a list of messages or a list of token ids, not {_shown(prompt)}{hint}",
        )
        if "from" in prompt[0] and "value" in prompt[0]:
            prompt = share_gpt_question(prompt)
            refuse(not prompt, f"{flag}: the only message is an answer, so there is no question")
        # The column `prompt` stays, because reward functions with TRL's signature get it as `prompts`
        return other_columns | {"messages": prompt, "prompt": prompt}


DEFAULT_COLUMNS = ColumnMap()  # the columns if no option names any


def _value(row: Mapping[str, Any], paths: tuple[str, ...], flag: str) -> Any:
    """Return the first value that the row has at one of these paths.

    Raises:
        ConfigurationError: The row has no value at any path. The message names the first missing part of the last path.
    """
    for path in paths:
        value = value_at(row, path)
        if not is_missing(value):
            return value
    path = paths[-1]
    value = value_at(row, path)
    if value is MISSING:
        state = f"is not in this row, which has {_names_at(row, path)}"
    else:
        state = f"is {json.dumps(value)} in this row"  # null or NaN
    raise ConfigurationError(f"{flag} {','.join(paths)}: {path} {state}")


def _refuse_speakers(
    speakers: Collection[str], row: Mapping[str, Any], paths: tuple[str, ...], flag: str, is_no: str
) -> None:
    """Raise ConfigurationError if a column is the text of a ShareGPT message from one of these speakers.

    Args:
        speakers: Values of `from`.
        row: The row.
        paths: Dotted paths. The first one at which the row has a value is used.
        flag: The option that names the paths.
        is_no: The end of the error message, after "so it is no": "answer: name the message of gpt", for example.
    """
    path = next(path for path in paths if not is_missing(value_at(row, path)))
    message_path, _, field = path.rpartition(".")
    speaker = value_at(row, f"{message_path}.from") if message_path and field == "value" else None
    refuse(speaker in speakers, f"{flag} {path}: this message is from {speaker!r}, so it is no {is_no}")


def _names_at(row: Mapping[str, Any], path: str) -> str:
    """Describe what the row has where the first missing part of a dotted path should be.

    For an object these are the names in it, for a list its length, and otherwise the beginning of the value.
    """
    value: Any = row
    read = ""
    for part in path.split("."):
        deeper = value_at(value, part)
        if deeper is MISSING:
            break
        value = deeper
        read = f"{read}.{part}".lstrip(".")
    if isinstance(value, str):
        value = parsed_text(value)
    place = f" in {read}" if read else ""
    if isinstance(value, Mapping):
        return f"{names_of(value)}{place}"
    if isinstance(value, list):
        return f"a list of {len(value)}{place}"
    return f"{_shown(value)}{place}"


def _shown(value: Any) -> str:
    return f"{value!r:.{SHOWN_CHARACTERS}}"


def _is_null_prompt(name: str, value: Any) -> bool:
    return name in PROMPT_COLUMNS and is_missing(value)


def _has_prompt(row: Mapping[str, Any]) -> bool:
    return any(name in row for name in PROMPT_COLUMNS)


def _messages_in_text(text: str, place: str) -> Any:
    """Return the messages if a text is the JSON of a list of messages, else the text itself.

    Args:
        text: The text.
        place: The column of the text, for error messages.

    Raises:
        ConfigurationError: The text is a list of messages as Python prints it, which cannot be read back.
    """
    stripped = text.strip()
    if stripped.startswith("{"):
        value = parsed_text(text)
        is_conversation = isinstance(value, dict) and (
            "messages" in value or {"role", "content"} <= value.keys()
        )
        refuse(
            is_conversation,
            f"{place}: the text is a JSON object with messages, {_shown(text)}: write the list of messages alone",
        )
        return text
    if not (SERIALIZED_BEGIN.match(stripped) and stripped.endswith(SERIALIZED_ENDS)):
        return text
    messages = parsed_text(text)
    if isinstance(messages, list):
        return messages
    raise ConfigurationError(
        f"{place}: the text is a list of messages as Python prints it, {_shown(text)}: write the list itself, or its "
        "JSON (json.dumps)"
    )


def _read_serialized(row: dict[str, Any], name: str) -> None:
    """If a column of the prompt is the JSON of a list of messages, replace it by these messages."""
    value = row.get(name)
    is_prompt = TOKENS not in row and (name == "messages" or "messages" not in row)
    if isinstance(value, str) and is_prompt:
        messages = _messages_in_text(value, name)
        if messages is not value:
            del row[name]
            row["messages"] = messages


def _refuse_infinite_answers(row: Mapping[str, Any]) -> None:
    """Raise ConfigurationError for an answer that is infinite or NaN, because no completion can state it."""
    for name in ("answer", "answers"):
        for number in _numbers(row.get(name)):
            refuse(
                not math.isfinite(number),
                f"{name} is {json.dumps(number)}, which is no finite number: correct the row, or drop it",
            )


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item)
