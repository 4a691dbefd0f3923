"""Messages between the process of the tested code and the process of its tests.

Plain values are sent as JSON and decoded to equal values. Any other object stays in its process, and a number is sent
for it. The bytes may come from hostile code, so decoding can only make values of the types in `_DATA`.
"""

import json
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from typing import Any

MAX_MESSAGE_BYTES = 32 * 2**20
# Longer integers are sent in hexadecimal, because Python limits the digits of decimal text
_JSON_INT_BITS = 64

# For each type, a function that splits a value into parts, and a function that makes a value of them
_DATA: dict[type, tuple[Callable[[Any], Any], Callable[..., Any]]] = {
    int: (lambda value: (hex(value),), lambda text: int(text, 16)),
    bytes: (lambda value: (value.decode("latin-1"),), lambda text: text.encode("latin-1")),
    bytearray: (lambda value: (value.decode("latin-1"),), lambda text: bytearray(text, "latin-1")),
    complex: (lambda value: (value.real, value.imag), complex),
    range: (lambda value: (value.start, value.stop, value.step), range),
    list: (tuple, lambda *parts: list(parts)),
    tuple: (tuple, lambda *parts: parts),
    set: (tuple, lambda *parts: set(parts)),
    frozenset: (tuple, lambda *parts: frozenset(parts)),
    dict: (dict.items, lambda *pairs: dict(pairs)),
    deque: (tuple, lambda *parts: deque(parts)),
    Counter: (lambda value: (dict(value),), Counter),
    OrderedDict: (dict.items, lambda *pairs: OrderedDict(pairs)),
    defaultdict: (dict.items, lambda *pairs: dict(pairs)),  # its default factory cannot be sent
    Fraction: (lambda value: (value.numerator, value.denominator), Fraction),
    Decimal: (lambda value: (str(value),), Decimal),
    type({}.keys()): (tuple, lambda *keys: dict.fromkeys(keys).keys()),
    type({}.values()): (tuple, lambda *values: dict(enumerate(values)).values()),
    type({}.items()): (tuple, lambda *pairs: dict(pairs).items()),
    slice: (lambda value: (value.start, value.stop, value.step), slice),
    datetime: (lambda value: (value.isoformat(),), datetime.fromisoformat),
    time: (lambda value: (value.isoformat(),), time.fromisoformat),
    timezone: (lambda value: (value.utcoffset(None),), timezone),
    date: (lambda value: (value.year, value.month, value.day), date),
    timedelta: (lambda value: (value.days, value.seconds, value.microseconds), timedelta),
}
_BY_NAME = {kind.__name__: build for kind, (_, build) in _DATA.items()}


class WireError(Exception):
    """The other process has ended, or has sent something that is not a valid message."""


class Unsendable(TypeError):
    """The value is neither plain data nor an object of the other process, so it cannot be sent."""


def encode(value: Any, refer: Callable[[Any], int | str]) -> Any:
    """Convert a value to JSON data. For an object that is not plain data, `refer` returns the number to send.

    >>> encode([1, (2.5, None)], refer=id)
    ['list', 1, ['tuple', 2.5, None]]
    """
    kind = type(value)
    if value is None or kind in (bool, str, float) or (kind is int and value.bit_length() <= _JSON_INT_BITS):
        return value
    if kind not in _DATA:
        return ["object", refer(value)]
    parts, _ = _DATA[kind]
    return [kind.__name__, *(encode(part, refer) for part in parts(value))]


def decode(data: Any, resolve: Callable[[Any], Any]) -> Any:
    """Convert data from `encode` back to the value. `resolve` returns the object with a number.

    Raises:
        WireError: The data is malformed.

    >>> decode(['list', 1, ['tuple', 2.5, None]], resolve=hex)
    [1, (2.5, None)]
    """
    if not isinstance(data, list):
        return data
    try:
        tag, *parts = data
        if tag == "object":
            return resolve(parts[0])
        return _BY_NAME[tag](*(decode(part, resolve) for part in parts))
    except Exception as error:  # hostile bytes can break any constructor
        raise WireError(f"this is not a valid value: {error!r}") from error


class RpcChannel:
    """Sends and receives messages over a file descriptor. Each message is a line of JSON."""

    def __init__(self, descriptor: int) -> None:
        self._reader = open(descriptor, "rb", closefd=False)
        self._writer = open(descriptor, "wb", closefd=False)

    def send(self, message: Any) -> None:
        """Send a message.

        Raises:
            WireError: The message is too large, or the other process has ended.
        """
        line = json.dumps(message).encode() + b"\n"
        if len(line) > MAX_MESSAGE_BYTES:
            raise WireError(f"{len(line)} bytes are more than {MAX_MESSAGE_BYTES}")
        try:
            self._writer.write(line)
            self._writer.flush()
        except OSError as error:
            raise WireError(str(error)) from error

    def receive(self) -> Any:
        """Return the next message.

        Raises:
            WireError: The other process has ended, or has sent something that is not a message.
        """
        try:
            line = self._reader.readline(MAX_MESSAGE_BYTES + 1)
            is_complete = line.endswith(b"\n")
            return json.loads(line if is_complete else b"")
        except (OSError, ValueError, RecursionError) as error:
            raise WireError(f"this is not a valid message: {error}") from error
