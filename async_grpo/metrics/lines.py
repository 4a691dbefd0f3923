"""Read the lines of a run's files and check their form, so that callers can rely on it even if a stranger wrote them.

Invalid lines are skipped, and so are invalid values in a valid line.
"""

from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from async_grpo.metrics.tail import last_records, spread_records
from async_grpo.options.fields import is_number, refuse
from async_grpo.processes.untrusted_files import is_text

LARGEST_COUNT = 1 << 53  # largest accepted count; a float cannot represent all larger integers
# Largest accepted number. Sums, squares and products of a few such numbers are still finite
LARGEST_NUMBER = 1e30
LONGEST_S = 1e9  # longest duration in seconds that is shown
LATEST_S = 1e11  # latest accepted Unix time, in the year 5138; much later times cannot be converted to dates
MAX_NAME_CHARACTERS = 200
# Keys of a line whose values `_checked` checks one by one
OTHER_KINDS = ("step", "file", "alarms", "verifiers", "staleness_tokens")
Line = dict[str, Any]


def metrics_lines(path: Path, count: int) -> list[Line]:
    """Return at most `count` last valid lines of a file of metrics or evaluations. Each has an integer `step`."""
    return list(_checked(last_records(path, count)))


def spread_metrics(path: Path, since: int, count: int) -> Iterator[tuple[Line, int]]:
    """Yield (line, position of its end in bytes) for each line that `spread_records` chooses, unless it is invalid."""
    for record, end in spread_records(path, since, count):
        for line in _checked([record]):
            yield line, end


def span_lines(records: Iterable[Line]) -> list[Line]:
    """Return the records that are valid spans of a timeline, with lane, activity, begin, end and step."""
    spans = []
    for record in records:
        names = record.get("lane"), record.get("what")
        has_times = _is_time(record.get("begin")) and _is_time(record.get("end"))
        if all(map(_is_name, names)) and has_times and is_count(record.get("step")):
            spans.append(record)
    return spans


def sample_lines(records: Iterable[Line]) -> list[Line]:
    """Return the records that are valid samples, with step, prompt and completion."""
    return [
        record
        for record in records
        if is_count(record.get("step"))
        and isinstance(record.get("input"), str)
        and isinstance(record.get("completion"), str)
    ]


def is_count(value: Any) -> bool:
    """Return whether a value is an integer from 0 to LARGEST_COUNT."""
    return type(value) is int and 0 <= value <= LARGEST_COUNT


def duration(seconds: float) -> timedelta:
    """Return a duration to show, rounded to seconds and limited to the range from 0 to LONGEST_S (30 years)."""
    return timedelta(seconds=round(min(max(0.0, seconds), LONGEST_S)))


def whole_option(options: Line, name: str) -> int:
    """Return an option of a run that must be a positive integer, or raise ConfigurationError."""
    value = options.get(name)
    refuse(
        not is_count(value) or value == 0,
        f"the run's parameters say {name} = {value!r:.50}, which is not a positive integer",
    )
    assert isinstance(value, int)
    return value


def _checked(records: Iterable[Line]) -> Iterator[Line]:
    for record in records:
        if not is_count(record.get("step")):
            continue
        line = _numbers({key: value for key, value in record.items() if key not in OTHER_KINDS})
        line["step"] = record["step"]
        if _is_name(record.get("file")):
            line["file"] = record["file"]
        alarms = record.get("alarms")
        if isinstance(alarms, list):
            line["alarms"] = [alarm for alarm in alarms if is_text(alarm)]
        verifiers = record.get("verifiers")
        if isinstance(verifiers, dict):
            tables = {name: stats for name, stats in verifiers.items() if isinstance(stats, dict)}
            line["verifiers"] = {
                name: _flat_numbers(stats) for name, stats in tables.items() if is_text(name)
            }
        ages = record.get("staleness_tokens")
        if isinstance(ages, dict):
            line["staleness_tokens"] = _flat_numbers(ages)
        yield line


def _numbers(value: Line) -> Line:
    """Return the numbers of a JSON object and its nested objects. None is kept, because runs write None for NaN.

    Numbers above LARGEST_NUMBER are dropped. No run writes them, and their mean could be infinite.
    """
    numbers: Line = {}
    for key, item in value.items():
        if not is_text(key):
            continue
        if isinstance(item, dict):
            numbers[key] = _numbers(item)
        elif item is None or (is_number(item) and abs(item) <= LARGEST_NUMBER):
            numbers[key] = item
    return numbers


def _flat_numbers(value: Line) -> Line:
    return {name: number for name, number in _numbers(value).items() if is_number(number)}


def _is_time(value: Any) -> bool:
    return is_number(value) and 0 <= value <= LATEST_S


def _is_name(value: Any) -> bool:
    return is_text(value) and len(value) <= MAX_NAME_CHARACTERS
