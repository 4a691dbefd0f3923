"""Values as data: how the process of the tested code and the process of its tests talk.

Plain values travel as JSON and arrive as what they were; any other object stays and travels as a number. Decoding
builds nothing but the values of one table, whatever the bytes say: they may come from hostile code.
"""

import json
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import date, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

MAX_MESSAGE_BYTES = 32 * 2**20
_JSON_INT_BITS = 64  # longer ones travel in hexadecimal: Python limits the digits of decimal text

# Type -> the parts that it travels as, and what builds it from them again.
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
    defaultdict: (dict.items, lambda *pairs: dict(pairs)),  # its default is a function, which does not travel
    Fraction: (lambda value: (value.numerator, value.denominator), Fraction),
    Decimal: (lambda value: (str(value),), Decimal),
    date: (lambda value: (value.year, value.month, value.day), date),
    timedelta: (lambda value: (value.days, value.seconds, value.microseconds), timedelta),
}
_BY_NAME = {kind.__name__: build for kind, (_, build) in _DATA.items()}


class WireError(Exception):
    """The other side has ended, or sent something that is no message."""


class Unsendable(TypeError):
    """A value that neither is data nor belongs to the other side."""


def encode(value: Any, refer: Callable[[Any], int | str]) -> Any:
    """The value as JSON can hold it; `refer` gives the number of an object that is no data.

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
    """The value again; `resolve` gives what stands for an object. WireError for anything malformed.

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
        raise WireError(f"no value: {error!r}") from error


class RpcChannel:
    """Messages over a descriptor, each a line of JSON. Both methods raise WireError, also at its end."""

    def __init__(self, descriptor: int) -> None:
        self._reader = open(descriptor, "rb", closefd=False)
        self._writer = open(descriptor, "wb", closefd=False)

    def send(self, message: Any) -> None:
        line = json.dumps(message).encode() + b"\n"
        if len(line) > MAX_MESSAGE_BYTES:
            raise WireError(f"{len(line)} bytes are more than {MAX_MESSAGE_BYTES}")
        try:
            self._writer.write(line)
            self._writer.flush()
        except OSError as error:
            raise WireError(str(error)) from error

    def receive(self) -> Any:
        try:
            line = self._reader.readline(MAX_MESSAGE_BYTES + 1)
            return json.loads(line if line.endswith(b"\n") else b"")  # it ended, or the line has no end
        except (OSError, ValueError, RecursionError) as error:
            raise WireError(f"no message: {error}") from error
