"""The bars of size that the house was put in order by."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_no_file_is_longer_than_300_lines_and_no_function_longer_than_60():
    for path in (ROOT / "async_grpo").rglob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) <= 300, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{path}: {node.name}"


def test_the_root_of_the_package_holds_at_most_six_modules():
    assert len(list((ROOT / "async_grpo").glob("*.py"))) <= 6
