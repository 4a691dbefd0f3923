"""Reads Python code that a model wrote: which block is the answer, and how a row's prelude is put before it.

The code is only parsed, which takes linear time. It runs nowhere but in the sandbox.
"""

import ast
import builtins
import re
import sys
import textwrap
import warnings
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from async_grpo.rewards.answer_reading.fences import PYTHON, fenced_blocks

MAX_PARSED_CHARACTERS = 100_000  # maximum length of code that is parsed
_MARKDOWN = ("markdown", "md")
_FENCES = ("```", "~~~")
_PRINTING_NAMES = ("print", "pprint")
_PRINTING_ATTRIBUTES = ("write", "writelines", "stdout")
# Matches `def f`, `class F` (with the name as a group) or `print` at the beginning of a line, in code that cannot be parsed
_DEFINES_OR_PRINTS = re.compile(r"^[ \t]*(?:(?:async[ \t]+def|def|class)[ \t]+(\w+)|print\b)", re.MULTILINE)
_DEFINING = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_IMPORTING = (ast.Import, ast.ImportFrom)
_SETTING = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Assert, ast.Pass)
_PROMPT = ">>> "  # text that an interactive session shows before the first line of a statement
_CONTINUATION = "..."  # text that an interactive session shows before the other lines of a statement


def python_code_of(text: str, prelude: str = "", calls: Sequence[str] = (), is_program: bool = False) -> str:
    """Return the code with which a completion answers, or the whole text if it has no block.

    1. Only blocks that are fenced as Python, and blocks without a language, are considered. Blocks in another language
       are considered if there are no others, and if they are valid Python nevertheless.
    2. If the tests are known, a block answers if it defines a name that they use, and runs as a program if they run one.
       If no block does, or if there are no tests, a block answers if it defines a function or a class, prints, or
       redefines another block's function by a lambda or an import. Sessions with ">>>" only answer without other blocks.
    3. The last block that answers is chosen, preferably one that is fenced as Python. A block that needs a name of
       another block is skipped, because it is probably an example of use. If all are skipped, the last one is chosen.
    4. If the chosen block, or a test, needs names that other blocks define, these blocks are put before the chosen one.
       This happens if all were skipped, or if the tests use names of several blocks.

    Args:
        text: The completion without its thought.
        prelude: Code that will be put before the result. It may define names that the answer needs, and it may end with
            the head of a function, whose body is the answer.
        calls: Tests that use the code.
        is_program: Whether a test runs the code as a program.
    """
    blocks = _candidates(text, prelude)
    if blocks and _parsed(text) is not None:
        return text  # the whole text is Python code, whose strings contain the fences
    if all(block.lstrip().startswith(_PROMPT) for block in blocks):
        blocks = [_typed_in(session) for session in blocks]
    if len(blocks) < 2:
        return blocks[0] if blocks else text
    contents = [_content_of(block) for block in blocks]
    # The prelude may end with the head of a function, which has no body yet
    is_complete = _parsed(prelude) is not None
    prelude_content = _content_of(prelude if is_complete else f"{prelude}\n    pass")
    tested_names = _names_used_by(calls) - prelude_content.definitions
    names_elsewhere: set[str] = set()
    functions: set[str] = set()
    for content in contents:
        names_elsewhere |= content.definitions
        functions |= content.functions
    names_elsewhere -= prelude_content.definitions
    answering = _fitting(contents, tested_names, is_program)
    last = answering[-1] if answering else len(blocks) - 1
    if not answering:
        answering = _answering(contents, functions)
    # Choose the last block that answers and is not an example of use, which would need names of other blocks
    answers = [position for position in answering if not contents[position].missing_names & names_elsewhere]
    position = answers[-1] if answers else last
    needed_names = contents[position].missing_names | (tested_names - contents[position].definitions)
    return _joined(position, blocks, contents, needed_names & names_elsewhere)


def _candidates(text: str, prelude: str) -> list[str]:
    """Return the blocks that may contain the answer. The later a block is in the list, the more it is preferred."""
    python_blocks = []
    plain_blocks = []
    other_blocks = []
    for language, block in _blocks_of(text):
        if language in PYTHON:
            python_blocks.append(_unindented(block, prelude))
        elif not language:
            plain_blocks.append(_unindented(block, prelude))
        elif _content_of(_typed_in(block)).may_answer and _parsed(_typed_in(block)) is not None:
            other_blocks.append(block)
    return plain_blocks + python_blocks or other_blocks


def _fitting(contents: Sequence["_Content"], tested_names: set[str], is_program: bool) -> list[int]:
    """Return the positions of the blocks that define a tested name, and run as a program if the tests demand that."""
    running = [position for position, content in enumerate(contents) if content.runs or not is_program]
    if not tested_names:
        return running if is_program else []
    # A variable with a tested name, as in `f = g`, only counts if no block defines a function with such a name
    positions = []
    for position in running:
        if tested_names & (contents[position].functions | contents[position].new_bindings):
            positions.append(position)
    return positions or [position for position in running if tested_names & contents[position].definitions]


def _answering(contents: Sequence["_Content"], functions: set[str]) -> list[int]:
    """Return the positions of the blocks that define or print something, or redefine one of the functions."""
    positions = []
    for position, content in enumerate(contents):
        if content.may_answer or content.new_bindings & functions:
            positions.append(position)
    return positions


def _joined(
    position: int, blocks: Sequence[str], contents: Sequence["_Content"], needed_names: AbstractSet[str]
) -> str:
    """Return a block after those other blocks that define the needed names."""
    parts = [blocks[position]]
    for index in reversed(range(len(blocks))):
        if index != position and contents[index].definitions & needed_names:
            parts.append(blocks[index])
            needed_names = needed_names - contents[index].definitions | contents[index].missing_names
    return _concatenated(parts[::-1])


def _names_used_by(calls: Sequence[str]) -> set[str]:
    """Return the names that tests use, and that neither they nor Python define."""
    names: set[str] = set()
    for call in calls:
        names |= _content_of(call).missing_names
    return names


def with_prelude(prelude: str, code: str) -> str:
    r"""Return the prelude followed by the code, with the `from __future__` statements of both at the beginning.

    >>> with_prelude("import math", "from __future__ import annotations; x = 1")
    'from __future__ import annotations\nimport math\npass; x = 1'
    """
    if "__future__" not in code or not prelude.strip():
        return f"{prelude}\n{code}"
    return _concatenated([prelude, code])


def _concatenated(parts: Sequence[str]) -> str:
    """Return parts of code one after another, with the `from __future__` statements of all at the beginning."""
    if len(parts) == 1:
        return parts[0]
    all_statements = []
    all_code = []
    for part in parts:
        statements, code = _without_future(part) if "__future__" in part else ([], part)
        all_statements += statements
        all_code.append(code)
    return "\n".join([*all_statements, *all_code])


def _blocks_of(text: str) -> list[tuple[str, str]]:
    """Return the fenced blocks of a text. A block of Markdown is replaced by the blocks in it, if it has any."""
    blocks = []
    for language, content in fenced_blocks(text):
        is_markdown = language in _MARKDOWN or (not language and content.lstrip().startswith(_FENCES))
        inner_blocks = fenced_blocks(content) if is_markdown else []
        blocks += inner_blocks or [(language, content)]
    return blocks


def _typed_in(block: str) -> str:
    """Return the code that was typed into an interactive session, without its output, or any other block unchanged."""
    if not block.lstrip().startswith(_PROMPT):
        return block
    lines = [line.rstrip() + " " for line in textwrap.dedent(block).splitlines()]
    typed_lines = [line for line in lines if line.startswith((_PROMPT, f"{_CONTINUATION} "))]
    return "".join(line[len(_PROMPT) :].rstrip() + "\n" for line in typed_lines)


def _unindented(code: str, prelude: str) -> str:
    """Return code without the indentation that all its lines share, unless the indentation continues the prelude.

    A byte order mark before the code is left out, as Python does when it reads a file.
    """
    code = code.removeprefix("\ufeff")
    is_indented = code.lstrip("\r\n")[:1] in (" ", "\t")
    if not is_indented or continues(prelude, code):
        return code
    return textwrap.dedent(code)


def continues(prelude: str, code: str) -> bool:
    r"""Return whether indented code is valid after the prelude, as the body of its last function.

    >>> continues("def f(x):", "    return x"), continues("import math", "    return x")
    (True, False)
    """
    return bool(prelude.strip()) and _parsed(f"{prelude}\n{code}") is not None


@dataclass(frozen=True)
class _Content:
    """The names in a block of code, and whether it defines or prints something.

    Attributes:
        may_answer: Whether the block defines a function or a class, or prints. A stub, whose body is missing, is neither.
        runs: Whether the block has a statement outside of functions that may print.
        definitions: Names that the block binds outside of functions and classes, except stubs.
        functions: Those `definitions` that are functions or classes, by a `def` or `class`.
        new_bindings: Those `definitions` that are bound to a lambda, or imported from the standard library.
        missing_names: Names that the block uses, and that neither it nor Python defines.
    """

    may_answer: bool
    runs: bool = False
    definitions: frozenset[str] = frozenset()
    functions: frozenset[str] = frozenset()
    new_bindings: frozenset[str] = frozenset()
    missing_names: frozenset[str] = frozenset()


def _content_of(code: str) -> _Content:
    tree = _parsed(code)
    if tree is None:
        return _content_of_broken(code)
    used_names: set[str] = set()
    bound_names: set[str] = set()
    foreign_modules: set[str] = set()
    attributes: list[ast.Attribute] = []
    changed_nodes: set[int] = set()
    may_answer = False
    has_star = False
    for node in ast.walk(tree):
        if id(node) not in changed_nodes:
            bound_names |= _names_bound_by(node)
        match node:
            case ast.AugAssign(target=target):
                changed_nodes.add(id(target))  # `x += 1` uses the name x, but does not define it
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                may_answer = may_answer or not _is_stub(node)
            case ast.Name(id=name):
                used_names.add(name)
                may_answer = may_answer or name in _PRINTING_NAMES
            case ast.Attribute(attr=name):
                attributes.append(node)
                may_answer = may_answer or name in _PRINTING_ATTRIBUTES
            case ast.ImportFrom(names=names) if _is_of_library(node):
                has_star = has_star or names[0].name == "*"
            case ast.ImportFrom(names=names):
                # Another block may define these names: the text may show the content of the imported module
                used_names |= {alias.name for alias in names}
            case ast.Import():
                foreign_modules |= _names_bound_by(node) - sys.stdlib_module_names
    used_names |= {node.attr for node in attributes if _is_name_of(node.value, foreign_modules)}
    missing_names = set() if has_star else used_names - bound_names - set(dir(builtins))
    return _Content(
        may_answer=may_answer,
        runs=any(_may_print(statement) for statement in tree.body),
        definitions=frozenset(_definitions_of(tree)),
        functions=frozenset(_names_bound_by_any(tree, _DEFINING)),
        new_bindings=frozenset(_names_bound_by_any(tree, _IMPORTING) | _names_of_lambdas(tree)),
        missing_names=frozenset(missing_names),
    )


def _content_of_broken(code: str) -> _Content:
    """Return the content of code that cannot be parsed, as far as single lines show it."""
    if code.lstrip().startswith(_PROMPT):
        return _Content(may_answer=False)
    matches = list(_DEFINES_OR_PRINTS.finditer(code))
    names = frozenset(match[1] for match in matches if match[1])
    return _Content(bool(matches), runs=bool(matches), definitions=names, functions=names)


def _is_name_of(node: ast.expr, names: set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def _is_stub(node: ast.AST) -> bool:
    """Return whether a function or class is only a placeholder.

    The body of such a function has only a docstring, `...`, `pass` or `raise NotImplementedError`. Such a class has
    methods, and all of them are such functions.
    """
    match node:
        case ast.FunctionDef(body=body) | ast.AsyncFunctionDef(body=body):
            return all(_says_nothing(statement) for statement in body)
        case ast.ClassDef(body=body):
            methods = [statement for statement in body if not _says_nothing(statement)]
            return bool(methods) and all(_is_stub(method) for method in methods)
    return False


def _says_nothing(statement: ast.stmt) -> bool:
    match statement:
        case ast.Pass() | ast.Expr(value=ast.Constant()):
            return True
        case ast.Raise(exc=ast.Name(id="NotImplementedError")):
            return True
        case ast.Raise(exc=ast.Call(func=ast.Name(id="NotImplementedError"))):
            return True
    return False


def _may_print(statement: ast.stmt) -> bool:
    """Return whether a statement of a module may print something, other than by an assignment."""
    if isinstance(statement, ast.Expr):
        return any(isinstance(node, ast.Call) for node in ast.walk(statement))
    return not isinstance(statement, (*_DEFINING, *_IMPORTING, *_SETTING))


def _definitions_of(tree: ast.Module) -> set[str]:
    """Return the names that a module defines: functions, classes, and variables with a simple assignment."""
    names: set[str] = set()
    for statement in tree.body:
        if _is_stub(statement):
            continue
        names |= _names_bound_by(statement)
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            for node in ast.iter_child_nodes(statement):
                names |= _names_bound_by(node)
    return names


def _names_bound_by_any(tree: ast.Module, kinds: tuple[type[ast.stmt], ...]) -> set[str]:
    """Return the names that a module's statements of these kinds bind, except stubs."""
    names: set[str] = set()
    for statement in tree.body:
        if isinstance(statement, kinds) and not _is_stub(statement):
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
        warnings.simplefilter("ignore")  # Python warns, for example, of an unknown escape in a string
        try:
            return ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
