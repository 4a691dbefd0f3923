"""Reads Python code that a model wrote: which block is the answer, and how a row's prelude is put before it.

The code is only parsed, which takes linear time. It runs nowhere but in the sandbox.
"""

import ast
import builtins
import re
import sys
import textwrap
import warnings
from dataclasses import dataclass

from async_grpo.rewards.answer_reading.fences import PYTHON, fenced_blocks

MAX_PARSED_CHARACTERS = 100_000  # maximum length of code that is parsed
_MARKDOWN = ("markdown", "md")
_FENCES = ("```", "~~~")
_PRINTING_NAMES = ("print", "pprint")
_PRINTING_ATTRIBUTES = ("write", "writelines", "stdout")
# The first word of a line that defines or prints, for code that cannot be parsed
_DEFINES_OR_PRINTS = re.compile(r"^[ \t]*(?:async[ \t]+def|def|class|print)\b", re.MULTILINE)
_DEFINING = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_IMPORTING = (ast.Import, ast.ImportFrom)
_PROMPT = ">>> "  # an interactive session shows this before a line of code


def python_code_of(text: str, prelude: str = "") -> str:
    """Return the code that a completion without its thought answers with, or the whole text if it has no block.

    A block answers if it defines a function or a class, or prints, or redefines another block's function by a lambda or an
    import. An example of use does not answer: it needs a name that only another block defines. Neither do sessions with
    ">>>", shell commands and expected output. Of the blocks that answer, the last one counts, and blocks that are fenced
    as Python precede those without a language. If no block answers, the last block counts.

    Args:
        text: The completion without its thought.
        prelude: Code that will be put before the result. It may define names that the answer needs, and the answer may
            continue a block of it.
    """
    python_blocks = []
    plain_blocks = []
    for language, block in _blocks_of(text):
        if language in PYTHON:
            python_blocks.append(_unindented(block, prelude))
        elif not language:
            plain_blocks.append(_unindented(block, prelude))
    blocks = plain_blocks + python_blocks
    if len(blocks) < 2:
        return blocks[0] if blocks else text
    contents = [_content_of(block) for block in blocks]
    names_elsewhere: set[str] = set()
    functions: set[str] = set()
    for content in contents:
        names_elsewhere |= content.definitions
        functions |= content.functions
    names_elsewhere -= _content_of(prelude).bound_names
    for block, content in zip(reversed(blocks), reversed(contents), strict=True):
        may_answer = content.may_answer or bool(content.new_bindings & functions)
        if may_answer and not content.missing_names & names_elsewhere:
            return block
    return blocks[-1]


def with_prelude(prelude: str, code: str) -> str:
    r"""Return the prelude followed by the code, with the `from __future__` statements of both at the beginning.

    >>> with_prelude("import math", "from __future__ import annotations; x = 1")
    'from __future__ import annotations\nimport math\npass; x = 1'
    """
    if "__future__" not in code or not prelude.strip():
        return f"{prelude}\n{code}"
    prelude_statements, other_prelude = _without_future(prelude)
    code_statements, other_code = _without_future(code)
    return "\n".join([*prelude_statements, *code_statements, other_prelude, other_code])


def _blocks_of(text: str) -> list[tuple[str, str]]:
    """Return the fenced blocks of a text. A block of Markdown is replaced by the blocks in it, if it has any."""
    blocks = []
    for language, content in fenced_blocks(text):
        is_markdown = language in _MARKDOWN or (not language and content.lstrip().startswith(_FENCES))
        inner_blocks = fenced_blocks(content) if is_markdown else []
        blocks += inner_blocks or [(language, content)]
    return blocks


def _unindented(code: str, prelude: str) -> str:
    """Return code without the indentation that all its lines share, unless the indentation continues the prelude.

    A byte order mark before the code is left out, as Python does when it reads a file.
    """
    code = code.removeprefix("\ufeff")
    is_indented = code.lstrip("\r\n")[:1] in (" ", "\t")
    if not is_indented or (prelude.strip() and _parsed(f"{prelude}\n{code}") is not None):
        return code
    return textwrap.dedent(code)


@dataclass(frozen=True)
class _Content:
    """The names in a block of code, and whether it defines or prints something.

    Attributes:
        may_answer: Whether the block defines a function or a class, or prints.
        definitions: Names that the block binds outside of functions and classes.
        functions: Those of them that are functions or classes by a `def` or `class`.
        new_bindings: Those of them that are bound to a lambda, or imported from the standard library.
        bound_names: Names that the block binds anywhere.
        missing_names: Names that the block uses, and that neither it nor Python defines.
    """

    may_answer: bool
    definitions: frozenset[str] = frozenset()
    functions: frozenset[str] = frozenset()
    new_bindings: frozenset[str] = frozenset()
    bound_names: frozenset[str] = frozenset()
    missing_names: frozenset[str] = frozenset()


def _content_of(code: str) -> _Content:
    tree = _parsed(code)
    if tree is None:
        is_session = code.lstrip().startswith(_PROMPT)
        return _Content(may_answer=not is_session and _DEFINES_OR_PRINTS.search(code) is not None)
    used_names: set[str] = set()
    bound_names: set[str] = set()
    may_answer = False
    has_star = False
    for node in ast.walk(tree):
        bound_names |= _names_bound_by(node)
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                may_answer = True
            case ast.Name(id=name):
                used_names.add(name)
                may_answer = may_answer or name in _PRINTING_NAMES
            case ast.Attribute(attr=name):
                may_answer = may_answer or name in _PRINTING_ATTRIBUTES
            case ast.ImportFrom(names=names) if _is_of_library(node):
                has_star = has_star or names[0].name == "*"
            case ast.ImportFrom(names=names):
                # Another block may be what the module is supposed to contain
                used_names |= {alias.name for alias in names}
    missing_names = set() if has_star else used_names - bound_names - set(dir(builtins))
    return _Content(
        may_answer=may_answer,
        definitions=frozenset(_definitions_of(tree)),
        functions=frozenset(_names_bound_by_any(tree, _DEFINING)),
        new_bindings=frozenset(_names_bound_by_any(tree, _IMPORTING) | _names_of_lambdas(tree)),
        bound_names=frozenset(bound_names),
        missing_names=frozenset(missing_names),
    )


def _definitions_of(tree: ast.Module) -> set[str]:
    """Return the names that a module defines: functions, classes, and variables with a simple assignment."""
    names: set[str] = set()
    for statement in tree.body:
        names |= _names_bound_by(statement)
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            for node in ast.iter_child_nodes(statement):
                names |= _names_bound_by(node)
    return names


def _names_bound_by_any(tree: ast.Module, kinds: tuple[type[ast.stmt], ...]) -> set[str]:
    """Return the names that a module's statements of these kinds bind."""
    names: set[str] = set()
    for statement in tree.body:
        if isinstance(statement, kinds):
            names |= _names_bound_by(statement)
    return names


def _names_of_lambdas(tree: ast.Module) -> set[str]:
    """Return the names that a module binds to lambdas."""
    names: set[str] = set()
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Lambda):
            for target in statement.targets:
                names |= _names_bound_by(target)
    return names


def _names_bound_by(node: ast.AST) -> set[str]:
    """Return the names that a node of a syntax tree binds, without those of its children."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
            return {name}
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            return {name}
        case ast.MatchMapping(rest=str(name)):
            return {name}
        case ast.Import(names=names):
            return {alias.asname or alias.name.partition(".")[0] for alias in names}
        case ast.ImportFrom(names=names) if _is_of_library(node):
            return {alias.asname or alias.name for alias in names}
    return set()


def _is_of_library(node: ast.ImportFrom) -> bool:
    """Return whether a statement imports names of Python's standard library."""
    return not node.level and (node.module or "").partition(".")[0] in sys.stdlib_module_names


def _without_future(code: str) -> tuple[list[str], str]:
    """Return the `from __future__` statements at the beginning of code, and the code with `pass` in their places."""
    # Python does the same when it reads code, so the line numbers in the tree refer to these line ends
    code = code.replace("\r\n", "\n").replace("\r", "\n")
    tree = _parsed(code)
    if tree is None:
        return [], code
    nodes: list[ast.ImportFrom] = []
    has_docstring = ast.get_docstring(tree, clean=False) is not None
    for node in tree.body[int(has_docstring) :]:
        if not isinstance(node, ast.ImportFrom) or node.module != "__future__":
            break
        nodes.append(node)
    lines = code.encode().split(b"\n")  # positions in the tree count bytes
    for node in reversed(nodes):
        first_line = node.lineno - 1
        last_line = (node.end_lineno or node.lineno) - 1
        before = lines[first_line][: node.col_offset]
        behind = lines[last_line][node.end_col_offset :]
        lines[first_line : last_line + 1] = [before + b"pass" + behind]
    return [ast.unparse(node) for node in nodes], b"\n".join(lines).decode()


def _parsed(code: str) -> ast.Module | None:
    """Return the syntax tree of code, or None if it is not valid Python or too long."""
    if len(code) > MAX_PARSED_CHARACTERS:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as for an unknown escape in a string
        try:
            return ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
