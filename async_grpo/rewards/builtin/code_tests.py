"""Reads the tests of a row for the `code` reward, which may have the form of public data sets.

    a list of tests         each is {"input": text, "output": text}, {"assert": text}, or the text of an assertion, as in
                            MBPP's `test_list`; "testtype": "stdin" of LiveCodeBench is ignored
    {"inputs": [...], "outputs": [...]}     as in APPS, TACO and verl's rows
    {"input": [...], "output": [...]}       as in CodeContests
    JSON text               of any of these

Tests that call a function by its name (`fn_name`, "testtype": "functional") must be rewritten as assertions.
"""

import ast
import functools
import json
import sys
from typing import Any

_TEST_KEYS = ({"assert"}, {"input", "output"})  # keys of the two kinds of tests
# If one object has all tests of a row: the keys of its two lists, of inputs and of outputs
_COLUMNS_OF_SETS = (("inputs", "outputs"), ("input", "output"))
# Names by which tests would see or replace input and output of the tested code. This cannot work, because the code runs in
# another process
_CAPTURING_MODULES = {"contextlib", "mock", "unittest.mock"}
_CAPTURING_FUNCTIONS = {"redirect_stdout", "redirect_stderr", "patch"}  # functions of the capturing modules
_CAPTURING_FIXTURES = {"capsys", "capfd", "monkeypatch"}  # arguments that pytest passes to test functions
_STREAMS = {"stdin", "stdout", "stderr"}  # attributes of `sys` that tests may set
_IMPORTABLE = sys.stdlib_module_names | {"solution"}  # modules that tests may import
_CACHED_TESTS = 4096  # number of tests that are not parsed again for each completion
_REWRITE = 'write them as {"assert": "assert NAME(ARGUMENTS) == RESULT"}'


def tests_of(sample: dict[str, Any]) -> list[dict[str, str]]:
    """Return the tests of a row.

    Raises:
        ValueError: The row has no tests, or a test that has none of the forms above.
    """
    value = sample.get("tests")
    tests = _decoded(value)
    if isinstance(tests, dict):
        tests = _tests_of_set(tests)
    if not isinstance(tests, list) or not tests:
        raise ValueError(f"a row for `code` needs a list `tests`, not {value!r:.200}")
    return [_test_of(test) for test in tests]


def _decoded(value: Any) -> Any:
    """Return the value of JSON text, and any other value as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _tests_of_set(tests: dict[str, Any]) -> list[Any]:
    """Return the tests of an object that contains lists of inputs and outputs.

    Raises:
        ValueError: The object does not contain two such lists of the same length, or the tests call a function.
    """
    if tests.get("fn_name"):
        raise ValueError(f"tests call the function {tests['fn_name']!r} by its name: {_REWRITE}")
    for columns in _COLUMNS_OF_SETS:
        inputs, outputs = (tests.get(column) for column in columns)
        if isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs):
            pairs = zip(inputs, outputs, strict=True)
            return [{"input": _joined(stdin), "output": _joined(output)} for stdin, output in pairs]
    raise ValueError(f"tests must be lists of inputs and outputs of the same length, not {tests!r:.200}")


def _joined(lines: Any) -> Any:
    """Return a text that is given as a list of its lines, as some rows of TACO have it, and any other value as it is."""
    is_list_of_lines = isinstance(lines, list) and all(isinstance(line, str) for line in lines)
    return "\n".join(lines) if is_list_of_lines else lines


def _test_of(test: Any) -> dict[str, str]:
    """Return a test with the keys of the `code` reward, or raise ValueError if it has none of the known forms."""
    if isinstance(test, str) and "assert" in test:
        test = {"assert": test}
    if isinstance(test, dict) and "testtype" in test:
        if test["testtype"] != "stdin":
            raise ValueError(
                f"tests of the type {test['testtype']!r} call a function by its name: {_REWRITE}"
            )
        test = {key: value for key, value in test.items() if key != "testtype"}
    keys = test.keys() if isinstance(test, dict) else ()
    if keys not in _TEST_KEYS or not all(isinstance(text, str) for text in test.values()):
        raise ValueError(f"a test must have texts as input and output, or as assert, not {test!r:.200}")
    if "assert" in test:
        _refuse_unusable(test["assert"])
    return {str(key): str(text) for key, text in test.items()}


@functools.lru_cache(_CACHED_TESTS)
def _refuse_unusable(statements: str) -> None:
    """Raise ValueError if test statements are no Python, or would fail or judge wrongly whatever the tested code is."""
    try:
        tree = ast.parse(statements)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(
            f"the test {statements!r:.200} cannot be run, because it is not valid Python: {error}"
        ) from error
    for statement in tree.body:
        for module in _modules_of(statement):
            if module not in _IMPORTABLE:
                raise ValueError(
                    f"the test {statements!r:.200} imports {module}, but tests can import only Python's standard library "
                    "and the module `solution`: rewrite it without this import"
                )
    for node in ast.walk(tree):
        if _captured_name(node) is not None:
            raise ValueError(
                f"the test {statements!r:.200} uses {_captured_name(node)}, but the tested code runs in a process of its "
                'own, whose input and output a test cannot see or replace: write {"input": ..., "output": ...}, which '
                "runs the code as a program"
            )


def _modules_of(statement: ast.stmt) -> list[str]:
    """Return the top-level modules that an import statement names, or [] for other statements."""
    match statement:
        case ast.Import(names=names):
            return [alias.name.partition(".")[0] for alias in names]
        case ast.ImportFrom(module=str(module), level=0):
            return [module.partition(".")[0]]
    return []


def _captured_name(node: ast.AST) -> str | None:
    """Return the name by which a node of a test sees or replaces input or output of the tested code, or None."""
    match node:
        case ast.arg(arg=name) if name in _CAPTURING_FIXTURES:
            return name
        case ast.ImportFrom(module=str(module), names=names) if module in _CAPTURING_MODULES:
            return next((alias.name for alias in names if alias.name in _CAPTURING_FUNCTIONS), None)
        case ast.Attribute(value=owner, attr=name) if name in _CAPTURING_FUNCTIONS:
            return name if ast.unparse(owner) in _CAPTURING_MODULES else None
        case ast.Attribute(value=ast.Name(id="sys"), attr=name, ctx=ast.Store()) if name in _STREAMS:
            return f"sys.{name}"
    return None
