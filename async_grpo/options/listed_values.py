"""Write lists and tables of options as text, and read them: `a,b` and `name=value,name=value`, or JSON.

JSON is written only where it is necessary: if a name or value contains a comma, or a name contains an equals sign, as
file names may. Both forms can be read.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from async_grpo.errors import ConfigurationError

Scalar = str | int | float | bool | None


def list_text(values: Iterable[Any]) -> str:
    """Return the text of a list.

    >>> list_text(["a", "b"]), list_text(["a,b.py:f"])
    ('a,b', '["a,b.py:f"]')
    """
    texts = [str(value) for value in values]
    if any("," in text for text in texts):
        return json.dumps(texts, ensure_ascii=False)
    return ",".join(texts)


def table_text(table: Mapping[str, Any]) -> str:
    """Return the text of a table. Tables within it become names with dots.

    >>> table_text({"a": 0.5, "b": 2}), table_text({"held out": "a,b.jsonl"}), table_text({"judge": {"rpm": 60}})
    ('a=0.5,b=2', '{"held out": "a,b.jsonl"}', 'judge.rpm=60')
    """
    flat = _flat(table)
    if any("," in name or "=" in name or "," in str(value) for name, value in flat.items()):
        return json.dumps({name: _scalar(value) for name, value in flat.items()}, ensure_ascii=False)
    return ",".join(f"{name}={value}" for name, value in flat.items())


def _flat(table: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{below}": item for below, item in _flat(value).items()}
        else:
            flat[str(name)] = value
    return flat


def _scalar(value: Any) -> Scalar:
    return value if isinstance(value, str | int | float) else str(value)


def split_list(text: str) -> list[str]:
    """Return the parts of a list's text, without empty parts.

    >>> split_list("a, b,"), split_list('["a,b.py:f"]')
    (['a', 'b'], ['a,b.py:f'])
    """
    if text.lstrip().startswith("["):
        try:
            values = json.loads(text)
        except ValueError:
            values = None
        if isinstance(values, list) and all(isinstance(value, str) for value in values):
            return [value for value in values if value]
    parts = [part.strip() for part in text.split(",")]
    return [part for part in parts if part]


def split_table(text: str, flag: str) -> list[tuple[str, Scalar]]:
    """Return the pairs of a table's text; the value of a part without an equals sign is "".

    Args:
        text: The value of the option.
        flag: Name of the option, for messages.

    Raises:
        ConfigurationError: The text begins like JSON, but is not a table of texts, numbers and booleans.

    >>> split_table("a=1, b = c=d", "x"), split_table('{"a": "1,2", "b": 3}', "x")
    ([('a', '1'), ('b', 'c=d')], [('a', '1,2'), ('b', 3)])
    """
    if not text.lstrip().startswith("{"):
        pairs: list[tuple[str, Scalar]] = []
        for part in text.split(","):
            if part.strip():
                name, _, value = part.partition("=")
                pairs.append((name.strip(), value.strip()))
        return pairs
    try:
        table = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"--{flag} {text!r} is no JSON: {error}") from error
    for name, value in table.items():
        if not isinstance(value, Scalar):
            raise ConfigurationError(
                f"--{flag} {text!r}: {name} is {value!r}, and a text or a number is needed"
            )
    return [*table.items()]


def repeated_arguments(texts_by_name: Mapping[str, Sequence[str]]) -> list[str]:
    """Return one argument for each option that was given once or more, with a JSON list of its texts.

    >>> repeated_arguments({"say": ["higher, please", "3"], "other": []})
    ['--say=["higher, please", "3"]']
    """
    arguments = []
    for name, texts in texts_by_name.items():
        if texts:
            arguments.append(f"--{name.replace('_', '-')}={json.dumps(texts, ensure_ascii=False)}")
    return arguments
