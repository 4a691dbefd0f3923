"""An object of the tested code, as the tests see it: each attribute, call or item is a question to the other process.

No method of the tested code decides what it equals among plain values, and none turns it into one in arithmetic: else
a class with an `__eq__` (or a `__sub__`) that pleases every test would pass it. Only if it is a kind of number, text or
collection, a named tuple say, it is compared by that value, sent as data (and once: `1 < x < 3` must not see two of
them). Operators on other objects may give an object, and compare two of them.
"""

import operator
from collections.abc import Callable
from typing import Any

Ask = Callable[..., Any]  # (operation, *arguments, **keywords) -> the answer


class Proxy:
    """See the module. `_number` is the other process's name for the object, `_value` what it is a kind of, once asked."""

    __slots__ = ("_ask", "_number", "_value")

    def __init__(self, ask: Ask, number: int) -> None:
        object.__setattr__(self, "_ask", ask)
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_value", self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ask("call", self, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python looks for these by itself, and shall look here
            raise AttributeError(name)
        return self._ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._ask("delattr", self, name)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, Proxy) and self._ask("isinstance", instance, self) is True

    def __hash__(self) -> int:
        return hash(self._number)


def _question(operation: str) -> Any:
    return lambda self, *args: self._ask(operation, self, *args)


def _unary(operation: str) -> Any:
    return lambda self: _object(operation, self._ask(operation, self))


def _binary(operation: str, *, gives_object: bool, reflected: bool = False) -> Any:
    compute = getattr(operator, operation)

    def apply(self: Proxy, other: Any) -> Any:
        operands = (other, self) if reflected else (self, other)
        if not isinstance(other, Proxy):
            value = _plain(self)
            if not isinstance(value, Proxy):
                return compute(*(value if operand is self else operand for operand in operands))
            if not gives_object:
                return NotImplemented
        result = self._ask(operation, *operands)
        return _object(operation, result) if gives_object else result is True

    return apply


def _plain(proxy: Proxy) -> Any:
    value = proxy._value
    if isinstance(value, Proxy | list | dict | set):  # not asked yet, or it may have changed
        value = proxy._ask("plain", proxy)
        object.__setattr__(proxy, "_value", value)
    return value


def _object(operation: str, result: Any) -> Proxy:
    if not isinstance(result, Proxy):
        raise TypeError(f"{operation} of an object gives an object here, not a {type(result).__name__}")
    return result


for _name in "iter next len str repr bool getitem setitem delitem".split():
    setattr(Proxy, f"__{_name}__", _question(_name))
for _name in "neg pos abs invert".split():
    setattr(Proxy, f"__{_name}__", _unary(_name))
for _name in "eq ne lt le gt ge".split():
    setattr(Proxy, f"__{_name}__", _binary(_name, gives_object=False))
for (
    _name
) in "add sub mul truediv floordiv mod pow matmul and_ or_ xor".split():  # as the module `operator` has them
    setattr(Proxy, f"__{_name.strip('_')}__", _binary(_name, gives_object=True))
    setattr(Proxy, f"__r{_name.strip('_')}__", _binary(_name, gives_object=True, reflected=True))
