"""The annotated shapes and dtypes are true: examples and tests pass with jaxtyping's checks switched on."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_examples_and_losses_pass_with_checked_shapes():
    """In a process of their own, because only modules that are not imported yet can be checked."""
    files = ["async_grpo/algorithm", "tests/algorithm/test_losses.py"]
    options = ["-q", "-p", "no:cacheprovider", "--doctest-modules"]
    checked = "--jaxtyping-packages=async_grpo.algorithm,shape_checker.check"
    command = [sys.executable, "-m", "pytest", *options, checked, *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
