"""The bars of size: what is short is read."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "async_grpo"


@pytest.mark.parametrize(
    "room", sorted({path.parent for path in PACKAGE.rglob("*.py")}), ids=lambda room: room.name
)
def test_no_file_is_longer_than_400_lines_and_no_function_longer_than_60(room):
    for path in room.glob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) <= 400, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{path}: {node.name}"


def test_the_root_of_the_package_holds_at_most_seven_modules():
    assert len(list(PACKAGE.glob("*.py"))) <= 7
