"""Runs a row's tests, in an interpreter that the tested code never enters.

What they name and neither they nor Python define is asked of the code's process: plain values arrive as data, other
objects as a `Proxy`. So code can neither end, patch nor read its examination, and never sees the values demanded.
"""

import ast
import builtins
import contextlib
import operator
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from async_grpo.rewards.sandbox.rpc import RpcChannel, Unsendable, WireError, decode, encode


class Proxy:
    """An object of the tested code, as the tests see it: each attribute, call or item is a question to its process.

    No method of the tested code decides what it equals among plain values, else one that pleases every test would pass.
    A kind of number, text or collection, a named tuple say, is compared by its `_value`, sent as data once: `1 < x < 3`
    must not see two. Operators on other objects may give an object, and compare two of them.
    """

    __slots__ = ("_ask", "_number", "_value")

    def __init__(self, ask: Callable[..., Any], number: int) -> None:
        object.__setattr__(self, "_ask", ask)  # (operation, *arguments, **keywords) -> the answer
        object.__setattr__(self, "_number", number)  # the other process's name for it
        object.__setattr__(self, "_value", self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python looks for these by itself, and shall look here
            raise AttributeError(name)
        return self._ask("getattr", self, name)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, Proxy) and self._ask("isinstance", instance, self) is True

    def __hash__(self) -> int:
        return hash(self._number)


def _question(operation: str) -> Any:
    return lambda self, *args, **kwargs: self._ask(operation, self, *args, **kwargs)


def _operator(name: str, *, gives_object: bool, reflected: bool = False) -> Any:
    def apply(self: Proxy, *others: Any) -> Any:
        operands = (*others, self) if reflected else (self, *others)
        if not any(isinstance(other, Proxy) for other in others):
            value = self._value
            if isinstance(value, Proxy | list | dict | set):  # not asked yet, or it may have changed
                value = self._ask("plain", self)
                object.__setattr__(self, "_value", value)
            if not isinstance(value, Proxy):
                return getattr(operator, name)(*(value if one is self else one for one in operands))
            if not gives_object:
                return NotImplemented
        result = self._ask(name, *operands)
        if not gives_object:
            return result is True
        if not isinstance(result, Proxy):
            raise TypeError(f"{name} of an object gives an object here, not a {type(result).__name__}")
        return result

    return apply


for _name in "call setattr delattr iter next len str repr bool getitem setitem delitem".split():
    setattr(Proxy, f"__{_name}__", _question(_name))
for _name in "eq ne lt le gt ge".split():
    setattr(Proxy, f"__{_name}__", _operator(_name, gives_object=False))
for _name in "neg pos abs invert add sub mul truediv floordiv mod pow matmul and_ or_ xor".split():
    setattr(Proxy, f"__{_name.strip('_')}__", _operator(_name, gives_object=True))
    setattr(Proxy, f"__r{_name.strip('_')}__", _operator(_name, gives_object=True, reflected=True))


class Solution(dict[str, Any]):
    """The built-in names of the tests: Python's, which the tested code cannot replace, and what that code defines."""

    def __init__(self, channel: RpcChannel, tree: ast.Module) -> None:
        super().__init__(vars(builtins))
        self._channel, self.module = channel, Proxy(self.ask, 0)
        owners = [node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        # Modules that the tests may use without an import: `math` in `math.isclose(...)`
        self._modules = {node.id for node in owners if isinstance(node, ast.Name)} & sys.stdlib_module_names
        self.asked = self.missing = False
        self.failure: WireError | Unsendable | None = None  # it outlives every `except` in the tests
        self.error: Exception | None = None  # the last that the tested code raised

    def __missing__(self, name: str) -> Any:
        if name in self._modules:
            return self.setdefault(name, import_module(name))
        self.asked = True
        try:
            return self.setdefault(name, self.ask("getattr", self.module, name))
        except AttributeError:
            self.missing = True  # tests that expect an exception must not take the NameError for it
            raise KeyError(name) from None

    def ask(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        """The answer; a list, dict or set among `args` becomes what the tested code made of it.

        Raises the built-in exception next to the code's own, or WireError: it is gone, or talks nonsense.
        """
        try:
            keywords = {name: encode(value, _reference_to) for name, value in kwargs.items()}
            self._channel.send([operation, [encode(value, _reference_to) for value in args], keywords])
            answer = self._channel.receive()
            match answer:
                case ["value", value, dict(changed)]:
                    for position, data in changed.items():
                        _overwrite(args, position, decode(data, self._object))
                    return decode(value, self._object)
                case ["raised", list(names), str(message)]:
                    self.error = error = _exception(names, message)
                case _:
                    raise WireError(f"no answer: {answer!r:.100}")
        except (WireError, Unsendable) as failure:
            self.failure = self.failure or failure
            raise
        raise error

    def _object(self, number: Any) -> Proxy:
        return Proxy(self.ask, int(number))  # what is no number becomes a WireError


def run(tests: str, channel: RpcChannel) -> bool | str:
    """Whether the tests pass; or why they cannot be run, which is their own fault."""
    try:
        tree = ast.parse(tests)
        code = compile(tree, "<tests>", "exec")
    except (SyntaxError, ValueError, RecursionError) as error:
        return str(error)
    solution = Solution(channel, tree)
    passed = False
    try:
        solution.ask("bool", solution.module)  # raises if the tested code could not even be loaded
        exec(code, {"__builtins__": solution, "__name__": "tests"})
        if not solution.asked:
            return "the tests use nothing that the tested code could define"
        passed = not solution.missing
    except ImportError as error:
        if error is not solution.error:
            return str(error)
    except BaseException:  # an assertion, or what the tests made of a wrong answer
        pass
    if isinstance(solution.failure, Unsendable):
        return str(solution.failure)
    return passed and solution.failure is None


def _reference_to(value: Any) -> int | str:
    """An object's number in the other process, or a built-in's name."""
    if isinstance(value, Proxy):
        return value._number
    name = getattr(value, "__name__", None)
    if isinstance(name, str) and getattr(builtins, name, None) is value:
        return name
    raise Unsendable(f"a {type(value).__name__} cannot be handed to the tested code, only plain values can")


def _overwrite(args: tuple[Any, ...], position: str, now: Any) -> None:
    value: Any = args[int(position)] if position.isdigit() and int(position) < len(args) else None
    kinds = (list, bytearray, dict, set)
    if not any(isinstance(value, kind) and isinstance(now, kind) for kind in kinds):
        raise WireError(f"argument {position} cannot have become a {type(now).__name__}")
    value.clear()
    fill = getattr(value, "extend", None) or value.update
    fill(now)


def _exception(names: list[Any], message: str) -> Exception:
    for name in names:
        kind = getattr(builtins, name, None) if isinstance(name, str) else None
        if isinstance(kind, type) and issubclass(kind, Exception):
            with contextlib.suppress(TypeError):  # a few want more arguments: then the next
                return kind(message)
    return Exception(message)
