"""Runs the tested code and answers the tests' questions about it. Nothing it says is believed: it is data.

A question is [operation, [arguments], {keywords}], the operation one of Python's: of `operator`, else a built-in function.
The answer is ["value", value, {position: changed argument}] or ["raised", [names of the exception's classes], message].
Object 0 is the code's module.
"""

import builtins
import contextlib
import operator
import sys
from types import ModuleType
from typing import Any

from async_grpo.rewards.sandbox.rpc import Channel, decode, encode

MODULE_NAME = "solution"
_MUTABLE = (list, dict, set, bytearray)
_PLAIN = (int, float, complex, str, bytes, list, tuple, set, frozenset, dict)


def run(code: str, channel: Channel) -> None:
    """Execute the code as a module, then answer until the channel ends.

    If the code raises, sys.exit() included, so does every question.
    """
    module = sys.modules[MODULE_NAME] = ModuleType(MODULE_NAME)  # data classes look themselves up there
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
        self._objects: dict[int, Any] = {0: module}  # by id: this keeps them alive, and so their ids

    def to(self, operation: str, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        try:
            if self.failure is not None:
                raise self.failure
            return self._compute(operation, args, kwargs)
        except BaseException as error:  # whatever the tested code raises is an answer, too
            text = ""
            with contextlib.suppress(
                Exception
            ):  # an exception of the tested code, whose text may raise in turn
                text = str(error)[:1000]
            return ["raised", [kind.__name__ for kind in type(error).__mro__], text]

    def _compute(self, operation: str, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        values = [decode(data, self._resolve) for data in args]
        keywords = {name: decode(data, self._resolve) for name, data in kwargs.items()}
        compute = _plain if operation == "plain" else getattr(operator, operation, None)
        result = encode((compute or getattr(builtins, operation))(*values, **keywords), self._refer)
        changed = {}
        for position, (value, data) in enumerate(zip(values, args, strict=True)):
            if type(value) in _MUTABLE and (now := encode(value, self._refer)) != data:
                changed[str(position)] = now
        return ["value", result, changed]

    def _refer(self, value: Any) -> int:
        self._objects[id(value)] = value
        return id(value)

    def _resolve(self, reference: int | str) -> Any:
        return getattr(builtins, reference) if isinstance(reference, str) else self._objects[reference]


def _plain(value: Any) -> Any:
    """The value without its class, if that class only refines a plain one: of a named tuple the tuple."""
    kind = next((kind for kind in _PLAIN if isinstance(value, kind)), None)
    if kind is str:
        return str.__str__(value)  # the class of an enumeration has another idea of its text
    return value if kind is None else kind(value)
