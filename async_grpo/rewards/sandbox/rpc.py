"""Values as data: how the witness (which runs the tested code) and the examiner (which runs the tests) talk.

Plain values travel as JSON and arrive as what they were. Any other object stays where it is and travels as a number,
by which the other side may ask for it. Decoding builds nothing but plain values, whatever the bytes say: they may
come from hostile code.
"""

import json
import os
import struct
from collections.abc import Callable
from importlib import import_module
from typing import Any

MAX_MESSAGE_BYTES = 32 * 2**20
_HEADER = struct.Struct("!I")
_JSON_INT_BITS = 64  # longer ones travel in hexadecimal: Python limits the digits of decimal text

# Values of the standard library: type -> the arguments that build it again.
_BUILT: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "builtins.range": lambda value: (value.start, value.stop, value.step),
    "builtins.complex": lambda value: (value.real, value.imag),
    "fractions.Fraction": lambda value: (value.numerator, value.denominator),
    "decimal.Decimal": lambda value: (str(value),),
    "datetime.date": lambda value: (value.year, value.month, value.day),
    "datetime.timedelta": lambda value: (value.days, value.seconds, value.microseconds),
    "collections.deque": lambda value: (list(value),),
    "collections.Counter": lambda value: (dict(value),),
    "collections.OrderedDict": lambda value: (dict(value),),
}
_COLLECTIONS: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_PLAIN_DICTS = {"collections.defaultdict"}


class WireError(Exception):
    """The other side has ended, or sent something that is no message."""


class Unsendable(TypeError):
    """A value that neither is data nor belongs to the other side."""


def encode(value: Any, refer: Callable[[Any], int]) -> Any:
    """The value as JSON can hold it; `refer` gives the number of an object that is no data.

    >>> encode([1, (2.5, None)], refer=id)
    ['list', 1, ['tuple', 2.5, None]]
    """
    kind = type(value)
    if value is None or kind in (bool, str, float):
        return value
    if kind is int:
        return value if value.bit_length() <= _JSON_INT_BITS else ["int", hex(value)]
    if kind.__name__ in _COLLECTIONS and kind is _COLLECTIONS[kind.__name__]:
        return [kind.__name__, *(encode(item, refer) for item in value)]
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind is dict or name in _PLAIN_DICTS:
        return ["dict", *(encode(part, refer) for pair in value.items() for part in pair)]
    if kind in (bytes, bytearray):
        return [kind.__name__, value.decode("latin-1")]
    if name in _BUILT:
        return [name, *(encode(part, refer) for part in _BUILT[name](value))]
    return ["object", refer(value)]


def decode(data: Any, resolve: Callable[[int], Any]) -> Any:
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
        if tag == "int":
            return int(parts[0], 16)
        if tag in ("bytes", "bytearray"):
            return (bytes if tag == "bytes" else bytearray)(parts[0], "latin-1")
        values = [decode(part, resolve) for part in parts]
        if tag in _COLLECTIONS:
            return _COLLECTIONS[tag](values)
        if tag == "dict":
            return dict(zip(values[::2], values[1::2], strict=True))
        if tag in _BUILT:
            module, _, name = tag.rpartition(".")
            return getattr(import_module(module), name)(*values)
        raise WireError(f"unknown kind {tag!r}")
    except WireError:
        raise
    except Exception as error:  # hostile bytes can break any constructor
        raise WireError(f"no value: {error!r}") from error


class Channel:
    """Messages over a descriptor: four bytes of length, then JSON."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def send(self, message: Any) -> None:
        """Raises WireError if the other side is gone or the message is too long."""
        body = json.dumps(message).encode()
        if len(body) > MAX_MESSAGE_BYTES:
            raise WireError(f"{len(body)} bytes are more than {MAX_MESSAGE_BYTES}")
        data = memoryview(_HEADER.pack(len(body)) + body)
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except OSError as error:
                raise WireError(str(error)) from error

    def receive(self) -> Any:
        """Raises WireError at the end of the channel and for what is no message."""
        (length,) = _HEADER.unpack(self._read(_HEADER.size))
        if length > MAX_MESSAGE_BYTES:
            raise WireError(f"{length} bytes are more than {MAX_MESSAGE_BYTES}")
        try:
            return json.loads(self._read(length))
        except (ValueError, RecursionError) as error:
            raise WireError(f"no JSON: {error}") from error

    def _read(self, num_bytes: int) -> bytes:
        received = bytearray()
        while len(received) < num_bytes:
            try:
                part = os.read(self._descriptor, min(num_bytes - len(received), 2**20))
            except OSError as error:  # it ended with a question unread
                raise WireError(str(error)) from error
            if not part:
                raise WireError("the other side has ended")
            received += part
        return bytes(received)
