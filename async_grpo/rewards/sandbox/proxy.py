"""An object of the tested code, as the tests see it: each attribute, call or item is a question to the witness.

No method of the tested code decides what it equals among plain values, and none turns it into one in arithmetic: else
a class with an `__eq__` (or a `__sub__`) that pleases everybody would pass every test. Only if it is a kind of number,
text or collection, a named tuple say, it is compared by that value, sent as data (and once: `1 < x < 3` must not see
two of them). Operators on other objects may give an object, and compare two of them.
"""

import operator
from typing import Any, Protocol


class Asks(Protocol):
    def ask(self, operation: str, *args: Any, **kwargs: Any) -> Any: ...


class Remote:
    """See the module. `_number` is the witness's name for the object, `_value` what it is a kind of, once asked."""

    __slots__ = ("_number", "_value", "_witness")

    def __init__(self, witness: Asks, number: int) -> None:
        object.__setattr__(self, "_witness", witness)
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_value", self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._witness.ask("call", self, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python looks for these by itself, and shall look here
            raise AttributeError(name)
        return self._witness.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._witness.ask("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._witness.ask("delattr", self, name)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, Remote) and self._witness.ask("isinstance", instance, self) is True

    def __hash__(self) -> int:
        return hash(self._number)


def _question(operation: str) -> Any:
    return lambda self, *args: self._witness.ask(operation, self, *args)


def _binary(operation: str, *, gives_object: bool, reflected: bool = False) -> Any:
    compute = getattr(operator, operation)

    def apply(self: Remote, other: Any) -> Any:
        operands = (other, self) if reflected else (self, other)
        if not isinstance(other, Remote):
            value = _plain(self)
            if not isinstance(value, Remote):
                return compute(*(value if operand is self else operand for operand in operands))
            if not gives_object:
                return NotImplemented
        result = self._witness.ask(operation, *operands)
        return _object(operation, result) if gives_object else result is True

    return apply


def _plain(remote: Remote) -> Any:
    value = remote._value
    if isinstance(value, Remote | list | dict | set):  # not asked yet, or it may have changed
        value = remote._witness.ask("plain", remote)
        object.__setattr__(remote, "_value", value)
    return value


def _unary(operation: str) -> Any:
    return lambda self: _object(operation, self._witness.ask(operation, self))


def _object(operation: str, result: Any) -> Remote:
    if not isinstance(result, Remote):
        raise TypeError(f"{operation} of an object gives an object here, not a {type(result).__name__}")
    return result


_UNARY = "neg pos abs invert".split()
# As the module `operator` names them.
_ARITHMETIC = "add sub mul truediv floordiv mod pow matmul and_ or_ xor".split()

for _name in "iter next len str repr bool getitem setitem delitem".split():
    setattr(Remote, f"__{_name}__", _question(_name))
for _name in "eq ne lt le gt ge".split():
    setattr(Remote, f"__{_name}__", _binary(_name, gives_object=False))
for _name in _UNARY:
    setattr(Remote, f"__{_name}__", _unary(_name))
for _name in _ARITHMETIC:
    setattr(Remote, f"__{_name.strip('_')}__", _binary(_name, gives_object=True))
    setattr(Remote, f"__r{_name.strip('_')}__", _binary(_name, gives_object=True, reflected=True))
