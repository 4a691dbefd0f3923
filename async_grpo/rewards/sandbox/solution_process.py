"""Runs the tested code and answers the tests' questions about it. Nothing it says is believed: it is data.

A question is [operation, [arguments], {keywords}]; the answer ["value", value, {position: changed argument}] or
["raised", [names of the exception's classes], message].
"""

import builtins
import operator
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from async_grpo.rewards.sandbox.rpc import Channel, decode, encode

MODULE_NAME = "solution"
_MUTABLE = (list, dict, set, bytearray)
_PLAIN: dict[type, Callable[[Any], Any]] = {  # how each gives itself, whatever a subclass overrides
    int: int.__int__, float: float.__float__, complex: complex.__complex__, str: str.__str__, bytes: bytes.__bytes__,
    list: lambda value: list(list.__iter__(value)), tuple: lambda value: tuple(tuple.__iter__(value)),
    set: lambda value: set(set.__iter__(value)), frozenset: lambda value: frozenset(frozenset.__iter__(value)),
    dict: dict.copy,
}  # fmt: skip
_OF_OPERATOR = """
eq ne lt le gt ge add sub mul truediv floordiv mod pow matmul and_ or_ xor neg pos abs invert getitem setitem delitem
""".split()
_BUILT_IN = "getattr setattr delattr iter next len str repr bool isinstance".split()


def run(code: str, channel: Channel) -> None:
    """Execute the code as a module, then answer until the channel ends.

    If the code raises, sys.exit() included, so does every question.
    """
    module = ModuleType(MODULE_NAME)
    sys.modules[MODULE_NAME] = module  # data classes look themselves up here
    answers = _Answers(module)
    try:
        exec(compile(code, f"<{MODULE_NAME}>", "exec"), module.__dict__)
    except BaseException as error:
        answers.failure = error
    while True:
        channel.send(answers.to(*channel.receive()))


class _Answers:
    def __init__(self, module: ModuleType) -> None:
        self.failure: BaseException | None = None
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}  # id -> number; the list keeps the objects alive, and so their ids
        self._operations: dict[str, Callable[..., Any]] = {
            **{name: getattr(builtins, name) for name in _BUILT_IN},
            **{name: getattr(operator, name) for name in _OF_OPERATOR},
            "call": lambda function, *args, **kwargs: function(*args, **kwargs),
            "global": lambda name: getattr(module, name),
            "plain": _plain,
        }

    def to(self, operation: str, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        try:
            if self.failure is not None:
                raise self.failure
            return self._compute(operation, args, kwargs)
        except BaseException as error:  # whatever the tested code raises is an answer, too
            return ["raised", [kind.__name__ for kind in type(error).__mro__], _text(error)]

    def _compute(self, operation: str, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        values = [decode(data, self._resolve) for data in args]
        keywords = {name: decode(data, self._resolve) for name, data in kwargs.items()}
        result = encode(self._operations[operation](*values, **keywords), self._refer)
        changed = {}
        for position, (value, data) in enumerate(zip(values, args, strict=True)):
            if type(value) in _MUTABLE and (now := encode(value, self._refer)) != data:
                changed[str(position)] = now
        return ["value", result, changed]

    def _refer(self, value: Any) -> int:
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)
        return number

    def _resolve(self, reference: int | str) -> Any:
        return getattr(builtins, reference) if isinstance(reference, str) else self._objects[reference]


def _plain(value: Any) -> Any:
    """The value without its class, if that class only refines a plain one: of a named tuple the tuple."""
    return next((plain(value) for base, plain in _PLAIN.items() if isinstance(value, base)), value)


def _text(error: BaseException) -> str:
    try:
        return str(error)[:1000]
    except Exception:  # an exception of the tested code, whose text may raise in turn
        return ""
