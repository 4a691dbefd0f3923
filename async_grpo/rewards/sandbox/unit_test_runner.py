"""Runs a row's tests against code that lives in another process.

The tests are executed here, by an interpreter that the tested code never enters. What they name and neither they nor
Python define is asked of the other process: plain values arrive as data, other objects as a `Proxy`. So code can neither
end, patch nor read its examination. To pass, it must send the values that the tests demand, which it never sees.
"""

import ast
import builtins
import sys
from collections.abc import Set
from importlib import import_module
from typing import Any

from async_grpo.rewards.sandbox.proxy import Proxy
from async_grpo.rewards.sandbox.rpc import Channel, Unsendable, WireError, decode, encode

PASSED, FAILED, LOST, UNUSABLE = "passed", "failed", "lost", "unusable"
_MUTABLE: dict[Any, Any] = {
    list: list.extend,
    bytearray: bytearray.extend,
    dict: dict.update,
    set: set.update,
}
_OF_MANY_ARGUMENTS = (UnicodeDecodeError, UnicodeEncodeError, UnicodeTranslateError, ExceptionGroup)


class RemoteError(Exception):
    """The tested code raised something that is no built-in exception."""


class Solution:
    """The tested code at the other end of the channel. Trouble with it outlives every `except` in the tests."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.failure: WireError | Unsendable | None = None
        self.error: Exception | None = None  # the last that the tested code raised

    def ask(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        """The answer; a list, dict or set among `args` becomes what the tested code made of it.

        Raises:
            Exception: what the tested code raised, as the built-in exception next to it.
            WireError: it is gone, or talks nonsense.
            Unsendable: an argument is no plain value.
        """
        try:
            keywords = {name: encode(value, _reference_to) for name, value in kwargs.items()}
            self._channel.send([operation, [encode(value, _reference_to) for value in args], keywords])
            answer = self._channel.receive()
            match answer:
                case ["value", value, dict(changed)]:
                    for position, data in changed.items():
                        _overwrite(args, position, decode(data, self._resolve))
                    return decode(value, self._resolve)
                case ["raised", list(names), str(message)]:
                    self.error = error = _exception(names)(message)
                case _:
                    raise WireError(f"no answer: {answer!r:.100}")
        except (WireError, Unsendable) as failure:
            self.failure = self.failure or failure
            raise
        raise error

    def _resolve(self, reference: Any) -> Proxy:
        if type(reference) is not int:
            raise WireError(f"no object: {reference!r:.100}")
        return Proxy(self.ask, reference)


class _Names(dict[str, Any]):
    """The built-in names of the tests: Python's, and behind them what the tested code defines.

    Python goes first: were `abs` or `math` taken from the tested code, it could make `abs(f(2) - 0.5) < 1e-6` true.
    """

    def __init__(self, solution: Solution, modules: Set[str]) -> None:
        super().__init__(vars(builtins))
        self._solution, self._modules = solution, modules
        self.asked = self.missing = False

    def __missing__(self, name: str) -> Any:
        if name in self._modules:
            return self.setdefault(name, import_module(name))
        self.asked = True
        try:
            return self.setdefault(name, self._solution.ask("global", name))
        except AttributeError:
            self.missing = True  # tests that expect an exception must not take the NameError for it
            raise KeyError(name) from None


def run(tests: str, channel: Channel) -> str:
    """PASSED, FAILED, LOST (the tested code ended in the middle), or UNUSABLE with the reason: the fault of the tests."""
    try:
        tree = ast.parse(tests)
        code = compile(tree, "<tests>", "exec")
    except (SyntaxError, ValueError, RecursionError) as error:
        return f"{UNUSABLE}: {error}"
    solution = Solution(channel)
    names = _Names(solution, _modules_of(tree))
    verdict = FAILED
    try:
        solution.ask("global", "__name__")  # raises if the tested code could not even be loaded
        exec(code, {"__builtins__": names, "__name__": "tests"})
        if not names.asked:
            return f"{UNUSABLE}: the tests use nothing that the tested code could define"
        verdict = FAILED if names.missing else PASSED
    except ImportError as error:
        if error is not solution.error:
            return f"{UNUSABLE}: {error}"
    except BaseException:  # an assertion, or what the tests made of a wrong answer
        verdict = FAILED
    if isinstance(solution.failure, Unsendable):
        return f"{UNUSABLE}: {solution.failure}"
    return verdict if solution.failure is None else LOST


def _modules_of(tree: ast.Module) -> set[str]:
    """Modules of the standard library that the tests may use without an import: `math` in `math.isclose(...)`.

    >>> _modules_of(ast.parse("assert math.isclose(string(n), 2)"))
    {'math'}
    """
    owners = (node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {owner.id for owner in owners if isinstance(owner, ast.Name)} & sys.stdlib_module_names


def _reference_to(value: Any) -> int | str:
    """What stands for an object on the way to the tested code: its number there, or the name of a built-in."""
    if isinstance(value, Proxy):
        return value._number
    name = getattr(value, "__name__", None)
    if isinstance(name, str) and getattr(builtins, name, None) is value:
        return name
    raise Unsendable(f"a {type(value).__name__} cannot be handed to the tested code, only plain values can")


def _overwrite(args: tuple[Any, ...], position: str, now: Any) -> None:
    value: Any = args[int(position)] if position.isdigit() and int(position) < len(args) else None
    for kind, fill in _MUTABLE.items():
        if isinstance(value, kind) and isinstance(now, kind):
            value.clear()
            fill(value, now)
            return
    raise WireError(f"argument {position} cannot have become a {type(now).__name__}")


def _exception(names: list[Any]) -> type[Exception]:
    for name in names:
        kind = getattr(builtins, name, None) if isinstance(name, str) else None
        if isinstance(kind, type) and issubclass(kind, Exception) and kind not in _OF_MANY_ARGUMENTS:
            return kind
    return RemoteError
