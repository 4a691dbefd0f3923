"""Runs a row's tests in an interpreter that the tested code never enters.

Names that neither the tests nor Python define are looked up in the process of the tested code. Plain values arrive as
data, and other objects as a `Proxy`. So the code can neither end, patch nor read its tests, nor see the expected
values.
"""

import ast
import builtins
import contextlib
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import CodeType, ModuleType
from typing import Any

from async_grpo.rewards.sandbox.rpc import RpcChannel, Unsendable, WireError, decode, encode
from async_grpo.rewards.sandbox.tested_objects import (
    ExceptionClass,
    Proxy,
    attribute_of_exception,
    builtin_exception,
    is_exception_class,
    message_of_exception,
)


class Solution(dict[str, Any]):
    """The dict in which Python looks up the built-in names of the tests (`__builtins__`).

    It contains Python's own built-in names, which the tested code cannot replace. Any other name is looked up in the
    process of the tested code.
    """

    def __init__(self, channel: RpcChannel, tree: ast.Module) -> None:
        super().__init__(vars(builtins))
        self.module = Proxy(self.ask, 0)
        self._channel = channel
        # Proxies by the number of their object. An object always gets the same proxy, so that tests can compare with `is`
        self._proxies = {0: self.module}
        # Classes by the name of the exception class that they represent. Each is made once, so that tests can catch it
        self._exception_classes: dict[str, Any] = {}
        # Modules that the tests may use without an import, such as `math` in `math.isclose(...)`
        owners = [node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        owner_names = {owner.id for owner in owners if isinstance(owner, ast.Name)}
        self._modules = owner_names & sys.stdlib_module_names
        self.has_used_solution = False  # whether the tests have used a name of the tested code
        self.has_missing_name = False  # whether the tests have used a name that nobody defines
        # Stored, because the tests may catch the exception
        self.failure: WireError | Unsendable | None = None
        self.error: Exception | None = None  # the last exception that the tested code raised

    def __missing__(self, name: str) -> Any:
        if name in self._modules:
            return self.setdefault(name, import_module(name))
        self.has_used_solution = True
        try:
            return self.setdefault(name, self.attribute(name))
        except AttributeError:
            raise KeyError(name) from None

    def attribute(self, name: str) -> Any:
        """Return the object that the tested code defines with this name, or raise AttributeError."""
        try:
            return self.ask("getattr", self.module, name)
        except AttributeError:
            # Note it, because tests that expect an exception could pass through this error
            self.has_missing_name = True
            raise

    def ask(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        """Ask the tested code's process to perform an operation (see `fork_server._answer`), and return the result.

        If the tested code changes a list, dict or set among `args`, it is changed here, too.

        Raises:
            Exception: The tested code has raised an exception, which is converted to the nearest built-in class.
            Unsendable: An argument cannot be sent.
            WireError: The process has ended, or has sent something that is not an answer.
        """
        if args[0] is not self.module:
            self.has_used_solution = True
        arguments_by_name = {str(position): value for position, value in enumerate(args)} | kwargs
        try:
            arguments = [encode(value, _reference_to) for value in args]
            keywords = {name: encode(value, _reference_to) for name, value in kwargs.items()}
            self._channel.send([operation, arguments, keywords])
            answer = self._channel.receive()
            match answer:
                case ["value", value, dict(changed)]:
                    self._overwrite_all(arguments_by_name, changed)
                    return decode(value, self._object)
                case ["argument", str(name), dict(changed)] if name in arguments_by_name:
                    self._overwrite_all(arguments_by_name, changed)
                    return arguments_by_name[name]
                case ["class", number, list(lineage)]:
                    exception_class = self._exception_class(_bases_by_name(lineage))
                    if isinstance(exception_class, ExceptionClass):
                        exception_class._proxy = self._object(number)
                    return exception_class
                case ["coroutine", number]:
                    return self._awaited(self._object(number))
                case ["raised", list(lineage), str(message), number, list(data)]:
                    values = [decode(value, self._object) for value in data]
                    error = self._exception(_bases_by_name(lineage), message, values)
                    error.__dict__.update(_proxy=self._object(number), _message=message)
                    self.error = error
                case _:
                    raise WireError(f"the tested process sent something else than an answer: {answer!r:.100}")
        except (WireError, Unsendable) as failure:
            self.failure = self.failure or failure
            raise
        raise error

    def _overwrite_all(self, arguments: dict[str, Any], changed: dict[str, Any]) -> None:
        for name, data in changed.items():
            _overwrite(arguments.get(name), decode(data, self._object))

    def _object(self, number: Any) -> Proxy:
        if not isinstance(number, int):
            raise WireError(f"{number!r:.100} is not the number of an object")
        return self._proxies.setdefault(number, Proxy(self.ask, number))

    async def _awaited(self, coroutine: Proxy) -> Any:
        return self.ask("run", coroutine)

    def _exception_class(self, bases_by_name: Mapping[str, Sequence[str]], name: str | None = None) -> Any:
        """Return the class that represents an exception class of the tested code.

        It is the built-in exception class of the same name, if there is one.

        Args:
            bases_by_name: The exception class and all classes that it is derived from (see `_bases_by_name`).
            name: Name of the class among them to represent; None means the exception class itself.
        """
        if name is None:
            name = next(iter(bases_by_name), "Exception")
        if name not in self._exception_classes:
            builtin_class = getattr(builtins, name, None)
            if is_exception_class(builtin_class):
                self._exception_classes[name] = builtin_class
            else:
                bases = [self._exception_class(bases_by_name, base) for base in bases_by_name.get(name, ())]
                methods = {"__getattr__": attribute_of_exception, "__str__": message_of_exception}
                different_bases = tuple(dict.fromkeys(bases)) or (Exception,)
                self._exception_classes[name] = ExceptionClass(name, different_bases, methods)
        return self._exception_classes[name]

    def _exception(
        self, bases_by_name: Mapping[str, Sequence[str]], message: str, values: Sequence[Any]
    ) -> Exception:
        kind = self._exception_class(bases_by_name)
        if isinstance(kind, ExceptionClass):
            # Some exception classes need other arguments. Then a built-in class is taken.
            with contextlib.suppress(TypeError):
                error: Exception = type.__call__(kind, *values)
                return error
        return builtin_exception(list(bases_by_name), message, values)


def _bases_by_name(lineage: Sequence[Any]) -> dict[str, list[str]]:
    """Return the names of the direct bases of an exception class and of all classes that it is derived from.

    The keys are the names of these classes. The exception class comes first.

    Args:
        lineage: What `fork_server._lineage` has returned for the class, as received from the tested process.

    Raises:
        WireError: The lineage is malformed.
    """
    try:
        return {str(name): [str(base) for base in bases] for name, bases in lineage}
    except (TypeError, ValueError) as error:
        raise WireError(f"this is no lineage of an exception class: {error}") from error


class SolutionModule(ModuleType):
    """The module `solution`, from which tests may import what the tested code defines."""

    def __init__(self, solution: Solution) -> None:
        super().__init__("solution")
        self.__dict__["_solution"] = solution

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system looks these names up
            raise AttributeError(name)
        return self.__dict__["_solution"].attribute(name)


def run(tests: str, channel: RpcChannel) -> bool | str:
    """Run the tests and return whether they pass. If the tests are invalid, return the reason as text.

    If the tests define test functions or classes as for pytest or unittest, but do not call them, these are run, too.
    """
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
        _execute(code, _unused_tests(tree), solution)
        if not solution.has_used_solution:
            return "the tests use nothing that the tested code could define"
        has_passed = not solution.has_missing_name
    except ImportError as error:
        if error is not solution.error and not solution.has_missing_name:
            return str(error)
    except BaseException:  # an assertion, or any error of the tests that a wrong answer causes
        pass
    if isinstance(solution.failure, Unsendable):
        return str(solution.failure)
    return has_passed and solution.failure is None


def _unused_tests(tree: ast.Module) -> list[str]:
    """Return the names of test classes, and of functions "test..." without arguments, that the tests do not use."""
    used_names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    unused_names = []
    for statement in tree.body:
        match statement:
            case ast.FunctionDef(name=name, args=arguments) if name.startswith("test"):
                is_test = len(arguments.args) == len(arguments.defaults)
            case ast.ClassDef(name=name):
                is_test = True
            case _:
                continue
        if is_test and name not in used_names:
            unused_names.append(name)
    return unused_names


def _execute(code: CodeType, unused_tests: Sequence[str], solution: Solution) -> None:
    """Execute the tests, and raise any exception if they fail."""
    module = ModuleType("tests")
    sys.modules |= {"tests": module, "__main__": module, "solution": SolutionModule(solution)}
    module.__dict__["__builtins__"] = solution
    try:
        exec(code, module.__dict__)
    except SystemExit as exit_of_tests:
        if exit_of_tests.code:
            raise
        # The tests have ended themselves with exit code 0. `unittest.main()` does so after it has run all tests
        return
    for name in unused_tests:
        test = module.__dict__[name]
        if not isinstance(test, type):
            test()
        elif "unittest" in sys.modules and issubclass(test, sys.modules["unittest"].TestCase):
            _run_test_case(test)
        elif name.startswith("Test"):
            for method_name in vars(test):
                if method_name.startswith("test"):
                    getattr(test(), method_name)()


def _run_test_case(test_case: Any) -> None:
    unittest = sys.modules["unittest"]
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(test_case).run(result)
    if not result.wasSuccessful():
        raise AssertionError(f"{test_case.__name__} failed")


def _reference_to(value: Any) -> int | str:
    """Return the number of a `Proxy`, or the name of a built-in object, for a request to the tested code's process.

    Raises:
        Unsendable: The value is neither a proxy nor a built-in object.
    """
    proxy = value if isinstance(value, Proxy) else getattr(value, "_proxy", None)
    if isinstance(proxy, Proxy):
        return proxy._number
    name = getattr(value, "__name__", None)
    if isinstance(name, str) and getattr(builtins, name, None) is value:
        return name
    raise Unsendable(f"a {type(value).__name__} cannot be handed to the tested code, only plain values can")


def _overwrite(value: Any, new_value: Any) -> None:
    """Replace the content of a mutable argument, or raise WireError if its type is not that of the new value."""
    kinds = (list, bytearray, dict, set)
    if not any(isinstance(value, kind) and isinstance(new_value, kind) for kind in kinds):
        raise WireError(
            f"a {type(value).__name__} cannot get the content of a {type(new_value).__name__}: its type differs"
        )
    value.clear()
    fill = getattr(value, "extend", None) or value.update
    fill(new_value)
