"""Every name of `from vllm... import` exists in each version that is known to work."""

import ast
import importlib
from pathlib import Path

import pytest

import async_grpo

pytest.importorskip("vllm")

PACKAGE = Path(async_grpo.__file__).parent
# Each line is a name that was found in every version of KNOWN_VERSIONS. Otherwise a function that only the newest one has
# would fail in the middle of a run with another one
KNOWN_NAMES = Path(__file__).parents[1] / "data" / "vllm_names.txt"


def imported_names() -> set[str]:
    """Return module.name of everything that the library imports from vLLM, also within functions."""
    names = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def exists(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    try:
        return hasattr(importlib.import_module(module), attribute) or bool(importlib.import_module(name))
    except ImportError:
        return False


def test_each_name_is_known_from_every_version_and_exists_in_this_one():
    names = imported_names()
    unknown = sorted(names - set(KNOWN_NAMES.read_text().split()))
    assert not unknown, (
        f"look for {unknown} in every vLLM of KNOWN_VERSIONS (vllm_edges/__init__.py), and add it to {KNOWN_NAMES.name}"
    )
    missing = [name for name in sorted(names) if not exists(name)]
    assert not missing, f"this vLLM lacks {missing}"
