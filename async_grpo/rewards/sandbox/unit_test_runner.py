"""Runs a row's tests against code that lives in another process: the witness.

The tests are executed here, by an interpreter that the tested code never enters. What they name and neither they nor
Python define is asked of the witness: plain values arrive as data, other objects as a `Remote`. So code can neither
end, patch nor read its examination. To pass, it must send the values that the tests demand, which it never sees.
"""

import ast
import builtins
import sys
from importlib import import_module
from typing import Any

from async_grpo.rewards.sandbox.proxy import Remote
from async_grpo.rewards.sandbox.rpc import Channel, Unsendable, WireError, decode, encode

PASSED, FAILED, LOST, UNUSABLE = "passed", "failed", "lost", "unusable"
_OF_MANY_ARGUMENTS = (UnicodeDecodeError, UnicodeEncodeError, UnicodeTranslateError, ExceptionGroup)


class RemoteError(Exception):
    """The tested code raised something that is no built-in exception."""


class Witness:
    """The other end of the channel. Trouble with it outlives every `except` in the tests."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.failure_reason: WireError | Unsendable | None = None
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
        except (WireError, Unsendable) as failure_reason:
            self.failure_reason = self.failure_reason or failure_reason
            raise
        raise error

    def _resolve(self, reference: Any) -> Remote:
        if type(reference) is not int:
            raise WireError(f"no object: {reference!r:.100}")
        return Remote(self, reference)


def run(tests: str, channel: Channel) -> str:
    """PASSED, FAILED, LOST (the witness ended in the middle), or UNUSABLE with the reason: the fault of the tests."""
    try:
        tree = ast.parse(tests)
        code = compile(tree, "<tests>", "exec")
    except (SyntaxError, ValueError, RecursionError) as error:
        return f"{UNUSABLE}: {error}"
    asked, modules = names_of(tree)
    if not asked:
        return f"{UNUSABLE}: the tests name nothing that the tested code could define"
    witness = Witness(channel)
    try:
        witness.ask("global", "__name__")  # raises if the tested code could not even be loaded
        namespace = {name: import_module(name) for name in modules}
        exec(code, namespace | _answers(asked, witness) | {"__name__": "tests"})
    except ImportError as error:
        if error is not witness.error:
            return f"{UNUSABLE}: {error}"
        verdict = FAILED
    except BaseException:  # an assertion, or what the tests made of a wrong answer
        verdict = FAILED
    else:
        verdict = PASSED
    if isinstance(witness.failure_reason, Unsendable):
        return f"{UNUSABLE}: {witness.failure_reason}"
    return verdict if witness.failure_reason is None else LOST


def names_of(tree: ast.Module) -> tuple[set[str], set[str]]:
    """What the tests use and neither they nor Python define: names of the tested code, and standard modules.

    Python goes first: were `abs` or `math` taken from the tested code, it could make `abs(f(2) - 0.5) < 1e-6` true.

    >>> names_of(ast.parse("n = 4\\nassert math.isclose(abs(root(n)), 2)"))
    ({'root'}, {'math'})
    """
    nodes = list(ast.walk(tree))
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    defined = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    defined |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    defined |= {
        node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    defined |= {(a.asname or a.name).partition(".")[0] for node in nodes
                if isinstance(node, ast.Import | ast.ImportFrom) for a in node.names}  # fmt: skip
    owners = {
        node.value.id
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    unknown = used - defined - set(dir(builtins))
    modules = unknown & owners & sys.stdlib_module_names
    return unknown - modules, modules


def _answers(names: set[str], witness: Witness) -> dict[str, Any]:
    found = {}
    for name in sorted(names):
        try:
            found[name] = witness.ask("global", name)
        except AttributeError:  # the tests will say so, where they use it
            continue
    return found


def _reference_to(value: Any) -> int | str:
    """What stands for an object on the way to the witness: its number there, or the name of a built-in."""
    if isinstance(value, Remote):
        return value._number  # type: ignore[no-any-return]
    name = getattr(value, "__name__", None)
    if isinstance(name, str) and getattr(builtins, name, None) is value:
        return name
    raise Unsendable(f"a {type(value).__name__} cannot be handed to the tested code, only plain values can")


def _overwrite(args: tuple[Any, ...], position: str, now: Any) -> None:
    value = args[int(position)] if position.isdigit() and int(position) < len(args) else None
    for kind in (list, bytearray):
        if isinstance(value, kind) and isinstance(now, kind):
            value[:] = now
            return
    for kind in (dict, set):
        if isinstance(value, kind) and isinstance(now, kind):
            value.clear()
            value.update(now)
            return
    raise WireError(f"argument {position} cannot have become a {type(now).__name__}")


def _exception(names: list[Any]) -> type[Exception]:
    for name in names:
        kind = getattr(builtins, name, None) if isinstance(name, str) else None
        if isinstance(kind, type) and issubclass(kind, Exception) and kind not in _OF_MANY_ARGUMENTS:
            return kind
    return RemoteError
