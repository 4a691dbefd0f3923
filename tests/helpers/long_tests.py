"""Marks of tests that take minutes. They run with LONG_TESTS=1, some also wherever the processor is fast enough."""

import os
from pathlib import Path

import pytest

WITH_LONG_TESTS = bool(os.environ.get("LONG_TESTS"))
HAS_BFLOAT16 = "avx512_bf16" in Path("/proc/cpuinfo").read_text()

long_without_bfloat16 = pytest.mark.skipif(
    not (HAS_BFLOAT16 or WITH_LONG_TESTS),
    reason="takes minutes on a processor without instructions for bfloat16: LONG_TESTS=1",
)


def long_test(how_long: str) -> pytest.MarkDecorator:
    """Return the mark of a test that runs with LONG_TESTS=1 alone."""
    return pytest.mark.skipif(not WITH_LONG_TESTS, reason=f"takes {how_long}: LONG_TESTS=1")
