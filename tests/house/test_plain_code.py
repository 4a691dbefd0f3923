"""Variables are nouns, and a statement does one thing: the part of the house style that a syntax tree shows."""

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("async_grpo", "examples", "scripts")

# The name of a variable says which thing it holds. These say only what happened to the thing, or point at it
PARTICIPLES = set(
    "asked began begun drawn done found given gone got held kept known lasted lost made named needed paid saved said "
    "seen served shown spent stored taken told wanted written".split()
)
POINTERS = set(
    "again alike also both each everyone everything here many more most none nothing of one ones other others ours own "
    "several such theirs these those what where which who whom whose why".split()
)
# Names of the lists that stay, by file, and the reason
ALLOWED = {
    ("async_grpo/protocols.py", "begun"): "engines outside of the library have this argument",
    ("async_grpo/inference/generation_worker.py", "begun"): "as its protocol names it",
    ("async_grpo/types.py", "other"): "Python's own name for the right operand",
}

Problem = tuple[int, str]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def bound_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and name of each variable and argument. A field of a class is read behind its owner, and may be brief."""
    fields = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for statement in node.body:
                if isinstance(statement, ast.AnnAssign | ast.Assign):
                    fields |= {id(part) for part in ast.walk(statement) if isinstance(part, ast.Name)}
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) if id(node) not in fields:
                yield node.lineno, name
            case ast.arg(arg=name):
                yield node.lineno, name
            case (
                ast.ExceptHandler(name=str(name))
                | ast.MatchAs(name=str(name))
                | ast.MatchStar(name=str(name))
            ):
                yield node.lineno, name


def vague_names(tree: ast.Module, file: str) -> Iterator[Problem]:
    """Find names that are no nouns. `left` is the side of something if the file also has a `right`."""
    names = list(bound_names(tree))
    has_right = any(name == "right" for _, name in names)
    for line, name in names:
        is_vague = name in PARTICIPLES | POINTERS or (name == "left" and not has_right)
        if is_vague and (file, name) not in ALLOWED:
            yield line, f"`{name}` does not name a thing"


def functions_and_module(tree: ast.Module) -> Iterator[ast.AST]:
    yield tree
    yield from (node for node in ast.walk(tree) if isinstance(node, Function))


def packed_arguments(tree: ast.Module, file: str) -> Iterator[Problem]:
    """Find tuples and lists that are made only to be unpacked, in a call or in another literal."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple | ast.List):
            yield node.lineno, "a literal behind a star: write its elements without it, one per line"
    for scope in functions_and_module(tree):
        literals: dict[str, int] = {}
        loads: Counter[str] = Counter()
        stores: Counter[str] = Counter()
        unpacked: set[str] = set()
        for node in ast.walk(scope):
            match node:
                case (
                    ast.Assign(targets=[ast.Name(id=name)], value=ast.Tuple() | ast.List())
                    | ast.AnnAssign(target=ast.Name(id=name), value=ast.Tuple() | ast.List())
                ) if not name.isupper():
                    literals[name] = node.lineno
                case ast.Name(id=name, ctx=ast.Load()):
                    loads[name] += 1
                case ast.Name(id=name, ctx=ast.Store()):
                    stores[name] += 1
                case ast.Call(args=arguments):
                    for argument in arguments:
                        if isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Name):
                            unpacked.add(argument.value.id)
        for name, line in literals.items():
            if name in unpacked and loads[name] == stores[name] == 1:
                yield (
                    line,
                    f"`{name}` is packed only to be unpacked in one call: pass the arguments one by one",
                )


def tuple_assignments(tree: ast.Module, file: str) -> Iterator[Problem]:
    """Find statements that assign several values, apart from swaps."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and not _is_simultaneous(target, node.value):
                    yield node.lineno, "a tuple assignment of several values: one statement for each"


def _is_simultaneous(target: ast.Tuple, value: ast.Tuple) -> bool:
    """Tell whether an element reads what is assigned in the same statement, as a swap does."""
    assigned = {ast.unparse(element) for element in target.elts}
    return any(ast.unparse(node) in assigned for node in ast.walk(value) if isinstance(node, ast.expr))


def arithmetic_on_truth(tree: ast.Module, file: str) -> Iterator[Problem]:
    """Find augmented assignments whose right side is a condition, such as `count += value > 0`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AugAssign) and _is_condition(node.value):
            yield (
                node.lineno,
                "an assignment that computes with a condition: write an `if`, or name the result",
            )


def _is_condition(value: ast.expr) -> bool:
    """`x or 0.0` is none: it gives a missing number a default."""
    match value:
        case ast.Compare() | ast.UnaryOp(op=ast.Not()):
            return True
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.startswith(("is_", "has_", "can_"))
        case ast.BoolOp(values=values):
            return any(map(_is_condition, values))
        case ast.BinOp(left=left, right=right):
            return _is_condition(left) or _is_condition(right)
    return False


@cache
def parsed_files() -> dict[str, ast.Module]:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths}


RULES = (vague_names, packed_arguments, tuple_assignments, arithmetic_on_truth)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_code_is_plain(rule):
    problems = []
    for file, tree in parsed_files().items():
        for line, text in sorted({*rule(tree, file)}):
            problems.append(f"{file}:{line}: {rule.__name__}: {text}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (vague_names, "found = 1"),
        (vague_names, "for one in samples: pass"),
        (vague_names, "[said for said in texts]"),
        (vague_names, "def f(given): pass"),
        (vague_names, "lambda own: 0"),
        (vague_names, "a, left = f()"),
        (packed_arguments, "arguments = (a, b)\nf(*arguments)"),
        (packed_arguments, "def g():\n    arguments: list = [a, b]\n    return f(0, *arguments)"),
        (packed_arguments, "f(*(a, b), c)"),
        (packed_arguments, "NAMES = (*('a', 'b'), 'c')"),
        (tuple_assignments, "a, b = 1, 2"),
        (arithmetic_on_truth, "x *= a > b"),
        (arithmetic_on_truth, "x -= is_last"),
        (arithmetic_on_truth, "x &= y > 0"),
        (arithmetic_on_truth, "x += has_a or has_b"),
        (arithmetic_on_truth, "x += 4 * config.is_used"),
    ],
)
def test_a_rule_finds_what_it_forbids(rule, source):
    assert list(rule(ast.parse(source), "new.py"))


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (vague_names, "class Turn:\n    said: str = ''"),
        (vague_names, "left, right = sides"),
        (packed_arguments, "arguments = [a]\narguments.append(b)\nf(*arguments)"),
        (tuple_assignments, "a, b = b, a + b\nc, d = f()\npair = a, b"),
        (arithmetic_on_truth, "x += y or 0.0\nx &= mask"),
    ],
)
def test_a_rule_permits_what_reads_well(rule, source):
    assert not list(rule(ast.parse(source), "new.py"))
