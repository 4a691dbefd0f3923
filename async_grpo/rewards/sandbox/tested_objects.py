"""Objects and exceptions of the tested code, as its tests see them in their own process."""

import builtins
import contextlib
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

_READABLE_NAMES = ("__name__", "__qualname__", "__dict__")  # special names that tests may look up


class Proxy:
    """An object of the tested code, as the tests see it. Each access is a question to its process.

    The tested code must not decide whether an object equals a plain value: an object that claims to equal everything
    would pass every test. If the object's class is derived from a number, text or collection, such as a named tuple, the
    tests compare its plain value `_value`. An immutable value is sent only once, so that `1 < x < 3` cannot see two
    values. Operators on other objects may return objects, and may compare two objects of the tested code.
    """

    __slots__ = ("_ask", "_number", "_value")

    def __init__(self, ask: Callable[..., Any], number: int) -> None:
        object.__setattr__(self, "_ask", ask)  # (operation, *arguments, **keywords) -> the answer
        object.__setattr__(self, "_number", number)  # number of the object in the other process
        object.__setattr__(self, "_value", self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in _READABLE_NAMES:
            # Python itself looks these names up, and the tested code must not influence the result
            raise AttributeError(name)
        return self._ask("getattr", self, name)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, Proxy) and self._ask("isinstance", instance, self) is True

    def __subclasscheck__(self, subclass: Any) -> bool:
        return isinstance(subclass, Proxy) and self._ask("issubclass", subclass, self) is True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        # The tested code gets the exception, but cannot suppress it: the exception may be that of a failed assertion
        names = [base.__name__ for base in kind.__mro__] if kind is not None else []
        self._ask("exit", self, names, str(error))


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
            # Ask for the plain value if it is a container, which the tested code may have changed, or is not known yet
            if isinstance(value, Proxy | list | dict | set):
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


for _name in "call setattr delattr iter next len str repr bool hash getitem setitem delitem enter".split():
    setattr(Proxy, f"__{_name}__", _question(_name))
for _name in "eq ne lt le gt ge".split():
    setattr(Proxy, f"__{_name}__", _operator(_name, gives_object=False))
for _name in "neg pos abs invert add sub mul truediv floordiv mod pow matmul and_ or_ xor".split():
    setattr(Proxy, f"__{_name.strip('_')}__", _operator(_name, gives_object=True))
    setattr(Proxy, f"__r{_name.strip('_')}__", _operator(_name, gives_object=True, reflected=True))
for _name in "iadd isub imul itruediv ifloordiv imod ipow imatmul iand ior ixor".split():
    setattr(Proxy, f"__{_name}__", _operator(_name, gives_object=True))


class ExceptionClass(type):
    """Metaclass of the classes that represent exception classes of the tested code, so that tests can catch them.

    A call of such a class makes an exception in the other process, and returns its proxy. The attribute `_proxy` of such a
    class is the proxy of the tested code's class. A raised exception has its own proxy as its attribute `_proxy`.
    """

    _proxy: Any

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._proxy(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        is_proxy = isinstance(instance, Proxy)
        return isinstance(instance, cls._proxy) if is_proxy else super().__instancecheck__(instance)


def attribute_of_exception(error: Exception, name: str) -> Any:
    """Return an attribute of an exception that the tested code has raised."""
    if name.startswith("_"):
        raise AttributeError(name)
    return getattr(error.__dict__["_proxy"], name)


def message_of_exception(error: Exception) -> str:
    """Return the message of an exception that the tested code has raised."""
    return str(error.__dict__["_message"])


def is_exception_class(kind: Any) -> TypeGuard[type[Exception]]:
    """Return whether a value is a class of exceptions."""
    return isinstance(kind, type) and issubclass(kind, Exception)


def builtin_exception(names: Sequence[Any], message: str, values: Sequence[Any]) -> Exception:
    """Return an exception of the first built-in class in `names`, the class names of the original exception.

    Args:
        names: Names of the exception's class and of its base classes.
        message: The exception as text, for a class that does not take its arguments.
        values: Arguments of the exception.
    """
    for name in names:
        kind = getattr(builtins, name, None) if isinstance(name, str) else None
        if is_exception_class(kind):
            # Some exception classes need more arguments. Then the next class is tried.
            for arguments in (values, [message]):
                with contextlib.suppress(TypeError):
                    return kind(*arguments)
    return Exception(message)
