"""Runs a row's tests in an interpreter that the tested code never enters.

Names that neither the tests nor Python define are looked up in the process of the tested code. Plain values arrive as
data, and other objects as a `Proxy`. So the code can neither end, patch nor read its tests, nor see the expected
values.
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
    """An object of the tested code, as the tests see it. Each access is a question to its process.

    The tested code cannot decide whether an object equals a plain value. Otherwise, an object that claims to equal
    everything would pass every test. If the object's class is derived from a number, text or collection, such as a
    named tuple, its plain value `_value` is compared. An immutable value is sent only once, so that `1 < x < 3` cannot
    see two values. Operators on other objects may return objects, and may compare two objects of the tested code.
    """

    __slots__ = ("_ask", "_number", "_value")

    def __init__(self, ask: Callable[..., Any], number: int) -> None:
        object.__setattr__(self, "_ask", ask)  # (operation, *arguments, **keywords) -> the answer
        object.__setattr__(self, "_number", number)  # number of the object in the other process
        object.__setattr__(self, "_value", self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            # Python itself looks these names up, and the tested code must not influence the result
            raise AttributeError(name)
        return self._ask("getattr", self, name)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, Proxy) and self._ask("isinstance", instance, self) is True

    def __hash__(self) -> int:
        return hash(self._number)


def _question(operation: str) -> Any:
    return lambda self, *args, **kwargs: self._ask(operation, self, *args, **kwargs)


def _operator(name: str, *, gives_object: bool, reflected: bool = False) -> Any:
    """Return a method of `Proxy` that implements an operator.

    Args:
        name: Name of the operator's function in the module `operator`.
        gives_object: Whether the operator returns an object instead of a truth value.
        reflected: Whether the proxy is the right operand.
    """

    def apply(self: Proxy, *other_operands: Any) -> Any:
        operands = (*other_operands, self) if reflected else (self, *other_operands)
        if not any(isinstance(operand, Proxy) for operand in other_operands):
            value = self._value
            if isinstance(value, Proxy | list | dict | set):  # not known yet, or it may have changed
                value = self._ask("plain", self)
                object.__setattr__(self, "_value", value)
            if not isinstance(value, Proxy):
                plain_operands = [value if operand is self else operand for operand in operands]
                return getattr(operator, name)(*plain_operands)
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
    """The built-in names of the tests: those of Python, which the tested code cannot replace, and that code's names."""

    def __init__(self, channel: RpcChannel, tree: ast.Module) -> None:
        super().__init__(vars(builtins))
        self.module = Proxy(self.ask, 0)
        self._channel = channel
        # Modules that the tests may use without an import, such as `math` in `math.isclose(...)`
        owners = [node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        owner_names = {owner.id for owner in owners if isinstance(owner, ast.Name)}
        self._modules = owner_names & sys.stdlib_module_names
        self.has_used_solution = False  # whether the tests have used a name of the tested code
        self.has_missing_name = False  # whether the tests have used a name that nobody defines
        # Kept here, because the tests may catch the exception
        self.failure: WireError | Unsendable | None = None
        self.error: Exception | None = None  # the last exception that the tested code raised

    def __missing__(self, name: str) -> Any:
        if name in self._modules:
            return self.setdefault(name, import_module(name))
        self.has_used_solution = True
        try:
            return self.setdefault(name, self.ask("getattr", self.module, name))
        except AttributeError:
            # Note it, because tests that expect an exception could pass through this NameError
            self.has_missing_name = True
            raise KeyError(name) from None

    def ask(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        """Ask the tested code's process to perform an operation (see `fork_server._answer`), and return the result.

        If the tested code changes a list, dict or set among `args`, it is changed here, too.

        Raises:
            Exception: The tested code has raised an exception, which is converted to the nearest built-in class.
            Unsendable: An argument cannot be sent.
            WireError: The process has ended, or has sent something that is not an answer.
        """
        try:
            arguments = [encode(value, _reference_to) for value in args]
            keywords = {name: encode(value, _reference_to) for name, value in kwargs.items()}
            self._channel.send([operation, arguments, keywords])
            answer = self._channel.receive()
            match answer:
                case ["value", value, dict(changed)]:
                    for position, data in changed.items():
                        _overwrite(args, position, decode(data, self._object))
                    return decode(value, self._object)
                case ["raised", list(names), str(message)]:
                    error = _exception(names, message)
                    self.error = error
                case _:
                    raise WireError(f"the tested process sent something else than an answer: {answer!r:.100}")
        except (WireError, Unsendable) as failure:
            self.failure = self.failure or failure
            raise
        raise error

    def _object(self, number: Any) -> Proxy:
        # If this is not a number, `int` raises an error, which `decode` converts to a WireError
        return Proxy(self.ask, int(number))


def run(tests: str, channel: RpcChannel) -> bool | str:
    """Run the tests and return whether they pass. If the tests are invalid, return the reason as text."""
    try:
        tree = ast.parse(tests)
        code = compile(tree, "<tests>", "exec")
    except (SyntaxError, ValueError, RecursionError) as error:
        return str(error)
    solution = Solution(channel, tree)
    has_passed = False
    try:
        # Raises if the tested code could not be loaded
        solution.ask("bool", solution.module)
        exec(code, {"__builtins__": solution, "__name__": "tests"})
        if not solution.has_used_solution:
            return "the tests use nothing that the tested code could define"
        has_passed = not solution.has_missing_name
    except ImportError as error:
        if error is not solution.error:
            return str(error)
    except BaseException:  # an assertion, or any error of the tests that a wrong answer causes
        pass
    if isinstance(solution.failure, Unsendable):
        return str(solution.failure)
    return has_passed and solution.failure is None


def _reference_to(value: Any) -> int | str:
    """Return the number of the other process's object, or the name of a built-in object.

    Raises:
        Unsendable: The value is neither.
    """
    if isinstance(value, Proxy):
        return value._number
    name = getattr(value, "__name__", None)
    if isinstance(name, str) and getattr(builtins, name, None) is value:
        return name
    raise Unsendable(f"a {type(value).__name__} cannot be handed to the tested code, only plain values can")


def _overwrite(args: tuple[Any, ...], position: str, new_value: Any) -> None:
    """Replace the content of a mutable argument, or raise WireError if its type is not that of the new value."""
    is_argument = position.isdigit() and int(position) < len(args)
    value: Any = args[int(position)] if is_argument else None
    kinds = (list, bytearray, dict, set)
    if not any(isinstance(value, kind) and isinstance(new_value, kind) for kind in kinds):
        raise WireError(
            f"argument {position} cannot get the content of a {type(new_value).__name__}: its type differs"
        )
    value.clear()
    fill = getattr(value, "extend", None) or value.update
    fill(new_value)


def _exception(names: list[Any], message: str) -> Exception:
    """Return an exception of the first built-in class in `names`, the class names of the original exception."""
    for name in names:
        kind = getattr(builtins, name, None) if isinstance(name, str) else None
        if isinstance(kind, type) and issubclass(kind, Exception):
            # Some exception classes need more arguments. Then the next class is tried.
            with contextlib.suppress(TypeError):
                return kind(message)
    return Exception(message)
